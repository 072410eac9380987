//! The encoding of objects: a tag, then what belongs to it. Canonical: a value has one encoding, so
//! that equal objects of many ranks have equal digests, and a decoder refuses every other spelling.
//! No value can name code: extensions carry a name that only the reader's own registry gives a
//! meaning.
//!
//! | tag | value | after the tag |
//! |---|---|---|
//! | 0 | None | |
//! | 1 | Ellipsis | |
//! | 2, 3 | False, True | |
//! | 4 | int of 64 bits | zigzag varint |
//! | 5 | larger int | length, two's complement, little-endian, no byte too many |
//! | 6 | float | 8 bytes, bit for bit |
//! | 7 | complex | 16 bytes |
//! | 8, 9, 10 | str, bytes, bytearray | length, bytes (UTF-8) |
//! | 11, 12 | list, tuple | count, values |
//! | 13, 14 | set, frozenset | count, values in the order of their encodings |
//! | 15 | dict | count, key and value in turn, order kept |
//! | 16 | numpy scalar | code of the dtype, its little-endian bytes |
//! | 17 | extension | length, name, value |
//!
//! Lengths and counts are varints (LEB128, no byte too many). Depth, size and number of values are
//! bounded by [`crate::limits`].

use super::limit;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::limits::{MAX_DEPTH, MAX_NAME_BYTES, MAX_OBJECT_BYTES, MAX_OBJECT_VALUES};
use crate::value::Value;

mod tag {
    pub const NONE: u8 = 0;
    pub const ELLIPSIS: u8 = 1;
    pub const FALSE: u8 = 2;
    pub const TRUE: u8 = 3;
    pub const INT: u8 = 4;
    pub const BIG_INT: u8 = 5;
    pub const FLOAT: u8 = 6;
    pub const COMPLEX: u8 = 7;
    pub const STR: u8 = 8;
    pub const BYTES: u8 = 9;
    pub const BYTE_ARRAY: u8 = 10;
    pub const LIST: u8 = 11;
    pub const TUPLE: u8 = 12;
    pub const SET: u8 = 13;
    pub const FROZEN_SET: u8 = 14;
    pub const DICT: u8 = 15;
    pub const NUMPY_SCALAR: u8 = 16;
    pub const EXTENSION: u8 = 17;
}

/// The encoding of a value. A large integer that fits 64 bits, or has bytes too many, is written as
/// the number that it is.
pub fn encode(value: &Value) -> Result<Vec<u8>> {
    let mut encoder = Encoder { values: 0 };
    let mut out = Vec::new();
    encoder.value(value, 1, &mut out)?;
    Ok(out)
}

struct Encoder {
    values: u64,
}

impl Encoder {
    fn value(&mut self, value: &Value, depth: u64, out: &mut Vec<u8>) -> Result<()> {
        limit("the nesting of an object", depth, MAX_DEPTH)?;
        self.values += 1;
        limit("the number of values in an object", self.values, MAX_OBJECT_VALUES)?;
        match value {
            Value::None => out.push(tag::NONE),
            Value::Ellipsis => out.push(tag::ELLIPSIS),
            Value::Bool(value) => out.push(if *value { tag::TRUE } else { tag::FALSE }),
            Value::Int(value) => put_int(*value, out),
            Value::BigInt(bytes) => match minimal(bytes) {
                Ok(small) => put_int(small, out),
                Err(bytes) => put_bytes(tag::BIG_INT, bytes, out)?,
            },
            Value::Float(value) => {
                out.push(tag::FLOAT);
                out.extend_from_slice(&value.to_bits().to_le_bytes());
            }
            Value::Complex(real, imaginary) => {
                out.push(tag::COMPLEX);
                out.extend_from_slice(&real.to_bits().to_le_bytes());
                out.extend_from_slice(&imaginary.to_bits().to_le_bytes());
            }
            Value::Str(text) => put_bytes(tag::STR, text.as_bytes(), out)?,
            Value::Bytes(bytes) => put_bytes(tag::BYTES, bytes, out)?,
            Value::ByteArray(bytes) => put_bytes(tag::BYTE_ARRAY, bytes, out)?,
            Value::List(values) => self.sequence(tag::LIST, values, depth, out)?,
            Value::Tuple(values) => self.sequence(tag::TUPLE, values, depth, out)?,
            Value::Set(values) => self.set(tag::SET, values, depth, out)?,
            Value::FrozenSet(values) => self.set(tag::FROZEN_SET, values, depth, out)?,
            Value::Dict(entries) => {
                out.push(tag::DICT);
                put_varint(entries.len() as u64, out);
                for (key, value) in entries {
                    self.value(key, depth + 1, out)?;
                    self.value(value, depth + 1, out)?;
                }
            }
            Value::NumpyScalar(dtype, bytes) => {
                if bytes.len() != dtype.size() {
                    return Err(Error::Misuse(format!(
                        "a {dtype} scalar has {} bytes, not {}",
                        dtype.size(),
                        bytes.len()
                    )));
                }
                out.extend([tag::NUMPY_SCALAR, dtype.code()]);
                out.extend_from_slice(bytes);
            }
            Value::Extension(name, value) => {
                limit("the length of an extension's name in bytes", name.len() as u64, MAX_NAME_BYTES)?;
                put_bytes(tag::EXTENSION, name.as_bytes(), out)?;
                self.value(value, depth + 1, out)?;
            }
        }
        limit("the size of an object in bytes", out.len() as u64, MAX_OBJECT_BYTES)
    }

