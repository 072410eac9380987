//! A strided array in host memory that somebody else owns, as a source of bytes.
#![expect(
    clippy::cast_possible_wrap,
    reason = "sizes and indices of an array in memory fit an isize; `new` has checked shape and strides"
)]

use std::ptr::NonNull;
use std::sync::Arc;

use super::{copy, stream};
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
    /// The memory, where it is this value's own.
    owned: Option<Arc<Vec<u8>>>,
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
            let (low, high) =
                reach(itemsize, shape, strides).ok_or_else(|| misuse("its strides are too long"))?;
            let address = i64::try_from(first as usize).map_err(|_| misuse("its address is none"))?;
            if address.checked_add(low).is_none_or(|low| low < 0) || address.checked_add(high).is_none() {
                return Err(misuse("it passes the end of the address space"));
            }
            NonNull::new(first.cast_mut()).ok_or_else(|| misuse("its address is null"))?
        };
        let contiguous = is_row_major(shape, strides, itemsize);
        Ok(Self {
            first,
            itemsize,
            shape: shape.into(),
            strides: strides.into(),
            bytes,
            contiguous,
            owned: None,
        })
    }

    /// An array in memory that it owns, alone or with others: the element at index zero starts at byte `first` of `memory`. [`Error::Misuse`] where an element would lie outside.
    pub fn owned(
        memory: impl Into<Arc<Vec<u8>>>,
        first: usize,
        itemsize: usize,
        shape: &[u64],
        strides: &[i64],
    ) -> Result<Self> {
        let memory: Arc<Vec<u8>> = memory.into();
        if !reach(itemsize, shape, strides).is_some_and(|(low, high)| {
            // The bytes of a slice always fit an i64.
            let (first, end) = (first as i64, memory.len() as i64);
            low == high
                || (first.checked_add(low) >= Some(0)
                    && first.checked_add(high).is_some_and(|high| high <= end))
        }) {
            return Err(Error::Misuse(format!(
                "an array of shape {shape:?}, strides {strides:?}, {itemsize} bytes each does not lie in {} bytes from byte {first} on",
                memory.len()
            )));
        }
        // SAFETY: all elements lie in `memory`, which the value keeps, and to which nobody can write while it is shared so.
        let mut source = unsafe { Self::new(memory.as_ptr().wrapping_add(first), itemsize, shape, strides)? };
        source.owned = Some(memory);
        Ok(source)
    }

    /// The memory, where it is the value's own.
    pub fn memory(&self) -> Option<&[u8]> {
        self.owned.as_deref().map(Vec::as_slice)
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
        if !from.is_multiple_of(item)
            || !len.is_multiple_of(item)
            || from.checked_add(len).is_none_or(|end| end > volume * item)
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
            unsafe { stream::run(into.as_mut_ptr(), self.first.as_ptr().add(from as usize), into.len()) };
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

/// The bytes from the lowest element's first to the highest one's last, relative to the element at index zero; `(0, 0)` if there are no elements, `None` on overflow.
fn reach(itemsize: usize, shape: &[u64], strides: &[i64]) -> Option<(i64, i64)> {
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

#[cfg(test)]
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "the numbers of these tests are small"
)]
mod tests {
    use ndarray::{ArrayD, ArrayViewD, Axis, IxDyn, Slice};
    use proptest::prelude::*;

    use super::*;

