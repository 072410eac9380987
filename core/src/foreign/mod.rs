//! Parsers of the bytes that other libraries write. They do no I/O, and trust nothing: memory and
//! time are bounded by the length of the input, nothing recurses, and nothing is ever executed.
//!
//! | module | what it reads |
//! |---|---|
//! | [`msgpack`] | a value in MessagePack, as inert nodes |
//! | [`npy`] | the header of a numpy array |
//! | [`ocdbt`] | the manifest and the nodes of an OCDBT database |
//! | [`pickle`] | the stream of a Python pickle, as a graph of inert nodes |
//! | [`safetensors`] | the header of a safetensors file |
//! | [`zip`] | the directory of a zip archive |
//!
//! The Python package knows what the found names and layouts mean.

pub mod msgpack;
pub mod npy;
pub mod ocdbt;
pub mod pickle;
pub mod safetensors;
pub mod zip;

/// A reason why bytes are not what they should be, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} (at byte {at})")]
pub struct Fault {
    /// Offset in the parsed bytes.
    pub at: u64,
    /// Expectation and finding.
    pub what: String,
    /// True if the bytes end where more of them were expected.
    pub is_cut: bool,
}

impl Fault {
    pub(crate) fn new(at: u64, what: impl Into<String>) -> Self {
        Self { at, what: what.into(), is_cut: false }
    }

    /// The fault of bytes that end too early.
    pub fn cut(at: u64, what: impl Into<String>) -> Self {
        Self { at, what: what.into(), is_cut: true }
    }
}

/// The result of a parser.
pub type Parsed<T> = std::result::Result<T, Fault>;
