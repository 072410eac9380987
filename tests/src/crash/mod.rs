//! The states after a power cut: each one is built and passed to a check.
//!
//! A test drives the real code over a [`SimDisk`], takes its [`Log`], and calls [`explore`] (or
//! [`explore_nested`], which also crashes inside the recovery). The check gets each crash state as
//! a fresh simulated disk, with the [`Marks`] (acknowledgements) that had been given before the
//! cut.
//!
//! **Durability**, POSIX-minimal: a write is durable after an fsync of its inode that came after
//! its completion, an entry after an fsync of its directory. Everything else is absent, present,
//! half there (the first or the second half) or zeros, each independently of all others: see
//! [`model`]. The second [`Profile`] keeps metadata in order, as journaling file systems do: some
//! bugs show only there.
//!
//! **Cuts.** An effect that is no sync only adds states (it may be absent), a sync only removes
//! some: so the states of all cuts are those of the cuts right before a sync, right before a mark,
//! and at the end. Nothing else is enumerated, nothing is missed.
//!
//! Marks before the first effect describe what the disk held when the scenario began; no cut comes
//! before them.
//!
//! **Enumeration** is exhaustive per cut while there are at most [`Options::cap`] states: each
//! inode's variants are listed once, directories combine those of their children ([`space`]); what
//! is not reachable from the root plays no part. Beyond the cap, all pairs of choices and seeded
//! samples ([`sample`]); the report counts such cuts. States are told apart by hash, together with
//! the marks.
//!
//! **Kills** ([`sweep`]): `kill -9` leaves what was not synced to the next process, and only then
//! comes the power cut.
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
use std::sync::{Arc, Mutex, PoisonError};

use stepwell_core::io::simulated::{Image, ImageNode, Log, Moment, Op, OperationKind, SimDisk, mix};

pub use marks::Marks;
pub use model::{Model, Profile};

/// True if nobody reads the bytes of files below an entry of this name.
pub type Unread = fn(&str) -> bool;

/// How states are enumerated.
#[derive(Clone, Debug)]
pub struct Options {
    /// The guarantees of the file system.
    pub profile: Profile,
    /// States of one cut up to which enumeration is exhaustive, and how many are sampled beyond.
    pub cap: usize,
    /// States of a whole log in which [`explore_nested`] crashes the recovery too, about.
    pub nested_cap: u64,
    /// For the samples.
    pub seed: u64,
    /// Entries (by name) below which the *bytes* of files make no difference, because nobody ever
    /// looks at them: leftovers that are only deleted. States that differ in such bytes alone are
    /// one state. This is no assumption: a check that reads, opens or measures a file there fails,
    /// and one that does not cannot tell those states apart.
    pub unread: Option<Unread>,
}

impl Default for Options {
    fn default() -> Self {
        Self { profile: Profile::PosixMinimal, cap: 20_000, nested_cap: 20_000, seed: 1, unread: None }
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

/// The size of an enumeration.
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
    /// The acknowledgements.
    pub marks: Marks,
    /// The disk.
    pub image: Image,
    /// The check's message.
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

/// Enumerates crash states, over one log or many; a pair of state and marks that was once checked
/// is never checked again.
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

    /// Hands every crash state of `log` that is new to the check; `before` was acknowledged before
    /// the log began. Ends at the first failure.
    pub fn explore(
        &mut self,
        log: &Log,
        before: &Marks,
        mut check: impl FnMut(&SimDisk, &Marks) -> Result<(), String>,
    ) -> Result<(), Box<Failure>> {
        let unread = self.options.unread;
        self.explore_from(log, 0, before, |image, marks| watched(unread, image, |disk| check(disk, marks)))
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
        let first = first.max(preface(log));
        for cut in 0..=log.records.len() {
            let next = log.records.get(cut);
            if cut >= first && next.is_none_or(|next| model.shrinks(&next.op)) {
                let mut visit = |node: Arc<ImageNode>| -> Result<(), Box<Failure>> {
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

/// Marks before the first effect: what the disk held when the scenario began.
fn preface(log: &Log) -> usize {
    log.records.iter().take_while(|record| matches!(record.op, Op::Mark(_))).count()
}

/// Runs a check on a fresh disk, which notices where it looks at what it said it would not.
pub(crate) fn watched(
    unread: Option<Unread>,
    image: &Image,
    check: impl FnOnce(&SimDisk) -> Result<(), String>,
) -> Result<(), String> {
    let disk = SimDisk::from_image(image);
    let Some(unread) = unread else { return check(&disk) };
    let seen = Arc::new(Mutex::new(None));
    let noted = Arc::clone(&seen);
    disk.set_hook(Some(Arc::new(move |moment, operation| {
        let looks =
            matches!(operation.kind, OperationKind::OpenFile | OperationKind::Read | OperationKind::Stat);
        if moment == Moment::Before && looks {
            let text = operation.path.to_string_lossy();
            if text.rsplit_once('/').is_some_and(|(above, _)| above.split('/').any(unread)) {
                *noted.lock().unwrap_or_else(PoisonError::into_inner) =
                    Some(format!("{:?} {text}", operation.kind));
            }
        }
    })));
    let result = check(&disk);
    disk.set_hook(None);
    match seen.lock().unwrap_or_else(PoisonError::into_inner).take() {
        Some(operation) if result.is_ok() => {
            Err(format!("somebody looked where nobody was to look: {operation}"))
        }
        _ => result,
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

/// As [`explore`], for a check that recovers the disk that it gets: what it did there is crashed
/// again at every operation, one level deep, and given to the same check; in all states, or in
/// about [`Options::nested_cap`] of them, spread evenly. Gives what was explored outside and
/// inside.
pub fn explore_nested(
    log: &Log,
    options: &Options,
    mut check: impl FnMut(&SimDisk, &Marks) -> Result<(), String>,
) -> Result<(Explored, Explored), Box<Failure>> {
    let mut count = Explorer::new(options.clone());
    count.explore_from(log, 0, &Marks::default(), |_, _| Ok(()))?;
    let stride = count.explored.distinct.div_ceil(options.nested_cap.max(1)).max(1);
    let mut outer = Explorer::new(options.clone());
    let mut inner = Explorer::new(options.clone());
    let mut number = 0;
    outer.explore(log, &Marks::default(), |disk, marks| {
        check(disk, marks)?;
        number += 1;
        if number % stride == 0 { nested(&mut inner, disk, marks, &mut check) } else { Ok(()) }
    })?;
    Ok((outer.explored, inner.explored))
}

/// Crashes what was done to `disk` since it was made from a crash state, and checks what that
/// leaves. Share one explorer among all outer states: most recoveries leave the same.
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
