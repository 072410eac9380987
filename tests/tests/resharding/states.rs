//! Random states of a job: who holds which parts of which tensors, and where in its memory.

use std::collections::BTreeSet;
use std::sync::Arc;

use ndarray::ArrayViewD;
use stepwell_core::leaf_path::{Component, LeafPath};
use stepwell_core::provider::{HostProvider, StateProvider};
use stepwell_core::region::Region;
use stepwell_core::sys::HostSource;
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_core::value::Value;
use stepwell_manager::state::{Holders, Part};
use stepwell_manager::{LeafSource, StateSource};
use stepwell_reshard::layout::{Place, Segment, flat};

use crate::dice::Dice;
use crate::local::Local;
use crate::tensors::{Memory, Tensor, Values, cut, run, slice, tiles};

/// A leaf of a job.
#[derive(Clone, Debug)]
pub struct Leaf {
    pub path: Vec<String>,
    pub what: What,
}

#[derive(Clone, Debug)]
pub enum What {
    Tensor {
        tensor: Tensor,
        held: Held,
    },
    Object {
        value: i64,
        ranks: Vec<u32>,
        drifting: bool,
    },
    /// The same as the leaf of that number, on the ranks that have it.
    Tie(usize),
}

/// The holders of a tensor's parts.
#[derive(Clone, Debug)]
pub enum Held {
    /// It is simply there on these ranks, in one array or in several.
    Plain { ranks: Vec<u32>, boxes: Vec<Region>, drifting: bool },
    /// It is cut. `idle`: ranks that have the leaf, and no part of it.
    Cut { shares: Vec<Share>, idle: Vec<u32> },
}

impl Leaf {
    /// True if no rank knows by itself who else has it.
    pub fn is_plain(&self) -> bool {
        matches!(&self.what, What::Tensor { tensor, held } if matches!(held, Held::Plain { .. }) || tensor.bytes() == 0)
    }
}

/// Boxes that differ along one axis, and the ranks that hold them.
#[derive(Clone, Debug)]
pub struct Share {
    pub boxes: Vec<Region>,
    pub axis: usize,
    pub holders: Vec<u32>,
    pub how: How,
}

/// How several ranks hold the same boxes.
#[derive(Clone, Debug)]
pub enum How {
    /// Only one does.
    Alone,
    /// All of it, and each knows which others do.
    Ranks,
    /// All of it, and each knows how many do, and its own place among them.
    Places(Vec<u32>),
    /// They have flattened it, and each has a run of that: as many borders as ranks, and one.
    Flat { local: Local, borders: Vec<u64> },
}

/// The state that all ranks of a job save as one step.
#[derive(Clone, Debug, Default)]
pub struct State {
    pub world: u32,
    pub leaves: Vec<Leaf>,
    /// Leaves that were ever made, for their names.
    made: usize,
}

impl State {
    /// No leaves yet.
    pub fn new(world: u32) -> Self {
        Self { world, ..Self::default() }
    }

    /// The state some steps later: some leaves have gone, all values are others.
    pub fn go_on(&mut self, dice: &mut Dice) {
        if dice.once_in(3) {
            let gone = dice.below(self.leaves.len() as u64 + 1) as usize;
            let is_tied = |leaf: &Leaf| matches!(leaf.what, What::Tie(_));
            // Ties count the leaves before them.
            if !self.leaves.iter().skip(gone).any(is_tied) && gone < self.leaves.len() {
                self.leaves.remove(gone);
            }
        }
        for leaf in &mut self.leaves {
            match &mut leaf.what {
                What::Tensor { tensor, .. } => tensor.set_values(dice),
                What::Object { value, .. } => *value = dice.number().cast_signed(),
                What::Tie(_) => {}
            }
        }
    }

    /// Adds so many leaves, of at most so many bytes each.
    pub fn grow(&mut self, dice: &mut Dice, leaves: u64, most_bytes: u64) {
        let all: Vec<u32> = (0..self.world).collect();
        // Now and then a rank has nothing.
        let active = if dice.once_in(3) { dice.some(&all) } else { all };
        for _ in 0..leaves {
            let tensors: Vec<usize> = self.tensors().map(|(number, ..)| number).collect();
            let what = match dice.below(12) {
                0 => What::Object {
                    value: dice.number().cast_signed(),
                    ranks: dice.some(&active),
                    drifting: dice.once_in(2),
                },
                1 if !tensors.is_empty() => What::Tie(*dice.pick(&tensors)),
                kind => {
                    let tensor = Tensor::random(dice, most_bytes);
                    let held = if kind < 5 {
                        plain(dice, &tensor, &active)
                    } else {
                        shared_out(dice, &tensor, &active)
                    };
                    What::Tensor { tensor, held }
                }
            };
            self.add(dice, what);
        }
    }

