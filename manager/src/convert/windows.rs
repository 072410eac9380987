//! Windows: aligned ranges of the output files, in which a conversion reads and writes.

use std::ops::Range;

use super::file_plan::PlannedFile;

/// The alignment of windows in their files, and of writes.
pub(super) const WINDOW_ALIGNMENT: u64 = 4096;

/// A range of an output file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OutputWindow {
    /// Its number among the windows of all files.
    pub number: u64,
    /// The number of its file.
    pub file: usize,
    /// Its offset in the file.
    pub offset: u64,
    /// Its length in bytes; the last one of a file may be shorter.
    pub len: usize,
}

/// The part of a piece that is in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WindowPart {
    /// The number of the piece in its file.
    pub piece: usize,
    /// Its first byte in the piece.
    pub from: u64,
    /// Its first byte in the window.
    pub at: usize,
    /// Its length in bytes.
    pub len: usize,
}

/// Returns the windows of all files, in order.
pub(super) fn windows(files: &[PlannedFile], window_bytes: u64) -> impl Iterator<Item = OutputWindow> + '_ {
    let of_files = files.iter().enumerate().flat_map(move |(file, planned)| {
        (0..planned.length.div_ceil(window_bytes)).map(move |number| {
            let offset = number * window_bytes;
            (file, offset, window_bytes.min(planned.length - offset) as usize)
        })
    });
    (0..).zip(of_files).map(|(number, (file, offset, len))| OutputWindow { number, file, offset, len })
}

/// Returns the windows of all files whose numbers are in a range, in order.
pub(super) fn windows_in(
    files: &[PlannedFile],
    window_bytes: u64,
    range: Range<u64>,
) -> impl Iterator<Item = OutputWindow> + '_ {
    let after = windows(files, window_bytes).skip_while(move |window| window.number < range.start);
    after.take_while(move |window| window.number < range.end)
}

/// Returns the parts of a window, in order. Empty pieces have none.
pub(super) fn parts<'a>(
    file: &'a PlannedFile,
    window: &OutputWindow,
) -> impl Iterator<Item = WindowPart> + 'a {
    let (start, end) = (window.offset, window.offset + window.len as u64);
    let first = file.pieces.partition_point(|piece| piece.offset + piece.length <= start);
    let pieces = file.pieces.iter().enumerate().skip(first);
    pieces.take_while(move |(_, piece)| piece.offset < end).filter_map(move |(number, piece)| {
        let (from, to) = (piece.offset.max(start), (piece.offset + piece.length).min(end));
        (from < to).then(|| WindowPart {
            piece: number,
            from: from - piece.offset,
            at: (from - start) as usize,
            len: (to - from) as usize,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::super::file_plan::{PieceContent, PlannedPiece};
    use super::*;

    fn file(length: u64, pieces: &[(u64, usize)]) -> PlannedFile {
        let piece = |&(offset, length): &(u64, usize)| PlannedPiece {
            offset,
            length: length as u64,
            content: PieceContent::Bytes(vec![1; length]),
        };
        PlannedFile { name: "f".to_owned(), length, pieces: pieces.iter().map(piece).collect() }
    }

    #[test]
    fn the_parts_of_all_windows_are_all_pieces() {
        let files = [file(1000, &[(0, 10), (10, 0), (10, 300), (320, 1), (330, 600), (1000, 0)])];
        let pieces = &files[0].pieces;
        for window_bytes in [1, 7, 64, 320, 1000, 5000] {
            let (mut found, mut end) = (vec![0; pieces.len()], 0);
            for (number, window) in windows(&files, window_bytes).enumerate() {
                assert_eq!((window.number, window.offset), (number as u64, end));
                end += window.len as u64;
                let mut at = 0;
                for part in parts(&files[0], &window) {
                    assert_eq!(part.from, found[part.piece], "a piece in order");
                    assert_eq!(pieces[part.piece].offset + part.from, window.offset + part.at as u64);
                    assert!(part.at >= at && part.at + part.len <= window.len);
                    at = part.at + part.len;
                    found[part.piece] += part.len as u64;
                }
            }
            assert_eq!(end, 1000);
            let all = 0..end.div_ceil(window_bytes);
            for start in all.clone() {
                let range = start..(start + 3).min(all.end);
                let numbers = windows_in(&files, window_bytes, range.clone()).map(|window| window.number);
                assert!(numbers.eq(range));
            }
            let lengths: Vec<u64> = pieces.iter().map(|piece| piece.length).collect();
            assert_eq!(found, lengths, "windows of {window_bytes}");
        }
    }
}
