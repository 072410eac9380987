//! A root in a store as a directory: its names are those of the ledger, and a rename is an entry.
//!
//! | name in the root | where its objects are |
//! |---|---|
//! | `step_00000001`, `.trash-…`, `.branch-…`, `.quarantine-…` | below the attempt that the ledger names |
//! | `.tmp-00000001-<session>-3` | below the attempt `00000001.<session>-3` |
//! | `.given-up-00000001-<session>-3` | nowhere: the ledger says that this attempt was given up |
//! | `.stepwell/…` | as on a disk |
//!
//! The files of an attempt never move, and no key gets another content, except below `.stepwell`.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stepwell_core::format::checksum::crc32c;
use stepwell_core::io::{
    Dir, Entry as DirEntry, EntryKind, File, Lock, LockKind, NextPiece, Owner, Rename, Stat, WriterFence,
};
use stepwell_core::limits::MAX_MANIFEST_BYTES;
use stepwell_core::{Error, Result};

use super::client::Ledger;
use super::entry::{Change, Entry, Named};
use super::step_dir::StepDir;
use crate::directory_layout::{self, CONTROL, MANIFEST, OwnName, ROOT_JSON, control};

/// The device number of names in the ledger.
const DEVICE: u64 = 0x1ED6E;

/// See the module documentation.
pub(super) struct RootDir {
    /// The prefix of the root.
    dir: Arc<dyn Dir>,
    ledger: Arc<Ledger>,
    /// The session of this process, once it owns the root.
    session: Arc<Mutex<String>>,
    /// The manifest that was committed last, by its path: a save that follows needs no request.
    committed: Mutex<(String, Vec<u8>)>,
}

/// The place of a name in the root.
enum Place {
    /// An object of the root itself.
    Plain,
    /// The directory of an attempt, and what the ledger says of it.
    Attempt(String, Option<Named>),
}

impl RootDir {
    pub(super) fn new(dir: Arc<dyn Dir>, ledger: Ledger) -> Self {
        Self { dir, ledger: Arc::new(ledger), session: Arc::default(), committed: Mutex::default() }
    }

    fn session(&self) -> MutexGuard<'_, String> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self, op: &'static str, name: &str, errno: i32) -> Error {
        Error::io(op, self.dir.path().join(name), std::io::Error::from_raw_os_error(errno))
    }

    /// Returns the highest entry. The owner of the root knows it: nobody else can add one.
    fn entry(&self) -> Result<Option<Arc<Entry>>> {
        let is_owner = !self.session().is_empty();
        if is_owner { self.ledger.last_read() } else { self.ledger.highest() }
    }

    /// Finds a name of the root. The ledger is read again if the name was not in it.
    fn place(&self, name: &str) -> Result<Option<Place>> {
        if name == CONTROL {
            return Ok(Some(Place::Plain));
        }
        let named = |entry: Option<Arc<Entry>>| entry.and_then(|entry| entry.names.get(name).cloned());
        let last = self.ledger.last_read()?;
        if let Some(named) = named(last.clone()) {
            return Ok(Some(Place::Attempt(named.attempt.clone(), Some(named))));
        }
        if let Some(attempt) = attempt_of(name) {
            // Committed objects are never reached, and so never deleted, by the temporary name.
            let is_named =
                last.is_some_and(|entry| entry.names.values().any(|named| named.attempt == attempt));
            return Ok((!is_named).then_some(Place::Attempt(attempt, None)));
        }
        let named = named(self.entry()?);
        Ok(named.map(|named| Place::Attempt(named.attempt.clone(), Some(named))))
    }

    /// Leads a path of the root to where its objects are. The error is ENOENT if its first part is
    /// not in the root.
    fn path_of(&self, op: &'static str, name: &str) -> Result<String> {
        let (first, rest) = name.split_once('/').map_or((name, None), |(first, rest)| (first, Some(rest)));
        let (attempt, named) = match self.place(first)? {
            None => return Err(self.error(op, name, libc::ENOENT)),
            Some(Place::Plain) => return Ok(name.to_owned()),
            Some(Place::Attempt(attempt, named)) => (attempt, named),
        };
        Ok(match (rest, named) {
            (None, _) => attempt,
            (Some(MANIFEST), Some(named)) => format!("{attempt}/{}", named.manifest),
            (Some(rest), _) => format!("{attempt}/{rest}"),
        })
    }

    fn append(&self, session: &str, change: Change) -> Result<()> {
        self.ledger.append(session, change)
    }

    /// Reads what a name of an attempt is to stand for.
    fn described(&self, attempt: &str) -> Result<Named> {
        let named = |bytes: &[u8]| Named {
            attempt: attempt.to_owned(),
            manifest: MANIFEST.to_owned(),
            manifest_bytes: bytes.len() as u64,
            manifest_crc: crc32c(bytes),
        };
        let path = format!("{attempt}/{MANIFEST}");
        match self.dir.read_file(&path, MAX_MANIFEST_BYTES) {
            Ok(bytes) => {
                let found = named(&bytes);
                *self.committed.lock().unwrap_or_else(PoisonError::into_inner) = (path, bytes);
                Ok(found)
            }
            Err(error) if error.is_not_found() => Ok(named(&[])),
            Err(error) => Err(error),
        }
    }
}

