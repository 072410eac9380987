//! A directory whose changes by this process are noted, so that they are no news when the directory shows them. A root as its writer has it.
//!
//! A directory says when it last changed, and not what. Its writer is nearly always the only one who changes it: a save makes, renames and removes a few
//! names there. With those noted, what was listed once is still known, however many steps there are; anybody else's change is seen by the directory showing another
//! time than after the writer's own last change. A stranger's change within the same tick of the file system's clock as one of ours (milliseconds; on Linux before 6.13)
//! is not: so a writer reads the whole directory again from time to time.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Dir, Entry, File, Lock, LockKind, Rename, Stat};
use crate::error::Result;

/// What this process has changed in a directory since it was listed.
#[derive(Debug, Default)]
pub struct Notes(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// What the directory shows where nobody but this process has changed it since it was listed.
    shows: Option<i64>,
    /// When it was listed.
    listed: Option<Instant>,
    /// Names that this process has changed since then or is changing, and when, by `clock`.
    touched: BTreeMap<String, u64>,
    /// Counts beginnings and ends of changes.
    clock: u64,
    under_way: u64,
}

/// A moment, by the beginnings and ends of changes.
#[derive(Clone, Copy, Debug)]
pub struct At {
    clock: u64,
    is_quiet: bool,
}

impl Notes {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The names that may stand for something else than was listed, where the directory shows this; `None` where nobody knows.
    pub fn since_listed(&self, shows: i64) -> Option<(Vec<String>, At)> {
        let state = self.lock();
        (state.shows == Some(shows)).then(|| (state.touched.keys().cloned().collect(), state.now()))
    }

    /// Before the directory is listed.
    pub fn now(&self) -> At {
        self.lock().now()
    }

    /// The directory was listed, as it was at that moment, and shows this since then.
    pub fn listed(&self, since: At, shows: i64) {
        let mut state = self.lock();
        // A change that began or ended meanwhile may be in the listing or not.
        if since.is_quiet && state.clock == since.clock {
            state.shows = Some(shows);
            state.listed = Some(Instant::now());
            state.touched.clear();
        }
    }

    /// The names that were touched up to that moment were looked at.
    pub fn looked_at(&self, up_to: At) {
        let mut state = self.lock();
        state.touched.retain(|_, &mut when| when > up_to.clock);
    }

    /// A name stands for something else, though the directory does not show it.
    pub fn touch(&self, name: &str) {
        self.lock().touch(&[name]);
    }

    /// From here on nobody knows, until the directory is listed.
    pub fn forget(&self) {
        self.lock().shows = None;
    }

    /// Whether the directory was listed so long ago, or never.
    pub fn is_older_than(&self, age: Duration) -> bool {
        self.lock().listed.is_none_or(|listed| listed.elapsed() > age)
    }
}

impl State {
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
pub struct Noting {
    dir: Arc<dyn Dir>,
    notes: Arc<Notes>,
}

impl Noting {
    /// A directory, and the notes of what is changed through this.
    pub fn new(dir: Arc<dyn Dir>, notes: Arc<Notes>) -> Self {
        Self { dir, notes }
    }

    fn change<T>(&self, names: &[&str], act: impl FnOnce() -> Result<T>) -> Result<T> {
        let begun = {
            let mut state = self.notes.lock();
            let is_alone = state.under_way == 0;
            state.under_way += 1;
            // Before it is done: whoever sees it done is to know.
            state.touch(names);
            is_alone.then_some(state.clock)
        };
        let before = self.dir.changed();
        let done = act();
        let after = self.dir.changed();
        let mut state = self.notes.lock();
        state.under_way -= 1;
        let was_alone = begun == Some(state.clock);
        // Whoever has looked meanwhile has to look again.
        state.touch(names);
        state.shows = match (before, after) {
            (Ok(before), Ok(after)) if was_alone && state.shows == Some(before) => Some(after),
            _ => None,
        };
        done
    }
}

impl Dir for Noting {
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

    fn extend_file(&self, name: &str, len: u64) -> Result<(Arc<dyn File>, u64)> {
        self.change(&[name], || self.dir.extend_file(name, len))
    }

    fn open_file(&self, name: &str) -> Result<Arc<dyn File>> {
        self.dir.open_file(name)
    }

    fn read_file(&self, name: &str, limit: u64) -> Result<Vec<u8>> {
        self.dir.read_file(name, limit)
    }

    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.change(&[name], || self.dir.write_file(name, bytes))
    }

    fn rename(&self, from: &str, to: &str, how: Rename) -> Result<()> {
        self.change(&[from, to], || self.dir.rename(from, to, how))
    }

    fn remove_file(&self, name: &str) -> Result<()> {
        self.change(&[name], || self.dir.remove_file(name))
    }

    fn remove_dir(&self, name: &str) -> Result<()> {
        self.change(&[name], || self.dir.remove_dir(name))
    }

    fn sync(&self) -> Result<()> {
        self.dir.sync()
    }

    fn try_lock(&self, name: &str, kind: LockKind, create: bool) -> Result<Option<Box<dyn Lock>>> {
        // Where it makes a file, the directory shows a change that was not noted, and is listed anew: no step is a file.
        self.dir.try_lock(name, kind, create)
    }

    fn free_bytes(&self) -> Result<u64> {
        self.dir.free_bytes()
    }
}

#[cfg(test)]
mod tests;