    /// A view of an array of element numbers: what a source of the same strides must deliver.
    fn view<'a>(base: &'a ArrayD<u64>, steps: &[(usize, isize)], order: &[usize]) -> ArrayViewD<'a, u64> {
        let mut view = base.view();
        for (axis, &(start, step)) in steps.iter().enumerate().take(base.ndim()) {
            let start = (start % (view.len_of(Axis(axis)) + 1)) as isize;
            view.slice_axis_inplace(Axis(axis), Slice::new(start, None, step));
        }
        let mut axes: Vec<usize> = (0..base.ndim()).collect();
        axes.sort_by_key(|&axis| order.get(axis).copied().unwrap_or(axis));
        view.permuted_axes(IxDyn(&axes))
    }

    fn memory(elements: usize, itemsize: usize) -> Vec<u8> {
        (0..elements * itemsize).map(|i| (i as u32).wrapping_mul(0x9E37_79B1).to_le_bytes()[3]).collect()
    }

    fn strategy() -> impl Strategy<Value = (Vec<usize>, Vec<(usize, isize)>, Vec<usize>)> {
        let step = prop_oneof![Just(1_isize), Just(1), Just(-1), Just(2), Just(-3)];
        (
            prop::collection::vec(prop_oneof![1_usize..6, 30_usize..70], 0..4),
            prop::collection::vec((0_usize..3, step), 4),
            prop::collection::vec(0_usize..9, 4),
        )
    }

    proptest! {
        #[test]
        fn any_part_of_any_strided_array_is_what_ndarray_says(
            (shape, steps, order) in strategy(),
            itemsize in prop_oneof![Just(1_usize), Just(2), Just(3), Just(4), Just(8), Just(16)],
            box_of in prop::collection::vec((0.0..1.0_f64, 0.0..1.0_f64), 4),
            cut in (0.0..1.0_f64, 0.0..1.0_f64),
            broadcast in any::<bool>(),
        ) {
            let elements: usize = shape.iter().product();
            let base = ArrayD::from_shape_vec(IxDyn(&shape), (0..elements as u64).collect()).unwrap();
            let view = view(&base, &steps, &order);
            let first = view.first().copied().unwrap_or(0) as usize * itemsize;
            let mut shape: Vec<u64> = view.shape().iter().map(|&n| n as u64).collect();
            let mut strides: Vec<i64> = view.strides().iter().map(|&s| (s * itemsize as isize) as i64).collect();
            let mut numbers: Vec<u64> = view.iter().copied().collect();
            if broadcast {
                shape.insert(0, 3);
                strides.insert(0, 0);
                numbers = numbers.repeat(3);
            }
            let bytes = memory(elements, itemsize);
            let source = HostSource::owned(bytes.clone(), first, itemsize, &shape, &strides).unwrap();

            let (mut offset, mut extent) = (Vec::new(), Vec::new());
            for (&n, &(a, b)) in shape.iter().zip(&box_of) {
                let start = (a * n as f64) as u64;
                offset.push(start);
                extent.push((b * (n - start) as f64).ceil() as u64);
            }
            // The broadcast axis may make it one more than there are boxes.
            offset.resize(shape.len(), 0);
            extent.extend_from_slice(&shape[extent.len()..]);
            let region = Region { offset: offset.into(), extent: extent.into() };
            let numbers = ArrayD::from_shape_vec(
                IxDyn(&shape.iter().map(|&n| n as usize).collect::<Vec<_>>()), numbers).unwrap();
            let mut part = numbers.view();
            for d in 0..region.ndim() {
                let start = region.offset[d] as isize;
                part.slice_axis_inplace(Axis(d), Slice::new(start, Some(start + region.extent[d] as isize), 1));
            }
            let wanted: Vec<u8> =
                part.iter().flat_map(|&i| bytes[i as usize * itemsize..][..itemsize].to_vec()).collect();

            let mut whole = vec![0; wanted.len()];
            source.copy(&region, 0, &mut whole).unwrap();
            prop_assert_eq!(&whole, &wanted);

            let total = part.len();
            let (a, b) = ((cut.0 * total as f64) as usize, (cut.1 * total as f64) as usize);
            let (from, to) = (a.min(b) * itemsize, a.max(b) * itemsize);
            let mut cut = vec![0; to - from];
            source.copy(&region, from as u64, &mut cut).unwrap();
            prop_assert_eq!(&cut, &wanted[from..to]);
        }
    }

    #[test]
    fn long_runs_of_any_alignment_arrive_whole() {
        let bytes = memory(70_000, 1);
        for (start, len) in [(0, 70_000), (1, 69_999), (63, 4096), (7, 4097), (64, 65_536), (3, 5000)] {
            let source = HostSource::owned(bytes.clone(), start, 1, &[len as u64], &[1]).unwrap();
            for skip in [0, 1, 31, 64] {
                let mut into = vec![0xEE; len + 128];
                source.copy(&Region::whole(&[len as u64]), 0, &mut into[skip..skip + len]).unwrap();
                assert_eq!(into[skip..skip + len], bytes[start..start + len]);
                assert!(
                    into[..skip].iter().chain(&into[skip + len..]).all(|&b| b == 0xEE),
                    "wrote beside it"
                );
            }
        }
    }

    #[test]
    fn arrays_that_pass_the_end_of_their_memory_are_refused() {
        let owned =
            |first, shape: &[u64], strides: &[i64]| HostSource::owned(vec![0; 64], first, 4, shape, strides);
        assert!(owned(0, &[16], &[4]).is_ok());
        assert!(owned(60, &[16], &[-4]).is_ok());
        assert!(owned(0, &[0, 1 << 40], &[1 << 40, 1 << 40]).is_ok(), "no elements, no bytes");
        assert!(owned(0, &[1 << 20], &[0]).is_ok(), "a broadcast of one element");
        for (first, shape, strides) in [
            (0, vec![17], vec![4]),
            (4, vec![16], vec![4]),
            (56, vec![16], vec![-4]),
            (0, vec![2, 2], vec![4]),
            (0, vec![u64::MAX], vec![4]),
            (0, vec![1 << 62], vec![0]),
            (0, vec![3], vec![i64::MAX]),
            (usize::MAX, vec![1], vec![4]),
        ] {
            assert!(owned(first, &shape, &strides).is_err(), "{first} {shape:?} {strides:?}");
        }
    }

    #[test]
    fn parts_of_elements_and_regions_outside_are_refused() {
        let source = HostSource::owned(vec![0; 64], 0, 4, &[4, 4], &[16, 4]).unwrap();
        let whole = Region::whole(&[4, 4]);
        assert!(source.copy(&whole, 0, &mut [0; 6]).is_err());
        assert!(source.copy(&whole, 2, &mut [0; 4]).is_err());
        assert!(source.copy(&whole, 60, &mut [0; 8]).is_err());
        assert!(source.copy(&whole, u64::MAX - 3, &mut [0; 8]).is_err());
        let outside = Region { offset: vec![3, 0].into(), extent: vec![2, 4].into() };
        assert!(source.copy(&outside, 0, &mut [0; 4]).is_err());
        assert!(source.copy(&Region::whole(&[16]), 0, &mut [0; 4]).is_err());
    }
}
