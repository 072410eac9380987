//! Divides the writing of replicated regions between their holders. Pure and deterministic: every
//! holder knows the others, so all of them compute the same answer.
//!
//! The regions of one group of holders are laid one after another, and that line is cut into one
//! stretch for each writer: so every byte is written once, writers get as many bytes each (first
//! the nodes, then the ranks of a node), and most regions are cut into no more than two. Small ones
//! are not cut at all.

use std::collections::HashMap;

use stepwell_core::region::{Dims, Region, row_major_strides};

use crate::subchunk::run_to_boxes;

/// Regions of fewer bytes are not cut, whatever there is in all.
const WHOLE_BELOW: u64 = 4096;
/// Regions of more bytes are cut where a border falls into them, however much there is in all.
const CUT_FROM: u64 = 1 << 20;
/// A border falls on a whole step of the outermost axis whose steps have at most so many bytes.
const STEP_BYTES: u64 = 128 << 10;

/// The most writers among the holders of a region at one place. One per socket is enough, and makes
/// longer files (FastPersist).
#[derive(Clone, Copy, Debug)]
pub struct Limit<'a> {
    /// How many.
    pub writers: u32,
    /// For each rank, the number of its place: its node, or its socket.
    pub places: &'a [u32],
}

/// The writers of a group, in the order in which the line is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Writers(Vec<Writer>);

/// A writer has one of `of` equal parts of the line, after `before` of them.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Writer {
    rank: u32,
    before: u64,
    of: u64,
}

impl Writers {
    /// The ranks that write for a group of holders. Every node has the same part, and those of its
    /// holders that the limit allows share it: the first of each place.
    pub fn new(holders: &[u32], nodes: &[u32], limit: Option<Limit<'_>>) -> Self {
        let number = |of: &[u32], rank: u32| of.get(rank as usize).copied().unwrap_or(0);
        let mut by_node: Vec<(u32, u32)> = holders.iter().map(|&rank| (number(nodes, rank), rank)).collect();
        by_node.sort_unstable();
        by_node.dedup();
        if let Some(limit) = limit {
            let mut writers = HashMap::new();
            by_node.retain(|&(node, rank)| {
                let writers = writers.entry((node, number(limit.places, rank))).or_insert(0);
                *writers += 1;
                *writers <= limit.writers.max(1)
            });
        }
        let teams: Vec<&[(u32, u32)]> = by_node.chunk_by(|one, other| one.0 == other.0).collect();
        let writers = teams.iter().enumerate().flat_map(|(node, team)| {
            let (size, nodes) = (team.len(), teams.len());
            team.iter().enumerate().map(move |(place, &(_, rank))| Writer {
                rank,
                before: (node * size + place) as u64,
                of: (nodes * size) as u64,
            })
        });
        Self(writers.collect())
    }

    /// Writers who count alike, by their places.
    pub fn alike(count: u32) -> Self {
        let writer = |rank: u32| Writer { rank, before: rank.into(), of: count.into() };
        Self((0..count).map(writer).collect())
    }

    /// The writer of an indivisible region.
    pub fn first(&self) -> Option<u32> {
        self.0.first().map(|writer| writer.rank)
    }

    /// The borders of a rank's stretch on a line of that length. `None` for a rank that writes
    /// nothing.
    fn stretch(&self, rank: u32, length: u64) -> Option<(u64, u64)> {
        let &Writer { before, of, .. } = self.0.iter().find(|writer| writer.rank == rank)?;
        let at = |parts: u64| (u128::from(length) * u128::from(parts) / u128::from(of)) as u64;
        Some((at(before), at(before + 1)))
    }
}

/// Regions of at most so many bytes belong together in few files: a reader that wants them all
/// reads few blocks for them then.
pub const SMALL: u64 = 64 << 10;

/// A region that all of a group hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Its extent.
    pub extent: Dims,
    /// Bytes of an element.
    pub itemsize: u64,
}

impl Held {
    /// All of it.
    pub fn bytes(&self) -> u64 {
        self.extent.iter().fold(self.itemsize, |bytes, &n| bytes.saturating_mul(n))
    }
}

