//! Layouts: the ordered segments that one process holds of one logical tensor, in one buffer. The segments of a buffer's layouts may repeat a region (a
//! replica) or leave a part of the buffer to none (padding).

use stepwell_core::format::index::ChunkRegion;
use stepwell_core::region::{Region, row_major_strides, volume};

use crate::read_plan::Request;
use crate::segment::{Place, Segment, SegmentError};
use crate::subchunk::run_to_boxes;

/// See the module documentation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout(pub Vec<Segment>);

impl Layout {
    /// All of a tensor in a buffer with those strides (bytes); `None`: row-major.
    pub fn whole(shape: &[u64], itemsize: u64, strides: Option<Vec<i64>>) -> Self {
        Self::one_box(Region::whole(shape), itemsize, strides)
    }

    /// A box of a tensor in a buffer of its own.
    pub fn one_box(region: Region, itemsize: u64, strides: Option<Vec<i64>>) -> Self {
        let row_major = || {
            let strides = row_major_strides(&region.extent).into_iter();
            strides.map(|n| i64::try_from(n.saturating_mul(itemsize)).unwrap_or(i64::MAX)).collect()
        };
        let place = Place { offset: 0, strides: strides.unwrap_or_else(row_major) };
        Self(vec![Segment { region: ChunkRegion::Box(region), place }])
    }

    /// A part of a flattened parameter, as ZeRO and FSDP1 shard it: `len` elements from `start` on of the process's *own* parameter, which is laid out as
    /// `self` in an array of shape `local`; they lie one after another from `offset` (bytes) on. The parameter may itself be a part of the tensor,
    /// or fused of several: so the run is cut into boxes of the local array, and each is followed through the segments that it meets.
    ///
    /// `None` where the run does not lie in the local array, or where a segment is no box in axis order of it (each dimension of a segment must step along
    /// one dimension of the local array, or along none).
    pub fn flat(&self, local: &[u64], itemsize: u64, start: u64, len: u64, offset: u64) -> Option<Self> {
        let local_strides: Vec<i64> = row_major_strides(local)
            .into_iter()
            .map(|n| i64::try_from(n.checked_mul(itemsize)?).ok())
            .collect::<Option<_>>()?;
        let own: Vec<LocalBox> =
            self.0.iter().map(|segment| LocalBox::new(segment, local, &local_strides, itemsize)).collect::<Option<_>>()?;
        let mut segments = Vec::new();
        let mut before = 0_u64; // elements of the run
        for part in run_to_boxes(local, start, len)? {
            let at = offset.checked_add(before.checked_mul(itemsize)?)?;
            let part_strides = row_major_strides(&part.extent);
            for own in &own {
                let Some(both) = own.local.intersect(&part) else { continue };
                let mut region = own.region.clone();
                let mut place = Place { offset: at, strides: vec![0; region.ndim()] };
                for d in 0..local.len() {
                    place.offset += (both.offset[d] - part.offset[d]) * part_strides[d] * itemsize;
                    if let Some(axis) = own.axis_of[d] {
                        region.offset[axis] += both.offset[d] - own.local.offset[d];
                        region.extent[axis] = both.extent[d];
                        place.strides[axis] = i64::try_from(part_strides[d] * itemsize).ok()?;
                    }
                }
                segments.push(Segment { region: ChunkRegion::Box(region), place });
            }
            before += part.volume()?;
        }
        Some(Self(segments))
    }

    /// Checks every segment against the tensor and the buffer.
    pub fn check(&self, shape: &[u64], itemsize: u64, buffer_bytes: u64) -> Result<(), SegmentError> {
        self.0.iter().enumerate().try_for_each(|(i, segment)| segment.check(i, shape, itemsize, buffer_bytes))
    }

    /// Elements that the segments hold.
    pub fn elements(&self) -> Option<u64> {
        self.0.iter().try_fold(0_u64, |sum, segment| sum.checked_add(segment.elements()?))
    }

    /// What must be read to fill the buffer `dst` from a stored tensor. `stored` is the part of the wanted tensor that is stored (a match's
    /// region; what lies beyond it is padding), `shape` the wanted shape. `None` where a segment does not lie in the tensor.
    pub fn requests(&self, leaf: u32, shape: &[u64], stored: &Region, dst: u32) -> Option<Vec<Request>> {
        let mut requests = Vec::with_capacity(self.0.len());
        for segment in &self.0 {
            for (region, place) in segment.clip(shape, stored)? {
                requests.push(Request { leaf, region, dst, dst_offset: place.offset, dst_strides: place.strides });
            }
        }
        Some(requests)
    }
}

/// A segment as a box of the local array.
struct LocalBox {
    /// In the logical tensor.
    region: Region,
    /// In the local array; same extents, but for dimensions of one element, in another order.
    local: Region,
    /// The tensor's axis along which a local dimension steps.
    axis_of: Vec<Option<usize>>,
}

impl LocalBox {
    fn new(segment: &Segment, local: &[u64], strides: &[i64], itemsize: u64) -> Option<Self> {
        let ChunkRegion::Box(region) = &segment.region else { return None };
        let mut at = segment.place.offset;
        if !at.is_multiple_of(itemsize.max(1)) || volume(local)? == 0 {
            return None;
        }
        at /= itemsize.max(1);
        let steps = row_major_strides(local);
        let offset: Vec<u64> = steps.iter().zip(local).map(|(step, size)| at / step % size).collect();
        let mut extent = vec![1; local.len()];
        let mut axis_of = vec![None; local.len()];
        for (axis, (&n, stride)) in region.extent.iter().zip(&segment.place.strides).enumerate() {
            if n == 1 {
                continue;
            }
            // Among dimensions of equal stride only one has more than one element.
            let d = (0..local.len()).find(|&d| strides[d] == *stride && local[d] > 1 && axis_of[d].is_none())?;
            axis_of[d] = Some(axis);
            extent[d] = n;
        }
        let found = Self { region: region.clone(), local: Region { offset, extent }, axis_of };
        found.local.fits(local).then_some(found)
    }
}

#[cfg(test)]
mod tests;
