//! The root and its steps as directories, whichever machine their files are on.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use stepwell_core::format::manifest::{Attempt, Manifest};
use stepwell_core::io::{Dir, Entry, File, Lock, LockKind, NextPiece, Rename, Stat};
use stepwell_core::limits::MAX_MANIFEST_BYTES;
use stepwell_core::served::lengths_below;
use stepwell_core::sys::each;
use stepwell_core::{Error, Result};

use super::{LENGTHS_LAST, Lengths, Machines, part_of, part_of_temporary, sync_below, writer_of};
use crate::directory_layout::{self, MANIFEST, OwnName};
use crate::discovery::{REQUESTS_AT_ONCE, is_not_a_step, read_manifest};

/// The root. The names in it are those of the main machine. Only that machine changes them.
pub(crate) struct MachinesDir {
    machines: Arc<Machines>,
    /// The root on the main machine.
    main: Arc<dyn Dir>,
}

impl MachinesDir {
    /// The root of these machines. `main` is that on the main machine.
    pub(crate) fn new(machines: Arc<Machines>, main: Arc<dyn Dir>) -> Self {
        Self { machines, main }
    }

    /// Wraps a directory of the main machine, if it is a step's.
    fn step(&self, name: &str, dir: Arc<dyn Dir>) -> Arc<dyn Dir> {
        let attempt = OnceLock::new();
        match directory_layout::parse(name) {
            Some(OwnName::Temporary { session, counter, .. }) => {
                let part = part_of_temporary(name).map(|(part, _)| part).unwrap_or_default();
                let _ = attempt.set((part, Attempt { session, counter }));
            }
            Some(OwnName::Branch { .. } | OwnName::Quarantine { .. }) => {}
            None if !name.contains('/') => {}
            _ => return dir,
        }
        let machines = Arc::clone(&self.machines);
        let here = if machines.is_main() { Some(Arc::clone(&dir)) } else { None };
        Arc::new(SpreadStep { machines, main: Some(dir), here: here.into(), attempt })
    }

    /// Opens or creates the part of a save, on another machine than the main one.
    fn part(&self, name: &str, create: bool) -> Option<Result<Arc<dyn Dir>>> {
        let (part, attempt) = part_of_temporary(name).filter(|_| !self.machines.is_main())?;
        let local = self.machines.local();
        let opened = if create { local.create_dir(&part) } else { local.open_dir(&part) };
        Some(opened.map(|dir| {
            let (machines, attempt) = (Arc::clone(&self.machines), OnceLock::from((part, attempt)));
            let here = Some(dir).into();
            let step: Arc<dyn Dir> = Arc::new(SpreadStep { machines, main: None, here, attempt });
            step
        }))
    }
}

impl Dir for MachinesDir {
    fn path(&self) -> &Path {
        self.machines.local().path()
    }

    fn open_dir(&self, name: &str) -> Result<Arc<dyn Dir>> {
        if let Some(part) = self.part(name, false) {
            return part;
        }
        Ok(self.step(name, self.main.open_dir(name)?))
    }

    fn create_dir(&self, name: &str) -> Result<Arc<dyn Dir>> {
        if let Some(part) = self.part(name, true) {
            return part;
        }
        Ok(self.step(name, self.main.create_dir(name)?))
    }

    fn unsorted_entries(&self) -> Result<Vec<Entry>> {
        self.main.unsorted_entries()
    }

    fn stat(&self, name: &str) -> Result<Option<Stat>> {
        let is_mark = || matches!(directory_layout::parse(name), Some(OwnName::GivenUp { .. }));
        if !self.machines.is_main() && is_mark() {
            // Only ranks of the main machine make it. A part of such a save is removed later.
            return Ok(None);
        }
        self.main.stat(name)
    }

    fn id(&self) -> Result<(u64, u64)> {
        self.main.id()
    }

    fn changed(&self) -> Result<i64> {
        self.main.changed()
    }

