//! The front of an index file: a fixed header, then the root table, which lists pages, files and
//! leaves.

use std::path::Path;

use rkyv::rancor::BoxedError;
use rkyv::{Archive, Serialize};

use super::columns::{Column, ReadResult, Texts};
use crate::error::{Error, Result};
use crate::format::bytes::{Put, open_front, seal_front};
use crate::format::checksum::crc32c;
use crate::format::index::FileRecord;
use crate::format::page::{PageKind, PageRef};
use crate::format::{FORMAT_VERSION, features, limit};
use crate::leaf_path::Component;
use crate::limits::{MAX_FILES, MAX_LEAVES, MAX_NODES, MAX_PAGE_BYTES, MAX_PAGES, MAX_ROOT_BYTES};
use crate::tree::{NodeKind, Tree};

/// The size of the header in bytes. The root table follows it.
pub const INDEX_HEADER_BYTES: u64 = 128;
/// See [`crate::format::header`].
const MAGIC: [u8; 8] = *b"\x89SWI\r\n\x1a\n";

/// The root table, version 1; columns as in [`super::page`]. Never change it.
#[derive(Archive, Serialize, Debug, Default)]
pub(super) struct IndexRootV1 {
    /// The length of each page in bytes, in order. The first page follows the outline (or the root
    /// table). Each other page follows its predecessor.
    pub page_length: Vec<u64>,
    /// CRC-32C of each page.
    pub page_crc: Vec<u32>,
    /// The number of leaves in each page.
    pub page_leaves: Vec<u64>,
    /// The hash of each leaf's path ([`leaf_hashes`]).
    pub leaf_hash: Vec<u32>,
    /// The length of each file's name.
    pub file_name: Vec<u32>,
    /// The names, one after the other.
    pub file_names: String,
    /// The length of each file in bytes.
    pub file_length: Vec<u64>,
    /// The id of each file, as in its header and trailer: low and high half.
    pub file_id: Vec<u64>,
    /// The CRC of each file's trailer.
    pub file_trailer_crc: Vec<u32>,
}

const _: () = assert!(size_of::<ArchivedIndexRootV1>() == 9 * 8);
const _: () = assert!(align_of::<ArchivedIndexRootV1>() == 1);

/// The content of an index file's front.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root {
    /// The places of the pages, in order, each with its first leaf.
    pub pages: Vec<PageRef>,
    /// The files that extents name.
    pub files: Vec<FileRecord>,
    /// The hash of each leaf's path, in leaf order. Different paths may have equal hashes.
    pub leaf_hashes: Vec<u32>,
    /// Number of nodes of the whole tree.
    pub nodes: u64,
}

/// The fixed header of an index file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexHeader {
    /// The length of the file in bytes.
    pub file_length: u64,
    /// The length of the root table in bytes. It begins at [`INDEX_HEADER_BYTES`].
    pub root_length: u64,
    /// CRC-32C of the root table.
    pub root_crc: u32,
    /// Number of leaves.
    pub leaves: u64,
    /// Number of nodes.
    pub nodes: u64,
    /// The length in bytes of the outline after the root table. 0 without an outline.
    pub outline_length: u64,
    /// CRC-32C of the outline.
    pub outline_crc: u32,
    /// True if chunks are compressed.
    pub is_compressed: bool,
}

impl IndexHeader {
    /// Offset of the first page.
    pub fn pages_at(&self) -> u64 {
        INDEX_HEADER_BYTES + self.root_length + self.outline_length
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(INDEX_HEADER_BYTES as usize);
        bytes.put(&MAGIC);
        bytes.put_u32(0); // placeholder of the CRC
        bytes.put_u32(FORMAT_VERSION);
        let outline = if self.outline_length > 0 { features::OUTLINE } else { 0 };
        bytes.put_u64(outline | if self.is_compressed { features::COMPRESSED_INDEX } else { 0 });
        bytes.put_u64(0); // optional features
        bytes.put_u64(self.file_length);
        bytes.put_u64(self.root_length);
        bytes.put_u32(self.root_crc);
        bytes.put_u32(0);
        bytes.put_u64(self.leaves);
        bytes.put_u64(self.nodes);
        bytes.put_u64(self.outline_length);
        bytes.put_u32(self.outline_crc);
        bytes.resize(INDEX_HEADER_BYTES as usize, 0);
        seal_front(&mut bytes);
        bytes
    }

