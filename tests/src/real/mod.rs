//! Proofs on real files: a small state of every kind of leaf, saved by the real manager into a real
//! directory, and what a reader makes of that directory once somebody has damaged it.
//!
//! | file | what it is |
//! |---|---|
//! | `states` | the state, and reading it back whole |
//! | `look` | everything that a reader does before it trusts a step, and who finds what |
//! | `layout` | which bytes of which file are what |
//! | `trials` | what processes save that are killed or fed errors, and what must hold afterwards |
//! | `tracing` | running such a process under strace |
//! | `repeatable` | saves that give the same bytes on every run |
//! | `history` | a process that saves, replaces, rewinds and deletes until the power goes, and writes down what it was told |
//! | `aftermath` | what must hold of its root afterwards |
//! | `forgetful` | a disk that forgets some fsyncs: what the checks must notice |

pub mod aftermath;
pub mod forgetful;
pub mod history;
pub mod layout;
pub mod look;
pub mod repeatable;
pub mod states;
pub mod tracing;
pub mod trials;