    fn create_file(&self, name: &str, len_hint: u64) -> Result<Arc<dyn File>> {
        self.main.create_file(name, len_hint)
    }

    fn overwrite_file(&self, name: &str, len_hint: u64) -> Result<Arc<dyn File>> {
        self.main.overwrite_file(name, len_hint)
    }

    fn extend_file(&self, name: &str, len: u64) -> Result<(Arc<dyn File>, u64)> {
        self.main.extend_file(name, len)
    }

    fn open_file(&self, name: &str) -> Result<Arc<dyn File>> {
        self.main.open_file(name)
    }

    /// All files of a step, on all machines.
    fn lengths(&self, name: &str) -> Result<Option<Lengths>> {
        let is_step = match directory_layout::parse(name) {
            Some(OwnName::Branch { .. }) => true,
            None => !name.is_empty() && !name.contains('/'),
            _ => false,
        };
        if !is_step {
            return self.main.lengths(name).map(|lengths| lengths.filter(|_| self.machines.is_main()));
        }
        if !self.machines.is_main() {
            return missing(self.main.lengths(name)).map(Option::flatten);
        }
        let known = self.machines.lengths().get(name).cloned();
        if let Some((since, lengths)) = known
            && since.elapsed() < LENGTHS_LAST
        {
            return Ok(Some(lengths));
        }
        let lengths = match self.open_dir(name) {
            Ok(step) => match step.lengths("") {
                Err(error) if error.is_gone() => return Ok(None),
                lengths => lengths?.unwrap_or_default(),
            },
            Err(error) if error.is_gone() => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut all = self.machines.lengths();
        all.retain(|_, (since, _)| since.elapsed() < LENGTHS_LAST);
        all.insert(name.to_owned(), (Instant::now(), lengths.clone()));
        Ok(Some(lengths))
    }

    fn read_file(&self, name: &str, limit: u64) -> Result<Vec<u8>> {
        self.main.read_file(name, limit)
    }

    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.main.write_file(name, bytes)
    }

    fn replace_file(&self, name: &str, new_name: &str, bytes: &[u8]) -> Result<()> {
        self.main.replace_file(name, new_name, bytes)
    }

    fn write_pieces(&self, name: &str, len_hint: u64, next: NextPiece<'_>) -> Result<()> {
        self.main.write_pieces(name, len_hint, next)
    }

    fn rename(&self, from: &str, to: &str, how: Rename) -> Result<()> {
        let mut known = self.machines.lengths();
        known.remove(from);
        known.remove(to);
        drop(known);
        self.main.rename(from, to, how)
    }

    fn remove_file(&self, name: &str) -> Result<()> {
        self.main.remove_file(name)
    }

    fn remove_files(&self, names: &[String]) -> Result<()> {
        self.main.remove_files(names)
    }

    fn remove_dir(&self, name: &str) -> Result<()> {
        self.main.remove_dir(name)
    }

    fn sync(&self) -> Result<()> {
        self.main.sync()
    }

    fn try_lock(&self, name: &str, kind: LockKind, create: bool) -> Result<Option<Box<dyn Lock>>> {
        self.main.try_lock(name, kind, create)
    }

    fn free_bytes(&self) -> Result<u64> {
        self.machines.local().free_bytes()
    }
}

/// A step. A file that is not on this machine is looked for on the others.
struct SpreadStep {
    machines: Arc<Machines>,
    /// Its directory on the main machine. `None` before the step has its name, on other machines.
    main: Option<Arc<dyn Dir>>,
    /// Its directory on this machine: that of the main machine, or the part.
    here: Here,
    /// The name of its parts, and its attempt.
    attempt: OnceLock<(String, Attempt)>,
}

/// A directory on this machine. It is looked for once, when it is needed.
struct Here(OnceLock<Option<Arc<dyn Dir>>>);

