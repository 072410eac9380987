//! CRC-32 sums of the pieces of one output file, computed window by window.

use stepwell_core::format::checksum::{crc32, crc32_of_both};
use stepwell_core::sys::Buffer;

use super::file_plan::{PieceContent, PlannedFile};
use super::windows::{OutputWindow, parts};

/// The sum of the bytes so far of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PieceSum {
    pub file: u32,
    pub piece: u32,
    pub crc: u32,
}

/// See the module documentation.
#[derive(Default)]
pub(super) struct PieceSums {
    file: usize,
    /// By piece. Empty for a file without checksums.
    crcs: Vec<u32>,
}

impl PieceSums {
    /// The sums that a conversion had before the window from which it is resumed.
    pub(super) fn resumed(files: &[PlannedFile], window: &OutputWindow, sums: &[PieceSum]) -> Self {
        let mut this = Self::default();
        if window.offset > 0 {
            this.start(files, window.file);
            for sum in sums.iter().filter(|sum| sum.file as usize == window.file) {
                if let Some(crc) = this.crcs.get_mut(sum.piece as usize) {
                    *crc = sum.crc;
                }
            }
        }
        this
    }

    fn start(&mut self, files: &[PlannedFile], file: usize) {
        self.file = file;
        let planned = files.get(file).filter(|planned| planned.has_checksums());
        self.crcs = vec![0; planned.map_or(0, |planned| planned.pieces.len())];
    }

    /// Adds a window, which must follow the last one. Writes the checksums that it holds, and
    /// returns the sums that have changed.
    pub(super) fn add(
        &mut self,
        files: &[PlannedFile],
        window: &OutputWindow,
        buffer: &mut Buffer,
    ) -> Vec<PieceSum> {
        if window.offset == 0 {
            self.start(files, window.file);
        }
        let mut changed = Vec::new();
        let Some(file) = files.get(window.file).filter(|_| !self.crcs.is_empty()) else { return changed };
        for part in parts(file, window) {
            let Some(bytes) = buffer.get_mut(part.at..part.at + part.len) else { continue };
            if let Some(PieceContent::Crc32 { first, last }) =
                file.pieces.get(part.piece).map(|piece| &piece.content)
            {
                let sum = self.of_pieces(file, *first as usize, *last as usize).to_le_bytes();
                let from = part.from as usize;
                if let Some(sum) = sum.get(from..from + part.len) {
                    bytes.copy_from_slice(sum);
                }
            }
            let Some(crc) = self.crcs.get_mut(part.piece) else { continue };
            *crc = crc32_of_both(*crc, crc32(bytes), part.len as u64);
            changed.push(PieceSum { file: window.file as u32, piece: part.piece as u32, crc: *crc });
        }
        changed
    }

    fn of_pieces(&self, file: &PlannedFile, first: usize, last: usize) -> u32 {
        let both = self.crcs.iter().zip(&file.pieces).take(last + 1).skip(first);
        both.fold(0, |sum, (&crc, piece)| crc32_of_both(sum, crc, piece.length))
    }
}
