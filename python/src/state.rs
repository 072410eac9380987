//! A flattened state, held between the walk and the capture.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use stepwell_core::format::index::ChunkRegion;
use stepwell_core::region::Region;
use stepwell_reshard::glob::{Glob, PathText};
use stepwell_reshard::matching::{PerGlob, near_globs};
use stepwell_reshard::selection::Selection;
use stepwell_reshard::tiling;

use crate::array_group::ArrayGroup;
use crate::errors::invalid;
use crate::flatten::{Choice, Flat, Leaf, Unsupported};
use crate::hooks::dtype_named;

/// A leaf: its kind, dtype, and shape. For an alias, the shape is the leaf that it is tied to.
type StateLeafRow = (&'static str, Option<&'static str>, Option<Vec<u64>>);

/// A flattened state: structure, object values, and arrays by reference. Their buffers are held
/// until this is dropped.
#[pyclass(frozen, module = "stepwell._core")]
pub struct State {
    flat: Mutex<Option<Flat>>,
}

impl State {
    /// Takes the state out. `None` if it was taken before.
    pub fn take(&self) -> Option<Flat> {
        self.flat.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn with<T>(&self, read: impl FnOnce(&Flat) -> T) -> PyResult<T> {
        let flat = self.flat.lock().unwrap_or_else(PoisonError::into_inner);
        flat.as_ref().map(read).ok_or_else(|| PyRuntimeError::new_err("this state was handed over to a save"))
    }
}

#[pymethods]
impl State {
    fn __len__(&self) -> PyResult<usize> {
        self.with(|flat| flat.leaves.len())
    }

    /// Returns the rendered leaf paths, in order.
    fn paths(&self) -> PyResult<Vec<String>> {
        self.with(|flat| {
            (0..flat.leaves.len() as u32).map(|leaf| flat.tree.leaf_path(leaf).to_string()).collect()
        })
    }

    /// Returns all leaves: `("array", dtype, shape)`, `("object", None, None)` or `("alias", None,
    /// [leaf])`.
    fn leaves(&self) -> PyResult<Vec<StateLeafRow>> {
        self.with(|flat| {
            let row = |leaf: &Leaf| match leaf {
                Leaf::Array { dtype, buffer, .. } => ("array", Some(dtype.name()), Some(buffer.dims())),
                Leaf::Sharded { dtype, shape, .. } | Leaf::Stored { dtype, shape, .. } => {
                    ("array", Some(dtype.name()), Some(shape.clone()))
                }
                Leaf::Object(_) => ("object", None, None),
                Leaf::Alias(of) => ("alias", None, Some(vec![u64::from(*of)])),
            };
            flat.leaves.iter().map(row).collect()
        })
    }

    /// Returns the numbers of the CUDA devices that have arrays, each once.
    pub fn devices(&self) -> PyResult<BTreeSet<u32>> {
        self.with(|flat| {
            let mut found = BTreeSet::new();
            for leaf in &flat.leaves {
                match leaf {
                    Leaf::Array { buffer, .. } => found.extend(buffer.device()),
                    Leaf::Sharded { shards, .. } => {
                        found.extend(shards.iter().filter_map(|shard| shard.buffer.device()));
                    }
                    Leaf::Stored { .. } | Leaf::Object(_) | Leaf::Alias(_) => {}
                }
            }
            found
        })
    }

