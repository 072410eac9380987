//! Every bound in one file. Each is checked on write and on read, before anything is allocated for it.

/// Leaves of one item.
pub const MAX_LEAVES: u64 = 16_000_000;
/// Nodes (containers and leaves) of one item.
pub const MAX_NODES: u64 = 32_000_000;
/// Dimensions of a tensor (numpy's own bound is 64).
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
/// Bytes of a user's metadata, of a step or of a root.
pub const MAX_METADATA_BYTES: u64 = 4 << 20;
/// Entries of a manifest's file list.
pub const MAX_FILES: u64 = 4_000_000;
/// Bytes of a data file.
pub const MAX_FILE_BYTES: u64 = 1 << 50;
/// Smallest and largest block size that a header may name, in bytes.
pub const BLOCK_BYTES: std::ops::RangeInclusive<u64> = 4096..=(64 << 20);
