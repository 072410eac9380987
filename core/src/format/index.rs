//! An index in memory: the same for every version of the format, and for foreign checkpoints (a
//! *virtual index*).

use smallvec::SmallVec;

use crate::compression::Compression;
use crate::dtype::Dtype;
use crate::region::{Dims, Region};
use crate::tree::Tree;

/// The leaves of an item, their logical tensors, and the places of their chunks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Index {
    /// Containers and leaves. Leaf numbers count `leaves`.
    pub tree: Tree,
    /// One record per leaf, in leaf order.
    pub leaves: Vec<LeafRecord>,
    /// The files that extents name by their ordinal.
    pub files: Vec<FileRecord>,
}

impl Index {
    /// True if a chunk is compressed.
    pub fn is_compressed(&self) -> bool {
        self.leaves.iter().any(LeafRecord::is_compressed)
    }

    /// Returns the leaf that holds the bytes of `leaf`, and its record: follows a tie. `None` if
    /// there is no such leaf, or if a tie names another tie.
    pub fn resolve(&self, leaf: u32) -> Option<(u32, &LeafRecord)> {
        let held = |leaf: u32| self.leaves.get(leaf as usize).map(|record| (leaf, record));
        match held(leaf)? {
            (_, LeafRecord::Alias { of }) => {
                held(*of).filter(|(_, record)| !matches!(record, LeafRecord::Alias { .. }))
            }
            found => Some(found),
        }
    }
}

/// The content of a leaf.
#[derive(Clone, Debug, PartialEq, Hash)]
pub enum LeafRecord {
    /// A logical tensor.
    Tensor(TensorRecord),
    /// An encoded [`crate::value::Value`].
    Object(Extent),
    /// A tie: the same value as another leaf, stored once.
    Alias {
        /// The leaf with the bytes. It is not an alias.
        of: u32,
    },
}

impl LeafRecord {
    /// True if one of its chunks is compressed.
    pub fn is_compressed(&self) -> bool {
        matches!(self, Self::Tensor(tensor) if tensor.chunks.iter().any(|chunk| chunk.codec == Codec::Planes))
    }

    /// Returns the extents of its bytes.
    pub fn extents(&self) -> impl Iterator<Item = &Extent> {
        let (chunks, object) = match self {
            Self::Tensor(tensor) => (tensor.chunks.as_slice(), None),
            Self::Object(extent) => (&[][..], Some(extent)),
            Self::Alias { .. } => (&[][..], None),
        };
        chunks.iter().map(|chunk| &chunk.extent).chain(object)
    }

    /// Returns the extents of its bytes, for changes.
    pub fn extents_mut(&mut self) -> impl Iterator<Item = &mut Extent> {
        let (chunks, object) = match self {
            Self::Tensor(tensor) => (tensor.chunks.as_mut_slice(), None),
            Self::Object(extent) => (&mut [][..], Some(extent)),
            Self::Alias { .. } => (&mut [][..], None),
        };
        chunks.iter_mut().map(|chunk| &mut chunk.extent).chain(object)
    }

    /// Returns the number of the leaf that it is an alias of, for changes.
    pub fn alias_of_mut(&mut self) -> Option<&mut u32> {
        match self {
            Self::Alias { of } => Some(of),
            Self::Tensor(_) | Self::Object(_) => None,
        }
    }
}

/// A logical tensor: dtype, true global shape, and the chunks that tile it exactly once.
#[derive(Clone, Debug, PartialEq, Hash)]
pub struct TensorRecord {
    /// Element type.
    pub dtype: Dtype,
    /// Global shape: no padding, no tensor-parallel cut, no stage number.
    pub shape: Dims,
    /// The chunks. Their regions tile `shape` exactly once.
    pub chunks: Chunks,
}

/// The chunks of a tensor. One is stored inline, because most tensors have only one. So an index of
/// many leaves needs no allocation for each.
pub type Chunks = SmallVec<[ChunkRecord; 1]>;

/// The region of a chunk.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ChunkRegion {
    /// A box. Its codec says in which order its elements are stored.
    Box(Region),
    /// A run of the row-major flattened tensor.
    Run {
        /// The number of its first element.
        start: u64,
        /// Number of elements.
        len: u64,
    },
}

/// How a chunk's bytes are encoded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Codec {
    /// The elements of its region, row-major.
    #[default]
    Raw,
    /// The elements of its box in another order or form. Only other libraries write such chunks.
    Elements(Box<ElementLayout>),
    /// [`Codec::Raw`], then byte planes that are compressed ([`super::planes`]).
    Planes,
    /// A part of the bytes that another chunk becomes. Only maps make such chunks, in memory.
    PlanesPart(Box<PlanesPart>),
}

/// A part of the bytes that a compressed chunk becomes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PlanesPart {
    /// Number of planes of that chunk.
    pub planes: u8,
    /// Bytes that it becomes.
    pub decoded: u64,
    /// The first of them that this part has.
    pub offset: u64,
    /// Number of bytes up to its last element.
    pub length: u64,
    /// The layout of its elements there.
    pub layout: ElementLayout,
}

