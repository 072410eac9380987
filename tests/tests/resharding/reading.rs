//! The stored bytes of a state, and the reads of another job's ranks with any other layout.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use ndarray::Axis;
use stepwell_core::format::index::{ChunkRegion, Index, LeafRecord};
use stepwell_core::io::Disk;
use stepwell_core::io::simulated::SimDisk;
use stepwell_core::load::{FileReads, FileSet, LoadOptions, LoadStats};
use stepwell_core::region::{Region, row_major_strides};
use stepwell_core::sys::HostTarget;
use stepwell_core::value::Value;
use stepwell_manager::Checkpoint;
use stepwell_reshard::layout::{Place, Segment, flat};
use stepwell_reshard::matching::{Match, MatchOptions, OnUnexpected, PerGlob, Resize, Spec, Wanted};
use stepwell_reshard::read_plan::Request;
use stepwell_reshard::subchunk::run_to_boxes;

use crate::dice::Dice;
use crate::local::Local;
use crate::states::{State, What, path};
use crate::tensors::{Memory, NOTHING, Tensor, Values, any_box, cut, inside, resized, run, slice, tiles};
use crate::world::step_path;

/// For each element of a tensor, row-major: its file, and its first byte there.
type Homes = Vec<(u32, u64)>;

/// A step as it is stored.
pub struct Stored<'a> {
    pub checkpoint: &'a Checkpoint,
    /// By the leaf that holds the bytes.
    homes: BTreeMap<usize, Homes>,
    blocks: Vec<u64>,
}

impl<'a> Stored<'a> {
    /// Looks at every byte of every tensor: each element is stored once, and is what was saved.
    /// Returns what is found.
    pub fn check(disk: &'a SimDisk, step: u64, checkpoint: &'a Checkpoint, state: &State) -> Self {
        let index = checkpoint.index().unwrap();
        let files: Vec<_> = index
            .files
            .iter()
            .map(|file| {
                let bytes = |name: &str| disk.bytes(&format!("{}/{name}", step_path(step)));
                match &file.within {
                    None => bytes(&file.name).expect("the file is there"),
                    Some(within) => {
                        assert_eq!(bytes(&file.name), None, "it has no file of its own");
                        let all = bytes(&within.name).expect("the file of its node is there");
                        Arc::new(all[within.offset as usize..][..file.length as usize].to_vec())
                    }
                }
            })
            .collect();
        let set = FileSet::new(disk.open_dir(Path::new(&step_path(step))).unwrap(), &index.files);
        let blocks = (0..files.len() as u32).map(|file| set.block_bytes(file).unwrap()).collect();
        let mut stored = Self { checkpoint, homes: BTreeMap::new(), blocks };
        let paths: BTreeSet<_> = checkpoint.leaves().iter().map(|leaf| leaf.path.clone()).collect();
        let expected: BTreeSet<_> = state.leaves.iter().map(|leaf| path(&leaf.path)).collect();
        assert_eq!(paths, expected, "every leaf is stored, and nothing else is");
        for leaf in &state.leaves {
            let (number, record) = stored.find(&leaf.path);
            let (LeafRecord::Tensor(record), Some(tensor)) = (record, state.tensor(leaf)) else {
                let What::Object { value, .. } = &leaf.what else {
                    panic!("{leaf:?} is stored as an object")
                };
                let found = checkpoint.read_objects(&[number as u32], &LoadOptions::default()).unwrap();
                assert_eq!(found, [Value::Int(*value)], "{leaf:?}");
                continue;
            };
            assert_eq!(
                (record.dtype, record.shape.as_slice()),
                (tensor.dtype, tensor.shape.as_slice()),
                "{leaf:?}"
            );
            if stored.homes.contains_key(&number) {
                continue;
            }
            let homes = homes(&index, number);
            for (values, &(file, at)) in tensor.whole.lanes(Axis(tensor.shape.len())).into_iter().zip(&homes)
            {
                let bytes = files[file as usize][at as usize..].iter().copied().map(i32::from);
                assert!(
                    values.iter().copied().eq(bytes.take(values.len())),
                    "{leaf:?} is stored as something else"
                );
            }
            stored.homes.insert(number, homes);
        }
        stored
    }

