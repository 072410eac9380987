//! The commit: how a step gets its name, and how it loses it. **No other module renames.**
//!
//! * [`machine`]: the commit as a state machine without I/O. It answers each event ([`action`])
//!   with the next action of its [`plan`]. The product, the simulators and the crash tests run the
//!   same code.
//! * [`driver`]: carries out the machine's actions over a [`Dir`](stepwell_core::io::Dir).
//! * [`draft`], [`vote`]: the parts of a step's manifest that are known before the save, and a
//!   rank's vote on it. Pure.
//! * [`records`]: the indexes and the manifest, made from the ranks' votes. Pure.
//! * [`announcement`]: the verdict, and the leader's announcement of it. Pure.
//! * [`aside`]: all other renames: retire, rewind, thin, replace a small file.

pub mod action;
pub mod announcement;
pub mod aside;
mod compared;
mod coverage;
pub mod draft;
pub mod driver;
mod gathered;
pub mod machine;
pub mod plan;
mod rank_parts;
pub mod records;
pub mod vote;

#[cfg(test)]
mod tests;

pub use crate::state::item::{DraftItem, ItemPart};
pub use action::{Action, Event, Now, PolledVotes, TargetState};
pub use announcement::{Announcement, LeaderNews, Verdict};
pub use draft::Draft;
pub use driver::{Commit, CommitOutcome, World, run};
pub use machine::Machine;
pub use plan::{CommitPlan, Existing};
pub use vote::Vote;
