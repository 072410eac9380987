//! An index and its files, opened for reading: of a step of ours, or of files that another library
//! wrote.
//!
//! Leaves have one numbering: positions in [`Reader::outline`], also used by
//! [`Reader::match_state`]. The places of a tensor's chunks are read with the rest of the index; in
//! a large index, they are read when they are needed. Data files are opened lazily below one
//! directory descriptor.

use std::borrow::Cow;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use stepwell_core::format::index::{Chunks, Index};
use stepwell_core::io::Dir;
use stepwell_core::load::{
    self, BlockChecksums, ComputedCells, Destination, FileReads, FileSet, GuardedRange, LoadFailure,
    LoadOptions, LoadStats, VerifyProgress, VerifyReport,
};
use stepwell_core::read_plan::BoxCopy;
use stepwell_core::sys::{Birth, cores, each, spawn};
use stepwell_core::tree::Tree;
use stepwell_core::value::Value;
use stepwell_reshard::computed::{Computations, ComputedTensor};
use stepwell_reshard::mapping::{self, MappedLeaf};
use stepwell_reshard::matching::{self, Report, StoredLeaf, Wanted};
use stepwell_reshard::read_plan::{self, Request};

use self::operands::{SHARED_BYTES, SharedOperands};
use crate::directory_layout::MANIFEST;
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::foreign_reading::ForeignReading;
use crate::options::Options;
use crate::stored_index::StoredIndex;

mod compute;
mod operands;

/// The plan of a read uses one thread for so many requests.
const REQUESTS_PER_THREAD: usize = 4096;

/// See the module documentation.
pub struct Reader {
    dir: Arc<dyn Dir>,
    origin: Origin,
    index: StoredIndex,
    /// The leaves that a map computes.
    computations: Option<Arc<Computations>>,
    /// Made when matching asks for it: a path for every leaf.
    stored: OnceLock<Vec<StoredLeaf>>,
    files: Arc<FileSet>,
    environment: Environment,
    load_options: LoadOptions,
    birth: Birth,
}

/// The writer of what is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// A step of ours, with a manifest.
    Step,
    /// Another library.
    Foreign,
}

/// An index with so many leaves takes milliseconds to free.
const MANY_LEAVES: usize = 4096;

impl Drop for Reader {
    fn drop(&mut self) {
        if self.index.outline().leaves.len() >= MANY_LEAVES {
            let index = std::mem::take(&mut self.index);
            // Without a thread it is freed here.
            let _ = spawn("stepwell-free", move || drop(index));
        }
    }
}

/// A failed read, and the targets that it had overwritten.
#[derive(Debug)]
pub struct ReadFailure {
    /// Why.
    pub error: Error,
    /// The numbers of the targets that it had written to.
    pub overwritten: Vec<u32>,
}

impl From<Error> for Box<ReadFailure> {
    fn from(error: Error) -> Self {
        Self::new(ReadFailure { error, overwritten: Vec::new() })
    }
}

impl Reader {
    /// The reader of a step's files.
    pub(crate) fn of_step(
        dir: Arc<dyn Dir>,
        index: StoredIndex,
        files: FileSet,
        environment: &Environment,
        load_options: LoadOptions,
    ) -> Self {
        Self::new(dir, Origin::Step, index, files, environment, load_options)
    }

    /// Opens files below `dir` that another library wrote. `index` describes them; chunks that it
    /// lacks are described later. The lengths of the files are checked when they are opened.
    /// Compressed files in a file without a name are in `memory`. Fails if a file of the reading
    /// has changed since it was first read.
    pub fn foreign(
        dir: &Path,
        index: Index,
        memory: Vec<u8>,
        reading: &ForeignReading,
        environment: &Environment,
    ) -> Result<Self> {
        let dir = environment.disk.open_foreign_dir(dir)?;
        let known = |path: &Path| reading.known(path);
        let files = FileSet::foreign(Arc::clone(&dir), &index.files, memory, &known)?;
        reading.check_unchanged(&*environment.disk)?;
        let load_options = Options::default().load_options(&*environment.disk, false);
        let index = StoredIndex::in_memory(index);
        Ok(Self::new(dir, Origin::Foreign, index, files, environment, load_options))
    }

