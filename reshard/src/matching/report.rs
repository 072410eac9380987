//! The report: what fits, what does not, what was left alone; and how it reads.

use std::fmt;

use stepwell_core::dtype::Dtype;

use super::{Dropped, Match, Unmatched};

/// Leaves of a class that a report's text names; the report itself holds all.
pub(super) const SHOWN: usize = 16;

/// The result of a match. Positions count the given wanted and stored leaves. `path` is the
/// rendered wanted path unless stated otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The leaves to read, in the order of the wanted leaves.
    pub matches: Vec<Match>,
    /// Wanted leaves whose values stay.
    pub kept: Vec<Kept>,
    /// Stored leaves, inside wanted top-level entries, that nobody wants and that the options
    /// ignore.
    pub ignored: Vec<usize>,
    /// Stored leaves below [`super::Spec::Skip`].
    pub skipped: Vec<usize>,
    /// Stored leaves in top-level entries that are not wanted, and those that other ranks want.
    pub not_wanted: Vec<usize>,
    /// Stored leaves that the selection left out.
    pub deselected: Vec<usize>,
    /// Patterns that apply to nothing: probably misspelt.
    pub unmatched: Vec<Unmatched>,
    /// Renames (from, to) that gave names in top-level entries that are not wanted.
    pub idle_renames: Vec<(String, String)>,
    /// Items that the step has no longer.
    pub dropped: Vec<Dropped>,
    /// Wanted, but not stored.
    pub missing: Vec<MissingLeaf>,
    /// Stored, but not wanted.
    pub unexpected: Vec<UnexpectedLeaf>,
    /// Shapes differ.
    pub wrong_shape: Vec<WrongShape>,
    /// Dtypes differ, and the cast is not allowed.
    pub wrong_dtype: Vec<WrongDtype>,
    /// A tensor where an object is wanted, or the reverse.
    pub wrong_kind: Vec<WrongKind>,
    /// Several stored leaves under one wanted name.
    pub collisions: Vec<Collision>,
}

/// A wanted leaf whose value stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Which.
    pub wanted: usize,
    /// Why.
    pub why: Why,
}

/// Why a value stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It is not stored, and the options say to keep.
    NotStored,
    /// It is stored, but the selection leaves it out.
    Deselected,
}

/// A wanted leaf that nothing stored goes into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingLeaf {
    /// Which.
    pub wanted: usize,
    /// Its path.
    pub path: String,
    /// Why.
    pub reason: Missing,
    /// Stored paths that it may be called, the nearest first; for the first leaves only.
    pub near: Vec<String>,
}

/// Why a leaf is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// It is not stored.
    NotStored,
    /// It is stored, but the selection leaves it out, and the caller has no value that could stay.
    Deselected,
    /// It is not stored; the options say to keep, but the caller has no value.
    NothingToKeep,
    /// It was in an item that was thinned away: the number of that in [`Report::dropped`].
    Dropped(usize),
}

/// A stored leaf, inside a wanted top-level entry, that nobody wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnexpectedLeaf {
    /// Which.
    pub stored: usize,
    /// Its stored path.
    pub path: String,
    /// Its wanted path, where a rename gave one.
    pub renamed: Option<String>,
    /// Missing leaves that it may be, the nearest first; for the first leaves only.
    pub near: Vec<String>,
}

/// Shapes that differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongShape {
    /// The wanted leaf.
    pub wanted: usize,
    /// The stored leaf.
    pub stored: usize,
    /// Its path.
    pub path: String,
    /// The stored shape.
    pub stored_shape: Vec<u64>,
    /// The wanted shape.
    pub wanted_shape: Vec<u64>,
}

/// Dtypes that differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongDtype {
    /// The wanted leaf.
    pub wanted: usize,
    /// The stored leaf.
    pub stored: usize,
    /// Its path.
    pub path: String,
    /// The stored dtype.
    pub stored_dtype: Dtype,
    /// The wanted dtype.
    pub wanted_dtype: Dtype,
    /// The problem of the cast, as a predicate ("may lose values").
    pub why: &'static str,
}

/// A tensor where an object is wanted, or the reverse.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongKind {
    /// The wanted leaf.
    pub wanted: usize,
    /// The stored leaf.
    pub stored: usize,
    /// Its path.
    pub path: String,
    /// The stored kind, with its article.
    pub stored_kind: &'static str,
    /// The wanted kind, with its article.
    pub wanted_kind: &'static str,
}

