//! Wanted leaves × stored leaves → one report that names *everything* that does not fit. Called by
//! a restore before a byte is read, and by a dry run; pure.
//!
//! * Leaves meet by their rendered paths: a key and a field of one name are the same, an index and
//!   an integer key too; the *text* `3` and the number `[3]` are not.
//! * Top-level entries that nothing wanted lies below are not wanted: no error, not read.
//! * Include and exclude look at stored paths, then renames give wanted ones.
//!   [`MatchOptions::unexpected`] is asked with stored paths (what a listing of the checkpoint shows),
//!   every other option with wanted ones.
//! * A leaf that selection left out counts as absent, but for a wanted leaf that holds a value:
//!   leaving it out says that the value shall stay.
//! * Aliases are followed: a tie is read from where it is stored.

mod near;
mod report;
mod resolve;
mod unmatched;

use std::collections::{HashMap, HashSet};

use stepwell_core::dtype::Dtype;
use stepwell_core::format::index::{Index, LeafRecord};
use stepwell_core::leaf_path::{Component, LeafPath};
use stepwell_core::region::{Dims, Region};

pub use self::report::{
    Collision, Kept, Missing, MissingLeaf, Report, UnexpectedLeaf, Why, WrongDtype, WrongKind, WrongShape,
};
pub use self::unmatched::{Unmatched, near_globs};
use crate::Result;
use crate::glob::{GlobList, PathText};
use crate::selection::{Renames, Selection};

/// A leaf of the abstract state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Its path in the caller's state.
    pub path: LeafPath,
    /// The wanted form.
    pub spec: Spec,
    /// True if the caller has a value there that may stay when nothing is stored (`missing="keep"`
    /// needs one).
    pub holds_value: bool,
}

/// The wanted form of a leaf.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Spec {
    /// A tensor; `None` takes what is stored.
    Tensor {
        /// Element type.
        dtype: Option<Dtype>,
        /// Global shape.
        shape: Option<Vec<u64>>,
    },
    /// An object.
    Object,
    /// Anything: a leaf, or all leaves below that path (each becomes its own [`Match`]).
    Any,
    /// Leave out: whatever is stored there or below it is not read, and nothing is missing.
    Skip,
}

/// A leaf of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredLeaf {
    /// Its path in the stored state.
    pub path: LeafPath,
    /// Its form.
    pub spec: StoredSpec,
}

/// The form of a stored leaf.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoredSpec {
    /// A logical tensor.
    Tensor {
        /// Element type.
        dtype: Dtype,
        /// Global shape.
        shape: Dims,
    },
    /// An object.
    Object,
    /// The same value as another leaf.
    Alias {
        /// Its position among the stored leaves.
        of: u32,
    },
}

/// The leaves of one index, in leaf order (so that positions are leaf numbers).
pub fn stored_leaves(index: &Index) -> Vec<StoredLeaf> {
    let spec = |record: &LeafRecord| match record {
        LeafRecord::Tensor(tensor) => StoredSpec::Tensor { dtype: tensor.dtype, shape: tensor.shape.clone() },
        LeafRecord::Object(_) => StoredSpec::Object,
        LeafRecord::Alias { of } => StoredSpec::Alias { of: *of },
    };
    index
        .leaves
        .iter()
        .enumerate()
        .map(|(leaf, record)| StoredLeaf { path: index.tree.leaf_path(leaf as u32), spec: spec(record) })
        .collect()
}

/// A choice that may differ per glob: the first glob that matches the path or a subtree above it
/// decides, else the default.
#[derive(Clone, Debug, Default)]
pub struct PerGlob<T> {
    globs: GlobList,
    choices: Vec<T>,
    default: T,
}

impl<T: Copy> PerGlob<T> {
    /// The same everywhere.
    pub fn everywhere(default: T) -> Self {
        Self { globs: GlobList::default(), choices: Vec::new(), default }
    }