    /// Describes the chunks of tensors whose index lacks them.
    pub fn describe(&self, leaves: Vec<(u32, Chunks)>) {
        self.index.describe(leaves);
    }

    /// Says which ranges of the files have checksums. Only a verification compares them, and
    /// nothing vouches for other bytes.
    pub fn guard(&self, ranges: &[GuardedRange]) {
        self.files.guard(ranges);
    }

    /// The same files, with their tensors in another arrangement. `self` must outlive it if a lease
    /// protects the files.
    pub fn mapped(&self, tree: Tree, leaves: &[MappedLeaf], computed: &[ComputedTensor]) -> Result<Self> {
        if let Some(leaf) = (0..self.outline().leaves.len() as u32).find(|&leaf| self.is_computed(leaf)) {
            return Err(compute::refuse(self, leaf));
        }
        let (index, computations) = mapping::mapped(&*self.index()?, tree, leaves, computed)?;
        Ok(Self {
            dir: Arc::clone(&self.dir),
            origin: self.origin,
            index: StoredIndex::in_memory(index),
            computations: computations.map(Arc::new),
            stored: OnceLock::new(),
            files: Arc::clone(&self.files),
            environment: self.environment.clone(),
            load_options: self.load_options.clone(),
            birth: self.birth,
        })
    }

    fn new(
        dir: Arc<dyn Dir>,
        origin: Origin,
        index: StoredIndex,
        files: FileSet,
        environment: &Environment,
        load_options: LoadOptions,
    ) -> Self {
        Self {
            dir,
            origin,
            index,
            computations: None,
            stored: OnceLock::new(),
            files: Arc::new(files),
            environment: environment.clone(),
            load_options,
            birth: Birth::now(),
        }
    }

    /// Its files.
    pub(crate) fn files(&self) -> &Arc<FileSet> {
        &self.files
    }

    /// Its open directory, for what may outlive it.
    pub(crate) fn shared_dir(&self) -> Arc<dyn Dir> {
        Arc::clone(&self.dir)
    }

    /// Its open directory.
    pub(crate) fn dir(&self) -> &dyn Dir {
        &*self.dir
    }

    /// The directory of its files.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Raises in a forked child.
    pub(crate) fn check_process(&self) -> Result<()> {
        Ok(self.birth.check("checkpoint")?)
    }

    /// Returns the options for reads: those of the manager that opened it, or the defaults of
    /// [`Options`].
    pub fn load_options(&self) -> &LoadOptions {
        &self.load_options
    }

    /// Returns all items merged: one tree, one numbering of leaves, file names relative to the
    /// step. It lacks the chunks of tensors that are read or described later: see
    /// [`Reader::index_of`].
    pub fn outline(&self) -> &Arc<Index> {
        self.index.outline()
    }

    /// [`Reader::outline`] with at least the chunks of those leaves, and of the leaves to which
    /// they are tied.
    pub fn index_of(&self, leaves: impl IntoIterator<Item = u32>) -> Result<Arc<Index>> {
        self.index.with(leaves)
    }

    /// Returns the whole index.
    pub fn index(&self) -> Result<Arc<Index>> {
        self.index.whole()
    }

    /// Names the places and layouts of all bytes, and how leaves are computed. Equal for equal
    /// ones, in one version of stepwell.
    pub fn fingerprint(&self) -> Result<String> {
        let index = self.index()?;
        let computations = self.computations().map(Computations::fingerprint);
        // Two hashes of 64 bits.
        let halves = [0_u8, 1].map(|half| {
            let mut hasher = DefaultHasher::new();
            (half, &index.files, &index.leaves, &computations).hash(&mut hasher);
            format!("{:016x}", hasher.finish())
        });
        Ok(halves.concat())
    }

    /// Returns the structure of the state.
    pub fn tree(&self) -> &Tree {
        &self.outline().tree
    }

    /// Returns the leaf that holds the bytes of this one: ties are followed.
    fn holder(&self, leaf: u32) -> u32 {
        self.outline().resolve(leaf).map_or(leaf, |(holder, _)| holder)
    }

