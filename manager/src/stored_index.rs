//! The index of a step: the indexes of all items, checked against the manifest and merged.
//!
//! Several threads read and decode large indexes, since a restore waits for them before it can
//! plan.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use stepwell_core::compression::Compression;
use stepwell_core::format::checksum::crc32c;
use stepwell_core::format::index::{
    ChunkRecord, Chunks, FileRecord, Index, LeafRecord, TensorRecord, Within,
};
use stepwell_core::format::index_v1::{self, INDEX_HEADER_BYTES, IndexHeader, Outline};
use stepwell_core::format::manifest::{FileEntry, Item, Manifest};
use stepwell_core::io::{Dir, File};
use stepwell_core::sys::{both, cores, each, try_reserve_huge};
use stepwell_core::tree::{Node, NodeKind, Tree};

use crate::directory_layout::MANIFEST;
use crate::error::{Error, Result};

#[cfg(test)]
mod tests;

/// Smaller indexes, in bytes, do not get a thread.
const MIN_THREAD_BYTES: u64 = 128 << 10;
/// Smaller indexes, in bytes, are read whole.
const MIN_OUTLINE_BYTES: u64 = 4 << 20;
const THREAD: &str = "stepwell-index";

/// The indexes of all items as one: top-level entries in the saved order, and files by their paths
/// below the step. A large index is read as its structure, and the chunks of a tensor on request.
#[derive(Default)]
pub(crate) struct StoredIndex {
    /// The index without the chunks that are read or described later.
    outline: Arc<Index>,
    /// The index with the chunks that are known.
    filled: Mutex<FilledIndex>,
    paged: Option<Paged>,
}

/// The parts of the index that are read later.
struct Paged {
    items: Vec<PagedItem>,
    /// By leaf: its item in `items` and its leaf there, if its chunks are not in the outline.
    places: Vec<Option<(usize, u32)>>,
}

struct PagedItem {
    outline: Outline,
    numbers: Numbers,
    file: Arc<dyn File>,
    path: PathBuf,
}

#[derive(Default)]
struct FilledIndex {
    index: Arc<Index>,
    /// The pages that were read: item and page.
    pages: HashSet<(usize, usize)>,
}

/// The part of an item's index that was read.
enum ReadIndex {
    Whole(Index),
    Outlined(Index, Outline, Arc<dyn File>),
}

impl StoredIndex {
    /// An index that is in memory already.
    pub fn in_memory(index: Index) -> Self {
        Self::new(Arc::new(index), None)
    }

    fn new(outline: Arc<Index>, paged: Option<Paged>) -> Self {
        let filled = FilledIndex { index: Arc::clone(&outline), pages: HashSet::new() };
        Self { outline, filled: Mutex::new(filled), paged }
    }

    /// Reads the indexes of a step and checks them against the manifest. Reads only the outline of
    /// a large one.
    pub fn read(dir: &dyn Dir, manifest: &Manifest) -> Result<Self> {
        Self::read_outlines(dir, manifest, MIN_OUTLINE_BYTES)
    }

    /// [`StoredIndex::read`] that reads indexes of fewer than `outline_from` bytes whole.
    fn read_outlines(dir: &dyn Dir, manifest: &Manifest, outline_from: u64) -> Result<Self> {
        let entries: HashMap<&str, &FileEntry> =
            manifest.files.iter().map(|entry| (entry.path.as_str(), entry)).collect();
        let large = manifest.items.iter().filter(|item| item.index.length >= MIN_THREAD_BYTES).count();
        let each_read = each(THREAD, large.min(cores()), &manifest.items, |item| -> Result<ReadIndex> {
            let mut read = match outlined(dir, item, outline_from)? {
                Some(read) => read,
                None => ReadIndex::Whole(whole(dir, item, large < cores())?),
            };
            let (ReadIndex::Whole(index) | ReadIndex::Outlined(index, ..)) = &mut read;
            name_files(index, item, &entries, &dir.path().join(&item.index.path))?;
            Ok(read)
        });
        let (mut indexes, mut later) = (Vec::new(), Vec::new());
        for (number, read) in each_read.into_iter().enumerate() {
            match read? {
                ReadIndex::Whole(index) => indexes.push(index),
                ReadIndex::Outlined(index, outline, file) => {
                    later.push((number, outline, file));
                    indexes.push(index);
                }
            }
        }
        let (index, mut numbers) = match indexes.len() {
            0 | 1 => (indexes.pop().unwrap_or_default(), vec![Numbers::default()]),
            _ => merge(dir, manifest, indexes)?,
        };
        let outline = Arc::new(index);
        if later.is_empty() {
            return Ok(Self::new(outline, None));
        }
        let mut places = vec![None; outline.leaves.len()];
        let mut items = Vec::with_capacity(later.len());
        for (number, item_outline, file) in later {
            let path = manifest.items.get(number).map(|item| dir.path().join(&item.index.path));
            let numbers = numbers.get_mut(number).map(std::mem::take).unwrap_or_default();
            for leaf in 0..item_outline.index().leaves.len() as u32 {
                if let Some(place) = places.get_mut(numbers.leaf(leaf) as usize) {
                    *place = Some((items.len(), leaf));
                }
            }
            items.push(PagedItem { outline: item_outline, numbers, file, path: path.unwrap_or_default() });
        }
        Ok(Self::new(outline, Some(Paged { items, places })))
    }