    /// Of every chunk, the bytes of an element, and of all of it.
    pub fn chunks(&self) -> impl Iterator<Item = (u64, u64)> {
        let tensors = self.checkpoint.outline().leaves.iter().filter_map(|record| match record {
            LeafRecord::Tensor(tensor) => Some(tensor),
            _ => None,
        });
        tensors.flat_map(|tensor| {
            tensor.chunks.iter().map(|chunk| (tensor.dtype.size() as u64, chunk.extent.length))
        })
    }

    /// The leaf that holds the bytes of a leaf.
    fn find(&self, keys: &[String]) -> (usize, &LeafRecord) {
        let (index, path) = (self.checkpoint.outline(), path(keys));
        let number = self.checkpoint.leaves().iter().position(|leaf| leaf.path == path).unwrap();
        let (holder, record) = index.resolve(number as u32).unwrap();
        (holder as usize, record)
    }
}

/// Bytes of tensors in the file of each rank that has written something.
pub fn written(checkpoint: &Checkpoint) -> BTreeMap<u32, u64> {
    let index = checkpoint.index().unwrap();
    let mut written = BTreeMap::new();
    for record in &index.leaves {
        let LeafRecord::Tensor(tensor) = record else { continue };
        for chunk in &tensor.chunks {
            let file = &index.files[chunk.extent.source.file().unwrap() as usize].name;
            let rank: u32 = Path::new(&**file).file_stem().unwrap().to_str().unwrap().parse().unwrap();
            *written.entry(rank).or_default() += chunk.extent.length;
        }
    }
    written
}

fn homes(index: &Index, leaf: usize) -> Homes {
    let LeafRecord::Tensor(tensor) = &index.leaves[leaf] else { panic!("a tensor") };
    let (itemsize, strides) = (tensor.dtype.size() as u64, row_major_strides(&tensor.shape));
    let mut homes = vec![None; tensor.shape.iter().product::<u64>() as usize];
    for chunk in &tensor.chunks {
        let ChunkRegion::Box(region) = &chunk.region else { panic!("boxes are written") };
        let file = chunk.extent.source.file().unwrap();
        let elements = region.volume().unwrap();
        assert_eq!(elements * itemsize, chunk.extent.length);
        for number in 0..elements {
            let (mut rest, mut element) = (number, 0);
            for d in (0..tensor.shape.len()).rev() {
                element += (region.offset[d] + rest % region.extent[d]) * strides[d];
                rest /= region.extent[d];
            }
            let home = homes[element as usize].replace((file, chunk.extent.offset + number * itemsize));
            assert_eq!(home, None, "an element that is stored twice");
        }
    }
    homes.into_iter().map(|home| home.expect("an element that is not stored")).collect()
}

/// What a rank wants of one tensor.
struct Want<'a> {
    leaf: usize,
    path: &'a [String],
    tensor: &'a Tensor,
    /// It may want it longer or shorter than it is stored.
    shape: Vec<u64>,
    /// The part of its wanted region that is read.
    within: Region,
    pieces: Vec<Piece>,
}

impl Want<'_> {
    /// Its pieces of an array of the stored shape.
    fn of(&self, whole: &Values) -> impl Iterator<Item = (&Piece, Values)> {
        let whole = inside(&resized(whole, &self.shape), &self.within);
        self.pieces.iter().map(move |piece| {
            let values = match &piece.what {
                Part::Box(region) => slice(&whole, region).to_owned(),
                Part::Run(start, len) => run(&whole, *start, *len),
                Part::Flat(local, start, len) => run(&local.values(&whole), *start, *len),
            };
            (piece, values)
        })
    }
}

