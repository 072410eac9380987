//! Segments: a box of a logical tensor ↔ a strided place in a local buffer. The one idea under
//! every layout: a box in a row-major array is a segment, and so is a part of a fused, transposed,
//! padded or flattened parameter.
//!
//! A layout is the ordered list of segments that one process holds of one logical tensor. They may
//! repeat a region (a replica) or leave a part of the buffer to none (padding).

use stepwell_core::region::{Dims, Region, row_major_strides, volume};

use crate::subchunk::run_to_boxes;

/// The place of a region in a buffer, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The region's first element.
    pub offset: u64,
    /// Distance between neighbours along each dimension of the region.
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
}

/// See the module documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// A box of the logical tensor.
    pub region: Region,
    /// The place of its elements in the local buffer.
    pub place: Place,
}

/// A part of a flattened parameter, as ZeRO and FSDP1 shard it: `len` elements from `start` on
/// of the process's *own* parameter, which is laid out as `own` in an array of shape `local`;
/// they lie one after another from `offset` (bytes) on. The parameter may itself be a part of
/// the tensor, or fused of several: so the run is cut into boxes of the local array, and each
/// is followed through the segments that it meets.
///
/// Returns the layout of a run of the flattened local array. `None` if the run exceeds the
/// array, or a segment is not aligned with its dimensions: each dimension of a segment must
/// step forwards along one of the array, and no two along the same.
pub fn flat(
    own: &[Segment],
    local: &[u64],
    itemsize: u64,
    start: u64,
    len: u64,
    offset: u64,
) -> Option<Vec<Segment>> {
    let local_strides: Vec<i64> = row_major_strides(local)
        .into_iter()
        .map(|n| i64::try_from(n.checked_mul(itemsize)?).ok())
        .collect::<Option<_>>()?;
    let own = own.iter().filter(|segment| !segment.region.is_empty());
    let own: Vec<LocalBox> =
        own.map(|segment| LocalBox::new(segment, local, &local_strides, itemsize)).collect::<Option<_>>()?;
    let mut segments = Vec::new();
    let mut before = 0_u64; // elements of the run
    for part in run_to_boxes(local, start, len)? {
        let at = offset.checked_add(before.checked_mul(itemsize)?)?;
        let part_strides = row_major_strides(&part.extent);
        'segments: for own in &own {
            let mut region = own.region.clone();
            let mut place = Place { offset: at, strides: Dims::from_elem(0, region.ndim()) };
            for (d, line) in own.lines.iter().enumerate() {
                let (first, count) = line.within(part.offset[d], part.extent[d]);
                if count == 0 {
                    continue 'segments;
                }
                let step = part_strides[d].checked_mul(itemsize)?;
                place.offset += (line.start + first * line.step - part.offset[d]) * step;
                if let Some(axis) = line.axis {
                    region.offset[axis] += first;
                    region.extent[axis] = count;
                    place.strides[axis] = i64::try_from(step.checked_mul(line.step)?).ok()?;
                }
            }
            segments.push(Segment { region, place });
        }
        before += part.volume()?;
    }
    Some(segments)
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
        let region = &segment.region;
        let at = segment.place.offset.checked_div(itemsize)?;
        if !segment.place.offset.is_multiple_of(itemsize) || at >= volume(local)? {
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
