//! The invariants of all indexes, in item files and footers. Checked before an index is written and
//! after it is read. It does not check that chunks tile a tensor: that is geometry
//! (`stepwell-reshard`), and a footer has only a part of the chunks.
//!
//! All arithmetic is safe from overflow. Allocations are bounded by the data in memory.

use std::collections::HashSet;
use std::ops::Range;

use foldhash::fast::RandomState;

use super::index::{
    ChunkRecord, ChunkRegion, Codec, Extent, FileRecord, Index, Integrity, LeafRecord, Source, TensorRecord,
};
use super::limit;
use super::paths::check_relative;
use super::planes;
use crate::error::Error;
use crate::leaf_path::Component;
use crate::limits::{
    MAX_DEPTH, MAX_DIMS, MAX_FILE_BYTES, MAX_FILES, MAX_LEAF_PATH_BYTES, MAX_LEAVES, MAX_NAME_BYTES,
    MAX_NODES, MAX_OBJECT_BYTES, MAX_TYPE_NAME_BYTES,
};
use crate::region::volume;
use crate::tree::{ContainerKind, NodeKind, Tree};

/// The least offset of a chunk or object in a data file.
const FIRST_BYTE: u64 = 4096;
/// The bytes that a stateful container's inner kind counts in [`MAX_TYPE_NAME_BYTES`]. A page
/// stores a kind once, but memory has one for each container.
pub(super) const STATEFUL_BYTES: u64 = 64;

/// The bounds for extents and leaf numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bounds {
    /// The whole index of an item.
    Item,
    /// The index in a footer. All extents are in that file, before its footer.
    Footer {
        /// The offset of the footer.
        footer_offset: u64,
    },
    /// Some pages of an item's index. Aliases may name leaves of other pages.
    Part {
        /// The number of leaves of the whole item.
        leaves: u64,
    },
}

/// A violated invariant.
pub(crate) enum IndexFault {
    /// A limit is exceeded.
    Limit(Error),
    /// A node of the tree is invalid.
    Node(u32, String),
    /// The index as a whole is invalid.
    Whole(String),
}

impl From<Error> for IndexFault {
    fn from(error: Error) -> Self {
        Self::Limit(error)
    }
}

type Checked<T = ()> = Result<T, IndexFault>;

pub(crate) fn check(index: &Index, bounds: Bounds) -> Checked {
    check_tree(&index.tree)?;
    check_counts(index, bounds)?;
    check_leaves(index, 0..index.leaves.len(), bounds)
}

/// Checks the counts of an index.
pub(crate) fn check_counts(index: &Index, bounds: Bounds) -> Checked {
    limit("the number of leaves", index.leaves.len() as u64, MAX_LEAVES)?;
    if index.tree.leaf_count() != index.leaves.len() {
        return Err(IndexFault::Whole(format!(
            "the tree has {} leaves, and there are records of {}",
            index.tree.leaf_count(),
            index.leaves.len()
        )));
    }
    if !matches!(bounds, Bounds::Footer { .. }) {
        check_files(&index.files)?;
    }
    Ok(())
}

/// Checks some leaves of an index.
pub(crate) fn check_leaves(index: &Index, numbers: Range<usize>, bounds: Bounds) -> Checked {
    let at_leaf = |leaf: usize, what| IndexFault::Node(index.tree.leaf_node(leaf as u32).unwrap_or(0), what);
    let leaves = index.leaves.get(numbers.clone());
    let leaves = leaves.ok_or_else(|| IndexFault::Whole(format!("there are no leaves {numbers:?}")))?;
    for (number, leaf) in numbers.zip(leaves) {
        let outcome = match leaf {
            LeafRecord::Tensor(tensor) => check_tensor(index, tensor, bounds),
            LeafRecord::Object(extent) => check_object(index, extent, bounds),
            LeafRecord::Alias { of } => match target(index, *of, bounds) {
                TieTarget::Outside | TieTarget::Leaf(LeafRecord::Tensor(_) | LeafRecord::Object(_)) => Ok(()),
                TieTarget::Leaf(LeafRecord::Alias { .. }) => {
                    Err(format!("it is tied to leaf {of}, itself a tie"))
                }
                TieTarget::None => Err(format!("it is tied to leaf {of}, which does not exist")),
            },
        };
        outcome.map_err(|what| at_leaf(number, what))?;
    }
    Ok(())
}

fn check_files(files: &[FileRecord]) -> Checked {
    limit("the number of files", files.len() as u64, MAX_FILES)?;
    let mut names = HashSet::with_capacity(files.len());
    for file in files {
        check_relative(&file.name).map_err(IndexFault::Whole)?;
        limit("the length of a file in bytes", file.length, MAX_FILE_BYTES)?;
        if !names.insert(&*file.name) {
            return Err(IndexFault::Whole(format!("the file `{}` is listed twice", file.name)));
        }
    }
    Ok(())
}

