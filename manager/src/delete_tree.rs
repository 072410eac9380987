//! Deletes a directory tree.

use stepwell_core::io::{Dir, EntryKind};

use crate::directory_layout::LEASE;

/// Directories nest no deeper in anything that we made; a deeper foreign tree is left alone.
const MAX_DEPTH: usize = 64;

/// Deletes a directory and all in it, at once. A missing one is ENOENT.
pub fn delete_tree(parent: &dyn Dir, name: &str) -> stepwell_core::Result<()> {
    delete(parent, name, &mut || true).map(drop)
}

/// The same, as long as `go_on` says so. `Ok(false)`: it was stopped.
pub(crate) fn delete(
    parent: &dyn Dir,
    name: &str,
    go_on: &mut dyn FnMut() -> bool,
) -> stepwell_core::Result<bool> {
    delete_at(parent, name, go_on, 0)
}

fn delete_at(
    parent: &dyn Dir,
    name: &str,
    go_on: &mut dyn FnMut() -> bool,
    depth: usize,
) -> stepwell_core::Result<bool> {
    let path = || parent.path().join(name);
    if depth > MAX_DEPTH {
        return Err(stepwell_core::Error::Limit {
            what: format!("the depth of directories at {}", path().display()),
            found: depth as u64,
            limit: MAX_DEPTH as u64,
        });
    }
    let dir = parent.open_dir(name)?;
    let mut entries = dir.entries()?;
    // The lock file goes last, so that the lock means something until the end.
    entries.sort_by_key(|entry| entry.name == LEASE);
    for entry in entries {
        if !go_on() {
            return Ok(false);
        }
        if entry.kind == EntryKind::Dir {
            match delete_at(&*dir, &entry.name, go_on, depth + 1) {
                Ok(true) => {}
                // Another process deletes the same.
                Err(error) if error.is_not_found() => {}
                stopped => return stopped,
            }
        } else {
            ignore_missing(dir.remove_file(&entry.name))?;
        }
    }
    ignore_missing(parent.remove_dir(name))?;
    Ok(true)
}

/// A missing file is as good as a removed one.
pub(crate) fn ignore_missing(result: stepwell_core::Result<()>) -> stepwell_core::Result<()> {
    match result {
        Err(error) if error.is_not_found() => Ok(()),
        other => other,
    }
}
