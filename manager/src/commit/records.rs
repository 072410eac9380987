//! The records of a step, made from the votes of all ranks: one index per item, and the manifest.
//! Pure.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};
use std::ops::Range;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use stepwell_core::format::FORMAT_VERSION;
use stepwell_core::format::index::{ChunkRecord, ChunkRegion, FileRecord, Index, LeafRecord, Within};
use stepwell_core::format::index_v1;
use stepwell_core::format::manifest::{
    self, Attempt, FileEntry, IndexEntry, Item, Manifest, NODE_FILES, Others, TopLevel, stored_files,
};
use stepwell_core::format::merge::{self, Refusal, Twice};
use stepwell_core::leaf_path::LeafPath;
use stepwell_core::limits;
use stepwell_core::region::Region;
use stepwell_reshard::tiling::{self, Fault, Slices};

use super::announcement::failure;
use crate::coordination::LEADER;
use crate::directory_layout::{INDEX, LEASE, MANIFEST};
use crate::error::{Advice, Error, Relayed, Result};
use crate::state::claims::Claim;
use crate::state::item::{DraftItem, ItemPart};
use crate::state::{MAX_SPLIT_ITEMS, leaf_hashes};

/// A rank's vote: the index of its data, or its failure.
#[derive(Clone, Debug, PartialEq)]
pub struct Vote {
    /// The rank.
    pub rank: u32,
    /// The step that it saves.
    pub step: u64,
    /// The attempt that it votes on.
    pub attempt: Attempt,
    /// True if its leaves have changed since the last census.
    pub stale: bool,
    /// This rank's values of leaves that should be equal on others.
    pub claims: Vec<Claim>,
    /// Its parts, with those of the ranks whose votes it gathered, or a failure.
    pub parts: Result<Vec<ItemPart>, Relayed>,
}

/// The parts of a manifest that are known before the data is written.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    /// The root, for messages.
    pub root: PathBuf,
    /// The step.
    pub step: u64,
    /// The time at which the save began, in nanoseconds since 1970.
    pub started_unix_ns: i64,
    /// The hash of the state's structure.
    pub plan_hash: String,
    /// The items, in order: directory, name, top-level entries.
    pub items: Vec<DraftItem>,
    /// This rank's values of leaves that should be equal on others.
    pub claims: Vec<Claim>,
    /// The user's metrics.
    pub metrics: BTreeMap<String, f64>,
    /// The user's metadata.
    pub custom_metadata: serde_json::Value,
}

impl Draft {
    /// Refuses, before the capture, a manifest that the commit would refuse. It makes the manifest
    /// as [`records`] does, with the widest numbers for unknown values, encodes it, and decodes it.
    /// Of many ranks it includes the files of two, and counts the others'.
    pub fn check(&self, session: &str, world_size: u32) -> Result<()> {
        let limit = |what: &str, found: u64, limit: u64| match found {
            found if found > limit => Err(stepwell_core::Error::Limit { what: what.into(), found, limit }),
            _ => Ok(()),
        };
        limit(
            "the number of data files",
            u64::from(world_size) * self.items.len() as u64,
            limits::MAX_FILES,
        )?;
        let bytes_of = |ranks: u32| -> Result<u64> {
            let bytes = self.widest(session, world_size, world_size - ranks..world_size).encode()?;
            Manifest::decode(&bytes, &self.root)?;
            Ok(bytes.len() as u64)
        };
        let one = bytes_of(1)?;
        if world_size > 1 {
            let each = bytes_of(2)?.saturating_sub(one);
            let all = one.saturating_add(each.saturating_mul(u64::from(world_size) - 1));
            limit("a manifest's size in bytes", all, limits::MAX_MANIFEST_BYTES)?;
        }
        Ok(())
    }

