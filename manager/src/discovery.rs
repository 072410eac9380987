//! Discovery: which steps a root holds.
//!
//! A *step* is a directory with a parsable, canonical step name that holds a `manifest.json` whose
//! own checksum holds, which carries that number, and whose listed files exist with the listed
//! lengths. Nothing else is one: a directory with a step's name that is none is *quarantined*,
//! which means reported by name and reason, never chosen, never deleted. Listing reads manifests;
//! [`damage`] is for the step that is chosen and for those that retention counts.
//!
//! A disk error is not an answer: EIO, EMFILE, EACCES and others end a listing. If such a step were
//! left out, an older one would become the latest, and retention would count wrong. Only missing
//! steps are left out (ENOENT, ESTALE: another process has retired it).
//!
//! A directory is not listed in one step: between two of its parts another process commits a step,
//! whose name the listing has passed already, and retires an older one, whose name it has not
//! reached. So a listing counts only where nothing speaks against it, or where the next one finds
//! the same: a reader never sees fewer steps than there always were.
//!
//! Manifests are cached by file identity and change time, so a repeated [`Discovery::list`] costs
//! one `stat` per step and reads nothing. The writer of a root is nearly always the only process
//! that changes it. Its [`Discovery::list_changes`] uses the record of its own changes
//! ([`stepwell_core::io::change_log`]). If the directory shows a foreign change, it compares names
//! and inode numbers. So the cost of a save does not grow with the number of steps. Manual changes
//! inside a step are found when that step is chosen ([`Discovery::is_as_listed`]), and gradually by
//! retention.

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

/// How often a root is listed for one answer, at most: as long as others take steps away while that
/// is done.
const MAX_PASSES: usize = 32;

/// Manifests that are worth a thread of their own.
const MANIFESTS_PER_THREAD: usize = 256;

/// Maximum age of a listing that a writer extends by its change log. Then it reads the directory
/// again, at a time that delays nobody.
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
    /// True if it has a manifest, which does not hold then.
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

/// Lists roots, and remembers manifests. See the module documentation.
#[derive(Debug, Default)]
pub struct Discovery {
    /// A writer's: what it has changed itself.
    changes: Option<Arc<ChangeLog>>,
    cache: Mutex<Cache>,
}

#[derive(Debug, Default)]
struct Cache {
    /// Everything that was read as a step, by its directory's name.
    known: HashMap<String, KnownStep>,
    /// The result of the last pass.
    listing: Arc<Listing>,
}

#[derive(Clone, Debug)]
struct KnownStep {
    /// The inode number of the directory, as its entry in the root has it.
    entry: u64,
    /// The manifest's file.
    stat: Stat,
    manifest: Arc<Manifest>,
}

/// The result of reading a root's directory once.
struct Pass {
    listing: Arc<Listing>,
    /// Something was gone before it could be looked at.
    vanished: bool,
    /// Something is missing that the pass before it knew.
    lost: bool,
    /// Something is there that the pass before it did not know.
    new: bool,
}

