//! Gather kernels: rows, cache-blocked transposes, single elements. Only [`super::HostSource`]
//! calls these, with pointers that it has checked.
#![expect(
    clippy::cast_possible_wrap,
    reason = "extents and item sizes are those of an array in memory, whose bytes fit an isize"
)]

use std::ptr;

use super::stream::run;
use crate::sys::gather::Dim;

/// Edge of a transposed tile, in elements.
const TILE: usize = 32;

/// Gathers a box into contiguous bytes at `dst`. `first` replaces the extent of `dims[0]`. Without
/// dimensions the box is one element.
///
/// # Safety
/// Every element of the box is readable, `dst` is writable for all of them, and the two do not
/// overlap.
pub(super) unsafe fn gather(dst: *mut u8, src: *const u8, itemsize: usize, dims: &[Dim], first: u64) {
    let Some((inner, outer)) = dims.split_last() else {
        // SAFETY: one element.
        return unsafe { run(dst, src, itemsize) };
    };
    let extent = |d: usize| if d == 0 { first } else { dims[d].extent };
    let inner_extent = extent(dims.len() - 1) as usize;
    if inner.stride == itemsize as i64 {
        let row = inner_extent * itemsize;
        // SAFETY: as promised by the caller: a row of contiguous elements for every index of the
        // outer dimensions.
        return unsafe {
            walk(outer, first, None, (dst, src), row, &mut |dst, src| run(dst, src, row));
        };
    }
    // A dimension that is contiguous in memory, and long enough to fetch whole cache lines.
    let along = (0..outer.len()).rev().find(|&d| dims[d].stride == itemsize as i64 && extent(d) > 1);
    if let Some(along) = along {
        let below: usize = (along + 1..dims.len()).map(|d| extent(d) as usize).product();
        let tiles = Tiles {
            rows: extent(along) as usize,
            columns: inner_extent,
            src_stride: inner.stride as isize,
            dst_stride: below * itemsize,
        };
        // SAFETY: as promised by the caller: `rows x columns` elements for every index of the other
        // dimensions.
        return unsafe {
            walk(outer, first, Some(along), (dst, src), inner_extent * itemsize, &mut |dst, src| {
                match itemsize {
                    1 => tiles.transpose::<u8>(dst, src),
                    2 => tiles.transpose::<[u8; 2]>(dst, src),
                    4 => tiles.transpose::<[u8; 4]>(dst, src),
                    8 => tiles.transpose::<[u8; 8]>(dst, src),
                    16 => tiles.transpose::<[u8; 16]>(dst, src),
                    _ => tiles.transpose_any(itemsize, dst, src),
                }
            });
        };
    }
    let stride = inner.stride as isize;
    // SAFETY: as promised by the caller: a strided row for every index of the outer dimensions.
    unsafe {
        walk(outer, first, None, (dst, src), inner_extent * itemsize, &mut |dst, src| match itemsize {
            1 => strided::<u8>(dst, src, stride, inner_extent),
            2 => strided::<[u8; 2]>(dst, src, stride, inner_extent),
            4 => strided::<[u8; 4]>(dst, src, stride, inner_extent),
            8 => strided::<[u8; 8]>(dst, src, stride, inner_extent),
            16 => strided::<[u8; 16]>(dst, src, stride, inner_extent),
            _ => {
                for i in 0..inner_extent {
                    ptr::copy_nonoverlapping(
                        src.offset(i as isize * stride),
                        dst.add(i * itemsize),
                        itemsize,
                    );
                }
            }
        });
    }
}