    /// True if a map computes the values of a leaf.
    pub fn is_computed(&self, leaf: u32) -> bool {
        self.computations.as_ref().is_some_and(|all| all.has(self.holder(leaf)))
    }

    /// Returns how its leaves are computed, `None` if no leaf is.
    pub fn computations(&self) -> Option<&Computations> {
        self.computations.as_deref()
    }

    /// Returns the bytes of memory that reads use beside their buffers.
    pub fn computing_bytes(&self) -> u64 {
        if self.computations.is_some() { 2 * compute::BATCH_BYTES + SHARED_BYTES } else { 0 }
    }

    /// Returns the leaves, for matching.
    pub fn leaves(&self) -> &[StoredLeaf] {
        self.stored.get_or_init(|| matching::stored_leaves(self.outline()))
    }

    /// Matches the wanted leaves with the stored ones. Reads no data.
    pub fn match_state(&self, wanted: &[Wanted], options: &matching::MatchOptions) -> Report {
        matching::match_state(wanted, self.leaves(), options)
    }

    /// Returns the reads of a restore of `requests` and `objects` (leaves of
    /// [`Self::outline`]), by file. A restore makes exactly these if the page cache holds no
    /// data, and may read operands of computed leaves more than once. Reads no data.
    pub fn plan(&self, requests: &[Request], objects: &[u32]) -> Result<Vec<FileReads>> {
        let (stored, computed) = self.by_kind(requests);
        let (index, mut copies) = self.copies(&stored)?;
        if let Some(computations) = &self.computations {
            for request in &computed {
                let Some(assembly) = computations.assembly(self.holder(request.leaf), request.region.clone())
                else {
                    continue;
                };
                copies.extend(read_plan::copies(&computations.index, &assembly.all_reads())?);
            }
        }
        let of_tensors = load::plan(&self.files, &index, &copies, self.load_options.limits);
        let of_objects = load::copies_of_objects(&self.files, self.outline(), objects)
            .and_then(|copies| load::plan(&self.files, self.outline(), &copies, self.load_options.limits));
        let mut planned = of_tensors.map_err(|error| self.gone_or(error))?;
        planned.extend(of_objects.map_err(|error| self.gone_or(error))?);
        Ok(planned)
    }

