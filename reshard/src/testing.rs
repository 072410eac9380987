//! Stored tensors for tests: an index and the bytes of its files, and reads of them element by
//! element.
#![expect(
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "the numbers of these tests are small"
)]

use proptest::prelude::*;
use stepwell_core::dtype::Dtype;
use stepwell_core::format::index::{
    ChunkRecord, ChunkRegion, Codec, ElementLayout, Extent, FileRecord, Index, Integrity, LeafRecord,
    NegatedParts, Source, TensorRecord,
};
use stepwell_core::leaf_path::Component;
use stepwell_core::read_plan::BoxCopy;
use stepwell_core::region::{Region, row_major_strides, volume};
use stepwell_core::tree::ContainerKind;

use crate::subchunk;

/// An index and the bytes of its files, built leaf by leaf.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stored {
    pub(crate) index: Index,
    pub(crate) files: Vec<Vec<u8>>,
    /// Every tensor's bytes, row-major.
    pub(crate) tensors: Vec<Vec<u8>>,
}

impl Stored {
    pub(crate) fn new(files: usize) -> Self {
        let mut stored = Self { files: vec![vec![0xEE; 8]; files], ..Self::default() };
        stored.index.tree.push_container(None, None, ContainerKind::Dict);
        stored
    }

    /// Stores the boxes of the last tensor again, as another library may lay them out. Dimensions
    /// are in the opposite order, and `gap` bytes are between elements.
    pub(crate) fn lay_out(&mut self, gap: u64, big_endian: bool, negated: NegatedParts) {
        let Some(LeafRecord::Tensor(tensor)) = self.index.leaves.last_mut() else { panic!("a tensor") };
        let itemsize = tensor.dtype.size();
        let numbers = if tensor.dtype == Dtype::Complex64 { 2 } else { 1 };
        let has_sign = |number: usize| match negated {
            NegatedParts::None => false,
            NegatedParts::All => true,
            NegatedParts::Imaginary => number == 1,
        };
        for chunk in &mut tensor.chunks {
            let ChunkRegion::Box(region) = &chunk.region else { continue };
            let mut stride = itemsize as u64 + gap;
            let mut layout = ElementLayout { strides: region.extent.clone(), big_endian, negated };
            for (stored, n) in layout.strides.iter_mut().zip(&region.extent) {
                (*stored, stride) = (stride, stride * n.max(&1));
            }
            let file = &mut self.files[chunk.extent.source.file().unwrap() as usize];
            let offset = file.len();
            chunk.extent.offset = offset as u64;
            chunk.extent.length = layout.span(&region.extent, itemsize as u64).unwrap();
            file.resize(offset + chunk.extent.length as usize, 0xEE);
            let data = self.tensors.last().unwrap();
            let mut element = 0;
            for_each_element(&tensor.shape, region, |source| {
                let (mut rest, mut at) = (element, offset);
                for d in (0..region.ndim()).rev() {
                    at += (rest % region.extent[d] * layout.strides[d]) as usize;
                    rest /= region.extent[d];
                }
                let mut bytes = data[source * itemsize..(source + 1) * itemsize].to_vec();
                for (number, bytes) in bytes.chunks_mut(itemsize / numbers).enumerate() {
                    *bytes.last_mut().unwrap() ^= if has_sign(number) { 0x80 } else { 0 };
                    if big_endian {
                        bytes.reverse();
                    }
                }
                file[at..at + itemsize].copy_from_slice(&bytes);
                element += 1;
            });
            chunk.codec = Codec::Elements(Box::new(layout));
        }
    }

    /// Adds a tensor whose chunk `i` goes to file `i % files`, at the next multiple of `align`.
    pub(crate) fn push(
        &mut self,
        dtype: Dtype,
        shape: &[u64],
        chunks: Vec<ChunkRegion>,
        align: usize,
    ) -> u32 {
        let itemsize = dtype.size();
        let leaf = self.tensors.len();
        let bytes = volume(shape).unwrap() as usize * itemsize;
        let data: Vec<u8> = (0..bytes).map(|i| (i * 131 + leaf * 17 + i / 251) as u8).collect();
        let mut records = Vec::new();
        for (i, region) in chunks.into_iter().enumerate() {
            let number = i % self.files.len();
            let file = &mut self.files[number];
            file.resize(file.len().next_multiple_of(align), 0xEE);
            let offset = file.len();
            match &region {
                ChunkRegion::Box(region) => {
                    for_each_element(shape, region, |e| file.extend(&data[e * itemsize..(e + 1) * itemsize]));
                }
                ChunkRegion::Run { start, len } => {
                    let (start, end) = (*start as usize, (start + len) as usize);
                    file.extend(&data[start * itemsize..end * itemsize]);
                }
            }
            let length = (file.len() - offset) as u64;
            let extent = Extent {
                source: Source::Own(number as u32),
                offset: offset as u64,
                length,
                integrity: Integrity::BlockCrc,
            };
            records.push(ChunkRecord { region, extent, codec: Codec::Raw });
        }
        let record = TensorRecord { dtype, shape: shape.into(), chunks: records.into() };
        self.index.leaves.push(LeafRecord::Tensor(record));
        self.tensors.push(data);
        self.index.tree.push_leaf(Some(0), Some(Component::Key(format!("t{leaf}").into())))
    }

