//! A prefix of a store as a directory.

use std::collections::BTreeMap;
use std::hash::BuildHasher;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use foldhash::fast::FixedState;

use super::disk::StoreOptions;
use super::file::StoreFile;
use super::store::{CreateOutcome, Listed, ObjectFacts, Store};
use crate::io::{Dir, Entry, EntryKind, File, Lock, LockKind, NextPiece, Rename, Stat};
use crate::sys::Buffer;
use crate::{Error, Result};

/// The device number that all objects show.
const DEVICE: u64 = 0x5703E;

/// See the module documentation.
pub(super) struct StoreDir {
    store: Arc<dyn Store>,
    options: StoreOptions,
    /// Empty, or with `/` at its end.
    prefix: String,
    path: PathBuf,
}

impl StoreDir {
    pub(super) fn new(store: &Arc<dyn Store>, options: StoreOptions, prefix: String) -> Self {
        let path = store.url().join(prefix.trim_end_matches('/'));
        Self { store: Arc::clone(store), options, prefix, path }
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn below(&self, name: &str) -> Self {
        Self::new(&self.store, self.options, format!("{}/", self.key(name)))
    }

    fn error(&self, op: &'static str, name: &str, errno: i32) -> Error {
        Error::io(op, self.path.join(name), std::io::Error::from_raw_os_error(errno))
    }

    fn refuse<T>(&self, op: &'static str, name: &str) -> Result<T> {
        Err(self.error(op, name, libc::EOPNOTSUPP))
    }
}

/// The identity of an object with this content, in the place of an inode number.
fn identity(key: &str, tag: &str) -> u64 {
    FixedState::default().hash_one((key, tag))
}

fn stat(key: &str, facts: &ObjectFacts) -> Stat {
    Stat {
        kind: EntryKind::File,
        len: facts.len,
        id: (DEVICE, identity(key, &facts.tag)),
        changed: facts.modified,
        modified: facts.modified,
    }
}

impl Dir for StoreDir {
    fn path(&self) -> &Path {
        &self.path
    }

    /// Makes no request: a directory is there while something is below it.
    fn open_dir(&self, name: &str) -> Result<Arc<dyn Dir>> {
        Ok(Arc::new(self.below(name)))
    }

    /// Makes no request, as [`Dir::open_dir`].
    fn create_dir(&self, name: &str) -> Result<Arc<dyn Dir>> {
        Ok(Arc::new(self.below(name)))
    }

    fn unsorted_entries(&self) -> Result<Vec<Entry>> {
        let named =
            |key: &str| key.strip_prefix(&self.prefix).unwrap_or(key).trim_end_matches('/').to_owned();
        let entry = |listed| match listed {
            Listed::Object(key, facts) => {
                Entry { name: named(&key), kind: EntryKind::File, inode: identity(&key, &facts.tag) }
            }
            Listed::Prefix(key) => {
                Entry { name: named(&key), kind: EntryKind::Dir, inode: identity(&key, "") }
            }
        };
        Ok(self.store.list(&self.prefix)?.into_iter().map(entry).collect())
    }

    fn stat(&self, name: &str) -> Result<Option<Stat>> {
        let key = self.key(name);
        if let Some(facts) = self.store.look(&key)? {
            return Ok(Some(stat(&key, &facts)));
        }
        let prefix = format!("{key}/");
        let is_dir = !self.store.list(&prefix)?.is_empty();
        let id = (DEVICE, identity(&prefix, ""));
        Ok(is_dir.then_some(Stat { kind: EntryKind::Dir, len: 0, id, changed: 0, modified: 0 }))
    }

    fn id(&self) -> Result<(u64, u64)> {
        Ok((DEVICE, identity(&self.prefix, "")))
    }

    /// Proves nothing.
    fn changed(&self) -> Result<i64> {
        Ok(0)
    }

    /// Replaces an object of that name when it is complete: a store knows no files in the making.
    fn create_file(&self, name: &str, len_hint: u64) -> Result<Arc<dyn File>> {
        let (key, path) = (self.key(name), self.path.join(name));
        Ok(Arc::new(StoreFile::upload(&self.store, key, path, self.options.part_bytes, len_hint)))
    }

