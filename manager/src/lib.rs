//! Steps over time: save, commit, retention, recovery.
#![forbid(unsafe_code)]

pub mod coordination;
pub mod directory_layout;
pub mod environment;
pub mod error;
pub mod retention;
pub mod save_policy;
pub mod step_name;

pub use error::{Error, Result};
