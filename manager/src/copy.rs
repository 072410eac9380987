//! Copies of checkpoints, or of some of their items: byte for byte, verified, and published by one
//! rename.
//!
//! A copy is written into a temporary beside its path, as a save is. Before it gets its name, it is
//! durable, and every checksum of it was verified.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use stepwell_core::format::manifest::{Manifest, stored_files};
use stepwell_core::io::Dir;

use crate::checkpoint::Checkpoint;
use crate::commit::aside;
use crate::delete_tree::delete_tree;
use crate::directory_layout::{self, LEASE, MANIFEST};
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::lease::{OwnedTemporary, own_temporary};
use crate::{retention, singular};

/// Called with the bytes done and the total, of writing and verifying. Returns false to stop the
/// copy.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64) -> bool;

/// The check of a copy before it gets its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyCheck {
    /// Every byte of the copy is read again.
    Whole,
    /// Every block is checked while it is read from the source. The headers, footers and indexes of
    /// the copy are read. For a slow target, whose own checks cover the bytes on their way.
    WhileReading,
}

/// The part of a checkpoint that a copy takes over. The default is all of it.
#[derive(Clone, Debug, Default)]
pub struct CopySelection {
    /// Globs of items; `None`: all.
    pub include: Option<Vec<String>>,
    /// Globs of items that are left out.
    pub exclude: Vec<String>,
    /// Metrics of a later date, which the copy's manifest gets.
    pub metrics: BTreeMap<String, f64>,
}

impl CopySelection {
    /// The manifest of the copy: without the items that are left out, and with later metrics.
    fn manifest(&self, source: &Manifest, unix_ns: i64) -> Result<Manifest> {
        let mut manifest = source.clone();
        manifest.metrics.extend(self.metrics.clone());
        let include = self.include.as_deref().map(retention::matcher).transpose()?;
        let exclude = retention::matcher(&self.exclude)?;
        let mut keep = BTreeSet::new();
        for item in &source.items {
            let is_included = include.as_ref().is_none_or(|globs| globs.selects(&item.name).unwrap_or(false));
            if is_included && !exclude.selects(&item.name).unwrap_or(false) {
                keep.insert(item.name.clone());
            }
        }
        if keep.is_empty() && !source.items.is_empty() {
            let names: Vec<&str> = source.items.iter().map(|item| item.name.as_str()).collect();
            return Err(Error::Invalid(format!(
                "nothing would be copied: no item is selected. The items are {}",
                names.join(", ")
            )));
        }
        aside::drop_items(&mut manifest, &keep, unix_ns);
        Ok(manifest)
    }
}

/// Copies an open checkpoint, or a part of it, to a free path.
pub fn to_path(
    source: &Checkpoint,
    part: &CopySelection,
    path: &Path,
    environment: &Environment,
    progress: Progress<'_>,
) -> Result<()> {
    let session = environment.hex_id();
    let (parent, name) = singular::own_destination(path, &session, environment)?;
    let label = directory_layout::label_of_path(&name);
    let place = CopyPlace { parent, name, label, trash: None };
    into(source, part, CopyCheck::Whole, &place, environment, progress)
}

/// The place of a copy.
pub(crate) struct CopyPlace {
    /// The directory around it.
    pub(crate) parent: Arc<dyn Dir>,
    /// Its name there.
    pub(crate) name: String,
    /// A part of the name of its temporary.
    pub(crate) label: String,
    /// If it replaces a checkpoint: the trash name that this one gets.
    pub(crate) trash: Option<String>,
}

/// Copies an open checkpoint, or a part of it.
pub(crate) fn into(
    source: &Checkpoint,
    part: &CopySelection,
    check: CopyCheck,
    place: &CopyPlace,
    environment: &Environment,
    progress: Progress<'_>,
) -> Result<()> {
    into_checked(source, part, check, place, environment, progress, &|| Ok(()))
}

/// [`into`], with a last check before the copy gets its name.
pub(crate) fn into_checked(
    source: &Checkpoint,
    part: &CopySelection,
    check: CopyCheck,
    place: &CopyPlace,
    environment: &Environment,
    progress: Progress<'_>,
    last: &dyn Fn() -> Result<()>,
) -> Result<()> {
    let manifest = part.manifest(source.manifest(), environment.clock.unix_ns())?;
    let parent = &place.parent;
    publish(place, environment, |dir, temporary| {
        write(source, &manifest, check, dir, progress)?;
        match check {
            CopyCheck::Whole => verify(parent, temporary, environment, source, progress),
            CopyCheck::WhileReading => Checkpoint::open_in(parent, temporary, environment)?.check_records(),
        }?;
        last()
    })
}