/// The attempt of a save's temporary name.
fn attempt_of(name: &str) -> Option<String> {
    match directory_layout::parse(name)? {
        OwnName::Temporary { label, session, counter } => Some(format!("{label}.{session}-{counter}")),
        _ => None,
    }
}

/// The temporary name of an attempt.
fn temporary_of(attempt: &str) -> Option<String> {
    let (label, save) = attempt.rsplit_once('.')?;
    let (session, counter) = save.rsplit_once('-')?;
    let name = directory_layout::temporary(label, session, counter.parse().ok()?);
    (attempt_of(&name).as_deref() == Some(attempt)).then_some(name)
}

/// The attempt that the mark of a given-up save is about, and its session.
fn given_up_of(name: &str) -> Option<(String, String)> {
    let rest = name.strip_prefix(".given-up-")?;
    let temporary = format!(".tmp-{rest}");
    match directory_layout::parse(&temporary)? {
        OwnName::Temporary { session, .. } => Some((attempt_of(&temporary)?, session)),
        _ => None,
    }
}

/// Fails if a root without entries had some: somebody has deleted its ledger.
pub(super) fn check_new(dir: &dyn Dir) -> Result<()> {
    let info = control(ROOT_JSON);
    if dir.stat(&info)?.is_none() {
        return Ok(());
    }
    let what = "the ledger of this root was deleted, so its steps cannot be found. Restore the objects below .stepwell/ledger, or delete all of the root";
    Err(Error::corrupt(dir.path().join(info), what))
}

fn session_of(name: &str) -> Option<String> {
    match directory_layout::parse(name)? {
        OwnName::Temporary { session, .. } => Some(session),
        _ => None,
    }
}

/// The identity of what a name stands for, in the place of a device and an inode number.
pub(super) fn identity(named: &Named) -> (u64, u64) {
    let mut hasher = DefaultHasher::new();
    (&named.attempt, &named.manifest).hash(&mut hasher);
    (DEVICE, hasher.finish())
}

impl Dir for RootDir {
    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn open_dir(&self, name: &str) -> Result<Arc<dyn Dir>> {
        let path = self.path_of("open", name)?;
        let dir = self.dir.open_dir(&path)?;
        match self.place(name)? {
            Some(Place::Attempt(_, Some(named))) => {
                Ok(Arc::new(StepDir::new(dir, self.path(), name, named, &self.ledger, &self.session)))
            }
            _ => Ok(dir),
        }
    }

    fn create_dir(&self, name: &str) -> Result<Arc<dyn Dir>> {
        if let Some((attempt, session)) = given_up_of(name) {
            match self.append(&session, Change::GiveUp(attempt)) {
                // It is committed, which the caller finds out.
                Err(error) if error.is_not_found() => {}
                given_up => given_up?,
            }
            return self.dir.open_dir(name);
        }
        self.dir.create_dir(&self.path_of("create", name)?)
    }

