//! Helpers for the tests that need several crates or processes.

pub mod crash;
pub mod fake_cuda;
pub mod real;
pub mod steps;
