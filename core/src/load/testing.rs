//! A disk in memory with injectable faults, and handwritten data files, for the tests of this
//! module.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use smallvec::smallvec;

use crate::format::checksum::crc32c;
use crate::format::footer;
use crate::format::header::Header;
use crate::format::index::{
    ChunkRecord, ChunkRegion, Codec, Extent, FileRecord, Index, Integrity, LeafRecord, Source, TensorRecord,
};
use crate::io::{
    Completion, Dir, Disk, EngineChoice, Entry, EntryKind, File, Lock, LockKind, Queue, Rename, Stat,
    Transfer,
};
use crate::leaf_path::Component;
use crate::read_plan::BoxCopy;
use crate::region::{Dims, Region};
use crate::sys::{Buffer, HostTarget};
use crate::tree::{ContainerKind, Tree};
use crate::{Error, Result};

use super::{FileSet, LoadOptions};

/// The faults to inject, and counters of requests.
#[derive(Debug, Default)]
pub(super) struct Knobs {
    /// Reads never end.
    pub(super) hang: AtomicBool,
    /// Opening a file blocks while this is set.
    pub(super) stuck: AtomicBool,
    /// Queued reads that touch this byte fail with EIO. Zero disables it.
    pub(super) bad_byte: AtomicU64,
    /// All bytes are in the page cache.
    pub(super) cached: AtomicBool,
    /// Bytes of buffers in flight, and their peak.
    pub(super) in_flight: AtomicUsize,
    pub(super) cached_reads: AtomicUsize,
    pub(super) direct_reads: AtomicUsize,
    /// The byte ranges of direct reads.
    pub(super) seen: Mutex<Vec<Range<u64>>>,
    pub(super) opened: AtomicUsize,
    puts: AtomicI64,
}

type FileBytes = Arc<Mutex<Vec<u8>>>;

#[derive(Clone, Debug)]
pub(super) struct MemoryDisk {
    /// The bytes of each file, and the number of the `put` that wrote it.
    files: Arc<Mutex<HashMap<String, (FileBytes, i64)>>>,
    pub(super) knobs: Arc<Knobs>,
    choice: EngineChoice,
}

impl MemoryDisk {
    pub(super) fn new() -> Self {
        let choice = EngineChoice {
            engine: "memory",
            direct: true,
            alignment: 4096,
            registered: false,
            reasons: vec![],
        };
        Self { files: Arc::default(), knobs: Arc::default(), choice }
    }

    pub(super) fn put(&self, name: &str, bytes: Vec<u8>) {
        let number = self.knobs.puts.fetch_add(1, Ordering::SeqCst);
        self.files.lock().unwrap().insert(name.into(), (Arc::new(Mutex::new(bytes)), number));
    }

    pub(super) fn change(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        change(&mut self.files.lock().unwrap()[name].0.lock().unwrap());
    }

    pub(super) fn dir(&self) -> Arc<dyn Dir> {
        Arc::new(self.clone())
    }
}

fn unsupported<T>() -> Result<T> {
    Err(Error::Misuse("a disk for reading".into()))
}

impl Disk for MemoryDisk {
    fn choice(&self) -> &EngineChoice {
        &self.choice
    }
    fn open_dir(&self, _: &Path) -> Result<Arc<dyn Dir>> {
        Ok(self.dir())
    }
    fn create_dir_all(&self, _: &Path) -> Result<Arc<dyn Dir>> {
        unsupported()
    }
    fn queue(&self, depth: usize) -> Result<Box<dyn Queue>> {
        Ok(Box::new(MemoryQueue { knobs: Arc::clone(&self.knobs), depth, waiting: Vec::new() }))
    }
}

