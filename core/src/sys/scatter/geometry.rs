//! The geometry of a scatter: a box copy in normal form, and its part whose source bytes are in a
//! window of the file.
//!
//! Pure arithmetic; no memory is touched. [`Strided::clip`] yields [`Tile`]s, which
//! `super::Scatter` copies. Invariants:
//! * Dimensions are sorted by falling source stride, and none has extent 1.
//! * Neighbouring dimensions that are contiguous on both sides are merged.
//! * `unit` is the longest run of bytes that is contiguous on both sides.

use std::ops::Range;

use smallvec::SmallVec;

use crate::read_plan::BoxCopy;

/// One dimension of a copy, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyDim {
    /// Number of steps.
    pub extent: u64,
    /// Distance between neighbours in the source.
    pub src: u64,
    /// Distance between neighbours in the target.
    pub dst: i64,
}

impl CopyDim {
    const ONE: Self = Self { extent: 1, src: 0, dst: 0 };
}

/// A box copy in normal form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Strided {
    /// Number of the leaf, for messages.
    pub(crate) leaf: u32,
    /// Ordinal of the file.
    pub(crate) file: u32,
    /// Number of the destination.
    pub(crate) dst: u32,
    /// Byte span of the source in the file.
    pub(crate) src: Range<u64>,
    /// Byte span in the destination.
    pub(crate) dst_span: Range<u64>,
    /// Offset in the destination of the box's first element.
    pub(crate) dst_offset: u64,
    /// Bytes of the longest run that is contiguous on both sides.
    pub(crate) unit: u64,
    /// The other dimensions, outermost (in the file) first.
    pub(crate) dims: SmallVec<[CopyDim; 2]>,
    /// Bits that are inverted in every byte.
    pub(crate) inverted: u8,
}

/// A two-dimensional part of a copy: `rows × cols` units. Every byte is in the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tile {
    /// Offset of the first byte in the file.
    pub(crate) src: u64,
    /// Offset of the first byte in the destination.
    pub(crate) dst: u64,
    /// Bytes of one unit.
    pub(crate) unit: u64,
    /// The remaining dimension with the smallest destination stride.
    pub(crate) rows: CopyDim,
    /// The dimension with the smallest source stride.
    pub(crate) cols: CopyDim,
}

impl Tile {
    /// Returns the bytes that the tile moves.
    pub(crate) fn bytes(&self) -> u64 {
        self.unit * self.rows.extent * self.cols.extent
    }
}

impl Strided {
    /// Returns the normal form of a copy, `None` if it moves nothing. Validates everything, since
    /// all numbers may come from a file. The error describes the defect.
    pub(crate) fn new(copy: &BoxCopy) -> Result<Option<Self>, String> {
        let ndim = copy.extent.len();
        if copy.src_strides.len() != ndim || copy.dst_strides.len() != ndim {
            return Err("strides and extent differ in their number of dimensions".into());
        }
        if copy.itemsize == 0 || copy.extent.contains(&0) {
            return Ok(None);
        }
        let itemsize = u64::from(copy.itemsize);
        let mut src_last = i128::from(copy.src_offset);
        let (mut dst_first, mut dst_last) = (i128::from(copy.dst_offset), i128::from(copy.dst_offset));
        let mut bytes = Some(itemsize);
        let mut dims: SmallVec<[CopyDim; 2]> = SmallVec::new();
        for ((&extent, &src), &dst) in copy.extent.iter().zip(&copy.src_strides).zip(&copy.dst_strides) {
            bytes = bytes.and_then(|bytes| bytes.checked_mul(extent));
            if extent == 1 {
                continue;
            }
            let steps = i128::from(extent - 1);
            // Both factors are below 2^64, and their product is checked to be below 2^127, so the
            // sums cannot wrap.
            let src_reach = steps.checked_mul(i128::from(src)).filter(|&reach| reach < 1 << 64);
            let dst_reach =
                steps.checked_mul(i128::from(dst)).filter(|&reach| reach.unsigned_abs() < 1 << 64);
            let (Some(src_reach), Some(dst_reach)) = (src_reach, dst_reach) else {
                return Err("its strides reach further than 64 bits".into());
            };
            src_last += src_reach;
            if dst_reach < 0 {
                dst_first += dst_reach;
            } else {
                dst_last += dst_reach;
            }
            dims.push(CopyDim { extent, src, dst });
        }
        let end = |last: i128| u64::try_from(last + i128::from(itemsize)).ok();
        let (Some(src_end), Some(dst_end), Ok(dst_start), Some(_)) =
            (end(src_last), end(dst_last), u64::try_from(dst_first), bytes)
        else {
            return Err("it reaches before the first byte or further than 64 bits".into());
        };
        dims.sort_by_key(|dim| std::cmp::Reverse((dim.src, dim.dst.unsigned_abs())));
        let unit = merge(&mut dims, itemsize);
        Ok(Some(Self {
            leaf: copy.leaf,
            file: copy.file,
            dst: copy.dst,
            src: copy.src_offset..src_end,
            dst_span: dst_start..dst_end,
            dst_offset: copy.dst_offset,
            unit,
            dims,
            inverted: copy.inverted,
        }))
    }

