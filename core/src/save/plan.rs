//! Planning: all checks, offsets and windows of a save, before anything is captured or written.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use super::capture::{self, Capture};
use super::flush::{self, Flush, PlannedItem};
use super::link::Link;
use super::progress::Progress;
use super::windows::{Chunk, FileCutter, Leaf, PartSource, Windows};
use super::{ChunkPlan, ItemPlan, LeafPlan, PAGE_ALIGNED_FROM, SMALL_ALIGNMENT, SaveOptions};
use crate::format::header::Header;
use crate::format::index::{
    ChunkRecord, ChunkRegion, Chunks, Codec, Extent, FileRecord, Index, Integrity, LeafRecord, Source,
    TensorRecord,
};
use crate::format::{index_v1, object};
use crate::io::is_component;
use crate::provider::CaptureTiming;
use crate::staging::StagingPool;
use crate::tree::Tree;
use crate::{Error, Result, limits};

/// Granularity of data files in bytes, enough for direct I/O on all known devices.
const PAGE: u64 = 4096;

/// Alignment of objects in bytes.
const OBJECT_ALIGNMENT: u64 = 8;

/// Plans a save, and finds all errors in the items. Reads and writes nothing, does not wait, and
/// does not grow the pool. The two halves run on two threads. Dropping one cancels the other.
pub fn prepare(
    items: Vec<ItemPlan>,
    pool: &Arc<StagingPool>,
    options: SaveOptions,
) -> Result<(Capture, Flush)> {
    let started = Instant::now();
    check_options(&items, pool, &options)?;
    let mut windows = Windows::default();
    let mut planned = Vec::with_capacity(items.len());
    let mut indexes = Vec::with_capacity(items.len());
    for (number, item) in items.into_iter().enumerate() {
        let (item, index) = plan_item(item, number, &mut windows, pool.slot_bytes() as u64, &options)?;
        planned.push(item);
        indexes.push(index);
    }
    let progress = Arc::new(Progress::default());
    progress.total(planned.iter().map(|item| item.data_bytes).sum());
    let link = Arc::new(Link::new(Arc::clone(pool), options.cancel.clone()));
    let indexes = Arc::new(indexes);
    let (sender, receiver) = crate::sync::unbounded();
    let flush = Flush::new(flush::FlushParts {
        items: planned,
        windows: windows.list.clone(),
        indexes: Arc::clone(&indexes),
        receiver,
        link: Arc::clone(&link),
        pool: Arc::clone(pool),
        progress: Arc::clone(&progress),
        options: options.clone(),
    });
    let capture = Capture::new(capture::CaptureParts {
        windows,
        indexes,
        sender,
        link,
        pool: Arc::clone(pool),
        progress: Arc::clone(&progress),
        options,
    });
    progress.planned_since(started);
    Ok((capture, flush))
}

fn check_options(items: &[ItemPlan], pool: &StagingPool, options: &SaveOptions) -> Result<()> {
    let misuse = |what: String| Err(Error::Misuse(what));
    let block = options.block_bytes;
    if !limits::BLOCK_BYTES.contains(&block) || !block.is_multiple_of(PAGE) {
        return misuse(format!("blocks of {block} bytes"));
    }
    let slot = pool.slot_bytes() as u64;
    if !slot.is_multiple_of(block) || u32::try_from(slot).is_err() {
        return misuse(format!("slots of {slot} bytes are not made of blocks of {block}"));
    }
    if options.file_ids.len() != items.len() {
        return Err(Error::internal(format!("{} file ids", items.len()), options.file_ids.len().to_string()));
    }
    let mut dirs = HashSet::new();
    for item in items {
        if !is_component(&item.dir) || !dirs.insert(item.dir.as_str()) {
            return Err(Error::internal(
                "unique names of item directories",
                format!("`{}`, which is invalid or used twice", item.dir),
            ));
        }
        if item.leaves.len() != item.tree.leaf_count() {
            return Err(Error::internal(
                format!("{} leaves in item `{}`, as its tree has", item.tree.leaf_count(), item.dir),
                item.leaves.len().to_string(),
            ));
        }
    }
    Ok(())
}