    /// Per glob, in order; `default` where none matches.
    pub fn new<S: AsRef<str>>(rules: impl IntoIterator<Item = (S, T)>, default: T) -> Result<Self> {
        let (globs, choices): (Vec<S>, Vec<T>) = rules.into_iter().unzip();
        Ok(Self { globs: GlobList::new(globs)?, choices, default })
    }

    /// The choice for the path with this text.
    pub fn of(&self, text: &[u8]) -> T {
        if self.choices.is_empty() {
            return self.default;
        }
        self.globs.first_match(text).and_then(|glob| self.choices.get(glob).copied()).unwrap_or(self.default)
    }
}

/// The treatment of a wanted leaf that is not stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnMissing {
    /// It is an error.
    #[default]
    Error,
    /// The caller's value stays; without one it is an error.
    Keep,
}

/// The treatment of a stored leaf inside a wanted top-level entry that is not wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnUnexpected {
    /// It is an error.
    #[default]
    Error,
    /// It is not read.
    Ignore,
}

/// Which casts are allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cast {
    /// None: the dtypes must be equal.
    Exact,
    /// Those that keep every value ([`crate::cast::is_lossless`]).
    #[default]
    Lossless,
    /// All that mean anything ([`crate::cast::is_possible`]).
    Lossy,
    /// To this dtype, with loss if need be: it becomes the dtype of a leaf that wants none in
    /// particular, and is agreed to for a leaf that wants it.
    To(Dtype),
}

/// Which differences of shape are allowed; the number of dimensions never differs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Resize {
    /// None.
    #[default]
    Never,
    /// Wanted may be longer: what is not stored is padding.
    Pad,
    /// As `Pad`, for a leaf that holds a value: what is not stored keeps it.
    Keep,
    /// Wanted may be shorter: what is stored beyond it is not read.
    Truncate,
    /// Either, per dimension.
    Both,
}

/// How a match is made. The default: everything selected, everything must be there, lossless casts,
/// no resizing.
#[derive(Clone, Debug, Default)]
pub struct MatchOptions {
    /// Which stored leaves are looked at.
    pub selection: Selection,
    /// Their wanted names.
    pub renames: Renames,
    /// For wanted leaves that are not stored.
    pub missing: PerGlob<OnMissing>,
    /// For stored leaves that are not wanted.
    pub unexpected: PerGlob<OnUnexpected>,
    /// Which casts are allowed.
    pub cast: PerGlob<Cast>,
    /// Which differences of shape are allowed.
    pub resize: PerGlob<Resize>,
    /// Top-level entries that are wanted though no wanted leaf is below them (an empty `dict` in
    /// the caller's state).
    pub top_level: Vec<Component>,
    /// True if everything that is stored is inside what is wanted: where the top of either state is
    /// no container of names, so that there are no entries to be left out by name.
    pub whole: bool,
    /// Items that the step had and has no longer, so that what is missing can be explained.
    pub dropped: Vec<Dropped>,
    /// Stored leaves that other ranks want: that this one does not is no difference.
    pub elsewhere: HashSet<usize>,
}

/// An item that was thinned away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// Its name: a rendered top-level component, or `.` for the loose leaves.
    pub item: String,
    /// When that was, for people.
    pub when: String,
}

/// A stored leaf that goes into a wanted one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Match {
    /// Position among the wanted leaves. Several matches may name one [`Spec::Any`].
    pub wanted: usize,
    /// Position among the stored leaves.
    pub stored: usize,
    /// Position of the stored leaf that holds the bytes: another one where `stored` is an alias.
    pub source: usize,
    /// The tensor that it becomes; `None` for an object.
    pub tensor: Option<TensorMatch>,
}

