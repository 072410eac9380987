//! The manifest: the JSON commit record of a step. A step is a directory that holds one whose own
//! checksum holds and whose files are there; so it names every file below the step, its length, and
//! the digest that binds its content.
//!
//! It is text for people and other languages: pretty-printed, keys in a fixed order, non-finite
//! metrics as strings. Its last line, `{"crc32c": "xxxxxxxx"}`, is the CRC-32C of all bytes before
//! that line. Unknown keys are ignored on read and kept on a rewrite. Unknown required features are
//! refused by name, duplicate keys are refused. The manager writes and reads it.
//!
//! Invariants of every manifest that [`Manifest::encode`] writes and [`Manifest::decode`] returns:
//! paths are relative and plain; item names, item directories and file paths are unique; each file
//! and index lies below the directory of an item; a tombstone names nothing that a living item
//! holds (recovery deletes what a tombstone names).

mod check;
mod json;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::format::{FORMAT_VERSION, sealed_text};
use crate::limits::MAX_MANIFEST_BYTES;

/// The first key of every manifest, so that a stranger knows what the file is.
const FORMAT_NAME: &str = "stepwell";
/// Data files are parts of others: [`FileEntry::within`].
pub const NODE_FILES: &str = "node_files";
/// The step's bytes are in files of another library: [`Manifest::adopted`].
pub const ADOPTED_FILES: &str = "adopted_files";
/// Data files may have compressed chunks: [`crate::format::planes`].
pub const COMPRESSED_CHUNKS: &str = "compressed_chunks";
/// Features that a manifest may require of this reader.
const KNOWN_FEATURES: &[&str] = &[NODE_FILES, ADOPTED_FILES, COMPRESSED_CHUNKS];

/// Keys that this version does not know. A rewrite (thinning) writes them back, so that records of
/// a later version survive an earlier one.
pub type Others = serde_json::Map<String, serde_json::Value>;

/// The commit record of a step. See the module documentation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the format; [`FORMAT_VERSION`].
    pub format_version: u32,
    /// Features that a reader must know beyond the version. A reader refuses a step with an unknown
    /// one.
    #[serde(default)]
    pub required_features: Vec<String>,
    /// Name and version of the program that wrote it.
    #[serde(default)]
    pub writer: String,
    /// The caller's label, 0 … 2⁶³ − 1; must agree with the name of the directory.
    pub step: u64,
    /// The save that wrote it.
    pub attempt: Attempt,
    /// When the save began, nanoseconds since 1970 UTC.
    pub started_unix_ns: i64,
    /// When it was committed, likewise.
    pub committed_unix_ns: i64,
    /// How many ranks wrote it.
    pub world_size: u32,
    /// Hash of the plan on which the ranks agreed.
    #[serde(default)]
    pub plan_hash: String,
    /// The items, in the order of their first top-level component.
    pub items: Vec<Item>,
    /// Every data file of every item.
    pub files: Vec<FileEntry>,
    /// The files of another library that have the bytes of the step. It has no items then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adopted: Option<AdoptedFiles>,
    /// Items that were thinned away after the commit.
    #[serde(default)]
    pub dropped: Vec<Tombstone>,
    /// Leaves of the user's state that could not be stored, and were left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unsupported: Vec<UnsupportedLeaf>,
    /// The user's metrics at the time of the save.
    #[serde(default, with = "json::metrics")]
    pub metrics: BTreeMap<String, f64>,
    /// The user's metadata.
    #[serde(default)]
    pub custom_metadata: serde_json::Value,
    /// Keys that this version does not know.
    #[serde(flatten)]
    pub others: Others,
}

/// A save: the session that the ranks agreed on, and its number in it. An identity, which is
/// compared: it has no other keys in any version.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Attempt {
    /// 32 lower-case hexadecimal digits.
    pub session: String,
    /// Counts the saves of the session.
    pub counter: u64,
}

/// A part of the state that is separable on disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Item {
    /// Its rendered top-level component, or `.` for the loose leaves or for a state that is one
    /// item.
    pub name: String,
    /// Its directory below the step, one component (`i0`).
    pub dir: String,
    /// Its index file.
    pub index: IndexEntry,
    /// The top-level components that it holds, in order.
    pub top_level: Vec<TopLevel>,
    /// Number of its leaves.
    pub leaves: u64,
    /// Bytes of its tensors.
    pub tensor_bytes: u64,
    /// Keys that this version does not know.
    #[serde(flatten)]
    pub others: Others,
}

