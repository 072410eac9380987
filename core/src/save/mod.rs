//! The save pipeline: leaves in, durable data files out.
//!
//! ```text
//! prepare ─▶ Capture::run  (the caller's thread and helpers: leaves ─provider─▶ slots)
//!        └─▶ Flush::run    (another thread, at the same time: slots ─▶ queue ─▶ file, checksums, footer, fsync)
//! ```
//!
//! The manager calls [`prepare`], which makes every check, gives every chunk its place, and cuts
//! the file into *windows* of one slot each. Capture fills a slot per window and hands it over;
//! flush submits it at once and checksums it when that costs nobody anything: behind the capture
//! while slots are free, at once where a slot is waited for. Invariants:
//!
//! * A checksum describes the bytes of the slot that was written, whatever happened to the source.
//! * A file's content depends on the items and the options alone: not on slots, threads, engine or
//!   timing.
//! * Whichever side ends early cancels the other; slots come back as their writes complete; nothing
//!   waits without a deadline on lack of progress.
//! * A write or fsync that failed is never tried again: the attempt is dead.

mod capture;
mod due;
mod flush;
mod link;
mod plan;
mod progress;
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

/// From this many bytes on a chunk starts on a page of its own, so that direct reads of it touch
/// nothing else. The gap before it is less than a page, so at this size the cost is at most a
/// sixteenth, and smaller chunks are packed.
pub const PAGE_ALIGNED_FROM: u64 = 64 << 10;

/// Alignment of the chunks below that: a cache line, and a multiple of every element.
pub const SMALL_ALIGNMENT: u64 = 64;

/// One item: what goes into one data file.
pub struct ItemPlan {
    /// Its directory below the step's (`i0`).
    pub dir: String,
    /// Its branches of the state, rooted at the state's root.
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
    /// A plain value that another rank writes: the leaf is in the index of this one's file, and no
    /// bytes of it are.
    Elsewhere,
    /// A tie to another leaf of the item, which is no alias itself.
    Alias {
        /// Number of that leaf.
        of: u32,
    },
}

impl LeafPlan {
    /// How soon its bytes are needed.
    fn timing(&self) -> CaptureTiming {
        match self {
            Self::Tensor { provider, .. } => provider.timing(),
            Self::Object(_) | Self::Elsewhere | Self::Alias { .. } => CaptureTiming::Copied,
        }
    }
}

/// A chunk: where it is in the tensor, and where in the provider's array.
pub struct ChunkPlan {
    /// In the logical tensor.
    pub region: ChunkRegion,
    /// In the provider's array; as many elements, in the same row-major order.
    pub local: Region,
    /// Chunks of lower bands stand first in the file, whatever leaves they are of.
    pub band: u32,
}

/// How a save is made.
#[derive(Clone, Debug)]
pub struct SaveOptions {
    /// Bytes per checksummed block. Slots are whole blocks.
    pub block_bytes: u64,
    /// This process's rank: names the data file.
    pub rank: u32,
    /// The number of its node, where the ranks of a node write into one file for each item, side by
    /// side.
    pub node: Option<u32>,
    /// A random id per item. Injected, so that the same state gives the same bytes where a test
    /// wants that.
    pub file_ids: Vec<u128>,
    /// Threads that capture, the caller's included.
    pub capture_threads: usize,
    /// How long every wait may see no progress.
    pub stall_timeout: Duration,
    /// Writes in flight.
    pub queue_depth: usize,
    /// True if the providers are dropped before the call that captures the last of them returns.
    /// Otherwise the flush drops them soon after: 20 000 of them take milliseconds.
    pub drops_providers: bool,
    /// Set from any thread to end a capture that runs: it stops after the copy it is at. Once
    /// everything is captured it means nothing.
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

/// A data file that is complete and durable (its directory entry is not: that is the commit's
/// part).
#[derive(Debug)]
pub struct WrittenItem {
    /// The item's directory.
    pub dir: String,
    /// Everything that the item holds; `files[0]` is the data file.
    pub index: Index,
    /// Bytes of the data file.
    pub length: u64,
    /// Its id.
    pub file_id: u128,
    /// CRC-32C of its trailer.
    pub trailer_crc: u32,
    /// Bytes of tensors in it.
    pub tensor_bytes: u64,
}
