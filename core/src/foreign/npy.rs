//! The header of a numpy array, as `numpy.save` writes it: magic, version, and a Python dict in
//! text. The array's bytes follow.
//!
//! The dict is parsed as what numpy writes and no more: its three keys in any order, text, `True`
//! and `False`, and a tuple of numbers. A structured dtype is skipped as a list of balanced
//! brackets.

use super::{Fault, Parsed};
use crate::limits::MAX_DIMS;

/// Magic, version, and the longest length field: what [`header_length`] needs.
pub const START_BYTES: u64 = 12;
/// The longest header that is read, from the start of the array. Only a structured dtype of many
/// fields makes a long one.
pub const MAX_HEADER_BYTES: u64 = 1 << 20;
/// The longest dtype of a plain array.
const MAX_DESCR_BYTES: usize = 64;

const MAGIC: &[u8] = b"\x93NUMPY";

/// A parsed header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NpyHeader {
    /// The dtype as numpy spells it (`<f4`). `None`: a structured one.
    pub descr: Option<String>,
    /// True if the first index moves fastest.
    pub fortran_order: bool,
    /// Elements along each dimension.
    pub shape: Vec<u64>,
    /// Bytes of the header: the array's bytes follow them.
    pub length: u64,
}

/// The bytes of the header, with magic, version and length. `start` are the first bytes of the
/// array: all, or [`START_BYTES`].
pub fn header_length(start: &[u8]) -> Parsed<u64> {
    let text_at = text_at(start)?;
    let bytes = start.get(8..text_at).unwrap_or_default();
    let text = bytes.iter().rev().fold(0, |length, &byte| length << 8 | u64::from(byte));
    let length = text_at as u64 + text;
    if length > MAX_HEADER_BYTES {
        let what = format!("a header of {length} bytes; at most {MAX_HEADER_BYTES} are supported");
        return Err(Fault::new(8, what));
    }
    Ok(length)
}

/// Offset of the header's text.
fn text_at(start: &[u8]) -> Parsed<usize> {
    if !start.starts_with(MAGIC) {
        return Err(Fault::new(0, "a numpy array begins with \\x93NUMPY, and this does not"));
    }
    let at = match start.get(6..8) {
        Some([1, _]) => 10,
        Some([2 | 3, _]) => 12,
        Some([major, minor]) => {
            let what = format!("version {major}.{minor} of numpy's format is not supported");
            return Err(Fault::new(6, what));
        }
        _ => return Err(Fault::new(6, "the array ends in its header")),
    };
    if start.len() < at {
        return Err(Fault::new(start.len() as u64, "the array ends in its header"));
    }
    Ok(at)
}

/// Parses the header at the start of `bytes`, which are at least [`header_length`] long.
pub fn parse(bytes: &[u8]) -> Parsed<NpyHeader> {
    let (at, length) = (text_at(bytes)?, header_length(bytes)?);
    let Some(header) = bytes.get(..length as usize) else {
        return Err(Fault::new(bytes.len() as u64, "the array ends in its header"));
    };
    let mut text = Text { bytes: header, at };
    text.expect(b'{')?;
    let (mut descr, mut order, mut shape) = (None, None, None);
    while !text.skip(b'}') {
        let key_at = text.at;
        let key = text.string()?;
        text.expect(b':')?;
        let again = match key.as_str() {
            "descr" => descr.replace(text.descr()?).is_some(),
            "fortran_order" => order.replace(text.boolean()?).is_some(),
            "shape" => shape.replace(text.shape()?).is_some(),
            _ => return Err(Fault::new(key_at as u64, format!("the unknown key {key:?}"))),
        };
        if again {
            return Err(Fault::new(key_at as u64, format!("the key {key:?} occurs twice")));
        }
        if !text.skip(b',') {
            text.expect(b'}')?;
            break;
        }
    }
    text.space();
    if let Some(rest) = header.get(text.at) {
        return Err(text.fault(format!("the end of the header was expected, not {:?}", char::from(*rest))));
    }
    let missing = |key: &str| Fault::new(at as u64, format!("the key '{key}' is missing"));
    Ok(NpyHeader {
        descr: descr.ok_or_else(|| missing("descr"))?,
        fortran_order: order.ok_or_else(|| missing("fortran_order"))?,
        shape: shape.ok_or_else(|| missing("shape"))?,
        length,
    })
}

