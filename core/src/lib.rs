//! Bytes, memory and files of **one** checkpoint. This crate makes no decision about steps,
//! retention or commits; it has the format of their records.
//!
//! ```text
//! save:    leaves ─provider─▶ chunks ─capture─▶ slots ─checksum─▶ blocks ─Disk─▶ data file + footer
//! restore: index ─plan─▶ coalesced block reads ─Disk─▶ verify ─scatter─▶ the caller's buffers
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | [`dtype`] [`region`] [`leaf_path`] [`tree`] [`value`] | the vocabulary; no I/O |
//! | [`arithmetic`] | what maps compute; no I/O |
//! | [`compression`] | compressed streams, decoded piece by piece |
//! | [`compressed_file`] | a data file, written once more with compressed chunks |
//! | [`digest`] | digests of tensors that do not depend on how they are cut |
//! | [`mod@format`] | the bytes on disk: blocks, footers, indexes, manifests; no I/O |
//! | [`io`] | the [`io::Disk`] trait and its engines |
//! | [`provider`] | what turns a leaf into bytes |
//! | [`staging`] | the memory that they pass through |
//! | [`save`] | the pipeline that writes data files |
//! | [`served`] | directories on other machines |
//! | [`load`] | the pipeline that reads them: restore, verification |
//! | [`read_plan`] | what a restore reads and where it puts it |
//! | [`sync`] | locks and channels, under names that tests of interleavings change |
//! | [`sys`] | the only unsafe code |

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!(
    "stepwell needs 64-bit Linux: its commit relies on calls of the Linux kernel. On macOS and Windows, use a Linux container"
);

pub mod arithmetic;
pub mod compressed_file;
pub mod compression;
pub mod deadline;
pub mod digest;
pub mod dtype;
mod error;
pub mod foreign;
pub mod format;
pub mod io;
mod kind;
pub mod leaf_path;
pub mod limits;
pub mod load;
pub mod provider;
pub mod read_plan;
pub mod region;
pub mod remote;
pub mod save;
pub mod served;
pub mod staging;
pub mod sync;
pub mod sys;
pub mod tree;
pub mod value;

pub use error::{Error, Result};
pub use kind::Kind;
