//! The files that the leader writes into a step, made from the votes of all ranks: one index per
//! item, the lease, and the manifest. Pure.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use stepwell_core::format::index_v1;
use stepwell_core::format::manifest::{
    self, Attempt, FileEntry, IndexEntry, Item, Manifest, Others, stored_files,
};
use stepwell_core::format::merge;

use super::coverage::check_coverage;
use super::draft::Draft;
use super::gathered::GatheredVotes;
use super::rank_parts::merge_parts;
use super::vote::{Vote, all_unsupported};
use crate::directory_layout::{INDEX, LEASE, MANIFEST};
use crate::error::{Error, Result};

/// A small file of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its path, relative to the step.
    pub path: String,
    /// Its content.
    pub bytes: Vec<u8>,
}

/// Data files of a step: path and length in bytes.
pub type DataFiles = Vec<(String, u64)>;
/// The files to write, in order, each with the directory to sync after it.
pub type Records = Vec<(Option<String>, Record)>;

/// Returns the data files of all ranks, which must exist, and the files to write: indexes, the
/// lease, and the manifest last.
pub fn records(
    draft: &Draft,
    attempt: &Attempt,
    world_size: u32,
    votes: Vec<Vote>,
    committed_unix_ns: i64,
) -> Result<(DataFiles, Records)> {
    let unsupported = all_unsupported(&votes);
    let (mut gathered, compared) = GatheredVotes::of(draft, votes)?;
    let mut merged = Vec::new();
    for mut item in gathered.take_items() {
        if item.parts.is_empty() {
            return Err(Error::Invalid(format!(
                "no rank wrote item `{}` of step {}. Save the same items on all ranks",
                item.draft.name, draft.step
            )));
        }
        let parts = std::mem::take(&mut item.parts);
        let tensor_bytes = parts.iter().fold(0_u64, |sum, (_, part)| sum.saturating_add(part.tensor_bytes));
        let (index, _) = merge_parts(parts, merge::merge)?;
        merged.push((item.draft, index, tensor_bytes));
    }
    compared.check(merged.iter().map(|(_, index, _)| index))?;
    // Check conflicts of all items before coverage: ranks that disagree on one tensor also
    // partition others differently. The plan of a single process covers everything by construction.
    if world_size > 1 {
        merged.iter().try_for_each(|(_, index, _)| check_coverage(index))?;
    }
    let mut out = Vec::new();
    let mut items = Vec::new();
    let mut files = Vec::new();
    for (mut item, index, tensor_bytes) in merged {
        gathered.set_top_level(&mut item, &index);
        for file in &index.files {
            files.push(FileEntry {
                path: format!("{}/{}", item.dir, file.name),
                length: file.length,
                trailer_crc32c: file.trailer_crc,
                file_id: file.file_id,
                within: file.within.as_ref().map(|within| manifest::WithinEntry {
                    path: format!("{}/{}", item.dir, within.name),
                    offset: within.offset,
                    others: Others::new(),
                }),
                others: Others::new(),
            });
        }
        let encoded = index_v1::encode(&index)?;
        let path = format!("{}/{INDEX}", item.dir);
        let entry = IndexEntry {
            path: path.clone(),
            length: encoded.bytes.len() as u64,
            crc32c: encoded.crc,
            others: Others::new(),
        };
        items.push(item.entry(entry, index.leaves.len() as u64, tensor_bytes));
        out.push((Some(item.dir), Record { path, bytes: encoded.bytes }));
    }
    number(&mut items);
    let data = stored_files(&files).into_iter().map(|(path, length)| (path.to_owned(), length)).collect();
    let manifest =
        Manifest { unsupported, ..draft.manifest(attempt, world_size, committed_unix_ns, items, files) };
    out.push((None, Record { path: LEASE.to_owned(), bytes: Vec::new() }));
    out.push((None, Record { path: MANIFEST.to_owned(), bytes: manifest.encode()? }));
    Ok((data, out))
}

/// Numbers the top-level entries of all items in one common order. Entries of one item keep their
/// order. The entries of all items are merged by their positions on the ranks.
fn number(items: &mut [Item]) {
    let head = |(item, of): (usize, &Item)| Some(Reverse((of.top_level.first()?.position, item, 0_usize)));
    let mut heads: BinaryHeap<_> = items.iter().enumerate().filter_map(head).collect();
    let mut positions = 0_u64..;
    while let Some(Reverse((_, item, at))) = heads.pop() {
        let Some(entries) = items.get_mut(item).map(|item| &mut item.top_level) else { continue };
        if let (Some(entry), Some(position)) = (entries.get_mut(at), positions.next()) {
            entry.position = position;
        }
        if let Some(entry) = entries.get(at + 1) {
            heads.push(Reverse((entry.position, item, at + 1)));
        }
    }
}
