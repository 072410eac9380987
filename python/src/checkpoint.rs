//! An open checkpoint, as Python sees it: structure, match, reads into arrays, objects,
//! verification.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use stepwell_core::format::index::{ChunkRegion, Extent, FileRecord, Index, LeafRecord};
use stepwell_core::io::{Engine, Purpose};
use stepwell_core::leaf_path::{Component, named};
use stepwell_core::load::{BlockChecksums, FileReads, VerifyProgress};
use stepwell_core::region::Region;
use stepwell_core::sys::{Device, UserStream, driver};
use stepwell_core::tree::{ContainerKind, NodeKind, Tree};
use stepwell_manager::{Error, ReadFailure, Reader, copy};
use stepwell_reshard::mapping::MappedLeaf;
use stepwell_reshard::read_plan::Request;

use crate::array_group::{ArrayGroup, request};
use crate::arrays;
use crate::errors::{closed, invalid, raise, raise_manager};
use crate::foreign::{Entered, Reading, entered};
use crate::hooks::hooks;
use crate::ingest::{HeldBuffer, streams_of, target_of};
use crate::location::Location;
use crate::options;
use crate::values::to_python;
use crate::wait;

use self::described::{
    ComputedRow, ForeignChunk, ForeignFile, ForeignLeaf, ForeignNode, GuardedRow, MappedRow, computed_tensor,
    foreign_chunks, foreign_file, foreign_leaf, guarded_ranges, is_negated, mapped_leaf, tree_of,
};

mod described;

pub type Engined = stepwell_manager::Checkpoint;

/// The part of a checkpoint to copy: globs of items to take, of items to leave out, later metrics,
/// globs of tensors to compress.
pub type CopiedPart = (Option<Vec<String>>, Vec<String>, BTreeMap<String, f64>, Vec<String>);

/// Names the fields of a part.
pub fn part_of((include, exclude, metrics, compress): CopiedPart) -> copy::CopySelection {
    copy::CopySelection { include, exclude, metrics, compress }
}

/// Files that are open for reading.
pub enum Opened {
    /// A step of ours.
    Step(Engined),
    /// Files of another library.
    Foreign(Reader),
    /// Either of them, with its tensors in another arrangement. The first one keeps the lease.
    Mapped(Arc<Opened>, Reader),
}

impl Deref for Opened {
    type Target = Reader;

    fn deref(&self) -> &Reader {
        match self {
            Self::Step(step) => step,
            Self::Foreign(reader) | Self::Mapped(_, reader) => reader,
        }
    }
}

impl Opened {
    /// The step of ours. Raises for files of another library.
    pub fn step(&self) -> Result<&Engined, Error> {
        match self {
            Self::Step(step) => Ok(step),
            Self::Mapped(stored, _) => stored.step(),
            Self::Foreign(reader) => {
                let path = reader.path().display();
                Err(Error::Invalid(format!("{path}: another library wrote it, so it is no step of stepwell")))
            }
        }
    }
}

/// The part of a foreign checkpoint that is not in arrays.
struct ForeignFacts {
    /// The path that the caller gave. Its files may be elsewhere, behind links.
    path: PathBuf,
    /// Objects by their leaf.
    objects: HashMap<u32, Py<PyAny>>,
    /// Facts in the form of a manifest.
    manifest: String,
    /// Names chunks and checksums when they are needed.
    details: Py<PyAny>,
    /// The reading that its files belong to.
    reading: Entered,
    /// Tensors whose chunks are not described yet.
    undescribed: Mutex<BTreeSet<u32>>,
}

/// An open checkpoint: leased, if it is a step of ours.
#[pyclass(frozen, module = "stepwell._core")]
pub struct Checkpoint {
    inner: Mutex<Option<Arc<Opened>>>,
    foreign: Option<ForeignFacts>,
}