impl Dir for MemoryDisk {
    fn path(&self) -> &Path {
        Path::new("/step/i0")
    }
    fn open_dir(&self, _: &str) -> Result<Arc<dyn Dir>> {
        unsupported()
    }
    fn create_dir(&self, _: &str) -> Result<Arc<dyn Dir>> {
        unsupported()
    }
    fn unsorted_entries(&self) -> Result<Vec<Entry>> {
        unsupported()
    }
    fn stat(&self, name: &str) -> Result<Option<Stat>> {
        let found = self.files.lock().unwrap().get(name).cloned();
        Ok(found.map(|(bytes, number)| {
            let len = bytes.lock().unwrap().len() as u64;
            Stat { kind: EntryKind::File, len, id: (1, 1), changed: number, modified: number }
        }))
    }
    fn id(&self) -> Result<(u64, u64)> {
        Ok((1, 1))
    }
    fn changed(&self) -> Result<i64> {
        unsupported()
    }
    fn create_file(&self, _: &str, _: u64) -> Result<Arc<dyn File>> {
        unsupported()
    }
    fn overwrite_file(&self, _: &str, _: u64) -> Result<Arc<dyn File>> {
        unsupported()
    }
    fn extend_file(&self, _: &str, _: u64) -> Result<(Arc<dyn File>, u64)> {
        unsupported()
    }
    fn open_file(&self, name: &str) -> Result<Arc<dyn File>> {
        let bytes = self.files.lock().unwrap().get(name).map(|(bytes, _)| Arc::clone(bytes));
        let path = Path::new("/step/i0").join(name);
        let bytes =
            bytes.ok_or_else(|| Error::io("open", &path, io::Error::from_raw_os_error(libc::ENOENT)))?;
        while self.knobs.stuck.load(Ordering::SeqCst) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        self.knobs.opened.fetch_add(1, Ordering::SeqCst);
        Ok(Arc::new(MemoryFile { path, bytes, knobs: Arc::clone(&self.knobs) }))
    }
    fn read_file(&self, _: &str, _: u64) -> Result<Vec<u8>> {
        unsupported()
    }
    fn write_file(&self, _: &str, _: &[u8]) -> Result<()> {
        unsupported()
    }
    fn rename(&self, _: &str, _: &str, _: Rename) -> Result<()> {
        unsupported()
    }
    fn remove_file(&self, _: &str) -> Result<()> {
        unsupported()
    }
    fn remove_dir(&self, _: &str) -> Result<()> {
        unsupported()
    }
    fn sync(&self) -> Result<()> {
        unsupported()
    }
    fn try_lock(&self, _: &str, _: LockKind, _: bool) -> Result<Option<Box<dyn Lock>>> {
        unsupported()
    }
    fn free_bytes(&self) -> Result<u64> {
        unsupported()
    }
}

struct MemoryFile {
    path: PathBuf,
    bytes: FileBytes,
    knobs: Arc<Knobs>,
}

impl MemoryFile {
    fn copy(&self, offset: u64, to: &mut [u8]) -> usize {
        let bytes = self.bytes.lock().unwrap();
        let from = bytes.get(offset as usize..).unwrap_or_default();
        let count = from.len().min(to.len());
        to[..count].copy_from_slice(&from[..count]);
        count
    }

    fn is_bad(&self, offset: u64, len: usize) -> Result<()> {
        let bad = self.knobs.bad_byte.load(Ordering::SeqCst);
        if bad != 0 && (offset..offset + len as u64).contains(&bad) {
            return Err(Error::io("read", &self.path, io::Error::from_raw_os_error(libc::EIO)));
        }
        Ok(())
    }
}