/// How a tensor is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMatch {
    /// The stored element type.
    pub stored_dtype: Dtype,
    /// The element type that the caller gets.
    pub dtype: Dtype,
    /// The shape that the caller gets.
    pub shape: Vec<u64>,
    /// The part of the stored tensor that is read. Its place in the caller's tensor is the same.
    pub region: Region,
    /// True if the caller's tensor is larger than `region`: the rest of it is padding, and the
    /// caller fills it.
    pub padded: bool,
    /// True if that rest keeps the caller's values.
    pub keeps: bool,
    /// True if the stored tensor is larger than `region`.
    pub truncated: bool,
}

impl TensorMatch {
    /// True if elements change their type.
    pub fn is_cast(&self) -> bool {
        self.stored_dtype != self.dtype
    }
}

/// Texts of many paths, without an allocation for each.
struct Texts {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Texts {
    fn new<'a>(paths: impl ExactSizeIterator<Item = &'a LeafPath>) -> Self {
        // Growing it would take a third of the time of a match.
        let mut texts = Self { bytes: Vec::with_capacity(48 * paths.len()), ends: vec![0] };
        for path in paths {
            path.0.iter().for_each(|component| crate::glob::push_component(component, &mut texts.bytes));
            texts.ends.push(texts.bytes.len());
        }
        texts
    }

    fn get(&self, i: usize) -> &[u8] {
        &self.bytes[self.ends[i]..self.ends[i + 1]]
    }
}

/// Matches `stored` with `wanted`. The report is complete whatever is wrong.
pub fn match_state(wanted: &[Wanted], stored: &[StoredLeaf], options: &MatchOptions) -> Report {
    let wanted_texts = Texts::new(wanted.iter().map(|wanted| &wanted.path));
    let stored_texts = Texts::new(stored.iter().map(|stored| &stored.path));
    Matching {
        wanted,
        stored,
        options,
        wanted_texts: &wanted_texts,
        stored_texts: &stored_texts,
        renamed: HashMap::new(),
        report: Report::default(),
    }
    .run()
}

struct Matching<'a> {
    wanted: &'a [Wanted],
    stored: &'a [StoredLeaf],
    options: &'a MatchOptions,
    wanted_texts: &'a Texts,
    stored_texts: &'a Texts,
    /// New texts of the stored leaves that a rule renamed.
    renamed: HashMap<usize, Vec<u8>>,
    report: Report,
}

/// The wanted leaves, as stored leaves meet them.
struct Targets<'a> {
    by_text: HashMap<&'a [u8], usize>,
    /// [`Spec::Any`] and [`Spec::Skip`], which take what is below them.
    branches: HashMap<&'a [u8], usize>,
    top_level: HashSet<&'a [u8]>,
    /// The whole state is one wanted leaf, so that every stored leaf is inside it.
    everything: bool,
}

impl Targets<'_> {
    fn branch(&self, text: &[u8]) -> Option<usize> {
        if self.branches.is_empty() {
            return None;
        }
        let mut ends: Vec<usize> = crate::glob::boundaries(text).collect();
        ends.reverse(); // the closest one decides
        ends.into_iter().find_map(|end| self.branches.get(&text[..end]).copied())
    }

    fn holds(&self, text: &[u8]) -> bool {
        self.everything
            || crate::glob::components(text).next().is_some_and(|top| self.top_level.contains(top))
    }
}

