//! Several ranks save together: each byte once, all or nothing, the same answer on every rank.

#![expect(clippy::unwrap_used, clippy::panic, reason = "tests end by them")]
#![expect(clippy::unnecessary_wraps, reason = "what a tree takes")]

#[path = "../common/mod.rs"]
mod common;
mod failing;
mod job;
mod lost;
mod machine_carrying;
mod machine_copies;
mod machines;
mod meeting;
mod refused;
mod saving;
mod singular;
