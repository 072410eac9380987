//! Writes verified bytes of a file into the caller's memory, from several threads.
//!
//! It is safe for any plan, for three reasons:
//! * *bounds*: [`Scatter::open`] checks every copy against its destination's length. Every tile is
//!   checked again, on both sides, before it is copied.
//! * *races*: a window of the file is scattered at most once (a flag per window). Windows are
//!   disjoint, and a copy never writes a byte twice. Two copies that may overlap (see
//!   [`disjoint`]) share a lock.
//! * *lifetime*: a [`ScatterGuard`] holds the caller's borrow. Dropping it closes the gate and
//!   waits for the copy under way. A late thread, for example after a stall, finds the gate closed.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use geometry::{CopyDim, Strided, Tile};

use super::{HostTarget, Piece, Staged, stream};
use crate::{Error, Result};

mod disjoint;
pub(super) mod geometry;

/// A target of a scatter.
#[derive(Debug)]
pub(crate) enum ScatterTarget<'a> {
    /// Host memory.
    Host(HostTarget<'a>),
    /// A target of that many bytes that has no address in this process.
    Elsewhere(u64),
}

impl ScatterTarget<'_> {
    fn len(&self) -> u64 {
        match self {
            Self::Host(target) => target.len() as u64,
            Self::Elsewhere(len) => *len,
        }
    }
}

/// Takes the bytes of copies to targets without an address.
pub(crate) trait Elsewhere {
    /// Copies a piece to target `dst`, or starts to.
    fn put(&mut self, dst: u32, piece: Piece) -> Result<()>;

    /// Waits until every piece has reached its target.
    fn settle(&mut self) -> Result<()>;
}

/// A part of a file that is scattered at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ScatterWindow {
    /// Ordinal of the file.
    pub(crate) file: u32,
    /// Its byte range.
    pub(crate) bytes: Range<u64>,
    /// Its copies: a range of the list given to [`Scatter::open`].
    pub(crate) copies: Range<usize>,
}

/// The destinations of a restore and the copies into them.
#[derive(Debug)]
pub(crate) struct Scatter {
    targets: Vec<TargetState>,
    copies: Vec<Strided>,
    /// The locks of copies that may overlap.
    locks: disjoint::Locks,
    windows: Vec<ScatterWindow>,
    lists: Vec<u32>,
    claimed: Vec<AtomicBool>,
    held: Vec<Mutex<()>>,
    open: RwLock<bool>,
}

#[derive(Debug)]
struct TargetState {
    /// `None` for a target elsewhere.
    address: Option<NonNull<u8>>,
    len: u64,
    touched: AtomicBool,
}

// SAFETY: the addresses are those of HostTargets, which any thread may write to. `put` prevents
// races.
unsafe impl Send for Scatter {}
// SAFETY: as above.
unsafe impl Sync for Scatter {}

/// Holds the caller's borrow of the targets; dropping it ends all writing.
#[derive(Debug)]
pub(crate) struct ScatterGuard<'a> {
    scatter: Arc<Scatter>,
    borrowed: PhantomData<&'a mut [u8]>,
}

impl ScatterGuard<'_> {
    pub(crate) fn share(&self) -> Arc<Scatter> {
        Arc::clone(&self.scatter)
    }
}

impl Drop for ScatterGuard<'_> {
    fn drop(&mut self) {
        *self.scatter.open.write().unwrap_or_else(PoisonError::into_inner) = false;
    }
}

