//! Copies of checkpoints, or of some of their items: byte for byte, verified, and published by one
//! rename.
//!
//! A copy is written into a temporary beside its path, as a save is. Before it gets its name, it is
//! durable, and every checksum of it was verified.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use stepwell_core::Result as CoreResult;
use stepwell_core::format::manifest::{FileEntry, Manifest, stored_files};
use stepwell_core::io::{Dir, File};

use crate::checkpoint::Checkpoint;
use crate::commit::aside;
use crate::compressed_copy::{self, CompressedCopy};
use crate::delete_tree::delete_tree;
use crate::directory_layout::{self, LEASE, MANIFEST};
use crate::environment::Environment;
use crate::error::{Advice, Error, Result};
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
    CopyTask {
        source,
        part,
        check: CopyCheck::Whole,
        place: &place,
        environment,
        others: None,
        last: &|| Ok(()),
    }
    .run(progress)
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

/// Other processes that write some of the files of a copy.
pub(crate) trait OtherWriters {
    /// Has them begin, with some of these files, which have their directories in the temporary.
    /// Returns those.
    fn begin(&self, temporary: &str, stored: &[String]) -> Result<BTreeSet<String>>;

    /// Waits until they have written their files durably. `goes_on` returns false to stop. Returns
    /// the new entries of the data files that are not as in the source.
    fn wait(&self, goes_on: &mut dyn FnMut() -> bool) -> Result<Vec<FileEntry>>;

    /// Has them stop, after a failure of anybody.
    fn stop(&self);
}

/// A copy of an open checkpoint, or of a part of it, into a directory.
pub(crate) struct CopyTask<'a> {
    pub(crate) source: &'a Checkpoint,
    pub(crate) part: &'a CopySelection,
    pub(crate) check: CopyCheck,
    pub(crate) place: &'a CopyPlace,
    pub(crate) environment: &'a Environment,
    pub(crate) others: Option<&'a dyn OtherWriters>,
    /// The last check before the copy gets its name.
    pub(crate) last: &'a dyn Fn() -> Result<()>,
}

impl CopyTask<'_> {
    /// Copies it.
    pub(crate) fn run(&self, progress: Progress<'_>) -> Result<()> {
        let manifest = self.part.manifest(self.source.manifest(), self.environment.clock.unix_ns())?;
        publish(self.place, self.environment, |dir, temporary| {
            let written = self.write_checked(manifest, (dir, temporary), progress);
            if let Some(others) = self.others
                && written.is_err()
            {
                others.stop();
            }
            written
        })
    }

    fn write_checked(
        &self,
        manifest: Manifest,
        (dir, temporary): (&Arc<dyn Dir>, &str),
        progress: Progress<'_>,
    ) -> Result<()> {
        let (parent, bytes) = (&self.place.parent, total(&manifest));
        self.write(manifest, (dir, temporary), progress)?;
        match self.check {
            CopyCheck::Whole => verify(parent, temporary, self.environment, (self.source, bytes), progress),
            CopyCheck::WhileReading => {
                Checkpoint::open_in(parent, temporary, self.environment)?.check_records()
            }
        }?;
        (self.last)()
    }

    /// Writes all files durably, the manifest last.
    fn write(
        &self,
        mut manifest: Manifest,
        (dir, temporary): (&Arc<dyn Dir>, &str),
        progress: Progress<'_>,
    ) -> Result<()> {
        let source = self.source;
        let passes = if self.check == CopyCheck::Whole { 2 } else { 1 };
        let mut writer = FileWriter::new(total(&manifest).saturating_mul(passes), progress);
        let globs = compressed_copy::chosen(&self.part.compress)?;
        let mut compressed = CompressedCopy::new(source, &globs, &manifest)?;
        for item in manifest.items.iter().filter(|item| !compressed.has_item(&manifest, item)) {
            let from = source.dir().open_file(&item.index.path)?;
            writer.copy(&**dir, &item.index.path, &*from)?;
        }
        let mut stored: Vec<String> =
            stored_files(&manifest.files).into_iter().map(|(path, _)| path.to_owned()).collect();
        let mut theirs = BTreeSet::new();
        if let Some(others) = self.others {
            stored.iter().try_for_each(|path| writer.create_above(&**dir, path))?;
            theirs = others.begin(temporary, &stored)?;
            stored.retain(|path| !theirs.contains(path));
        }
        let is_checked = self.check == CopyCheck::WhileReading;
        write_data(&mut compressed, &mut manifest, (&**dir, &stored), is_checked, &mut writer)?;
        if let Some(others) = self.others.filter(|_| !theirs.is_empty()) {
            let entries = others.wait(&mut || writer.went_on(0, 0))?;
            compressed.take_over(&**dir, &mut manifest, &theirs, entries)?;
        }
        let mut items = std::mem::take(&mut manifest.items);
        for item in items.iter_mut().filter(|item| compressed.has_item(&manifest, item)) {
            compressed.write_index(&**dir, item)?;
        }
        manifest.items = items;
        compressed.declare(&mut manifest);
        writer.sync(&**dir)?;
        write_manifest(dir, &manifest)
    }
}

