//! The heartbeats of ranks: each rank reports the progress of its saves.

use std::time::Duration;

use super::Team;
use crate::coordination::Message;
use crate::error::Result;

/// A rank's heartbeat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankHeartbeat {
    /// The first save on which it still has to report: its vote, or the leader's verdict.
    pub save: u64,
    /// A number that changes with the progress of its saves.
    pub progress: u64,
}

impl RankHeartbeat {
    /// The last heartbeat of a rank for which the session is over.
    pub(super) const LEFT: Self = Self { save: u64::MAX, progress: u64::MAX };

    /// Returns the progress for a rank that waits for a report on that save. `None` if this rank
    /// already sent the report. Without this, two live ranks would wait for each other permanently
    /// after a lost message.
    pub fn in_save(self, save: u64) -> Option<u64> {
        (self.save <= save).then_some(self.progress)
    }

    fn encode(self) -> Message {
        [self.save.to_le_bytes(), self.progress.to_le_bytes()].concat()
    }

    fn decode(message: &[u8]) -> Option<Self> {
        let (save, progress) = message.split_first_chunk()?;
        Some(Self {
            save: u64::from_le_bytes(*save),
            progress: u64::from_le_bytes(progress.try_into().ok()?),
        })
    }
}

impl Team {
    /// Sends this rank's heartbeat.
    pub fn send_heartbeat(&self, heartbeat: RankHeartbeat) -> Result<()> {
        let heartbeat = if self.lost.get().is_some() { RankHeartbeat::LEFT } else { heartbeat };
        self.coordinator.put(&self.key(&format!("heartbeat/{}", self.rank())), &heartbeat.encode())
    }

    /// Returns a rank's last heartbeat.
    pub fn heartbeat_of(&self, rank: u32) -> Result<RankHeartbeat> {
        let heartbeat = self.coordinator.get(&self.key(&format!("heartbeat/{rank}")), Duration::ZERO)?;
        Ok(heartbeat.and_then(|message| RankHeartbeat::decode(&message)).unwrap_or_default())
    }

    /// The interval of heartbeats, short enough that no rank counts as silent.
    pub fn heartbeat_interval(&self) -> Duration {
        (self.timeout / 8).clamp(Duration::from_millis(10), Duration::from_secs(5))
    }
}