    /// Returns a manifest with the widest numbers for unknown values, and the files of some ranks.
    fn widest(&self, session: &str, world_size: u32, ranks: Range<u32>) -> Manifest {
        let items = self.items.iter().map(|item| {
            let index = IndexEntry {
                path: format!("{}/{INDEX}", item.dir),
                length: limits::MAX_INDEX_BYTES,
                crc32c: u32::MAX,
                others: Others::new(),
            };
            item.entry(index, limits::MAX_LEAVES, u64::MAX)
        });
        let ranks = ranks.flat_map(|rank| self.items.iter().map(move |item| (rank, item)));
        let files = ranks.map(|(rank, item)| FileEntry {
            path: format!("{}/{rank:05}.data", item.dir),
            length: limits::MAX_FILE_BYTES / 2,
            trailer_crc32c: u32::MAX,
            file_id: u128::MAX,
            within: Some(manifest::WithinEntry {
                path: format!("{}/n{rank:05}.data", item.dir),
                offset: limits::MAX_FILE_BYTES / 2,
                others: Others::new(),
            }),
            others: Others::new(),
        });
        let attempt = Attempt { session: session.to_owned(), counter: u64::MAX };
        self.manifest(&attempt, world_size, i64::MAX, items.collect(), files.collect())
    }

    /// Makes the manifest. No other function makes one.
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
            required_features: if files.iter().any(|file| file.within.is_some()) {
                vec![NODE_FILES.to_owned()]
            } else {
                Vec::new()
            },
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

/// Files below a step: path and length.
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
    let (mut gathered, claimed) = Gathered::of(draft, votes)?;
    let mut merged = Vec::new();
    for mut item in gathered.items() {
        if item.parts.is_empty() {
            return Err(Error::Invalid(format!(
                "no rank wrote item `{}` of step {}",
                item.draft.name, draft.step
            )));
        }
        let parts = std::mem::take(&mut item.parts);
        let tensor_bytes = parts.iter().fold(0_u64, |sum, (_, part)| sum.saturating_add(part.tensor_bytes));
        let (index, _) = merge(parts, merge::merge)?;
        merged.push((item.draft, index, tensor_bytes));
    }
    claimed.check(merged.iter().map(|(_, index, _)| index))?;
    // Check conflicts of all items before coverage: ranks that disagree on one tensor also
    // partition others differently. The plan of a single process covers everything by construction.
    if world_size > 1 {
        merged.iter().try_for_each(|(_, index, _)| check_coverage(index))?;
    }
    let mut out = Vec::new();
    let mut items = Vec::new();
    let mut files = Vec::new();
    for (mut item, index, tensor_bytes) in merged {
        gathered.order(&mut item, &index);
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
    let manifest = draft.manifest(attempt, world_size, committed_unix_ns, items, files);
    out.push((None, Record { path: LEASE.to_owned(), bytes: Vec::new() }));
    out.push((None, Record { path: MANIFEST.to_owned(), bytes: manifest.encode()? }));
    Ok((data, out))
}

/// Merges the votes of a node's ranks into one, which `rank` sends. A conflict becomes a failed
/// vote.
pub fn gather(draft: &Draft, attempt: &Attempt, rank: u32, votes: Vec<Vote>) -> Vote {
    let stale = votes.iter().any(|vote| vote.stale);
    let (claims, parts) = match gather_parts(draft, votes) {
        Ok((claims, parts)) => (claims, Ok(parts)),
        Err(error) => (Vec::new(), Err(failure(rank, &error))),
    };
    Vote { rank, step: draft.step, attempt: attempt.clone(), stale, claims, parts }
}

fn gather_parts(draft: &Draft, votes: Vec<Vote>) -> Result<(Vec<Claim>, Vec<ItemPart>)> {
    let (mut gathered, claimed) = Gathered::of(draft, votes)?;
    let items = gathered.items().into_iter().filter(|item| !item.parts.is_empty());
    let merged = items.map(|item| {
        let mut draft = item.draft;
        // Keep each entry with its holder's position. The leader orders them.
        let mut known: HashSet<String> = draft.top_level.iter().map(|entry| entry.name.clone()).collect();
        for (_, part) in &item.parts {
            let new = part.item.top_level.iter().filter(|entry| known.insert(entry.name.clone()));
            draft.top_level.extend(new.cloned());
        }
        let tensor_bytes =
            item.parts.iter().fold(0_u64, |sum, (_, part)| sum.saturating_add(part.tensor_bytes));
        let (index, unsettled) = merge(item.parts, merge::merge_some)?;
        draft.unsettled = (0..index.leaves.len() as u32)
            .filter(|&leaf| !unsettled.is_empty() && unsettled.contains(&index.tree.leaf_path(leaf)))
            .collect();
        Ok(ItemPart { item: draft, index, tensor_bytes })
    });
    let parts = merged.collect::<Result<_>>()?;
    // Forward differences too: perhaps only other nodes have written the leaf.
    Ok((claimed.forwarded(), parts))
}

/// The parts of all ranks, by item.
#[derive(Default)]
struct Gathered {
    /// The items, in the order of the leader's state, then items that it does not have.
    items: Vec<GatheredItem>,
    by_dir: HashMap<String, usize>,
    /// The position of a top-level entry, in the state of the first rank that has it.
    positions: HashMap<String, u64>,
    /// The item of a top-level entry, and the ranks that reported it.
    item_of: HashMap<String, (usize, String)>,
}

struct GatheredItem {
    draft: DraftItem,
    /// The parts, by rank.
    parts: Vec<(u32, ItemPart)>,
}

impl Gathered {
    /// Collects parts and claims from votes. A failed vote fails it.
    fn of(draft: &Draft, votes: Vec<Vote>) -> Result<(Self, Claimed)> {
        let (mut gathered, mut claimed) = (Self::default(), Claimed::default());
        for item in &draft.items {
            gathered.item(item);
        }
        for vote in votes {
            claimed.add(&vote.claims);
            for part in vote.parts.map_err(Error::Relayed)? {
                gathered.add(vote.rank, part)?;
            }
        }
        Ok((gathered, claimed))
    }

