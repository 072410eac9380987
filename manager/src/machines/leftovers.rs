//! The removal of parts whose steps are gone.
//!
//! The main machine decides what a step is. So another machine removes a part when the main machine
//! has no step, branch or invalid directory of its attempt, and has deleted the retired step, which
//! readers may hold. It keeps:
//!
//! * parts of a save of this session that is not over on its host, or that may still be committed;
//! * parts of a session whose steps may be on a machine that is absent. They go once the run has
//!   gone on ([`super::record`]).

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use stepwell_core::format::manifest::{Attempt, Manifest};
use stepwell_core::io::{Dir, Entry};
use stepwell_core::limits::MAX_MANIFEST_BYTES;

use super::copies::replace;
use super::{Machines, record};
use crate::commit::aside;
use crate::directory_layout::{self, MANIFEST, OwnName};
use crate::discovery::{is_not_a_step, read_manifest};
use crate::environment::Environment;
use crate::error::Result;
use crate::lease;
use crate::root::Root;

/// The longest wait for the lease of a step that is being thinned. The next look tries again.
const THINNING_TIMEOUT: Duration = Duration::from_millis(100);

/// Removes the parts of one machine. Its host owns it.
pub(crate) struct Leftovers {
    machines: Arc<Machines>,
    environment: Environment,
    /// True if retention drops items of steps.
    thins: bool,
    /// The number of machines that have a file.
    copies: u32,
    listing: MainListing,
}

/// Lists the steps of the main machine.
#[derive(Default)]
pub(super) struct MainListing {
    /// The attempts of directories of the main machine, by name and inode.
    known: HashMap<(String, u64), Attempt>,
}

/// The files of an attempt on this machine: its part or its copy.
struct FoundPart {
    name: String,
    step: u64,
    attempt: Attempt,
}

/// The main machine's directories of steps.
#[derive(Default)]
pub(super) struct MainNames {
    /// By attempt.
    names: HashMap<Attempt, String>,
    /// The steps of directories whose manifest is invalid. `None`: any step.
    invalid: BTreeSet<Option<u64>>,
}

impl MainNames {
    /// Returns the name that an attempt has.
    fn name_of(&self, attempt: &Attempt) -> Option<&str> {
        self.names.get(attempt).map(String::as_str)
    }

    /// True if an attempt is a step, or may be one whose manifest is invalid.
    pub(super) fn lists(&self, attempt: &Attempt) -> bool {
        !self.invalid.is_empty() || self.name_of(attempt).is_some_and(is_step)
    }

    fn has(&self, part: &FoundPart) -> bool {
        let is_invalid = |step| self.invalid.contains(&step);
        self.names.contains_key(&part.attempt) || is_invalid(Some(part.step)) || is_invalid(None)
    }
}

impl Leftovers {
    /// The parts and copies of this machine. `thins`: retention drops items of steps. `copies`: the
    /// number of machines that have a file.
    pub(crate) fn new(machines: Arc<Machines>, environment: Environment, thins: bool, copies: u32) -> Self {
        Self { machines, environment, thins, copies, listing: MainListing::default() }
    }

