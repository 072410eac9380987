//! Paths in files: relative names of plain components below a directory that the reader chose.

use crate::limits::{MAX_PATH_BYTES, MAX_PATH_COMPONENT_BYTES};

/// Checks that `path` stays below its directory: it has no root, no `.` or `..`, no empty
/// component, and no character that a terminal or another system would read differently. Returns
/// the fault.
pub(crate) fn check_relative(path: &str) -> Result<(), String> {
    if path.len() as u64 > MAX_PATH_BYTES {
        return Err(format!("a path of {} bytes is longer than the limit of {MAX_PATH_BYTES}", path.len()));
    }
    for component in path.split('/') {
        let what = match component {
            "" => "has an empty component",
            "." | ".." => "has a component `.` or `..`",
            _ if component.len() as u64 > MAX_PATH_COMPONENT_BYTES => {
                "has a component of more than 255 bytes"
            }
            _ if component.contains('\\') => "holds a backslash",
            _ if component.chars().any(char::is_control) => "holds a control character",
            _ => continue,
        };
        return Err(format!("the path `{}` {what}", path.escape_debug()));
    }
    Ok(())
}

/// Checks `path` as [`check_relative`], and that no component is hidden: a step's own files
/// (`.lease`, temporaries) begin with a dot.
pub(crate) fn check_visible(path: &str) -> Result<(), String> {
    check_relative(path)?;
    if path.split('/').any(|component| component.starts_with('.')) {
        return Err(format!("the path `{path}` has a component that begins with a dot"));
    }
    Ok(())
}

/// True if `path` is inside `dir`. Both were checked before.
pub(crate) fn is_below(path: &str, dir: &str) -> bool {
    path.strip_prefix(dir).is_some_and(|rest| rest.len() > 1 && rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_below_the_directory_pass() {
        for good in ["a", "i0/00000.data", "i0/g000/00017.data", "model-00001-of-2.safetensors", "…"] {
            assert_eq!(check_relative(good), Ok(()), "{good}");
        }
        for bad in ["", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a\\b", "a\0b", "a\nb"] {
            assert!(check_relative(bad).is_err(), "{bad}");
        }
        assert!(check_relative(&"x".repeat(256)).is_err());
        assert!(check_relative(&"x/".repeat(3000)).is_err());
        assert!(check_visible(".lease").is_err() && check_visible("i0/.hidden").is_err());
    }

    #[test]
    fn a_directory_is_no_prefix_of_its_neighbour() {
        assert!(is_below("i1/x", "i1"));
        assert!(!is_below("i10/x", "i1") && !is_below("i1", "i1") && !is_below("i1/", "i1"));
    }
}
