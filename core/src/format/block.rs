//! Blocks: pieces of fixed size that tile a data file from offset 0 to its footer. A block is the
//! unit of checksums and of reading. The last one may be shorter. A block's CRC does not include
//! its position or its file: the table of CRCs and the file id identify them.

use std::path::Path;

use super::checksum::crc32c;
use crate::error::{Error, Result};
use crate::limits::BLOCK_BYTES;

/// The default size of a block in bytes. It is small, so that a resharded read wastes little. The
/// checksums take 256 bytes per MiB.
pub const DEFAULT_BLOCK_BYTES: u64 = 16 << 10;

/// Returns the number of blocks that tile `[0, bytes)`.
pub fn count(bytes: u64, block_bytes: u64) -> u64 {
    bytes.div_ceil(block_bytes.max(1))
}

/// Returns the CRCs of the blocks in `bytes`, which begin at the start of a block.
pub fn crcs(bytes: &[u8], block_bytes: u64) -> impl Iterator<Item = u32> + '_ {
    bytes.chunks(usize::try_from(block_bytes).unwrap_or(usize::MAX).max(1)).map(crc32c)
}

/// Checks the CRC of a block. The error names the file and the block.
pub fn check(block: u64, bytes: &[u8], expected: u32, file: &Path) -> Result<()> {
    let found = crc32c(bytes);
    if found == expected {
        return Ok(());
    }
    Err(Error::Corrupt {
        file: file.to_owned(),
        leaf: None,
        block: Some(block),
        what: format!("the checksum of its bytes is {found:08x}, but it was written with {expected:08x}"),
    })
}

/// Checks a block size from a user or a file: a power of two within [`BLOCK_BYTES`].
pub fn check_size(block_bytes: u64) -> std::result::Result<(), String> {
    if block_bytes.is_power_of_two() && BLOCK_BYTES.contains(&block_bytes) {
        return Ok(());
    }
    Err(format!(
        "a block size of {block_bytes} bytes is not possible. It must be a power of two from {} to {}",
        BLOCK_BYTES.start(),
        BLOCK_BYTES.end()
    ))
}
