//! The footer of a data file: pages of this file's index, pages of block checksums, the page table,
//! and the trailer. With it, a file can be verified by itself, and the index of an item can be
//! rebuilt from the data files.

use std::path::Path;

use super::block;
use super::bytes::Fields;
use super::checksum::crc32c;
use super::index::{FileRecord, Index};
use super::page::{self, PageKind, PageRef};
use super::trailer::{PageTableRef, TRAILER_BYTES};
pub use super::trailer::{Trailer, decode_page_table};
use super::{index_v1, limit};
use crate::error::{Error, Result};
use crate::limits::MAX_PAGES;

/// The block CRCs in one page, at least and at most. A read of one tensor reads the pages for the
/// places of its chunks. So pages are small: 32 KiB for 128 MiB of blocks of the default size.
const CRCS_PER_PAGE: (usize, usize) = (8 << 10, 256 << 10);
/// Pages grow from this number of them on.
const MANY_PAGES: usize = 4096;

/// The end of a data file, from the footer's offset on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footer {
    /// The footer's bytes, a multiple of 4096.
    pub bytes: Vec<u8>,
    /// The CRC of the trailer, which manifest and index record for the file.
    pub trailer_crc: u32,
}

/// Encodes the footer of a data file. `index` has the leaves of this file. All extents are in this
/// file (`Source::Own(0)`), before `footer_offset`. The footer does not contain `index.files`,
/// because a file cannot contain its own length and checksum. `block_crcs` are the checksums of the
/// blocks that tile `[0, footer_offset)`.
pub fn encode(
    file_id: u128,
    block_bytes: u64,
    footer_offset: u64,
    index: &Index,
    block_crcs: &[u32],
) -> Result<Footer> {
    let invalid = |what: String| Error::internal("a valid footer to write", what);
    block::check_size(block_bytes).map_err(invalid)?;
    if block::count(footer_offset, block_bytes) != block_crcs.len() as u64 {
        return Err(invalid(format!(
            "{} block checksums cannot tile {footer_offset} bytes in blocks of {block_bytes}",
            block_crcs.len()
        )));
    }
    let mut pages = index_v1::encode_pages(index, index_v1::Bounds::Footer { footer_offset })?;
    let (least, most) = CRCS_PER_PAGE;
    let per_page = (block_crcs.len() / MANY_PAGES).clamp(least, most);
    for (number, crcs) in block_crcs.chunks(per_page).enumerate() {
        let payload: Vec<u8> = crcs.iter().flat_map(|crc| crc.to_le_bytes()).collect();
        let first = (number * per_page) as u64;
        pages.push(page::encode(PageKind::BlockCrcs, first, crcs.len() as u64, &payload)?);
    }
    limit("the pages of a footer", pages.len() as u64, MAX_PAGES)?;

    let mut bytes = Vec::with_capacity(pages.iter().map(|(bytes, _)| bytes.len() + 40).sum::<usize>() + 8192);
    let mut table = Vec::with_capacity(pages.len() * page::ENTRY_BYTES as usize);
    for (page_bytes, entry) in &pages {
        PageRef { offset: footer_offset + bytes.len() as u64, ..*entry }.put(&mut table);
        bytes.extend_from_slice(page_bytes);
    }
    let table_at = bytes.len();
    bytes.extend_from_slice(&table);
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    let trailer = Trailer {
        file_id,
        footer_offset,
        footer_length: bytes.len() as u64 + TRAILER_BYTES,
        block_bytes,
        page_table: PageTableRef {
            offset: footer_offset + table_at as u64,
            length: (bytes.len() - table_at) as u64,
            count: pages.len() as u32,
            crc: bytes.get(table_at..).map_or(0, crc32c),
        },
        crc: 0,
    };
    trailer.check().map_err(invalid)?;
    let (trailer_bytes, trailer_crc) = trailer.encode();
    bytes.extend_from_slice(&trailer_bytes);
    Ok(Footer { bytes, trailer_crc })
}

/// Decodes a page of block checksums.
pub fn decode_block_crcs(page: &PageRef, bytes: &[u8], file: &Path) -> Result<Vec<u32>> {
    let payload = page::open(page, bytes, file)?;
    if page.kind != PageKind::BlockCrcs || page.count.checked_mul(4) != Some(payload.len() as u64) {
        return Err(Error::corrupt(
            file,
            format!("the page at offset {} holds no block checksums", page.offset),
        ));
    }
    let mut fields = Fields(payload);
    Ok(std::iter::from_fn(|| fields.u32()).collect())
}

/// Decodes the page table of a footer. `footer` is the file from `trailer.footer_offset` to its
/// end.
pub fn pages_of(trailer: &Trailer, footer: &[u8], file: &Path) -> Result<Vec<PageRef>> {
    let cut = || Error::corrupt(file, "its footer is cut");
    if footer.len() as u64 != trailer.footer_length {
        return Err(cut());
    }
    let table = &trailer.page_table;
    let bytes = table
        .offset
        .checked_sub(trailer.footer_offset)
        .and_then(|start| {
            footer.get(usize::try_from(start).ok()?..)?.get(..usize::try_from(table.length).ok()?)
        })
        .ok_or_else(cut)?;
    decode_page_table(trailer, bytes, file)
}

/// Decodes the index in a footer, with the leaves of this data file. `name` becomes the name of its
/// only file record.
pub fn decode_index(trailer: &Trailer, footer: &[u8], name: &str, file: &Path) -> Result<Index> {
    let pages: Vec<PageRef> = pages_of(trailer, footer, file)?;
    let pages = pages.iter().filter(|page| page.kind == PageKind::Index).map(|page| {
        let bytes = page.slice(footer, trailer.footer_offset);
        bytes.map(|bytes| (*page, bytes)).ok_or_else(|| Error::corrupt(file, "its footer is cut"))
    });
    let record = FileRecord {
        name: name.into(),
        length: trailer.file_length(),
        file_id: trailer.file_id,
        trailer_crc: trailer.crc,
        within: None,
    };
    let bounds = index_v1::Bounds::Footer { footer_offset: trailer.footer_offset };
    index_v1::decode_pages(pages.collect::<Result<Vec<_>>>()?, vec![record], bounds, file)
}