impl Checkpoint {
    /// Opens a checkpoint on a thread of its own.
    pub fn open(
        py: Python<'_>,
        opening: impl FnOnce() -> Result<Engined, Error> + Send + 'static,
    ) -> PyResult<Self> {
        let opened = wait::on_thread(py, opening)?.map_err(|error| raise_manager(py, &error))?;
        Ok(Self { inner: Mutex::new(Some(Arc::new(Opened::Step(opened)))), foreign: None })
    }

    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<Arc<Opened>> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.clone().ok_or_else(|| closed(py, "this checkpoint was closed; open it again"))
    }

    /// [`Checkpoint::get`], with all chunks described.
    pub(crate) fn described(&self, py: Python<'_>) -> PyResult<Arc<Opened>> {
        let inner = self.get(py)?;
        self.describe(py, &inner, 0..inner.outline().leaves.len() as u32)?;
        Ok(inner)
    }

    /// The same files, with the ranges of them that have checksums.
    fn guarded(&self, py: Python<'_>, inner: Arc<Opened>) -> PyResult<Arc<Opened>> {
        if let Some(facts) = &self.foreign {
            let rows: Vec<GuardedRow> = facts.details.bind(py).call_method0("guarded")?.extract()?;
            inner.guard(&rows.into_iter().flat_map(guarded_ranges).collect::<Vec<_>>());
        }
        Ok(inner)
    }

    /// Describes the chunks of leaves of a foreign checkpoint, unless they are known.
    fn describe(&self, py: Python<'_>, inner: &Opened, leaves: impl Iterator<Item = u32>) -> PyResult<()> {
        let Some(facts) = &self.foreign else { return Ok(()) };
        let outline = inner.outline();
        let wanted: BTreeSet<u32> = {
            let undescribed = facts.undescribed();
            let holder = |leaf| outline.resolve(leaf).map(|(holder, _)| holder);
            leaves.filter_map(holder).filter(|leaf| undescribed.contains(leaf)).collect()
        };
        if wanted.is_empty() {
            return Ok(());
        }
        // Without the lock: this reads files. Two threads may describe the same leaf. The rows are
        // in the order of this list. (A set of Python has an order of its own.)
        let listed: Vec<u32> = wanted.iter().copied().collect();
        let rows: Vec<Vec<ForeignChunk>> =
            facts.details.bind(py).call_method1("chunks", (&listed,))?.extract()?;
        if rows.len() != listed.len() {
            let found = format!("{} rows for {}", rows.len(), listed.len());
            return Err(raise(py, &stepwell_core::Error::internal("chunks of each leaf", found)));
        }
        let described = listed.iter().zip(rows).map(|(&leaf, chunks)| {
            let ndim = match outline.leaves.get(leaf as usize) {
                Some(LeafRecord::Tensor(tensor)) => tensor.shape.len(),
                _ => 0,
            };
            Ok((leaf, foreign_chunks(ndim, chunks)?))
        });
        inner.describe(described.collect::<PyResult<_>>()?);
        facts.undescribed().retain(|leaf| !wanted.contains(leaf));
        Ok(())
    }
}