/// Writes a checkpoint into a temporary of a directory, and gives it its name. `write` gets the
/// temporary and its name, and makes all files of it durable.
pub(crate) fn publish(
    place: &CopyPlace,
    environment: &Environment,
    write: impl FnOnce(&Arc<dyn Dir>, &str) -> Result<()>,
) -> Result<()> {
    let CopyPlace { parent, name, label, trash } = place;
    let taken = || Error::PathExists { path: parent.path().join(name) };
    if trash.is_none() && parent.stat(name)?.is_some() {
        return Err(taken());
    }
    let temporary = directory_layout::temporary(label, &environment.hex_id(), 0);
    // Its held lease shows that its writer is alive, and becomes the lease of the checkpoint.
    let OwnedTemporary { dir, lease } = own_temporary(&**parent, &temporary, false)?;
    let written = write(&dir, &temporary);
    let is_written = written.is_ok();
    let published = written.and_then(|()| match trash {
        Some(trash) => Ok(aside::replace_by_copy(&**parent, &temporary, name, trash)?),
        None => match aside::publish_copy(&**parent, &temporary, name) {
            Err(error) if error.already_exists() => Err(taken()),
            published => Ok(published?),
        },
    });
    drop(lease);
    // A whole copy may have its name, although the answer was an error. The next writer finds out.
    let is_ours = !is_written || matches!(published, Err(Error::PathExists { .. }));
    if published.is_err()
        && is_ours
        && let Err(error) = delete_tree(&**parent, &temporary)
        && !error.is_not_found()
    {
        tracing::warn!(%error, "a failed write left its temporary; the next save to this path removes it");
    }
    published
}

/// Returns the bytes of a copy.
pub(crate) fn total(manifest: &Manifest) -> u64 {
    stored_files(&manifest.files).iter().map(|(_, length)| length).sum()
}

/// Writes all files durably, the manifest last.
fn write(
    source: &Checkpoint,
    manifest: &Manifest,
    check: CopyCheck,
    dir: &Arc<dyn Dir>,
    progress: Progress<'_>,
) -> Result<()> {
    let indexes = manifest.items.iter().map(|item| (item.index.path.as_str(), false));
    let files =
        stored_files(&manifest.files).into_iter().map(|(path, _)| (path, check == CopyCheck::WhileReading));
    let passes = if check == CopyCheck::Whole { 2 } else { 1 };
    let whole = total(manifest).saturating_mul(passes);
    let mut directories = BTreeSet::new();
    let mut done = 0_u64;
    for (path, checked) in indexes.chain(files) {
        if let Some((above, _)) = path.rsplit_once('/')
            && directories.insert(above.to_owned())
        {
            dir.create_dir(above)?;
        }
        let from = if checked { source.stored_file(path)? } else { source.dir().open_file(path)? };
        dir.copy_file(path, &*from, &mut |bytes| {
            done = done.saturating_add(bytes);
            progress(done.min(whole), whole)
        })?;
    }
    for directory in &directories {
        dir.open_dir(directory)?.sync()?;
    }
    write_manifest(dir, manifest)
}

/// Writes the manifest and what else a step has beside its data, durably.
pub(crate) fn write_manifest(dir: &Arc<dyn Dir>, manifest: &Manifest) -> Result<()> {
    if dir.stat(LEASE)?.is_none() {
        dir.write_file(LEASE, b"")?;
    }
    dir.write_file(MANIFEST, &manifest.encode()?)?;
    Ok(dir.sync()?)
}

/// Verifies every checksum of the copy.
fn verify(
    parent: &Arc<dyn Dir>,
    temporary: &str,
    environment: &Environment,
    source: &Checkpoint,
    progress: Progress<'_>,
) -> Result<()> {
    let copy = Checkpoint::open_in(parent, temporary, environment)?;
    let half = total(copy.manifest());
    let report = copy.verify(source.load_options(), &mut |at| {
        progress(half.saturating_add(at.done), half.saturating_mul(2))
    })?;
    match report.damages.first() {
        None => Ok(()),
        Some(damage) => {
            let what = format!("{}; the copy was given up. Verify the source", damage.what);
            Err(stepwell_core::Error::corrupt(&damage.file, what).into())
        }
    }
}
