//! How ranks agree. Correctness comes from the file system (each rank's footer and vote, one
//! rename); a coordinator only makes it prompt.
//!
//! | module | what it is |
//! |---|---|
//! | here | [`Coordinator`]: a board on which ranks leave messages for each other. All that a framework must have |
//! | [`shared_directory`] | ranks that share nothing but a file system |
//! | [`team`] | what a manager makes of it: who is there, calls that all make, answers of the leader, votes |
//!
//! One process is the case of one rank, with a vote of its own. Every wait has a deadline; who
//! gives up says for whom it waited.

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

/// A board that all ranks of a job see. Keys are paths of plain components. Nothing is ever put
/// under a key twice, but for signs of life.
///
/// An implementation may be called from several threads at once, and must not need the others to
/// make a call of theirs at the same time (as a collective operation would).
pub trait Coordinator: Send + Sync {
    /// This process.
    fn rank(&self) -> u32;

    /// All processes.
    fn world_size(&self) -> u32;

    /// A fresh name on the board: the same on all ranks if all call it equally often.
    fn namespace(&self) -> String;

    /// Puts a message, replacing an older one. A reader sees all of it or none.
    fn put(&self, key: &str, message: &[u8]) -> Result<()>;

    /// The message under a key: `None` if nothing is there within that time.
    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Message>>;

    /// Takes a message off the board, if it is there. Only tidiness depends on it.
    fn remove(&self, key: &str) -> Result<()>;

    /// The machine that this process is on: ranks of one name gather among themselves first.
    fn node(&self) -> String {
        stepwell_core::sys::host_name()
    }

    /// The socket of that machine that it is bound to, if it is to one.
    fn socket(&self) -> Option<u32> {
        stepwell_core::sys::socket()
    }
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
