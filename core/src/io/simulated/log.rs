//! The record of what was done to a file system since a known, durable state.

use std::fmt;
use std::sync::Arc;

use super::Ino;
use super::inodes::Inodes;
use crate::io::Rename;

/// One effect. Inodes, not paths: what a later rename does to the names changes nothing here.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are what their names say: inodes, names, bytes")]
pub enum Op {
    /// A directory was made.
    Mkdir { dir: Ino, name: Arc<str>, ino: Ino },
    /// A file was made.
    Create { dir: Ino, name: Arc<str>, ino: Ino },
    /// Bytes were written, all at once.
    Write { ino: Ino, offset: u64, data: Arc<[u8]> },
    /// A write was handed to a queue: from here on its bytes may be on the disk, in part or whole.
    Submit { id: u64, ino: Ino, offset: u64, data: Arc<[u8]> },
    /// That write completed: an fsync from here on makes it durable.
    Complete { id: u64, ino: Ino },
    /// A file was cut or extended.
    SetLen { ino: Ino, len: u64 },
    /// A file was synced.
    Fsync { ino: Ino },
    /// The fsync of a file failed: earlier writes may be lost permanently, even if a later fsync
    /// succeeds.
    FsyncFailed { ino: Ino },
    /// A directory was synced.
    FsyncDir { dir: Ino },
    /// `ino` took the name `to` in `to_dir`; `other` is the inode that had it before (replaced, or
    /// exchanged and now named `from`).
    Rename { dir: Ino, from: Arc<str>, to_dir: Ino, to: Arc<str>, how: Rename, ino: Ino, other: Option<Ino> },
    /// A file lost its name.
    Unlink { dir: Ino, name: Arc<str>, ino: Ino },
    /// An empty directory lost its name.
    Rmdir { dir: Ino, name: Arc<str>, ino: Ino },
    /// Something that a test wants to know about in the order of effects, such as an
    /// acknowledgement. Not an effect.
    Mark(Arc<str>),
}

/// An effect, with the path that it went by at that time (for people).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The effect.
    pub op: Op,
    /// Path of the inode that it was done to; empty for a mark.
    pub path: Arc<str>,
}

/// Effects in order, on top of a state that was durable when the record began.
#[derive(Clone, Debug)]
pub struct Log {
    /// The durable content before the first effect.
    pub base: Inodes,
    /// The effects.
    pub records: Vec<Record>,
}

impl fmt::Display for Record {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = &self.path;
        match &self.op {
            Op::Mkdir { .. } => write!(out, "mkdir {path}"),
            Op::Create { .. } => write!(out, "create {path}"),
            Op::Write { offset, data, .. } => write!(out, "write {path} [{offset}, +{})", data.len()),
            Op::Submit { offset, data, .. } => write!(out, "submit {path} [{offset}, +{})", data.len()),
            Op::Complete { .. } => write!(out, "complete {path}"),
            Op::SetLen { len, .. } => write!(out, "set length of {path} to {len}"),
            Op::Fsync { .. } => write!(out, "fsync {path}"),
            Op::FsyncFailed { .. } => write!(out, "failed fsync {path}"),
            Op::FsyncDir { .. } => write!(out, "fsync {path}/"),
            Op::Rename { from, to, how, .. } => {
                let verb = if matches!(how, Rename::Exchange) { "exchange" } else { "rename" };
                let parent = path.rsplit_once('/').map_or("", |(parent, _)| parent);
                write!(out, "{verb} {parent}/{from} -> {to}")
            }
            Op::Unlink { .. } => write!(out, "unlink {path}"),
            Op::Rmdir { .. } => write!(out, "rmdir {path}"),
            Op::Mark(label) => write!(out, "mark \"{label}\""),
        }
    }
}

impl fmt::Display for Log {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.records.iter().enumerate().try_for_each(|(at, record)| writeln!(out, "{at:4}  {record}"))
    }
}
