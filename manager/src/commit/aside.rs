//! Renames that retire a step, set it aside, or replace a small file. Each is one rename inside one
//! directory, followed by that directory's sync.

use std::collections::BTreeSet;
use std::sync::Arc;

use stepwell_core::format::manifest::{Item, Manifest, Others, Tombstone, stored_files};
use stepwell_core::io::{Dir, LockKind, Rename};

use crate::delete_tree::{delete_tree, ignore_missing};
use crate::directory_layout::{self, LEASE, MANIFEST, MANIFEST_NEW};
use crate::discovery::read_manifest;
use crate::error::Result;

/// Retires a step, or a dead temporary. It may be deleted only after this has returned `Ok`: the
/// rename is durable then.
pub fn retire(root: &dyn Dir, name: &str, trash: &str) -> stepwell_core::Result<()> {
    root.rename(name, trash, Rename::NoReplace)?;
    root.sync()
}

/// The result of retiring several steps.
#[derive(Debug, Default)]
#[must_use]
pub struct Retired {
    /// The number of renamed steps, from the first on.
    pub renamed: usize,
    /// True if those renames are durable. Otherwise nothing may be deleted: a power cut could
    /// restore the old names.
    pub durable: bool,
    /// The error that ended it early.
    pub error: Option<stepwell_core::Error>,
}

impl Retired {
    /// Returns the number of steps that may be deleted.
    pub fn deletable(&self) -> usize {
        if self.durable { self.renamed } else { 0 }
    }
}

/// Retires several steps, (name, trash) each, with one sync for all. A failed rename ends it. The
/// earlier renames are still made durable.
pub fn retire_all(root: &dyn Dir, names: &[(String, String)]) -> Retired {
    let mut retired = Retired::default();
    for (name, trash) in names {
        match root.rename(name, trash, Rename::NoReplace) {
            Ok(()) => retired.renamed += 1,
            Err(error) => {
                retired.error = Some(error);
                break;
            }
        }
    }
    if retired.renamed > 0 {
        match root.sync() {
            Ok(()) => retired.durable = true,
            Err(error) => retired.error = retired.error.or(Some(error)),
        }
    }
    retired
}

/// Renames a dead owner's temporary to trash. Returns true if it did. Removes an empty one without
/// a lease at once: its owner was killed, or has not locked it yet and will create it again.
pub fn retire_abandoned(parent: &dyn Dir, name: &str, trash: &str) -> stepwell_core::Result<bool> {
    let dir = match parent.open_dir(name) {
        Ok(dir) => dir,
        Err(error) if error.is_gone() => return Ok(false),
        Err(error) => return Err(error),
    };
    let mut lock = dir.try_lock(LEASE, LockKind::Exclusive, false);
    if lock.as_ref().is_err_and(stepwell_core::Error::is_not_found) {
        match parent.remove_dir(name) {
            Ok(()) => return Ok(false),
            Err(error) if error.is_gone() => return Ok(false),
            // A live owner locks the lease before it writes anything else. So either it has come
            // just now, and its lock shows that, or a power cut lost the lease.
            Err(error) if error.is_occupied() => {
                lock = dir.try_lock(LEASE, LockKind::Exclusive, true);
            }
            Err(error) => return Err(error),
        }
    }
    match lock {
        Ok(Some(_lock)) => {
            match parent.rename(name, trash, Rename::NoReplace) {
                Ok(()) => Ok(true),
                // Its owner has just committed it: the locked directory has its final name.
                Err(error) if error.is_not_found() => Ok(false),
                Err(error) => Err(error),
            }
        }
        Ok(None) => Ok(false),
        Err(error) if error.is_gone() => Ok(false),
        // Without locks, nothing shows if its owner is alive.
        Err(error) if error.is_without_locks() => Ok(false),
        Err(error) => Err(error),
    }
}

/// Renames files of trash, so that no reader opens them by their old names. Returns the new names,
/// relative to the root. Syncs nothing: both names are trash.
pub fn rename_apart(root: &dyn Dir, trash: &str, files: &[&str]) -> stepwell_core::Result<Vec<String>> {
    let apart = |(number, file): (usize, &&str)| {
        let name = format!("{trash}/.spare-{number}");
        root.rename(&format!("{trash}/{file}"), &name, Rename::NoReplace)?;
        Ok(name)
    };
    files.iter().enumerate().map(apart).collect()
}

/// Gives a complete and durable copy its name. Fails with EEXIST if the name is taken.
pub fn publish_copy(parent: &dyn Dir, temporary: &str, name: &str) -> stepwell_core::Result<()> {
    parent.rename(temporary, name, Rename::NoReplace)?;
    parent.sync()
}

/// Gives a complete and durable copy the name of a checkpoint, which becomes trash. If the file
/// system can swap names, a crash leaves one of the two under the name. The trash may be deleted
/// after this.
pub fn replace_by_copy(
    parent: &dyn Dir,
    temporary: &str,
    name: &str,
    trash: &str,
) -> stepwell_core::Result<()> {
    match parent.rename(temporary, name, Rename::Exchange) {
        Ok(()) => {
            parent.sync()?;
            parent.rename(temporary, trash, Rename::NoReplace)
        }
        Err(error) if error.is_unknown_request() => {
            retire(parent, name, trash)?;
            publish_copy(parent, temporary, name)
        }
        Err(error) => Err(error),
    }
}

