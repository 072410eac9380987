//! The copies of a step in the tiers. A copy keeps the attempt and the values of its source, so a
//! step may be read from any tier that has it. The nearest one is used.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use stepwell_core::format::manifest::Attempt;
use stepwell_core::load::{LoadOptions, OtherCopies};

use super::Inner;
use super::rebuilt_bytes::DamagedStep;
use super::tiers::Tier;
use crate::checkpoint::Checkpoint;
use crate::discovery::Found;
use crate::error::{Error, Result};
use crate::root::{MAX_LISTINGS, Root};

impl Inner {
    /// Returns the roots of all tiers, nearest first.
    pub(super) fn roots(&self) -> impl Iterator<Item = &Root> {
        std::iter::once(&self.root).chain(self.tiers.iter().map(|tier| tier.root()))
    }

    /// Returns the newest step of all tiers. A tier that this process writes is not asked.
    pub(super) fn newest_step(&self) -> Result<Option<u64>> {
        let mut newest = self.root.newest_step()?;
        for tier in &self.tiers {
            let known = tier.known_steps().map(|steps| steps.last().copied());
            newest = newest.max(known.map_or_else(|| tier.root().newest_step(), Ok)?);
        }
        Ok(newest)
    }

    /// Returns the whole copies of a step, with their roots: the complete ones before those that
    /// retention has thinned, the nearest first. A tier that fails is passed over, unless all do.
    fn copies_of(&self, step: u64) -> Result<Vec<(&Root, Found)>> {
        let mut copies = Vec::new();
        let mut failure = None;
        for root in self.roots() {
            match whole(root, step) {
                Ok(found) => copies.extend(found.map(|found| (root, found))),
                Err(error) => {
                    tracing::warn!(step, root = %root.path.display(), %error, "a tier does not answer");
                    failure = Some(error);
                }
            }
        }
        match failure {
            Some(error) if copies.is_empty() => Err(error),
            _ => {
                copies.sort_by_key(|(_, found)| found.manifest.dropped.len());
                Ok(copies)
            }
        }
    }

    /// Returns a step (`None`: the newest) and the root of the nearest tier that has it whole.
    pub(super) fn find(&self, step: Option<u64>) -> Result<(&Root, Found)> {
        if self.tiers.is_empty() {
            return Ok((&self.root, self.root.find(step)?));
        }
        let candidates = step.map_or_else(|| self.all_steps(), |step| Ok([step].into()))?;
        for &candidate in candidates.iter().rev() {
            if let Some(copy) = self.copies_of(candidate)?.into_iter().next() {
                return Ok(copy);
            }
        }
        // Perhaps it is damaged everywhere. Then a read says where.
        let elsewhere = || self.roots().find_map(|root| Some((root, root.find(step).ok()?)));
        let found = self.root.find(step).map(|found| (&self.root, found));
        found.or_else(|error| elsewhere().ok_or_else(|| self.in_all_tiers(error)))
    }

    /// Completes the error that the near tier lacks a step: other tiers may have newer ones.
    fn in_all_tiers(&self, error: Error) -> Error {
        match error {
            Error::StepNotFound { step, root, latest } => {
                let latest = self.newest_step().unwrap_or(latest);
                Error::StepNotFound { step, root, latest }
            }
            other => other,
        }
    }

    /// Opens and leases a step (`None`: the newest) in the nearest tier that has it whole.
    pub(super) fn lease(&self, step: Option<u64>) -> Result<Checkpoint> {
        let shares = self.team.shared_node().is_some();
        let timeout = self.options.stall_timeout;
        if self.tiers.is_empty() {
            let load = self.options.load_options(&*self.environment.disk, shares);
            return self.root.lease(step, timeout, &load);
        }
        for _ in 0..MAX_LISTINGS {
            let chosen = self.find(step)?.1.manifest.step;
            let mut failure = None;
            for (root, found) in self.copies_of(chosen)? {
                let load = self.options.load_options(root.disk(), shares);
                match root.lease_found(&found, timeout, load) {
                    Ok(Some(leased)) => {
                        let farther = FartherCopies::of(self.tiers_behind(root), &leased);
                        leased.files().mend_from(Arc::new(farther));
                        return Ok(leased);
                    }
                    // It was retired meanwhile. Perhaps another tier has it.
                    Ok(None) | Err(Error::StepGone { .. }) => root.discovery.forget(),
                    Err(error) => {
                        tracing::warn!(step = chosen, root = %root.path.display(), %error, "a copy cannot be opened");
                        failure = Some(error);
                    }
                }
            }
            if let Some(error) = failure {
                return Err(error);
            }
        }
        Err(self.in_all_tiers(self.root.not_found(step)))
    }