/// Checks a tree.
pub(crate) fn check_tree(tree: &Tree) -> Checked {
    limit("the number of nodes", tree.nodes().len() as u64, MAX_NODES)?;
    let mut open: Vec<OpenContainer<'_>> = Vec::new();
    // Neighbours tend to have the same number of children, so reuse the memory.
    let mut likely = 0;
    let mut type_names = 0;
    for (number, node) in tree.nodes().iter().enumerate() {
        let number = number as u32;
        let fault = |what: &str| IndexFault::Node(number, what.to_owned());
        let mut path_bytes = 0;
        match &node.component {
            None if number == 0 && node.parent == 0 => {}
            None => return Err(fault("a node other than the root has no name")),
            Some(_) if number == 0 => return Err(fault("the root has a name")),
            Some(component) => {
                while let Some(closed) = open.pop_if(|container| container.node != node.parent) {
                    likely = closed.children.len().min(1024);
                }
                let Some(container) = open.last_mut() else {
                    return Err(fault("its parent is no container that is open where it stands"));
                };
                path_bytes = container.path_bytes + component_bytes(component);
                limit("the length of a leaf path in bytes", path_bytes, MAX_LEAF_PATH_BYTES)?;
                if !container.children.insert(Sibling::of(component)) {
                    return Err(fault("it occurs twice in its container"));
                }
            }
        }
        if let NodeKind::Container(kind) = &node.kind {
            let children = Siblings::with_capacity_and_hasher(likely, RandomState::default());
            open.push(OpenContainer { node: number, path_bytes, children });
            limit("the nesting of containers", open.len() as u64, MAX_DEPTH)?;
            type_names += check_kind(kind)?;
            limit("the size of all type names in bytes", type_names, MAX_TYPE_NAME_BYTES)?;
        }
        if let Some(Component::Key(name) | Component::Field(name)) = &node.component {
            limit("the length of a name in bytes", name.len() as u64, MAX_NAME_BYTES)?;
        }
    }
    Ok(())
}

/// A container from the root to the current node.
struct OpenContainer<'a> {
    node: u32,
    path_bytes: u64,
    children: Siblings<'a>,
}

/// A hasher with a random seed, so that a hostile file cannot contain names that collide on
/// purpose.
type Siblings<'a> = HashSet<Sibling<'a>, RandomState>;

/// The rendered name of a child, which must be unique in its container. A key `a` and a field `a`
/// have the same path.
#[derive(PartialEq, Eq, Hash)]
enum Sibling<'a> {
    Name(&'a str),
    Number(i64),
}

impl<'a> Sibling<'a> {
    fn of(component: &'a Component) -> Self {
        match component {
            Component::Key(name) | Component::Field(name) => Self::Name(name),
            Component::Int(number) => Self::Number(*number),
            Component::Index(number) => Self::Number(i64::from(*number)),
        }
    }
}

fn component_bytes(component: &Component) -> u64 {
    match component {
        Component::Key(name) | Component::Field(name) => name.len() as u64 + 1,
        Component::Int(_) | Component::Index(_) => 9,
    }
}

/// Returns an estimate of the bytes that a copy of the kind allocates.
fn check_kind(kind: &ContainerKind) -> Checked<u64> {
    let mut bytes = 0;
    let mut name = |text: &str| -> Checked {
        bytes += text.len() as u64;
        Ok(limit("the length of a type name in bytes", text.len() as u64, MAX_NAME_BYTES)?)
    };
    let mut kind = kind;
    let mut boxes = 0;
    for _ in 0..MAX_DEPTH {
        match kind {
            ContainerKind::Dict
            | ContainerKind::OrderedDict
            | ContainerKind::DefaultDict
            | ContainerKind::List
            | ContainerKind::Tuple
            | ContainerKind::Deque { .. } => return Ok(bytes + boxes),
            ContainerKind::NamedTuple { type_name }
            | ContainerKind::Dataclass { type_name }
            | ContainerKind::Custom { type_name } => {
                name(type_name)?;
                return Ok(bytes + boxes);
            }
            ContainerKind::Stateful { type_name, protocol, inner } => {
                name(type_name)?;
                name(protocol)?;
                boxes += STATEFUL_BYTES;
                kind = inner;
            }
        }
    }
    Err(Error::Limit {
        what: "the nesting of container kinds".to_owned(),
        found: MAX_DEPTH + 1,
        limit: MAX_DEPTH,
    }
    .into())
}

