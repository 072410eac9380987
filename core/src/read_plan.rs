//! The copies of a restore: which bytes of which file go where. `stepwell-reshard` makes them, and
//! [`crate::load`] reads what they need.

use smallvec::SmallVec;

/// A number for each dimension of a copy. Dimensions that are contiguous on both sides are merged,
/// so one or two usually remain.
pub type CopyDims<T = u64> = SmallVec<[T; 2]>;

/// A compressed chunk in a data file ([`crate::format::planes`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EncodedChunk {
    /// Offset in the file of its first byte.
    pub offset: u64,
    /// Stored bytes.
    pub length: u64,
    /// Bytes that they become.
    pub decoded: u64,
    /// Number of planes.
    pub planes: u8,
}

/// A box of elements, from a chunk in a file to a strided place in a destination. Strides and
/// offsets are in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoxCopy {
    /// Number of the leaf, for messages.
    pub leaf: u32,
    /// Ordinal of the file in the index.
    pub file: u32,
    /// The compressed chunk that holds the box. Source offsets count its decoded bytes then.
    pub encoded: Option<EncodedChunk>,
    /// Offset in the file of the box's first element.
    pub src_offset: u64,
    /// Distance in the file between neighbours along each dimension.
    pub src_strides: CopyDims,
    /// Elements along each dimension; none is zero.
    pub extent: CopyDims,
    /// Bytes per element.
    pub itemsize: u32,
    /// Number of the destination.
    pub dst: u32,
    /// Offset in the destination of the box's first element.
    pub dst_offset: u64,
    /// Distance in the destination between neighbours along each dimension.
    pub dst_strides: CopyDims<i64>,
    /// Bits that are inverted in every byte: `0x80` where a sign is stored the other way round.
    /// Only copies to host memory may invert bits.
    pub inverted: u8,
}
