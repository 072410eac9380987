//! Conversions into files of other formats, as Python sees them. The package's writers plan the
//! files.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use stepwell_core::dtype::Dtype;
use stepwell_core::format::index::LeafRecord;
use stepwell_core::io::{Engine, Purpose};
use stepwell_core::region::Region;
use stepwell_core::sys::lower_priority;
use stepwell_manager::convert::{
    self, Complete, Conversion as Engined, ConversionOptions, ConversionPlan, Leftover, LeftoverKind,
    NO_OWNER, OutputKind, PieceContent, PlannedFile, PlannedPiece, SavePauses, Sharing as Shared,
    StoredProvider, TensorPair, compare,
};
use stepwell_manager::state::{Holders, Part};
use stepwell_manager::{Environment, Error, LeafSource, Manager as EngineManager, Options, Reader};

use crate::board::Agreeing;
use crate::checkpoint::{Checkpoint, Opened, telling};
use crate::errors::{invalid, raise_manager};
use crate::hooks::dtype_named;
use crate::location::{self, Location};
use crate::manager::{Manager, call};
use crate::options;
use crate::wait;

/// A piece: offset, length, and its bytes, or a tensor (leaf, dtype), or the first and the last
/// piece of a checksum.
type PieceRow<'py> = (u64, u64, Option<Bound<'py, PyBytes>>, Option<(u32, String)>, Option<(u32, u32)>);

/// An output file: name, length, pieces.
type FileRow<'py> = (String, u64, Vec<PieceRow<'py>>);

fn piece_of((offset, length, bytes, tensor, sum): PieceRow<'_>) -> PyResult<PlannedPiece> {
    let content = match (bytes, tensor, sum) {
        (_, Some((leaf, dtype)), _) => PieceContent::Tensor { leaf, dtype: dtype_named(&dtype)? },
        (_, _, Some((first, last))) => PieceContent::Crc32 { first, last },
        (bytes, None, None) => {
            PieceContent::Bytes(bytes.map(|bytes| bytes.as_bytes().to_vec()).unwrap_or_default())
        }
    };
    Ok(PlannedPiece { offset, length, content })
}

/// The state of a conversion.
enum Phase {
    Begun(Box<Engined>),
    Complete(Complete),
}

/// A conversion to one path. It is written, perhaps compared with its source, and published.
#[pyclass(frozen, module = "stepwell._core")]
pub struct Conversion {
    phase: Mutex<Option<Phase>>,
}

impl Conversion {
    fn take(&self, py: Python<'_>) -> PyResult<Phase> {
        let phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner).take();
        phase.ok_or_else(|| invalid(py, "this conversion has ended; begin it again"))
    }

    fn put(&self, phase: Phase) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = Some(phase);
    }

    fn complete(&self, py: Python<'_>) -> PyResult<Complete> {
        match self.take(py)? {
            Phase::Complete(complete) => Ok(complete),
            begun @ Phase::Begun(_) => {
                self.put(begun);
                Err(invalid(py, "this conversion is not written yet"))
            }
        }
    }
}

