//! Copies of the files of other machines, so that the loss of a machine loses no step.
//!
//! ```text
//! machine 0 (main)            machine 1                  machine 2
//! step_00000010/              .part-00000010-…/          .part-00000010-…/
//! .copy-…/  of machine 2      .copy-…/  of machine 0     .copy-…/  of machine 1
//!                               with manifest and indexes
//! ```
//!
//! Each machine pulls the files of the machines before it into a *copy*, a directory that is named
//! after the attempt. A file gets its name there when it is whole and durable. A marker names the
//! writers all of whose files are there: an interrupted copy does not count. The machines behind
//! the main one also copy the manifest and the indexes. If the main machine is lost, the next
//! leader takes the steps from such a machine ([`super::hand_over`]).
//!
//! The main machine gives orders in a file, which the others read: the step to copy. They report in
//! a file of theirs, which the leader reads. A copy must not bring back a step that was rewound or
//! deleted. So each order makes the machines look at the steps of the main machine first, and drop
//! the manifests of others. A rewind or deletion waits for the reports. A machine that was absent
//! in a session drops all manifests of its copies when it is back.

use std::collections::BTreeSet;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use stepwell_core::format::manifest::{Attempt, Manifest, stored_files};
use stepwell_core::io::{Dir, File};
use stepwell_core::load::LoadOptions;
use stepwell_core::served::lengths_below;
use stepwell_core::sys::each;
use stepwell_core::{Result as CoreResult, limits};

use super::dir::{NamedAttempt, named_attempts};
use super::hand_over::take_sidecars_over;
use super::leftovers::MainListing;
use super::{Lengths, Machines, WriterRuns, part_of, runs_of, sync_below, writer_of};
use crate::checkpoint::Checkpoint;
use crate::commit::aside;
use crate::control::{self, KnownRun};
use crate::delete_tree::ignore_missing;
use crate::directory_layout::{self, ASIDE, COPY_ORDERS, COPY_REPORT, MANIFEST, OwnName, WHOLE};
use crate::discovery::REQUESTS_AT_ONCE;
use crate::error::Result;
use crate::root::Root;

/// The most bytes of a marker.
const MAX_BYTES: u64 = 1 << 20;
/// The most writers whose files are in a copy.
const MAX_WRITERS: u64 = 1 << 24;
/// A machine that copies looks for new orders, and reports its progress, at this interval.
const ORDERS_INTERVAL: Duration = Duration::from_millis(500);

/// The orders of the main machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CopyOrders {
    /// The session that gives them.
    session: String,
    /// Counts the orders of the session. The first one is 1.
    number: u64,
    target: Option<CopyTarget>,
    /// True if steps were removed: the run has gone on.
    has_removed: bool,
}

/// The attempt to copy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CopyTarget {
    pub(crate) step: u64,
    /// The name of its directory.
    pub(crate) name: String,
    pub(crate) attempt: Attempt,
}

/// The report of a machine on these orders.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CopyReport {
    session: String,
    /// The last order before whose copying the machine has dropped manifests.
    pub(crate) dropped: u64,
    /// The last order that has ended.
    pub(crate) ended: u64,
    /// Why it failed.
    pub(crate) failure: Option<String>,
    /// The bytes that were copied in this session.
    pub(crate) bytes: u64,
}

/// The report of a machine, or the error of its reading.
pub(crate) struct FoundReport<T> {
    /// The root of the machine, for messages.
    pub(crate) place: String,
    pub(crate) report: CoreResult<T>,
}

impl Machines {
    /// Gives an order, on the main machine.
    pub(crate) fn order(&self, number: u64, target: Option<CopyTarget>, has_removed: bool) -> CoreResult<()> {
        let orders = CopyOrders { session: self.session.clone(), number, target, has_removed };
        control::replace_json(&*self.local, COPY_ORDERS, &orders)
    }

