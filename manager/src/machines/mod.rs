//! A root whose files are on the local disks of several machines.
//!
//! ```text
//! the leader's machine                    another machine
//! run/step_00000010/manifest.json         run/.part-00000010-<session>-<save>/params/00008.data
//!                  /params/index                                            /params/00009.data
//!                  /params/00000.data     ...
//! ```
//!
//! The steps, with their manifests and indexes, are on the machine of the leader (the main
//! machine). Each rank writes its data file to its own machine: into a *part*, a directory that is
//! named after the attempt. A part is durable before its ranks vote. So the one rename of the
//! leader commits the step on all machines, and nothing has to be rolled forward.
//!
//! The first rank of each machine serves the files of its machine to the others
//! ([`stepwell_core::served`]). To a reader, the root is one directory ([`dir`]). When the ranks
//! meet ([`meeting`]), the leader finds the machine that was main last ([`record`]), and takes its
//! steps over ([`hand_over`]). Parts of steps that are gone are removed ([`leftovers`]). Other
//! machines keep copies of the files, if the user wants it ([`copies`]). Each machine carries its
//! own files to further tiers ([`carrying`]).

mod carrying;
mod copies;
mod dir;
mod hand_over;
mod leftovers;
mod meeting;
mod record;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use stepwell_core::format::manifest::Attempt;
use stepwell_core::io::{Dir, EntryKind, Lock};
use stepwell_core::served::{ServedDir, Server};

use crate::directory_layout::{self, OwnName};
use crate::error::Result;

pub(crate) use carrying::{CarryLimits, CarryOutcome, CarryRoots, CarryTask, FileCarrier};
pub(crate) use copies::{Copier, CopyTarget, FoundReport};
pub(crate) use dir::MachinesDir;
pub(crate) use leftovers::Leftovers;
pub(crate) use meeting::meet;
pub(crate) use record::is_spread;

/// The answer to a question for all files of a step is used again for so long.
const LENGTHS_LAST: Duration = Duration::from_secs(5);

/// The first node among the numbers of writers. Ranks are below.
const NODES: u32 = 1 << 31;

/// The lengths of files, by their paths in a step.
type Lengths = BTreeMap<String, u64>;
/// The lengths of steps, by name, with the time of the answer.
type KnownLengths = HashMap<String, (Instant, Lengths)>;

/// The machines of a job, as one of its ranks knows them.
pub(crate) struct Machines {
    /// The number of this machine.
    own: u32,
    /// The number of the main machine.
    main: u32,
    /// The root on this machine.
    local: Arc<dyn Dir>,
    /// The roots of the other machines, by number.
    others: BTreeMap<u32, Arc<ServedDir>>,
    /// For each rank, the number of its machine in this session.
    of_ranks: Arc<[u32]>,
    session: String,
    /// The machines that have files of a rank, for the attempts of earlier sessions.
    held: HashMap<Attempt, Vec<Held>>,
    /// Sessions of parts without a step, when the ranks met.
    unnamed: BTreeSet<String>,
    /// The machines that had a copy or a part with a manifest, when the ranks met.
    with_manifests: BTreeSet<u32>,
    /// Held by the thread that changes the manifest of a copy on this machine.
    copied_manifests: Mutex<()>,
    lengths: Mutex<KnownLengths>,
    is_host: bool,
    is_recorded: Mutex<bool>,
    /// The id of the main machine.
    main_id: String,
    /// On the first rank of a machine, until it leaves.
    hosting: Mutex<Option<Hosting>>,
}

/// The services of the first rank of a machine for it.
struct Hosting {
    server: Option<Server>,
    /// The lock of the writer of this machine's root. The main machine's is the root's own.
    _lock: Option<Box<dyn Lock>>,
}

/// Writers of data files ([`writer_of`]), as first and last of each run, in order.
type WriterRuns = Vec<(u32, u32)>;

/// Files of an attempt on a machine: those of these writers.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Held {
    machine: u32,
    writers: WriterRuns,
    /// The writers all of whose files are there, if it is a copy.
    whole: Option<WriterRuns>,
}

/// A machine that may have a file, and true if it would be in a copy.
type Place = (u32, bool);

impl Held {
    fn in_copy(&self) -> bool {
        self.whole.is_some()
    }

    /// True if it has a file of a writer.
    fn has(&self, writer: u32) -> bool {
        contain(&self.writers, writer)
    }

    /// True if it has all files of a writer.
    fn has_all(&self, writer: u32) -> bool {
        contain(self.whole.as_ref().unwrap_or(&self.writers), writer)
    }
}

fn contain(runs: &WriterRuns, writer: u32) -> bool {
    runs.iter().any(|&(first, last)| (first..=last).contains(&writer))
}

/// Returns writers as first and last of each run.
fn runs_of(writers: &BTreeSet<u32>) -> WriterRuns {
    let mut runs = WriterRuns::new();
    for &writer in writers {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(writer) => *last = writer,
            _ => runs.push((writer, writer)),
        }
    }
    runs
}

impl Machines {
    /// True on the machine that has the steps.
    pub(crate) fn is_main(&self) -> bool {
        self.own == self.main
    }

    /// True if this process serves the files of its machine.
    pub(crate) fn is_host(&self) -> bool {
        self.is_host
    }

    /// The root on this machine.
    pub(crate) fn local(&self) -> &Arc<dyn Dir> {
        &self.local
    }

