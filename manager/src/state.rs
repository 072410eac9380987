//! A state as the front end passes it, and its division into items.
//!
//! **Items** are the top-level containers and stateful objects. Plain leaves share one item, `.`. A
//! state with more than [`MAX_SPLIT_ITEMS`] such entries, or without string keys, is one item. Leaf
//! paths do not depend on items. Ties are shared within an item. A tie between two items is stored
//! in both, so that each can be restored alone. [`sharing`] assigns the writes to the ranks.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use stepwell_core::dtype::{Dtype, DtypeKind};
use stepwell_core::format::index::{ChunkRegion, Chunks, Index, LeafRecord, TensorRecord};
use stepwell_core::format::index_v1::{ComponentSpelling, KindSpelling};
use stepwell_core::format::manifest::{Others, TopLevel};
use stepwell_core::leaf_path::{Component, LeafPath};
use stepwell_core::limits::MAX_CHUNKS;
use stepwell_core::provider::{CastProvider, ShardedProvider, StateProvider};
use stepwell_core::region::Region;
use stepwell_core::save::{ChunkPlan, ItemPlan, LeafPlan};
use stepwell_core::tree::{ContainerKind, NodeKind, Tree};
use stepwell_core::value::Value;
use stepwell_reshard::subchunk;

use crate::error::{Error, Result};
pub use claims::Claim;
use item::{DraftItem, ItemPart};
pub(crate) use sharing::{Census, Shares, Writing, leaf_hashes, plain_leaves};

pub(crate) mod claims;
pub(crate) mod item;

mod sharing;

/// A state with more top-level containers is one item.
pub const MAX_SPLIT_ITEMS: usize = 64;
/// The name of the item of plain leaves, and of a state that is one item.
pub const LOOSE: &str = ".";

/// A state to save: its structure, and one source per leaf.
pub struct StateSource {
    /// Containers and leaves, in order.
    pub tree: Tree,
    /// The sources, in the order of the tree's leaves.
    pub leaves: Vec<LeafSource>,
}

/// The source of a leaf's value.
#[derive(Clone)]
pub enum LeafSource {
    /// A tensor.
    Tensor {
        /// Element type.
        dtype: Dtype,
        /// The global shape, over all processes.
        shape: Vec<u64>,
        /// The parts that this process holds.
        parts: Vec<Part>,
        /// The source of the bytes: an array of that shape, of which the save requests only the
        /// parts.
        provider: Arc<dyn StateProvider>,
    },
    /// A plain value, equal on all ranks that have this leaf.
    Object(Value),
    /// A plain value that may differ between ranks. The first rank's is stored.
    Drifting(Value),
    /// The same value as another leaf, which must not be an alias.
    Alias(u32),
}

/// A region of a tensor that this process holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its region in the tensor.
    pub region: Region,
    /// The other holders.
    pub holders: Holders,
}

/// The holders of a region. One of them writes each byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holders {
    /// This process alone.
    This,
    /// Every process whose state has this box of this leaf. Their values must be equal, and are
    /// compared. For layouts that may not know all holders.
    Everyone,
    /// As [`Holders::Everyone`], but values may differ: the first holder's is stored.
    First,
    /// These ranks, in order. This one is among them.
    Ranks(Arc<[u32]>),
    /// A number of replicas on unnamed processes.
    Replicas {
        /// The number of this replica, from 0.
        index: u32,
        /// The number of replicas.
        count: u32,
    },
}

impl LeafSource {
    /// A tensor that each of its holders holds whole, as in a single process.
    pub fn whole(dtype: Dtype, shape: Vec<u64>, provider: Arc<dyn StateProvider>) -> Self {
        let parts = vec![Part { region: Region::whole(&shape), holders: Holders::Everyone }];
        Self::Tensor { dtype, shape, parts, provider }
    }

    /// Returns the same leaf with values that may differ between ranks. The first rank's is stored.
    #[must_use]
    pub fn of_first(mut self) -> Self {
        if let Self::Tensor { parts, .. } = &mut self {
            for part in parts.iter_mut().filter(|part| part.holders == Holders::Everyone) {
                part.holders = Holders::First;
            }
        }
        self
    }

