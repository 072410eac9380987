//! A part of a file, used as a file of its own. Ranks of a node may write side by side into one
//! file.

use std::path::Path;
use std::sync::Arc;

use super::File;
use crate::{Error, Result};

/// Sections begin at multiples of this, so no page or file system stripe belongs to two ranks.
pub const SECTION_ALIGNMENT: u64 = 1 << 20;

/// `length` bytes of a file from `first`, as a file with its own offsets. Engines add
/// [`File::base`] to the offsets of transfers and do not know the end; callers of a queue must
/// respect it.
pub struct Section {
    file: Arc<dyn File>,
    first: u64,
    length: u64,
}

impl Section {
    /// Those bytes of a file, even if the file is shorter.
    pub fn new(file: Arc<dyn File>, first: u64, length: u64) -> Self {
        Self { file, first, length }
    }

    fn clamp(&self, offset: u64, len: usize) -> usize {
        len.min(usize::try_from(self.length.saturating_sub(offset)).unwrap_or(usize::MAX))
    }
}

impl File for Section {
    fn path(&self) -> &Path {
        self.file.path()
    }

    fn len(&self) -> Result<u64> {
        Ok(self.file.len()?.saturating_sub(self.first).min(self.length))
    }

    fn set_len(&self, len: u64) -> Result<()> {
        if len == self.length {
            return Ok(());
        }
        let expected = format!("{} bytes in this part of {}", self.length, self.path().display());
        Err(Error::internal(expected, len.to_string()))
    }

    fn sync(&self) -> Result<()> {
        self.file.sync()
    }

    fn read_at(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        self.file.read_at(self.first.saturating_add(offset), self.clamp(offset, len))
    }

    fn source(&self) -> u64 {
        self.file.source()
    }

    fn cached(&self, offset: u64, len: u64) -> Option<u64> {
        self.file.cached(self.first.saturating_add(offset), len)
    }

    fn base(&self) -> u64 {
        self.first + self.file.base()
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self.file.as_any()
    }
}
