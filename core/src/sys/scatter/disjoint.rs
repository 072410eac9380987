//! Detects copies that may write the same bytes.
//!
//! Copies of a plan that reshard made never overlap. Nearly always that is cheap to prove: their
//! byte spans are disjoint, or straight cuts separate them as boxes of one array. Without such a
//! proof, all copies of that memory share a lock and run one after the other. So no plan causes a
//! data race. The cost is near-linear: sorting, and at most two cuts per dimension.

use std::ops::Range;

use super::geometry::Strided;

/// The locks that the copies need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Locks {
    of: Vec<Option<u32>>,
    count: usize,
}

impl Locks {
    /// Assigns locks. `spans` are the addresses of the targets; targets with overlapping memory
    /// share a lock.
    pub(crate) fn find(spans: &[Range<u64>], copies: &[Strided]) -> Self {
        let areas = Areas::of(spans);
        let mut by_area: Vec<Vec<u32>> = vec![Vec::new(); areas.count];
        for (number, copy) in copies.iter().enumerate() {
            if let Some(list) = areas.of_target.get(copy.dst as usize).and_then(|&area| by_area.get_mut(area))
            {
                list.push(number as u32);
            }
        }
        let mut locks = Self { of: vec![None; copies.len()], count: 0 };
        for list in by_area {
            let members: Vec<Member<'_>> = list
                .iter()
                .filter_map(|&number| {
                    let copy = copies.get(number as usize)?;
                    let base = spans.get(copy.dst as usize)?.start;
                    Some(Member { copy, base })
                })
                .collect();
            if members.len() > 1 && !spans_disjoint(&members) && !boxes_disjoint(&members) {
                for number in list {
                    if let Some(of) = locks.of.get_mut(number as usize) {
                        *of = Some(locks.count as u32);
                    }
                }
                locks.count += 1;
            }
        }
        locks
    }

    pub(crate) fn of(&self, copy: u32) -> Option<usize> {
        self.of.get(copy as usize).copied().flatten().map(|lock| lock as usize)
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }
}

/// Targets grouped by shared memory.
struct Areas {
    of_target: Vec<usize>,
    count: usize,
}

impl Areas {
    fn of(spans: &[Range<u64>]) -> Self {
        let mut order: Vec<usize> = (0..spans.len()).collect();
        order.sort_by_key(|&i| spans.get(i).map(|span| (span.start, span.end)));
        let mut of_target = vec![0; spans.len()];
        let (mut count, mut end) = (0, None);
        for i in order {
            let Some(span) = spans.get(i) else { continue };
            if end.is_none_or(|end| span.start >= end) {
                count += 1;
            }
            end = Some(end.map_or(span.end, |end: u64| end.max(span.end)));
            if let Some(of) = of_target.get_mut(i) {
                *of = count - 1;
            }
        }
        Self { of_target, count }
    }
}

struct Member<'a> {
    copy: &'a Strided,
    /// Address of the copy's target.
    base: u64,
}

impl Member<'_> {
    fn span(&self) -> Range<u64> {
        self.base + self.copy.dst_span.start..self.base + self.copy.dst_span.end
    }
}

