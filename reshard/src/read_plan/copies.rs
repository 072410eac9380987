//! Requests → box copies: which part of which chunk goes where.

use std::collections::HashMap;

use smallvec::{SmallVec, smallvec};

use stepwell_core::dtype::{Dtype, DtypeKind};
use stepwell_core::format::index::{
    ChunkRecord, ChunkRegion, Codec, ElementLayout, Index, NegatedParts, Source, TensorRecord,
};
use stepwell_core::format::planes;
use stepwell_core::read_plan::{BoxCopy, EncodedChunk};
use stepwell_core::region::Region;

use super::{Request, name, tensor};
use crate::overlap::{ChunkIndex, StoredBox};
use crate::tiling::{self, Fault};
use crate::{Error, Result};

/// The copies of requests, in their order.
pub(super) fn copies_of(index: &Index, requests: &[Request]) -> Result<Vec<BoxCopy>> {
    let mut copies = Vec::with_capacity(requests.len());
    let mut chunks_of: HashMap<u32, ChunkIndex> = HashMap::new();
    for request in requests {
        let (source, tensor) = tensor(index, request.leaf)?;
        let request_error = |what: String| Error::Request { leaf: name(index, request.leaf), what };
        if !request.region.fits(&tensor.shape) {
            return Err(request_error(format!(
                "the region at {:?} of extent {:?} does not lie in its shape {:?}",
                request.region.offset, request.region.extent, tensor.shape
            )));
        }
        if request.dst_strides.len() != tensor.shape.len() {
            return Err(request_error(format!(
                "{} strides for {} dimensions",
                request.dst_strides.len(),
                tensor.shape.len()
            )));
        }
        if request.region.is_empty() {
            continue;
        }
        let whole_chunk = match tensor.chunks.as_slice() {
            [ChunkRecord { region: ChunkRegion::Box(region), .. }] if region.fits(&tensor.shape) => {
                Some(StoredBox { chunk: 0, region: region.clone(), base: 0 })
            }
            _ => None,
        };
        let mut maker = Maker { index, request, tensor, copies: &mut copies };
        if let Some(stored) = whole_chunk {
            // One chunk, the common case of small leaves: no tree for it.
            if stored.region.intersect(&request.region).as_ref() != Some(&request.region) {
                let part = stored.region.intersect(&request.region).map(|part| (0, part));
                tiling::check_boxes(&request.region, part.into_iter().collect()).map_err(|fault| {
                    Error::Tiling { leaf: name(index, request.leaf), fault: fault.into() }
                })?;
            }
            maker.copy(&stored, &request.region)?;
            continue;
        }
        let chunks = match chunks_of.entry(source) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                let chunks = ChunkIndex::new(&tensor.shape, &tensor.chunks).map_err(|chunk| {
                    Error::Tiling { leaf: name(index, request.leaf), fault: Fault::Outside { chunk }.into() }
                })?;
                entry.insert(chunks)
            }
        };
        let overlaps = chunks.overlaps(&request.region);
        let parts =
            overlaps.iter().map(|overlap| (overlap.stored.chunk as usize, overlap.region.clone())).collect();
        tiling::check_boxes(&request.region, parts)
            .map_err(|fault| Error::Tiling { leaf: name(index, request.leaf), fault: fault.into() })?;
        for overlap in &overlaps {
            maker.copy(overlap.stored, &overlap.region)?;
        }
    }
    Ok(copies)
}

struct Maker<'a> {
    index: &'a Index,
    request: &'a Request,
    tensor: &'a TensorRecord,
    copies: &'a mut Vec<BoxCopy>,
}