/// The part of each region that `rank` writes: boxes of it, in its own coordinates. `None` for
/// those that others write, also where they are empty: those are the first writer's. All ranks of a
/// group must ask with the same regions in the same order.
pub fn shares(held: &[Held], writers: &Writers, rank: u32) -> Vec<Option<Vec<Region>>> {
    let total = held.iter().fold(0_u64, |sum, held| sum.saturating_add(held.bytes()));
    let Some((begin, end)) = writers.stretch(rank, total) else { return vec![None; held.len()] };
    let cut_from = (total / (64 * writers.0.len() as u64).max(1)).clamp(WHOLE_BELOW, CUT_FROM);
    let mut before = 0_u64;
    let share = |held: &Held| {
        let bytes = held.bytes();
        let start = before;
        before = before.saturating_add(bytes);
        if bytes == 0 {
            return (writers.first() == Some(rank)).then(|| vec![Region::whole(&held.extent)]);
        }
        if bytes < cut_from {
            let middle = start + bytes / 2;
            return (begin <= middle && middle < end).then(|| vec![Region::whole(&held.extent)]);
        }
        let step = step(held);
        let border = |at: u64| {
            let inside = at.saturating_sub(start).min(bytes);
            // To the nearest step; the ends of the line are those of the regions.
            if inside == bytes { bytes } else { ((inside + step / 2) / step * step).min(bytes) }
        };
        let (from, to) = (border(begin), border(end));
        if from >= to {
            return None;
        }
        run_to_boxes(&held.extent, from / held.itemsize, (to - from) / held.itemsize)
    };
    held.iter().map(share).collect()
}