/// The end of the extents that a file has so far.
struct Cursor {
    offset: u64,
}

impl Cursor {
    /// Adds an extent and returns its offset.
    fn place(&mut self, len: u64, alignment: u64) -> Result<u64> {
        let placed = self
            .offset
            .checked_next_multiple_of(alignment)
            .and_then(|start| Some((start, start.checked_add(len)?)))
            .filter(|&(_, end)| end <= limits::MAX_FILE_BYTES);
        let Some((start, end)) = placed else {
            return Err(Error::Limit {
                what: "bytes of a data file".into(),
                found: self.offset.saturating_add(len),
                limit: limits::MAX_FILE_BYTES,
            });
        };
        self.offset = end;
        Ok(start)
    }
}

/// A chunk without an offset in the file.
struct UnplacedChunk {
    timing: CaptureTiming,
    band: u32,
    leaf: u32,
    /// Its number in its leaf.
    chunk: u32,
    /// Its number among all chunks of the save.
    source: u32,
    bytes: u64,
}

fn extent(offset: u64, length: u64) -> Extent {
    Extent { source: Source::Own(0), offset, length, integrity: Integrity::BlockCrc }
}

fn plan_item(
    item: ItemPlan,
    number: usize,
    windows: &mut Windows,
    slot_bytes: u64,
    options: &SaveOptions,
) -> Result<(PlannedItem, Index)> {
    let ItemPlan { dir, tree, leaves } = item;
    let file_id = options.file_ids.get(number).copied().unwrap_or_default();
    let number = number as u32;
    let mut cursor = Cursor { offset: 0 };
    let mut cutter = FileCutter::new(windows, number, slot_bytes);
    let header = Header::new(file_id, options.block_bytes, options.rank).encode();
    cutter.add_bytes(cursor.place(header.len() as u64, PAGE)?, &header);

    let mut records = Vec::with_capacity(leaves.len());
    let mut unplaced = Vec::with_capacity(leaves.len());
    let mut objects = Vec::new();
    let mut tensor_bytes = 0;
    // An estimate of the index's size: names, and numbers per leaf and chunk.
    let mut index_bytes = 64 * tree.nodes().len() as u64;
    for (leaf, plan) in (0_u32..).zip(leaves) {
        let timing = plan.timing();
        records.push(match plan {
            LeafPlan::Tensor { dtype, shape, chunks, provider } => {
                index_bytes += (96 + 24 * shape.len() as u64) * (1 + chunks.len() as u64);
                let tensor = TensorLeaf { tree: &tree, leaf, itemsize: dtype.size() };
                tensor.check(&chunks, &*provider)?;
                let owner = cutter.leaf(Leaf { provider, item: number, number: leaf })?;
                let mut stored = Chunks::with_capacity(chunks.len());
                for (chunk, ChunkPlan { region, local, band }) in (0_u32..).zip(chunks) {
                    let bytes = tensor.bytes(&region)?;
                    tensor_bytes += bytes;
                    let source = cutter.chunk(Chunk { leaf: owner, local })?;
                    unplaced.push(UnplacedChunk { timing, band, leaf, chunk, source, bytes });
                    stored.push(ChunkRecord { region, extent: extent(0, bytes), codec: Codec::Raw });
                }
                let shape = shape.into();
                LeafRecord::Tensor(TensorRecord { dtype, shape, chunks: stored })
            }
            LeafPlan::Object(value) => {
                objects.push((leaf, value));
                LeafRecord::Object(extent(0, 0))
            }
            // An empty extent at the first data page.
            LeafPlan::Elsewhere => LeafRecord::Object(extent(PAGE, 0)),
            LeafPlan::Alias { of } => LeafRecord::Alias { of },
        });
    }
    // Sort by urgency: a slot is as urgent as its most urgent leaf, so leaves with different timing
    // should not share slots.
    unplaced.sort_by_key(|chunk| (Reverse(chunk.timing), chunk.band));
    for UnplacedChunk { leaf, chunk, source, bytes, .. } in unplaced {
        let alignment = if bytes >= PAGE_ALIGNED_FROM { PAGE } else { SMALL_ALIGNMENT };
        let offset = cursor.place(bytes, alignment)?;
        cutter.add(offset, bytes, PartSource::Chunk(source), 0);
        if let Some(LeafRecord::Tensor(tensor)) = records.get_mut(leaf as usize)
            && let Some(stored) = tensor.chunks.get_mut(chunk as usize)
        {
            stored.extent.offset = offset;
        }
    }
    for (leaf, value) in objects {
        let bytes = object::encode(&value).map_err(|error| with_path(error, &tree, leaf))?;
        let offset = cursor.place(bytes.len() as u64, OBJECT_ALIGNMENT)?;
        cutter.add_bytes(offset, &bytes);
        if let Some(record) = records.get_mut(leaf as usize) {
            *record = LeafRecord::Object(extent(offset, bytes.len() as u64));
        }
    }
    let data_bytes = cursor.offset.next_multiple_of(PAGE);
    cutter.finish(data_bytes);

    let file_name = format!("{:05}.data", options.rank);
    let file =
        FileRecord { name: file_name.as_str().into(), length: 0, file_id, trailer_crc: 0, within: None };
    let index = Index { tree, leaves: records, files: vec![file] };
    // The footer is encoded much later, after the capture, so check the index now.
    index_v1::check_to_write(&index, index_v1::Bounds::Footer { footer_offset: data_bytes })?;
    let footer_hint = index_bytes + data_bytes.div_ceil(options.block_bytes) * 4 + 4 * PAGE;
    Ok((PlannedItem { dir, file_name, file_id, data_bytes, tensor_bytes, footer_hint }, index))
}

