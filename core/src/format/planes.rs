//! Codec 1 of chunks: byte planes, each compressed by zstd where that saves space.
//!
//! Numbers of a tensor have similar exponents and random mantissas. So byte `b` of all numbers of a
//! chunk is one *plane*: planes of exponents compress well, planes of mantissas hardly at all.
//!
//! ```text
//! u32 for each plane: its stored bytes; the highest bit is set if it is raw
//! the planes, back to back: the bytes themselves, or one frame of zstd
//! ```
//!
//! Blocks have checksums of the stored bytes, which a reader compares first. Even so, a decoder
//! trusts nothing: it writes exactly the bytes that the region of a chunk has, and needs memory for
//! these and for a context of zstd, whatever a frame says.

use zstd_safe::{CCtx, CParameter, DCtx};

use crate::dtype::{Dtype, DtypeKind};
use crate::limits::MAX_PLANES_BYTES;

/// The level of zstd for floating-point numbers (decision 029). Exponents repeat one by one, not in
/// sequences. So a tiny table of matches makes zstd faster, and its output smaller.
const FLOAT_LEVEL: (i32, CParameter, CParameter) = (1, CParameter::HashLog(6), CParameter::MinMatch(7));
/// The level of zstd for other values.
const OTHER_LEVEL: i32 = 3;
/// The bit of a plane that is raw.
const RAW: u32 = 1 << 31;
/// The largest number in bytes: there is a plane for each of them.
const MAX_PLANES: usize = 8;
/// A plane or a chunk is compressed if that saves at least this part of it. Less is not worth the
/// time of a decoder.
const LEAST_SAVING: usize = 64;

/// The number of planes of a dtype: the bytes of a number. A complex number is two.
pub fn count(dtype: Dtype) -> usize {
    if dtype.kind() == DtypeKind::Complex { dtype.size() / 2 } else { dtype.size() }
}

/// The most bytes that so many stored ones can become.
pub fn most_decoded(stored: u64) -> u64 {
    crate::compression::Compression::Zstd.most_decoded(stored).min(MAX_PLANES_BYTES)
}

/// Encodes chunks.
pub struct PlanesEncoder {
    floats: CCtx<'static>,
    others: CCtx<'static>,
    plane: Vec<u8>,
    frame: Vec<u8>,
}

impl std::fmt::Debug for PlanesEncoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlanesEncoder").finish_non_exhaustive()
    }
}

impl PlanesEncoder {
    /// Fails without memory.
    pub fn new() -> Result<Self, &'static str> {
        let context = |parameters: &[CParameter]| {
            let mut context = CCtx::try_create().ok_or("no memory for an encoder of zstd")?;
            // Blocks have a checksum already.
            for &parameter in [CParameter::ChecksumFlag(false)].iter().chain(parameters) {
                context.set_parameter(parameter).map_err(zstd_safe::get_error_name)?;
            }
            Ok::<_, &'static str>(context)
        };
        let (level, hash_log, min_match) = FLOAT_LEVEL;
        Ok(Self {
            floats: context(&[CParameter::CompressionLevel(level), hash_log, min_match])?,
            others: context(&[CParameter::CompressionLevel(OTHER_LEVEL)])?,
            plane: Vec::new(),
            frame: Vec::new(),
        })
    }

    /// Encodes elements of a dtype. Returns `None` if that saves too little: the chunk stays raw
    /// then. Equal elements have equal encodings in one version of zstd.
    pub fn encode(&mut self, bytes: &[u8], dtype: Dtype) -> Result<Option<Vec<u8>>, &'static str> {
        let planes = count(dtype);
        let is_whole = (1..=MAX_PLANES).contains(&planes) && bytes.len().is_multiple_of(planes);
        if bytes.is_empty() || bytes.len() as u64 > MAX_PLANES_BYTES || !is_whole {
            return Ok(None);
        }
        let is_float = matches!(dtype.kind(), DtypeKind::Float | DtypeKind::Complex);
        let context = if is_float { &mut self.floats } else { &mut self.others };
        let numbers = bytes.len() / planes;
        let mut stored = vec![0; 4 * planes];
        for number in 0..planes {
            let plane = if planes == 1 {
                bytes
            } else {
                self.plane.clear();
                match planes {
                    2 => take::<2>(bytes, number, &mut self.plane),
                    4 => take::<4>(bytes, number, &mut self.plane),
                    _ => self.plane.extend(bytes.iter().skip(number).step_by(planes)),
                }
                &self.plane
            };
            self.frame.resize(zstd_safe::compress_bound(numbers), 0);
            let written = context.compress2(self.frame.as_mut_slice(), plane);
            let frame = written.map(|written| self.frame.get(..written).unwrap_or_default());
            let frame = frame.map_err(zstd_safe::get_error_name)?;
            let is_raw = !saves(frame.len(), numbers);
            let chosen = if is_raw { plane } else { frame };
            let length = chosen.len() as u32 | if is_raw { RAW } else { 0 };
            if let Some(entry) = stored.get_mut(4 * number..4 * number + 4) {
                entry.copy_from_slice(&length.to_le_bytes());
            }
            stored.extend_from_slice(chosen);
        }
        Ok(saves(stored.len(), bytes.len()).then_some(stored))
    }
}

