//! How ranks agree. Correctness comes from the file system: each rank's footer and vote, and one
//! rename. A coordinator only makes it prompt.
//!
//! | module | what it is |
//! |---|---|
//! | here | [`Coordinator`]: a board for the messages of ranks. A framework must provide no more |
//! | [`shared_directory`] | a board in a directory, for ranks that share only a file system |
//! | [`team`] | the session of ranks over a board: meeting, calls of all ranks, answers of the leader, votes |
//!
//! One process is one rank with one vote. Every wait has a deadline. Its error names the missing
//! ranks.

use std::time::Duration;

use crate::error::Result;

pub mod shared_directory;
pub mod team;
#[cfg(any(test, feature = "test-support"))]
pub mod testing;

/// The rank that decides: listings, clocks, signals, and the rename.
pub const LEADER: u32 = 0;

/// A message between ranks: a few bytes, or an index.
pub type Message = Vec<u8>;

/// A board that all ranks of a job share. Keys are paths of plain components. Only heartbeats are
/// put under one key twice.
///
/// Several threads may call an implementation at once. It must not need the other ranks to make the
/// same call, as a collective operation would.
pub trait Coordinator: Send + Sync {
    /// The rank of this process.
    fn rank(&self) -> u32;

    /// The number of ranks.
    fn world_size(&self) -> u32;

    /// Returns a fresh name on the board. The n-th call returns the same name on all ranks.
    fn namespace(&self) -> String;

    /// Puts a message, replacing an older one. A reader sees all of it or none.
    fn put(&self, key: &str, message: &[u8]) -> Result<()>;

    /// Returns the message under a key. `None` if there is no message within that time.
    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Message>>;

    /// Removes a message, if it exists. Only tidiness depends on it.
    fn remove(&self, key: &str) -> Result<()>;

    /// The name of this process's machine. Ranks of one machine gather their votes first.
    fn node(&self) -> String {
        stepwell_core::sys::host_name()
    }

    /// The socket to which this process is bound, if it is bound to one.
    fn socket(&self) -> Option<u32> {
        stepwell_core::sys::socket()
    }
}

/// The coordinator of one process.
#[derive(Clone, Copy, Debug, Default)]
pub struct SingleProcess;

impl Coordinator for SingleProcess {
    fn rank(&self) -> u32 {
        LEADER
    }

    fn world_size(&self) -> u32 {
        1
    }

    fn namespace(&self) -> String {
        String::new()
    }

    fn put(&self, _key: &str, _message: &[u8]) -> Result<()> {
        Ok(())
    }

    fn get(&self, _key: &str, _timeout: Duration) -> Result<Option<Message>> {
        Ok(None)
    }

    fn remove(&self, _key: &str) -> Result<()> {
        Ok(())
    }
}
