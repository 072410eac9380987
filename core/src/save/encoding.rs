//! What the pipeline needs of the format: headers, objects, checksums, footers.

use std::path::Path;

use crate::Result;
use crate::format::index::Index;
use crate::value::Value;

pub(super) fn header(block_bytes: u64, file_id: u128, rank: u32) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    bytes[..8].copy_from_slice(&block_bytes.to_le_bytes());
    bytes[8..24].copy_from_slice(&file_id.to_le_bytes());
    bytes[24..28].copy_from_slice(&rank.to_le_bytes());
    bytes
}

pub(super) fn object(value: &Value) -> Result<Vec<u8>> {
    Ok(format!("{value:?}").into_bytes())
}

pub(super) fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

pub(super) struct Footer {
    pub bytes: Vec<u8>,
    pub trailer_crc: u32,
}

pub(super) fn footer(
    file_id: u128,
    footer_offset: u64,
    _index: &Index,
    block_crcs: &[u32],
) -> Result<Footer> {
    let mut bytes = Vec::new();
    for crc in block_crcs {
        bytes.extend_from_slice(&crc.to_le_bytes());
    }
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    bytes.extend_from_slice(&file_id.to_le_bytes());
    bytes.extend_from_slice(&footer_offset.to_le_bytes());
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    let trailer_crc = crc32c(&bytes[bytes.len() - 4096..]);
    let _ = Path::new("");
    Ok(Footer { bytes, trailer_crc })
}
