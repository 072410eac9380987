//! Rebuilds lost or damaged indexes of one step from the footers of its data files.
//!
//! The manifest has the checksum of every data file's trailer, which covers its footer. So a
//! rebuilt index has only facts that the save wrote. Usually it equals the lost index byte for
//! byte, and the manifest's checksum proves that. If the ranks' parts were merged in another order,
//! it differs. Then the manifest records the rebuilt index, provided that each element of each
//! tensor is stored exactly once.
//!
//! It writes nothing before every damaged index of the step could be rebuilt. It keeps a damaged
//! index beside the new one until [`forget_damaged`], which the caller calls after it has verified
//! the step.

use std::path::Path;
use std::sync::Arc;

use stepwell_core::format::checksum::crc32c;
use stepwell_core::format::index::{Index, LeafRecord};
use stepwell_core::format::index_v1;
use stepwell_core::format::manifest::{FileEntry, Item, Manifest};
use stepwell_core::format::merge::{self, Refusal, Twice};
use stepwell_core::io::{Dir, LockKind};
use stepwell_core::limits::MAX_MANIFEST_BYTES;
use stepwell_core::load::index_in_footer;
use stepwell_core::{Error as CoreError, Result as CoreResult};
use stepwell_reshard::tiling;

use crate::commit::aside;
use crate::delete_tree::ignore_missing;
use crate::directory_layout::{LEASE, MANIFEST, MANIFEST_NEW};
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::stored_index::file_record;

/// The temporary name of a rebuilt index, beside it.
const INDEX_NEW: &str = ".index.new";
/// The new name of the index that it replaces.
const INDEX_DAMAGED: &str = ".index.damaged";
/// The errno of an unreadable sector.
const EIO: i32 = 5;

/// The result for an item's index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepairedIndex {
    /// The item.
    pub item: String,
    /// The index file, relative to the step.
    pub path: String,
    /// The damage. `None` if the index is intact; then it stays as it is.
    pub damage: Option<String>,
    /// Its leaves.
    pub leaves: u64,
    /// True if the rebuilt index differs from the lost one in its bytes, so that the manifest
    /// records it again.
    pub recorded: bool,
}

/// A rebuilt index to write.
struct Rebuilt<'a> {
    dir: &'a str,
    name: &'a str,
    bytes: Vec<u8>,
}

/// Rebuilds the damaged indexes of the step at `path`. With `dry_run`, only in memory. If it
/// cannot, it changes nothing, and the error names the file and the leaf.
pub fn repair(path: &Path, environment: &Environment, dry_run: bool) -> Result<Vec<RepairedIndex>> {
    let step = open(path, environment)?;
    let number = manifest(&*step)?.step;
    let _lock = if dry_run { None } else { lock(&*step, number)? };
    // Read it again under the lock: a thinning may have changed it.
    let mut manifest = manifest(&*step)?;
    let mut report = Vec::with_capacity(manifest.items.len());
    let (mut rebuilt, mut entries) = (Vec::new(), Vec::new());
    for item in &manifest.items {
        let damage = damage(&*step, item)?;
        let mut recorded = false;
        if damage.is_some() {
            let encoded = rebuild(&step, &manifest, item)?;
            let mut entry = item.index.clone();
            (entry.length, entry.crc32c) = (encoded.bytes.len() as u64, encoded.crc);
            recorded = entry != item.index;
            let (dir, name) = item.index.path.rsplit_once('/').unwrap_or(("", &item.index.path));
            rebuilt.push(Rebuilt { dir, name, bytes: encoded.bytes });
            entries.push(entry);
        } else {
            entries.push(item.index.clone());
        }
        let (name, path) = (item.name.clone(), item.index.path.clone());
        report.push(RepairedIndex { item: name, path, damage, leaves: item.leaves, recorded });
    }
    if !dry_run {
        for Rebuilt { dir, name, bytes } in rebuilt {
            aside::replace_and_keep(&*step.open_dir(dir)?, name, INDEX_NEW, INDEX_DAMAGED, &bytes)?;
        }
        if report.iter().any(|index| index.recorded) {
            for (item, entry) in manifest.items.iter_mut().zip(entries) {
                item.index = entry;
            }
            step.replace_file(MANIFEST, MANIFEST_NEW, &manifest.encode()?)?;
        }
    }
    Ok(report)
}

/// Removes the damaged indexes that [`repair`] has kept. The caller has verified the step.
pub fn forget_damaged(path: &Path, environment: &Environment) -> Result<()> {
    let step = open(path, environment)?;
    for item in &manifest(&*step)?.items {
        let dir = step.open_dir(&item.dir)?;
        for name in [INDEX_DAMAGED, INDEX_NEW] {
            ignore_missing(dir.remove_file(name))?;
        }
    }
    Ok(())
}

fn open(path: &Path, environment: &Environment) -> Result<Arc<dyn Dir>> {
    match environment.disk.open_dir(path) {
        Err(error) if error.is_not_found() => {
            Err(Error::StepNotFound { step: None, root: path.to_owned(), latest: None })
        }
        opened => Ok(opened?),
    }
}