/// Several stored leaves under one wanted name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collision {
    /// The wanted leaf.
    pub wanted: usize,
    /// Its path.
    pub path: String,
    /// The stored leaves.
    pub stored: Vec<usize>,
    /// Their stored paths.
    pub stored_paths: Vec<String>,
}

impl Report {
    /// True if everything that is wanted can be read.
    pub fn is_ok(&self) -> bool {
        self.missing.is_empty()
            && self.unexpected.is_empty()
            && self.wrong_shape.is_empty()
            && self.wrong_dtype.is_empty()
            && self.wrong_kind.is_empty()
            && self.collisions.is_empty()
            && !self.unmatched.iter().any(|unmatched| unmatched.fails)
    }

    fn counts(&self) -> String {
        let counts = [
            (self.missing.len(), "missing"),
            (self.unexpected.len(), "unexpected"),
            (self.wrong_shape.len(), "wrong shape"),
            (self.wrong_dtype.len(), "wrong dtype"),
            (self.wrong_kind.len(), "wrong kind"),
            (self.collisions.len(), "colliding"),
            (
                self.unmatched.iter().filter(|unmatched| unmatched.fails).count(),
                "pattern(s) that match nothing",
            ),
        ];
        let counts: Vec<String> =
            counts.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
        counts.join(", ")
    }
}

/// One class of the report's text.
struct Class<'a> {
    title: &'a str,
    advice: &'a str,
}

impl Class<'_> {
    fn write<T>(
        &self,
        f: &mut fmt::Formatter<'_>,
        leaves: &[T],
        mut line: impl FnMut(&mut fmt::Formatter<'_>, &T) -> fmt::Result,
    ) -> fmt::Result {
        if leaves.is_empty() {
            return Ok(());
        }
        write!(f, "\n{} ({}):", self.title, leaves.len())?;
        for leaf in leaves.iter().take(SHOWN) {
            f.write_str("\n  ")?;
            line(f, leaf)?;
        }
        if leaves.len() > SHOWN {
            write!(f, "\n  … and {} more", leaves.len() - SHOWN)?;
        }
        write!(f, "\n  → {}", self.advice)
    }
}

fn near(f: &mut fmt::Formatter<'_>, what: &str, names: &[String]) -> fmt::Result {
    for (i, name) in names.iter().enumerate() {
        write!(f, "{} `{name}`", if i == 0 { what } else { " or" })?;
    }
    Ok(())
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_ok() {
            let tensors = || self.matches.iter().filter_map(|found| found.tensor.as_ref());
            let counts = [
                (tensors().filter(|tensor| tensor.is_cast()).count(), "cast"),
                (tensors().filter(|tensor| tensor.padded || tensor.truncated).count(), "resized"),
                (self.kept.len(), "kept as they are"),
                (self.ignored.len(), "ignored"),
                (self.skipped.len() + self.not_wanted.len() + self.deselected.len(), "stored but not wanted"),
            ];
            write!(f, "{} leaves match", self.matches.len())?;
            counts.iter().filter(|(n, _)| *n > 0).try_for_each(|(n, what)| write!(f, ", {n} {what}"))?;
        } else {
            write!(f, "the checkpoint does not hold what is wanted: {}", self.counts())?;
            self.classes(f)?;
        }
        let class = Class {
            title: "patterns that match nothing",
            advice: "include, exclude, unexpected and the left side of a rename are matched against stored paths, missing, cast and resize against \
                     wanted ones; `a/**` is all below `a`. Mend the pattern, or leave it out",
        };
        class.write(f, &self.unmatched, |f, unmatched| {
            write!(f, "{}: `{}`", unmatched.option, unmatched.glob)?;
            match unmatched.dropped.and_then(|item| self.dropped.get(item)) {
                Some(dropped) => write!(f, " ({dropped})"),
                None => near(f, "; near it is", &unmatched.near),
            }
        })?;
        let class = Class {
            title: "renames to names that are not wanted",
            advice: "the right side must begin with a top-level entry of what is wanted; what is renamed to others is not read",
        };
        class.write(f, &self.idle_renames, |f, (from, to)| write!(f, "{from} → {to}"))
    }
}

