//! The outline of a large index: the whole index without the chunks. With many ranks, nearly all of
//! an index is chunks. A reader reads the outline first, then the pages of the leaves that it
//! wants. So thousands of ranks need not read all pages each.

use std::path::Path;

use super::write::{self, Paging};
use super::{
    Bounds, INDEX_HEADER_BYTES, IndexHeader, PagePart, Pages, Root, check, check_declared, decode_part,
    on_read, root,
};
use crate::error::{Error, Result};
use crate::format::checksum::{crc32c, crc32c_of_both};
use crate::format::index::{Chunks, Index, LeafRecord, TensorRecord};
use crate::format::page::{PageKind, PageRef};

/// The least number of pages of an index with an outline. With fewer pages, none can be skipped.
const LEAST_PAGES: usize = 4;
/// The least number of chunks per leaf of an index with an outline. The outline is then small.
const LEAST_CHUNKS: usize = 4;

/// True if an index of so many pages gets an outline.
pub(super) fn is_worthwhile(index: &Index, pages: usize) -> bool {
    let chunks = || index.leaves.iter().map(|leaf| leaf.extents().count()).sum::<usize>();
    pages >= LEAST_PAGES && chunks() >= LEAST_CHUNKS * index.leaves.len()
}

/// Encodes the outline of an index. Empty if it would be larger than a page may be.
pub(super) fn encode(index: &Index) -> Result<Vec<u8>> {
    let leaves = index.leaves.iter().map(without_chunks).collect();
    let outline = Index { tree: index.tree.clone(), leaves, files: Vec::new() };
    match write::pages(&outline, Paging { bytes: u64::MAX, leaves: u64::MAX }) {
        Ok(mut pages) => Ok(pages.pop().map(|(bytes, _)| bytes).unwrap_or_default()),
        Err(Error::Limit { .. }) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Decodes and checks the outline in the front of an index file, if it has one.
pub(super) fn decode(header: &IndexHeader, root: &Root, bytes: &[u8], file: &Path) -> Result<Option<Index>> {
    if header.outline_length == 0 {
        return Ok(None);
    }
    let page = PageRef {
        kind: PageKind::Index,
        offset: INDEX_HEADER_BYTES + header.root_length,
        length: header.outline_length,
        crc: header.outline_crc,
        first: 0,
        count: header.leaves,
    };
    let bytes = page.slice(bytes, 0).ok_or_else(|| Error::corrupt(file, "its outline is cut"))?;
    let pages = Pages::open(vec![(page, bytes)], file)?;
    let outline = Index { tree: pages.tree()?, leaves: pages.leaves(Vec::new())?, files: root.files.clone() };
    check(&outline, Bounds::Item).map_err(|fault| on_read(&outline.tree, fault, file))?;
    let has_chunks =
        |leaf: &LeafRecord| matches!(leaf, LeafRecord::Tensor(tensor) if !tensor.chunks.is_empty());
    let is_listed = root::leaf_hashes(&outline.tree) == root.leaf_hashes;
    if !is_listed
        || outline.tree.nodes().len() as u64 != header.nodes
        || outline.leaves.iter().any(has_chunks)
    {
        return Err(Error::corrupt(file, "its outline is not that of its pages"));
    }
    Ok(Some(outline))
}

/// True if the outline is that of the index.
pub(super) fn is_of(outline: &Index, index: &Index) -> bool {
    outline.tree == index.tree && are_of(&outline.leaves, &index.leaves)
}

fn are_of(outlined: &[LeafRecord], leaves: &[LeafRecord]) -> bool {
    let same = |(outlined, leaf): (&LeafRecord, &LeafRecord)| match (outlined, leaf) {
        (LeafRecord::Tensor(outlined), LeafRecord::Tensor(tensor)) => {
            let TensorRecord { dtype, shape, chunks: _ } = outlined;
            *dtype == tensor.dtype && *shape == tensor.shape
        }
        (outlined, leaf) => outlined == leaf,
    };
    outlined.len() == leaves.len() && outlined.iter().zip(leaves).all(same)
}

fn without_chunks(leaf: &LeafRecord) -> LeafRecord {
    match leaf {
        LeafRecord::Tensor(TensorRecord { dtype, shape, chunks: _ }) => {
            LeafRecord::Tensor(TensorRecord { dtype: *dtype, shape: shape.clone(), chunks: Chunks::new() })
        }
        other => other.clone(),
    }
}

/// The front of an index file: its outline and the list of its pages.
#[derive(Debug)]
pub struct Outline {
    root: Root,
    /// The index, whose tensors have no chunks.
    index: Index,
    /// True if chunks are compressed.
    is_compressed: bool,
}

impl Outline {
    /// Decodes the first [`IndexHeader::pages_at`] bytes of a file with an outline. `crc` is the
    /// checksum of the whole file, from the manifest. It also covers the checksums of the pages in
    /// the root table.
    pub fn decode(header: &IndexHeader, bytes: &[u8], crc: u32, file: &Path) -> Result<Self> {
        let root = Root::decode(header, bytes, file)?;
        let index = decode(header, &root, bytes, file)?
            .ok_or_else(|| Error::corrupt(file, "it has no outline, but its manifest names one"))?;
        let front = bytes.get(..header.pages_at() as usize).unwrap_or(bytes);
        let found =
            root.pages.iter().fold(crc32c(front), |crc, page| crc32c_of_both(crc, page.crc, page.length));
        if found != crc {
            return Err(Error::corrupt(file, "it is not the index that its manifest names"));
        }
        Ok(Self { root, index, is_compressed: header.is_compressed })
    }

    /// Returns the index without chunks.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Returns the pages, in order.
    pub fn pages(&self) -> &[PageRef] {
        &self.root.pages
    }

    /// Returns the number of the page with a leaf.
    pub fn page_of(&self, leaf: u32) -> Option<usize> {
        let leaf = u64::from(leaf);
        let after = self.root.pages.partition_point(|page| page.first <= leaf);
        let page = after.checked_sub(1)?;
        self.root.pages.get(page).is_some_and(|found| leaf - found.first < found.count).then_some(page)
    }

    /// Decodes the leaves of a page, with their chunks.
    pub fn leaves(&self, page: &PageRef, bytes: &[u8], file: &Path) -> Result<Vec<LeafRecord>> {
        let PagePart { first_leaf, tree, leaves } = decode_part(&self.root, page, bytes, file)?;
        let first = usize::try_from(first_leaf).unwrap_or(usize::MAX);
        let its = first..first.saturating_add(leaves.len());
        let listed = self.root.leaf_hashes.get(its.clone());
        let outlined = self.index.leaves.get(its).unwrap_or_default();
        if listed != Some(&root::leaf_hashes(&tree)[..]) || !are_of(outlined, &leaves) {
            let what =
                format!("the index page at offset {} does not hold the leaves of its outline", page.offset);
            return Err(Error::corrupt(file, what));
        }
        check_declared(&leaves, self.is_compressed, file)?;
        Ok(leaves)
    }

    /// True if chunks are compressed.
    pub fn is_compressed(&self) -> bool {
        self.is_compressed
    }
}
