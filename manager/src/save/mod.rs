//! One save from the request to the outcome, in a root or under a path of its own.
//!
//! ```text
//! order ─job: prepare, split─▶ Capturing (the caller's thread)
//!                          └─▶ Job (the persister's thread) ─persist: pipeline, commit machine─▶ outcome ─▶ the handle
//! ```
//!
//! | file | what it is |
//! |---|---|
//! | `job` | the preparation: every check of the user's data, the plan, the draft of the manifest, and the split into write and capture |
//! | `persist` | the run: the pipeline and the commit, guarded against panics, up to an [`Outcome`] |
//! | `participation` | what several ranks say to each other about one save, beside the commit |
//! | `handle` | the caller's handle [`Save`], with its two tracks |
//!
//! Two callers run saves. A manager's persister ([`crate::manager`]) runs them in order, with
//! retention after each. A singular checkpoint ([`crate::singular`]) has a thread of its own.

mod handle;
#[cfg(all(test, feature = "interleavings"))]
mod interleaving_tests;
pub(crate) mod job;
pub(crate) mod participation;
pub(crate) mod persist;

pub use handle::{Callback, Outcome, Refusal, Save, Stats};
pub use job::Streams;