    /// Records, before the first step of this session is committed, that the run goes on with it
    /// ([`record`]).
    pub(crate) fn record_session(&self) -> stepwell_core::Result<()> {
        let mut is_recorded = self.is_recorded.lock().unwrap_or_else(PoisonError::into_inner);
        if *is_recorded || !self.is_host() {
            return Ok(());
        }
        if let Some(mut record) = record::read(&*self.local)? {
            record.sessions.insert(self.session.clone());
            record.main.clone_from(&self.main_id);
            record::write(&*self.local, &record)?;
        }
        *is_recorded = true;
        Ok(())
    }

    /// Records, on the main machine, that the run has gone on without the steps of absent machines:
    /// their parts may go.
    pub(crate) fn forget_absent(&self) -> Result<()> {
        let Some(mut record) = record::read(&*self.local)? else { return Ok(()) };
        record.sessions.extend(self.unnamed.iter().cloned());
        record.absent.clear();
        Ok(record::write(&*self.local, &record)?)
    }

    /// The number of reads of data that this process has answered. It changes while others read.
    pub(crate) fn reads(&self) -> u64 {
        self.hosting().as_ref().and_then(|hosting| hosting.server.as_ref()).map_or(0, Server::reads)
    }

    /// Ends what this process does for its machine.
    pub(crate) fn stop(&self) {
        let hosting = self.hosting().take();
        drop(hosting);
    }

    fn hosting(&self) -> MutexGuard<'_, Option<Hosting>> {
        self.hosting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the machines that may have a file of a writer, the likeliest first. The main machine
    /// has all files of a step that was copied into the root.
    fn holders(&self, attempt: &Attempt, writer: u32) -> Vec<Place> {
        let (saved, held) = (self.saved_by(attempt, writer), self.held_of(attempt));
        let held = held.filter(|held| held.has(writer)).map(|held| (held.machine, held.in_copy()));
        saved.map(|machine| (machine, false)).into_iter().chain(held).chain([(self.main, false)]).collect()
    }

    /// Returns the machines that may have files of an attempt.
    fn holders_of(&self, attempt: &Attempt) -> BTreeSet<Place> {
        if attempt.session == self.session {
            return self.of_ranks.iter().map(|&machine| (machine, false)).collect();
        }
        let held = self.held_of(attempt).map(|held| (held.machine, held.in_copy()));
        held.chain([(self.main, false)]).collect()
    }

    /// Returns the machines that have all files of a writer.
    fn machines_with(&self, attempt: &Attempt, writer: u32) -> BTreeSet<u32> {
        let held = self.held_of(attempt).filter(|held| held.has_all(writer)).map(|held| held.machine);
        let known: BTreeSet<u32> = self.saved_by(attempt, writer).into_iter().chain(held).collect();
        if known.is_empty() { BTreeSet::from([self.main]) } else { known }
    }

    /// Returns the machine of a writer, if this session made the attempt.
    fn saved_by(&self, attempt: &Attempt, writer: u32) -> Option<u32> {
        let machine = match writer.checked_sub(NODES) {
            Some(node) => Some(node).filter(|node| self.of_ranks.contains(node)),
            None => self.of_ranks.get(writer as usize).copied(),
        };
        machine.filter(|_| attempt.session == self.session)
    }

    fn held_of(&self, attempt: &Attempt) -> impl Iterator<Item = &Held> {
        self.held.get(attempt).into_iter().flatten()
    }

    fn lengths(&self) -> MutexGuard<'_, KnownLengths> {
        self.lengths.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the name of the part of an attempt.
fn part_of(step: u64, attempt: &Attempt) -> String {
    directory_layout::part(&directory_layout::label(step), &attempt.session, attempt.counter)
}

/// Returns the part that ranks of other machines write, in place of the temporary of a save.
fn part_of_temporary(name: &str) -> Option<(String, Attempt)> {
    match directory_layout::parse(name)? {
        OwnName::Temporary { label, session, counter } => {
            let part = directory_layout::part(&label, &session, counter);
            Some((part, Attempt { session, counter }))
        }
        _ => None,
    }
}

/// Returns the writer of a data file by its name: a rank, or a node whose ranks share the file.
/// Nodes are counted from [`NODES`], and are the machines of the session that wrote it.
fn writer_of(path: &str) -> Option<u32> {
    let name = path.rsplit_once('/').map_or(path, |(_, name)| name).strip_suffix(".data")?;
    match name.strip_prefix('n') {
        Some(node) => node.parse().ok().and_then(|node: u32| node.checked_add(NODES)),
        None => name.parse().ok().filter(|&rank| rank < NODES),
    }
}

/// Syncs a directory with all directories in it, the deepest first.
fn sync_below(dir: &dyn Dir) -> stepwell_core::Result<()> {
    for entry in dir.unsorted_entries()?.into_iter().filter(|entry| entry.kind == EntryKind::Dir) {
        sync_below(&*dir.open_dir(&entry.name)?)?;
    }
    dir.sync()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_writer_is_read_from_the_name_of_a_file() {
        assert_eq!(writer_of("params/00008.data"), Some(8));
        assert_eq!(writer_of("params/n00016.data"), Some(NODES + 16));
        for other in ["params/index", "manifest.json", "00008", "params/x.data", ""] {
            assert_eq!(writer_of(other), None, "{other}");
        }
    }

    #[test]
    fn a_part_is_named_after_the_attempt() {
        let session = "0123456789abcdef0123456789abcdef".to_owned();
        let attempt = Attempt { session: session.clone(), counter: 3 };
        let temporary = directory_layout::temporary(&directory_layout::label(5), &session, 3);
        assert_eq!(part_of_temporary(&temporary), Some((part_of(5, &attempt), attempt)));
        assert_eq!(part_of_temporary("step_00000005"), None);
    }
}
