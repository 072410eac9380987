//! The layout of an array in host or device memory: its validation, and the runs for copying a part
//! of it.
#![expect(
    clippy::cast_possible_wrap,
    reason = "sizes and indices of an array in memory fit an isize; `new` has checked shape and strides"
)]

use crate::region::{self, Region};
use crate::sys::gather::{self, Dim};
use crate::{Error, Result};

/// The shape and strides of an array. All elements are addressable.
#[derive(Debug)]
pub(super) struct StridedMemory {
    itemsize: usize,
    shape: Box<[u64]>,
    /// In bytes.
    strides: Box<[i64]>,
    /// Bytes in the array.
    bytes: u64,
    contiguous: bool,
}

/// A part that is copied in one call.
pub(super) enum StridedRun<'a> {
    /// Contiguous bytes.
    Contiguous {
        /// Start, in bytes from the element at index zero.
        offset: isize,
        /// Destination, in bytes from the first copied byte.
        at: usize,
        /// Number of bytes.
        len: usize,
    },
    /// A box of elements.
    Strided {
        /// First element, in bytes from the element at index zero.
        offset: isize,
        /// Destination, in bytes from the first copied byte.
        at: usize,
        /// The dimensions of the box; empty for one element.
        dims: &'a [Dim],
        /// Replaces the extent of `dims[0]`.
        count: u64,
    },
}

impl StridedMemory {
    /// Validates a layout. [`Error::Misuse`] if an element is not addressable from `first` on.
    pub(super) fn new(first: u64, itemsize: usize, shape: &[u64], strides: &[i64]) -> Result<Self> {
        let misuse = |what: &str| {
            Error::Misuse(format!(
                "an array of shape {shape:?}, strides {strides:?}, {itemsize} bytes each: {what}"
            ))
        };
        if shape.len() != strides.len() {
            return Err(misuse("as many strides as dimensions are needed"));
        }
        if itemsize == 0 {
            return Err(misuse("an element has no bytes"));
        }
        let bytes = region::volume(shape)
            .and_then(|n| n.checked_mul(itemsize as u64))
            .filter(|&n| i64::try_from(n).is_ok())
            .ok_or_else(|| misuse("it has too many bytes"))?;
        if bytes > 0 {
            // The furthest elements must be addressable, so that no later offset overflows.
            let (low, high) =
                reach(itemsize, shape, strides).ok_or_else(|| misuse("its strides are too long"))?;
            let address = i64::try_from(first).map_err(|_| misuse("its address is none"))?;
            if address.checked_add(low).is_none_or(|low| low < 0) || address.checked_add(high).is_none() {
                return Err(misuse("it passes the end of the address space"));
            }
            if address == 0 {
                return Err(misuse("its address is null"));
            }
        }
        let contiguous = is_row_major(shape, strides, itemsize);
        Ok(Self { itemsize, shape: shape.into(), strides: strides.into(), bytes, contiguous })
    }

    pub(super) fn shape(&self) -> &[u64] {
        &self.shape
    }

    pub(super) fn itemsize(&self) -> usize {
        self.itemsize
    }

    pub(super) fn has_gaps_in_rows(&self) -> bool {
        self.strides.last().is_some_and(|&stride| stride != self.itemsize as i64)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Yields the runs of the bytes `from .. from + len` of the row-major bytes of `region`, in
    /// order. Both ends are between elements.
    pub(super) fn runs(
        &self,
        region: &Region,
        from: u64,
        len: u64,
        mut copy: impl FnMut(StridedRun<'_>),
    ) -> Result<()> {
        let item = self.itemsize as u64;
        if !region.fits(&self.shape) {
            return Err(self.refuse(region, "it passes the end"));
        }
        // A part's volume does not overflow, since the array's does not.
        let volume = region.volume().unwrap_or(0);
        if !from.is_multiple_of(item)
            || !len.is_multiple_of(item)
            || from.checked_add(len).is_none_or(|end| end > volume * item)
        {
            return Err(self.refuse(region, &format!("bytes {from} and {len} more are no elements of it")));
        }
        if len == 0 {
            return Ok(());
        }
        if self.contiguous && volume * item == self.bytes {
            copy(StridedRun::Contiguous { offset: from as isize, at: 0, len: len as usize });
            return Ok(());
        }
        let Some(dims) = gather::simplify(&region.extent, &self.strides) else { return Ok(()) };
        // The region is inside the array, and `new` has checked that no offset there overflows.
        let first = self.offset(&region.offset);
        let mut at = 0_usize;
        gather::pieces(&dims, from / item, len / item, |piece| {
            let offset = first + piece.offset as isize;
            copy(StridedRun::Strided { offset, at, dims: &dims[piece.dim..], count: piece.count });
            at += piece.elements as usize * self.itemsize;
        });
        Ok(())
    }

    /// Returns the bytes from the array's first element to the element at `index`, which is inside
    /// it.
    fn offset(&self, index: &[u64]) -> isize {
        index.iter().zip(&self.strides).map(|(&i, &stride)| i as isize * stride as isize).sum()
    }

    fn refuse(&self, region: &Region, what: &str) -> Error {
        Error::internal(
            format!("a region of an array of shape {:?}", self.shape),
            format!("{:?} + {:?}: {what}", region.offset, region.extent),
        )
    }
}

/// Returns the byte range from the lowest element's start to the highest element's end, relative to
/// the element at index zero. `(0, 0)` without elements, `None` on overflow.
pub(super) fn reach(itemsize: usize, shape: &[u64], strides: &[i64]) -> Option<(i64, i64)> {
    if shape.contains(&0) {
        return Some((0, 0));
    }
    let mut reach = (0_i64, i64::try_from(itemsize).ok()?);
    for (&n, &stride) in shape.iter().zip(strides) {
        let span = i64::try_from(n - 1).ok()?.checked_mul(stride)?;
        let end = if span < 0 { &mut reach.0 } else { &mut reach.1 };
        *end = end.checked_add(span)?;
    }
    Some(reach)
}

fn is_row_major(shape: &[u64], strides: &[i64], itemsize: usize) -> bool {
    let mut expected = itemsize as i64;
    for (&n, &stride) in shape.iter().zip(strides).rev() {
        if n > 1 {
            if stride != expected {
                return false;
            }
            expected = expected.wrapping_mul(n as i64);
        }
    }
    true
}
