//! Objects: hostile encodings, and values made from the input.

use arbitrary::Unstructured;
use stepwell_core::format::object;

use crate::{sealed, tree};

/// See the module documentation.
pub fn run(input: &[u8]) {
    let Some((is_value, bytes)) = sealed(input) else { return };
    if is_value {
        let Ok(value) = tree::value(&mut Unstructured::new(bytes), 0) else { return };
        let Ok(encoding) = object::encode(&value) else { return };
        let read = object::decode(&encoding).expect("what was encoded can be read");
        assert_eq!(object::encode(&read).ok(), Some(encoding), "a value has one encoding");
        return;
    }
    if let Ok(value) = object::decode(bytes) {
        assert_eq!(object::encode(&value).ok().as_deref(), Some(bytes), "a value has one encoding");
    }
}
