//! The last 4096 bytes of a data file: the places of its footer and its page table. The last field
//! is the trailer's own CRC. Manifest and index record this CRC for the file. It covers the page
//! table's checksum, which covers the pages, which cover all blocks. (A CRC over *all* 4096 bytes
//! would be the same for every trailer; see [`super::checksum`].)

use std::path::Path;

use super::bytes::{Fields, Put};
use super::checksum::crc32c;
use super::page::{ENTRY_BYTES, PageKind, PageRef};
use super::{FORMAT_VERSION, block};
use crate::error::{Error, Result};
use crate::limits::{MAX_FILE_BYTES, MAX_PAGE_BYTES, MAX_PAGES};

/// The size of a trailer in bytes.
pub const TRAILER_BYTES: u64 = 4096;
/// See [`super::header`].
const MAGIC: &[u8; 8] = b"\x89SWT\r\n\x1a\n";
const CRC_AT: usize = TRAILER_BYTES as usize - 4;

/// The trailer of a data file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trailer {
    /// The file id, as in the header.
    pub file_id: u128,
    /// The offset of the footer, after the last block. A multiple of 4096.
    pub footer_offset: u64,
    /// The length of the footer, to the end of the file. A multiple of 4096.
    pub footer_length: u64,
    /// The size of a block in bytes.
    pub block_bytes: u64,
    /// The place of the footer's page table.
    pub page_table: PageTableRef,
    /// The CRC of the trailer, its last field.
    pub crc: u32,
}

/// The place of a page table: between the last page and the trailer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageTableRef {
    /// Its offset in the file.
    pub offset: u64,
    /// Its length in bytes, up to the trailer: the entries, then zeros.
    pub length: u64,
    /// The number of entries.
    pub count: u32,
    /// CRC-32C of those bytes.
    pub crc: u32,
}

impl Trailer {
    /// Returns the length of the whole file.
    pub fn file_length(&self) -> u64 {
        self.footer_offset + self.footer_length
    }

    /// Returns the number of blocks before the footer.
    pub fn block_count(&self) -> u64 {
        block::count(self.footer_offset, self.block_bytes)
    }

    /// Encodes its 4096 bytes. Computes `crc` and ignores the field.
    pub(crate) fn encode(&self) -> (Vec<u8>, u32) {
        let mut bytes = Vec::with_capacity(TRAILER_BYTES as usize);
        bytes.put(MAGIC);
        bytes.put_u32(FORMAT_VERSION);
        bytes.put_u32(self.page_table.count);
        bytes.put_u128(self.file_id);
        bytes.put_u64(self.footer_offset);
        bytes.put_u64(self.footer_length);
        bytes.put_u64(self.block_bytes);
        bytes.put_u64(self.page_table.offset);
        bytes.put_u64(self.page_table.length);
        bytes.put_u32(self.page_table.crc);
        bytes.resize(CRC_AT, 0);
        let crc = crc32c(&bytes);
        bytes.put_u32(crc);
        (bytes, crc)
    }

    /// Decodes and checks the last 4096 bytes of a data file. `expected_crc` and `expected_id` are
    /// from the manifest or the index. With them, this finds a file that was replaced by another
    /// one.
    pub fn decode(
        bytes: &[u8],
        file: &Path,
        expected_crc: Option<u32>,
        expected_id: Option<u128>,
    ) -> Result<Self> {
        let corrupt = |what: &str| Error::corrupt(file, what);
        if bytes.len() as u64 != TRAILER_BYTES {
            return Err(corrupt("its trailer is cut"));
        }
        let (covered, own) = bytes.split_at_checked(CRC_AT).ok_or_else(|| corrupt("its trailer is cut"))?;
        let crc = Fields(own).u32().ok_or_else(|| corrupt("its trailer is cut"))?;
        if crc32c(covered) != crc {
            return Err(corrupt(
                "the checksum of its trailer does not hold; the file was cut or its end is damaged",
            ));
        }
        let mut fields = Fields(covered);
        if fields.take(8) != Some(MAGIC) {
            return Err(corrupt("it does not end in a trailer"));
        }
        if expected_crc.is_some_and(|expected| expected != crc) {
            return Err(corrupt(
                "its trailer is not the one that was recorded; another file is in its place",
            ));
        }
        let (version, trailer) = Self::take(&mut fields, crc).ok_or_else(|| corrupt("its trailer is cut"))?;
        if version != FORMAT_VERSION {
            return Err(Error::Format {
                file: file.to_owned(),
                what: format!(
                    "its trailer has format version {version}; this version of stepwell reads version {FORMAT_VERSION}"
                ),
            });
        }
        if expected_id.is_some_and(|expected| expected != trailer.file_id) {
            return Err(corrupt(
                "its file id is not the one that was recorded; another file is in its place",
            ));
        }
        trailer.check().map_err(|what| corrupt(&format!("its trailer makes no sense: {what}")))?;
        Ok(trailer)
    }

