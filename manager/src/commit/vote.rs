//! The vote of a rank on a save, its encoding, and the common vote of a node. Pure.

use std::collections::HashSet;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use stepwell_core::format::index::Within;
use stepwell_core::format::manifest::{Attempt, UnsupportedLeaf};
use stepwell_core::format::{index_v1, merge};

use super::announcement::failure;
use super::draft::Draft;
use super::gathered::GatheredVotes;
use super::rank_parts::merge_parts;
use crate::error::{Error, Relayed, Result};
use crate::state::claims::Claim;
use crate::state::item::{DraftItem, ItemPart};

/// A rank's vote: the index of its data, or its failure.
#[derive(Clone, Debug, PartialEq)]
pub struct Vote {
    /// The rank.
    pub rank: u32,
    /// The step that it saves.
    pub step: u64,
    /// The attempt that it votes on.
    pub attempt: Attempt,
    /// True if its leaves have changed since the last census ([`crate::state::Census`]).
    pub stale: bool,
    /// This rank's values of leaves that should be equal on others.
    pub claims: Vec<Claim>,
    /// Leaves that it has left out, with those of the ranks whose votes it gathered.
    pub unsupported: Vec<UnsupportedLeaf>,
    /// Its parts, with those of the ranks whose votes it gathered, or a failure.
    pub parts: Result<Vec<ItemPart>, Relayed>,
}

/// Merges the votes of a node's ranks into one vote of `rank`. After a conflict, returns a failed
/// vote.
pub fn merge_votes(draft: &Draft, attempt: &Attempt, rank: u32, votes: Vec<Vote>) -> Vote {
    let stale = votes.iter().any(|vote| vote.stale);
    let unsupported = all_unsupported(&votes);
    let (claims, parts) = match merge_vote_parts(draft, votes) {
        Ok((claims, parts)) => (claims, Ok(parts)),
        Err(error) => (Vec::new(), Err(failure(rank, &error))),
    };
    Vote { rank, step: draft.step, attempt: attempt.clone(), stale, claims, unsupported, parts }
}

/// Returns the leaves that any of these ranks has left out. If several have one path, the first
/// rank's reason counts.
pub(super) fn all_unsupported(votes: &[Vote]) -> Vec<UnsupportedLeaf> {
    let mut known = HashSet::new();
    let leaves = votes.iter().flat_map(|vote| &vote.unsupported);
    leaves.filter(|leaf| known.insert(leaf.path.as_str())).cloned().collect()
}

fn merge_vote_parts(draft: &Draft, votes: Vec<Vote>) -> Result<(Vec<Claim>, Vec<ItemPart>)> {
    let (mut gathered, compared) = GatheredVotes::of(draft, votes)?;
    let items = gathered.take_items().into_iter().filter(|item| !item.parts.is_empty());
    let merged = items.map(|item| {
        let mut draft = item.draft;
        // Entries keep their positions on their ranks. The leader merges the order.
        let mut known: HashSet<String> = draft.top_level.iter().map(|entry| entry.name.clone()).collect();
        for (_, part) in &item.parts {
            let new = part.item.top_level.iter().filter(|entry| known.insert(entry.name.clone()));
            draft.top_level.extend(new.cloned());
        }
        let tensor_bytes =
            item.parts.iter().fold(0_u64, |sum, (_, part)| sum.saturating_add(part.tensor_bytes));
        let (index, undecided) = merge_parts(item.parts, merge::merge_some)?;
        draft.undecided = (0..index.leaves.len() as u32)
            .filter(|&leaf| !undecided.is_empty() && undecided.contains(&index.tree.leaf_path(leaf)))
            .collect();
        Ok(ItemPart { item: draft, index, tensor_bytes })
    });
    let parts = merged.collect::<Result<_>>()?;
    // The vote contains differences too, because only other nodes may have written that leaf.
    Ok((compared.forwarded(), parts))
}

/// The head of an encoded vote, in JSON. The claims and the encoded indexes follow it.
#[derive(Serialize, Deserialize)]
struct VoteHead {
    step: u64,
    attempt: Attempt,
    stale: bool,
    claims: u64,
    #[serde(default)]
    unsupported: Vec<UnsupportedLeaf>,
    failure: Option<Relayed>,
    parts: Vec<VotePart>,
}

#[derive(Serialize, Deserialize)]
struct VotePart {
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
            parts.push(VotePart {
                item: part.item.clone(),
                index_bytes: encoded.len() as u64,
                tensor_bytes: part.tensor_bytes,
                within: within.collect(),
            });
            indexes.extend_from_slice(&encoded);
        }
        let (stale, claims) = (self.stale, self.claims.len() as u64);
        let head = VoteHead {
            step: self.step,
            attempt: self.attempt.clone(),
            stale,
            claims,
            unsupported: self.unsupported.clone(),
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
        Self {
            rank,
            step,
            attempt,
            stale: false,
            claims: Vec::new(),
            unsupported: Vec::new(),
            parts: Err(failure),
        }
    }

    /// Decodes a vote of that rank.
    pub fn decode(rank: u32, bytes: &[u8]) -> Result<Self> {
        let bad = || Error::RankFailed {
            rank,
            cause: "its vote cannot be read. Run the same version of stepwell on all ranks".to_owned(),
        };
        let (length, rest) = bytes.split_first_chunk::<8>().ok_or_else(bad)?;
        let length = usize::try_from(u64::from_le_bytes(*length)).map_err(|_| bad())?;
        let (head, mut rest) = rest.split_at_checked(length).ok_or_else(bad)?;
        let head: VoteHead = serde_json::from_slice(head).map_err(|_| bad())?;
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
                unsupported: head.unsupported,
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
                file.within = within.map(|(name, offset)| Within { name, offset, stream: None });
            }
            parts.push(ItemPart { item: part.item, index, tensor_bytes: part.tensor_bytes });
        }
        Ok(Self {
            rank,
            step: head.step,
            attempt: head.attempt,
            stale: head.stale,
            claims,
            unsupported: head.unsupported,
            parts: Ok(parts),
        })
    }
}
