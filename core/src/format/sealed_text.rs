//! Text whose last line is its own checksum: `{"crc32c": "xxxxxxxx"}`, the CRC-32C of all bytes
//! before that line. Manifests and traces are such text.

use serde::de::DeserializeOwned;

use super::checksum::crc32c;

/// `{"crc32c": "xxxxxxxx"}` and a line feed.
const LAST_LINE_BYTES: usize = 23;

/// Appends a line feed and the line with the checksum.
pub fn seal(text: &mut Vec<u8>) {
    text.push(b'\n');
    let crc = crc32c(text);
    text.extend_from_slice(&last_line(crc));
}

fn last_line(crc: u32) -> [u8; LAST_LINE_BYTES] {
    let mut line = [0; LAST_LINE_BYTES];
    for (byte, text) in line.iter_mut().zip(format!("{{\"crc32c\": \"{crc:08x}\"}}\n").bytes()) {
        *byte = text;
    }
    line
}

/// Reads JSON whose last line is its checksum. The error is a sentence for the user.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    serde_json::from_slice(unseal(bytes)?).map_err(|error| error.to_string())
}

/// Returns the bytes before the last line, where the last line is exactly what belongs there. The
/// error is a sentence for the user.
pub fn unseal(bytes: &[u8]) -> Result<&[u8], String> {
    let (body, line) = bytes
        .len()
        .checked_sub(LAST_LINE_BYTES)
        .and_then(|end| bytes.split_at_checked(end))
        .ok_or("it is too short to hold the line with its checksum")?;
    if !body.ends_with(b"\n") || !line.starts_with(b"{\"crc32c\": \"") {
        return Err("its last line is not its checksum; it was cut or edited".to_owned());
    }
    let crc = crc32c(body);
    if line != last_line(crc) {
        return Err(format!(
            "its checksum does not hold: its bytes give {crc:08x}, its last line says {}",
            String::from_utf8_lossy(line).trim_end()
        ));
    }
    Ok(body)
}
