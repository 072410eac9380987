//! Checksums of the blocks of whole foreign files, which were computed once and are kept beside
//! them. Reads of such a file are checked as those of our own.

use std::any::Any;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::decode;
use super::destination::Started;
use super::file_set::{BadBlock, FileSet, short};
use super::guards::GuardCheck;
use super::options::LoadOptions;
use super::pipeline::Sink;
use super::schedule::{Cell, Schedule};
use super::verify::VerifyProgress;
use crate::format::block;
use crate::format::checksum::crc32c;
use crate::io::{Disk, File};
use crate::sys::Staged;
use crate::{Error, Result};

/// The checksums of a file.
#[derive(Debug, PartialEq, Eq)]
pub struct BlockChecksums {
    block_bytes: u64,
    /// Bytes of the file.
    length: u64,
    /// CRC-32C of each block.
    crcs: Box<[u32]>,
}

impl BlockChecksums {
    /// Fails with what is wrong unless there is a checksum for each block.
    pub fn new(block_bytes: u64, length: u64, crcs: Box<[u32]>) -> std::result::Result<Self, String> {
        block::check_size(block_bytes)?;
        let wanted = block::count(length, block_bytes);
        if wanted != crcs.len() as u64 {
            return Err(format!("{wanted} checksums were expected for {length} bytes, not {}", crcs.len()));
        }
        Ok(Self { block_bytes, length, crcs })
    }

    /// Returns the checksums of the blocks, in order.
    pub fn crcs(&self) -> &[u32] {
        &self.crcs
    }

    /// Returns the size of a block.
    pub(super) fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Compares one block with its checksum.
    pub(super) fn check(&self, block: u64, bytes: &[u8]) -> std::result::Result<(), BadBlock> {
        let found = crc32c(bytes);
        match usize::try_from(block).ok().and_then(|block| self.crcs.get(block)).copied() {
            Some(written) if written == found => Ok(()),
            written => Err(BadBlock { block, found, written: written.unwrap_or(!found) }),
        }
    }

    /// Fails if the file has another length.
    pub(super) fn check_length(&self, file: &dyn File) -> Result<()> {
        let found = file.len()?;
        if found == self.length {
            return Ok(());
        }
        let what = format!(
            "it has {found} bytes, and had {} when its checksums were computed. \
             If it was replaced on purpose, adopt it again with `replace`",
            self.length
        );
        Err(Error::corrupt(file.path(), what))
    }
}

/// A file whose reads are checked. It is read at any place, and not by a queue.
pub struct CheckedFile {
    file: Arc<dyn File>,
    checksums: Arc<BlockChecksums>,
}

impl CheckedFile {
    /// Fails if the file has another length than its checksums.
    pub fn new(file: Arc<dyn File>, checksums: Arc<BlockChecksums>) -> Result<Self> {
        checksums.check_length(&*file)?;
        Ok(Self { file, checksums })
    }

    fn refuse<T>() -> Result<T> {
        Err(Error::internal("a read of a checked file", "a write"))
    }

    /// Reads whole blocks and checks them.
    fn blocks(&self, bytes: &Range<u64>) -> Result<Vec<u8>> {
        let read = self.file.read_at(bytes.start, (bytes.end - bytes.start) as usize)?;
        let found = bytes.start + read.len() as u64;
        if found < bytes.end {
            return Err(short(self.file.path(), found, bytes.end));
        }
        let size = self.checksums.block_bytes;
        for (block, bytes) in (bytes.start / size..).zip(read.chunks(size as usize)) {
            self.checksums.check(block, bytes).map_err(|bad| bad.at(self.file.path()))?;
        }
        Ok(read)
    }
}

impl File for CheckedFile {
    fn path(&self) -> &Path {
        self.file.path()
    }

    fn len(&self) -> Result<u64> {
        Ok(self.checksums.length)
    }

    fn set_len(&self, _: u64) -> Result<()> {
        Self::refuse()
    }

    fn sync(&self) -> Result<()> {
        Self::refuse()
    }

    fn read_at(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let (length, size) = (self.checksums.length, self.checksums.block_bytes);
        let end = offset.saturating_add(len as u64).min(length);
        if offset >= end {
            return Ok(Vec::new());
        }
        let start = offset / size * size;
        let mut read = self.blocks(&(start..end.div_ceil(size).saturating_mul(size).min(length)))?;
        read.truncate((end - start) as usize);
        read.drain(..(offset - start) as usize);
        Ok(read)
    }

    fn cached(&self, offset: u64, len: u64) -> Option<u64> {
        self.file.cached(offset, len)
    }

