//! Reads the index in the footer of a data file, and its header. A repair rebuilds the index of an
//! item from these.

use crate::format::footer::{self, Trailer};
use crate::format::header::HEADER_BYTES;
use crate::format::index::{FileRecord, Index};
use crate::format::trailer::TRAILER_BYTES;
use crate::io::{Dir, File, Section};
use crate::limits::MAX_INDEX_BYTES;
use crate::{Error, Result};

/// Returns the header of a data file below `dir`, as it is stored. The first block has its
/// checksum.
pub fn stored_header(dir: &dyn Dir, record: &FileRecord) -> Result<Vec<u8>> {
    dir.open_file(record.stored_name())?.read_at(record.stored_offset(0), HEADER_BYTES as usize)
}

/// Returns the index in the footer of a data file below `dir`, checked against the record of the
/// file. The file gets the name `name` in it.
pub fn index_in_footer(dir: &dyn Dir, record: &FileRecord, name: &str) -> Result<Index> {
    let path = dir.path().join(record.stored_name());
    let file = match dir.open_file(record.stored_name()) {
        Err(error) if error.is_gone() => {
            return Err(Error::corrupt(path, "its manifest lists it, and it is missing"));
        }
        opened => Section::new(opened?, record.stored_offset(0), record.length),
    };
    let read = |offset: u64, length: u64| {
        let bytes = file.read_at(offset, length as usize)?;
        if bytes.len() as u64 == length {
            return Ok(bytes);
        }
        Err(Error::corrupt(&path, format!("it ends before its {} bytes", record.length)))
    };
    let trailer = read(record.length.saturating_sub(TRAILER_BYTES), TRAILER_BYTES)?;
    let trailer = Trailer::decode(&trailer, &path, Some(record.trailer_crc), Some(record.file_id))?;
    if trailer.file_length() != record.length {
        return Err(Error::corrupt(path, "its footer does not end where the file ends"));
    }
    if trailer.footer_length > MAX_INDEX_BYTES {
        let what = format!("bytes of the footer of {}", path.display());
        return Err(Error::Limit { what, found: trailer.footer_length, limit: MAX_INDEX_BYTES });
    }
    let bytes = read(trailer.footer_offset, trailer.footer_length)?;
    footer::decode_index(&trailer, &bytes, name, &path)
}