    /// Returns the tiers that are farther than one with this root.
    fn tiers_behind(&self, root: &Root) -> Vec<Arc<Tier>> {
        let place = self.tiers.iter().position(|tier| std::ptr::eq(tier.root(), root));
        self.tiers.iter().skip(place.map_or(0, |place| place + 1)).cloned().collect()
    }

    /// Returns the numbers of all steps of all tiers.
    pub(super) fn all_steps(&self) -> Result<BTreeSet<u64>> {
        let mut steps = BTreeSet::new();
        steps.extend(self.root.list()?.steps.keys());
        for tier in &self.tiers {
            let listed = || Ok(tier.root().list()?.steps.keys().copied().collect());
            steps.extend(tier.known_steps().map_or_else(listed, Ok::<BTreeSet<u64>, Error>)?);
        }
        Ok(steps)
    }
}

/// Returns a step of a root, if it has all of its files.
fn whole(root: &Root, step: u64) -> Result<Option<Found>> {
    let Some(found) = root.committed(step)? else { return Ok(None) };
    Ok(root.damage(&found)?.is_none().then_some(found))
}

/// The copies of a step in farther tiers, each opened when its bytes are needed.
struct FartherCopies {
    copies: Vec<(Arc<Tier>, OnceLock<Option<Checkpoint>>)>,
    step: u64,
    attempt: Attempt,
    damaged: DamagedStep,
}

impl FartherCopies {
    /// Those of an open step.
    fn of(tiers: Vec<Arc<Tier>>, step: &Checkpoint) -> Self {
        let copies = tiers.into_iter().map(|tier| (tier, OnceLock::new())).collect();
        let manifest = step.manifest();
        let damaged = DamagedStep::new(step.shared_dir(), Arc::clone(manifest));
        Self { copies, step: manifest.step, attempt: manifest.attempt.clone(), damaged }
    }

    /// Reads bytes of a file from a copy, or makes them if its files are others.
    fn read_from(&self, copy: &Checkpoint, name: &str, bytes: &Range<u64>) -> Result<Option<Vec<u8>>> {
        if !self.damaged.is_same(copy.manifest(), name) {
            return self.damaged.rebuild(copy, name, bytes);
        }
        let length = (bytes.end - bytes.start) as usize;
        Ok(Some(copy.stored_file(name)?.read_at(bytes.start, length)?))
    }

    /// Opens the copy of a tier, if it has the same attempt.
    fn open(&self, tier: &Tier) -> Result<Option<Checkpoint>> {
        let root = tier.root();
        let found = root.committed(self.step)?.filter(|found| found.manifest.attempt == self.attempt);
        let Some(found) = found else { return Ok(None) };
        root.lease_found(&found, tier.manager.inner.options.stall_timeout, LoadOptions::default())
    }
}

impl OtherCopies for FartherCopies {
    fn read(
        &self,
        name: &str,
        offset: u64,
        len: usize,
        is_right: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Option<Vec<u8>> {
        for (tier, copy) in &self.copies {
            let opened = copy.get_or_init(|| {
                self.open(tier).unwrap_or_else(|error| {
                    tracing::warn!(step = self.step, tier = %tier.name, %error, "a farther copy cannot be opened");
                    None
                })
            });
            let Some(copy) = opened else { continue };
            match self.read_from(copy, name, &(offset..offset.saturating_add(len as u64))) {
                Ok(Some(bytes)) if is_right(&bytes) => return Some(bytes),
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(step = self.step, tier = %tier.name, %error, "a farther copy cannot be read");
                }
            }
        }
        None
    }
}