    fn source(&self) -> u64 {
        self.file.source()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Reads files whole and returns the checksums of their blocks. Fails if a guarded range is
/// damaged. None of the files is a compressed stream. `progress` is called on this thread and
/// cancels by returning `false`.
pub fn checksums(
    disk: &dyn Disk,
    files: &FileSet,
    block_bytes: u64,
    options: &LoadOptions,
    progress: &mut dyn FnMut(VerifyProgress) -> bool,
) -> Result<Vec<BlockChecksums>> {
    let invalid = |what: String| Error::internal("a valid size of blocks, and whole files", what);
    block::check_size(block_bytes).map_err(invalid)?;
    let mut schedule = Schedule::new(options.limits);
    let mut crcs = Vec::with_capacity(files.len());
    for file in 0..files.len() as u32 {
        let length = files.info(file)?.data_end;
        schedule.push(file, 0..length, block_bytes, false);
        let count = block::count(length, block_bytes);
        crcs.push((0..count).map(|_| AtomicU32::new(0)).collect());
    }
    let total = schedule.bytes();
    let cells = schedule.cells.clone();
    let guards = GuardCheck::new(files.guards());
    let sums = Arc::new(Sums { block_bytes, cells, crcs, guards, failed: Mutex::default() });
    decode::run(disk, files, schedule, &sums, options, &mut |done| progress(VerifyProgress { done, total }))?;
    if let Some(error) = sums.failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
        return Err(error);
    }
    if let Some((range, crc32)) = sums.guards.damaged().first() {
        return Err(Error::corrupt(files.path(range.file), range.damage(*crc32)));
    }
    let of_file = |(file, crcs): (u32, &Vec<AtomicU32>)| {
        let length = files.info(file)?.data_end;
        let crcs = crcs.iter().map(|crc| crc.load(Ordering::Acquire)).collect();
        BlockChecksums::new(block_bytes, length, crcs).map_err(invalid)
    };
    (0..).zip(&sums.crcs).map(of_file).collect()
}

/// Keeps the checksums of the blocks that stream by.
struct Sums {
    block_bytes: u64,
    cells: Vec<Cell>,
    /// By file and block.
    crcs: Vec<Vec<AtomicU32>>,
    guards: GuardCheck,
    failed: Mutex<Option<Error>>,
}

impl Sink for Sums {
    fn cell(&self, number: usize, bytes: &Staged, _: &mut Started) -> Result<()> {
        let cell = self.cells.get(number);
        let found = cell.and_then(|cell| Some((cell, self.crcs.get(cell.file as usize)?)));
        let Some((cell, crcs)) = found else {
            return Err(Error::internal("a cell of the schedule", format!("cell {number}")));
        };
        self.guards.add(cell.file, cell.bytes.start, bytes);
        let first = (cell.bytes.start / self.block_bytes) as usize;
        let crcs = crcs.get(first..).unwrap_or_default();
        for (crc, found) in crcs.iter().zip(block::crcs(bytes, self.block_bytes)) {
            crc.store(found, Ordering::Release);
        }
        Ok(())
    }

    fn failed(&self, _: Range<usize>, error: Error) -> Result<()> {
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        Err(Error::Cancelled("by a failed read".into()))
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::io::MemoryFile;

    const BLOCK: u64 = 4096;

    /// A file of that length in memory, and the checksums of another with `change` at its place.
    fn checked(length: usize, change: Option<usize>) -> Result<CheckedFile> {
        let bytes: Vec<u8> = (0..length).map(|at| (at * 31 % 251) as u8).collect();
        let mut other = bytes.clone();
        if let Some(byte) = change.and_then(|at| other.get_mut(at)) {
            *byte ^= 1;
        }
        let crcs = block::crcs(&other, BLOCK).collect();
        let checksums = BlockChecksums::new(BLOCK, length as u64, crcs).unwrap();
        CheckedFile::new(Arc::new(MemoryFile::new(PathBuf::from("file"), bytes)), Arc::new(checksums))
    }

    #[test]
    fn any_read_of_a_checked_file_is_what_the_file_has() {
        for length in [0, 1, 4095, 4096, 4097, 20_000] {
            let file = checked(length, None).unwrap();
            assert_eq!(file.len().unwrap(), length as u64);
            for offset in [0_usize, 1, 4095, 4096, 8000, 19_999, 20_000, 1 << 40] {
                for len in [0, 1, 4096, 5000, 1 << 30] {
                    let found = file.read_at(offset as u64, len).unwrap();
                    let end = offset.saturating_add(len).min(length);
                    let wanted: Vec<u8> = (offset..end).map(|at| (at * 31 % 251) as u8).collect();
                    assert_eq!(found, wanted);
                }
            }
        }
    }

    #[test]
    fn a_read_fails_if_one_of_its_blocks_was_changed() {
        let file = checked(20_000, Some(9000)).unwrap();
        assert!(file.read_at(0, 8192).is_ok());
        assert!(file.read_at(12_288, 100).is_ok());
        for (offset, len) in [(0, 20_000), (8192, 1), (12_287, 2)] {
            let error = file.read_at(offset, len).unwrap_err();
            assert!(matches!(error, Error::Corrupt { block: Some(2), .. }), "{error}");
        }
    }

    #[test]
    fn a_file_of_another_length_is_refused() {
        let checksums = Arc::new(BlockChecksums::new(BLOCK, 1, [0].into()).unwrap());
        let file = Arc::new(MemoryFile::new(PathBuf::from("file"), vec![1, 2]));
        let error = CheckedFile::new(file, checksums).err().unwrap();
        assert!(error.to_string().contains("it has 2 bytes"), "{error}");
        assert!(BlockChecksums::new(BLOCK, 4097, [0].into()).is_err());
        assert!(BlockChecksums::new(1000, 1, [0].into()).is_err());
    }
}
