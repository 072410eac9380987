//! A comparison of two checkpoints, tensor by tensor, in constant memory.

use std::collections::BTreeSet;

use stepwell_core::dtype::Dtype;
use stepwell_core::sys::Buffer;

use super::assembler::Assembler;
use super::file_plan::{PieceContent, PlannedFile, PlannedPiece, tensor_of};
use super::windows::{parts, windows};
use crate::error::{Error, Result};
use crate::reader::Reader;

/// Bytes that are compared at a time.
const COMPARED_BYTES: u64 = 16 << 20;
/// A multiple of the size of every element.
const ALIGNMENT: u64 = 64;

/// A tensor of one checkpoint, and the one of the other that must equal it.
#[derive(Clone, Copy, Debug)]
pub struct TensorPair {
    /// The leaf of the first.
    pub source: u32,
    /// The leaf of the second.
    pub made: u32,
    /// The dtype of the second, to which values of the first are cast.
    pub dtype: Dtype,
}

/// Reads the tensors of both and returns the numbers of the pairs that differ: in a byte, in shape
/// or in dtype. `go_on` gets the bytes done and in all, and stops it by `false`.
pub fn compare(
    source: &Reader,
    made: &Reader,
    pairs: &[TensorPair],
    go_on: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Vec<usize>> {
    let mut different = BTreeSet::new();
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let (mut numbers, mut offset) = (Vec::new(), 0_u64);
    for (number, pair) in pairs.iter().enumerate() {
        let (here, there) = (tensor_of(source, pair.source)?, tensor_of(made, pair.made)?);
        let length = there.shape.iter().try_fold(pair.dtype.size() as u64, |bytes, &n| bytes.checked_mul(n));
        let Some(length) = length.filter(|_| here.shape == there.shape && there.dtype == pair.dtype) else {
            different.insert(number);
            continue;
        };
        let piece =
            |leaf| PlannedPiece { offset, length, content: PieceContent::Tensor { leaf, dtype: pair.dtype } };
        ours.push(piece(pair.source));
        theirs.push(piece(pair.made));
        numbers.push(number);
        offset = offset.saturating_add(length).next_multiple_of(ALIGNMENT);
    }
    let file = |pieces| [PlannedFile { name: String::new(), length: offset, pieces }];
    let (ours, theirs) = (file(ours), file(theirs));
    let buffer = || Buffer::alone(COMPARED_BYTES as usize);
    let mut here = (Assembler::new(source, buffer()?), [buffer()?]);
    let mut there = (Assembler::new(made, Buffer::alone(0)?), [buffer()?]);
    for window in windows(&ours, COMPARED_BYTES) {
        let mut go_on = || go_on(window.offset, offset);
        here.0.assemble(&ours, &[window], &mut here.1, &mut go_on)?;
        there.0.assemble(&theirs, &[window], &mut there.1, &mut go_on)?;
        let ([one], [other]) = (&here.1, &there.1);
        if one[..] == other[..] {
            continue;
        }
        for part in parts(&ours[0], &window) {
            let range = part.at..part.at + part.len;
            let number = *numbers.get(part.piece).ok_or_else(|| Error::internal("a pair", "none"))?;
            if one.get(range.clone()) != other.get(range) {
                different.insert(number);
            }
        }
    }
    Ok(different.into_iter().collect())
}
