//! Version 1 of the index: the file `iN/index` of an item, and the same pages in the footers of
//! data files.
//!
//! ```text
//! 0     header, 128 bytes: magic, own CRC, version, features, lengths, CRC of the root table
//! 128   root table (rkyv): where the pages are and their CRCs, hashes of leaf paths, files
//! …     outline, of a large index: one page with all of it but the chunks
//! …     pages (rkyv), one after the other, each about 1 MiB
//! ```
//!
//! Pages are self-contained: each repeats the containers above its first node. A large index is
//! nearly all chunks. Its reader reads the [`Outline`], then the pages with the leaves whose chunks
//! it wants. Bytes are checked before they are interpreted (CRC, then bytecheck, then the columns,
//! then [`super::check`]). Writers check by the same rules. Encoding is deterministic, and decoding
//! returns the encoded index.
//!
//! The leader of a commit writes index files, the save pipeline writes footers, every reader reads
//! them.

mod columns;
mod outline;
mod page;
mod read;
mod root;
mod spelling;
#[cfg(test)]
pub(super) mod tests;
mod write;

use std::ops::Range;
use std::path::Path;

pub use self::outline::Outline;
pub use self::root::{INDEX_HEADER_BYTES, IndexHeader, Root};
pub use self::spelling::{ComponentSpelling, KindSpelling};
use self::write::Paging;
pub(crate) use super::check::Bounds;
use super::check::{IndexFault, check, check_counts, check_leaves, check_tree};
use super::checksum::crc32c;
use super::index::{FileRecord, Index, LeafRecord};
use super::limit;
use super::page::{PageRef, open};
use crate::error::{Error, Result};
use crate::limits::{MAX_LEAVES, MAX_NODES, MAX_PAGES};
use crate::tree::Tree;

/// An index file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexFile {
    /// Its content.
    pub bytes: Vec<u8>,
    /// CRC-32C of the whole file, which the manifest records.
    pub crc: u32,
}

/// Encodes the index file of an item. Fails for an index that [`decode`] would refuse.
pub fn encode(index: &Index) -> Result<IndexFile> {
    encode_as(index, Paging::DEFAULT, outline::is_worthwhile)
}

/// Encodes an index file. `is_outlined` decides whether an index of so many pages gets an outline.
fn encode_as(index: &Index, paging: Paging, is_outlined: fn(&Index, usize) -> bool) -> Result<IndexFile> {
    let pages = pages(index, Bounds::Item, paging)?;
    let mut root = Root {
        pages: pages.iter().map(|&(_, page)| page).collect(),
        files: index.files.clone(),
        leaf_hashes: root::leaf_hashes(&index.tree),
        nodes: index.tree.nodes().len() as u64,
    };
    let table = root.encode()?;
    root.pages.clear();
    let outline = if is_outlined(index, pages.len()) { outline::encode(index)? } else { Vec::new() };
    let pages_length: usize = pages.iter().map(|(bytes, _)| bytes.len()).sum();
    let file_length = INDEX_HEADER_BYTES as usize + table.len() + outline.len() + pages_length;
    let header = IndexHeader {
        file_length: file_length as u64,
        root_length: table.len() as u64,
        root_crc: crc32c(&table),
        leaves: index.leaves.len() as u64,
        nodes: root.nodes,
        outline_length: outline.len() as u64,
        outline_crc: crc32c(&outline),
        is_compressed: index.is_compressed(),
    };
    let mut bytes = Vec::with_capacity(file_length);
    bytes.extend_from_slice(&header.encode());
    bytes.extend_from_slice(&table);
    bytes.extend_from_slice(&outline);
    for (page, _) in &pages {
        bytes.extend_from_slice(page);
    }
    let crc = crc32c(&bytes);
    Ok(IndexFile { bytes, crc })
}

/// Decodes and checks a whole index file. `file` is for messages. The result fulfils all that
/// [`super::check`] lists. It is not checked that chunks tile their tensors.
pub fn decode(bytes: &[u8], file: &Path) -> Result<Index> {
    let opened = Opened::new(bytes, file)?;
    let index = opened.join(opened.tree()?, opened.leaves(Vec::new())?)?;
    opened.check(&index, 0..index.leaves.len())?;
    Ok(index)
}

/// An index file with valid checksums. The tree and the leaf records are decoded separately, and
/// leaves are checked by ranges, so that two threads can share the work.
pub struct Opened<'a> {
    file: &'a Path,
    header: IndexHeader,
    root: Root,
    outline: Option<Index>,
    pages: Pages<'a>,
}

