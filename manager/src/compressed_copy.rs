//! Copies of a step whose chosen tensors are compressed.
//!
//! Called by [`crate::copy`] in the place of a copy byte for byte. Each data file with a chosen
//! tensor is written once more ([`CompressedFile`]), then the index of its item. Other files are
//! copied as they are. The manifest gets the new lengths and checksums, and keeps the attempt.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use stepwell_core::compressed_file::{CompressedFile, FinishedCopy, move_leaf};
use stepwell_core::format::index::{Codec, Index, LeafRecord};
use stepwell_core::format::index_v1;
use stepwell_core::format::manifest::{COMPRESSED_CHUNKS, FileEntry, Item, Manifest, NODE_FILES};
use stepwell_core::io::{Dir, Section};
use stepwell_core::load::index_in_footer;
use stepwell_core::sys::each;
use stepwell_reshard::glob::{Glob, GlobList, PathText};

use crate::checkpoint::Checkpoint;
use crate::copy::FileWriter;
use crate::discovery::REQUESTS_AT_ONCE;
use crate::error::{Error, Result};
use crate::stored_index;

/// Reads the globs of tensors that are compressed.
pub(crate) fn chosen(globs: &[String]) -> Result<GlobList> {
    GlobList::new(globs).map_err(|error| Error::Invalid(format!("a glob of what is compressed: {error}")))
}

/// Returns the globs that select no tensor.
pub(crate) fn unmatched(globs: &[String], index: &Index) -> Result<Vec<String>> {
    let globs = chosen(globs)?;
    let tensors = (0_u32..).zip(&index.leaves).filter(|(_, leaf)| matches!(leaf, LeafRecord::Tensor(_)));
    let paths: Vec<PathText> =
        tensors.map(|(number, _)| PathText::new(&index.tree.leaf_path(number))).collect();
    let selects_none = |glob: &&Glob| !paths.iter().any(|path| glob.selects(path.as_bytes()));
    Ok(globs.globs().iter().filter(selects_none).map(|glob| glob.as_str().to_owned()).collect())
}

/// A copy whose chosen tensors are compressed.
pub(crate) struct CompressedCopy<'a> {
    source: &'a Checkpoint,
    globs: &'a GlobList,
    /// The paths of the data files that are written once more.
    files: BTreeSet<String>,
    /// By file on disk, the numbers in the manifest of the data files in it.
    parts: HashMap<String, Vec<usize>>,
    /// The written ones, by path.
    written: HashMap<String, FinishedCopy>,
}

impl<'a> CompressedCopy<'a> {
    /// Finds the files with chosen tensors that are not compressed yet.
    pub(crate) fn new(source: &'a Checkpoint, globs: &'a GlobList, manifest: &Manifest) -> Result<Self> {
        let mut copy =
            Self { source, globs, files: BTreeSet::new(), parts: HashMap::new(), written: HashMap::new() };
        if globs.is_empty() {
            return Ok(copy);
        }
        let index = source.index()?;
        let of_copy: BTreeSet<&str> = manifest.files.iter().map(|entry| entry.path.as_str()).collect();
        for (number, leaf) in (0_u32..).zip(&index.leaves) {
            let LeafRecord::Tensor(tensor) = leaf else { continue };
            if !is_chosen(globs, &index, number) {
                continue;
            }
            let raw = tensor.chunks.iter().filter(|chunk| chunk.codec == Codec::Raw);
            for file in raw.filter_map(|chunk| index.files.get(chunk.extent.source.file()? as usize)) {
                if of_copy.contains(&*file.name) && !copy.files.contains(&*file.name) {
                    copy.files.insert(file.name.to_string());
                }
            }
        }
        for (number, entry) in manifest.files.iter().enumerate() {
            let stored = entry.within.as_ref().map_or(&entry.path, |within| &within.path);
            copy.parts.entry(stored.clone()).or_default().push(number);
        }
        let is_written = |number: &usize| {
            manifest.files.get(*number).is_some_and(|entry| copy.files.contains(&entry.path))
        };
        copy.parts.retain(|_, numbers| numbers.iter().any(is_written));
        Ok(copy)
    }

