//! A real manager over a simulated disk: scenarios that acknowledge what they were promised, and
//! the check of what a crash leaves of it.
//!
//! A scenario marks in the disk's log what it is about to do and what it was told (`begin 3 a`,
//! `committed 3 a`, `may go 1 once 3`, …: see [`promises`]). [`check::Checker`] gets a crash state
//! with the marks before the cut, opens the root as a reader and as a writer, and holds what it
//! finds against the invariants: I1 to I6, I8 to I10 and I16 of the design, as far as one disk can
//! show them, and I17: what a user has removed is recorded.

pub mod check;
pub mod promises;
pub mod run;
pub mod singular;
pub mod states;
pub mod world;

/// The root of every scenario.
pub const ROOT: &str = "run";