impl ForeignFacts {
    fn undescribed(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.undescribed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Checkpoint {
    fn drop(&mut self) {
        let closed = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if closed.is_some() {
            Python::try_attach(|py| py.detach(move || drop(closed)));
        }
    }
}

/// A stored tensor, the place of a region in it, and the array of that region's extent that it is
/// read into.
type ReadRow<'py> = (u32, Vec<u64>, Bound<'py, PyAny>);

/// The reads of a file: `(path, reads, blocks, bytes of the reads, wanted bytes)`.
type PlanRow = (String, u64, u64, u64, u64);

/// A stored leaf: `(kind, dtype, shape, the leaf that it is tied to)`.
type LeafRow = (&'static str, Option<&'static str>, Option<Vec<u64>>, Option<u32>);

fn leaf_row(inner: &Reader, leaf: usize) -> LeafRow {
    let index = inner.outline();
    let tied = match index.leaves.get(leaf) {
        Some(LeafRecord::Alias { of }) => Some(*of),
        _ => None,
    };
    match index.resolve(leaf as u32) {
        Some((_, LeafRecord::Tensor(tensor))) => {
            ("tensor", Some(tensor.dtype.name()), Some(tensor.shape.to_vec()), tied)
        }
        _ => ("object", None, None, tied),
    }
}

/// A chunk: `(file, offset, bytes, first element or offsets, elements or extents)`; without a file
/// where it is supplied by a reader.
type ChunkRow = (Option<u32>, u64, u64, Vec<u64>, Vec<u64>);

fn chunk_rows(index: &Index, record: &LeafRecord) -> Vec<ChunkRow> {
    let row = |extent: &Extent, first: Vec<u64>, count: Vec<u64>| {
        let file = extent.source.file();
        let record = file.and_then(|file| index.files.get(file as usize));
        let offset = record.map_or(extent.offset, |record| record.stored_offset(extent.offset));
        (file, offset, extent.length, first, count)
    };
    match record {
        LeafRecord::Alias { .. } => Vec::new(),
        LeafRecord::Object(extent) => vec![row(extent, Vec::new(), Vec::new())],
        LeafRecord::Tensor(tensor) => {
            let chunks = tensor.chunks.iter().map(|chunk| match &chunk.region {
                ChunkRegion::Box(region) => {
                    row(&chunk.extent, region.offset.to_vec(), region.extent.to_vec())
                }
                ChunkRegion::Run { start, len } => row(&chunk.extent, vec![*start], vec![*len]),
            });
            chunks.collect()
        }
    }
}

#[pymethods]
impl Checkpoint {
    /// Opens a checkpoint of another library, which the caller knows by `path`: `files` below
    /// `directory` by name and length, the nodes of the tree, its leaves, and the objects by leaf.
    /// `manifest` has facts about them, in the form of a manifest. `details.chunks(leaves)` returns
    /// the chunks that leaves lack, and `details.guarded()` the ranges of files that have
    /// checksums. Compressed files in a file without a name are in `memory`. The files belong to
    /// the entered [`Reading`].
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "a description, part by part")]
    fn foreign(
        py: Python<'_>,
        path: PathBuf,
        directory: PathBuf,
        files: Vec<ForeignFile>,
        nodes: Vec<ForeignNode<'_>>,
        leaves: Vec<ForeignLeaf>,
        objects: HashMap<u32, Py<PyAny>>,
        details: Py<PyAny>,
        memory: Vec<u8>,
        manifest: String,
        engine: &str,
    ) -> PyResult<Self> {
        let engine = options::engine(py, engine)?;
        let lacks_chunks = |leaf: &ForeignLeaf| matches!(leaf, (Some((.., None)), _));
        let undescribed = (0_u32..)
            .zip(&leaves)
            .filter_map(|(number, leaf)| lacks_chunks(leaf).then_some(number))
            .collect();
        let index = Index {
            tree: tree_of(nodes, &Tree::new())?,
            leaves: leaves.into_iter().map(foreign_leaf).collect::<PyResult<_>>()?,
            files: files.into_iter().map(foreign_file).collect::<PyResult<_>>()?,
        };
        let reading = entered();
        let entered = reading.clone();
        let opened = wait::on_thread(py, move || {
            let environment = entered.environment(&directory, engine, Purpose::Read)?;
            Reader::foreign(&directory, index, memory, &entered.reading, &environment)
        })?
        .map_err(|error| raise_manager(py, &error))?;
        let undescribed = Mutex::new(undescribed);
        let foreign = Some(ForeignFacts { path, objects, manifest, details, reading, undescribed });
        Ok(Self { inner: Mutex::new(Some(Arc::new(Opened::Foreign(opened)))), foreign })
    }

    /// The same checkpoint with its tensors in another arrangement: nodes, leaves and computed
    /// tensors as in [`ForeignNode`], [`MappedRow`] and [`ComputedRow`].
    fn mapped(
        &self,
        py: Python<'_>,
        nodes: Vec<ForeignNode<'_>>,
        leaves: Vec<MappedRow>,
        computed: Vec<ComputedRow>,
    ) -> PyResult<Self> {
        let inner = self.described(py)?;
        let computed = computed.into_iter().map(computed_tensor).collect::<PyResult<Vec<_>>>()?;
        let tree = tree_of(nodes, inner.tree())?;
        let leaves = leaves.into_iter().map(mapped_leaf).collect::<PyResult<Vec<_>>>()?;
        let foreign = self.foreign.as_ref().map(|facts| {
            let object = |(number, leaf): (u32, &MappedLeaf)| match leaf {
                MappedLeaf::Stored(stored) => {
                    let holder = inner.outline().resolve(*stored).map_or(*stored, |(holder, _)| holder);
                    facts.objects.get(&holder).map(|object| (number, object.clone_ref(py)))
                }
                _ => None,
            };
            ForeignFacts {
                path: facts.path.clone(),
                objects: (0_u32..).zip(&leaves).filter_map(object).collect(),
                manifest: facts.manifest.clone(),
                details: facts.details.clone_ref(py),
                reading: facts.reading.clone(),
                undescribed: Mutex::default(),
            }
        });
        let mapped = {
            let inner = Arc::clone(&inner);
            wait::on_thread(py, move || inner.mapped(tree, &leaves, &computed))?
        };
        let reader = mapped.map_err(|error| raise_manager(py, &error))?;
        Ok(Self { inner: Mutex::new(Some(Arc::new(Opened::Mapped(inner, reader)))), foreign })
    }

    /// Returns the reading that files beside those of the checkpoint are read in, too.
    fn reading(&self) -> Reading {
        Reading(self.foreign.as_ref().map(|facts| facts.reading.clone()).unwrap_or_default())
    }

    fn close(&self, py: Python<'_>) {
        let closed = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Closing files may take time, on a network file system.
        py.detach(move || drop(closed));
    }

    /// The path of the checkpoint, as the caller gave it.
    fn path(&self, py: Python<'_>) -> PyResult<String> {
        let inner = self.get(py)?;
        let path = self.foreign.as_ref().map_or(inner.path(), |facts| &facts.path);
        Ok(path.display().to_string())
    }

    /// The directory that the names of its files are relative to. Links are followed in it.
    fn directory(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.get(py)?.path().display().to_string())
    }

    fn step(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.get(py)?.step().map_or(0, Engined::step))
    }

    /// Describes missing files and wrong lengths.
    fn damage(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let inner = self.get(py)?;
        py.detach(move || inner.step().map_or(Ok(None), Engined::damage))
            .map_err(|error| raise_manager(py, &error))
    }

    /// The manifest as text.
    fn manifest(&self, py: Python<'_>) -> PyResult<String> {
        let inner = self.get(py)?;
        let Ok(step) = inner.step() else {
            return Ok(self.foreign.as_ref().map(|one| one.manifest.clone()).unwrap_or_default());
        };
        let bytes = step.manifest().encode().map_err(|error| raise_manager(py, &error.into()))?;
        let text = String::from_utf8(bytes).map_err(|error| PyValueError::new_err(error.to_string()))?;
        // The last line seals what is before it, and is no part of the record.
        let body = text.trim_end().rsplit_once('\n').map_or("", |(body, _)| body);
        Ok(body.to_owned())
    }

    /// True for a step whose bytes are files of another library.
    fn is_adopted(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.get(py)?.step().is_ok_and(|step| step.manifest().adopted.is_some()))
    }

    /// Metrics that were saved with it.
    fn metrics(&self, py: Python<'_>) -> PyResult<BTreeMap<String, f64>> {
        Ok(self.get(py)?.step().map(|step| step.manifest().metrics.clone()).unwrap_or_default())
    }

    /// Items that were thinned away, and when: nanoseconds since 1970.
    fn dropped(&self, py: Python<'_>) -> PyResult<Vec<(String, i64)>> {
        let inner = self.get(py)?;
        let dropped = inner.step().map_or(&[][..], |step| &step.manifest().dropped);
        Ok(dropped.iter().map(|one| (one.item.clone(), one.unix_ns)).collect())
    }

    /// Nodes in pre-order: `(parent, component or None, leaf number or container kind)`.
    fn nodes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let inner = self.get(py)?;
        let nodes = inner.tree().nodes().iter().map(|node| {
            let component =
                node.component.as_ref().map(|component| component_row(py, component)).transpose()?;
            let kind = match &node.kind {
                NodeKind::Leaf(leaf) => leaf.into_pyobject(py)?.into_any(),
                NodeKind::Container(kind) => kind_row(py, kind)?.into_any(),
            };
            (node.parent, component, kind).into_pyobject(py)
        });
        PyList::new(py, nodes.collect::<PyResult<Vec<_>>>()?)
    }

    /// All leaves: `(kind, dtype, shape, tied)`.
    fn leaves(&self, py: Python<'_>) -> PyResult<Vec<LeafRow>> {
        let inner = self.get(py)?;
        Ok((0..inner.outline().leaves.len()).map(|leaf| leaf_row(&inner, leaf)).collect())
    }

    /// Rendered paths of all leaves.
    fn leaf_paths(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let inner = self.get(py)?;
        let leaves = 0..inner.outline().leaves.len() as u32;
        Ok(py.detach(|| leaves.map(|leaf| inner.tree().leaf_path(leaf).to_string()).collect()))
    }

    /// One leaf.
    fn leaf(&self, py: Python<'_>, leaf: usize) -> PyResult<LeafRow> {
        Ok(leaf_row(&*self.get(py)?, leaf))
    }

    /// The places of all bytes: the data files, relative to the step, and the chunks of each leaf:
    /// `(file, offset, bytes, first element or offsets, elements or extents)`. A run of the
    /// flattened array has one number each, an object none.
    fn places(&self, py: Python<'_>) -> PyResult<(Vec<String>, Vec<Vec<ChunkRow>>)> {
        let inner = self.described(py)?;
        let index = py.detach(|| inner.index()).map_err(|error| raise_manager(py, &error))?;
        let files = index.files.iter().map(|file| file.stored_name().to_owned()).collect();
        Ok((files, index.leaves.iter().map(|leaf| chunk_rows(&index, leaf)).collect()))
    }

    /// Names the places and layouts of all bytes, and how leaves are computed.
    fn fingerprint(&self, py: Python<'_>) -> PyResult<String> {
        let inner = self.described(py)?;
        py.detach(|| inner.fingerprint()).map_err(|error| raise_manager(py, &error))
    }

    /// The values of object leaves.
    fn objects<'py>(
        &self,
        py: Python<'py>,
        leaves: Vec<u32>,
        reviver: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        if leaves.is_empty() {
            return Ok(Vec::new());
        }
        let inner = self.get(py)?;
        if let Some(foreign) = &self.foreign {
            let holder = |leaf| inner.outline().resolve(leaf).map_or(leaf, |(holder, _)| holder);
            let object = |leaf: u32| foreign.objects.get(&holder(leaf)).map(|one| one.bind(py).clone());
            let missing = || PyValueError::new_err("a leaf without an object");
            return leaves.into_iter().map(|leaf| object(leaf).ok_or_else(missing)).collect();
        }
        let values = wait::on_thread(py, move || inner.read_objects(&leaves, inner.load_options()))?
            .map_err(|error| raise_manager(py, &error))?;
        values.iter().map(|value| to_python(py, value, reviver)).collect()
    }

    /// Reads regions of stored tensors into writable arrays, `(leaf, offset, array)`, and groups.
    /// Returns the bytes that were read. Nothing is written any more when it returns, however it
    /// does.
    #[pyo3(signature = (requests, groups = Vec::new()))]
    fn read(
        &self,
        py: Python<'_>,
        requests: Vec<ReadRow<'_>>,
        groups: Vec<Bound<'_, ArrayGroup>>,
    ) -> PyResult<u64> {
        let inner = self.get(py)?;
        let mut index = Arc::clone(inner.outline());
        if self.foreign.is_some() {
            let mut leaves: Vec<u32> = requests.iter().map(|(leaf, ..)| *leaf).collect();
            leaves.extend(groups.iter().flat_map(|group| group.get().stored()));
            self.describe(py, &inner, leaves.iter().copied())?;
            index = inner.index_of(leaves).map_err(|error| raise_manager(py, &error))?;
        }
        let known = arrays::known();
        let mut targets = Vec::with_capacity(requests.len());
        let mut parts: Vec<Request> = Vec::with_capacity(requests.len());
        for (leaf, offset, array) in requests {
            let target = known.hold(&array, true)?;
            if offset.len() != target.shape().len() {
                return Err(PyValueError::new_err(format!(
                    "leaf {leaf}: an array of shape {:?} cannot take a region at {offset:?}",
                    target.shape()
                )));
            }
            let itemsize = target.itemsize() as u64;
            match index.resolve(leaf) {
                Some((_, LeafRecord::Tensor(tensor))) if tensor.dtype.size() as u64 == itemsize => {
                    if target.device().is_some() && tensor.chunks.iter().any(is_negated) {
                        let path = named(&inner.tree().leaf_path(leaf).to_string());
                        let what = "the file has its values with the opposite sign, which only a read into \
                                    host memory changes; restore it there, then move it to the device";
                        return Err(invalid(py, &format!("{path}: {what}")));
                    }
                }
                _ => {
                    return Err(PyValueError::new_err(format!(
                        "leaf {leaf} has no elements of {itemsize} bytes"
                    )));
                }
            }
            parts.push(request(leaf, offset, &target, targets.len()));
            targets.push(target);
        }
        for group in groups {
            group.get().give_requests(&mut parts, &mut targets);
        }
        read_all(py, &inner, parts, targets)
    }

    /// The reads that [`Checkpoint::read`] would make for leading parts of stored tensors, `(leaf,
    /// extent)`, and [`Checkpoint::objects`] for objects. Returns for each file `(path, reads,
    /// blocks, bytes of the reads, wanted bytes)`. Reads no data.
    fn plan(
        &self,
        py: Python<'_>,
        tensors: Vec<(u32, Vec<u64>)>,
        objects: Vec<u32>,
    ) -> PyResult<Vec<PlanRow>> {
        let inner = self.get(py)?;
        self.describe(py, &inner, tensors.iter().map(|(leaf, _)| *leaf))?;
        let index = Arc::clone(inner.outline());
        let mut requests = Vec::with_capacity(tensors.len());
        for (leaf, extent) in tensors {
            let Some((_, LeafRecord::Tensor(tensor))) = index.resolve(leaf) else {
                return Err(PyValueError::new_err(format!("leaf {leaf} is no tensor")));
            };
            let region = Region { offset: vec![0; extent.len()].into(), extent: extent.into() };
            let (itemsize, number) = (tensor.dtype.size() as u64, requests.len() as u32);
            requests.push(Request::row_major(leaf, region, itemsize, number));
        }
        // Foreign objects are in memory.
        let objects = if self.foreign.is_some() { Vec::new() } else { objects };
        let planned = wait::on_thread(py, move || inner.plan(&requests, &objects))?
            .map_err(|error| raise_manager(py, &error))?;
        let row = |file: FileReads| {
            let path = index.files.get(file.file as usize).map_or("", FileRecord::stored_name).to_owned();
            let bytes = file.reads.iter().map(|read| read.end - read.start).sum();
            (path, file.reads.len() as u64, file.blocks, bytes, file.wanted_bytes)
        };
        Ok(planned.into_iter().map(row).collect())
    }

    /// Copies it, or a part of it, to a free path, verified and durably; `progress` as in `verify`.
    #[pyo3(signature = (path, part, progress = None))]
    fn copy(
        &self,
        py: Python<'_>,
        path: Location,
        part: CopiedPart,
        progress: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let inner = self.get(py)?;
        telling(py, progress.as_ref(), move |seen| {
            let environment = path.environment(Engine::Auto, Purpose::Write)?;
            let mut seen = |at: copy::CopyProgress| seen(at.done, at.total);
            copy::to_path(inner.step()?, &part_of(part), &path.path, &environment, &mut seen)
        })
    }

    /// Reads all files of another library and returns the CRC-32C of each block of that size, by
    /// file: four bytes each, the least significant one first. No file is a compressed stream.
    #[pyo3(signature = (block_bytes, progress = None))]
    fn checksums<'py>(
        &self,
        py: Python<'py>,
        block_bytes: u64,
        progress: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let inner = self.guarded(py, self.get(py)?)?;
        let found = telling(py, progress.as_ref(), move |seen| {
            inner.checksums(block_bytes, &mut |at: VerifyProgress| seen(at.done, at.total))
        })?;
        let bytes = |file: BlockChecksums| {
            let bytes: Vec<u8> = file.crcs().iter().flat_map(|crc| crc.to_le_bytes()).collect();
            PyBytes::new(py, &bytes)
        };
        Ok(found.into_iter().map(bytes).collect())
    }

    /// Reads everything and compares every checksum: `(files, bytes, bytes without a checksum,
    /// [(file, block, leaf paths, what)])`. `progress(done, total)` is called now and then.
    #[pyo3(signature = (progress = None))]
    #[expect(clippy::type_complexity, reason = "a row of plain values for Python")]
    fn verify(
        &self,
        py: Python<'_>,
        progress: Option<Bound<'_, PyAny>>,
    ) -> PyResult<(u64, u64, u64, Vec<(String, Option<u64>, Vec<String>, String)>)> {
        let opened = self.described(py)?;
        let inner = match &*opened {
            Opened::Mapped(stored, _) => Arc::clone(stored),
            _ => opened,
        };
        let inner = self.guarded(py, inner)?;
        let checked = Arc::clone(&inner);
        let report = telling(py, progress.as_ref(), move |seen| {
            let options = checked.load_options();
            let mut progress = |at: VerifyProgress| seen(at.done, at.total);
            match &*checked {
                Opened::Step(step) => step.verify(options, &mut progress),
                Opened::Foreign(reader) | Opened::Mapped(_, reader) => reader.verify(options, &mut progress),
            }
        })?;
        let name = |leaf: &u32| inner.tree().leaf_path(*leaf).to_string();
        let damages = report.damages.iter().map(|damage| {
            let leaves = damage.leaves.iter().map(name).collect();
            (damage.file.display().to_string(), damage.block, leaves, damage.what.clone())
        });
        Ok((report.files, report.bytes, report.unguarded_bytes, damages.collect()))
    }
}

