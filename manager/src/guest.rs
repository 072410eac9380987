//! The deletion of a guest: a checkpoint in a directory that another library names. The directory
//! is a singular checkpoint, or has a root in it, and files of that library beside it.

use std::path::Path;

use stepwell_core::io::{Dir, EntryKind, Lock, LockKind};

use crate::commit::aside;
use crate::delete_tree::{delete_tree, ignore_missing};
use crate::directory_layout::{self, LEASE, OwnName};
use crate::environment::Environment;
use crate::error::Result;
use crate::singular;

/// The deepest step below the directory of a guest: in a root that has a directory of its own.
const DEPTH_OF_STEPS: usize = 2;

/// Deletes a guest. Its name is free at once, also after a crash. Its files stay while readers hold
/// its steps, and the next call for a guest beside it deletes them. Returns false if they stay.
/// Trash of other guests that cannot be deleted is logged and passed over.
pub fn remove(path: &Path, environment: &Environment) -> Result<bool> {
    let (parent, name) = singular::split(path)?;
    let parent = environment.disk.open_dir(parent)?;
    let label = directory_layout::label_of_path(&name);
    let trash = directory_layout::trash(&label, environment.rng.next_u128());
    ignore_missing(aside::retire(&*parent, &name, &trash))?;
    let mut is_gone = true;
    for entry in parent.entries()?.into_iter().filter(|entry| entry.kind == EntryKind::Dir) {
        if let Some(OwnName::Trash { label }) = directory_layout::parse(&entry.name)
            && !directory_layout::is_step_label(&label)
        {
            match delete_unread(&*parent, &entry.name) {
                Ok(is_deleted) => is_gone &= is_deleted || entry.name != trash,
                Err(error) if entry.name == trash => return Err(error.into()),
                Err(error) => tracing::warn!(
                    path = %parent.path().join(&entry.name).display(),
                    %error,
                    "deleting the trash of another checkpoint failed. Delete it by hand if this is repeated"
                ),
            }
        }
    }
    Ok(is_gone)
}

/// Deletes the trash of a guest, unless readers hold its steps. Returns false if they do.
fn delete_unread(parent: &dyn Dir, trash: &str) -> stepwell_core::Result<bool> {
    let mut leases = Vec::new();
    match parent.open_dir(trash).and_then(|dir| lease_steps(&*dir, DEPTH_OF_STEPS, &mut leases)) {
        Ok(true) => {}
        Err(error) if !error.is_not_found() => return Err(error),
        // Also if another process deletes it.
        held => return Ok(held.is_err()),
    }
    let mut deleted = delete_tree(parent, trash);
    if deleted.as_ref().is_err_and(stepwell_core::Error::is_occupied) {
        // A network file system keeps an open file under another name. Here these are the leases.
        drop(leases);
        deleted = delete_tree(parent, trash);
    }
    ignore_missing(deleted)?;
    Ok(true)
}

/// Takes the leases of all steps exclusively. Returns false if a reader holds one.
fn lease_steps(dir: &dyn Dir, depth: usize, leases: &mut Vec<Box<dyn Lock>>) -> stepwell_core::Result<bool> {
    for entry in dir.entries()? {
        if entry.name == LEASE {
            match dir.try_lock(LEASE, LockKind::Exclusive, false) {
                Ok(Some(lease)) => leases.push(lease),
                Ok(None) => return Ok(false),
                // Without locks, nothing shows if a reader has it.
                Err(error) if error.is_not_found() || error.is_without_locks() => {}
                Err(error) => return Err(error),
            }
        } else if entry.kind == EntryKind::Dir
            && depth > 0
            && !lease_steps(&*dir.open_dir(&entry.name)?, depth - 1, leases)?
        {
            return Ok(false);
        }
    }
    Ok(true)
}
