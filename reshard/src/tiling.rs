//! Checks that the chunks of a tensor cover it exactly once. A commit asks it, and a reader asks it
//! before it trusts that every byte of a buffer will be filled.
//!
//! Chunks tile a tensor when, at every element, as many chunks as whole tensors (one) are there.
//! Two sums of boxes are equal everywhere when they are equal at the beginning and change alike at
//! every border of the first axis; what changes at a border is again a sum of boxes, with one axis
//! less. So a sweep along the first axis calls itself for the cross-sections that begin and end at
//! each border, after those that are the same on both sides have cancelled. In a grid nearly all
//! do: the work is that of sorting.

use std::cmp::Ordering;
use std::fmt;

use stepwell_core::format::index::ChunkRegion;
use stepwell_core::region::{Dims, Region};

use crate::subchunk::run_to_boxes;

/// Borders that may be looked at per chunk and dimension before a tiling counts as too irregular:
/// real ones need about two; the bound keeps a hostile index from costing more than its size.
const BUDGET: usize = 512;

/// Why chunks do not tile a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A chunk exceeds the tensor.
    Outside {
        /// Position of the chunk.
        chunk: usize,
    },
    /// No chunk covers this region.
    Hole {
        /// A box of elements that no chunk holds; there may be more.
        region: Region,
    },
    /// Two chunks hold the same elements.
    Overlap {
        /// Position of the one.
        first: usize,
        /// Position of the other.
        second: usize,
        /// The common region.
        region: Region,
    },
    /// The chunks are so irregular that checking them would take too long; no writer makes such
    /// chunks.
    TooIrregular,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Outside { chunk } => write!(f, "chunk {chunk} does not lie in the tensor"),
            Self::Hole { region } => write!(f, "no chunk holds {}", Slices(region)),
            Self::Overlap { first, second, region } => {
                write!(f, "chunks {first} and {second} both hold {}", Slices(region))
            }
            Self::TooIrregular => f.write_str("its chunks are too irregular to be checked"),
        }
    }
}

/// A region as a Python slice, for messages.
pub struct Slices<'a>(pub &'a Region);

impl fmt::Display for Slices<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slice = |(&offset, &extent): (&u64, &u64)| format!("{offset}:{}", offset.saturating_add(extent));
        let slices: Vec<String> = self.0.offset.iter().zip(&self.0.extent).map(slice).collect();
        write!(f, "[{}]", slices.join(", "))
    }
}

/// Checks that `chunks` cover a tensor of that shape exactly once. A tensor without elements is
/// covered by any chunks without elements.
pub fn check(shape: &[u64], chunks: &[ChunkRegion]) -> Result<(), Fault> {
    let mut boxes = Vec::with_capacity(chunks.len());
    for (chunk, region) in chunks.iter().enumerate() {
        match region {
            ChunkRegion::Box(region) if region.fits(shape) => boxes.push((chunk, region.clone())),
            ChunkRegion::Box(_) => return Err(Fault::Outside { chunk }),
            ChunkRegion::Run { start, len } => {
                let parts = run_to_boxes(shape, *start, *len).ok_or(Fault::Outside { chunk })?;
                boxes.extend(parts.into_iter().map(|part| (chunk, part)));
            }
        }
    }
    check_boxes(&Region::whole(shape), boxes)
}

/// [`check`] of boxes.
pub fn check_regions(shape: &[u64], regions: &[Region]) -> Result<(), Fault> {
    if let Some(chunk) = regions.iter().position(|region| !region.fits(shape)) {
        return Err(Fault::Outside { chunk });
    }
    check_boxes(&Region::whole(shape), regions.iter().cloned().enumerate().collect())
}

/// Checks that boxes, each inside `whole` and with the number of its chunk, cover `whole` exactly
/// once.
pub(crate) fn check_boxes(whole: &Region, mut boxes: Vec<(usize, Region)>) -> Result<(), Fault> {
    boxes.retain(|(_, region)| !region.is_empty());
    if boxes.iter().map(|(_, region)| region).eq([whole]) {
        return Ok(());
    }
    let mut sweep = Sweep { whole, boxes: &boxes, point: Vec::new(), budget: 0 };
    sweep.budget = (boxes.len() + 2).saturating_mul(BUDGET).saturating_mul(whole.ndim().max(1));
    let terms =
        (0..boxes.len()).map(|b| Term { of: b, sign: 1 }).chain([Term { of: WHOLE, sign: -1 }]).collect();
    match sweep.differs(0, terms) {
        None => Ok(()),
        Some(Difference::TooIrregular) => Err(Fault::TooIrregular),
        Some(Difference::At) => {
            let point = sweep.point;
            Err(fault_at(whole, &boxes, &point))
        }
    }
}