/// Appends a plane of numbers of `N` bytes.
fn take<const N: usize>(bytes: &[u8], number: usize, plane: &mut Vec<u8>) {
    let numbers = bytes.as_chunks::<N>().0;
    plane.extend(numbers.iter().map(|bytes| bytes.get(number).copied().unwrap_or_default()));
}

fn saves(stored: usize, bytes: usize) -> bool {
    stored < bytes - bytes.div_ceil(LEAST_SAVING)
}

/// Decodes a chunk of numbers of `planes` bytes to exactly the bytes of `out`. Fails with a
/// description of the damage.
pub fn decode(stored: &[u8], planes: usize, out: &mut [u8]) -> Result<(), String> {
    if !(1..=MAX_PLANES).contains(&planes) || out.is_empty() || !out.len().is_multiple_of(planes) {
        return Err(format!("{} bytes are not {planes} planes", out.len()));
    }
    let numbers = out.len() / planes;
    let cut = || "it ends before its planes".to_owned();
    let (table, mut rest) = stored.split_at_checked(4 * planes).ok_or_else(cut)?;
    // Of each plane, if it is raw, and its stored bytes.
    let mut entries = [(false, [].as_slice()); MAX_PLANES];
    let mut compressed = 0;
    for (number, (length, entry)) in table.as_chunks::<4>().0.iter().zip(&mut entries).enumerate() {
        let length = u32::from_le_bytes(*length);
        let is_raw = length & RAW != 0;
        let (bytes, behind) = rest.split_at_checked((length & !RAW) as usize).ok_or_else(cut)?;
        rest = behind;
        if is_raw && bytes.len() != numbers {
            return Err(format!("plane {number} has {} bytes for {numbers} numbers", bytes.len()));
        }
        compressed += usize::from(!is_raw);
        *entry = (is_raw, bytes);
    }
    if !rest.is_empty() {
        return Err(format!("{} bytes follow its planes", rest.len()));
    }
    let no_memory = "no memory to decode it";
    let mut context = DCtx::try_create().ok_or(no_memory)?;
    if let (1, [(false, bytes), ..]) = (planes, entries) {
        return frame(&mut context, bytes, out).map_err(|what| format!("plane 0: {what}"));
    }
    let mut decoded = Vec::new();
    decoded.try_reserve_exact(compressed * numbers).map_err(|_| no_memory)?;
    decoded.resize(compressed * numbers, 0);
    let mut targets = decoded.chunks_exact_mut(numbers.max(1));
    let mut found = [[].as_slice(); MAX_PLANES];
    for (number, ((is_raw, bytes), plane)) in entries.into_iter().zip(&mut found).enumerate().take(planes) {
        *plane = bytes;
        if !is_raw && let Some(target) = targets.next() {
            frame(&mut context, bytes, target).map_err(|what| format!("plane {number}: {what}"))?;
            *plane = target;
        }
    }
    join(found.get(..planes).unwrap_or_default(), out);
    Ok(())
}

/// Decodes one frame that becomes exactly the bytes of `out`.
fn frame(context: &mut DCtx<'_>, stored: &[u8], out: &mut [u8]) -> Result<(), String> {
    let length = zstd_safe::find_frame_compressed_size(stored).map_err(zstd_safe::get_error_name)?;
    if length != stored.len() {
        return Err(format!("its frame has {length} of {} bytes", stored.len()));
    }
    let written = context.decompress(out, stored).map_err(zstd_safe::get_error_name)?;
    if written != out.len() {
        return Err(format!("its frame becomes {written} bytes, not {}", out.len()));
    }
    Ok(())
}

/// Puts planes together again.
fn join(planes: &[&[u8]], out: &mut [u8]) {
    match *planes {
        [bytes] => out.copy_from_slice(bytes),
        [a, b] => {
            for ((out, &a), &b) in out.as_chunks_mut::<2>().0.iter_mut().zip(a).zip(b) {
                *out = [a, b];
            }
        }
        [a, b, c, d] => {
            let numbers = out.as_chunks_mut::<4>().0.iter_mut();
            for ((((out, &a), &b), &c), &d) in numbers.zip(a).zip(b).zip(c).zip(d) {
                *out = [a, b, c, d];
            }
        }
        _ => {
            for (number, plane) in planes.iter().enumerate() {
                for (out, &byte) in out.chunks_exact_mut(planes.len()).zip(*plane) {
                    if let Some(out) = out.get_mut(number) {
                        *out = byte;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