impl From<Option<Arc<dyn Dir>>> for Here {
    fn from(dir: Option<Arc<dyn Dir>>) -> Self {
        Self(dir.map_or_else(OnceLock::new, |dir| OnceLock::from(Some(dir))))
    }
}

impl SpreadStep {
    fn attempt(&self) -> Result<&(String, Attempt)> {
        if let Some(known) = self.attempt.get() {
            return Ok(known);
        }
        let main = self.main.as_ref().ok_or_else(|| self.gone("open", ""))?;
        let bytes = main.read_file(MANIFEST, MAX_MANIFEST_BYTES)?;
        let manifest = Manifest::decode(&bytes, &main.path().join(MANIFEST))?;
        let part = part_of(manifest.step, &manifest.attempt);
        Ok(self.attempt.get_or_init(|| (part, manifest.attempt)))
    }

    /// Its directory on this machine, if this machine has files of it.
    fn here(&self) -> Result<Option<&Arc<dyn Dir>>> {
        if let Some(known) = self.here.0.get() {
            return Ok(known.as_ref());
        }
        let (part, _) = self.attempt()?;
        let dir = match self.machines.local().open_dir(part) {
            Ok(dir) => Some(dir),
            Err(error) if error.is_gone() => None,
            Err(error) => return Err(error),
        };
        Ok(self.here.0.get_or_init(|| dir).as_ref())
    }

    /// Its directory on this machine, for a change.
    fn changed_here(&self, op: &'static str, name: &str) -> Result<&Arc<dyn Dir>> {
        self.here()?.ok_or_else(|| self.gone(op, name))
    }

    fn gone(&self, op: &'static str, name: &str) -> Error {
        Error::io(op, self.path().join(name), std::io::ErrorKind::NotFound)
    }

    /// Calls `find` for each place that may have a file, until one has it.
    fn find<T>(&self, name: &str, find: impl Fn(&dyn Dir, &str) -> Result<Option<T>>) -> Result<Option<T>> {
        let Some(writer) = writer_of(name) else {
            // Not a data file: only the main machine has it. A part may have an outdated one.
            let dir = match &self.main {
                Some(main) => main,
                None => self.changed_here("open", name)?,
            };
            return find(&**dir, name);
        };
        if let Some(here) = self.here()?
            && let Some(found) = find(&**here, name)?
        {
            return Ok(Some(found));
        }
        let (part, attempt) = self.attempt()?;
        let mut failure = None;
        for (machine, in_copy) in self.machines.holders(attempt, writer) {
            let found = match (self.machines.others.get(&machine), &self.main) {
                (other, _) if in_copy => {
                    let root = other.map_or(&**self.machines.local(), |other| &**other as &dyn Dir);
                    find(root, &format!("{}/{name}", copy_of_part(part)))
                }
                // As it was opened: under a lease, it may have lost its name.
                (_, Some(main)) if machine == self.machines.main => find(&**main, name),
                (Some(other), _) => find(&**other, &format!("{part}/{name}")),
                _ => continue,
            };
            match found {
                Ok(Some(found)) => return Ok(Some(found)),
                Ok(None) => {}
                Err(error) => failure = Some(error),
            }
        }
        failure.map_or(Ok(None), Err)
    }
}

impl Machines {
    /// Opens the copies of a step's files that machines keep for each other, of this attempt.
    pub(crate) fn copies_of(&self, step: u64, attempt: &Attempt) -> impl Iterator<Item = Arc<dyn Dir>> {
        let name = directory_layout::copy(&directory_layout::label(step), &attempt.session, attempt.counter);
        let others = self.others.values().map(|other| &**other as &dyn Dir);
        let machines = std::iter::once(&*self.local).chain(others);
        machines.filter_map(move |machine| match machine.open_dir(&name) {
            Ok(copy) => Some(copy),
            Err(error) => {
                if !error.is_gone() {
                    tracing::warn!(step, %error, "a copy on another machine cannot be opened");
                }
                None
            }
        })
    }
}

