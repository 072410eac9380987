//! A read plan: what a restore reads and where the bytes go. `stepwell-reshard` makes it, and
//! [`crate::load`] runs it.

use smallvec::SmallVec;

/// Reads of whole blocks, and the copies that they feed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadPlan {
    /// Runs in file order; within a file they do not overlap.
    pub runs: Vec<ReadRun>,
    /// Copies; a copy that spans runs is listed by each of them.
    pub copies: Vec<BoxCopy>,
}

/// One contiguous read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadRun {
    /// Ordinal of the file in the index.
    pub file: u32,
    /// First byte; a multiple of the block size.
    pub offset: u64,
    /// Bytes; whole blocks (the last block of a file may be short).
    pub len: u64,
    /// Numbers of the copies whose source bytes it holds, or a part of them.
    pub copies: Vec<u32>,
}

/// A number for each dimension of a copy. Dimensions that are contiguous on both sides are merged,
/// so one or two usually remain.
pub type CopyDims<T = u64> = SmallVec<[T; 2]>;

/// A box of elements, from a chunk in a file to a strided place in a destination. Strides and
/// offsets are in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoxCopy {
    /// Number of the leaf, for messages.
    pub leaf: u32,
    /// Ordinal of the file in the index.
    pub file: u32,
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
}
