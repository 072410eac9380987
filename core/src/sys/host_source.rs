//! A strided array in host memory that somebody else owns, as a source of bytes.

use std::ptr::NonNull;

use super::copy;
use crate::copy::gather;
use crate::region::{self, Region};
use crate::{Error, Result};

/// An n-dimensional array in host memory, of any strides (negative, zero, Fortran order). It is only ever read, and never through a reference: no
/// promise is needed that nobody else holds one.
#[derive(Debug)]
pub struct HostSource {
    /// The element at index (0, 0, …).
    first: NonNull<u8>,
    itemsize: usize,
    shape: Box<[u64]>,
    /// In bytes.
    strides: Box<[i64]>,
    /// Bytes in the array.
    bytes: u64,
    contiguous: bool,
}

// SAFETY: reading memory has no thread affinity, and `new` demands that it may be read for as long as this lives.
unsafe impl Send for HostSource {}
// SAFETY: as above.
unsafe impl Sync for HostSource {}

impl HostSource {
    /// An array of `shape` whose element at index zero is at `first`, with `strides` in bytes. The address need not be aligned; it is not looked at
    /// where the array has no elements. [`Error::Misuse`] where shape and strides do not make an addressable array.
    ///
    /// # Safety
    /// For as long as the value lives, every element that `shape` and `strides` can name is readable memory, and nobody writes to it while a
    /// copy is under way.
    pub unsafe fn new(first: *const u8, itemsize: usize, shape: &[u64], strides: &[i64]) -> Result<Self> {
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
        let first = if bytes == 0 {
            NonNull::dangling()
        } else {
            // The furthest elements must be addressable, so that no later offset overflows.
            let mut reach = (0_i64, itemsize as i64);
            for (&n, &stride) in shape.iter().zip(strides) {
                let span = i64::try_from(n - 1).ok().and_then(|n| n.checked_mul(stride));
                let span = span.ok_or_else(|| misuse("a stride is too long"))?;
                let end = if span < 0 { &mut reach.0 } else { &mut reach.1 };
                *end = end.checked_add(span).ok_or_else(|| misuse("its strides are too long"))?;
            }
            let address = i64::try_from(first as usize).map_err(|_| misuse("its address is none"))?;
            if address.checked_add(reach.0).is_none_or(|low| low < 0)
                || address.checked_add(reach.1).is_none()
            {
                return Err(misuse("it passes the end of the address space"));
            }
            NonNull::new(first.cast_mut()).ok_or_else(|| misuse("its address is null"))?
        };
        let contiguous = is_row_major(shape, strides, itemsize);
        Ok(Self { first, itemsize, shape: shape.into(), strides: strides.into(), bytes, contiguous })
    }

    /// Elements along each dimension.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Bytes per element.
    pub fn itemsize(&self) -> usize {
        self.itemsize
    }

    /// Bytes in the array.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Copies the bytes `from .. from + into.len()` of the row-major bytes of `region`. Both ends fall between elements.
    pub fn copy(&self, region: &Region, from: u64, into: &mut [u8]) -> Result<()> {
        let item = self.itemsize as u64;
        let len = into.len() as u64;
        if !region.fits(&self.shape) {
            return Err(self.refuse(region, "it passes the end"));
        }
        // The volume of a part of the array does not overflow, since that of the array does not.
        let volume = region.volume().unwrap_or(0);
        if from % item != 0 || len % item != 0 || from.checked_add(len).is_none_or(|end| end > volume * item)
        {
            return Err(self.refuse(region, &format!("bytes {from} and {len} more are no elements of it")));
        }
        if len == 0 {
            return Ok(());
        }
        let whole = self.contiguous && volume * item == self.bytes;
        if whole {
            // SAFETY: `from + len <= bytes`, all of it readable (see `new`); `into` is a mutable slice, so it overlaps nothing that is readable
            // through a promise of its owner.
            unsafe { copy::run(into.as_mut_ptr(), self.first.as_ptr().add(from as usize), into.len()) };
            return Ok(());
        }
        let Some(dims) = gather::simplify(&region.extent, &self.strides) else { return Ok(()) };
        // SAFETY: the region lies in the array, and `new` has checked that no offset in the array overflows.
        let first = unsafe { self.first.as_ptr().offset(self.offset(&region.offset)) };
        let mut at = 0_usize;
        gather::pieces(&dims, from / item, len / item, |piece| {
            let bytes = piece.elements as usize * self.itemsize;
            // SAFETY: pieces are boxes of elements of the region, so readable; together they are `len` bytes, and `into` has as many.
            unsafe {
                copy::gather(
                    into.as_mut_ptr().add(at),
                    first.offset(piece.offset as isize),
                    self.itemsize,
                    &dims[piece.dim..],
                    piece.count,
                );
            }
            at += bytes;
        });
        Ok(())
    }

    /// Bytes from the array's first element to the element at `index`, which lies in it.
    fn offset(&self, index: &[u64]) -> isize {
        index.iter().zip(&self.strides).map(|(&i, &stride)| i as isize * stride as isize).sum()
    }

    fn refuse(&self, region: &Region, what: &str) -> Error {
        Error::Misuse(format!(
            "region {:?} + {:?} of an array of shape {:?}: {what}",
            region.offset, region.extent, self.shape
        ))
    }
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
