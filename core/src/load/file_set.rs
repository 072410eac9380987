//! The files of one item's directory, opened on first use and checked once.
//!
//! Before any data is used, the file's own records (header, trailer, page table, checksum pages)
//! are compared with the index (length, id, trailer CRC). A checksum page is read with the first of
//! its blocks. Errors name the file.

mod info;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

pub(super) use info::{FileInfo, check_page};

use super::buffers::ReadBuffers;
use super::head_start::{Coming, HeadStart};
use super::options::LoadOptions;
use super::schedule::Shape;
use crate::format::index::FileRecord;
use crate::io::{Dir, Disk, File, Section, is_component};
use crate::{Error, Result};

/// Limit on open files. An item of a large job has more files than a process may open.
const MAX_OPEN: usize = 128;

/// The kind of integrity check for a set's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Data files of stepwell: everything is checked.
    Own,
    /// Files of other libraries: only their length is checked.
    Foreign,
}

/// The files of one item. All readers of a checkpoint share it, from any thread.
pub struct FileSet {
    dir: Arc<dyn Dir>,
    records: Vec<FileRecord>,
    kind: Kind,
    state: Mutex<State>,
    buffers: Arc<ReadBuffers>,
    begun: Mutex<Begun>,
}

/// The prefetch of a set ([`super::head_start`]).
#[derive(Default)]
enum Begun {
    #[default]
    Nothing,
    /// The prefetch runs, and its result has not been received.
    Coming(Coming),
    Here(HeadStart),
}

#[derive(Default)]
struct State {
    /// The files that were opened and checked.
    known: HashMap<u32, Arc<FileInfo>>,
    open: HashMap<u32, Arc<dyn File>>,
    /// The open files, oldest first.
    order: VecDeque<u32>,
}

impl std::fmt::Debug for FileSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileSet")
            .field("dir", &self.dir.path())
            .field("files", &self.records.len())
            .finish_non_exhaustive()
    }
}

impl FileSet {
    /// Creates the set of an index's data files below `dir`. Opens nothing yet.
    pub fn new(dir: Arc<dyn Dir>, records: &[FileRecord]) -> Self {
        Self::of(dir, records, Kind::Own)
    }

    /// Creates the set of a foreign checkpoint's files below `dir`. They have no checksums.
    pub fn foreign(dir: Arc<dyn Dir>, records: &[FileRecord]) -> Self {
        Self::of(dir, records, Kind::Foreign)
    }

    fn of(dir: Arc<dyn Dir>, records: &[FileRecord], kind: Kind) -> Self {
        let buffers = ReadBuffers::shared();
        let begun = Mutex::default();
        Self { dir, records: records.to_vec(), kind, state: Mutex::default(), buffers, begun }
    }

    /// Returns the records of the files.
    pub fn records(&self) -> &[FileRecord] {
        &self.records
    }

    /// Starts to prefetch these files, in this order, for a restore that will read all of them.
    /// Returns at once. A failed prefetch is not reported: the restore reads by itself.
    pub fn begin(self: &Arc<Self>, disk: Arc<dyn Disk>, files: Vec<u32>, options: LoadOptions) {
        match Coming::start(disk, Arc::clone(self), files, options) {
            Ok(coming) => *self.begun() = Begun::Coming(coming),
            Err(error) => tracing::debug!(%error, "no head start"),
        }
    }

    /// Waits until [`FileSet::begin`] has submitted its reads. Call it before work that keeps all
    /// cores busy: the prefetch needs a core now and then until its reads are submitted.
    pub fn has_begun(&self) {
        // Holds the lock, so that concurrent callers wait too.
        let mut begun = self.begun();
        if let Begun::Coming(_) = *begun
            && let Begun::Coming(coming) = std::mem::take(&mut *begun)
            && let Some(head_start) = coming.wait()
        {
            *begun = Begun::Here(head_start);
        }
    }

