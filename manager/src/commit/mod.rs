//! The commit: how a step gets its name and loses it. **The only module that renames.**
//!
//! * [`machine`]: the commit as a sans-IO state machine: events in, actions out; the product, the
//!   simulators and the crash tests run the same code.
//! * [`driver`]: carries out the machine's actions over a [`Dir`](stepwell_core::io::Dir).
//! * [`records`]: what is written beside the data: indexes and the manifest, from the ranks' votes.
//!   Pure.
//! * [`announcement`]: how a commit ends, and what the leader tells the other ranks. Pure.
//! * [`aside`]: renames that take something away: retire, quarantine, rewind, and thinning's new
//!   manifest.

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