    fn overwrite_file(&self, name: &str, _: u64) -> Result<Arc<dyn File>> {
        self.refuse("overwrite", name)
    }

    fn extend_file(&self, name: &str, _: u64) -> Result<(Arc<dyn File>, u64)> {
        self.refuse("extend", name)
    }

    fn open_file(&self, name: &str) -> Result<Arc<dyn File>> {
        let (key, path) = (self.key(name), self.path.join(name));
        let Some(facts) = self.store.look(&key)? else { return Err(self.error("open", name, libc::ENOENT)) };
        Ok(Arc::new(StoreFile::stored(&self.store, key, path, facts.len)))
    }

    fn open_recorded(&self, name: &str, len: u64) -> Result<Arc<dyn File>> {
        let (key, path) = (self.key(name), self.path.join(name));
        Ok(Arc::new(StoreFile::stored(&self.store, key, path, len)))
    }

    fn lengths(&self, name: &str) -> Result<Option<BTreeMap<String, u64>>> {
        let prefix = if name.is_empty() { self.prefix.clone() } else { format!("{}/", self.key(name)) };
        let length =
            |(key, facts): (String, ObjectFacts)| Some((key.strip_prefix(&prefix)?.to_owned(), facts.len));
        Ok(Some(self.store.list_below(&prefix)?.into_iter().filter_map(length).collect()))
    }

    fn read_file(&self, name: &str, limit: u64) -> Result<Vec<u8>> {
        self.store.get(&self.key(name), limit)
    }

    /// The object is durable and has its name when this returns.
    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let key = self.key(name);
        let (begun, timeout) = (Instant::now(), self.options.create_timeout);
        let mut pause = timeout / 1024;
        while begun.elapsed() < timeout {
            match self.store.create(&key, bytes)? {
                CreateOutcome::Stored => return Ok(()),
                CreateOutcome::Exists => match self.store.get(&key, bytes.len() as u64) {
                    // Stored by an earlier try whose answer was lost.
                    Ok(found) if found == bytes => return Ok(()),
                    Ok(_) | Err(Error::Limit { .. }) => return Err(self.error("create", name, libc::EEXIST)),
                    Err(error) if error.is_not_found() => {}
                    Err(error) => return Err(error),
                },
                CreateOutcome::Unknown => {}
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(timeout / 32);
        }
        let what = format!("the store has not confirmed it for {} s", timeout.as_secs_f32());
        let error = std::io::Error::new(std::io::ErrorKind::TimedOut, what);
        Err(Error::io("create", self.path.join(name), error))
    }

    fn replace_file(&self, name: &str, _: &str, bytes: &[u8]) -> Result<()> {
        self.store.put(&self.key(name), bytes)
    }

    fn write_pieces(&self, name: &str, len_hint: u64, next: NextPiece<'_>) -> Result<()> {
        let (key, path) = (self.key(name), self.path.join(name));
        let file = StoreFile::upload(&self.store, key, path, self.options.part_bytes, len_hint);
        let (mut offset, most) = (0, file.part_bytes() as usize);
        loop {
            let piece = next(most)?;
            if piece.is_empty() {
                break;
            }
            let mut buffer = Buffer::alone(piece.len())?;
            buffer.get_mut(..piece.len()).unwrap_or_default().copy_from_slice(&piece);
            file.write(offset, buffer, piece.len()).1?;
            offset += piece.len() as u64;
        }
        file.set_len(offset)?;
        file.sync()
    }

    fn rename(&self, from: &str, _: &str, _: Rename) -> Result<()> {
        self.refuse("rename", from)
    }

    fn remove_file(&self, name: &str) -> Result<()> {
        self.store.delete(&[self.key(name)])
    }

    fn remove_files(&self, names: &[String]) -> Result<()> {
        self.store.delete(&names.iter().map(|name| self.key(name)).collect::<Vec<_>>())
    }

    fn remove_dir(&self, _: &str) -> Result<()> {
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn try_lock(&self, name: &str, _: LockKind, _: bool) -> Result<Option<Box<dyn Lock>>> {
        self.refuse("lock", name)
    }

    fn free_bytes(&self) -> Result<u64> {
        Ok(u64::MAX)
    }
}
