//! Open directories, files and locks.

use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Ino;
use super::context::{Context, failed};
use super::faults::{Action, OperationKind};
use super::log::Op;
use super::world::World;
use crate::io::{Dir, Entry, File, Lock, LockKind, Rename, SECTION_ALIGNMENT, Stat};
use crate::{Error, Result};

/// The device number that every simulated inode shows.
const DEVICE: u64 = 0x51;

/// A reference of an open handle to its inode.
struct NodeHandle {
    context: Arc<Context>,
    ino: Ino,
    path: PathBuf,
}

impl NodeHandle {
    fn new(context: &Arc<Context>, world: &mut World, ino: Ino, path: PathBuf) -> Self {
        world.open(ino);
        Self { context: Arc::clone(context), ino, path }
    }
}

impl Drop for NodeHandle {
    fn drop(&mut self) {
        self.context.world().close(self.ino);
    }
}

pub(super) struct SimDir(NodeHandle);

impl SimDir {
    pub(super) fn new(context: &Arc<Context>, world: &mut World, ino: Ino, path: &Path) -> Arc<Self> {
        Arc::new(Self(NodeHandle::new(context, world, ino, path.to_path_buf())))
    }

    fn context(&self) -> &Arc<Context> {
        &self.0.context
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.path.join(name)
    }

    fn open_as(&self, name: &str, access: Access) -> Result<Arc<SimFile>> {
        let path = self.join(name);
        self.context().perform(OperationKind::OpenFile, "open", &path, |world| {
            let ino = world.find_file(self.0.ino, name)?;
            Ok(SimFile::new(self.context(), world, ino, path.clone(), access))
        })
    }

    /// Takes away what a call has just made exclusively and could not finish, as the real engines
    /// do.
    fn discard(&self, name: &str) {
        // A second failure leaves it: that is for the caller's clean-up to find.
        drop(self.remove_file(name));
    }

    /// Preallocates a file that has just got this name, which goes where that fails.
    fn allocate(&self, file: &SimFile, name: &str, len: u64) -> Result<()> {
        let allocated = self.context().perform(OperationKind::Allocate, "allocate", &file.0.path, |world| {
            world.set_len(file.0.ino, len)
        });
        match allocated {
            Err(error) if error.errno() != Some(libc::EOPNOTSUPP) => {
                self.discard(name);
                Err(error)
            }
            _ => Ok(()),
        }
    }

    fn create(&self, name: &str) -> Result<Arc<SimFile>> {
        let path = self.join(name);
        self.context().perform(OperationKind::CreateFile, "create", &path, |world| {
            let ino = world.create(self.0.ino, name)?;
            Ok(SimFile::new(self.context(), world, ino, path.clone(), Access::Write))
        })
    }
}

impl Dir for SimDir {
    fn path(&self) -> &Path {
        &self.0.path
    }

    fn open_dir(&self, name: &str) -> Result<Arc<dyn Dir>> {
        let path = self.join(name);
        self.context().perform(OperationKind::OpenDir, "open", &path, |world| {
            let ino = world.find_dir(self.0.ino, name)?;
            Ok(Self::new(self.context(), world, ino, &path) as Arc<dyn Dir>)
        })
    }

    fn create_dir(&self, name: &str) -> Result<Arc<dyn Dir>> {
        let path = self.join(name);
        self.context().perform(OperationKind::CreateDir, "mkdir", &path, |world| {
            let ino = world.mkdir(self.0.ino, name)?;
            Ok(Self::new(self.context(), world, ino, &path) as Arc<dyn Dir>)
        })
    }

    fn unsorted_entries(&self) -> Result<Vec<Entry>> {
        // From the last name to the first, and not in one step: what takes a name behind the place
        // that it has reached is not seen.
        let reached = |world: &mut World| Ok(world.entries(self.0.ino)?.keys().next_back().cloned());
        self.context().perform_amid(
            OperationKind::Entries,
            "list",
            &self.0.path,
            reached,
            |world, reached| {
                let entries = world.entries(self.0.ino)?;
                Ok(entries
                    .iter()
                    .filter(|(name, _)| reached.as_ref().is_some_and(|reached| *name <= reached))
                    .map(|(name, &ino)| Entry {
                        name: name.to_string(),
                        kind: world.kind_of(ino),
                        inode: ino,
                    })
                    .collect())
            },
        )
    }

    fn stat(&self, name: &str) -> Result<Option<Stat>> {
        self.context().perform(OperationKind::Stat, "stat", &self.join(name), |world| {
            let found = match world.find(self.0.ino, name) {
                Err(libc::ENOENT) => None,
                found => found?,
            };
            let Some(ino) = found else { return Ok(None) };
            let len = world.bytes(ino).map_or(0, |bytes| bytes.len() as u64);
            let changed = world.changed(ino);
            Ok(Some(Stat { kind: world.kind_of(ino), len, id: (DEVICE, ino), changed, modified: changed }))
        })
    }

