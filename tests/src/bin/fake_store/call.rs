//! A request to a store and its answer, in no dialect.

use std::sync::Arc;

use crate::objects::Object;

/// A request, without its dialect. Keys are whole, without the bucket.
#[derive(Clone, Debug)]
pub enum Call {
    /// Stores the body. Fails if `create` is set and the key is taken.
    Put {
        key: String,
        create: bool,
    },
    Get {
        key: String,
        range: Option<Range>,
    },
    Head {
        key: String,
    },
    Delete {
        key: String,
    },
    /// Deletes several objects.
    BulkDelete {
        keys: Vec<String>,
    },
    List(Listing),
    StartUpload {
        key: String,
    },
    /// Stores the body as a part.
    Part {
        key: String,
        upload: String,
        part: String,
    },
    Complete {
        key: String,
        upload: String,
        parts: Vec<NamedPart>,
        create: bool,
    },
    Abort {
        upload: String,
    },
}

impl Call {
    /// The name of its kind, as the control paths use it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Put { create: true, .. } => "create",
            Self::Put { .. } => "put",
            Self::Get { range: None, .. } => "get",
            Self::Get { .. } => "range",
            Self::Head { .. } => "head",
            Self::Delete { .. } => "delete",
            Self::BulkDelete { .. } => "bulk_delete",
            Self::List(_) => "list",
            Self::StartUpload { .. } => "start_upload",
            Self::Part { .. } => "part",
            Self::Complete { .. } => "complete",
            Self::Abort { .. } => "abort",
        }
    }
}

/// The kinds of calls.
pub const KINDS: [&str; 12] = [
    "create",
    "put",
    "get",
    "range",
    "head",
    "list",
    "delete",
    "bulk_delete",
    "start_upload",
    "part",
    "complete",
    "abort",
];

/// The bytes that a request asks for.
#[derive(Clone, Copy, Debug)]
pub enum Range {
    /// From a first byte to a last one, which may be past the end.
    Between(u64, u64),
    /// So many bytes at the end.
    Last(u64),
}

impl Range {
    /// Parses a header such as `bytes=0-9`.
    pub fn parse(header: &str) -> Option<Self> {
        let (first, last) = header.trim().strip_prefix("bytes=")?.split_once('-')?;
        match (first, last) {
            ("", last) => Some(Self::Last(last.parse().ok()?)),
            (first, "") => Some(Self::Between(first.parse().ok()?, u64::MAX)),
            (first, last) => Some(Self::Between(first.parse().ok()?, last.parse().ok()?)),
        }
    }

    /// The bytes of an object of this length. `None` if it has none of them.
    pub fn within(self, len: u64) -> Option<std::ops::Range<u64>> {
        let found = match self {
            Self::Between(first, last) => first..last.saturating_add(1).min(len),
            Self::Last(count) => len.saturating_sub(count)..len,
        };
        (!found.is_empty()).then_some(found)
    }
}

/// One page of a listing.
#[derive(Clone, Debug)]
pub struct Listing {
    pub prefix: String,
    pub delimiter: String,
    /// The first key that may be listed.
    pub from: Option<String>,
    pub limit: usize,
}

/// A part that a request names.
#[derive(Clone, Debug)]
pub struct NamedPart {
    pub id: String,
    pub tag: Option<String>,
    pub checksum: Option<String>,
}

/// The answer to a call that succeeded.
#[derive(Debug)]
pub enum Done {
    Stored(Arc<Object>),
    Found(Arc<Object>, std::ops::Range<u64>),
    Deleted,
    /// The keys, and whether each was there.
    BulkDeleted(Vec<(String, bool)>),
    Listed(Page),
    Started(String),
    Part {
        tag: String,
        checksum: u64,
    },
    Aborted,
}

/// A page of a listing.
#[derive(Debug, Default)]
pub struct Page {
    pub objects: Vec<(String, Arc<Object>)>,
    pub prefixes: Vec<String>,
    /// The key that the next page begins with.
    pub next: Option<String>,
}

/// Why a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    BadDigest,
    Busy,
    Conflict,
    Denied,
    EntityTooSmall,
    Exists,
    Expired,
    Internal,
    InvalidPart,
    InvalidRange,
    Malformed,
    NoBucket,
    NoKey,
    NoUpload,
    NotImplemented,
    SlowDown,
}
