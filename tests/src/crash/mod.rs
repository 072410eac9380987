//! What a power cut can leave behind: every state, built and handed to a check.
//!
//! A test drives the real code over a [`SimDisk`], takes its [`Log`], and calls [`explore`] (or [`explore_nested`], which also crashes inside the
//! recovery). The check gets each crash state as a fresh simulated disk, with the [`Marks`] (acknowledgements) that had been given before the cut.
//!
//! **Durability**, POSIX-minimal: a write is durable after an fsync of its inode that came after its completion, an entry after an fsync of its
//! directory. Everything else is absent, present, half there (the first or the second half) or zeros, each independently of
//! all others: see [`model`]. The second [`Profile`] keeps metadata in order, as journaling file systems do: some bugs show only there.
//!
//! **Cuts.** An effect that is no sync only adds states (it may be absent), a sync only removes some: so the states of all cuts are those
//! of the cuts right before a sync, right before a mark, and at the end. Nothing else is enumerated, nothing is missed.
//!
//! **Enumeration** is exhaustive per cut while there are at most [`Options::cap`] states: each inode's variants are listed once, directories combine those of
//! their children ([`space`]); what is not reachable from the root plays no part. Beyond the cap, all pairs of choices and seeded samples
//! ([`sample`]); the report counts such cuts. States are told apart by hash, together with the marks.
//!
//! **Kills** ([`sweep`]): `kill -9` leaves what was not synced to the next process, and only then comes the power cut.
//!
//! **Mutants** ([`mutants`]) check the checker.

pub mod marks;
pub mod model;
pub mod mutants;
#[cfg(test)]
mod oracle;
mod sample;
mod space;
pub mod sweep;

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use stepwell_core::io::simulated::{Image, Log, Node, Op, SimDisk, mix};

pub use marks::Marks;
pub use model::{Model, Profile};

/// How states are enumerated.
#[derive(Clone, Debug)]
pub struct Options {
    /// What a crash may keep.
    pub profile: Profile,
    /// States of one cut up to which enumeration is exhaustive, and how many are sampled beyond.
    pub cap: usize,
    /// For the samples.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { profile: Profile::PosixMinimal, cap: 20_000, seed: 1 }
    }
}

impl Options {
    /// These options with another profile.
    #[must_use]
    pub fn profile(mut self, profile: Profile) -> Self {
        self.profile = profile;
        self
    }
}

/// What was enumerated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Explored {
    /// Cuts whose states were built.
    pub cuts: u64,
    /// Cuts with more states than the cap: sampled.
    pub sampled_cuts: u64,
    /// States built, with repetitions over cuts.
    pub states: u64,
    /// Different (state, marks) pairs: checked.
    pub distinct: u64,
}

impl fmt::Display for Explored {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cuts, sampled_cuts, states, distinct } = self;
        write!(out, "{distinct} distinct states of {states} at {cuts} cuts ({sampled_cuts} sampled)")
    }
}

/// A crash state that the check refused.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Effects before the cut.
    pub cut: usize,
    /// The last effects before the cut, and the one that never came.
    pub around: Vec<String>,
    /// What had been acknowledged.
    pub marks: Marks,
    /// What was left.
    pub image: Image,
    /// What the check said.
    pub message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "{}", self.message)?;
        writeln!(out, "after a crash with {} effects done (the last of these never came):", self.cut)?;
        self.around.iter().try_for_each(|line| writeln!(out, "    {line}"))?;
        writeln!(out, "acknowledged: {}", self.marks)?;
        write!(out, "left on the disk:\n{}", self.image)
    }
}

impl std::error::Error for Failure {}

/// Enumerates crash states, over one log or many; a pair of state and marks that was once checked is never checked again.
pub struct Explorer {
    options: Options,
    seen: HashSet<u64>,
    /// Sums over all explored logs.
    pub explored: Explored,
}

impl Explorer {
    /// One that has seen nothing yet.
    pub fn new(options: Options) -> Self {
        Self { options, seen: HashSet::new(), explored: Explored::default() }
    }