/// A top-level entry of the state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopLevel {
    /// Its rendered component.
    pub name: String,
    /// Its place among the state's top-level entries, so that a reader can merge the items in the
    /// order that was saved.
    pub position: u64,
    /// Keys that this version does not know.
    #[serde(flatten)]
    pub others: Others,
}

/// An index file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexEntry {
    /// Relative to the step.
    pub path: String,
    /// In bytes.
    pub length: u64,
    /// CRC-32C of all its bytes.
    #[serde(with = "json::hex_u32")]
    pub crc32c: u32,
    /// Keys that this version does not know.
    #[serde(flatten)]
    pub others: Others,
}

/// A data file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Relative to the step (`i0/00000.data`).
    pub path: String,
    /// In bytes.
    pub length: u64,
    /// The CRC that its trailer ends in.
    #[serde(with = "json::hex_u32")]
    pub trailer_crc32c: u32,
    /// The random id of its header and trailer.
    #[serde(with = "json::hex_u128")]
    pub file_id: u128,
    /// Its container, if it is a part of another file. Then nothing exists under `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<WithinEntry>,
    /// Keys that this version does not know.
    #[serde(flatten)]
    pub others: Others,
}

/// The place of a data file that is a part of another file: the ranks of a node may write into one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WithinEntry {
    /// That file, relative to the step.
    pub path: String,
    /// Offset of the data file in it, in bytes.
    pub offset: u64,
    /// Keys that this version does not know.
    #[serde(flatten)]
    pub others: Others,
}

/// A checkpoint of another library, and the file with its checksums. Both paths are absolute, or
/// relative to the root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdoptedFiles {
    /// The checkpoint: a file or a directory.
    pub path: String,
    /// True if it is read as a step of the root above it: that may be more than the path alone.
    pub of_root: bool,
    /// The library that wrote it.
    pub family: String,
    /// Bytes of its files.
    pub bytes: u64,
    /// The file with its checksums.
    pub checksums: ChecksumsEntry,
    /// Keys that this version does not know.
    #[serde(flatten)]
    pub others: Others,
}

/// A file with the checksums of an adopted checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChecksumsEntry {
    /// Absolute, or relative to the root.
    pub path: String,
    /// Bytes from its start on. The file may have more, if files were added later.
    pub length: u64,
    /// CRC-32C of these bytes.
    #[serde(with = "json::hex_u32")]
    pub crc32c: u32,
    /// Keys that this version does not know.
    #[serde(flatten)]
    pub others: Others,
}

/// The files on disk for these data files: paths and lengths, in order.
pub fn stored_files(entries: &[FileEntry]) -> Vec<(&str, u64)> {
    let mut found: Vec<(&str, u64)> = Vec::with_capacity(entries.len());
    let mut shared: HashMap<&str, usize> = HashMap::new();
    for entry in entries {
        let Some(within) = &entry.within else {
            found.push((&entry.path, entry.length));
            continue;
        };
        let end = within.offset.saturating_add(entry.length);
        let at = *shared.entry(&within.path).or_insert_with(|| {
            found.push((&within.path, 0));
            found.len() - 1
        });
        if let Some((_, length)) = found.get_mut(at) {
            *length = end.max(*length);
        }
    }
    found
}

/// An item that was thinned away: its files may or may not be there still.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tombstone {
    /// The item's name.
    pub item: String,
    /// The directory that it had; no living item has it.
    pub dir: String,
    /// The files that it had, relative to the step.
    pub paths: Vec<String>,
    /// When it was dropped, nanoseconds since 1970 UTC.
    pub unix_ns: i64,
    /// Keys that this version does not know.
    #[serde(flatten)]
    pub others: Others,
}

/// A leaf that could not be stored, and was left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnsupportedLeaf {
    /// Its rendered path.
    pub path: String,
    /// Why it could not be stored.
    pub reason: String,
    /// Keys that this version does not know.
    #[serde(flatten)]
    pub others: Others,
}

/// A metric as JSON has it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a number, or \"NaN\", \"Infinity\" or \"-Infinity\"")]
pub enum MetricNumber {
    /// With digits.
    Real(f64),
    /// By its name.
    Named(NamedNumber),
}

/// A number that JSON has no digits for.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum NamedNumber {
    /// Not a number.
    NaN,
    /// Positive.
    Infinity,
    /// Negative.
    #[serde(rename = "-Infinity")]
    MinusInfinity,
}

