//! Indexes that Python describes row by row: those of foreign files, and mapped ones.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use stepwell_core::arithmetic::Operation;
use stepwell_core::format::index::{
    ChunkRecord, ChunkRegion, Chunks, Codec, CompressedStream, ElementLayout, Extent, FileRecord, Integrity,
    LeafRecord, NegatedParts, Source, TensorRecord, Within,
};
use stepwell_core::load::GuardedRange;
use stepwell_core::region::Region;
use stepwell_core::tree::{ContainerKind, Node, Tree};
use stepwell_reshard::computed::ComputedTensor;
use stepwell_reshard::mapping::{MappedAxis, MappedLeaf, MappedPiece, MappedSource, MappedTensor};

use crate::foreign::compression_named;
use crate::hooks::dtype_named;
use crate::matching::component_of;

/// A node of a foreign or mapped checkpoint: its parent, its component, and its kind; without one a
/// leaf.
pub(super) type ForeignNode<'py> = (u32, Option<Bound<'py, PyAny>>, Option<KindRow>);

/// The kind of a container.
#[derive(FromPyObject)]
pub(super) enum KindRow {
    /// By its name.
    Named(String),
    /// That of a stored node.
    OfNode(u32),
}

/// A leaf of a mapped checkpoint: a stored leaf, the earlier leaf of a tie, or a tensor.
pub(super) type MappedRow = (Option<u32>, Option<u32>, Option<MappedTensorRow>);

/// A tensor: shape and pieces.
type MappedTensorRow = (Vec<u64>, Vec<MappedPieceRow>);

/// A piece: offset and extent of its box, number of its source, whether that is a computed tensor
/// and not a stored leaf, first stored element, and for each dimension the stored axis and the
/// step.
type MappedPieceRow = (Vec<u64>, Vec<u64>, u32, bool, Vec<u64>, Vec<(Option<u32>, u64)>);

/// A computed tensor: dtype, shape, operation, its constant, its blocks, operands.
pub(super) type ComputedRow = (String, Vec<u64>, String, f64, Vec<u64>, Vec<MappedTensorRow>);

pub(super) fn mapped_leaf(row: MappedRow) -> PyResult<MappedLeaf> {
    Ok(match row {
        (Some(stored), None, None) => MappedLeaf::Stored(stored),
        (None, Some(tie), None) => MappedLeaf::Tie(tie),
        (None, None, Some(tensor)) => MappedLeaf::Tensor(mapped_tensor(tensor)),
        _ => return Err(PyValueError::new_err("a mapped leaf is one of three")),
    })
}

fn mapped_tensor((shape, pieces): MappedTensorRow) -> MappedTensor {
    let piece = |(offset, extent, number, is_computed, first, axes): MappedPieceRow| MappedPiece {
        region: Region { offset: offset.into(), extent: extent.into() },
        source: if is_computed { MappedSource::Computed(number) } else { MappedSource::Stored(number) },
        first: first.into(),
        axes: axes.into_iter().map(|(stored, step)| MappedAxis { stored, step }).collect(),
    };
    MappedTensor { shape: shape.into(), pieces: pieces.into_iter().map(piece).collect() }
}

pub(super) fn computed_tensor(row: ComputedRow) -> PyResult<ComputedTensor> {
    let (dtype, shape, operation, constant, block, operands) = row;
    let operation = match &*operation {
        "fill" => Operation::Fill(constant),
        "cast" => Operation::Cast,
        "scale" => Operation::Scale(constant),
        "divide" => Operation::Divide(constant),
        "add" => Operation::Add(constant),
        "dequantise" => Operation::Dequantise(block.into()),
        "merge" => Operation::Merge(constant),
        other => return Err(PyValueError::new_err(format!("operation {other:?}"))),
    };
    let operands = operands.into_iter().map(mapped_tensor).collect();
    Ok(ComputedTensor { dtype: dtype_named(&dtype)?, shape: shape.into(), operation, operands })
}

/// A leaf of a foreign checkpoint: a tensor (dtype, shape, chunks, or `None` if they are described
/// later), or the leaf that it is tied to, or else an object.
pub(super) type ForeignLeaf = (Option<(String, Vec<u64>, Option<Vec<ForeignChunk>>)>, Option<u32>);

/// A file of a foreign checkpoint: name, bytes, and the compressed stream that it is in the file of
/// that name.
pub(super) type ForeignFile = (String, u64, Option<ForeignStream>);

/// A compressed stream: its method, offset, bytes, and the CRC-32 of its content.
type ForeignStream = (String, u64, u64, Option<u32>);