/// Adds the leaf's path to an error.
fn with_path(error: Error, tree: &Tree, leaf: u32) -> Error {
    match error {
        Error::Limit { what, found, limit } => Error::Limit {
            what: format!("{what} ({})", crate::leaf_path::named(&tree.leaf_path(leaf).to_string())),
            found,
            limit,
        },
        Error::Misuse(what) => Error::Leaf { leaf: tree.leaf_path(leaf).to_string(), what },
        other => other,
    }
}

/// A tensor leaf, for its checks.
struct TensorLeaf<'a> {
    tree: &'a Tree,
    leaf: u32,
    itemsize: usize,
}

impl TensorLeaf<'_> {
    fn refuse(&self, what: impl Into<String>) -> Error {
        Error::Leaf { leaf: self.tree.leaf_path(self.leaf).to_string(), what: what.into() }
    }

    /// Checks that the chunks match the provider's array. The index checks their regions.
    fn check(&self, chunks: &[ChunkPlan], provider: &dyn crate::provider::StateProvider) -> Result<()> {
        for ChunkPlan { region, local, .. } in chunks {
            if local.volume() != volume(region) {
                return Err(self.refuse(format!(
                    "chunk {region:?} and {local:?} in memory have different numbers of elements"
                )));
            }
            provider.check(local, self.itemsize).map_err(|what| self.refuse(what))?;
        }
        Ok(())
    }

    fn bytes(&self, region: &ChunkRegion) -> Result<u64> {
        volume(region)
            .and_then(|elements| elements.checked_mul(self.itemsize as u64))
            .ok_or_else(|| self.refuse("a chunk has too many bytes"))
    }
}

fn volume(region: &ChunkRegion) -> Option<u64> {
    match region {
        ChunkRegion::Box(region) => region.volume(),
        ChunkRegion::Run { len, .. } => Some(*len),
    }
}
