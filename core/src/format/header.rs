//! The first 4096 bytes of a data file. Magic, CRC and format version have the same offsets in
//! every version, so that a reader can always report the version. The CRC covers all 4096 bytes
//! after itself.

use std::path::Path;

use super::bytes::{Put, open_front, seal_front};
use super::{FORMAT_VERSION, block, features};
use crate::error::{Error, Result};

/// The size of a header in bytes. The chunks follow it.
pub const HEADER_BYTES: u64 = 4096;
/// The magic bytes, made like PNG's: a non-text byte, a name, both line ends, and an end-of-file.
/// So a transfer in text mode is detected.
const MAGIC: [u8; 8] = *b"\x89SWD\r\n\x1a\n";

/// The header of a data file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// [`FORMAT_VERSION`].
    pub format_version: u32,
    /// Feature bits that a reader must know.
    pub required_features: u64,
    /// Feature bits that a reader may ignore.
    pub optional_features: u64,
    /// The size of a block in bytes.
    pub block_bytes: u64,
    /// The file's random id, which trailer, index and manifest repeat.
    pub file_id: u128,
    /// The rank that wrote it.
    pub rank: u32,
}

impl Header {
    /// Returns the header of a file of this version, without features.
    pub fn new(file_id: u128, block_bytes: u64, rank: u32) -> Self {
        Self {
            format_version: FORMAT_VERSION,
            required_features: 0,
            optional_features: 0,
            block_bytes,
            file_id,
            rank,
        }
    }

    /// Returns the header of a file that may have compressed chunks.
    #[must_use]
    pub fn compressed(self) -> Self {
        Self { required_features: self.required_features | features::COMPRESSED_DATA, ..self }
    }

    /// Encodes its 4096 bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES as usize);
        bytes.put(&MAGIC);
        bytes.put_u32(0); // placeholder of the CRC
        bytes.put_u32(self.format_version);
        bytes.put_u64(self.required_features);
        bytes.put_u64(self.optional_features);
        bytes.put_u64(self.block_bytes);
        bytes.put_u32(self.rank);
        bytes.put_u32(0);
        bytes.put_u128(self.file_id);
        bytes.resize(HEADER_BYTES as usize, 0);
        seal_front(&mut bytes);
        bytes
    }

    /// Decodes and checks the first 4096 bytes of a data file. `file` is for messages.
    pub fn decode(bytes: &[u8], file: &Path) -> Result<Self> {
        if bytes.len() as u64 != HEADER_BYTES {
            return Err(Error::corrupt(
                file,
                format!("its header has {} bytes, not {HEADER_BYTES}", bytes.len()),
            ));
        }
        let mut fields = open_front(bytes, MAGIC, "the header of a data file", file)?;
        let format = |what: String| Error::Format { file: file.to_owned(), what };
        let mut read = || {
            let format_version = fields.u32()?;
            let required_features = fields.u64()?;
            let optional_features = fields.u64()?;
            let block_bytes = fields.u64()?;
            let rank = fields.u32()?;
            fields.u32()?;
            let file_id = fields.u128()?;
            Some(Self { format_version, required_features, optional_features, block_bytes, file_id, rank })
        };
        let header = read().ok_or_else(|| Error::corrupt(file, "its header is too short"))?;
        if header.format_version != FORMAT_VERSION {
            return Err(format(format!(
                "it has format version {}; this version of stepwell reads version {FORMAT_VERSION}",
                header.format_version
            )));
        }
        features::check_required(header.required_features, features::OF_DATA_FILES).map_err(format)?;
        block::check_size(header.block_bytes).map_err(format)?;
        Ok(header)
    }
}
