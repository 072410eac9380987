//! The comparison of leaves that should be equal on all ranks that have them.

use std::collections::HashMap;

use stepwell_core::format::index::Index;

use crate::error::{Advice, Error, Result};
use crate::state::claims::Claim;
use crate::state::leaf_hashes;

/// The claims of the ranks on their leaves, and the differences between them.
#[derive(Default)]
pub(super) struct ComparedClaims {
    /// The first claim on each part of a leaf.
    first: HashMap<u64, Claim>,
    /// Two claims that differ, by the hash of their leaf's path.
    differ: HashMap<u64, (Claim, Claim)>,
}

impl ComparedClaims {
    /// Compares claims with the earlier ones.
    pub(super) fn add(&mut self, claims: &[Claim]) {
        for &claim in claims {
            let entry = self.first.entry(claim.part).or_insert(claim);
            let known = *entry;
            if known.value == 0 {
                // The earlier claim has no sample of the values. Compare later claims with this
                // one.
                *entry = claim;
            }
            let other_value = known.value != 0 && claim.value != 0 && known.value != claim.value;
            if known.kind != claim.kind || other_value {
                self.differ.entry(claim.path).or_insert((known, claim));
            }
        }
    }

    /// Returns the claims for the vote of a node: one for each part, and all that differ.
    pub(super) fn forwarded(&self) -> Vec<Claim> {
        let differ = self.differ.values().flat_map(|&(one, other)| [one, other]);
        let mut forwarded: Vec<Claim> = self.first.values().copied().chain(differ).collect();
        forwarded.sort_unstable_by_key(|claim| (claim.path, claim.part, claim.rank));
        forwarded.dedup();
        forwarded
    }

    /// Fails if a leaf differs between ranks. `items` are the indexes of all items, for its path.
    pub(super) fn check<'a>(&self, mut items: impl Iterator<Item = &'a Index>) -> Result<()> {
        if self.differ.is_empty() {
            return Ok(());
        }
        items.try_for_each(|index| self.check_item(index))?;
        // No rank has written the leaf, so its path is unknown.
        let ranks = self.differ.values().map(|(one, other)| (one.rank, other.rank)).min();
        let (one, other) = ranks.unwrap_or_default();
        Err(Error::Invalid(format!(
            "ranks {one} and {other} have different values of a leaf that no rank has written. Save the same state on both, or select the leaf on one of them"
        )))
    }

    fn check_item(&self, index: &Index) -> Result<()> {
        for (leaf, path) in (0_u32..).zip(leaf_hashes(&index.tree)) {
            if let Some((one, other)) = self.differ.get(&path) {
                let other_kind = one.kind != other.kind;
                let (one, other) = (one.rank, other.rank);
                let (what, advice) = if other_kind {
                    let what = format!(
                        "its dtype, shape or type differs between ranks {one} and {other}. Save the same structure on all ranks"
                    );
                    (what, None)
                } else {
                    let what =
                        format!("it is replicated, but its values differ between ranks {one} and {other}");
                    (what, Some(Advice::NamePerRank))
                };
                return Err(Error::Layout { leaf: index.tree.leaf_path(leaf).to_string(), what, advice });
            }
        }
        Ok(())
    }
}
