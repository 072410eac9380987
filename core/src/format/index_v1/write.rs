//! Encodes an index into pages.

use std::collections::HashMap;

use rkyv::rancor::BoxedError;

use super::page::{IndexPageV1, tag};
use super::spelling::{ComponentSpelling, KindSpelling};
use crate::error::{Error, Result};
use crate::format::index::{ChunkRegion, Codec, Extent, Index, Integrity, LeafRecord, Source, TensorRecord};
use crate::format::page::{PageKind, PageRef, TARGET_PAGE_BYTES, encode};
use crate::tree::{ContainerKind, Node, NodeKind};

/// The size at which a page is closed. The first limit that is reached counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Paging {
    /// About so many bytes.
    pub bytes: u64,
    /// So many leaves.
    pub leaves: u64,
}

impl Paging {
    pub(super) const DEFAULT: Self = Self { bytes: TARGET_PAGE_BYTES, leaves: 64 << 10 };
}

/// Encodes the pages of a checked index. Returns each with its entry, whose offset is not set.
pub(super) fn pages(index: &Index, paging: Paging) -> Result<Vec<(Vec<u8>, PageRef)>> {
    let nodes = index.tree.nodes();
    let mut pages = Vec::new();
    let mut page = PageWriter::begin(nodes, &[], 0, 0);
    let mut open: Vec<u32> = Vec::new();
    let mut leaves = index.leaves.iter();
    let mut first_leaf = 0;
    for (number, node) in nodes.iter().enumerate() {
        while open.last().is_some_and(|&container| container != node.parent) {
            open.pop();
        }
        if page.bytes >= paging.bytes || page.leaves >= paging.leaves {
            let next = PageWriter::begin(nodes, &open, number, first_leaf + page.leaves);
            first_leaf += page.leaves;
            pages.push(std::mem::replace(&mut page, next).finish()?);
        }
        page.node(node, open.len());
        match node.kind {
            NodeKind::Container(_) => open.push(number as u32),
            NodeKind::Leaf(_) => {
                let leaf = leaves
                    .next()
                    .ok_or_else(|| Error::internal("a record for each leaf", "more leaves than records"))?;
                page.leaf(leaf);
            }
        }
    }
    if !page.columns.node_parent.is_empty() {
        pages.push(page.finish()?);
    }
    Ok(pages)
}

struct PageWriter<'a> {
    columns: IndexPageV1,
    kinds: HashMap<&'a ContainerKind, u32>,
    first_leaf: u64,
    leaves: u64,
    /// An estimate of the size of the archived form.
    bytes: u64,
}

impl<'a> PageWriter<'a> {
    /// Begins a page with the own node `first_node`, below the open containers.
    fn begin(nodes: &'a [Node], open: &[u32], first_node: usize, first_leaf: u64) -> Self {
        let columns = IndexPageV1 {
            first_node: first_node as u64,
            repeated_nodes: open.len() as u32,
            ..IndexPageV1::default()
        };
        let mut page = Self { columns, kinds: HashMap::new(), first_leaf, leaves: 0, bytes: 0 };
        for (depth, node) in open.iter().filter_map(|&node| nodes.get(node as usize)).enumerate() {
            page.node_below(node, depth.saturating_sub(1) as u32);
        }
        page
    }

    /// Adds an own node at a depth. Its parent is an own node, or the repeated node one level
    /// above.
    fn node(&mut self, node: &'a Node, depth: usize) {
        let columns = &self.columns;
        let local = match u64::from(node.parent).checked_sub(columns.first_node) {
            Some(own) => columns.repeated_nodes + own as u32,
            None => depth.saturating_sub(1) as u32,
        };
        self.node_below(node, local);
    }

    fn node_below(&mut self, node: &'a Node, parent: u32) {
        let kind = match &node.kind {
            NodeKind::Container(kind) => self.kind(kind),
            NodeKind::Leaf(_) => 0,
        };
        let columns = &mut self.columns;
        let ComponentSpelling { tag, number, name } = ComponentSpelling::of(node.component.as_ref());
        // Named components store the length of the name, which was checked before.
        let value = if matches!(tag, tag::KEY | tag::FIELD) { i64::from(name.len() as u32) } else { number };
        columns.node_parent.push(parent);
        columns.node_tag.push(tag);
        columns.node_value.push(value);
        columns.node_kind.push(kind);
        columns.names.push_str(name);
        self.bytes += 17 + name.len() as u64;
    }

