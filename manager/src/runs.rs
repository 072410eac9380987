//! Ascending numbers as runs `first..end`, a short form for numbers of ranks and leaves in
//! messages.

/// Returns the runs of ascending numbers.
pub(crate) fn runs_of(numbers: &[u32]) -> Vec<(u32, u32)> {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, end)) if *end == number => *end += 1,
            _ => runs.push((number, number + 1)),
        }
    }
    runs
}

/// Returns the numbers of runs.
pub(crate) fn numbers_of(runs: Vec<(u32, u32)>) -> Vec<u32> {
    runs.into_iter().flat_map(|(first, end)| first..end).collect()
}

/// Returns the runs of the numbers that are in both.
pub(crate) fn in_both(one: &[(u32, u32)], other: &[(u32, u32)]) -> Vec<(u32, u32)> {
    let (mut one, mut other) = (one.iter().peekable(), other.iter().peekable());
    let mut found = Vec::new();
    while let (Some(&&(first, end)), Some(&&(other_first, other_end))) = (one.peek(), other.peek()) {
        let both = (first.max(other_first), end.min(other_end));
        if both.0 < both.1 {
            found.push(both);
        }
        if end <= other_end {
            one.next();
        } else {
            other.next();
        }
    }
    found
}

/// A serde form for numbers with many equal neighbours: each number with its count.
pub(crate) mod repeats {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    /// The most numbers: more ranks than any job has.
    const MAX: u64 = 1 << 24;

    pub(crate) fn serialize<S: Serializer>(numbers: &[u32], serializer: S) -> Result<S::Ok, S::Error> {
        let repeated = numbers.chunk_by(|one, other| one == other);
        let repeated = repeated.filter_map(|same| Some((*same.first()?, same.len() as u32)));
        repeated.collect::<Vec<(u32, u32)>>().serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u32>, D::Error> {
        let repeated: Vec<(u32, u32)> = Vec::deserialize(deserializer)?;
        if repeated.iter().map(|&(_, count)| u64::from(count)).sum::<u64>() > MAX {
            return Err(D::Error::custom("more numbers than there are ranks"));
        }
        Ok(repeated.into_iter().flat_map(|(number, count)| (0..count).map(move |_| number)).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn runs_say_what_the_numbers_say(
            one in prop::collection::btree_set(0_u32..40, 0..30), other in prop::collection::btree_set(0_u32..40, 0..30),
        ) {
            let runs = |numbers: &BTreeSet<u32>| runs_of(&numbers.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(numbers_of(runs(&one)).into_iter().collect::<BTreeSet<_>>(), one.clone());
            let both: Vec<u32> = one.intersection(&other).copied().collect();
            prop_assert_eq!(numbers_of(in_both(&runs(&one), &runs(&other))), both);
        }

        #[test]
        fn repeated_numbers_are_read_as_they_were(numbers in prop::collection::vec(0_u32..3, 0..20)) {
            let mut bytes = Vec::new();
            repeats::serialize(&numbers, &mut serde_json::Serializer::new(&mut bytes)).unwrap();
            let read = repeats::deserialize(&mut serde_json::Deserializer::from_slice(&bytes)).unwrap();
            prop_assert_eq!(read, numbers);
        }
    }
}
