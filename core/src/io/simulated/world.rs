//! The one state behind all handles: inodes, processes, locks, the log; and what each operation
//! does to them.
//!
//! Called with the mutex of [`super::disk`] held. Answers are errnos: the handles add verb and
//! path.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::faults::{Action, Faults, OperationKind};
use super::inodes::{Inode, Inodes, overwrite};
use super::log::{Log, Op, Record};
use super::{Ino, KILLED, ROOT};
use crate::io::{EntryKind, LockKind, Rename, is_relative};

/// The system's answer: a value or an errno.
pub(super) type Answer<T> = Result<T, i32>;

/// No simulated file reaches farther, in bytes: its bytes are memory.
const LONGEST: u64 = 1 << 32;

pub(super) struct World {
    pub(super) inodes: Inodes,
    pub(super) log: Log,
    /// Directory and last name of each inode. Kept after the name is gone, for messages.
    places: BTreeMap<Ino, (Ino, Arc<str>)>,
    /// Open handles per inode.
    handles: BTreeMap<Ino, u64>,
    locks: Vec<Held>,
    processes: Vec<Process>,
    pub(super) capacity: Option<u64>,
    next_id: u64,
    /// When each inode last changed, by the count of all changes: what a ctime is on a real disk.
    changes: BTreeMap<Ino, i64>,
    last_change: i64,
}

struct Held {
    id: u64,
    ino: Ino,
    process: usize,
    kind: LockKind,
}

#[derive(Default)]
pub(super) struct Process {
    pub(super) operations: u64,
    pub(super) stop_at: Option<u64>,
    pub(super) killed: bool,
    pub(super) faults: Faults,
}

impl World {
    pub(super) fn new(inodes: Inodes) -> Self {
        let log = Log { base: inodes.clone(), records: Vec::new() };
        let mut places = BTreeMap::new();
        for (dir, inode) in inodes.iter() {
            if let Inode::Dir(entries) = inode {
                places.extend(entries.iter().map(|(name, &ino)| (ino, (dir, Arc::clone(name)))));
            }
        }
        Self {
            inodes,
            log,
            places,
            handles: BTreeMap::new(),
            locks: Vec::new(),
            processes: Vec::new(),
            capacity: None,
            next_id: 1,
            changes: BTreeMap::new(),
            last_change: 0,
        }
    }

    /// Takes another table for the present state, which begins a new log. Handles and locks stay on
    /// their inodes.
    pub(super) fn replant(&mut self, inodes: Inodes) {
        let mut fresh = Self::new(inodes);
        std::mem::swap(&mut fresh.inodes, &mut self.inodes);
        std::mem::swap(&mut fresh.log, &mut self.log);
        self.places.extend(fresh.places);
    }

    // Processes.

    pub(super) fn add_process(&mut self) -> usize {
        self.processes.push(Process::default());
        self.processes.len() - 1
    }

    pub(super) fn process(&mut self, process: usize) -> Answer<&mut Process> {
        self.processes.get_mut(process).ok_or(KILLED)
    }

    pub(super) fn kill(&mut self, process: usize) {
        if let Ok(state) = self.process(process) {
            state.killed = true;
        }
        let gone: Vec<Ino> =
            self.locks.iter().filter(|held| held.process == process).map(|held| held.ino).collect();
        self.locks.retain(|held| held.process != process);
        for ino in gone {
            self.close(ino);
        }
    }

    pub(super) fn is_killed(&self, process: usize) -> bool {
        self.processes.get(process).is_none_or(|state| state.killed)
    }

    /// Counts an operation: its number and what fault hits it.
    pub(super) fn enter(
        &mut self,
        process: usize,
        kind: OperationKind,
        path: &str,
    ) -> Answer<(u64, Option<Action>)> {
        let state = self.process(process)?;
        if state.killed {
            return Err(KILLED);
        }
        let number = state.operations;
        state.operations += 1;
        if state.stop_at == Some(number) {
            self.kill(process);
            return Err(KILLED);
        }
        Ok((number, state.faults.hit(kind, path)))
    }

    // The log.

    /// Records an effect on `ino`, under the path that it has now.
    pub(super) fn record(&mut self, op: Op, ino: Ino) {
        let durability_only = matches!(
            op,
            Op::Complete { .. }
                | Op::Fsync { .. }
                | Op::FsyncFailed { .. }
                | Op::FsyncDir { .. }
                | Op::Mark(_)
        );
        if !durability_only {
            self.last_change += 1;
            self.changes.insert(ino, self.last_change);
            let (dir, to_dir) = match op {
                Op::Mkdir { dir, .. }
                | Op::Create { dir, .. }
                | Op::Unlink { dir, .. }
                | Op::Rmdir { dir, .. } => (Some(dir), None),
                Op::Rename { dir, to_dir, .. } => (Some(dir), Some(to_dir)),
                _ => (None, None),
            };
            for dir in dir.into_iter().chain(to_dir) {
                self.changes.insert(dir, self.last_change);
            }
        }
        let path = Arc::from(self.path_of(ino));
        self.log.records.push(Record { op, path });
    }

