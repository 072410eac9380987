//! Copies of checkpoints, or of some of their items: byte for byte, verified, and published by one
//! rename.
//!
//! A copy is written into a temporary beside its path, as a save is. Before it gets its name, it is
//! durable, and every checksum of it was verified.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use stepwell_core::Result as CoreResult;
use stepwell_core::format::manifest::{Manifest, stored_files};
use stepwell_core::io::{Dir, File};
use stepwell_reshard::glob::GlobList;

use crate::checkpoint::Checkpoint;
use crate::commit::aside;
use crate::compressed_copy::{self, CompressedCopy};
use crate::delete_tree::delete_tree;
use crate::directory_layout::{self, LEASE, MANIFEST};
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::lease::{OwnedTemporary, own_temporary};
use crate::{retention, singular};

/// The progress of a copy, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyProgress {
    /// Bytes of the source that were copied, and of the copy that were verified.
    pub done: u64,
    /// All of these.
    pub total: u64,
    /// Bytes that were written. Fewer, if the copy is compressed.
    pub written: u64,
}

/// Called while a copy is written and verified. Returns false to stop it.
pub type Progress<'a> = &'a mut dyn FnMut(CopyProgress) -> bool;

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
    /// Globs of tensors that are compressed. Compressed tensors stay compressed without it.
    pub compress: Vec<String>,
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
        let globs = compressed_copy::chosen(&part.compress)?;
        let bytes = total(&manifest);
        write(source, manifest, &globs, check, dir, progress)?;
        match check {
            CopyCheck::Whole => verify(parent, temporary, environment, (source, bytes), progress),
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

/// Writes the files of a copy, and reports its progress.
pub(crate) struct FileWriter<'a> {
    at: CopyProgress,
    progress: Progress<'a>,
    /// The directories that were created.
    directories: BTreeSet<String>,
}

impl FileWriter<'_> {
    /// Copies a file.
    pub(crate) fn copy(&mut self, dir: &dyn Dir, path: &str, from: &dyn File) -> Result<()> {
        self.create_above(dir, path)?;
        Ok(dir.copy_file(path, from, &mut |bytes| self.went_on(bytes, bytes))?)
    }

    /// Writes a file out of pieces. `next` also returns the bytes of the source that were read.
    pub(crate) fn pieces(
        &mut self,
        dir: &dyn Dir,
        path: &str,
        len_hint: u64,
        next: &mut dyn FnMut(usize) -> CoreResult<(Vec<u8>, u64)>,
    ) -> Result<()> {
        self.create_above(dir, path)?;
        let mut before = (0, 0);
        let written = dir.write_pieces(path, len_hint, &mut |most| {
            if before.0 > 0 && !self.went_on(before.1, before.0) {
                return Err(stepwell_core::Error::Cancelled("by the caller".to_owned()));
            }
            let (piece, read) = next(most)?;
            before = (piece.len() as u64, read);
            Ok(piece)
        });
        self.at.done = self.at.done.saturating_add(before.1);
        Ok(written?)
    }

    fn went_on(&mut self, read: u64, written: u64) -> bool {
        self.at.done = self.at.done.saturating_add(read).min(self.at.total);
        self.at.written = self.at.written.saturating_add(written);
        (self.progress)(self.at)
    }

    fn create_above(&mut self, dir: &dyn Dir, path: &str) -> Result<()> {
        if let Some((above, _)) = path.rsplit_once('/')
            && self.directories.insert(above.to_owned())
        {
            dir.create_dir(above)?;
        }
        Ok(())
    }
}

/// Writes all files durably, the manifest last. Tensors that the globs select are compressed.
fn write(
    source: &Checkpoint,
    mut manifest: Manifest,
    globs: &GlobList,
    check: CopyCheck,
    dir: &Arc<dyn Dir>,
    progress: Progress<'_>,
) -> Result<()> {
    let passes = if check == CopyCheck::Whole { 2 } else { 1 };
    let whole = total(&manifest).saturating_mul(passes);
    let at = CopyProgress { total: whole, ..CopyProgress::default() };
    let mut writer = FileWriter { at, progress, directories: BTreeSet::new() };
    let mut compressed = CompressedCopy::new(source, globs, &manifest)?;
    for item in manifest.items.iter().filter(|item| !compressed.has_item(&manifest, item)) {
        let from = source.dir().open_file(&item.index.path)?;
        writer.copy(&**dir, &item.index.path, &*from)?;
    }
    let stored: Vec<String> =
        stored_files(&manifest.files).into_iter().map(|(path, _)| path.to_owned()).collect();
    for path in &stored {
        if compressed.has_part(path) {
            compressed.write(&**dir, &mut manifest, path, &mut writer)?;
        } else {
            let is_checked = check == CopyCheck::WhileReading;
            let from = if is_checked { source.stored_file(path)? } else { source.dir().open_file(path)? };
            writer.copy(&**dir, path, &*from)?;
        }
    }
    let mut items = std::mem::take(&mut manifest.items);
    for item in items.iter_mut().filter(|item| compressed.has_item(&manifest, item)) {
        compressed.write_index(&**dir, item)?;
    }
    manifest.items = items;
    compressed.declare(&mut manifest);
    for directory in &writer.directories {
        dir.open_dir(directory)?.sync()?;
    }
    write_manifest(dir, &manifest)
}

/// Writes the manifest and what else a step has beside its data, durably.
pub(crate) fn write_manifest(dir: &Arc<dyn Dir>, manifest: &Manifest) -> Result<()> {
    if dir.stat(LEASE)?.is_none() {
        dir.write_file(LEASE, b"")?;
    }
    dir.write_file(MANIFEST, &manifest.encode()?)?;
    Ok(dir.sync()?)
}

/// Verifies every checksum of the copy. It may be smaller than the copied bytes of its source.
fn verify(
    parent: &Arc<dyn Dir>,
    temporary: &str,
    environment: &Environment,
    (source, half): (&Checkpoint, u64),
    progress: Progress<'_>,
) -> Result<()> {
    let copy = Checkpoint::open_in(parent, temporary, environment)?;
    let written = total(copy.manifest());
    let report = copy.verify(source.load_options(), &mut |at| {
        let done = u128::from(half) * u128::from(at.done) / u128::from(at.total.max(1));
        progress(CopyProgress {
            done: half.saturating_add(u64::try_from(done).unwrap_or(half)),
            total: half.saturating_mul(2),
            written,
        })
    })?;
    match report.damages.first() {
        None => Ok(()),
        Some(damage) => {
            let what = format!("{}; the copy was given up. Verify the source", damage.what);
            Err(stepwell_core::Error::corrupt(&damage.file, what).into())
        }
    }
}
