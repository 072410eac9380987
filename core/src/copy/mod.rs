//! Geometry of copies between strided memory and the row-major bytes of a chunk: which pieces, in
//! which order, with which kernel. Pure arithmetic; [`crate::sys`] moves the bytes.

pub mod gather;