impl Maker<'_> {
    /// Adds the copy of `region` (in the tensor's coordinates) out of a stored box that holds all
    /// of it.
    fn copy(&mut self, stored: &StoredBox, region: &Region) -> Result<()> {
        let chunk = &self.tensor.chunks[stored.chunk as usize];
        let itemsize = self.tensor.dtype.size() as u64;
        let file = self.file(stored.chunk, chunk)?;
        let layout = match &chunk.codec {
            Codec::Raw | Codec::Planes => None,
            Codec::Elements(layout) => Some(&**layout),
            Codec::PlanesPart(part) => Some(&part.layout),
        };
        let length = match (&chunk.region, layout) {
            (_, Some(layout)) if !has_signs(self.tensor.dtype) && layout.negated != NegatedParts::None => {
                let what = format!("{} has no sign that could be inverted", self.tensor.dtype);
                return Err(self.inconsistent(what));
            }
            (ChunkRegion::Box(region), Some(layout)) => layout.span(&region.extent, itemsize),
            (ChunkRegion::Run { .. }, Some(_)) => {
                let what = format!("chunk {} has a layout of elements, and no box", stored.chunk);
                return Err(self.inconsistent(what));
            }
            (ChunkRegion::Box(region), None) => {
                region.volume().and_then(|elements| elements.checked_mul(itemsize))
            }
            (ChunkRegion::Run { len, .. }, None) => len.checked_mul(itemsize),
        };
        let place = ElementsPlace::of(chunk, self.tensor);
        let place = place.filter(|place| length == Some(place.length));
        let Some(ElementsPlace { encoded, offset, .. }) = place else {
            let found = length.map_or_else(|| "more than 64 bits can count".to_owned(), |n| n.to_string());
            let (number, stored) = (stored.chunk, chunk.extent.length);
            return Err(
                self.inconsistent(format!("chunk {number} has {stored} bytes, but its region has {found}"))
            );
        };
        // From here on, the source side cannot overflow: the box is inside the chunk, and the
        // chunk's bytes fit.
        let ndim = region.ndim();
        let (mut dims, mut row_major) = (SmallVec::with_capacity(ndim), itemsize);
        let mut src_offset = offset + stored.base * itemsize;
        let mut dst_offset = i128::from(self.request.dst_offset);
        for d in (0..ndim).rev() {
            let stride = layout.map_or(row_major, |layout| layout.strides[d]);
            src_offset += (region.offset[d] - stored.region.offset[d]) * stride;
            let dst_stride = self.request.dst_strides[d];
            dst_offset +=
                i128::from(region.offset[d] - self.request.region.offset[d]) * i128::from(dst_stride);
            dims.push(Dim { extent: region.extent[d], src: stride, dst: dst_stride });
            row_major = row_major.wrapping_mul(stored.region.extent[d]);
        }
        let backwards = |dim: &Dim| (i128::from(dim.extent - 1) * i128::from(dim.dst)).min(0);
        let first = dst_offset + dims.iter().map(backwards).sum::<i128>();
        let Some(dst_offset) = u64::try_from(dst_offset).ok().filter(|_| first >= 0) else {
            return Err(Error::Request {
                leaf: name(self.index, self.request.leaf),
                what: format!("its strides lead to byte {first} of the destination"),
            });
        };
        let dims = merge(dims);
        let whole = BoxCopy {
            leaf: self.request.leaf,
            file,
            encoded,
            src_offset,
            src_strides: dims.iter().map(|dim| dim.src).collect(),
            extent: dims.iter().map(|dim| dim.extent).collect(),
            itemsize: itemsize as u32,
            dst: self.request.dst,
            dst_offset,
            dst_strides: dims.iter().map(|dim| dim.dst).collect(),
            inverted: 0,
        };
        match layout {
            None => self.copies.push(whole),
            Some(layout) => {
                for run in byte_runs(self.tensor.dtype, layout) {
                    self.copies.push(run.of(&whole));
                }
            }
        }
        Ok(())
    }

    /// Returns the file of a chunk, after a check that the chunk is inside it.
    fn file(&self, number: u32, chunk: &ChunkRecord) -> Result<u32> {
        let file = match chunk.extent.source {
            Source::Own(file) | Source::Range(file) => file,
            Source::Pulled(reader) => {
                let what = format!("chunk {number} is supplied by reader {reader}, not by a file");
                return Err(Error::Request { leaf: name(self.index, self.request.leaf), what });
            }
        };
        let record = self.index.files.get(file as usize).ok_or_else(|| {
            self.inconsistent(format!("chunk {number} lies in file {file}, which is not listed"))
        })?;
        let end = chunk.extent.offset.checked_add(chunk.extent.length);
        if end.is_none_or(|end| end > record.length) {
            let (offset, length) = (chunk.extent.offset, chunk.extent.length);
            return Err(self.inconsistent(format!(
                "chunk {number} is {length} bytes at {offset} of {}, which has {} bytes",
                record.name, record.length
            )));
        }
        Ok(file)
    }

    fn inconsistent(&self, what: String) -> Error {
        Error::Index { leaf: name(self.index, self.request.leaf), what }
    }
}

/// The bytes that a chunk's elements are in: in a file, or decoded.
struct ElementsPlace {
    encoded: Option<EncodedChunk>,
    offset: u64,
    length: u64,
}

