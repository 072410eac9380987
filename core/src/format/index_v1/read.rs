//! Decodes pages into an index. Checks only what reading the columns requires. The index itself is
//! checked afterwards, in [`crate::format::check`].

use std::hash::BuildHasher;
use std::sync::Arc;

use foldhash::fast::RandomState;
use rkyv::primitive::{ArchivedU32, ArchivedU64};
use rkyv::rancor::BoxedError;

use super::columns::{Column, ReadResult, Texts};
use super::page::{ArchivedIndexPageV1, tag};
use crate::dtype::Dtype;
use crate::format::check::STATEFUL_BYTES;
use crate::format::index::{
    ChunkRecord, ChunkRegion, Chunks, Codec, Extent, Integrity, LeafRecord, Source, TensorRecord,
};
use crate::leaf_path::Component;
use crate::limits::{MAX_DEPTH, MAX_NODES, MAX_TYPE_NAME_BYTES};
use crate::region::{Dims, Region};
use crate::tree::{ContainerKind, NodeKind, Tree};

/// Returns the archived page in a payload. `count` is the number of leaves in the page's front.
pub(super) fn access(payload: &[u8], count: u64) -> ReadResult<&ArchivedIndexPageV1> {
    let page = rkyv::access::<ArchivedIndexPageV1, BoxedError>(payload)
        .map_err(|error| format!("it is malformed: {error}"))?;
    if page.leaf_tag.len() as u64 != count {
        return Err(format!("it has {} leaves, but its front says {count}", page.leaf_tag.len()));
    }
    Ok(page)
}

/// Returns the number of leaves to reserve memory for, bounded by the records in the page.
pub(super) fn leaf_count(page: &ArchivedIndexPageV1) -> usize {
    page.leaf_tag.len().min(page.tensor_dtype.len() + page.extent_tag.len() + page.alias_of.len())
}

/// Appends the records of a page's leaves.
pub(super) fn leaves(page: &ArchivedIndexPageV1, out: &mut Vec<LeafRecord>) -> ReadResult<()> {
    let mut extents = Extents::new(page);
    let mut tensors = Tensors::new(page);
    let mut aliases = Column::new(&page.alias_of, "alias_of");
    for &tag in page.leaf_tag.iter() {
        match tag {
            tag::TENSOR => {
                out.push(LeafRecord::Tensor(TensorRecord {
                    dtype: tensors.dtype()?,
                    shape: Dims::new(),
                    chunks: Chunks::new(),
                }));
                if let Some(LeafRecord::Tensor(tensor)) = out.last_mut() {
                    tensors.fill(tensor, &mut extents)?;
                }
            }
            tag::OBJECT => out.push(LeafRecord::Object(extents.next()?)),
            tag::ALIAS => out.push(LeafRecord::Alias { of: aliases.next()? }),
            other => return Err(format!("a leaf has the unknown tag {other}")),
        }
    }
    aliases.end()?;
    tensors.end()?;
    extents.end()
}

/// Joins the trees of pages, in order.
#[derive(Default)]
pub(super) struct Assembler {
    pub tree: Tree,
    /// True if only one page is read, without its predecessors.
    is_part: bool,
    type_name_bytes: u64,
    names: Names,
}

impl Assembler {
    /// Returns an assembler for a single page.
    pub(super) fn part() -> Self {
        Self { is_part: true, ..Self::default() }
    }

