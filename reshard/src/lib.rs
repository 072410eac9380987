//! Pure planning: who holds what, how it is cut, what a restore reads. No files, no threads.
#![forbid(unsafe_code)]
