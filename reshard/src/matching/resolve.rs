//! Compares a stored leaf with the wanted one that it meets: kind, dtype, shape. Decides about
//! wanted leaves that meet none.

use std::collections::HashSet;

use stepwell_core::dtype::Dtype;
use stepwell_core::region::{Dims, Region};

use super::{
    Cast, Kept, Match, Matching, Missing, MissingLeaf, OnMissing, Resize, Spec, StoredSpec, TensorMatch, Why,
    WrongDtype, WrongKind, WrongShape,
};
use crate::cast;
use crate::glob::{components, is_within};

impl Matching<'_> {
    pub(super) fn resolve(&mut self, assigned: &[Option<usize>], below_any: &[(usize, usize)]) {
        let taken_as_branch: HashSet<usize> = below_any.iter().map(|&(w, _)| w).collect();
        let deselected: HashSet<&[u8]> = self.report.deselected.iter().map(|&s| self.text(s)).collect();
        let is_deselected = |w: usize| {
            let text = self.wanted_texts.get(w);
            match self.wanted[w].spec {
                Spec::Any => deselected.iter().any(|leaf| is_within(leaf, text)),
                _ => deselected.contains(text),
            }
        };
        let is_deselected: Vec<bool> =
            assigned.iter().enumerate().map(|(w, stored)| stored.is_none() && is_deselected(w)).collect();
        for (w, stored) in assigned.iter().enumerate() {
            match stored {
                Some(s) => self.fit(w, *s),
                None if self.wanted[w].spec == Spec::Skip || taken_as_branch.contains(&w) => {}
                None => self.absent(w, is_deselected[w]),
            }
        }
        for &(w, s) in below_any {
            self.fit(w, s);
        }
        self.report.matches.sort_unstable_by_key(|found| (found.wanted, found.stored));
    }

    fn absent(&mut self, w: usize, deselected: bool) {
        let keep = self.options.missing.of(self.wanted_texts.get(w)) == OnMissing::Keep;
        let holds = self.wanted[w].holds_value;
        match (deselected, keep, holds) {
            (true, _, true) => self.report.kept.push(Kept { wanted: w, why: Why::Deselected }),
            (false, true, true) => self.report.kept.push(Kept { wanted: w, why: Why::NotStored }),
            _ => {
                let reason = match (deselected, keep) {
                    (true, _) => Missing::Deselected,
                    (false, keep) => match (self.dropped_with(w), keep) {
                        (Some(item), _) => Missing::Dropped(item),
                        (None, true) => Missing::NothingToKeep,
                        (None, false) => Missing::NotStored,
                    },
                };
                let path = self.wanted[w].path.to_string();
                let is_misspelt = |one: &super::Unmatched| one.option == "include";
                if path.is_empty() && deselected && self.report.unmatched.iter().any(is_misspelt) {
                    return; // the pattern is what is wrong
                }
                self.report.missing.push(MissingLeaf { wanted: w, path, reason, near: Vec::new() });
            }
        }
    }

    /// The number of the dropped item that held a wanted leaf. The names of plain top-level leaves
    /// are no longer known, so any leaf at the top may have been one.
    fn dropped_with(&self, w: usize) -> Option<usize> {
        let mut components = components(self.wanted_texts.get(w));
        let top = crate::glob::render(components.next()?);
        let loose = components.next().is_none();
        let dropped = &self.options.dropped;
        let named = dropped.iter().position(|dropped| dropped.item == top);
        named.or_else(|| dropped.iter().position(|dropped| dropped.item == "." && loose))
    }

    /// The leaf that holds the bytes. An alias of an alias is none (an index that says so was
    /// refused when it was read).
    fn source(&self, s: usize) -> Option<usize> {
        let StoredSpec::Alias { of } = self.stored[s].spec else { return Some(s) };
        let target = self.stored.get(of as usize)?;
        (!matches!(target.spec, StoredSpec::Alias { .. })).then_some(of as usize)
    }

    fn fit(&mut self, w: usize, s: usize) {
        let wanted = &self.wanted[w];
        // Below a wanted branch, options are asked with the leaf's own path.
        let text = self.renamed.get(&s).map_or_else(|| self.stored_texts.get(s), Vec::as_slice);
        let path = || crate::glob::render(text);
        let Some(source) = self.source(s) else {
            let kind = "an alias of no leaf that holds bytes";
            self.report.wrong_kind.push(WrongKind {
                wanted: w,
                stored: s,
                path: path(),
                stored_kind: kind,
                wanted_kind: "a leaf",
            });
            return;
        };
        let (dtype, shape) = match (&self.stored[source].spec, &wanted.spec) {
            (StoredSpec::Tensor { dtype, shape }, Spec::Tensor { .. } | Spec::Any) => (*dtype, shape),
            (StoredSpec::Object, Spec::Object | Spec::Any) => {
                self.report.matches.push(Match { wanted: w, stored: s, source, tensor: None });
                return;
            }
            (stored, _) => {
                const KINDS: [&str; 2] = ["a tensor", "an object"];
                let [stored_kind, wanted_kind] =
                    if matches!(stored, StoredSpec::Tensor { .. }) { KINDS } else { [KINDS[1], KINDS[0]] };
                self.report.wrong_kind.push(WrongKind {
                    wanted: w,
                    stored: s,
                    path: path(),
                    stored_kind,
                    wanted_kind,
                });
                return;
            }
        };
        let (wanted_dtype, wanted_shape) = match &wanted.spec {
            Spec::Tensor { dtype, shape } => (*dtype, shape.as_deref()),
            _ => (None, None),
        };
        let allowed = self.options.cast.of(text);
        let cast = cast_of(dtype, wanted_dtype, allowed);
        if let Err((wanted_dtype, why)) = cast {
            let path = path();
            self.report.wrong_dtype.push(WrongDtype {
                wanted: w,
                stored: s,
                path,
                stored_dtype: dtype,
                wanted_dtype,
                why,
            });
        }
        let wanted_shape = wanted_shape.unwrap_or(shape);
        let resize = self.options.resize.of(text);
        let nothing_to_keep =
            resize == Resize::Keep && !wanted.holds_value && shape.as_slice() != wanted_shape;
        if nothing_to_keep || !resize_allows(resize, shape, wanted_shape) {
            self.report.wrong_shape.push(WrongShape {
                wanted: w,
                stored: s,
                path: path(),
                stored_shape: shape.to_vec(),
                wanted_shape: wanted_shape.to_vec(),
            });
        } else if let Ok(to) = cast {
            let extent: Vec<u64> =
                shape.iter().zip(wanted_shape).map(|(&stored, &wanted)| stored.min(wanted)).collect();
            self.report.matches.push(Match {
                wanted: w,
                stored: s,
                source,
                tensor: Some(TensorMatch {
                    stored_dtype: dtype,
                    dtype: to,
                    padded: extent != wanted_shape,
                    keeps: resize == Resize::Keep && extent != wanted_shape,
                    truncated: extent != shape.as_slice(),
                    shape: wanted_shape.to_vec(),
                    region: Region { offset: Dims::from_elem(0, extent.len()), extent: extent.into() },
                }),
            });
        }
    }
}

