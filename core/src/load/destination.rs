//! Destinations of verified bytes: host memory, or a device that copies asynchronously.
//!
//! A [`DeviceTarget`] receives a [`Piece`] and returns a [`Ticket`]. It is the counterpart of the
//! save side's state providers. A piece holds its read buffer: the memory is neither reused nor
//! freed until the last clone is dropped, even if the restore fails. A target keeps the piece until
//! its copies are complete. A copy that never ends costs only its buffer.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::time::Duration;

use super::geometry::{CopyDim, Tile};
use crate::deadline::deadline_after;
use crate::provider::Ticket;
use crate::staging::Fence;
use crate::sys::{Buffer, HostTarget, Mapping};
use crate::{Error, Result};

/// The destination of one tensor or of a part of one. It is not `Clone`: one restore takes it.
#[derive(Debug)]
pub enum Destination<'a> {
    /// Host memory. The restore writes to it directly.
    Host(HostTarget<'a>),
    /// A device that takes the bytes from read buffers.
    Device(Arc<dyn DeviceTarget>),
}

impl<'a> From<HostTarget<'a>> for Destination<'a> {
    fn from(target: HostTarget<'a>) -> Self {
        Self::Host(target)
    }
}

impl From<Arc<dyn DeviceTarget>> for Destination<'_> {
    fn from(target: Arc<dyn DeviceTarget>) -> Self {
        Self::Device(target)
    }
}

/// A destination without an address in this process.
pub trait DeviceTarget: Send + Sync + fmt::Debug {
    /// Returns the length in bytes.
    fn bytes(&self) -> u64;

    /// Copies a piece to its place, or starts to. The restore returns once every ticket's fence has
    /// passed. Called from several threads, in any order, with every byte once. An error here or
    /// from a fence ends the restore.
    fn put(&self, piece: Piece) -> Result<Ticket>;
}

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

/// One dimension of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steps {
    /// Number of steps.
    pub count: u64,
    /// Distance between neighbours in the staged bytes.
    pub from: u64,
    /// Distance between neighbours in the target.
    pub to: i64,
}

impl From<CopyDim> for Steps {
    fn from(dim: CopyDim) -> Self {
        Self { count: dim.extent, from: dim.src, to: dim.dst }
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
    pub rows: Steps,
    /// The inner dimension.
    pub cols: Steps,
}

impl Piece {
    /// Builds the piece of a checked tile. `staged` holds the file's bytes from `start` on.
    pub(crate) fn new(staged: &Staged, start: u64, tile: &Tile) -> Self {
        Self {
            staged: staged.clone(),
            from: tile.src - start,
            to: tile.dst,
            unit: tile.unit,
            rows: tile.rows.into(),
            cols: tile.cols.into(),
        }
    }

    /// True if the piece is inside `staged` and inside a target of `target_bytes` bytes.
    pub fn is_inside(&self, target_bytes: u64) -> bool {
        let (rows, cols, unit) = (self.rows, self.cols, i128::from(self.unit));
        let Some((last_row, last_col)) = rows.count.checked_sub(1).zip(cols.count.checked_sub(1)) else {
            return false;
        };
        let (last_row, last_col) = (i128::from(last_row), i128::from(last_col));
        let from_end = i128::from(self.from)
            + last_row * i128::from(rows.from)
            + last_col * i128::from(cols.from)
            + unit;
        let reach = [last_row * i128::from(rows.to), last_col * i128::from(cols.to)];
        let low = i128::from(self.to) + reach.iter().map(|&steps| steps.min(0)).sum::<i128>();
        let high = i128::from(self.to) + reach.iter().map(|&steps| steps.max(0)).sum::<i128>() + unit;
        from_end <= self.staged.len() as i128 && low >= 0 && high <= i128::from(target_bytes)
    }

    /// Iterates over the units: the offset in the target, and the bytes.
    pub fn units(&self) -> impl Iterator<Item = (u64, &[u8])> {
        (0..self.rows.count).flat_map(move |row| {
            (0..self.cols.count).map(move |col| {
                let from = (self.from + row * self.rows.from + col * self.cols.from) as usize;
                let step = |steps: Steps, i: u64| i.cast_signed().wrapping_mul(steps.to);
                let to = self.to.wrapping_add_signed(step(self.rows, row).wrapping_add(step(self.cols, col)));
                (to, self.staged.get(from..from + self.unit as usize).unwrap_or_default())
            })
        })
    }
}

/// Started copies to devices that have not been seen to end.
pub(crate) struct Started {
    fences: Vec<Box<dyn Fence>>,
    stall_timeout: Duration,
}

impl Started {
    pub(crate) fn new(stall_timeout: Duration) -> Self {
        Self { fences: Vec::new(), stall_timeout }
    }

    pub(crate) fn add(&mut self, ticket: Ticket) {
        if let Ticket::Event(fence) = ticket {
            self.fences.push(fence);
        }
    }

    /// Waits until all copies have ended, even after an error, and returns the first error. The
    /// deadline limits lack of progress: it restarts whenever a copy ends.
    pub(crate) fn wait(&mut self) -> Result<()> {
        let mut outcome = Ok(());
        for fence in self.fences.drain(..) {
            // After one timeout, the other copies are only polled.
            let stuck = matches!(outcome, Err(Error::Timeout { .. }));
            let patience = if stuck { Duration::ZERO } else { self.stall_timeout };
            let passed = fence.host_wait(deadline_after(patience));
            outcome = outcome.and(passed);
        }
        outcome
    }
}
