//! Tensors in another arrangement: an index whose tensors are made of parts of stored ones.
//!
//! Splitting, concatenating, interleaving, stacking, permuting and cropping only change which
//! stored element is which element of a tensor. So they change chunks, not bytes: a mapped chunk
//! names the same bytes of the same file, with another region and other strides. All that follows
//! (match, plan, read) works on the mapped index as on any other.
//!
//! Operations that compute are apart ([`crate::computed`]): a computed leaf has no chunks.
//!
//! The result lives in memory only. Like the index of foreign files, it has chunks that no data
//! file of ours may have.

use std::collections::HashMap;

use smallvec::SmallVec;

use stepwell_core::dtype::Dtype;
use stepwell_core::format::index::{
    ChunkRecord, ChunkRegion, Chunks, Codec, ElementLayout, Index, LeafRecord, PlanesPart, TensorRecord,
};
use stepwell_core::format::planes;
use stepwell_core::leaf_path::Component;
use stepwell_core::region::{Dims, Region, row_major_strides};
use stepwell_core::tree::Tree;

use crate::computed::{Composite, CompositePart, Computation, Computations, ComputedSource, ComputedTensor};
use crate::overlap::{ChunkIndex, StoredBox};
use crate::read_plan::{name, tensor};
use crate::{Error, Result};

/// A leaf of a mapped index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MappedLeaf {
    /// A stored leaf as it is.
    Stored(u32),
    /// The same value as an earlier leaf of the mapped index.
    Tie(u32),
    /// A tensor made of parts of stored tensors.
    Tensor(MappedTensor),
}

/// A tensor made of parts of stored tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedTensor {
    /// Its shape.
    pub shape: Dims,
    /// Its parts. A read fails if they do not tile what it wants.
    pub pieces: Vec<MappedPiece>,
}

/// A box of a mapped tensor, and the stored elements that it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedPiece {
    /// The box.
    pub region: Region,
    /// The tensor that it is a part of: called *stored* also where it is computed.
    pub source: MappedSource,
    /// Stored element that is the box's first one.
    pub first: Dims,
    /// Per dimension of the box: the stored axis that it follows.
    pub axes: SmallVec<[MappedAxis; 4]>,
}

/// The tensor that a piece is a part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MappedSource {
    /// A stored leaf.
    Stored(u32),
    /// A computed tensor, by its number.
    Computed(u32),
}

/// The steps along a dimension of a mapped box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappedAxis {
    /// The stored axis; `None`: the box has one element along this dimension.
    pub stored: Option<u32>,
    /// Stored elements from one element of the box to the next. At least one.
    pub step: u64,
}

/// Returns the index of these leaves, and how computed ones are computed. `tree` is their
/// structure. Operands of a computed tensor are stored, or computed before it.
pub fn mapped(
    index: &Index,
    tree: Tree,
    leaves: &[MappedLeaf],
    computed: &[ComputedTensor],
) -> Result<(Index, Option<Computations>)> {
    let mut mapper = Mapper { index, chunks_of: HashMap::new(), computations: Computations::new(index) };
    for (number, one) in computed.iter().enumerate() {
        mapper.computation(one).map_err(|fault| match fault {
            MapFault::Error(error) => error,
            MapFault::Piece(what) => Error::Request { leaf: format!("computed tensor {number}"), what },
        })?;
    }
    let mut records = Vec::with_capacity(leaves.len());
    for (number, leaf) in (0_u32..).zip(leaves) {
        let refused = |what: &str| Error::Request { leaf: name_in(&tree, number), what: what.to_owned() };
        records.push(match leaf {
            MappedLeaf::Tie(of) if *of < number => LeafRecord::Alias { of: *of },
            MappedLeaf::Tie(_) => return Err(refused("it is tied to a leaf that is not before it")),
            MappedLeaf::Stored(stored) => match index.resolve(*stored) {
                Some((_, record)) => record.clone(),
                None => return Err(refused("it is a stored leaf that does not exist")),
            },
            MappedLeaf::Tensor(tensor) => {
                LeafRecord::Tensor(mapper.leaf(number, tensor).map_err(|fault| match fault {
                    MapFault::Error(error) => error,
                    MapFault::Piece(what) => refused(&what),
                })?)
            }
        });
    }
    if tree.leaf_count() != records.len() {
        let what = format!("the tree has {} leaves, and {} are mapped", tree.leaf_count(), records.len());
        return Err(Error::Request { leaf: String::new(), what });
    }
    let computations = (!computed.is_empty()).then_some(mapper.computations);
    Ok((Index { tree, leaves: records, files: index.files.clone() }, computations))
}