    /// Adds a leaf, under a path that no other ever had.
    pub fn add(&mut self, dice: &mut Dice, what: What) {
        let path = match &what {
            // Beside what it is tied to, or in an item of its own, behind it in any case.
            What::Tie(of) if dice.once_in(2) => {
                let mut path = self.leaves[*of].path.clone();
                let name = path.pop().unwrap();
                path.push(format!("{name}-tied{}", self.made));
                path
            }
            What::Tie(_) => vec!["ties".to_owned(), format!("w{}", self.made)],
            _ => {
                let inside = dice.pick(&["", "params/", "params/layer/", "optimizer/"]);
                format!("{inside}w{}", self.made).split('/').map(str::to_owned).collect()
            }
        };
        self.made += 1;
        self.leaves.push(Leaf { path, what });
    }

    /// All tensors, with their numbers and paths.
    pub fn tensors(&self) -> impl Iterator<Item = (usize, &Leaf, &Tensor, &Held)> {
        self.leaves.iter().enumerate().filter_map(|(number, leaf)| match &leaf.what {
            What::Tensor { tensor, held } => Some((number, leaf, tensor, held)),
            _ => None,
        })
    }

    /// The tensor that is stored at a leaf, its own or the one that it is tied to.
    pub fn tensor<'a>(&'a self, leaf: &'a Leaf) -> Option<&'a Tensor> {
        match &leaf.what {
            What::Tensor { tensor, .. } => Some(tensor),
            What::Object { .. } => None,
            What::Tie(of) => self.tensor(&self.leaves[*of]),
        }
    }

    /// The ranks that have a leaf.
    pub fn ranks(&self, leaf: &Leaf) -> BTreeSet<u32> {
        match &leaf.what {
            What::Tensor { held: Held::Plain { ranks, .. }, .. } | What::Object { ranks, .. } => {
                ranks.iter().copied().collect()
            }
            What::Tensor { held: Held::Cut { shares, idle }, .. } => {
                shares.iter().flat_map(|share| &share.holders).chain(idle).copied().collect()
            }
            What::Tie(of) => self.ranks(&self.leaves[*of]),
        }
    }

    /// The tensors, once for each item that they are stored in: one that is tied to another item's
    /// is stored there too.
    pub fn stored(&self) -> impl Iterator<Item = &Leaf> {
        let item = |leaf: &Leaf| if leaf.path.len() > 1 { leaf.path[0].clone() } else { String::new() };
        let holder = |(number, leaf): (usize, &Leaf)| match leaf.what {
            What::Tensor { .. } => Some((number, item(leaf))),
            What::Tie(of) => Some((of, item(leaf))),
            What::Object { .. } => None,
        };
        let stored: BTreeSet<(usize, String)> = self.leaves.iter().enumerate().filter_map(holder).collect();
        stored.into_iter().map(|(number, _)| &self.leaves[number])
    }

    /// A rank's leaves, in memory of its own.
    pub fn of_rank(&self, dice: &mut Dice, rank: u32) -> StateSource {
        let mut memories = vec![Memory::default(); 1 + dice.below(3) as usize];
        let mut pieces: Vec<Vec<Piece>> = Vec::new();
        let mine: Vec<&Leaf> = self.leaves.iter().filter(|leaf| self.ranks(leaf).contains(&rank)).collect();
        for leaf in &mine {
            let What::Tensor { tensor, held } = &leaf.what else {
                pieces.push(Vec::new());
                continue;
            };
            pieces.push(pieces_of(dice, tensor, held, rank, &mut memories));
        }
        let memories: Vec<Arc<Vec<u8>>> = memories.into_iter().map(|memory| Arc::new(memory.bytes)).collect();
        let sources =
            mine.iter().zip(pieces).map(|(leaf, pieces)| (*leaf, source(leaf, pieces, rank, &memories)));
        self.tree(sources.collect())
    }

    /// A state of these leaves, which are given with what they hold.
    fn tree(&self, leaves: Vec<(&Leaf, LeafSource)>) -> StateSource {
        let number = |leaf: &Leaf| self.leaves.iter().position(|other| other.path == leaf.path).unwrap();
        let mut state = StateSource { tree: Tree::new(), leaves: Vec::new() };
        let root = state.tree.push_container(None, None, ContainerKind::Dict);
        let mut numbers = Vec::new();
        branch(
            &mut state,
            &mut numbers,
            root,
            leaves.into_iter().map(|(leaf, source)| (&leaf.path[..], number(leaf), source)).collect(),
        );
        for source in &mut state.leaves {
            if let LeafSource::Alias(of) = source {
                *of = numbers.iter().position(|&number| number == *of as usize).unwrap() as u32;
            }
        }
        state
    }
}

