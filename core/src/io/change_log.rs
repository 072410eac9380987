//! A directory that records the changes of this process. The writer opens a root this way.
//!
//! A directory shows when it last changed, but not what changed. The writer is nearly always the
//! only process that changes its root, and each save touches only a few names. With those recorded,
//! an earlier listing stays valid however many steps there are. A change by another process shows
//! as a different change time. A foreign change within the same clock tick as one of ours
//! (milliseconds, on Linux before 6.13) stays invisible, so the writer reads the whole directory
//! again from time to time.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Dir, Entry, File, Lock, LockKind, NextPiece, Rename, Stat, WriterFence};
use crate::error::Result;

/// The names that this process has changed in a directory since it was listed.
#[derive(Debug, Default)]
pub struct ChangeLog(Mutex<ChangeLogState>);

#[derive(Debug, Default)]
struct ChangeLogState {
    /// The directory's change time if only this process has changed it since the listing.
    shows: Option<i64>,
    /// When it was listed.
    listed: Option<Instant>,
    /// Names that this process has changed since then, or is changing, with their time by `clock`.
    touched: BTreeMap<String, u64>,
    /// Counts the starts and ends of changes.
    clock: u64,
    under_way: u64,
}

/// A point in the order of starts and ends of changes.
#[derive(Clone, Copy, Debug)]
pub struct At {
    clock: u64,
    is_quiet: bool,
}

impl ChangeLog {
    fn lock(&self) -> MutexGuard<'_, ChangeLogState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the names that may differ from the listing if the directory shows this change time.
    /// `None` if another process has changed the directory.
    pub fn since_listed(&self, shows: i64) -> Option<(Vec<String>, At)> {
        let state = self.lock();
        (state.shows == Some(shows)).then(|| (state.touched.keys().cloned().collect(), state.now()))
    }

    /// The current point. Call it before you list the directory.
    pub fn now(&self) -> At {
        self.lock().now()
    }

    /// Records a listing that was made at `since` and has shown this change time from then on.
    pub fn listed(&self, since: At, shows: i64) {
        let mut state = self.lock();
        // A change that started or ended in between may be missing from the listing.
        if since.is_quiet && state.clock == since.clock {
            state.shows = Some(shows);
            state.listed = Some(Instant::now());
            state.touched.clear();
        }
    }

    /// Forgets the names that the caller has looked at again.
    pub fn clear_up_to(&self, up_to: At) {
        let mut state = self.lock();
        state.touched.retain(|_, &mut when| when > up_to.clock);
    }

    /// Records a name whose meaning has changed although the directory does not show it.
    pub fn touch(&self, name: &str) {
        self.lock().touch(&[name]);
    }

    /// Invalidates the listing.
    pub fn forget(&self) {
        self.lock().shows = None;
    }

    /// True if the last listing is older than `age`, or missing.
    pub fn is_older_than(&self, age: Duration) -> bool {
        self.lock().listed.is_none_or(|listed| listed.elapsed() > age)
    }
}

impl ChangeLogState {
    fn now(&self) -> At {
        At { clock: self.clock, is_quiet: self.under_way == 0 }
    }

    fn touch(&mut self, names: &[&str]) {
        self.clock += 1;
        for &name in names {
            self.touched.insert(name.to_owned(), self.clock);
        }
    }
}

/// See the module documentation.
pub struct RecordingDir {
    dir: Arc<dyn Dir>,
    changes: Arc<ChangeLog>,
}

impl RecordingDir {
    /// Wraps a directory and records the changes made through the wrapper.
    pub fn new(dir: Arc<dyn Dir>, changes: Arc<ChangeLog>) -> Self {
        Self { dir, changes }
    }

    fn change<T>(&self, names: &[&str], act: impl FnOnce() -> Result<T>) -> Result<T> {
        let begun = {
            let mut state = self.changes.lock();
            let is_alone = state.under_way == 0;
            state.under_way += 1;
            // Record it first, so that nobody sees the change before the record.
            state.touch(names);
            is_alone.then_some(state.clock)
        };
        let before = self.dir.changed();
        let done = act();
        let after = self.dir.changed();
        let mut state = self.changes.lock();
        state.under_way -= 1;
        let was_alone = begun == Some(state.clock);
        // A reader that looked during the change must look again.
        state.touch(names);
        state.shows = match (before, after) {
            (Ok(before), Ok(after)) if was_alone && state.shows == Some(before) => Some(after),
            _ => None,
        };
        done
    }
}