    /// Returns the number of an item. Adds the item if it is new.
    fn item(&mut self, draft: &DraftItem) -> usize {
        for entry in &draft.top_level {
            self.positions.entry(entry.name.clone()).or_insert(entry.position);
        }
        let next = self.items.len();
        let at = *self.by_dir.entry(draft.dir.clone()).or_insert(next);
        if at == next {
            self.items.push(GatheredItem { draft: draft.clone(), parts: Vec::new() });
        }
        at
    }

    fn add(&mut self, rank: u32, part: ItemPart) -> Result<()> {
        let at = self.item(&part.item);
        for entry in &part.item.top_level {
            let (known, who) =
                self.item_of.entry(entry.name.clone()).or_insert_with(|| (at, named(rank, &part.index)));
            if *known != at {
                let what = format!(
                    "ranks {who} and {} disagree: it is a container on one and a leaf on the other, or only one of them has more than {MAX_SPLIT_ITEMS} containers beside it",
                    named(rank, &part.index)
                );
                return Err(Error::Layout { leaf: entry.name.clone(), what, advice: None });
            }
        }
        if let Some(item) = self.items.get_mut(at) {
            item.parts.push((rank, part));
        }
        Ok(())
    }

    fn items(&mut self) -> Vec<GatheredItem> {
        std::mem::take(&mut self.items)
    }

