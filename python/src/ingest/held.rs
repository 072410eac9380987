//! Memory of Python objects that is held: it stays where it is, and allocated, until the value is
//! dropped.

use std::ffi::c_int;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use stepwell_core::dtype::Dtype;
use stepwell_core::region::Dims;

use super::dlpack;

/// Strided memory that somebody exported. Dropping it gives it back, under the GIL.
pub struct HeldBuffer {
    export: Export,
    device: Option<u32>,
    address: *mut u8,
    itemsize: usize,
    nbytes: usize,
    shape: Dims<isize>,
    /// In bytes.
    strides: Dims<isize>,
}

/// The owner of the memory.
enum Export {
    // Boxed: an exporter may keep pointers into its own view.
    Buffer(Box<ffi::Py_buffer>),
    Capsule(Option<Py<PyAny>>),
}

// SAFETY: the fields are plain data, and what keeps the memory is only touched under the GIL
// (`new`, `of_capsule`, `drop`).
unsafe impl Send for HeldBuffer {}
// SAFETY: as above; `&HeldBuffer` reads plain fields that nobody changes.
unsafe impl Sync for HeldBuffer {}

impl HeldBuffer {
    /// Takes a strided buffer of `object`, for reading or for writing (a read-only array then
    /// raises `BufferError`).
    pub fn new(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        let mut view = Box::new(ffi::Py_buffer::new());
        let flags: c_int = ffi::PyBUF_STRIDES | if writable { ffi::PyBUF_WRITABLE } else { 0 };
        // SAFETY: `object` is alive and the GIL is held (a Bound proves both); `view` is a valid
        // place that outlives the export.
        let answer = unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, flags) };
        if answer != 0 {
            return Err(PyErr::take(object.py()).unwrap_or_else(|| PyBufferError::new_err("no buffer")));
        }
        let dims = |first: *const isize| -> Dims<isize> {
            let count = usize::try_from(view.ndim).unwrap_or(0);
            if count == 0 || first.is_null() {
                return Dims::new(); // numpy exports a 0-d array with null shape and strides
            }
            // SAFETY: PyBUF_STRIDES was asked for, so shape and strides hold `ndim` numbers each
            // and live as long as the export.
            Dims::from_slice(unsafe { std::slice::from_raw_parts(first, count) })
        };
        Ok(Self {
            device: None,
            address: view.buf.cast(),
            itemsize: view.itemsize.unsigned_abs(),
            nbytes: view.len.unsigned_abs(),
            shape: dims(view.shape),
            strides: dims(view.strides),
            export: Export::Buffer(view),
        })
    }

    /// Takes the tensor of a DLPack capsule, in host memory or in that of a CUDA device, and says
    /// what its elements are. In place of a capsule: a tuple of it and of what else is to be held.
    pub fn of_capsule(capsule: Bound<'_, PyAny>) -> PyResult<(Dtype, Self)> {
        let described = match capsule.cast::<PyTuple>() {
            Ok(tuple) => dlpack::describe(&tuple.get_item(0)?)?,
            Err(_) => dlpack::describe(&capsule)?,
        };
        let dlpack::Described { device, address, dtype, shape, strides } = described;
        let count = shape.iter().try_fold(1_usize, |n, &m| n.checked_mul(usize::try_from(m).ok()?));
        let nbytes = count.and_then(|count| count.checked_mul(dtype.size()));
        let Some(nbytes) = nbytes else {
            return Err(PyBufferError::new_err("the shape of a DLPack capsule is larger than any memory"));
        };
        let export = Export::Capsule(Some(capsule.unbind()));
        Ok((dtype, Self { export, device, address, itemsize: dtype.size(), nbytes, shape, strides }))
    }

    /// The number of the CUDA device whose memory it is in; `None`: the host's.
    pub fn device(&self) -> Option<u32> {
        self.device
    }

    /// Address of the first element.
    pub fn address(&self) -> *mut u8 {
        self.address
    }

    /// Bytes per element.
    pub fn itemsize(&self) -> usize {
        self.itemsize
    }

    /// Bytes of all elements.
    pub fn nbytes(&self) -> usize {
        self.nbytes
    }

    /// Elements along each dimension.
    pub fn shape(&self) -> &[isize] {
        &self.shape
    }

    /// The same, as the engine counts.
    pub fn dims(&self) -> Vec<u64> {
        self.shape().iter().map(|&n| n.unsigned_abs() as u64).collect()
    }

    /// Distance in bytes between neighbours along each dimension.
    pub fn strides(&self) -> &[isize] {
        &self.strides
    }

    /// True if one element stands for several.
    pub fn is_broadcast(&self) -> bool {
        self.shape().iter().zip(self.strides()).any(|(&n, &stride)| n > 1 && stride == 0)
    }

    /// True if no two elements share memory, as far as strides that grow tell (those of a broadcast
    /// or a sliding window do not).
    pub fn is_injective(&self) -> bool {
        let dims = self.shape().iter().zip(self.strides()).filter(|&(&n, _)| n > 1);
        let mut dims: Vec<(usize, usize)> =
            dims.map(|(&n, &stride)| (stride.unsigned_abs(), n.unsigned_abs())).collect();
        dims.sort_unstable();
        let mut reach = self.itemsize();
        dims.into_iter().all(|(stride, n)| {
            let apart = stride >= reach;
            reach = stride.saturating_mul(n - 1).saturating_add(reach);
            apart
        })
    }

    /// The bytes between the lowest and the highest byte of any element: (distance of the lowest
    /// from the first element, length).
    pub fn span(&self) -> (usize, usize) {
        if self.nbytes() == 0 {
            return (0, 0);
        }
        let (mut below, mut above) = (0, self.itemsize());
        for (&n, &stride) in self.shape().iter().zip(self.strides()) {
            let reach = n.unsigned_abs().saturating_sub(1) * stride.unsigned_abs();
            if stride < 0 { below += reach } else { above += reach }
        }
        (below, below + above)
    }
}

impl Drop for HeldBuffer {
    fn drop(&mut self) {
        // At interpreter shutdown there is nobody left to give it back to.
        let export = &mut self.export;
        let given_back = Python::try_attach(|_| match export {
            // SAFETY: `view` was filled by PyObject_GetBuffer and is released exactly once,
            // attached to the interpreter.
            Export::Buffer(view) => unsafe { ffi::PyBuffer_Release(&raw mut **view) },
            Export::Capsule(capsule) => drop(capsule.take()),
        });
        if given_back.is_none()
            && let Export::Capsule(capsule) = export
        {
            std::mem::forget(capsule.take());
        }
    }
}