impl File for MemoryFile {
    fn path(&self) -> &Path {
        &self.path
    }
    fn len(&self) -> Result<u64> {
        Ok(self.bytes.lock().unwrap().len() as u64)
    }
    fn set_len(&self, _: u64) -> Result<()> {
        unsupported()
    }
    fn sync(&self) -> Result<()> {
        unsupported()
    }
    fn read_at(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        self.is_bad(offset, len)?;
        let mut bytes = vec![0; len];
        let count = self.copy(offset, &mut bytes);
        bytes.truncate(count);
        Ok(bytes)
    }
    fn cached(&self, _: u64, len: u64) -> Option<u64> {
        self.knobs.cached.load(Ordering::SeqCst).then_some(len)
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

struct Waiting {
    file: Arc<dyn File>,
    offset: u64,
    len: usize,
    buffer: Buffer,
    token: u64,
}

struct MemoryQueue {
    knobs: Arc<Knobs>,
    depth: usize,
    waiting: Vec<Waiting>,
}

impl Queue for MemoryQueue {
    fn submit(
        &mut self,
        how: Transfer,
        file: &Arc<dyn File>,
        offset: u64,
        len: usize,
        buffer: Buffer,
        token: u64,
    ) {
        assert!(self.waiting.len() < self.depth, "more than `depth` transfers");
        assert!(
            offset.is_multiple_of(4096) && len.is_multiple_of(4096) && len <= buffer.len(),
            "an unaligned transfer"
        );
        let counter = match how {
            Transfer::Read => &self.knobs.direct_reads,
            Transfer::ReadCached => &self.knobs.cached_reads,
            Transfer::Write => panic!("a restore writes no file"),
        };
        counter.fetch_add(1, Ordering::SeqCst);
        if how == Transfer::Read {
            self.knobs.seen.lock().unwrap().push(offset..offset + len as u64);
        }
        self.knobs.in_flight.fetch_add(1, Ordering::SeqCst);
        self.waiting.push(Waiting { file: Arc::clone(file), offset, len, buffer, token });
    }

    fn complete(&mut self, timeout: Duration) -> Option<Completion> {
        if self.waiting.is_empty() {
            return None;
        }
        if self.knobs.hang.load(Ordering::SeqCst) {
            std::thread::sleep(timeout);
            return None;
        }
        // Complete out of order, like real queues.
        let Waiting { file, offset, len, mut buffer, token } = self.waiting.remove(self.waiting.len() / 2);
        self.knobs.in_flight.fetch_sub(1, Ordering::SeqCst);
        let file = file.as_any().downcast_ref::<MemoryFile>().unwrap();
        let result = file.is_bad(offset, len).map(|()| file.copy(offset, &mut buffer[..len]));
        Some(Completion { token, buffer, result })
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }
}

impl Drop for MemoryQueue {
    fn drop(&mut self) {
        assert!(
            !self.knobs.hang.load(Ordering::SeqCst) || self.waiting.is_empty(),
            "dropping this queue would hang"
        );
    }
}

/// A handwritten item: tensors of bytes at chosen places of `00000.data`.
pub(super) struct TestItem {
    pub(super) disk: MemoryDisk,
    pub(super) index: Index,
    pub(super) block: u64,
}

pub(super) const FILE: &str = "00000.data";

/// Returns recognisable bytes.
pub(super) fn pattern(seed: u64, len: u64) -> Vec<u8> {
    (0..len)
        .map(|i| ((i ^ seed.wrapping_mul(0x9E37_79B9)).wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u8)
        .collect()
}

/// Returns a data file around `data` (which begins at byte 4096), and its record.
pub(super) fn data_file(id: u128, block: u64, data: &[u8], index: &Index) -> (Vec<u8>, FileRecord) {
    let mut bytes = Header::new(id, block, 0).encode();
    bytes.extend_from_slice(data);
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    let footer_offset = bytes.len() as u64;
    let crcs: Vec<u32> = bytes.chunks(block as usize).map(crc32c).collect();
    let footer = footer::encode(id, block, footer_offset, index, &crcs).unwrap();
    bytes.extend_from_slice(&footer.bytes);
    let record = FileRecord {
        name: FILE.into(),
        length: bytes.len() as u64,
        file_id: id,
        trailer_crc: footer.trailer_crc,
        within: None,
    };
    (bytes, record)
}

/// Returns the tree of a dict with one leaf per name.
pub(super) fn tree(names: &[String]) -> Tree {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    for name in names {
        tree.push_leaf(Some(root), Some(Component::Key(name.as_str().into())));
    }
    tree
}

pub(super) fn extent(file: u32, offset: u64, length: u64) -> Extent {
    Extent { source: Source::Own(file), offset, length, integrity: Integrity::BlockCrc }
}

/// Returns the record of a `uint8` tensor in one chunk.
pub(super) fn bytes_tensor(at: Extent) -> LeafRecord {
    let shape: Dims = smallvec![at.length];
    let region = ChunkRegion::Box(Region::whole(&shape));
    let chunks = smallvec![ChunkRecord { region, extent: at, codec: Codec::Raw }];
    LeafRecord::Tensor(TensorRecord { dtype: crate::dtype::Dtype::Uint8, shape, chunks })
}

impl TestItem {
    /// Creates tensors of these lengths, each at the next multiple of 64. Leaf `i` holds
    /// `pattern(i, length)`.
    pub(super) fn of_tensors(block: u64, lengths: &[u64]) -> Self {
        let mut data = Vec::new();
        let mut leaves = Vec::new();
        for (seed, &length) in (0..).zip(lengths) {
            data.resize(data.len().next_multiple_of(64), 0xAA);
            leaves.push(bytes_tensor(extent(0, 4096 + data.len() as u64, length)));
            data.extend(pattern(seed, length));
        }
        let names: Vec<String> = (0..lengths.len()).map(|i| format!("w{i}")).collect();
        let mut index = Index { tree: tree(&names), leaves, files: Vec::new() };
        let (bytes, record) = data_file(7, block, &data, &index);
        index.files.push(record);
        let disk = MemoryDisk::new();
        disk.put(FILE, bytes);
        Self { disk, index, block }
    }

    pub(super) fn files(&self) -> FileSet {
        FileSet::new(self.disk.dir(), &self.index.files)
    }

    pub(super) fn extent(&self, leaf: usize) -> Extent {
        match &self.index.leaves[leaf] {
            LeafRecord::Tensor(tensor) => tensor.chunks[0].extent,
            LeafRecord::Object(extent) => *extent,
            LeafRecord::Alias { .. } => panic!("a tie has no bytes of its own"),
        }
    }

    /// Returns the copies of whole leaves, each to its own target.
    pub(super) fn copies(&self, leaves: &[usize]) -> Vec<BoxCopy> {
        (0..)
            .zip(leaves.iter().map(|&leaf| (leaf as u32, self.extent(leaf))))
            .filter(|(_, (_, extent))| extent.length > 0)
            .map(|(number, (leaf, extent))| flat(leaf, number, extent.offset, extent.length))
            .collect()
    }

    /// Reads whole leaves.
    pub(super) fn load(&self, leaves: &[usize], options: &LoadOptions) -> (Vec<Vec<u8>>, Loaded) {
        let mut into: Vec<Vec<u8>> =
            leaves.iter().map(|&leaf| vec![0xEE; self.extent(leaf).length as usize]).collect();
        let targets: Vec<HostTarget<'_>> = into.iter_mut().map(|bytes| bytes.as_mut_slice().into()).collect();
        let result =
            super::execute(&self.disk, &self.files(), &self.index, &self.copies(leaves), targets, options);
        (into, result)
    }
}

pub(super) type Loaded = std::result::Result<super::LoadStats, super::LoadFailure>;

/// Returns a copy of bytes to the start of a destination.
pub(super) fn flat(leaf: u32, dst: u32, src_offset: u64, len: u64) -> BoxCopy {
    BoxCopy {
        leaf,
        file: 0,
        src_offset,
        src_strides: vec![1].into(),
        extent: vec![len].into(),
        itemsize: 1,
        dst,
        dst_offset: 0,
        dst_strides: vec![1].into(),
        inverted: 0,
        encoded: None,
    }
}

/// Returns options for tests: two threads and a short deadline.
pub(super) fn options() -> LoadOptions {
    LoadOptions { threads: 2, stall_timeout: Duration::from_secs(10), ..LoadOptions::default() }
}