    /// Returns the requests of stored leaves, and of computed ones.
    fn by_kind<'r>(&self, requests: &'r [Request]) -> (Cow<'r, [Request]>, Vec<Request>) {
        if self.computations.is_none() {
            return (requests.into(), Vec::new());
        }
        let all = requests.iter().cloned();
        let (computed, stored): (Vec<_>, Vec<_>) = all.partition(|request| self.is_computed(request.leaf));
        (stored.into(), computed)
    }

    /// Returns the copies of requests, and the index that they refer to.
    fn copies(&self, requests: &[Request]) -> Result<(Arc<Index>, Vec<BoxCopy>)> {
        let index = self.index_of(requests.iter().map(|request| request.leaf))?;
        let threads = cores().min(requests.len() / REQUESTS_PER_THREAD).max(1);
        let shares: Vec<&[Request]> = requests.chunks(requests.len().div_ceil(threads).max(1)).collect();
        let planned = each("stepwell-plan", threads, &shares, |share| read_plan::copies(&index, share));
        let mut copies = Vec::new();
        for share in planned {
            let mut share = share?;
            if copies.is_empty() { copies = share } else { copies.append(&mut share) }
        }
        Ok((index, copies))
    }

    /// Reads regions of stored tensors into host or device memory. Verifies every block.
    pub fn read<'a>(
        &self,
        requests: &[Request],
        targets: impl IntoIterator<Item = impl Into<Destination<'a>>>,
        options: &LoadOptions,
    ) -> std::result::Result<LoadStats, Box<ReadFailure>> {
        self.read_while(requests, targets, options, &mut |_| true)
    }

    /// [`Self::read`] until `go_on` returns false. It is called between reads, with the
    /// number of bytes read.
    pub fn read_while<'a>(
        &self,
        requests: &[Request],
        targets: impl IntoIterator<Item = impl Into<Destination<'a>>>,
        options: &LoadOptions,
        go_on: &mut dyn FnMut(u64) -> bool,
    ) -> std::result::Result<LoadStats, Box<ReadFailure>> {
        self.check_process()?;
        let (stored, computed) = self.by_kind(requests);
        let (index, copies) = self.copies(&stored)?;
        let disk = &*self.environment.disk;
        let Some(computations) = self.computations.as_ref().filter(|_| !computed.is_empty()) else {
            return load::execute_while(disk, &self.files, &index, &copies, targets, options, go_on).map_err(
                |LoadFailure { error, overwritten }| {
                    Box::new(ReadFailure { error: self.gone_or(error), overwritten })
                },
            );
        };
        let cells = compute::cells(self, computations, &computed)?;
        let mut shared = SharedOperands::of(computations, &cells)?;
        // The error of this crate, and what the operands took.
        let (mut failed, mut operands) = (None, LoadStats::default());
        let mut next = |first: usize, go_on: &mut dyn FnMut(u64) -> bool| {
            let rest = cells.get(first..).unwrap_or_default();
            shared.free(first);
            compute::compute(self, computations, rest, &mut shared, options, &mut operands, go_on).map_err(
                |error| {
                    failed = Some(error);
                    stepwell_core::Error::Cancelled("a leaf cannot be computed".to_owned())
                },
            )
        };
        let copies_of_cells = cells.iter().map(compute::ComputedCell::copy).collect();
        let cells = ComputedCells { copies: copies_of_cells, compute: &mut next };
        let (files, copies) = (&self.files, (&*index, &*copies));
        let read = load::execute_computing(disk, files, copies, Some(cells), targets, options, go_on);
        let mut stats = read.map_err(|LoadFailure { error, overwritten }| {
            let error = failed.take().unwrap_or_else(|| self.gone_or(error));
            Box::new(ReadFailure { error, overwritten })
        })?;
        stats.bytes_read += operands.bytes_read;
        stats.bytes_cached += operands.bytes_cached;
        stats.reads += operands.reads;
        Ok(stats)
    }

    /// Reads the values of object leaves.
    pub fn read_objects(&self, leaves: &[u32], options: &LoadOptions) -> Result<Vec<Value>> {
        self.check_process()?;
        load::read_objects(&*self.environment.disk, &self.files, self.outline(), leaves, options)
            .map_err(|error| self.gone_or(error))
    }

    /// Reads and checks every byte; all damage is reported. `progress` may stop it by `false`.
    pub fn verify(
        &self,
        options: &LoadOptions,
        progress: &mut dyn FnMut(VerifyProgress) -> bool,
    ) -> Result<VerifyReport> {
        self.check_process()?;
        let index = self.index()?;
        load::verify(&*self.environment.disk, &self.files, &index, options, progress)
            .map_err(|error| self.gone_or(error))
    }

    /// Reads the files whole and returns the checksums of their blocks, by file. None of them is a
    /// compressed stream. `progress` may stop it by `false`.
    pub fn checksums(
        &self,
        block_bytes: u64,
        progress: &mut dyn FnMut(VerifyProgress) -> bool,
    ) -> Result<Vec<BlockChecksums>> {
        self.check_process()?;
        let disk = &*self.environment.disk;
        Ok(load::checksums(disk, &self.files, block_bytes, &self.load_options, progress)?)
    }

    /// Converts an error of a read. A missing file means that the step was removed under an
    /// unprotected reader, or that it is damaged.
    fn gone_or(&self, error: stepwell_core::Error) -> Error {
        let missing = self.origin == Origin::Step && error.is_gone();
        if missing && !matches!(self.dir.stat(MANIFEST), Ok(Some(_))) {
            let what = error.file().map_or_else(|| "a file".to_owned(), |file| file.display().to_string());
            return Error::StepGone { path: self.dir.path().to_owned(), what };
        }
        if missing {
            let file = error.file().unwrap_or(self.dir.path()).to_owned();
            return stepwell_core::Error::corrupt(file, "its manifest lists it, and it is missing").into();
        }
        error.into()
    }
}
