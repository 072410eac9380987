//! The plan of a commit: its names, its ranks, and its options.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use stepwell_core::format::manifest::Attempt;

use crate::coordination::LEADER;

/// The plan of one commit.
#[derive(Clone, Debug)]
pub struct CommitPlan {
    /// The step, for messages.
    pub step: u64,
    /// The id of this save.
    pub attempt: Attempt,
    /// The name of the directory while it is written.
    pub temporary: String,
    /// The name of an empty directory: a rank creates it when it gives up on a silent leader. Late
    /// ranks that find it do not take part.
    pub given_up: String,
    /// The name that the directory gets.
    pub target: String,
    /// The treatment of an existing step.
    pub existing: Existing,
    /// The new name for a replaced step.
    pub trash: String,
    /// The new name for an invalid step.
    pub quarantine: String,
    /// This rank.
    pub rank: u32,
    /// The number of ranks.
    pub world_size: u32,
    /// For each rank, the number of its node. Missing ranks are on node 0. The first rank of a node
    /// gathers its votes.
    pub nodes: Arc<[u32]>,
    /// The longest time without progress of another rank.
    pub stall_timeout: Duration,
    /// True for a step of a root. Then the root has an epoch file, which names its writer. False
    /// for a singular checkpoint.
    pub in_root: bool,
    /// True if the leader is on another machine, which has the name of the step
    /// ([`crate::machines`]). This rank then syncs its own directory, and cannot rename that of the
    /// leader.
    pub is_far: bool,
    /// True if this rank's leaves have changed since the last census ([`crate::state::Census`]).
    pub stale: bool,
}

impl CommitPlan {
    fn node(&self, rank: u32) -> u32 {
        self.nodes.get(rank as usize).copied().unwrap_or(0)
    }

    /// Returns the ranks whose votes this rank gathers. The first rank of a node gathers its node's
    /// votes. The leader also gathers those of the first ranks of all other nodes.
    pub(super) fn awaited(&self) -> Vec<u32> {
        let mut gathered = BTreeSet::new();
        // Ranks in order, and whether each is the first of its node.
        let ranks: Vec<(u32, bool)> =
            (0..self.world_size).map(|rank| (rank, gathered.insert(self.node(rank)))).collect();
        let is_first = ranks.get(self.rank as usize).is_some_and(|&(_, first)| first);
        let node = self.node(self.rank);
        let comes_here = |&(rank, first): &(u32, bool)| {
            (is_first && self.node(rank) == node) || (self.rank == LEADER && first)
        };
        ranks.into_iter().filter(comes_here).map(|(rank, _)| rank).filter(|&rank| rank != self.rank).collect()
    }
}

/// The treatment of an existing step with the target name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Existing {
    /// The step stays, and the commit fails.
    Refuse,
    /// The step is swapped with the new one in one operation, then retired.
    Replace,
}