/// Returns the name of the copy of the attempt that has this part.
fn copy_of_part(part: &str) -> String {
    match directory_layout::parse(part) {
        Some(OwnName::Part { label, session, counter }) => directory_layout::copy(&label, &session, counter),
        _ => String::new(),
    }
}

/// Turns a missing file into `None`.
fn missing<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.is_gone() => Ok(None),
        Err(error) => Err(error),
    }
}

impl Dir for SpreadStep {
    fn path(&self) -> &Path {
        match (self.here.0.get(), &self.main) {
            (Some(Some(here)), _) => here.path(),
            (_, Some(main)) => main.path(),
            _ => self.machines.local().path(),
        }
    }

    fn open_dir(&self, name: &str) -> Result<Arc<dyn Dir>> {
        self.changed_here("open", name)?.open_dir(name)
    }

    fn create_dir(&self, name: &str) -> Result<Arc<dyn Dir>> {
        self.changed_here("create", name)?.create_dir(name)
    }

    fn unsorted_entries(&self) -> Result<Vec<Entry>> {
        self.main
            .as_ref()
            .map_or_else(|| self.changed_here("list", "")?.unsorted_entries(), |main| main.unsorted_entries())
    }

    fn stat(&self, name: &str) -> Result<Option<Stat>> {
        self.find(name, |dir, name| dir.stat(name))
    }

    fn id(&self) -> Result<(u64, u64)> {
        self.main.as_ref().map_or_else(|| self.changed_here("open", "")?.id(), |main| main.id())
    }

    fn changed(&self) -> Result<i64> {
        self.main.as_ref().map_or_else(|| self.changed_here("open", "")?.changed(), |main| main.changed())
    }

    fn create_file(&self, name: &str, len_hint: u64) -> Result<Arc<dyn File>> {
        self.changed_here("create", name)?.create_file(name, len_hint)
    }

    fn overwrite_file(&self, name: &str, len_hint: u64) -> Result<Arc<dyn File>> {
        self.changed_here("overwrite", name)?.overwrite_file(name, len_hint)
    }

    fn extend_file(&self, name: &str, len: u64) -> Result<(Arc<dyn File>, u64)> {
        self.changed_here("extend", name)?.extend_file(name, len)
    }

    fn open_file(&self, name: &str) -> Result<Arc<dyn File>> {
        let found = self.find(name, |dir, name| missing(dir.open_file(name)))?;
        found.ok_or_else(|| self.gone("open", name))
    }

    /// All files of the step, on all machines, for the whole step.
    fn lengths(&self, name: &str) -> Result<Option<Lengths>> {
        if !name.is_empty() {
            return Ok(None);
        }
        let mut all = Lengths::new();
        let mut add = |is_main: bool, mut lengths: Lengths| {
            // As in `find`.
            lengths.retain(|path, _| is_main || writer_of(path).is_some());
            all.append(&mut lengths);
        };
        if let Some(here) = self.here()?.filter(|_| !self.machines.is_main()) {
            add(false, lengths_below(here)?);
        }
        let (part, attempt) = self.attempt()?;
        let copy = copy_of_part(part);
        let mut places = Vec::new();
        for (machine, in_copy) in self.machines.holders_of(attempt) {
            let other = self.machines.others.get(&machine).map(|other| Arc::clone(other) as Arc<dyn Dir>);
            let place: (bool, Arc<dyn Dir>, &str) = match (other, &self.main) {
                (Some(other), _) if in_copy => (false, other, &copy),
                (None, _) if in_copy => match missing(self.machines.local().open_dir(&copy))? {
                    Some(copy) => (false, copy, ""),
                    None => continue,
                },
                (_, Some(main)) if machine == self.machines.main => (true, Arc::clone(main), ""),
                (Some(other), _) => (false, other, part),
                _ => continue,
            };
            places.push(place);
        }
        let answers = each("stepwell-find", REQUESTS_AT_ONCE, &places, |(is_main, dir, below)| {
            let lengths = if below.is_empty() { lengths_below(dir).map(Some) } else { dir.lengths(below) };
            missing(lengths).map(|lengths| (*is_main, lengths))
        });
        for answer in answers {
            let (is_main, lengths) = answer?;
            add(is_main, lengths.flatten().unwrap_or_default());
        }
        Ok(Some(all))
    }

