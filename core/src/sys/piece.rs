//! Bytes of a shared read buffer, and their places in a target.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use super::scatter::geometry::{CopyDim, Tile};
use super::{Buffer, Mapping};

/// Verified bytes in a read buffer. Clones share the buffer and prevent its reuse.
#[derive(Clone)]
pub struct Staged {
    buffer: Arc<Buffer>,
    range: Range<usize>,
}

impl Staged {
    /// Returns the part `range` of a buffer, `None` if it exceeds the buffer.
    pub(crate) fn new(buffer: &Arc<Buffer>, range: Range<usize>) -> Option<Self> {
        buffer.get(range.clone())?;
        Some(Self { buffer: Arc::clone(buffer), range })
    }

    /// Returns the mapping that holds the bytes.
    pub fn mapping(&self) -> &Arc<Mapping> {
        self.buffer.mapping()
    }
}

impl Deref for Staged {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.get(self.range.clone()).unwrap_or_default()
    }
}

impl fmt::Debug for Staged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Staged({} bytes)", self.len())
    }
}

/// `rows × cols` units of contiguous bytes in a read buffer, and their places in the target. All of
/// them are inside both.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The buffer part that contains the units.
    pub staged: Staged,
    /// Offset of the first unit, in `staged`.
    pub from: u64,
    /// Offset of the first unit, in the target.
    pub to: u64,
    /// Bytes per unit.
    pub unit: u64,
    /// The outer dimension.
    pub rows: CopyDim,
    /// The inner dimension.
    pub cols: CopyDim,
}

impl Piece {
    /// Builds the piece of a checked tile. `staged` holds the file's bytes from `start` on.
    pub(super) fn new(staged: &Staged, start: u64, tile: &Tile) -> Self {
        Self {
            staged: staged.clone(),
            from: tile.src - start,
            to: tile.dst,
            unit: tile.unit,
            rows: tile.rows,
            cols: tile.cols,
        }
    }

    /// True if the piece is inside `staged` and inside a target of `target_bytes` bytes.
    pub fn is_inside(&self, target_bytes: u64) -> bool {
        let (rows, cols, unit) = (self.rows, self.cols, i128::from(self.unit));
        let Some((last_row, last_col)) = rows.extent.checked_sub(1).zip(cols.extent.checked_sub(1)) else {
            return false;
        };
        let (last_row, last_col) = (i128::from(last_row), i128::from(last_col));
        let from_end =
            i128::from(self.from) + last_row * i128::from(rows.src) + last_col * i128::from(cols.src) + unit;
        let reach = [last_row * i128::from(rows.dst), last_col * i128::from(cols.dst)];
        let low = i128::from(self.to) + reach.iter().map(|&steps| steps.min(0)).sum::<i128>();
        let high = i128::from(self.to) + reach.iter().map(|&steps| steps.max(0)).sum::<i128>() + unit;
        from_end <= self.staged.len() as i128 && low >= 0 && high <= i128::from(target_bytes)
    }

    /// Iterates over the units: the offset in the target, and the bytes.
    pub fn units(&self) -> impl Iterator<Item = (u64, &[u8])> {
        (0..self.rows.extent).flat_map(move |row| {
            (0..self.cols.extent).map(move |col| {
                let from = (self.from + row * self.rows.src + col * self.cols.src) as usize;
                let step = |dim: CopyDim, i: u64| i.cast_signed().wrapping_mul(dim.dst);
                let to = self.to.wrapping_add_signed(step(self.rows, row).wrapping_add(step(self.cols, col)));
                (to, self.staged.get(from..from + self.unit as usize).unwrap_or_default())
            })
        })
    }
}
