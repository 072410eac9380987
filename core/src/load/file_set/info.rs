//! The facts about one file: its blocks and their checksums.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use crate::format::block::DEFAULT_BLOCK_BYTES;
use crate::format::checksum::crc32c;
use crate::format::footer::{self, Trailer};
use crate::format::header::Header;
use crate::format::index::{CompressedStream, FileRecord};
use crate::format::page::{PageKind, PageRef};
use crate::io::File;
use crate::limits::MAX_PAGE_BYTES;
use crate::load::block_checksums::BlockChecksums;
use crate::{Error, Result};

/// Bytes of a header, and of a trailer.
const PAGE: u64 = 4096;
/// Bytes at the end of a file that are read at once. Most footers fit.
const TAIL: u64 = 128 << 10;

/// A file that has been checked.
#[derive(Debug)]
pub(in crate::load) struct FileInfo {
    pub(in crate::load) path: PathBuf,
    pub(in crate::load) block_bytes: u64,
    /// Offset of the end of the blocks.
    pub(in crate::load) data_end: u64,
    /// See [`File::source`].
    pub(in crate::load) source: u64,
    /// Pages of the footer that hold parts of an index.
    pub(in crate::load) index_pages: Vec<PageRef>,
    /// The id of our own file.
    file_id: Option<u128>,
    checksums: Checksums,
}

/// The checksums of a file's blocks.
#[derive(Debug)]
enum Checksums {
    /// There are none.
    Unknown,
    /// Those in the footer of our own file.
    Footer(Vec<ChecksumPage>),
    /// Those of a foreign file.
    Computed(Arc<BlockChecksums>),
    /// The header or the footer of our own file is damaged, as described here. So its bytes are
    /// read from other copies.
    Lost(String),
}

/// Checksums of a range of blocks, read on first use.
#[derive(Debug)]
struct ChecksumPage {
    page: PageRef,
    checksums: OnceLock<Vec<u32>>,
}

/// A block whose checksum does not match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::load) struct BadBlock {
    pub(in crate::load) block: u64,
    pub(in crate::load) found: u32,
    pub(in crate::load) written: u32,
}

impl BadBlock {
    pub(in crate::load) fn what(&self) -> String {
        format!(
            "the checksum of the block is {:08x}, but it was written with {:08x}",
            self.found, self.written
        )
    }

    /// Returns the error of a block of a file.
    pub(in crate::load) fn at(self, file: &Path) -> Error {
        let what = self.what();
        Error::Corrupt { file: file.to_owned(), leaf: None, block: Some(self.block), what }
    }
}

impl FileInfo {
    /// Checks a data file against the index's record of it.
    pub(super) fn own(file: &dyn File, record: &FileRecord) -> Result<Self> {
        let path = file.path();
        check_length(file, record)?;
        if record.length < 2 * PAGE || !record.length.is_multiple_of(PAGE) {
            let what = format!("a data file of {} bytes has no header and trailer", record.length);
            return Err(Error::corrupt(path, what));
        }
        let tail = Tail::read(file, record.length)?;
        let trailer_bytes = tail.get(file, record.length - PAGE, PAGE)?;
        let trailer = Trailer::decode(&trailer_bytes, path, Some(record.trailer_crc), Some(record.file_id))?;
        if trailer.file_length() != record.length {
            return Err(Error::corrupt(path, "its footer does not end where the file ends"));
        }
        let table = trailer.page_table;
        let table_bytes = tail.get(file, table.offset, table.length)?;
        let pages = footer::decode_page_table(&trailer, &table_bytes, path)?;
        let (index_pages, checksum_pages): (Vec<_>, Vec<_>) =
            pages.into_iter().partition(|page| page.kind == PageKind::Index);
        let mut checksums = Vec::with_capacity(checksum_pages.len());
        // The page table's own check has proved that the pages cover every block, without gaps.
        for page in checksum_pages {
            let cell = OnceLock::new();
            if page.offset >= tail.start {
                let bytes = tail.get(file, page.offset, page.length)?;
                let _ = cell.set(footer::decode_block_crcs(&page, &bytes, path)?);
            }
            checksums.push(ChecksumPage { page, checksums: cell });
        }
        let info = Self {
            path: path.to_owned(),
            block_bytes: trailer.block_bytes,
            data_end: trailer.footer_offset,
            source: file.source(),
            index_pages,
            file_id: Some(trailer.file_id),
            checksums: Checksums::Footer(checksums),
        };
        // An object was stored in one piece, and one more request takes long. A verification checks
        // its header.
        if tail.start == 0 || !file.is_object() {
            info.check_header(&tail.get(file, 0, PAGE)?)?;
        }
        Ok(info)
    }

