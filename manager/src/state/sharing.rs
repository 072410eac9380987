//! This rank's part of the writes: the regions that it alone holds, and its share of replicated
//! regions ([`stepwell_reshard::partition`]).
//!
//! Every holder of a region knows the others: layouts name them, or the ranks have exchanged them
//! in a census. So the plan needs no message.

use std::collections::HashMap;
use std::sync::Arc;

use stepwell_core::format::index_v1::ComponentSpelling;
use stepwell_core::region::{Region, volume};
use stepwell_core::tree::{NodeKind, Tree};
use stepwell_reshard::partition::{Held, Limit, SMALL, Writers, shares};
use stepwell_reshard::tiling;

use super::{Claim, Fnv, Holders, LeafSource, Part, StateSource};
use crate::error::{Error, Result};
use crate::runs::{numbers_of, runs_of};

/// The weight in bytes of an object when writes are balanced. Its real size is known only after
/// encoding.
const OBJECT_BYTES: u64 = 64;

/// The writing rank, and its knowledge of the others.
#[derive(Clone, Copy)]
pub(crate) struct Writing<'a> {
    pub rank: u32,
    pub world_size: u32,
    /// For each rank, the number of its node.
    pub nodes: &'a [u32],
    /// The most writers of a replicated region.
    pub limit: Option<Limit<'a>>,
    /// True if replicas that layouts declare are compared too.
    pub compares: bool,
    /// The holders of plain leaves. `None` before the first census: every rank then writes all that
    /// it has.
    pub census: Option<&'a Census>,
}

impl Writing<'_> {
    /// Returns the directory of an item. One process numbers items. Several ranks derive it from
    /// the item's name, since their states may differ.
    pub(super) fn dir(&self, number: usize, name: &str) -> String {
        if self.world_size == 1 {
            return format!("i{number}");
        }
        let mut hash = Fnv::new();
        hash.add(name.as_bytes());
        format!("i-{:016x}", hash.half())
    }

    /// True if other ranks should have the same value of that part, and claim it too.
    fn is_compared(&self, holders: &Holders, part: u64) -> bool {
        match holders {
            Holders::Everyone => self.is_shared(part) || self.is_news(part),
            Holders::Ranks(ranks) => self.compares && ranks.len() > 1,
            Holders::Replicas { count, .. } => self.compares && *count > 1,
            Holders::This | Holders::First => false,
        }
    }

    /// True if the census has other holders of that part.
    fn is_shared(&self, part: u64) -> bool {
        let holders = self.census.and_then(|census| census.holders(part));
        holders.is_some_and(|ranks| ranks.len() > 1 && ranks.contains(&self.rank))
    }

    /// True if the census does not have this rank as a holder of that part. Others may have it,
    /// too.
    fn is_news(&self, part: u64) -> bool {
        let encoded = |census: &Census| census.holders(part).is_some_and(|ranks| ranks.contains(&self.rank));
        self.census.is_some_and(|census| !encoded(census))
    }

    fn ranks(&self, holders: &Holders, part: u64) -> PartWriters {
        match holders {
            Holders::This => PartWriters::Alone,
            Holders::Ranks(ranks) if ranks.len() <= 1 => PartWriters::Alone,
            Holders::Ranks(ranks) => PartWriters::Ranks(Arc::clone(ranks)),
            Holders::Replicas { count, .. } if *count <= 1 => PartWriters::Alone,
            Holders::Replicas { index, count } => PartWriters::Places(*index, *count),
            Holders::First => match self.census.and_then(|census| census.holders(part)) {
                Some(ranks) if ranks.first() == Some(&self.rank) => PartWriters::Alone,
                Some(ranks) if ranks.contains(&self.rank) => PartWriters::Others,
                _ => PartWriters::Undecided,
            },
            Holders::Everyone => match self.census.and_then(|census| census.holders(part)) {
                Some(ranks) if !ranks.contains(&self.rank) => PartWriters::Undecided,
                Some(ranks) if ranks.len() > 1 => PartWriters::Ranks(ranks),
                Some(_) => PartWriters::Alone,
                None => PartWriters::Undecided,
            },
        }
    }
}

/// The holders of plain leaves, and of boxes of leaves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Census {
    /// Hashes ([`part_hash`]), sorted, each with the number of its set of ranks.
    leaves: Vec<(u64, u32)>,
    sets: Vec<Arc<[u32]>>,
}

