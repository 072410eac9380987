//! Mechanical mutants of a protocol: its log with one sync or rename left out, or with two
//! neighbours swapped. A checker that does not notice them checks nothing.
//!
//! Each mutant is caught, or adds no crash state to those of the original (then no check could
//! notice it: *equivalent*), or is explained in a table of the caller, with the reason why it is
//! harmless. Anything else is a hole in the invariants, or in the protocol.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use stepwell_core::io::simulated::{Image, Ino, Log, Op, SimDisk, mix};

use super::{Explored, Explorer, Failure, Marks, Options, preface, watched};

/// A change of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// This effect never happened.
    Drop(usize),
    /// This effect and the next happened in the other order.
    Swap(usize),
}

impl Mutation {
    /// Every mutation of a log: each fsync, directory fsync and rename dropped, each adjacent pair
    /// swapped that could have happened in the other order (a write into a file that is not made
    /// yet could not).
    pub fn all(log: &Log) -> Vec<Self> {
        let ops: Vec<&Op> = log.records.iter().map(|record| &record.op).collect();
        let drops = ops.iter().enumerate().filter(|(_, op)| can_be_dropped(op)).map(|(at, _)| Self::Drop(at));
        let swaps = ops.windows(2).enumerate().skip(preface(log)).filter_map(|(at, pair)| match pair {
            [one, two] if can_be_swapped(one, two) => Some(Self::Swap(at)),
            _ => None,
        });
        drops.chain(swaps).collect()
    }

    /// The mutated log.
    pub fn of(self, log: &Log) -> Log {
        let mut log = log.clone();
        match self {
            Self::Drop(at) => {
                log.records.remove(at);
            }
            Self::Swap(at) => log.records.swap(at, at + 1),
        }
        log
    }

    /// Its description: `drop fsync run/.tmp-1/manifest.json`, `swap [rename … | fsync …]`.
    pub fn label(self, log: &Log) -> String {
        let words = |at: usize| log.records.get(at).map(ToString::to_string).unwrap_or_default();
        match self {
            Self::Drop(at) => format!("drop {}", words(at)),
            Self::Swap(at) => format!("swap [{} | {}]", words(at), words(at + 1)),
        }
    }

    fn first_cut(self) -> usize {
        match self {
            // States before the mutation are the original's.
            Self::Drop(at) | Self::Swap(at) => at,
        }
    }
}

fn can_be_dropped(op: &Op) -> bool {
    matches!(op, Op::Fsync { .. } | Op::FsyncDir { .. } | Op::Rename { .. })
}

/// The inode that an effect is done to, and the directory and names that it changes.
fn subject(op: &Op) -> (Option<Ino>, Option<Ino>, Vec<&Arc<str>>) {
    match op {
        Op::Mkdir { dir, name, ino }
        | Op::Create { dir, name, ino }
        | Op::Unlink { dir, name, ino }
        | Op::Rmdir { dir, name, ino } => (Some(*ino), Some(*dir), vec![name]),
        Op::Rename { dir, from, to, ino, .. } => (Some(*ino), Some(*dir), vec![from, to]),
        Op::Write { ino, .. }
        | Op::Submit { ino, .. }
        | Op::Complete { ino, .. }
        | Op::SetLen { ino, .. }
        | Op::Fsync { ino }
        | Op::FsyncFailed { ino } => (Some(*ino), None, Vec::new()),
        Op::FsyncDir { dir } => (Some(*dir), None, Vec::new()),
        Op::Mark(_) => (None, None, Vec::new()),
    }
}

fn can_be_swapped(one: &Op, two: &Op) -> bool {
    let (first, first_dir, first_names) = subject(one);
    let (second, second_dir, second_names) = subject(two);
    let makes = matches!(one, Op::Mkdir { .. } | Op::Create { .. });
    let uses = first.is_some() && (second == first || second_dir == first);
    let same_names = first_dir.is_some()
        && first_dir == second_dir
        && first_names.iter().any(|name| second_names.contains(name));
    // A directory is removed when it is empty.
    let empties = matches!(two, Op::Rmdir { ino, .. } if first_dir == Some(*ino));
    let both_marks = matches!((one, two), (Op::Mark(_), Op::Mark(_)));
    let completes =
        matches!((one, two), (Op::Submit { id, .. }, Op::Complete { id: done, .. }) if id == done);
    let impossible = (makes && uses) || same_names || empties || completes;
    !impossible && !both_marks && one != two
}

/// Why a mutant that survives is harmless: `pattern` is a label with `*` for any text.
#[derive(Clone, Copy, Debug)]
pub struct Explained {
    /// Which labels it explains.
    pub pattern: &'static str,
    /// Why it does no harm.
    pub reason: &'static str,
}

/// The result of a mutant.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// Some crash state of it breaks an invariant.
    Caught(Box<Failure>),
    /// It has no crash state that the original does not have.
    Equivalent,
    /// It has new states and all pass, for this reason.
    Explained(&'static str),
    /// It has new states and all pass, for no known reason.
    Survived,
}

/// One mutant and what became of it.
#[derive(Clone, Debug)]
pub struct Judged {
    /// See [`Mutation::label`].
    pub label: String,
    /// Its result.
    pub verdict: Verdict,
    /// States that the original does not have and that were checked.
    pub new_states: u64,
}

