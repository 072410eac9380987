//! Stands in for `format::object` until that is there.

use crate::Result;
use crate::value::Value;

#[expect(clippy::unnecessary_wraps, reason = "the real one can fail")]
pub(super) fn object(value: &Value) -> Result<Vec<u8>> {
    Ok(format!("{value:?}").into_bytes())
}
