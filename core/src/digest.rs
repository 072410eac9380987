//! Digests of tensors, for traces of training runs. They do not depend on how a tensor is cut.
//!
//! A digest is a sum modulo 2^64: each 32-bit little-endian word of the tensor's row-major bytes,
//! times the odd key of the word's position in the whole tensor. So the digests of disjoint regions
//! add up to the digest of the whole. A single changed word always changes the digest. Random
//! changes cancel with a probability of at most 2^-32. It finds accidents; it is no security.

use std::time::Duration;

use crate::deadline::deadline_after;
use crate::provider::{Fill, StateProvider};
use crate::region::{Region, row_major_strides};
use crate::staging::{Filled, StagingPool};
use crate::{Error, Result};

/// Words that share one multiplier. Their keys stay in the nearest cache.
const PIECE_WORDS: usize = 1024;
const WORD_BYTES: usize = 4;
const PIECE_BYTES: u64 = (PIECE_WORDS * WORD_BYTES) as u64;
/// Bytes that are copied from host memory at a time. Longer copies would bypass the cache. A
/// multiple of the size of every element.
const HOST_BYTES: usize = 4080;
/// The same for rows with gaps: several rows, so that all elements of a cache line are used.
const HOST_BYTES_OF_ROWS: usize = 64 * HOST_BYTES;
/// How often a wait for a staging slot looks again.
const SLOT_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// A well-mixed number (the finaliser of splitmix64, Steele et al. 2014).
const fn mixed(number: u64) -> u64 {
    let mut n = number.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(0x6A09_E667_F3BC_C909);
    n = (n ^ (n >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    n = (n ^ (n >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    n ^ (n >> 31)
}

/// The keys of the words of a piece.
static KEYS: [u64; PIECE_WORDS] = {
    let mut keys = [0; PIECE_WORDS];
    let mut number = 0;
    while number < PIECE_WORDS {
        keys[number] = mixed(number as u64) | 1;
        number += 1;
    }
    keys
};

/// Returns the digest of bytes that start at byte `at` of a whole. The digests of its parts add up
/// (modulo 2^64) to that of the whole.
pub fn digest_at(at: u64, bytes: &[u8]) -> u64 {
    let (mut at, mut rest, mut sum) = (at, bytes, 0_u64);
    while !rest.is_empty() {
        let from = at % PIECE_BYTES;
        let (part, after) = rest.split_at(rest.len().min((PIECE_BYTES - from) as usize));
        // Other numbers than those of the keys.
        let multiplier = mixed(!(at / PIECE_BYTES)) | 1;
        sum = sum.wrapping_add(in_piece(from as usize, part).wrapping_mul(multiplier));
        at = at.wrapping_add(part.len() as u64);
        rest = after;
    }
    sum
}

/// The sum of the words of a piece, each times its key. `bytes` start at byte `from` of the piece.
fn in_piece(from: usize, bytes: &[u8]) -> u64 {
    let within = from % WORD_BYTES;
    let head = if within == 0 { 0 } else { (WORD_BYTES - within).min(bytes.len()) };
    let (head, aligned) = bytes.split_at(head);
    let (words, tail) = aligned.as_chunks::<WORD_BYTES>();
    let keys = KEYS.get(from / WORD_BYTES..).unwrap_or_default();
    let (first, keys) = if head.is_empty() {
        (0, keys)
    } else {
        keys.split_first().map_or((0, keys), |(&first, keys)| (first, keys))
    };
    let sum = word(within, head).wrapping_mul(first);
    let products =
        words.iter().zip(keys).map(|(word, &key)| u64::from(u32::from_le_bytes(*word)).wrapping_mul(key));
    let sum = products.fold(sum, u64::wrapping_add);
    let last = keys.get(words.len()).copied().unwrap_or(0);
    sum.wrapping_add(word(0, tail).wrapping_mul(last))
}

/// The word that has these bytes from byte `within` on, and zeros elsewhere.
fn word(within: usize, bytes: &[u8]) -> u64 {
    let bytes = (within..).zip(bytes);
    bytes.map(|(place, &byte)| u64::from(byte) << (8 * place)).sum()
}

/// The rows of a region: its longest runs that are contiguous in the whole tensor.
struct RegionRows {
    /// Bytes of a row.
    row: u64,
    /// The place of the first row in the tensor, in bytes.
    first: u64,
    /// Extent and stride in bytes of the dimensions that number the rows.
    outer: Vec<(u64, u64)>,
}

impl RegionRows {
    fn new(shape: &[u64], region: &Region, itemsize: u64) -> Self {
        let strides = row_major_strides(shape);
        let mut inner = region.ndim();
        while inner > 0 && region.extent[inner - 1] == shape[inner - 1] {
            inner -= 1;
        }
        // The dimension before the whole ones is contiguous too.
        let inner = inner.saturating_sub(1);
        let row = region.extent[inner..].iter().product::<u64>() * itemsize;
        let first =
            region.offset.iter().zip(&strides).map(|(at, stride)| at * stride).sum::<u64>() * itemsize;
        let outer = region.extent[..inner].iter().zip(&strides);
        Self { row, first, outer: outer.map(|(&extent, stride)| (extent, stride * itemsize)).collect() }
    }

    /// The place of a row in the tensor.
    fn place(&self, number: u64) -> u64 {
        let (mut left, mut place) = (number, self.first);
        for &(extent, stride) in self.outer.iter().rev() {
            place += left % extent * stride;
            left /= extent;
        }
        place
    }

    /// The digest of bytes of the region that start at its byte `from`.
    fn digest(&self, from: u64, bytes: &[u8]) -> u64 {
        let (mut from, mut rest, mut sum) = (from, bytes, 0_u64);
        while !rest.is_empty() {
            let within = from % self.row;
            let (part, after) = rest.split_at(rest.len().min((self.row - within) as usize));
            sum = sum.wrapping_add(digest_at(self.place(from / self.row) + within, part));
            from += part.len() as u64;
            rest = after;
        }
        sum
    }
}

/// A part of a region of a tensor whose digest is computed.
pub struct DigestPart<'a> {
    /// The source of the tensor's bytes.
    pub provider: &'a dyn StateProvider,
    /// The tensor's shape.
    pub shape: &'a [u64],
    /// The region.
    pub region: &'a Region,
    /// Bytes of an element.
    pub itemsize: u64,
    /// The first byte of the part, in the row-major bytes of the region.
    pub from: u64,
    /// Bytes of the part; whole elements.
    pub len: u64,
}

impl DigestPart<'_> {
    /// Returns the digest. Host memory is read directly. Bytes of a device come through slots of
    /// the pool, as in a save. [`Error::Timeout`] without progress for `stall`.
    pub fn digest(&self, pool: &StagingPool, stall: Duration) -> Result<u64> {
        if !self.region.fits(self.shape) || self.itemsize == 0 {
            return Err(Error::internal("a region of the tensor", format!("{:?}", self.region)));
        }
        let rows = RegionRows::new(self.shape, self.region, self.itemsize);
        let (mut from, end, mut sum) = (self.from, self.from + self.len, 0_u64);
        let window = if self.provider.has_gaps_in_rows() { HOST_BYTES_OF_ROWS } else { HOST_BYTES };
        let mut host = vec![0; (self.len as usize).min(window)];
        while from < end {
            let Some(bytes) = host.get_mut(..(end - from).min(window as u64) as usize) else { break };
            if !self.provider.peek(self.region, from, bytes)? {
                return Ok(sum.wrapping_add(self.staged(&rows, from, pool, stall)?));
            }
            sum = sum.wrapping_add(rows.digest(from, bytes));
            from += bytes.len() as u64;
        }
        Ok(sum)
    }

    /// The digest of the bytes from `from` on, through slots.
    fn staged(&self, rows: &RegionRows, from: u64, pool: &StagingPool, stall: Duration) -> Result<u64> {
        let (mut from, end, mut sum) = (from, self.from + self.len, 0_u64);
        while from < end {
            let mut slot = pool.acquire(stall, SLOT_POLL_INTERVAL, || None)?.0.begin();
            let len = (end - from).min(slot.len() as u64 / self.itemsize * self.itemsize);
            self.provider.capture(&[Fill { local: self.region, from, len, at: 0 }], &mut slot)?;
            let slot = match slot.finish() {
                Filled::Full(slot) => slot,
                Filled::Pending(slot) => slot.wait(deadline_after(stall))?,
            };
            sum = sum.wrapping_add(rows.digest(from, slot.bytes().get(..len as usize).unwrap_or_default()));
            from += len;
        }
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::provider::HostProvider;
    use crate::sys::HostSource;

    const STALL: Duration = Duration::from_secs(10);

    fn noise(len: usize) -> Vec<u8> {
        (0..len as u64).map(|n| mixed(n) as u8).collect()
    }

    /// The definition, word by word.
    fn slow(bytes: &[u8]) -> u64 {
        let words = bytes.chunks(4).zip(0_u64..).map(|(bytes, number)| {
            let key = KEYS[(number % 1024) as usize].wrapping_mul(mixed(!(number / 1024)) | 1);
            word(0, bytes).wrapping_mul(key)
        });
        words.fold(0, u64::wrapping_add)
    }

    #[test]
    fn the_digest_is_the_sum_of_words_times_keys() {
        for len in [0, 1, 3, 4, 5, 4095, 4096, 4097, 20_003] {
            let bytes = noise(len);
            assert_eq!(digest_at(0, &bytes), slow(&bytes), "{len}");
        }
    }

    #[test]
    fn every_flipped_bit_and_swapped_word_changes_it() {
        let mut bytes = noise(12_000);
        let whole = digest_at(0, &bytes);
        for bit in (0..12_000 * 8).step_by(7) {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(digest_at(0, &bytes), whole, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        for (one, other) in [(0, 4), (0, 4096), (8, 8192 + 8)] {
            let mut swapped = bytes.clone();
            (0..4).for_each(|at| swapped.swap(one + at, other + at));
            assert_ne!(digest_at(0, &swapped), whole);
        }
        // Two sign bits of float64.
        let mut negated = bytes;
        negated[7] ^= 0x80;
        negated[15] ^= 0x80;
        assert_ne!(digest_at(0, &negated), whole);
    }

    proptest! {
        #[test]
        fn regions_add_up_to_the_whole(
            shape in prop::collection::vec(1_u64..9, 0..4),
            long in 1_u64..1500,
            itemsize in prop_oneof![Just(1_usize), Just(2), Just(4), Just(8), Just(16)],
            axis in 0_usize..4,
            cut in 0_u64..=100,
            split in 0_u64..=100,
        ) {
            let mut shape = shape;
            shape.push(long);
            let axis = axis % shape.len();
            let strides: Vec<i64> =
                row_major_strides(&shape).iter().map(|&n| n as i64 * itemsize as i64).collect();
            let bytes = noise(shape.iter().product::<u64>() as usize * itemsize);
            let source = HostSource::owned(bytes.clone(), 0, itemsize, &shape, &strides).unwrap();
            let provider = HostProvider::new(source);
            let pool = StagingPool::new(1, 4096).unwrap();
            let here = cut * shape[axis] / 100;
            let mut sum = 0_u64;
            for (offset, extent) in [(0, here), (here, shape[axis] - here)] {
                let mut region = Region::whole(&shape);
                region.offset[axis] = offset;
                region.extent[axis] = extent;
                let all = region.volume().unwrap();
                let half = split * all / 100 * itemsize as u64;
                let part = |from, len| DigestPart {
                    provider: &provider, shape: &shape, region: &region, itemsize: itemsize as u64, from, len,
                };
                for part in [part(0, half), part(half, all * itemsize as u64 - half)] {
                    sum = sum.wrapping_add(part.digest(&pool, STALL).unwrap());
                }
            }
            prop_assert_eq!(sum, digest_at(0, &bytes));
        }
    }

    /// A provider that only captures, as that of a device.
    struct Captured(HostProvider);

    impl StateProvider for Captured {
        fn capture(
            &self,
            fills: &[Fill<'_>],
            slot: &mut crate::staging::Slot<crate::staging::Filling>,
        ) -> Result<()> {
            self.0.capture(fills, slot)
        }
    }

    #[test]
    fn bytes_that_come_through_slots_have_the_same_digest() {
        let bytes = noise(3 * 4096 + 40);
        let shape = [bytes.len() as u64 / 8, 2];
        let source = HostSource::owned(Arc::new(bytes.clone()), 0, 4, &shape, &[8, 4]).unwrap();
        let provider = Captured(HostProvider::new(source));
        let pool = StagingPool::new(1, 4096).unwrap();
        let region = Region::whole(&shape);
        let len = bytes.len() as u64;
        let part =
            DigestPart { provider: &provider, shape: &shape, region: &region, itemsize: 4, from: 0, len };
        assert_eq!(part.digest(&pool, STALL).unwrap(), digest_at(0, &bytes));
    }
}
