//! A file of a step as it is stored, read in order and checked, for copies.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use super::file_set::{FileInfo, FileSet};
use crate::io::File;
use crate::{Error, Result};

/// A file of one or several ranks. Every block that is read is checked. Footers are not: open the
/// copy to check them.
pub struct StoredFile {
    file: Arc<dyn File>,
    files: Arc<FileSet>,
    parts: Vec<Part>,
}

/// A data file in it.
struct Part {
    number: u32,
    start: u64,
    info: Arc<FileInfo>,
}

impl StoredFile {
    /// Opens the file with this name.
    pub fn of(files: &Arc<FileSet>, name: &str) -> Result<Arc<Self>> {
        let mut parts = Vec::new();
        for (number, record) in (0..).zip(files.records()) {
            if record.stored_name() == name {
                let info = files.info(number)?;
                info.check_own()?;
                parts.push(Part { number, start: record.stored_offset(0), info });
            }
        }
        parts.sort_unstable_by_key(|part| part.start);
        Ok(Arc::new(Self { file: files.open_stored(name)?, files: Arc::clone(files), parts }))
    }

    fn refuse<T>() -> Result<T> {
        Err(Error::internal("a read of a stored file", "a write"))
    }

    /// Returns the whole blocks that a range touches, as a range of the file.
    fn whole_blocks(&self, start: u64, end: u64) -> (u64, u64) {
        let edge = |at: u64, up: bool| {
            let part = self.parts.iter().rev().find(|part| part.start <= at)?;
            let inside = at - part.start;
            if inside >= part.info.data_end {
                return None;
            }
            let block = part.info.bytes_of(part.info.block_of(inside));
            let edge = if up && inside > block.start { block.end } else { block.start };
            Some(part.start + edge)
        };
        (edge(start, false).unwrap_or(start), edge(end, true).unwrap_or(end))
    }

    /// Checks all blocks in bytes that begin at `start`, at an edge of blocks.
    fn check(&self, start: u64, bytes: &[u8]) -> Result<()> {
        let end = start + bytes.len() as u64;
        for part in &self.parts {
            let first = start.max(part.start);
            let last = end.min(part.start.saturating_add(part.info.data_end));
            if first >= last {
                continue;
            }
            let range = first - part.start..last - part.start;
            self.files.ready(part.number, &range)?;
            let ours = bytes.get((first - start) as usize..(last - start) as usize).unwrap_or_default();
            for (block, bytes) in
                (part.info.block_of(range.start)..).zip(ours.chunks(part.info.block_bytes as usize))
            {
                part.info.check(block, bytes).map_err(|bad| bad.at(&part.info.path))?;
            }
        }
        Ok(())
    }
}

impl File for StoredFile {
    fn path(&self) -> &Path {
        self.file.path()
    }

    fn len(&self) -> Result<u64> {
        self.file.len()
    }

    fn set_len(&self, _: u64) -> Result<()> {
        Self::refuse()
    }

    fn sync(&self) -> Result<()> {
        Self::refuse()
    }

    fn read_at(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let wanted = offset.saturating_add(len as u64).min(self.len()?);
        if offset >= wanted {
            return Ok(Vec::new());
        }
        let (start, end) = self.whole_blocks(offset, wanted);
        let len = (end - start) as usize;
        let mut bytes = self.file.read_at(start, len)?;
        if self.check(start, &bytes).is_err() {
            // They may have been damaged on their way.
            bytes = self.file.read_at(start, len)?;
            self.check(start, &bytes)?;
        }
        bytes.truncate((wanted - start) as usize);
        bytes.drain(..((offset - start) as usize).min(bytes.len()));
        Ok(bytes)
    }

    fn cached(&self, offset: u64, len: u64) -> Option<u64> {
        self.file.cached(offset, len)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