    /// Takes the prefetch out of the set.
    pub(super) fn take_head_start(&self) -> Option<HeadStart> {
        // Wait without holding the lock.
        let begun = std::mem::take(&mut *self.begun());
        match begun {
            Begun::Nothing => None,
            Begun::Coming(coming) => coming.wait(),
            Begun::Here(head_start) => Some(head_start),
        }
    }

    /// Stores a prefetch for a later run.
    pub(super) fn keep_head_start(&self, head_start: HeadStart) {
        *self.begun() = Begun::Here(head_start);
    }

    fn begun(&self) -> std::sync::MutexGuard<'_, Begun> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the directory of the files.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the number of files.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// True if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Returns the block size of a file, for planning. Opens and checks the file.
    pub fn block_bytes(&self, file: u32) -> Result<u64> {
        self.info(file).map(|info| info.block_bytes)
    }

    /// Returns the path of a file, for messages.
    pub fn path(&self, file: u32) -> PathBuf {
        let name = self.records.get(file as usize).map_or("", FileRecord::stored_name);
        self.dir.path().join(name)
    }

    pub(super) fn buffers(&self) -> &Arc<ReadBuffers> {
        &self.buffers
    }

    pub(super) fn shape(&self, file: u32) -> Result<Shape> {
        let info = self.info(file)?;
        Ok(Shape { path: info.path.clone(), block_bytes: info.block_bytes, data_end: info.data_end })
    }

    /// Returns the facts about a file. The first call opens and checks it.
    pub(super) fn info(&self, file: u32) -> Result<Arc<FileInfo>> {
        let known = self.lock().known.get(&file).cloned();
        match known {
            Some(info) => Ok(info),
            None => self.open(file).map(|(info, _)| info),
        }
    }

    /// Returns an open file, after loading the checksums of `bytes`.
    pub(super) fn ready(&self, file: u32, bytes: &Range<u64>) -> Result<Arc<dyn File>> {
        let state = self.lock();
        let at_hand = state.known.get(&file).cloned().zip(state.open.get(&file).cloned());
        drop(state);
        let (info, handle) = match at_hand {
            Some(at_hand) => at_hand,
            None => self.open(file)?,
        };
        info.load_checksums(handle.as_ref(), bytes)?;
        Ok(handle)
    }

    /// Returns the error of a file that ended early.
    pub(super) fn short(&self, file: u32, found: u64, wanted: u64) -> Error {
        super::pipeline::short(&self.path(file), found, wanted)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a file without holding the lock. Two threads may open it at the same time; both
    /// results are valid.
    fn open(&self, file: u32) -> Result<(Arc<FileInfo>, Arc<dyn File>)> {
        let record = self.records.get(file as usize).ok_or_else(|| {
            Error::corrupt(self.dir.path(), format!("the index names file {file} of {}", self.records.len()))
        })?;
        let name = record.stored_name();
        if !name.split('/').all(is_component) {
            let what = format!("the index names a file `{name}`, which is no path below the item");
            return Err(Error::corrupt(self.dir.path(), what));
        }
        let mut handle = self.dir.open_file(name)?;
        if let Some(within) = &record.within {
            handle = Arc::new(Section::new(handle, within.offset, record.length));
        }
        let known = self.lock().known.get(&file).cloned();
        let info = match known {
            Some(info) => info,
            None => Arc::new(match self.kind {
                Kind::Own => FileInfo::own(handle.as_ref(), record)?,
                Kind::Foreign => FileInfo::foreign(handle.as_ref(), record)?,
            }),
        };
        let mut state = self.lock();
        let info = Arc::clone(state.known.entry(file).or_insert(info));
        if state.open.insert(file, Arc::clone(&handle)).is_none() {
            state.order.push_back(file);
        }
        let closing = if state.order.len() > MAX_OPEN { state.order.pop_front() } else { None };
        let closed = closing.and_then(|oldest| state.open.remove(&oldest));
        drop(state);
        drop(closed);
        Ok((info, handle))
    }
}