/// Stands for the whole tensor among the boxes.
const WHOLE: usize = usize::MAX;

/// A box in a sum of boxes.
#[derive(Clone, Copy)]
struct Term {
    of: usize,
    sign: i64,
}

struct Sweep<'a> {
    whole: &'a Region,
    boxes: &'a [(usize, Region)],
    /// Coordinates, so far, of the first element where the sum is not zero.
    point: Vec<u64>,
    budget: usize,
}

enum Difference {
    /// At `point`.
    At,
    TooIrregular,
}

impl Sweep<'_> {
    fn region(&self, term: Term) -> &Region {
        self.boxes.get(term.of).map_or(self.whole, |(_, region)| region)
    }

    /// Returns a difference where the sum of the terms' cross-sections (the axes from `axis` on) is
    /// not zero.
    fn differs(&mut self, axis: usize, terms: Vec<Term>) -> Option<Difference> {
        if axis == self.whole.ndim() {
            return (terms.iter().map(|term| term.sign).sum::<i64>() != 0).then_some(Difference::At);
        }
        let events = terms.into_iter().flat_map(|term| {
            let region = self.region(term);
            let (start, end) = (region.offset[axis], region.offset[axis] + region.extent[axis]);
            [(start, term), (end, Term { sign: -term.sign, ..term })]
        });
        let mut events: Vec<(u64, Term)> = events.collect();
        let Some(budget) = self.budget.checked_sub(events.len()) else {
            return Some(Difference::TooIrregular);
        };
        self.budget = budget;
        let next = axis + 1;
        let order =
            |(x, a): &(u64, Term), (y, b): &(u64, Term)| x.cmp(y).then_with(|| self.compare(*a, *b, next));
        events.sort_unstable_by(order);
        let mut rest = events.as_slice();
        while let Some(&(border, _)) = rest.first() {
            let (here, after) = rest.split_at(rest.partition_point(|(at, _)| *at == border));
            rest = after;
            let mut changes: Vec<Term> = Vec::new();
            for &(_, term) in here {
                match changes.last_mut() {
                    Some(last) if self.compare(*last, term, next) == Ordering::Equal => {
                        last.sign += term.sign;
                    }
                    _ => changes.push(term),
                }
            }
            changes.retain(|term| term.sign != 0);
            if changes.is_empty() {
                continue;
            }
            self.point.push(border);
            if let Some(difference) = self.differs(next, changes) {
                return Some(difference);
            }
            self.point.pop();
        }
        None
    }

    /// An order of cross-sections.
    fn compare(&self, a: Term, b: Term, axis: usize) -> Ordering {
        let (a, b) = (self.region(a), self.region(b));
        a.offset[axis..].cmp(&b.offset[axis..]).then_with(|| a.extent[axis..].cmp(&b.extent[axis..]))
    }
}

/// Describes what is wrong at an element that not exactly one box covers.
fn fault_at(whole: &Region, boxes: &[(usize, Region)], point: &[u64]) -> Fault {
    let covers = |region: &Region, point: &[u64]| {
        (0..point.len())
            .all(|d| region.offset[d] <= point[d] && point[d] - region.offset[d] < region.extent[d])
    };
    let mut there = boxes.iter().filter(|(_, region)| covers(region, point));
    if let (Some((first, a)), Some((second, b))) = (there.next(), there.next()) {
        let region = a.intersect(b).unwrap_or_else(|| Region {
            offset: Dims::from_slice(point),
            extent: Dims::from_elem(1, point.len()),
        });
        return Fault::Overlap { first: *first, second: *second, region };
    }
    // The largest box with its first corner here, grown along the last axis first.
    let mut hole = Region { offset: Dims::from_slice(point), extent: Dims::from_elem(1, point.len()) };
    for d in (0..point.len()).rev() {
        let mut end = whole.offset[d] + whole.extent[d];
        hole.extent[d] = end - point[d];
        for (_, region) in boxes {
            if region.intersect(&hole).is_some() {
                end = end.min(region.offset[d]);
                hole.extent[d] = end.saturating_sub(point[d]).max(1);
            }
        }
    }
    Fault::Hole { region: hole }
}

#[cfg(test)]
#[expect(clippy::cast_possible_wrap, reason = "the numbers of these tests are small")]
mod tests {
    use proptest::prelude::*;
    use stepwell_core::region::volume;

    use super::*;
    use crate::subchunk::{self, SubchunkOptions};

    fn boxes(regions: impl IntoIterator<Item = Region>) -> Vec<ChunkRegion> {
        regions.into_iter().map(ChunkRegion::Box).collect()
    }

