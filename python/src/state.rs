//! A flattened state, held between the walk and the capture.

use pyo3::prelude::*;

use crate::flatten::{Flat, Leaf};

/// A flattened state: structure, object values, and arrays by reference (their buffers are held until this is dropped).
#[pyclass(frozen, module = "stepwell._core")]
pub struct State {
    pub flat: Flat,
}

#[pymethods]
impl State {
    fn __len__(&self) -> usize {
        self.flat.leaves.len()
    }

    /// Rendered leaf paths, in order.
    fn paths(&self) -> Vec<String> {
        (0..self.flat.leaves.len() as u32).map(|leaf| self.flat.tree.leaf_path(leaf).to_string()).collect()
    }

    /// What each leaf is: `("array", dtype, shape)`, `("object", None, None)` or `("alias", None, [of])`.
    fn leaves(&self) -> Vec<(&'static str, Option<&'static str>, Option<Vec<u64>>)> {
        self.flat
            .leaves
            .iter()
            .map(|leaf| match leaf {
                Leaf::Array(dtype, buffer) => {
                    ("array", Some(dtype.name()), Some(buffer.shape().iter().map(|&n| n as u64).collect()))
                }
                Leaf::Object(_) => ("object", None, None),
                Leaf::Alias(of) => ("alias", None, Some(vec![u64::from(*of)])),
            })
            .collect()
    }

    /// Bytes of all arrays, ties counted once.
    #[getter]
    fn nbytes(&self) -> usize {
        self.flat.leaves.iter().map(|leaf| if let Leaf::Array(_, buffer) = leaf { buffer.nbytes() } else { 0 }).sum()
    }

    /// The value of an object leaf, revived.
    fn object<'py>(&self, leaf: usize, reviver: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self.flat.leaves.get(leaf) {
            Some(Leaf::Object(value)) => crate::values::to_python(reviver.py(), value, reviver).map(Some),
            _ => Ok(None),
        }
    }
}

/// Flattens a state; `UnsupportedLeaf` names what cannot be stored.
#[pyfunction]
pub fn flatten(state: &Bound<'_, PyAny>) -> PyResult<State> {
    Ok(State { flat: crate::flatten::flatten(state)? })
}

/// Whether a value is one object leaf: a scalar, or a sequence or set of plain values only.
#[pyfunction]
pub fn is_plain(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    let hooks = crate::hooks::hooks(value.py())?;
    Ok(matches!(crate::values::to_value(hooks, value, false, 0)?, crate::values::Plain::Value(_)))
}
