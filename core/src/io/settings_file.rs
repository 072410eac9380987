//! Small text files that belong to the machine, such as certificates and tokens.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

/// The longest file.
const MOST_BYTES: u64 = 4 << 20;

/// Reads such a file.
pub(crate) fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let read = File::open(path)?.take(MOST_BYTES + 1).read_to_string(&mut text)?;
    if read as u64 > MOST_BYTES {
        return Err(io::Error::other(format!("it is longer than {MOST_BYTES} bytes")));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_an_end_is_refused() {
        assert!(read(Path::new("/dev/zero")).unwrap_err().to_string().contains("longer"));
        assert!(!read(Path::new("/proc/self/status")).unwrap().is_empty());
        assert_eq!(read(Path::new("/none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
