//! Compressed streams in files of other libraries, decoded piece by piece.
//!
//! Memory is bounded by the method's window, whatever a stream says of its length.

use std::fmt;

use miniz_oxide::inflate::stream::{InflateState, inflate};
use miniz_oxide::{DataFormat, MZError, MZFlush, MZStatus};
use zstd_safe::{DCtx, DParameter, InBuffer, OutBuffer};

/// Logarithm of the largest window of a zstd stream: 8 MiB, which every decoder supports.
const ZSTD_WINDOW_LOG: u32 = 23;

/// A method of compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compression {
    /// Deflate without a frame, as in zip archives.
    Deflate,
    /// Frames of zstd, one after the other.
    Zstd,
    /// UTF-8 text. Each of its characters is the byte of that number (Latin-1).
    Latin1,
    /// None: the bytes as they are.
    Stored,
}

impl Compression {
    /// The most bytes that so many compressed ones can become. A writer that claims more lies.
    pub fn most_decoded(self, compressed: u64) -> u64 {
        match self {
            // A match of 258 bytes takes two bits.
            Self::Deflate => compressed.saturating_mul(1032),
            // A block of 128 KiB takes four bytes.
            Self::Zstd => compressed.saturating_mul(32 << 10),
            Self::Latin1 | Self::Stored => compressed,
        }
    }

    /// True if streams have a mark at their end. Others may go on behind the bytes that are known
    /// to be in them.
    pub fn has_end(self) -> bool {
        self == Self::Deflate
    }
}

/// Decodes one stream.
pub struct Decompressor(DecoderState);