    /// Returns the same leaf, stored as `to`. Scalars (such as an optimizer's step count) and
    /// leaves that are not floating-point stay as they are.
    pub fn cast(self, to: Dtype, path: &LeafPath) -> Result<Self> {
        match self {
            Self::Tensor { dtype, shape, parts, provider }
                if dtype.kind() == DtypeKind::Float && dtype != to && !shape.is_empty() =>
            {
                let leaf = path.to_string();
                let provider = CastProvider::new(provider, dtype, to, &leaf)
                    .map_err(|what| stepwell_core::Error::Leaf { leaf, what })?;
                Ok(Self::Tensor { dtype: to, shape, parts, provider: Arc::new(provider) })
            }
            other => Ok(other),
        }
    }

    /// A tensor of which this process holds boxes, each in its own array.
    pub fn sharded(dtype: Dtype, shape: Vec<u64>, shards: Vec<(Part, Arc<dyn StateProvider>)>) -> Self {
        let (parts, providers): (Vec<Part>, Vec<_>) = shards.into_iter().unzip();
        let regions = parts.iter().map(|part| part.region.clone());
        let provider = Arc::new(ShardedProvider::new(regions.zip(providers).collect()));
        Self::Tensor { dtype, shape, parts, provider }
    }
}

/// A state, divided into items.
pub(crate) struct StateItems {
    /// The plans of this rank's data files.
    pub plans: Vec<ItemPlan>,
    /// This rank's tensors in items that others write, so that the leader finds unwritten tensors
    /// and disagreements.
    pub unwritten: Vec<ItemPart>,
    /// All items of the state.
    pub drafts: Vec<DraftItem>,
    /// This rank's values of leaves that should be equal on others.
    pub claims: Vec<Claim>,
    pub plan_hash: String,
    /// Bytes of the tensors that this rank writes.
    pub tensor_bytes: u64,
}

/// Divides a state into items, and this rank's regions of its tensors into chunks.
pub(crate) fn items(
    state: &StateSource,
    chunks: &subchunk::SubchunkOptions,
    writing: &Writing<'_>,
) -> Result<StateItems> {
    check(state)?;
    let plan_hash = plan_hash(state);
    let shares = Shares::of(state, writing)?;
    let groups = groups(&state.tree);
    let mut plans = Vec::with_capacity(groups.len());
    let mut unwritten = Vec::new();
    let mut drafts = Vec::with_capacity(groups.len());
    let mut tensor_bytes = 0_u64;
    // A tie to a leaf of another item is stored as that leaf is.
    let holder = |origin: u32| match state.leaves.get(origin as usize) {
        Some(LeafSource::Alias(of)) => *of,
        _ => origin,
    };
    for (number, group) in groups.into_iter().enumerate() {
        let dir = writing.dir(number, &group.name);
        let (tree, origins) = subtree(&state.tree, &group.nodes);
        let leaves = leaves(state, &origins, chunks, &shares, &mut tensor_bytes)?;
        let undecided = (0_u32..).zip(&origins).filter(|(_, origin)| shares.is_undecided(holder(**origin)));
        let undecided = undecided.map(|(here, _)| here).collect();
        let draft = DraftItem { dir: dir.clone(), name: group.name, top_level: group.top_level, undecided };
        if origins.is_empty() || origins.iter().any(|&origin| shares.is_mine(holder(origin))) {
            plans.push(ItemPlan { dir, tree, leaves });
        } else {
            let index = tensors(&tree, &leaves);
            // Claims compare objects. Only this part reports an empty container.
            if !index.leaves.is_empty() || has_empty_container(&tree) {
                unwritten.push(ItemPart { item: draft.clone(), index, tensor_bytes: 0 });
            }
        }
        drafts.push(draft);
    }
    Ok(StateItems { plans, unwritten, drafts, claims: shares.claims(), plan_hash, tensor_bytes })
}