    fn read_file(&self, name: &str, limit: u64) -> Result<Vec<u8>> {
        let found = self.find(name, |dir, name| missing(dir.read_file(name, limit)))?;
        found.ok_or_else(|| self.gone("read", name))
    }

    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let here = self.changed_here("write", name)?;
        match (here.write_file(name, bytes), name.rsplit_once('/')) {
            // The index of an item whose data is on other machines only.
            (Err(error), Some((item, _))) if error.is_not_found() => {
                here.create_dir(item)?;
                here.write_file(name, bytes)
            }
            (written, _) => written,
        }
    }

    fn replace_file(&self, name: &str, new_name: &str, bytes: &[u8]) -> Result<()> {
        self.changed_here("replace", name)?.replace_file(name, new_name, bytes)
    }

    fn write_pieces(&self, name: &str, len_hint: u64, next: NextPiece<'_>) -> Result<()> {
        self.changed_here("write", name)?.write_pieces(name, len_hint, next)
    }

    fn rename(&self, from: &str, to: &str, how: Rename) -> Result<()> {
        self.changed_here("rename", from)?.rename(from, to, how)
    }

    fn remove_file(&self, name: &str) -> Result<()> {
        self.changed_here("remove", name)?.remove_file(name)
    }

    fn remove_dir(&self, name: &str) -> Result<()> {
        self.changed_here("remove", name)?.remove_dir(name)
    }

    /// On the main machine, this directory. On others, the whole part and its name: nothing there
    /// is synced later.
    fn sync(&self) -> Result<()> {
        let here = self.changed_here("fsync", "")?;
        if self.machines.is_main() {
            return here.sync();
        }
        sync_below(&**here)?;
        self.machines.local().sync()
    }

    fn try_lock(&self, name: &str, kind: LockKind, create: bool) -> Result<Option<Box<dyn Lock>>> {
        match &self.main {
            Some(main) => main.try_lock(name, kind, create),
            None => self.changed_here("lock", name)?.try_lock(name, kind, create),
        }
    }

    fn free_bytes(&self) -> Result<u64> {
        self.machines.local().free_bytes()
    }
}

/// A directory with a manifest in a root.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct NamedAttempt {
    pub(super) name: String,
    pub(super) step: u64,
    pub(super) attempt: Attempt,
}

impl NamedAttempt {
    /// False for a branch's.
    pub(super) fn is_step(&self) -> bool {
        !matches!(directory_layout::parse(&self.name), Some(OwnName::Branch { .. }))
    }

    /// The name of the step, also of one in a branch.
    pub(super) fn step_name(&self) -> String {
        match directory_layout::parse(&self.name) {
            Some(OwnName::Branch { step_name, .. }) => step_name,
            _ => self.name.clone(),
        }
    }
}

/// Returns the directories of a root that have a manifest and such a name.
pub(super) fn named_attempts(root: &dyn Dir, has_name: &dyn Fn(&str) -> bool) -> Result<Vec<NamedAttempt>> {
    let mut named = Vec::new();
    for Entry { name, .. } in root.entries()?.into_iter().filter(|entry| has_name(&entry.name)) {
        match read_manifest(root, &name) {
            Ok(Manifest { step, attempt, .. }) => named.push(NamedAttempt { name, step, attempt }),
            Err(error) if error.is_gone() || is_not_a_step(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(named)
}