    pub(crate) fn finish(mut self) -> Self {
        self.index.files = self
            .files
            .iter()
            .enumerate()
            .map(|(i, file)| FileRecord {
                name: format!("{i:05}.data").into(),
                length: file.len() as u64,
                file_id: 0,
                trailer_crc: 0,
                within: None,
            })
            .collect();
        self
    }

    pub(crate) fn tensor(&self, leaf: u32) -> &TensorRecord {
        let LeafRecord::Tensor(tensor) = &self.index.leaves[leaf as usize] else { panic!("a tensor") };
        tensor
    }
}

/// Calls `f` with the row-major number of every element of a region, in row-major order.
pub(crate) fn for_each_element(shape: &[u64], region: &Region, mut f: impl FnMut(usize)) {
    let strides = row_major_strides(shape);
    for n in 0..region.volume().unwrap() {
        let (mut rest, mut element) = (n, 0);
        for d in (0..shape.len()).rev() {
            element += (region.offset[d] + rest % region.extent[d]) * strides[d];
            rest /= region.extent[d];
        }
        f(element as usize);
    }
}

/// The bytes of every element of a copy: where they are, where they go.
pub(crate) fn for_each_copied(copy: &BoxCopy, mut f: impl FnMut(u64, usize)) {
    for n in 0..copy.extent.iter().product::<u64>() {
        let (mut rest, mut src, mut dst) = (n, copy.src_offset, copy.dst_offset as i64);
        for d in (0..copy.extent.len()).rev() {
            let i = rest % copy.extent[d];
            rest /= copy.extent[d];
            src += i * copy.src_strides[d];
            dst += i as i64 * copy.dst_strides[d];
        }
        for byte in 0..u64::from(copy.itemsize) {
            f(src + byte, dst as usize + byte as usize);
        }
    }
}

/// Carries copies out, byte by byte.
pub(crate) fn execute(stored: &Stored, copies: &[BoxCopy], destinations: &mut [Vec<u8>]) {
    for copy in copies {
        let bytes = &stored.files[copy.file as usize];
        for_each_copied(copy, |src, dst| {
            destinations[copy.dst as usize][dst] = bytes[src as usize] ^ copy.inverted;
        });
    }
}

/// A tiling of `shape` in chunks of one kind or another.
pub(crate) fn chunks(shape: Vec<u64>) -> impl Strategy<Value = (Vec<u64>, Vec<ChunkRegion>)> {
    let n = volume(&shape).unwrap();
    let whole = Region::whole(&shape);
    let grid = (1_u64..64).prop_map({
        let whole = whole.clone();
        move |target_bytes| {
            let options = subchunk::SubchunkOptions {
                target_bytes,
                min_row_bytes: 4,
                ..subchunk::SubchunkOptions::HOST
            };
            subchunk::cut(&whole, &whole.extent, 1, &options).map(ChunkRegion::Box).collect()
        }
    });
    let runs = prop::collection::btree_set(0..=n, 0..5).prop_map(move |mut borders| {
        borders.extend([0, n]);
        let borders: Vec<u64> = borders.into_iter().collect();
        borders.windows(2).map(|w| ChunkRegion::Run { start: w[0], len: w[1] - w[0] }).collect()
    });
    let one = Just(vec![ChunkRegion::Box(whole)]);
    (Just(shape), prop_oneof![grid, runs, one])
}

pub(crate) fn checkpoint() -> impl Strategy<Value = Stored> {
    let dtype = prop_oneof![Just(Dtype::Int8), Just(Dtype::Bfloat16), Just(Dtype::Complex64)];
    let shape = prop::collection::vec(prop_oneof![9 => 1_u64..12, 1 => Just(0)], 0..4);
    let align = prop_oneof![Just(1_usize), Just(8), Just(64)];
    let negated = prop::sample::select(vec![NegatedParts::None, NegatedParts::All, NegatedParts::Imaginary]);
    let layout = prop::option::of((0_u64..3, any::<bool>(), negated));
    let tensor = (dtype, shape.prop_flat_map(chunks), align, layout);
    (1_usize..4, prop::collection::vec(tensor, 1..6)).prop_map(|(files, tensors)| {
        let mut stored = Stored::new(files);
        for (dtype, (shape, chunks), align, layout) in tensors {
            stored.push(dtype, &shape, chunks, align);
            if let Some((gap, big_endian, negated)) = layout {
                let negated = if dtype == Dtype::Int8 { NegatedParts::None } else { negated };
                stored.lay_out(gap, big_endian, negated);
            }
        }
        stored.finish()
    })
}