    fn take(fields: &mut Fields<'_>, crc: u32) -> Option<(u32, Self)> {
        let (version, count) = (fields.u32()?, fields.u32()?);
        let file_id = fields.u128()?;
        let (footer_offset, footer_length, block_bytes) = (fields.u64()?, fields.u64()?, fields.u64()?);
        let (offset, length, table_crc) = (fields.u64()?, fields.u64()?, fields.u32()?);
        let page_table = PageTableRef { offset, length, count, crc: table_crc };
        Some((version, Self { file_id, footer_offset, footer_length, block_bytes, page_table, crc }))
    }

    /// Checks all values that readers compute with, so that no later arithmetic overflows.
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        block::check_size(self.block_bytes)?;
        let aligned = |value: u64| value >= 4096 && value.is_multiple_of(4096);
        if !aligned(self.footer_offset) || !aligned(self.footer_length) {
            return Err("the footer does not begin and end at multiples of 4096".to_owned());
        }
        let end = self.footer_offset.checked_add(self.footer_length).filter(|&end| end <= MAX_FILE_BYTES);
        let table = &self.page_table;
        if end.is_none() || table.offset < self.footer_offset {
            return Err("the footer is out of bounds".to_owned());
        }
        let table_end = table.offset.checked_add(table.length).and_then(|end| end.checked_add(TRAILER_BYTES));
        if table_end != end {
            return Err("the page table does not end at the trailer".to_owned());
        }
        let entries = u64::from(table.count) * ENTRY_BYTES;
        if u64::from(table.count) > MAX_PAGES || table.length < entries || table.length - entries >= 4096 {
            return Err(format!("{} pages cannot be listed in {} bytes", table.count, table.length));
        }
        Ok(())
    }
}

/// Decodes the page table of a footer (`trailer.page_table`). The pages tile the footer up to the
/// table. Index pages number their leaves without a gap. Pages of block checksums cover every
/// block.
pub fn decode_page_table(trailer: &Trailer, bytes: &[u8], file: &Path) -> Result<Vec<PageRef>> {
    let corrupt = |what: &str| Error::corrupt(file, format!("its page table {what}"));
    let table = &trailer.page_table;
    if bytes.len() as u64 != table.length {
        return Err(corrupt("has another length than the trailer says"));
    }
    if crc32c(bytes) != table.crc {
        return Err(corrupt("does not have the checksum that the trailer says"));
    }
    let mut fields = Fields(bytes);
    let mut pages =
        Vec::with_capacity((bytes.len() as u64 / ENTRY_BYTES).min(u64::from(table.count)) as usize);
    let (mut at, mut leaves, mut blocks) = (trailer.footer_offset, 0_u64, 0_u64);
    for _ in 0..table.count {
        let page = PageRef::take(&mut fields)
            .ok_or_else(|| corrupt("is too short"))?
            .map_err(|what| corrupt(&format!("does not hold: {what}")))?;
        let next = match page.kind {
            PageKind::Index => &mut leaves,
            PageKind::BlockCrcs => &mut blocks,
        };
        if page.offset != at || page.length > MAX_PAGE_BYTES || page.first != *next {
            return Err(corrupt(&format!("has a gap before its page at offset {}", page.offset)));
        }
        *next = next.checked_add(page.count).ok_or_else(|| corrupt("counts too much"))?;
        at = at.checked_add(page.length).ok_or_else(|| corrupt("counts too much"))?;
        pages.push(page);
    }
    if at != table.offset {
        return Err(corrupt("does not list all of the footer"));
    }
    if blocks != trailer.block_count() {
        return Err(corrupt(&format!(
            "lists checksums of {blocks} blocks, not of {}",
            trailer.block_count()
        )));
    }
    if fields.0.iter().any(|&byte| byte != 0) {
        return Err(corrupt("is followed by other bytes than zeros"));
    }
    Ok(pages)
}