#[pymethods]
impl Conversion {
    /// Begins or resumes the conversion of a checkpoint to a free path, with the ranks of
    /// `sharing`. `digests` name the plan and its source, and the owner.
    #[new]
    #[expect(clippy::too_many_arguments, reason = "a plan and its limits, part by part")]
    fn new(
        py: Python<'_>,
        source: &Checkpoint,
        path: Location,
        is_directory: bool,
        files: Vec<FileRow<'_>>,
        digests: ([u8; 32], Option<[u8; 32]>),
        limits: (u64, u64, u64),
        sharing: &Sharing,
    ) -> PyResult<Self> {
        let source = source.described(py)?;
        let file = |(name, length, pieces): FileRow<'_>| {
            let pieces = pieces.into_iter().map(piece_of).collect::<PyResult<_>>()?;
            PyResult::Ok(PlannedFile { name, length, pieces })
        };
        let files = files.into_iter().map(file).collect::<PyResult<_>>()?;
        let plan = ConversionPlan { files, digest: digests.0, owner: digests.1.unwrap_or(NO_OWNER) };
        let (budget_bytes, window_bytes, journal_bytes) = limits;
        // The reader has its own buffers beside the windows.
        let own = source.load_options().budget_bytes + source.computing_bytes();
        let budget_bytes = budget_bytes.saturating_sub(own);
        let sharing = sharing.get(py)?;
        let stall_timeout = Options::default().stall_timeout;
        let limits = ConversionOptions { budget_bytes, window_bytes, journal_bytes, stall_timeout };
        let begun = wait::on_thread(py, move || {
            let environment = path.environment(Engine::Auto, Purpose::Write)?;
            Engined::begin(&source, plan, &path.path, kind_of(is_directory), &sharing, &environment, limits)
        })?
        .map_err(|error| raise_manager(py, &error))?;
        Ok(Self { phase: Mutex::new(Some(Phase::Begun(Box::new(begun)))) })
    }

    /// The bytes that an earlier process has written.
    fn resumed_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        let phase = self.take(py)?;
        let resumed = match &phase {
            Phase::Begun(begun) => begun.resumed_bytes(),
            Phase::Complete(_) => 0,
        };
        self.put(phase);
        Ok(resumed)
    }

    /// The temporary path of the output. In a store it is the final one.
    fn partial(&self, py: Python<'_>) -> PyResult<String> {
        let phase = self.take(py)?;
        let path = match &phase {
            Phase::Begun(begun) => begun.partial(),
            Phase::Complete(complete) => complete.partial(),
        };
        self.put(phase);
        Ok(path.display().to_string())
    }

    /// Writes all files below the temporary name; `progress` as in `Checkpoint.verify`. `beside`:
    /// at low priority, beside the saves of a manager.
    #[pyo3(signature = (source, progress = None, beside = None))]
    fn write(
        &self,
        py: Python<'_>,
        source: &Checkpoint,
        progress: Option<Bound<'_, PyAny>>,
        beside: Option<&Manager>,
    ) -> PyResult<()> {
        let (source, mut beside) = (source.described(py)?, beside.map(Beside::new));
        let Phase::Begun(begun) = self.take(py)? else {
            return Err(invalid(py, "this conversion is written already"));
        };
        let complete = telling(py, progress.as_ref(), move |seen| {
            let sharing = Arc::clone(begun.sharing());
            begun.write(&source, &mut yielding(beside.as_mut(), &sharing, seen))
        })?;
        self.put(Phase::Complete(complete));
        Ok(())
    }

    /// Gives the complete output its name.
    fn publish(&self, py: Python<'_>) -> PyResult<()> {
        let complete = self.complete(py)?;
        call(py, move || complete.publish())
    }

    /// Releases the output, whose lock others may wait for. Does nothing after the end.
    fn close(&self, py: Python<'_>) {
        let phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(phase));
    }

    /// Removes the complete output.
    fn discard(&self, py: Python<'_>) -> PyResult<()> {
        let complete = self.complete(py)?;
        py.detach(move || complete.discard()).map_err(|error| raise_manager(py, &error))
    }
}

/// Compares tensors of two checkpoints, `(leaf of the first, leaf of the second, dtype of the
/// second)`, and returns the numbers of the rows that differ.
#[pyfunction]
#[pyo3(signature = (source, made, pairs, progress = None))]
pub fn compare_tensors(
    py: Python<'_>,
    source: &Checkpoint,
    made: &Checkpoint,
    pairs: Vec<(u32, u32, String)>,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<Vec<usize>> {
    let (source, made, pairs) = (source.described(py)?, made.described(py)?, pairs_of(pairs)?);
    telling(py, progress.as_ref(), move |seen| {
        let (source, made): (&Reader, &Reader) = (&source, &made);
        compare(source, made, &pairs, seen)
    })
}

fn pairs_of(pairs: Vec<(u32, u32, String)>) -> PyResult<Vec<TensorPair>> {
    let pair = |(source, made, dtype): (u32, u32, String)| {
        PyResult::Ok(TensorPair { source, made, dtype: dtype_named(&dtype)? })
    };
    pairs.into_iter().map(pair).collect()
}

/// Work beside the saves of a manager, which go first.
struct Beside {
    manager: Arc<EngineManager>,
    pauses: SavePauses,
}

impl Beside {
    fn new(manager: &Manager) -> Self {
        Self { manager: manager.engine(), pauses: SavePauses::default() }
    }

    /// Waits while a save is pending, but not for too long. `go_on` ends the wait by `false`.
    fn yield_to_saves(&mut self, sharing: &Shared, mut go_on: impl FnMut() -> bool) {
        self.pauses.wait(|| {
            // The other ranks must not take the pause for a stall.
            sharing.advance();
            self.manager.is_saving() && go_on()
        });
    }
}

/// Returns `go_on` for work that yields to saves, if it is beside them. Lowers the priority of the
/// thread that does the work.
fn yielding<'a>(
    mut beside: Option<&'a mut Beside>,
    sharing: &'a Shared,
    go_on: &'a mut dyn FnMut(u64, u64) -> bool,
) -> impl FnMut(u64, u64) -> bool + 'a {
    if beside.is_some() {
        lower_priority();
    }
    move |done, total| {
        if let Some(beside) = &mut beside {
            beside.yield_to_saves(sharing, || go_on(done, total));
        }
        go_on(done, total)
    }
}

