//! Samples of leaves that should be equal on all ranks. The leader compares them before it commits:
//! if ranks had drifted apart, the step would mix their states.

use stepwell_core::dtype::Dtype;
use stepwell_core::format::checksum::crc32c;
use stepwell_core::format::object;
use stepwell_core::provider::StateProvider;
use stepwell_core::region::{Region, volume};
use stepwell_core::value::Value;

use super::Fnv;
use crate::error::Result;

/// The samples of a large region: so many pieces, evenly spread, including its end.
const PIECES: u64 = 16;
const PIECE_BYTES: u64 = 4096;

/// A rank's claim on the value of a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The rank.
    pub rank: u32,
    /// The hash of the leaf's path.
    pub path: u64,
    /// The hash of the part of the leaf. For the whole leaf it is the path's.
    pub part: u64,
    /// The hash of its kind: an object, or a tensor's dtype and shape.
    pub kind: u32,
    /// The checksum of its value, or of samples of it. 0: not sampled.
    pub value: u32,
}

impl Claim {
    /// Bytes of one claim in a vote.
    pub(crate) const BYTES: usize = 28;

    pub(super) fn of_object(rank: u32, path: u64, value: &Value) -> Result<Self> {
        let bytes = object::encode(value)?;
        Ok(Self { rank, path, part: path, kind: 1, value: crc32c(&bytes).max(1) })
    }

    pub(super) fn of_tensor(
        rank: u32,
        path: u64,
        part: u64,
        dtype: Dtype,
        shape: &[u64],
        region: &Region,
        provider: &dyn StateProvider,
    ) -> Result<Self> {
        let mut hash = Fnv::new();
        hash.add(&[2, dtype.code()]);
        for extent in shape {
            hash.add(&extent.to_le_bytes());
        }
        let kind = hash.half() as u32;
        let value = sampled(region, dtype.size() as u64, provider)?.map_or(0, |sum| sum.max(1));
        Ok(Self { rank, path, part, kind, value })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.rank.to_le_bytes());
        out.extend_from_slice(&self.path.to_le_bytes());
        out.extend_from_slice(&self.part.to_le_bytes());
        out.extend_from_slice(&self.kind.to_le_bytes());
        out.extend_from_slice(&self.value.to_le_bytes());
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (rank, rest) = bytes.split_first_chunk::<4>()?;
        let (path, rest) = rest.split_first_chunk::<8>()?;
        let (part, rest) = rest.split_first_chunk::<8>()?;
        let (kind, rest) = rest.split_first_chunk::<4>()?;
        let (value, _) = rest.split_first_chunk::<4>()?;
        Some(Self {
            rank: u32::from_le_bytes(*rank),
            path: u64::from_le_bytes(*path),
            part: u64::from_le_bytes(*part),
            kind: u32::from_le_bytes(*kind),
            value: u32::from_le_bytes(*value),
        })
    }
}

/// Returns a checksum of a region, or of pieces of it. `None` if its provider cannot be read early.
fn sampled(region: &Region, itemsize: u64, provider: &dyn StateProvider) -> Result<Option<u32>> {
    let bytes = volume(&region.extent).unwrap_or(0).saturating_mul(itemsize);
    let mut all = Vec::new();
    let mut sample = |from: u64, length: u64| -> Result<bool> {
        let at = all.len();
        all.resize(at + length as usize, 0);
        Ok(provider.peek(region, from, all.get_mut(at..).unwrap_or_default())?)
    };
    if bytes <= PIECES * PIECE_BYTES {
        if bytes > 0 && !sample(0, bytes)? {
            return Ok(None);
        }
    } else {
        let piece = PIECE_BYTES / itemsize * itemsize;
        for number in 0..PIECES {
            // The last one ends where the region does.
            let from = (u128::from(bytes - piece) * u128::from(number) / u128::from(PIECES - 1)) as u64;
            if !sample(from / itemsize * itemsize, piece)? {
                return Ok(None);
            }
        }
    }
    Ok(Some(crc32c(&all)))
}
