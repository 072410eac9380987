//! Python bindings: no policy, no format, no framework logic.
use pyo3::prelude::*;

/// The engine behind the package `stepwell`.
#[pymodule]
mod _core {}
