//! Bytes in memory as a file: values of a foreign checkpoint that its index holds.

use std::any::Any;
use std::path::{Path, PathBuf};

use super::File;
use crate::{Error, Result};

/// See the module documentation. It can be read at any place, and not by a queue.
#[derive(Debug)]
pub struct MemoryFile {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl MemoryFile {
    /// Wraps bytes. The path is for messages.
    pub fn new(path: PathBuf, bytes: Vec<u8>) -> Self {
        Self { path, bytes }
    }

    fn refuse<T>() -> Result<T> {
        Err(Error::internal("a read of bytes in memory", "a write"))
    }
}

impl File for MemoryFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn len(&self) -> Result<u64> {
        Ok(self.bytes.len() as u64)
    }

    fn set_len(&self, _: u64) -> Result<()> {
        Self::refuse()
    }

    fn sync(&self) -> Result<()> {
        Self::refuse()
    }

    fn read_at(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let rest = usize::try_from(offset).ok().and_then(|offset| self.bytes.get(offset..));
        let rest = rest.unwrap_or_default();
        Ok(rest.get(..len).unwrap_or(rest).to_vec())
    }

    fn cached(&self, _: u64, _: u64) -> Option<u64> {
        None
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
