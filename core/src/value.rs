//! Objects: the typed values of leaves that are not tensors. A closed set; there is no pickle
//! anywhere, and a file never chooses what is imported.

use crate::dtype::Dtype;

/// The value of an object leaf. Python scalar, numpy scalar and 0-d array are distinct: the first
/// two are here, the third is a tensor.
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
    /// `frozenset` of plain values, likewise.
    FrozenSet(Vec<Value>),
    /// `dict` of plain values (inside another plain value; a `dict` in the state is a container),
    /// order kept.
    Dict(Vec<(Value, Value)>),
    /// A numpy scalar: its dtype and its little-endian bytes.
    NumpyScalar(Dtype, Vec<u8>),
    /// Anything else that the front end knows how to take apart: a name that says what it is
    /// (`enum`, `datetime.datetime`, `torch.Size`, `numpy.dtype`, …) and its parts.
    Extension(String, Box<Value>),
}
