//! Memory that Python owns, seen from Rust: the only unsafe code of this crate.
//!
//! An array is reached through the buffer protocol *without* its format. numpy then exports every
//! dtype, also those of ml_dtypes and `datetime64`, which refuse a buffer with a format. The dtype
//! object describes the elements. Tensors of libraries that export no buffer come by DLPack, which
//! describes them.
#![expect(unsafe_code, reason = "pointers of Python's buffers enter the engine here and nowhere else")]

mod dlpack;
mod held;
mod source;

pub use held::HeldBuffer;
pub use source::{device_of, provider_of, streams_of, target_of};
