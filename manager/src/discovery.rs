//! Discovery: which steps a root holds.
//!
//! A *step* is a directory with a parsable, canonical step name that holds a `manifest.json` whose own checksum holds, which carries that number, and
//! whose listed files exist with the listed lengths. Nothing else is one: a directory with a step's name that is none is *quarantined*, which means
//! reported by name and reason, never chosen, never deleted. Listing reads manifests; [`damage`] is for the step that is chosen and
//! for those that retention counts.
//!
//! What the disk does not answer is no answer: an I/O error (EIO, EMFILE, EACCES, …) ends a listing. A step that was left out for it would make an older one the
//! latest, and retention count wrong. Only what is not there any more (ENOENT, ESTALE: another process has retired it) is left out.
//!
//! A directory is not listed in one step: between two of its parts another process commits a step, whose name the listing has passed already, and retires an older
//! one, whose name it has not reached. So a listing counts only where nothing speaks against it, or where the next one finds the same: a reader never sees fewer steps
//! than there always were.
//!
//! Manifests are cached by the identity of their file and by when it changed, so that a repeated listing costs one `stat` per step and reads nothing.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use stepwell_core::format::manifest::Manifest;
use stepwell_core::io::{Dir, EntryKind, Stat};
use stepwell_core::limits::MAX_MANIFEST_BYTES;

use crate::directory_layout::MANIFEST;
use crate::error::Result;
use crate::step_name::StepName;

/// How often a root is listed for one answer, at most: as long as others take steps away while that is done.
const PASSES: usize = 32;

/// A step that a listing found.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The directory's name.
    pub name: String,
    /// Its commit record.
    pub manifest: Arc<Manifest>,
}

/// A directory with a step's name that is no step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quarantined {
    /// The directory's name.
    pub name: String,
    /// What does not hold.
    pub reason: String,
}

/// What a listing found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Listing {
    /// The steps, by number.
    pub steps: BTreeMap<u64, Found>,
    /// What has a step's name and is none.
    pub quarantined: Vec<Quarantined>,
}

/// Lists roots, and remembers manifests. See the module documentation.
#[derive(Debug, Default)]
pub struct Discovery {
    cache: Mutex<HashMap<String, (Stat, Arc<Manifest>)>>,
}

