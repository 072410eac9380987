//! The error type of this crate. Every variant names what happened, the place (leaf, file, block),
//! and its cause. [`Error::kind`] is a stable name, which the Python exceptions use.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::kind::Kind;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file operation failed. `source` keeps the errno.
    #[error("{op} of {} failed: {source}", path.display())]
    Io {
        /// The operation, as a verb: `write`, `fsync`, `rename`, `open`, `lock`, …
        op: &'static str,
        /// Its file or directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// Stored bytes differ from the written bytes.
    #[error("{} is corrupt{}{}: {what}", file.display(), of_leaf(leaf.as_deref()), in_block(*block))]
    Corrupt {
        /// The file with the bytes.
        file: PathBuf,
        /// The rendered path of the damaged leaf, if it is known.
        leaf: Option<String>,
        /// The damaged block of the data file, if it is known.
        block: Option<u64>,
        /// The violated condition.
        what: String,
    },
    /// This version cannot read a file: an unknown version, an unknown required feature, or a
    /// foreign file.
    #[error("{} cannot be read: {what}", file.display())]
    Format {
        /// The file.
        file: PathBuf,
        /// The finding, and what this version understands.
        what: String,
    },
    /// A limit of [`crate::limits`] is exceeded, on write or on read.
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
        /// The reason, and what to do.
        what: String,
    },
    /// There was no progress for the timeout.
    #[error("waited {seconds:.1} s for {waited_for}")]
    Timeout {
        /// The awaited event.
        waited_for: String,
        /// The time of the wait, in seconds.
        seconds: f64,
    },
    /// The other half of this operation failed first, with this error.
    #[error("{0}")]
    Shared(Arc<Error>),
    /// The other half of this operation ended first, and reports its own error.
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
    /// A call of a device failed. After a failed kernel, all further calls fail, because the
    /// process's context on that device is broken.
    #[error("{device}: {call} failed with {answer}")]
    Device {
        /// Its number and name.
        device: String,
        /// The call that failed.
        call: &'static str,
        /// The name and number of the device's error.
        answer: String,
    },
    /// There is no usable CUDA device.
    #[error("no CUDA device can be used: {0}")]
    NoDriver(String),
    /// This handle was made before a `fork`, and belongs to the parent process.
    #[error(
        "this {0} was made before a fork and belongs to the parent process; open the checkpoint again in the child"
    )]
    Forked(&'static str),
    /// A crate above this one failed while it filled a slot.
    #[error("{what}")]
    Provider {
        /// The kind of its error.
        kind: Kind,
        /// Its message.
        what: String,
    },
    /// The caller's arguments are invalid.
    #[error("{0}")]
    Misuse(String),
    /// An invariant of stepwell does not hold. This is never the caller's mistake.
    #[error(
        "this is a bug in stepwell: expected {expected}, found {found}. Please report it with this message"
    )]
    Internal {
        /// The invariant, with its place.
        expected: String,
        /// The state that was found.
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
    /// Returns the error of a failed file operation.
    pub fn io(op: &'static str, path: impl Into<PathBuf>, source: impl Into<io::Error>) -> Self {
        Self::Io { op, path: path.into(), source: source.into() }
    }

    /// Returns the error for damage whose leaf and block are not known yet.
    pub fn corrupt(file: impl Into<PathBuf>, what: impl Into<String>) -> Self {
        Self::Corrupt { file: file.into(), leaf: None, block: None, what: what.into() }
    }

    /// Returns the error for a broken invariant: the expected and the found state.
    pub fn internal(expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self::Internal { expected: expected.into(), found: found.into() }
    }

    /// Returns the stable name of its [`Kind`], a part of the public interface.
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
            Self::Provider { kind, .. } => *kind,
            Self::Misuse(_) => Kind::Invalid,
            Self::Internal { .. } => Kind::Internal,
        };
        kind.name()
    }

    /// Returns the error that two halves of an operation share, or itself.
    pub fn inner(&self) -> &Self {
        match self {
            Self::Shared(error) => error.inner(),
            error => error,
        }
    }

    /// Returns the errno of a failed file operation.
    pub fn errno(&self) -> Option<i32> {
        match self.inner() {
            Self::Io { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }

    /// Returns the file of the error, if there is one.
    pub fn file(&self) -> Option<&Path> {
        match self.inner() {
            Self::Io { path, .. } => Some(path),
            Self::Corrupt { file, .. } | Self::Format { file, .. } => Some(file),
            _ => None,
        }
    }

    /// True if the file or directory did not exist (ENOENT).
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    /// True if it no longer exists: [`Error::is_not_found`], or ESTALE, as a network file system
    /// reports it for an open file.
    pub fn is_gone(&self) -> bool {
        self.is_not_found() || self.errno() == Some(libc::ESTALE)
    }

    /// True if the file or directory to create exists already (EEXIST).
    pub fn already_exists(&self) -> bool {
        self.errno() == Some(libc::EEXIST)
    }

    /// True if a name is occupied: the target of a rename exists, or a directory to remove is not
    /// empty. Systems return either EEXIST or ENOTEMPTY.
    pub fn is_occupied(&self) -> bool {
        matches!(self.errno(), Some(libc::EEXIST | libc::ENOTEMPTY))
    }

    /// True if there is no space on the disk or in the user's quota (ENOSPC, EDQUOT).
    pub fn is_full(&self) -> bool {
        matches!(self.errno(), Some(libc::ENOSPC | libc::EDQUOT))
    }

    /// True if the file system does not support the request, such as a swapping rename (EINVAL).
    pub fn is_unknown_request(&self) -> bool {
        self.errno() == Some(libc::EINVAL)
    }

    /// True if a path has another file in place of a directory (ENOTDIR).
    pub fn is_no_directory(&self) -> bool {
        self.errno() == Some(libc::ENOTDIR)
    }

    /// True if a path has another file in place of a regular file or of a directory on the way to
    /// it: a symlink, socket, pipe or directory (ENXIO, ENOTDIR, EISDIR, ELOOP). The engines report
    /// this themselves without an errno.
    pub fn is_no_file(&self) -> bool {
        let Self::Io { source, .. } = self else { return false };
        match source.raw_os_error() {
            Some(errno) => matches!(errno, libc::ENXIO | libc::ENOTDIR | libc::EISDIR | libc::ELOOP),
            None => source.kind() == io::ErrorKind::InvalidInput,
        }
    }

    /// True if the answer to a lock means that the file system has no locks (ENOLCK, EOPNOTSUPP,
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
