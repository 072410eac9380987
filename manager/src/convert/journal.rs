//! The journal of a conversion: how far its output is durable. It is a file beside the
//! incomplete output.
//!
//! A record says how many windows are finished, and the sums of pieces that have changed since the
//! record before. Records fill whole blocks and are only appended, after the windows that they
//! count are durable. A conversion that begins again draws another generation and writes over the
//! file from its beginning. Reading ends at the first record of another generation, or that is
//! torn.
//!
//! ```text
//! record: magic 8 │ crc32c of the rest 4 │ bytes 4 │ generation 16 │ digest 32 │ owner 32 │ finished 8 │ sums 12 each │ zeros
//! ```

use std::sync::Arc;

use stepwell_core::format::checksum::crc32c;
use stepwell_core::io::{Disk, File, Transfer};
use stepwell_core::sys::Buffer;

use super::WRITE_TIMEOUT;
use super::checksums::PieceSum;
use super::windows::WINDOW_ALIGNMENT;
use crate::error::{Error, Result};

const MAGIC: &[u8; 8] = b"swconv\x01\n";
/// Bytes before the sums.
const HEAD: usize = 104;
/// Bytes of a sum.
const SUM: usize = 12;
/// The longest journal that is read.
const MAX_BYTES: usize = 1 << 30;

/// The content of a journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Recorded {
    pub digest: [u8; 32],
    pub owner: [u8; 32],
    pub generation: u128,
    /// Windows that are durable.
    pub finished: u64,
    pub sums: Vec<PieceSum>,
    /// The end of the last record.
    end: u64,
}

/// An open journal.
pub(super) struct Journal {
    disk: Arc<dyn Disk>,
    file: Arc<dyn File>,
    digest: [u8; 32],
    owner: [u8; 32],
    generation: u128,
    end: u64,
}

/// Reads a journal. `None`: it has no valid record.
pub(super) fn read(file: &dyn File) -> Result<Option<Recorded>> {
    let bytes = file.read_at(0, MAX_BYTES)?;
    let mut found: Option<Recorded> = None;
    while let Some(record) = decode(&bytes, found.as_ref().map_or(0, |found| found.end)) {
        match &mut found {
            None => found = Some(record),
            Some(found) if found.generation == record.generation && found.digest == record.digest => {
                found.sums.extend(record.sums);
                found.finished = record.finished;
                found.end = record.end;
            }
            Some(_) => break,
        }
    }
    Ok(found)
}

/// True if a file without a valid record may be a journal whose first record was never finished.
pub(super) fn is_unwritten(file: &dyn File) -> Result<bool> {
    let start = file.read_at(0, MAGIC.len())?;
    Ok(start.is_empty() || start == MAGIC || start.iter().all(|&byte| byte == 0))
}

fn decode(bytes: &[u8], at: u64) -> Option<Recorded> {
    let bytes = bytes.get(usize::try_from(at).ok()?..)?;
    let number = |from: usize| bytes.get(from..from + 4).map(|four| four.try_into().map(u32::from_le_bytes));
    let (crc, length) = (number(8)?.ok()?, number(12)?.ok()? as usize);
    let record = bytes.get(..length).filter(|record| record.starts_with(MAGIC) && length >= HEAD)?;
    if crc32c(record.get(12..)?) != crc || !(length - HEAD).is_multiple_of(SUM) {
        return None;
    }
    let (sums, _) = record.get(HEAD..)?.as_chunks::<SUM>();
    let sum = |[a, b, c, d, e, f, g, h, i, j, k, l]: &[u8; SUM]| PieceSum {
        file: u32::from_le_bytes([*a, *b, *c, *d]),
        piece: u32::from_le_bytes([*e, *f, *g, *h]),
        crc: u32::from_le_bytes([*i, *j, *k, *l]),
    };
    Some(Recorded {
        generation: u128::from_le_bytes(record.get(16..32)?.try_into().ok()?),
        digest: record.get(32..64)?.try_into().ok()?,
        owner: record.get(64..96)?.try_into().ok()?,
        finished: u64::from_le_bytes(record.get(96..HEAD)?.try_into().ok()?),
        sums: sums.iter().map(sum).collect(),
        end: at + (length as u64).next_multiple_of(WINDOW_ALIGNMENT),
    })
}

fn encode(digest: [u8; 32], owner: [u8; 32], generation: u128, finished: u64, sums: &[PieceSum]) -> Vec<u8> {
    let length = HEAD + sums.len() * SUM;
    let mut rest = (length as u32).to_le_bytes().to_vec();
    rest.extend(generation.to_le_bytes());
    rest.extend(digest);
    rest.extend(owner);
    rest.extend(finished.to_le_bytes());
    for sum in sums {
        rest.extend([sum.file, sum.piece, sum.crc].map(u32::to_le_bytes).as_flattened());
    }
    [MAGIC, &crc32c(&rest).to_le_bytes()[..], &rest].concat()
}

