//! Reading.
mod buffers;
pub(crate) mod disjoint;
pub(crate) mod geometry;
pub use buffers::ReadBuffers;