    /// Appends the nodes of a page.
    pub(super) fn add(&mut self, page: &ArchivedIndexPageV1) -> ReadResult<()> {
        let kinds = kinds(page)?;
        let mut parents = Column::new(&page.node_parent, "node_parent");
        let mut tags = Column::new(&page.node_tag, "node_tag");
        let mut values = Column::new(&page.node_value, "node_value");
        let mut node_kinds = Column::new(&page.node_kind, "node_kind");
        let mut texts = Texts::new(page.names.as_str(), "names");
        let repeated = page.repeated_nodes.to_native();
        // The first page adds its repeated nodes. The following pages repeat known nodes.
        let before = self.tree.nodes().len() as u64;
        let begins = before == 0;
        let follows = page.first_node.to_native() == before;
        if !(follows || (begins && self.is_part)) || (begins && !self.is_part && repeated > 0) {
            return Err("its nodes do not follow those of the page before".to_owned());
        }
        if before + parents.len() as u64 > MAX_NODES {
            return Err(format!("there are more than {MAX_NODES} nodes"));
        }
        let open = self.open_chain();
        let mut leaves = 0_usize;
        for local in 0..parents.len() as u32 {
            let parent = parents.next()?;
            if parent > local || (parent == local && local > 0) {
                return Err(format!("node {local} precedes its parent"));
            }
            let component = component(tags.next()?, values.next()?, &mut texts, &mut self.names)?;
            let kind = match node_kinds.next()? {
                0 => None,
                number => {
                    let kind = kinds.get(number as usize - 1).ok_or("a container has an unknown kind")?;
                    self.type_name_bytes += kind.bytes;
                    if self.type_name_bytes > MAX_TYPE_NAME_BYTES {
                        return Err("its type names are too large".to_owned());
                    }
                    Some(&kind.container)
                }
            };
            if local < repeated {
                if (local > 0 && parent + 1 != local) || kind.is_none() {
                    return Err("its repeated nodes are not a chain of containers".to_owned());
                }
                if !begins {
                    let known =
                        open.get(local as usize).and_then(|&node| self.tree.nodes().get(node as usize));
                    let same = known.is_some_and(|known| {
                        known.component == component
                            && matches!((&known.kind, kind), (NodeKind::Container(known), Some(kind)) if **known == *kind)
                    });
                    if !same {
                        return Err("its repeated nodes differ from the end of the page before".to_owned());
                    }
                    continue;
                }
            }
            let number = match (begins, parent.checked_sub(repeated)) {
                (true, _) => parent,
                (false, Some(own)) => before as u32 + own,
                (false, None) => *open
                    .get(parent as usize)
                    .ok_or("its repeated nodes differ from the end of the page before")?,
            };
            let parent = (local > 0 || !begins).then_some(number);
            if let Some(kind) = kind {
                self.tree.push_container(parent, component, kind.clone());
            } else {
                leaves += 1;
                self.tree.push_leaf(parent, component);
            }
        }
        if leaves != page.leaf_tag.len() {
            return Err(format!(
                "{leaves} of its nodes are leaves, but it has {} leaf records",
                page.leaf_tag.len()
            ));
        }
        tags.end()?;
        values.end()?;
        node_kinds.end()?;
        texts.end()
    }

    /// Returns the containers from the root to the last node. Empty if they are deeper than a tree
    /// may be.
    fn open_chain(&self) -> Vec<u32> {
        let nodes = self.tree.nodes();
        let mut chain = Vec::new();
        let mut at = nodes.len().wrapping_sub(1) as u32;
        while let Some(node) = nodes.get(at as usize) {
            if chain.len() as u64 > MAX_DEPTH {
                return Vec::new();
            }
            chain.push(at);
            if node.parent >= at {
                break;
            }
            at = node.parent;
        }
        chain.reverse();
        chain
    }
}

/// A cache of recently read names, each in the slot of its hash. The names of one layer repeat in
/// the next, and then share their memory. A missing or evicted name is allocated again.
#[derive(Default)]
struct Names {
    recent: Vec<Arc<str>>,
    hasher: RandomState,
}

impl Names {
    const PLACES: usize = 1024;

    fn shared(&mut self, text: &str) -> Arc<str> {
        if self.recent.is_empty() {
            self.recent = vec![Arc::from(""); Self::PLACES];
        }
        let place = self.hasher.hash_one(text) as usize % Self::PLACES;
        let Some(recent) = self.recent.get_mut(place) else { return Arc::from(text) };
        if **recent != *text {
            *recent = Arc::from(text);
        }
        Arc::clone(recent)
    }
}

fn component(tag: u8, value: i64, texts: &mut Texts<'_>, names: &mut Names) -> ReadResult<Option<Component>> {
    let mut name = || -> ReadResult<Arc<str>> {
        let text = texts.take(usize::try_from(value).map_err(|_| "a name has no length")?)?;
        Ok(names.shared(text))
    };
    Ok(Some(match tag {
        tag::ROOT if value == 0 => return Ok(None),
        tag::KEY => Component::Key(name()?),
        tag::FIELD => Component::Field(name()?),
        tag::INT => Component::Int(value),
        tag::INDEX => Component::Index(u32::try_from(value).map_err(|_| "an index is out of bounds")?),
        _ => return Err(format!("a component has the unknown tag {tag}")),
    }))
}