    /// When an inode last changed; 0: it stands as it stood when the file system was made.
    pub(super) fn changed(&self, ino: Ino) -> i64 {
        self.changes.get(&ino).copied().unwrap_or(0)
    }

    pub(super) fn mark(&mut self, label: &str) {
        self.log.records.push(Record { op: Op::Mark(Arc::from(label)), path: Arc::from("") });
    }

    pub(super) fn fresh_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    pub(super) fn path_of(&self, ino: Ino) -> String {
        let mut parts = Vec::new();
        let mut at = ino;
        while let Some((dir, name)) = self.places.get(&at) {
            parts.push(name.as_ref());
            at = *dir;
        }
        parts.reverse();
        parts.join("/")
    }

    // Handles.

    pub(super) fn open(&mut self, ino: Ino) {
        *self.handles.entry(ino).or_insert(0) += 1;
    }

    pub(super) fn close(&mut self, ino: Ino) {
        if let Some(count) = self.handles.get_mut(&ino) {
            *count -= 1;
            if *count == 0 {
                self.handles.remove(&ino);
                self.reclaim(ino);
            }
        }
    }

    pub(super) fn is_open(&self, ino: Ino) -> bool {
        self.handles.contains_key(&ino)
    }

    pub(super) fn open_handles(&self) -> u64 {
        self.handles.values().sum()
    }

    /// Forgets an inode that has neither a name nor a handle.
    fn reclaim(&mut self, ino: Ino) {
        if !self.is_linked(ino) && !self.handles.contains_key(&ino) {
            self.inodes.remove(ino);
        }
    }

    fn is_linked(&self, ino: Ino) -> bool {
        ino == ROOT
            || self.places.get(&ino).is_some_and(|(dir, name)| {
                self.inodes.entries(*dir).is_some_and(|entries| entries.get(name) == Some(&ino))
            })
    }

    // Names.

    /// The entries of a directory.
    pub(super) fn entries(&self, dir: Ino) -> Answer<&BTreeMap<Arc<str>, Ino>> {
        self.inodes.entries(dir).ok_or(libc::ENOTDIR)
    }

    fn entries_mut(&mut self, dir: Ino) -> Answer<&mut BTreeMap<Arc<str>, Ino>> {
        if !self.is_linked(dir) {
            return Err(libc::ENOENT);
        }
        match self.inodes.get_mut(dir) {
            Some(Inode::Dir(entries)) => Ok(entries),
            Some(_) => Err(libc::ENOTDIR),
            None => Err(libc::ENOENT),
        }
    }

    pub(super) fn kind_of(&self, ino: Ino) -> EntryKind {
        match self.inodes.get(ino) {
            Some(Inode::Dir(_)) => EntryKind::Dir,
            Some(Inode::File(_)) => EntryKind::File,
            Some(Inode::Other) | None => EntryKind::Other,
        }
    }

