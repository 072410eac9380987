//! The bytes on disk, as `docs/format.md` describes them. No I/O here: bytes in, bytes out.
//!
//! | module | what it reads and writes | bound by |
//! |---|---|---|
//! | [`manifest`] | `manifest.json`, the commit record of a step | its own last line |
//! | [`header`] [`block`] [`footer`] | a data file: its front, its blocks, its end | own CRCs; manifest and index record the trailer's |
//! | [`index_v1`] | the index file of an item, and the index pages of a footer | manifest, root table, page table |
//! | [`planes`] | the bytes of a compressed chunk | the blocks that they lie in |
//! | [`object`] | the values of leaves that are not tensors | the blocks that they lie in |
//! | [`index`] | what an index says, in memory, whatever version it came from | |
//! | [`merge`] | many ranks' indexes become one | |
//! | [`sealed_text`] | text that ends in its own checksum | |
//!
//! Everything that is read here is hostile until checked: checksum first, then structure, then
//! meaning; a size is checked before it is allocated, and no input panics. Encoding is
//! deterministic: same values in, same bytes out.

pub mod block;
mod bytes;
mod check;
pub mod checksum;
mod features;
pub mod footer;
#[cfg(test)]
mod footer_tests;
pub mod header;
pub mod index;
pub mod index_v1;
pub mod manifest;
pub mod merge;
pub mod object;
pub mod page;
mod paths;
pub mod planes;
pub mod sealed_text;
pub mod trailer;

/// The format version that this code writes. Older versions stay readable permanently.
pub const FORMAT_VERSION: u32 = 1;

/// Refuses a count that passes its bound of [`crate::limits`].
pub(crate) fn limit(what: &str, found: u64, limit: u64) -> crate::Result<()> {
    if found > limit {
        return Err(crate::Error::Limit { what: what.to_owned(), found, limit });
    }
    Ok(())
}
