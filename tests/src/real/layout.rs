//! Which bytes of which file are what: the metadata of a step, of which every bit is tried, and its
//! data.

use std::ops::Range;
use std::path::{Path, PathBuf};

use stepwell_core::format::footer::pages_of;
use stepwell_core::format::header::HEADER_BYTES;
use stepwell_core::format::index::{Index, LeafRecord, Source};
use stepwell_core::format::page::PageKind;
use stepwell_core::format::trailer::{TRAILER_BYTES, Trailer};

/// A data file, taken apart.
pub struct DataFile {
    /// Its path.
    pub path: PathBuf,
    /// Its length.
    pub length: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// The end of its blocks.
    pub data_end: u64,
    /// Pages of its own index, which only `verify` and a rebuilding read.
    pub index_pages: Vec<Range<u64>>,
    /// For each leaf with bytes in it (ties included) and each of its extents: the leaf's number
    /// and the bytes.
    pub extents: Vec<(u32, Range<u64>)>,
}

impl DataFile {
    /// Takes the file `name` of a step apart; `index` is the whole step's.
    pub fn of(step: &Path, name: &str, index: &Index) -> Result<Self, String> {
        let path = step.join(name);
        let bytes = std::fs::read(&path).map_err(|error| error.to_string())?;
        let length = bytes.len() as u64;
        let trailer = bytes.len().checked_sub(TRAILER_BYTES as usize).ok_or("it has no trailer")?;
        let trailer =
            Trailer::decode(&bytes[trailer..], &path, None, None).map_err(|error| error.to_string())?;
        let pages = pages_of(&trailer, &bytes[trailer.footer_offset as usize..], &path)
            .map_err(|error| error.to_string())?;
        let index_pages = pages.iter().filter(|page| page.kind == PageKind::Index);
        let number = index.files.iter().position(|file| &*file.name == name).ok_or("no index names it")?;
        let mut extents = Vec::new();
        for (leaf, record) in (0_u32..).zip(&index.leaves) {
            let stored = match record {
                LeafRecord::Alias { of } => index.leaves.get(*of as usize),
                record => Some(record),
            };
            let list = match stored {
                Some(LeafRecord::Tensor(tensor)) => tensor.chunks.iter().map(|chunk| chunk.extent).collect(),
                Some(LeafRecord::Object(extent)) => vec![*extent],
                _ => Vec::new(),
            };
            for extent in list {
                if extent.source == Source::Own(number as u32) && extent.length > 0 {
                    extents.push((leaf, extent.offset..extent.offset + extent.length));
                }
            }
        }
        Ok(Self {
            path,
            length,
            block_bytes: trailer.block_bytes,
            data_end: trailer.footer_offset,
            index_pages: index_pages.map(|page| page.offset..page.offset + page.length).collect(),
            extents,
        })
    }

    /// Everything but the data: header, footer, trailer.
    pub fn metadata(&self) -> [Range<u64>; 2] {
        [0..HEADER_BYTES, self.data_end..self.length]
    }

    /// True if a byte is in a page that no restore reads.
    pub fn is_index_page(&self, byte: u64) -> bool {
        self.index_pages.iter().any(|page| page.contains(&byte))
    }

    /// The block of a byte.
    pub fn block_of(&self, byte: u64) -> u64 {
        byte / self.block_bytes
    }

    /// The leaves with bytes in a block.
    pub fn leaves_in(&self, block: u64) -> Vec<u32> {
        let bytes = block * self.block_bytes..(block + 1) * self.block_bytes;
        let hit = |range: &Range<u64>| range.start < bytes.end && bytes.start < range.end;
        let mut leaves: Vec<u32> =
            self.extents.iter().filter(|(_, range)| hit(range)).map(|(leaf, _)| *leaf).collect();
        leaves.sort_unstable();
        leaves.dedup();
        leaves
    }
}