    /// Returns the structure: the index without the chunks that are read or described later.
    pub fn outline(&self) -> &Arc<Index> {
        &self.outline
    }

    /// Returns the whole index.
    pub fn whole(&self) -> Result<Arc<Index>> {
        self.with(0..self.outline.leaves.len() as u32)
    }

    /// Returns the index with at least the chunks of those leaves, and of the leaves to which they
    /// are tied.
    pub fn with(&self, leaves: impl IntoIterator<Item = u32>) -> Result<Arc<Index>> {
        let mut filled = self.filled.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(paged) = &self.paged else { return Ok(Arc::clone(&filled.index)) };
        let mut wanted = BTreeSet::new();
        for leaf in leaves {
            let place = paged.places.get(self.holder(leaf) as usize).copied().flatten();
            let page =
                place.and_then(|(item, leaf)| Some((item, paged.items.get(item)?.outline.page_of(leaf)?)));
            wanted.extend(page.filter(|page| !filled.pages.contains(page)));
        }
        let wanted: Vec<_> = wanted.into_iter().collect();
        let read = each(THREAD, wanted.len().min(cores()), &wanted, |&(item, page)| {
            paged.items.get(item).map_or_else(|| Ok(Vec::new()), |item| item.leaves(page))
        });
        for (at, leaves) in wanted.into_iter().zip(read) {
            let index = Arc::make_mut(&mut filled.index);
            for (leaf, record) in leaves? {
                if let Some(place) = index.leaves.get_mut(leaf as usize) {
                    *place = record;
                }
            }
            filled.pages.insert(at);
        }
        Ok(Arc::clone(&filled.index))
    }

    /// Adds the chunks of tensors.
    pub fn describe(&self, leaves: Vec<(u32, Chunks)>) {
        let mut filled = self.filled.lock().unwrap_or_else(PoisonError::into_inner);
        let index = Arc::make_mut(&mut filled.index);
        for (leaf, chunks) in leaves {
            if let Some(LeafRecord::Tensor(tensor)) = index.leaves.get_mut(leaf as usize) {
                tensor.chunks = chunks;
            }
        }
    }

    /// Of the indexes that are read page by page, the bytes that have been read, and all of them.
    #[cfg(test)]
    pub(crate) fn bytes_read(&self) -> (u64, u64) {
        let Some(paged) = &self.paged else { return (0, 0) };
        let filled = self.filled.lock().unwrap();
        let (mut read, mut all) = (0, 0);
        for (number, item) in paged.items.iter().enumerate() {
            let pages = item.outline.pages();
            let front = pages.first().map_or(0, |page| page.offset);
            read += front;
            all += front + pages.iter().map(|page| page.length).sum::<u64>();
            for (at, page) in pages.iter().enumerate() {
                read += if filled.pages.contains(&(number, at)) { page.length } else { 0 };
            }
        }
        (read, all)
    }

    /// Returns the leaf that holds the bytes of a leaf. It is another one for a tie.
    fn holder(&self, leaf: u32) -> u32 {
        self.outline.resolve(leaf).map_or(leaf, |(holder, _)| holder)
    }
}

impl PagedItem {
    /// Reads and checks the leaves of a page. Returns each with its number in the index of the
    /// step.
    fn leaves(&self, page: usize) -> Result<Vec<(u32, LeafRecord)>> {
        let Some(page) = self.outline.pages().get(page) else { return Ok(Vec::new()) };
        let bytes = self.file.read_at(page.offset, page.length as usize)?;
        let leaves = self.outline.leaves(page, &bytes, &self.path)?;
        let first = page.first as usize;
        check_claims(&self.outline.index().tree, first, &leaves, &self.path)?;
        let numbered = (page.first as u32..).zip(leaves).map(|(leaf, mut record)| {
            self.numbers.renumber(&mut record);
            (self.numbers.leaf(leaf), record)
        });
        Ok(numbered.collect())
    }
}

