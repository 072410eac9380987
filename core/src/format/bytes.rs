//! Fixed-width little-endian fields, written and read in order.

/// Unread bytes. Each field is read from their front. `None` at their end.
pub(crate) struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    pub(crate) fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*taken)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn u128(&mut self) -> Option<u128> {
        self.array().map(u128::from_le_bytes)
    }
}

/// Appends fields.
pub(crate) trait Put {
    fn put(&mut self, bytes: &[u8]);

    fn put_u16(&mut self, value: u16) {
        self.put(&value.to_le_bytes());
    }

    fn put_u32(&mut self, value: u32) {
        self.put(&value.to_le_bytes());
    }

    fn put_u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }

    fn put_u128(&mut self, value: u128) {
        self.put(&value.to_le_bytes());
    }
}

impl Put for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

/// Writes the CRC into the front of a file: `magic (8 bytes), CRC (4 bytes), covered bytes …`.
pub(crate) fn seal_front(bytes: &mut [u8]) {
    if let Some((front, covered)) = bytes.split_at_mut_checked(12)
        && let Some(crc) = front.get_mut(8..)
    {
        crc.copy_from_slice(&super::checksum::crc32c(covered).to_le_bytes());
    }
}

/// Checks a front from [`seal_front`], and returns the bytes that its CRC covers. Another record
/// names the file, so other content is damage.
pub(crate) fn open_front<'a>(
    bytes: &'a [u8],
    magic: [u8; 8],
    what: &str,
    file: &std::path::Path,
) -> crate::Result<Fields<'a>> {
    let mut fields = Fields(bytes);
    let (Some(found), Some(crc)) = (fields.take(8), fields.u32()) else {
        return Err(crate::Error::corrupt(file, format!("it is too short for {what}")));
    };
    let is_intact = super::checksum::crc32c(fields.0) == crc;
    match (found == magic.as_slice(), is_intact) {
        (true, true) => Ok(fields),
        (true, false) => Err(crate::Error::corrupt(file, format!("the checksum of {what} does not hold"))),
        (false, false) if bytes.iter().any(|&byte| byte != 0) => {
            Err(crate::Error::corrupt(file, format!("other bytes are in the place of {what}")))
        }
        (false, _) => Err(crate::Error::corrupt(file, format!("the first bytes of {what} are damaged"))),
    }
}