struct ContainerKindEntry {
    container: ContainerKind,
    /// An estimate of the memory of a copy.
    bytes: u64,
    nesting: u64,
}

fn kinds(page: &ArchivedIndexPageV1) -> ReadResult<Vec<ContainerKindEntry>> {
    let mut tags = Column::new(&page.kind_tag, "kind_tag");
    let mut numbers = Column::new(&page.kind_number, "kind_number");
    let mut names = Column::new(&page.kind_name, "kind_name");
    let mut protocols = Column::new(&page.kind_protocol, "kind_protocol");
    let mut texts = Texts::new(page.kind_texts.as_str(), "kind_texts");
    let mut kinds: Vec<ContainerKindEntry> = Vec::with_capacity(tags.len());
    let mut total = 0;
    for _ in 0..tags.len() {
        let (tag, number) = (tags.next()?, numbers.next()?);
        let name = texts.take(names.next()? as usize)?;
        let protocol = texts.take(protocols.next()? as usize)?;
        let mut bytes = (name.len() + protocol.len()) as u64;
        let mut nesting = 1;
        let type_name = || name.into();
        let container = match tag {
            tag::DICT => ContainerKind::Dict,
            tag::ORDERED_DICT => ContainerKind::OrderedDict,
            tag::DEFAULT_DICT => ContainerKind::DefaultDict,
            tag::LIST => ContainerKind::List,
            tag::TUPLE => ContainerKind::Tuple,
            tag::DEQUE => ContainerKind::Deque { maxlen: None },
            tag::DEQUE_BOUNDED => ContainerKind::Deque { maxlen: Some(number) },
            tag::NAMED_TUPLE => ContainerKind::NamedTuple { type_name: type_name() },
            tag::DATACLASS => ContainerKind::Dataclass { type_name: type_name() },
            tag::CUSTOM => ContainerKind::Custom { type_name: type_name() },
            tag::STATEFUL => {
                let inner = number
                    .checked_sub(1)
                    .and_then(|inner| kinds.get(usize::try_from(inner).ok()?))
                    .ok_or("a container kind refers to a kind that does not precede it")?;
                bytes += inner.bytes + STATEFUL_BYTES;
                nesting += inner.nesting;
                ContainerKind::Stateful {
                    type_name: type_name(),
                    protocol: protocol.into(),
                    inner: Box::new(inner.container.clone()),
                }
            }
            other => return Err(format!("a container has the unknown tag {other}")),
        };
        total += bytes;
        if nesting > MAX_DEPTH || total > MAX_TYPE_NAME_BYTES {
            return Err("its container kinds nest too deeply or are too large".to_owned());
        }
        kinds.push(ContainerKindEntry { container, bytes, nesting });
    }
    numbers.end()?;
    names.end()?;
    protocols.end()?;
    texts.end()?;
    Ok(kinds)
}

struct Extents<'a> {
    tags: Column<'a, u8>,
    sources: Column<'a, ArchivedU32>,
    offsets: Column<'a, ArchivedU64>,
    lengths: Column<'a, ArchivedU64>,
    integrities: Column<'a, u8>,
    zips: Column<'a, ArchivedU32>,
}

impl<'a> Extents<'a> {
    fn new(page: &'a ArchivedIndexPageV1) -> Self {
        Self {
            tags: Column::new(&page.extent_tag, "extent_tag"),
            sources: Column::new(&page.extent_source, "extent_source"),
            offsets: Column::new(&page.extent_offset, "extent_offset"),
            lengths: Column::new(&page.extent_length, "extent_length"),
            integrities: Column::new(&page.extent_integrity, "extent_integrity"),
            zips: Column::new(&page.extent_zip, "extent_zip"),
        }
    }