    /// Sets the top-level entries of an item, in the order of its tree.
    fn order(&self, item: &mut DraftItem, index: &Index) {
        let tops = index.tree.nodes().iter().skip(1).filter(|node| node.parent == 0);
        item.top_level = tops
            .filter_map(|node| {
                let mut name = String::new();
                node.component.as_ref()?.render(&mut name);
                let position = self.positions.get(&name).copied().unwrap_or(u64::MAX);
                Some(TopLevel { name, position, others: Others::new() })
            })
            .collect();
    }
}

/// Numbers the top-level entries of all items. Entries of one item keep their order. All are as
/// near as possible to their positions on the ranks, which may have different entries.
fn number(items: &mut [Item]) {
    let head = |(item, of): (usize, &Item)| Some(Reverse((of.top_level.first()?.position, item, 0_usize)));
    let mut heads: BinaryHeap<_> = items.iter().enumerate().filter_map(head).collect();
    let mut places = 0_u64..;
    while let Some(Reverse((_, item, at))) = heads.pop() {
        let Some(entries) = items.get_mut(item).map(|item| &mut item.top_level) else { continue };
        if let (Some(entry), Some(place)) = (entries.get_mut(at), places.next()) {
            entry.position = place;
        }
        if let Some(entry) = entries.get(at + 1) {
            heads.push(Reverse((entry.position, item, at + 1)));
        }
    }
}

/// The ranks' claims on leaves that should be equal.
#[derive(Default)]
struct Claimed {
    /// By the part.
    first: HashMap<u64, Claim>,
    /// Two different claims on a leaf, by the hash of its path.
    differ: HashMap<u64, (Claim, Claim)>,
}

impl Claimed {
    fn add(&mut self, claims: &[Claim]) {
        for &claim in claims {
            let entry = self.first.entry(claim.part).or_insert(claim);
            let known = *entry;
            if known.value == 0 {
                // The known claim has no sample: compare later claims with this one.
                *entry = claim;
            }
            let other_value = known.value != 0 && claim.value != 0 && known.value != claim.value;
            if known.kind != claim.kind || other_value {
                self.differ.entry(claim.path).or_insert((known, claim));
            }
        }
    }

    /// Returns the claims that a vote forwards: one for each part, and all that differ.
    fn forwarded(&self) -> Vec<Claim> {
        let differ = self.differ.values().flat_map(|&(one, other)| [one, other]);
        let mut forwarded: Vec<Claim> = self.first.values().copied().chain(differ).collect();
        forwarded.sort_unstable_by_key(|claim| (claim.path, claim.part, claim.rank));
        forwarded.dedup();
        forwarded
    }

    /// Refuses a step with a leaf that differs between ranks. `items` are the indexes of all items.
    fn check<'a>(&self, mut items: impl Iterator<Item = &'a Index>) -> Result<()> {
        if self.differ.is_empty() {
            return Ok(());
        }
        items.try_for_each(|index| self.check_item(index))?;
        // Report a difference even if no index has its leaf.
        let ranks = self.differ.values().map(|(one, other)| (one.rank, other.rank)).min();
        let (one, other) = ranks.unwrap_or_default();
        Err(Error::Invalid(format!(
            "ranks {one} and {other} differ in a leaf of which no rank has written anything"
        )))
    }

    fn check_item(&self, index: &Index) -> Result<()> {
        for (leaf, path) in (0_u32..).zip(leaf_hashes(&index.tree)) {
            if let Some((one, other)) = self.differ.get(&path) {
                let other_kind = one.kind != other.kind;
                let (one, other) = (one.rank, other.rank);
                let (what, advice) = if other_kind {
                    let what = format!(
                        "it is of another dtype or shape, or another sort of value, on rank {one} than on rank {other}"
                    );
                    (what, None)
                } else {
                    let what = format!(
                        "it is replicated, and rank {one} has other values than rank {other}. Save one value per rank, or say that the first rank's counts"
                    );
                    (what, Some(Advice::NamePerRank))
                };
                return Err(Error::Layout { leaf: index.tree.leaf_path(leaf).to_string(), what, advice });
            }
        }
        Ok(())
    }
}

/// Merges parts into one index. A part is a rank's, or a node's under the rank that gathered it.
/// Also returns the leaves that are still unsettled. Names the leaf and the ranks of a
/// contradiction.
fn merge(
    mut parts: Vec<(u32, ItemPart)>,
    merge: impl FnOnce(Vec<Index>, Twice) -> std::result::Result<Index, Refusal>,
) -> Result<(Index, HashSet<LeafPath>)> {
    let unsettled = take_once(&mut parts);
    let whose: Vec<String> = parts.iter().map(|(rank, part)| named(*rank, &part.index)).collect();
    let merged = merge(parts.into_iter().map(|(_, part)| part.index).collect(), Twice::Both);
    let index = merged.map_err(|refusal| match refusal {
        Refusal::Contradiction { leaf, first, second, what } => {
            let who = |part: usize| whose.get(part).map_or("0", String::as_str);
            Error::Layout {
                leaf,
                what: format!("ranks {} and {} disagree: {what}", who(first), who(second)),
                advice: None,
            }
        }
        Refusal::Other(error) => error.into(),
    })?;
    Ok((index, unsettled))
}

