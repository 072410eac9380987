//! The stored dtypes of a state's arrays, looked up once per dtype object.

use std::collections::HashMap;

use pyo3::intern;
use pyo3::prelude::*;

use stepwell_core::dtype::Dtype;

use crate::hooks::{Hooks, dtype_named};

/// The dtype objects that the walk has met, by address. They are kept alive, so that no address is
/// reused.
#[derive(Default)]
pub struct Dtypes<'py>(HashMap<usize, (Bound<'py, PyAny>, Option<Dtype>)>);

impl<'py> Dtypes<'py> {
    /// The storable dtype of an array, or `None`.
    pub fn of(&mut self, hooks: &Hooks, array: &Bound<'py, PyAny>) -> PyResult<Option<Dtype>> {
        self.named(hooks, array.getattr(intern!(array.py(), "dtype"))?)
    }

    /// The stored dtype of a dtype object, or `None`.
    fn named(&mut self, hooks: &Hooks, dtype: Bound<'py, PyAny>) -> PyResult<Option<Dtype>> {
        if let Some((_, known)) = self.0.get(&(dtype.as_ptr() as usize)) {
            return Ok(*known);
        }
        let name: Option<String> = hooks.storable_name.bind(dtype.py()).call1((&dtype,))?.extract()?;
        let known = name.map(|name| dtype_named(&name)).transpose()?;
        self.0.insert(dtype.as_ptr() as usize, (dtype, known));
        Ok(known)
    }
}
