//! Functions and types of the Python package that this crate uses. They are looked up once.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use stepwell_core::dtype::Dtype;

/// The functions and types.
pub struct Hooks {
    /// `numpy.ndarray`
    pub ndarray: Py<PyAny>,
    /// `stepwell._state.leaves.describe`
    pub describe: Py<PyAny>,
    /// `stepwell._adapters.load`
    pub load_adapters: Py<PyAny>,
    /// `stepwell._adapters.streams`
    pub streams: Py<PyAny>,
    /// `stepwell.errors.StepwellError`
    pub error: Py<PyAny>,
    /// `stepwell.errors.UnsupportedLeaf`
    pub unsupported: Py<PyAny>,
    /// `stepwell._state.leaves.storable_name`
    pub storable_name: Py<PyAny>,
    /// `stepwell.errors.from_engine`
    pub from_engine: Py<PyAny>,
}

static HOOKS: PyOnceLock<Hooks> = PyOnceLock::new();

/// Returns the hooks of this interpreter.
pub fn hooks(py: Python<'_>) -> PyResult<&Hooks> {
    HOOKS.get_or_try_init(py, || {
        let adapters = py.import("stepwell._adapters")?;
        let leaves = py.import("stepwell._state.leaves")?;
        let errors = py.import("stepwell.errors")?;
        Ok(Hooks {
            load_adapters: adapters.getattr("load")?.unbind(),
            streams: adapters.getattr("streams")?.unbind(),
            error: errors.getattr("StepwellError")?.unbind(),
            unsupported: errors.getattr("UnsupportedLeaf")?.unbind(),
            ndarray: py.import("numpy")?.getattr("ndarray")?.unbind(),
            describe: leaves.getattr("describe")?.unbind(),
            storable_name: leaves.getattr("storable_name")?.unbind(),
            from_engine: errors.getattr("from_engine")?.unbind(),
        })
    })
}

/// Returns the exception for a leaf that cannot be stored.
pub fn unsupported(py: Python<'_>, leaf: &str, what: &str) -> PyErr {
    crate::errors::raise(py, &stepwell_core::Error::Leaf { leaf: leaf.to_owned(), what: what.to_owned() })
}

/// Returns the dtype with a name. An error means that the package and the engine have other dtypes.
pub fn dtype_named(name: &str) -> PyResult<Dtype> {
    Dtype::from_name(name)
        .ok_or_else(|| pyo3::exceptions::PyValueError::new_err(format!("the engine knows no dtype `{name}`")))
}
