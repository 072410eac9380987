//! Segments: a region of a logical tensor ↔ a strided place in a local buffer. The one idea under
//! every layout: a box in a row-major array is a segment, and so is a part of a fused, transposed,
//! padded or flattened parameter.

use stepwell_core::format::index::ChunkRegion;
use stepwell_core::region::{Dims, Region, row_major_strides, volume};

use crate::subchunk::run_to_boxes;

/// The place of a region in a buffer, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The region's first element.
    pub offset: u64,
    /// Distance between neighbours along each dimension of the region; one stride for a run.
    pub strides: Dims<i64>,
}

impl Place {
    /// A box of that extent in a row-major buffer of its own.
    pub fn row_major(extent: &[u64], itemsize: u64) -> Self {
        let mut strides = Dims::from_elem(i64::try_from(itemsize).unwrap_or(i64::MAX), extent.len());
        for d in (1..extent.len()).rev() {
            let extent = i64::try_from(extent[d].max(1)).unwrap_or(i64::MAX);
            strides[d - 1] = strides[d].saturating_mul(extent);
        }
        Self { offset: 0, strides }
    }

    /// The place of a box inside this region.
    #[must_use]
    pub fn of_box(&self, region: &Region) -> Self {
        let steps = region.offset.iter().zip(&self.strides);
        let offset = steps.fold(self.offset, |at, (&n, &stride)| {
            at.saturating_add_signed(stride.saturating_mul(i64::try_from(n).unwrap_or(i64::MAX)))
        });
        Self { offset, strides: self.strides.clone() }
    }

    /// The first byte and the end of a region of that extent in the buffer. `None` if they overflow
    /// 64 bits or begin before the buffer.
    pub fn span(&self, extent: &[u64], itemsize: u64) -> Option<(u64, u64)> {
        if extent.contains(&0) {
            return Some((self.offset, self.offset));
        }
        let (mut first, mut end) = (i128::from(self.offset), i128::from(self.offset) + i128::from(itemsize));
        for (&n, &stride) in extent.iter().zip(&self.strides) {
            let reach = i128::from(n - 1).checked_mul(i128::from(stride))?;
            if reach < 0 {
                first = first.checked_add(reach)?;
            } else {
                end = end.checked_add(reach)?;
            }
        }
        Some((u64::try_from(first).ok()?, u64::try_from(end).ok()?))
    }
}

/// See the module documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// A box of the logical tensor, or a run of the flattened one.
    pub region: ChunkRegion,
    /// The place of its elements in the local buffer.
    pub place: Place,
}

/// Why a segment cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SegmentError {
    /// The region is no part of the tensor.
    #[error("segment {number} does not lie in the tensor's shape {shape:?}")]
    Outside {
        /// Position of the segment.
        number: usize,
        /// The tensor's shape.
        shape: Vec<u64>,
    },
    /// The place has not one stride per dimension.
    #[error("segment {number} has {strides} strides for {dimensions} dimensions")]
    Strides {
        /// Position of the segment.
        number: usize,
        /// Strides that it has.
        strides: usize,
        /// Strides that it needs.
        dimensions: usize,
    },
    /// The place is no part of the buffer.
    #[error("segment {number} does not lie in its buffer of {buffer_bytes} bytes")]
    Buffer {
        /// Position of the segment.
        number: usize,
        /// The buffer's size.
        buffer_bytes: u64,
    },
}

impl Segment {
    /// Number of elements.
    pub fn elements(&self) -> Option<u64> {
        match &self.region {
            ChunkRegion::Box(region) => region.volume(),
            ChunkRegion::Run { len, .. } => Some(*len),
        }
    }

    /// Checks it against the tensor and the buffer; `number` is its position, for the message.
    pub fn check(
        &self,
        number: usize,
        shape: &[u64],
        itemsize: u64,
        buffer_bytes: u64,
    ) -> Result<(), SegmentError> {
        let (extent, fits) = match &self.region {
            ChunkRegion::Box(region) => (region.extent.clone(), region.fits(shape)),
            ChunkRegion::Run { start, len } => {
                let end = start.checked_add(*len);
                (
                    Dims::from_elem(*len, 1),
                    matches!((end, volume(shape)), (Some(end), Some(all)) if end <= all),
                )
            }
        };
        if !fits {
            return Err(SegmentError::Outside { number, shape: shape.to_vec() });
        }
        if self.place.strides.len() != extent.len() {
            let (strides, dimensions) = (self.place.strides.len(), extent.len());
            return Err(SegmentError::Strides { number, strides, dimensions });
        }
        match self.place.span(&extent, itemsize) {
            Some((_, end)) if end <= buffer_bytes => Ok(()),
            _ => Err(SegmentError::Buffer { number, buffer_bytes }),
        }
    }

    /// The segment as boxes with their places: itself, or the boxes of its run. `None` if it
    /// exceeds the tensor.
    pub fn boxes(&self, shape: &[u64]) -> Option<Vec<(Region, Place)>> {
        match &self.region {
            ChunkRegion::Box(region) => {
                region.fits(shape).then(|| vec![(region.clone(), self.place.clone())])
            }
            ChunkRegion::Run { start, len } => {
                let stride = self.place.strides.first().copied()?;
                let mut before = 0_u64; // elements of the run
                let mut boxes = Vec::new();
                for region in run_to_boxes(shape, *start, *len)? {
                    let offset = i128::from(self.place.offset) + i128::from(before) * i128::from(stride);
                    let scaled = |n: u64| i64::try_from(i128::from(n) * i128::from(stride)).ok();
                    let strides =
                        row_major_strides(&region.extent).into_iter().map(scaled).collect::<Option<_>>()?;
                    before += region.volume()?;
                    boxes.push((region, Place { offset: u64::try_from(offset).ok()?, strides }));
                }
                Some(boxes)
            }
        }
    }

    /// The part of it inside `within` (a box of the tensor), as boxes with their places.
    pub fn clip(&self, shape: &[u64], within: &Region) -> Option<Vec<(Region, Place)>> {
        let boxes = self.boxes(shape)?.into_iter().filter_map(|(region, place)| {
            let part = region.intersect(within)?;
            let offset = part.offset.iter().zip(&region.offset).zip(&place.strides).try_fold(
                i128::from(place.offset),
                |at, ((part, region), stride)| {
                    at.checked_add(i128::from(part - region) * i128::from(*stride))
                },
            );
            Some(offset.and_then(|at| u64::try_from(at).ok()).map(|offset| (part, Place { offset, ..place })))
        });
        boxes.collect()
    }
}