/// The text of a header, read from `at` on.
struct Text<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Text<'_> {
    /// Skips white space, and returns the byte behind it.
    fn space(&mut self) -> Option<u8> {
        while let Some(b' ' | b'\n' | b'\t' | b'\r') = self.bytes.get(self.at) {
            self.at += 1;
        }
        self.bytes.get(self.at).copied()
    }

    /// Skips a character, if it is the next one.
    fn skip(&mut self, wanted: u8) -> bool {
        let found = self.space() == Some(wanted);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, wanted: u8) -> Parsed<()> {
        if self.skip(wanted) {
            return Ok(());
        }
        Err(self.unexpected(&format!("`{}`", char::from(wanted))))
    }

    /// Plain ASCII text in quotes. No key and no dtype of a plain array needs more.
    fn string(&mut self) -> Parsed<String> {
        let quote = self.space();
        if !matches!(quote, Some(b'\'' | b'"')) {
            return Err(self.unexpected("text in quotes"));
        }
        let rest = self.bytes.get(self.at + 1..).unwrap_or_default();
        let rest = rest.get(..=MAX_DESCR_BYTES).unwrap_or(rest);
        let length = rest.iter().position(|&byte| Some(byte) == quote);
        let text = length.and_then(|length| rest.get(..length)).unwrap_or_default();
        let plain = text.iter().all(|byte| matches!(byte, b' '..=b'~') && *byte != b'\\');
        if length.is_none() || !plain {
            return Err(self.fault("short ASCII text in quotes was expected".to_owned()));
        }
        self.at += text.len() + 2;
        Ok(text.iter().copied().map(char::from).collect())
    }

    /// A dtype: text, or the list of a structured one, which is skipped.
    fn descr(&mut self) -> Parsed<Option<String>> {
        match self.space() {
            Some(b'[' | b'(' | b'{') => self.balanced().map(|()| None),
            _ => self.string().map(Some),
        }
    }

    /// Skips to the end of the bracket that begins here. Brackets in quotes do not count.
    fn balanced(&mut self) -> Parsed<()> {
        let begin = self.at;
        let (mut depth, mut quote) = (0_usize, None);
        while let Some(&byte) = self.bytes.get(self.at) {
            self.at += 1;
            match (quote, byte) {
                (Some(_), b'\\') => self.at += 1,
                (Some(open), _) if open == byte => quote = None,
                (None, b'\'' | b'"') => quote = Some(byte),
                (None, b'[' | b'(' | b'{') => depth += 1,
                (None, b']' | b')' | b'}') => {
                    depth -= 1; // The first byte has opened one, and the last one returns.
                    if depth == 0 {
                        return Ok(());
                    }
                }
                (Some(_) | None, _) => {}
            }
        }
        Err(Fault::new(begin as u64, "a structured dtype without an end"))
    }

    fn boolean(&mut self) -> Parsed<bool> {
        self.space();
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let (value, length) = match rest {
            rest if rest.starts_with(b"True") => (true, 4),
            rest if rest.starts_with(b"False") => (false, 5),
            _ => return Err(self.unexpected("True or False")),
        };
        self.at += length;
        Ok(value)
    }

    fn shape(&mut self) -> Parsed<Vec<u64>> {
        self.expect(b'(')?;
        let mut shape = Vec::new();
        while !self.skip(b')') {
            if shape.len() as u64 == MAX_DIMS {
                return Err(self.fault(format!("more than {MAX_DIMS} dimensions")));
            }
            shape.push(self.number()?);
            if !self.skip(b',') {
                self.expect(b')')?;
                break;
            }
        }
        Ok(shape)
    }

    fn number(&mut self) -> Parsed<u64> {
        self.space();
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let value = rest
            .iter()
            .take(digits)
            .try_fold(0_u64, |value, digit| value.checked_mul(10)?.checked_add(u64::from(digit - b'0')));
        let Some(value) = value.filter(|_| digits > 0) else {
            return Err(self.unexpected("a number of elements"));
        };
        self.at += digits;
        // Python 2 marks long integers.
        if self.bytes.get(self.at) == Some(&b'L') {
            self.at += 1;
        }
        Ok(value)
    }

    fn unexpected(&self, wanted: &str) -> Fault {
        let found = match self.bytes.get(self.at) {
            Some(&byte) => format!("{:?}", char::from(byte)),
            None => "the end".to_owned(),
        };
        self.fault(format!("{wanted} was expected, not {found}"))
    }

    fn fault(&self, what: String) -> Fault {
        Fault::new(self.at as u64, what)
    }
}

#[cfg(test)]
mod tests;
