//! Incomplete outputs: their names, their locks, and how they are removed.
//!
//! | name | what it is |
//! |---|---|
//! | `model.partial`, `model.partial.safetensors` | the incomplete output: a directory, a file |
//! | `model.partial.journal` | its journal, which also locks it; other ranks than the leader have `….journal.3` |

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use stepwell_core::io::{Dir, EntryKind, File, Lock, LockKind};

use super::OutputKind;
use super::file_plan::ConversionPlan;
use super::journal::{self, Recorded};
use super::windows::OutputWindow;
use super::writer::OutputFile;
use crate::commit::aside;
use crate::delete_tree::{delete_tree, ignore_missing};
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::foreign_reading::parent_and_name;
use crate::singular;

/// Marks the name of an incomplete output.
const PARTIAL: &str = ".partial";
/// Follows the name of an incomplete output, in the name of its journal.
const JOURNAL: &str = ".journal";
/// Follows the name of an output that is being removed.
const REMOVED: &str = ".removed";

/// The place of an incomplete output.
#[derive(Clone)]
pub(super) struct PartialOutput {
    pub parent: Arc<dyn Dir>,
    pub kind: OutputKind,
    /// The name of the complete output.
    pub name: String,
    /// The name until then.
    pub partial: String,
    /// The name of the journal that locks it.
    pub journal: String,
}

/// The lock of a journal.
enum JournalLock {
    Held(Box<dyn Lock>),
    /// The file system has no locks.
    Unsupported,
    /// Another process has it.
    Busy,
}

/// The owner that a journal names.
enum JournalOwner {
    /// It is no journal.
    None,
    /// Its first record was never finished.
    Unwritten,
    Of([u8; 32]),
}

impl PartialOutput {
    pub(super) fn new(parent: Arc<dyn Dir>, name: String, kind: OutputKind) -> Self {
        // Readers know a file by the end of its name, which stays.
        let partial = match name.rsplit_once('.') {
            Some((stem, suffix)) if kind == OutputKind::File && !stem.is_empty() => {
                format!("{stem}{PARTIAL}.{suffix}")
            }
            _ => format!("{name}{PARTIAL}"),
        };
        let journal = format!("{partial}{JOURNAL}");
        Self { parent, kind, name, partial, journal }
    }

    /// Returns the path of the incomplete output.
    pub(super) fn path(&self) -> PathBuf {
        self.parent.path().join(&self.partial)
    }

    /// Returns the name of a rank's journal.
    pub(super) fn journal_of(&self, rank: u32) -> String {
        if rank == 0 { self.journal.clone() } else { format!("{}.{rank}", self.journal) }
    }

    pub(super) fn check_free(&self) -> Result<()> {
        if self.parent.stat(&self.name)?.is_some() { Err(self.taken()) } else { Ok(()) }
    }

    pub(super) fn taken(&self) -> Error {
        let path = self.parent.path().join(&self.name);
        Error::Invalid(format!(
            "{} exists already. Pass a free path, or move what is there away",
            path.display()
        ))
    }

    /// True if something has the name of the incomplete output.
    pub(super) fn is_there(&self) -> Result<bool> {
        Ok(self.parent.stat(&self.partial)?.is_some())
    }

    /// Locks the journal, which is created if both are missing. `None` without locks.
    pub(super) fn lock(&self, is_there: bool) -> Result<Option<Box<dyn Lock>>> {
        match self.try_lock(!is_there) {
            Ok(JournalLock::Held(lock)) => Ok(Some(lock)),
            Ok(JournalLock::Unsupported) => Ok(None),
            Ok(JournalLock::Busy) => Err(Error::Invalid(format!(
                "another process writes {}. Wait for it, or pass another path",
                self.path().display()
            ))),
            Err(error) if is_there && error.is_not_found() => Err(self.in_the_way(&self.partial)),
            Err(error) => Err(error.into()),
        }
    }