enum TieTarget<'a> {
    Leaf(&'a LeafRecord),
    /// The leaf is in another page of the item.
    Outside,
    None,
}

fn target(index: &Index, of: u32, bounds: Bounds) -> TieTarget<'_> {
    match bounds {
        Bounds::Part { leaves } if u64::from(of) < leaves => TieTarget::Outside,
        Bounds::Part { .. } => TieTarget::None,
        _ => index.leaves.get(of as usize).map_or(TieTarget::None, TieTarget::Leaf),
    }
}

fn check_tensor(index: &Index, tensor: &TensorRecord, bounds: Bounds) -> Result<(), String> {
    let TensorRecord { dtype, shape, chunks } = tensor;
    if shape.len() as u64 > MAX_DIMS {
        return Err(format!("it has {} dimensions, more than the limit of {MAX_DIMS}", shape.len()));
    }
    let itemsize = dtype.size() as u64;
    let elements = volume(shape)
        .filter(|elements| elements.checked_mul(itemsize).is_some())
        .ok_or_else(|| format!("a tensor of shape {shape:?} does not fit 64 bits"))?;
    for (number, chunk) in chunks.iter().enumerate() {
        check_chunk(index, chunk, shape, elements, itemsize, bounds)
            .map_err(|what| format!("chunk {number} {what}"))?;
    }
    Ok(())
}

fn check_chunk(
    index: &Index,
    chunk: &ChunkRecord,
    shape: &[u64],
    elements: u64,
    itemsize: u64,
    bounds: Bounds,
) -> Result<(), String> {
    let covered = match &chunk.region {
        ChunkRegion::Box(region) if region.fits(shape) => region.volume(),
        ChunkRegion::Run { start, len } if start.checked_add(*len).is_some_and(|end| end <= elements) => {
            Some(*len)
        }
        region => return Err(format!("covers {region:?}, which is not inside the shape {shape:?}")),
    };
    let expected = covered.and_then(|elements| elements.checked_mul(itemsize));
    match chunk.codec {
        Codec::Raw if expected != Some(chunk.extent.length) => {
            return Err(format!("has {} bytes, its region has {expected:?}", chunk.extent.length));
        }
        Codec::Raw => {}
        Codec::Planes => check_planes(chunk, expected)?,
        Codec::Elements(_) | Codec::PlanesPart(_) => {
            return Err("has a layout that only other libraries' files have".to_owned());
        }
    }
    check_extent(index, &chunk.extent, bounds)
}

/// Checks the sizes of a compressed chunk. Readers allocate the decoded bytes.
fn check_planes(chunk: &ChunkRecord, decoded: Option<u64>) -> Result<(), String> {
    let stored = chunk.extent.length;
    match decoded {
        Some(decoded) if stored < decoded && decoded <= planes::most_decoded(stored) => Ok(()),
        _ => Err(format!("has {stored} compressed bytes, which cannot become the {decoded:?} of its region")),
    }
}

fn check_object(index: &Index, extent: &Extent, bounds: Bounds) -> Result<(), String> {
    if extent.length > MAX_OBJECT_BYTES {
        return Err(format!(
            "its object has {} bytes, more than the limit of {MAX_OBJECT_BYTES}",
            extent.length
        ));
    }
    check_extent(index, extent, bounds)
}

fn check_extent(index: &Index, extent: &Extent, bounds: Bounds) -> Result<(), String> {
    let end = extent.offset.checked_add(extent.length).ok_or("has an offset that overflows")?;
    let file = |ordinal: u32| {
        index
            .files
            .get(ordinal as usize)
            .ok_or_else(|| format!("lies in file {ordinal}, which does not exist"))
    };
    let (first, last) = match (extent.source, bounds) {
        (Source::Own(0), Bounds::Footer { footer_offset }) => (FIRST_BYTE, footer_offset),
        (_, Bounds::Footer { .. }) => {
            return Err("is in another file than its footer".to_owned());
        }
        // The trailer is at the end of the file. Only the file knows the start of its footer.
        (Source::Own(ordinal), _) => (FIRST_BYTE, file(ordinal)?.length.saturating_sub(FIRST_BYTE)),
        (Source::Range(ordinal), _) => (0, file(ordinal)?.length),
        (Source::Pulled(_), _) => (0, u64::MAX),
    };
    if extent.offset < first || end > last {
        return Err(format!("lies at {}..{end}, outside of {first}..{last}", extent.offset));
    }
    let own = matches!(extent.source, Source::Own(_));
    match extent.integrity {
        Integrity::BlockCrc if own => Ok(()),
        Integrity::Zip(_) | Integrity::None if !own => Ok(()),
        other => Err(format!("has the integrity {other:?}, which does not fit its source")),
    }
}