    /// Reads the reports of all machines, on the main machine.
    pub(crate) fn copy_reports(&self) -> Vec<FoundReport<CopyReport>> {
        let others = self.others.values().map(|other| Arc::clone(other) as Arc<dyn Dir>);
        let roots: Vec<Arc<dyn Dir>> = std::iter::once(Arc::clone(&self.local)).chain(others).collect();
        self.reports(&roots, COPY_REPORT, |report: &CopyReport| &report.session)
    }

    /// Reads the reports of machines, in the files with this name. A report of another session
    /// counts as none.
    pub(super) fn reports<T: for<'de> Deserialize<'de> + Default + Send>(
        &self,
        roots: &[Arc<dyn Dir>],
        name: &str,
        session: impl Fn(&T) -> &str + Sync,
    ) -> Vec<FoundReport<T>> {
        each("stepwell-reports", REQUESTS_AT_ONCE, roots, |root| {
            let report: CoreResult<Option<T>> = read_control(&**root, name);
            let report = report.map(|found| found.filter(|one| session(one) == self.session));
            let place = root.path().display().to_string();
            FoundReport { place, report: report.map(Option::unwrap_or_default) }
        })
    }

    /// The number of machines.
    pub(crate) fn count(&self) -> usize {
        self.others.len() + 1
    }

    /// True if a machine had a copy with a manifest, when the ranks met.
    pub(crate) fn had_manifests(&self) -> bool {
        !self.with_manifests.is_empty()
    }

    /// The right to change manifests of copies on this machine.
    pub(super) fn copied_manifests(&self) -> MutexGuard<'_, ()> {
        self.copied_manifests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if no other machine has a copy with another manifest than this one. It is asked before
    /// files are deleted that an older manifest lists.
    pub(super) fn copies_have(
        &self,
        (step, attempt): (u64, &Attempt),
        manifest: &[u8],
        copies: u32,
    ) -> CoreResult<bool> {
        let mut machines = self.keepers(&BTreeSet::from([self.main]), copies);
        machines.extend(&self.with_manifests);
        for other in machines.iter().filter_map(|machine| self.others.get(machine)) {
            for dir in [copy_of(step, attempt), part_of(step, attempt)] {
                match other.read_file(&format!("{dir}/{MANIFEST}"), limits::MAX_MANIFEST_BYTES) {
                    Ok(theirs) if theirs != manifest => return Ok(false),
                    Err(error) if !error.is_gone() => return Err(error),
                    _ => {}
                }
            }
        }
        Ok(true)
    }

    /// Returns the machines that are to have copies of files that these machines have.
    fn keepers(&self, holders: &BTreeSet<u32>, copies: u32) -> BTreeSet<u32> {
        let mut all: BTreeSet<u32> = self.others.keys().copied().collect();
        all.insert(self.own);
        keepers(&all, holders, copies)
    }

    /// True if this machine is to have a copy of a file of an attempt.
    fn keeps(&self, attempt: &Attempt, path: &str, copies: u32) -> bool {
        let Some(writer) = writer_of(path) else { return false };
        self.keepers(&self.machines_with(attempt, writer), copies).contains(&self.own)
    }

    /// True if this machine is to have copies of the manifests.
    fn keeps_manifests(&self, copies: u32) -> bool {
        self.keepers(&BTreeSet::from([self.main]), copies).contains(&self.own)
    }
}

/// Returns those of `all` machines that follow the first holder, until `copies` have the files.
fn keepers(all: &BTreeSet<u32>, holders: &BTreeSet<u32>, copies: u32) -> BTreeSet<u32> {
    let Some(&first) = holders.first() else { return BTreeSet::new() };
    let lacking = (copies as usize).min(all.len()).saturating_sub(holders.len());
    let (before, behind) = (all.range(..first), all.range(first..));
    behind.chain(before).filter(|machine| !holders.contains(machine)).take(lacking).copied().collect()
}