    /// Locks the journal, or makes it if `create`.
    fn try_lock(&self, create: bool) -> stepwell_core::Result<JournalLock> {
        let lock = match self.parent.try_lock(&self.journal, LockKind::Exclusive, create) {
            Err(error) if error.is_without_locks() => return Ok(JournalLock::Unsupported),
            lock => lock?,
        };
        let Some(lock) = lock else { return Ok(JournalLock::Busy) };
        // The process that held it may have removed the file, and another may have made a new one.
        let named = self.parent.stat(&self.journal)?.map(|stat| stat.id);
        Ok(if named == Some(lock.id()?) { JournalLock::Held(lock) } else { JournalLock::Busy })
    }

    /// Returns what a journal has recorded.
    pub(super) fn read_journal(&self, name: &str) -> Result<Option<Recorded>> {
        let file = match self.parent.overwrite_file(name, 0) {
            Err(error) if error.is_not_found() => return Ok(None),
            opened => opened?,
        };
        let recorded = journal::read(&*file)?;
        if recorded.is_none() && !journal::is_unwritten(&*file)? {
            return Err(self.in_the_way(name));
        }
        Ok(recorded)
    }

    /// Returns the owner in the journal.
    fn owner(&self) -> Result<JournalOwner> {
        let file = match self.parent.open_file(&self.journal) {
            Err(error) if error.is_not_found() || error.is_no_file() => return Ok(JournalOwner::None),
            opened => opened?,
        };
        Ok(match journal::read(&*file)? {
            Some(recorded) => JournalOwner::Of(recorded.owner),
            None if journal::is_unwritten(&*file)? => JournalOwner::Unwritten,
            None => JournalOwner::None,
        })
    }

    /// Opens a journal, or creates it.
    pub(super) fn open_journal(&self, name: &str) -> Result<Arc<dyn File>> {
        match self.parent.overwrite_file(name, 0) {
            Err(error) if error.is_not_found() => Ok(self.parent.create_file(name, 0)?),
            opened => Ok(opened?),
        }
    }

    pub(super) fn in_the_way(&self, name: &str) -> Error {
        Error::Invalid(format!(
            "{} is in the way: it has the name of an incomplete conversion, and is none. Move or delete it",
            self.parent.path().join(name).display()
        ))
    }

    pub(super) fn of_another_owner(&self) -> Error {
        Error::Invalid(format!(
            "{} is in the way: it is an incomplete conversion, and not one of this export. Finish it, or delete it and its journal",
            self.path().display()
        ))
    }

    /// Creates the directory, or the empty file. Its journal is durable already: with it, the
    /// output can be told from a stranger's file.
    pub(super) fn create(&self) -> Result<()> {
        match self.kind {
            OutputKind::Directory => drop(self.parent.create_dir(&self.partial)?),
            OutputKind::File => drop(self.parent.create_file(&self.partial, 0)?),
        }
        Ok(self.parent.sync()?)
    }

    /// Creates the files of a directory that are missing, and makes their names durable. Only the
    /// leader does so, before any rank writes.
    pub(super) fn create_files(&self, plan: &ConversionPlan) -> Result<()> {
        let dir = self.dir()?;
        for OutputFile { name, .. } in self.files(plan) {
            match dir.create_file(&name, 0) {
                Err(error) if error.already_exists() => {}
                created => drop(created?),
            }
        }
        Ok(dir.sync()?)
    }

    /// Opens the directory of the files.
    pub(super) fn dir(&self) -> Result<Arc<dyn Dir>> {
        match self.kind {
            OutputKind::File => Ok(Arc::clone(&self.parent)),
            OutputKind::Directory => Ok(self.parent.open_dir(&self.partial)?),
        }
    }

    /// Fails if the output was removed after the leader had created it.
    pub(super) fn check_there(&self) -> Result<()> {
        if self.is_there()? {
            return Ok(());
        }
        Err(Error::Invalid(format!(
            "{} is gone: another rank or process has removed it. Convert again",
            self.path().display()
        )))
    }