/// Reads the structure of a large index, without its chunks. `None` if it must be read whole.
fn outlined(dir: &dyn Dir, item: &Item, outline_from: u64) -> Result<Option<ReadIndex>> {
    if item.index.length < outline_from {
        return Ok(None);
    }
    let path = dir.path().join(&item.index.path);
    let file = dir.open_file(&item.index.path).map_err(|error| missing_index(error, &path))?;
    let header = IndexHeader::decode(&file.read_at(0, INDEX_HEADER_BYTES as usize)?, &path)?;
    if header.outline_length == 0 {
        return Ok(None);
    }
    if header.file_length != item.index.length || file.len()? != item.index.length {
        return Err(other_index(&path));
    }
    let front = file.read_at(0, header.pages_at() as usize)?;
    let outline = Outline::decode(&header, &front, item.index.crc32c, &path)?;
    let index = outline.index().clone();
    // As `check_claims`, without the chunks.
    let stored = index.files.iter().map(|file| u128::from(file.length)).sum::<u128>();
    let most_decoded = |stored| Compression::Zstd.most_decoded(u64::try_from(stored).unwrap_or(u64::MAX));
    let most = if outline.is_compressed() { most_decoded(stored).into() } else { stored };
    for (leaf, record) in (0_u32..).zip(&index.leaves) {
        let LeafRecord::Tensor(tensor) = record else { continue };
        if claimed(tensor).is_none_or(|bytes| bytes > most) {
            return Err(claims_too_much(&index.tree, leaf, tensor, stored, &path));
        }
    }
    Ok(Some(ReadIndex::Outlined(index, outline, file)))
}

fn missing_index(error: stepwell_core::Error, file: &Path) -> Error {
    if error.is_not_found() {
        return stepwell_core::Error::corrupt(file, "its manifest lists it, and it is missing").into();
    }
    error.into()
}

fn other_index(file: &Path) -> Error {
    stepwell_core::Error::corrupt(file, "it is not the index that its manifest names").into()
}

/// Reads the whole index of an item. Its files have their names in the item.
pub(crate) fn of_item(dir: &dyn Dir, item: &Item) -> Result<Index> {
    whole(dir, item, false)
}

/// Reads the whole index of an item. `alone`: another core is free for half of the work.
fn whole(dir: &dyn Dir, item: &Item, alone: bool) -> Result<Index> {
    let file = dir.path().join(&item.index.path);
    let bytes = match dir.read_file(&item.index.path, item.index.length) {
        Ok(bytes) => bytes,
        Err(stepwell_core::Error::Limit { .. }) => {
            return Err(stepwell_core::Error::corrupt(file, "it is longer than its manifest says").into());
        }
        Err(error) => return Err(missing_index(error, &file)),
    };
    let apart = item.index.length >= MIN_THREAD_BYTES && alone;
    let (crc, opened) = both(THREAD, apart, || crc32c(&bytes), || index_v1::Opened::new(&bytes, &file));
    if bytes.len() as u64 != item.index.length || crc != item.index.crc32c {
        return Err(other_index(&file));
    }
    let opened = opened?;
    let leaves = || {
        let mut buffer = Vec::new();
        // Only an optimization: the vector grows if this fails.
        let _ = try_reserve_huge(&mut buffer, opened.leaf_count());
        opened.leaves(buffer)
    };
    let (tree, leaves) = both(THREAD, apart, || opened.tree(), leaves);
    let index = opened.join(tree?, leaves?)?;
    let check = |leaves: Range<usize>| -> Result<()> {
        opened.check(&index, leaves.clone())?;
        let records = index.leaves.get(leaves.clone()).unwrap_or_default();
        check_claims(&index.tree, leaves.start, records, &file)
    };
    let (half, end) = (index.leaves.len() / 2, index.leaves.len());
    let (lower, upper) = both(THREAD, apart, || check(0..half), || check(half..end));
    lower.and(upper)?;
    Ok(index)
}

