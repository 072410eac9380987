//! The votes on saves, the leader's verdicts, and what the ranks note about them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{RankHeartbeat, Team};
use crate::coordination::Message;
use crate::error::Result;

/// The memory of a rank about its saves.
#[derive(Default)]
pub(super) struct SaveNotes {
    /// The first save whose verdict is still on the board.
    first_verdict: u64,
    /// The leader's failed saves whose verdicts are still on the board.
    failed: BTreeSet<u64>,
    /// Saves on which this rank has voted.
    voted: BTreeSet<u64>,
    /// The save before which the ranks held the last census.
    census_agreed_at: u64,
    /// The first save since then in which a rank reported changed leaves.
    census_stale_since: Option<u64>,
    /// The leader's last save, and the ranks that did not vote in time, each with its last
    /// heartbeat.
    missed: (u64, BTreeMap<u32, RankHeartbeat>),
}

impl Team {
    /// Publishes this rank's vote on a save.
    pub fn send_vote(&self, save: u64, vote: &[u8]) -> Result<()> {
        let put = self.put_with_retries(&self.key(&format!("vote/{save}/{}", self.rank())), vote);
        // Record it even after a failure, because a vote is sent only once.
        self.notes().voted.insert(save);
        put
    }

    /// True if this rank has voted on a save.
    pub fn has_voted(&self, save: u64) -> bool {
        self.notes().voted.contains(&save)
    }

    /// Forgets this rank's votes on saves below that number.
    pub fn forget_votes(&self, before: u64) {
        let mut notes = self.notes();
        notes.voted = notes.voted.split_off(&before);
    }

    /// Returns the votes of these ranks that have come. Waits up to `timeout` for the first rank's
    /// vote.
    pub fn votes(&self, save: u64, of: &[u32], timeout: Duration) -> Result<Vec<(u32, Message)>> {
        let mut found = Vec::new();
        for &rank in of {
            let wait = if found.is_empty() && Some(&rank) == of.first() { timeout } else { Duration::ZERO };
            let key = self.key(&format!("vote/{save}/{rank}"));
            if let Some(vote) = self.coordinator.get(&key, wait)? {
                self.coordinator.remove(&key)?;
                found.push((rank, vote));
            }
        }
        Ok(found)
    }

    /// Announces the verdict on a save. A failed save may leave unread votes, which are removed
    /// with its verdict.
    pub fn send_verdict(&self, save: u64, verdict: &[u8], has_failed: bool) -> Result<()> {
        if has_failed {
            self.notes().failed.insert(save);
        }
        self.put_with_retries(&self.key(&format!("verdict/{save}")), verdict)
    }

    /// Records that a rank reported changed leaves in that save. All ranks learn of it with the
    /// verdict. A save that was planned before the last census is ignored.
    pub fn record_stale_census(&self, save: u64) {
        let mut notes = self.notes();
        if save >= notes.census_agreed_at {
            notes.census_stale_since = Some(notes.census_stale_since.map_or(save, |first| first.min(save)));
        }
    }

    /// Returns the first save since the last census in which a rank reported changed leaves.
    pub fn census_stale_since(&self) -> Option<u64> {
        self.notes().census_stale_since
    }

    /// Records that the ranks held a census before that save.
    pub fn record_census(&self, save: u64) {
        let mut notes = self.notes();
        (notes.census_agreed_at, notes.census_stale_since) = (save, None);
    }

    /// Removes the verdicts on saves below that number, which all ranks have read.
    pub fn remove_verdicts(&self, before: u64) -> Result<()> {
        let from = self.notes().first_verdict;
        for save in from..before {
            self.coordinator.remove(&self.key(&format!("verdict/{save}")))?;
            let has_failed = self.notes().failed.remove(&save);
            for rank in (0..self.world_size()).filter(|_| has_failed) {
                self.coordinator.remove(&self.key(&format!("vote/{save}/{rank}")))?;
            }
        }
        self.notes().first_verdict = before.max(from);
        Ok(())
    }

    /// Returns the verdict on a save, if the leader announces it within that time.
    pub fn verdict(&self, save: u64, timeout: Duration) -> Result<Option<Message>> {
        self.coordinator.get(&self.key(&format!("verdict/{save}")), timeout)
    }

    /// Records the ranks that did not vote on the leader's save in time.
    pub fn record_missed(&self, save: u64, ranks: &[u32]) {
        let heartbeats =
            ranks.iter().map(|&rank| (rank, self.heartbeat_of(rank).unwrap_or_default())).collect();
        self.notes().missed = (save, heartbeats);
    }

    /// True if the rank missed the last save, and has sent neither a heartbeat nor a late vote
    /// since.
    pub(super) fn is_gone(&self, rank: u32) -> Result<bool> {
        let (save, heartbeat) = {
            let notes = self.notes();
            let Some(&heartbeat) = notes.missed.1.get(&rank) else { return Ok(false) };
            (notes.missed.0, heartbeat)
        };
        let vote = self.coordinator.get(&self.key(&format!("vote/{save}/{rank}")), Duration::ZERO)?;
        Ok(vote.is_none() && self.heartbeat_of(rank)? == heartbeat)
    }
}