/// What a rank hands over of a leaf.
fn source(leaf: &Leaf, pieces: Vec<Piece>, rank: u32, memories: &[Arc<Vec<u8>>]) -> LeafSource {
    match &leaf.what {
        What::Tie(of) => LeafSource::Alias(*of as u32), // counted in this rank's leaves later
        What::Object { value, ranks, drifting: false } => {
            assert!(ranks.contains(&rank));
            LeafSource::Object(Value::Int(*value))
        }
        What::Object { value, ranks, .. } => {
            LeafSource::Drifting(Value::Int(if ranks[0] == rank { *value } else { i64::from(rank) }))
        }
        What::Tensor { tensor, held } => {
            let itemsize = tensor.dtype.size();
            let shards = pieces.into_iter().map(|Piece { part, memory, place }| {
                let (extent, memory) = (&part.region.extent, Arc::clone(&memories[memory]));
                let source =
                    HostSource::owned(memory, place.offset as usize, itemsize, extent, &place.strides);
                let provider: Arc<dyn StateProvider> = Arc::new(HostProvider::new(source.unwrap()));
                (part, provider)
            });
            let mut shards: Vec<_> = shards.collect();
            let is_first = matches!(held, Held::Plain { drifting: true, .. });
            let source = match shards.as_slice() {
                [(part, _)]
                    if part.region == Region::whole(&tensor.shape) && part.holders == Holders::Everyone =>
                {
                    LeafSource::whole(tensor.dtype, tensor.shape.clone(), shards.remove(0).1)
                }
                _ => LeafSource::sharded(tensor.dtype, tensor.shape.clone(), shards),
            };
            if is_first { source.of_first() } else { source }
        }
    }
}

/// Adds leaves below a container, in their order; those of one container below it stand where its
/// first one does.
fn branch(
    state: &mut StateSource,
    numbers: &mut Vec<usize>,
    parent: u32,
    mut leaves: Vec<(&[String], usize, LeafSource)>,
) {
    while !leaves.is_empty() {
        let (path, number, source) = leaves.remove(0);
        let component = Some(Component::Key(path[0].as_str().into()));
        if path.len() == 1 {
            state.tree.push_leaf(Some(parent), component);
            state.leaves.push(source);
            numbers.push(number);
            continue;
        }
        let (inside, others) =
            leaves.into_iter().partition(|(other, ..)| other.len() > 1 && other[0] == path[0]);
        let inside: Vec<(&[String], usize, LeafSource)> = inside;
        let below = std::iter::once((path, number, source)).chain(inside);
        let below = below.map(|(path, number, source)| (&path[1..], number, source)).collect();
        let node = state.tree.push_container(Some(parent), component, ContainerKind::Dict);
        branch(state, numbers, node, below);
        leaves = others;
    }
}

/// A path of keys.
pub fn path(keys: &[String]) -> LeafPath {
    LeafPath(keys.iter().map(|key| Component::Key(key.as_str().into())).collect())
}

/// A tensor that is simply there.
pub fn plain(dice: &mut Dice, tensor: &Tensor, ranks: &[u32]) -> Held {
    let parts = if dice.once_in(4) { dice.between(2, 4) } else { 1 };
    let boxes = tiles(dice, &Region::whole(&tensor.shape), parts);
    Held::Plain { ranks: dice.some(ranks), boxes, drifting: dice.once_in(4) }
}

/// A tensor that ranks share, each box of it in another way.
pub fn shared_out(dice: &mut Dice, tensor: &Tensor, ranks: &[u32]) -> Held {
    let parts = dice.between(1, 2 * ranks.len() as u64 + 1);
    let mut shares = Vec::new();
    let common = How::random(dice);
    for region in tiles(dice, &Region::whole(&tensor.shape), parts) {
        let axis = dice.below(region.ndim() as u64) as usize;
        let mut boxes = vec![region];
        if boxes[0].ndim() > 0 && dice.once_in(3) {
            for _ in 0..dice.between(1, 2) {
                let last = boxes.pop().unwrap();
                boxes.extend(cut(dice, &last, axis));
            }
        }
        let holders = if dice.once_in(2) { vec![*dice.pick(ranks)] } else { dice.some(ranks) };
        // Mostly one way for all of a tensor.
        let how = if dice.once_in(4) { How::random(dice) } else { common };
        let how = match how {
            Random::Flat => {
                let local = Local::new(dice, &boxes, axis);
                let borders = dice.borders(local.elements(), holders.len());
                How::Flat { local, borders }
            }
            _ if holders.len() == 1 => How::Alone,
            Random::Ranks => How::Ranks,
            Random::Places => {
                let mut places: Vec<u32> = (0..holders.len() as u32).collect();
                dice.shuffle(&mut places);
                How::Places(places)
            }
        };
        shares.push(Share { boxes, axis, holders, how });
    }
    let idle = if dice.once_in(4) { dice.some(ranks) } else { Vec::new() };
    Held::Cut { shares, idle }
}