impl Scatter {
    /// Validates everything that [`Self::put`] relies on, and takes the targets. `windows` are in
    /// file order and do not overlap. [`Error::Internal`] if a copy does not fit its target:
    /// the plan of the restore chose both.
    pub(crate) fn open(
        targets: Vec<ScatterTarget<'_>>,
        copies: Vec<Strided>,
        windows: Vec<ScatterWindow>,
        lists: Vec<u32>,
    ) -> Result<ScatterGuard<'_>> {
        for copy in &copies {
            let target = targets.get(copy.dst as usize).ok_or_else(|| {
                Error::internal(
                    format!("a copy to one of {} destinations", targets.len()),
                    format!("one to destination {}", copy.dst),
                )
            })?;
            let len = target.len();
            if copy.inverted != 0 && matches!(target, ScatterTarget::Elsewhere(_)) {
                return Err(Error::internal(
                    "copies that invert bits only on their way to host memory",
                    format!("one to destination {}, which is elsewhere", copy.dst),
                ));
            }
            if copy.dst_span.end > len {
                return Err(Error::internal(
                    format!("a copy inside the {len} bytes of destination {}", copy.dst),
                    format!("one that ends at byte {}", copy.dst_span.end),
                ));
            }
            if !copy.is_injective() {
                return Err(Error::internal(
                    format!("a copy that writes each byte of destination {} once", copy.dst),
                    "a layout that overlaps itself",
                ));
            }
        }
        let ascending = windows.windows(2).all(|pair| match pair {
            [a, b] => (a.file, a.bytes.end) <= (b.file, b.bytes.start),
            _ => true,
        });
        if !ascending || windows.iter().any(|window| window.bytes.is_empty()) {
            return Err(Error::internal("windows in file order", "windows that overlap"));
        }
        for window in &windows {
            let copies_of = lists.get(window.copies.clone()).unwrap_or_default();
            if copies_of.len() != window.copies.len()
                || copies_of.windows(2).any(|pair| matches!(pair, [a, b] if a >= b))
                || copies_of
                    .iter()
                    .any(|&c| copies.get(c as usize).is_none_or(|copy| copy.file != window.file))
            {
                return Err(Error::internal(
                    format!("copies from file {} in its window", window.file),
                    "other copies",
                ));
            }
        }
        let locks = disjoint::Locks::find(&spans(&targets)?, &copies);
        Ok(ScatterGuard {
            scatter: Arc::new(Self {
                held: (0..locks.count()).map(|_| Mutex::new(())).collect(),
                locks,
                claimed: windows.iter().map(|_| AtomicBool::new(false)).collect(),
                targets: targets
                    .into_iter()
                    .map(|target| TargetState {
                        len: target.len(),
                        address: match target {
                            ScatterTarget::Host(target) => Some(target.address()),
                            ScatterTarget::Elsewhere(_) => None,
                        },
                        touched: AtomicBool::new(false),
                    })
                    .collect(),
                copies,
                windows,
                lists,
                open: RwLock::new(true),
            }),
            borrowed: PhantomData,
        })
    }

    pub(crate) fn copies(&self) -> &[Strided] {
        &self.copies
    }

    /// Returns the numbers of a window's copies.
    pub(crate) fn copies_of(&self, window: usize) -> &[u32] {
        self.windows.get(window).and_then(|window| self.lists.get(window.copies.clone())).unwrap_or_default()
    }

    /// Returns the destinations that were written to, at least partly.
    pub(crate) fn overwritten(&self) -> Vec<u32> {
        let touched = |(_, target): &(usize, &TargetState)| target.touched.load(Ordering::Acquire);
        self.targets.iter().enumerate().filter(touched).map(|(number, _)| number as u32).collect()
    }

    /// Scatters a window's bytes, once, and returns the bytes copied or given to `elsewhere`.
    pub(crate) fn put(&self, number: usize, bytes: &Staged, elsewhere: &mut dyn Elsewhere) -> Result<u64> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        if !*open {
            return Err(Error::Cancelled("the restore has ended".into()));
        }
        let (Some(window), Some(claimed)) = (self.windows.get(number), self.claimed.get(number)) else {
            return Err(Error::internal("a window of the read", format!("window {number}")));
        };
        if bytes.len() as u64 != window.bytes.end - window.bytes.start {
            return Err(Error::internal(
                format!("{} bytes for window {number}", window.bytes.end - window.bytes.start),
                bytes.len().to_string(),
            ));
        }
        if claimed.swap(true, Ordering::AcqRel) {
            return Err(Error::internal("each window once", format!("window {number} a second time")));
        }
        let mut moved = 0;
        let mut outside = false;
        for &c in self.copies_of(number) {
            let Some(copy) = self.copies.get(c as usize) else { continue };
            let Some(target) = self.targets.get(copy.dst as usize) else { continue };
            let lock = self.locks.of(c).and_then(|lock| self.held.get(lock));
            let held = lock.map(|lock| lock.lock().unwrap_or_else(PoisonError::into_inner));
            target.touched.store(true, Ordering::Release);
            let Some(address) = target.address else {
                let mut tiles = Vec::new();
                copy.clip(&window.bytes, &mut |tile| tiles.push(tile));
                for tile in &tiles {
                    if !tile_fits(tile, target.len, window.bytes.end) || tile.src < window.bytes.start {
                        return Err(left(number));
                    }
                    elsewhere.put(copy.dst, Piece::new(bytes, window.bytes.start, tile))?;
                    moved += tile.bytes();
                }
                if held.is_some() {
                    // Another copy may write the same bytes: it must follow this one.
                    elsewhere.settle()?;
                }
                continue;
            };
            copy.clip(&window.bytes, &mut |tile| {
                if tile_fits(&tile, target.len, window.bytes.end) && tile.src >= window.bytes.start {
                    let from = (tile.src - window.bytes.start) as usize;
                    // SAFETY: the tile is inside the destination and inside `bytes`, whose first
                    // byte is the window's. The destination is valid: the gate is open, and closing
                    // it needs the lock held here. Nobody else writes these bytes: the window is
                    // claimed, no other window has these bytes of the file, and copies that may
                    // overlap share a lock.
                    unsafe {
                        let (to, from) = (address.as_ptr().add(tile.dst as usize), bytes.as_ptr().add(from));
                        if copy.inverted == 0 {
                            copy_tile(to, from, &tile);
                        } else {
                            invert_tile(to, from, &tile, copy.inverted);
                        }
                    };
                    moved += tile.bytes();
                } else {
                    outside = true;
                }
            });
            drop(held);
        }
        if outside {
            return Err(left(number));
        }
        Ok(moved)
    }
}

