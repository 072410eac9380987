//! The index of a step: that of every item, read and checked against the manifest, and all of them merged into one.
//!
//! Indexes of some size are read and decoded on several threads: they are what a restore waits for before it can plan.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use stepwell_core::format::checksum::crc32c;
use stepwell_core::format::index::{FileRecord, Index, LeafRecord};
use stepwell_core::format::index_v1;
use stepwell_core::format::manifest::{FileEntry, Manifest};
use stepwell_core::io::Dir;
use stepwell_core::sys::{both, cores, each, try_reserve_huge};
use stepwell_core::tree::{Node, NodeKind};

use crate::directory_layout::MANIFEST;
use crate::error::Result;

/// Indexes of fewer bytes are not worth a thread.
const WORTH_A_THREAD: u64 = 128 << 10;
const THREAD: &str = "stepwell-index";

/// One index out of those of the items, each of which is what the manifest says: top-level entries in the order that was saved, files by their paths below the step.
/// `between` is called for each when it has been read and is about to be decoded, which takes a core.
pub(crate) fn read(dir: &dyn Dir, manifest: &Manifest, between: &(dyn Fn() + Sync)) -> Result<Index> {
    let entries: HashMap<&str, &FileEntry> =
        manifest.files.iter().map(|entry| (entry.path.as_str(), entry)).collect();
    let large = manifest.items.iter().filter(|item| item.index.length >= WORTH_A_THREAD).count();
    let decoded = each(THREAD, large.min(cores()), &manifest.items, |item| {
        let file = dir.path().join(&item.index.path);
        let bytes = match dir.read_file(&item.index.path, item.index.length) {
            Ok(bytes) => bytes,
            Err(error) if error.is_not_found() => {
                return Err(
                    stepwell_core::Error::corrupt(file, "its manifest lists it, and it is missing").into()
                );
            }
            Err(stepwell_core::Error::Limit { .. }) => {
                return Err(stepwell_core::Error::corrupt(file, "it is longer than its manifest says").into());
            }
            Err(error) => return Err(error.into()),
        };
        between();
        let apart = item.index.length >= WORTH_A_THREAD && large < cores();
        let (crc, opened) = both(THREAD, apart, || crc32c(&bytes), || index_v1::Opened::new(&bytes, &file));
        if bytes.len() as u64 != item.index.length || crc != item.index.crc32c {
            return Err(
                stepwell_core::Error::corrupt(file, "it is not the index that its manifest names").into()
            );
        }
        let opened = opened?;
        let leaves = || {
            let mut room = Vec::new();
            // A help and no more: whoever fills it asks again.
            let _ = try_reserve_huge(&mut room, opened.leaf_count());
            opened.leaves(room)
        };
        let (tree, leaves) = both(THREAD, apart, || opened.tree(), leaves);
        let mut index = opened.join(tree?, leaves?)?;
        let check = |leaves: Range<usize>| -> Result<()> {
            opened.check(&index, leaves.clone())?;
            check_claims(&index, leaves, &file)
        };
        let (half, end) = (index.leaves.len() / 2, index.leaves.len());
        let (lower, upper) = both(THREAD, apart, || check(0..half), || check(half..end));
        lower.and(upper)?;
        for record in &mut index.files {
            let path = format!("{}/{}", item.dir, record.name);
            let agrees = entries.get(path.as_str()).is_some_and(|entry| {
                entry.length == record.length
                    && entry.file_id == record.file_id
                    && entry.trailer_crc32c == record.trailer_crc
            });
            if !agrees {
                let what = format!("index and manifest do not agree on {path}");
                return Err(stepwell_core::Error::corrupt(file, what).into());
            }
            record.name = path.into();
        }
        Ok(index)
    });
    let mut indexes = decoded.into_iter().collect::<Result<Vec<Index>>>()?;
    if indexes.len() <= 1 {
        return Ok(indexes.pop().unwrap_or_default());
    }
    merge(dir, manifest, indexes)
}