    #[inline]
    fn next(&mut self) -> ReadResult<Extent> {
        let number = self.sources.next()?;
        Ok(Extent {
            source: match self.tags.next()? {
                tag::OWN => Source::Own(number),
                tag::RANGE => Source::Range(number),
                tag::PULLED => Source::Pulled(number),
                other => return Err(format!("an extent is of the unknown source {other}")),
            },
            offset: self.offsets.next()?,
            length: self.lengths.next()?,
            integrity: match self.integrities.next()? {
                tag::BLOCK_CRC => Integrity::BlockCrc,
                tag::ZIP => Integrity::Zip(self.zips.next()?),
                tag::NO_INTEGRITY => Integrity::None,
                other => return Err(format!("an extent is of the unknown integrity {other}")),
            },
        })
    }

    fn end(self) -> ReadResult<()> {
        self.tags.end()?;
        self.sources.end()?;
        self.offsets.end()?;
        self.lengths.end()?;
        self.integrities.end()?;
        self.zips.end()
    }
}

struct Tensors<'a> {
    dtypes: Column<'a, u8>,
    ndims: Column<'a, u8>,
    dims: Column<'a, ArchivedU64>,
    chunk_counts: Column<'a, ArchivedU32>,
    chunk_tags: Column<'a, u8>,
    chunk_regions: Column<'a, ArchivedU64>,
    chunk_codecs: Column<'a, u8>,
}

impl<'a> Tensors<'a> {
    fn new(page: &'a ArchivedIndexPageV1) -> Self {
        Self {
            dtypes: Column::new(&page.tensor_dtype, "tensor_dtype"),
            ndims: Column::new(&page.tensor_ndim, "tensor_ndim"),
            dims: Column::new(&page.tensor_dims, "tensor_dims"),
            chunk_counts: Column::new(&page.tensor_chunks, "tensor_chunks"),
            chunk_tags: Column::new(&page.chunk_tag, "chunk_tag"),
            chunk_regions: Column::new(&page.chunk_region, "chunk_region"),
            chunk_codecs: Column::new(&page.chunk_codec, "chunk_codec"),
        }
    }

    fn dtype(&mut self) -> ReadResult<Dtype> {
        let code = self.dtypes.next()?;
        Dtype::from_code(code).ok_or_else(|| format!("a tensor is of the unknown dtype {code}"))
    }

    /// Fills a record in place, except for its dtype. It is large, and moving it costs more than
    /// filling it.
    fn fill(&mut self, tensor: &mut TensorRecord, extents: &mut Extents<'_>) -> ReadResult<()> {
        let ndim = usize::from(self.ndims.next()?);
        self.dims.dims(ndim, &mut tensor.shape)?;
        let count = self.chunk_counts.next()? as usize;
        // Reserve no memory for chunks that the page does not have.
        tensor.chunks.reserve_exact(count.min(self.chunk_tags.len()));
        for _ in 0..count {
            tensor.chunks.push(ChunkRecord {
                region: match self.chunk_tags.next()? {
                    tag::BOX => ChunkRegion::Box(region(&mut self.chunk_regions, ndim)?),
                    tag::RUN => ChunkRegion::Run {
                        start: self.chunk_regions.next()?,
                        len: self.chunk_regions.next()?,
                    },
                    other => return Err(format!("a chunk is of the unknown sort {other}")),
                },
                extent: extents.next()?,
                codec: match self.chunk_codecs.next()? {
                    tag::RAW => Codec::Raw,
                    tag::PLANES => Codec::Planes,
                    other => return Err(format!("a chunk has the unknown codec {other}")),
                },
            });
        }
        Ok(())
    }

    fn end(self) -> ReadResult<()> {
        self.dtypes.end()?;
        self.ndims.end()?;
        self.dims.end()?;
        self.chunk_counts.end()?;
        self.chunk_tags.end()?;
        self.chunk_regions.end()?;
        self.chunk_codecs.end()
    }
}

/// Reads the offsets, then the extents, of `ndim` dimensions.
#[inline]
fn region(numbers: &mut Column<'_, ArchivedU64>, ndim: usize) -> ReadResult<Region> {
    let mut region = Region { offset: Dims::new(), extent: Dims::new() };
    numbers.dims(ndim, &mut region.offset)?;
    numbers.dims(ndim, &mut region.extent)?;
    Ok(region)
}
