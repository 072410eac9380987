//! The durable and the pending effects, per inode, after a prefix of a log.
//!
//! A pending effect may be kept or lost, independently of the others. Its meaning after lost
//! predecessors:
//!
//! * data: a kept write puts its bytes (all, the first half, the second half with zeros before it,
//!   or zeros) at its place;
//! * entries: a kept rename gives its inode exactly its new name: an inode has one name in its
//!   directory, whichever renames were lost; a kept removal makes the name mean nothing. A rename
//!   into another directory is two changes.
//!
//! An fsync makes durable what had *completed* before it. A failed fsync dooms what was pending: a
//! later fsync that succeeds does not bring it back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use stepwell_core::io::Rename;
use stepwell_core::io::simulated::{Ino, Inode, Inodes, Op, ROOT};

/// The guarantees of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Profile {
    /// Only what was synced is sure; all else is kept or lost independently.
    PosixMinimal,
    /// Names change in the order in which they were changed, across all directories: a crash keeps
    /// a prefix. Data as in `PosixMinimal`.
    OrderedMetadata,
}

/// The entries of a directory.
pub type Entries = BTreeMap<Arc<str>, Ino>;

/// See the module documentation.
#[derive(Clone, Debug)]
pub struct Model {
    pub(crate) inodes: BTreeMap<Ino, State>,
    /// The directories in which an inode ever had a name.
    parents: BTreeMap<Ino, BTreeSet<Ino>>,
    next_serial: u64,
    /// Entry changes up to this serial are durable where metadata is ordered.
    pub(crate) floor: u64,
    /// Inodes whose states changed since the space last looked, with all their ancestors.
    pub(crate) touched: BTreeSet<Ino>,
}

#[derive(Clone, Debug)]
pub(crate) enum State {
    Dir { durable: Entries, pending: Vec<Edit> },
    File { durable: Arc<Vec<u8>>, pending: Vec<Change> },
    Other,
}

/// A pending change of a directory.
#[derive(Clone, Debug)]
pub(crate) struct Edit {
    pub(crate) serial: u64,
    what: EditKind,
}

#[derive(Clone, Debug)]
enum EditKind {
    Link { name: Arc<str>, ino: Ino },
    Unlink { name: Arc<str> },
    Rename { from: Arc<str>, to: Arc<str>, ino: Ino },
    Exchange { from: Arc<str>, to: Arc<str>, ino: Ino, other: Ino },
}

/// A pending change of a file.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) serial: u64,
    what: ChangeKind,
    fate: Fate,
}

#[derive(Clone, Debug)]
enum ChangeKind {
    Write { offset: u64, data: Arc<[u8]> },
    SetLen(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Handed to a queue under this number, not completed.
    InFlight(u64),
    /// Completed: the next fsync makes it durable.
    Completed,
    /// An fsync failed after it: nothing makes it durable.
    Doomed,
}

/// The kept part of a pending change: 0 is nothing, 1 is all.
pub(crate) type Choice = u8;

impl Edit {
    pub(crate) const CHOICES: Choice = 2;

    /// The inodes that it gives a name.
    fn named(&self) -> impl Iterator<Item = Ino> {
        let (one, two) = match &self.what {
            EditKind::Link { ino, .. } | EditKind::Rename { ino, .. } => (Some(*ino), None),
            EditKind::Exchange { ino, other, .. } => (Some(*ino), Some(*other)),
            EditKind::Unlink { .. } => (None, None),
        };
        one.into_iter().chain(two)
    }

    /// The directory after this edit was kept.
    pub(crate) fn keep(&self, entries: &mut Entries) {
        match &self.what {
            EditKind::Link { name, ino } => {
                entries.insert(Arc::clone(name), *ino);
            }
            EditKind::Unlink { name } => {
                entries.remove(name);
            }
            EditKind::Rename { from, to, ino } => {
                entries.remove(from);
                entries.retain(|_, named| named != ino);
                entries.insert(Arc::clone(to), *ino);
            }
            EditKind::Exchange { from, to, ino, other } => {
                entries.retain(|_, named| named != ino && named != other);
                entries.insert(Arc::clone(to), *ino);
                entries.insert(Arc::clone(from), *other);
            }
        }
    }
}

impl Change {
    pub(crate) fn choices(&self) -> Choice {
        match &self.what {
            ChangeKind::Write { data, .. } if data.len() > 1 => 5,
            ChangeKind::Write { .. } => 3,
            ChangeKind::SetLen(_) => 2,
        }
    }

