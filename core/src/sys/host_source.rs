//! A strided host array that somebody else owns, as a source of bytes.
#![expect(clippy::cast_possible_wrap, reason = "the bytes of a slice fit an i64")]

use std::ptr::NonNull;
use std::sync::Arc;

use super::strided::{StridedMemory, StridedRun, reach};
use super::{copy, stream};
use crate::region::Region;
use crate::{Error, Result};

/// An n-dimensional array in host memory, of any strides (negative, zero, Fortran order). It is
/// only read, and never through a reference. So other references to the memory may exist.
#[derive(Debug)]
pub struct HostSource {
    /// The element at index (0, 0, …).
    first: NonNull<u8>,
    memory: StridedMemory,
    /// The memory, if this value owns it.
    owned: Option<Arc<Vec<u8>>>,
}

// SAFETY: any thread may read memory, and `new` requires that it is readable while this value
// lives.
unsafe impl Send for HostSource {}
// SAFETY: as above.
unsafe impl Sync for HostSource {}

impl HostSource {
    /// Wraps an array of `shape` with `strides` in bytes, whose element at index zero is at
    /// `first`. The address may be unaligned. It is ignored if the array has no elements.
    /// [`Error::Misuse`] if shape and strides do not make an addressable array.
    ///
    /// # Safety
    /// While the value lives, every element that `shape` and `strides` can name is readable memory.
    /// Nobody writes to it during a copy.
    pub unsafe fn new(first: *const u8, itemsize: usize, shape: &[u64], strides: &[i64]) -> Result<Self> {
        let memory = StridedMemory::new(first as u64, itemsize, shape, strides)?;
        // An array without elements needs no address.
        let first = NonNull::new(first.cast_mut()).unwrap_or(NonNull::dangling());
        Ok(Self { first, memory, owned: None })
    }

    /// Wraps an array in memory that the value owns, possibly shared. The element at index zero
    /// starts at byte `first` of `memory`. [`Error::Misuse`] if an element would be outside.
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
        // SAFETY: all elements are in `memory`. The value keeps it, and nobody can write to it
        // while it is shared.
        let mut source = unsafe { Self::new(memory.as_ptr().wrapping_add(first), itemsize, shape, strides)? };
        source.owned = Some(memory);
        Ok(source)
    }

    /// Returns the extent of each dimension, in elements.
    pub fn shape(&self) -> &[u64] {
        self.memory.shape()
    }

    /// Returns the bytes per element.
    pub fn itemsize(&self) -> usize {
        self.memory.itemsize()
    }

    /// Returns the bytes of the array.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    /// Returns true if neighbours in a row are apart in memory, as in a transposed array.
    pub fn has_gaps_in_rows(&self) -> bool {
        self.memory.has_gaps_in_rows()
    }

    /// Copies the bytes `from .. from + into.len()` of the row-major bytes of `region`. Both ends
    /// are between elements.
    pub fn copy(&self, region: &Region, from: u64, into: &mut [u8]) -> Result<()> {
        let (first, itemsize) = (self.first.as_ptr(), self.itemsize());
        let to = into.as_mut_ptr();
        self.memory.runs(region, from, into.len() as u64, |run| match run {
            StridedRun::Contiguous { offset, at, len } => {
                // SAFETY: `len` bytes of the array from `offset` on are readable (see `new`), and
                // `at + len <= into.len()`. `into` is a mutable slice, so it overlaps no memory
                // that an owner promised to be readable.
                unsafe { stream::run(to.add(at), first.offset(offset), len) };
            }
            // SAFETY: the elements of the region are readable, and `into` has as many bytes from
            // `at` on.
            StridedRun::Strided { offset, at, dims, count } => unsafe {
                copy::gather(to.add(at), first.offset(offset), itemsize, dims, count);
            },
        })
    }
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

    /// Returns a view of an array of element numbers: the expected result of a source with the same
    /// strides.
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
            // The broadcast axis may add a dimension.
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