/// Bytes of what is not cut: one step along the outermost axis where that is little.
fn step(held: &Held) -> u64 {
    let steps =
        row_major_strides(&held.extent).into_iter().map(|elements| elements.saturating_mul(held.itemsize));
    steps.into_iter().find(|&bytes| bytes <= STEP_BYTES).unwrap_or(held.itemsize).max(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tiling;

    fn bytes_of(share: &[Option<Vec<Region>>], held: &[Held]) -> u64 {
        let bytes = |(regions, held): (&Option<Vec<Region>>, &Held)| {
            regions.iter().flatten().map(|region| region.volume().unwrap() * held.itemsize).sum::<u64>()
        };
        share.iter().zip(held).map(bytes).sum()
    }

    #[test]
    fn a_replicated_model_is_written_in_equal_parts() {
        // Eight layers of a Llama of 1024, on 8 ranks.
        let layer = [[1024_u64, 1024], [2816, 1024], [1024, 1], [1024, 2816]];
        let held: Vec<Held> = (0..8)
            .flat_map(|_| layer)
            .map(|extent| Held { extent: extent.into_iter().collect(), itemsize: 4 })
            .collect();
        let total: u64 = held.iter().map(Held::bytes).sum();
        for (ranks, nodes) in [(8_u32, vec![0; 8]), (8, vec![0, 0, 0, 0, 1, 1, 1, 1]), (3, vec![0; 3])] {
            let all: Vec<u32> = (0..ranks).collect();
            let writers = Writers::new(&all, &nodes, None);
            for rank in all {
                let bytes = bytes_of(&shares(&held, &writers, rank), &held);
                assert!(bytes * 100 <= 105 * total / u64::from(ranks), "{bytes} of {total} on {rank}");
            }
        }
    }

    #[test]
    fn nodes_get_equal_parts_first_and_then_their_ranks() {
        let held = [Held { extent: vec![6 << 20].into(), itemsize: 1 }];
        let writers = Writers::new(&[0, 1, 2, 3], &[0, 0, 0, 1], None);
        let bytes: Vec<u64> = (0..4).map(|rank| bytes_of(&shares(&held, &writers, rank), &held)).collect();
        assert_eq!(bytes, [1 << 20, 1 << 20, 1 << 20, 3 << 20]);
    }

    #[test]
    fn writers_are_limited_per_node_or_socket() {
        let held = [Held { extent: vec![6 << 20].into(), itemsize: 1 }];
        let nodes = [0, 0, 0, 0, 1, 1];
        // Sockets of two nodes; the last two ranks are on one.
        let sockets = [0, 0, 1, 1, 2, 2];
        let mebibytes = |writers: u32, places: &[u32]| {
            let writers = Writers::new(&[0, 1, 2, 3, 4, 5], &nodes, Some(Limit { writers, places }));
            (0..6).map(|rank| bytes_of(&shares(&held, &writers, rank), &held) >> 20).collect::<Vec<_>>()
        };
        assert_eq!(mebibytes(1, &nodes), [3, 0, 0, 0, 3, 0]);
        assert_eq!(mebibytes(3, &nodes), [1, 1, 1, 0, 1, 1]);
        assert_eq!(mebibytes(1, &sockets), [1, 0, 1, 0, 3, 0]);
        assert_eq!(mebibytes(9, &sockets), [0, 0, 0, 0, 1, 1], "all of them");
    }

    #[test]
    fn small_things_stay_whole_and_empty_ones_are_the_first_writers() {
        let scalar = Held { extent: Dims::new(), itemsize: 8 };
        let empty = Held { extent: vec![0, 3].into(), itemsize: 4 };
        let held = [scalar.clone(), scalar.clone(), empty, scalar];
        let writers = Writers::new(&[4, 7], &[], None);
        let first = shares(&held, &writers, 4);
        let second = shares(&held, &writers, 7);
        for (one, other) in first.iter().zip(&second) {
            assert!(one.is_some() != other.is_some());
        }
        assert!(first[2].is_some());
    }

    fn bytes_by_rank(extents: &[&[u64]], ranks: u32) -> Vec<Vec<u64>> {
        let held: Vec<Held> =
            extents.iter().map(|extent| Held { extent: (*extent).into(), itemsize: 1 }).collect();
        let share = |rank| shares(&held, &Writers::alike(ranks), rank);
        let bytes = |part: &Option<Vec<Region>>| part.iter().flatten().filter_map(Region::volume).sum();
        (0..ranks).map(|rank| share(rank).iter().map(bytes).collect()).collect()
    }

    #[test]
    fn writers_that_count_alike_get_equal_parts() {
        assert_eq!(bytes_by_rank(&[&[4 << 20]], 4), vec![[1 << 20]; 4]);
        assert_eq!(Writers::alike(4).first(), Some(0));
    }

    #[test]
    fn a_region_is_cut_where_it_is_large_for_what_there_is() {
        const LARGE: u64 = 16 << 20;
        let (small, middle) = (200 << 10, 300 << 10);
        let one = bytes_by_rank(&[&[LARGE], &[small], &[LARGE]], 2);
        assert!(one[0][1] == 0 || one[1][1] == 0, "{one:?}");
        let both = bytes_by_rank(&[&[LARGE], &[middle], &[LARGE]], 2);
        assert_eq!((both[0][1], both[1][1]), (middle / 2, middle / 2));
        assert_eq!(bytes_by_rank(&[&[4096]], 2), [[2048], [2048]]);
        assert_eq!(bytes_by_rank(&[&[1000], &[3000]], 2), [[1000, 0], [0, 3000]], "by their middles");
    }

    #[test]
    fn a_border_falls_on_the_nearest_step_unless_steps_are_large() {
        let (row, wide) = (100 << 10, 300 << 10);
        assert_eq!(bytes_by_rank(&[&[10, row]], 3), [[3 * row], [4 * row], [3 * row]]);
        assert_eq!(bytes_by_rank(&[&[2, wide]], 3), vec![[200 << 10]; 3]);
    }

    proptest! {
        #[test]
        fn every_element_is_written_by_exactly_one_rank(
            shapes in prop::collection::vec(prop::collection::vec(0_u64..200, 0..4), 1..8),
            ranks in prop::collection::btree_set(0_u32..40, 1..9),
            nodes in prop::collection::vec(0_u32..4, 40),
            limit in prop::option::of(1_u32..3),
            places in prop::collection::vec(0_u32..8, 40),
            itemsize in prop_oneof![Just(1_u64), Just(2), Just(4), Just(16)],
        ) {
            let held: Vec<Held> =
                shapes.iter().map(|shape| Held { extent: shape.clone().into(), itemsize }).collect();
            let ranks: Vec<u32> = ranks.into_iter().collect();
            let writers = Writers::new(&ranks, &nodes, limit.map(|writers| Limit { writers, places: &places }));
            let parts: Vec<_> = ranks.iter().map(|&rank| shares(&held, &writers, rank)).collect();
            for (number, held) in held.iter().enumerate() {
                let boxes: Vec<Region> = parts.iter().flat_map(|part| part[number].clone().unwrap_or_default()).collect();
                let numbered = boxes.iter().cloned().enumerate().collect();
                prop_assert_eq!(tiling::check_boxes(&Region::whole(&held.extent), numbered), Ok(()));
                prop_assert!(parts.iter().any(|part| part[number].is_some()));
                if held.bytes() == 0 {
                    prop_assert_eq!(boxes.len(), 1);
                }
            }
            prop_assert!(shares(&held, &writers, 99).iter().all(Option::is_none));
        }
    }
}