#[derive(Clone, Copy)]
enum Random {
    Ranks,
    Places,
    Flat,
}

impl How {
    fn random(dice: &mut Dice) -> Random {
        *dice.pick(&[Random::Ranks, Random::Ranks, Random::Places, Random::Flat])
    }
}

/// A part, and where a rank has it.
struct Piece {
    part: Part,
    memory: usize,
    place: Place,
}

/// A rank's parts of a tensor, copied into its memory.
fn pieces_of(
    dice: &mut Dice,
    tensor: &Tensor,
    held: &Held,
    rank: u32,
    memories: &mut [Memory],
) -> Vec<Piece> {
    let mut pieces = Vec::new();
    match held {
        Held::Plain { ranks, boxes, drifting } => {
            let mut whole = &tensor.whole;
            let other: Values;
            if *drifting && ranks[0] != rank {
                other = tensor.whole.mapv(|byte| byte ^ 0x55);
                whole = &other;
            }
            for region in boxes {
                pieces.push(apart(dice, whole, region, Holders::Everyone, memories));
            }
        }
        Held::Cut { shares, .. } => {
            for share in shares {
                let Some(place) = share.holders.iter().position(|&holder| holder == rank) else { continue };
                pieces.extend(pieces_of_share(dice, tensor, share, place, memories));
            }
        }
    }
    pieces
}

fn pieces_of_share(
    dice: &mut Dice,
    tensor: &Tensor,
    share: &Share,
    place: usize,
    memories: &mut [Memory],
) -> Vec<Piece> {
    let itemsize = tensor.itemsize();
    let number = dice.below(memories.len() as u64) as usize;
    let holders = match &share.how {
        How::Flat { local, borders } => {
            let (start, len) = (borders[place], borders[place + 1] - borders[place]);
            let offset = memories[number].flat(dice, len * itemsize);
            let values = run(&local.values(&tensor.whole), start, len);
            memories[number]
                .put(&Place { offset, strides: [itemsize.cast_signed()].as_slice().into() }, &values.view());
            let part = flat(&local.layout(itemsize, 0), &local.shape, itemsize, start, len, offset).unwrap();
            return parts(part, &Holders::This, number);
        }
        How::Alone => Holders::This,
        How::Ranks => Holders::Ranks(share.holders.as_slice().into()),
        How::Places(places) => Holders::Replicas { index: places[place], count: share.holders.len() as u32 },
    };
    if dice.once_in(2) {
        return share
            .boxes
            .iter()
            .map(|region| apart(dice, &tensor.whole, region, holders.clone(), memories))
            .collect();
    }
    let local = Local::new(dice, &share.boxes, share.axis);
    let offset = memories[number].flat(dice, local.elements() * itemsize);
    let all = Place { offset, ..Place::row_major(&local.shape, itemsize) };
    memories[number].put(&all, &local.values(&tensor.whole).view());
    parts(local.layout(itemsize, offset), &holders, number)
}

/// A box in a place of its own.
fn apart(
    dice: &mut Dice,
    whole: &Values,
    region: &Region,
    holders: Holders,
    memories: &mut [Memory],
) -> Piece {
    let memory = dice.below(memories.len() as u64) as usize;
    let values: ArrayViewD<'_, i32> = slice(whole, region);
    let itemsize = values.shape()[region.ndim()] as u64;
    let place = memories[memory].place(dice, &region.extent, itemsize);
    memories[memory].put(&place, &values);
    Piece { part: Part { region: region.clone(), holders }, memory, place }
}

fn parts(layout: Vec<Segment>, holders: &Holders, memory: usize) -> Vec<Piece> {
    let piece =
        |Segment { region, place }| Piece { part: Part { region, holders: holders.clone() }, memory, place };
    layout.into_iter().map(piece).collect()
}