/// Names the ranks of a part, for messages.
fn named(rank: u32, index: &Index) -> String {
    let mut ranks: Vec<u32> = index.files.iter().filter_map(rank_of).collect();
    ranks.sort_unstable();
    match ranks.as_slice() {
        [first, .., last] => format!("one of {first} to {last}"),
        _ => rank.to_string(),
    }
}

/// Returns the rank that wrote a data file.
fn rank_of(file: &FileRecord) -> Option<u32> {
    file.name.strip_suffix(".data")?.parse().ok()
}

/// Keeps one copy of each unsettled leaf: ranks wrote it without knowing of each other. Settled
/// copies have priority, then the first rank's. Returns the leaves of which an unsettled copy was
/// kept.
fn take_once(parts: &mut [(u32, ItemPart)]) -> HashSet<LeafPath> {
    let mut kept: HashMap<LeafPath, HashSet<Region>> = HashMap::new();
    for (_, part) in parts.iter() {
        kept.extend(
            part.item.unsettled.iter().map(|&leaf| (part.index.tree.leaf_path(leaf), HashSet::new())),
        );
    }
    let mut stayed = HashSet::new();
    if kept.is_empty() {
        return stayed;
    }
    for settled in [true, false] {
        for (_, part) in parts.iter_mut() {
            for (leaf, record) in (0_u32..).zip(&mut part.index.leaves) {
                let (LeafRecord::Tensor(tensor), true) =
                    (record, part.item.unsettled.binary_search(&leaf).is_err() == settled)
                else {
                    continue;
                };
                let path = part.index.tree.leaf_path(leaf);
                let Some(kept) = kept.get_mut(&path) else { continue };
                let region_of = |chunk: &ChunkRecord| match &chunk.region {
                    ChunkRegion::Box(region) => region.clone(),
                    ChunkRegion::Run { .. } => Region::whole(&tensor.shape),
                };
                if !settled {
                    tensor.chunks.retain(|chunk| {
                        let region = region_of(chunk);
                        // Most are equal copies, so compare by equality first.
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

/// Checks that the chunks of every tensor tile its shape exactly once.
fn check_coverage(index: &Index) -> Result<()> {
    for (leaf, record) in (0_u32..).zip(&index.leaves) {
        let LeafRecord::Tensor(tensor) = record else { continue };
        let regions: Vec<_> = tensor.chunks.iter().map(|chunk| chunk.region.clone()).collect();
        let Err(fault) = tiling::check(&tensor.shape, &regions) else { continue };
        let rank_of = |chunk: usize| {
            let file = tensor.chunks.get(chunk).and_then(|chunk| chunk.extent.source.file());
            file.and_then(|file| rank_of(index.files.get(file as usize)?)).unwrap_or(LEADER)
        };
        let shape = tensor.shape.as_slice();
        let what = match fault {
            Fault::Hole { region } => {
                let mut holders: Vec<u32> = (0..tensor.chunks.len()).map(rank_of).collect();
                holders.sort_unstable();
                holders.dedup();
                if holders.is_empty() {
                    format!(
                        "no rank writes any part of it, of shape {shape:?}: none holds one, all say that another one's copy counts, or the ranks select different leaves (include=, exclude=)"
                    )
                } else {
                    format!(
                        "no rank holds {} of its shape {shape:?}; ranks {holders:?} hold parts of it",
                        Slices(&region)
                    )
                }
            }
            Fault::Overlap { first, second, region } => {
                let (one, other) = (rank_of(first), rank_of(second));
                let who = if one == other {
                    format!("rank {one} holds {} twice", Slices(&region))
                } else {
                    format!("ranks {one} and {other} both hold {}", Slices(&region))
                };
                format!("{who} of its shape {shape:?}, and neither says that the other does")
            }
            fault @ (Fault::Outside { .. } | Fault::TooIrregular) => fault.to_string(),
        };
        let advice = Some(Advice::NameReplicas);
        return Err(Error::Layout { leaf: index.tree.leaf_path(leaf).to_string(), what, advice });
    }
    Ok(())
}

/// The JSON head of an encoded vote. The claims and the encoded indexes follow it.
#[derive(Serialize, Deserialize)]
struct Head {
    step: u64,
    attempt: Attempt,
    stale: bool,
    claims: u64,
    failure: Option<Relayed>,
    parts: Vec<HeadPart>,
}

#[derive(Serialize, Deserialize)]
struct HeadPart {
    item: DraftItem,
    index_bytes: u64,
    tensor_bytes: u64,
    /// For each file of the index: the file that contains it, and its offset there.
    #[serde(default)]
    within: Vec<Option<(Box<str>, u64)>>,
}

impl Vote {
    /// Encodes the vote.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut indexes = Vec::new();
        let mut parts = Vec::new();
        for part in self.parts.iter().flatten() {
            let encoded = index_v1::encode(&part.index)?.bytes;
            let files = part.index.files.iter();
            let within =
                files.map(|file| file.within.as_ref().map(|within| (within.name.clone(), within.offset)));
            parts.push(HeadPart {
                item: part.item.clone(),
                index_bytes: encoded.len() as u64,
                tensor_bytes: part.tensor_bytes,
                within: within.collect(),
            });
            indexes.extend_from_slice(&encoded);
        }
        let (stale, claims) = (self.stale, self.claims.len() as u64);
        let head = Head {
            step: self.step,
            attempt: self.attempt.clone(),
            stale,
            claims,
            failure: self.parts.as_ref().err().cloned(),
            parts,
        };
        let head = serde_json::to_vec(&head).map_err(|error| crate::error::unencodable(&error))?;
        let mut out = (head.len() as u64).to_le_bytes().to_vec();
        out.extend_from_slice(&head);
        self.claims.iter().for_each(|claim| claim.encode(&mut out));
        out.extend_from_slice(&indexes);
        Ok(out)
    }

    /// Returns a failed vote.
    pub fn failed(rank: u32, step: u64, attempt: Attempt, failure: Relayed) -> Self {
        Self { rank, step, attempt, stale: false, claims: Vec::new(), parts: Err(failure) }
    }

    /// Decodes a vote of that rank.
    pub fn decode(rank: u32, bytes: &[u8]) -> Result<Self> {
        let bad = || Error::RankFailed {
            rank,
            cause: "its vote cannot be read; are all ranks of one version?".to_owned(),
        };
        let (length, rest) = bytes.split_first_chunk::<8>().ok_or_else(bad)?;
        let length = usize::try_from(u64::from_le_bytes(*length)).map_err(|_| bad())?;
        let (head, mut rest) = rest.split_at_checked(length).ok_or_else(bad)?;
        let head: Head = serde_json::from_slice(head).map_err(|_| bad())?;
        let claims = usize::try_from(head.claims).ok().and_then(|count| count.checked_mul(Claim::BYTES));
        let (claims, after) = claims.and_then(|bytes| rest.split_at_checked(bytes)).ok_or_else(bad)?;
        rest = after;
        let claims: Vec<Claim> = claims.chunks(Claim::BYTES).filter_map(Claim::decode).collect();
        if let Some(failure) = head.failure {
            return Ok(Self {
                rank,
                step: head.step,
                attempt: head.attempt,
                stale: head.stale,
                claims,
                parts: Err(failure),
            });
        }
        let mut parts = Vec::with_capacity(head.parts.len());
        for part in head.parts {
            let length = usize::try_from(part.index_bytes).map_err(|_| bad())?;
            let (index, after) = rest.split_at_checked(length).ok_or_else(bad)?;
            rest = after;
            let mut index = index_v1::decode(index, &PathBuf::from(format!("the vote of rank {rank}")))?;
            for (file, within) in index.files.iter_mut().zip(part.within) {
                file.within = within.map(|(name, offset)| Within { name, offset });
            }
            parts.push(ItemPart { item: part.item, index, tensor_bytes: part.tensor_bytes });
        }
        Ok(Self { rank, step: head.step, attempt: head.attempt, stale: head.stale, claims, parts: Ok(parts) })
    }
}
