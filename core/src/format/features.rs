//! Feature bits of data files and indexes. A reader refuses a file with an unknown bit in
//! `required`. It ignores unknown bits in `optional`. (Manifests are read first, and list required
//! features by name.)

use super::manifest::COMPRESSED_CHUNKS;

/// The feature bit of an index with an outline before its pages (see [`super::index_v1`]).
pub(crate) const OUTLINE: u64 = 1 << 0;

/// The feature bit of an index with compressed chunks ([`super::planes`]).
pub(crate) const COMPRESSED_INDEX: u64 = 1 << 1;
/// The feature bit of a data file that may have compressed chunks.
pub(crate) const COMPRESSED_DATA: u64 = 1 << 0;

/// The required bits of data files that this version knows, by position and name.
pub(crate) const OF_DATA_FILES: &[(u32, &str)] = &[(0, COMPRESSED_CHUNKS)];
/// The required bits of indexes that this version knows.
pub(crate) const OF_INDEXES: &[(u32, &str)] = &[(0, "index_outline"), (1, COMPRESSED_CHUNKS)];

/// Refuses required bits that this version does not know.
pub(crate) fn check_required(bits: u64, known: &[(u32, &str)]) -> Result<(), String> {
    let unknown: Vec<String> = (0..64)
        .filter(|bit| bits >> bit & 1 == 1 && !known.iter().any(|(known, _)| known == bit))
        .map(|bit| format!("required feature bit {bit}"))
        .collect();
    if unknown.is_empty() {
        return Ok(());
    }
    let known: Vec<&str> = known.iter().map(|&(_, name)| name).collect();
    Err(format!(
        "it has {}, unknown to this version of stepwell (which knows: {}); read it with a newer one",
        unknown.join(", "),
        if known.is_empty() { "none".to_owned() } else { known.join(", ") }
    ))
}
