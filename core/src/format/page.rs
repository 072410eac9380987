//! Pages: the checksummed pieces of footers and indexes. A page has a front of 32 bytes, which
//! gives its kind and content, and a payload. The CRC covers both. It is not in the page, but in
//! the list of pages (a page table or an index root), so that a reader detects a page in the wrong
//! place.
//!
//! ```text
//! 0  magic "SWPG"   4  kind u16   6  version u16   8  payload bytes u64   16  first u64   24  count u64   32  payload
//! ```

use std::path::Path;

use super::bytes::{Fields, Put};
use super::checksum::crc32c;
use crate::error::{Error, Result};
use crate::limits::MAX_PAGE_BYTES;

const MAGIC: &[u8; 4] = b"SWPG";
const VERSION: u16 = 1;
/// The size of the front in bytes.
pub(crate) const FRONT_BYTES: u64 = 32;
/// The size of an entry of a page table in bytes.
pub(crate) const ENTRY_BYTES: u64 = 40;
/// A page is closed once it has this size in bytes. A reader of one leaf reads about this much.
pub(crate) const TARGET_PAGE_BYTES: u64 = 1 << 20;

/// The kind of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageKind {
    /// Leaves of an index. `first` and `count` number leaves.
    Index,
    /// CRCs of blocks. `first` and `count` number blocks.
    BlockCrcs,
}

impl PageKind {
    const fn code(self) -> u16 {
        match self {
            Self::Index => 1,
            Self::BlockCrcs => 2,
        }
    }

    const fn from_code(code: u16) -> Option<Self> {
        match code {
            1 => Some(Self::Index),
            2 => Some(Self::BlockCrcs),
            _ => None,
        }
    }
}

/// The place and kind of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRef {
    /// Its kind.
    pub kind: PageKind,
    /// Its offset in the file.
    pub offset: u64,
    /// Its length in bytes, with its front.
    pub length: u64,
    /// CRC-32C of its bytes.
    pub crc: u32,
    /// The number of its first leaf or block.
    pub first: u64,
    /// The number of leaves or blocks in it.
    pub count: u64,
}

impl PageRef {
    /// Returns the page's bytes. `bytes` begin at offset `at` of the file.
    pub fn slice<'a>(&self, bytes: &'a [u8], at: u64) -> Option<&'a [u8]> {
        let start = usize::try_from(self.offset.checked_sub(at)?).ok()?;
        bytes.get(start..)?.get(..usize::try_from(self.length).ok()?)
    }

    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        out.put_u32(u32::from(self.kind.code()));
        out.put_u32(self.crc);
        out.put_u64(self.offset);
        out.put_u64(self.length);
        out.put_u64(self.first);
        out.put_u64(self.count);
    }

    pub(crate) fn take(fields: &mut Fields<'_>) -> Option<std::result::Result<Self, String>> {
        let (code, crc) = (fields.u32()?, fields.u32()?);
        let (offset, length, first, count) = (fields.u64()?, fields.u64()?, fields.u64()?, fields.u64()?);
        Some(match u16::try_from(code).ok().and_then(PageKind::from_code) {
            Some(kind) => Ok(Self { kind, offset, length, crc, first, count }),
            None => Err(format!("a page is of the unknown kind {code}")),
        })
    }
}

/// Encodes a page. Returns its bytes, and its entry, whose offset is not set.
pub(crate) fn encode(kind: PageKind, first: u64, count: u64, payload: &[u8]) -> Result<(Vec<u8>, PageRef)> {
    let length = FRONT_BYTES + payload.len() as u64;
    super::limit("the size of a page in bytes", length, MAX_PAGE_BYTES)?;
    let mut bytes = Vec::with_capacity(length as usize);
    bytes.put(MAGIC);
    bytes.put_u16(kind.code());
    bytes.put_u16(VERSION);
    bytes.put_u64(payload.len() as u64);
    bytes.put_u64(first);
    bytes.put_u64(count);
    bytes.put(payload);
    let crc = crc32c(&bytes);
    Ok((bytes, PageRef { kind, offset: 0, length, crc, first, count }))
}

/// Checks a page against its entry, and returns its payload.
pub(crate) fn open<'a>(page: &PageRef, bytes: &'a [u8], file: &Path) -> Result<&'a [u8]> {
    let corrupt = |what: &str| {
        Error::corrupt(file, format!("the page at offset {} ({:?}) {what}", page.offset, page.kind))
    };
    if bytes.len() as u64 != page.length || page.length > MAX_PAGE_BYTES {
        return Err(corrupt("has another length than its entry says"));
    }
    if crc32c(bytes) != page.crc {
        return Err(corrupt("does not have the checksum that its entry says"));
    }
    let mut fields = Fields(bytes);
    let front = fields.take(4) == Some(MAGIC)
        && fields.u16() == Some(page.kind.code())
        && fields.u16() == Some(VERSION)
        && fields.u64() == page.length.checked_sub(FRONT_BYTES)
        && fields.u64() == Some(page.first)
        && fields.u64() == Some(page.count);
    if front { Ok(fields.0) } else { Err(corrupt("is another page than its entry says")) }
}