impl Discovery {
    /// Forgets everything.
    pub fn forget(&self) {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// What the root holds now.
    pub fn list(&self, root: &dyn Dir, names: &StepName) -> Result<Listing> {
        let mut known: BTreeSet<String> =
            self.cache.lock().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect();
        let mut passes = 0;
        loop {
            passes += 1;
            let changed = root.changed()?;
            let (listing, vanished) = self.pass(root, names)?;
            // The clock of a file system ticks slowly: that a directory shows no change says little of the last milliseconds, and what is missing says more.
            let still = root.changed()? == changed;
            let found: BTreeSet<String> = listing.steps.values().map(|found| found.name.clone()).collect();
            let whole = !vanished && known.is_subset(&found);
            let again = passes > 1 && whole && known == found;
            let sure = if found.is_empty() { again && still } else { again || (whole && still) };
            if sure || passes == PASSES {
                return Ok(listing);
            }
            known = found;
        }
    }

    /// What one reading of the directory finds, and whether something was gone before it could be looked at.
    fn pass(&self, root: &dyn Dir, names: &StepName) -> Result<(Listing, bool)> {
        let mut listing = Listing::default();
        let mut seen = HashMap::new();
        let mut vanished = false;
        for entry in root.entries()? {
            let Some(step) = names.parse(&entry.name) else { continue };
            if entry.kind != EntryKind::Dir {
                let reason = "it is no directory".to_owned();
                listing.quarantined.push(Quarantined { name: entry.name, reason });
                continue;
            }
            match self.read(root, &entry.name, step)? {
                Read::Step(stat, manifest) => {
                    seen.insert(entry.name.clone(), (stat, manifest.clone()));
                    add(&mut listing, names, step, Found { name: entry.name, manifest });
                }
                Read::NoStep(reason) => listing.quarantined.push(Quarantined { name: entry.name, reason }),
                Read::Gone => vanished = true,
            }
        }
        *self.cache.lock().unwrap_or_else(PoisonError::into_inner) = seen;
        Ok((listing, vanished))
    }

    fn read(&self, root: &dyn Dir, name: &str, step: u64) -> Result<Read> {
        let path = format!("{name}/{MANIFEST}");
        let stat = match root.stat(&path) {
            Ok(Some(stat)) => stat,
            Ok(None) => {
                // Retired between the listing and now, or never a step.
                let gone = root.stat(name)?.is_none();
                return Ok(if gone { Read::Gone } else { Read::NoStep(format!("it has no {MANIFEST}")) });
            }
            Err(error) if error.is_gone() => return Ok(Read::Gone),
            Err(error) if is_no_step(&error) => return Ok(Read::NoStep(error.to_string())),
            Err(error) => return Err(error.into()),
        };
        if let Some((cached, manifest)) = self.cache.lock().unwrap_or_else(PoisonError::into_inner).get(name)
            && *cached == stat
        {
            return Ok(Read::Step(stat, manifest.clone()));
        }
        match read_manifest(root, name) {
            Ok(manifest) if manifest.step != step => Ok(Read::NoStep(format!(
                "its manifest says that it is step {}: a step is not renamed by hand",
                manifest.step
            ))),
            Ok(manifest) => Ok(Read::Step(stat, Arc::new(manifest))),
            Err(error) if error.is_gone() => Ok(Read::Gone),
            Err(error) if is_no_step(&error) => Ok(Read::NoStep(error.to_string())),
            Err(error) => Err(error.into()),
        }
    }
}

/// Whether the answer to reading a manifest says something of what stands there (damaged, foreign, no regular file), and not of the disk.
pub(crate) fn is_no_step(error: &stepwell_core::Error) -> bool {
    use stepwell_core::Error::{Corrupt, Format, Limit};
    matches!(error, Corrupt { .. } | Format { .. } | Limit { .. }) || error.is_no_file()
}

enum Read {
    Step(Stat, Arc<Manifest>),
    NoStep(String),
    Gone,
}

fn add(listing: &mut Listing, names: &StepName, step: u64, found: Found) {
    let Some(other) = listing.steps.remove(&step) else {
        listing.steps.insert(step, found);
        return;
    };
    // Two patterns are read, and both have this number: the one that is written wins, whatever the order of the listing.
    let (kept, dropped) = if names.is_primary(&found.name) { (found, other) } else { (other, found) };
    let reason = format!("{} is the same step under another name", kept.name);
    listing.quarantined.push(Quarantined { name: dropped.name, reason });
    listing.steps.insert(step, kept);
}

/// The manifest of a directory, checked by itself.
pub fn read_manifest(parent: &dyn Dir, name: &str) -> stepwell_core::Result<Manifest> {
    let path = format!("{name}/{MANIFEST}");
    let bytes = parent.read_file(&path, MAX_MANIFEST_BYTES)?;
    Manifest::decode(&bytes, &parent.path().join(path))
}

/// What of the files that a manifest lists is missing or has another length. An error is no damage: the disk did not answer.
/// A caller that reads without the writer's lock looks with [`stands`] before it calls a step damaged: it may have been retired or replaced meanwhile.
pub fn damage(parent: &dyn Dir, name: &str, manifest: &Manifest) -> stepwell_core::Result<Option<String>> {
    damage_by(manifest, |path| parent.stat(&format!("{name}/{path}")))
}

/// [`damage`], of a step whose files `stat` knows.
pub(crate) fn damage_by(
    manifest: &Manifest,
    stat: impl Fn(&str) -> stepwell_core::Result<Option<Stat>>,
) -> stepwell_core::Result<Option<String>> {
    let files = manifest.files.iter().map(|file| (&file.path, file.length));
    let indexes = manifest.items.iter().map(|item| (&item.index.path, item.index.length));
    for (path, length) in files.chain(indexes) {
        match stat(path) {
            Ok(Some(stat)) if stat.kind == EntryKind::File && stat.len == length => {}
            Ok(Some(stat)) if stat.kind == EntryKind::File => {
                return Ok(Some(format!("{path} has {} bytes, its manifest says {length}", stat.len)));
            }
            Ok(Some(_)) => return Ok(Some(format!("{path} is no regular file"))),
            Ok(None) => return Ok(Some(format!("{path} is missing"))),
            // What leads there is missing, or is no directory.
            Err(error) if error.is_gone() || is_no_step(&error) => {
                return Ok(Some(error.to_string()));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Whether a step that was listed still stands under its name, as the same attempt.
pub fn stands(parent: &dyn Dir, found: &Found) -> stepwell_core::Result<bool> {
    match read_manifest(parent, &found.name) {
        Ok(manifest) => Ok(manifest.attempt == found.manifest.attempt),
        Err(error) if error.is_gone() => Ok(false),
        // Damage, and nobody's doing.
        Err(error) if is_no_step(&error) => Ok(true),
        Err(error) => Err(error),
    }
}