fn check(state: &StateSource) -> Result<()> {
    if state.tree.nodes().is_empty() {
        return Err(Error::Invalid(
            "nothing of the state is left to save: the globs select none of its leaves".to_owned(),
        ));
    }
    if state.leaves.len() != state.tree.leaf_count() {
        return Err(Error::internal(
            format!("{} sources of leaves", state.tree.leaf_count()),
            state.leaves.len().to_string(),
        ));
    }
    let mut seen = HashSet::with_capacity(state.tree.nodes().len());
    for node in state.tree.nodes() {
        if let Some(component) = &node.component
            && !seen.insert((node.parent, component))
        {
            let mut parent = state.tree.path(node.parent);
            parent.0.push(component.clone());
            return Err(stepwell_core::Error::Leaf {
                leaf: parent.to_string(),
                what: "two entries of one container have this path; rename one of them".to_owned(),
            }
            .into());
        }
    }
    for (leaf, source) in state.leaves.iter().enumerate() {
        if let LeafSource::Alias(of) = source
            && !matches!(
                state.leaves.get(*of as usize),
                Some(LeafSource::Tensor { .. } | LeafSource::Object(_) | LeafSource::Drifting(_))
            )
        {
            return Err(stepwell_core::Error::Leaf {
                leaf: state.tree.leaf_path(leaf as u32).to_string(),
                what: format!("it is tied to leaf {of}, which has no value of its own"),
            }
            .into());
        }
    }
    Ok(())
}

struct ItemGroup {
    name: String,
    top_level: Vec<TopLevel>,
    /// The numbers of its top-level nodes.
    nodes: BTreeSet<u32>,
}

fn groups(tree: &Tree) -> Vec<ItemGroup> {
    let top: Vec<u32> = (1..tree.nodes().len() as u32)
        .filter(|&number| tree.nodes().get(number as usize).is_some_and(|node| node.parent == 0))
        .collect();
    let entry = |position: usize, number: u32| {
        let component = tree.nodes().get(number as usize).and_then(|node| node.component.clone());
        TopLevel { name: rendered(component.as_ref()), position: position as u64, others: Others::new() }
    };
    let is_container = |number: u32| {
        matches!(tree.nodes().get(number as usize).map(|node| &node.kind), Some(NodeKind::Container(_)))
    };
    let containers = top.iter().filter(|&&number| is_container(number)).count();
    if !is_string_keyed(tree) || containers > MAX_SPLIT_ITEMS || containers == 0 {
        let top_level = top.iter().enumerate().map(|(position, &number)| entry(position, number)).collect();
        return vec![ItemGroup { name: LOOSE.to_owned(), top_level, nodes: top.into_iter().collect() }];
    }
    let mut groups: Vec<ItemGroup> = Vec::new();
    let mut loose: Option<usize> = None;
    for (position, &number) in top.iter().enumerate() {
        let entry = entry(position, number);
        let new =
            |name: String, entry| ItemGroup { name, top_level: vec![entry], nodes: BTreeSet::from([number]) };
        if is_container(number) {
            // A key `.` must not name the item of plain leaves, so it is escaped.
            let name = if entry.name == LOOSE { "\\.".to_owned() } else { entry.name.clone() };
            groups.push(new(name, entry));
        } else if let Some(group) = loose.and_then(|at| groups.get_mut(at)) {
            group.top_level.push(entry);
            group.nodes.insert(number);
        } else {
            loose = Some(groups.len());
            groups.push(new(LOOSE.to_owned(), entry));
        }
    }
    groups
}

fn rendered(component: Option<&Component>) -> String {
    let mut out = String::new();
    if let Some(component) = component {
        component.render(&mut out);
    }
    out
}

fn is_string_keyed(tree: &Tree) -> bool {
    let root_is_mapping = tree.nodes().first().is_some_and(|root| {
        matches!(
            root.container(),
            Some(ContainerKind::Dict | ContainerKind::OrderedDict | ContainerKind::DefaultDict)
        )
    });
    root_is_mapping
        && tree
            .nodes()
            .iter()
            .skip(1)
            .filter(|node| node.parent == 0)
            .all(|node| matches!(node.component, Some(Component::Key(_))))
}

