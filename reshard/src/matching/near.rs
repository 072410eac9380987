//! Near names: for each missing leaf, the stored leaves that it may have been called, and the other
//! way round. The cost is bounded: only the leaves that a report shows get suggestions.

use super::Matching;
use super::report::SHOWN;
use crate::glob::{components, render};

/// Names that are suggested for one.
const SUGGESTED: usize = 3;
/// Bytes of a name's differing middle that are compared letter by letter.
const COMPARED: usize = 64;

impl Matching<'_> {
    pub(super) fn suggest(&mut self, assigned: &[Option<usize>], below_any: &[(usize, usize)]) {
        let mut taken = vec![false; self.stored.len()];
        let used = assigned.iter().flatten().chain(below_any.iter().map(|(_, s)| s));
        used.for_each(|&s| taken[s] = true);
        let free = (0..self.stored.len()).filter(|&s| !taken[s]).map(|s| (s, self.text(s)));
        let asked =
            self.report.missing.iter().take(SHOWN).map(|missing| self.wanted_texts.get(missing.wanted));
        let for_missing = nearest(&asked.collect::<Vec<_>>(), free);
        let free =
            self.report.missing.iter().map(|missing| (missing.wanted, self.wanted_texts.get(missing.wanted)));
        let asked = self.report.unexpected.iter().take(SHOWN).map(|unexpected| self.text(unexpected.stored));
        let for_unexpected = nearest(&asked.collect::<Vec<_>>(), free);
        // Of stored leaves the stored name is shown: it is what the user will look for in the
        // checkpoint.
        for (i, near) in for_missing.into_iter().enumerate() {
            let names = near.into_iter().map(|s| render(self.stored_texts.get(s)));
            // A rename takes the stored leaf of the same name elsewhere.
            let missing = &mut self.report.missing[i];
            missing.near = names.filter(|name| *name != missing.path).collect();
        }
        for (i, near) in for_unexpected.into_iter().enumerate() {
            let names = near.into_iter().map(|w| render(self.wanted_texts.get(w))).collect();
            self.report.unexpected[i].near = names;
        }
    }
}

/// The nearest candidates (by their numbers) of each asked text.
fn nearest<'a>(asked: &[&[u8]], candidates: impl Iterator<Item = (usize, &'a [u8])>) -> Vec<Vec<usize>> {
    if asked.is_empty() {
        return Vec::new();
    }
    let asked: Vec<Name> = asked.iter().map(|text| Name::new(text)).collect();
    let mut found = vec![Vec::new(); asked.len()];
    for (number, text) in candidates {
        let candidate = Name::new(text);
        for (asked, found) in asked.iter().zip(&mut found) {
            if asked.is_near(&candidate) {
                found.push((distance(asked.text, text), number));
            }
        }
    }
    found.into_iter().map(first).collect()
}

/// The few with the smallest distances.
pub(super) fn first<T: Ord>(mut ranked: Vec<(usize, T)>) -> Vec<T> {
    ranked.sort_unstable();
    ranked.into_iter().take(SUGGESTED).map(|(_, one)| one).collect()
}

struct Name<'a> {
    text: &'a [u8],
    components: Vec<&'a [u8]>,
    /// Its letters and digits in lower case.
    letters: Vec<u8>,
}

impl<'a> Name<'a> {
    fn new(text: &'a [u8]) -> Self {
        let letters = text.iter().filter(|byte| byte.is_ascii_alphanumeric() || (0x80..0xF8).contains(*byte));
        Self {
            text,
            components: components(text).collect(),
            letters: letters.map(u8::to_ascii_lowercase).collect(),
        }
    }

    /// True if one whole component was changed, added or removed, if only case and separators
    /// differ, or if the last two components are the same.
    fn is_near(&self, other: &Self) -> bool {
        let (a, b) = (&self.components, &other.components);
        let start = a.iter().zip(b).take_while(|(a, b)| a == b).count();
        let end = a[start..].iter().rev().zip(b[start..].iter().rev()).take_while(|(a, b)| a == b).count();
        let same = start + end;
        end > 1 || (same > 0 && same + 1 >= a.len().max(b.len())) || self.letters == other.letters
    }
}

/// Levenshtein's distance between what stands between a common beginning and a common end.
pub(super) fn distance(a: &[u8], b: &[u8]) -> usize {
    let same = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let (a, b) = (&a[same..], &b[same..]);
    let same = a.iter().rev().zip(b.iter().rev()).take_while(|(a, b)| a == b).count();
    let (a, b) = (&a[..a.len() - same], &b[..b.len() - same]);
    if a.len().max(b.len()) > COMPARED {
        return a.len().max(b.len());
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The textbook's recursion.
    fn levenshtein(a: &[u8], b: &[u8]) -> usize {
        match (a, b) {
            ([], rest) | (rest, []) => rest.len(),
            ([x, a @ ..], [y, b @ ..]) if x == y => levenshtein(a, b),
            ([_, rest_a @ ..], [_, rest_b @ ..]) => {
                1 + levenshtein(rest_a, b).min(levenshtein(a, rest_b)).min(levenshtein(rest_a, rest_b))
            }
        }
    }

    proptest! {
        #[test]
        fn the_distance_counts_changed_letters(a in "[abc]{0,6}", b in "[abc]{0,6}") {
            prop_assert_eq!(distance(a.as_bytes(), b.as_bytes()), levenshtein(a.as_bytes(), b.as_bytes()));
        }
    }

    #[test]
    fn long_differences_are_not_compared_by_letters() {
        let name = |first: char, letters: usize, last: char| format!("{first}{}{last}", "m".repeat(letters));
        let of = |letters| distance(name('a', letters, 'b').as_bytes(), name('c', letters, 'd').as_bytes());
        assert_eq!((of(62), of(63)), (2, 65));
    }
}
