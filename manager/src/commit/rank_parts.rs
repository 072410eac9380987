//! The merge of an item's parts, which several ranks have written.

use std::collections::{HashMap, HashSet};

use stepwell_core::format::index::{ChunkRecord, ChunkRegion, FileRecord, Index, LeafRecord};
use stepwell_core::format::merge::{Refusal, Twice};
use stepwell_core::leaf_path::LeafPath;
use stepwell_core::region::Region;

use crate::error::{Error, Result};
use crate::state::item::ItemPart;

/// Merges the parts of an item into one index. A part is a rank's, or a node's under the number of
/// its first rank. Also returns the leaves that are still undecided. The error names the leaf and
/// the ranks that contradict each other.
pub(super) fn merge_parts(
    mut parts: Vec<(u32, ItemPart)>,
    merge: impl FnOnce(Vec<Index>, Twice) -> std::result::Result<Index, Refusal>,
) -> Result<(Index, HashSet<LeafPath>)> {
    let undecided = keep_one_copy(&mut parts);
    let whose: Vec<String> = parts.iter().map(|(rank, part)| rank_names(*rank, &part.index)).collect();
    let merged = merge(parts.into_iter().map(|(_, part)| part.index).collect(), Twice::Both);
    let index = merged.map_err(|refusal| match refusal {
        Refusal::Contradiction { leaf, first, second, what } => {
            let who = |part: usize| whose.get(part).map_or("0", String::as_str);
            Error::Layout {
                leaf,
                what: format!(
                    "ranks {} and {} disagree: {what}. Save states of the same structure on all ranks",
                    who(first),
                    who(second)
                ),
                advice: None,
            }
        }
        Refusal::Other(error) => error.into(),
    })?;
    Ok((index, undecided))
}

/// Returns the ranks of a part as text, for messages.
pub(super) fn rank_names(rank: u32, index: &Index) -> String {
    let mut ranks: Vec<u32> = index.files.iter().filter_map(rank_of).collect();
    ranks.sort_unstable();
    match ranks.as_slice() {
        [first, .., last] => format!("one of {first} to {last}"),
        _ => rank.to_string(),
    }
}

/// Returns the rank that wrote a data file.
pub(super) fn rank_of(file: &FileRecord) -> Option<u32> {
    file.name.strip_suffix(".data")?.parse().ok()
}

/// Keeps one copy of each undecided leaf ([`DraftItem::undecided`](crate::state::item::DraftItem)):
/// the copy of a rank that has decided, else that of the lowest rank. Returns the leaves of which
/// it kept an undecided copy.
fn keep_one_copy(parts: &mut [(u32, ItemPart)]) -> HashSet<LeafPath> {
    let mut kept: HashMap<LeafPath, HashSet<Region>> = HashMap::new();
    for (_, part) in parts.iter() {
        kept.extend(
            part.item.undecided.iter().map(|&leaf| (part.index.tree.leaf_path(leaf), HashSet::new())),
        );
    }
    let mut stayed = HashSet::new();
    if kept.is_empty() {
        return stayed;
    }
    for decided in [true, false] {
        for (_, part) in parts.iter_mut() {
            for (leaf, record) in (0_u32..).zip(&mut part.index.leaves) {
                let (LeafRecord::Tensor(tensor), true) =
                    (record, part.item.undecided.binary_search(&leaf).is_err() == decided)
                else {
                    continue;
                };
                let path = part.index.tree.leaf_path(leaf);
                let Some(kept) = kept.get_mut(&path) else { continue };
                let region_of = |chunk: &ChunkRecord| match &chunk.region {
                    ChunkRegion::Box(region) => region.clone(),
                    ChunkRegion::Run { .. } => Region::whole(&tensor.shape),
                };
                if !decided {
                    tensor.chunks.retain(|chunk| {
                        let region = region_of(chunk);
                        // Most regions are equal, so look for an equal one first.
                        !kept.contains(&region) && kept.iter().all(|other| other.intersect(&region).is_none())
                    });
                    if !tensor.chunks.is_empty() {
                        stayed.insert(path);
                    }
                }
                kept.extend(tensor.chunks.iter().map(region_of));
            }
        }
    }
    stayed
}