fn name_in(tree: &Tree, leaf: u32) -> String {
    tree.leaf_node(leaf).map_or_else(|| format!("number {leaf}"), |_| tree.leaf_path(leaf).to_string())
}

/// A reason why a mapped tensor cannot be made.
enum MapFault {
    /// A piece is not what it should be.
    Piece(String),
    /// A stored tensor is not what it should be.
    Error(Error),
}

impl From<Error> for MapFault {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

struct Mapper<'a> {
    index: &'a Index,
    /// The chunks of stored tensors, by leaf.
    chunks_of: HashMap<u32, ChunkIndex>,
    computations: Computations,
}

impl Mapper<'_> {
    /// The record of a leaf. A computed one has no chunks.
    fn leaf(&mut self, number: u32, wanted: &MappedTensor) -> Result<TensorRecord, MapFault> {
        let is_computed = |piece: &MappedPiece| matches!(piece.source, MappedSource::Computed(_));
        if !wanted.pieces.iter().any(is_computed) {
            return self.tensor(wanted);
        }
        let composite = self.composite(wanted)?;
        let (dtype, shape) = (composite.dtype, composite.shape.clone());
        self.computations.leaves.insert(number, composite);
        Ok(TensorRecord { dtype, shape, chunks: Chunks::new() })
    }

    fn computation(&mut self, wanted: &ComputedTensor) -> Result<(), MapFault> {
        let operands =
            wanted.operands.iter().map(|operand| self.composite(operand)).collect::<Result<_, _>>()?;
        let (dtype, shape, operation) = (wanted.dtype, wanted.shape.clone(), wanted.operation.clone());
        let computation = Computation { dtype, shape, operation, operands };
        computation.check().map_err(MapFault::Piece)?;
        self.computations.tensors.push(computation);
        Ok(())
    }

    /// A tensor with its stored parts as a leaf of their own.
    fn composite(&mut self, wanted: &MappedTensor) -> Result<Composite, MapFault> {
        let record = self.tensor(wanted)?;
        let parts = wanted.pieces.iter().map(|piece| CompositePart {
            region: piece.region.clone(),
            computed: match piece.source {
                MappedSource::Stored(_) => None,
                MappedSource::Computed(number) => {
                    Some(ComputedSource { number, first: piece.first.clone(), axes: piece.axes.clone() })
                }
            },
        });
        let parts = parts.collect();
        let (dtype, shape, leaf) =
            (record.dtype, wanted.shape.clone(), self.computations.index.leaves.len() as u32);
        let stored = wanted.pieces.iter().find_map(|piece| match piece.source {
            MappedSource::Stored(leaf) => Some(name(self.index, leaf)),
            MappedSource::Computed(_) => None,
        });
        let component = Component::Key(stored.unwrap_or_default().into());
        self.computations.index.tree.push_leaf(Some(0), Some(component));
        self.computations.index.leaves.push(LeafRecord::Tensor(record));
        Ok(Composite { dtype, shape, leaf, parts })
    }

    /// The record of a tensor, with the chunks of its stored parts.
    fn tensor(&mut self, wanted: &MappedTensor) -> Result<TensorRecord, MapFault> {
        let mut dtype: Option<Dtype> = None;
        let mut chunks = Chunks::new();
        for piece in &wanted.pieces {
            let path = || match piece.source {
                MappedSource::Stored(leaf) => name(self.index, leaf),
                MappedSource::Computed(number) => format!("computed tensor {number}"),
            };
            let (stored, source_dtype, shape) = match piece.source {
                MappedSource::Stored(leaf) => {
                    let (source, stored) = tensor(self.index, leaf)?;
                    (Some((source, stored)), stored.dtype, &stored.shape)
                }
                MappedSource::Computed(number) => match self.computations.tensors.get(number as usize) {
                    Some(computed) => (None, computed.dtype, &computed.shape),
                    None => return Err(MapFault::Piece(format!("{} is not before it", path()))),
                },
            };
            check(piece, &wanted.shape, shape)
                .map_err(|what| MapFault::Piece(format!("a part of `{}`: {what}", path())))?;
            match dtype {
                Some(dtype) if dtype != source_dtype => {
                    let what =
                        format!("`{}` is stored as {source_dtype}, another part of it as {dtype}", path());
                    return Err(MapFault::Piece(what));
                }
                _ => dtype = Some(source_dtype),
            }
            let Some((source, stored)) = stored.filter(|_| !piece.region.is_empty()) else { continue };
            let chunks_of = match self.chunks_of.entry(source) {
                std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::hash_map::Entry::Vacant(entry) => {
                    let chunks = ChunkIndex::new(&stored.shape, &stored.chunks).map_err(|chunk| {
                        let what = format!("chunk {chunk} does not lie in the tensor");
                        Error::Index { leaf: path(), what }
                    })?;
                    entry.insert(chunks)
                }
            };
            for overlap in chunks_of.overlaps(&bounds(piece, &stored.shape)) {
                let chunk = &stored.chunks[overlap.stored.chunk as usize];
                chunks.extend(part(piece, chunk, overlap.stored, stored).map_err(|what| Error::Index {
                    leaf: path(),
                    what: format!("chunk {} {what}", overlap.stored.chunk),
                })?);
            }
        }
        let Some(dtype) = dtype else { return Err(MapFault::Piece("it has no parts".to_owned())) };
        Ok(TensorRecord { dtype, shape: wanted.shape.clone(), chunks })
    }
}