/// The session of ranks that share conversions.
#[pyclass(frozen, module = "stepwell._core")]
pub struct Sharing {
    shared: Mutex<Option<Arc<Shared>>>,
}

impl Sharing {
    pub fn new_from(shared: Shared) -> Self {
        Self { shared: Mutex::new(Some(Arc::new(shared))) }
    }

    fn get(&self, py: Python<'_>) -> PyResult<Arc<Shared>> {
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner).clone();
        shared.ok_or_else(|| invalid(py, "the ranks have left this session; meet again"))
    }
}

#[pymethods]
impl Sharing {
    /// Meets the ranks that share conversions to a path; without `ranks`, this process shares
    /// nothing. A wait for a rank ends after `stall_seconds` without its progress.
    #[new]
    fn new(
        py: Python<'_>,
        path: Location,
        ranks: Option<Agreeing<'_>>,
        stall_seconds: u64,
    ) -> PyResult<Self> {
        let ranks = ranks.map(Agreeing::ranks);
        let shared = call(py, move || {
            let options = Options { stall_timeout: Duration::from_secs(stall_seconds), ..Options::default() };
            let environment = options::environment_of(&path, Engine::Auto, &options, ranks)?;
            Shared::meet(&path.path, &environment, options.stall_timeout)
        })?;
        Ok(Self::new_from(shared))
    }

    /// This process's rank, and the number of ranks.
    fn ranks(&self, py: Python<'_>) -> PyResult<(u32, u32)> {
        Ok(self.get(py)?.ranks())
    }

    /// Returns the leader's text on all ranks. All make this call.
    fn ask(&self, py: Python<'_>, what: String, text: String) -> PyResult<String> {
        let shared = self.get(py)?;
        call(py, move || shared.ask(&what, || Ok(text)))
    }

    /// Refuses, on all ranks, a rank with another digest of its source and plan, or another
    /// `verify=`.
    fn check_equal(&self, py: Python<'_>, digest: String, verify: bool) -> PyResult<()> {
        let shared = self.get(py)?;
        call(py, move || shared.check_equal(&digest, verify))
    }

    /// `compare_tensors` by all ranks, which make this call and get the same answer.
    #[pyo3(signature = (source, made, pairs, beside = None))]
    fn compare(
        &self,
        py: Python<'_>,
        source: &Checkpoint,
        made: &Checkpoint,
        pairs: Vec<(u32, u32, String)>,
        beside: Option<&Manager>,
    ) -> PyResult<Vec<usize>> {
        let (source, made, pairs) = (source.described(py)?, made.described(py)?, pairs_of(pairs)?);
        let (shared, mut beside) = (self.get(py)?, beside.map(Beside::new));
        telling(py, None, move |seen| {
            let mut go_on = yielding(beside.as_mut(), &shared, seen);
            shared.compare(&source, &made, &pairs, &mut go_on)
        })
    }

    /// Ends the session on all ranks, because this one has failed.
    fn fail(&self, py: Python<'_>, cause: &str) -> PyResult<()> {
        let shared = self.get(py)?;
        py.detach(|| shared.fail(cause));
        Ok(())
    }

    /// Leaves the other ranks.
    fn leave(&self, py: Python<'_>) {
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(shared) = shared {
            py.detach(|| shared.leave());
        }
    }
}

fn kind_of(is_directory: bool) -> OutputKind {
    if is_directory { OutputKind::Directory } else { OutputKind::File }
}

fn environment_of(path: &Path) -> Result<Environment, Error> {
    location::of_path(path, Engine::Auto, Purpose::Write)
}

/// Removes what an interrupted conversion of an owner to a path has left.
#[pyfunction]
pub fn discard_conversion(
    py: Python<'_>,
    path: PathBuf,
    is_directory: bool,
    owner: [u8; 32],
) -> PyResult<()> {
    call(py, move || convert::discard(&path, kind_of(is_directory), owner, &environment_of(&path)?))
}