impl Matching<'_> {
    fn run(mut self) -> Report {
        let top_level: Vec<PathText> =
            self.options.top_level.iter().map(|top| PathText::new(&LeafPath(vec![top.clone()]))).collect();
        let wanted_texts = self.wanted_texts;
        let mut targets = Targets {
            by_text: HashMap::with_capacity(self.wanted.len()),
            branches: HashMap::new(),
            top_level: top_level.iter().map(PathText::as_bytes).collect(),
            everything: self.options.whole,
        };
        for (w, wanted) in self.wanted.iter().enumerate() {
            let text = wanted_texts.get(w);
            targets.by_text.entry(text).or_insert(w);
            if matches!(wanted.spec, Spec::Any | Spec::Skip) {
                targets.branches.entry(text).or_insert(w);
            }
            match crate::glob::components(text).next() {
                Some(top) => drop(targets.top_level.insert(top)),
                None => targets.everything = true,
            }
        }
        let mut assigned: Vec<Option<usize>> = vec![None; self.wanted.len()];
        let mut below_any: Vec<(usize, usize)> = Vec::new();
        let mut collisions: HashMap<usize, Vec<usize>> = HashMap::new();
        let rules = self.options.renames.globs().len();
        // By rename: whether it applied at all, and whether to a leaf that is wanted or left out on
        // purpose.
        let (mut applied, mut useful) = (vec![false; rules], vec![false; rules]);
        for s in 0..self.stored.len() {
            let stored_text = self.stored_texts.get(s);
            let renamed = self.options.renames.apply_text(stored_text);
            let selected = self.options.selection.selects_text(stored_text);
            let rule = renamed.map(|(rule, text)| {
                applied[rule] = true;
                self.renamed.insert(s, text);
                rule
            });
            let mut inside = true;
            if !selected {
                if let Some(rule) = rule {
                    useful[rule] = true;
                }
                self.report.deselected.push(s);
                continue;
            }
            let text = self.renamed.get(&s).map_or(stored_text, Vec::as_slice);
            let exact = targets.by_text.get(text).copied();
            match exact.or_else(|| targets.branch(text)) {
                Some(w) if self.wanted[w].spec == Spec::Skip => self.report.skipped.push(s),
                Some(w) if exact.is_none() => below_any.push((w, s)),
                Some(w) => match assigned[w] {
                    None => assigned[w] = Some(s),
                    Some(first) => collisions.entry(w).or_insert_with(|| vec![first]).push(s),
                },
                None if !targets.holds(text) => {
                    inside = false;
                    self.report.not_wanted.push(s);
                }
                None => match self.options.unexpected.of(stored_text) {
                    OnUnexpected::Ignore => self.report.ignored.push(s),
                    OnUnexpected::Error if self.options.elsewhere.contains(&s) => {
                        self.report.not_wanted.push(s);
                    }
                    OnUnexpected::Error => self.unexpected(s),
                },
            }
            if let Some(rule) = rule {
                useful[rule] |= inside;
            }
        }
        let idle = (0..rules).filter(|&rule| applied[rule] && !useful[rule]);
        let idle = idle.filter_map(|rule| self.options.renames.rule(rule));
        self.report.idle_renames = idle.map(|(from, to)| (from.to_owned(), to.to_owned())).collect();
        self.report.dropped.clone_from(&self.options.dropped);
        self.unmatched(&applied);
        self.collide(collisions);
        self.resolve(&assigned, &below_any);
        self.suggest(&assigned, &below_any);
        self.report
    }

    /// The text under which a stored leaf is wanted.
    fn text(&self, s: usize) -> &[u8] {
        self.renamed.get(&s).map_or_else(|| self.stored_texts.get(s), Vec::as_slice)
    }

    fn unexpected(&mut self, s: usize) {
        let stored_path = crate::glob::render(self.stored_texts.get(s));
        let renamed = self.renamed.get(&s).map(|text| crate::glob::render(text));
        self.report.unexpected.push(UnexpectedLeaf {
            stored: s,
            path: stored_path,
            renamed,
            near: Vec::new(),
        });
    }

    fn collide(&mut self, collisions: HashMap<usize, Vec<usize>>) {
        let mut collisions: Vec<_> = collisions.into_iter().collect();
        collisions.sort_unstable();
        for (w, stored) in collisions {
            let path = crate::glob::render(self.wanted_texts.get(w));
            let stored_paths =
                stored.iter().map(|&s| crate::glob::render(self.stored_texts.get(s))).collect();
            self.report.collisions.push(Collision { wanted: w, path, stored, stored_paths });
        }
    }
}

#[cfg(test)]
mod tests;
