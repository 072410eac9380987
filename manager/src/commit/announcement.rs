//! The verdict of a commit, and the leader's announcement of it to the other ranks. Pure.

use serde::{Deserialize, Serialize};

use crate::coordination::LEADER;
use crate::error::{Error, Relayed, Result};

/// The verdict of a commit.
#[derive(Debug)]
pub enum Verdict {
    /// The step survives a power cut.
    Committed {
        /// The trash name of the replaced step, ready to be deleted.
        replaced: Option<String>,
    },
    /// Nothing is visible.
    NotCommitted(Error),
    /// The step has its name, but may not survive a power cut.
    Uncertain(stepwell_core::Error),
}

/// The verdict, as the leader announces it to the other ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Announcement {
    /// The step survives a power cut.
    Committed,
    /// Nothing is visible.
    NotCommitted(Relayed),
    /// The step has its name, but may not survive a power cut.
    Uncertain {
        /// The failure on the leader.
        cause: String,
        /// Its errno, where it has one.
        errno: Option<i32>,
    },
}

/// The news of a rank that waits for the leader.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct LeaderNews {
    /// The leader's announcement, if it has come.
    pub announcement: Option<Announcement>,
    /// The leader's last heartbeat. While it changes, the leader makes progress or waits for
    /// others.
    pub heartbeat: u64,
}

/// Returns a rank's report of a failed save: the leader's to all ranks, or another rank's in its
/// vote. It names `rank` if the error names no rank.
pub fn failure(rank: u32, error: &Error) -> Relayed {
    let named = match error {
        Error::RankFailed { .. }
        | Error::CoordinationTimeout { .. }
        | Error::Layout { .. }
        | Error::Relayed(_) => return Relayed::of(error),
        Error::GivenUpOn { step, seconds } => Error::CoordinationTimeout {
            missing: vec![LEADER],
            waited_for: format!("to decide on step {step}"),
            seconds: *seconds,
        },
        error => Error::RankFailed { rank, cause: error.to_string() },
    };
    Relayed::of(&named)
}

impl Announcement {
    /// Returns the leader's announcement of its verdict.
    pub fn of(verdict: &Verdict) -> Self {
        match verdict {
            Verdict::Committed { .. } => Self::Committed,
            Verdict::NotCommitted(error) => Self::NotCommitted(failure(LEADER, error)),
            Verdict::Uncertain(error) => Self::Uncertain { cause: error.to_string(), errno: error.errno() },
        }
    }

    /// Returns the verdict for another rank. `target` is the step, for messages.
    pub fn verdict(self, target: &std::path::Path) -> Verdict {
        match self {
            Self::Committed => Verdict::Committed { replaced: None },
            Self::NotCommitted(failure) => Verdict::NotCommitted(Error::Relayed(failure)),
            Self::Uncertain { cause, errno } => {
                let source =
                    errno.map_or_else(|| std::io::Error::other(cause), std::io::Error::from_raw_os_error);
                Verdict::Uncertain(stepwell_core::Error::io("the leader's sync", target, source))
            }
        }
    }

    /// Encodes a message. `stale`: a rank's leaves have changed since the last census.
    pub fn encode(&self, stale: bool) -> Result<Vec<u8>> {
        serde_json::to_vec(&(self, stale)).map_err(|error| crate::error::unencodable(&error))
    }

    /// Decodes a message.
    pub fn decode(message: &[u8]) -> Result<(Self, bool)> {
        serde_json::from_slice(message).map_err(|error| Error::RankFailed {
            rank: LEADER,
            cause: format!("its verdict cannot be read ({error}); are all ranks of one version?"),
        })
    }
}