    /// The names of the ledger, and the temporaries of attempts that it does not name, if this
    /// process owns the root.
    fn unsorted_entries(&self) -> Result<Vec<DirEntry>> {
        let highest = self.entry()?;
        let mut entries = vec![DirEntry { name: CONTROL.to_owned(), kind: EntryKind::Dir, inode: 0 }];
        let names = highest.as_ref().map(|entry| &entry.names);
        for (name, named) in names.into_iter().flatten() {
            let (_, inode) = identity(named);
            entries.push(DirEntry { name: name.clone(), kind: EntryKind::Dir, inode });
        }
        if self.session().is_empty() {
            return Ok(entries);
        }
        let is_named = |attempt: &str| names.into_iter().flatten().any(|(_, named)| named.attempt == attempt);
        for entry in self.dir.unsorted_entries()? {
            if let Some(name) = temporary_of(&entry.name).filter(|_| !is_named(&entry.name)) {
                entries.push(DirEntry { name, ..entry });
            }
        }
        Ok(entries)
    }

    fn stat(&self, name: &str) -> Result<Option<Stat>> {
        let (first, rest) = name.split_once('/').map_or((name, None), |(first, rest)| (first, Some(rest)));
        if let Some((attempt, _)) = given_up_of(first) {
            let given_up = self.ledger.highest()?.is_some_and(|entry| entry.given_up.contains(&attempt));
            return Ok(given_up.then_some(directory((DEVICE, 0))));
        }
        match (self.place(first)?, rest) {
            (None, _) => Ok(None),
            (Some(Place::Plain), None) => Ok(self.entry()?.map(|_| directory((DEVICE, 0)))),
            (Some(Place::Attempt(_, Some(named))), None) => Ok(Some(directory(identity(&named)))),
            (Some(Place::Attempt(_, Some(named))), Some(MANIFEST)) if named.manifest_bytes > 0 => {
                let id = identity(&named);
                let changed = i64::from(named.manifest_crc);
                let len = named.manifest_bytes;
                Ok(Some(Stat { kind: EntryKind::File, len, id, changed, modified: changed }))
            }
            _ => self.dir.stat(&self.path_of("stat", name)?),
        }
    }

    fn id(&self) -> Result<(u64, u64)> {
        self.dir.id()
    }

    /// The number of the highest entry.
    fn changed(&self) -> Result<i64> {
        Ok(self.entry()?.map_or(-1, |entry| i64::try_from(entry.number).unwrap_or(i64::MAX)))
    }

    fn create_file(&self, name: &str, len_hint: u64) -> Result<Arc<dyn File>> {
        self.dir.create_file(&self.path_of("create", name)?, len_hint)
    }

    fn overwrite_file(&self, name: &str, len_hint: u64) -> Result<Arc<dyn File>> {
        self.dir.overwrite_file(&self.path_of("overwrite", name)?, len_hint)
    }

    fn extend_file(&self, name: &str, len: u64) -> Result<(Arc<dyn File>, u64)> {
        self.dir.extend_file(&self.path_of("extend", name)?, len)
    }

    fn open_file(&self, name: &str) -> Result<Arc<dyn File>> {
        self.dir.open_file(&self.path_of("open", name)?)
    }

    fn open_recorded(&self, name: &str, len: u64) -> Result<Arc<dyn File>> {
        self.dir.open_recorded(&self.path_of("open", name)?, len)
    }

    fn lengths(&self, name: &str) -> Result<Option<BTreeMap<String, u64>>> {
        self.dir.lengths(&self.path_of("list", name)?)
    }