enum DecoderState {
    Deflate(Box<InflateState>),
    /// `None` without memory for it.
    Zstd(Option<DCtx<'static>>),
    /// The first byte of a character whose second one was not decoded.
    Latin1(Option<u8>),
    Stored,
}

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
        Self(match compression {
            Compression::Deflate => DecoderState::Deflate(InflateState::new_boxed(DataFormat::Raw)),
            Compression::Zstd => {
                let bounded = |mut context: DCtx<'static>| {
                    let limit = DParameter::WindowLogMax(ZSTD_WINDOW_LOG);
                    context.set_parameter(limit).is_ok().then_some(context)
                };
                DecoderState::Zstd(DCtx::try_create().and_then(bounded))
            }
            Compression::Latin1 => DecoderState::Latin1(None),
            Compression::Stored => DecoderState::Stored,
        })
    }

    /// Bytes of memory that it uses.
    pub fn memory_bytes(&self) -> usize {
        match &self.0 {
            DecoderState::Deflate(state) => size_of_val(&**state),
            DecoderState::Zstd(context) => context.as_ref().map_or(0, DCtx::sizeof),
            DecoderState::Latin1(_) | DecoderState::Stored => 0,
        }
    }

    /// Decodes until `input` is used or `output` is full. A step that uses and writes nothing needs
    /// more of one of them. Fails with a description of the damage.
    pub fn step(&mut self, input: &[u8], output: &mut [u8]) -> Result<DecodedPiece, &'static str> {
        match &mut self.0 {
            DecoderState::Deflate(state) => {
                let result = inflate(state, input, output, MZFlush::None);
                let ended = match result.status {
                    Ok(MZStatus::StreamEnd) => true,
                    Ok(_) | Err(MZError::Buf) => false,
                    Err(_) => return Err("it is no valid deflate stream"),
                };
                Ok(DecodedPiece { used: result.bytes_consumed, written: result.bytes_written, ended })
            }
            DecoderState::Zstd(context) => {
                let context = context.as_mut().ok_or("no memory for a decoder of zstd")?;
                let (mut from, mut to) = (InBuffer::around(input), OutBuffer::around(output));
                context.decompress_stream(&mut to, &mut from).map_err(zstd_safe::get_error_name)?;
                Ok(DecodedPiece { used: from.pos(), written: to.pos(), ended: false })
            }
            DecoderState::Stored => {
                let length = input.len().min(output.len());
                for (out, byte) in output.iter_mut().zip(input) {
                    *out = *byte;
                }
                Ok(DecodedPiece { used: length, written: length, ended: false })
            }
            DecoderState::Latin1(lead) => {
                let (mut used, mut written) = (0, 0);
                while let (Some(&byte), Some(out)) = (input.get(used), output.get_mut(written)) {
                    match (lead.take(), byte) {
                        (None, 0..0x80) => *out = byte,
                        (None, 0xc2 | 0xc3) => *lead = Some(byte),
                        (Some(lead), 0x80..0xc0) => *out = lead << 6 | byte & 0x3f,
                        _ => return Err("it is no text of bytes"),
                    }
                    used += 1;
                    written += usize::from(lead.is_none());
                }
                Ok(DecodedPiece { used, written, ended: false })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use miniz_oxide::deflate::compress_to_vec;
    use proptest::prelude::*;

    use super::*;

    const ALL: [Compression; 4] =
        [Compression::Deflate, Compression::Zstd, Compression::Latin1, Compression::Stored];

    fn encoded(compression: Compression, bytes: &[u8]) -> Vec<u8> {
        match compression {
            Compression::Deflate => compress_to_vec(bytes, 6),
            Compression::Zstd => {
                let mut frame = vec![0; zstd_safe::compress_bound(bytes.len())];
                let length = zstd_safe::compress(frame.as_mut_slice(), bytes, 3).unwrap();
                frame[..length].to_vec()
            }
            Compression::Latin1 => {
                bytes.iter().map(|&byte| char::from(byte)).collect::<String>().into_bytes()
            }
            Compression::Stored => bytes.to_vec(),
        }
    }

    /// Decodes in pieces of that size.
    fn decoded(compression: Compression, stream: &[u8], piece: usize) -> Result<Vec<u8>, &'static str> {
        let mut decoder = Decompressor::new(compression);
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
                return if compression.has_end() { Err("no end") } else { Ok(out) };
            }
        }
    }

    #[test]
    fn no_stream_decodes_to_more_than_is_claimed() {
        for compression in ALL {
            let zeros = encoded(compression, &vec![0; 4 << 20]);
            assert!(compression.most_decoded(zeros.len() as u64) >= 4 << 20);
            let tight = compression.most_decoded(zeros.len() as u64) / (4 << 20);
            assert!(tight < 2, "{compression:?} {tight}");
            assert!(compression.most_decoded(u64::MAX) == u64::MAX);
        }
    }

    #[test]
    fn a_large_window_of_zstd_is_refused() {
        // A frame with a window of 16 MiB, and one empty block.
        let frame = |window: u8| [&0xfd2f_b528_u32.to_le_bytes()[..], &[0, window << 3, 1, 0, 0]].concat();
        assert_eq!(decoded(Compression::Zstd, &frame(ZSTD_WINDOW_LOG as u8 - 10), 100), Ok(Vec::new()));
        let refused = decoded(Compression::Zstd, &frame(ZSTD_WINDOW_LOG as u8 - 9), 100).unwrap_err();
        assert!(refused.contains("too much memory"), "{refused}");
    }

    #[test]
    fn frames_of_zstd_follow_each_other() {
        let two = [encoded(Compression::Zstd, b"one"), encoded(Compression::Zstd, b"two")].concat();
        assert_eq!(decoded(Compression::Zstd, &two, 5).unwrap(), b"onetwo");
    }

    #[test]
    fn text_with_other_characters_is_damage() {
        for text in ["\u{100}".as_bytes(), b"\xc2a", b"\x80", b"\xc0\x80", b"\xff"] {
            assert!(decoded(Compression::Latin1, text, 1).is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn streams_decode_in_any_pieces(bytes in proptest::collection::vec(120_u8..140, 0..5000), piece in 1_usize..700, cut: prop::sample::Index) {
            for compression in ALL {
                let stream = encoded(compression, &bytes);
                prop_assert_eq!(decoded(compression, &stream, piece), Ok(bytes.clone()));
                if !bytes.is_empty() {
                    let cut = decoded(compression, &stream[..cut.index(stream.len())], piece);
                    prop_assert!(cut.is_err() || !compression.has_end() && cut != Ok(bytes.clone()));
                }
            }
        }

        #[test]
        fn any_stream_ends_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), piece in 1_usize..90) {
            for compression in ALL {
                let _ = decoded(compression, &bytes, piece);
            }
        }
    }
}
