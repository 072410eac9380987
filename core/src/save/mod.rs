//! The save pipeline: leaves in, durable data files out.
//!
//! ```text
//! prepare ─▶ Capture::run  (the caller's thread and helpers: leaves ─provider─▶ slots)
//!        └─▶ Flush::run    (another thread, at the same time: slots ─▶ queue ─▶ file, checksums, footer, fsync)
//! ```
//!
//! The manager calls [`prepare`], which makes all checks, places every chunk, and cuts the file
//! into *windows* of one slot each. The capture fills one slot per window and sends it to the
//! flush. The flush submits it at once. It computes the checksum after the capture, or earlier if
//! the capture waits for a slot. Invariants:
//!
//! * A checksum describes the written bytes of the slot, even if the source changes.
//! * A file's content depends only on the items and the options, not on slots, threads, engine or
//!   timing.
//! * A half that ends early cancels the other one. Slots return to the pool as their writes
//!   complete. Every wait fails after the stall timeout without progress.
//! * A failed write or fsync is never repeated. The save fails.

mod capture;
mod flush;
mod link;
mod plan;
mod progress;
mod schedule;
#[cfg(test)]
mod tests;
mod torn;
mod windows;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::dtype::Dtype;
use crate::format::index::{ChunkRegion, Index};
use crate::provider::{CaptureTiming, StateProvider};
use crate::region::Region;
use crate::tree::Tree;
use crate::value::Value;

pub use capture::Capture;
pub use flush::Flush;
pub use plan::prepare;
pub use progress::{Progress, SaveStats};

/// Chunks of at least this many bytes start on a page of their own, so that direct reads touch
/// nothing else. The gap before such a chunk is less than a page, at most a sixteenth of it.
/// Smaller chunks are packed.
pub const PAGE_ALIGNED_FROM: u64 = 64 << 10;

/// Alignment of smaller chunks, in bytes: a cache line, and a multiple of every item size.
pub const SMALL_ALIGNMENT: u64 = 64;

/// One item. Its leaves go into one data file.
pub struct ItemPlan {
    /// Its directory below the step's (`i0`).
    pub dir: String,
    /// Its part of the state, from the state's root on.
    pub tree: Tree,
    /// One per leaf of the tree, in leaf order.
    pub leaves: Vec<LeafPlan>,
}

/// The plan of a leaf.
pub enum LeafPlan {
    /// A tensor, or this rank's part of one.
    Tensor {
        /// Element type.
        dtype: Dtype,
        /// Global shape.
        shape: Vec<u64>,
        /// The chunks that this rank stores, in file order.
        chunks: Vec<ChunkPlan>,
        /// The source of the bytes. Dropped after the capture.
        provider: Arc<dyn StateProvider>,
    },
    /// A plain value.
    Object(Value),
    /// A plain value that another rank writes. The index of this rank's file lists the leaf without
    /// bytes.
    Elsewhere,
    /// A tie to another leaf of the item, which is not an alias.
    Alias {
        /// Number of that leaf.
        of: u32,
    },
}

impl LeafPlan {
    /// Returns how much of it is captured before the caller continues.
    fn timing(&self) -> CaptureTiming {
        match self {
            Self::Tensor { provider, .. } => provider.timing(),
            Self::Object(_) | Self::Elsewhere | Self::Alias { .. } => CaptureTiming::Copied,
        }
    }
}

/// A chunk of a tensor.
pub struct ChunkPlan {
    /// Its region in the logical tensor.
    pub region: ChunkRegion,
    /// The same elements in the provider's array, in the same row-major order.
    pub local: Region,
    /// Its band. Chunks of lower bands come first in the file, across all leaves.
    pub band: u32,
}

/// The options of one save.
#[derive(Clone, Debug)]
pub struct SaveOptions {
    /// Bytes per checksummed block. Slots are whole blocks.
    pub block_bytes: u64,
    /// This process's rank, which names the data file.
    pub rank: u32,
    /// The number of this rank's node if the ranks of a node share one file per item.
    pub node: Option<u32>,
    /// A random id per item. Tests inject fixed ids to get the same bytes for the same state.
    pub file_ids: Vec<u128>,
    /// The number of capturing threads, including the caller's.
    pub capture_threads: usize,
    /// The longest time without progress in any wait.
    pub stall_timeout: Duration,
    /// The number of writes in flight.
    pub queue_depth: usize,
    /// True if the capture drops the providers before it returns. Otherwise the flush drops them
    /// soon after: 20 000 of them take milliseconds.
    pub drops_providers: bool,
    /// Set from any thread to stop a running capture after its current copy. It has no effect on a
    /// complete capture.
    pub cancel: Option<Arc<AtomicBool>>,
}

impl Default for SaveOptions {
    fn default() -> Self {
        Self {
            block_bytes: crate::format::block::DEFAULT_BLOCK_BYTES,
            rank: 0,
            node: None,
            file_ids: Vec::new(),
            // A few threads saturate the memory bus.
            capture_threads: crate::sys::cores().min(8),
            stall_timeout: Duration::from_secs(120),
            queue_depth: 4,
            drops_providers: false,
            cancel: None,
        }
    }
}

/// A data file that is complete and durable. The commit syncs its directory entry.
#[derive(Debug)]
pub struct WrittenItem {
    /// The item's directory.
    pub dir: String,
    /// The item's index. `files[0]` is the data file.
    pub index: Index,
    /// The length of the data file in bytes.
    pub length: u64,
    /// Its id.
    pub file_id: u128,
    /// CRC-32C of its trailer.
    pub trailer_crc: u32,
    /// Bytes of tensors in it.
    pub tensor_bytes: u64,
}
