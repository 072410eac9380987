//! Waits for messages on the board, and their encoding.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use stepwell_core::deadline::StallTimer;

use super::RankHeartbeat;
use crate::coordination::{Coordinator, LEADER, Message};
use crate::error::{Error, Relayed, Result};

/// The timeout of one read of the board. Between two reads, a waiting rank checks heartbeats.
pub(super) const BOARD_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The leader's answer to a call of all ranks, or its failure.
pub(super) type Answer<T> = std::result::Result<T, Relayed>;

/// The board, with the timeout of each wait.
pub(super) struct Board<'a> {
    pub coordinator: &'a Arc<dyn Coordinator>,
    pub timeout: Duration,
}

impl Board<'_> {
    /// Waits for a message of a rank. Fails after the timeout without a change of the rank's
    /// heartbeat, which `heartbeat` returns.
    pub(super) fn wait(
        &self,
        key: &str,
        rank: u32,
        what: &str,
        heartbeat: impl Fn() -> Result<RankHeartbeat>,
    ) -> Result<Message> {
        let begun = Instant::now();
        let mut timer = StallTimer::new(self.timeout);
        let mut left = timer.left(None);
        loop {
            if let Some(message) = self.coordinator.get(key, left.min(BOARD_POLL_INTERVAL))? {
                return Ok(message);
            }
            let now = heartbeat()?;
            if now == RankHeartbeat::LEFT {
                // It may have sent the message just before it left.
                if let Some(message) = self.coordinator.get(key, Duration::ZERO)? {
                    return Ok(message);
                }
                let cause = format!(
                    "rank {rank} has left it: it closed its manager, or its call failed without an answer"
                );
                return Err(Error::SessionLost { missing: vec![rank], cause });
            }
            left = timer.left(Some(now));
            if left.is_zero() {
                return Err(Error::CoordinationTimeout {
                    missing: vec![rank],
                    waited_for: what.to_owned(),
                    seconds: begun.elapsed().as_secs_f64(),
                });
            }
        }
    }

    /// Waits for the leader's answer, without checks of heartbeats.
    pub(super) fn answer<T: DeserializeOwned>(&self, key: &str, what: &str) -> Result<T> {
        let message = self.wait(key, LEADER, what, || Ok(RankHeartbeat::default()))?;
        decoded::<Answer<T>>(LEADER, &message)?.map_err(Error::Relayed)
    }
}

pub(super) fn encoded(value: &impl Serialize) -> Result<Message> {
    serde_json::to_vec(value).map_err(|error| crate::error::unencodable(&error))
}

pub(super) fn decoded<T: DeserializeOwned>(rank: u32, message: &[u8]) -> Result<T> {
    serde_json::from_slice(message).map_err(|error| {
        let cause =
            format!("its message cannot be read ({error}). Run the same version of stepwell on all ranks");
        Error::RankFailed { rank, cause }
    })
}