    fn sequence(&mut self, tag: u8, values: &[Value], depth: u64, out: &mut Vec<u8>) -> Result<()> {
        out.push(tag);
        put_varint(values.len() as u64, out);
        values.iter().try_for_each(|value| self.value(value, depth + 1, out))
    }

    fn set(&mut self, tag: u8, values: &[Value], depth: u64, out: &mut Vec<u8>) -> Result<()> {
        let mut encodings = Vec::with_capacity(values.len());
        for value in values {
            let mut encoding = Vec::new();
            self.value(value, depth + 1, &mut encoding)?;
            encodings.push(encoding);
        }
        encodings.sort_unstable();
        out.push(tag);
        put_varint(values.len() as u64, out);
        for encoding in &encodings {
            out.extend_from_slice(encoding);
        }
        Ok(())
    }
}

fn put_varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn put_int(value: i64, out: &mut Vec<u8>) {
    out.push(tag::INT);
    put_varint((value << 1 ^ value >> 63).cast_unsigned(), out);
}

fn put_bytes(tag: u8, bytes: &[u8], out: &mut Vec<u8>) -> Result<()> {
    limit("the size of an object in bytes", bytes.len() as u64, MAX_OBJECT_BYTES)?;
    out.push(tag);
    put_varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
    Ok(())
}

/// A two's complement number as `i64`, or as the fewest bytes that hold it.
fn minimal(mut bytes: &[u8]) -> std::result::Result<i64, &[u8]> {
    // The last byte says nothing where it repeats the sign of the one before it.
    while let [rest @ .., before, last] = bytes
        && *last == if *before & 0x80 == 0 { 0 } else { 0xFF }
    {
        bytes = bytes.get(..rest.len() + 1).unwrap_or_default();
    }
    if bytes.len() > 8 {
        return Err(bytes);
    }
    let sign = if bytes.last().is_some_and(|last| last & 0x80 != 0) { 0xFF } else { 0 };
    let mut wide = [sign; 8];
    for (wide, byte) in wide.iter_mut().zip(bytes) {
        *wide = *byte;
    }
    Ok(i64::from_le_bytes(wide))
}

/// The value of an encoding; the text says what is wrong with it. Never panics, and allocates no
/// more than a small multiple of the values that are there.
pub fn decode(bytes: &[u8]) -> std::result::Result<Value, String> {
    if bytes.len() as u64 > MAX_OBJECT_BYTES {
        return Err(format!(
            "an object of {} bytes is larger than the limit of {MAX_OBJECT_BYTES}",
            bytes.len()
        ));
    }
    let mut decoder = Decoder { rest: bytes, values: 0 };
    let value = decoder.value(1)?;
    if !decoder.rest.is_empty() {
        return Err(format!("{} bytes follow the object", decoder.rest.len()));
    }
    Ok(value)
}

struct Decoder<'a> {
    rest: &'a [u8],
    values: u64,
}

type Decoded<T> = std::result::Result<T, String>;

