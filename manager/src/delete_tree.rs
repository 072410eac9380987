//! The deletion of a directory tree.

use stepwell_core::io::{Dir, EntryKind};

use crate::directory_layout::{EXPORT_RECORD, LEASE};

/// The deepest nesting. Steps are less deep, and a deeper foreign tree is not deleted.
const MAX_DEPTH: usize = 64;
/// The objects that one request deletes.
pub(crate) const DELETED_AT_ONCE: usize = 1000;

/// Deletes a directory with its content. A missing one is ENOENT.
pub fn delete_tree(parent: &dyn Dir, name: &str) -> stepwell_core::Result<()> {
    delete(parent, name, &mut || true).map(drop)
}

/// [`delete_tree`] until `go_on` returns false. `Ok(false)`: it was stopped.
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
    if let Some(lengths) = parent.lengths(name)? {
        return delete_objects(parent, name, &lengths.into_keys().collect::<Vec<_>>(), go_on);
    }
    let dir = parent.open_dir(name)?;
    let mut entries = dir.entries()?;
    // The lock file goes last, so that the lock means something until the end. So does the record
    // of an export, also in a power cut: without it, the rest may be a directory of somebody else.
    entries.sort_by_key(|entry| entry.name == LEASE || entry.name == EXPORT_RECORD);
    for entry in entries {
        if !go_on() {
            return Ok(false);
        }
        if entry.kind == EntryKind::Dir {
            match delete_at(&*dir, &entry.name, go_on, depth + 1) {
                Ok(true) => {}
                // Another process deletes it too.
                Err(error) if error.is_not_found() => {}
                stopped => return stopped,
            }
        } else {
            if entry.name == EXPORT_RECORD {
                dir.sync()?;
            }
            ignore_missing(dir.remove_file(&entry.name))?;
        }
    }
    ignore_missing(parent.remove_dir(name))?;
    Ok(true)
}

/// Deletes the files below a directory of a store, and then its name.
fn delete_objects(
    parent: &dyn Dir,
    name: &str,
    files: &[String],
    go_on: &mut dyn FnMut() -> bool,
) -> stepwell_core::Result<bool> {
    for batch in files.chunks(DELETED_AT_ONCE) {
        if !go_on() {
            return Ok(false);
        }
        let paths: Vec<String> = batch.iter().map(|file| format!("{name}/{file}")).collect();
        parent.remove_files(&paths)?;
    }
    ignore_missing(parent.remove_dir(name))?;
    Ok(true)
}

/// Ignores that a file is missing.
pub(crate) fn ignore_missing(result: stepwell_core::Result<()>) -> stepwell_core::Result<()> {
    match result {
        Err(error) if error.is_not_found() => Ok(()),
        other => other,
    }
}