/// Locks the step against deletion, thinning and other repairs. `None` without locks.
fn lock(step: &dyn Dir, number: u64) -> Result<Option<Box<dyn stepwell_core::io::Lock>>> {
    match step.try_lock(LEASE, LockKind::Exclusive, true) {
        Ok(Some(lock)) => Ok(Some(lock)),
        Ok(None) => {
            let by = "somebody reads, thins or repairs it. Try again when they have ended".to_owned();
            Err(Error::Held { step: number, by, advice: None })
        }
        Err(error) if error.is_without_locks() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn manifest(step: &dyn Dir) -> Result<Manifest> {
    const LOST: &str = "Only the manifest says which files a save has committed, so nothing can be rebuilt \
                        without it. Restore another step, or copy the manifest from a mirror";
    let file = step.path().join(MANIFEST);
    let read = step.read_file(MANIFEST, MAX_MANIFEST_BYTES);
    match read.and_then(|bytes| Manifest::decode(&bytes, &file)) {
        Err(error) if error.is_not_found() => {
            let reason = format!("it has no {MANIFEST}. {LOST}");
            Err(Error::NotAStep { path: step.path().to_owned(), reason })
        }
        Err(CoreError::Corrupt { file, what, .. }) => {
            Err(CoreError::corrupt(file, format!("{what}. {LOST}")).into())
        }
        read => Ok(read?),
    }
}

/// Returns the damage of an index. A disk error is no damage, except for a missing file and an
/// unreadable sector.
fn damage(step: &dyn Dir, item: &Item) -> Result<Option<String>> {
    let file = step.path().join(&item.index.path);
    let bytes = match step.read_file(&item.index.path, item.index.length) {
        Ok(bytes) => bytes,
        Err(error) if error.is_gone() => return Ok(Some("it is missing".to_owned())),
        Err(CoreError::Limit { .. }) => return Ok(Some("it is longer than its manifest says".to_owned())),
        Err(error) if error.is_no_file() => return Ok(Some("it is no regular file".to_owned())),
        // An unreadable sector.
        Err(error) if error.errno() == Some(EIO) => return Ok(Some(error.to_string())),
        Err(error) => return Err(error.into()),
    };
    let found = (bytes.len() as u64, crc32c(&bytes));
    if found != (item.index.length, item.index.crc32c) {
        let (length, crc) = found;
        return Ok(Some(format!(
            "its {length} bytes with the checksum {crc:08x} are not the {} bytes with {:08x} that its manifest records",
            item.index.length, item.index.crc32c
        )));
    }
    match index_v1::decode(&bytes, &file) {
        Ok(_) => Ok(None),
        Err(CoreError::Corrupt { what, .. }) => Ok(Some(what)),
        Err(error) => Err(error.into()),
    }
}

/// Rebuilds the index of an item from the footers of its data files.
fn rebuild(step: &Arc<dyn Dir>, manifest: &Manifest, item: &Item) -> Result<index_v1::IndexFile> {
    let files: Vec<&FileEntry> = manifest.files_of(item).collect();
    let parts = files.iter().map(|entry| part(step, item, entry)).collect::<CoreResult<Vec<Index>>>()?;
    let refused = |leaf: Option<String>, what: String| -> Error {
        let what = format!("it cannot be rebuilt from the {} data files of its item: {what}", files.len());
        let file = step.path().join(&item.index.path);
        CoreError::Corrupt { file, leaf, block: None, what }.into()
    };
    let merged = |twice| {
        let index = merge::merge(parts.clone(), twice).map_err(|refusal| match refusal {
            Refusal::Contradiction { leaf, what, .. } | Refusal::Other(CoreError::Leaf { leaf, what }) => {
                refused(Some(leaf), what)
            }
            Refusal::Other(error) => refused(None, error.to_string()),
        })?;
        if index.leaves.len() as u64 != item.leaves {
            let found = index.leaves.len();
            let what = format!("they hold {found} leaves, its manifest records {}", item.leaves);
            return Err(refused(None, what));
        }
        Ok::<_, Error>(index)
    };
    let encoded = index_v1::encode(&merged(Twice::First)?)?;
    if (encoded.bytes.len() as u64, encoded.crc) == (item.index.length, item.index.crc32c) {
        return Ok(encoded);
    }
    // Only the lost index said which of several copies counts, so copies fail the check of
    // coverage.
    let index = merged(Twice::Both)?;
    for (leaf, record) in (0_u32..).zip(&index.leaves) {
        let LeafRecord::Tensor(tensor) = record else { continue };
        let regions: Vec<_> = tensor.chunks.iter().map(|chunk| chunk.region.clone()).collect();
        tiling::check(&tensor.shape, &regions)
            .map_err(|fault| refused(Some(index.tree.leaf_path(leaf).to_string()), fault.to_string()))?;
    }
    Ok(index_v1::encode(&index)?)
}

/// Reads the index in the footer of a data file, and checks the file against the manifest.
fn part(step: &Arc<dyn Dir>, item: &Item, entry: &FileEntry) -> CoreResult<Index> {
    let name = entry.path.strip_prefix(&format!("{}/", item.dir)).unwrap_or(&entry.path);
    index_in_footer(&**step, &file_record(entry), name)
}