    /// The file after this choice.
    pub(crate) fn keep(&self, choice: Choice, bytes: &mut Vec<u8>) {
        match &self.what {
            ChangeKind::SetLen(len) if choice > 0 => bytes.resize(*len as usize, 0),
            ChangeKind::SetLen(_) => {}
            ChangeKind::Write { offset, data } => {
                let start = *offset as usize;
                let half = data.len() / 2;
                // The kept bytes, and the zeros before them.
                let (zeros, kept) = match choice {
                    0 => return,
                    1 => (0, &data[..]),
                    2 => (data.len(), &[][..]),
                    3 => (0, data.get(..half).unwrap_or_default()),
                    _ => (half, data.get(half..).unwrap_or_default()),
                };
                let end = start + zeros + kept.len();
                if bytes.len() < end {
                    bytes.resize(end, 0);
                }
                let (blank, rest) = bytes.split_at_mut(start + zeros);
                blank.iter_mut().skip(start).for_each(|byte| *byte = 0);
                for (to, from) in rest.iter_mut().zip(kept) {
                    *to = *from;
                }
            }
        }
    }

    fn touches(&self, other: &Self) -> bool {
        match (&self.what, &other.what) {
            (ChangeKind::Write { offset: a, data: one }, ChangeKind::Write { offset: b, data: two }) => {
                *a < b + two.len() as u64 && *b < a + one.len() as u64
            }
            _ => true,
        }
    }
}

impl Model {
    /// Everything durable.
    pub fn new(base: &Inodes) -> Self {
        let mut model = Self {
            inodes: BTreeMap::new(),
            parents: BTreeMap::new(),
            next_serial: 1,
            floor: 0,
            touched: BTreeSet::new(),
        };
        for (ino, inode) in base.iter() {
            let state = match inode {
                Inode::Dir(entries) => {
                    for &child in entries.values() {
                        model.parents.entry(child).or_default().insert(ino);
                    }
                    State::Dir { durable: entries.clone(), pending: Vec::new() }
                }
                Inode::File(bytes) => State::File { durable: Arc::clone(bytes), pending: Vec::new() },
                Inode::Other => State::Other,
            };
            model.inodes.insert(ino, state);
        }
        model
    }

    /// True if some state before this effect may be none after it: then the cut before it must be
    /// enumerated.
    pub(crate) fn shrinks(&self, op: &Op) -> bool {
        match op {
            Op::Fsync { .. } | Op::FsyncDir { .. } | Op::Mark(_) => true,
            // A completion moves its write behind others: the same states, unless they overlap.
            Op::Complete { id, ino } => match self.inodes.get(ino) {
                Some(State::File { pending, .. }) => {
                    let mut from_it = pending.iter().skip_while(|change| change.fate != Fate::InFlight(*id));
                    from_it.next().is_some_and(|change| from_it.any(|later| later.touches(change)))
                }
                _ => false,
            },
            _ => false,
        }
    }

    /// One more effect.
    pub fn apply(&mut self, op: &Op) {
        match op {
            Op::Mark(_) => {}
            Op::Mkdir { dir, name, ino } => {
                self.add(*dir, *ino, State::Dir { durable: Entries::new(), pending: Vec::new() });
                self.edit(*dir, EditKind::Link { name: Arc::clone(name), ino: *ino });
            }
            Op::Create { dir, name, ino } => {
                self.add(*dir, *ino, State::File { durable: Arc::default(), pending: Vec::new() });
                self.edit(*dir, EditKind::Link { name: Arc::clone(name), ino: *ino });
            }
            Op::Unlink { dir, name, .. } | Op::Rmdir { dir, name, .. } => {
                self.edit(*dir, EditKind::Unlink { name: Arc::clone(name) });
            }
            Op::Rename { dir, from, to_dir, to, how, ino, other } => {
                let (from, to, ino) = (Arc::clone(from), Arc::clone(to), *ino);
                let exchanged = other.filter(|_| *how == Rename::Exchange);
                if dir == to_dir {
                    let edit = match exchanged {
                        Some(other) => EditKind::Exchange { from, to, ino, other },
                        None => EditKind::Rename { from, to, ino },
                    };
                    self.edit(*dir, edit);
                } else {
                    // Two directories, two changes: without a journal a crash may leave both names,
                    // or none.
                    let back = match exchanged {
                        Some(other) => EditKind::Link { name: from, ino: other },
                        None => EditKind::Unlink { name: from },
                    };
                    self.parents.entry(ino).or_default().insert(*to_dir);
                    self.edit(*to_dir, EditKind::Link { name: to, ino });
                    self.edit(*dir, back);
                }
            }
            Op::Write { ino, offset, data } => {
                let what = ChangeKind::Write { offset: *offset, data: Arc::clone(data) };
                self.change(*ino, what, Fate::Completed);
            }
            Op::Submit { id, ino, offset, data } => {
                let what = ChangeKind::Write { offset: *offset, data: Arc::clone(data) };
                self.change(*ino, what, Fate::InFlight(*id));
            }
            Op::SetLen { ino, len } => self.change(*ino, ChangeKind::SetLen(*len), Fate::Completed),
            Op::Complete { id, ino } => {
                if let Some(State::File { pending, .. }) = self.inodes.get_mut(ino)
                    && let Some(place) = pending.iter().position(|change| change.fate == Fate::InFlight(*id))
                {
                    let mut change = pending.remove(place);
                    change.fate = Fate::Completed;
                    pending.push(change);
                    self.touch(*ino);
                }
            }
            Op::Fsync { ino } => self.fsync(*ino),
            Op::FsyncFailed { ino } => {
                if let Some(State::File { pending, .. }) = self.inodes.get_mut(ino) {
                    for change in pending.iter_mut().filter(|change| change.fate == Fate::Completed) {
                        change.fate = Fate::Doomed;
                    }
                }
            }
            Op::FsyncDir { dir } => {
                if let Some(State::Dir { durable, pending }) = self.inodes.get_mut(dir) {
                    for edit in pending.drain(..) {
                        self.floor = self.floor.max(edit.serial);
                        edit.keep(durable);
                    }
                    self.touch(*dir);
                }
            }
        }
    }

