//! Layouts: the ordered segments that one process holds of one logical tensor, in one buffer. The
//! segments of a buffer's layouts may repeat a region (a replica) or leave a part of the buffer to
//! none (padding).

use stepwell_core::format::index::ChunkRegion;
use stepwell_core::region::{Dims, Region, row_major_strides, volume};

use crate::read_plan::Request;
use crate::segment::{Place, Segment, SegmentError};
use crate::subchunk::run_to_boxes;

/// See the module documentation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout(pub Vec<Segment>);

impl Layout {
    /// All of a tensor in a buffer with those strides (bytes); `None`: row-major.
    pub fn whole(shape: &[u64], itemsize: u64, strides: Option<Dims<i64>>) -> Self {
        Self::one_box(Region::whole(shape), itemsize, strides)
    }

    /// True if it is [`Layout::whole`], row-major: the buffer is the tensor.
    pub fn is_whole(&self, shape: &[u64], itemsize: u64) -> bool {
        let [Segment { region: ChunkRegion::Box(region), place }] = self.0.as_slice() else { return false };
        let all = region.offset.iter().all(|&first| first == 0) && region.extent.as_slice() == shape;
        all && *place == Place::row_major(shape, itemsize)
    }

    /// A layout of row-major boxes at their places in the whole tensor.
    pub fn boxes(shape: &[u64], itemsize: u64, boxes: impl Iterator<Item = Region>) -> Self {
        let whole = Place::row_major(shape, itemsize);
        let segment =
            |region: Region| Segment { place: whole.of_box(&region), region: ChunkRegion::Box(region) };
        Self(boxes.map(segment).collect())
    }

    /// A box of a tensor in a buffer of its own.
    pub fn one_box(region: Region, itemsize: u64, strides: Option<Dims<i64>>) -> Self {
        let place = match strides {
            Some(strides) => Place { offset: 0, strides },
            None => Place::row_major(&region.extent, itemsize),
        };
        Self(vec![Segment { region: ChunkRegion::Box(region), place }])
    }

    /// A part of a flattened parameter, as ZeRO and FSDP1 shard it: `len` elements from `start` on
    /// of the process's *own* parameter, which is laid out as `self` in an array of shape `local`;
    /// they lie one after another from `offset` (bytes) on. The parameter may itself be a part of
    /// the tensor, or fused of several: so the run is cut into boxes of the local array, and each
    /// is followed through the segments that it meets.
    ///
    /// Returns the layout of a run of the flattened local array. `None` if the run exceeds the
    /// array, or a segment is not aligned with its dimensions: each dimension of a segment must
    /// step forwards along one of the array, and no two along the same.
    pub fn flat(&self, local: &[u64], itemsize: u64, start: u64, len: u64, offset: u64) -> Option<Self> {
        let local_strides: Vec<i64> = row_major_strides(local)
            .into_iter()
            .map(|n| i64::try_from(n.checked_mul(itemsize)?).ok())
            .collect::<Option<_>>()?;
        let own = self.0.iter().filter(|segment| segment.elements() != Some(0));
        let own: Vec<LocalBox> = own
            .map(|segment| LocalBox::new(segment, local, &local_strides, itemsize))
            .collect::<Option<_>>()?;
        let mut segments = Vec::new();
        let mut before = 0_u64; // elements of the run
        for part in run_to_boxes(local, start, len)? {
            let at = offset.checked_add(before.checked_mul(itemsize)?)?;
            let part_strides = row_major_strides(&part.extent);
            for own in &own {
                let mut region = own.region.clone();
                let mut place = Place { offset: at, strides: Dims::from_elem(0, region.ndim()) };
                let mut meets = true;
                for (d, line) in own.lines.iter().enumerate() {
                    let (first, count) = line.within(part.offset[d], part.extent[d]);
                    meets &= count > 0;
                    if !meets {
                        break;
                    }
                    let step = part_strides[d].checked_mul(itemsize)?;
                    place.offset += (line.start + first * line.step - part.offset[d]) * step;
                    if let Some(axis) = line.axis {
                        region.offset[axis] += first;
                        region.extent[axis] = count;
                        place.strides[axis] = i64::try_from(step.checked_mul(line.step)?).ok()?;
                    }
                }
                if meets {
                    segments.push(Segment { region: ChunkRegion::Box(region), place });
                }
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

    /// Returns the requests that fill the buffer `dst` from a stored tensor. `stored` is the stored
    /// part of the wanted tensor (a match's region; the rest is padding), `shape` the wanted shape.
    /// `None` if a segment exceeds the tensor.
    pub fn requests(&self, leaf: u32, shape: &[u64], stored: &Region, dst: u32) -> Option<Vec<Request>> {
        let mut requests = Vec::with_capacity(self.0.len());
        for segment in &self.0 {
            for (region, place) in segment.clip(shape, stored)? {
                requests.push(Request {
                    leaf,
                    region,
                    dst,
                    dst_offset: place.offset,
                    dst_strides: place.strides,
                });
            }
        }
        Some(requests)
    }
}

/// A segment in the coordinates of the local array.
struct LocalBox {
    /// In the logical tensor.
    region: Region,
    /// One for each local dimension.
    lines: Vec<Line>,
}

/// The places along one local dimension that a segment takes.
#[derive(Clone, Copy)]
struct Line {
    start: u64,
    step: u64,
    count: u64,
    /// The tensor's axis that steps along it; `None` where it takes one place.
    axis: Option<usize>,
}

impl Line {
    /// Its places in `from .. from + len`: the number of the first, and how many.
    fn within(&self, from: u64, len: u64) -> (u64, u64) {
        let before = |end: u64| end.saturating_sub(self.start).div_ceil(self.step).min(self.count);
        let first = before(from);
        (first, before(from + len) - first)
    }
}

impl LocalBox {
    fn new(segment: &Segment, local: &[u64], strides: &[i64], itemsize: u64) -> Option<Self> {
        let ChunkRegion::Box(region) = &segment.region else { return None };
        if region.is_empty()
            || volume(local)? == 0
            || itemsize == 0
            || !segment.place.offset.is_multiple_of(itemsize)
        {
            return None;
        }
        let at = segment.place.offset / itemsize;
        if at >= volume(local)? {
            return None;
        }
        let steps = row_major_strides(local).into_iter().zip(local);
        let mut lines: Vec<Line> = steps
            .map(|(step, size)| Line { start: at / step % size, step: 1, count: 1, axis: None })
            .collect();
        for (axis, (&n, &stride)) in region.extent.iter().zip(&segment.place.strides).enumerate() {
            if n == 1 {
                continue;
            }
            // The outermost dimension that has room for it: a step along an inner one would be
            // shorter.
            let line = lines.iter_mut().zip(strides).zip(local).find_map(|((line, &local_stride), &size)| {
                let step = u64::try_from(stride).ok()? / u64::try_from(local_stride).ok()?;
                let last = step.checked_mul(n - 1)?.checked_add(line.start)?;
                let fits = stride % local_stride == 0 && step > 0 && last < size && line.axis.is_none();
                fits.then(|| *line = Line { start: line.start, step, count: n, axis: Some(axis) })
            });
            line?;
        }
        Some(Self { region: region.clone(), lines })
    }
}

#[cfg(test)]
mod tests;