/// Returns the subtree below some top-level nodes, rooted at the state's root, and for each of its
/// leaves the number in the state.
fn subtree(tree: &Tree, top: &BTreeSet<u32>) -> (Tree, Vec<u32>) {
    let mut out = Tree::new();
    let mut origins = Vec::new();
    // The new number of a node, if it is in the subtree.
    let mut numbers: HashMap<u32, u32> = HashMap::new();
    for (number, node) in (0_u32..).zip(tree.nodes()) {
        let parent = if number == 0 {
            None
        } else if node.parent != 0 || top.contains(&number) {
            match numbers.get(&node.parent) {
                Some(&parent) => Some(parent),
                None => continue,
            }
        } else {
            continue;
        };
        match &node.kind {
            NodeKind::Container(kind) => {
                numbers.insert(number, out.push_container(parent, node.component.clone(), kind.clone()));
            }
            NodeKind::Leaf(leaf) => {
                out.push_leaf(parent, node.component.clone());
                origins.push(*leaf);
            }
        }
    }
    (out, origins)
}

fn has_empty_container(tree: &Tree) -> bool {
    let parents: HashSet<u32> = tree.nodes().iter().skip(1).map(|node| node.parent).collect();
    (0_u32..)
        .zip(tree.nodes())
        .any(|(number, node)| matches!(node.kind, NodeKind::Container(_)) && !parents.contains(&number))
}

/// Returns the containers and tensors of an item of which this rank writes nothing.
fn tensors(tree: &Tree, leaves: &[LeafPlan]) -> Index {
    let mut index = Index::default();
    let mut numbers: Vec<u32> = Vec::with_capacity(tree.nodes().len());
    for (number, node) in tree.nodes().iter().enumerate() {
        let parent = if number == 0 { None } else { numbers.get(node.parent as usize).copied() };
        let mut here = 0;
        match &node.kind {
            NodeKind::Container(kind) => {
                here = index.tree.push_container(parent, node.component.clone(), kind.clone());
            }
            NodeKind::Leaf(leaf) => {
                if let Some(LeafPlan::Tensor { dtype, shape, .. }) = leaves.get(*leaf as usize) {
                    index.tree.push_leaf(parent, node.component.clone());
                    let (shape, chunks) = (shape.as_slice().into(), Chunks::new());
                    let tensor = TensorRecord { dtype: *dtype, shape, chunks };
                    index.leaves.push(LeafRecord::Tensor(tensor));
                }
            }
        }
        numbers.push(here);
    }
    index
}

fn leaves(
    state: &StateSource,
    origins: &[u32],
    chunks: &subchunk::SubchunkOptions,
    shares: &Shares,
    tensor_bytes: &mut u64,
) -> Result<Vec<LeafPlan>> {
    // The number in this item of each leaf with a value.
    let mut stored: HashMap<u32, u32> = (0_u32..)
        .zip(origins)
        .filter(|(_, origin)| !matches!(state.leaves.get(**origin as usize), Some(LeafSource::Alias(_))))
        .map(|(here, &origin)| (origin, here))
        .collect();
    let mut out = Vec::with_capacity(origins.len());
    // The number of chunks that the item may still get.
    let mut chunks_left = MAX_CHUNKS;
    for (here, &origin) in (0_u32..).zip(origins) {
        let mut holder = origin;
        let mut source = state.leaves.get(origin as usize);
        if let Some(LeafSource::Alias(of)) = source {
            if let Some(&of) = stored.get(of) {
                out.push(LeafPlan::Alias { of });
                continue;
            }
            stored.insert(*of, here);
            holder = *of;
            source = state.leaves.get(*of as usize);
        }
        out.push(match source {
            Some(LeafSource::Tensor { dtype, shape, provider, .. }) => {
                let itemsize = dtype.size() as u64;
                let is_in_host = provider.devices().is_empty();
                let options = if is_in_host { *chunks } else { chunks.on_device() };
                let slab_bytes = provider.slab_bytes();
                let options = slab_bytes.map_or(options, |bytes| options.in_slabs(bytes));
                // The array has the tensor's shape, so a chunk has one region in both. No chunk
                // crosses the border of a part.
                let bytes = |part: &Region| part.volume().unwrap_or(u64::MAX).saturating_mul(itemsize);
                let mut chunks: Vec<ChunkPlan> = Vec::new();
                for share in shares.regions(holder) {
                    let slabs = subchunk::slabs(share, itemsize, slab_bytes);
                    let count = slabs.len();
                    for slab in slabs {
                        let shape = if slab_bytes.is_some() { &slab.extent[..] } else { shape };
                        let parts = subchunk::cut(&slab, shape, itemsize, &options);
                        let all = count.saturating_mul(parts.len());
                        chunks_left = chunks_left
                            .checked_sub(parts.len() as u64)
                            .ok_or_else(|| too_many_chunks(&state.tree, origin, all, &options))?;
                        chunks.extend(parts.map(|part| {
                            let band =
                                if slab_bytes.is_some() { 0 } else { subchunk::band(&part, share, shape) };
                            ChunkPlan { band, region: ChunkRegion::Box(part.clone()), local: part }
                        }));
                    }
                }
                *tensor_bytes =
                    chunks.iter().fold(*tensor_bytes, |sum, chunk| sum.saturating_add(bytes(&chunk.local)));
                LeafPlan::Tensor {
                    dtype: *dtype,
                    shape: shape.clone(),
                    chunks,
                    provider: Arc::clone(provider),
                }
            }
            Some(LeafSource::Object(value) | LeafSource::Drifting(value)) => {
                if shares.is_mine(holder) {
                    LeafPlan::Object(value.clone())
                } else {
                    LeafPlan::Elsewhere
                }
            }
            Some(LeafSource::Alias(_)) | None => {
                return Err(Error::internal(
                    format!("a value of leaf `{}`", state.tree.leaf_path(origin)),
                    "none",
                ));
            }
        });
    }
    Ok(out)
}