/// All mutants of a log.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// In order of the log, drops first.
    pub judged: Vec<Judged>,
    /// The size of the enumeration, including the original.
    pub explored: Explored,
    /// Patterns of the table that explained nothing: to be removed.
    pub unused: Vec<&'static str>,
}

impl Report {
    /// Mutants that survived without an explanation.
    pub fn survivors(&self) -> Vec<&str> {
        self.with(|verdict| matches!(verdict, Verdict::Survived))
    }

    /// Mutants that were caught.
    pub fn caught(&self) -> Vec<&str> {
        self.with(|verdict| matches!(verdict, Verdict::Caught(_)))
    }

    /// Mutants without a state of their own.
    pub fn equivalent(&self) -> Vec<&str> {
        self.with(|verdict| matches!(verdict, Verdict::Equivalent))
    }

    fn with(&self, wanted: impl Fn(&Verdict) -> bool) -> Vec<&str> {
        self.judged
            .iter()
            .filter(|judged| wanted(&judged.verdict))
            .map(|judged| judged.label.as_str())
            .collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Judged { label, verdict, new_states } in &self.judged {
            match verdict {
                Verdict::Caught(failure) => {
                    let first = failure.message.lines().next().unwrap_or_default();
                    writeln!(out, "caught      {label}: {first}")?;
                }
                Verdict::Equivalent => writeln!(out, "equivalent  {label}")?,
                Verdict::Explained(reason) => {
                    writeln!(out, "explained   {label} ({new_states} new states): {reason}")?;
                }
                Verdict::Survived => writeln!(out, "SURVIVED    {label} ({new_states} new states)")?,
            }
        }
        for pattern in &self.unused {
            writeln!(out, "UNUSED      {pattern}")?;
        }
        write!(
            out,
            "{} mutants: {} caught, {} equivalent, {} survived; {}",
            self.judged.len(),
            self.caught().len(),
            self.equivalent().len(),
            self.survivors().len(),
            self.explored
        )
    }
}

/// Checks the original log, which must pass, then every mutant of it. A state that passed is not
/// checked again for another mutant.
pub fn judge(
    log: &Log,
    options: &Options,
    explained: &[Explained],
    mut check: impl FnMut(&SimDisk, &Marks) -> Result<(), String>,
) -> Result<Report, Box<Failure>> {
    let mut original = HashSet::new();
    let mut passed = HashSet::new();
    let mut report = Report::default();
    let mut explorer = Explorer::new(options.clone());
    explorer.explore_from(log, 0, &Marks::default(), |image, marks| {
        original.insert(key(image, marks));
        watched(options.unread, image, |disk| check(disk, marks))
    })?;
    add(&mut report.explored, &explorer.explored);
    let mut used = HashSet::new();
    for mutation in Mutation::all(log) {
        let mut new_states = 0;
        let mut explorer = Explorer::new(options.clone());
        let mutant = mutation.of(log);
        let result =
            explorer.explore_from(&mutant, mutation.first_cut(), &Marks::default(), |image, marks| {
                let key = key(image, marks);
                if original.contains(&key) {
                    return Ok(());
                }
                new_states += 1;
                if passed.contains(&key) {
                    return Ok(());
                }
                watched(options.unread, image, |disk| check(disk, marks))?;
                passed.insert(key);
                Ok(())
            });
        add(&mut report.explored, &explorer.explored);
        let label = mutation.label(log);
        let verdict = match result {
            Err(failure) => Verdict::Caught(failure),
            Ok(()) if new_states == 0 => Verdict::Equivalent,
            Ok(()) => match explained.iter().find(|line| matches(line.pattern, &label)) {
                Some(line) => {
                    used.insert(line.pattern);
                    Verdict::Explained(line.reason)
                }
                None => Verdict::Survived,
            },
        };
        report.judged.push(Judged { label, verdict, new_states });
    }
    report.unused =
        explained.iter().map(|line| line.pattern).filter(|pattern| !used.contains(pattern)).collect();
    Ok(report)
}

fn key(image: &Image, marks: &Marks) -> u64 {
    mix(image.hash(), marks.hash())
}

fn add(sum: &mut Explored, more: &Explored) {
    sum.cuts += more.cuts;
    sum.sampled_cuts += more.sampled_cuts;
    sum.states += more.states;
    sum.distinct += more.distinct;
}

/// True if `*` (any text) in the pattern can be filled so that it is the label.
fn matches(pattern: &str, label: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == label,
        Some((head, tail)) => label.strip_prefix(head).is_some_and(|rest| {
            rest.char_indices().map(|(at, _)| at).chain([rest.len()]).any(|at| matches(tail, &rest[at..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn a_star_stands_for_any_text() {
        assert!(matches("drop fsync *", "drop fsync run/x"));
        assert!(matches("swap [* | mark \"committed *\"]", "swap [fsync run/ | mark \"committed 3\"]"));
        assert!(matches("*", ""));
        assert!(!matches("drop fsync", "drop fsync run"));
        assert!(!matches("drop *manifest", "drop fsync run/manifest.json"));
    }
}