/// Checks the files of an item's index against the manifest, and gives them their paths below the
/// step.
fn name_files(
    index: &mut Index,
    item: &Item,
    entries: &HashMap<&str, &FileEntry>,
    file: &Path,
) -> Result<()> {
    for record in &mut index.files {
        let path = format!("{}/{}", item.dir, record.name);
        let entry = entries.get(path.as_str()).filter(|entry| {
            entry.length == record.length
                && entry.file_id == record.file_id
                && entry.trailer_crc32c == record.trailer_crc
        });
        let Some(entry) = entry else {
            let what = format!("index and manifest do not agree on {path}");
            return Err(stepwell_core::Error::corrupt(file, what).into());
        };
        record.name = path.into();
        record.within = within(entry);
    }
    Ok(())
}

/// Checks that the chunks of each tensor add up to its size: readers allocate that size before they
/// read the chunks. `leaves` are those of the tree from `first` on.
fn check_claims(tree: &Tree, first: usize, leaves: &[LeafRecord], file: &Path) -> Result<()> {
    for (leaf, record) in (first as u32..).zip(leaves) {
        let LeafRecord::Tensor(tensor) = record else { continue };
        let itemsize = tensor.dtype.size() as u64;
        // The check of the index has bounded what compressed chunks may become.
        let bytes = |chunk: &ChunkRecord| u128::from(chunk.decoded_bytes(itemsize).unwrap_or(u64::MAX));
        let stored = tensor.chunks.iter().map(bytes).sum::<u128>();
        if claimed(tensor) != Some(stored) {
            return Err(claims_too_much(tree, leaf, tensor, stored, file));
        }
    }
    Ok(())
}

/// Returns the size of a tensor in bytes. `None` if it overflows.
fn claimed(tensor: &TensorRecord) -> Option<u128> {
    let size = tensor.dtype.size() as u128;
    tensor.shape.iter().try_fold(size, |bytes, &n| bytes.checked_mul(u128::from(n)))
}

fn claims_too_much(tree: &Tree, leaf: u32, tensor: &TensorRecord, stored: u128, file: &Path) -> Error {
    let what =
        format!("its {stored} bytes are not those of a {} of shape {:?}", tensor.dtype.name(), tensor.shape);
    let leaf = Some(tree.leaf_path(leaf).to_string());
    stepwell_core::Error::Corrupt { file: file.to_owned(), leaf, block: None, what }.into()
}

/// Returns the data files of the manifest, item by item. This is their numbering in the merged
/// index, if the indexes list theirs in the same order.
pub(crate) fn files(manifest: &Manifest) -> Vec<FileRecord> {
    let mut of_item: HashMap<&str, Vec<FileRecord>> = HashMap::new();
    for entry in &manifest.files {
        let dir = entry.path.split('/').next().unwrap_or_default();
        of_item.entry(dir).or_default().push(file_record(entry));
    }
    manifest.items.iter().flat_map(|item| of_item.remove(item.dir.as_str()).unwrap_or_default()).collect()
}

/// Returns the record of a data file, with its path below the step.
pub(crate) fn file_record(entry: &FileEntry) -> FileRecord {
    FileRecord {
        name: entry.path.as_str().into(),
        length: entry.length,
        file_id: entry.file_id,
        trailer_crc: entry.trailer_crc32c,
        within: within(entry),
    }
}

/// Returns the file that contains a data file, if there is one.
fn within(entry: &FileEntry) -> Option<Within> {
    let within = entry.within.as_ref()?;
    Some(Within { name: within.path.as_str().into(), offset: within.offset, stream: None })
}

/// A top-level entry: nodes `first..end` of an item's tree, and its position in the state.
struct TopLevelNodes {
    position: u64,
    item: usize,
    first: usize,
    end: usize,
}