impl<'a> Decoder<'a> {
    fn value(&mut self, depth: u64) -> Decoded<Value> {
        if depth > MAX_DEPTH {
            return Err(format!("an object nests more deeply than the limit of {MAX_DEPTH}"));
        }
        self.values += 1;
        if self.values > MAX_OBJECT_VALUES {
            return Err(format!("an object holds more values than the limit of {MAX_OBJECT_VALUES}"));
        }
        Ok(match self.byte()? {
            tag::NONE => Value::None,
            tag::ELLIPSIS => Value::Ellipsis,
            tag::FALSE => Value::Bool(false),
            tag::TRUE => Value::Bool(true),
            tag::INT => {
                let zigzag = self.varint()?;
                Value::Int((zigzag >> 1).cast_signed() ^ -(zigzag & 1).cast_signed())
            }
            tag::BIG_INT => {
                let bytes = self.bytes()?;
                if minimal(bytes) != Err(bytes) {
                    return Err("an integer is not in its shortest form".to_owned());
                }
                Value::BigInt(bytes.to_vec())
            }
            tag::FLOAT => Value::Float(self.float()?),
            tag::COMPLEX => Value::Complex(self.float()?, self.float()?),
            tag::STR => Value::Str(self.text()?.to_owned()),
            tag::BYTES => Value::Bytes(self.bytes()?.to_vec()),
            tag::BYTE_ARRAY => Value::ByteArray(self.bytes()?.to_vec()),
            tag::LIST => Value::List(self.sequence(depth)?),
            tag::TUPLE => Value::Tuple(self.sequence(depth)?),
            tag::SET => Value::Set(self.set(depth)?),
            tag::FROZEN_SET => Value::FrozenSet(self.set(depth)?),
            tag::DICT => {
                let count = self.count(2)?;
                let mut entries = Vec::with_capacity(count.min(1024));
                for _ in 0..count {
                    entries.push((self.value(depth + 1)?, self.value(depth + 1)?));
                }
                Value::Dict(entries)
            }
            tag::NUMPY_SCALAR => {
                let code = self.byte()?;
                let dtype = Dtype::from_code(code)
                    .ok_or_else(|| format!("a numpy scalar has the unknown dtype {code}"))?;
                Value::NumpyScalar(dtype, self.take(dtype.size() as u64)?.to_vec())
            }
            tag::EXTENSION => {
                let name = self.text()?;
                if name.len() as u64 > MAX_NAME_BYTES {
                    return Err(format!(
                        "the name of an extension is longer than the limit of {MAX_NAME_BYTES}"
                    ));
                }
                Value::Extension(name.to_owned(), Box::new(self.value(depth + 1)?))
            }
            other => return Err(format!("an object holds a value of the unknown sort {other}")),
        })
    }