pub(super) fn foreign_file((name, length, stream): ForeignFile) -> PyResult<FileRecord> {
    let name: Box<str> = name.into();
    let within = |(compression, offset, length, crc): ForeignStream| {
        let stream = CompressedStream { compression: compression_named(&compression)?, length, crc };
        Ok::<_, PyErr>(Within { name: name.clone(), offset, stream: Some(stream) })
    };
    let within = stream.map(within).transpose()?;
    Ok(FileRecord { name, length, file_id: 0, trailer_crc: 0, within })
}

/// A chunk: file, offset, bytes, offsets, extents, and its layout unless its elements are row-major
/// and little-endian. A run of the flattened tensor has one offset and one extent.
pub(super) type ForeignChunk = (u32, u64, u64, Vec<u64>, Vec<u64>, Option<ForeignLayout>);

/// The guarded ranges of a foreign file: file, and offset, bytes and CRC-32 of each.
pub(super) type GuardedRow = (u32, Vec<(u64, u64, u32)>);

pub(super) fn guarded_ranges((file, ranges): GuardedRow) -> impl Iterator<Item = GuardedRange> {
    let range = move |(offset, length, crc32)| GuardedRange { file, offset, length, crc32 };
    ranges.into_iter().map(range)
}

/// The layout of a chunk's elements: strides in bytes, big-endian, negated parts.
type ForeignLayout = (Vec<u64>, bool, String);

fn codec_of(layout: Option<ForeignLayout>) -> PyResult<Codec> {
    let Some((strides, big_endian, negated)) = layout else { return Ok(Codec::Raw) };
    let negated = match &*negated {
        "" => NegatedParts::None,
        "all" => NegatedParts::All,
        "imaginary" => NegatedParts::Imaginary,
        other => return Err(PyValueError::new_err(format!("negated parts {other:?}"))),
    };
    Ok(Codec::Elements(Box::new(ElementLayout { strides: strides.into(), big_endian, negated })))
}

/// True if numbers of a chunk are stored with the opposite sign.
pub(super) fn is_negated(chunk: &ChunkRecord) -> bool {
    matches!(&chunk.codec, Codec::Elements(layout) if layout.negated != NegatedParts::None)
}

/// The tree of these nodes. `stored` has the nodes whose kinds are meant.
pub(super) fn tree_of(nodes: Vec<ForeignNode<'_>>, stored: &Tree) -> PyResult<Tree> {
    let mut tree = Tree::new();
    for (number, (parent, component, kind)) in (0_u32..).zip(nodes) {
        let component = component.map(|row| component_of(&row)).transpose()?;
        let parent = component.as_ref().map(|_| parent).filter(|&parent| parent < number);
        if parent.is_none() && number > 0 {
            return Err(PyValueError::new_err(format!("node {number} has no parent before it")));
        }
        let kind = match kind {
            None => {
                tree.push_leaf(parent, component);
                continue;
            }
            Some(KindRow::OfNode(node)) => {
                stored.nodes().get(node as usize).and_then(Node::container).cloned()
            }
            Some(KindRow::Named(name)) => match &*name {
                "dict" => Some(ContainerKind::Dict),
                "OrderedDict" => Some(ContainerKind::OrderedDict),
                "list" => Some(ContainerKind::List),
                "tuple" => Some(ContainerKind::Tuple),
                _ => None,
            },
        };
        let unknown = || PyValueError::new_err(format!("node {number} is a container of no known kind"));
        tree.push_container(parent, component, kind.ok_or_else(unknown)?);
    }
    Ok(tree)
}

pub(super) fn foreign_leaf((tensor, of): ForeignLeaf) -> PyResult<LeafRecord> {
    Ok(match (tensor, of) {
        (None, None) => LeafRecord::Object(foreign_extent(Source::Pulled(0), 0, 0)),
        (None, Some(of)) => LeafRecord::Alias { of },
        (Some((dtype, shape, chunks)), _) => LeafRecord::Tensor(TensorRecord {
            dtype: dtype_named(&dtype)?,
            chunks: foreign_chunks(shape.len(), chunks.unwrap_or_default())?,
            shape: shape.into(),
        }),
    })
}

/// The chunks of a tensor of so many dimensions.
pub(super) fn foreign_chunks(ndim: usize, chunks: Vec<ForeignChunk>) -> PyResult<Chunks> {
    let chunk = |(file, offset, length, start, size, layout): ForeignChunk| {
        let region = match (start.as_slice(), size.as_slice()) {
            (&[start], &[len]) if ndim != 1 => ChunkRegion::Run { start, len },
            _ => ChunkRegion::Box(Region { offset: start.into(), extent: size.into() }),
        };
        Ok(ChunkRecord {
            region,
            extent: foreign_extent(Source::Range(file), offset, length),
            codec: codec_of(layout)?,
        })
    };
    chunks.into_iter().map(chunk).collect()
}

fn foreign_extent(source: Source, offset: u64, length: u64) -> Extent {
    Extent { source, offset, length, integrity: Integrity::None }
}