impl Report {
    fn classes(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let class = Class {
            title: "missing: wanted, but not stored",
            advice: "rename the stored leaves, leave these out of what is wanted, or keep the values they have with missing=\"keep\" (also per glob)",
        };
        class.write(f, &self.missing, |f, leaf| {
            f.write_str(shown(&leaf.path))?;
            match leaf.reason {
                Missing::Dropped(item) => {
                    if let Some(dropped) = self.dropped.get(item) {
                        write!(f, " ({dropped})")?;
                    }
                }
                Missing::NotStored => {}
                Missing::Deselected => f.write_str(" (stored, but left out by include/exclude)")?,
                Missing::NothingToKeep => {
                    f.write_str(" (nothing to keep: only its description was given, no value)")?;
                }
            }
            if matches!(leaf.reason, Missing::Deselected | Missing::Dropped(_)) {
                Ok(())
            } else {
                near(f, "; near it is stored", &leaf.near)
            }
        })?;
        let class = Class {
            title: "unexpected: stored, but not wanted",
            advice: "add them to what is wanted, leave them out with exclude=…, or pass them over with unexpected=\"ignore\" (also per glob)",
        };
        class.write(f, &self.unexpected, |f, leaf| {
            f.write_str(shown(&leaf.path))?;
            if let Some(renamed) = &leaf.renamed {
                write!(f, " (renamed to {renamed})")?;
            }
            near(f, "; near it is missing", &leaf.near)
        })?;
        let class = Class {
            title: "wrong shape",
            advice: "want the stored shape, or allow the difference with resize=\"pad\", \"truncate\" or \"both\" (also per glob)",
        };
        class.write(f, &self.wrong_shape, |f, leaf| {
            write!(
                f,
                "{}: stored {}, wanted {}",
                shown(&leaf.path),
                Shape(&leaf.stored_shape),
                Shape(&leaf.wanted_shape)
            )?;
            let (stored, wanted) = (leaf.stored_shape.len(), leaf.wanted_shape.len());
            if stored == wanted {
                Ok(())
            } else {
                write!(f, " ({stored} and {wanted} dimensions: no resize helps)")
            }
        })?;
        let class = Class {
            title: "wrong dtype",
            advice: "want the stored dtype, or allow the loss with cast=\"lossy\" or cast={glob: dtype}",
        };
        class.write(f, &self.wrong_dtype, |f, leaf| {
            let WrongDtype { path, stored_dtype, wanted_dtype, why, .. } = leaf;
            write!(f, "{}: stored {stored_dtype}, wanted {wanted_dtype}, which {why}", shown(path))
        })?;
        let class = Class {
            title: "wrong kind",
            advice: "want what is stored (an array or its description for a tensor, a plain value for an object)",
        };
        class.write(f, &self.wrong_kind, |f, leaf| {
            write!(f, "{}: stored is {}, wanted is {}", shown(&leaf.path), leaf.stored_kind, leaf.wanted_kind)
        })?;
        let class = Class {
            title: "colliding: several stored leaves under one name",
            advice: "change the renames, or leave all but one out with exclude=…",
        };
        class.write(f, &self.collisions, |f, leaf| {
            write!(f, "{}: ", leaf.path)?;
            for (i, path) in leaf.stored_paths.iter().take(3).enumerate() {
                write!(f, "{}{path}", if i == 0 { "" } else { ", " })?;
            }
            if leaf.stored_paths.len() > 3 { f.write_str(", …") } else { Ok(()) }
        })
    }
}

impl fmt::Display for Dropped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { item, when } = self;
        match item.as_str() {
            "." => write!(f, "the loose leaves were dropped from this step by thinning, {when}")?,
            item => write!(f, "the item `{item}` was dropped from this step by thinning, {when}")?,
        }
        f.write_str("; take a newer step, or leave it out")
    }
}

/// A path in a line of its own; that of a state which is one leaf is empty.
fn shown(path: &str) -> &str {
    if path.is_empty() { "the whole state" } else { path }
}

/// A shape as Python shows a tuple.
struct Shape<'a>(&'a [u64]);

impl fmt::Display for Shape<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [one] => write!(f, "({one},)"),
            shape => {
                let sizes: Vec<String> = shape.iter().map(u64::to_string).collect();
                write!(f, "({})", sizes.join(", "))
            }
        }
    }
}