    /// Checks the header of our own object, unless that was done before.
    pub(in crate::load) fn check_object(&self, file: &dyn File) -> Result<()> {
        let is_own = self.file_id.is_some();
        if is_own && file.is_object() { self.check_header(&exactly(file, 0, PAGE)?) } else { Ok(()) }
    }

    /// Checks a header against the trailer of its file.
    fn check_header(&self, bytes: &[u8]) -> Result<()> {
        let Some(file_id) = self.file_id else { return Ok(()) };
        let header = Header::decode(bytes, &self.path)?;
        if header.file_id != file_id {
            let what = "the id in its header is not that of its trailer: it was put together from two files";
            return Err(Error::corrupt(&self.path, what));
        }
        if header.block_bytes != self.block_bytes {
            return Err(Error::corrupt(&self.path, "header and trailer name different block sizes"));
        }
        Ok(())
    }

    /// Checks the length of a foreign file, or the place of a compressed stream in it.
    /// Reads of a stream are checked in the file around it.
    pub(super) fn foreign(
        file: &dyn File,
        record: &FileRecord,
        checksums: Option<&Arc<BlockChecksums>>,
    ) -> Result<Self> {
        let checksums = checksums.filter(|_| record.stream().is_none());
        match record.stream() {
            Some(stream) => check_stream(file, record, stream)?,
            None => check_length(file, record)?,
        }
        if let Some(checksums) = checksums {
            checksums.check_length(file)?;
        }
        Ok(Self {
            path: file.path().to_owned(),
            block_bytes: checksums.map_or(DEFAULT_BLOCK_BYTES, |found| found.block_bytes()),
            data_end: record.length,
            source: file.source(),
            index_pages: Vec::new(),
            file_id: None,
            checksums: checksums.map_or(Checksums::Unknown, |found| Checksums::Computed(Arc::clone(found))),
        })
    }

    /// Creates the facts about a file of nothing but blocks.
    #[cfg(test)]
    pub(in crate::load) fn of_blocks(block_bytes: u64, data_end: u64) -> Self {
        let (path, checksums) = ("file".into(), Checksums::Unknown);
        Self { path, block_bytes, data_end, source: 0, index_pages: Vec::new(), file_id: None, checksums }
    }

    /// Creates the facts about our own file whose header or footer is damaged.
    pub(super) fn lost(path: PathBuf, record: &FileRecord, damage: String) -> Self {
        Self {
            path,
            block_bytes: DEFAULT_BLOCK_BYTES,
            // All data end before the trailer.
            data_end: record.length.saturating_sub(PAGE),
            source: 0,
            index_pages: Vec::new(),
            file_id: None,
            checksums: Checksums::Lost(damage),
        }
    }

    /// Fails if the file's header or footer is damaged.
    pub(in crate::load) fn check_own(&self) -> Result<()> {
        match &self.checksums {
            Checksums::Lost(damage) => Err(Error::corrupt(&self.path, damage.clone())),
            _ => Ok(()),
        }
    }

    /// True if the file has the checksum of a block. Its page has been read.
    pub(in crate::load) fn knows_checksum_of(&self, block: u64) -> bool {
        match &self.checksums {
            Checksums::Lost(_) => false,
            Checksums::Footer(_) => {
                let page = self.pages_of(&(block..block + 1)).first();
                page.is_some_and(|page| page.checksums.get().is_some())
            }
            Checksums::Unknown | Checksums::Computed(_) => true,
        }
    }

    /// True if the file has checksums.
    pub(in crate::load) fn is_guarded(&self) -> bool {
        !matches!(self.checksums, Checksums::Unknown)
    }

    /// Returns the block that holds a byte.
    pub(in crate::load) fn block_of(&self, byte: u64) -> u64 {
        byte / self.block_bytes
    }

    /// Returns the byte range of a block.
    pub(in crate::load) fn bytes_of(&self, block: u64) -> Range<u64> {
        let start = block.saturating_mul(self.block_bytes);
        start..start.saturating_add(self.block_bytes).min(self.data_end)
    }

    /// Reads the checksum pages for the blocks of `bytes`.
    pub(super) fn load_checksums(&self, file: &dyn File, bytes: &Range<u64>) -> Result<()> {
        let blocks = self.block_of(bytes.start)..bytes.end.div_ceil(self.block_bytes);
        for part in self.pages_of(&blocks) {
            if part.checksums.get().is_none() {
                let bytes = page_bytes(file, &part.page)?;
                // Another thread may have set it first, to the same value.
                let _ = part.checksums.set(footer::decode_block_crcs(&part.page, &bytes, &self.path)?);
            }
        }
        Ok(())
    }