    /// Reads and checks the first [`INDEX_HEADER_BYTES`] of an index file.
    pub fn decode(bytes: &[u8], file: &Path) -> Result<Self> {
        let cut = || Error::corrupt(file, "it is too short to hold the header of an index");
        let front = bytes.get(..INDEX_HEADER_BYTES as usize).ok_or_else(cut)?;
        let mut fields = open_front(front, MAGIC, "the header of an index", file)?;
        let mut read = || {
            let (version, required, _optional) = (fields.u32()?, fields.u64()?, fields.u64()?);
            let (file_length, root_length, root_crc) = (fields.u64()?, fields.u64()?, fields.u32()?);
            fields.u32()?;
            let (leaves, nodes) = (fields.u64()?, fields.u64()?);
            let (outline_length, outline_crc) = (fields.u64()?, fields.u32()?);
            let is_compressed = required & features::COMPRESSED_INDEX != 0;
            let header = Self {
                file_length,
                root_length,
                root_crc,
                leaves,
                nodes,
                outline_length,
                outline_crc,
                is_compressed,
            };
            Some((version, required, header))
        };
        let (version, required, header) = read().ok_or_else(cut)?;
        let format = |what: String| Error::Format { file: file.to_owned(), what };
        if version != FORMAT_VERSION {
            return Err(format(format!(
                "it is an index of version {version}; this version of stepwell reads version {FORMAT_VERSION}"
            )));
        }
        features::check_required(required, features::OF_INDEXES).map_err(format)?;
        limit("the size of the root table of an index in bytes", header.root_length, MAX_ROOT_BYTES)?;
        limit("the number of leaves", header.leaves, MAX_LEAVES)?;
        limit("the number of nodes", header.nodes, MAX_NODES)?;
        limit("the size of the outline of an index in bytes", header.outline_length, MAX_PAGE_BYTES)?;
        if (required & features::OUTLINE != 0) != (header.outline_length > 0) {
            return Err(Error::corrupt(file, "its header does not say whether it has an outline"));
        }
        if header.file_length < header.pages_at() {
            return Err(Error::corrupt(file, "its header says that it is shorter than its root table"));
        }
        Ok(header)
    }
}

impl Root {
    /// Encodes a root table.
    pub(super) fn encode(&self) -> Result<Vec<u8>> {
        let mut columns = IndexRootV1 { leaf_hash: self.leaf_hashes.clone(), ..IndexRootV1::default() };
        for page in &self.pages {
            columns.page_length.push(page.length);
            columns.page_crc.push(page.crc);
            columns.page_leaves.push(page.count);
        }
        for file in &self.files {
            columns.file_name.push(file.name.len() as u32);
            columns.file_names.push_str(&file.name);
            columns.file_length.push(file.length);
            columns.file_id.extend([file.file_id as u64, (file.file_id >> 64) as u64]);
            columns.file_trailer_crc.push(file.trailer_crc);
        }
        let bytes = rkyv::to_bytes::<BoxedError>(&columns)
            .map_err(|error| Error::internal("a root table that can be encoded", error.to_string()))?;
        limit("the size of the root table of an index in bytes", bytes.len() as u64, MAX_ROOT_BYTES)?;
        Ok(bytes.into_vec())
    }

    /// Decodes and checks the root table of an index file. `bytes` are at least the first
    /// `INDEX_HEADER_BYTES + header.root_length` bytes of the file.
    pub fn decode(header: &IndexHeader, bytes: &[u8], file: &Path) -> Result<Self> {
        let table = bytes
            .get(INDEX_HEADER_BYTES as usize..)
            .and_then(|rest| rest.get(..usize::try_from(header.root_length).ok()?))
            .ok_or_else(|| Error::corrupt(file, "it is too short to hold its root table"))?;
        if crc32c(table) != header.root_crc {
            return Err(Error::corrupt(file, "the checksum of its root table does not hold"));
        }
        Self::take(header, table)
            .map_err(|what| Error::corrupt(file, format!("its root table makes no sense: {what}")))
    }

    fn take(header: &IndexHeader, table: &[u8]) -> ReadResult<Self> {
        let root = rkyv::access::<ArchivedIndexRootV1, BoxedError>(table)
            .map_err(|error| format!("it is not well formed: {error}"))?;
        if root.leaf_hash.len() as u64 != header.leaves {
            return Err("it does not list every leaf".to_owned());
        }
        if root.page_length.len() as u64 > MAX_PAGES || root.file_name.len() as u64 > MAX_FILES {
            return Err("it lists too many pages or files".to_owned());
        }
        Ok(Self {
            pages: Self::pages(header, root)?,
            files: Self::files(root)?,
            leaf_hashes: root.leaf_hash.iter().map(|hash| hash.to_native()).collect(),
            nodes: header.nodes,
        })
    }

