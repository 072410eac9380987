//! Patterns of the caller that apply to nothing. Most are misspelt, so each comes with near names.
//!
//! A pattern that chooses what is read (include, exclude, rename, cast) makes the match fail. The
//! others (missing, unexpected, resize) only allow something: the report lists them.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::near::{distance, first};
use super::{Matching, PerGlob, Spec};
use crate::glob::{Glob, PathText, boundaries, components, is_within, render};

/// A pattern that applies to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unmatched {
    /// The option that it was given to.
    pub option: &'static str,
    /// The pattern.
    pub glob: String,
    /// Likely intended paths: leaves, subtrees above them, or a pattern for everything below one.
    pub near: Vec<String>,
    /// The number of the dropped item that it names, where it names one.
    pub dropped: Option<usize>,
    /// True if that makes the match fail.
    pub fails: bool,
}

impl Matching<'_> {
    /// Finds them. `applied`: whether each rename applied to a stored leaf.
    pub(super) fn unmatched(&mut self, applied: &[bool]) {
        let options = self.options;
        let stored: Vec<&[u8]> = (0..self.stored.len()).map(|s| self.stored_texts.get(s)).collect();
        let mut found = Vec::new();
        let include = options.selection.include().unwrap_or_default();
        for glob in unused(include, &stored) {
            found
                .push(Unmatched { dropped: self.dropped(&glob), ..suggest("include", &glob, &stored, true) });
        }
        // A dropped leaf need not exist to be excluded or renamed.
        for glob in unused(options.selection.exclude(), &stored) {
            if self.dropped(&glob).is_none() {
                found.push(suggest("exclude", &glob, &stored, true));
            }
        }
        for glob in unused(options.unexpected.globs(), &stored) {
            found.push(suggest("unexpected", &glob, &stored, false));
        }
        let idle = options.renames.globs().iter().zip(applied).filter(|(_, applied)| !**applied);
        // Those that an earlier rule leaves nothing to are no mistake.
        for (glob, _) in idle.filter(|(glob, _)| !stored.iter().any(|text| glob.selects(text))) {
            if self.dropped(glob).is_none() {
                found.push(suggest("rename", glob, &stored, true));
            }
        }
        let given = [options.missing.globs(), options.cast.globs(), options.resize.globs()];
        if given.iter().any(|globs| !globs.is_empty()) {
            // These are asked with wanted paths; below a wanted branch, with those of what is
            // stored there. A wanted branch without anything stored is asked about as missing.
            let all: Vec<&[u8]> = (0..self.wanted.len()).map(|w| self.wanted_texts.get(w)).collect();
            let stored = (0..self.stored.len()).map(|s| self.text(s));
            let leaves = (0..self.wanted.len()).filter(|&w| self.wanted[w].spec != Spec::Any).map(|w| all[w]);
            let wanted: Vec<&[u8]> = leaves.chain(stored.clone()).collect();
            let all: Vec<&[u8]> = all.iter().copied().chain(stored).collect();
            let mut add = |option, globs: &[Glob], texts: &[&[u8]], fails| {
                for glob in unused(globs, texts) {
                    let dropped = self.dropped(&glob);
                    let fails = fails && dropped.is_none();
                    found.push(Unmatched { dropped, ..suggest(option, &glob, texts, fails) });
                }
            };
            add("missing", options.missing.globs(), &all, false);
            add("cast", options.cast.globs(), &wanted, true);
            add("resize", options.resize.globs(), &wanted, false);
        }
        self.report.unmatched = found;
    }

    fn dropped(&self, glob: &Glob) -> Option<usize> {
        let first = components(glob.leading_literal()).next().map(render)?;
        self.options.dropped.iter().position(|dropped| dropped.item == first)
    }
}

impl<T: Copy> PerGlob<T> {
    /// The globs.
    pub fn globs(&self) -> &[Glob] {
        self.globs.globs()
    }
}

/// The globs that match none of the texts.
fn unused(globs: &[Glob], texts: &[&[u8]]) -> Vec<Glob> {
    if globs.is_empty() {
        return Vec::new();
    }
    let mut known: Option<HashSet<&[u8]>> = None;
    let mut is_used = |glob: &&Glob| match glob.literal() {
        Some(literal) => known
            .get_or_insert_with(|| {
                texts.iter().flat_map(|text| boundaries(text).map(|end| &text[..end])).collect()
            })
            .contains(literal),
        None => texts.iter().any(|text| glob.selects(text)),
    };
    globs.iter().filter(|glob| !is_used(glob)).cloned().collect()
}

fn suggest(option: &'static str, glob: &Glob, texts: &[&[u8]], fails: bool) -> Unmatched {
    Unmatched { option, glob: glob.as_str().to_owned(), near: near(glob, texts), dropped: None, fails }
}

/// Returns likely intended globs in place of one that matches none of these paths.
pub fn near_globs(glob: &Glob, paths: &[PathText]) -> Vec<String> {
    near(glob, &paths.iter().map(PathText::as_bytes).collect::<Vec<_>>())
}

/// Likely intended globs. At the place where the glob's beginning stops to be an existing path: the
/// names there. If it is an existing path: everything below it.
fn near(glob: &Glob, texts: &[&[u8]]) -> Vec<String> {
    let literal = glob.leading_literal();
    if literal.is_empty() {
        let Some(last) = glob.trailing_literal().and_then(|text| components(text).last()) else {
            return Vec::new();
        };
        // With an open beginning, compare the ends of paths.
        let mut by_name: HashMap<&[u8], &[u8]> = HashMap::new();
        for text in texts {
            if let Some(name) = components(text).last() {
                by_name.entry(name).or_insert(text);
            }
        }
        return nearest(last, by_name.into_iter());
    }
    let mut above = 0; // bytes of the literal that are a branch of the texts
    for name in components(literal) {
        let branch = &literal[..above];
        above += name.len();
        if !texts.iter().any(|text| is_within(text, &literal[..above])) {
            let below = texts.iter().filter(|text| is_within(text, branch));
            let there: BTreeSet<(&[u8], &[u8])> = below
                .filter_map(|text| {
                    let next = components(&text[branch.len()..]).next()?;
                    Some((next, &text[..branch.len() + next.len()]))
                })
                .collect();
            return nearest(name, there.into_iter());
        }
    }
    let branch = render(literal);
    let is_branch = texts.iter().any(|text| *text != literal && is_within(text, literal));
    vec![if is_branch { format!("{}/**", crate::glob::escape(&branch)) } else { branch }]
}

/// The renderings of those whose names are nearest, as long as they are near at all.
fn nearest<'a>(asked: &[u8], candidates: impl Iterator<Item = (&'a [u8], &'a [u8])>) -> Vec<String> {
    let lower = asked.to_ascii_lowercase();
    let ranked = candidates
        .map(|(name, path)| (distance(&lower, &name.to_ascii_lowercase()), path))
        .filter(|(distance, _)| *distance <= 2.max(asked.len() / 2));
    first(ranked.collect()).into_iter().map(render).collect()
}
