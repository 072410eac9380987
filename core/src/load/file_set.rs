//! The files of one item's directory, opened on first use and checked once.
//!
//! Before any data is used, the file's own records (header, trailer, page table, checksum pages)
//! are compared with the index (length, id, trailer CRC). A checksum page is read with the first of
//! its blocks. Errors name the file.
//!
//! Foreign files have no such records. Whenever one is opened, its length and time of change are
//! compared with those before its header was read, or else with those at the creation of the set.

mod info;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

pub(super) use info::{BadBlock, FileInfo, check_page, short};

use super::block_checksums::{BlockChecksums, CheckedFile};
use super::decode::PausedStreams;
use super::guards::{GuardedRange, Guards};
use super::mender::OtherCopies;
use crate::format::index::{CompressedStream, FileRecord, Within};
use crate::io::{Dir, EntryKind, File, MemoryFile, Section, Stat, is_component};
use crate::{Error, Result};

/// The facts about files, by their ordinals.
pub(super) type FileInfos = HashMap<u32, Arc<FileInfo>>;

/// Limit on open files. An item of a large job has more files than a process may open.
const MAX_OPEN: usize = 128;

/// The origin of integrity check for a set's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileOrigin {
    /// Data files of stepwell: everything is checked.
    Own,
    /// Files of other libraries: their length and time of change are checked, and their blocks if
    /// they have checksums.
    Foreign,
}

/// The known facts about a foreign file.
#[derive(Clone, Debug, Default)]
pub struct KnownFile {
    /// Its facts before it was first read.
    pub first: Option<Stat>,
    /// The checksums of its blocks.
    pub checksums: Option<Arc<BlockChecksums>>,
}

/// The files of one item. All readers of a checkpoint share it, from any thread.
pub struct FileSet {
    dir: Arc<dyn Dir>,
    records: Arc<[FileRecord]>,
    origin: FileOrigin,
    /// Foreign files before they were first read, by name.
    described: HashMap<String, Stat>,
    /// The checksums of foreign files, by name.
    checksums: HashMap<String, Arc<BlockChecksums>>,
    /// The guarded ranges of foreign files, once they are known.
    guards: OnceLock<Arc<Guards>>,
    /// Other places of the same step.
    others: OnceLock<Arc<dyn OtherCopies>>,
    state: Mutex<OpenFiles>,
    paused: PausedStreams,
    /// Bytes that streams in the file without a name are in.
    memory: Option<Arc<MemoryFile>>,
}