/// A census as a message: leaves, each with the number of its set of ranks, and those sets, as
/// runs.
pub(crate) type EncodedCensus = (Vec<(u64, u32)>, Vec<Vec<(u32, u32)>>);

impl Census {
    /// Makes a census from the hashes of each rank's leaves.
    pub(crate) fn new(ranks: &[(u32, Vec<u64>)]) -> Self {
        let mut holders: HashMap<u64, Vec<u32>> = HashMap::new();
        for (rank, leaves) in ranks {
            for &leaf in leaves {
                holders.entry(leaf).or_default().push(*rank);
            }
        }
        let mut sets: Vec<Arc<[u32]>> = Vec::new();
        let mut numbers: HashMap<Arc<[u32]>, u32> = HashMap::new();
        let mut leaves: Vec<(u64, u32)> = Vec::with_capacity(holders.len());
        for (leaf, mut ranks) in holders {
            ranks.sort_unstable();
            ranks.dedup();
            let number = *numbers.entry(ranks.into()).or_insert_with_key(|set| {
                sets.push(Arc::clone(set));
                sets.len() as u32 - 1
            });
            leaves.push((leaf, number));
        }
        leaves.sort_unstable();
        Self { leaves, sets }
    }

    /// Returns the census as a message. It has every leaf once.
    pub(crate) fn encoded(self) -> EncodedCensus {
        (self.leaves, self.sets.iter().map(|set| runs_of(set)).collect())
    }

    /// Returns the census of a message.
    pub(crate) fn decoded((leaves, sets): EncodedCensus) -> Self {
        Self { leaves, sets: sets.into_iter().map(|set| numbers_of(set).into()).collect() }
    }

    /// Returns the holders of a part. `None` if they are unknown.
    fn holders(&self, part: u64) -> Option<Arc<[u32]>> {
        let at = self.leaves.binary_search_by_key(&part, |&(leaf, _)| leaf).ok()?;
        let (_, set) = self.leaves.get(at)?;
        self.sets.get(*set as usize).cloned()
    }

    /// True if the census has exactly these leaves for the rank. `leaves` is sorted.
    pub(crate) fn has(&self, rank: u32, leaves: &[u64]) -> bool {
        let of = |set: &Arc<[u32]>| set.binary_search(&rank).is_ok();
        let mine: Vec<bool> = self.sets.iter().map(of).collect();
        let known = self.leaves.iter().filter(|(_, set)| mine.get(*set as usize) == Some(&true));
        known.map(|(leaf, _)| leaf).eq(leaves)
    }
}

/// Returns the sorted hashes of a state's plain leaves, and of boxes whose holders only the census
/// knows.
pub(crate) fn plain_leaves(state: &StateSource) -> Vec<u64> {
    let mut plain = Vec::new();
    for (source, path) in state.leaves.iter().zip(path_hashes(state)) {
        match source {
            LeafSource::Tensor { shape, .. } if shape.contains(&0) => plain.push(path),
            LeafSource::Tensor { shape, parts, .. } => {
                let is_plain = |part: &&Part| matches!(part.holders, Holders::Everyone | Holders::First);
                let parts = parts.iter().filter(is_plain);
                plain.extend(parts.map(|part| part_hash(path, shape, &part.region)));
            }
            LeafSource::Object(_) | LeafSource::Drifting(_) => plain.push(path),
            LeafSource::Alias(_) => {}
        }
    }
    plain.sort_unstable();
    plain
}

/// Returns a hash of a leaf's path and a box of it. For the whole leaf it is the path's hash.
fn part_hash(path: u64, shape: &[u64], region: &Region) -> u64 {
    if *region.extent == *shape {
        return path;
    }
    let mut hash = Fnv::new();
    for number in [path].iter().chain(&region.offset).chain(&region.extent) {
        hash.add(&number.to_le_bytes());
    }
    hash.half()
}

/// Returns a hash of each leaf's path.
fn path_hashes(state: &StateSource) -> Vec<u64> {
    leaf_hashes(&state.tree)
}

