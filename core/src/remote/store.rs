//! The requests to an object store.

use std::path::Path;

use crate::Result;
use crate::sys::Buffer;

/// The answer to [`Store::create`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CreateOutcome {
    /// It was stored.
    Stored,
    /// The store says that the key is taken, or that somebody else writes it. It may be this very
    /// object, or none: read it.
    Exists,
    /// No answer, or one that says nothing. It may be stored now, later or never.
    Unknown,
}

/// Facts about an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectFacts {
    /// Length in bytes.
    pub len: u64,
    /// Differs between two contents of one key (an ETag).
    pub tag: String,
    /// When it was stored, in nanoseconds since 1970 by the store's clock. Whole seconds.
    pub modified: i64,
}

/// An entry of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listed {
    /// An object, by its key.
    Object(String, ObjectFacts),
    /// A prefix that ends with `/`, with objects below.
    Prefix(String),
}

/// An upload in parts that has begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UploadId(pub String);

/// A stored part, as the store names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartTag(pub String);

/// An object store. Each call is one request (a listing: one per page), and may be made by many
/// threads at once. Keys are relative to the place that the store was opened at.
///
/// [`Store::create`] is never repeated by anything below it: a library that repeats it hears
/// "exists" of its own object. All others do no harm when they are repeated, and are, for a while.
/// Each call ends within a deadline of its own.
pub trait Store: Send + Sync {
    /// Its URL, without secrets.
    fn url(&self) -> &Path;

    /// Creates a small object if its key is free.
    fn create(&self, key: &str, bytes: &[u8]) -> Result<CreateOutcome>;

    /// Stores a small object. It replaces another one.
    fn put(&self, key: &str, bytes: &[u8]) -> Result<()>;

    /// Returns facts about an object. `None` if it does not exist.
    fn look(&self, key: &str) -> Result<Option<ObjectFacts>>;

    /// Reads a whole small object. ENOENT if it does not exist. [`crate::Error::Limit`] if it is
    /// longer than `limit` bytes.
    fn get(&self, key: &str, limit: u64) -> Result<Vec<u8>>;

    /// Reads a range. Returns the number of bytes: fewer only at the object's end.
    fn read(&self, key: &str, offset: u64, into: &mut [u8]) -> Result<usize>;

    /// Lists one level below a prefix: its objects, and the prefixes beside them.
    fn list(&self, prefix: &str) -> Result<Vec<Listed>>;

    /// Lists all objects below a prefix, on every level.
    fn list_below(&self, prefix: &str) -> Result<Vec<(String, ObjectFacts)>>;

    /// Deletes objects. One that is missing is no error.
    fn delete(&self, keys: &[String]) -> Result<()>;

    /// Begins an upload in parts.
    fn start_upload(&self, key: &str) -> Result<UploadId>;

    /// Stores the first `len` bytes of a buffer as a part. Parts have numbers from 1 on, and may be
    /// stored in any order. Returns the buffer in every case.
    fn put_part(
        &self,
        key: &str,
        upload: &UploadId,
        number: u32,
        part: Buffer,
        len: usize,
    ) -> (Buffer, Result<PartTag>);

    /// Makes an object of all parts, in the order of their numbers.
    fn complete_upload(&self, key: &str, upload: &UploadId, parts: &[PartTag]) -> Result<()>;

    /// Deletes the parts of an upload.
    fn abort_upload(&self, key: &str, upload: &UploadId) -> Result<()>;
}
