//! What is written beside the data: one index per item and the manifest, from the votes of all ranks. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use stepwell_core::format::FORMAT_VERSION;
use stepwell_core::format::index::{Index, LeafRecord, Source};
use stepwell_core::format::index_v1;
use stepwell_core::format::manifest::{Attempt, FileEntry, IndexEntry, Item, Manifest, Others, TopLevel};
use stepwell_core::limits;

use crate::directory_layout::{INDEX, LEASE, MANIFEST};
use crate::error::{Error, Result};

/// What a rank wrote of one item.
#[derive(Clone, Debug, PartialEq)]
pub struct ItemPart {
    /// The item's directory.
    pub dir: String,
    /// What its data file holds; `files[0]` is that file.
    pub index: Index,
    /// Bytes of tensors.
    pub tensor_bytes: u64,
}

/// A rank's vote: what it wrote, or why it could not.
#[derive(Clone, Debug, PartialEq)]
pub struct Vote {
    /// The rank.
    pub rank: u32,
    /// The attempt that it votes on.
    pub attempt: Attempt,
    /// Its parts, or its failure.
    pub parts: Result<Vec<ItemPart>, String>,
}

/// The parts of a manifest that are known before the data is written.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    /// The root, for messages.
    pub root: PathBuf,
    /// The step.
    pub step: u64,
    /// When the save began.
    pub started_unix_ns: i64,
    /// Hash of the plan on which the ranks agreed.
    pub plan_hash: String,
    /// The items, in order: directory, name, top-level entries.
    pub items: Vec<DraftItem>,
    /// The user's metrics.
    pub metrics: BTreeMap<String, f64>,
    /// The user's metadata.
    pub custom_metadata: serde_json::Value,
}

impl Draft {
    /// Refuses what a commit of this draft would refuse in its manifest, before anything of it is captured: the manifest is made as [`records`] makes it,
    /// with the widest numbers for what is not known yet, encoded by the same code, and read back.
    pub fn check(&self, session: &str, world_size: u32) -> Result<()> {
        let items = self.items.iter().map(|item| {
            let index = IndexEntry {
                path: format!("{}/{INDEX}", item.dir),
                length: limits::MAX_INDEX_BYTES,
                crc32c: u32::MAX,
                others: Others::new(),
            };
            item.entry(index, limits::MAX_LEAVES, u64::MAX)
        });
        let ranks =
            (0..u64::from(world_size)).flat_map(|rank| self.items.iter().map(move |item| (rank, item)));
        let files = ranks.take(limits::MAX_FILES as usize + 1).map(|(rank, item)| FileEntry {
            path: format!("{}/{rank:05}.data", item.dir),
            length: limits::MAX_FILE_BYTES,
            trailer_crc32c: u32::MAX,
            file_id: u128::MAX,
            others: Others::new(),
        });
        let attempt = Attempt { session: session.to_owned(), counter: u64::MAX };
        let manifest = self.manifest(&attempt, world_size, i64::MAX, items.collect(), files.collect());
        Manifest::decode(&manifest.encode()?, &self.root)?;
        Ok(())
    }

    /// The commit record: the only place that makes one.
    fn manifest(
        &self,
        attempt: &Attempt,
        world_size: u32,
        committed_unix_ns: i64,
        items: Vec<Item>,
        files: Vec<FileEntry>,
    ) -> Manifest {
        Manifest {
            format_version: FORMAT_VERSION,
            required_features: Vec::new(),
            writer: format!("stepwell {}", env!("CARGO_PKG_VERSION")),
            step: self.step,
            attempt: attempt.clone(),
            started_unix_ns: self.started_unix_ns,
            committed_unix_ns,
            world_size,
            plan_hash: self.plan_hash.clone(),
            items,
            files,
            dropped: Vec::new(),
            metrics: self.metrics.clone(),
            custom_metadata: self.custom_metadata.clone(),
            others: Others::new(),
        }
    }
}