    fn id(&self) -> Result<(u64, u64)> {
        self.context().perform(OperationKind::Stat, "stat", &self.0.path, |_| Ok((DEVICE, self.0.ino)))
    }

    fn changed(&self) -> Result<i64> {
        self.context()
            .perform(OperationKind::Stat, "stat", &self.0.path, |world| Ok(world.changed(self.0.ino)))
    }

    fn create_file(&self, name: &str, len_hint: u64) -> Result<Arc<dyn File>> {
        let file = self.create(name)?;
        if len_hint > 0 {
            self.allocate(&file, name, len_hint)?;
        }
        Ok(file)
    }

    fn take_over(&self, from: &str, to: &str, len_hint: u64) -> Result<Option<Arc<dyn File>>> {
        let path = self.join(to);
        let taken = self.context().perform(OperationKind::Rename, "rename", &self.join(from), |world| {
            let ino = world.find_file(self.0.ino, from)?;
            if world.is_open(ino) {
                return Ok(None);
            }
            world.rename(self.0.ino, from, to, Rename::NoReplace)?;
            Ok(Some(SimFile::new(self.context(), world, ino, path.clone(), Access::Write)))
        })?;
        let Some(file) = taken else { return Ok(None) };
        if file.len()? < len_hint {
            self.allocate(&file, to, len_hint)?;
        }
        Ok(Some(file))
    }

    fn overwrite_file(&self, name: &str, len_hint: u64) -> Result<Arc<dyn File>> {
        let file = self.open_as(name, Access::Write)?;
        if file.len()? < len_hint {
            let extend = |world: &mut World| world.set_len(file.0.ino, len_hint);
            match self.context().perform(OperationKind::Allocate, "allocate", &file.0.path, extend) {
                Err(error) if error.errno() != Some(libc::EOPNOTSUPP) => return Err(error),
                _ => {}
            }
        }
        Ok(file)
    }

    fn extend_file(&self, name: &str, len: u64) -> Result<(Arc<dyn File>, u64)> {
        let file = match self.create(name) {
            Err(error) if error.already_exists() => self.open_as(name, Access::Write)?,
            other => other?,
        };
        let first = file.len()?.next_multiple_of(SECTION_ALIGNMENT);
        let (path, ino) = (&file.0.path, file.0.ino);
        let extend = |world: &mut World| world.set_len(ino, first + len);
        match self.context().perform(OperationKind::Allocate, "allocate", path, extend) {
            Ok(()) => {}
            Err(error) if error.errno() == Some(libc::EOPNOTSUPP) => file.set_len(first + len)?,
            Err(error) => return Err(error),
        }
        Ok((file, first))
    }

    fn open_file(&self, name: &str) -> Result<Arc<dyn File>> {
        Ok(self.open_as(name, Access::Read)?)
    }

    fn read_file(&self, name: &str, limit: u64) -> Result<Vec<u8>> {
        let file = self.open_as(name, Access::Read)?;
        let len = file.len()?;
        if len > limit {
            return Err(Error::Limit {
                what: format!("the length of {}", file.0.path.display()),
                found: len,
                limit,
            });
        }
        file.read_at(0, usize::try_from(len).unwrap_or(usize::MAX))
    }

    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let file = self.create(name)?;
        let written = file.write_all(bytes).and_then(|()| file.sync());
        if written.is_err() {
            self.discard(name);
        }
        written
    }

    fn rename(&self, from: &str, to: &str, how: Rename) -> Result<()> {
        let kind = if how == Rename::Exchange { OperationKind::Exchange } else { OperationKind::Rename };
        let answer = self
            .context()
            .perform(kind, "rename", &self.join(from), |world| world.rename(self.0.ino, from, to, how));
        answer.map_err(|error| match error.errno() {
            // It is about the other name.
            Some(libc::EEXIST) => failed("rename", &self.join(to), libc::EEXIST),
            _ => error,
        })
    }

    fn remove_file(&self, name: &str) -> Result<()> {
        self.context().perform(OperationKind::RemoveFile, "remove", &self.join(name), |world| {
            world.unlink(self.0.ino, name)
        })
    }

    fn remove_dir(&self, name: &str) -> Result<()> {
        self.context().perform(OperationKind::RemoveDir, "remove", &self.join(name), |world| {
            world.rmdir(self.0.ino, name)
        })
    }

    fn sync(&self) -> Result<()> {
        self.context().perform(OperationKind::SyncDir, "fsync", &self.0.path, |world| {
            world.record(Op::FsyncDir { dir: self.0.ino }, self.0.ino);
            Ok(())
        })
    }

    fn try_lock(&self, name: &str, kind: LockKind, create: bool) -> Result<Option<Box<dyn Lock>>> {
        let path = self.join(name);
        let context = self.context();
        let made = context.perform_with(OperationKind::Lock, "lock", &path, |world, action| {
            if let Some(Action::Fail(errno) | Action::FailHalfway(errno) | Action::FailAfterwards(errno)) =
                action
            {
                return Err(errno);
            }
            let ino = match world.find(self.0.ino, name)? {
                None if create => world.create(self.0.ino, name)?,
                _ => world.find_file(self.0.ino, name)?,
            };
            if !context.locks {
                return Err(libc::ENOLCK);
            }
            Ok(world.lock(context.process, ino, kind).map(|id| (id, ino)))
        })?;
        let lock = |(id, ino)| Box::new(SimLock { context: Arc::clone(context), id, ino }) as Box<dyn Lock>;
        Ok(made.map(lock))
    }

    fn free_bytes(&self) -> Result<u64> {
        self.context()
            .perform(OperationKind::FreeBytes, "statvfs", &self.0.path, |world| Ok(world.free_bytes()))
    }
}