impl From<f64> for MetricNumber {
    fn from(value: f64) -> Self {
        if value.is_finite() {
            Self::Real(value)
        } else if value.is_nan() {
            Self::Named(NamedNumber::NaN)
        } else {
            Self::Named(if value > 0.0 { NamedNumber::Infinity } else { NamedNumber::MinusInfinity })
        }
    }
}

impl From<MetricNumber> for f64 {
    fn from(number: MetricNumber) -> Self {
        match number {
            MetricNumber::Real(value) => value,
            MetricNumber::Named(NamedNumber::NaN) => f64::NAN,
            MetricNumber::Named(NamedNumber::Infinity) => f64::INFINITY,
            MetricNumber::Named(NamedNumber::MinusInfinity) => f64::NEG_INFINITY,
        }
    }
}

/// The fields before the manifest proper.
#[derive(Serialize)]
struct Tagged<'a> {
    format: &'a str,
    #[serde(flatten)]
    manifest: &'a Manifest,
}

/// The keys that every version has and will have.
#[derive(Deserialize)]
struct Envelope {
    format: String,
    format_version: u32,
    #[serde(default)]
    required_features: Vec<String>,
}

impl Manifest {
    /// The bytes of `manifest.json`. Refuses what [`Self::decode`] would refuse.
    pub fn encode(&self) -> Result<Vec<u8>> {
        if self.format_version != FORMAT_VERSION {
            return Err(Error::internal(
                format!("a manifest of format version {FORMAT_VERSION}"),
                format!("version {}", self.format_version),
            ));
        }
        let invalid = |what: String| Error::internal("a valid manifest to write", what);
        check_features(&self.required_features).map_err(invalid)?;
        check::check(self)?.map_err(invalid)?;
        let mut bytes = serde_json::to_vec_pretty(&Tagged { format: FORMAT_NAME, manifest: self })
            .map_err(|error| invalid(error.to_string()))?;
        sealed_text::seal(&mut bytes);
        limit_bytes(&bytes)?;
        Ok(bytes)
    }

    /// Reads and checks `manifest.json`; `file` is for messages. The checksum comes first: an
    /// altered byte is [`Error::Corrupt`], an unknown version or required feature is
    /// [`Error::Format`], and so is what does not keep the module's invariants.
    pub fn decode(bytes: &[u8], file: &Path) -> Result<Self> {
        limit_bytes(bytes)?;
        let format = |what: String| Error::Format { file: file.to_owned(), what };
        let body = sealed_text::unseal(bytes).map_err(|what| Error::corrupt(file, what))?;
        json::refuse_duplicate_keys(body).map_err(|error| format(error.to_string()))?;
        let envelope: Envelope = serde_json::from_slice(body)
            .map_err(|error| format(format!("it is no manifest of stepwell: {error}")))?;
        if envelope.format != FORMAT_NAME {
            return Err(format(format!("its format is `{}`, not `{FORMAT_NAME}`", envelope.format)));
        }
        if envelope.format_version != FORMAT_VERSION {
            return Err(format(format!(
                "it has format version {}; this version of stepwell reads version {FORMAT_VERSION}",
                envelope.format_version
            )));
        }
        check_features(&envelope.required_features).map_err(format)?;
        let mut manifest: Self = serde_json::from_slice(body).map_err(|error| format(error.to_string()))?;
        // The envelope's, written by `encode`. The rest keeps its order: `remove` would put the
        // last key in the place of this one.
        manifest.others.shift_remove("format");
        check::check(&manifest)?.map_err(format)?;
        Ok(manifest)
    }

    /// The item of that name.
    pub fn item(&self, name: &str) -> Option<&Item> {
        self.items.iter().find(|item| item.name == name)
    }

    /// The data files below an item's directory, in the order of the list.
    pub fn files_of<'a>(&'a self, item: &'a Item) -> impl Iterator<Item = &'a FileEntry> + 'a {
        self.files.iter().filter(|entry| super::paths::is_below(&entry.path, &item.dir))
    }
}

fn check_features(required: &[String]) -> std::result::Result<(), String> {
    match required.iter().find(|name| !KNOWN_FEATURES.contains(&name.as_str())) {
        Some(name) => {
            Err(format!("it requires the feature `{name}`, which this version of stepwell does not know"))
        }
        None => Ok(()),
    }
}

fn limit_bytes(bytes: &[u8]) -> Result<()> {
    super::limit("a manifest's size in bytes", bytes.len() as u64, MAX_MANIFEST_BYTES)
}