    fn fsync(&mut self, ino: Ino) {
        if let Some(State::File { durable, pending }) = self.inodes.get_mut(&ino) {
            let (done, rest) =
                std::mem::take(pending).into_iter().partition(|change| change.fate == Fate::Completed);
            *pending = rest;
            let done: Vec<Change> = done;
            if !done.is_empty() {
                let bytes = Arc::make_mut(durable);
                for change in &done {
                    change.keep(1, bytes);
                }
            }
            self.touch(ino);
        }
    }

    fn add(&mut self, dir: Ino, ino: Ino, state: State) {
        self.inodes.insert(ino, state);
        self.parents.entry(ino).or_default().insert(dir);
    }

    fn serial(&mut self) -> u64 {
        self.next_serial += 1;
        self.next_serial
    }

    fn edit(&mut self, dir: Ino, what: EditKind) {
        let serial = self.serial();
        if let Some(State::Dir { pending, .. }) = self.inodes.get_mut(&dir) {
            pending.push(Edit { serial, what });
            self.touch(dir);
        }
    }

    fn change(&mut self, ino: Ino, what: ChangeKind, fate: Fate) {
        let serial = self.serial();
        if let Some(State::File { pending, .. }) = self.inodes.get_mut(&ino) {
            pending.push(Change { serial, what, fate });
            self.touch(ino);
        }
    }

    fn touch(&mut self, ino: Ino) {
        let mut todo = vec![ino];
        while let Some(ino) = todo.pop() {
            if self.touched.insert(ino) {
                todo.extend(self.parents.get(&ino).into_iter().flatten());
            }
        }
    }

    /// The inodes that have a name in some state.
    pub(crate) fn reachable(&self) -> BTreeSet<Ino> {
        let mut found = BTreeSet::from([ROOT]);
        let mut todo = vec![ROOT];
        while let Some(ino) = todo.pop() {
            if let Some(State::Dir { durable, pending }) = self.inodes.get(&ino) {
                let named = durable.values().copied().chain(pending.iter().flat_map(Edit::named));
                todo.extend(named.filter(|&child| found.insert(child)));
            }
        }
        found
    }

    /// The prefixes of entry changes that ordered metadata may keep, by the serial of the last one
    /// kept.
    pub(crate) fn prefixes(&self) -> Vec<u64> {
        let mut serials: Vec<u64> = self
            .inodes
            .values()
            .filter_map(|state| match state {
                State::Dir { pending, .. } => Some(pending.iter().map(|edit| edit.serial)),
                _ => None,
            })
            .flatten()
            .filter(|&serial| serial > self.floor)
            .collect();
        serials.push(self.floor);
        serials.sort_unstable();
        serials
    }
}

/// A directory after the edits up to `last` were kept.
pub(crate) fn prefix(durable: &Entries, pending: &[Edit], last: u64) -> Entries {
    let mut entries = durable.clone();
    pending.iter().filter(|edit| edit.serial <= last).for_each(|edit| edit.keep(&mut entries));
    entries
}