    /// Returns the bytes of all arrays. Tied ones count once.
    #[getter]
    fn nbytes(&self) -> PyResult<usize> {
        let bytes = |leaf: &Leaf| match leaf {
            Leaf::Array { buffer, .. } => buffer.nbytes(),
            Leaf::Sharded { shards, .. } => shards.iter().map(|shard| shard.buffer.nbytes()).sum(),
            Leaf::Stored { dtype, shape, .. } => shape.iter().product::<u64>() as usize * dtype.size(),
            Leaf::Object(_) | Leaf::Alias(_) => 0,
        };
        self.with(|flat| flat.leaves.iter().map(bytes).sum())
    }
}

/// The part of a state to save: `include`, `exclude`, and `cast` as pairs of glob and dtype. The
/// last one is for leaves that cannot be stored: `None`, the name "drop", or a function.
pub type ChoiceArguments = (Option<Vec<String>>, Vec<String>, Vec<(String, String)>, Option<Py<PyAny>>);

/// Flattens the chosen part of a state. `UnsupportedLeaf` names a leaf that cannot be stored. If
/// `is_whole`, the state is not one rank's part of several, and a glob without a match raises.
#[pyfunction]
#[pyo3(signature = (state, choice = ChoiceArguments::default(), is_whole = true))]
pub fn flatten(state: &Bound<'_, PyAny>, choice: ChoiceArguments, is_whole: bool) -> PyResult<State> {
    let py = state.py();
    let wrong = |error: stepwell_reshard::Error| invalid(py, &error.to_string());
    let (include, exclude, cast, unsupported) = choice;
    let cast = cast
        .into_iter()
        .map(|(glob, dtype)| Ok((glob, Some(dtype_named(&dtype)?))))
        .collect::<PyResult<Vec<_>>>()?;
    let selection = Selection::new(include.as_deref(), &exclude).map_err(wrong)?;
    let unsupported = unsupported.map(|given| {
        if given.bind(py).is_callable() { Unsupported::Convert(given) } else { Unsupported::Drop }
    });
    let choice = Choice::new(selection, PerGlob::new(cast, None).map_err(wrong)?, unsupported);
    let (flat, idle) = crate::flatten::flatten(state, choice)?;
    if let Some((option, glob)) = idle.first().filter(|_| is_whole) {
        let near: Vec<String> = near(state, glob).iter().map(|near| format!("`{near}`")).collect();
        let near =
            if near.is_empty() { String::new() } else { format!("; near it is {}", near.join(" or ")) };
        return Err(invalid(
            py,
            &format!("{option}: `{}` matches nothing of this state{near}", glob.as_str()),
        ));
    }
    Ok(State { flat: Mutex::new(Some(flat)) })
}

/// Returns likely intended globs in place of one that matches nothing of a state.
fn near(state: &Bound<'_, PyAny>, glob: &Glob) -> Vec<String> {
    let choice = Choice::new(Selection::default(), PerGlob::default(), Some(Unsupported::Drop));
    // Without suggestions, the error is still right.
    let Ok((flat, _)) = crate::flatten::flatten(state, choice) else { return Vec::new() };
    let leaves = 0..u32::try_from(flat.leaves.len()).unwrap_or(u32::MAX);
    let paths: Vec<PathText> = leaves.map(|leaf| PathText::new(&flat.tree.leaf_path(leaf))).collect();
    near_globs(glob, &paths)
}

/// Two arrays whose spans of memory overlap: their numbers, and the addresses of their first
/// elements.
type Close = (usize, usize, usize, usize);

/// Finds arrays that may share memory. The first `filled` arrays are to be filled, and those of
/// groups, which all have the number after the last array. Returns the numbers of those whose
/// strides do not exclude overlapping elements. Also returns all pairs with overlapping spans, of
/// which the first is to be filled.
#[pyfunction]
#[pyo3(signature = (arrays, filled, groups = Vec::new()))]
pub fn shared_memory(
    arrays: Vec<Bound<'_, PyAny>>,
    filled: usize,
    groups: Vec<Bound<'_, ArrayGroup>>,
) -> PyResult<(Vec<usize>, Vec<Close>)> {
    let known = crate::arrays::known();
    let mut spread = Vec::new();
    // Spans: the first byte, the end, the array's number, and the address of its first element.
    let mut spans = Vec::with_capacity(arrays.len());
    for (number, array) in arrays.iter().enumerate() {
        let buffer = known.hold(array, false)?;
        let (below, len) = buffer.span();
        let first = buffer.address() as usize;
        spans.push((first - below, first - below + len, number, first));
        if number < filled && !buffer.is_injective() {
            spread.push(number);
        }
    }
    let grouped = arrays.len();
    for group in &groups {
        group.get().spans(|low, end, is_injective| {
            spans.push((low, end, grouped, low));
            spread.extend((!is_injective).then_some(grouped));
        });
    }
    spans.sort_unstable();
    let is_filled = |number| number < filled || number == grouped;
    let mut pairs = Vec::new();
    let mut open: Vec<(usize, usize, usize)> = Vec::new();
    for (low, high, number, first) in spans {
        open.retain(|&(end, ..)| end > low);
        for &(_, other, other_first) in &open {
            if is_filled(other) {
                pairs.push((other, number, other_first, first));
            } else if is_filled(number) {
                pairs.push((number, other, first, other_first));
            }
        }
        open.push((high, number, first));
    }
    Ok((spread, pairs))
}

/// Returns why regions, `(offset, extent)`, do not cover an array of that shape exactly once.
#[pyfunction]
pub fn covers(shape: Vec<u64>, boxes: Vec<(Vec<u64>, Vec<u64>)>) -> Option<String> {
    let region = |(offset, extent): (Vec<u64>, Vec<u64>)| {
        ChunkRegion::Box(Region { offset: offset.into(), extent: extent.into() })
    };
    let boxes: Vec<ChunkRegion> = boxes.into_iter().map(region).collect();
    tiling::check(&shape, &boxes).err().map(|fault| fault.to_string())
}

/// True if a value is one object leaf: a scalar, or a sequence or set of only plain values.
#[pyfunction]
pub fn is_plain(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    let hooks = crate::hooks::hooks(value.py())?;
    Ok(matches!(crate::values::to_value(hooks, value, false, 0)?, crate::values::Plain::Value(_)))
}
