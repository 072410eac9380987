//! Requests → box copies: which part of which chunk goes where.

use std::collections::HashMap;

use smallvec::SmallVec;

use stepwell_core::format::index::{ChunkRecord, ChunkRegion, Codec, Index, Source, TensorRecord};
use stepwell_core::read_plan::BoxCopy;
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
        let elements = match &chunk.region {
            ChunkRegion::Box(region) => region.volume(),
            ChunkRegion::Run { len, .. } => Some(*len),
        };
        let length = elements.and_then(|n| n.checked_mul(itemsize));
        if length != Some(chunk.extent.length) {
            let found = length.map_or_else(|| "more than 64 bits can count".to_owned(), |n| n.to_string());
            let (number, stored) = (stored.chunk, chunk.extent.length);
            return Err(
                self.inconsistent(format!("chunk {number} has {stored} bytes, but its region has {found}"))
            );
        }
        // From here on, the source side cannot overflow: the box is inside the chunk, and the
        // chunk's bytes fit.
        let ndim = region.ndim();
        let (mut dims, mut stride) = (SmallVec::with_capacity(ndim), itemsize);
        let mut src_offset = chunk.extent.offset + stored.base * itemsize;
        let mut dst_offset = i128::from(self.request.dst_offset);
        for d in (0..ndim).rev() {
            src_offset += (region.offset[d] - stored.region.offset[d]) * stride;
            let dst_stride = self.request.dst_strides[d];
            dst_offset +=
                i128::from(region.offset[d] - self.request.region.offset[d]) * i128::from(dst_stride);
            dims.push(Dim { extent: region.extent[d], src: stride, dst: dst_stride });
            stride *= stored.region.extent[d];
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
        self.copies.push(BoxCopy {
            leaf: self.request.leaf,
            file,
            src_offset,
            src_strides: dims.iter().map(|dim| dim.src).collect(),
            extent: dims.iter().map(|dim| dim.extent).collect(),
            itemsize: itemsize as u32,
            dst: self.request.dst,
            dst_offset,
            dst_strides: dims.iter().map(|dim| dim.dst).collect(),
        });
        Ok(())
    }

    /// Returns the file of a chunk, after a check that the chunk is inside it.
    fn file(&self, number: u32, chunk: &ChunkRecord) -> Result<u32> {
        let Codec::Raw = chunk.codec;
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