/// The layout of a box of elements in another library's file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ElementLayout {
    /// Bytes between neighbours along each dimension. Zero repeats an element.
    pub strides: Dims,
    /// True if the most significant byte of each number is the first one.
    pub big_endian: bool,
    /// The numbers whose sign is stored the other way round.
    pub negated: NegatedParts,
}

/// The numbers of an element whose sign is stored the other way round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NegatedParts {
    /// None of them.
    #[default]
    None,
    /// The element, or both parts of a complex one.
    All,
    /// The imaginary part.
    Imaginary,
}

impl ElementLayout {
    /// Returns the bytes from the first element to the end of the last one. `None` if the strides
    /// do not have the box's dimensions, or if 64 bits cannot count the bytes.
    pub fn span(&self, extent: &[u64], itemsize: u64) -> Option<u64> {
        if self.strides.len() != extent.len() {
            return None;
        }
        if extent.contains(&0) {
            return Some(0);
        }
        extent.iter().zip(&self.strides).try_fold(itemsize, |span, (&n, &stride)| {
            (n - 1).checked_mul(stride).and_then(|reach| span.checked_add(reach))
        })
    }
}

/// A region of a logical tensor that is stored contiguously.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ChunkRecord {
    /// Its region.
    pub region: ChunkRegion,
    /// The place of its bytes.
    pub extent: Extent,
    /// How they are encoded.
    pub codec: Codec,
}

impl ChunkRecord {
    /// Returns the bytes that its elements have when they are decoded. `None` if 64 bits cannot
    /// count them.
    pub fn decoded_bytes(&self, itemsize: u64) -> Option<u64> {
        match (&self.codec, &self.region) {
            (Codec::Raw | Codec::Elements(_), _) => Some(self.extent.length),
            (Codec::PlanesPart(part), _) => Some(part.decoded),
            (Codec::Planes, ChunkRegion::Box(region)) => {
                region.volume().and_then(|elements| elements.checked_mul(itemsize))
            }
            (Codec::Planes, ChunkRegion::Run { len, .. }) => len.checked_mul(itemsize),
        }
    }
}

/// The place of some bytes, and their integrity check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// The file or reader.
    pub source: Source,
    /// First byte in the source.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
    /// The check that they are the written bytes.
    pub integrity: Integrity,
}

/// The source of an extent's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// A data file of stepwell, by its ordinal in [`Index::files`].
    Own(u32),
    /// A byte range of a foreign file, by its ordinal in [`Index::files`].
    Range(u32),
    /// A reader outside the engine, by its number.
    Pulled(u32),
}

impl Source {
    /// Returns the ordinal of its file.
    pub fn file(&self) -> Option<u32> {
        match self {
            Self::Own(file) | Self::Range(file) => Some(*file),
            Self::Pulled(_) => None,
        }
    }

    /// Returns the ordinal of its file, for changes.
    pub fn file_mut(&mut self) -> Option<&mut u32> {
        match self {
            Self::Own(file) | Self::Range(file) => Some(file),
            Self::Pulled(_) => None,
        }
    }
}

/// The integrity check of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Integrity {
    /// CRC-32C of its blocks in the data file.
    BlockCrc,
    /// CRC-32 of a zip member.
    Zip(u32),
    /// None.
    None,
}

/// A file with extents.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FileRecord {
    /// Path relative to the index's directory (`00000.data`, `g000/00017.data`).
    pub name: Box<str>,
    /// Length in bytes.
    pub length: u64,
    /// Random id in header and trailer (zero for foreign files).
    pub file_id: u128,
    /// CRC-32C of its trailer. It links manifest, index and file.
    pub trailer_crc: u32,
    /// Set if it is a part of another file. The manifest records it, the index file does not.
    pub within: Option<Within>,
}

impl FileRecord {
    /// Returns the name of the file on disk that contains it.
    pub fn stored_name(&self) -> &str {
        self.within.as_ref().map_or(&self.name, |within| &within.name)
    }

    /// The offset in the file on disk of byte `offset` of the data file: of the stream that holds
    /// it, if it is compressed.
    pub fn stored_offset(&self, offset: u64) -> u64 {
        match &self.within {
            None => offset,
            Some(Within { offset: begin, stream: None, .. }) => begin.saturating_add(offset),
            Some(Within { offset: begin, stream: Some(_), .. }) => *begin,
        }
    }

    /// The compressed stream that it is in another file, if it is one.
    pub fn stream(&self) -> Option<&CompressedStream> {
        self.within.as_ref().and_then(|within| within.stream.as_ref())
    }
}

/// The place of a data file that is a part of another file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Within {
    /// The path of that file, relative as [`FileRecord::name`].
    pub name: Box<str>,
    /// The offset of the data file in that file.
    pub offset: u64,
    /// The stream that it is there. `None`: its bytes are there as they are.
    pub stream: Option<CompressedStream>,
}

/// A file that is a compressed stream in a file of another library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CompressedStream {
    /// The method.
    pub compression: Compression,
    /// Bytes of the stream.
    pub length: u64,
    /// CRC-32 of the decoded bytes, if the other file has it.
    pub crc: Option<u32>,
}
