//! Tensors whose elements are computed from those of others.
//!
//! Any region of one can be computed: an [`Assembly`] names the stored regions that it needs, and
//! has their bytes once they were read. A region is cut into cells, so that little is in memory at
//! a time.

use std::borrow::Cow;
use std::collections::HashMap;

use smallvec::SmallVec;

use stepwell_core::arithmetic::{Operand, Operation, can_read, compute};
use stepwell_core::dtype::Dtype;
use stepwell_core::format::index::Index;
use stepwell_core::provider::can_cast;
use stepwell_core::region::{Dims, Region, row_major_strides};
use stepwell_core::tree::{ContainerKind, Tree};

use crate::mapping::{MappedAxis, MappedTensor};
use crate::read_plan::Request;

/// A tensor that is computed from operands.
#[derive(Clone, Debug, PartialEq)]
pub struct ComputedTensor {
    /// Its dtype.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Dims,
    /// How it is computed.
    pub operation: Operation,
    /// The tensors that it is computed from.
    pub operands: Vec<MappedTensor>,
}

/// A mapped tensor with its stored and its computed parts apart.
#[derive(Debug)]
pub(crate) struct Composite {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Dims,
    /// The leaf of [`Computations::index`] that has the stored parts.
    pub(crate) leaf: u32,
    pub(crate) parts: Vec<CompositePart>,
}

/// A box of a tensor.
#[derive(Debug)]
pub(crate) struct CompositePart {
    pub(crate) region: Region,
    /// `None`: stored.
    pub(crate) computed: Option<ComputedSource>,
}

/// The computed elements that a box has: as in [`crate::mapping::MappedPiece`].
#[derive(Debug)]
pub(crate) struct ComputedSource {
    pub(crate) number: u32,
    pub(crate) first: Dims,
    pub(crate) axes: SmallVec<[MappedAxis; 4]>,
}

/// A computed tensor and its operands.
#[derive(Debug)]
pub(crate) struct Computation {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Dims,
    pub(crate) operation: Operation,
    pub(crate) operands: Vec<Composite>,
}

impl Computation {
    /// Describes what does not fit.
    pub(crate) fn check(&self) -> Result<(), String> {
        let shapes: SmallVec<[&[u64]; 3]> = self.operands.iter().map(|one| &one.shape[..]).collect();
        let fits = match (&self.operation, shapes.as_slice()) {
            (Operation::Fill(value), []) => can_cast(self.dtype, self.dtype) || value.to_bits() == 0,
            (Operation::Cast | Operation::Scale(_) | Operation::Divide(_) | Operation::Add(_), [x]) => {
                *x == &self.shape[..]
            }
            (Operation::Dequantise(block), [x, scales]) => {
                let blocks = x.iter().zip(block).map(|(n, block)| n.div_ceil((*block).max(1)));
                *x == &self.shape[..]
                    && !x.is_empty()
                    && block.len() == x.len()
                    && !block.contains(&0)
                    && blocks.eq(scales.iter().copied())
            }
            (Operation::Merge(_), [x, [rows, rank], [same, columns]]) => {
                *x == &self.shape[..] && *x == [*rows, *columns] && rank == same && *rank > 0
            }
            _ => false,
        };
        if !fits {
            return Err(format!(
                "{:?} of operands of shapes {shapes:?} is not {:?}",
                self.operation, self.shape
            ));
        }
        let is_fill = matches!(self.operation, Operation::Fill(_));
        let unknown = self.operands.iter().map(|one| one.dtype).find(|&dtype| !can_read(dtype));
        match unknown.or((!is_fill && !can_cast(self.dtype, self.dtype)).then_some(self.dtype)) {
            Some(dtype) => Err(format!("maps do not compute with {dtype}")),
            None => Ok(()),
        }
    }

    /// The region of an operand that a region of the tensor needs.
    fn region_of(&self, operand: usize, region: &Region) -> Region {
        match (&self.operation, operand) {
            (Operation::Dequantise(block), 1) => {
                let mut needed = region.clone();
                for (axis, block) in block.iter().enumerate() {
                    let end = (region.offset[axis] + region.extent[axis]).div_ceil(*block);
                    needed.offset[axis] /= block;
                    needed.extent[axis] = end - needed.offset[axis];
                }
                needed
            }
            (Operation::Merge(_), 1 | 2) => {
                // Whole rows of the left matrix, and whole columns of the right one.
                let mut needed = region.clone();
                let inner = 2 - operand;
                needed.offset[inner] = 0;
                needed.extent[inner] = self.operands[operand].shape[inner];
                needed
            }
            _ => region.clone(),
        }
    }
}

/// The computed leaves of a mapped index.
#[derive(Debug)]
pub struct Computations {
    /// The stored parts of leaves and operands. Its leaves are named like the stored ones.
    pub index: Index,
    pub(crate) tensors: Vec<Computation>,
    pub(crate) leaves: HashMap<u32, Composite>,
}

