//! The actions that the commit machine requests, and the events that answer them.

use std::time::Duration;

use stepwell_core::format::manifest::Attempt;

use super::announcement::{Announcement, LeaderNews, Verdict};
use super::vote::Vote;
use crate::error::Error;
use crate::state::item::ItemPart;

/// An action that the machine requests.
#[derive(Debug)]
pub enum Action {
    /// Create the plan's temporary. With several ranks, another one may have created it. Returns
    /// [`Event::GivenUp`] if a rank has given up on the leader in this save.
    CreateTemporary,
    /// Create the plan's `given_up` mark. Another rank may have created it.
    MarkGivenUp,
    /// Run the save pipeline into the temporary. The result is [`Event::Data`].
    WriteData,
    /// Publish this rank's vote.
    SendVote(Box<Vote>),
    /// Read the votes of these ranks.
    PollVotes {
        /// The ranks that have not voted.
        missing: Vec<u32>,
        /// The longest wait.
        timeout: Duration,
    },
    /// Write and sync a small file below the temporary.
    WriteFile {
        /// Relative to the temporary.
        path: String,
        /// Its content.
        bytes: Vec<u8>,
    },
    /// Check that the files of all ranks are below the temporary, each with its length.
    FindFiles(Vec<(String, u64)>),
    /// Sync a directory of the temporary. An empty path is the temporary itself.
    SyncDir(String),
    /// Read the epoch file, to check that this is still the root's writer.
    CheckWriter,
    /// Inspect this name.
    InspectTarget(String),
    /// Rename within the root.
    Rename {
        /// The old name.
        from: String,
        /// The new name.
        to: String,
        /// The treatment of an existing entry with the new name.
        how: stepwell_core::io::Rename,
    },
    /// Make the root's entries durable.
    SyncRoot,
    /// Remove the temporary with its content, and its given-up mark. A failure is no error: the
    /// next writer removes them.
    RemoveTemporary,
    /// Announce the verdict to the other ranks.
    Announce(Announcement),
    /// Wait for the leader's announcement, and read its heartbeat.
    Listen {
        /// The longest wait.
        timeout: Duration,
    },
    /// End the commit.
    Finish(Box<Verdict>),
}

/// The result of an action.
#[derive(Debug)]
pub enum Event {
    /// The action succeeded.
    Done,
    /// The action failed.
    Failed(stepwell_core::Error),
    /// A rank has given up on the leader in this save, so this rank must not take part.
    GivenUp,
    /// The data files of this rank are written and synced.
    Data(Vec<ItemPart>),
    /// The votes that have come.
    Votes(PolledVotes),
    /// The state of the inspected name.
    TargetState(TargetState),
    /// The other writer that has taken the root over. `None` if this is still the writer.
    OtherWriter(Option<String>),
    /// The news from the leader.
    LeaderNews(LeaderNews),
    /// The other ranks could not be reached.
    Unreachable(Error),
}

/// The votes that have come, and the heartbeats of the other ranks.
#[derive(Debug, Default)]
pub struct PolledVotes {
    /// The votes that have come.
    pub votes: Vec<Vote>,
    /// The heartbeats of ranks that have not voted: rank, and a number that changes with progress.
    pub heartbeats: Vec<(u32, u64)>,
}

/// The state of the target name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetState {
    /// Nothing has the name.
    Absent,
    /// A committed step, with its attempt.
    Committed(Attempt),
    /// An invalid step, with the reason.
    NotAStep(String),
}

/// The time of an event.
#[derive(Clone, Copy, Debug, Default)]
pub struct Now {
    /// Monotonic.
    pub monotonic: Duration,
    /// Wall clock, nanoseconds since 1970.
    pub unix_ns: i64,
}