/// The remains of an output: its name, the kind, and the owner of an incomplete output.
type LeftoverRow = (String, &'static str, Option<[u8; 32]>);

/// Lists what ended processes have left of outputs in a folder.
#[pyfunction]
pub fn leftover_conversions(
    py: Python<'_>,
    folder: PathBuf,
    is_directory: bool,
) -> PyResult<Vec<LeftoverRow>> {
    let found =
        call(py, move || convert::leftovers(&folder, kind_of(is_directory), &environment_of(&folder)?))?;
    let row = |found: Leftover| match found.kind {
        LeftoverKind::Partial(owner) => (found.name, "partial", Some(owner)),
        LeftoverKind::Journal => (found.name, "journal", None),
        LeftoverKind::Removal => (found.name, "removal", None),
    };
    Ok(found.into_iter().map(row).collect())
}

/// Returns the path that an output has while it is removed.
#[pyfunction]
pub fn removal_of(path: &str) -> String {
    convert::removal_of(path)
}

/// Removes the file of an earlier conversion, durably.
#[pyfunction]
pub fn remove_output_file(py: Python<'_>, path: PathBuf) -> PyResult<()> {
    call(py, move || convert::remove_file(&path, &environment_of(&path)?))
}

/// Writes a small file beside an output, or replaces it. It is durable and whole.
#[pyfunction]
pub fn write_record(py: Python<'_>, path: Location, text: String) -> PyResult<()> {
    call(py, move || {
        let environment = path.environment(Engine::Auto, Purpose::Write)?;
        convert::write_record(&path.path, text.as_bytes(), &environment)
    })
}

/// Returns the names below a URL, of one level.
#[pyfunction]
pub fn stored_level(py: Python<'_>, url: Location) -> PyResult<Vec<String>> {
    call(py, move || convert::stored_level(&url.path, &url.environment(Engine::Auto, Purpose::Write)?))
}

/// Returns a small object. `None` if it does not exist.
#[pyfunction]
pub fn read_object(py: Python<'_>, url: Location) -> PyResult<Option<Cow<'static, [u8]>>> {
    let read =
        call(py, move || convert::read_object(&url.path, &url.environment(Engine::Auto, Purpose::Write)?))?;
    Ok(read.map(Cow::Owned))
}

/// Deletes an export in a store, its record last.
#[pyfunction]
pub fn remove_objects(py: Python<'_>, url: Location, is_directory: bool) -> PyResult<()> {
    call(py, move || {
        let environment = url.environment(Engine::Auto, Purpose::Write)?;
        convert::remove_objects(&url.path, kind_of(is_directory), &environment)
    })
}

/// Removes the directory of an earlier conversion; `only_rest`: only what an interrupted removal
/// has left.
#[pyfunction]
pub fn remove_conversion(py: Python<'_>, path: PathBuf, only_rest: bool) -> PyResult<()> {
    call(py, move || {
        let environment = environment_of(&path)?;
        if only_rest {
            convert::end_removal(&path, &environment)
        } else {
            convert::remove(&path, &environment)
        }
    })
}

/// A stored tensor in the place of an array in a state. A save reads it when it captures it. All
/// ranks that share the save can read it, and each writes a part.
#[pyclass(frozen, module = "stepwell._core")]
pub struct StoredTensor {
    source: Arc<Opened>,
    leaf: u32,
    reads: Arc<convert::StoredReads>,
    /// The rank, and the number of ranks.
    ranks: (u32, u32),
}

impl StoredTensor {
    /// The leaf that holds its bytes, dtype and shape.
    pub fn describe(&self, py: Python<'_>) -> PyResult<(u32, Dtype, Vec<u64>)> {
        match self.source.outline().resolve(self.leaf) {
            Some((holder, LeafRecord::Tensor(tensor))) => Ok((holder, tensor.dtype, tensor.shape.to_vec())),
            _ => Err(invalid(py, &format!("leaf {} is no tensor", self.leaf))),
        }
    }

    /// The checkpoint, for comparisons.
    pub fn source_address(&self) -> usize {
        Arc::as_ptr(&self.source) as usize
    }

    /// The leaf of a save with its dtype and shape.
    pub fn leaf_source(&self, dtype: Dtype, shape: Vec<u64>) -> LeafSource {
        let (index, count) = self.ranks;
        let holders = Holders::Replicas { index, count };
        let parts = vec![Part { region: Region::whole(&shape), holders }];
        let provider = StoredProvider::new(Arc::clone(&self.source), self.leaf, Arc::clone(&self.reads));
        LeafSource::Tensor { dtype, shape, parts, provider: Arc::new(provider) }
    }
}

/// The state that the stored tensors of one save share.
#[pyclass(frozen, module = "stepwell._core")]
#[derive(Default)]
pub struct StoredReads(Arc<convert::StoredReads>);

#[pymethods]
impl StoredReads {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Has all reads fail.
    fn stop(&self) {
        self.0.stop();
    }
}

#[pymethods]
impl StoredTensor {
    #[new]
    fn new(
        py: Python<'_>,
        source: &Checkpoint,
        leaf: u32,
        reads: &StoredReads,
        ranks: (u32, u32),
    ) -> PyResult<Self> {
        let this = Self { source: source.described(py)?, leaf, reads: Arc::clone(&reads.0), ranks };
        this.describe(py)?;
        Ok(this)
    }
}