    /// Returns the files to write, by their names in [`Self::dir`].
    pub(super) fn files(&self, plan: &ConversionPlan) -> Vec<OutputFile> {
        let name = |planned: &str| match self.kind {
            OutputKind::File => self.partial.clone(),
            OutputKind::Directory => planned.to_owned(),
        };
        plan.files.iter().map(|file| OutputFile { name: name(&file.name), length: file.length }).collect()
    }

    /// True if the files of finished windows are there, and long enough.
    pub(super) fn has_files_of(
        &self,
        plan: &ConversionPlan,
        finished: impl Iterator<Item = OutputWindow>,
    ) -> Result<bool> {
        let below = |name: &str| match self.kind {
            OutputKind::File => self.parent.stat(&self.partial),
            OutputKind::Directory => self.parent.stat(&format!("{}/{name}", self.partial)),
        };
        // Without preallocation, a file ends with the last window that was written to it.
        let mut ends = BTreeMap::new();
        for window in finished {
            ends.insert(window.file, window.offset + window.len as u64);
        }
        for (number, end) in ends {
            let Some(planned) = plan.files.get(number) else { return Ok(false) };
            let stat = match below(&planned.name) {
                Err(error) if error.is_no_directory() => None,
                stat => stat?,
            };
            if stat.is_none_or(|stat| stat.kind != EntryKind::File || stat.len < end) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Removes the incomplete output, whatever its kind. The journals stay.
    pub(super) fn remove(&self) -> Result<()> {
        match self.parent.stat(&self.partial)?.map(|stat| stat.kind) {
            None => return Ok(()),
            Some(EntryKind::Dir) => ignore_missing(delete_tree(&*self.parent, &self.partial))?,
            Some(_) => ignore_missing(self.parent.remove_file(&self.partial))?,
        }
        Ok(self.parent.sync()?)
    }

    /// Removes the incomplete output and its journals.
    pub(super) fn give_up(&self) -> Result<()> {
        // The output goes first: with its journal, it can be told from a stranger's file.
        self.remove()?;
        self.remove_journals()
    }

    /// Removes the journals of all ranks. The one that is locked goes last.
    pub(super) fn remove_journals(&self) -> Result<()> {
        let others = format!("{}.", self.journal);
        for entry in self.parent.entries()? {
            if entry.name.strip_prefix(&others).is_some_and(|rank| rank.parse::<u32>().is_ok()) {
                ignore_missing(self.parent.remove_file(&entry.name))?;
            }
        }
        Ok(ignore_missing(self.parent.remove_file(&self.journal))?)
    }
}

/// Gives files their exact lengths: a process may have been killed before it cut what was allocated
/// behind their ends.
pub(super) fn settle_lengths(dir: &dyn Dir, files: &[OutputFile]) -> Result<()> {
    for OutputFile { name, length } in files {
        let stat = dir.stat(name)?;
        if stat.is_some_and(|stat| stat.len == *length) {
            continue;
        }
        let file: Arc<dyn File> = dir.overwrite_file(name, 0)?;
        file.set_len(*length)?;
        file.sync()?;
    }
    Ok(())
}

/// Removes what an interrupted conversion of `owner` to `path` has left. Does nothing if there is
/// nothing, if it has another owner, or if another process writes it.
pub fn discard(path: &Path, kind: OutputKind, owner: [u8; 32], environment: &Environment) -> Result<()> {
    let (parent, name) = singular::split(path)?;
    let parent = match environment.disk.open_dir(parent) {
        Err(error) if error.is_not_found() => return Ok(()),
        parent => parent?,
    };
    let output = PartialOutput::new(parent, name, kind);
    let _lock = match output.try_lock(false) {
        // Without its journal, it may be somebody else's.
        Err(error) if error.is_not_found() => return Ok(()),
        Ok(JournalLock::Busy) => return Ok(()),
        lock => lock?,
    };
    match output.owner()? {
        JournalOwner::Of(found) if found == owner => output.give_up(),
        // The process was killed before it wrote anything.
        JournalOwner::Unwritten if !output.is_there()? => output.give_up(),
        _ => Ok(()),
    }
}

/// The remains of an output, which an ended process has left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leftover {
    /// The name of the complete output.
    pub name: String,
    /// The kind of its remains.
    pub kind: LeftoverKind,
}

/// The kind of the remains of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftoverKind {
    /// An incomplete output with its journal, and the owner in it.
    Partial([u8; 32]),
    /// A journal alone.
    Journal,
    /// A directory that is being removed.
    Removal,
}

