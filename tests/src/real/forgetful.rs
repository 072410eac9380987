//! A disk that forgets some fsyncs: the mutants by which the proofs on block devices show that they
//! can fail. It stands between the manager and the real disk, in the tests' own binary; the product
//! knows nothing of it.

use std::any::Any;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use stepwell_core::io::{Dir, Disk, EngineChoice, Entry, File, Lock, LockKind, Queue, Rename, Stat};
use stepwell_core::sys::Mapping;
use stepwell_core::{Error, Result};

/// Which fsyncs are forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forgets {
    /// Those of files.
    Files,
    /// Those of every directory.
    Directories,
    /// Those of the root alone: the one after the rename that commits, and the one after a rename
    /// that takes away.
    Root,
}

impl FromStr for Forgets {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        match name {
            "files" => Ok(Self::Files),
            "directories" => Ok(Self::Directories),
            "root" => Ok(Self::Root),
            _ => Err(format!("nothing forgets {name:?}: files, directories or root")),
        }
    }
}

/// The skipped operations, and the root directory.
#[derive(Clone)]
struct Mind {
    forgets: Forgets,
    root: PathBuf,
}

impl Mind {
    fn dir(&self, inner: Arc<dyn Dir>) -> Arc<dyn Dir> {
        Arc::new(ForgetfulDir { inner, mind: self.clone() })
    }

    fn file(&self, inner: Arc<dyn File>) -> Arc<dyn File> {
        if self.forgets == Forgets::Files { Arc::new(ForgetfulFile(inner)) } else { inner }
    }
}

/// A disk, less some fsyncs.
pub struct Forgetful {
    inner: Arc<dyn Disk>,
    mind: Mind,
}

impl Forgetful {
    /// The disk of a root.
    pub fn new(inner: Arc<dyn Disk>, forgets: Forgets, root: &Path) -> Self {
        Self { inner, mind: Mind { forgets, root: root.to_owned() } }
    }
}

impl Disk for Forgetful {
    fn choice(&self) -> &EngineChoice {
        self.inner.choice()
    }

    fn open_dir(&self, path: &Path) -> Result<Arc<dyn Dir>> {
        Ok(self.mind.dir(self.inner.open_dir(path)?))
    }

    fn create_dir_all(&self, path: &Path) -> Result<Arc<dyn Dir>> {
        Ok(self.mind.dir(self.inner.create_dir_all(path)?))
    }

    fn queue(&self, depth: usize) -> Result<Box<dyn Queue>> {
        self.inner.queue(depth)
    }

    fn queue_for_reads(&self, depth: usize) -> Result<Box<dyn Queue>> {
        self.inner.queue_for_reads(depth)
    }

    fn register(&self, memory: &[Arc<Mapping>]) -> Result<()> {
        self.inner.register(memory)
    }
}

struct ForgetfulDir {
    inner: Arc<dyn Dir>,
    mind: Mind,
}

impl Dir for ForgetfulDir {
    fn path(&self) -> &Path {
        self.inner.path()
    }

    fn open_dir(&self, name: &str) -> Result<Arc<dyn Dir>> {
        Ok(self.mind.dir(self.inner.open_dir(name)?))
    }

    fn create_dir(&self, name: &str) -> Result<Arc<dyn Dir>> {
        Ok(self.mind.dir(self.inner.create_dir(name)?))
    }

    fn unsorted_entries(&self) -> Result<Vec<Entry>> {
        self.inner.unsorted_entries()
    }

    fn stat(&self, name: &str) -> Result<Option<Stat>> {
        self.inner.stat(name)
    }

    fn id(&self) -> Result<(u64, u64)> {
        self.inner.id()
    }

    fn changed(&self) -> Result<i64> {
        self.inner.changed()
    }

    fn create_file(&self, name: &str, len_hint: u64) -> Result<Arc<dyn File>> {
        Ok(self.mind.file(self.inner.create_file(name, len_hint)?))
    }

    fn overwrite_file(&self, name: &str, len_hint: u64) -> Result<Arc<dyn File>> {
        Ok(self.mind.file(self.inner.overwrite_file(name, len_hint)?))
    }

    fn extend_file(&self, name: &str, len: u64) -> Result<(Arc<dyn File>, u64)> {
        let (file, first) = self.inner.extend_file(name, len)?;
        Ok((self.mind.file(file), first))
    }

    fn open_file(&self, name: &str) -> Result<Arc<dyn File>> {
        Ok(self.mind.file(self.inner.open_file(name)?))
    }

    fn read_file(&self, name: &str, limit: u64) -> Result<Vec<u8>> {
        self.inner.read_file(name, limit)
    }

    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        if self.mind.forgets != Forgets::Files {
            return self.inner.write_file(name, bytes);
        }
        let path = self.inner.path().join(name);
        let written = OpenOptions::new().write(true).create_new(true).open(&path);
        written.and_then(|mut file| file.write_all(bytes)).map_err(|error| Error::io("write", path, error))
    }

    fn rename(&self, from: &str, to: &str, how: Rename) -> Result<()> {
        self.inner.rename(from, to, how)
    }

    fn remove_file(&self, name: &str) -> Result<()> {
        self.inner.remove_file(name)
    }

    fn remove_dir(&self, name: &str) -> Result<()> {
        self.inner.remove_dir(name)
    }

    fn sync(&self) -> Result<()> {
        match self.mind.forgets {
            Forgets::Directories => Ok(()),
            Forgets::Root if self.inner.path() == self.mind.root => Ok(()),
            _ => self.inner.sync(),
        }
    }

    fn try_lock(&self, name: &str, kind: LockKind, create: bool) -> Result<Option<Box<dyn Lock>>> {
        self.inner.try_lock(name, kind, create)
    }

    fn free_bytes(&self) -> Result<u64> {
        self.inner.free_bytes()
    }
}

struct ForgetfulFile(Arc<dyn File>);

impl File for ForgetfulFile {
    fn path(&self) -> &Path {
        self.0.path()
    }

    fn len(&self) -> Result<u64> {
        self.0.len()
    }

    fn set_len(&self, len: u64) -> Result<()> {
        self.0.set_len(len)
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn read_at(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        self.0.read_at(offset, len)
    }

    fn cached(&self, offset: u64, len: u64) -> Option<u64> {
        self.0.cached(offset, len)
    }

    fn base(&self) -> u64 {
        self.0.base()
    }

    fn as_any(&self) -> &dyn Any {
        // A queue takes the engine's own file.
        self.0.as_any()
    }
}
