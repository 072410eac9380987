//! How a commit ends, and the leader's announcement of it to the other ranks, with the failure and
//! the ranks concerned. Pure.

use serde::{Deserialize, Serialize};

use crate::coordination::LEADER;
use crate::error::{Advice, Error, Result};

/// How a commit ended.
#[derive(Debug)]
pub enum Verdict {
    /// The step survives a power cut.
    Committed {
        /// The name in the root of the step that was replaced, ready to be deleted.
        replaced: Option<String>,
    },
    /// Nothing is visible.
    NotCommitted(Error),
    /// The step has its name, but may not survive a power cut.
    Uncertain(stepwell_core::Error),
}

/// How a commit ended, for the other ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case", deny_unknown_fields)]
pub enum Announcement {
    /// The step survives a power cut.
    Committed,
    /// Nothing is visible: a rank failed, usually the leader itself.
    RankFailed {
        /// The rank.
        rank: u32,
        /// Its report.
        cause: String,
    },
    /// Nothing is visible: the ranks' parts do not fit together.
    Layout {
        /// The leaf.
        leaf: String,
        /// Which ranks, and which regions.
        what: String,
        /// A remedy.
        advice: Option<Advice>,
    },
    /// Nothing is visible: ranks did not answer in time.
    RanksMissing {
        /// The ranks.
        missing: Vec<u32>,
        /// The awaited answer.
        waited_for: String,
        /// For how long, in seconds.
        seconds: f64,
    },
    /// The step has its name, but may not survive a power cut.
    Uncertain {
        /// The failure on the leader.
        cause: String,
        /// Its errno, where it has one.
        errno: Option<i32>,
    },
}

/// The knowledge of a rank that waits for the leader.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Heard {
    /// The leader's word, if it is there.
    pub announcement: Option<Announcement>,
    /// The leader's last heartbeat. While it changes, the leader makes progress or waits for
    /// others.
    pub beat: u64,
}

impl Announcement {
    /// A rank's report of its verdict: the leader's to all, another rank's in its vote.
    pub fn of(verdict: &Verdict, rank: u32) -> Self {
        match verdict {
            Verdict::Committed { .. } => Self::Committed,
            Verdict::NotCommitted(Error::RankFailed { rank, cause }) => {
                Self::RankFailed { rank: *rank, cause: cause.clone() }
            }
            Verdict::NotCommitted(Error::CoordinationTimeout { missing, waited_for, seconds }) => {
                Self::RanksMissing {
                    missing: missing.clone(),
                    waited_for: waited_for.clone(),
                    seconds: *seconds,
                }
            }
            Verdict::NotCommitted(Error::GivenUpOn { step, seconds }) => Self::RanksMissing {
                missing: vec![LEADER],
                waited_for: format!("to decide on step {step}"),
                seconds: *seconds,
            },
            Verdict::NotCommitted(Error::Layout { leaf, what, advice }) => {
                Self::Layout { leaf: leaf.clone(), what: what.clone(), advice: *advice }
            }
            Verdict::NotCommitted(error) => Self::RankFailed { rank, cause: error.to_string() },
            Verdict::Uncertain(error) => Self::Uncertain { cause: error.to_string(), errno: error.errno() },
        }
    }

    /// The verdict for another rank. `target` is the step, for messages.
    pub fn verdict(self, target: &std::path::Path) -> Verdict {
        match self {
            Self::Committed => Verdict::Committed { replaced: None },
            Self::RankFailed { rank, cause } => Verdict::NotCommitted(Error::RankFailed { rank, cause }),
            Self::Layout { leaf, what, advice } => {
                Verdict::NotCommitted(Error::Layout { leaf, what, advice })
            }
            Self::RanksMissing { missing, waited_for, seconds } => {
                Verdict::NotCommitted(Error::CoordinationTimeout { missing, waited_for, seconds })
            }
            Self::Uncertain { cause, errno } => {
                let source =
                    errno.map_or_else(|| std::io::Error::other(cause), std::io::Error::from_raw_os_error);
                Verdict::Uncertain(stepwell_core::Error::io("the leader's sync", target, source))
            }
        }
    }

    /// The error of a vote without parts. `rank` is its sender.
    pub fn error(self, rank: u32) -> Error {
        match self.verdict(std::path::Path::new("")) {
            Verdict::NotCommitted(error) => error,
            Verdict::Committed { .. } | Verdict::Uncertain(_) => {
                Error::RankFailed { rank, cause: "its vote says how the step ended".to_owned() }
            }
        }
    }

    /// As a message; `stale`: a rank's leaves are others than it has told.
    pub fn encode(&self, stale: bool) -> Result<Vec<u8>> {
        serde_json::to_vec(&(self, stale)).map_err(|error| crate::error::unencodable(&error))
    }

    /// From a message.
    pub fn decode(message: &[u8]) -> Result<(Self, bool)> {
        serde_json::from_slice(message).map_err(|error| Error::RankFailed {
            rank: LEADER,
            cause: format!("its verdict cannot be read ({error}); are all ranks of one version?"),
        })
    }
}