impl ElementsPlace {
    /// Returns `None` if the numbers contradict each other.
    fn of(chunk: &ChunkRecord, tensor: &TensorRecord) -> Option<Self> {
        let extent = &chunk.extent;
        let (offset, length, planes) = match &chunk.codec {
            Codec::Raw | Codec::Elements(_) => {
                return Some(Self { encoded: None, offset: extent.offset, length: extent.length });
            }
            Codec::Planes => {
                (0, chunk.decoded_bytes(tensor.dtype.size() as u64)?, planes::count(tensor.dtype) as u8)
            }
            Codec::PlanesPart(part) => (part.offset, part.length, part.planes),
        };
        let decoded = chunk.decoded_bytes(tensor.dtype.size() as u64)?;
        offset.checked_add(length).filter(|&end| end <= decoded)?;
        let encoded = EncodedChunk { offset: extent.offset, length: extent.length, decoded, planes };
        Some(Self { encoded: Some(encoded), offset, length })
    }
}

/// Bytes of each element that are copied alike.
#[derive(Clone, Copy)]
struct ByteRun {
    /// The first byte in the file, and in the destination, of those of an element.
    src: u64,
    dst: u64,
    /// Number of bytes.
    len: u64,
    /// True if they are written in the opposite order: `dst` is then the last one.
    reversed: bool,
    /// Bits that are inverted in every byte.
    inverted: u8,
}

impl ByteRun {
    /// The copy of these bytes, out of the copy of whole elements.
    fn of(self, whole: &BoxCopy) -> BoxCopy {
        let mut copy = whole.clone();
        copy.src_offset += self.src;
        copy.dst_offset += self.dst;
        copy.inverted = self.inverted;
        copy.itemsize = self.len as u32;
        if self.reversed {
            copy.itemsize = 1;
            copy.extent.push(self.len);
            copy.src_strides.push(1);
            copy.dst_strides.push(-1);
        }
        copy
    }
}

/// True if the highest bit of a number is its sign and nothing else. Smaller floats have other
/// meanings for it.
fn has_signs(dtype: Dtype) -> bool {
    matches!(dtype.kind(), DtypeKind::Float | DtypeKind::Complex) && dtype.size() > 1
}

/// The bytes of an element by how they are copied. Its numbers have their sign in the last byte of
/// the destination, which is little-endian.
fn byte_runs(dtype: Dtype, layout: &ElementLayout) -> SmallVec<[ByteRun; 4]> {
    let itemsize = dtype.size() as u64;
    let numbers = if dtype.kind() == DtypeKind::Complex { 2 } else { 1 };
    let bytes = itemsize / numbers;
    let swapped = layout.big_endian && bytes > 1;
    if !swapped && layout.negated == NegatedParts::None {
        return smallvec![ByteRun { src: 0, dst: 0, len: itemsize, reversed: false, inverted: 0 }];
    }
    let mut runs = SmallVec::new();
    for number in 0..numbers {
        let at = number * bytes;
        let negated = match layout.negated {
            NegatedParts::None => false,
            NegatedParts::All => true,
            NegatedParts::Imaginary => number == 1,
        };
        // The sign is the highest bit of the most significant byte.
        let sign = u64::from(negated);
        let plain = bytes - sign;
        if plain > 0 {
            runs.push(if swapped {
                ByteRun { src: at + sign, dst: at + plain - 1, len: plain, reversed: true, inverted: 0 }
            } else {
                ByteRun { src: at, dst: at, len: plain, reversed: false, inverted: 0 }
            });
        }
        if negated {
            let src = if swapped { at } else { at + plain };
            runs.push(ByteRun { src, dst: at + plain, len: 1, reversed: false, inverted: 0x80 });
        }
    }
    runs
}

struct Dim {
    extent: u64,
    src: u64,
    dst: i64,
}

/// Dimensions (innermost first) made few (outermost first): those of one element go, and two that
/// step alike on both sides become one.
fn merge(dims: SmallVec<[Dim; 4]>) -> SmallVec<[Dim; 4]> {
    let mut merged: SmallVec<[Dim; 4]> = SmallVec::with_capacity(dims.len());
    for dim in dims.into_iter().filter(|dim| dim.extent != 1) {
        match merged.last_mut() {
            Some(inner)
                if inner.src.checked_mul(inner.extent) == Some(dim.src)
                    && i128::from(inner.dst) * i128::from(inner.extent) == i128::from(dim.dst) =>
            {
                inner.extent *= dim.extent;
            }
            _ => merged.push(dim),
        }
    }
    merged.reverse();
    merged
}
