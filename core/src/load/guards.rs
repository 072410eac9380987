//! Checksums of ranges of foreign files. A zip archive has a CRC-32 of each of its members.
//!
//! A verification reads a file in pieces, in any order and on several threads. [`GuardCheck`] keeps
//! the checksum of each piece, and combines them at the end.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// A range of a foreign file, and the CRC-32 of its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuardedRange {
    /// The file.
    pub file: u32,
    /// Its first byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// CRC-32 of its bytes (ISO-HDLC, as zip archives have it).
    pub crc32: u32,
}

impl GuardedRange {
    /// Returns the offset behind its last byte.
    fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }

    /// Describes the damage if its bytes have another checksum.
    pub(super) fn damage(&self, crc32: u32) -> String {
        format!(
            "the CRC-32 of bytes {} to {} is {crc32:08x}, but they were written with {:08x}",
            self.offset,
            self.end(),
            self.crc32
        )
    }
}

/// The guarded ranges of a set of files.
#[derive(Debug, Default)]
pub(super) struct Guards {
    /// By file, then by offset. Ranges of a file do not overlap.
    ranges: HashMap<u32, Vec<GuardedRange>>,
}

impl Guards {
    pub(super) fn new(ranges: &[GuardedRange]) -> Self {
        let mut by_file: HashMap<u32, Vec<GuardedRange>> = HashMap::new();
        for range in ranges.iter().filter(|range| range.length > 0) {
            by_file.entry(range.file).or_default().push(*range);
        }
        for ranges in by_file.values_mut() {
            ranges.sort_unstable_by_key(|range| range.offset);
        }
        Self { ranges: by_file }
    }

    fn of(&self, file: u32) -> &[GuardedRange] {
        self.ranges.get(&file).map(Vec::as_slice).unwrap_or_default()
    }

    /// Returns the guarded bytes of a file.
    pub(super) fn guarded_bytes(&self, file: u32) -> u64 {
        self.of(file).iter().map(|range| range.length).sum()
    }

    /// Returns the ranges with bytes in that range of a file.
    fn overlapping(&self, file: u32, bytes: &Range<u64>) -> impl Iterator<Item = &GuardedRange> {
        let ranges = self.of(file);
        let first = ranges.partition_point(|range| range.end() <= bytes.start);
        let end = bytes.end;
        ranges.get(first..).unwrap_or_default().iter().take_while(move |range| range.offset < end)
    }
}

/// The checksum of a part of a guarded range.
#[derive(Clone, Copy)]
struct CheckedPart {
    start: u64,
    length: u64,
    crc32: u32,
}

/// The check of guarded ranges while their bytes stream by.
pub(super) struct GuardCheck {
    guards: Arc<Guards>,
    /// Parts by the file and offset of their range.
    parts: Mutex<HashMap<(u32, u64), Vec<CheckedPart>>>,
}

impl GuardCheck {
    pub(super) fn new(guards: Arc<Guards>) -> Self {
        Self { guards, parts: Mutex::default() }
    }

    /// Takes bytes of a file. Every byte is given once.
    pub(super) fn add(&self, file: u32, start: u64, bytes: &[u8]) {
        let given = start..start.saturating_add(bytes.len() as u64);
        for range in self.guards.overlapping(file, &given) {
            let (from, to) = (range.offset.max(given.start), range.end().min(given.end));
            let part = bytes.get((from - start) as usize..(to - start) as usize).unwrap_or_default();
            let crc32 = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32IsoHdlc, part) as u32;
            let part = CheckedPart { start: from, length: part.len() as u64, crc32 };
            let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
            parts.entry((file, range.offset)).or_default().push(part);
        }
    }

    /// Returns the ranges whose bytes have another checksum, and the checksum that was found. A
    /// range that was not read whole is left out: its read has failed.
    pub(super) fn damaged(&self) -> Vec<(GuardedRange, u32)> {
        let parts = std::mem::take(&mut *self.parts.lock().unwrap_or_else(PoisonError::into_inner));
        let mut found = Vec::new();
        for ((file, offset), mut parts) in parts {
            let ranges = self.guards.of(file);
            let range = ranges.binary_search_by_key(&offset, |range| range.offset);
            let Some(range) = range.ok().and_then(|at| ranges.get(at)) else { continue };
            parts.sort_unstable_by_key(|part| part.start);
            let mut at = range.offset;
            let mut crc32 = 0;
            for part in parts.iter().take_while(|part| part.start <= range.end()) {
                if part.start != at {
                    break;
                }
                at += part.length;
                crc32 = both(crc32, part);
            }
            if at == range.end() && crc32 != range.crc32 {
                found.push((*range, crc32));
            }
        }
        found
    }
}

/// The CRC-32 of bytes and a part behind them.
fn both(first: u32, part: &CheckedPart) -> u32 {
    let algorithm = crc_fast::CrcAlgorithm::Crc32IsoHdlc;
    crc_fast::checksum_combine(algorithm, u64::from(first), u64::from(part.crc32), part.length) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: &[u8] = b"123456789";

    /// The damage of a file that is read in pieces, each with its first byte and the byte behind.
    fn damaged(crc32: u32, pieces: &[(usize, usize)]) -> Vec<(GuardedRange, u32)> {
        let range = GuardedRange { file: 3, offset: 100, length: 9, crc32 };
        let guards = Guards::new(&[range, GuardedRange { offset: 0, length: 50, ..range }]);
        assert_eq!(guards.guarded_bytes(3), 59);
        let check = GuardCheck::new(Arc::new(guards));
        let file = [&[7; 100], WORDS, &[7; 40]].concat();
        for &(start, end) in pieces {
            check.add(3, start as u64, &file[start..end]);
        }
        check.damaged()
    }

    #[test]
    fn pieces_in_any_order_have_the_checksum_of_the_whole() {
        // The check value of CRC-32/ISO-HDLC.
        for pieces in [&[(90, 149)][..], &[(104, 120), (60, 102), (102, 104)], &[(109, 149), (51, 109)]] {
            assert_eq!(damaged(0xcbf4_3926, pieces), []);
            assert_eq!(damaged(1, pieces)[0].1, 0xcbf4_3926);
        }
    }

    #[test]
    fn a_range_that_was_not_read_whole_is_left_out() {
        assert_eq!(damaged(1, &[(90, 108)]), []);
        assert_eq!(damaged(1, &[(101, 149)]), []);
        assert_eq!(damaged(1, &[(90, 102), (103, 149)]), []);
    }
}