/// Runs long work on a thread. `progress(done, total)` is called now and then, and stops the work
/// by an exception, as an interrupt does.
pub fn telling<T: Send + 'static>(
    py: Python<'_>,
    progress: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(&mut dyn FnMut(u64, u64) -> bool) -> Result<T, Error> + Send + 'static,
) -> PyResult<T> {
    let stop = Arc::new(AtomicBool::new(false));
    let seen = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
    let work = {
        let (stop, seen) = (Arc::clone(&stop), Arc::clone(&seen));
        move || {
            work(&mut |done, total| {
                seen.0.store(done, Ordering::Relaxed);
                seen.1.store(total, Ordering::Relaxed);
                !stop.load(Ordering::Relaxed)
            })
        }
    };
    let tell = || match progress {
        Some(progress) => {
            progress.call1((seen.0.load(Ordering::Relaxed), seen.1.load(Ordering::Relaxed))).map(|_| ())
        }
        None => Ok(()),
    };
    let answer = wait::to_the_end(py, &stop, work, tell)?.map_err(|error| raise_manager(py, &error))?;
    tell()?;
    Ok(answer)
}

/// Reads into held, writable buffers, by their number. Returns the bytes that were read. No host
/// memory is written any more when it returns, however it does; where a device is too slow, copies
/// into it may be under way, and the current streams wait for them.
fn read_all(
    py: Python<'_>,
    inner: &Arc<Opened>,
    requests: Vec<Request>,
    buffers: Vec<HeldBuffer>,
) -> PyResult<u64> {
    let streams = receive_after(py, &buffers)?;
    // Copies of a failed read may still be in flight. The frameworks' next work is ordered after
    // them.
    let behind = |streams: &[(Arc<Device>, UserStream)]| {
        for (device, stream) in streams {
            if let Err(error) = device.received_before(*stream) {
                tracing::warn!(?device, %error, "copies of a restore that has failed may still be under way");
            }
        }
    };
    let buffers = Arc::new(buffers);
    let stop = Arc::new(AtomicBool::new(false));
    let work = {
        let (inner, buffers, stop) = (Arc::clone(inner), Arc::clone(&buffers), Arc::clone(&stop));
        move || {
            let targets = buffers.iter().map(|buffer| target_of(buffer, &buffers));
            let targets = targets.collect::<Result<Vec<_>, _>>().map_err(Error::from)?;
            let mut go_on = |_| !stop.load(Ordering::Relaxed);
            inner.read_while(&requests, targets, inner.load_options(), &mut go_on)
        }
    };
    // `buffers` outlives the work on this side, so that they go back attached.
    let outcome = wait::to_the_end(py, &stop, work, || Ok(()));
    drop(buffers);
    if !matches!(outcome, Ok(Ok(_))) {
        behind(&streams);
    }
    outcome?
        .map(|stats| stats.bytes_read + stats.bytes_cached)
        .map_err(|failure: Box<ReadFailure>| raise_manager(py, &failure.error))
}