/// The elements of a region of a tensor: stored ones that are read, and computed ones.
#[derive(Debug)]
pub struct Assembly<'a> {
    dtype: Dtype,
    region: Region,
    /// The reads of its stored parts, from [`Computations::index`].
    pub reads: Vec<Request>,
    /// Their target: row-major bytes of the region.
    pub stored: Vec<u8>,
    computed: Vec<ComputedPart<'a>>,
}

#[derive(Debug)]
struct ComputedPart<'a> {
    computation: &'a Computation,
    /// The region of the computed tensor, and its operands.
    region: Region,
    operands: Vec<Assembly<'a>>,
    /// The elements in it and in the assembly: extents, then first element and strides of each.
    extent: Dims,
    from: (u64, Dims),
    to: (u64, Dims),
}

/// A value became infinite in this dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overflow(pub Dtype);

impl Computations {
    /// No computed leaf, of an index with the same files.
    pub(crate) fn new(index: &Index) -> Self {
        let mut tree = Tree::new();
        tree.push_container(None, None, ContainerKind::Dict);
        let index = Index { tree, leaves: Vec::new(), files: index.files.clone() };
        Self { index, tensors: Vec::new(), leaves: HashMap::new() }
    }

    /// Names all of it. Equal for equal computations.
    pub fn fingerprint(&self) -> String {
        let mut leaves: Vec<_> = self.leaves.iter().collect();
        leaves.sort_unstable_by_key(|(number, _)| **number);
        format!("{:?} {:?} {leaves:?}", self.index.leaves, self.tensors)
    }

    /// True if the holder of a leaf is computed.
    pub fn has(&self, holder: u32) -> bool {
        self.leaves.contains_key(&holder)
    }

    /// Returns what a region of a computed leaf is made of.
    pub fn assembly(&self, holder: u32, region: Region) -> Option<Assembly<'_>> {
        self.leaves.get(&holder).map(|leaf| self.assemble(leaf, region))
    }

    /// Cuts a region into cells that need at most so many bytes each, if they have more than one
    /// element.
    pub fn cells(&self, holder: u32, region: Region, limit: u64) -> Vec<Region> {
        let mut cells = Vec::new();
        let mut pending = vec![region];
        while let Some(region) = pending.pop() {
            let bytes = |region: &Region| {
                self.assembly(holder, region.clone()).map_or(0, |assembly| assembly.bytes_needed())
            };
            if region.is_empty() {
                continue;
            }
            if bytes(&region) <= limit || region.volume() == Some(1) {
                cells.push(region);
                continue;
            }
            // The cut that shares the least. Of equals the outermost: its halves are contiguous.
            let halves = (0..region.ndim()).filter(|&axis| region.extent[axis] > 1).map(|axis| {
                let half = region.extent[axis].div_ceil(2);
                let (mut first, mut second) = (region.clone(), region.clone());
                first.extent[axis] = half;
                second.offset[axis] += half;
                second.extent[axis] -= half;
                (first, second)
            });
            if let Some((first, second)) = halves.min_by_key(|(first, _)| bytes(first)) {
                pending.extend([second, first]);
            }
        }
        // Neighbours in a row are read together: they share blocks of the file.
        cells.sort_unstable_by(|one, other| one.offset.cmp(&other.offset));
        cells
    }

    fn assemble(&self, tensor: &Composite, region: Region) -> Assembly<'_> {
        let strides = row_major_strides(&region.extent);
        let size = tensor.dtype.size() as u64;
        let mut assembly = Assembly {
            dtype: tensor.dtype,
            region,
            reads: Vec::new(),
            stored: Vec::new(),
            computed: Vec::new(),
        };
        for part in &tensor.parts {
            let Some(shared) = part.region.intersect(&assembly.region).filter(|shared| !shared.is_empty())
            else {
                continue;
            };
            let places = shared.offset.iter().zip(&assembly.region.offset).zip(&strides);
            let to = places.map(|((at, first), stride)| (at - first) * stride).sum::<u64>();
            let Some(source) = &part.computed else {
                #[expect(clippy::cast_possible_wrap, reason = "strides of bytes in memory fit an isize")]
                let dst_strides = strides.iter().map(|&stride| (stride * size) as i64).collect();
                assembly.reads.push(Request {
                    leaf: tensor.leaf,
                    region: shared,
                    dst: 0,
                    dst_offset: to * size,
                    dst_strides,
                });
                continue;
            };
            if let Some(computation) = self.tensors.get(source.number as usize) {
                let part = self.part(computation, source, &part.region, shared, (to, strides[..].into()));
                assembly.computed.push(part);
            }
        }
        assembly
    }

    /// The elements of `shared`, a part of the box `whole`.
    fn part<'a>(
        &'a self,
        computation: &'a Computation,
        source: &ComputedSource,
        whole: &Region,
        shared: Region,
        to: (u64, Dims),
    ) -> ComputedPart<'a> {
        let mut region = Region { offset: source.first.clone(), extent: vec![1; source.first.len()].into() };
        for (d, axis) in source.axes.iter().enumerate() {
            let Some(stored) = axis.stored.map(|stored| stored as usize) else { continue };
            region.offset[stored] += (shared.offset[d] - whole.offset[d]) * axis.step.max(1);
            region.extent[stored] = (shared.extent[d] - 1) * axis.step.max(1) + 1;
        }
        let own = row_major_strides(&region.extent);
        let stride =
            |axis: &MappedAxis| axis.stored.map_or(0, |stored| own[stored as usize] * axis.step.max(1));
        let operands = computation.operands.iter().enumerate();
        let operands = operands
            .map(|(number, operand)| self.assemble(operand, computation.region_of(number, &region)))
            .collect();
        let from = (0, source.axes.iter().map(stride).collect());
        ComputedPart { computation, region, operands, extent: shared.extent, from, to }
    }
}

