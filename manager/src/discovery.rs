//! Discovery: the steps of a root.
//!
//! A *step* is a directory with a canonical step name. Its `manifest.json` has a valid checksum and
//! that number. Its listed files exist with the listed lengths. An invalid directory with a step's
//! name is *quarantined*: it is reported with a reason, never chosen, never deleted. A listing
//! reads manifests only. [`damage`] checks the files of a chosen step, and of those that retention
//! counts.
//!
//! A disk error (EIO, EMFILE, EACCES) ends a listing. If it hid a step, an older one would become
//! the latest, and retention would count wrong. Only a missing step is left out (ENOENT, ESTALE:
//! another process has retired it).
//!
//! A directory is not read atomically. During the read, another process may commit a step whose
//! name was passed already, and retire an older one whose name was not reached. So a listing counts
//! only if the directory did not change, or if a second pass finds the same. A reader never misses
//! a step that existed all the time.
//!
//! Manifests are cached by file identity and change time, so a repeated [`Discovery::list`] costs
//! one `stat` per step. A root's writer is nearly always the only process that changes it. Its
//! [`Discovery::list_changes`] uses the log of its own changes ([`stepwell_core::io::change_log`]).
//! After a foreign change, it compares names and inode numbers. So the cost of a save does not grow
//! with the number of steps. Manual changes inside a step are found when that step is chosen
//! ([`Discovery::is_as_listed`]), and gradually by retention.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use stepwell_core::format::manifest::{Manifest, stored_files};
use stepwell_core::io::change_log::ChangeLog;
use stepwell_core::io::{Dir, EntryKind, Stat};
use stepwell_core::limits::MAX_MANIFEST_BYTES;
use stepwell_core::sys::{cores, each};

use crate::directory_layout::MANIFEST;
use crate::error::Result;
use crate::step_name::StepName;

/// The most passes of one listing, while other processes retire steps.
const MAX_PASSES: usize = 32;

/// A pass uses one thread for so many manifests.
const MANIFESTS_PER_THREAD: usize = 256;
/// Requests to a store that wait for an answer at once.
pub(crate) const REQUESTS_AT_ONCE: usize = 32;

/// The maximum age of a listing that a writer extends by its change log. The persister refreshes an
/// older one after a commit.
const MAX_LISTING_AGE: Duration = Duration::from_secs(10);

/// A step that a listing found.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The directory's name.
    pub name: String,
    /// Its commit record.
    pub manifest: Arc<Manifest>,
}

/// An invalid directory with a step's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quarantined {
    /// The directory's name.
    pub name: String,
    /// The violated condition.
    pub reason: String,
    /// True if it has an invalid manifest.
    pub has_manifest: bool,
}

/// The result of a listing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Listing {
    /// The steps, by number.
    pub steps: BTreeMap<u64, Found>,
    /// Invalid directories with a step's name.
    pub quarantined: Vec<Quarantined>,
}

/// Lists a root, and caches its manifests.
#[derive(Debug, Default)]
pub struct Discovery {
    /// The log of a writer's own changes.
    changes: Option<Arc<ChangeLog>>,
    /// Held by a writer's thread that lists, or that makes a later listing look again.
    turn: Mutex<()>,
    cache: Mutex<Cache>,
}

#[derive(Debug, Default)]
struct Cache {
    /// The known steps, by the name of the directory.
    known: HashMap<String, KnownStep>,
    /// The result of the last pass.
    listing: Arc<Listing>,
}

#[derive(Clone, Debug)]
struct KnownStep {
    /// The inode number of the directory.
    entry: u64,
    /// The state of the manifest's file.
    stat: Stat,
    manifest: Arc<Manifest>,
}

/// The result of one pass over a root's directory.
struct Pass {
    listing: Arc<Listing>,
    /// True if an entry was gone before it could be inspected.
    has_vanished: bool,
    /// True if a step of the previous pass is missing.
    misses_step: bool,
    /// True if a step is new since the previous pass.
    has_new_step: bool,
}