    /// Removes parts. `root` is the root of all machines, and its deleter that of this machine.
    /// `is_over` is true for the saves of this session that cannot be committed any more, or are.
    pub(crate) fn remove(&mut self, root: &Root, is_over: &dyn Fn(u64, u64) -> bool) -> Result<()> {
        let machines = Arc::clone(&self.machines);
        let local = machines.local();
        let parts = parts_in(&**local)?;
        // Ask before the steps: a save that is committed meanwhile is not over then.
        let has_ended = |part: &FoundPart| {
            part.attempt.session != machines.session || is_over(part.step, part.attempt.counter)
        };
        let ended: Vec<FoundPart> = parts.into_iter().filter(has_ended).collect();
        if ended.is_empty() {
            return Ok(());
        }
        let main = self.listing.list(root)?;
        if self.thins {
            for part in &ended {
                if let Some(name) = main.name_of(&part.attempt).filter(|name| is_step(name)) {
                    self.thin(part, &*root.dir, name)?;
                }
            }
        }
        if ended.iter().all(|part| main.has(part)) {
            return Ok(());
        }
        let again = self.listing.list_anew(root)?;
        let record = record::read(&*root.dir)?.unwrap_or_default();
        let is_gone = |part: &FoundPart| {
            let is_known =
                part.attempt.session == machines.session || record.knows_steps_of(&part.attempt.session);
            is_known && !main.has(part) && !again.has(part)
        };
        let trash = |part: FoundPart| {
            let label = directory_layout::label(part.step);
            (part.name, directory_layout::trash(&label, self.environment.rng.next_u128()))
        };
        let removed: Vec<(String, String)> = ended.into_iter().filter(is_gone).map(trash).collect();
        let retired = aside::retire_all(&**local, &removed);
        root.deleter.enqueue(removed.into_iter().take(retired.deletable()).map(|(_, trash)| trash));
        retired.error.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Deletes what retention has dropped from a step. Under its lease: the thinning is durable
    /// then. Before, each copy of the manifest must be the thinned one.
    fn thin(&self, part: &FoundPart, root: &dyn Dir, name: &str) -> Result<()> {
        let Ok(Some((step, _lease))) = lease::acquire(root, name, THINNING_TIMEOUT) else { return Ok(()) };
        let bytes = step.read_file(MANIFEST, MAX_MANIFEST_BYTES)?;
        let manifest = Manifest::decode(&bytes, &step.path().join(MANIFEST))?;
        if manifest.dropped.is_empty() {
            return Ok(());
        }
        let here = self.machines.local().open_dir(&part.name)?;
        let right = self.machines.copied_manifests();
        if here.stat(MANIFEST)?.is_some() && here.read_file(MANIFEST, MAX_MANIFEST_BYTES)? != bytes {
            replace(&*here, MANIFEST, &bytes)?;
        }
        drop(right);
        let mut is_there = false;
        for tombstone in &manifest.dropped {
            is_there |= here.stat(&tombstone.dir)?.is_some();
        }
        if is_there && self.machines.copies_have((part.step, &part.attempt), &bytes, self.copies)? {
            aside::apply_tombstones(&here, &manifest)?;
        }
        Ok(())
    }

    /// Deletes trash that an earlier process has left on this machine.
    pub(crate) fn empty_trash(&self, root: &Root) -> Result<()> {
        let entries = self.machines.local().entries()?;
        root.deleter.enqueue(entries.into_iter().map(|entry| entry.name).filter(|name| is_trash(name)));
        Ok(())
    }
}

impl MainListing {
    /// Lists again before something is removed: the cache may be outdated, and a listing may miss a
    /// step that gets another name meanwhile. A second one does not.
    pub(super) fn list_anew(&mut self, root: &Root) -> Result<MainNames> {
        self.known.clear();
        self.list(root)
    }

    /// Returns what the main machine has: steps, branches, invalid directories and trash.
    pub(super) fn list(&mut self, root: &Root) -> Result<MainNames> {
        let step_of = |name: &str| root.names.parse(name);
        let mut main = MainNames::default();
        let mut known = HashMap::new();
        for Entry { name, inode, .. } in root.dir.entries()? {
            let (step, is_left) = match directory_layout::parse(&name) {
                Some(OwnName::Branch { step_name, .. }) => (step_of(&step_name), false),
                Some(OwnName::Quarantine { label }) => (step_of(&label), false),
                // Readers may hold it. A temporary may be a step that is being replaced.
                Some(OwnName::Trash { .. } | OwnName::Temporary { .. }) => (None, true),
                None if step_of(&name).is_some() => (step_of(&name), false),
                _ => continue,
            };
            let attempt = match self.known.remove(&(name.clone(), inode)) {
                Some(attempt) => attempt,
                None => match read_manifest(&*root.dir, &name) {
                    Ok(manifest) => manifest.attempt,
                    Err(error) if error.is_gone() => continue,
                    Err(error) if is_not_a_step(&error) => {
                        if !is_left {
                            main.invalid.insert(step);
                        }
                        continue;
                    }
                    Err(error) => return Err(error.into()),
                },
            };
            known.insert((name.clone(), inode), attempt.clone());
            main.names.insert(attempt, name);
        }
        self.known = known;
        Ok(main)
    }
}

fn parts_in(local: &dyn Dir) -> stepwell_core::Result<Vec<FoundPart>> {
    let part = |Entry { name, .. }: Entry| match directory_layout::parse(&name)? {
        OwnName::Part { label, session, counter } | OwnName::Copy { label, session, counter } => {
            Some(FoundPart { name, step: label.parse().ok()?, attempt: Attempt { session, counter } })
        }
        _ => None,
    };
    Ok(local.entries()?.into_iter().filter_map(part).collect())
}

fn is_step(name: &str) -> bool {
    directory_layout::parse(name).is_none()
}

fn is_trash(name: &str) -> bool {
    matches!(directory_layout::parse(name), Some(OwnName::Trash { .. }))
}
