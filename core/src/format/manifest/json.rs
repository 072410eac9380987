//! The manifest's values in JSON, and a pass that refuses duplicate keys. serde keeps the last of
//! two in a map, and ignores unknown ones, so two readers could read two different manifests in one
//! file.

use std::collections::HashSet;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

/// `u32` as eight lower-case hexadecimal digits.
pub(super) mod hex_u32 {
    use serde::{Deserializer, Serializer};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
    pub(in super::super) fn serialize<S: Serializer>(value: &u32, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&format_args!("{value:08x}"))
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
        from.deserialize_str(super::Hex::<8>).map(|value| value as u32)
    }
}

/// `u128` as 32 lower-case hexadecimal digits.
pub(super) mod hex_u128 {
    use serde::{Deserializer, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(value: &u128, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&format_args!("{value:032x}"))
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u128, D::Error> {
        from.deserialize_str(super::Hex::<32>)
    }
}

/// True if `text` is `digits` lower-case hexadecimal digits.
pub(super) fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

struct Hex<const DIGITS: usize>;

impl<const DIGITS: usize> Visitor<'_> for Hex<DIGITS> {
    type Value = u128;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{DIGITS} lower-case hexadecimal digits")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<u128, E> {
        if !is_hex(text, DIGITS) {
            return Err(E::invalid_value(serde::de::Unexpected::Str(text), &self));
        }
        u128::from_str_radix(text, 16).map_err(E::custom)
    }
}

/// Real numbers by name ([`super::MetricNumber`]).
pub(super) mod metrics {
    use std::collections::BTreeMap;

    use serde::de::{Deserialize, Deserializer};
    use serde::ser::Serializer;

    use super::super::MetricNumber;

    pub(in super::super) fn serialize<S: Serializer>(
        metrics: &BTreeMap<String, f64>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_map(metrics.iter().map(|(name, &value)| (name, MetricNumber::from(value))))
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<BTreeMap<String, f64>, D::Error> {
        let metrics = BTreeMap::<String, MetricNumber>::deserialize(from)?;
        Ok(metrics.into_iter().map(|(name, value)| (name, value.into())).collect())
    }
}

/// Walks all of a JSON text, keeps nothing but the keys of the objects that are open, and refuses a
/// key that comes twice.
pub(super) fn refuse_duplicate_keys(text: &[u8]) -> serde_json::Result<()> {
    let mut parser = serde_json::Deserializer::from_slice(text);
    UniqueKeys.deserialize(&mut parser)?;
    parser.end()
}

struct UniqueKeys;

impl<'de> DeserializeSeed<'de> for UniqueKeys {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for UniqueKeys {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element_seed(Self)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut keys = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            map.next_value_seed(Self)?;
            if let Some(twice) = keys.replace(key) {
                return Err(A::Error::custom(format_args!("the key {twice:?} occurs twice in one object")));
            }
        }
        Ok(())
    }
}