    pub(crate) fn source(&self) -> &'a Checkpoint {
        self.source
    }

    /// True if the file on disk has a data file that is written once more.
    pub(crate) fn has_part(&self, stored: &str) -> bool {
        self.parts.contains_key(stored)
    }

    /// True if the index of the item changes.
    pub(crate) fn has_item(&self, manifest: &Manifest, item: &Item) -> bool {
        manifest.files_of(item).any(|entry| self.files.contains(&entry.path))
    }

    /// Writes the data files that a file on disk has, each as a file of its own.
    pub(crate) fn write(
        &mut self,
        dir: &dyn Dir,
        manifest: &mut Manifest,
        stored: &str,
        writer: &mut FileWriter<'_>,
    ) -> Result<()> {
        let around = self.source.stored_file(stored)?;
        for number in self.parts.get(stored).cloned().unwrap_or_default() {
            let Some(entry) = manifest.files.get_mut(number) else { continue };
            let record = stored_index::file_record(entry);
            let from = Section::new(Arc::clone(&around), record.stored_offset(0), record.length);
            entry.within = None;
            if !self.files.contains(&entry.path) {
                writer.copy(dir, &entry.path, &from)?;
                continue;
            }
            let index = index_in_footer(self.source.dir(), &record, &record.name)?;
            let paths = Index { tree: index.tree.clone(), ..Index::default() };
            let mut file = CompressedFile::new(&from, index, &|leaf| is_chosen(self.globs, &paths, leaf))?;
            let (mut read, length) = (0, record.length);
            writer.pieces(dir, &entry.path, length, &mut |most| {
                let piece = file.next_piece(most)?;
                // The footer of the old file is not read as a whole.
                let now = if piece.len() < most { length } else { file.bytes_read().min(length) };
                let done = now - std::mem::replace(&mut read, now);
                Ok((piece, done))
            })?;
            let finished = file.finish()?;
            entry.length = finished.record.length;
            entry.file_id = finished.record.file_id;
            entry.trailer_crc32c = finished.record.trailer_crc;
            self.written.insert(entry.path.clone(), finished);
        }
        Ok(())
    }

    /// Returns the entries of the data files that were written once more.
    pub(crate) fn entries(&self, manifest: &Manifest) -> Vec<FileEntry> {
        let is_written = |entry: &&FileEntry| self.written.contains_key(&entry.path);
        manifest.files.iter().filter(is_written).cloned().collect()
    }

    /// Records files that another process has written, of these files on disk. `entries` are those
    /// of its [`CompressedCopy::entries`].
    pub(crate) fn take_over(
        &mut self,
        dir: &dyn Dir,
        manifest: &mut Manifest,
        stored: &BTreeSet<String>,
        entries: Vec<FileEntry>,
    ) -> Result<()> {
        let mut entries: HashMap<String, FileEntry> =
            entries.into_iter().map(|entry| (entry.path.clone(), entry)).collect();
        let mut taken = Vec::new();
        for &number in stored.iter().filter_map(|path| self.parts.get(path)).flatten() {
            let Some(entry) = manifest.files.get_mut(number) else { continue };
            let old = stored_index::file_record(entry);
            entry.within = None;
            if !self.files.contains(&entry.path) {
                continue;
            }
            let Some(new) = entries.remove(&entry.path) else {
                let what = format!("an entry of {} by the process that has written it", entry.path);
                return Err(stepwell_core::Error::internal(what, "none").into());
            };
            *entry = FileEntry { others: std::mem::take(&mut entry.others), ..new };
            taken.push((old, stored_index::file_record(entry)));
        }
        let source = self.source.dir();
        let finished = each("stepwell-footers", REQUESTS_AT_ONCE, &taken, |(old, new)| {
            let of_old = index_in_footer(source, old, &old.name)?;
            let of_new = index_in_footer(dir, new, &new.name)?;
            FinishedCopy::of_footers(new.clone(), &of_old, &of_new)
                .map_err(|what| stepwell_core::Error::corrupt(dir.path().join(&*new.name), what))
        });
        for ((_, new), finished) in taken.iter().zip(finished) {
            self.written.insert(new.name.to_string(), finished?);
        }
        Ok(())
    }

    /// Writes the index of an item whose files were written, and records it.
    pub(crate) fn write_index(&self, dir: &dyn Dir, item: &mut Item) -> Result<()> {
        let path = self.source.path().join(&item.index.path);
        let mut index = stored_index::of_item(self.source.dir(), item)?;
        let mut places = HashMap::new();
        for (number, record) in (0_u32..).zip(&mut index.files) {
            let Some(new) = self.written.get(&format!("{}/{}", item.dir, record.name)) else { continue };
            record.length = new.record.length;
            record.file_id = new.record.file_id;
            record.trailer_crc = new.record.trailer_crc;
            places.insert(number, &new.places);
        }
        for leaf in &mut index.leaves {
            move_leaf(leaf, &|file| places.get(&file).copied()).map_err(|what| {
                stepwell_core::Error::corrupt(&path, format!("its footers list other bytes: {what}"))
            })?;
        }
        let encoded = index_v1::encode(&index)?;
        (item.index.length, item.index.crc32c) = (encoded.bytes.len() as u64, encoded.crc);
        let mut bytes = encoded.bytes;
        dir.write_pieces(&item.index.path, bytes.len() as u64, &mut |most| {
            let rest = bytes.split_off(most.min(bytes.len()));
            Ok(std::mem::replace(&mut bytes, rest))
        })?;
        Ok(())
    }

    /// Declares what the files of the copy need.
    pub(crate) fn declare(&self, manifest: &mut Manifest) {
        if self.written.is_empty() {
            return;
        }
        let has_parts = manifest.files.iter().any(|entry| entry.within.is_some());
        manifest
            .required_features
            .retain(|name| name != COMPRESSED_CHUNKS && (has_parts || name != NODE_FILES));
        manifest.required_features.push(COMPRESSED_CHUNKS.to_owned());
    }
}

fn is_chosen(globs: &GlobList, index: &Index, leaf: u32) -> bool {
    globs.first_match(PathText::new(&index.tree.leaf_path(leaf)).as_bytes()).is_some()
}