/// Checks the numbers of a piece, so that no sum about it overflows.
fn check(piece: &MappedPiece, shape: &[u64], stored: &[u64]) -> Result<(), String> {
    let MappedPiece { region, first, axes, .. } = piece;
    if !region.fits(shape) {
        return Err(format!("{:?} + {:?} is not inside the shape {shape:?}", region.offset, region.extent));
    }
    if axes.len() != region.ndim() || first.len() != stored.len() {
        return Err("it has other dimensions".to_owned());
    }
    let mut last: Dims = first.clone();
    let mut followed = vec![false; stored.len()];
    for (axis, &n) in axes.iter().zip(&region.extent) {
        match axis.stored {
            None if n <= 1 => {}
            None => return Err(format!("{n} elements along a dimension that follows no stored axis")),
            Some(stored) => {
                let free = followed.get_mut(stored as usize).filter(|followed| !**followed);
                let Some(free) = free else {
                    return Err(format!("stored axis {stored} is followed twice, or is none"));
                };
                *free = true;
                let reach = n.saturating_sub(1).checked_mul(axis.step.max(1));
                let end = reach.and_then(|reach| first[stored as usize].checked_add(reach));
                last[stored as usize] = end.ok_or("it reaches further than 64 bits")?;
            }
        }
    }
    if !region.is_empty() && last.iter().zip(stored).any(|(last, n)| last >= n) {
        return Err(format!("it ends at element {last:?} of the stored shape {stored:?}"));
    }
    Ok(())
}

/// The stored region that a piece takes its elements from.
fn bounds(piece: &MappedPiece, stored: &[u64]) -> Region {
    let mut bounds = Region { offset: piece.first.clone(), extent: vec![1; stored.len()].into() };
    for (axis, &n) in piece.axes.iter().zip(&piece.region.extent) {
        if let Some(stored) = axis.stored {
            bounds.extent[stored as usize] = (n - 1) * axis.step.max(1) + 1;
        }
    }
    bounds
}

