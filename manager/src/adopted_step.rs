//! Steps whose bytes are files of another library. Such a step has a manifest, which names these
//! files, and no files of its own. So it is listed, leased and retired as any other step, and the
//! files stay as they are.

use std::collections::BTreeMap;
use std::path::Path;

use stepwell_core::format::FORMAT_VERSION;
use stepwell_core::format::manifest::{ADOPTED_FILES, AdoptedFiles, Attempt, Manifest, Others};
use stepwell_core::io::{Disk, EntryKind, Stat};

use crate::discovery::is_not_a_step;

/// A step to commit.
#[derive(Clone, Debug)]
pub struct AdoptedStep {
    /// Its number.
    pub step: u64,
    /// Its files.
    pub files: AdoptedFiles,
    /// When they were written, nanoseconds since 1970 UTC.
    pub written_unix_ns: i64,
    /// The user's metrics.
    pub metrics: BTreeMap<String, f64>,
    /// The user's metadata.
    pub custom_metadata: serde_json::Value,
}

impl AdoptedStep {
    /// Returns the manifest of the step. `session` is unique.
    pub(crate) fn manifest(&self, session: String) -> Manifest {
        Manifest {
            format_version: FORMAT_VERSION,
            required_features: vec![ADOPTED_FILES.to_owned()],
            writer: format!("stepwell {}", env!("CARGO_PKG_VERSION")),
            step: self.step,
            attempt: Attempt { session, counter: 0 },
            started_unix_ns: self.written_unix_ns,
            committed_unix_ns: self.written_unix_ns,
            world_size: 1,
            plan_hash: String::new(),
            items: Vec::new(),
            files: Vec::new(),
            adopted: Some(self.files.clone()),
            dropped: Vec::new(),
            unsupported: Vec::new(),
            metrics: self.metrics.clone(),
            custom_metadata: self.custom_metadata.clone(),
            others: Others::new(),
        }
    }
}

/// Returns the damage of an adopted step that shows without reading its files: they or their
/// checksums are missing.
pub(crate) fn damage(
    disk: &dyn Disk,
    root: &Path,
    files: &AdoptedFiles,
) -> stepwell_core::Result<Option<String>> {
    let (path, checksums) = (root.join(&files.path), root.join(&files.checksums.path));
    let family = &files.family;
    if stat(disk, &path)?.is_none() {
        return Ok(Some(format!(
            "its files of another library ({family}) are missing: {}. Move them back, or delete the step",
            path.display()
        )));
    }
    let length = files.checksums.length;
    let is_there = |stat: &Stat| stat.kind == EntryKind::File && stat.len >= length;
    if stat(disk, &checksums)?.as_ref().is_some_and(is_there) {
        return Ok(None);
    }
    Ok(Some(format!(
        "the checksums of its files ({family}) are missing or were replaced: {}. Delete the step, and adopt {} again",
        checksums.display(),
        path.display()
    )))
}

/// Facts about a path; `None` if nothing is there.
fn stat(disk: &dyn Disk, path: &Path) -> stepwell_core::Result<Option<Stat>> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str())) else {
        return Ok(None);
    };
    match disk.open_dir(parent).and_then(|parent| parent.stat(name)) {
        Err(error) if error.is_gone() || is_not_a_step(&error) => Ok(None),
        found => found,
    }
}
