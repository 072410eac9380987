//! The commit: how a step gets its name, and how it loses it. **No other module renames.**
//!
//! * [`machine`]: the commit as a state machine without I/O: events in, actions out. The product,
//!   the simulators and the crash tests run the same code.
//! * [`driver`]: carries out the machine's actions over a [`Dir`](stepwell_core::io::Dir).
//! * [`records`]: the indexes and the manifest, made from the ranks' votes. Pure.
//! * [`announcement`]: the verdict, and the leader's announcement of it. Pure.
//! * [`aside`]: all other renames: retire, rewind, thin, replace a small file.

pub mod announcement;
pub mod aside;
pub mod driver;
pub mod machine;
pub mod records;

#[cfg(test)]
mod tests;

pub use crate::state::item::{DraftItem, ItemPart};
pub use announcement::{Announcement, LeaderNews, Verdict};
pub use driver::{Commit, CommitOutcome, run};
pub use machine::{Action, CommitPlan, Event, Existing, Machine, Now, TargetState};
pub use records::{Draft, Vote};
