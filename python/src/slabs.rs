//! Memory for new arrays: the policy of `_restore/allocate.py` for a whole restore at a time, with
//! all sizes known in advance.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::hooks::hooks;
use crate::ingest::HeldBuffer;

/// From here on an array has memory of its own.
const LARGE: u64 = 4 << 20;
/// Slabs of arrays up to a quarter of this size.
const SMALL_SLAB: u64 = 2 << 20;
/// Slabs of those between.
const MEDIUM_SLAB: u64 = 8 << 20;
/// Alignment for vector units and for zero-copy imports by other frameworks.
const ALIGNMENT: u64 = 64;

/// The place of an array.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// Nowhere: it has no bytes.
    Empty,
    /// In a slab, from this byte on.
    Slab {
        /// Number of the slab.
        slab: u32,
        /// First byte.
        offset: u64,
    },
}

/// Slabs: planned first, then mapped all together.
#[derive(Default)]
pub struct Slabs {
    /// Bytes used of each.
    sizes: Vec<u64>,
    small: Option<u32>,
    medium: Option<u32>,
    /// `numpy.uint8` arrays over the mapped slabs.
    mapped: Vec<Py<PyAny>>,
}

impl Slabs {
    /// A place for an array.
    pub fn take(&mut self, bytes: u64) -> Place {
        if bytes == 0 {
            return Place::Empty;
        }
        if bytes >= LARGE {
            return Place::Slab { slab: self.add(bytes), offset: 0 };
        }
        let small = bytes <= SMALL_SLAB / 4;
        let (current, size) = if small { (self.small, SMALL_SLAB) } else { (self.medium, MEDIUM_SLAB) };
        if let Some(slab) = current
            && let Some(used) = self.sizes.get_mut(slab as usize)
        {
            let offset = used.next_multiple_of(ALIGNMENT);
            if offset + bytes <= size {
                *used = offset + bytes;
                return Place::Slab { slab, offset };
            }
        }
        let slab = self.add(bytes);
        *(if small { &mut self.small } else { &mut self.medium }) = Some(slab);
        Place::Slab { slab, offset: 0 }
    }

    fn add(&mut self, bytes: u64) -> u32 {
        self.sizes.push(bytes);
        (self.sizes.len() - 1) as u32
    }

    /// Maps what was planned.
    pub fn map(&mut self, py: Python<'_>) -> PyResult<()> {
        let mapper = hooks(py)?.mapper.bind(py).call0()?;
        for &size in self.sizes.get(self.mapped.len()..).unwrap_or_default() {
            self.mapped.push(mapper.call1((size,))?.unbind());
        }
        Ok(())
    }

    /// The memory of all slabs.
    pub fn buffers(&self, py: Python<'_>) -> PyResult<Vec<HeldBuffer>> {
        self.mapped.iter().map(|slab| HeldBuffer::new(slab.bind(py), true)).collect()
    }

    /// A slab as Python sees it.
    pub fn object<'py>(&self, py: Python<'py>, slab: u32) -> PyResult<Bound<'py, PyAny>> {
        let found = self.mapped.get(slab as usize).map(|slab| slab.bind(py).clone());
        found.ok_or_else(|| PyRuntimeError::new_err("memory that was planned is not mapped"))
    }
}
