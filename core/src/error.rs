//! The one error type of this crate. Every variant says what happened, where (leaf, file, block),
//! and carries its cause; [`Error::kind`] is a stable name that the Python exceptions mirror.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::kind::Kind;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// See the module documentation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file operation failed. `source` keeps the errno.
    #[error("{op} of {} failed: {source}", path.display())]
    Io {
        /// The operation, as a verb: `write`, `fsync`, `rename`, `open`, `lock`, …
        op: &'static str,
        /// The file or directory it was done to.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// Stored bytes are not the bytes that were written.
    #[error("{} is corrupt{}{}: {what}", file.display(), of_leaf(leaf.as_deref()), in_block(*block))]
    Corrupt {
        /// The file that holds the bytes.
        file: PathBuf,
        /// The rendered path of the leaf that would have been damaged, where one is known.
        leaf: Option<String>,
        /// The block of the data file, where one is known.
        block: Option<u64>,
        /// The violated condition.
        what: String,
    },
    /// A file is not of a form that this version reads (unknown version, unknown required feature,
    /// foreign file).
    #[error("{} cannot be read: {what}", file.display())]
    Format {
        /// The file.
        file: PathBuf,
        /// The finding, and what this version understands.
        what: String,
    },
    /// A bound of [`crate::limits`] was passed, on write or on read.
    #[error("{what} is {found}, more than the limit of {limit}")]
    Limit {
        /// The counted thing, with its place.
        what: String,
        /// The count.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A leaf cannot be stored, or two leaves collide.
    #[error("{}: {what}", crate::leaf_path::named(leaf))]
    Leaf {
        /// The rendered leaf path.
        leaf: String,
        /// Why, and what to do.
        what: String,
    },
    /// Nothing happened for too long.
    #[error("waited {seconds:.1} s for {waited_for}")]
    Timeout {
        /// The awaited event.
        waited_for: String,
        /// For how long, in seconds.
        seconds: f64,
    },
    /// The other half of this operation ended first, by this.
    #[error("{0}")]
    Shared(Arc<Error>),
    /// The other half of this operation ended first; its own error says why.
    #[error("cancelled: {0}")]
    Cancelled(String),
    /// A leaf was changed between the call that saves it and its capture.
    #[error(
        "{} was changed after its save was called and before it was captured: what would be stored is neither the old value nor the new one",
        crate::leaf_path::named(leaf)
    )]
    Torn {
        /// The rendered leaf path.
        leaf: String,
    },
    /// A device answered a call with an error. Those of a running kernel stay: the process's
    /// context on that device is of no use any more.
    #[error("{device}: {call} failed with {answer}")]
    Device {
        /// Its number and name.
        device: String,
        /// The call that failed.
        call: &'static str,
        /// Name and number of its answer.
        answer: String,
    },
    /// There is no CUDA device that could be used.
    #[error("no CUDA device can be used: {0}")]
    NoDriver(String),
    /// This handle was made before a `fork` and belongs to the parent process.
    #[error(
        "this {0} was made before a fork and belongs to the parent process; open the checkpoint again in the child"
    )]
    Forked(&'static str),
    /// The caller's arguments cannot work.
    #[error("{0}")]
    Misuse(String),
    /// An invariant of stepwell does not hold. Never the caller's mistake.
    #[error(
        "this is a bug in stepwell: expected {expected}, found {found}. Please report it with this message"
    )]
    Internal {
        /// The invariant, with its place.
        expected: String,
        /// The state in its stead.
        found: String,
    },
}

fn of_leaf(leaf: Option<&str>) -> String {
    leaf.map(|leaf| format!(", {}", crate::leaf_path::named(leaf))).unwrap_or_default()
}

fn in_block(block: Option<u64>) -> String {
    block.map(|block| format!(", block {block}")).unwrap_or_default()
}

impl Error {
    /// A file operation that failed.
    pub fn io(op: &'static str, path: impl Into<PathBuf>, source: impl Into<io::Error>) -> Self {
        Self::Io { op, path: path.into(), source: source.into() }
    }

    /// Damage that no leaf or block can be named for yet.
    pub fn corrupt(file: impl Into<PathBuf>, what: impl Into<String>) -> Self {
        Self::Corrupt { file: file.into(), leaf: None, block: None, what: what.into() }
    }

    /// An invariant that does not hold: what it demands, and what was found in its place.
    pub fn internal(expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self::Internal { expected: expected.into(), found: found.into() }
    }