/// Returns the name of the copy of an attempt.
pub(super) fn copy_of(step: u64, attempt: &Attempt) -> String {
    directory_layout::copy(&directory_layout::label(step), &attempt.session, attempt.counter)
}

/// Returns the copies and parts with the manifest of a step on this machine. A machine that was
/// main has such parts.
pub(super) fn with_manifest(local: &dyn Dir) -> CoreResult<Vec<NamedAttempt>> {
    let is_ours = |name: &str| {
        matches!(directory_layout::parse(name), Some(OwnName::Copy { .. } | OwnName::Part { .. }))
    };
    let mut found = Vec::new();
    for named in named_attempts(local, &is_ours)? {
        if local.stat(&format!("{}/{ASIDE}", named.name))?.is_none() {
            found.push(named);
        }
    }
    Ok(found)
}

/// Drops the manifest of a copy, durably.
pub(super) fn drop_manifest(local: &dyn Dir, copy: &str) -> CoreResult<()> {
    let copy = local.open_dir(copy)?;
    ignore_missing(copy.remove_file(MANIFEST))?;
    copy.sync()
}

/// Returns the writers all of whose files are in a copy.
pub(super) fn whole_writers(copy: &dyn Dir) -> CoreResult<WriterRuns> {
    match copy.read_file(WHOLE, MAX_BYTES) {
        // An invalid one was edited. The files are copied again.
        Ok(bytes) => {
            let runs: WriterRuns = serde_json::from_slice(&bytes).unwrap_or_default();
            let writers = runs.iter().map(|&(first, last)| u64::from(last.saturating_sub(first)) + 1);
            Ok(if writers.sum::<u64>() > MAX_WRITERS { WriterRuns::new() } else { runs })
        }
        Err(error) if error.is_gone() => Ok(WriterRuns::new()),
        Err(error) => Err(error),
    }
}

