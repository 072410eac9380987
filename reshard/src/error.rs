//! The one error type of this crate; [`Error::kind`] is a stable name that the Python exceptions
//! mirror.

use stepwell_core::Kind;

use crate::tiling::Fault;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// See the module documentation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A glob or a rename cannot be understood.
    #[error("`{glob}`: {what}")]
    Glob {
        /// The glob, as it was given.
        glob: String,
        /// The problem, and the correct form.
        what: String,
    },
    /// The stored chunks of a tensor do not cover it exactly once: the checkpoint is damaged.
    #[error("{}: {fault}", stepwell_core::leaf_path::named(leaf))]
    Tiling {
        /// The rendered leaf path.
        leaf: String,
        /// The hole or the overlap.
        fault: Box<Fault>,
    },
    /// The index contradicts itself: it is damaged, or a reader of a foreign format is wrong.
    #[error("{}: the index is inconsistent: {what}", stepwell_core::leaf_path::named(leaf))]
    Index {
        /// The rendered leaf path.
        leaf: String,
        /// The contradiction.
        what: String,
    },
    /// Something was asked for that the checkpoint cannot give; a defect of the caller.
    #[error("{}: {what}", stepwell_core::leaf_path::named(leaf))]
    Request {
        /// The rendered leaf path.
        leaf: String,
        /// Why not.
        what: String,
    },
}

impl Error {
    /// Stable name of its [`Kind`]; part of the public interface.
    pub fn kind(&self) -> &'static str {
        let kind = match self {
            Self::Glob { .. } | Self::Request { .. } => Kind::Invalid,
            Self::Tiling { .. } | Self::Index { .. } => Kind::CorruptCheckpoint,
        };
        kind.name()
    }
}
