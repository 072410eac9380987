//! DLPack: the memory of a tensor of another library, as its capsule describes it
//! (<https://dmlc.github.io/dlpack/>). The capsule is kept, never consumed: as long as it lives, so
//! does the tensor's memory, and its own destructor gives it back.

use std::ffi::{CStr, c_void};

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods};

use stepwell_core::dtype::Dtype;
use stepwell_core::region::Dims;

/// The first version's capsule, and the later ones'.
const LEGACY: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

/// The major version whose layout is known here.
const MAJOR: u32 = 1;

/// Kinds of devices.
const CPU: i32 = 1;
const CUDA: i32 = 2;
/// Host memory that CUDA has pinned.
const CUDA_HOST: i32 = 3;
const CUDA_MANAGED: i32 = 13;

#[repr(C)]
struct DLDevice {
    kind: i32,
    id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DLDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DLTensor {
    data: *mut c_void,
    device: DLDevice,
    ndim: i32,
    dtype: DLDataType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// The head of the struct behind a capsule named [`LEGACY`].
#[repr(C)]
struct DLManagedTensor {
    tensor: DLTensor,
}

/// The head of the struct behind a capsule named [`VERSIONED`].
#[repr(C)]
struct DLManagedTensorVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: *mut c_void,
    flags: u64,
    tensor: DLTensor,
}

/// The tensor that a capsule describes.
pub(super) struct Described {
    /// The number of the CUDA device whose memory it is in; `None`: the host's.
    pub device: Option<u32>,
    pub address: *mut u8,
    pub dtype: Dtype,
    pub shape: Dims<isize>,
    /// In bytes.
    pub strides: Dims<isize>,
}

/// Reads a capsule; `BufferError` where it is none, its tensor is on a device of another kind than
/// CUDA's, or its elements are of a type that is not stored.
pub(super) fn describe(capsule: &Bound<'_, PyAny>) -> PyResult<Described> {
    let refuse = |why: &str| Err(PyBufferError::new_err(why.to_owned()));
    let Ok(capsule) = capsule.cast::<PyCapsule>() else { return refuse("no DLPack capsule") };
    let tensor: &DLTensor = if let Ok(pointer) = capsule.pointer_checked(Some(LEGACY)) {
        // SAFETY: a capsule of that name points to a DLManagedTensor, which its producer keeps
        // until the capsule is consumed (renamed) or gone; it is borrowed here for as long as
        // `capsule`, which nobody else has.
        &unsafe { pointer.cast::<DLManagedTensor>().as_ref() }.tensor
    } else if let Ok(pointer) = capsule.pointer_checked(Some(VERSIONED)) {
        let managed = pointer.cast::<DLManagedTensorVersioned>();
        // SAFETY: every version begins with its major number. Only that is read: another version
        // may be shorter.
        let major = unsafe { (&raw const (*managed.as_ptr()).major).read() };
        if major != MAJOR {
            return refuse("a DLPack capsule of a version that is not known");
        }
        // SAFETY: as above, for the type that this name stands for. Later minor versions only add
        // fields behind.
        &unsafe { managed.as_ref() }.tensor
    } else {
        return refuse("no DLPack capsule, or one that was consumed");
    };
    let device = match tensor.device.kind {
        CPU | CUDA_HOST => None,
        CUDA | CUDA_MANAGED => match u32::try_from(tensor.device.id) {
            Ok(device) => Some(device),
            Err(_) => return refuse("a tensor on a device without a number"),
        },
        _ => return refuse("a tensor on a device of a kind that is not known"),
    };
    let Some(dtype) = dtype_of(tensor.dtype) else { return refuse("a DLPack type that is not stored") };
    let Ok(ndim) = usize::try_from(tensor.ndim) else { return refuse("a negative number of dimensions") };
    let shape = dims(tensor.shape, ndim);
    if shape.len() != ndim {
        return refuse("a DLPack tensor without a shape");
    }
    let itemsize = dtype.size() as isize;
    let strides = if tensor.strides.is_null() {
        // Compact and row-major.
        let mut strides = Dims::from_elem(itemsize, ndim);
        for d in (1..ndim).rev() {
            strides[d - 1] = strides[d].saturating_mul(shape[d].max(1));
        }
        strides
    } else {
        dims(tensor.strides, ndim).into_iter().map(|stride| stride.saturating_mul(itemsize)).collect()
    };
    // The format demands that the offset stays inside the allocation.
    let address = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
    Ok(Described { device, address, dtype, shape, strides })
}

fn dims(first: *const i64, count: usize) -> Dims<isize> {
    if count == 0 || first.is_null() {
        return Dims::new();
    }
    // SAFETY: a producer lays out `ndim` numbers at `shape`, and at `strides` where that is not
    // null, for as long as the tensor.
    let numbers = unsafe { std::slice::from_raw_parts(first, count) };
    numbers.iter().map(|&n| n as isize).collect()
}

fn dtype_of(DLDataType { code, bits, lanes }: DLDataType) -> Option<Dtype> {
    let name = match (code, bits) {
        (0, 8) => "int8",
        (0, 16) => "int16",
        (0, 32) => "int32",
        (0, 64) => "int64",
        (1, 8) => "uint8",
        (1, 16) => "uint16",
        (1, 32) => "uint32",
        (1, 64) => "uint64",
        (2, 16) => "float16",
        (2, 32) => "float32",
        (2, 64) => "float64",
        (4, 16) => "bfloat16",
        (5, 32) => "complex32",
        (5, 64) => "complex64",
        (5, 128) => "complex128",
        (6, 8) => "bool",
        (7, 8) => "float8_e3m4",
        (8, 8) => "float8_e4m3",
        (9, 8) => "float8_e4m3b11fnuz",
        (10, 8) => "float8_e4m3fn",
        (11, 8) => "float8_e4m3fnuz",
        (12, 8) => "float8_e5m2",
        (13, 8) => "float8_e5m2fnuz",
        (14, 8) => "float8_e8m0fnu",
        _ => return None,
    };
    if lanes == 1 { Dtype::from_name(name) } else { None }
}
