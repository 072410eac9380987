//! Objects as the format encodes them.

pub(super) use crate::format::object::encode as object;
