//! The value in a MessagePack file, as Python objects.

use std::path::PathBuf;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use stepwell_core::Error;
use stepwell_core::foreign::msgpack::MsgpackNode;

use crate::errors::raise;
use crate::foreign::read;

/// Returns the value in a MessagePack file. Arrays are lists, and maps are dicts, with keys that
/// are text or integers. Bytes are their place, `(offset, length)`. A value of an application's
/// type is `(type, offset, length, content)`; the content is parsed if the type is one of `nested`.
#[pyfunction]
pub fn msgpack(py: Python<'_>, path: PathBuf, nested: Vec<i8>) -> PyResult<Bound<'_, PyAny>> {
    let file = path.clone();
    let nodes = read(py, path, move |path, files| stepwell_manager::msgpack(path, &nested, files))?;
    // The parts of a container follow it: from the end, they are there when it is reached.
    let mut values: Vec<Bound<'_, PyAny>> = Vec::new();
    for node in nodes.into_iter().rev() {
        let value = match node {
            MsgpackNode::Nil => py.None().into_bound(py),
            MsgpackNode::Bool(value) => value.into_pyobject(py)?.to_owned().into_any(),
            MsgpackNode::Int(value) => value.into_pyobject(py)?.into_any(),
            MsgpackNode::Unsigned(value) => value.into_pyobject(py)?.into_any(),
            MsgpackNode::Float(value) => value.into_pyobject(py)?.into_any(),
            MsgpackNode::Str(text) => text.into_pyobject(py)?.into_any(),
            MsgpackNode::Bin(place) => (place.offset, place.length).into_pyobject(py)?.into_any(),
            MsgpackNode::Array(count) => {
                let parts = parts(&mut values, count as usize)?;
                PyList::new(py, parts.into_iter().rev())?.into_any()
            }
            MsgpackNode::Map(count) => {
                let parts = parts(&mut values, 2 * count as usize)?;
                let map = PyDict::new(py);
                for pair in parts.rchunks_exact(2) {
                    let [value, key] = pair else { continue };
                    if !key.is_instance_of::<pyo3::types::PyString>()
                        && !key.is_instance_of::<pyo3::types::PyInt>()
                    {
                        return Err(raise(
                            py,
                            &Error::corrupt(&file, "a key of a map is neither text nor an integer"),
                        ));
                    }
                    if key.is_instance_of::<pyo3::types::PyInt>() && key.extract::<i64>().is_err() {
                        return Err(raise(
                            py,
                            &Error::corrupt(&file, format!("the key {key} of a map has 64 bits")),
                        ));
                    }
                    if map.contains(key)? {
                        return Err(raise(
                            py,
                            &Error::corrupt(&file, format!("the key {key} occurs twice in a map")),
                        ));
                    }
                    map.set_item(key, value)?;
                }
                map.into_any()
            }
            MsgpackNode::Ext { code, place, nested } => {
                let content = parts(&mut values, usize::from(nested))?.pop();
                (code, place.offset, place.length, content).into_pyobject(py)?.into_any()
            }
        };
        values.push(value);
    }
    values.pop().ok_or_else(|| PyValueError::new_err("a value without nodes"))
}

/// Takes the parts of a container, the last one first.
fn parts<'py>(values: &mut Vec<Bound<'py, PyAny>>, count: usize) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let from = values.len().checked_sub(count);
    let from = from.ok_or_else(|| PyValueError::new_err("a container without its parts"))?;
    Ok(values.split_off(from))
}
