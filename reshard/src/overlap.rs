//! Which chunks of a tensor hold a region, and where in them. Chunks are put into a tree of
//! bounding boxes once per tensor, so that a question costs about the logarithm of their number and
//! the answers, however the chunks lie. Called by [`crate::read_plan`].

use stepwell_core::format::index::{ChunkRecord, ChunkRegion};
use stepwell_core::region::Region;

use crate::subchunk::run_to_boxes;

/// Boxes of one leaf of the tree.
const FANOUT: usize = 8;

/// A box that is stored contiguously, row-major: a chunk, or a part of a chunk that is a flat run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredBox {
    /// Position of the chunk.
    pub chunk: u32,
    /// Its region.
    pub region: Region,
    /// Elements of the chunk before it.
    pub base: u64,
}

/// The part of a stored box that a region needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlap<'a> {
    /// The box.
    pub stored: &'a StoredBox,
    /// The common region, in the tensor's coordinates.
    pub region: Region,
}

/// The chunks of one tensor, ready for questions.
#[derive(Clone, Debug)]
pub struct ChunkIndex {
    boxes: Vec<StoredBox>,
    /// In pre-order; the root is the first.
    nodes: Vec<Node>,
}

#[derive(Clone, Debug)]
struct Node {
    bounds: Region,
    /// Its boxes, for a leaf.
    boxes: std::ops::Range<usize>,
    /// Its second child, for an inner node (the first one follows it); 0 for a leaf.
    second: usize,
}

impl ChunkIndex {
    /// Builds the lookup. `Err` is the number of a chunk that exceeds the tensor.
    pub fn new(shape: &[u64], chunks: &[ChunkRecord]) -> Result<Self, usize> {
        let mut boxes = Vec::with_capacity(chunks.len());
        for (number, chunk) in chunks.iter().enumerate() {
            let parts = match &chunk.region {
                ChunkRegion::Box(region) if region.fits(shape) => vec![region.clone()],
                ChunkRegion::Box(_) => return Err(number),
                ChunkRegion::Run { start, len } => run_to_boxes(shape, *start, *len).ok_or(number)?,
            };
            let mut base = 0_u64;
            for region in parts {
                let volume = region.volume().ok_or(number)?;
                if !region.is_empty() {
                    boxes.push(StoredBox { chunk: u32::try_from(number).map_err(|_| number)?, region, base });
                }
                base = base.checked_add(volume).ok_or(number)?;
            }
        }
        let mut index = Self { nodes: Vec::new(), boxes };
        if !index.boxes.is_empty() {
            index.build(0..index.boxes.len());
        }
        Ok(index)
    }

    fn build(&mut self, range: std::ops::Range<usize>) {
        let boxes = &mut self.boxes[range.clone()];
        let bounds = bounds(boxes);
        let node = self.nodes.len();
        self.nodes.push(Node { bounds, boxes: range.clone(), second: 0 });
        if boxes.len() <= FANOUT {
            return;
        }
        // Halve along the axis along which the boxes' beginnings spread over the most boxes'
        // widths.
        let spread = |d: usize| {
            let (mut low, mut high, mut width) = (u64::MAX, 0, u64::MAX);
            for stored in boxes.iter() {
                low = low.min(stored.region.offset[d]);
                high = high.max(stored.region.offset[d]);
                width = width.min(stored.region.extent[d]);
            }
            (high - low) / width.max(1)
        };
        let Some(axis) = (0..boxes[0].region.ndim()).max_by_key(|&d| (spread(d), std::cmp::Reverse(d)))
        else {
            return;
        };
        let middle = boxes.len() / 2;
        boxes.select_nth_unstable_by_key(middle, |stored| {
            (stored.region.offset[axis], stored.chunk, stored.base)
        });
        self.build(range.start..range.start + middle);
        self.nodes[node].second = self.nodes.len();
        self.build(range.start + middle..range.end);
    }

    /// The overlaps of `region`, in the order of chunks and of boxes within them.
    pub fn overlaps(&self, region: &Region) -> Vec<Overlap<'_>> {
        let mut found = Vec::new();
        let mut open = vec![0_usize];
        while let Some(at) = open.pop() {
            let Some(node) = self.nodes.get(at) else { continue };
            if node.bounds.intersect(region).is_none() {
                continue;
            }
            if node.second != 0 {
                open.extend([node.second, at + 1]);
                continue;
            }
            found.extend(
                self.boxes[node.boxes.clone()]
                    .iter()
                    .filter_map(|stored| Some(Overlap { stored, region: stored.region.intersect(region)? })),
            );
        }
        found.sort_unstable_by_key(|overlap| (overlap.stored.chunk, overlap.stored.base));
        found
    }
}

