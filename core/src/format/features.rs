//! Feature bits of data files and indexes. A bit in `required` that a reader does not know makes it refuse the file; a bit in `optional`
//! may be ignored. (Manifests, which are read first, list required features by name.)

/// Names of the required bits that this version knows, by their position.
const KNOWN_REQUIRED: &[(u32, &str)] = &[];

/// Refuses required bits that this version does not know.
pub(crate) fn check_required(bits: u64) -> Result<(), String> {
    let unknown: Vec<String> = (0..64)
        .filter(|bit| bits >> bit & 1 == 1 && !KNOWN_REQUIRED.iter().any(|(known, _)| known == bit))
        .map(|bit| format!("required feature bit {bit}"))
        .collect();
    if unknown.is_empty() {
        return Ok(());
    }
    let known: Vec<&str> = KNOWN_REQUIRED.iter().map(|&(_, name)| name).collect();
    Err(format!(
        "it has {}, unknown to this version of stepwell (which knows: {}); read it with a newer one",
        unknown.join(", "),
        if known.is_empty() { "none".to_owned() } else { known.join(", ") }
    ))
}
