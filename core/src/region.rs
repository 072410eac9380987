//! Regions: n-dimensional boxes in a logical tensor. Pure geometry in units of elements.

use smallvec::SmallVec;

/// One number per dimension. Up to four are stored inline, because a plan of 100 000 leaves would
/// otherwise spend most of its time in the allocator.
pub type Dims<T = u64> = SmallVec<[T; 4]>;

/// A box: `offset[d] .. offset[d] + extent[d]` along every dimension `d`. A 0-d region has one
/// element.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    /// The first element along each dimension.
    pub offset: Dims,
    /// The number of elements along each dimension. It has the same length as `offset`.
    pub extent: Dims,
}

impl Region {
    /// Returns the region that covers all of `shape`.
    pub fn whole(shape: &[u64]) -> Self {
        Self { offset: Dims::from_elem(0, shape.len()), extent: Dims::from_slice(shape) }
    }

    /// Returns the number of dimensions.
    pub fn ndim(&self) -> usize {
        self.extent.len()
    }

    /// Returns the number of elements. `None` if it does not fit 64 bits.
    pub fn volume(&self) -> Option<u64> {
        volume(&self.extent)
    }

    /// True if it has no element.
    pub fn is_empty(&self) -> bool {
        self.extent.contains(&0)
    }

    /// True if it is inside a tensor of that shape. The check cannot overflow, because the numbers
    /// may be from a file.
    pub fn fits(&self, shape: &[u64]) -> bool {
        self.offset.len() == shape.len()
            && self.extent.len() == shape.len()
            && self
                .offset
                .iter()
                .zip(&self.extent)
                .zip(shape)
                .all(|((&offset, &extent), &size)| offset.checked_add(extent).is_some_and(|end| end <= size))
    }

    /// Returns the common elements. `None` if there are none, or if the dimensions differ.
    pub fn intersect(&self, other: &Self) -> Option<Self> {
        if self.ndim() != other.ndim() {
            return None;
        }
        let mut offset = Dims::with_capacity(self.ndim());
        let mut extent = Dims::with_capacity(self.ndim());
        for d in 0..self.ndim() {
            let start = self.offset[d].max(other.offset[d]);
            let end = (self.offset[d].saturating_add(self.extent[d]))
                .min(other.offset[d].saturating_add(other.extent[d]));
            if start >= end {
                return None;
            }
            offset.push(start);
            extent.push(end - start);
        }
        Some(Self { offset, extent })
    }
}

/// Returns the product of the extents. 1 without extents, 0 if one is zero, `None` on overflow.
pub fn volume(extent: &[u64]) -> Option<u64> {
    if extent.contains(&0) {
        return Some(0);
    }
    extent.iter().try_fold(1_u64, |product, &n| product.checked_mul(n))
}

/// Returns the strides of a row-major (C order) array of that shape, in elements. They saturate if
/// the shape is larger than any memory.
pub fn row_major_strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1_u64; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d].saturating_mul(shape[d].max(1));
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scalar_has_one_element_and_fits_itself() {
        let scalar = Region::whole(&[]);
        assert_eq!(scalar.volume(), Some(1));
        assert!(scalar.fits(&[]));
        assert_eq!(scalar.intersect(&scalar), Some(scalar.clone()));
    }

    #[test]
    fn numbers_from_a_hostile_file_do_not_overflow() {
        let region = Region { offset: vec![u64::MAX].into(), extent: vec![2].into() };
        assert!(!region.fits(&[10]));
        assert_eq!(volume(&[u64::MAX, 2]), None);
        assert_eq!(volume(&[u64::MAX, 2, 0]), Some(0));
    }
}
