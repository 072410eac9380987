//! How ranks agree. Correctness comes from the file system (each rank's footer and vote); a coordinator only makes it prompt.
//!
//! Rounds are named by the attempt, so that a straggler of a dead attempt can hurt nobody. Every wait has a deadline; who gives up says for whom
//! it waited. One process is the case of one rank, with a vote of its own.

use std::time::Duration;

use crate::error::Result;

/// The rank that decides: listings, clocks, signals, and the rename.
pub const LEADER: u32 = 0;

/// A message between ranks: a few kilobytes of JSON.
pub type Message = Vec<u8>;

/// The ranks of a job. All of them make the same calls in the same order.
pub trait Coordinator: Send + Sync {
    /// This process.
    fn rank(&self) -> u32;

    /// All processes.
    fn world_size(&self) -> u32;

    /// Publishes this rank's message of a round.
    fn send(&self, round: &str, message: Message) -> Result<()>;

    /// The messages of a round that are there, by rank; waits up to `timeout` until there are more than `have`.
    fn poll(&self, round: &str, have: usize, timeout: Duration) -> Result<Vec<(u32, Message)>>;

    /// The leader's answer, on every rank. `answer` is called on the leader only.
    fn broadcast(
        &self,
        round: &str,
        answer: &mut dyn FnMut() -> Result<Message>,
        timeout: Duration,
    ) -> Result<Message>;
}

/// One process.
#[derive(Clone, Copy, Debug, Default)]
pub struct SingleProcess;

impl Coordinator for SingleProcess {
    fn rank(&self) -> u32 {
        LEADER
    }

    fn world_size(&self) -> u32 {
        1
    }

    fn send(&self, _round: &str, _message: Message) -> Result<()> {
        Ok(())
    }

    fn poll(&self, _round: &str, _have: usize, _timeout: Duration) -> Result<Vec<(u32, Message)>> {
        Ok(Vec::new())
    }

    fn broadcast(
        &self,
        _round: &str,
        answer: &mut dyn FnMut() -> Result<Message>,
        _timeout: Duration,
    ) -> Result<Message> {
        answer()
    }
}