/// An item, before it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftItem {
    /// Its directory.
    pub dir: String,
    /// Its name.
    pub name: String,
    /// Its top-level entries.
    pub top_level: Vec<TopLevel>,
}

impl DraftItem {
    fn entry(&self, index: IndexEntry, leaves: u64, tensor_bytes: u64) -> Item {
        Item {
            name: self.name.clone(),
            dir: self.dir.clone(),
            index,
            top_level: self.top_level.clone(),
            leaves,
            tensor_bytes,
            others: Others::new(),
        }
    }
}

/// A small file of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Relative to the step.
    pub path: String,
    /// Its content.
    pub bytes: Vec<u8>,
}

/// The files to write, in order, each with the directory to sync after it: indexes, the lease, and the manifest last.
pub fn records(
    draft: &Draft,
    attempt: &Attempt,
    world_size: u32,
    votes: Vec<Vote>,
    committed_unix_ns: i64,
) -> Result<Vec<(Option<String>, Record)>> {
    let mut parts: BTreeMap<String, Vec<ItemPart>> = BTreeMap::new();
    for vote in votes {
        let rank = vote.rank;
        for part in vote.parts.map_err(|cause| Error::RankFailed { rank, cause })? {
            parts.entry(part.dir.clone()).or_default().push(part);
        }
    }
    let mut out = Vec::new();
    let mut items = Vec::new();
    let mut files = Vec::new();
    for item in &draft.items {
        let parts = parts.remove(&item.dir).ok_or_else(|| {
            Error::Invalid(format!("no rank wrote item `{}` of step {}", item.name, draft.step))
        })?;
        let (index, tensor_bytes) = merge(&item.name, parts)?;
        for file in &index.files {
            files.push(FileEntry {
                path: format!("{}/{}", item.dir, file.name),
                length: file.length,
                trailer_crc32c: file.trailer_crc,
                file_id: file.file_id,
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
        out.push((Some(item.dir.clone()), Record { path, bytes: encoded.bytes }));
    }
    let manifest = draft.manifest(attempt, world_size, committed_unix_ns, items, files);
    out.push((None, Record { path: LEASE.to_owned(), bytes: Vec::new() }));
    out.push((None, Record { path: MANIFEST.to_owned(), bytes: manifest.encode()? }));
    Ok(out)
}

/// One index from the parts of all ranks: same tree, chunks side by side, each object from the first rank that wrote it.
fn merge(item: &str, parts: Vec<ItemPart>) -> Result<(Index, u64)> {
    let several = parts.len() > 1;
    let mut parts = parts.into_iter();
    let Some(first) = parts.next() else {
        return Err(Error::Invalid(format!("no rank wrote item `{item}`")));
    };
    let mut index = first.index;
    let mut tensor_bytes = first.tensor_bytes;
    for part in parts {
        if part.index.tree != index.tree || part.index.leaves.len() != index.leaves.len() {
            return Err(Error::Invalid(format!("the ranks do not agree on the structure of item `{item}`")));
        }
        let shift = index.files.len() as u32;
        index.files.extend(part.index.files);
        tensor_bytes = tensor_bytes.saturating_add(part.tensor_bytes);
        for (leaf, (ours, theirs)) in index.leaves.iter_mut().zip(part.index.leaves).enumerate() {
            match (ours, theirs) {
                (LeafRecord::Tensor(ours), LeafRecord::Tensor(theirs)) => {
                    if ours.dtype != theirs.dtype || ours.shape != theirs.shape {
                        return Err(Error::Invalid(format!(
                            "the ranks do not agree on the dtype or shape of `{}`",
                            index.tree.leaf_path(leaf as u32)
                        )));
                    }
                    ours.chunks.extend(theirs.chunks.into_iter().map(|mut chunk| {
                        if let Source::Own(file) = &mut chunk.extent.source {
                            *file += shift;
                        }
                        chunk
                    }));
                }
                (LeafRecord::Object(_), LeafRecord::Object(_)) => {}
                (LeafRecord::Alias { of: ours }, LeafRecord::Alias { of: theirs }) if *ours == theirs => {}
                _ => {
                    return Err(Error::Invalid(format!(
                        "the ranks do not agree on what `{}` is",
                        index.tree.leaf_path(leaf as u32)
                    )));
                }
            }
        }
    }
    let names: BTreeSet<&str> = index.files.iter().map(|file| file.name.as_ref()).collect();
    if names.len() != index.files.len() {
        return Err(Error::Invalid(format!("two ranks wrote the same data file of item `{item}`")));
    }
    if several {
        check_coverage(&index)?;
    }
    Ok((index, tensor_bytes))
}

/// The chunks of every tensor must tile its shape exactly once. (One rank's own plan does by construction.)
fn check_coverage(index: &Index) -> Result<()> {
    for (leaf, record) in index.leaves.iter().enumerate() {
        let LeafRecord::Tensor(tensor) = record else { continue };
        let regions: Vec<_> = tensor.chunks.iter().map(|chunk| chunk.region.clone()).collect();
        stepwell_reshard::tiling::check(&tensor.shape, &regions).map_err(|what| {
            Error::Invalid(format!(
                "the ranks' shards do not cover `{}` exactly once: {what}",
                index.tree.leaf_path(leaf as u32)
            ))
        })?;
    }
    Ok(())
}

/// How a vote travels: a JSON head, then the encoded indexes back to back.
#[derive(Serialize, Deserialize)]
struct Head {
    attempt: Attempt,
    failure: Option<String>,
    parts: Vec<HeadPart>,
}

#[derive(Serialize, Deserialize)]
struct HeadPart {
    dir: String,
    index_bytes: u64,
    tensor_bytes: u64,
}

impl Vote {
    /// The vote as a message.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut indexes = Vec::new();
        let mut parts = Vec::new();
        for part in self.parts.iter().flatten() {
            let encoded = index_v1::encode(&part.index)?.bytes;
            parts.push(HeadPart {
                dir: part.dir.clone(),
                index_bytes: encoded.len() as u64,
                tensor_bytes: part.tensor_bytes,
            });
            indexes.extend_from_slice(&encoded);
        }
        let head = Head { attempt: self.attempt.clone(), failure: self.parts.as_ref().err().cloned(), parts };
        let head = serde_json::to_vec(&head).map_err(|error| Error::Invalid(error.to_string()))?;
        let mut out = (head.len() as u64).to_le_bytes().to_vec();
        out.extend_from_slice(&head);
        out.extend_from_slice(&indexes);
        Ok(out)
    }

    /// A vote from a message of that rank.
    pub fn decode(rank: u32, bytes: &[u8]) -> Result<Self> {
        let bad = || Error::RankFailed {
            rank,
            cause: "its vote cannot be read; are all ranks of one version?".to_owned(),
        };
        let (length, rest) = bytes.split_first_chunk::<8>().ok_or_else(bad)?;
        let length = usize::try_from(u64::from_le_bytes(*length)).map_err(|_| bad())?;
        let (head, mut rest) = rest.split_at_checked(length).ok_or_else(bad)?;
        let head: Head = serde_json::from_slice(head).map_err(|_| bad())?;
        if let Some(failure) = head.failure {
            return Ok(Self { rank, attempt: head.attempt, parts: Err(failure) });
        }
        let mut parts = Vec::with_capacity(head.parts.len());
        for part in head.parts {
            let length = usize::try_from(part.index_bytes).map_err(|_| bad())?;
            let (index, after) = rest.split_at_checked(length).ok_or_else(bad)?;
            rest = after;
            let index = index_v1::decode(index, &PathBuf::from(format!("the vote of rank {rank}")))?;
            parts.push(ItemPart { dir: part.dir, index, tensor_bytes: part.tensor_bytes });
        }
        Ok(Self { rank, attempt: head.attempt, parts: Ok(parts) })
    }
}
