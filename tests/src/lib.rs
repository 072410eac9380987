//! Helpers for the tests that need several crates or processes.

pub mod crash;
pub mod steps;
pub mod real;
