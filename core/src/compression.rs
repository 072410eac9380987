//! Compressed streams in files of other libraries, decoded piece by piece.
//!
//! Memory is bounded by the method's window, whatever a stream says of its length.

use std::fmt;

use miniz_oxide::inflate::stream::{InflateState, inflate};
use miniz_oxide::{DataFormat, MZError, MZFlush, MZStatus};

/// A method of compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compression {
    /// Deflate without a frame, as in zip archives.
    Deflate,
}

impl Compression {
    /// The most bytes that so many compressed ones can become. A writer that claims more lies.
    pub fn most_decoded(self, compressed: u64) -> u64 {
        match self {
            // A match of 258 bytes takes two bits.
            Self::Deflate => compressed.saturating_mul(1032),
        }
    }
}

/// Decodes one stream.
pub struct Decompressor(Box<InflateState>);

impl fmt::Debug for Decompressor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decompressor").finish_non_exhaustive()
    }
}

/// The result of a step of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodedPiece {
    /// Compressed bytes that were used.
    pub used: usize,
    /// Decoded bytes that were written.
    pub written: usize,
    /// True at the end of the stream.
    pub ended: bool,
}

impl Decompressor {
    /// The decoder of a stream, at its start.
    pub fn new(compression: Compression) -> Self {
        match compression {
            Compression::Deflate => Self(InflateState::new_boxed(DataFormat::Raw)),
        }
    }

    /// Decodes until `input` is used or `output` is full. A step that uses and writes nothing needs
    /// more of one of them. Fails with a description of the damage.
    pub fn step(&mut self, input: &[u8], output: &mut [u8]) -> Result<DecodedPiece, &'static str> {
        let result = inflate(&mut self.0, input, output, MZFlush::None);
        let ended = match result.status {
            Ok(MZStatus::StreamEnd) => true,
            Ok(_) | Err(MZError::Buf) => false,
            Err(_) => return Err("it is no valid deflate stream"),
        };
        Ok(DecodedPiece { used: result.bytes_consumed, written: result.bytes_written, ended })
    }
}

#[cfg(test)]
mod tests {
    use miniz_oxide::deflate::compress_to_vec;
    use proptest::prelude::*;

    use super::*;

    /// Decodes in pieces of that size.
    fn decoded(stream: &[u8], piece: usize) -> Result<Vec<u8>, &'static str> {
        let mut decoder = Decompressor::new(Compression::Deflate);
        let (mut out, mut at) = (Vec::new(), 0);
        loop {
            let input = &stream[at..stream.len().min(at + piece)];
            let mut output = vec![0; piece];
            let step = decoder.step(input, &mut output)?;
            at += step.used;
            out.extend(&output[..step.written]);
            if step.ended {
                return if at == stream.len() { Ok(out) } else { Err("more follows") };
            }
            if (step.used, step.written) == (0, 0) && at == stream.len() {
                return Err("no end");
            }
        }
    }

    #[test]
    fn no_stream_decodes_to_more_than_is_claimed() {
        let zeros = compress_to_vec(&vec![0; 4 << 20], 9);
        assert!(Compression::Deflate.most_decoded(zeros.len() as u64) >= 4 << 20);
        assert!(zeros.len() as u64 * 1000 < 4 << 20);
        assert_eq!(Compression::Deflate.most_decoded(u64::MAX), u64::MAX);
    }

    proptest! {
        #[test]
        fn streams_decode_in_any_pieces(bytes in proptest::collection::vec(0_u8..9, 0..5000), piece in 1_usize..700, cut: prop::sample::Index) {
            let stream = compress_to_vec(&bytes, 6);
            prop_assert_eq!(decoded(&stream, piece), Ok(bytes.clone()));
            prop_assert!(decoded(&stream[..cut.index(stream.len())], piece).is_err());
        }

        #[test]
        fn any_stream_ends_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), piece in 1_usize..90) {
            let _ = decoded(&bytes, piece);
        }
    }
}
