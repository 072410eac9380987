//! The result of the walk over a state: its containers and leaves.

use pyo3::Py;

use stepwell_core::dtype::Dtype;
use stepwell_core::region::Region;
use stepwell_core::tree::Tree;
use stepwell_core::value::Value;
use stepwell_manager::state::Holders;
use stepwell_reshard::matching::PerGlob;

use crate::convert::StoredTensor;
use crate::ingest::HeldBuffer;

/// A leaf of a flattened state.
pub enum Leaf {
    /// An array whose elements are in the held buffer. If `immutable`, they never change.
    Array { dtype: Dtype, buffer: HeldBuffer, immutable: bool },
    /// An array in several buffers, each with one region of it.
    Sharded { dtype: Dtype, shape: Vec<u64>, shards: Vec<Shard> },
    /// A tensor of an open checkpoint.
    Stored { dtype: Dtype, shape: Vec<u64>, tensor: Py<StoredTensor> },
    /// A typed value.
    Object(Value),
    /// A tie to an earlier leaf with the same memory, shape, strides and dtype.
    Alias(u32),
}

/// A region of an array, and the buffer with its elements.
pub struct Shard {
    /// Its region in the whole array.
    pub region: Region,
    /// The buffer with its elements.
    pub buffer: HeldBuffer,
    /// True if its elements never change, or only after the capture.
    pub immutable: bool,
    /// The processes that hold the same region.
    pub holders: Holders,
}

/// A flattened state.
#[derive(Default)]
pub struct Flat {
    /// Containers and leaves.
    pub tree: Tree,
    /// The leaves, in the tree's order.
    pub leaves: Vec<Leaf>,
    /// The numbers of the leaves that may differ between ranks, in order. The lowest rank's values
    /// are stored.
    pub drifting: Vec<u32>,
    /// Leaves that could not be stored and were left out: path and reason.
    pub unsupported: Vec<(String, String)>,
    /// The stored dtypes of leaves that are cast.
    pub cast: PerGlob<Option<Dtype>>,
}