impl<'a> Opened<'a> {
    /// Opens an index file and compares all checksums. Does not decode the pages.
    pub fn new(bytes: &'a [u8], file: &'a Path) -> Result<Self> {
        let header = IndexHeader::decode(bytes, file)?;
        if header.file_length != bytes.len() as u64 {
            return Err(Error::corrupt(
                file,
                format!("it has {} bytes, its header says {}", bytes.len(), header.file_length),
            ));
        }
        let root = Root::decode(&header, bytes, file)?;
        let outline = outline::decode(&header, &root, bytes, file)?;
        let cut = || Error::corrupt(file, "its pages are cut");
        let pages =
            root.pages.iter().map(|page| page.slice(bytes, 0).map(|bytes| (*page, bytes)).ok_or_else(cut));
        let pages = Pages::open(pages.collect::<Result<Vec<_>>>()?, file)?;
        Ok(Self { file, header, root, outline, pages })
    }

    /// Decodes and checks the tree.
    pub fn tree(&self) -> Result<Tree> {
        let tree = self.pages.tree()?;
        if let Err(fault) = check_tree(&tree) {
            return Err(on_read(&tree, fault, self.file));
        }
        if tree.nodes().len() as u64 != self.header.nodes || root::leaf_hashes(&tree) != self.root.leaf_hashes
        {
            let what = "its root table does not list the leaves that its pages hold";
            return Err(Error::corrupt(self.file, what));
        }
        Ok(tree)
    }

    /// Returns the number of leaf records to reserve memory for.
    pub fn leaf_count(&self) -> usize {
        self.pages.leaf_count()
    }

    /// Returns the records of all leaves, in order, unchecked. Reuses the memory of the empty
    /// vector `room`.
    pub fn leaves(&self, room: Vec<LeafRecord>) -> Result<Vec<LeafRecord>> {
        self.pages.leaves(room)
    }

    /// Joins a tree and leaves to an index. Each leaf must pass [`Self::check`] before it is used.
    pub fn join(&self, tree: Tree, leaves: Vec<LeafRecord>) -> Result<Index> {
        let index = Index { tree, leaves, files: self.root.files.clone() };
        check_counts(&index, Bounds::Item).map_err(|fault| on_read(&index.tree, fault, self.file))?;
        if self.outline.as_ref().is_some_and(|outline| !outline::is_of(outline, &index)) {
            return Err(Error::corrupt(self.file, "its outline is not that of its pages"));
        }
        Ok(index)
    }

    /// Checks some leaves of an index from [`Self::join`].
    pub fn check(&self, index: &Index, leaves: Range<usize>) -> Result<()> {
        let records = index.leaves.get(leaves.clone()).unwrap_or_default();
        check_declared(records, self.header.is_compressed, self.file)?;
        check_leaves(index, leaves, Bounds::Item).map_err(|fault| on_read(&index.tree, fault, self.file))
    }
}

/// The pages of an index in order, with valid checksums.
struct Pages<'a> {
    file: &'a Path,
    pages: Vec<(PageRef, &'a page::ArchivedIndexPageV1)>,
}