    fn counts(shape: &[u64], chunks: &[ChunkRegion]) -> ndarray::ArrayD<u32> {
        let dims: Vec<usize> = shape.iter().map(|&n| n as usize).collect();
        let mut counts = ndarray::ArrayD::zeros(dims);
        for chunk in chunks {
            match chunk {
                ChunkRegion::Box(region) => add(&mut counts, region),
                ChunkRegion::Run { start, len } => {
                    counts.iter_mut().skip(*start as usize).take(*len as usize).for_each(|count| *count += 1);
                }
            }
        }
        counts
    }

    fn add(counts: &mut ndarray::ArrayD<u32>, region: &Region) {
        counts
            .slice_each_axis_mut(|axis| {
                let d = axis.axis.index();
                let start = region.offset[d] as isize;
                ndarray::Slice::new(start, Some(start + region.extent[d] as isize), 1)
            })
            .mapv_inplace(|count| count + 1);
    }

    #[test]
    fn a_hole_and_an_overlap_are_named() {
        let region = |offset: [u64; 2], extent: [u64; 2]| Region {
            offset: Dims::from_slice(&offset),
            extent: Dims::from_slice(&extent),
        };
        let quarters = || {
            vec![
                region([0, 0], [2, 2]),
                region([0, 2], [2, 2]),
                region([2, 0], [2, 2]),
                region([2, 2], [2, 2]),
            ]
        };
        assert_eq!(check(&[4, 4], &boxes(quarters())), Ok(()));
        let mut hole = quarters();
        hole.remove(1);
        let fault = check(&[4, 4], &boxes(hole)).unwrap_err();
        assert_eq!(fault, Fault::Hole { region: region([0, 2], [2, 2]) });
        assert_eq!(fault.to_string(), "no chunk holds [0:2, 2:4]");
        let mut twice = quarters();
        twice[3] = region([1, 1], [3, 3]);
        let fault = check(&[4, 4], &boxes(twice)).unwrap_err();
        assert_eq!(fault.to_string(), "chunks 0 and 3 both hold [1:2, 1:2]");
        assert_eq!(check(&[4, 4], &[]).unwrap_err().to_string(), "no chunk holds [0:4, 0:4]");
        let fault = check(&[4, 4], &boxes([region([0, 0], [4, 5])])).unwrap_err();
        assert_eq!(fault, Fault::Outside { chunk: 0 });
    }

    #[test]
    fn scalars_and_empty_tensors_are_tiled_too() {
        assert_eq!(check(&[], &boxes([Region::whole(&[])])), Ok(()));
        assert_eq!(check(&[], &[]).unwrap_err(), Fault::Hole { region: Region::whole(&[]) });
        let twice = boxes([Region::whole(&[]), Region::whole(&[])]);
        assert!(matches!(check(&[], &twice), Err(Fault::Overlap { first: 0, second: 1, .. })));
        assert_eq!(check(&[3, 0], &[]), Ok(()));
        assert_eq!(check(&[3, 0], &boxes([Region::whole(&[3, 0])])), Ok(()));
    }

    #[test]
    fn a_grid_of_many_chunks_is_checked_within_the_budget() {
        let shape = [320 * 4, 320 * 4];
        let options = SubchunkOptions { target_bytes: 16, min_row_bytes: 4, ..SubchunkOptions::HOST };
        let chunks = boxes(subchunk::cut(&Region::whole(&shape), &shape, 1, &options));
        assert!(chunks.len() >= 100_000);
        assert_eq!(check(&shape, &chunks), Ok(()));
        let mut hole = chunks;
        let ChunkRegion::Box(removed) = hole.remove(77_777) else { unreachable!() };
        assert_eq!(check(&shape, &hole), Err(Fault::Hole { region: removed }));
    }

    #[test]
    fn a_grid_of_many_dimensions_is_checked_within_the_budget() {
        let shape = [2; 12];
        let options = SubchunkOptions { target_bytes: 1, ..SubchunkOptions::HOST };
        let chunks = boxes(subchunk::cut(&Region::whole(&shape), &shape, 1, &options));
        assert_eq!(chunks.len(), 4096);
        assert_eq!(check(&shape, &chunks), Ok(()));
    }

    #[test]
    fn a_check_that_would_take_too_long_is_refused() {
        // The borders of each axis double the work for the next one.
        let half = |at: u64| {
            let mut half = Region::whole(&[2; 20]);
            (half.offset[19], half.extent[19]) = (at, 1);
            half
        };
        let fault = check(&[2; 20], &boxes([half(0), half(1)])).unwrap_err();
        assert_eq!(fault, Fault::TooIrregular);
        assert_eq!(fault.to_string(), "its chunks are too irregular to be checked");
    }

