//! Arrays of other libraries: which classes are arrays, and how their memory is taken hold of. The package's adapters say so (`array_type`); nothing here knows a framework.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyType;

/// A class whose instances are arrays.
pub struct ArrayType {
    /// Kept, so that its address stays its own.
    class: Py<PyType>,
    /// What the library is called.
    pub library: Arc<str>,
    /// Whether its instances export a buffer, and have a numpy dtype.
    pub buffer: bool,
    /// Instance → DLPack capsule, where there is no buffer.
    pub capsule: Py<PyAny>,
    /// Whether its instances never change.
    pub immutable: bool,
    /// An attribute, and what class its value is of where all of an array is in one piece of memory; others are described by the package.
    whole: Option<(String, Py<PyType>)>,
}

impl ArrayType {
    /// Whether all of that array is in one piece of memory.
    pub fn is_whole(&self, array: &Bound<'_, PyAny>) -> bool {
        self.whole.as_ref().is_none_or(|(attribute, class)| {
            array.getattr(attribute.as_str()).is_ok_and(|value| value.get_type().is(class))
        })
    }
}

/// By address of the class.
pub type ArrayTypes = HashMap<usize, ArrayType>;

static KNOWN: Mutex<Option<Arc<ArrayTypes>>> = Mutex::new(None);

/// Those that are known now.
pub fn known() -> Arc<ArrayTypes> {
    let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.clone().unwrap_or_default()
}

/// Whether an object is of such a class.
pub fn is_known(object: &Bound<'_, PyAny>) -> bool {
    let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.as_ref().is_some_and(|known| known.contains_key(&(object.get_type().as_ptr() as usize)))
}

/// Makes a class of arrays known. Subclasses are not meant: they may be something else. An array whose memory cannot be had like this is described by the package.
#[pyfunction]
#[pyo3(signature = (class_, library, buffer, capsule, immutable, whole = None))]
pub fn array_type(
    py: Python<'_>,
    class_: Bound<'_, PyType>,
    library: &str,
    buffer: bool,
    capsule: Py<PyAny>,
    immutable: bool,
    whole: Option<(String, Bound<'_, PyType>)>,
) {
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let copy = |one: &ArrayType| ArrayType {
        class: one.class.clone_ref(py),
        library: Arc::clone(&one.library),
        buffer: one.buffer,
        capsule: one.capsule.clone_ref(py),
        immutable: one.immutable,
        whole: one.whole.as_ref().map(|(attribute, class)| (attribute.clone(), class.clone_ref(py))),
    };
    let mut types: ArrayTypes =
        known.iter().flat_map(|known| known.iter().map(|(&at, one)| (at, copy(one)))).collect();
    let at = class_.as_ptr() as usize;
    let library = Arc::from(library);
    let whole = whole.map(|(attribute, class)| (attribute, class.unbind()));
    types.insert(at, ArrayType { class: class_.unbind(), library, buffer, capsule, immutable, whole });
    *known = Some(Arc::new(types));
}