/// The smallest region that holds all boxes.
fn bounds(boxes: &[StoredBox]) -> Region {
    let mut bounds = boxes.first().map_or_else(|| Region::whole(&[]), |first| first.region.clone());
    for Region { offset, extent } in boxes.iter().map(|stored| &stored.region) {
        for d in 0..bounds.ndim() {
            let end = (bounds.offset[d] + bounds.extent[d]).max(offset[d] + extent[d]);
            bounds.offset[d] = bounds.offset[d].min(offset[d]);
            bounds.extent[d] = end - bounds.offset[d];
        }
    }
    bounds
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use stepwell_core::format::index::{Codec, Extent, Integrity, Source};
    use stepwell_core::region::volume;

    use super::*;
    use crate::subchunk;

    fn chunk(region: ChunkRegion) -> ChunkRecord {
        let extent = Extent { source: Source::Own(0), offset: 0, length: 0, integrity: Integrity::BlockCrc };
        ChunkRecord { region, extent, codec: Codec::Raw }
    }

    fn region_in(shape: Vec<u64>) -> impl Strategy<Value = Region> {
        let axes: Vec<_> =
            shape.into_iter().map(|n| (0..=n).prop_flat_map(move |o| (Just(o), 0..=n - o))).collect();
        axes.prop_map(|axes| {
            let (offset, extent) = axes.into_iter().unzip();
            Region { offset, extent }
        })
    }

    proptest! {
        #[test]
        fn the_overlaps_are_those_that_comparing_every_box_finds(
            (shape, wanted, chunks) in prop::collection::vec(1_u64..12, 1..4).prop_flat_map(|shape| {
                let n = volume(&shape).unwrap();
                let run = (0..=n).prop_flat_map(move |s| (Just(s), 0..=n - s));
                let chunk = prop_oneof![
                    region_in(shape.clone()).prop_map(ChunkRegion::Box),
                    run.prop_map(|(start, len)| ChunkRegion::Run { start, len }),
                ];
                (Just(shape.clone()), region_in(shape), prop::collection::vec(chunk, 0..60))
            })
        ) {
            let chunks: Vec<ChunkRecord> = chunks.into_iter().map(chunk).collect();
            let index = ChunkIndex::new(&shape, &chunks).unwrap();
            let mut expected = Vec::new();
            for (number, record) in chunks.iter().enumerate() {
                let boxes = match &record.region {
                    ChunkRegion::Box(region) => vec![region.clone()],
                    ChunkRegion::Run { start, len } => subchunk::run_to_boxes(&shape, *start, *len).unwrap(),
                };
                let mut base = 0;
                for stored in boxes {
                    if let Some(both) = stored.intersect(&wanted) {
                        expected.push((number as u32, base, both));
                    }
                    base += stored.volume().unwrap();
                }
            }
            let found: Vec<_> =
                index.overlaps(&wanted).into_iter().map(|o| (o.stored.chunk, o.stored.base, o.region)).collect();
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn a_question_looks_at_few_of_many_chunks() {
        // 16 × 64 chunks of 1 × 1000 elements.
        let at = (0..16).flat_map(|i| (0..64).map(move |j| vec![i, 1000 * j]));
        let chunks: Vec<_> = at
            .map(|offset| ChunkRegion::Box(Region { offset: offset.into(), extent: vec![1, 1000].into() }))
            .map(chunk)
            .collect();
        let index = ChunkIndex::new(&[16, 64_000], &chunks).unwrap();
        let leaves = |offset: [u64; 2], extent: [u64; 2]| {
            let asked = Region { offset: offset.as_slice().into(), extent: extent.as_slice().into() };
            let nodes = index.nodes.iter().filter(|node| node.second == 0);
            nodes.filter(|node| node.bounds.intersect(&asked).is_some()).count()
        };
        assert_eq!(index.nodes[0].bounds, Region::whole(&[16, 64_000]));
        let (row, column) = (leaves([9, 0], [1, 64_000]), leaves([0, 40_000], [16, 1000]));
        assert!(row <= 32 && column <= 8, "{row} {column}");
        assert_eq!(leaves([9, 40_000], [1, 1000]), 1);
    }

    #[test]
    fn a_chunk_outside_of_the_tensor_is_named() {
        let inside = chunk(ChunkRegion::Box(Region::whole(&[4])));
        for outside in [
            ChunkRegion::Box(Region { offset: vec![u64::MAX].into(), extent: vec![2].into() }),
            ChunkRegion::Box(Region::whole(&[4, 1])),
            ChunkRegion::Run { start: 3, len: 2 },
            ChunkRegion::Run { start: 1, len: u64::MAX },
        ] {
            assert_eq!(ChunkIndex::new(&[4], &[inside.clone(), chunk(outside)]).unwrap_err(), 1);
        }
    }
}
