//! Converts Python values to object leaves ([`Value`]) and back. This module handles exact built-in
//! types. Python describes all others.

use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyByteArray, PyBytes, PyComplex, PyDict, PyEllipsis, PyFloat, PyFrozenSet, PyInt, PyList, PySet,
    PyString, PyTuple,
};

use stepwell_core::dtype::Dtype;
use stepwell_core::limits::MAX_DEPTH;
use stepwell_core::value::Value;

use crate::arrays;
use crate::hooks::{Hooks, dtype_named};

/// The class of a value.
pub enum Plain {
    /// It is an object leaf.
    Value(Value),
    /// It is no object leaf: an array or a container, or it contains one.
    Not,
    /// It cannot be stored, for this reason.
    Refused(String),
}

/// The reason for refusing values that are nested too deeply.
pub const TOO_DEEP: &str = "nested more than 128 deep (does it hold itself?); flatten it";

/// Returns the value of an exact built-in scalar type. `None` for other types.
pub fn exact_scalar(object: &Bound<'_, PyAny>) -> PyResult<Option<Value>> {
    if object.is_exact_instance_of::<PyFloat>() {
        return Ok(Some(Value::Float(object.extract()?)));
    }
    if object.is_exact_instance_of::<PyInt>() {
        return integer(object).map(Some);
    }
    if object.is_none() {
        return Ok(Some(Value::None));
    }
    if let Ok(string) = object.cast_exact::<PyString>() {
        return text(string).map(Some);
    }
    if object.is_exact_instance_of::<PyBool>() {
        return Ok(Some(Value::Bool(object.is_truthy()?)));
    }
    if let Ok(bytes) = object.cast_exact::<PyBytes>() {
        return Ok(Some(Value::Bytes(bytes.as_bytes().to_vec())));
    }
    if let Ok(complex) = object.cast_exact::<PyComplex>() {
        return Ok(Some(Value::Complex(complex.real(), complex.imag())));
    }
    if let Ok(bytes) = object.cast_exact::<PyByteArray>() {
        return Ok(Some(Value::ByteArray(bytes.to_vec())));
    }
    if object.is_exact_instance_of::<PyEllipsis>() {
        return Ok(Some(Value::Ellipsis));
    }
    Ok(None)
}

fn integer(object: &Bound<'_, PyAny>) -> PyResult<Value> {
    if let Ok(small) = object.extract::<i64>() {
        return Ok(Value::Int(small));
    }
    let bits: usize = object.call_method0("bit_length")?.extract()?;
    let signed = PyDict::new(object.py());
    signed.set_item("signed", true)?;
    let bytes = object.call_method("to_bytes", (bits / 8 + 1, "little"), Some(&signed))?;
    Ok(Value::BigInt(bytes.extract()?))
}

/// Converts a `str`. One with lone surrogates (such as a file name of the system) has no UTF-8
/// encoding, and is stored as bytes.
fn text(string: &Bound<'_, PyString>) -> PyResult<Value> {
    if let Ok(utf8) = string.to_str() {
        return Ok(Value::Str(utf8.to_owned()));
    }
    let bytes: Vec<u8> = string.call_method1("encode", ("utf-8", "surrogatepass"))?.extract()?;
    Ok(Value::Extension("str".into(), Box::new(Value::Bytes(bytes))))
}

/// Converts an object if it is plain: a scalar, a sequence or set of plain values, or an object
/// that Python describes by such values. If `dicts`, a `dict` is a plain value, as in the parts of
/// an extension. Otherwise it is a container, as in a state.
pub fn to_value(hooks: &Hooks, object: &Bound<'_, PyAny>, dicts: bool, depth: u64) -> PyResult<Plain> {
    if depth > MAX_DEPTH {
        return Ok(Plain::Refused(TOO_DEEP.into()));
    }
    if let Some(value) = exact_scalar(object)? {
        return Ok(Plain::Value(value));
    }
    if let Ok(list) = object.cast_exact::<PyList>() {
        return Ok(sequence(hooks, list.iter(), dicts, depth)?.wrap(Value::List));
    }
    if let Ok(tuple) = object.cast_exact::<PyTuple>() {
        return Ok(sequence(hooks, tuple.iter(), dicts, depth)?.wrap(Value::Tuple));
    }
    if let Ok(set) = object.cast_exact::<PySet>() {
        return Ok(members(hooks, set.iter(), depth)?.wrap(Value::Set));
    }
    if let Ok(set) = object.cast_exact::<PyFrozenSet>() {
        return Ok(members(hooks, set.iter(), depth)?.wrap(Value::FrozenSet));
    }
    if let Ok(dict) = object.cast_exact::<PyDict>() {
        return if dicts { mapping(hooks, dict, depth) } else { Ok(Plain::Not) };
    }
    if object.get_type().is(&hooks.ndarray) || arrays::is_known(object) {
        return Ok(Plain::Not);
    }
    let description = hooks.describe.bind(object.py()).call1((object,))?;
    described(hooks, &description, depth)
}

