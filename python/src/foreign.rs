//! The parsers of other libraries' bytes, for the package's format modules.

use std::path::PathBuf;

use pyo3::prelude::*;

use stepwell_core::Error;
use stepwell_core::foreign::{Fault, safetensors};

use crate::errors::raise;

/// `(name, dtype, shape, offset in the file, bytes)`.
type TensorRow = (String, String, Vec<u64>, u64, u64);

/// Metadata by name, and the tensors.
type HeaderRows = (Vec<(String, String)>, Vec<TensorRow>);

/// Parses the header of a safetensors file: `start` are its first eight bytes or more. Returns the
/// length of the header, which follows these eight bytes.
#[pyfunction]
pub fn safetensors_header_length(
    py: Python<'_>,
    path: PathBuf,
    start: &[u8],
    file_length: u64,
) -> PyResult<u64> {
    let too_short = || Fault { at: 0, what: "a safetensors file has eight bytes or more".to_owned() };
    let length = start
        .first_chunk()
        .ok_or_else(too_short)
        .and_then(|&start| safetensors::header_length(start, file_length));
    length.map_err(|fault| corrupt(py, path, &fault))
}

/// Parses the header of a safetensors file of that length: the entries of its metadata, and its
/// tensors in the order of their bytes.
#[pyfunction]
pub fn safetensors_header(
    py: Python<'_>,
    path: PathBuf,
    header: &[u8],
    file_length: u64,
) -> PyResult<HeaderRows> {
    let header = safetensors::parse(header, file_length).map_err(|fault| corrupt(py, path, &fault))?;
    let row = |one: safetensors::Tensor| (one.name, one.dtype, one.shape, one.offset, one.length);
    Ok((header.metadata, header.tensors.into_iter().map(row).collect()))
}

fn corrupt(py: Python<'_>, path: PathBuf, fault: &Fault) -> PyErr {
    raise(py, &Error::corrupt(path, fault.to_string()))
}