    /// Returns the number of a container kind in this page, counted from 1.
    fn kind(&mut self, kind: &'a ContainerKind) -> u32 {
        if let Some(&known) = self.kinds.get(kind) {
            return known;
        }
        let KindSpelling { tag, number, type_name: name, protocol, inner } = KindSpelling::of(kind);
        let number = inner.map_or(number, |inner| u64::from(self.kind(inner)));
        let columns = &mut self.columns;
        columns.kind_tag.push(tag);
        columns.kind_number.push(number);
        columns.kind_name.push(name.len() as u32);
        columns.kind_protocol.push(protocol.len() as u32);
        columns.kind_texts.push_str(name);
        columns.kind_texts.push_str(protocol);
        self.bytes += 17 + (name.len() + protocol.len()) as u64;
        let number = columns.kind_tag.len() as u32;
        self.kinds.insert(kind, number);
        number
    }

    fn leaf(&mut self, leaf: &LeafRecord) {
        self.leaves += 1;
        self.bytes += 1;
        let tag = match leaf {
            LeafRecord::Tensor(tensor) => {
                self.tensor(tensor);
                tag::TENSOR
            }
            LeafRecord::Object(extent) => {
                self.extent(extent);
                tag::OBJECT
            }
            LeafRecord::Alias { of } => {
                self.columns.alias_of.push(*of);
                self.bytes += 4;
                tag::ALIAS
            }
        };
        self.columns.leaf_tag.push(tag);
    }

    fn tensor(&mut self, tensor: &TensorRecord) {
        let columns = &mut self.columns;
        columns.tensor_dtype.push(tensor.dtype.code());
        columns.tensor_ndim.push(tensor.shape.len() as u8);
        columns.tensor_dims.extend_from_slice(&tensor.shape);
        columns.tensor_chunks.push(tensor.chunks.len() as u32);
        self.bytes += 6 + 8 * tensor.shape.len() as u64;
        for chunk in &tensor.chunks {
            let columns = &mut self.columns;
            let numbers = columns.chunk_region.len();
            match &chunk.region {
                ChunkRegion::Box(region) => {
                    columns.chunk_tag.push(tag::BOX);
                    columns.chunk_region.extend_from_slice(&region.offset);
                    columns.chunk_region.extend_from_slice(&region.extent);
                }
                ChunkRegion::Run { start, len } => {
                    columns.chunk_tag.push(tag::RUN);
                    columns.chunk_region.extend([start, len]);
                }
            }
            columns.chunk_codec.push(match chunk.codec {
                Codec::Raw => tag::RAW,
                Codec::Planes => tag::PLANES,
                // The check of the index refuses it, and no reader knows the tag.
                Codec::Elements(_) | Codec::PlanesPart(_) => tag::FOREIGN,
            });
            self.bytes += 2 + 8 * (columns.chunk_region.len() - numbers) as u64;
            self.extent(&chunk.extent);
        }
    }

    fn extent(&mut self, extent: &Extent) {
        let columns = &mut self.columns;
        let (tag, source) = match extent.source {
            Source::Own(ordinal) => (tag::OWN, ordinal),
            Source::Range(ordinal) => (tag::RANGE, ordinal),
            Source::Pulled(number) => (tag::PULLED, number),
        };
        columns.extent_tag.push(tag);
        columns.extent_source.push(source);
        columns.extent_offset.push(extent.offset);
        columns.extent_length.push(extent.length);
        columns.extent_integrity.push(match extent.integrity {
            Integrity::BlockCrc => tag::BLOCK_CRC,
            Integrity::Zip(crc) => {
                columns.extent_zip.push(crc);
                self.bytes += 4;
                tag::ZIP
            }
            Integrity::None => tag::NO_INTEGRITY,
        });
        self.bytes += 22;
    }

    fn finish(self) -> Result<(Vec<u8>, PageRef)> {
        let payload = rkyv::to_bytes::<BoxedError>(&self.columns)
            .map_err(|error| Error::internal("a page that can be encoded", error.to_string()))?;
        encode(PageKind::Index, self.first_leaf, self.leaves, &payload)
    }
}