/// Converts the answer of `describe` if it describes a plain value.
pub fn described(hooks: &Hooks, description: &Bound<'_, PyAny>, depth: u64) -> PyResult<Plain> {
    let tag: String = description.get_item(0)?.extract()?;
    match tag.as_str() {
        "plain" => to_value(hooks, &description.get_item(1)?, true, depth + 1),
        "same" => to_value(hooks, &description.get_item(1)?, false, depth + 1),
        "extension" => {
            let name: String = description.get_item(1)?.extract()?;
            Ok(match to_value(hooks, &description.get_item(2)?, true, depth + 1)? {
                Plain::Value(parts) => Plain::Value(Value::Extension(name, Box::new(parts))),
                Plain::Not => Plain::Refused(format!("{name} holds values that are not plain")),
                refused @ Plain::Refused(_) => refused,
            })
        }
        "scalar" => {
            let dtype: Dtype = dtype_named(&description.get_item(1)?.extract::<String>()?)?;
            Ok(Plain::Value(Value::NumpyScalar(dtype, description.get_item(2)?.extract()?)))
        }
        "deque" => {
            let parts = description.get_item(2)?;
            if parts.len()? == 0 {
                return Ok(Plain::Not); // an empty sequence is a container
            }
            Ok(match to_value(hooks, &parts, false, depth + 1)? {
                Plain::Value(list) => {
                    let bound = exact_scalar(&description.get_item(1)?)?.unwrap_or(Value::None);
                    let parts = Box::new(Value::List(vec![bound, list]));
                    Plain::Value(Value::Extension("collections.deque".into(), parts))
                }
                other => other,
            })
        }
        "refuse" => Ok(Plain::Refused(description.get_item(1)?.extract()?)),
        _ => Ok(Plain::Not),
    }
}

/// The values of a sequence, or the class of an element that is not plain.
enum Several {
    Values(Vec<Value>),
    Not,
    Refused(String),
}

impl Several {
    fn wrap(self, make: impl FnOnce(Vec<Value>) -> Value) -> Plain {
        match self {
            Self::Values(values) => Plain::Value(make(values)),
            Self::Not => Plain::Not,
            Self::Refused(why) => Plain::Refused(why),
        }
    }
}

fn sequence<'py>(
    hooks: &Hooks,
    items: impl ExactSizeIterator<Item = Bound<'py, PyAny>>,
    dicts: bool,
    depth: u64,
) -> PyResult<Several> {
    let mut values = Vec::with_capacity(items.len());
    for item in items {
        match to_value(hooks, &item, dicts, depth + 1)? {
            Plain::Value(value) => values.push(value),
            // A refused element makes the sequence a container. Its walk then names the path of the
            // element.
            Plain::Not | Plain::Refused(_) if !dicts => return Ok(Several::Not),
            Plain::Not => return Ok(Several::Not),
            Plain::Refused(why) => return Ok(Several::Refused(why)),
        }
    }
    Ok(Several::Values(values))
}

fn members<'py>(
    hooks: &Hooks,
    items: impl ExactSizeIterator<Item = Bound<'py, PyAny>>,
    depth: u64,
) -> PyResult<Several> {
    Ok(match sequence(hooks, items, true, depth)? {
        Several::Not => Several::Refused("a set can only hold plain values".into()),
        other => other,
    })
}

fn mapping(hooks: &Hooks, dict: &Bound<'_, PyDict>, depth: u64) -> PyResult<Plain> {
    let mut pairs = Vec::with_capacity(dict.len());
    for (key, value) in dict.iter() {
        let pair = (to_value(hooks, &key, true, depth + 1)?, to_value(hooks, &value, true, depth + 1)?);
        match pair {
            (Plain::Value(key), Plain::Value(value)) => pairs.push((key, value)),
            (Plain::Refused(why), _) | (_, Plain::Refused(why)) => return Ok(Plain::Refused(why)),
            _ => return Ok(Plain::Not),
        }
    }
    Ok(Plain::Value(Value::Dict(pairs)))
}

/// Returns the Python object of a value. `reviver` is a `stepwell._state.leaves.Reviver`.
pub fn to_python<'py>(
    py: Python<'py>,
    value: &Value,
    reviver: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let many = |values: &[Value]| {
        values.iter().map(|value| to_python(py, value, reviver)).collect::<PyResult<Vec<_>>>()
    };
    Ok(match value {
        Value::None => py.None().into_bound(py),
        Value::Ellipsis => PyEllipsis::get(py).to_owned().into_any(),
        Value::Bool(value) => PyBool::new(py, *value).to_owned().into_any(),
        Value::Int(value) => value.into_pyobject(py)?.into_any(),
        Value::BigInt(bytes) => {
            let signed = PyDict::new(py);
            signed.set_item("signed", true)?;
            py.get_type::<PyInt>().call_method(
                "from_bytes",
                (PyBytes::new(py, bytes), "little"),
                Some(&signed),
            )?
        }
        Value::Float(value) => PyFloat::new(py, *value).into_any(),
        Value::Complex(real, imag) => PyComplex::from_doubles(py, *real, *imag).into_any(),
        Value::Str(text) => PyString::new(py, text).into_any(),
        Value::Bytes(bytes) => PyBytes::new(py, bytes).into_any(),
        Value::ByteArray(bytes) => PyByteArray::new(py, bytes).into_any(),
        Value::List(values) => PyList::new(py, many(values)?)?.into_any(),
        Value::Tuple(values) => PyTuple::new(py, many(values)?)?.into_any(),
        Value::Set(values) => PySet::new(py, many(values)?)?.into_any(),
        Value::FrozenSet(values) => PyFrozenSet::new(py, many(values)?)?.into_any(),
        Value::Dict(pairs) => {
            let dict = PyDict::new(py);
            for (key, value) in pairs {
                dict.set_item(to_python(py, key, reviver)?, to_python(py, value, reviver)?)?;
            }
            dict.into_any()
        }
        Value::NumpyScalar(dtype, bytes) => {
            reviver.call_method1("scalar", (dtype.name(), PyBytes::new(py, bytes)))?
        }
        Value::Extension(name, parts) => {
            reviver.call_method1("extension", (name, to_python(py, parts, reviver)?))?
        }
    })
}