    /// Returns the bytes that the copy moves.
    pub(crate) fn bytes(&self) -> u64 {
        self.dims.iter().fold(self.unit, |bytes, dim| bytes.saturating_mul(dim.extent))
    }

    /// True if the units are provably disjoint in the destination: their strides are nested. Every
    /// array except a contrived view has nested strides.
    pub(crate) fn is_injective(&self) -> bool {
        let mut dims: Vec<(u128, u128)> = self
            .dims
            .iter()
            .map(|dim| (u128::from(dim.dst.unsigned_abs()), u128::from(dim.extent)))
            .collect();
        dims.sort_unstable();
        let mut reach = u128::from(self.unit);
        for (stride, extent) in dims {
            if stride < reach {
                return false;
            }
            reach = reach.saturating_add(stride.saturating_mul(extent - 1));
        }
        true
    }

    /// Yields the part of the copy in `window` (a byte range of the file) as tiles. Every byte is
    /// in exactly one tile. An element at the window's edge is cut.
    pub(crate) fn clip(&self, window: &Range<u64>, each: &mut dyn FnMut(Tile)) {
        if window.start < self.src.end && self.src.start < window.end {
            self.clip_dims(0, self.src.start, self.dst_offset, window, each);
        }
    }

    fn clip_dims(&self, depth: usize, src: u64, dst: u64, window: &Range<u64>, each: &mut dyn FnMut(Tile)) {
        let Some((dim, inner)) = self.dims.get(depth..).and_then(<[CopyDim]>::split_first) else {
            let start = src.max(window.start);
            let end = (src + self.unit).min(window.end);
            if start < end {
                let tile = Tile {
                    src: start,
                    dst: dst + (start - src),
                    unit: end - start,
                    rows: CopyDim::ONE,
                    cols: CopyDim::ONE,
                };
                each(tile);
            }
            return;
        };
        // Index i occupies [src + i·stride, src + i·stride + reach).
        let reach = self.unit + inner.iter().map(|dim| (dim.extent - 1) * dim.src).sum::<u64>();
        let touching = touching(dim, src, reach, window);
        let whole = within(dim, src, reach, window);
        let at = |i: u64| (src + i * dim.src, dst.wrapping_add_signed(i.cast_signed().wrapping_mul(dim.dst)));
        if whole.is_empty() {
            for i in touching {
                let (src, dst) = at(i);
                self.clip_dims(depth + 1, src, dst, window, each);
            }
            return;
        }
        for i in touching.start..whole.start {
            let (src, dst) = at(i);
            self.clip_dims(depth + 1, src, dst, window, each);
        }
        let (first_src, first_dst) = at(whole.start);
        let head = CopyDim { extent: whole.end - whole.start, ..*dim };
        self.tiles(head, inner, first_src, first_dst, each);
        for i in whole.end..touching.end {
            let (src, dst) = at(i);
            self.clip_dims(depth + 1, src, dst, window, each);
        }
    }

