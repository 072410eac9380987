//! Step names: the conversion between a step's number and its directory's name. Pure.
//!
//! Names are **canonical**: a name is a step's only if its number formats to the same name. So
//! `step_5` and `step_00000005` are never both steps, and a listing does not depend on its order.

use std::fmt;

use serde::{Deserialize, Serialize};
use stepwell_core::limits::MAX_STEP;

use crate::error::{Error, Result};

/// The most digits of the padding.
const MAX_WIDTH: usize = 19;
/// The longest prefix in bytes, so that every name with it stays below the usual 255.
const MAX_PREFIX_BYTES: usize = 100;

/// The pattern of step names: a prefix, and the number, padded with zeros to `width` digits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Fields", into = "Fields")]
pub struct StepName {
    prefix: String,
    width: usize,
    also: Vec<StepName>,
}

/// Formats the pattern as an argument of a manager.
impl fmt::Display for StepName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StepName({:?}, {}", self.prefix, self.width)?;
        if !self.also.is_empty() {
            let also: Vec<String> = self.also.iter().map(|name| format!("{name},")).collect();
            write!(f, ", also_read=({})", also.join(" "))?;
        }
        f.write_str(")")
    }
}

/// The JSON form of a [`StepName`], in `root.json` and in options.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    prefix: String,
    width: usize,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    also_read: Vec<StepName>,
}

impl TryFrom<Fields> for StepName {
    type Error = Error;

    fn try_from(fields: Fields) -> Result<Self> {
        Self::new(fields.prefix, fields.width)?.also_reading(fields.also_read)
    }
}

impl From<StepName> for Fields {
    fn from(name: StepName) -> Self {
        Self { prefix: name.prefix, width: name.width, also_read: name.also }
    }
}

impl Default for StepName {
    fn default() -> Self {
        Self { prefix: "step_".to_owned(), width: 8, also: Vec::new() }
    }
}

impl StepName {
    /// Returns a pattern. The prefix must be a part of one file name, without separators, control
    /// characters and a leading dot.
    pub fn new(prefix: impl Into<String>, width: usize) -> Result<Self> {
        let prefix = prefix.into();
        if prefix.starts_with('.') || prefix.contains('/') || prefix.chars().any(char::is_control) {
            return Err(Error::Invalid(format!(
                "the step prefix {prefix:?} must not start with a dot nor hold `/` or control characters: it is a part of a directory's name"
            )));
        }
        if prefix.len() > MAX_PREFIX_BYTES || width > MAX_WIDTH {
            return Err(Error::Invalid(format!(
                "the step prefix {prefix:?} with width {width} is too long (at most {MAX_PREFIX_BYTES} bytes and {MAX_WIDTH} digits)"
            )));
        }
        Ok(Self { prefix, width, also: Vec::new() })
    }

    /// Returns the same pattern, which also reads the `other` patterns, for a root whose pattern
    /// has changed.
    pub fn also_reading(mut self, other: Vec<StepName>) -> Result<Self> {
        if other.iter().any(|name| !name.also.is_empty()) {
            return Err(Error::Invalid("a step name that is only read cannot itself read others".to_owned()));
        }
        self.also = other;
        Ok(self)
    }

    /// Returns the name of a step.
    pub fn format(&self, step: u64) -> String {
        format!("{}{step:0width$}", self.prefix, width = self.width)
    }

    /// Parses a step's canonical name. `None` for any other name.
    pub fn parse(&self, name: &str) -> Option<u64> {
        self.parse_own(name).or_else(|| self.also.iter().find_map(|other| other.parse_own(name)))
    }

    /// True if a name follows the pattern that is written, and not one that is only read.
    pub fn is_primary(&self, name: &str) -> bool {
        self.parse_own(name).is_some()
    }

    /// Returns all names that a step may have. The one that is written is first.
    pub fn names(&self, step: u64) -> Vec<String> {
        let mut names = vec![self.format(step)];
        names.extend(self.also.iter().map(|other| other.format(step)));
        names.dedup();
        names
    }

    /// Returns the same pattern, which also reads all patterns of `other`.
    #[must_use]
    pub fn reading_too(mut self, other: &Self) -> Self {
        let own = Self { also: Vec::new(), ..other.clone() };
        for name in std::iter::once(&own).chain(&other.also) {
            if (&name.prefix, name.width) != (&self.prefix, self.width) && !self.also.contains(name) {
                self.also.push(name.clone());
            }
        }
        self
    }

    fn parse_own(&self, name: &str) -> Option<u64> {
        let digits = name.strip_prefix(self.prefix.as_str())?;
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        let step = digits.parse().ok().filter(|&step| step <= MAX_STEP)?;
        (self.format(step) == name).then_some(step)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_step_is_found_again_by_its_name(step in 0..=MAX_STEP, width in 0..=MAX_WIDTH, prefix in "[a-z_-]{0,8}") {
            let names = StepName::new(prefix, width).unwrap();
            prop_assert_eq!(names.parse(&names.format(step)), Some(step));
        }

        #[test]
        fn whatever_parses_is_the_canonical_name(name in "step_[0-9]{1,20}") {
            let names = StepName::default();
            if let Some(step) = names.parse(&name) {
                prop_assert_eq!(names.format(step), name);
            }
        }
    }

    #[test]
    fn only_one_of_the_spellings_of_a_number_is_a_step() {
        let names = StepName::new("", 0).unwrap();
        assert_eq!(names.parse("5"), Some(5));
        for other in ["005", "+5", "-5", "5 ", "", "5.orbax-checkpoint-tmp", "٥", "9223372036854775808"] {
            assert_eq!(names.parse(other), None, "{other:?}");
        }
        assert_eq!(StepName::default().parse("step_123456789"), Some(123_456_789));
        assert_eq!(StepName::default().parse("step_0123456789"), None);
    }

    #[test]
    fn a_changed_pattern_reads_the_old_names_and_writes_the_new_one() {
        let names = StepName::default().also_reading(vec![StepName::new("", 0).unwrap()]).unwrap();
        assert_eq!(names.parse("7"), Some(7));
        assert_eq!(names.parse("step_00000007"), Some(7));
        assert_eq!(names.format(7), "step_00000007");
        assert!(!names.is_primary("7"));
    }

    #[test]
    fn a_prefix_that_is_more_than_a_part_of_a_name_is_refused() {
        for prefix in ["../", "a/b", ".tmp-", "a\0", "a\nb"] {
            assert!(StepName::new(prefix, 8).is_err(), "{prefix:?}");
        }
        assert!(StepName::new("x".repeat(101), 8).is_err());
        assert!(serde_json::from_str::<StepName>(r#"{"prefix": "../x", "width": 8}"#).is_err());
    }
}