    fn pages(header: &IndexHeader, root: &ArchivedIndexRootV1) -> ReadResult<Vec<PageRef>> {
        let mut lengths = Column::new(&root.page_length, "page_length");
        let mut crcs = Column::new(&root.page_crc, "page_crc");
        let mut leaves = Column::new(&root.page_leaves, "page_leaves");
        let mut pages = Vec::with_capacity(lengths.len());
        let (mut offset, mut first) = (header.pages_at(), 0_u64);
        for _ in 0..lengths.len() {
            let (length, crc, count) = (lengths.next()?, crcs.next()?, leaves.next()?);
            if length > MAX_PAGE_BYTES {
                return Err(format!("a page has {length} bytes, more than the limit of {MAX_PAGE_BYTES}"));
            }
            pages.push(PageRef { kind: PageKind::Index, offset, length, crc, first, count });
            offset += length; // at most MAX_PAGES * MAX_PAGE_BYTES
            first = first.checked_add(count).ok_or("its pages hold too many leaves")?;
        }
        crcs.end()?;
        leaves.end()?;
        if offset != header.file_length || first != header.leaves {
            return Err("its pages are not what its header says".to_owned());
        }
        Ok(pages)
    }

    fn files(root: &ArchivedIndexRootV1) -> ReadResult<Vec<FileRecord>> {
        let mut name_lengths = Column::new(&root.file_name, "file_name");
        let mut names = Texts::new(root.file_names.as_str(), "file_names");
        let mut lengths = Column::new(&root.file_length, "file_length");
        let mut ids = Column::new(&root.file_id, "file_id");
        let mut crcs = Column::new(&root.file_trailer_crc, "file_trailer_crc");
        let mut files = Vec::with_capacity(name_lengths.len());
        for _ in 0..name_lengths.len() {
            files.push(FileRecord {
                name: names.take(name_lengths.next()? as usize)?.into(),
                length: lengths.next()?,
                file_id: u128::from(ids.next()?) | u128::from(ids.next()?) << 64,
                trailer_crc: crcs.next()?,
                within: None,
            });
        }
        names.end()?;
        lengths.end()?;
        ids.end()?;
        crcs.end()?;
        Ok(files)
    }
}

pub(super) fn component_hash(parent: u32, component: &Component, scratch: &mut Vec<u8>) -> u32 {
    use super::page::tag;
    scratch.clear();
    scratch.put_u32(parent);
    match component {
        Component::Key(name) | Component::Field(name) => {
            scratch.push(if matches!(component, Component::Key(_)) { tag::KEY } else { tag::FIELD });
            scratch.put(name.as_bytes());
        }
        Component::Int(number) => {
            scratch.push(tag::INT);
            scratch.put(&number.to_le_bytes());
        }
        Component::Index(number) => {
            scratch.push(tag::INDEX);
            scratch.put(&i64::from(*number).to_le_bytes());
        }
    }
    crc32c(scratch)
}

/// Returns the hashes of all leaves' paths. Each node is hashed once. The tree must be checked.
///
/// The hash of a path starts at 0, and takes one component after the other. Each step is the
/// CRC-32C of the hash so far (u32), the tag of the component (one byte, as in [`super::page`]),
/// and its name in UTF-8 or its number as i64.
pub(super) fn leaf_hashes(tree: &Tree) -> Vec<u32> {
    let mut hashes = Vec::with_capacity(tree.leaf_count());
    let mut open: Vec<(u32, u32)> = Vec::new();
    let mut scratch = Vec::new();
    for (number, node) in tree.nodes().iter().enumerate() {
        while open.last().is_some_and(|&(container, _)| container != node.parent) {
            open.pop();
        }
        let parent = open.last().map_or(0, |&(_, hash)| hash);
        let hash = match &node.component {
            Some(component) => component_hash(parent, component, &mut scratch),
            None => 0,
        };
        match node.kind {
            NodeKind::Container(_) => open.push((number as u32, hash)),
            NodeKind::Leaf(_) => hashes.push(hash),
        }
    }
    hashes
}