impl Journal {
    /// Begins a journal, in a file that may hold records of another generation.
    pub(super) fn start(
        disk: Arc<dyn Disk>,
        file: Arc<dyn File>,
        digest: [u8; 32],
        owner: [u8; 32],
        generation: u128,
    ) -> Result<Self> {
        let mut this = Self { disk, file, digest, owner, generation, end: 0 };
        this.append(0, &[])?;
        Ok(this)
    }

    /// Goes on after the last record.
    pub(super) fn resume(disk: Arc<dyn Disk>, file: Arc<dyn File>, recorded: &Recorded) -> Self {
        let Recorded { digest, owner, generation, end, .. } = *recorded;
        Self { disk, file, digest, owner, generation, end }
    }

    /// Appends a durable record. The windows that it counts are durable already.
    pub(super) fn append(&mut self, finished: u64, sums: &[PieceSum]) -> Result<()> {
        let bytes = encode(self.digest, self.owner, self.generation, finished, sums);
        let length = bytes.len().next_multiple_of(WINDOW_ALIGNMENT as usize);
        let mut buffer = Buffer::alone(length)?;
        if let Some(start) = buffer.get_mut(..bytes.len()) {
            start.copy_from_slice(&bytes);
        }
        let mut queue = self.disk.queue(1)?;
        queue.submit(Transfer::Write, &self.file, self.end, length, buffer, 0);
        let Some(completion) = queue.complete(WRITE_TIMEOUT) else {
            let waited_for = format!("a write of {}", self.file.path().display());
            return Err(Error::Timeout { waited_for, waited: WRITE_TIMEOUT });
        };
        completion.result?;
        self.file.sync()?;
        self.end += length as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use stepwell_core::io::simulated::SimDisk;

    use super::*;

    fn sums(count: u32) -> Vec<PieceSum> {
        (0..count).map(|n| PieceSum { file: n % 3, piece: n, crc: n * 77 }).collect()
    }

    #[test]
    fn a_journal_ends_before_a_torn_or_foreign_record() {
        let disk: Arc<dyn Disk> = Arc::new(SimDisk::new());
        let dir = disk.create_dir_all(Path::new("/d")).unwrap();
        let file = dir.create_file("journal", 0).unwrap();
        let open = || dir.overwrite_file("journal", 0).unwrap();
        let start =
            |generation| Journal::start(Arc::clone(&disk), open(), [7; 32], [8; 32], generation).unwrap();
        let mut first = start(1);
        // The record with 600 sums fills two blocks.
        for (finished, count) in [(3, 2), (9, 600), (11, 0), (12, 1)] {
            first.append(finished, &sums(count)).unwrap();
        }
        let all = read(&*file).unwrap().unwrap();
        assert_eq!((all.generation, all.finished, all.end), (1, 12, first.end));
        assert_eq!(all.sums, [sums(2), sums(600), sums(1)].concat());
        // The last record is torn.
        file.set_len(all.end - WINDOW_ALIGNMENT + 50).unwrap();
        let torn = read(&*file).unwrap().unwrap();
        assert_eq!((torn.finished, torn.end), (11, all.end - WINDOW_ALIGNMENT));
        let mut resumed = Journal::resume(Arc::clone(&disk), open(), &torn);
        resumed.append(13, &sums(4)).unwrap();
        let found = read(&*file).unwrap().unwrap();
        assert_eq!((found.finished, found.end), (13, all.end));
        assert_eq!(found.sums, [sums(2), sums(600), sums(4)].concat());
        // Another generation writes over the first two records. The block behind them begins the
        // third one.
        start(2).append(1, &sums(5)).unwrap();
        let other = read(&*file).unwrap().unwrap();
        assert_eq!((other.generation, other.finished, &other.sums), (2, 1, &sums(5)));
        assert_eq!(other.end, 2 * WINDOW_ALIGNMENT);
    }

    #[test]
    fn a_record_is_read_as_it_was_written_or_not_at_all() {
        for count in [0, 1, 400] {
            let bytes = encode([7; 32], [8; 32], 1 << 100 | 5, 42, &sums(count));
            let found = decode(&bytes, 0).unwrap();
            assert_eq!((found.digest, found.owner), ([7; 32], [8; 32]));
            assert_eq!((found.generation, found.finished), (1 << 100 | 5, 42));
            assert_eq!(found.sums, sums(count));
            assert_eq!(found.end % WINDOW_ALIGNMENT, 0);
            for at in 0..bytes.len() {
                let mut torn = bytes.clone();
                torn[at] ^= 1;
                assert_eq!(decode(&torn, 0), None, "byte {at}");
                assert_eq!(decode(&bytes[..at], 0), None, "cut at {at}");
            }
        }
    }
}