/// The part of a stored box that a piece takes: as a chunk of the mapped tensor.
fn part(
    piece: &MappedPiece,
    chunk: &ChunkRecord,
    stored: &StoredBox,
    tensor: &TensorRecord,
) -> Result<Option<ChunkRecord>, String> {
    let itemsize = tensor.dtype.size() as u64;
    let strides = match &chunk.codec {
        Codec::Raw | Codec::Planes => {
            let elements = row_major_strides(&stored.region.extent);
            elements.iter().map(|&n| n.checked_mul(itemsize)).collect::<Option<Dims>>()
        }
        Codec::Elements(layout) => Some(layout.strides.clone()),
        Codec::PlanesPart(part) => Some(part.layout.strides.clone()),
    };
    let strides = strides.filter(|strides| strides.len() == stored.region.ndim());
    let strides = strides.ok_or("has strides that do not fit it")?;
    // Of each stored axis, the first element that is taken.
    let mut taken = piece.first.clone();
    let mut region = piece.region.clone();
    let mut layout = ElementLayout::default();
    let stored_layout = match &chunk.codec {
        Codec::Elements(layout) => Some(&**layout),
        Codec::PlanesPart(part) => Some(&part.layout),
        Codec::Raw | Codec::Planes => None,
    };
    if let Some(stored) = stored_layout {
        (layout.big_endian, layout.negated) = (stored.big_endian, stored.negated);
    }
    for (d, axis) in piece.axes.iter().enumerate() {
        let Some(stored_axis) = axis.stored.map(|axis| axis as usize) else {
            layout.strides.push(itemsize);
            continue;
        };
        let step = axis.step.max(1);
        let (from, until) = (stored.region.offset[stored_axis], end(&stored.region, stored_axis));
        let first = piece.first[stored_axis];
        let begin = from.saturating_sub(first).div_ceil(step);
        let end = until.saturating_sub(first).div_ceil(step).min(region.extent[d]);
        if begin >= end {
            return Ok(None);
        }
        taken[stored_axis] = first + begin * step;
        region.offset[d] += begin;
        region.extent[d] = end - begin;
        let stride = strides[stored_axis].checked_mul(step).filter(|_| end - begin > 1);
        layout.strides.push(stride.unwrap_or(itemsize));
    }
    // The bytes that the elements are in: those of the extent, or those that it becomes.
    let decoded = chunk.decoded_bytes(itemsize).ok_or("overflows")?;
    let (begin, whole) = match &chunk.codec {
        Codec::Raw | Codec::Elements(_) => (chunk.extent.offset, chunk.extent.length),
        Codec::Planes => (0, decoded),
        Codec::PlanesPart(part) => (part.offset, part.length),
    };
    let mut at = stored.base.checked_mul(itemsize).and_then(|base| begin.checked_add(base));
    for (axis, &element) in taken.iter().enumerate() {
        let Some(steps) =
            element.checked_sub(stored.region.offset[axis]).filter(|&n| n < stored.region.extent[axis])
        else {
            return Ok(None);
        };
        at = steps.checked_mul(strides[axis]).and_then(|bytes| at?.checked_add(bytes));
    }
    let offset = at.ok_or("overflows")?;
    let length = layout.span(&region.extent, itemsize).ok_or("overflows")?;
    if offset.checked_add(length).is_none_or(|end| begin.checked_add(whole).is_none_or(|whole| end > whole)) {
        return Err("is shorter than its region".to_owned());
    }
    let planes = match &chunk.codec {
        Codec::Raw | Codec::Elements(_) => None,
        Codec::Planes => Some(planes::count(tensor.dtype) as u8),
        Codec::PlanesPart(part) => Some(part.planes),
    };
    let mut extent = chunk.extent;
    let codec = if let Some(planes) = planes {
        Codec::PlanesPart(Box::new(PlanesPart { planes, decoded, offset, length, layout }))
    } else {
        (extent.offset, extent.length) = (offset, length);
        Codec::Elements(Box::new(layout))
    };
    Ok(Some(ChunkRecord { region: ChunkRegion::Box(region), extent, codec }))
}

fn end(region: &Region, axis: usize) -> u64 {
    region.offset[axis] + region.extent[axis]
}

#[cfg(test)]
mod tests;
