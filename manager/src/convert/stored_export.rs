//! Exports in an object store. Each has a record, which names its root and its step. The record is
//! the first object that is written and the last one that is deleted, and says meanwhile that the
//! export is not complete. So whatever an ended process has left can be told from other objects.

use std::path::Path;

use stepwell_core::limits::MAX_MANIFEST_BYTES;

use super::OutputKind;
use crate::delete_tree::DELETED_AT_ONCE;
use crate::directory_layout::EXPORT_RECORD;
use crate::environment::Environment;
use crate::error::Result;
use crate::foreign_reading::parent_and_name;

/// Returns the names below a URL, of one level.
pub fn stored_level(url: &Path, environment: &Environment) -> Result<Vec<String>> {
    let entries = environment.disk.open_foreign_dir(url)?.entries()?;
    Ok(entries.into_iter().map(|entry| entry.name).collect())
}

/// Returns a small object. `None` if it does not exist.
pub fn read_object(url: &Path, environment: &Environment) -> Result<Option<Vec<u8>>> {
    let (parent, name) = parent_and_name(url)?;
    match environment.disk.open_foreign_dir(parent)?.read_file(name, MAX_MANIFEST_BYTES) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Deletes an export: its only object, or all that are below its URL, the record last.
pub fn remove_objects(url: &Path, kind: OutputKind, environment: &Environment) -> Result<()> {
    if kind == OutputKind::File {
        let (parent, name) = parent_and_name(url)?;
        return Ok(environment.disk.open_foreign_dir(parent)?.remove_files(&[name.to_owned()])?);
    }
    let dir = environment.disk.open_foreign_dir(url)?;
    let names = dir.lengths("")?.unwrap_or_default().into_keys();
    let (records, others): (Vec<_>, Vec<_>) = names.partition(|name| name == EXPORT_RECORD);
    for some in others.chunks(DELETED_AT_ONCE) {
        dir.remove_files(some)?;
    }
    if !records.is_empty() {
        dir.remove_files(&records)?;
    }
    Ok(())
}