/// Gives a durable file of a copy its name, durably. It replaces one that has the name.
pub fn name_file(dir: &dyn Dir, from: &str, to: &str) -> stepwell_core::Result<()> {
    dir.rename(from, to, Rename::Replace)?;
    dir.sync()
}

/// Renames the files of a step on one machine: a part gets the name of its step, or the reverse.
pub fn name_part(root: &dyn Dir, from: &str, to: &str) -> stepwell_core::Result<()> {
    root.rename(from, to, Rename::NoReplace)?;
    root.sync()
}

/// Moves a step into a branch.
pub fn set_aside(root: &dyn Dir, name: &str, branch: &str) -> stepwell_core::Result<()> {
    root.rename(name, &directory_layout::branch(branch, name), Rename::NoReplace)?;
    root.sync()
}

/// Replaces a damaged file, and keeps it under another name. The new one is durable before the old
/// one loses its name. A crash in between leaves both under their other names.
pub fn replace_and_keep(
    dir: &dyn Dir,
    name: &str,
    new_name: &str,
    kept_name: &str,
    bytes: &[u8],
) -> stepwell_core::Result<()> {
    ignore_missing(dir.remove_file(new_name))?;
    dir.write_file(new_name, bytes)?;
    dir.sync()?;
    ignore_missing(dir.rename(name, kept_name, Rename::Replace))?;
    dir.rename(new_name, name, Rename::Replace)?;
    dir.sync()
}

/// The result of a thinning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Thinned {
    /// These items were dropped.
    Dropped(Vec<String>),
    /// These items were dropped from the manifest. Their files stay for the grace period, as no
    /// lock shows who reads them.
    Later(Vec<String>),
    /// Readers hold the step, so it stays as it is for now.
    Held,
    /// No item had to be dropped.
    Nothing,
}

/// Drops the items of a step that are not in `keep`. A new manifest with tombstones replaces the
/// old one, then the files are deleted. After a crash in between, recovery deletes the files that
/// tombstones name.
pub fn thin(root: &dyn Dir, name: &str, keep: &BTreeSet<String>, unix_ns: i64) -> Result<Thinned> {
    let step = root.open_dir(name)?;
    let lock = match step.try_lock(LEASE, LockKind::Exclusive, true) {
        Ok(Some(lock)) => Some(lock),
        Ok(None) => return Ok(Thinned::Held),
        Err(error) if error.is_without_locks() => None,
        Err(error) => return Err(error.into()),
    };
    let mut manifest = read_manifest(root, name)?;
    let names = drop_items(&mut manifest, keep, unix_ns);
    if names.is_empty() {
        return Ok(Thinned::Nothing);
    }
    step.replace_file(MANIFEST, MANIFEST_NEW, &manifest.encode()?)?;
    if lock.is_none() {
        return Ok(Thinned::Later(names));
    }
    apply_tombstones(&step, &manifest)?;
    Ok(Thinned::Dropped(names))
}

/// Takes the items that are not in `keep` out of a manifest, with tombstones in their place.
/// Returns their names. A manifest that would lose all items stays as it is.
pub(crate) fn drop_items(manifest: &mut Manifest, keep: &BTreeSet<String>, unix_ns: i64) -> Vec<String> {
    let is_kept = |item: &Item| keep.contains(&item.name);
    if !manifest.items.iter().any(is_kept) {
        return Vec::new();
    }
    let (kept, dropped) = std::mem::take(&mut manifest.items).into_iter().partition(is_kept);
    manifest.items = kept;
    let dropped: Vec<Item> = dropped;
    let names = dropped.iter().map(|item| item.name.clone()).collect();
    for item in dropped {
        let below = format!("{}/", item.dir);
        let (gone, files): (Vec<_>, _) = std::mem::take(&mut manifest.files)
            .into_iter()
            .partition(|file: &stepwell_core::format::manifest::FileEntry| file.path.starts_with(&below));
        manifest.files = files;
        let files = stored_files(&gone).into_iter().map(|(path, _)| path.to_owned());
        let paths = std::iter::once(item.index.path).chain(files).collect();
        let others = Others::new();
        manifest.dropped.push(Tombstone { item: item.name, dir: item.dir, paths, unix_ns, others });
    }
    names
}

/// Deletes the files that the tombstones of a manifest name. The caller holds the step's lease
/// exclusively, or knows that no reader has it.
pub fn apply_tombstones(step: &Arc<dyn Dir>, manifest: &Manifest) -> stepwell_core::Result<()> {
    let mut changed = false;
    for tombstone in &manifest.dropped {
        match delete_tree(&**step, &tombstone.dir) {
            Ok(()) => changed = true,
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
    }
    if changed { step.sync() } else { Ok(()) }
}
