//! CRC-32C (Castagnoli), the one checksum of the format. It finds accidents; it is no security.
//!
//! A CRC over bytes that *end* in their own CRC is a constant, for any bytes. Therefore a digest
//! that is recorded elsewhere is the stored CRC itself (trailers), or it covers bytes whose own CRC
//! comes before the bytes that it covers (indexes).

/// CRC-32C of `bytes`, on the fastest path that the processor has.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// The CRC-32 of zip archives, of bytes that come in pieces.
#[derive(Debug)]
pub struct ZipCrc(crc_fast::Digest);

impl Default for ZipCrc {
    fn default() -> Self {
        Self(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32IsoHdlc))
    }
}

impl ZipCrc {
    /// Adds a piece.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the CRC of the pieces so far.
    pub fn value(&self) -> u32 {
        self.0.finalize() as u32
    }
}

/// The CRC-32C of bytes that are known in two parts: those of both, and how long the second is.
pub fn crc32c_of_both(first: u32, second: u32, second_length: u64) -> u32 {
    let both = crc_fast::checksum_combine(
        crc_fast::CrcAlgorithm::Crc32Iscsi,
        u64::from(first),
        u64::from(second),
        second_length,
    );
    both as u32
}

/// CRC-32 of `bytes` as zip archives have it.
pub fn crc32(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iso_hdlc(bytes)
}

/// The [`crc32`] of bytes that are known in two parts: those of both, and how long the second is.
pub fn crc32_of_both(first: u32, second: u32, second_length: u64) -> u32 {
    let both = crc_fast::checksum_combine(
        crc_fast::CrcAlgorithm::Crc32IsoHdlc,
        u64::from(first),
        u64::from(second),
        second_length,
    );
    both as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_of_both_parts_is_that_of_the_whole() {
        let bytes: Vec<u8> = (0..1000_u32).map(|n| (n * 31 % 251) as u8).collect();
        for cut in [0, 1, 7, 500, 999, 1000] {
            let (first, second) = bytes.split_at(cut);
            assert_eq!(crc32c_of_both(crc32c(first), crc32c(second), second.len() as u64), crc32c(&bytes));
            assert_eq!(crc32_of_both(crc32(first), crc32(second), second.len() as u64), crc32(&bytes));
        }
    }

    #[test]
    fn it_is_the_castagnoli_polynomial_of_rfc_3720() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        assert_eq!(crc32c(&[0xFF; 32]), 0x62A8_AB43);
        assert_eq!(crc32c(b""), 0);
    }

    #[test]
    fn the_checksum_of_zip_archives_is_that_of_its_specification() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
        assert_eq!(crc32(b""), 0);
    }

    #[test]
    fn the_checksum_of_zip_archives_is_that_of_iso_hdlc() {
        let mut crc = ZipCrc::default();
        crc.update(b"1234");
        crc.update(b"56789");
        assert_eq!(crc.value(), 0xCBF4_3926);
    }

    #[test]
    fn bytes_that_end_in_their_own_checksum_all_look_the_same() {
        let sealed = |text: &[u8]| [text, &crc32c(text).to_le_bytes()].concat();
        assert_eq!(crc32c(&sealed(b"one")), crc32c(&sealed(b"another")));
    }
}
