//! How objects become bytes.

use crate::Result;
use crate::format::object as format;
use crate::value::Value;

pub(super) fn object(value: &Value) -> Result<Vec<u8>> {
    format::encode(value)
}