/// Reads a file of orders or of a report, if there is one.
pub(super) fn read_control<T: for<'de> Deserialize<'de>>(
    root: &dyn Dir,
    name: &str,
) -> CoreResult<Option<T>> {
    match root.read_file(&directory_layout::control(name), limits::MAX_MANIFEST_BYTES) {
        // An invalid one was edited. The next one replaces it.
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(error) if error.is_gone() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Keeps the copies of one machine. Its host owns it.
pub(crate) struct Copier {
    machines: Arc<Machines>,
    copies: u32,
    listing: MainListing,
    report: CopyReport,
    /// The report that was written last.
    written: CopyReport,
    /// The order that is carried out.
    order: u64,
    /// True if the copying was stopped.
    is_stopped: bool,
}

impl Copier {
    /// The copier of this machine. `copies` is the number of machines that have a file.
    pub(crate) fn new(machines: Arc<Machines>, copies: u32) -> Self {
        let report = CopyReport { session: machines.session.clone(), ..CopyReport::default() };
        let (written, listing) = (CopyReport::default(), MainListing::default());
        Self { machines, copies, listing, report, written, order: 0, is_stopped: false }
    }

    /// Does what the main machine has ordered. `root` is the root of all machines. `goes_on` is
    /// called after each piece of a file, and returns false to stop.
    pub(crate) fn look(
        &mut self,
        root: &Root,
        load: &LoadOptions,
        timeout: Duration,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let Some(orders) = self.orders(root)? else { return Ok(()) };
        self.follow(root, &orders)?;
        if self.report.ended < orders.number {
            self.is_stopped = false;
            let copied = match &orders.target {
                Some(target) if self.copies > 1 => self.copy(root, target, (load, timeout), goes_on),
                _ => Ok(()),
            };
            if self.is_stopped {
                return Ok(());
            }
            self.report.failure = copied.err().map(|error| error.to_string());
            self.report.ended = self.order;
        }
        Ok(self.write_report()?)
    }

    /// Begins to carry out orders.
    fn follow(&mut self, root: &Root, orders: &CopyOrders) -> Result<()> {
        self.order = orders.number;
        if self.report.dropped < orders.number {
            if orders.has_removed {
                self.machines.record_session()?;
            }
            self.drop_manifests(root)?;
            self.report.dropped = orders.number;
        }
        Ok(self.write_report()?)
    }

    /// Reads the orders of this session.
    fn orders(&self, root: &Root) -> CoreResult<Option<CopyOrders>> {
        let orders: Option<CopyOrders> = read_control(&*root.dir, COPY_ORDERS)?;
        Ok(orders.filter(|orders| orders.session == self.machines.session))
    }

    fn write_report(&mut self) -> CoreResult<()> {
        if self.written != self.report {
            control::replace_json(&*self.machines.local, COPY_REPORT, &self.report)?;
            self.written = self.report.clone();
        }
        Ok(())
    }

    /// Drops the manifests of copies whose step the main machine does not list any more.
    fn drop_manifests(&mut self, root: &Root) -> Result<()> {
        let machines = Arc::clone(&self.machines);
        let local = &*machines.local;
        let mut named = with_manifest(local)?;
        if named.is_empty() {
            return Ok(());
        }
        let main = self.listing.list(root)?;
        named.retain(|named| !main.lists(&named.attempt));
        if named.is_empty() {
            return Ok(());
        }
        let again = self.listing.list_anew(root)?;
        let _right = machines.copied_manifests();
        for named in named.iter().filter(|named| !again.lists(&named.attempt)) {
            drop_manifest(local, &named.name)?;
        }
        Ok(())
    }

    /// Copies what this machine is to have of a step. Does nothing if the step is gone.
    fn copy(
        &mut self,
        root: &Root,
        target: &CopyTarget,
        (load, timeout): (&LoadOptions, Duration),
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let CopyTarget { step, name, attempt } = target;
        let source = root.lease_name(name, timeout, load.clone())?;
        let Some(source) = source.filter(|source| source.manifest().attempt == *attempt) else {
            return Ok(());
        };
        let manifest = Arc::clone(source.manifest());
        let files = stored_files(&manifest.files).into_iter();
        let files: Vec<(&str, u64)> =
            files.filter(|(path, _)| self.machines.keeps(attempt, path, self.copies)).collect();
        let has_manifest = self.machines.keeps_manifests(self.copies);
        if files.is_empty() && !has_manifest {
            return Ok(());
        }
        let machines = Arc::clone(&self.machines);
        let local = &*machines.local;
        let dir = opened_or_created(local, &copy_of(*step, attempt))?;
        let there = lengths_below(&dir)?;
        let mut looked = Instant::now();
        let mut went_on = |copier: &mut Self, bytes: u64| -> Result<bool> {
            copier.report.bytes = copier.report.bytes.saturating_add(bytes);
            if looked.elapsed() >= ORDERS_INTERVAL {
                looked = Instant::now();
                match copier.orders(root)? {
                    Some(orders) if orders.target.as_ref() == Some(target) => copier.follow(root, &orders)?,
                    _ => return Ok(false),
                }
            }
            Ok(goes_on())
        };
        for (path, length) in &files {
            if there.get(*path) != Some(length) {
                let from = source.stored_file(path)?;
                self.copy_file(&dir, path, &*from, &mut went_on)?;
            }
        }
        sync_below(&*dir)?;
        local.sync()?;
        let writers = writers_of(&whole_writers(&*dir)?).into_iter();
        let writers = writers.chain(files.iter().filter_map(|(path, _)| writer_of(path))).collect();
        let whole = serde_json::to_vec(&runs_of(&writers)).unwrap_or_default();
        replace(&*dir, WHOLE, &whole)?;
        if has_manifest {
            if !went_on(self, 0)? {
                self.is_stopped = true;
                return Ok(());
            }
            copy_control(local, &*root.dir)?;
            write_indexes(&dir, &there, &source, &manifest)?;
            let _right = machines.copied_manifests();
            replace(&*dir, MANIFEST, &source.dir().read_file(MANIFEST, limits::MAX_MANIFEST_BYTES)?)?;
        }
        Ok(())
    }

    /// Copies a file, which gets its name when it is durable.
    fn copy_file(
        &mut self,
        dir: &Arc<dyn Dir>,
        path: &str,
        from: &dyn File,
        went_on: &mut dyn FnMut(&mut Self, u64) -> Result<bool>,
    ) -> Result<()> {
        let (item, name) = path.rsplit_once('/').unwrap_or(("", path));
        let above = if item.is_empty() { Arc::clone(dir) } else { opened_or_created(&**dir, item)? };
        let new = format!("{name}.new");
        // An earlier try was interrupted.
        ignore_missing(above.remove_file(&new))?;
        let mut failure = None;
        let copied = above.copy_file(&new, from, &mut |bytes| match went_on(self, bytes) {
            Ok(goes_on) => {
                self.is_stopped = !goes_on;
                goes_on
            }
            Err(error) => {
                failure = Some(error);
                false
            }
        });
        failure.map_or(Ok(()), Err)?;
        copied?;
        Ok(aside::name_file(&*above, &new, name)?)
    }
}

/// Copies what else a main machine knows: the root's facts, its sessions and later metrics.
fn copy_control(local: &dyn Dir, main: &dyn Dir) -> Result<()> {
    if let Some(info) = control::read_info(main)?
        && control::read_info(local)?.as_ref() != Some(&info)
    {
        control::replace_info(local, &info)?;
    }
    if let Some(known) = KnownRun::read(main)? {
        known.write(local)?;
    }
    take_sidecars_over(local, main)
}

/// Writes the indexes of a step, durably.
fn write_indexes(
    dir: &Arc<dyn Dir>,
    there: &Lengths,
    source: &Checkpoint,
    manifest: &Manifest,
) -> Result<()> {
    for item in &manifest.items {
        let above = opened_or_created(&**dir, &item.dir)?;
        if there.get(&item.index.path) != Some(&item.index.length) {
            let bytes = source.dir().read_file(&item.index.path, limits::MAX_INDEX_BYTES)?;
            let name = item.index.path.rsplit_once('/').map_or(&*item.index.path, |(_, name)| name);
            replace(&*above, name, &bytes)?;
        }
    }
    Ok(sync_below(&**dir)?)
}

/// Returns the writers of these runs.
fn writers_of(runs: &WriterRuns) -> BTreeSet<u32> {
    runs.iter().flat_map(|&(first, last)| first..=last).collect()
}

/// Replaces a file of a copy by one with these bytes.
pub(super) fn replace(dir: &dyn Dir, name: &str, bytes: &[u8]) -> CoreResult<()> {
    let new = format!("{name}.new");
    // An earlier try was interrupted.
    ignore_missing(dir.remove_file(&new))?;
    dir.replace_file(name, &new, bytes)
}

fn opened_or_created(parent: &dyn Dir, name: &str) -> CoreResult<Arc<dyn Dir>> {
    match parent.create_dir(name) {
        Err(error) if error.already_exists() => parent.open_dir(name),
        created => created,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_machines_keep_copies_until_there_are_enough() {
        let all = BTreeSet::from([0, 1, 2, 3]);
        let of = |holders: &[u32], copies| -> Vec<u32> {
            keepers(&all, &holders.iter().copied().collect(), copies).into_iter().collect()
        };
        assert!(of(&[1], 1).is_empty());
        assert_eq!(of(&[1], 2), [2]);
        assert_eq!(of(&[3], 2), [0]);
        assert!(of(&[1, 2], 2).is_empty());
        assert_eq!(of(&[1, 2], 3), [3]);
        assert_eq!(of(&[0], 9), [1, 2, 3]);
        assert_eq!(of(&[7], 2), [0], "the machine is not here");
        assert!(of(&[], 2).is_empty());
    }
}