    fn take(&mut self, count: u64) -> Decoded<&'a [u8]> {
        let split = usize::try_from(count).ok().and_then(|count| self.rest.split_at_checked(count));
        let (taken, rest) = split.ok_or("an object is cut")?;
        self.rest = rest;
        Ok(taken)
    }

    fn byte(&mut self) -> Decoded<u8> {
        let (&first, rest) = self.rest.split_first().ok_or("an object is cut")?;
        self.rest = rest;
        Ok(first)
    }

    fn varint(&mut self) -> Decoded<u64> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7F);
            value |= bits << shift;
            if byte & 0x80 == 0 {
                // The tenth byte holds one bit; a last byte of zero would be one too many.
                if (shift == 63 && bits > 1) || (shift > 0 && bits == 0) {
                    break;
                }
                return Ok(value);
            }
        }
        Err("a number is not in its shortest form, or does not fit 64 bits".to_owned())
    }

    fn bytes(&mut self) -> Decoded<&'a [u8]> {
        let length = self.varint()?;
        self.take(length)
    }

    fn text(&mut self) -> Decoded<&'a str> {
        std::str::from_utf8(self.bytes()?).map_err(|error| format!("a text is not UTF-8: {error}"))
    }

    fn float(&mut self) -> Decoded<f64> {
        let (bits, rest) = self.rest.split_first_chunk::<8>().ok_or("an object is cut")?;
        self.rest = rest;
        Ok(f64::from_bits(u64::from_le_bytes(*bits)))
    }

    /// A count of entries, each of which takes at least so many bytes.
    fn count(&mut self, bytes_each: u64) -> Decoded<usize> {
        let count = self.varint()?;
        if count > self.rest.len() as u64 / bytes_each {
            return Err("an object is cut".to_owned());
        }
        Ok(count as usize)
    }

    fn sequence(&mut self, depth: u64) -> Decoded<Vec<Value>> {
        let count = self.count(1)?;
        let mut values = Vec::with_capacity(count.min(1024));
        for _ in 0..count {
            values.push(self.value(depth + 1)?);
        }
        Ok(values)
    }

    fn set(&mut self, depth: u64) -> Decoded<Vec<Value>> {
        let count = self.count(1)?;
        let mut values = Vec::with_capacity(count.min(1024));
        let mut before: &[u8] = &[];
        for _ in 0..count {
            let start = self.rest;
            values.push(self.value(depth + 1)?);
            let encoding = start.get(..start.len() - self.rest.len()).unwrap_or_default();
            // Equal ones are possible: two NaN objects are two elements.
            if encoding < before {
                return Err("a set is not in the order of its encodings".to_owned());
            }
            before = encoding;
        }
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A value with its sets in the order of their encodings and its integers in the smallest
    /// variant.
    fn canonical(value: Value) -> Value {
        let all = |values: Vec<Value>| values.into_iter().map(canonical).collect::<Vec<_>>();
        let sorted = |values: Vec<Value>| {
            let mut values = all(values);
            values.sort_by_key(|value| encode(value).unwrap());
            values
        };
        match value {
            Value::BigInt(bytes) => match minimal(&bytes) {
                Ok(small) => Value::Int(small),
                Err(bytes) => Value::BigInt(bytes.to_vec()),
            },
            Value::List(values) => Value::List(all(values)),
            Value::Tuple(values) => Value::Tuple(all(values)),
            Value::Set(values) => Value::Set(sorted(values)),
            Value::FrozenSet(values) => Value::FrozenSet(sorted(values)),
            Value::Dict(entries) => Value::Dict(
                entries.into_iter().map(|(key, value)| (canonical(key), canonical(value))).collect(),
            ),
            Value::Extension(name, value) => Value::Extension(name, Box::new(canonical(*value))),
            other => other,
        }
    }

    fn any_value() -> impl Strategy<Value = Value> {
        let float = any::<u64>().prop_map(f64::from_bits);
        let scalar = prop::sample::select(Dtype::ALL).prop_flat_map(|dtype| {
            prop::collection::vec(any::<u8>(), dtype.size())
                .prop_map(move |bytes| Value::NumpyScalar(dtype, bytes))
        });
        let leaf = prop_oneof![
            Just(Value::None),
            Just(Value::Ellipsis),
            any::<bool>().prop_map(Value::Bool),
            any::<i64>().prop_map(Value::Int),
            prop::collection::vec(any::<u8>(), 0..20).prop_map(Value::BigInt),
            float.clone().prop_map(Value::Float),
            (float.clone(), float).prop_map(|(re, im)| Value::Complex(re, im)),
            ".{0,12}".prop_map(Value::Str),
            prop::collection::vec(any::<u8>(), 0..20).prop_map(Value::Bytes),
            prop::collection::vec(any::<u8>(), 0..20).prop_map(Value::ByteArray),
            scalar,
        ];
        leaf.prop_recursive(5, 60, 6, |inner| {
            let many = prop::collection::vec(inner.clone(), 0..6);
            prop_oneof![
                many.clone().prop_map(Value::List),
                many.clone().prop_map(Value::Tuple),
                many.clone().prop_map(Value::Set),
                many.prop_map(Value::FrozenSet),
                prop::collection::vec((inner.clone(), inner.clone()), 0..5).prop_map(Value::Dict),
                ("[a-z.]{0,20}", inner).prop_map(|(name, value)| Value::Extension(name, Box::new(value))),
            ]
        })
    }

    proptest! {
        #[test]
        fn every_value_is_read_again_bit_for_bit(value in any_value()) {
            let encoding = encode(&value).unwrap();
            let again = decode(&encoding).unwrap();
            // Debug prints NaN without its payload, the second encoding compares the bits.
            prop_assert_eq!(format!("{again:?}"), format!("{:?}", canonical(value)));
            prop_assert_eq!(encode(&again).unwrap(), encoding);
        }

        #[test]
        fn a_value_has_one_encoding(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            if let Ok(value) = decode(&bytes) {
                prop_assert_eq!(encode(&value).unwrap(), bytes);
            }
        }

        #[test]
        fn an_altered_encoding_is_refused_or_is_another_value(
            value in any_value(), at in any::<prop::sample::Index>(), with in any::<u8>()
        ) {
            let encoding = encode(&value).unwrap();
            let mut altered = encoding.clone();
            let at = at.index(altered.len());
            altered[at] = with;
            if let Ok(other) = decode(&altered) {
                prop_assert_eq!(encode(&other).unwrap(), altered);
            }
            for end in 0..encoding.len() {
                prop_assert!(decode(&encoding[..end]).is_err());
            }
        }
    }

    #[test]
    fn small_bytes_are_what_the_table_says() {
        let bytes = |value| encode(&value).unwrap();
        assert_eq!(bytes(Value::None), [0]);
        assert_eq!(bytes(Value::Bool(true)), [3]);
        assert_eq!(bytes(Value::Int(-1)), [4, 1]);
        assert_eq!(bytes(Value::Int(64)), [4, 0x80, 1]);
        assert_eq!(bytes(Value::Int(i64::MIN)).len(), 11);
        assert_eq!(bytes(Value::Str("é".into())), [8, 2, 0xC3, 0xA9]);
        assert_eq!(bytes(Value::NumpyScalar(Dtype::Uint16, vec![1, 2])), [16, 7, 1, 2]);
        assert_eq!(bytes(Value::Dict(vec![(Value::Int(1), Value::None)])), [15, 1, 4, 2, 0]);
    }

    #[test]
    fn integers_of_any_size_are_one_number_each() {
        let two_to_64 = [0, 0, 0, 0, 0, 0, 0, 0, 1];
        assert_eq!(
            decode(&encode(&Value::BigInt(two_to_64.into())).unwrap()).unwrap(),
            Value::BigInt(two_to_64.into())
        );
        for (bytes, number) in
            [(vec![], 0), (vec![0xFF; 30], -1), (vec![5, 0, 0], 5), (vec![0x80, 0], 128), (vec![0x80], -128)]
        {
            assert_eq!(encode(&Value::BigInt(bytes)).unwrap(), encode(&Value::Int(number)).unwrap());
        }
        assert!(decode(&[5, 1, 7]).is_err(), "a small number was taken as a large one");
        let negative = [0, 0, 0, 0, 0, 0, 0, 0x80, 0xFE];
        assert_eq!(
            decode(&encode(&Value::BigInt(negative.into())).unwrap()).unwrap(),
            Value::BigInt(negative.into())
        );
    }

    #[test]
    fn other_spellings_are_refused() {
        assert!(decode(&[4, 0x80, 0]).is_err(), "a varint with a byte too many");
        assert!(
            decode(&[4, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 2]).is_err(),
            "a varint of 65 bits"
        );
        assert!(decode(&[13, 2, 3, 2]).is_err(), "a set out of order");
        assert!(decode(&[8, 1, 0xFF]).is_err(), "a text that is not UTF-8");
        assert!(decode(&[16, 0, 0]).is_err(), "an unknown dtype");
        assert!(decode(&[18]).is_err(), "an unknown tag");
        assert!(decode(&[0, 0]).is_err(), "bytes after the value");
        assert!(encode(&Value::NumpyScalar(Dtype::Int64, vec![1])).is_err(), "a scalar of another size");
    }

    #[test]
    fn depth_is_limited_on_write_and_on_read() {
        let nested = |depth| (1..depth).fold(Value::None, |inner, _| Value::List(vec![inner]));
        assert!(decode(&encode(&nested(MAX_DEPTH)).unwrap()).is_ok());
        assert_eq!(encode(&nested(MAX_DEPTH + 1)).unwrap_err().kind(), "format");
        assert!(decode(&[11, 1].repeat(1 << 20)).unwrap_err().contains("nests"));
    }

    #[test]
    fn a_count_that_lies_allocates_nothing() {
        let lie = [&[11][..], &[0xFF; 9], &[1]].concat();
        assert!(decode(&lie).unwrap_err().contains("cut"));
        assert!(decode(&[&[9][..], &[0xFF; 9], &[1]].concat()).unwrap_err().contains("cut"));
    }
}