    #[test]
    fn regions_are_checked_as_chunks_are() {
        let row = |at: u64, len: u64| Region { offset: vec![at].into(), extent: vec![len].into() };
        assert_eq!(check_regions(&[4], &[row(0, 2), row(2, 2)]), Ok(()));
        assert_eq!(check_regions(&[4], &[row(0, 2), row(2, 3)]), Err(Fault::Outside { chunk: 1 }));
        assert_eq!(check_regions(&[4], &[row(0, 2)]), Err(Fault::Hole { region: row(2, 2) }));
    }

    #[test]
    fn arbitrary_chunks_are_checked_within_the_budget() {
        // Strips along the first axis, each cut in two at another place: no border is shared by
        // two.
        let n = 2000_u64;
        let cut = |i: u64| (i * 7919) % (n - 1) + 1;
        let strips = (0..n).flat_map(|i| {
            let part = |from: u64, to: u64| Region {
                offset: vec![from, i].into(),
                extent: vec![to - from, 1].into(),
            };
            [part(0, cut(i)), part(cut(i), n)]
        });
        assert_eq!(check(&[n, n], &boxes(strips)), Ok(()));
    }

    /// Cuts a box again and again, at places given by `cuts`: a tiling that is no grid.
    fn guillotine(shape: &[u64], cuts: &[(usize, usize, u64)]) -> Vec<Region> {
        let mut parts = vec![Region::whole(shape)];
        for &(which, axis, at) in cuts {
            let (which, axis) = (which % parts.len(), axis % shape.len());
            let part = parts[which].clone();
            if part.extent[axis] > 1 {
                let at = 1 + at % (part.extent[axis] - 1);
                parts[which].extent[axis] = at;
                let mut second = part.clone();
                second.offset[axis] += at;
                second.extent[axis] -= at;
                parts.push(second);
            }
        }
        parts
    }

    proptest! {
        #[test]
        fn any_change_to_a_tiling_is_found(
            shape in prop::collection::vec(1_u64..7, 1..5),
            cuts in prop::collection::vec((any::<usize>(), any::<usize>(), any::<u64>()), 0..20),
            change in (any::<prop::sample::Index>(), 0_usize..5, 0_usize..4),
        ) {
            let mut parts = guillotine(&shape, &cuts);
            prop_assert_eq!(check(&shape, &boxes(parts.clone())), Ok(()));
            let (which, how, axis) = (change.0.index(parts.len()), change.1, change.2 % shape.len());
            match how {
                0 => drop(parts.remove(which)),
                1 => parts.push(parts[which].clone()),
                2 => parts[which].extent[axis] -= 1,
                3 if parts[which].offset[axis] > 0 => parts[which].offset[axis] -= 1,
                _ if parts[which].offset[axis] + parts[which].extent[axis] < shape[axis] => parts[which].extent[axis] += 1,
                _ => {}
            }
            let chunks = boxes(parts);
            let counts = counts(&shape, &chunks);
            let found = check(&shape, &chunks);
            prop_assert_eq!(found.is_ok(), counts.iter().all(|&count| count == 1));
            let mut marked = ndarray::ArrayD::zeros(counts.raw_dim());
            match found {
                Err(Fault::Hole { region }) => {
                    add(&mut marked, &region);
                    prop_assert!(!region.is_empty());
                    prop_assert!(marked.iter().zip(&counts).all(|(&marked, &count)| marked == 0 || count == 0));
                }
                Err(Fault::Overlap { first, second, region }) => {
                    add(&mut marked, &region);
                    prop_assert!(first != second && !region.is_empty());
                    prop_assert!(marked.iter().zip(&counts).all(|(&marked, &count)| marked == 0 || count > 1));
                }
                other => prop_assert_eq!(other, Ok(())),
            }
        }

        #[test]
        fn runs_tile_where_they_follow_each_other(
            shape in prop::collection::vec(1_u64..6, 1..4),
            borders in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
            gap in any::<bool>(),
        ) {
            let n = volume(&shape).unwrap();
            let mut borders: Vec<u64> = borders.iter().map(|at| at.index(n as usize) as u64).chain([0, n]).collect();
            borders.sort_unstable();
            borders.dedup();
            let mut runs: Vec<_> =
                borders.windows(2).map(|w| ChunkRegion::Run { start: w[0], len: w[1] - w[0] }).collect();
            if gap {
                runs.pop();
            }
            let counts = counts(&shape, &runs);
            prop_assert_eq!(check(&shape, &runs).is_ok(), counts.iter().all(|&count| count == 1));
        }
    }
}