    /// Yields the tiles of a box that is completely inside the window.
    fn tiles(&self, head: CopyDim, inner: &[CopyDim], src: u64, dst: u64, each: &mut dyn FnMut(Tile)) {
        let Some((&cols, outer)) = inner.split_last() else {
            each(Tile { src, dst, unit: self.unit, rows: CopyDim::ONE, cols: head });
            return;
        };
        // The rows are the dimension with the smallest destination stride: the head (`None`), or
        // one of the outer dimensions.
        let mut nearest = (head, None);
        for (i, dim) in outer.iter().enumerate() {
            if dim.dst.unsigned_abs() < nearest.0.dst.unsigned_abs() {
                nearest = (*dim, Some(i));
            }
        }
        let (rows, taken) = nearest;
        let mut rest = Vec::with_capacity(outer.len());
        if taken.is_some() {
            rest.push(head);
        }
        rest.extend(outer.iter().enumerate().filter(|(i, _)| Some(*i) != taken).map(|(_, dim)| *dim));
        walk(&rest, src, dst, &mut |src, dst| each(Tile { src, dst, unit: self.unit, rows, cols }));
    }
}

/// Merges dimensions that are contiguous on both sides and returns the bytes of a unit.
fn merge(dims: &mut SmallVec<[CopyDim; 2]>, itemsize: u64) -> u64 {
    let mut unit = itemsize;
    let mut merged: Vec<CopyDim> = Vec::new(); // innermost first
    for &dim in dims.iter().rev() {
        let dense = |bytes: u64| dim.src == bytes && u64::try_from(dim.dst) == Ok(bytes);
        match merged.last_mut() {
            None if dense(unit) => unit *= dim.extent,
            Some(inner)
                if Some(dim.src) == inner.src.checked_mul(inner.extent)
                    && i64::try_from(inner.extent).ok().and_then(|n| inner.dst.checked_mul(n))
                        == Some(dim.dst) =>
            {
                inner.extent *= dim.extent;
            }
            _ => merged.push(dim),
        }
    }
    merged.reverse();
    *dims = merged.into();
    unit
}

/// Returns the indices of `dim` whose bytes touch the window.
fn touching(dim: &CopyDim, src: u64, reach: u64, window: &Range<u64>) -> Range<u64> {
    if dim.src == 0 {
        let touches = src < window.end && window.start < src + reach;
        return 0..if touches { dim.extent } else { 0 };
    }
    // The first i with src + i·stride + reach > start, and the first with src + i·stride >= end.
    let first = (window.start + 1).saturating_sub(src + reach).div_ceil(dim.src);
    let end = window.end.saturating_sub(src).div_ceil(dim.src).min(dim.extent);
    first.min(end)..end
}

/// Returns the indices of `dim` whose bytes are completely inside the window.
fn within(dim: &CopyDim, src: u64, reach: u64, window: &Range<u64>) -> Range<u64> {
    if window.end < src + reach {
        return 0..0;
    }
    if dim.src == 0 {
        return 0..if src >= window.start { dim.extent } else { 0 };
    }
    let first = window.start.saturating_sub(src).div_ceil(dim.src);
    let end = ((window.end - src - reach) / dim.src + 1).min(dim.extent);
    first.min(end)..end
}

/// Calls `each` with the source and destination offset of every step of `dims`.
pub(crate) fn walk(dims: &[CopyDim], src: u64, dst: u64, each: &mut dyn FnMut(u64, u64)) {
    let Some((dim, inner)) = dims.split_first() else {
        each(src, dst);
        return;
    };
    for i in 0..dim.extent {
        walk(inner, src + i * dim.src, dst.wrapping_add_signed(i.cast_signed().wrapping_mul(dim.dst)), each);
    }
}

#[cfg(test)]
mod tests;
