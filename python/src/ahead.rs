//! Work that overlaps with opening a checkpoint: prefetching reads, and exporting the arrays that a
//! restore fills. With small leaves, both take as long as opening does.

use std::collections::HashSet;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use stepwell_core::limits::MAX_DEPTH;
use stepwell_manager::{Error, Expected};

use crate::checkpoint::{Checkpoint, Engined};
use crate::errors::raise_manager;
use crate::hooks::hooks;
use crate::ingest::HeldBuffer;
use crate::wait;

/// The data that a restore will read: all, unknown, or all of some top-level entries.
#[derive(FromPyObject)]
pub enum Ahead {
    #[pyo3(transparent)]
    Known(bool),
    #[pyo3(transparent)]
    Entries(Vec<String>),
}

impl Ahead {
    /// As the engine has it.
    pub fn expected(ahead: Option<Self>) -> Expected {
        match ahead {
            None | Some(Self::Known(false)) => Expected::Nothing,
            Some(Self::Known(true)) => Expected::Everything,
            Some(Self::Entries(names)) => Expected::Entries(names),
        }
    }
}

/// Opens a checkpoint, and takes hold of the arrays of `to_fill` meanwhile.
pub fn open(
    py: Python<'_>,
    to_fill: Option<&Bound<'_, PyAny>>,
    opening: impl FnOnce() -> Result<Engined, Error> + Send + 'static,
) -> PyResult<Checkpoint> {
    let mut taken = Ok(Taken::default());
    let opened = wait::on_thread_while(py, opening, || {
        if let Some(target) = to_fill {
            taken = Taken::of(target);
        }
    })?;
    let opened = opened.map_err(|error| raise_manager(py, &error))?;
    Ok(Checkpoint::new(opened, taken?))
}

/// Writable buffers of the arrays of a target, in the order of a walk through its dicts, lists and
/// tuples.
#[derive(Default)]
pub struct Taken(std::vec::IntoIter<HeldBuffer>);

impl Taken {
    fn of(target: &Bound<'_, PyAny>) -> PyResult<Self> {
        let ndarray = &hooks(target.py())?.ndarray;
        let mut walk = Walk { ndarray, containers: HashSet::new(), buffers: Vec::new() };
        walk.visit(target, 0);
        Ok(Self(walk.buffers.into_iter()))
    }

    /// Returns the buffer of an array: one that was already exported, or a new one. Releases
    /// earlier exports that were skipped.
    pub fn buffer(&mut self, array: &Bound<'_, PyAny>) -> PyResult<HeldBuffer> {
        match self.0.find(|buffer| buffer.is_of(array)) {
            Some(buffer) => Ok(buffer),
            None => HeldBuffer::new(array, true),
        }
    }
}

struct Walk<'a> {
    ndarray: &'a Py<PyAny>,
    /// Addresses of those that were walked through: each once, however they contain each other.
    containers: HashSet<usize>,
    buffers: Vec<HeldBuffer>,
}

impl Walk<'_> {
    fn visit(&mut self, target: &Bound<'_, PyAny>, depth: u64) {
        if target.get_type().is(self.ndarray) {
            // One that gives no writable buffer is the restore's to judge.
            self.buffers.extend(HeldBuffer::new(target, true));
        } else if depth > MAX_DEPTH {
        } else if let Ok(dict) = target.cast_exact::<PyDict>() {
            if self.containers.insert(dict.as_ptr() as usize) {
                dict.iter().for_each(|(_, value)| self.visit(&value, depth + 1));
            }
        } else if let Ok(list) = target.cast_exact::<PyList>() {
            if self.containers.insert(list.as_ptr() as usize) {
                list.iter().for_each(|value| self.visit(&value, depth + 1));
            }
        } else if let Ok(tuple) = target.cast_exact::<PyTuple>()
            && self.containers.insert(tuple.as_ptr() as usize)
        {
            tuple.iter().for_each(|value| self.visit(&value, depth + 1));
        }
    }
}