/// A part of a tensor, and where it goes.
struct Piece {
    memory: usize,
    place: Place,
    what: Part,
}

enum Part {
    Box(Region),
    /// A run of the flattened tensor.
    Run(u64, u64),
    /// A run of a flattened array of parts of the tensor.
    Flat(Local, u64, u64),
}

/// Reads as one rank of another job does, with a layout of its own, and compares all of its memory.
pub fn read_as_a_rank(dice: &mut Dice, stored: &Stored<'_>, state: &State) {
    let mut memories = vec![Memory::default(); 1 + dice.below(3) as usize];
    let wants: Vec<Want<'_>> =
        (0..state.leaves.len()).filter_map(|leaf| want(dice, state, leaf, &mut memories)).collect();
    let mut expected = memories.clone();
    let mut needed = Needed::default();
    for want in &wants {
        for (piece, values) in want.of(&want.tensor.whole) {
            expected[piece.memory].put(&piece.place, &values.view());
        }
        needed.add(stored, state, want);
    }
    let requests = requests(stored, &wants);
    let checkpoint = stored.checkpoint;
    let load = LoadOptions {
        budget_bytes: *dice.pick(&[0, 256 << 10, 64 << 20]),
        queue_depth: dice.between(1, 16) as usize,
        threads: dice.between(1, 2) as usize,
        ..LoadOptions::default()
    };
    let plan = checkpoint.plan(&requests, &[]).unwrap();
    needed.check(&plan, &stored.blocks);
    let mut found = memories;
    let stats =
        checkpoint.read(&requests, targets(&mut found), &load).map_err(|failure| failure.error).unwrap();
    compare(&wants, &found, &expected);
    check_stats(&plan, &stats, &load);
}

fn targets(memories: &mut [Memory]) -> Vec<HostTarget<'_>> {
    memories.iter_mut().map(|memory| HostTarget::from(memory.bytes.as_mut_slice())).collect()
}

fn compare(wants: &[Want<'_>], found: &[Memory], expected: &[Memory]) {
    for (number, (found, expected)) in found.iter().zip(expected).enumerate() {
        let Some(at) = found.bytes.iter().zip(&expected.bytes).position(|(one, other)| one != other) else {
            continue;
        };
        let inside = wants.iter().flat_map(|want| &want.pieces).filter(|piece| piece.memory == number);
        let near =
            inside.filter(|piece| piece.place.offset <= at as u64).max_by_key(|piece| piece.place.offset);
        let near = near.map(|piece| &piece.place);
        panic!("byte {at} of buffer {number} is wrong; before it begins {near:?}");
    }
}

fn want<'a>(dice: &mut Dice, state: &'a State, leaf: usize, memories: &mut [Memory]) -> Option<Want<'a>> {
    let (at, tensor) = (&state.leaves[leaf], state.tensor(&state.leaves[leaf])?);
    if dice.once_in(5) {
        return None;
    }
    let mut shape = tensor.shape.clone();
    if dice.once_in(6) {
        for n in &mut shape {
            *n = (*n + dice.below(3)).saturating_sub(dice.below(3));
        }
    }
    let within = if dice.once_in(6) { any_box(dice, &shape) } else { Region::whole(&shape) };
    let mut pieces = Vec::new();
    let itemsize = tensor.itemsize();
    let elements: u64 = shape.iter().product();
    for _ in 0..dice.between(1, 2) {
        let memory = dice.below(memories.len() as u64) as usize;
        let room = &mut memories[memory];
        let stride = |bytes: u64| [bytes.cast_signed()].as_slice().into();
        match dice.below(5) {
            // All of it, cut in another way.
            0 => {
                let parts = dice.between(1, 4);
                for region in tiles(dice, &Region::whole(&shape), parts) {
                    let place = room.place(dice, &region.extent, itemsize);
                    pieces.push(Piece { memory, place, what: Part::Box(region) });
                }
            }
            1 => {
                let region = any_box(dice, &shape);
                let place = room.place(dice, &region.extent, itemsize);
                pieces.push(Piece { memory, place, what: Part::Box(region) });
            }
            2 => {
                let borders = dice.borders(elements, 3);
                let (start, len) = (borders[1], borders[2] - borders[1]);
                let place = room.place(dice, &[len], itemsize);
                pieces.push(Piece { memory, place, what: Part::Run(start, len) });
            }
            kind => {
                let region = any_box(dice, &shape);
                let axis = dice.below(shape.len() as u64) as usize;
                let boxes = if shape.is_empty() { vec![region] } else { cut(dice, &region, axis).to_vec() };
                let local = Local::new(dice, &boxes, axis);
                let borders =
                    if kind == 3 { vec![0, 0, local.elements()] } else { dice.borders(local.elements(), 3) };
                let (start, len) = (borders[1], borders[2] - borders[1]);
                let offset = room.flat(dice, len * itemsize);
                let place = Place { offset, strides: stride(itemsize) };
                pieces.push(Piece { memory, place, what: Part::Flat(local, start, len) });
            }
        }
    }
    Some(Want { leaf, path: &at.path, tensor, shape, within, pieces })
}