/// Readers take memory for a tensor before its chunks are looked at one by one: they must add up to it.
fn check_claims(index: &Index, leaves: Range<usize>, file: &Path) -> Result<()> {
    for (leaf, record) in leaves.clone().zip(index.leaves.get(leaves).unwrap_or_default()) {
        let LeafRecord::Tensor(tensor) = record else { continue };
        if tensor.view.is_some() {
            continue;
        }
        let size = tensor.dtype.size() as u128;
        let claimed = tensor.shape.iter().try_fold(size, |bytes, &n| bytes.checked_mul(u128::from(n)));
        let stored = tensor.chunks.iter().map(|chunk| u128::from(chunk.extent.length)).sum::<u128>();
        if claimed != Some(stored) {
            return Err(stepwell_core::Error::Corrupt {
                file: file.to_owned(),
                leaf: Some(index.tree.leaf_path(leaf as u32).to_string()),
                block: None,
                what: format!(
                    "its {stored} bytes are not those of a {} of shape {:?}",
                    tensor.dtype.name(),
                    tensor.shape
                ),
            }
            .into());
        }
    }
    Ok(())
}

/// The data files as the manifest has them, item by item: the numbering that [`read`] gives them, where indexes list theirs in the same order.
pub(crate) fn files(manifest: &Manifest) -> Vec<FileRecord> {
    let mut of_item: HashMap<&str, Vec<FileRecord>> = HashMap::new();
    for entry in &manifest.files {
        let dir = entry.path.split('/').next().unwrap_or_default();
        of_item.entry(dir).or_default().push(FileRecord {
            name: entry.path.as_str().into(),
            length: entry.length,
            file_id: entry.file_id,
            trailer_crc: entry.trailer_crc32c,
        });
    }
    manifest.items.iter().flat_map(|item| of_item.remove(item.dir.as_str()).unwrap_or_default()).collect()
}

/// Nodes `first..end` of an item's tree, which stand at that place in the state.
struct Branch {
    position: u64,
    item: usize,
    first: usize,
    end: usize,
}

fn merge(dir: &dyn Dir, manifest: &Manifest, indexes: Vec<Index>) -> Result<Index> {
    let mut branches = Vec::new();
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
            branches.push(Branch { position: entry.position, item: number, first, end });
        }
    }
    let count = |of: &dyn Fn(&Index) -> usize| indexes.iter().map(of).sum::<usize>();
    branches.sort_unstable_by_key(|branch| (branch.position, branch.item, branch.first));

    let mut out =
        Index { leaves: Vec::with_capacity(count(&|index| index.leaves.len())), ..Index::default() };
    // A help and no more.
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
    let mut parts: Vec<Part> = Vec::with_capacity(indexes.len());
    for index in indexes {
        let first_file = out.files.len() as u32;
        out.files.extend(index.files);
        let new_leaf = vec![u32::MAX; index.leaves.len()];
        let leaves = index.leaves.into_iter().map(Some).collect();
        parts.push(Part { nodes: index.tree.into_nodes(), leaves, first_file, new_leaf });
    }
    // Which item each leaf came from: a tie is told by the item's numbers, and may point forward.
    let mut origins = Vec::with_capacity(out.leaves.capacity());
    for Branch { item, first, end, .. } in branches {
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
                    if let Some(place) = part.new_leaf.get_mut(leaf as usize) {
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
        part.renumber(record);
    }
    Ok(out)
}

/// What is left of an item's index, and how its numbers change.
struct Part {
    nodes: Vec<Node>,
    leaves: Vec<Option<LeafRecord>>,
    first_file: u32,
    new_leaf: Vec<u32>,
}

impl Part {
    fn renumber(&self, record: &mut LeafRecord) {
        for file in record.extents_mut().filter_map(|extent| extent.source.file_mut()) {
            *file += self.first_file;
        }
        if let Some(of) = record.refers_to() {
            *of = self.new_leaf.get(*of as usize).copied().unwrap_or(u32::MAX);
        }
    }
}