    /// Stable name of its [`Kind`]; part of the public interface.
    pub fn kind(&self) -> &'static str {
        let kind = match self {
            Self::Io { .. } => Kind::Io,
            Self::Corrupt { .. } => Kind::CorruptCheckpoint,
            Self::Format { .. } | Self::Limit { .. } => Kind::Format,
            Self::Leaf { .. } => Kind::UnsupportedLeaf,
            Self::Timeout { .. } => Kind::Timeout,
            Self::Shared(error) => return error.kind(),
            Self::Cancelled(_) => Kind::Cancelled,
            Self::Torn { .. } => Kind::TornSnapshot,
            Self::Device { .. } | Self::NoDriver(_) => Kind::Device,
            Self::Forked(_) => Kind::ForkedProcess,
            Self::Misuse(_) => Kind::Invalid,
            Self::Internal { .. } => Kind::Internal,
        };
        kind.name()
    }

    /// The error itself, where two halves of an operation share one.
    pub fn inner(&self) -> &Self {
        match self {
            Self::Shared(error) => error.inner(),
            error => error,
        }
    }

    /// The errno of a failed file operation.
    pub fn errno(&self) -> Option<i32> {
        match self.inner() {
            Self::Io { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }

    /// The file that the error is about, where it is about one.
    pub fn file(&self) -> Option<&Path> {
        match self.inner() {
            Self::Io { path, .. } => Some(path),
            Self::Corrupt { file, .. } | Self::Format { file, .. } => Some(file),
            _ => None,
        }
    }

    /// True if the file or directory was not there (ENOENT).
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    /// True if it is not there any more: [`Error::is_not_found`], or ESTALE, as a network file
    /// system says it of what was open.
    pub fn is_gone(&self) -> bool {
        self.is_not_found() || self.errno() == Some(libc::ESTALE)
    }

    /// True if what was to be made is there already (EEXIST).
    pub fn already_exists(&self) -> bool {
        self.errno() == Some(libc::EEXIST)
    }

    /// True if a name is occupied: the target of a rename exists, or a directory to remove is not
    /// empty. Systems return either EEXIST or ENOTEMPTY.
    pub fn is_occupied(&self) -> bool {
        matches!(self.errno(), Some(libc::EEXIST | libc::ENOTEMPTY))
    }

    /// True if there is no room: on the disk, or for this user (ENOSPC, EDQUOT).
    pub fn is_full(&self) -> bool {
        matches!(self.errno(), Some(libc::ENOSPC | libc::EDQUOT))
    }

    /// True if the file system does not know what was asked of it, as a rename that swaps (EINVAL).
    pub fn is_unknown_request(&self) -> bool {
        self.errno() == Some(libc::EINVAL)
    }

    /// True if something else than a directory stands where one was to be (ENOTDIR).
    pub fn is_no_directory(&self) -> bool {
        self.errno() == Some(libc::ENOTDIR)
    }

    /// True if something else than a regular file stands where one was to be, or on the way to it:
    /// a symlink, socket, pipe or directory (ENXIO, ENOTDIR, EISDIR, ELOOP; the engines themselves
    /// say it without an errno).
    pub fn is_no_file(&self) -> bool {
        let Self::Io { source, .. } = self else { return false };
        match source.raw_os_error() {
            Some(errno) => matches!(errno, libc::ENXIO | libc::ENOTDIR | libc::EISDIR | libc::ELOOP),
            None => source.kind() == io::ErrorKind::InvalidInput,
        }
    }

    /// True if the answer to a lock means that this file system has none (ENOLCK, EOPNOTSUPP,
    /// ENOSYS).
    pub fn is_without_locks(&self) -> bool {
        matches!(self.errno(), Some(libc::ENOLCK | libc::EOPNOTSUPP | libc::ENOSYS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Question = fn(&Error) -> bool;

    #[test]
    fn each_question_is_answered_by_its_errnos_and_by_no_other() {
        let questions: [(Question, &[i32]); 9] = [
            (Error::is_not_found, &[libc::ENOENT]),
            (Error::is_gone, &[libc::ENOENT, libc::ESTALE]),
            (Error::already_exists, &[libc::EEXIST]),
            (Error::is_occupied, &[libc::EEXIST, libc::ENOTEMPTY]),
            (Error::is_full, &[libc::ENOSPC, libc::EDQUOT]),
            (Error::is_unknown_request, &[libc::EINVAL]),
            (Error::is_no_directory, &[libc::ENOTDIR]),
            (Error::is_no_file, &[libc::ENXIO, libc::ENOTDIR, libc::EISDIR, libc::ELOOP]),
            (Error::is_without_locks, &[libc::ENOLCK, libc::EOPNOTSUPP, libc::ENOSYS]),
        ];
        for (number, (question, yes)) in questions.into_iter().enumerate() {
            for errno in 1..200 {
                let error = Error::io("open", "/x", io::Error::from_raw_os_error(errno));
                assert_eq!(question(&error), yes.contains(&errno), "question {number}, errno {errno}");
            }
            assert!(!question(&Error::Misuse("no file operation".to_owned())), "question {number}");
        }
    }

    #[test]
    fn a_bug_of_ours_is_never_called_the_callers_mistake() {
        let error = Error::internal("3 leaves of item `a`", "4");
        assert_eq!(error.kind(), "internal");
        assert_eq!(
            error.to_string(),
            "this is a bug in stepwell: expected 3 leaves of item `a`, found 4. Please report it with this message"
        );
        assert_eq!(Error::Misuse("no such engine".to_owned()).kind(), "invalid");
    }

    #[test]
    fn kinds_have_names_of_their_own() {
        let names: std::collections::HashSet<_> = Kind::ALL.iter().map(|kind| kind.name()).collect();
        assert_eq!(names.len(), Kind::ALL.len());
    }

    #[test]
    fn what_the_engines_refuse_as_no_regular_file_has_no_errno() {
        let refused = io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
        assert!(Error::io("open", "/x", refused).is_no_file());
        assert!(!Error::io("open", "/x", io::Error::other("the queue is gone")).is_no_file());
    }
}