/// Returns a hash of each leaf's path, in a tree.
pub(crate) fn leaf_hashes(tree: &Tree) -> Vec<u64> {
    let nodes = tree.nodes();
    let mut hashes: Vec<u64> = Vec::with_capacity(nodes.len());
    let mut leaves = vec![0; tree.leaf_count()];
    for node in nodes {
        let mut hash = Fnv::new();
        if let Some(component) = &node.component {
            let ComponentSpelling { tag, number, name } = ComponentSpelling::of(Some(component));
            hash.add(&hashes.get(node.parent as usize).copied().unwrap_or(0).to_le_bytes());
            hash.add(&[tag]);
            hash.add(&number.to_le_bytes());
            hash.add(name.as_bytes());
        }
        hashes.push(hash.half());
        if let NodeKind::Leaf(leaf) = node.kind
            && let Some(place) = leaves.get_mut(leaf as usize)
        {
            *place = hash.half();
        }
    }
    leaves
}

/// The regions that this rank writes of each leaf.
pub(crate) struct Shares {
    /// For each leaf, the boxes of its tensor. `None`: others write all of it.
    mine: Vec<Option<Vec<Region>>>,
    /// The leaves whose writer the ranks have not decided, in order.
    undecided: Vec<u32>,
    claims: Vec<Claim>,
}

/// The writers of a part.
enum PartWriters {
    Alone,
    /// Another rank writes it.
    Others,
    /// This rank did not have the part at the last census. Every current holder writes it, and the
    /// leader keeps one copy.
    Undecided,
    Ranks(Arc<[u32]>),
    /// The number of this replica, and the number of replicas.
    Places(u32, u32),
}

/// A part that other ranks hold too.
struct SharedPart {
    leaf: usize,
    /// The sort key, equal on all holders.
    order: (u64, Region),
    held: Held,
}

impl Shares {
    pub(crate) fn of(state: &StateSource, writing: &Writing<'_>) -> Result<Self> {
        if writing.world_size == 1 {
            return Self::alone(state);
        }
        let paths = path_hashes(state);
        let mut mine: Vec<Option<Vec<Region>>> = vec![None; state.leaves.len()];
        let mut undecided = Vec::new();
        let mut claims = Vec::new();
        let mut groups: HashMap<Arc<[u32]>, Vec<SharedPart>> = HashMap::new();
        for (leaf, (source, &path)) in state.leaves.iter().zip(&paths).enumerate() {
            let Some(own) = mine.get_mut(leaf) else { continue };
            match source {
                LeafSource::Tensor { dtype, shape, parts, provider } => {
                    check_size(state, leaf, shape, dtype.size())?;
                    // An empty tensor has no parts. One rank must still record it.
                    let nothing = [Part { region: Region::whole(shape), holders: Holders::Everyone }];
                    let parts = if shape.contains(&0) { nothing.as_slice() } else { parts };
                    for Part { region, holders } in parts {
                        let part = part_hash(path, shape, region);
                        if writing.is_compared(holders, part) {
                            let (rank, provider) = (writing.rank, &**provider);
                            claims.push(Claim::of_tensor(rank, path, part, *dtype, shape, region, provider)?);
                        }
                        let held = Held { extent: region.extent.clone(), itemsize: dtype.size() as u64 };
                        match writing.ranks(holders, part) {
                            PartWriters::Alone => own.get_or_insert_default().push(region.clone()),
                            PartWriters::Others => {}
                            PartWriters::Undecided => {
                                undecided.push(leaf as u32);
                                own.get_or_insert_default().push(region.clone());
                            }
                            PartWriters::Ranks(ranks) => {
                                let order = (path, region.clone());
                                groups.entry(ranks).or_default().push(SharedPart { leaf, order, held });
                            }
                            PartWriters::Places(index, count) => {
                                if let Some(share) = of_places(path, region, held, index, count) {
                                    own.get_or_insert_default().extend(share);
                                }
                            }
                        }
                    }
                }
                LeafSource::Object(value) => {
                    if writing.is_compared(&Holders::Everyone, path) {
                        claims.push(Claim::of_object(writing.rank, path, value)?);
                    }
                    if let PartWriters::Ranks(ranks) = writing.ranks(&Holders::Everyone, path) {
                        let order = (path, Region::whole(&[]));
                        let held = Held { extent: vec![].into(), itemsize: OBJECT_BYTES };
                        groups.entry(ranks).or_default().push(SharedPart { leaf, order, held });
                    } else {
                        *own = Some(Vec::new());
                    }
                }
                LeafSource::Drifting(_) => {
                    if !matches!(writing.ranks(&Holders::First, path), PartWriters::Others) {
                        *own = Some(Vec::new());
                    }
                }
                LeafSource::Alias(_) => {}
            }
        }
        for (ranks, mut shared) in groups {
            shared.sort_by(|one, other| {
                // Small parts are adjacent, so that few files get them.
                let key = |shared: &SharedPart| {
                    (shared.held.bytes() > SMALL, shared.order.0, shared.order.1.offset.clone())
                };
                key(one).cmp(&key(other))
            });
            let writers = Writers::new(&ranks, writing.nodes, writing.limit);
            let (places, held): (Vec<(usize, Region)>, Vec<Held>) =
                shared.into_iter().map(|shared| ((shared.leaf, shared.order.1), shared.held)).unzip();
            let shares = shares(&held, &writers, writing.rank);
            for ((leaf, region), share) in places.into_iter().zip(shares) {
                let (Some(own), Some(share)) = (mine.get_mut(leaf), share) else { continue };
                own.get_or_insert_default().extend(share.into_iter().map(|part| inside(&region, part)));
            }
        }
        for own in mine.iter_mut().flatten() {
            // The order of the groups is random.
            own.sort_by(|one, other| one.offset.cmp(&other.offset));
        }
        Ok(Self { mine, undecided, claims })
    }

