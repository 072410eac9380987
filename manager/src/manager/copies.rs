//! The copies of a step in the tiers. A copy keeps the attempt and the values of its source, so a
//! step may be read from any tier that has this attempt. The nearest one is used. Farther tiers are
//! asked only if the nearer ones cannot give the step: they may be slow, or away.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use stepwell_core::format::index::FileRecord;
use stepwell_core::format::manifest::Attempt;
use stepwell_core::io::File as _;
use stepwell_core::load::{FileSet, LoadOptions, OtherCopies, StoredFile};

use super::Inner;
use super::rebuilt_bytes::DamagedStep;
use super::tiers::Tier;
use crate::checkpoint::Checkpoint;
use crate::discovery::{Found, Listing};
use crate::error::{Error, Result};
use crate::machines::Machines;
use crate::root::{MAX_LISTINGS, Root};

/// The copies of one step, nearest first.
#[derive(Default)]
struct Copies<'a> {
    /// The attempt that the nearest listing names. Copies of others have other values.
    attempt: Option<Attempt>,
    /// Copies that lack items, which retention has thinned. Complete ones are better.
    thinned: Vec<(&'a Root, Found)>,
    /// The nearest copy that has lost a file.
    damaged: Option<(&'a Root, Found)>,
    failure: Option<Error>,
}

/// The result of a search among the copies of a step.
struct Choice<'a, T> {
    taken: Option<T>,
    /// The nearest copy that has lost a file, if none was taken.
    damaged: Option<(&'a Root, Found)>,
}

impl Inner {
    /// Returns the roots of all tiers, nearest first.
    pub(super) fn roots(&self) -> impl Iterator<Item = &Root> {
        std::iter::once(&self.root).chain(self.tiers.iter().map(|tier| tier.root()))
    }

    /// Returns the newest step of all tiers. A tier that this process writes is not asked.
    pub(super) fn newest_step(&self) -> Result<Option<u64>> {
        let mut newest = self.root.newest_step()?;
        if self.tiers.is_empty() {
            return Ok(newest);
        }
        let near = self.root.list_changes()?;
        for tier in &self.tiers {
            newest = newest.max(newest_in(tier, &near)?);
        }
        Ok(newest)
    }

    /// Passes the whole copies of a step to `take`, until it takes one: complete ones before those
    /// that retention has thinned, the nearest first. Asks no tier behind the one that is taken.
    /// Returns what was taken, or else the nearest copy that has lost a file.
    fn among_copies<'a, T>(
        &'a self,
        step: u64,
        mut take: impl FnMut(&'a Root, &Found) -> Result<Option<T>>,
    ) -> Result<Choice<'a, T>> {
        let mut copies = Copies::default();
        let tiers = self.tiers.iter().map(|tier| (Some(tier), tier.root()));
        for (tier, root) in std::iter::once((None, &self.root)).chain(tiers) {
            if tier.is_some_and(|tier| tier.is_known_to_lack(step, copies.attempt.as_ref())) {
                continue;
            }
            match copies.find(root, step) {
                Ok(Some(found)) if found.manifest.dropped.is_empty() => match take(root, &found) {
                    Ok(Some(taken)) => return Ok(Choice { taken: Some(taken), damaged: None }),
                    Ok(None) => {}
                    Err(error) => copies.fails(root, step, error),
                },
                Ok(Some(found)) => copies.thinned.push((root, found)),
                Ok(None) => {}
                Err(error) => copies.fails(root, step, error),
            }
        }
        copies.thinned.sort_by_key(|(_, found)| found.manifest.dropped.len());
        for (root, found) in std::mem::take(&mut copies.thinned) {
            match take(root, &found) {
                Ok(Some(taken)) => return Ok(Choice { taken: Some(taken), damaged: None }),
                Ok(None) => {}
                Err(error) => copies.fails(root, step, error),
            }
        }
        match copies.failure {
            Some(error) => Err(error),
            None => Ok(Choice { taken: None, damaged: copies.damaged }),
        }
    }

    /// Returns a step (`None`: the newest) and the root of the nearest tier that has it whole.
    pub(super) fn find(&self, step: Option<u64>) -> Result<(&Root, Found)> {
        if self.tiers.is_empty() {
            return Ok((&self.root, self.root.find(step)?));
        }
        let mut nearest_damaged = None;
        for candidate in self.candidates(step)? {
            let Choice { taken, damaged } =
                self.among_copies(candidate, |root, found| Ok(Some((root, found.clone()))))?;
            if let Some(found) = taken {
                return Ok(found);
            }
            nearest_damaged = nearest_damaged.or(damaged);
        }
        // A read says what is damaged.
        nearest_damaged.ok_or_else(|| self.in_all_tiers(self.root.not_found(step)))
    }

    /// Returns a step, or all steps of all tiers, newest first.
    fn candidates(&self, step: Option<u64>) -> Result<Vec<u64>> {
        match step {
            Some(step) => Ok(vec![step]),
            None => Ok(self.all_steps()?.into_iter().rev().collect()),
        }
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
        if self.tiers.is_empty() {
            let shares = self.team.shared_node().is_some();
            let load = self.options.load_options(&*self.environment.disk, shares);
            let leased = self.root.lease(step, self.options.stall_timeout, &load)?;
            self.mend_from_other_copies(&self.root, &leased);
            return Ok(leased);
        }
        for _ in 0..MAX_LISTINGS {
            let (mut nearest_damaged, mut is_gone) = (None, false);
            for candidate in self.candidates(step)? {
                let Choice { taken, damaged } = self.among_copies(candidate, |root, found| {
                    let leased = self.lease_copy(root, found)?;
                    is_gone |= leased.is_none();
                    Ok(leased)
                })?;
                if let Some(leased) = taken {
                    return Ok(leased);
                }
                if is_gone {
                    break;
                }
                nearest_damaged = nearest_damaged.or(damaged);
            }
            // A read says what is damaged.
            if let Some((root, found)) = nearest_damaged.filter(|_| !is_gone) {
                match self.lease_copy(root, &found)? {
                    Some(leased) => return Ok(leased),
                    None => is_gone = true,
                }
            }
            if !is_gone {
                break;
            }
        }
        Err(self.in_all_tiers(self.root.not_found(step)))
    }

    /// Opens and leases a copy of a step. `None` if it was retired meanwhile.
    fn lease_copy(&self, root: &Root, found: &Found) -> Result<Option<Checkpoint>> {
        let load = self.options.load_options(root.disk(), self.team.shared_node().is_some());
        match root.lease_found(found, self.options.stall_timeout, load) {
            Ok(Some(leased)) => {
                self.mend_from_other_copies(root, &leased);
                Ok(Some(leased))
            }
            Ok(None) | Err(Error::StepGone { .. }) => {
                root.discovery.forget();
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Lets reads of a step of this root take what is damaged there from other copies.
    fn mend_from_other_copies(&self, root: &Root, step: &Checkpoint) {
        let machines = self.machines.as_ref().filter(|_| std::ptr::eq(root, &raw const self.root));
        let farther = FartherCopies::of(machines.cloned(), self.tiers_behind(root), step);
        if farther.machines.is_some() || !farther.copies.is_empty() {
            step.files().mend_from(Arc::new(farther));
        }
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

impl<'a> Copies<'a> {
    /// Returns a step of a root, if it is of the wanted attempt and has all of its files.
    fn find(&mut self, root: &'a Root, step: u64) -> Result<Option<Found>> {
        let Some(found) = root.committed(step)? else { return Ok(None) };
        let attempt = self.attempt.get_or_insert_with(|| found.manifest.attempt.clone());
        if *attempt != found.manifest.attempt {
            tracing::warn!(
                step, root = %root.path.display(),
                "a farther copy is of an earlier save of this step, so it is not used in place of the damaged one"
            );
            return Ok(None);
        }
        let Some(damage) = root.damage(&found)? else { return Ok(Some(found)) };
        root.report_damaged(&found, &damage);
        self.damaged.get_or_insert((root, found));
        Ok(None)
    }

    /// Records that a tier did not answer or cannot open its copy. The next one is asked.
    fn fails(&mut self, root: &Root, step: u64, error: Error) {
        tracing::warn!(step, root = %root.path.display(), %error, "a tier cannot give this step");
        // The nearest one says most.
        self.failure.get_or_insert(error);
    }
}

/// Returns the newest step of a tier that the near one does not have with another attempt.
fn newest_in(tier: &Tier, near: &Listing) -> Result<Option<u64>> {
    let is_current = |step: &u64, attempt: &Attempt| {
        near.steps.get(step).is_none_or(|found| found.manifest.attempt == *attempt)
    };
    if tier.is_written_here() {
        let state = tier.lock();
        let mut newest_first = state.steps.iter().rev();
        return Ok(newest_first.find(|(step, attempt)| is_current(step, attempt)).map(|(&step, _)| step));
    }
    let root = tier.root();
    let Some(newest) = root.newest()? else { return Ok(None) };
    if is_current(&newest.manifest.step, &newest.manifest.attempt) {
        return Ok(Some(newest.manifest.step));
    }
    for (&step, found) in root.list_changes()?.steps.range(..newest.manifest.step).rev() {
        if is_current(&step, &found.manifest.attempt) && root.damage(found)?.is_none() {
            return Ok(Some(step));
        }
    }
    Ok(None)
}

/// The copies of a step on other machines and in farther tiers, each opened when its bytes are
/// needed.
struct FartherCopies {
    /// The machines that may keep copies of each other's files.
    machines: Option<Arc<Machines>>,
    /// The copies on machines, with the checksums of their own.
    on_machines: OnceLock<Vec<Arc<FileSet>>>,
    records: Arc<[FileRecord]>,
    copies: Vec<(Arc<Tier>, OnceLock<Option<Checkpoint>>)>,
    step: u64,
    attempt: Attempt,
    damaged: DamagedStep,
}

impl FartherCopies {
    /// Those of an open step.
    fn of(machines: Option<Arc<Machines>>, tiers: Vec<Arc<Tier>>, step: &Checkpoint) -> Self {
        let copies = tiers.into_iter().map(|tier| (tier, OnceLock::new())).collect();
        let manifest = step.manifest();
        let damaged = DamagedStep::new(step.shared_dir(), Arc::clone(manifest));
        Self {
            machines,
            on_machines: OnceLock::new(),
            records: Arc::clone(step.files().shared_records()),
            copies,
            step: manifest.step,
            attempt: manifest.attempt.clone(),
            damaged,
        }
    }

    /// Opens the copies on machines, at the first call.
    fn on_machines(&self) -> &[Arc<FileSet>] {
        self.on_machines.get_or_init(|| {
            let dirs = self.machines.iter().flat_map(|machines| machines.copies_of(self.step, &self.attempt));
            dirs.map(|dir| Arc::new(FileSet::new(dir, &self.records))).collect()
        })
    }

    /// Reads bytes of a file from the copies that machines keep of each other's files.
    fn read_from_machines(
        &self,
        name: &str,
        bytes: &Range<u64>,
        is_right: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Option<Vec<u8>> {
        let length = (bytes.end - bytes.start) as usize;
        for copy in self.on_machines() {
            match StoredFile::of(copy, name).and_then(|file| file.read_at(bytes.start, length)) {
                Ok(bytes) if is_right(&bytes) => return Some(bytes),
                Ok(_) => {}
                Err(error) if error.is_gone() => {}
                Err(error) => {
                    tracing::warn!(step = self.step, %error, "a copy on another machine cannot be read");
                }
            }
        }
        None
    }

    /// Reads bytes of a file from a copy, or makes them if its files are others.
    fn read_from(&self, copy: &Checkpoint, name: &str, bytes: &Range<u64>) -> Result<Option<Vec<u8>>> {
        if !self.damaged.is_same(copy.manifest(), name) {
            return self.damaged.rebuild(copy, name, bytes);
        }
        let length = (bytes.end - bytes.start) as usize;
        Ok(Some(copy.stored_file(name)?.read_at(bytes.start, length)?))
    }

    /// Returns the copies that can be opened, with their tiers.
    fn opened(&self) -> impl Iterator<Item = (&Arc<Tier>, &Checkpoint)> {
        self.copies.iter().filter_map(|(tier, copy)| {
            let opened = copy.get_or_init(|| {
                self.open(tier).unwrap_or_else(|error| {
                    tracing::warn!(step = self.step, tier = %tier.name, %error, "a farther copy cannot be opened");
                    None
                })
            });
            Some((tier, opened.as_ref()?))
        })
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
    fn any(&self) -> bool {
        !self.on_machines().is_empty() || self.opened().next().is_some()
    }

    fn read(
        &self,
        name: &str,
        offset: u64,
        len: usize,
        is_right: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Option<Vec<u8>> {
        let range = offset..offset.saturating_add(len as u64);
        if let Some(bytes) = self.read_from_machines(name, &range, is_right) {
            return Some(bytes);
        }
        for (tier, copy) in self.opened() {
            match self.read_from(copy, name, &range) {
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
