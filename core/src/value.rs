//! Objects: the values of leaves that are not tensors. The set of types is closed. There is no
//! pickle, and a file never chooses an import.

use crate::dtype::Dtype;

/// The value of an object leaf. Python scalars and numpy scalars are different values. A 0-d array
/// is a tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `None`
    None,
    /// `...`, as a value inside a sequence of plain values.
    Ellipsis,
    /// `bool`
    Bool(bool),
    /// An `int` that fits 64 bits.
    Int(i64),
    /// A larger `int`: two's complement, little-endian.
    BigInt(Vec<u8>),
    /// `float`, bit for bit (NaN payloads included).
    Float(f64),
    /// `complex`
    Complex(f64, f64),
    /// `str`
    Str(String),
    /// `bytes`
    Bytes(Vec<u8>),
    /// `bytearray`
    ByteArray(Vec<u8>),
    /// `list` of plain values.
    List(Vec<Value>),
    /// `tuple` of plain values.
    Tuple(Vec<Value>),
    /// `set` of plain values, in the order of their encodings.
    Set(Vec<Value>),
    /// `frozenset` of plain values, in the order of their encodings.
    FrozenSet(Vec<Value>),
    /// `dict` of plain values, in order, inside another plain value. (A `dict` in the state is a
    /// container.)
    Dict(Vec<(Value, Value)>),
    /// A numpy scalar: its dtype and its little-endian bytes.
    NumpyScalar(Dtype, Vec<u8>),
    /// A value of another type that the Python package describes by a name (`enum`,
    /// `datetime.datetime`, `torch.Size`, `numpy.dtype`, …) and plain parts.
    Extension(String, Box<Value>),
}
