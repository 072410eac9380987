//! Data files, whole: header, trailer, page table, pages of the index and of block checksums.

use std::path::Path;

use stepwell_core::format::block;
use stepwell_core::format::footer::{self, Trailer};
use stepwell_core::format::header::{HEADER_BYTES, Header};
use stepwell_core::format::merge;
use stepwell_core::format::page::PageKind;

use crate::{seal, sealed};

/// See the module documentation.
pub fn run(input: &[u8]) {
    let Some((is_sealed, bytes)) = sealed(input) else { return };
    let mut bytes = bytes.to_vec();
    if is_sealed {
        // A file has whole pages: what the mutator inserts or takes goes to the end of the data,
        // not of the file.
        bytes.truncate(bytes.len() / 4096 * 4096);
        seal::data(&mut bytes);
    }
    let file = Path::new("00000.data");
    let header = bytes.get(..HEADER_BYTES as usize).map(|front| Header::decode(front, file));
    if let Some(Ok(header)) = &header {
        // Bytes that no version has given a meaning are ignored, so the text may differ, but not
        // what it says.
        assert_eq!(Header::decode(&header.encode(), file).ok().as_ref(), Some(header));
    }
    let Some(end) = bytes.len().checked_sub(4096) else { return };
    let Ok(trailer) = Trailer::decode(&bytes[end..], file, None, None) else { return };
    assert!(Trailer::decode(&bytes[end..], file, Some(trailer.crc), Some(trailer.file_id)).is_ok());
    assert!(Trailer::decode(&bytes[end..], file, Some(!trailer.crc), None).is_err());
    if trailer.file_length() != bytes.len() as u64 {
        return;
    }
    let front = &bytes[trailer.footer_offset as usize..];
    let Ok(pages) = footer::pages_of(&trailer, front, file) else { return };
    let mut crcs = Vec::new();
    for page in pages.iter().filter(|page| page.kind == PageKind::BlockCrcs) {
        let content = page.slice(front, trailer.footer_offset).expect("a page that is listed is there");
        let Ok(more) = footer::decode_block_crcs(page, content, file) else { return };
        crcs.extend(more);
    }
    assert_eq!(crcs.len() as u64, trailer.block_count());
    if is_sealed {
        let blocks = &bytes[..trailer.footer_offset as usize];
        let held = block::crcs(blocks, trailer.block_bytes).eq(crcs.iter().copied());
        assert!(held, "sealed blocks have the checksums that the footer says");
    }
    let Ok(index) = footer::decode_index(&trailer, front, "00000.data", file) else { return };
    let written = footer::encode(trailer.file_id, trailer.block_bytes, trailer.footer_offset, &index, &crcs)
        .expect("a footer that was read can be written");
    let at = written.bytes.len() - 4096;
    let again = Trailer::decode(&written.bytes[at..], file, Some(written.trailer_crc), Some(trailer.file_id))
        .expect("what was written can be read");
    let read = footer::decode_index(&again, &written.bytes, "00000.data", file).expect("likewise");
    assert_eq!((&read.tree, &read.leaves), (&index.tree, &index.leaves));
    let _ = merge::merge(vec![index], merge::Twice::First);
}
