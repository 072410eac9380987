//! A step of a root in a store as a directory. Its manifest is the one that the ledger names.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use stepwell_core::Result;
use stepwell_core::format::checksum::crc32c;
use stepwell_core::io::{Dir, Entry, File, Lock, LockKind, NextPiece, Rename, Stat};

use super::client::Ledger;
use super::entry::{Change, Named};
use super::root_dir::identity;
use crate::directory_layout::{MANIFEST, SINGLE};

/// See the module documentation.
pub(super) struct StepDir {
    /// The prefix of the attempt.
    dir: Arc<dyn Dir>,
    /// The URL by which it can be opened.
    path: PathBuf,
    /// Its name in the root.
    name: String,
    named: Named,
    ledger: Arc<Ledger>,
    session: Arc<Mutex<String>>,
}

impl StepDir {
    pub(super) fn new(
        dir: Arc<dyn Dir>,
        root: &Path,
        name: &str,
        named: Named,
        ledger: &Arc<Ledger>,
        session: &Arc<Mutex<String>>,
    ) -> Self {
        let path = if name == SINGLE { root.to_owned() } else { root.join(name) };
        let (name, ledger, session) = (name.to_owned(), Arc::clone(ledger), Arc::clone(session));
        Self { dir, path, name, named, ledger, session }
    }

    fn at<'a>(&'a self, name: &'a str) -> &'a str {
        if name == MANIFEST { &self.named.manifest } else { name }
    }
}

impl Dir for StepDir {
    fn path(&self) -> &Path {
        &self.path
    }

    fn open_dir(&self, name: &str) -> Result<Arc<dyn Dir>> {
        self.dir.open_dir(name)
    }

    fn create_dir(&self, name: &str) -> Result<Arc<dyn Dir>> {
        self.dir.create_dir(name)
    }

    fn unsorted_entries(&self) -> Result<Vec<Entry>> {
        self.dir.unsorted_entries()
    }

    fn stat(&self, name: &str) -> Result<Option<Stat>> {
        self.dir.stat(self.at(name))
    }

    /// That of its name in the root.
    fn id(&self) -> Result<(u64, u64)> {
        Ok(identity(&self.named))
    }

    fn changed(&self) -> Result<i64> {
        self.dir.changed()
    }

    fn create_file(&self, name: &str, len_hint: u64) -> Result<Arc<dyn File>> {
        self.dir.create_file(name, len_hint)
    }

    fn overwrite_file(&self, name: &str, len_hint: u64) -> Result<Arc<dyn File>> {
        self.dir.overwrite_file(name, len_hint)
    }

    fn extend_file(&self, name: &str, len: u64) -> Result<(Arc<dyn File>, u64)> {
        self.dir.extend_file(name, len)
    }

    fn open_file(&self, name: &str) -> Result<Arc<dyn File>> {
        self.dir.open_file(self.at(name))
    }

    fn open_recorded(&self, name: &str, len: u64) -> Result<Arc<dyn File>> {
        self.dir.open_recorded(self.at(name), len)
    }

    fn lengths(&self, name: &str) -> Result<Option<BTreeMap<String, u64>>> {
        self.dir.lengths(name)
    }

    fn read_file(&self, name: &str, limit: u64) -> Result<Vec<u8>> {
        self.dir.read_file(self.at(name), limit)
    }

    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.dir.write_file(name, bytes)
    }

    /// A new manifest gets a key of its own, and the ledger names it.
    fn replace_file(&self, name: &str, new_name: &str, bytes: &[u8]) -> Result<()> {
        if name != MANIFEST {
            return self.dir.replace_file(name, new_name, bytes);
        }
        let manifest_crc = crc32c(bytes);
        let manifest = format!("manifest.{manifest_crc:08x}.json");
        self.dir.write_file(&manifest, bytes)?;
        let attempt = self.named.attempt.clone();
        let manifest_bytes = bytes.len() as u64;
        let remove = [(self.name.clone(), attempt.clone())].into();
        let add = [(self.name.clone(), Named { attempt, manifest, manifest_bytes, manifest_crc })].into();
        let session = self.session.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.ledger.append(&session, Change::Names { remove, add })
    }

    fn write_pieces(&self, name: &str, len_hint: u64, next: NextPiece<'_>) -> Result<()> {
        self.dir.write_pieces(name, len_hint, next)
    }

    fn rename(&self, from: &str, to: &str, how: Rename) -> Result<()> {
        self.dir.rename(from, to, how)
    }

    fn remove_file(&self, name: &str) -> Result<()> {
        self.dir.remove_file(name)
    }

    fn remove_files(&self, names: &[String]) -> Result<()> {
        self.dir.remove_files(names)
    }

    fn remove_dir(&self, name: &str) -> Result<()> {
        self.dir.remove_dir(name)
    }

    fn sync(&self) -> Result<()> {
        self.dir.sync()
    }

    fn try_lock(&self, name: &str, kind: LockKind, create: bool) -> Result<Option<Box<dyn Lock>>> {
        self.dir.try_lock(name, kind, create)
    }

    fn free_bytes(&self) -> Result<u64> {
        self.dir.free_bytes()
    }
}