/// Writes some of the data files of a copy, in the place of the process that publishes it. Each
/// block is checked while it is read. Returns the new entries of the data files that are not as in
/// the source.
pub(crate) fn write_some(
    source: &Checkpoint,
    compress: &[String],
    (dir, stored): (&dyn Dir, &[String]),
    progress: Progress<'_>,
) -> Result<Vec<FileEntry>> {
    let mut manifest = Manifest::clone(source.manifest());
    let mut writer = FileWriter::new(total(&manifest), progress);
    let globs = compressed_copy::chosen(compress)?;
    let mut compressed = CompressedCopy::new(source, &globs, &manifest)?;
    write_data(&mut compressed, &mut manifest, (dir, stored), true, &mut writer)?;
    writer.sync(dir)?;
    Ok(compressed.entries(&manifest))
}

/// Writes data files, by their paths on disk.
fn write_data(
    compressed: &mut CompressedCopy<'_>,
    manifest: &mut Manifest,
    (dir, stored): (&dyn Dir, &[String]),
    is_checked: bool,
    writer: &mut FileWriter<'_>,
) -> Result<()> {
    let source = compressed.source();
    for path in stored {
        if compressed.has_part(path) {
            compressed.write(dir, manifest, path, writer)?;
        } else {
            let from = if is_checked { source.stored_file(path)? } else { source.dir().open_file(path)? };
            writer.copy(dir, path, &*from)?;
        }
    }
    Ok(())
}

/// Writes a checkpoint into a temporary of a directory, and gives it its name. `write` gets the
/// temporary and its name, and makes all files of it durable.
pub(crate) fn publish(
    place: &CopyPlace,
    environment: &Environment,
    write: impl FnOnce(&Arc<dyn Dir>, &str) -> Result<()>,
) -> Result<()> {
    let CopyPlace { parent, name, label, trash } = place;
    let taken = || Error::PathExists { path: parent.path().join(name), advice: Advice::OtherPath };
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
    /// The directories of the files.
    directories: BTreeSet<String>,
}

impl<'a> FileWriter<'a> {
    fn new(total: u64, progress: Progress<'a>) -> Self {
        let at = CopyProgress { total, ..CopyProgress::default() };
        Self { at, progress, directories: BTreeSet::new() }
    }

    /// Makes the names of the files durable.
    fn sync(&self, dir: &dyn Dir) -> Result<()> {
        Ok(self.directories.iter().try_for_each(|directory| dir.open_dir(directory)?.sync())?)
    }

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
            match dir.create_dir(above) {
                // Several processes may write the files of a copy.
                Err(error) if !error.already_exists() => return Err(error.into()),
                _ => {}
            }
        }
        Ok(())
    }
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