#[derive(Default)]
struct OpenFiles {
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
        Self::of(dir, records, FileOrigin::Own)
    }

    /// Creates the set of a foreign checkpoint's files below `dir`. Streams in a file without a
    /// name are in `memory`. `known` returns the facts about a file, by its path. Fails if a
    /// compressed file claims to become more bytes than it can.
    pub fn foreign(
        dir: Arc<dyn Dir>,
        records: &[FileRecord],
        memory: Vec<u8>,
        known: &dyn Fn(&Path) -> KnownFile,
    ) -> Result<Self> {
        for record in records {
            let Some(stream) = record.stream() else { continue };
            if record.length > stream.compression.most_decoded(stream.length) {
                let what = format!("{} compressed bytes cannot become {}", stream.length, record.length);
                return Err(Error::corrupt(dir.path().join(record.stored_name()), what));
            }
        }
        let memory = Some(Arc::new(MemoryFile::new(dir.path().to_owned(), memory)));
        let mut set = Self { memory, ..Self::of(dir, records, FileOrigin::Foreign) };
        for name in records.iter().map(FileRecord::stored_name).filter(|name| !name.is_empty()) {
            if set.described.contains_key(name) {
                continue;
            }
            let KnownFile { first, checksums } = known(&set.dir.path().join(name));
            let stat = first.map_or_else(|| set.dir.stat(name), |first| Ok(Some(first)))?;
            if let Some(stat) = stat.filter(|stat| stat.kind == EntryKind::File) {
                set.described.insert(name.to_owned(), stat);
                if let Some(found) = checksums {
                    set.checksums.insert(name.to_owned(), found);
                }
            }
        }
        Ok(set)
    }

    /// Says which ranges of foreign files have checksums. Those of one file do not overlap. Only
    /// the first call counts.
    pub fn guard(&self, ranges: &[GuardedRange]) {
        self.guards.get_or_init(|| Arc::new(Guards::new(ranges)));
    }

    fn of(dir: Arc<dyn Dir>, records: &[FileRecord], origin: FileOrigin) -> Self {
        Self {
            dir,
            records: records.into(),
            origin,
            described: HashMap::new(),
            checksums: HashMap::new(),
            guards: OnceLock::new(),
            others: OnceLock::new(),
            state: Mutex::default(),
            paused: PausedStreams::default(),
            memory: None,
        }
    }

    /// Names other places of the same step, for bytes that arrive damaged. Only the first call
    /// counts.
    pub fn mend_from(&self, others: Arc<dyn OtherCopies>) {
        let _ = self.others.set(others);
    }

    pub(super) fn other_copies(&self) -> Option<&Arc<dyn OtherCopies>> {
        self.others.get()
    }

    pub(super) fn directory(&self) -> &Arc<dyn Dir> {
        &self.dir
    }

    /// Their records, to keep.
    pub fn shared_records(&self) -> &Arc<[FileRecord]> {
        &self.records
    }

    /// True if the files are ours.
    pub(super) fn is_own(&self) -> bool {
        self.origin == FileOrigin::Own
    }

    /// Returns the guarded ranges: none, if nobody has named them.
    pub(super) fn guards(&self) -> Arc<Guards> {
        self.guards.get().cloned().unwrap_or_default()
    }

    /// Returns the records of the files.
    pub fn records(&self) -> &[FileRecord] {
        &self.records
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

    /// Returns the facts about a file. The first call opens and checks it.
    pub(super) fn info(&self, file: u32) -> Result<Arc<FileInfo>> {
        let known = self.lock().known.get(&file).cloned();
        match known {
            Some(info) => Ok(info),
            None => self.open(file).map(|(info, _)| info).or_else(|error| self.lost(file, error)),
        }
    }

    /// Returns the facts about a file that cannot be opened, if another copy has its bytes.
    fn lost(&self, file: u32, error: Error) -> Result<Arc<FileInfo>> {
        let record = self.records.get(file as usize).filter(|_| self.is_own());
        let others = self.other_copies().filter(|others| others.any());
        let (Some(record), Some(_)) = (record, others) else { return Err(error) };
        let path = self.path(file);
        let damage = match error {
            Error::Corrupt { what, .. } | Error::Format { what, .. } => what,
            other => other.to_string(),
        };
        tracing::warn!(
            file = %path.display(), %damage,
            "a file cannot be opened, so its bytes are read from another copy. Verify the step"
        );
        let lost = Arc::new(FileInfo::lost(path, record, damage));
        Ok(Arc::clone(self.lock().known.entry(file).or_insert(lost)))
    }

    /// Returns the same files without other copies.
    pub(super) fn alone(&self) -> Option<Self> {
        self.other_copies().map(|_| Self::of(Arc::clone(&self.dir), &self.records, self.origin))
    }

    /// Returns the machine that the bytes of a file come from, if the file was opened before.
    pub(super) fn source(&self, file: u32) -> u64 {
        self.lock().known.get(&file).map_or(0, |info| info.source)
    }

    /// Returns an open file, after loading the checksums of `bytes`. For a compressed
    /// stream, this is the file around it.
    pub(super) fn ready(&self, file: u32, bytes: &Range<u64>) -> Result<Arc<dyn File>> {
        let state = self.lock();
        let known = state.known.get(&file).cloned();
        let at_hand = known.clone().zip(state.open.get(&file).cloned());
        drop(state);
        known.map_or(Ok(()), |info| info.check_own())?;
        let (info, handle) = match at_hand {
            Some(at_hand) => at_hand,
            None => self.open(file)?,
        };
        info.load_checksums(handle.as_ref(), bytes)?;
        Ok(handle)
    }

    /// Returns the compressed stream that a file is in another file, and its offset there.
    pub(super) fn stream(&self, file: u32) -> Option<(&CompressedStream, u64)> {
        let record = self.records.get(file as usize)?;
        Some((record.stream()?, record.stored_offset(0)))
    }

    /// Returns the readers of compressed streams that were kept.
    pub(super) fn paused(&self) -> &PausedStreams {
        &self.paused
    }

    /// Returns the error of a file that ended early.
    pub(super) fn short(&self, file: u32, found: u64, wanted: u64) -> Error {
        info::short(&self.path(file), found, wanted)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, OpenFiles> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails if a foreign file has changed. The caller has opened it: what replaces it from now on
    /// is not read. The inode is not compared, because some network file systems change it.
    fn check_unchanged(&self, name: &str) -> Result<()> {
        let Some(before) = self.described.get(name) else { return Ok(()) };
        match self.dir.stat(name)? {
            Some(now) if (now.len, now.modified) != (before.len, before.modified) => {
                let what = "it has changed since the checkpoint was opened. Open the checkpoint again";
                Err(Error::corrupt(self.dir.path().join(name), what))
            }
            _ => Ok(()),
        }
    }

    /// Opens the file on disk that has a file's bytes.
    fn handle(&self, record: &FileRecord) -> Result<Arc<dyn File>> {
        let name = record.stored_name();
        if let (true, Some(_), Some(memory)) = (name.is_empty(), record.stream(), &self.memory) {
            return Ok(Arc::clone(memory) as Arc<dyn File>);
        }
        if !name.split('/').all(is_component) {
            let what = format!("the index names a file `{name}`, which is no path below the item");
            return Err(Error::corrupt(self.dir.path(), what));
        }
        match record.within {
            None if self.origin == FileOrigin::Own => self.dir.open_recorded(name, record.length),
            _ => self.dir.open_file(name),
        }
    }

    /// Opens the stored file with this name. It may hold the data files of several ranks.
    pub(super) fn open_stored(&self, name: &str) -> Result<Arc<dyn File>> {
        let mut ours = self.records.iter().filter(|record| record.stored_name() == name);
        let record = ours.next().ok_or_else(|| Error::internal("a file of the index", name))?;
        self.handle(record)
    }

    /// Checks the header and the footer of every file.
    pub fn check_records(&self) -> Result<()> {
        (0..self.records.len() as u32).try_for_each(|file| self.info(file).map(drop))
    }

    /// Opens a file without holding the lock. Two threads may open it at the same time; both
    /// results are valid.
    fn open(&self, file: u32) -> Result<(Arc<FileInfo>, Arc<dyn File>)> {
        let record = self.records.get(file as usize).ok_or_else(|| {
            Error::corrupt(self.dir.path(), format!("the index names file {file} of {}", self.records.len()))
        })?;
        let mut handle = self.handle(record)?;
        let checksums = self.checksums.get(record.stored_name());
        if let (Some(checksums), Some(_)) = (checksums, record.stream()) {
            handle = Arc::new(CheckedFile::new(handle, Arc::clone(checksums))?);
        }
        if let Some(Within { offset, stream: None, .. }) = &record.within {
            handle = Arc::new(Section::new(handle, *offset, record.length));
        }
        let known = self.lock().known.get(&file).cloned();
        let info = match known {
            Some(info) => info,
            None => Arc::new(match self.origin {
                FileOrigin::Own => FileInfo::own(handle.as_ref(), record)?,
                FileOrigin::Foreign => FileInfo::foreign(handle.as_ref(), record, checksums)?,
            }),
        };
        self.check_unchanged(record.stored_name())?;
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