/// The requests to the engine: leaves matched by their paths, with layouts clipped to the stored
/// tensors.
fn requests(stored: &Stored<'_>, wants: &[Want<'_>]) -> Vec<Request> {
    let wanted = wants.iter().map(|want| {
        let spec = Spec::Tensor { dtype: Some(want.tensor.dtype), shape: Some(want.shape.clone()) };
        Wanted { path: path(want.path), spec, holds_value: true }
    });
    let options = MatchOptions {
        unexpected: PerGlob::everywhere(OnUnexpected::Ignore),
        resize: PerGlob::everywhere(Resize::Both),
        ..MatchOptions::default()
    };
    let report = stored.checkpoint.match_state(&wanted.collect::<Vec<_>>(), &options);
    assert!(report.is_ok(), "{report}");
    assert_eq!(report.matches.len(), wants.len());
    let mut requests = Vec::new();
    for Match { wanted, stored: leaf, tensor: matched, .. } in &report.matches {
        let (want, matched) = (&wants[*wanted], matched.as_ref().unwrap());
        let itemsize = want.tensor.itemsize();
        let empty =
            || Region { extent: want.shape.iter().map(|_| 0).collect(), ..Region::whole(&want.shape) };
        let there = matched.region.intersect(&want.within).unwrap_or_else(empty);
        for piece in &want.pieces {
            let layout = match &piece.what {
                Part::Box(region) => vec![Segment { region: region.clone(), place: piece.place.clone() }],
                Part::Run(start, len) => boxes_of_run(&want.shape, *start, *len, &piece.place),
                // One that is all of its array lies there as it is.
                Part::Flat(local, 0, len) if *len == local.elements() && want.leaf % 2 == 0 => {
                    local.layout(itemsize, piece.place.offset)
                }
                Part::Flat(local, start, len) => {
                    let own = local.layout(itemsize, 0);
                    flat(&own, &local.shape, itemsize, *start, *len, piece.place.offset).unwrap()
                }
            };
            let asked =
                layout.iter().filter_map(|one| request(one, *leaf as u32, &there, piece.memory as u32));
            requests.extend(asked);
        }
    }
    requests
}

/// A run of the flattened tensor, whose elements lie one after another, as boxes.
fn boxes_of_run(shape: &[u64], start: u64, len: u64, place: &Place) -> Vec<Segment> {
    let (mut at, stride) = (place.offset.cast_signed(), place.strides[0]);
    let boxes = run_to_boxes(shape, start, len).unwrap().into_iter().map(|region| {
        let steps = row_major_strides(&region.extent).into_iter();
        let strides = steps.map(|n| n.cast_signed() * stride).collect();
        let place = Place { offset: at.cast_unsigned(), strides };
        at += region.volume().unwrap().cast_signed() * stride;
        Segment { region, place }
    });
    boxes.collect()
}

