//! One save, from the order to the outcome; of a root or of its own.
//!
//! ```text
//! order ─job: prepare, split─▶ Capturing (the caller's thread)
//!                          └─▶ Job (the persister's thread) ─persist: pipeline, commit machine─▶ outcome ─▶ the handle
//! ```
//!
//! | file | what it is |
//! |---|---|
//! | `job` | making a save: every check of the user's data, the plan, the draft of the manifest; then the two halves |
//! | `persist` | running it: the pipeline and the commit, guarded, to an [`Outcome`] |
//! | `participation` | what several ranks say to each other about one save, beside the commit |
//! | `handle` | what the caller holds of it: [`Save`], with its two tracks |
//!
//! The runner is elsewhere: a manager's persister ([`crate::manager`]), in order and with retention
//! after each save; a thread of its own for a singular checkpoint ([`crate::singular`]).

mod handle;
#[cfg(all(test, feature = "interleavings"))]
mod interleaving_tests;
pub(crate) mod job;
pub(crate) mod participation;
pub(crate) mod persist;

pub use handle::{Callback, Outcome, Refusal, Save, Stats};
pub use job::Streams;