impl Dir for RecordingDir {
    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn open_dir(&self, name: &str) -> Result<Arc<dyn Dir>> {
        self.dir.open_dir(name)
    }

    fn create_dir(&self, name: &str) -> Result<Arc<dyn Dir>> {
        self.change(&[name], || self.dir.create_dir(name))
    }

    fn unsorted_entries(&self) -> Result<Vec<Entry>> {
        self.dir.unsorted_entries()
    }

    fn stat(&self, name: &str) -> Result<Option<Stat>> {
        self.dir.stat(name)
    }

    fn id(&self) -> Result<(u64, u64)> {
        self.dir.id()
    }

    fn changed(&self) -> Result<i64> {
        self.dir.changed()
    }

    fn create_file(&self, name: &str, len_hint: u64) -> Result<Arc<dyn File>> {
        self.change(&[name], || self.dir.create_file(name, len_hint))
    }

    fn take_over(&self, from: &str, to: &str, len_hint: u64) -> Result<Option<Arc<dyn File>>> {
        self.change(&[from, to], || self.dir.take_over(from, to, len_hint))
    }

    fn overwrite_file(&self, name: &str, len_hint: u64) -> Result<Arc<dyn File>> {
        self.change(&[name], || self.dir.overwrite_file(name, len_hint))
    }

    fn extend_file(&self, name: &str, len: u64) -> Result<(Arc<dyn File>, u64)> {
        self.change(&[name], || self.dir.extend_file(name, len))
    }

    fn open_file(&self, name: &str) -> Result<Arc<dyn File>> {
        self.dir.open_file(name)
    }

    fn open_recorded(&self, name: &str, len: u64) -> Result<Arc<dyn File>> {
        self.dir.open_recorded(name, len)
    }

    fn lengths(&self, name: &str) -> Result<Option<BTreeMap<String, u64>>> {
        self.dir.lengths(name)
    }

    fn read_file(&self, name: &str, limit: u64) -> Result<Vec<u8>> {
        self.dir.read_file(name, limit)
    }

    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.change(&[name], || self.dir.write_file(name, bytes))
    }

    fn replace_file(&self, name: &str, new_name: &str, bytes: &[u8]) -> Result<()> {
        self.change(&[name, new_name], || self.dir.replace_file(name, new_name, bytes))
    }

    fn write_pieces(&self, name: &str, len_hint: u64, next: NextPiece<'_>) -> Result<()> {
        self.change(&[name], || self.dir.write_pieces(name, len_hint, next))
    }

    fn rename(&self, from: &str, to: &str, how: Rename) -> Result<()> {
        self.change(&[from, to], || self.dir.rename(from, to, how))
    }

    fn remove_file(&self, name: &str) -> Result<()> {
        self.change(&[name], || self.dir.remove_file(name))
    }

    fn remove_files(&self, names: &[String]) -> Result<()> {
        let touched: Vec<&str> = names.iter().map(String::as_str).collect();
        self.change(&touched, || self.dir.remove_files(names))
    }

    fn remove_dir(&self, name: &str) -> Result<()> {
        self.change(&[name], || self.dir.remove_dir(name))
    }

    fn sync(&self) -> Result<()> {
        self.dir.sync()
    }

    fn try_lock(&self, name: &str, kind: LockKind, create: bool) -> Result<Option<Box<dyn Lock>>> {
        // A lock file that this creates shows as an unrecorded change. The next query lists again.
        self.dir.try_lock(name, kind, create)
    }

    fn free_bytes(&self) -> Result<u64> {
        self.dir.free_bytes()
    }

    fn fence(&self) -> Option<&dyn WriterFence> {
        self.dir.fence()
    }
}

#[cfg(test)]
mod tests;