/// Lists what ended processes have left in a directory of outputs of one kind. A running conversion
/// is listed, too. Incomplete outputs without a journal are not: they may be somebody else's.
pub fn leftovers(folder: &Path, kind: OutputKind, environment: &Environment) -> Result<Vec<Leftover>> {
    let parent = match environment.disk.open_dir(folder) {
        Err(error) if error.is_not_found() => return Ok(Vec::new()),
        parent => parent?,
    };
    let mut found = Vec::new();
    for entry in parent.entries()? {
        if kind == OutputKind::Directory
            && let Some(name) = entry.name.strip_suffix(REMOVED)
        {
            found.push(Leftover { name: name.to_owned(), kind: LeftoverKind::Removal });
        }
        let Some(partial) = entry.name.strip_suffix(JOURNAL) else { continue };
        let names = partial.match_indices(PARTIAL).map(|(at, _)| {
            let (start, end) = partial.split_at(at);
            format!("{start}{}", end.strip_prefix(PARTIAL).unwrap_or_default())
        });
        let mut outputs = names.map(|name| PartialOutput::new(Arc::clone(&parent), name, kind));
        let Some(output) = outputs.find(|output| output.partial == partial) else { continue };
        let kind = match output.owner()? {
            JournalOwner::Of(owner) if output.is_there()? => LeftoverKind::Partial(owner),
            JournalOwner::Of(_) | JournalOwner::Unwritten if !output.is_there()? => LeftoverKind::Journal,
            _ => continue,
        };
        found.push(Leftover { name: output.name, kind });
    }
    Ok(found)
}

/// Returns the name that an output has while it is removed.
pub fn removal_of(name: &str) -> String {
    format!("{name}{REMOVED}")
}

/// Removes the directory of a complete output. Its name is free at once, also after a crash, and
/// its files are deleted then. [`end_removal`] ends a removal that was interrupted.
pub fn remove(path: &Path, environment: &Environment) -> Result<()> {
    end_removal(path, environment)?;
    let (parent, name) = singular::split(path)?;
    let parent = environment.disk.open_dir(parent)?;
    match aside::retire(&*parent, &name, &removal_of(&name)) {
        Err(error) if error.is_not_found() => return Ok(()),
        retired => retired?,
    }
    end_removal(path, environment)
}

/// Removes a complete output that is one file, durably.
pub fn remove_file(path: &Path, environment: &Environment) -> Result<()> {
    let (parent, name) = singular::split(path)?;
    let parent = environment.disk.open_dir(parent)?;
    parent.remove_file(&name)?;
    Ok(parent.sync()?)
}

/// Writes a small file beside an output, or replaces it. It is durable and whole.
pub fn write_record(path: &Path, bytes: &[u8], environment: &Environment) -> Result<()> {
    let (parent, name) = parent_and_name(path)?;
    let parent = if environment.disk.keeps_ledgers() {
        environment.disk.open_foreign_dir(parent)?
    } else {
        environment.disk.create_dir_all(parent)?
    };
    Ok(parent.replace_file(name, &format!("{name}.new"), bytes)?)
}

/// Deletes the files of an output that an interrupted [`remove`] has left.
pub fn end_removal(path: &Path, environment: &Environment) -> Result<()> {
    let (parent, name) = singular::split(path)?;
    let parent = environment.disk.open_dir(parent)?;
    Ok(ignore_missing(delete_tree(&*parent, &removal_of(&name)))?)
}
