//! Arrays of other libraries: which classes are arrays, and how their memory is taken hold of. The
//! package's adapters say so (`array_type`); nothing here knows a framework.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyType;

use crate::ingest::HeldBuffer;

/// A class whose instances are arrays.
pub struct ArrayType {
    /// Kept, so that its address stays its own.
    _class: Py<PyType>,
    /// Name of the library.
    pub library: Arc<str>,
    /// True if its instances export a buffer, and have a numpy dtype.
    pub buffer: bool,
    /// Instance → DLPack capsule (or a tuple of it and of what is held with it), where there is no
    /// buffer.
    pub capsule: Py<PyAny>,
    /// For one on a device: instance, the handle of the stream that it is to be copied on → a
    /// capsule of what that stream sees, or `None` where it cannot be held. Without it, the order
    /// is that of the library's current stream.
    pub on_device: Option<Py<PyAny>>,
    /// True if its instances never change.
    pub immutable: bool,
    /// Which of them are in one piece of memory; others are described by the package.
    whole: Option<Whole>,
}

impl ArrayType {
    /// True if all of that array is in one piece of memory.
    pub fn is_whole(&self, array: &Bound<'_, PyAny>) -> bool {
        self.whole.as_ref().is_none_or(|whole| whole.holds(array))
    }
}

/// An attribute, and the class of its value where all of an array is in one piece of memory.
struct Whole {
    attribute: String,
    class: Py<PyType>,
}

impl Whole {
    fn holds(&self, array: &Bound<'_, PyAny>) -> bool {
        array.getattr(self.attribute.as_str()).is_ok_and(|value| value.get_type().is(&self.class))
    }
}

/// The classes that are known, by their address.
#[derive(Clone, Default)]
pub struct Known(HashMap<usize, Arc<ArrayType>>);

impl Known {
    /// The registered class of an array.
    pub fn array(&self, object: &Bound<'_, PyAny>) -> Option<&Arc<ArrayType>> {
        self.0.get(&address(object))
    }

    /// Exports the memory of an array: through the buffer protocol, or through a registered class.
    /// A `writable` export is checked to be writable.
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

/// Those that are known now.
pub fn known() -> Arc<Known> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default()
}

/// True if an object is of a class of arrays.
pub fn is_known(object: &Bound<'_, PyAny>) -> bool {
    let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.as_ref().is_some_and(|known| known.array(object).is_some())
}

/// Makes a class of arrays known. Subclasses are not meant: they may be something else. An array
/// whose memory cannot be had like this is described by the package.
#[pyfunction]
#[pyo3(signature = (class_, library, buffer, capsule, immutable, whole = None, on_device = None))]
pub fn array_type(
    class_: Bound<'_, PyType>,
    library: &str,
    buffer: bool,
    capsule: Py<PyAny>,
    immutable: bool,
    whole: Option<(String, Bound<'_, PyType>)>,
    on_device: Option<Py<PyAny>>,
) {
    let at = class_.as_ptr() as usize;
    let library = Arc::from(library);
    let whole = whole.map(|(attribute, class)| Whole { attribute, class: class.unbind() });
    let found = ArrayType { _class: class_.unbind(), library, buffer, capsule, on_device, immutable, whole };
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::make_mut(known.get_or_insert_default()).0.insert(at, Arc::new(found));
}
