//! The plan of a conversion: output files, each a list of pieces at increasing offsets.
//!
//! The writer of a format makes it. A piece is literal bytes, a whole tensor in row-major order, or
//! a checksum of earlier pieces. Bytes between pieces are zero.

use stepwell_core::dtype::Dtype;
use stepwell_core::format::index::{LeafRecord, TensorRecord};
use stepwell_core::io::is_component;
use stepwell_core::provider::can_cast;

use crate::error::{Error, Result};
use crate::reader::Reader;

/// See the module documentation.
#[derive(Debug)]
pub struct ConversionPlan {
    /// The output files.
    pub files: Vec<PlannedFile>,
    /// Names this plan and its source. A conversion is resumed only by a plan with the same digest.
    pub digest: [u8; 32],
    /// Names the export that the conversion is for. An export does not replace the conversion of
    /// another owner. [`NO_OWNER`] is not checked.
    pub owner: [u8; 32],
}

/// The owner of a conversion that is for no export.
pub const NO_OWNER: [u8; 32] = [0; 32];

/// An output file.
#[derive(Debug)]
pub struct PlannedFile {
    /// Its name: one component.
    pub name: String,
    /// Its length in bytes, which is not 0.
    pub length: u64,
    /// Its content.
    pub pieces: Vec<PlannedPiece>,
}

/// A part of an output file.
#[derive(Debug)]
pub struct PlannedPiece {
    /// Offset in the file. That of a tensor is a multiple of the size of its elements.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Its bytes.
    pub content: PieceContent,
}

/// The bytes of a piece.
#[derive(Debug)]
pub enum PieceContent {
    /// These.
    Bytes(Vec<u8>),
    /// A tensor of the source, row-major and little-endian.
    Tensor {
        /// The leaf.
        leaf: u32,
        /// The dtype in the output.
        dtype: Dtype,
    },
    /// The CRC-32 of the pieces `first..=last`, which come before this one, in four bytes.
    Crc32 {
        /// The first piece.
        first: u32,
        /// The last piece.
        last: u32,
    },
}

impl ConversionPlan {
    /// Checks the plan against its source. A plan comes from this package, so a wrong one is an
    /// internal error.
    pub(super) fn check(&self, source: &Reader) -> Result<()> {
        let mut names = std::collections::HashSet::new();
        for file in &self.files {
            if !is_component(&file.name) || file.length == 0 || !names.insert(&file.name) {
                return Err(wrong(file, "a file with a name of its own and some bytes"));
            }
            let mut end = 0;
            for (number, piece) in file.pieces.iter().enumerate() {
                if piece.offset < end {
                    return Err(wrong(file, "pieces at increasing offsets"));
                }
                end = piece.offset.saturating_add(piece.length);
                if !piece.fits(number, source) {
                    return Err(wrong(file, &format!("a piece {number} that fits its place")));
                }
            }
            if end > file.length {
                return Err(wrong(file, "pieces that end with their file"));
            }
        }
        Ok(())
    }
}

impl PlannedFile {
    /// True if it has checksums of pieces.
    pub(super) fn has_checksums(&self) -> bool {
        self.pieces.iter().any(|piece| matches!(piece.content, PieceContent::Crc32 { .. }))
    }
}

impl PlannedPiece {
    fn fits(&self, number: usize, source: &Reader) -> bool {
        match &self.content {
            PieceContent::Bytes(bytes) => bytes.len() as u64 == self.length,
            PieceContent::Crc32 { first, last } => {
                first <= last && (*last as usize) < number && self.length == 4
            }
            PieceContent::Tensor { leaf, dtype } => {
                let Ok(tensor) = tensor_of(source, *leaf) else { return false };
                let size = dtype.size() as u64;
                let bytes = tensor.shape.iter().try_fold(size, |bytes, &n| bytes.checked_mul(n));
                let castable = tensor.dtype == *dtype || can_cast(tensor.dtype, *dtype);
                bytes == Some(self.length) && self.offset.is_multiple_of(size) && castable
            }
        }
    }
}

/// Returns the record of a tensor leaf. Ties are followed.
pub(super) fn tensor_of(source: &Reader, leaf: u32) -> Result<&TensorRecord> {
    match source.outline().resolve(leaf) {
        Some((_, LeafRecord::Tensor(tensor))) => Ok(tensor),
        _ => Err(Error::internal("a leaf with a tensor", format!("leaf {leaf}"))),
    }
}

fn wrong(file: &PlannedFile, expected: &str) -> Error {
    Error::internal(expected, format!("the plan of {:?}, {} bytes", file.name, file.length))
}
