//! Conversions into files of other formats, as Python sees them. The package's writers plan the
//! files.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use stepwell_core::dtype::Dtype;
use stepwell_core::format::index::LeafRecord;
use stepwell_core::io::{Engine, Purpose};
use stepwell_core::provider::StateProvider;
use stepwell_manager::Reader;
use stepwell_manager::convert::{
    Complete, Conversion as Engined, ConversionOptions, ConversionPlan, OutputKind, PieceContent,
    PlannedFile, PlannedPiece, StoredProvider, TensorPair, compare,
};

use crate::checkpoint::{Checkpoint, Opened, telling};
use crate::errors::{invalid, raise_manager};
use crate::hooks::dtype_named;
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
    /// Begins or resumes the conversion of a checkpoint to a free path. `digest` names the plan and
    /// its source.
    #[new]
    #[expect(clippy::too_many_arguments, reason = "a plan and its limits, part by part")]
    fn new(
        py: Python<'_>,
        source: &Checkpoint,
        path: PathBuf,
        is_directory: bool,
        files: Vec<FileRow<'_>>,
        digest: [u8; 32],
        budget_bytes: u64,
        window_bytes: u64,
        journal_bytes: u64,
    ) -> PyResult<Self> {
        let source = source.get(py)?;
        let file = |(name, length, pieces): FileRow<'_>| {
            let pieces = pieces.into_iter().map(piece_of).collect::<PyResult<_>>()?;
            PyResult::Ok(PlannedFile { name, length, pieces })
        };
        let files = files.into_iter().map(file).collect::<PyResult<_>>()?;
        let plan = ConversionPlan { files, digest };
        let kind = if is_directory { OutputKind::Directory } else { OutputKind::File };
        // The reader has its own buffers beside the windows.
        let own = source.load_options().budget_bytes;
        let budget_bytes = budget_bytes.saturating_sub(own);
        let limits = ConversionOptions { budget_bytes, window_bytes, journal_bytes };
        let begun = wait::on_thread(py, move || {
            let environment = options::environment(&path, Engine::Auto, Purpose::Write)?;
            Engined::begin(&source, plan, &path, kind, &environment, limits)
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

    /// The temporary path of the output.
    fn partial(&self, py: Python<'_>) -> PyResult<String> {
        let phase = self.take(py)?;
        let path = match &phase {
            Phase::Begun(begun) => begun.partial(),
            Phase::Complete(complete) => complete.partial(),
        };
        self.put(phase);
        Ok(path.display().to_string())
    }

    /// Writes all files below the temporary name; `progress` as in `Checkpoint.verify`.
    #[pyo3(signature = (source, progress = None))]
    fn write(&self, py: Python<'_>, source: &Checkpoint, progress: Option<Bound<'_, PyAny>>) -> PyResult<()> {
        let source = source.get(py)?;
        let Phase::Begun(begun) = self.take(py)? else {
            return Err(invalid(py, "this conversion is written already"));
        };
        let complete = telling(py, progress.as_ref(), move |seen| begun.write(&source, seen))?;
        self.put(Phase::Complete(complete));
        Ok(())
    }

    /// Gives the complete output its name.
    fn publish(&self, py: Python<'_>) -> PyResult<()> {
        let complete = self.complete(py)?;
        py.detach(move || complete.publish()).map_err(|error| raise_manager(py, &error))
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
    let (source, made) = (source.get(py)?, made.get(py)?);
    let pair = |(source, made, dtype): (u32, u32, String)| {
        PyResult::Ok(TensorPair { source, made, dtype: dtype_named(&dtype)? })
    };
    let pairs: Vec<TensorPair> = pairs.into_iter().map(pair).collect::<PyResult<_>>()?;
    telling(py, progress.as_ref(), move |seen| {
        let (source, made): (&Reader, &Reader) = (&source, &made);
        compare(source, made, &pairs, seen)
    })
}

/// A stored tensor in the place of an array in a state. A save reads it when it captures it.
#[pyclass(frozen, module = "stepwell._core")]
pub struct StoredTensor {
    source: Arc<Opened>,
    leaf: u32,
    stop: Arc<AtomicBool>,
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

    /// The source of its bytes.
    pub fn provider(&self) -> Arc<dyn StateProvider> {
        Arc::new(StoredProvider::new(Arc::clone(&self.source), self.leaf, Arc::clone(&self.stop)))
    }
}

/// Stops the reads of stored tensors.
#[pyclass(frozen, module = "stepwell._core")]
#[derive(Default)]
pub struct Stop(Arc<AtomicBool>);

#[pymethods]
impl Stop {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Has all reads fail.
    fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[pymethods]
impl StoredTensor {
    #[new]
    fn new(py: Python<'_>, source: &Checkpoint, leaf: u32, stop: &Stop) -> PyResult<Self> {
        let this = Self { source: source.get(py)?, leaf, stop: Arc::clone(&stop.0) };
        this.describe(py)?;
        Ok(this)
    }
}