impl<'a> Pages<'a> {
    fn open(pages: Vec<(PageRef, &'a [u8])>, file: &'a Path) -> Result<Self> {
        let archived = pages.into_iter().map(|(page, bytes)| {
            let payload = open(&page, bytes, file)?;
            let archived = read::access(payload, page.count).map_err(|what| in_page(&page, &what, file))?;
            Ok((page, archived))
        });
        Ok(Self { file, pages: archived.collect::<Result<Vec<_>>>()? })
    }

    /// Returns the number of leaves to reserve memory for, because growing would copy them.
    fn leaf_count(&self) -> usize {
        self.pages.iter().map(|(_, page)| read::leaf_count(page)).sum::<usize>().min(MAX_LEAVES as usize)
    }

    fn no_memory(&self) -> Error {
        Error::io("read", self.file, std::io::ErrorKind::OutOfMemory)
    }

    fn tree(&self) -> Result<Tree> {
        let nodes = self.pages.iter().map(|(_, page)| page.node_parent.len()).sum::<usize>();
        let mut assembler = read::Assembler::default();
        let room = assembler.tree.try_reserve(nodes.min(MAX_NODES as usize), self.leaf_count());
        room.map_err(|_| self.no_memory())?;
        for (page, archived) in &self.pages {
            assembler.add(archived).map_err(|what| in_page(page, &what, self.file))?;
        }
        Ok(assembler.tree)
    }

    fn leaves(&self, room: Vec<LeafRecord>) -> Result<Vec<LeafRecord>> {
        let mut leaves = room;
        leaves.try_reserve_exact(self.leaf_count()).map_err(|_| self.no_memory())?;
        for (page, archived) in &self.pages {
            read::leaves(archived, &mut leaves).map_err(|what| in_page(page, &what, self.file))?;
        }
        Ok(leaves)
    }
}

/// The leaves of one page of an index file.
#[derive(Clone, Debug, PartialEq)]
pub struct PagePart {
    /// The number of its first leaf in the item's index. Aliases name leaves by these numbers.
    pub first_leaf: u64,
    /// The containers and leaves of this page, below the containers that lead to them.
    pub tree: Tree,
    /// The records of its leaves.
    pub leaves: Vec<LeafRecord>,
}

/// Decodes and checks one page of an index file.
pub fn decode_part(root: &Root, page: &PageRef, bytes: &[u8], file: &Path) -> Result<PagePart> {
    let payload = open(page, bytes, file)?;
    let mut assembler = read::Assembler::part();
    let mut leaves = Vec::new();
    read::access(payload, page.count)
        .and_then(|archived| assembler.add(archived).and_then(|()| read::leaves(archived, &mut leaves)))
        .map_err(|what| in_page(page, &what, file))?;
    let index = Index { tree: assembler.tree, leaves, files: root.files.clone() };
    check(&index, Bounds::Part { leaves: root.leaf_hashes.len() as u64 })
        .map_err(|fault| on_read(&index.tree, fault, file))?;
    Ok(PagePart { first_leaf: page.first, tree: index.tree, leaves: index.leaves })
}

/// Encodes the pages of an index. Returns each with its entry, whose offset is not set.
pub(super) fn encode_pages(index: &Index, bounds: Bounds) -> Result<Vec<(Vec<u8>, PageRef)>> {
    pages(index, bounds, Paging::DEFAULT)
}

/// Checks that an index can be written.
pub(crate) fn check_to_write(index: &Index, bounds: Bounds) -> Result<()> {
    check(index, bounds).map_err(|fault| match fault {
        IndexFault::Limit(error) => error,
        IndexFault::Node(node, what) => Error::Leaf { leaf: index.tree.path(node).to_string(), what },
        IndexFault::Whole(what) => Error::internal("a valid index to write", what),
    })
}

fn pages(index: &Index, bounds: Bounds, paging: Paging) -> Result<Vec<(Vec<u8>, PageRef)>> {
    check_to_write(index, bounds)?;
    let pages = write::pages(index, paging)?;
    limit("the pages of an index", pages.len() as u64, MAX_PAGES)?;
    Ok(pages)
}

/// Decodes an index from all of its pages, in order.
pub(super) fn decode_pages(
    pages: Vec<(PageRef, &[u8])>,
    files: Vec<FileRecord>,
    bounds: Bounds,
    file: &Path,
) -> Result<Index> {
    let pages = Pages::open(pages, file)?;
    let index = Index { tree: pages.tree()?, leaves: pages.leaves(Vec::new())?, files };
    check(&index, bounds).map_err(|fault| on_read(&index.tree, fault, file))?;
    Ok(index)
}

/// Checks that an index with compressed chunks says so, because older readers must refuse it.
fn check_declared(leaves: &[LeafRecord], is_compressed: bool, file: &Path) -> Result<()> {
    if is_compressed || !leaves.iter().any(LeafRecord::is_compressed) {
        return Ok(());
    }
    Err(Error::corrupt(file, "it has compressed chunks, and its header does not say so"))
}

fn in_page(page: &PageRef, what: &str, file: &Path) -> Error {
    Error::corrupt(file, format!("the index page at offset {} makes no sense: {what}", page.offset))
}

fn on_read(tree: &Tree, fault: IndexFault, file: &Path) -> Error {
    match fault {
        IndexFault::Limit(error) => error,
        IndexFault::Node(node, what) => Error::Corrupt {
            file: file.to_owned(),
            leaf: Some(tree.path(node).to_string()),
            block: None,
            what: format!("the index makes no sense: {what}"),
        },
        IndexFault::Whole(what) => Error::corrupt(file, format!("the index makes no sense: {what}")),
    }
}