/// Calls `kernel` for every index of all dimensions except `skip`. `row` is the bytes in `dst` per
/// step of the innermost one.
///
/// # Safety
/// All addresses formed here are in the box and in its destination.
unsafe fn walk(
    dims: &[Dim],
    first: u64,
    skip: Option<usize>,
    (dst, src): (*mut u8, *const u8),
    row: usize,
    kernel: &mut dyn FnMut(*mut u8, *const u8),
) {
    // (extent, source stride, destination stride), outermost first.
    let mut loops: Vec<(u64, isize, usize)> = Vec::with_capacity(dims.len());
    let mut step = row;
    for (d, dim) in dims.iter().enumerate().rev() {
        let extent = if d == 0 { first } else { dim.extent };
        if Some(d) != skip {
            loops.push((extent, dim.stride as isize, step));
        }
        step *= extent as usize;
    }
    loops.reverse();
    let Some((&(count, src_step, dst_step), outer)) = loops.split_last() else {
        return kernel(dst, src);
    };
    let mut index = vec![0_u64; outer.len()];
    let (mut dst, mut src) = (dst, src);
    loop {
        for i in 0..count as usize {
            // SAFETY: an index of the box, as promised by the caller.
            unsafe { kernel(dst.add(i * dst_step), src.offset(i as isize * src_step)) };
        }
        let mut d = outer.len();
        loop {
            if d == 0 {
                return;
            }
            d -= 1;
            let (extent, src_step, dst_step) = outer[d];
            index[d] += 1;
            if index[d] < extent {
                // `wrapping`: between two rows the address may pass the end of the box when an
                // inner loop restarts.
                src = src.wrapping_offset(src_step);
                dst = dst.wrapping_add(dst_step);
                break;
            }
            index[d] = 0;
            src = src.wrapping_offset(-(src_step * (extent as isize - 1)));
            dst = dst.wrapping_sub(dst_step * (extent as usize - 1));
        }
    }
}

/// # Safety
/// `count` elements at `stride` from `src` are readable, `count` contiguous ones at `dst` writable.
unsafe fn strided<T: Copy>(dst: *mut u8, src: *const u8, stride: isize, count: usize) {
    let dst = dst.cast::<T>();
    for i in 0..count {
        // SAFETY: as promised by the caller. Elements need not be aligned.
        unsafe { dst.add(i).write_unaligned(src.offset(i as isize * stride).cast::<T>().read_unaligned()) };
    }
}

/// A matrix whose rows are contiguous in the destination and whose columns are contiguous in the
/// source.
struct Tiles {
    rows: usize,
    columns: usize,
    /// Bytes from one column to the next in the source.
    src_stride: isize,
    /// Bytes from one row to the next in the destination.
    dst_stride: usize,
}

impl Tiles {
    /// Transposes tile by tile, through a small buffer. A part of each column is fetched at once,
    /// and every fetched cache line is used completely. That holds also if the columns are a power
    /// of two apart and compete for the same lines of the first-level cache.
    ///
    /// # Safety
    /// All elements of the matrix are readable at `src` and writable at `dst`.
    unsafe fn transpose<T: Copy + Default>(&self, dst: *mut u8, src: *const u8) {
        let item = size_of::<T>();
        let mut tile = [[T::default(); TILE]; TILE];
        for row in (0..self.rows).step_by(TILE) {
            let rows = TILE.min(self.rows - row);
            for column in (0..self.columns).step_by(TILE) {
                let columns = TILE.min(self.columns - column);
                for (c, line) in tile.iter_mut().enumerate().take(columns) {
                    // SAFETY: `rows` contiguous elements of column `column + c`, from row `row` on;
                    // `rows <= TILE`.
                    unsafe {
                        let from = src.offset((column + c) as isize * self.src_stride).add(row * item);
                        ptr::copy_nonoverlapping(from, line.as_mut_ptr().cast::<u8>(), rows * item);
                    }
                }
                for r in 0..rows {
                    // SAFETY: `columns` contiguous elements of row `row + r`, from column `column`
                    // on.
                    unsafe {
                        let to = dst.add((row + r) * self.dst_stride + column * item).cast::<T>();
                        for (c, line) in tile.iter().enumerate().take(columns) {
                            to.add(c).write_unaligned(line[r]);
                        }
                    }
                }
            }
        }
    }

    /// Like [`Self::transpose`] for element sizes without a matching type, element by element.
    ///
    /// # Safety
    /// As [`Self::transpose`].
    unsafe fn transpose_any(&self, item: usize, dst: *mut u8, src: *const u8) {
        for row in 0..self.rows {
            for column in 0..self.columns {
                // SAFETY: an element of the matrix.
                unsafe {
                    let from = src.offset(column as isize * self.src_stride).add(row * item);
                    ptr::copy_nonoverlapping(from, dst.add(row * self.dst_stride + column * item), item);
                }
            }
        }
    }
}
