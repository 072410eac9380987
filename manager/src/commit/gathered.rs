//! Votes, sorted by item.

use std::collections::HashMap;

use stepwell_core::format::index::Index;
use stepwell_core::format::manifest::{Others, TopLevel};

use super::compared::ComparedClaims;
use super::draft::Draft;
use super::rank_parts::rank_names;
use super::vote::Vote;
use crate::error::{Error, Result};
use crate::state::MAX_SPLIT_ITEMS;
use crate::state::item::{DraftItem, ItemPart};

/// The parts of all ranks, by item.
#[derive(Default)]
pub(super) struct GatheredVotes {
    /// The items, in the order of the leader's state, then items that it does not have.
    items: Vec<GatheredItem>,
    by_dir: HashMap<String, usize>,
    /// The position of a top-level entry, in the state of the first rank that has it.
    positions: HashMap<String, u64>,
    /// The item of a top-level entry, and the name of the ranks that reported it first.
    item_of: HashMap<String, (usize, String)>,
}

pub(super) struct GatheredItem {
    pub draft: DraftItem,
    /// The parts, by rank.
    pub parts: Vec<(u32, ItemPart)>,
}

impl GatheredVotes {
    /// Sorts the parts and claims of votes. Fails if a vote reports a failure.
    pub(super) fn of(draft: &Draft, votes: Vec<Vote>) -> Result<(Self, ComparedClaims)> {
        let (mut gathered, mut compared) = (Self::default(), ComparedClaims::default());
        for item in &draft.items {
            gathered.item(item);
        }
        for vote in votes {
            compared.add(&vote.claims);
            for part in vote.parts.map_err(Error::Relayed)? {
                gathered.add(vote.rank, part)?;
            }
        }
        Ok((gathered, compared))
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
                self.item_of.entry(entry.name.clone()).or_insert_with(|| (at, rank_names(rank, &part.index)));
            if *known != at {
                let what = format!(
                    "ranks {who} and {} disagree: it is a container on one and a leaf on the other, or only one of them has more than {MAX_SPLIT_ITEMS} containers beside it. Save states of the same structure on all ranks",
                    rank_names(rank, &part.index)
                );
                return Err(Error::Layout { leaf: entry.name.clone(), what, advice: None });
            }
        }
        if let Some(item) = self.items.get_mut(at) {
            item.parts.push((rank, part));
        }
        Ok(())
    }

    pub(super) fn take_items(&mut self) -> Vec<GatheredItem> {
        std::mem::take(&mut self.items)
    }

    /// Sets the top-level entries of an item, in the order of its merged tree.
    pub(super) fn set_top_level(&self, item: &mut DraftItem, index: &Index) {
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