fn spans_disjoint(members: &[Member<'_>]) -> bool {
    let mut spans: Vec<Range<u64>> = members.iter().map(Member::span).collect();
    spans.sort_unstable_by_key(|span| span.start);
    spans.windows(2).all(|pair| matches!(pair, [a, b] if a.end <= b.start))
}

/// True if the copies are disjoint boxes of one strided array. The array's strides are all strides
/// that occur (in magnitude). An address has one set of coordinates: the digits of a number whose
/// radices are the strides. Every copy must be a box in these coordinates.
fn boxes_disjoint(members: &[Member<'_>]) -> bool {
    let mut strides: Vec<u64> =
        members.iter().flat_map(|m| m.copy.dims.iter().map(|dim| dim.dst.unsigned_abs())).collect();
    strides.sort_unstable();
    strides.dedup();
    if strides.contains(&0) || strides.len() > MAX_STRIDES {
        return false;
    }
    let Some(origin) = members.iter().map(|m| m.span().start).min() else { return true };
    let boxes: Option<Vec<Cuboid>> = members.iter().map(|m| to_box(m, &strides, origin)).collect();
    let Some(mut boxes) = boxes else { return false };
    apart(&mut boxes, strides.len() + 1, 2 * (strides.len() + 1))
}

/// Limit on different strides. More of them do not occur in one array.
const MAX_STRIDES: usize = 16;

/// A box in coordinates: half-open ranges, first of bytes, then of each stride in ascending order.
type Cuboid = Vec<Range<u64>>;

/// Returns the copy's box. `strides` ascend. `None` if the copy is not a box in these coordinates.
fn to_box(member: &Member<'_>, strides: &[u64], origin: u64) -> Option<Cuboid> {
    let start = member.span().start - origin;
    let mut ranges = Vec::with_capacity(strides.len() + 1);
    // `count` steps of the current digit, each `worth` bytes.
    let (mut count, mut worth) = (member.copy.unit, 1);
    for &radix in strides {
        // The start in steps of the current digit, below one step of the next.
        let first = (start % radix) / worth;
        let mut carry = 1;
        if first.checked_add(count)?.checked_mul(worth)? <= radix {
            ranges.push(first..first + count);
        } else {
            // The copy exceeds one row: it must consist of whole rows of the array.
            if !start.is_multiple_of(radix)
                || !count.checked_mul(worth)?.is_multiple_of(radix)
                || !radix.is_multiple_of(worth)
            {
                return None;
            }
            ranges.push(0..radix / worth);
            carry = count * worth / radix;
        }
        let mut own = member.copy.dims.iter().filter(|dim| dim.dst.unsigned_abs() == radix);
        let extent = own.next().map_or(1, |dim| dim.extent);
        if own.next().is_some() || (carry != 1 && extent != 1) {
            return None;
        }
        (count, worth) = (carry * extent, radix);
    }
    let first = start / worth;
    ranges.push(first..first.checked_add(count)?);
    Some(ranges)
}

/// True if straight cuts separate the boxes. `false` may also mean that no cut was found.
fn apart(boxes: &mut [Cuboid], dims: usize, depth: usize) -> bool {
    if boxes.len() < 2 {
        return true;
    }
    if depth == 0 {
        return false;
    }
    for d in 0..dims {
        let range = |b: &Cuboid| b.get(d).cloned().unwrap_or_default();
        boxes.sort_by_key(|b| range(b).start);
        let mut cuts = Vec::new();
        let mut end = 0;
        for (i, b) in boxes.iter().enumerate() {
            let range = range(b);
            if i > 0 && range.start >= end {
                cuts.push(i);
            }
            end = end.max(range.end);
        }
        if cuts.is_empty() {
            continue;
        }
        let mut rest = boxes;
        let mut taken = 0;
        for cut in cuts {
            let (part, right) = rest.split_at_mut(cut - taken);
            if !apart(part, dims, depth - 1) {
                return false;
            }
            taken = cut;
            rest = right;
        }
        return apart(rest, dims, depth - 1);
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read_plan::BoxCopy;

    /// One target of `len` bytes at address zero.
    fn one(len: u64) -> Vec<Range<u64>> {
        std::iter::once(0..len).collect()
    }

    /// A box of a row-major array of 4-byte elements.
    fn part(dst: u32, shape: &[u64], offset: &[u64], extent: &[u64]) -> Strided {
        let mut strides = vec![4_u64; shape.len()];
        for d in (0..shape.len().saturating_sub(1)).rev() {
            strides[d] = strides[d + 1] * shape[d + 1];
        }
        let mut dense = vec![4_u64; shape.len()];
        for d in (0..shape.len().saturating_sub(1)).rev() {
            dense[d] = dense[d + 1] * extent[d + 1];
        }
        let copy = BoxCopy {
            leaf: 0,
            file: 0,
            src_offset: 0,
            src_strides: dense.into(),
            extent: extent.to_vec().into(),
            itemsize: 4,
            dst,
            dst_offset: offset.iter().zip(&strides).map(|(o, s)| o * s).sum(),
            dst_strides: strides.iter().map(|&s| s.cast_signed()).collect(),
            inverted: 0,
            encoded: None,
        };
        Strided::new(&copy).unwrap().unwrap()
    }

    fn grid(shape: [u64; 2], tile: [u64; 2]) -> Vec<Strided> {
        let mut parts = Vec::new();
        for r in (0..shape[0]).step_by(tile[0] as usize) {
            for c in (0..shape[1]).step_by(tile[1] as usize) {
                let extent = [tile[0].min(shape[0] - r), tile[1].min(shape[1] - c)];
                parts.push(part(0, &shape, &[r, c], &extent));
            }
        }
        parts
    }

    #[test]
    fn rows_and_grids_of_one_array_need_no_lock() {
        for tile in [[10, 60], [100, 7], [9, 11], [1, 1], [100, 60]] {
            assert_eq!(Locks::find(&one(100 * 60 * 4), &grid([100, 60], tile)).count(), 0, "{tile:?}");
        }
    }

    #[test]
    fn whole_rows_beside_cut_rows_need_no_lock() {
        let shape = [4, 100, 60];
        let parts = [
            part(0, &shape, &[0, 0, 0], &[1, 100, 60]),
            part(0, &shape, &[1, 0, 0], &[1, 50, 60]),
            part(0, &shape, &[1, 50, 0], &[1, 50, 30]),
            part(0, &shape, &[1, 50, 30], &[1, 50, 30]),
            part(0, &shape, &[2, 0, 0], &[2, 10, 60]),
            part(0, &shape, &[2, 10, 0], &[2, 90, 60]),
        ];
        assert_eq!(Locks::find(&one(4 * 100 * 60 * 4), &parts).count(), 0);
    }

    #[test]
    fn boxes_that_overlap_share_a_lock() {
        let mut parts = grid([100, 60], [9, 11]);
        parts.push(part(0, &[100, 60], &[20, 20], &[2, 2]));
        let locks = Locks::find(&one(100 * 60 * 4), &parts);
        assert_eq!(locks.count(), 1);
        assert!((0..parts.len() as u32).all(|c| locks.of(c) == Some(0)));
    }

    #[test]
    fn one_byte_of_overlap_is_seen() {
        let a = part(0, &[100], &[0], &[10]);
        let mut b = part(0, &[100], &[10], &[10]);
        assert_eq!(Locks::find(&one(400), &[a.clone(), b.clone()]).count(), 0);
        b.dst_span.start -= 1;
        assert_eq!(Locks::find(&one(400), &[a, b]).count(), 1);
    }

    #[test]
    fn targets_that_share_memory_share_a_lock_and_others_do_not() {
        let parts =
            [part(0, &[100], &[0], &[100]), part(1, &[100], &[0], &[100]), part(2, &[100], &[0], &[100])];
        let locks = Locks::find(&[0..400, 399..799, 800..1200], &parts);
        assert_eq!((locks.of(0), locks.of(1), locks.of(2)), (Some(0), Some(0), None));
    }

    #[test]
    fn views_of_one_array_as_several_targets_need_no_lock() {
        // Columns 0..30 and 30..60 of a [100, 60] array, each its own target.
        let left = part(0, &[100, 60], &[0, 0], &[100, 30]);
        let right = Strided { dst: 1, ..part(0, &[100, 60], &[0, 0], &[100, 30]) };
        let spans = [0..99 * 240 + 120, 120..100 * 240];
        assert_eq!(Locks::find(&spans, &[left, right]).count(), 0);
    }

    #[test]
    fn ten_thousand_columns_are_checked_in_no_time() {
        let start = std::time::Instant::now();
        assert_eq!(Locks::find(&one(100 * 10_000 * 4), &grid([100, 10_000], [100, 1])).count(), 0);
        assert!(start.elapsed().as_secs() < 5);
    }
}