    fn read_file(&self, name: &str, limit: u64) -> Result<Vec<u8>> {
        let path = self.path_of("read", name)?;
        let committed = self.committed.lock().unwrap_or_else(PoisonError::into_inner);
        if committed.0 == path && committed.1.len() as u64 <= limit {
            return Ok(committed.1.clone());
        }
        drop(committed);
        self.dir.read_file(&path, limit)
    }

    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.dir.write_file(&self.path_of("create", name)?, bytes)
    }

    fn replace_file(&self, name: &str, new_name: &str, bytes: &[u8]) -> Result<()> {
        self.dir.replace_file(&self.path_of("replace", name)?, new_name, bytes)
    }

    fn write_pieces(&self, name: &str, len_hint: u64, next: NextPiece<'_>) -> Result<()> {
        self.dir.write_pieces(&self.path_of("copy", name)?, len_hint, next)
    }

    /// One entry. It is durable when this returns.
    fn rename(&self, from: &str, to: &str, how: Rename) -> Result<()> {
        if from.contains('/') || to.contains('/') {
            return Err(self.error("rename", from, libc::EOPNOTSUPP));
        }
        let highest = self.entry()?;
        let named = |name: &str| highest.as_ref().and_then(|entry| entry.names.get(name)).cloned();
        let (moved, replaced) = (named(from), named(to));
        let session = Some(self.session().clone()).filter(|session| !session.is_empty());
        // Another rank has no session of its own: it acts in that of the save.
        let session = session.or_else(|| session_of(from)).unwrap_or_default();
        let is_committed = |attempt: &str| {
            let names = highest.iter().flat_map(|entry| entry.names.values());
            names.into_iter().any(|named| named.attempt == attempt)
        };
        let moved = match (moved, attempt_of(from)) {
            (Some(moved), _) => moved,
            // A committed attempt has lost its temporary name.
            (None, Some(attempt)) if !is_committed(&attempt) => self.described(&attempt)?,
            _ => return Err(self.error("rename", from, libc::ENOENT)),
        };
        let mut remove = BTreeMap::from([(from.to_owned(), moved.attempt.clone())]);
        let mut add = BTreeMap::from([(to.to_owned(), moved)]);
        match (how, replaced) {
            (Rename::NoReplace, Some(_)) => return Err(self.error("rename", to, libc::EEXIST)),
            (Rename::Exchange, None) => return Err(self.error("rename", to, libc::ENOENT)),
            (Rename::Exchange, Some(replaced)) => {
                remove.insert(to.to_owned(), replaced.attempt.clone());
                add.insert(from.to_owned(), replaced);
            }
            (_, Some(replaced)) => drop(remove.insert(to.to_owned(), replaced.attempt)),
            (_, None) => {}
        }
        self.append(&session, Change::Names { remove, add })
    }

    fn remove_file(&self, name: &str) -> Result<()> {
        self.dir.remove_file(&self.path_of("remove", name)?)
    }

    fn remove_files(&self, names: &[String]) -> Result<()> {
        let paths = names.iter().map(|name| self.path_of("remove", name)).collect::<Result<Vec<_>>>()?;
        self.dir.remove_files(&paths)
    }

    /// Takes a name away. Its objects are deleted before.
    fn remove_dir(&self, name: &str) -> Result<()> {
        let named = self.entry()?.and_then(|entry| entry.names.get(name).cloned());
        let Some(named) = named else { return Ok(()) };
        let remove = [(name.to_owned(), named.attempt)].into();
        let session = self.session().clone();
        self.append(&session, Change::Names { remove, add: BTreeMap::new() })
    }

    /// Nothing is to be synced. Fails while the outcome of a change is unknown.
    fn sync(&self) -> Result<()> {
        self.ledger.settle()
    }

    fn try_lock(&self, name: &str, kind: LockKind, create: bool) -> Result<Option<Box<dyn Lock>>> {
        self.dir.try_lock(name, kind, create)
    }

    fn free_bytes(&self) -> Result<u64> {
        self.dir.free_bytes()
    }

    fn fence(&self) -> Option<&dyn WriterFence> {
        Some(self)
    }
}

fn directory(id: (u64, u64)) -> Stat {
    Stat { kind: EntryKind::Dir, len: 0, id, changed: 0, modified: 0 }
}

impl WriterFence for RootDir {
    fn owner(&self) -> Result<Option<Owner>> {
        let owner = |entry: Arc<Entry>| Owner {
            epoch: entry.epoch,
            session: entry.session.clone(),
            owner: entry.owner.clone(),
        };
        Ok(self.ledger.highest()?.map(owner))
    }

    fn take(&self, session: &str) -> Result<()> {
        let highest = self.ledger.highest()?;
        if highest.is_none() {
            check_new(&*self.dir)?;
            self.ledger.check_conditions()?;
        }
        let from = highest.map(|entry| entry.session.clone()).unwrap_or_default();
        self.append(session, Change::TakeOver { from })?;
        session.clone_into(&mut self.session());
        Ok(())
    }
}
