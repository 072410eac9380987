//! All limits of the format. Each is checked on write and on read, before memory is allocated for
//! the data.

/// Leaves of one item.
pub const MAX_LEAVES: u64 = 16_000_000;
/// Chunks into which one process cuts its part of an item. It limits plans only. The chunks of a
/// file are limited by its bytes.
pub const MAX_CHUNKS: u64 = 32_000_000;
/// Nodes (containers and leaves) of one item.
pub const MAX_NODES: u64 = 32_000_000;
/// Dimensions of a tensor. Numpy's own limit is 64.
pub const MAX_DIMS: u64 = 64;
/// Depth of nested containers, and of nested objects.
pub const MAX_DEPTH: u64 = 128;
/// Bytes of one key or type name.
pub const MAX_NAME_BYTES: u64 = 64 << 10;
/// Bytes of one encoded object.
pub const MAX_OBJECT_BYTES: u64 = 1 << 30;
/// Bytes of one page of an index or of a footer.
pub const MAX_PAGE_BYTES: u64 = 64 << 20;
/// Pages of one footer or index.
pub const MAX_PAGES: u64 = 1 << 20;
/// Bytes of a manifest.
pub const MAX_MANIFEST_BYTES: u64 = 64 << 20;
/// Metrics of a manifest.
pub const MAX_METRICS: u64 = 64 << 10;
/// Bytes of a user's metadata, of a step or of a root.
pub const MAX_METADATA_BYTES: u64 = 4 << 20;
/// Bytes of one trace: the digests of one rank's leaves at one step.
pub const MAX_TRACE_BYTES: u64 = 256 << 20;
/// Bytes of an entry of the ledger of a root in an object store.
pub const MAX_LEDGER_ENTRY_BYTES: u64 = 16 << 20;
/// Entries of a manifest's file list.
pub const MAX_FILES: u64 = 4_000_000;
/// Bytes of a data file.
pub const MAX_FILE_BYTES: u64 = 1 << 50;
/// Smallest and largest block size that a header may name, in bytes.
pub const BLOCK_BYTES: std::ops::RangeInclusive<u64> = 4096..=(64 << 20);
/// Depth of nested lists and objects in a user's metadata. The JSON parser's own limit is 128, and
/// the manifest nests around the metadata.
pub const MAX_METADATA_DEPTH: u64 = 64;
/// Bytes of a relative path (of a data file, an index, an item directory).
pub const MAX_PATH_BYTES: u64 = 4096;
/// Bytes of one component of such a path. It is Linux' own limit.
pub const MAX_PATH_COMPONENT_BYTES: u64 = 255;
/// Items of a manifest: top-level entries, one for loose leaves, and those that thinning dropped.
pub const MAX_ITEMS: u64 = 4096;
/// Largest number of a step. It fits a signed 64-bit integer, which every language has.
pub const MAX_STEP: u64 = i64::MAX as u64;
/// Bytes of the root table of an index.
pub const MAX_ROOT_BYTES: u64 = 512 << 20;
/// Bytes of the names along one leaf path, plus one for each component.
pub const MAX_LEAF_PATH_BYTES: u64 = 256 << 10;
/// Bytes of the type names of all containers of an item. Files share equal names, memory does not.
pub const MAX_TYPE_NAME_BYTES: u64 = 256 << 20;
/// Values in one encoded object. In memory each takes 32 bytes or more, in a file at least one.
pub const MAX_OBJECT_VALUES: u64 = 64 << 20;
/// Bytes of an index file.
pub const MAX_INDEX_BYTES: u64 = 4 << 30;

/// Decoded bytes of one compressed chunk. Larger chunks are stored raw.
pub const MAX_PLANES_BYTES: u64 = 64 << 20;

/// The most ranks for which replicas are compared. Every rank's vote has a claim on each replica,
/// and the leader could not read those of many thousands in time.
pub const COMPARED_RANKS: usize = 1024;
