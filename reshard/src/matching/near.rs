//! Near names: for each missing leaf, the stored leaves that it may have been called, and the other
//! way round. One pass over the candidates with a few look-ups each, so that the cost is bounded
//! however many leaves there are and however many are missing.
//!
//! A candidate is near when, after one whole component was changed, added or taken away, the two
//! paths are the same; or when they differ in case and separators only (`a.b.w` and `A/b/w`); or
//! when their last two components are the same.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::Matching;
use crate::glob::{components, render};

/// Leaves of a class that get suggestions: more are never shown.
const ASKED: usize = 64;
/// Candidates that are compared for one of the keys of one of them.
const CANDIDATES: usize = 8;
/// Names that are suggested for one.
const SUGGESTED: usize = 3;
/// Bytes of a name's differing middle that are compared letter by letter.
const COMPARED: usize = 64;

impl Matching<'_> {
    pub(super) fn suggest(&mut self, assigned: &[Option<usize>], below_any: &[(usize, usize)]) {
        if self.report.missing.is_empty() && self.report.unexpected.is_empty() {
            return;
        }
        let mut taken = vec![false; self.stored.len()];
        let used = assigned.iter().flatten().chain(below_any.iter().map(|(_, s)| s));
        used.for_each(|&s| taken[s] = true);
        let free = (0..self.stored.len()).filter(|&s| !taken[s]).map(|s| (s, self.text(s)));
        let asked =
            self.report.missing.iter().take(ASKED).map(|missing| self.wanted_texts.get(missing.wanted));
        let for_missing = nearest(&asked.collect::<Vec<_>>(), free);
        let free =
            self.report.missing.iter().map(|missing| (missing.wanted, self.wanted_texts.get(missing.wanted)));
        let asked = self.report.unexpected.iter().take(ASKED).map(|unexpected| self.text(unexpected.stored));
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
    let mut by_key: HashMap<u64, Vec<(usize, &[u8])>> = HashMap::new();
    for text in asked {
        keys(text, |key| {
            by_key.entry(key).or_default();
        });
    }
    for (number, text) in candidates {
        keys(text, |key| {
            if let Some(found) = by_key.get_mut(&key)
                && found.len() < CANDIDATES
            {
                found.push((number, text));
            }
        });
    }
    asked
        .iter()
        .map(|text| {
            let mut ranked = Vec::new();
            keys(text, |key| {
                let found = by_key.get(&key).into_iter().flatten();
                ranked.extend(found.map(|&(number, candidate)| (distance(text, candidate), number)));
            });
            ranked.sort_unstable();
            ranked.dedup();
            ranked.into_iter().take(SUGGESTED).map(|(_, number)| number).collect()
        })
        .collect()
}

/// Numbers that near texts share.
fn keys(text: &[u8], mut found: impl FnMut(u64)) {
    let parts: Vec<u64> = components(text).map(|component| hash(&component)).collect();
    // The whole path, and the path without each component: a changed, added or removed component
    // matches one of them. A left-out component leaves no trace of its place, so a moved one is
    // near too.
    let without = |left_out: usize| {
        let mut hasher = DefaultHasher::new();
        for (_, part) in parts.iter().enumerate().filter(|(i, _)| *i != left_out) {
            hasher.write_u64(*part);
        }
        hasher.finish()
    };
    found(without(usize::MAX));
    if parts.len() > 1 {
        (0..parts.len()).for_each(|left_out| found(without(left_out)));
    }
    if let [.., parent, last] = parts.as_slice() {
        found(hash(&("tail", parent, last)));
    }
    let mut hasher = DefaultHasher::new();
    for &byte in text {
        // Marks, dots and underscores separate; only what stands between them counts.
        if byte.is_ascii_alphanumeric() || (0x80..0xF8).contains(&byte) {
            hasher.write_u8(byte.to_ascii_lowercase());
        }
    }
    found(hasher.finish());
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
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
