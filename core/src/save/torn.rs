//! Detection of torn saves, for debugging: the state changed between the call of `save` and its
//! capture. Everything is read twice, first while the caller waits.

use std::collections::HashMap;

use super::windows::{PartSource, Windows};
use crate::format::checksum::crc32c;
use crate::format::index::Index;
use crate::{Error, Result};

/// The first reading of windows: the checksum of each part of a leaf, by window number.
#[derive(Default)]
pub(super) struct FirstReading(HashMap<u32, Vec<u32>>);

impl FirstReading {
    /// Records the checksums of a window.
    pub(super) fn note(&mut self, all: &Windows, window: u32, bytes: &[u8]) {
        let crcs = parts(all, window, bytes).map(|(_, bytes)| crc32c(bytes)).collect();
        self.0.insert(window, crcs);
    }

    /// Checks that a recorded window is unchanged. [`Error::Torn`] names the first changed leaf.
    pub(super) fn check(&self, all: &Windows, window: u32, bytes: &[u8], indexes: &[Index]) -> Result<()> {
        let Some(crcs) = self.0.get(&window) else { return Ok(()) };
        let changed = parts(all, window, bytes).zip(crcs).find(|((_, bytes), crc)| crc32c(bytes) != **crc);
        let Some(((leaf, _), _)) = changed else { return Ok(()) };
        let leaf = all.leaves.get(leaf as usize);
        let path = leaf
            .and_then(|leaf| Some(indexes.get(leaf.item as usize)?.tree.leaf_path(leaf.number).to_string()));
        Err(Error::Torn { leaf: path.unwrap_or_default() })
    }
}

/// Returns the parts of leaves in a window: the leaf's number, and its bytes there.
fn parts<'a>(all: &'a Windows, window: u32, bytes: &'a [u8]) -> impl Iterator<Item = (u32, &'a [u8])> {
    let parts = all.list.get(window as usize).and_then(|window| all.parts.get(window.parts.clone()));
    parts.unwrap_or_default().iter().filter_map(move |part| {
        let PartSource::Chunk(chunk) = part.source else { return None };
        let at = part.at as usize;
        Some((all.chunks.get(chunk as usize)?.leaf, bytes.get(at..at + part.len as usize)?))
    })
}
