//! The header of a safetensors file: names, dtypes, shapes and places of its tensors.
//!
//! As strict as the official reader where that protects values: offsets in order and without gaps,
//! lengths that agree with shapes, and a last tensor that ends the file. Stricter in one thing: a
//! name may not occur twice.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use super::{Fault, Parsed};
use crate::limits::MAX_DIMS;

/// Bytes in front of the header: its length.
pub const LENGTH_BYTES: u64 = 8;
/// The longest header that the format allows.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// A parsed header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SafetensorsHeader {
    /// The text entries of `__metadata__`, in the order of the file.
    pub metadata: Vec<(String, String)>,
    /// The tensors, in the order of their bytes.
    pub tensors: Vec<SafetensorsEntry>,
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SafetensorsEntry {
    /// Its name: any text.
    pub name: String,
    /// Its dtype, as the format calls it (`BF16`).
    pub dtype: String,
    /// Elements along each dimension.
    pub shape: Vec<u64>,
    /// Offset of its first byte in the file.
    pub offset: u64,
    /// Number of its bytes.
    pub length: u64,
}

/// The length of the header, from the first eight bytes of a file of that length.
pub fn header_length(bytes: [u8; LENGTH_BYTES as usize], file_length: u64) -> Parsed<u64> {
    let length = u64::from_le_bytes(bytes);
    if length > MAX_HEADER_BYTES {
        return Err(Fault::new(
            0,
            format!("a header of at most {MAX_HEADER_BYTES} bytes was expected, not of {length}"),
        ));
    }
    if LENGTH_BYTES + length > file_length {
        return Err(Fault::new(
            0,
            format!("a header of {length} bytes does not fit into a file of {file_length}"),
        ));
    }
    Ok(length)
}

/// Parses the header of a file of that length.
pub fn parse(header: &[u8], file_length: u64) -> Parsed<SafetensorsHeader> {
    let entries: HeaderFields = serde_json::from_slice(header).map_err(|error| {
        Fault::new(LENGTH_BYTES, format!("the header is no valid JSON of tensors: {error}"))
    })?;
    let begin = LENGTH_BYTES + header.len() as u64;
    let mut tensors = Vec::with_capacity(entries.tensors.len());
    for (name, EntryFields { dtype, shape: EntryShape(shape), data_offsets: (first, end) }) in entries.tensors
    {
        let fault = |what: String| Fault::new(LENGTH_BYTES, format!("tensor `{name}`: {what}"));
        let Some(length) = end.checked_sub(first) else {
            return Err(fault(format!("it ends at {end}, before it begins at {first}")));
        };
        let bits = bits_of(&dtype).ok_or_else(|| fault(format!("dtype {dtype} is not known")))?;
        let bytes = shape
            .iter()
            .try_fold(u64::from(bits), |product, &n| product.checked_mul(n))
            .filter(|bits| bits % 8 == 0)
            .map(|bits| bits / 8);
        if bytes != Some(length) {
            return Err(fault(format!("{length} bytes are not those of {dtype} in shape {shape:?}")));
        }
        let offset = begin.checked_add(first).ok_or_else(|| fault("its offset is too large".to_owned()))?;
        tensors.push(SafetensorsEntry { name, dtype, shape, offset, length });
    }
    tensors.sort_by(|one: &SafetensorsEntry, other| one.name.cmp(&other.name));
    let twice = tensors.windows(2).find(|two| matches!(two, [one, other] if one.name == other.name));
    if let Some([one, ..]) = twice {
        return Err(Fault::new(LENGTH_BYTES, format!("tensor `{}` occurs twice", one.name)));
    }
    tensors.sort_by_key(|tensor| (tensor.offset, tensor.length));
    let mut at = begin;
    for tensor in &tensors {
        if tensor.offset != at {
            let what = format!(
                "tensor `{}` begins at byte {}; the one before it ends at {at}",
                tensor.name, tensor.offset
            );
            return Err(Fault::new(tensor.offset, what));
        }
        at = at.saturating_add(tensor.length);
    }
    if at != file_length {
        return Err(Fault::new(at, format!("the last tensor ends at byte {at}; the file has {file_length}")));
    }
    Ok(SafetensorsHeader { metadata: entries.metadata, tensors })
}

/// Bits of an element.
fn bits_of(dtype: &str) -> Option<u32> {
    Some(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "I64" | "U64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EntryFields {
    dtype: String,
    shape: EntryShape,
    data_offsets: (u64, u64),
}

struct EntryShape(Vec<u64>);

impl<'de> Deserialize<'de> for EntryShape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ShapeVisitor;
        impl<'de> Visitor<'de> for ShapeVisitor {
            type Value = EntryShape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the elements along each dimension")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<EntryShape, A::Error> {
                let mut shape = Vec::new();
                while let Some(n) = sequence.next_element()? {
                    if shape.len() as u64 == MAX_DIMS {
                        return Err(A::Error::custom(format_args!("more than {MAX_DIMS} dimensions")));
                    }
                    shape.push(n);
                }
                Ok(EntryShape(shape))
            }
        }
        deserializer.deserialize_seq(ShapeVisitor)
    }
}

/// The entries of a header.
#[derive(Default)]
struct HeaderFields {
    metadata: Vec<(String, String)>,
    tensors: Vec<(String, EntryFields)>,
}

impl<'de> Deserialize<'de> for HeaderFields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = HeaderFields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<HeaderFields, A::Error> {
        let mut entries = HeaderFields::default();
        let mut metadata = None;
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                if metadata.replace(map.next_value::<MetadataFields>()?).is_some() {
                    return Err(A::Error::duplicate_field("__metadata__"));
                }
            } else {
                entries.tensors.push((name, map.next_value()?));
            }
        }
        entries.metadata = metadata.map(|MetadataFields(texts)| texts).unwrap_or_default();
        Ok(entries)
    }
}

/// An object of texts, in order.
struct MetadataFields(Vec<(String, String)>);

impl<'de> Deserialize<'de> for MetadataFields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MetadataVisitor;
        impl<'de> Visitor<'de> for MetadataVisitor {
            type Value = MetadataFields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of texts")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<MetadataFields, A::Error> {
                let mut texts = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    texts.push(entry);
                }
                Ok(MetadataFields(texts))
            }
        }
        deserializer.deserialize_map(MetadataVisitor)
    }
}

#[cfg(test)]
mod tests;