/// Merges the indexes. Returns for each how its numbers have changed.
fn merge(dir: &dyn Dir, manifest: &Manifest, indexes: Vec<Index>) -> Result<(Index, Vec<Numbers>)> {
    let mut tops_in_order = Vec::new();
    for (number, (item, index)) in manifest.items.iter().zip(&indexes).enumerate() {
        let nodes = index.tree.nodes();
        let tops: Vec<usize> =
            (1..nodes.len()).filter(|&at| nodes.get(at).is_some_and(|node| node.parent == 0)).collect();
        if tops.len() != item.top_level.len() {
            let what = format!(
                "it has {} top-level entries, its manifest says {}",
                tops.len(),
                item.top_level.len()
            );
            return Err(stepwell_core::Error::corrupt(dir.path().join(&item.index.path), what).into());
        }
        for (at, (&first, entry)) in tops.iter().zip(&item.top_level).enumerate() {
            let end = tops.get(at + 1).copied().unwrap_or(nodes.len());
            tops_in_order.push(TopLevelNodes { position: entry.position, item: number, first, end });
        }
    }
    let count = |of: &dyn Fn(&Index) -> usize| indexes.iter().map(of).sum::<usize>();
    tops_in_order.sort_unstable_by_key(|top| (top.position, top.item, top.first));

    let mut out =
        Index { leaves: Vec::with_capacity(count(&|index| index.leaves.len())), ..Index::default() };
    // Only an optimization.
    let _ = out.tree.try_reserve(count(&|index| index.tree.nodes().len()), out.leaves.capacity());
    match indexes.iter().find_map(|index| index.tree.nodes().first()).map(|root| &root.kind) {
        Some(NodeKind::Container(kind)) => {
            out.tree.push_container(None, None, kind.clone());
        }
        Some(NodeKind::Leaf(_)) => {
            let file = dir.path().join(MANIFEST);
            return Err(
                stepwell_core::Error::corrupt(file, "several items, and the state is one leaf").into()
            );
        }
        None => {}
    }
    let mut parts: Vec<RemainingItem> = Vec::with_capacity(indexes.len());
    for index in indexes {
        let first_file = out.files.len() as u32;
        out.files.extend(index.files);
        let numbers = Numbers { first_file, new_leaf: Some(vec![u32::MAX; index.leaves.len()]) };
        let leaves = index.leaves.into_iter().map(Some).collect();
        parts.push(RemainingItem { nodes: index.tree.into_nodes(), leaves, numbers });
    }
    // The item of each leaf. Ties use the item's numbers, and may point forward, so they are
    // renumbered last.
    let mut origins = Vec::with_capacity(out.leaves.capacity());
    for TopLevelNodes { item, first, end, .. } in tops_in_order {
        let Some(part) = parts.get_mut(item) else { continue };
        let mut numbers = vec![0_u32; end - first];
        for at in first..end {
            let Some(node) = part.nodes.get_mut(at) else { continue };
            let parent = (node.parent as usize)
                .checked_sub(first)
                .and_then(|at| numbers.get(at))
                .copied()
                .unwrap_or(0);
            let (component, number) = (node.component.take(), out.tree.nodes().len() as u32);
            match std::mem::replace(&mut node.kind, NodeKind::Leaf(u32::MAX)) {
                NodeKind::Container(kind) => {
                    out.tree.push_container(Some(parent), component, kind);
                }
                NodeKind::Leaf(leaf) => {
                    let new = out.tree.push_leaf(Some(parent), component);
                    if let Some(place) =
                        part.numbers.new_leaf.as_mut().and_then(|new_leaf| new_leaf.get_mut(leaf as usize))
                    {
                        *place = new;
                    }
                    let Some(record) = part.leaves.get_mut(leaf as usize).and_then(Option::take) else {
                        let file = dir.path().join(MANIFEST);
                        let what = format!("item {item} has no leaf {leaf}");
                        return Err(stepwell_core::Error::corrupt(file, what).into());
                    };
                    out.leaves.push(record);
                    origins.push(item);
                }
            }
            if let Some(place) = numbers.get_mut(at - first) {
                *place = number;
            }
        }
    }
    for (record, item) in out.leaves.iter_mut().zip(origins) {
        let Some(part) = parts.get(item) else { continue };
        part.numbers.renumber(record);
    }
    Ok((out, parts.into_iter().map(|part| part.numbers).collect()))
}

/// The rest of an item's index during the merge, and the change of its numbers.
struct RemainingItem {
    nodes: Vec<Node>,
    leaves: Vec<Option<LeafRecord>>,
    numbers: Numbers,
}

/// The change from the numbers of an item's index to those of the step's.
#[derive(Default)]
struct Numbers {
    first_file: u32,
    /// The new number of each leaf. `None`: unchanged.
    new_leaf: Option<Vec<u32>>,
}

impl Numbers {
    fn leaf(&self, leaf: u32) -> u32 {
        match &self.new_leaf {
            Some(new_leaf) => new_leaf.get(leaf as usize).copied().unwrap_or(u32::MAX),
            None => leaf,
        }
    }

    fn renumber(&self, record: &mut LeafRecord) {
        for file in record.extents_mut().filter_map(|extent| extent.source.file_mut()) {
            *file += self.first_file;
        }
        if let Some(of) = record.alias_of_mut() {
            *of = self.leaf(*of);
        }
    }
}