/// The request for the part of a segment that is stored.
fn request(Segment { region, place }: &Segment, leaf: u32, stored: &Region, dst: u32) -> Option<Request> {
    let part = region.intersect(stored)?;
    let moved = part.offset.iter().zip(&region.offset).zip(&place.strides);
    let offset = moved.fold(place.offset.cast_signed(), |at, ((part, region), stride)| {
        at + (part - region).cast_signed() * stride
    });
    let (dst_offset, dst_strides) = (offset.cast_unsigned(), place.strides.clone());
    Some(Request { leaf, region: part, dst, dst_offset, dst_strides })
}

/// Blocks that hold a byte of what is wanted, by file.
#[derive(Default)]
struct Needed(BTreeMap<u32, BTreeSet<u64>>);

impl Needed {
    fn add(&mut self, stored: &Stored<'_>, state: &State, want: &Want<'_>) {
        let (leaf, _) = stored.find(&state.leaves[want.leaf].path);
        let homes = &stored.homes[&leaf];
        for (_, elements) in want.of(&want.tensor.numbers()) {
            for &element in elements.iter().filter(|&&element| element != NOTHING) {
                let (file, at) = homes[usize::try_from(element).unwrap()];
                let block = stored.blocks[file as usize];
                let blocks = at / block..=(at + want.tensor.itemsize() - 1) / block;
                self.0.entry(file).or_default().extend(blocks);
            }
        }
    }

    /// The plan reads each of them once, and what lies between two of them only where that is no
    /// more than the gap.
    fn check(&self, plan: &[FileReads], blocks: &[u64]) {
        assert!(plan.iter().map(|file| file.file).eq(self.0.keys().copied()));
        for file in plan {
            let (block, mut needed) = (blocks[file.file as usize], self.0[&file.file].iter().peekable());
            assert!(file.reads.is_sorted_by(|a, b| a.end <= b.start), "{:?}", file.reads);
            let (mut next, mut gap) = (0, 0);
            for read in &file.reads {
                assert!(read.start.is_multiple_of(block), "{read:?}");
                assert!(read.end - read.start <= MAX_READ_BYTES.max(block), "{read:?}");
                if read.start / block != next {
                    assert_eq!(gap, 0, "{read:?} comes after a block that nobody needs");
                }
                next = read.end.div_ceil(block);
                for number in read.start / block..next {
                    gap = if needed.next_if_eq(&&number).is_some() { 0 } else { gap + block };
                    assert!(gap <= MAX_GAP_BYTES, "{read:?} bridges too much");
                }
            }
            assert!(gap == 0 && needed.next().is_none(), "blocks of file {}", file.file);
        }
    }
}

/// The longest read, unless one block is longer, and the most bytes that a read bridges.
const MAX_READ_BYTES: u64 = 4 << 20;
const MAX_GAP_BYTES: u64 = 64 << 10;
/// No read buffer is smaller.
const LEAST_BUFFER: u64 = 64 << 10;

fn check_stats(plan: &[FileReads], stats: &LoadStats, options: &LoadOptions) {
    let lengths = || plan.iter().flat_map(|file| &file.reads).map(|read| read.end - read.start);
    assert_eq!(stats.bytes_copied, plan.iter().map(|file| file.wanted_bytes).sum::<u64>());
    assert_eq!(stats.bytes_read + stats.bytes_cached, lengths().sum::<u64>(), "{stats:?}, planned {plan:?}");
    if stats.bytes_cached == 0 {
        assert_eq!(stats.reads, lengths().count() as u64, "{stats:?}, planned {plan:?}");
    }
    // Two reads, and what a thread works on.
    let longest = lengths().max().unwrap_or(0).next_power_of_two().max(LEAST_BUFFER);
    assert!(stats.peak_buffer_bytes <= options.budget_bytes.max(3 * longest), "{stats:?} of {options:?}");
}
