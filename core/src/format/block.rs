//! Blocks: the fixed-size pieces that tile a data file from offset 0 to its footer; the unit of
//! checksum and of reading. The last one may be short. A block's CRC says nothing of its position
//! or file: its place in the table does, and the file id.

use std::path::Path;

use super::checksum::crc32c;
use crate::error::{Error, Result};
use crate::limits::BLOCK_BYTES;

/// Bytes of a block where nothing else is asked for: small enough that a resharded read wastes
/// little, large enough that the checksums are 256 bytes per MiB.
pub const DEFAULT_BLOCK_BYTES: u64 = 16 << 10;

/// How many blocks tile `[0, bytes)`.
pub fn count(bytes: u64, block_bytes: u64) -> u64 {
    bytes.div_ceil(block_bytes.max(1))
}

/// The CRCs of the blocks of `bytes`, which begin at a block's begin.
pub fn crcs(bytes: &[u8], block_bytes: u64) -> impl Iterator<Item = u32> + '_ {
    bytes.chunks(usize::try_from(block_bytes).unwrap_or(usize::MAX).max(1)).map(crc32c)
}

/// Checks that `bytes` are those of the block with that CRC; names file and block where they are
/// not.
pub fn check(block: u64, bytes: &[u8], expected: u32, file: &Path) -> Result<()> {
    let found = crc32c(bytes);
    if found == expected {
        return Ok(());
    }
    Err(Error::Corrupt {
        file: file.to_owned(),
        leaf: None,
        block: Some(block),
        what: format!("the checksum of its bytes is {found:08x}, {expected:08x} was written"),
    })
}

/// Checks a block size from a user or a file: a power of two within [`BLOCK_BYTES`].
pub fn check_size(block_bytes: u64) -> std::result::Result<(), String> {
    if block_bytes.is_power_of_two() && BLOCK_BYTES.contains(&block_bytes) {
        return Ok(());
    }
    Err(format!(
        "a block size of {block_bytes} bytes is none: it is a power of two from {} to {}",
        BLOCK_BYTES.start(),
        BLOCK_BYTES.end()
    ))
}
