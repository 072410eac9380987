//! Feature bits of data files and indexes. A bit in `required` that a reader does not know makes it
//! refuse the file; a bit in `optional` may be ignored. (Manifests, which are read first, list
//! required features by name.)

/// Of an index: it has an outline before its pages (see [`super::index_v1`]).
pub(crate) const OUTLINE: u64 = 1 << 0;

/// The required bits that this version knows, by position and name: of data files,
pub(crate) const OF_DATA_FILES: &[(u32, &str)] = &[];
/// and of indexes.
pub(crate) const OF_INDEXES: &[(u32, &str)] = &[(0, "index_outline")];

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
