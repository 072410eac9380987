//! Arrays of other libraries: their classes, and how to export their memory. The package's adapters
//! register them (`array_type`). This module knows no framework.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyType;

use crate::ingest::HeldBuffer;

/// A class whose instances are arrays.
pub struct ArrayType {
    /// Keeps the class alive, so that its address is not reused.
    _class: Py<PyType>,
    /// The name of its library.
    pub library: Arc<str>,
    /// True if its instances export a buffer, and have a numpy dtype.
    pub buffer: bool,
    /// A function from an instance to its DLPack capsule, or to a tuple of the capsule and an
    /// object to keep alive. Used if there is no buffer.
    pub capsule: Py<PyAny>,
    /// True if its instances never change. Those on a device are copied by Python: the library
    /// refuses to donate them to a computation while somebody else holds them.
    pub immutable: bool,
    /// The test whether an instance is one piece of memory. Python describes the others.
    whole: Option<Whole>,
}

impl ArrayType {
    /// True if the array is one piece of memory.
    pub fn is_whole(&self, array: &Bound<'_, PyAny>) -> bool {
        self.whole.as_ref().is_none_or(|whole| whole.holds(array))
    }
}

/// An attribute of arrays, and the class of its value in arrays that are one piece of memory.
struct Whole {
    attribute: String,
    class: Py<PyType>,
}

impl Whole {
    fn holds(&self, array: &Bound<'_, PyAny>) -> bool {
        array.getattr(self.attribute.as_str()).is_ok_and(|value| value.get_type().is(&self.class))
    }
}

/// The registered classes, by address.
#[derive(Clone, Default)]
pub struct Known(HashMap<usize, Arc<ArrayType>>);

impl Known {
    /// The registered class of an array.
    pub fn array(&self, object: &Bound<'_, PyAny>) -> Option<&Arc<ArrayType>> {
        self.0.get(&address(object))
    }

    /// Exports the memory of an array, through the buffer protocol or its registered class. Fails
    /// if `writable` and the memory is read-only.
    pub fn hold(&self, array: &Bound<'_, PyAny>, writable: bool) -> PyResult<HeldBuffer> {
        let known = self.array(array).filter(|known| !(writable && known.immutable));
        match known {
            Some(known) if !known.buffer => {
                let capsule = known.capsule.bind(array.py()).call1((array,))?;
                Ok(HeldBuffer::of_capsule(capsule)?.1)
            }
            _ => HeldBuffer::new(array, writable),
        }
    }
}

fn address(object: &Bound<'_, PyAny>) -> usize {
    object.get_type().as_ptr() as usize
}

static KNOWN: Mutex<Option<Arc<Known>>> = Mutex::new(None);

/// Returns the registered classes.
pub fn known() -> Arc<Known> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default()
}

/// True if an object's class is registered.
pub fn is_known(object: &Bound<'_, PyAny>) -> bool {
    let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.as_ref().is_some_and(|known| known.array(object).is_some())
}

/// Registers a class of arrays, without its subclasses. If the memory of an instance cannot be
/// exported, Python describes the instance.
#[pyfunction]
#[pyo3(signature = (class_, library, buffer, capsule, immutable, whole = None))]
pub fn array_type(
    class_: Bound<'_, PyType>,
    library: &str,
    buffer: bool,
    capsule: Py<PyAny>,
    immutable: bool,
    whole: Option<(String, Bound<'_, PyType>)>,
) {
    let at = class_.as_ptr() as usize;
    let library = Arc::from(library);
    let whole = whole.map(|(attribute, class)| Whole { attribute, class: class.unbind() });
    let found = ArrayType { _class: class_.unbind(), library, buffer, capsule, immutable, whole };
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::make_mut(known.get_or_insert_default()).0.insert(at, Arc::new(found));
}