impl Discovery {
    /// For the writer of a root, who knows what it changes there.
    pub fn of_writer(changes: Arc<ChangeLog>) -> Self {
        Self { changes: Some(changes), cache: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets everything.
    pub fn forget(&self) {
        *self.lock() = Cache::default();
        if let Some(changes) = &self.changes {
            changes.forget();
        }
    }

    /// Has this name inspected again, because its manifest has changed.
    pub fn touch(&self, name: &str) {
        self.lock().remove(name);
        if let Some(changes) = &self.changes {
            changes.touch(name);
        }
    }

    /// The current content of the root, with every manifest inspected.
    pub fn list(&self, root: &dyn Dir, names: &StepName) -> Result<Arc<Listing>> {
        self.agree(root, names, false)
    }

    /// [`Discovery::list`], in which a writer takes for granted what nobody else changes. See the
    /// module documentation.
    pub fn list_changes(&self, root: &dyn Dir, names: &StepName) -> Result<Arc<Listing>> {
        let Some(changes) = &self.changes else { return self.list(root, names) };
        match changes.since_listed(root.changed()?) {
            Some((touched, at)) => {
                let listing = self.inspect_names(root, names, &touched)?;
                changes.clear_up_to(at);
                Ok(listing)
            }
            None => self.agree(root, names, true),
        }
    }

    /// Lists the whole directory where that was not done for a while: a writer's, who has time.
    pub fn refresh(&self, root: &dyn Dir, names: &StepName) -> Result<()> {
        match &self.changes {
            Some(changes) if changes.is_older_than(MAX_LISTING_AGE) => {
                self.agree(root, names, true).map(drop)
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

    /// Lists until nothing speaks against what was found.
    fn agree(&self, root: &dyn Dir, names: &StepName, by_entries: bool) -> Result<Arc<Listing>> {
        let mut passes = 0;
        loop {
            passes += 1;
            let begun = self.changes.as_ref().map(|changes| changes.now());
            let shows = root.changed()?;
            let Pass { listing, vanished, lost, new } = self.pass(root, names, by_entries)?;
            // The clock of a file system ticks slowly: that a directory shows no change says little
            // of the last milliseconds, and what is missing says more.
            let still = root.changed()? == shows;
            let whole = !vanished && !lost;
            let again = passes > 1 && whole && !new;
            let sure = if listing.steps.is_empty() { again && still } else { again || (whole && still) };
            if sure
                && still
                && let (Some(changes), Some(begun)) = (&self.changes, begun)
            {
                changes.listed(begun, shows);
            }
            if sure || passes == MAX_PASSES {
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
        // No lock is held while the disk is asked.
        let (others, mut lost) = {
            let cache = self.lock();
            let mut there = 0;
            let mut others = Vec::new();
            for entry in &entries {
                let known = cache.known.get(&entry.name);
                there += usize::from(known.is_some());
                let is_same = |known: &KnownStep| known.entry == entry.inode && entry.kind == EntryKind::Dir;
                if by_entries && known.is_some_and(is_same) {
                    continue;
                }
                if let Some(step) = names.parse(&entry.name) {
                    others.push((entry, step));
                }
            }
            (others, there < cache.known.len())
        };
        let threads = cores().min(others.len() / MANIFESTS_PER_THREAD).max(1);
        let answers = each("stepwell-list", threads, &others, |&(entry, step)| {
            self.inspect(root, &entry.name, step, entry.kind)
        });
        let mut inspected = InspectedNames::default();
        for (answer, (entry, _)) in answers.into_iter().zip(&others) {
            inspected.add(&entry.name, entry.inode, answer?);
        }
        let mut cache = self.lock();
        let known = inspected.steps.iter().filter(|(name, _)| cache.known.contains_key(name)).count();
        let (new, vanished) = (known < inspected.steps.len(), inspected.vanished);
        if !by_entries {
            lost |= known < cache.known.len();
            cache.known.clear();
        } else if lost {
            let there: HashSet<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
            cache.known.retain(|name, _| there.contains(name.as_str()));
        }
        for one in &inspected.quarantined {
            lost |= cache.known.remove(&one.name).is_some();
        }
        cache.remember(names, inspected);
        Ok(Pass { listing: Arc::clone(&cache.listing), vanished, lost, new })
    }

    fn read(&self, root: &dyn Dir, name: &str, step: u64) -> Result<NameInspection> {
        let not_a_step = |reason| NameInspection::NotAStep { reason, has_manifest: true };
        let path = format!("{name}/{MANIFEST}");
        let stat = match root.stat(&path) {
            Ok(Some(stat)) => stat,
            Ok(None) => {
                // Retired between the listing and now, or never a step.
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
                "its manifest says that it is step {}: a step is not renamed by hand",
                manifest.step
            ))),
            Ok(manifest) => Ok(NameInspection::Step(stat, Arc::new(manifest))),
            Err(error) if error.is_gone() => Ok(NameInspection::Gone),
            Err(error) if is_not_a_step(&error) => Ok(not_a_step(error.to_string())),
            Err(error) => Err(error.into()),
        }
    }
}

impl Cache {
    /// Nothing is known of this name any more.
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

    /// Takes up what a pass has read: everything that is `known` beside it stands as it stood.
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
        // Of two names of one step one is the step's, and the other is quarantined: not here.
        let mut numbers = BTreeSet::new();
        let mut is_free = |found: &Found| {
            let step = found.manifest.step;
            !self.listing.steps.contains_key(&step) && numbers.insert(step)
        };
        if !is_odd
            && added.iter().all(&mut is_free)
            && self.listing.steps.len() + added.len() == self.known.len()
        {
            // Only new steps, usually one: the others are not copied.
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
        // Even for equal content: manifests are compared by identity, and one that was read again
        // (its file was linked, or its permissions changed) has another.
        self.listing = Arc::new(listing);
    }
}

/// True if a read error describes the manifest (damaged, foreign, not a regular file), not the
/// disk.
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
    // Two patterns are read, and both have this number: the one that is written wins, whatever the
    // order of the listing.
    let (kept, dropped) = if names.is_primary(&found.name) { (found, other) } else { (other, found) };
    let reason = format!("{} is the same step under another name", kept.name);
    listing.quarantined.push(Quarantined { name: dropped.name, reason, has_manifest: true });
    listing.steps.insert(step, kept);
}

/// The manifest of a directory, checked by itself.
pub fn read_manifest(parent: &dyn Dir, name: &str) -> stepwell_core::Result<Manifest> {
    let path = format!("{name}/{MANIFEST}");
    let bytes = parent.read_file(&path, MAX_MANIFEST_BYTES)?;
    Manifest::decode(&bytes, &parent.path().join(path))
}

/// Describes files of a manifest that are missing or have another length. A disk error is not
/// damage. A caller without the writer's lock checks [`is_current`] before it calls a step damaged:
/// the step may have been retired or replaced meanwhile.
pub fn damage(parent: &dyn Dir, name: &str, manifest: &Manifest) -> stepwell_core::Result<Option<String>> {
    damage_by(manifest, |path| parent.stat(&format!("{name}/{path}")))
}

/// [`damage`], of a step whose files `stat` knows.
pub(crate) fn damage_by(
    manifest: &Manifest,
    stat: impl Fn(&str) -> stepwell_core::Result<Option<Stat>>,
) -> stepwell_core::Result<Option<String>> {
    let files = stored_files(&manifest.files).into_iter();
    let indexes = manifest.items.iter().map(|item| (item.index.path.as_str(), item.index.length));
    for (path, length) in files.chain(indexes) {
        match stat(path) {
            Ok(Some(stat)) if stat.kind == EntryKind::File && stat.len == length => {}
            Ok(Some(stat)) if stat.kind == EntryKind::File => {
                return Ok(Some(format!("{path} has {} bytes, its manifest says {length}", stat.len)));
            }
            Ok(Some(_)) => return Ok(Some(format!("{path} is no regular file"))),
            Ok(None) => return Ok(Some(format!("{path} is missing"))),
            // A directory on the way is missing, or is not a directory.
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
        // Damage, and nobody's doing.
        Err(error) if is_not_a_step(&error) => Ok(true),
        Err(error) => Err(error),
    }
}