struct SimLock {
    context: Arc<Context>,
    id: u64,
    ino: Ino,
}

impl Lock for SimLock {
    fn id(&self) -> Result<(u64, u64)> {
        Ok((DEVICE, self.ino))
    }
}

impl Drop for SimLock {
    fn drop(&mut self) {
        self.context.world().unlock(self.id);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

pub(super) struct SimFile(NodeHandle, Access);

impl SimFile {
    fn new(context: &Arc<Context>, world: &mut World, ino: Ino, path: PathBuf, access: Access) -> Arc<Self> {
        Arc::new(Self(NodeHandle::new(context, world, ino, path), access))
    }

    pub(super) fn ino(&self) -> Ino {
        self.0.ino
    }

    pub(super) fn writable(&self) -> bool {
        self.1 == Access::Write
    }

    fn write_all(&self, bytes: &[u8]) -> Result<()> {
        let mut at = 0;
        while let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) {
            at += self.write_at(at as u64, rest)?;
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<usize> {
        let half = bytes.get(..bytes.len() / 2).unwrap_or_default();
        self.0.context.perform_with(OperationKind::Write, "write", &self.0.path, |world, action| match action
        {
            Some(Action::Fail(errno)) => Err(errno),
            Some(Action::FailHalfway(errno)) => world.write(self.0.ino, offset, half).and(Err(errno)),
            Some(Action::FailAfterwards(errno)) => world.write(self.0.ino, offset, bytes).and(Err(errno)),
            Some(Action::Short) if !half.is_empty() => world.write(self.0.ino, offset, half),
            Some(Action::Short | Action::Stall) | None => world.write(self.0.ino, offset, bytes),
        })
    }
}

impl File for SimFile {
    fn path(&self) -> &Path {
        &self.0.path
    }

    fn len(&self) -> Result<u64> {
        self.0.context.perform(OperationKind::Stat, "stat", &self.0.path, |world| {
            world.bytes(self.0.ino).map(|bytes| bytes.len() as u64)
        })
    }

    fn set_len(&self, len: u64) -> Result<()> {
        if !self.writable() {
            return Err(failed("truncate", &self.0.path, libc::EINVAL));
        }
        self.0
            .context
            .perform(OperationKind::SetLen, "truncate", &self.0.path, |world| world.set_len(self.0.ino, len))
    }

    fn sync(&self) -> Result<()> {
        self.0.context.perform_with(OperationKind::Sync, "fsync", &self.0.path, |world, action| {
            let ino = self.0.ino;
            match action {
                Some(Action::Fail(errno) | Action::FailHalfway(errno)) => {
                    world.record(Op::FsyncFailed { ino }, ino);
                    Err(errno)
                }
                Some(Action::FailAfterwards(errno)) => {
                    world.record(Op::Fsync { ino }, ino);
                    Err(errno)
                }
                Some(Action::Short | Action::Stall) | None => {
                    world.record(Op::Fsync { ino }, ino);
                    Ok(())
                }
            }
        })
    }

    fn read_at(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        self.0.context.perform(OperationKind::Read, "read", &self.0.path, |world| {
            world.read(self.0.ino, offset, len).map(<[u8]>::to_vec)
        })
    }

    fn cached(&self, _offset: u64, _len: u64) -> Option<u64> {
        None
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