impl Discovery {
    /// Returns the discovery of a root's writer, with the log of its changes.
    pub fn of_writer(changes: Arc<ChangeLog>) -> Self {
        Self { changes: Some(changes), ..Self::default() }
    }

    /// Waits for the listings of other threads. The log of changes and the cache describe one point
    /// in time only if one thread updates them. A reader's passes inspect every name, so they need
    /// no turns.
    fn turn(&self) -> Option<MutexGuard<'_, ()>> {
        let _ = self.changes.as_ref()?;
        Some(self.turn.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn lock(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets all steps.
    pub fn forget(&self) {
        let _turn = self.turn();
        *self.lock() = Cache::default();
        if let Some(changes) = &self.changes {
            changes.forget();
        }
    }

    /// Makes the next listing inspect this name again, because its manifest has changed.
    pub fn touch(&self, name: &str) {
        let _turn = self.turn();
        self.lock().remove(name);
        if let Some(changes) = &self.changes {
            changes.touch(name);
        }
    }

    /// Lists the root. Checks the `stat` of every manifest.
    pub fn list(&self, root: &dyn Dir, names: &StepName) -> Result<Arc<Listing>> {
        let _turn = self.turn();
        self.list_until_stable(root, names, false)
    }

    /// Lists the root. A writer inspects only changed names. See the module documentation.
    pub fn list_changes(&self, root: &dyn Dir, names: &StepName) -> Result<Arc<Listing>> {
        let Some(changes) = &self.changes else { return self.list(root, names) };
        let _turn = self.turn();
        match changes.since_listed(root.changed()?) {
            Some((touched, at)) => {
                let listing = self.inspect_names(root, names, &touched)?;
                changes.clear_up_to(at);
                Ok(listing)
            }
            None => self.list_until_stable(root, names, true),
        }
    }

    /// Lists the whole directory, if the writer's last listing is old.
    pub fn refresh(&self, root: &dyn Dir, names: &StepName) -> Result<()> {
        let _turn = self.turn();
        match &self.changes {
            Some(changes) if changes.is_older_than(MAX_LISTING_AGE) => {
                self.list_until_stable(root, names, true).map(drop)
            }
            _ => Ok(()),
        }
    }

    /// True if the manifest of a step is the listed file. If not, the next listing reads it again.
    pub fn is_as_listed(&self, root: &dyn Dir, found: &Found) -> stepwell_core::Result<bool> {
        let listed = match self.lock().known.get(&found.name) {
            Some(known) if Arc::ptr_eq(&known.manifest, &found.manifest) => known.stat,
            _ => return Ok(false),
        };
        let is = match root.stat(&format!("{}/{MANIFEST}", found.name)) {
            Ok(stat) => stat == Some(listed),
            Err(error) if error.is_gone() || is_not_a_step(&error) => false,
            Err(error) => return Err(error),
        };
        if !is {
            self.touch(&found.name);
        }
        Ok(is)
    }

    /// Lists the root until the result is certain.
    fn list_until_stable(&self, root: &dyn Dir, names: &StepName, by_entries: bool) -> Result<Arc<Listing>> {
        let mut passes = 0;
        // A reader gets all names of a store from one entry of its ledger.
        let is_exact = self.changes.is_none() && root.fence().is_some();
        let changed = || if is_exact { Ok(0) } else { root.changed() };
        loop {
            passes += 1;
            let begun = self.changes.as_ref().map(|changes| changes.now());
            let change_time = changed()?;
            let Pass { listing, has_vanished, misses_step, has_new_step } =
                self.pass(root, names, by_entries)?;
            // File systems have coarse timestamps, so an unchanged directory proves little about
            // the last milliseconds. A missing step proves more.
            let is_unchanged = changed()? == change_time;
            let is_complete = !has_vanished && !misses_step;
            let is_repeated = passes > 1 && is_complete && !has_new_step;
            let is_certain = if is_exact {
                !has_vanished
            } else if listing.steps.is_empty() {
                is_repeated && is_unchanged
            } else {
                is_repeated || (is_complete && is_unchanged)
            };
            if is_certain
                && is_unchanged
                && let (Some(changes), Some(begun)) = (&self.changes, begun)
            {
                changes.listed(begun, change_time);
            }
            if is_certain || passes == MAX_PASSES {
                return Ok(listing);
            }
        }
    }

    /// Inspects these names only.
    fn inspect_names(&self, root: &dyn Dir, names: &StepName, touched: &[String]) -> Result<Arc<Listing>> {
        let mut inspected = InspectedNames::default();
        for name in touched {
            let Some(step) = names.parse(name) else { continue };
            let Some(stat) = root.stat(name)? else { continue };
            inspected.add(name, stat.id.1, self.inspect(root, name, step, stat.kind)?);
        }
        let mut cache = self.lock();
        for name in touched {
            cache.remove(name);
        }
        inspected.quarantined.extend(cache.listing.quarantined.iter().cloned());
        cache.remember(names, inspected);
        Ok(Arc::clone(&cache.listing))
    }

    fn inspect(&self, root: &dyn Dir, name: &str, step: u64, kind: EntryKind) -> Result<NameInspection> {
        match kind {
            EntryKind::Dir => self.read(root, name, step),
            _ => {
                Ok(NameInspection::NotAStep { reason: "it is no directory".to_owned(), has_manifest: false })
            }
        }
    }

    fn pass(&self, root: &dyn Dir, names: &StepName, by_entries: bool) -> Result<Pass> {
        let entries = root.unsorted_entries()?;
        // Hold no lock during disk operations.
        let (others, mut misses_step) = {
            let cache = self.lock();
            let mut found = 0;
            let mut others = Vec::new();
            for entry in &entries {
                let known = cache.known.get(&entry.name);
                found += usize::from(known.is_some());
                let is_same = |known: &KnownStep| known.entry == entry.inode && entry.kind == EntryKind::Dir;
                if by_entries && known.is_some_and(is_same) {
                    continue;
                }
                if let Some(step) = names.parse(&entry.name) {
                    others.push((entry, step));
                }
            }
            (others, found < cache.known.len())
        };
        let threads = if root.fence().is_some() {
            REQUESTS_AT_ONCE
        } else {
            cores().min(others.len() / MANIFESTS_PER_THREAD).max(1)
        };
        let answers = each("stepwell-list", threads, &others, |&(entry, step)| {
            self.inspect(root, &entry.name, step, entry.kind)
        });
        let mut inspected = InspectedNames::default();
        for (answer, (entry, _)) in answers.into_iter().zip(&others) {
            inspected.add(&entry.name, entry.inode, answer?);
        }
        let mut cache = self.lock();
        let known = inspected.steps.iter().filter(|(name, _)| cache.known.contains_key(name)).count();
        let (has_new_step, has_vanished) = (known < inspected.steps.len(), inspected.vanished);
        if !by_entries {
            misses_step |= known < cache.known.len();
            cache.known.clear();
        } else if misses_step {
            let names: HashSet<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
            cache.known.retain(|name, _| names.contains(name.as_str()));
        }
        for one in &inspected.quarantined {
            misses_step |= cache.known.remove(&one.name).is_some();
        }
        cache.remember(names, inspected);
        Ok(Pass { listing: Arc::clone(&cache.listing), has_vanished, misses_step, has_new_step })
    }

    fn read(&self, root: &dyn Dir, name: &str, step: u64) -> Result<NameInspection> {
        let not_a_step = |reason| NameInspection::NotAStep { reason, has_manifest: true };
        let path = format!("{name}/{MANIFEST}");
        let stat = match root.stat(&path) {
            Ok(Some(stat)) => stat,
            Ok(None) => {
                // It was retired since the listing, or was never a step.
                let gone = root.stat(name)?.is_none();
                return Ok(if gone {
                    NameInspection::Gone
                } else {
                    NameInspection::NotAStep { reason: format!("it has no {MANIFEST}"), has_manifest: false }
                });
            }
            Err(error) if error.is_gone() => return Ok(NameInspection::Gone),
            Err(error) if is_not_a_step(&error) => return Ok(not_a_step(error.to_string())),
            Err(error) => return Err(error.into()),
        };
        if let Some(known) = self.lock().known.get(name)
            && known.stat == stat
        {
            return Ok(NameInspection::Step(stat, Arc::clone(&known.manifest)));
        }
        match read_manifest(root, name) {
            Ok(manifest) if manifest.step != step => Ok(not_a_step(format!(
                "its manifest says that it is step {}: do not rename steps by hand",
                manifest.step
            ))),
            Ok(manifest) => Ok(NameInspection::Step(stat, Arc::new(manifest))),
            Err(error) if error.is_gone() => {
                // A ledger may name a manifest that somebody has deleted: read it again.
                let is_named = root.fence().is_some() && {
                    root.changed()?;
                    root.stat(&path)? == Some(stat)
                };
                Ok(if is_named { not_a_step(error.to_string()) } else { NameInspection::Gone })
            }
            Err(error) if is_not_a_step(&error) => Ok(not_a_step(error.to_string())),
            Err(error) => Err(error.into()),
        }
    }
}

impl Cache {
    /// Forgets a name.
    fn remove(&mut self, name: &str) {
        if self.listing.quarantined.iter().any(|one| one.name == name) {
            Arc::make_mut(&mut self.listing).quarantined.retain(|one| one.name != name);
        }
        let Some(known) = self.known.remove(name) else { return };
        let step = known.manifest.step;
        if self.listing.steps.get(&step).is_some_and(|found| found.name == name) {
            Arc::make_mut(&mut self.listing).steps.remove(&step);
        }
    }

    /// Adds the result of a pass. All other known steps stay.
    fn remember(&mut self, names: &StepName, inspected: InspectedNames) {
        let InspectedNames { steps, mut quarantined, .. } = inspected;
        quarantined.sort_by(|a, b| a.name.cmp(&b.name));
        let is_odd = !quarantined.is_empty() || !self.listing.quarantined.is_empty();
        let mut added = Vec::new();
        for (name, known) in steps {
            let step = known.manifest.step;
            let manifest = Arc::clone(&known.manifest);
            let is_listed = self
                .listing
                .steps
                .get(&step)
                .is_some_and(|found| found.name == name && Arc::ptr_eq(&found.manifest, &manifest));
            if !is_listed {
                added.push(Found { name: name.clone(), manifest });
            }
            self.known.insert(name, known);
        }
        // Two names of one step need the slow path, which quarantines one of them.
        let mut numbers = BTreeSet::new();
        let mut is_free = |found: &Found| {
            let step = found.manifest.step;
            !self.listing.steps.contains_key(&step) && numbers.insert(step)
        };
        if !is_odd
            && added.iter().all(&mut is_free)
            && self.listing.steps.len() + added.len() == self.known.len()
        {
            // The usual case: add the new steps without a copy of the others.
            if !added.is_empty() {
                let steps = &mut Arc::make_mut(&mut self.listing).steps;
                steps.extend(added.into_iter().map(|found| (found.manifest.step, found)));
            }
            return;
        }
        let mut listing = Listing { quarantined, ..Listing::default() };
        for (name, known) in &self.known {
            let found = Found { name: name.clone(), manifest: Arc::clone(&known.manifest) };
            add(&mut listing, names, known.manifest.step, found);
        }
        // Replace the listing even if it is equal: manifests are compared by identity, and one that
        // was read again has another.
        self.listing = Arc::new(listing);
    }
}

/// True if a read error is a fault of the manifest (damaged, foreign, not a regular file), and not
/// of the disk.
pub(crate) fn is_not_a_step(error: &stepwell_core::Error) -> bool {
    use stepwell_core::Error::{Corrupt, Format, Limit};
    matches!(error, Corrupt { .. } | Format { .. } | Limit { .. }) || error.is_no_file()
}

/// The result of inspecting a name.
enum NameInspection {
    Step(Stat, Arc<Manifest>),
    NotAStep { reason: String, has_manifest: bool },
    Gone,
}

/// The names that a pass has inspected.
#[derive(Default)]
struct InspectedNames {
    steps: Vec<(String, KnownStep)>,
    quarantined: Vec<Quarantined>,
    /// Something was gone before it could be inspected.
    vanished: bool,
}

impl InspectedNames {
    /// Adds a name, with the inode number of its entry.
    fn add(&mut self, name: &str, entry: u64, inspection: NameInspection) {
        let name = name.to_owned();
        match inspection {
            NameInspection::Step(stat, manifest) => {
                self.steps.push((name, KnownStep { entry, stat, manifest }));
            }
            NameInspection::NotAStep { reason, has_manifest } => {
                self.quarantined.push(Quarantined { name, reason, has_manifest });
            }
            NameInspection::Gone => self.vanished = true,
        }
    }
}

fn add(listing: &mut Listing, names: &StepName, step: u64, found: Found) {
    let Some(other) = listing.steps.remove(&step) else {
        listing.steps.insert(step, found);
        return;
    };
    // Both names have this number, by two patterns. The pattern that is written wins, in any order.
    let (kept, dropped) = if names.is_primary(&found.name) { (found, other) } else { (other, found) };
    let reason = format!("{} is the same step under another name", kept.name);
    listing.quarantined.push(Quarantined { name: dropped.name, reason, has_manifest: true });
    listing.steps.insert(step, kept);
}

/// Reads and checks the manifest of a directory.
pub fn read_manifest(parent: &dyn Dir, name: &str) -> stepwell_core::Result<Manifest> {
    let path = format!("{name}/{MANIFEST}");
    let bytes = parent.read_file(&path, MAX_MANIFEST_BYTES)?;
    Manifest::decode(&bytes, &parent.path().join(path))
}

/// Returns the first file of a manifest that is missing or has another length. A disk error is not
/// damage. A caller without the writer's lock must check [`is_current`] too: the step may have been
/// retired or replaced since.
///
/// An empty name is the directory itself.
pub fn damage(dir: &dyn Dir, name: &str, manifest: &Manifest) -> stepwell_core::Result<Option<String>> {
    let lengths = dir.lengths(name)?;
    let stat = |path: &str| -> stepwell_core::Result<Option<(EntryKind, u64)>> {
        Ok(match &lengths {
            Some(lengths) => lengths.get(path).map(|&len| (EntryKind::File, len)),
            None if name.is_empty() => dir.stat(path)?.map(|stat| (stat.kind, stat.len)),
            None => dir.stat(&format!("{name}/{path}"))?.map(|stat| (stat.kind, stat.len)),
        })
    };
    let files = stored_files(&manifest.files).into_iter();
    let indexes = manifest.items.iter().map(|item| (item.index.path.as_str(), item.index.length));
    for (path, length) in files.chain(indexes) {
        match stat(path) {
            Ok(Some((EntryKind::File, len))) if len == length => {}
            Ok(Some((EntryKind::File, len))) => {
                return Ok(Some(format!("{path} has {len} bytes, its manifest says {length}")));
            }
            Ok(Some(_)) => return Ok(Some(format!("{path} is no regular file"))),
            Ok(None) => return Ok(Some(format!("{path} is missing"))),
            // A parent directory is missing, or is not a directory.
            Err(error) if error.is_gone() || is_not_a_step(&error) => {
                return Ok(Some(error.to_string()));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// True if a listed step still has its name, as the same attempt.
pub fn is_current(parent: &dyn Dir, found: &Found) -> stepwell_core::Result<bool> {
    match read_manifest(parent, &found.name) {
        Ok(manifest) => Ok(manifest.attempt == found.manifest.attempt),
        Err(error) if error.is_gone() => Ok(false),
        // It is damaged, not replaced.
        Err(error) if is_not_a_step(&error) => Ok(true),
        Err(error) => Err(error),
    }
}