impl Assembly<'_> {
    fn len(&self) -> usize {
        let bytes = self.region.volume().and_then(|n| n.checked_mul(self.dtype.size() as u64));
        bytes.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX)
    }

    /// Returns the bytes in memory while it is computed.
    pub fn bytes_needed(&self) -> u64 {
        let parts = self.computed.iter().map(|part| {
            let own = part.region.volume().unwrap_or(u64::MAX);
            let operands = part.operands.iter().map(Assembly::bytes_needed);
            // Scales and adapters are float64 while they are used.
            let wide = part
                .operands
                .iter()
                .skip(1)
                .map(|one| (one.len() / one.dtype.size()).saturating_mul(8) as u64);
            let own = own.saturating_mul(part.computation.dtype.size() as u64);
            operands.chain(wide).fold(own, u64::saturating_add)
        });
        parts.fold(self.len() as u64, u64::saturating_add)
    }

    /// Allocates the targets of all reads, and calls `read` with each and its requests.
    pub fn for_each_read<'s>(&'s mut self, read: &mut dyn FnMut(&[Request], &'s mut Vec<u8>)) {
        if !self.reads.is_empty() {
            self.stored = vec![0; self.len()];
            read(&self.reads, &mut self.stored);
        }
        for operand in self.computed.iter_mut().flat_map(|part| &mut part.operands) {
            operand.for_each_read(read);
        }
    }

    /// Returns the reads of all operands.
    pub fn all_reads(&self) -> Vec<Request> {
        let operands = self.computed.iter().flat_map(|part| &part.operands);
        self.reads.iter().cloned().chain(operands.flat_map(Self::all_reads)).collect()
    }

    /// Computes its bytes, row-major, after the reads.
    pub fn bytes(&self) -> Result<Cow<'_, [u8]>, Overflow> {
        let mut bytes = Cow::Borrowed(&self.stored[..]);
        for part in &self.computed {
            let mut made =
                vec![0; part.computation.dtype.size() * part.region.volume().unwrap_or(0) as usize];
            let operands = part.operands.iter().map(Assembly::bytes).collect::<Result<Vec<_>, _>>()?;
            let operands: SmallVec<[Operand<'_>; 3]> = part
                .operands
                .iter()
                .zip(&operands)
                .map(|(one, bytes)| Operand { dtype: one.dtype, region: &one.region, bytes })
                .collect();
            let Computation { dtype, operation, .. } = part.computation;
            if !compute(operation, *dtype, &part.region, &operands, &mut made) {
                return Err(Overflow(*dtype));
            }
            if part.from.1 == part.to.1 && made.len() == self.len() {
                return Ok(made.into());
            }
            if bytes.is_empty() {
                bytes = vec![0; self.len()].into();
            }
            part.place(&made, bytes.to_mut(), self.dtype.size());
        }
        Ok(bytes)
    }
}

impl ComputedPart<'_> {
    /// Copies computed elements to their places.
    fn place(&self, made: &[u8], out: &mut [u8], size: usize) {
        let (Some(&count), Some(&from), Some(&to)) =
            (self.extent.last(), self.from.1.last(), self.to.1.last())
        else {
            out.copy_from_slice(made);
            return;
        };
        let (count, from, to) = (count as usize * size, from as usize * size, to as usize * size);
        let outer = self.extent.len() - 1;
        let mut at: Dims = vec![0; outer].into();
        loop {
            let place = |(first, strides): &(u64, Dims)| {
                let steps = at.iter().zip(strides).map(|(at, stride)| at * stride).sum::<u64>();
                (first + steps) as usize * size
            };
            let (source, target) = (&made[place(&self.from)..], &mut out[place(&self.to)..]);
            if from == size && to == size {
                target[..count].copy_from_slice(&source[..count]);
            } else {
                for n in 0..count / size {
                    target[n * to..n * to + size].copy_from_slice(&source[n * from..n * from + size]);
                }
            }
            let Some(axis) = (0..outer).rev().find(|&axis| at[axis] + 1 < self.extent[axis]) else { return };
            at[axis] += 1;
            at[axis + 1..].fill(0);
        }
    }
}

#[cfg(test)]
mod tests;