    /// The directory that holds the last component of a path below `dir`, and that component.
    pub(super) fn resolve<'a>(&self, dir: Ino, path: &'a str) -> Answer<(Ino, &'a str)> {
        if !is_relative(path) {
            return Err(libc::EINVAL);
        }
        let (parents, last) = path.rsplit_once('/').unwrap_or(("", path));
        let mut at = dir;
        for part in parents.split('/').filter(|part| !part.is_empty()) {
            at = self.child_dir(at, part)?;
        }
        if last.len() > 255 { Err(libc::ENAMETOOLONG) } else { Ok((at, last)) }
    }

    fn child_dir(&self, dir: Ino, name: &str) -> Answer<Ino> {
        let ino = *self.entries(dir)?.get(name).ok_or(libc::ENOENT)?;
        match self.kind_of(ino) {
            EntryKind::Dir => Ok(ino),
            EntryKind::File => Err(libc::ENOTDIR),
            EntryKind::Other => Err(libc::ELOOP),
        }
    }

    /// The inode at a path below `dir`.
    pub(super) fn find(&self, dir: Ino, path: &str) -> Answer<Option<Ino>> {
        let (parent, name) = self.resolve(dir, path)?;
        Ok(self.entries(parent)?.get(name).copied())
    }

    /// As [`World::find`], for something that must be a directory.
    pub(super) fn find_dir(&self, dir: Ino, path: &str) -> Answer<Ino> {
        let (parent, name) = self.resolve(dir, path)?;
        self.child_dir(parent, name)
    }

    /// As [`World::find`], for something that must be a file.
    pub(super) fn find_file(&self, dir: Ino, path: &str) -> Answer<Ino> {
        let ino = self.find(dir, path)?.ok_or(libc::ENOENT)?;
        match self.kind_of(ino) {
            EntryKind::File => Ok(ino),
            EntryKind::Dir => Err(libc::EISDIR),
            EntryKind::Other => Err(libc::ELOOP),
        }
    }

    fn add(&mut self, dir: Ino, path: &str, inode: Inode) -> Answer<(Ino, Arc<str>, Ino)> {
        let (parent, name) = self.resolve(dir, path)?;
        let name: Arc<str> = Arc::from(name);
        if self.entries_mut(parent)?.contains_key(&name) {
            return Err(libc::EEXIST);
        }
        if matches!(inode, Inode::Dir(_)) {
            self.reserve(4096)?;
        }
        let ino = self.inodes.add(inode);
        self.entries_mut(parent)?.insert(Arc::clone(&name), ino);
        self.places.insert(ino, (parent, Arc::clone(&name)));
        Ok((parent, name, ino))
    }

    pub(super) fn mkdir(&mut self, dir: Ino, path: &str) -> Answer<Ino> {
        let (dir, name, ino) = self.add(dir, path, Inode::Dir(BTreeMap::new()))?;
        self.record(Op::Mkdir { dir, name, ino }, ino);
        Ok(ino)
    }

    pub(super) fn create(&mut self, dir: Ino, path: &str) -> Answer<Ino> {
        let (dir, name, ino) = self.add(dir, path, Inode::File(Arc::default()))?;
        self.record(Op::Create { dir, name, ino }, ino);
        Ok(ino)
    }

    pub(super) fn rename(&mut self, dir: Ino, from: &str, to: &str, how: Rename) -> Answer<()> {
        let (to_dir, to) = self.resolve(dir, to)?;
        let (dir, from) = self.resolve(dir, from)?;
        let (from, to): (Arc<str>, Arc<str>) = (Arc::from(from), Arc::from(to));
        let ino = *self.entries_mut(dir)?.get(&from).ok_or(libc::ENOENT)?;
        let other = self.entries_mut(to_dir)?.get(&to).copied();
        let is_dir = |ino: Ino| self.kind_of(ino) == EntryKind::Dir;
        if dir != to_dir && (is_dir(ino) || other.is_some_and(is_dir)) {
            return Err(libc::EXDEV);
        }
        match (how, other) {
            (Rename::NoReplace, Some(_)) => return Err(libc::EEXIST),
            (Rename::Exchange, None) => return Err(libc::ENOENT),
            (_, Some(same)) if same == ino => return Ok(()),
            (Rename::Replace, Some(other)) => self.may_replace(ino, other)?,
            _ => {}
        }
        if let (Rename::Exchange, Some(other)) = (how, other) {
            self.entries_mut(dir)?.insert(Arc::clone(&from), other);
            self.places.insert(other, (dir, Arc::clone(&from)));
        } else {
            self.entries_mut(dir)?.remove(&from);
        }
        self.entries_mut(to_dir)?.insert(Arc::clone(&to), ino);
        self.places.insert(ino, (to_dir, Arc::clone(&to)));
        self.record(Op::Rename { dir, from, to_dir, to, how, ino, other }, ino);
        if let (Rename::Replace, Some(other)) = (how, other) {
            self.reclaim(other);
        }
        Ok(())
    }

    fn may_replace(&self, ino: Ino, other: Ino) -> Answer<()> {
        match (self.kind_of(ino), self.inodes.get(other)) {
            (EntryKind::Dir, Some(Inode::Dir(entries))) if !entries.is_empty() => Err(libc::ENOTEMPTY),
            (EntryKind::Dir, Some(Inode::Dir(_))) => Ok(()),
            (EntryKind::Dir, _) => Err(libc::ENOTDIR),
            (_, Some(Inode::Dir(_))) => Err(libc::EISDIR),
            _ => Ok(()),
        }
    }

    pub(super) fn unlink(&mut self, dir: Ino, path: &str) -> Answer<()> {
        let (dir, name) = self.resolve(dir, path)?;
        let ino = *self.entries(dir)?.get(name).ok_or(libc::ENOENT)?;
        if self.kind_of(ino) == EntryKind::Dir {
            return Err(libc::EISDIR);
        }
        let name: Arc<str> = Arc::from(name);
        self.record(Op::Unlink { dir, name: Arc::clone(&name), ino }, ino);
        self.entries_mut(dir)?.remove(&name);
        if self.inodes.take_twice(ino) {
            // Its link count was one, so it is freed even if it had a second name.
            self.record(Op::SetLen { ino, len: 0 }, ino);
            if let Some(Inode::File(bytes)) = self.inodes.get_mut(ino) {
                *bytes = Arc::default();
            }
            return Ok(());
        }
        self.reclaim(ino);
        Ok(())
    }

    pub(super) fn rmdir(&mut self, dir: Ino, path: &str) -> Answer<()> {
        let (dir, name) = self.resolve(dir, path)?;
        let ino = self.child_dir(dir, name).map_err(|errno| match errno {
            libc::ELOOP => libc::ENOTDIR,
            errno => errno,
        })?;
        if !self.entries(ino)?.is_empty() {
            return Err(libc::ENOTEMPTY);
        }
        let name: Arc<str> = Arc::from(name);
        self.record(Op::Rmdir { dir, name: Arc::clone(&name), ino }, ino);
        self.entries_mut(dir)?.remove(&name);
        self.reclaim(ino);
        Ok(())
    }

    // Bytes.

    pub(super) fn bytes(&self, ino: Ino) -> Answer<&Arc<Vec<u8>>> {
        match self.inodes.get(ino) {
            Some(Inode::File(bytes)) => Ok(bytes),
            _ => Err(libc::EBADF),
        }
    }

    fn bytes_mut(&mut self, ino: Ino) -> Answer<&mut Vec<u8>> {
        match self.inodes.get_mut(ino) {
            Some(Inode::File(bytes)) => Ok(Arc::make_mut(bytes)),
            _ => Err(libc::EBADF),
        }
    }

    pub(super) fn read(&self, ino: Ino, offset: u64, len: usize) -> Answer<&[u8]> {
        let bytes = self.bytes(ino)?;
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
        let end = start.saturating_add(len).min(bytes.len());
        Ok(bytes.get(start..end).unwrap_or_default())
    }

    pub(super) fn free_bytes(&self) -> u64 {
        self.capacity.map_or(1 << 50, |capacity| capacity.saturating_sub(self.inodes.used_bytes()))
    }

    fn reserve(&self, more: u64) -> Answer<()> {
        if self.capacity.is_some() && more > self.free_bytes() { Err(libc::ENOSPC) } else { Ok(()) }
    }

    /// How long a file may become: its pages, and those that are free.
    fn longest(&self, ino: Ino) -> Answer<u64> {
        if self.capacity.is_none() {
            return Ok(LONGEST);
        }
        let pages = (self.bytes(ino)?.len() as u64).next_multiple_of(4096);
        Ok(pages + self.free_bytes() / 4096 * 4096)
    }

    /// Changes bytes without a record; what fits, and ENOSPC where nothing does. Gives the bytes
    /// written.
    pub(super) fn put(&mut self, ino: Ino, offset: u64, data: &[u8]) -> Answer<usize> {
        if offset.saturating_add(data.len() as u64) > LONGEST {
            return Err(libc::EFBIG);
        }
        let room = self.longest(ino)?.saturating_sub(offset);
        let fits = data.len().min(usize::try_from(room).unwrap_or(usize::MAX));
        if fits == 0 && !data.is_empty() {
            return Err(libc::ENOSPC);
        }
        overwrite(self.bytes_mut(ino)?, offset, data.get(..fits).unwrap_or_default());
        Ok(fits)
    }

    /// Writes as `write` does: may be short where the disk is full.
    pub(super) fn write(&mut self, ino: Ino, offset: u64, data: &[u8]) -> Answer<usize> {
        let written = self.put(ino, offset, data)?;
        let data = Arc::from(data.get(..written).unwrap_or_default());
        self.record(Op::Write { ino, offset, data }, ino);
        Ok(written)
    }

    pub(super) fn set_len(&mut self, ino: Ino, len: u64) -> Answer<()> {
        if len > LONGEST {
            return Err(libc::EFBIG);
        }
        if len > self.longest(ino)? {
            return Err(libc::ENOSPC);
        }
        let new = usize::try_from(len).map_err(|_| libc::EFBIG)?;
        self.bytes_mut(ino)?.resize(new, 0);
        self.record(Op::SetLen { ino, len }, ino);
        Ok(())
    }

    // Locks.

    /// `None`: held by another open file description, of this process or not.
    pub(super) fn lock(&mut self, process: usize, ino: Ino, kind: LockKind) -> Option<u64> {
        let free = self
            .locks
            .iter()
            .all(|held| held.ino != ino || (held.kind == LockKind::Shared && kind == LockKind::Shared));
        if !free {
            return None;
        }
        let id = self.fresh_id();
        self.locks.push(Held { id, ino, process, kind });
        self.open(ino);
        Some(id)
    }

    pub(super) fn unlock(&mut self, id: u64) {
        if let Some(place) = self.locks.iter().position(|held| held.id == id) {
            let held = self.locks.swap_remove(place);
            self.close(held.ino);
        }
    }

    pub(super) fn locks_held(&self, process: usize) -> usize {
        self.locks.iter().filter(|held| held.process == process).count()
    }
}