    /// Returns the shares of a single process, which must hold everything.
    fn alone(state: &StateSource) -> Result<Self> {
        let share = |(leaf, source): (usize, &LeafSource)| {
            let LeafSource::Tensor { dtype, shape, parts, .. } = source else { return Ok(Some(Vec::new())) };
            check_size(state, leaf, shape, dtype.size())?;
            let regions: Vec<Region> = parts.iter().map(|part| part.region.clone()).collect();
            if let [only] = regions.as_slice()
                && *only == Region::whole(shape)
            {
                return Ok(Some(regions));
            }
            tiling::check_regions(shape, &regions).map_err(|fault| {
                let what = format!(
                    "this process is the only one that saves, and does not hold all of it exactly once: {fault}"
                );
                refused(state, leaf, what)
            })?;
            Ok(Some(regions))
        };
        let mine = state.leaves.iter().enumerate().map(share).collect::<Result<_>>()?;
        Ok(Self { mine, undecided: Vec::new(), claims: Vec::new() })
    }

    /// True if this rank writes a part of a leaf, or records an empty one.
    pub(super) fn is_mine(&self, leaf: u32) -> bool {
        self.mine.get(leaf as usize).is_some_and(Option::is_some)
    }

    /// This rank's values of leaves that should be equal on others.
    pub(super) fn claims(&self) -> Vec<Claim> {
        self.claims.clone()
    }

    /// True if the ranks have not decided who writes the leaf.
    pub(super) fn is_undecided(&self, leaf: u32) -> bool {
        self.undecided.binary_search(&leaf).is_ok()
    }

    /// Returns the regions of a tensor that this rank writes.
    pub(super) fn regions(&self, leaf: u32) -> &[Region] {
        self.mine.get(leaf as usize).and_then(Option::as_deref).unwrap_or_default()
    }
}

/// Returns the share of one of several replicas on unnamed processes. The first one writes all
/// small parts.
fn of_places(path: u64, region: &Region, held: Held, index: u32, count: u32) -> Option<Vec<Region>> {
    if held.bytes() <= SMALL {
        return (index == 0).then(|| vec![region.clone()]);
    }
    let mut hash = Fnv::new();
    hash.add(&path.to_le_bytes());
    region.offset.iter().for_each(|first| hash.add(&first.to_le_bytes()));
    let first = (hash.half() % u64::from(count)) as u32;
    // Each region has another first replica, so that no replica writes all of them.
    let place = (index + count - first) % count;
    let share = shares(&[held], &Writers::alike(count), place).pop().flatten()?;
    Some(share.into_iter().map(|part| inside(region, part)).collect())
}

/// Returns a box of a region in the tensor's coordinates.
fn inside(region: &Region, mut part: Region) -> Region {
    for (at, &first) in part.offset.iter_mut().zip(&region.offset) {
        *at += first;
    }
    part
}

fn check_size(state: &StateSource, leaf: usize, shape: &[u64], itemsize: usize) -> Result<()> {
    let bytes = volume(shape).and_then(|volume| volume.checked_mul(itemsize as u64));
    bytes
        .map(drop)
        .ok_or_else(|| refused(state, leaf, format!("its shape {shape:?} is larger than any memory")))
}

fn refused(state: &StateSource, leaf: usize, what: String) -> Error {
    stepwell_core::Error::Leaf { leaf: state.tree.leaf_path(leaf as u32).to_string(), what }.into()
}
