//! Steps over time: save, commit, retention, recovery.
#![forbid(unsafe_code)]