    /// Hands every crash state of `log` that is new to the check; `before` was acknowledged before the log began. Ends at the first failure.
    pub fn explore(
        &mut self,
        log: &Log,
        before: &Marks,
        mut check: impl FnMut(&SimDisk, &Marks) -> Result<(), String>,
    ) -> Result<(), Box<Failure>> {
        self.explore_from(log, 0, before, |image, marks| check(&SimDisk::from_image(image), marks))
    }

    /// As [`Explorer::explore`], for the cuts from `first` on, with images instead of disks.
    pub(crate) fn explore_from(
        &mut self,
        log: &Log,
        first: usize,
        before: &Marks,
        mut check: impl FnMut(&Image, &Marks) -> Result<(), String>,
    ) -> Result<(), Box<Failure>> {
        let mut model = Model::new(&log.base);
        let mut space = space::Space::new(&self.options);
        let mut marks = before.clone();
        for cut in 0..=log.records.len() {
            let next = log.records.get(cut);
            if cut >= first && next.is_none_or(|next| model.shrinks(&next.op)) {
                let mut visit = |node: Arc<Node>| -> Result<(), Box<Failure>> {
                    self.explored.states += 1;
                    if !self.seen.insert(mix(node.hash(), marks.hash())) {
                        return Ok(());
                    }
                    self.explored.distinct += 1;
                    let image = Image(node);
                    check(&image, &marks).map_err(|message| {
                        let around = log.records.iter().take(cut + 1).skip(cut.saturating_sub(8));
                        let around = around.map(ToString::to_string).collect();
                        Box::new(Failure { cut, around, marks: marks.clone(), image, message })
                    })
                };
                self.explored.cuts += 1;
                if let Some(states) = space.all(&mut model) {
                    for state in states.iter() {
                        visit(Arc::clone(state))?;
                    }
                } else {
                    self.explored.sampled_cuts += 1;
                    let seed = mix(self.options.seed, cut as u64);
                    sample::visit(&model, &self.options, seed, &mut visit)?;
                }
            }
            if let Some(next) = next {
                if let Op::Mark(label) = &next.op {
                    marks.push(label);
                }
                model.apply(&next.op);
            }
        }
        Ok(())
    }
}

/// Checks every crash state of a log.
pub fn explore(
    log: &Log,
    options: &Options,
    check: impl FnMut(&SimDisk, &Marks) -> Result<(), String>,
) -> Result<Explored, Box<Failure>> {
    let mut explorer = Explorer::new(options.clone());
    explorer.explore(log, &Marks::default(), check)?;
    Ok(explorer.explored)
}

/// As [`explore`], for a check that recovers the disk that it gets: what it did there is crashed again at every operation, one level deep, and given
/// to the same check. Gives what was explored outside and inside.
pub fn explore_nested(
    log: &Log,
    options: &Options,
    mut check: impl FnMut(&SimDisk, &Marks) -> Result<(), String>,
) -> Result<(Explored, Explored), Box<Failure>> {
    let mut outer = Explorer::new(options.clone());
    let mut inner = Explorer::new(options.clone());
    outer.explore(log, &Marks::default(), |disk, marks| {
        check(disk, marks)?;
        nested(&mut inner, disk, marks, &mut check)
    })?;
    Ok((outer.explored, inner.explored))
}

/// Crashes what was done to `disk` since it was made from a crash state, and checks what that leaves. Share one explorer among all outer states: most
/// recoveries leave the same.
pub fn nested(
    inner: &mut Explorer,
    disk: &SimDisk,
    marks: &Marks,
    mut check: impl FnMut(&SimDisk, &Marks) -> Result<(), String>,
) -> Result<(), String> {
    let log = disk.log();
    if log.records.is_empty() {
        return Ok(());
    }
    inner
        .explore(&log, marks, &mut check)
        .map_err(|failure| format!("after a second crash, inside the recovery: {failure}"))
}