/// Has what is copied to devices come after what the frameworks have put on their current streams.
fn receive_after(py: Python<'_>, buffers: &[HeldBuffer]) -> PyResult<Vec<(Arc<Device>, UserStream)>> {
    let devices: BTreeSet<u32> = buffers.iter().filter_map(HeldBuffer::device).collect();
    if devices.is_empty() {
        return Ok(Vec::new());
    }
    let streams = hooks(py)?.streams.bind(py).call1((&devices,))?.extract()?;
    let order = |(ordinal, stream)| {
        let device = driver()?.device(ordinal)?;
        device.receive_after(stream)?;
        Ok((device, stream))
    };
    let ordered =
        streams_of(py, &streams)?.into_iter().map(order).collect::<Result<_, stepwell_core::Error>>();
    ordered.map_err(|error| raise(py, &error))
}

fn component_row<'py>(py: Python<'py>, component: &Component) -> PyResult<Bound<'py, PyTuple>> {
    match component {
        Component::Key(name) => ("k", &**name).into_pyobject(py),
        Component::Int(key) => ("i", key).into_pyobject(py),
        Component::Index(index) => ("x", index).into_pyobject(py),
        Component::Field(name) => ("f", &**name).into_pyobject(py),
    }
}

fn kind_row<'py>(py: Python<'py>, kind: &ContainerKind) -> PyResult<Bound<'py, PyTuple>> {
    match kind {
        ContainerKind::Dict => ("dict",).into_pyobject(py),
        ContainerKind::OrderedDict => ("OrderedDict",).into_pyobject(py),
        ContainerKind::DefaultDict => ("defaultdict",).into_pyobject(py),
        ContainerKind::List => ("list",).into_pyobject(py),
        ContainerKind::Tuple => ("tuple",).into_pyobject(py),
        ContainerKind::Deque { maxlen } => ("deque", maxlen).into_pyobject(py),
        ContainerKind::NamedTuple { type_name } => ("namedtuple", &**type_name).into_pyobject(py),
        ContainerKind::Dataclass { type_name } => ("dataclass", &**type_name).into_pyobject(py),
        ContainerKind::Stateful { type_name, protocol, inner } => {
            ("stateful", &**type_name, &**protocol, kind_row(py, inner)?).into_pyobject(py)
        }
        ContainerKind::Custom { type_name } => ("custom", &**type_name).into_pyobject(py),
    }
}