fn left(window: usize) -> Error {
    Error::internal("copies inside their destinations", format!("one of window {window} that leaves its own"))
}

/// Returns the address ranges of all targets, to find shared memory. Targets elsewhere get
/// artificial, disjoint ranges above all of this process.
fn spans(targets: &[ScatterTarget<'_>]) -> Result<Vec<Range<u64>>> {
    let mut next = 1_u64 << 63;
    let mut spans = Vec::with_capacity(targets.len());
    for target in targets {
        let start = match target {
            ScatterTarget::Host(target) => target.address().as_ptr() as u64,
            ScatterTarget::Elsewhere(_) => next,
        };
        let len = target.len();
        let end = start.checked_add(len).ok_or_else(|| {
            Error::internal("a destination in the address space", format!("one of {len} bytes at {start:#x}"))
        })?;
        if matches!(target, ScatterTarget::Elsewhere(_)) {
            next = end;
        }
        spans.push(start..end);
    }
    Ok(spans)
}

/// True if the tile is below `dst_end` in its destination and below `src_end` in the file.
fn tile_fits(tile: &Tile, dst_end: u64, src_end: u64) -> bool {
    let (mut first, mut last) = (i128::from(tile.dst), i128::from(tile.dst));
    let mut src = u128::from(tile.src);
    for dim in [tile.rows, tile.cols] {
        let Some(steps) = dim.extent.checked_sub(1) else { return false };
        // Products of two 64-bit numbers fit 127 bits and a sign, except the largest. No tile of a
        // checked copy has it.
        let Some(reach) = i128::from(steps).checked_mul(i128::from(dim.dst)) else { return false };
        let Some(src_reach) = u128::from(steps).checked_mul(u128::from(dim.src)) else { return false };
        if reach < 0 {
            first = first.saturating_add(reach);
        } else {
            last = last.saturating_add(reach);
        }
        src = src.saturating_add(src_reach);
    }
    first >= 0
        && last.saturating_add(i128::from(tile.unit)) <= i128::from(dst_end)
        && src.saturating_add(u128::from(tile.unit)) <= u128::from(src_end)
}

/// Edge of the squares of a transposing copy, in units: 32 lines of 64 bytes on either side fit the
/// first-level cache.
const SQUARE: u64 = 32;

/// # Safety
/// Every unit of the tile is readable at `src` and writable at `dst`, and the two do not overlap.
unsafe fn copy_tile(dst: *mut u8, src: *const u8, tile: &Tile) {
    // SAFETY: as promised by the caller.
    unsafe {
        match tile.unit {
            1 => units::<u8>(dst, src, tile),
            2 => units::<[u8; 2]>(dst, src, tile),
            4 => units::<[u8; 4]>(dst, src, tile),
            8 => units::<[u8; 8]>(dst, src, tile),
            16 => units::<[u8; 16]>(dst, src, tile),
            _ => {
                let unit = tile.unit as usize;
                for row in 0..tile.rows.extent {
                    for col in 0..tile.cols.extent {
                        let (to, from) = at(dst, src, tile, row, col);
                        stream::row(to, from, unit);
                    }
                }
                stream::fence();
            }
        }
    }
}

/// Copies a tile and inverts bits of every byte.
///
/// # Safety
/// As [`copy_tile`].
unsafe fn invert_tile(dst: *mut u8, src: *const u8, tile: &Tile, inverted: u8) {
    for row in 0..tile.rows.extent {
        for col in 0..tile.cols.extent {
            // SAFETY: units of the tile.
            unsafe {
                let (to, from) = at(dst, src, tile, row, col);
                for byte in 0..tile.unit as usize {
                    to.add(byte).write(from.add(byte).read() ^ inverted);
                }
            }
        }
    }
}

/// Copies unit by unit, in squares, so that both sides stay in the cache.
///
/// # Safety
/// As [`copy_tile`], and `tile.unit` is the size of `T`.
unsafe fn units<T: Copy>(dst: *mut u8, src: *const u8, tile: &Tile) {
    let (rows, cols) = (tile.rows.extent, tile.cols.extent);
    let rows_inside = tile.rows.dst.unsigned_abs() < tile.cols.dst.unsigned_abs();
    for row in (0..rows).step_by(SQUARE as usize) {
        let row_end = (row + SQUARE).min(rows);
        for col in (0..cols).step_by(SQUARE as usize) {
            let col_end = (col + SQUARE).min(cols);
            // The destination's nearer dimension is the inner one: filling a cache line by stores
            // gains more than by loads.
            if rows_inside {
                for c in col..col_end {
                    // SAFETY: units of the tile.
                    unsafe { line::<T>(at(dst, src, tile, row, c), tile.rows, row_end - row) };
                }
            } else {
                for r in row..row_end {
                    // SAFETY: units of the tile.
                    unsafe { line::<T>(at(dst, src, tile, r, col), tile.cols, col_end - col) };
                }
            }
        }
    }
}

/// # Safety
/// `count` units along `dim` are readable and writable at the two addresses.
#[inline]
unsafe fn line<T: Copy>((dst, src): (*mut u8, *const u8), dim: CopyDim, count: u64) {
    let (dst_step, src_step) = (dim.dst as isize, dim.src as usize);
    for i in 0..count as usize {
        // SAFETY: as promised by the caller. Units need not be aligned.
        unsafe {
            let to = dst.offset(i.cast_signed() * dst_step).cast::<T>();
            to.write_unaligned(src.add(i * src_step).cast::<T>().read_unaligned());
        }
    }
}

/// # Safety
/// `row` and `col` are inside the tile.
#[inline]
unsafe fn at(dst: *mut u8, src: *const u8, tile: &Tile, row: u64, col: u64) -> (*mut u8, *const u8) {
    let to = row
        .cast_signed()
        .wrapping_mul(tile.rows.dst)
        .wrapping_add(col.cast_signed().wrapping_mul(tile.cols.dst));
    let from = row * tile.rows.src + col * tile.cols.src;
    // SAFETY: an address inside the tile, as promised by the caller.
    unsafe { (dst.offset(to as isize), src.add(from as usize)) }
}
