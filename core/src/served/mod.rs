//! A directory on another machine: one process serves it, others read it over TCP.
//!
//! | module | what it is |
//! |---|---|
//! | `protocol` | the requests and answers |
//! | `server` | answers requests for one directory |
//! | `client` | connections to one server |
//! | `dir` | the directory and its files, as [`Dir`](crate::io::Dir) and [`File`](crate::io::File) |
//! | `disk` | a disk whose queues read these files beside its own |
//!
//! It is read only. A shared lock is held as long as its connection. A client shows a token, which
//! it has from the server's process. Bytes are not encrypted. Readers of data check its blocks.

mod client;
mod dir;
mod disk;
mod protocol;
mod server;
#[cfg(test)]
mod tests;

pub use client::Connections;
pub use dir::{ServedDir, lengths_below};
pub use disk::ServedDisk;
pub use server::Server;
