//! The one error type of this crate. Every variant says what happened, where (leaf, file, block), and carries
//! its cause; [`Error::kind`] is a stable name that the Python exceptions mirror.

use std::io;
use std::path::{Path, PathBuf};

/// What every fallible call of this crate returns.
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
        /// What does not hold.
        what: String,
    },
    /// A file is not of a form that this version reads (unknown version, unknown required feature, foreign file).
    #[error("{} cannot be read: {what}", file.display())]
    Format {
        /// The file.
        file: PathBuf,
        /// What was found and what would have been understood.
        what: String,
    },
    /// A bound of [`crate::limits`] was passed, on write or on read.
    #[error("{what} is {found}, more than the limit of {limit}")]
    Limit {
        /// What was counted, with its place.
        what: String,
        /// What was found.
        found: u64,
        /// What is allowed.
        limit: u64,
    },
    /// A leaf cannot be stored, or two leaves collide.
    #[error("leaf `{leaf}`: {what}")]
    Leaf {
        /// The rendered leaf path.
        leaf: String,
        /// Why, and what to do.
        what: String,
    },
    /// Nothing happened for too long.
    #[error("waited {seconds:.1} s for {waited_for}")]
    Timeout {
        /// What was waited for.
        waited_for: String,
        /// For how long, in seconds.
        seconds: f64,
    },
    /// The other half of this operation ended first; its own error says why.
    #[error("cancelled: {0}")]
    Cancelled(String),
    /// This handle was made before a `fork` and belongs to the parent process.
    #[error(
        "this {0} was made before a fork and belongs to the parent process; open the checkpoint again in the child"
    )]
    Forked(&'static str),
    /// Called in a way that cannot work; a defect of the caller.
    #[error("{0}")]
    Misuse(String),
}

fn of_leaf(leaf: Option<&str>) -> String {
    leaf.map(|leaf| format!(", leaf `{leaf}`")).unwrap_or_default()
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

    /// Stable name of the variant; part of the public interface.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Io { .. } => "io",
            Self::Corrupt { .. } => "corrupt",
            Self::Format { .. } => "format",
            Self::Limit { .. } => "limit",
            Self::Leaf { .. } => "leaf",
            Self::Timeout { .. } => "timeout",
            Self::Cancelled(_) => "cancelled",
            Self::Forked(_) => "forked",
            Self::Misuse(_) => "misuse",
        }
    }

    /// The errno of a failed file operation.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Io { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }

    /// The file that the error is about, where it is about one.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Io { path, .. } => Some(path),
            Self::Corrupt { file, .. } | Self::Format { file, .. } => Some(file),
            _ => None,
        }
    }

    /// Whether the file or directory was not there (ENOENT).
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}