/// The dtype that a tensor gets, or the one that it cannot get and why.
fn cast_of(stored: Dtype, wanted: Option<Dtype>, allowed: Cast) -> Result<Dtype, (Dtype, &'static str)> {
    let to = match (wanted, allowed) {
        (Some(wanted), _) => wanted,
        (None, Cast::To(dtype)) => dtype,
        (None, _) => stored,
    };
    if to == stored {
        return Ok(to);
    }
    if !cast::is_possible(stored, to) {
        return Err((to, "means nothing"));
    }
    match allowed {
        Cast::Exact => Err((to, "is a cast, and none is allowed here")),
        Cast::Lossless if !cast::is_lossless(stored, to) => Err((to, "may lose values")),
        Cast::To(dtype) if dtype != to && !cast::is_lossless(stored, to) => {
            Err((to, "may lose values, and is not the cast that was allowed"))
        }
        _ => Ok(to),
    }
}

fn resize_allows(resize: Resize, stored: &[u64], wanted: &[u64]) -> bool {
    stored.len() == wanted.len()
        && stored.iter().zip(wanted).all(|(stored, wanted)| match resize {
            Resize::Never => stored == wanted,
            Resize::Pad | Resize::Keep => stored <= wanted,
            Resize::Truncate => stored >= wanted,
            Resize::Both => true,
        })
}