fn too_many_chunks(tree: &Tree, leaf: u32, chunks: usize, options: &subchunk::SubchunkOptions) -> Error {
    let what = format!(
        "it would be cut into {chunks} chunks of at most {} bytes, and its item then have more than {MAX_CHUNKS}: save with larger Options.chunk_bytes",
        options.target_bytes
    );
    stepwell_core::Error::Leaf { leaf: tree.leaf_path(leaf).to_string(), what }.into()
}

/// Returns a hash of the structure: paths, kinds, dtypes, shapes and ties, but no values. It is
/// stored and compared between ranks, so it uses the format's tags, which are equal in every build.
/// FNV-1a twice: it finds ranks that disagree, and gives no security.
fn plan_hash(state: &StateSource) -> String {
    let mut hash = Fnv::new();
    for node in state.tree.nodes() {
        hash.add(&node.parent.to_le_bytes());
        let ComponentSpelling { tag, number, name } = ComponentSpelling::of(node.component.as_ref());
        hash.add(&[tag]);
        hash.add(&number.to_le_bytes());
        hash.add(name.as_bytes());
        match &node.kind {
            NodeKind::Container(kind) => hash.add_kind(kind),
            NodeKind::Leaf(leaf) => match state.leaves.get(*leaf as usize) {
                Some(LeafSource::Tensor { dtype, shape, .. }) => {
                    hash.add(&[0, dtype.code()]);
                    for extent in shape {
                        hash.add(&extent.to_le_bytes());
                    }
                }
                Some(LeafSource::Alias(of)) => {
                    hash.add(&[1]);
                    hash.add(&of.to_le_bytes());
                }
                Some(LeafSource::Object(_) | LeafSource::Drifting(_)) | None => hash.add(&[2]),
            },
        }
    }
    let Fnv([a, b]) = hash;
    format!("{a:016x}{b:016x}")
}

/// Two FNV-1a hashes, 128 bits together.
pub(crate) struct Fnv([u64; 2]);

impl Fnv {
    pub(crate) fn new() -> Self {
        Self([0xcbf2_9ce4_8422_2325, 0x9ae1_6a3b_2f90_404f])
    }

    pub(crate) fn half(&self) -> u64 {
        self.0[1]
    }

    pub(crate) fn add(&mut self, bytes: &[u8]) {
        for byte in bytes.iter().chain(&[0xff]) {
            for half in &mut self.0 {
                *half = (*half ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
            self.0[1] = self.0[1].rotate_left(5);
        }
    }

    fn add_kind(&mut self, kind: &ContainerKind) {
        let mut kind = Some(kind);
        while let Some(KindSpelling { tag, number, type_name, protocol, inner }) = kind.map(KindSpelling::of)
        {
            self.add(&[tag]);
            self.add(&number.to_le_bytes());
            self.add(type_name.as_bytes());
            self.add(protocol.as_bytes());
            kind = inner;
        }
    }
}

#[cfg(test)]
mod tests;
