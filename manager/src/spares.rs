//! Spares: files of a retired step that the next save overwrites. Their blocks are allocated, so
//! the file system need not free and find blocks. On file systems that discard freed blocks, this
//! halves the time of a save.
//!
//! The last retired step waits in its trash for the next save. Its lease is locked, and its data
//! files get new names. So a process that opens one by its old name has it open already, or finds
//! nothing. A file is taken only if no process has it open and it has no other name (a backup's
//! hard link). Unused files are deleted with their trash: when the next step is retired, when the
//! disk is full, and at the end. A killed process leaves ordinary trash, which the next writer
//! deletes.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stepwell_core::format::manifest::FileEntry;
use stepwell_core::io::{Dir, File, Lock, LockKind};

use crate::commit::aside::rename_apart;
use crate::directory_layout::LEASE;

/// The data files of one retired step.
struct Kept {
    trash: String,
    /// The held lease, against readers and deleters.
    _lock: Box<dyn Lock>,
    files: Vec<Spare>,
}

struct Spare {
    /// Its path below the step.
    path: String,
    /// Its name below the root.
    name: String,
}

/// The spares of one root.
pub struct Spares {
    root: Arc<dyn Dir>,
    /// The smallest size of a spare in bytes. `None`: no file is kept.
    from_bytes: Option<u64>,
    kept: Mutex<Option<Kept>>,
    /// Directories below the root from which files were taken, and which were not synced since.
    left: Mutex<BTreeSet<String>>,
}

impl Spares {
    pub(crate) fn new(root: Arc<dyn Dir>, from_bytes: Option<u64>) -> Self {
        Self { root, from_bytes, kept: Mutex::default(), left: Mutex::default() }
    }

    fn kept(&self) -> MutexGuard<'_, Option<Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn left(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps trash whose rename is durable, if some of its `files` are large enough and no reader
    /// holds it. It replaces the trash that was kept before. Returns the trash to delete.
    pub fn keep(&self, trash: String, files: &[FileEntry]) -> Option<String> {
        match self.claim(&trash, files) {
            Ok(Some(kept)) => self.kept().replace(kept).map(|before| before.trash),
            Ok(None) => Some(trash),
            Err(error) => {
                tracing::debug!(trash, %error, "the next save does not overwrite its files");
                Some(trash)
            }
        }
    }

    fn claim(&self, trash: &str, files: &[FileEntry]) -> stepwell_core::Result<Option<Kept>> {
        let Some(from_bytes) = self.from_bytes else { return Ok(None) };
        // A file that contains data of several ranks is not overwritten.
        let large = files.iter().filter(|file| file.length >= from_bytes && file.within.is_none());
        let mut paths: Vec<&str> = large.map(|file| file.path.as_str()).collect();
        if paths.is_empty() {
            return Ok(None);
        }
        let step = self.root.open_dir(trash)?;
        // The others are on other machines.
        paths.retain(|path| step.stat(path).is_ok_and(|stat| stat.is_some()));
        let Some(lock) = step.try_lock(LEASE, LockKind::Exclusive, false)? else {
            return Ok(None);
        };
        let names = rename_apart(&*self.root, trash, &paths)?;
        let files = paths.into_iter().zip(names).map(|(path, name)| Spare { path: path.to_owned(), name });
        Ok(Some(Kept { trash: trash.to_owned(), _lock: lock, files: files.collect() }))
    }

    /// Takes the spare with that path below its step. It gets the name `to` below the root, and is
    /// then overwritten.
    pub fn take(&self, path: &str, to: &str, len_hint: u64) -> Option<Arc<dyn File>> {
        let (name, trash) = {
            let mut kept = self.kept();
            let kept = kept.as_mut()?;
            let at = kept.files.iter().position(|file| file.path == path)?;
            (kept.files.swap_remove(at).name, kept.trash.clone())
        };
        // It went from its own directory to the trash, and goes from there now.
        let own = path.rsplit_once('/').map(|(item, _)| format!("{trash}/{item}"));
        self.left().extend(own.into_iter().chain([trash]));
        // Hold no lock: a disk that hangs then blocks only this save. If the trash is deleted at
        // the same time, one of the two wins.
        self.root.take_over(&name, to, len_hint).unwrap_or_else(|error| {
            tracing::debug!(name, %error, "this file is not overwritten");
            if !error.already_exists() {
                // It may have the new name in spite of the error.
                let _ = self.root.remove_file(to);
            }
            None
        })
    }

    /// Makes the moves durable, before the step with the files is committed. Otherwise a power cut
    /// might leave a file in both places, and a deletion of one would damage the other.
    pub fn sync(&self) -> stepwell_core::Result<()> {
        let left = std::mem::take(&mut *self.left());
        for name in &left {
            self.sync_dir(name)?;
        }
        Ok(())
    }

    fn sync_dir(&self, name: &str) -> stepwell_core::Result<()> {
        match self.root.open_dir(name) {
            Ok(dir) => dir.sync(),
            // It was deleted since. That must be durable too.
            Err(error) if error.is_not_found() => match name.rsplit_once('/') {
                Some((above, _)) => self.sync_dir(above),
                None => self.root.sync(),
            },
            Err(error) => Err(error),
        }
    }

    /// Stops to keep files. Returns the trash to delete.
    pub fn give_up(&self) -> Option<String> {
        self.kept().take().map(|kept| kept.trash)
    }
}