    fn pages_of(&self, blocks: &Range<u64>) -> &[ChecksumPage] {
        let Checksums::Footer(pages) = &self.checksums else { return &[] };
        let start = pages.partition_point(|part| part.page.first + part.page.count <= blocks.start);
        let end = pages.partition_point(|part| part.page.first < blocks.end);
        pages.get(start..end).unwrap_or_default()
    }

    /// Compares one block with its checksum.
    pub(in crate::load) fn check(&self, block: u64, bytes: &[u8]) -> Result<(), BadBlock> {
        match &self.checksums {
            Checksums::Unknown => return Ok(()),
            Checksums::Computed(checksums) => return checksums.check(block, bytes),
            Checksums::Footer(_) | Checksums::Lost(_) => {}
        }
        let found = crc32c(bytes);
        let written = self.pages_of(&(block..block + 1)).first().and_then(|part| {
            part.checksums.get()?.get(usize::try_from(block - part.page.first).ok()?).copied()
        });
        match written {
            Some(written) if written == found => Ok(()),
            // A block without a checksum is damage too: unchecked bytes are never returned.
            other => Err(BadBlock { block, found, written: other.unwrap_or(!found) }),
        }
    }
}

fn check_length(file: &dyn File, record: &FileRecord) -> Result<()> {
    let found = file.len()?;
    if found == record.length {
        return Ok(());
    }
    let what = format!("it has {found} bytes, {} were written", record.length);
    Err(Error::corrupt(file.path(), what))
}

fn check_stream(file: &dyn File, record: &FileRecord, stream: &CompressedStream) -> Result<()> {
    let end = record.stored_offset(0).checked_add(stream.length);
    if end.is_none_or(|end| file.len().is_ok_and(|length| end > length)) {
        return Err(short(file.path(), file.len()?, end.unwrap_or(u64::MAX)));
    }
    Ok(())
}

/// Reads a page of a footer and compares it with its checksum.
pub(in crate::load) fn check_page(file: &dyn File, page: &PageRef) -> Result<()> {
    if crc32c(&page_bytes(file, page)?) == page.crc {
        return Ok(());
    }
    let what = format!(
        "the page of its index at offset {} does not have the checksum that was recorded",
        page.offset
    );
    Err(Error::corrupt(file.path(), what))
}

/// Returns the raw bytes of a footer page.
fn page_bytes(file: &dyn File, page: &PageRef) -> Result<Vec<u8>> {
    if page.length > MAX_PAGE_BYTES {
        let what = format!("a page of {}", file.path().display());
        return Err(Error::Limit { what, found: page.length, limit: MAX_PAGE_BYTES });
    }
    exactly(file, page.offset, page.length)
}

fn exactly(file: &dyn File, offset: u64, len: u64) -> Result<Vec<u8>> {
    let bytes = file.read_at(offset, len as usize)?;
    if bytes.len() as u64 == len {
        return Ok(bytes);
    }
    Err(short(file.path(), offset + bytes.len() as u64, offset.saturating_add(len)))
}

/// Returns the error of a file that ended early.
pub(in crate::load) fn short(path: &Path, found: u64, wanted: u64) -> Error {
    Error::corrupt(
        path,
        format!("it has no bytes from {found} on, in the middle of data that reach to byte {wanted}"),
    )
}

/// The last bytes of a file.
struct Tail {
    start: u64,
    bytes: Vec<u8>,
}

impl Tail {
    fn read(file: &dyn File, length: u64) -> Result<Self> {
        let start = length.saturating_sub(TAIL);
        match exactly(file, start, length - start) {
            Ok(bytes) => Ok(Self { start, bytes }),
            // The tail contains data too. An unreadable sector there does not invalidate the
            // footer.
            Err(Error::Io { .. }) => {
                let start = length - PAGE;
                Ok(Self { start, bytes: exactly(file, start, PAGE)? })
            }
            Err(error) => Err(error),
        }
    }

    /// Returns bytes of the file: from the tail, or from the disk if they start before it.
    fn get(&self, file: &dyn File, offset: u64, len: u64) -> Result<Vec<u8>> {
        if let Some(at) = offset.checked_sub(self.start) {
            let end = at.checked_add(len).filter(|&end| end <= self.bytes.len() as u64);
            let bytes = end.and_then(|end| self.bytes.get(at as usize..end as usize));
            return bytes.map(<[u8]>::to_vec).ok_or_else(|| {
                Error::corrupt(file.path(), "a page of its footer reaches past the end of the file")
            });
        }
        if len > MAX_PAGE_BYTES {
            let what = format!("a page of {}", file.path().display());
            return Err(Error::Limit { what, found: len, limit: MAX_PAGE_BYTES });
        }
        exactly(file, offset, len)
    }
}
