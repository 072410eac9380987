//! Plans the copies of a restore: regions of stored tensors → box copies. A restore calls it after
//! the match, and the engine reads the blocks that the copies need.
//!
//! * Every element of every request is copied exactly once, or planning fails. The caller never
//!   sees unfilled memory.
//! * A request without elements copies nothing.
//!
//! The numbers of an index are hostile: sums and products are checked, and contradictions are
//! errors that name the leaf.

mod copies;

use stepwell_core::format::index::{Index, LeafRecord, TensorRecord};
use stepwell_core::read_plan::BoxCopy;
use stepwell_core::region::{Dims, Region};

use crate::layout::Place;
use crate::{Error, Result};

/// A region of a stored tensor, and where it goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Number of the leaf in the index; an alias is followed.
    pub leaf: u32,
    /// Part of the stored tensor.
    pub region: Region,
    /// Number of the destination.
    pub dst: u32,
    /// Byte of the destination where the region's first element goes.
    pub dst_offset: u64,
    /// Bytes between neighbours in the destination, along each dimension of the tensor.
    pub dst_strides: Dims<i64>,
}

impl Request {
    /// A whole tensor into a row-major buffer of its own.
    pub fn whole(leaf: u32, tensor: &TensorRecord, dst: u32) -> Self {
        Self::row_major(leaf, Region::whole(&tensor.shape), tensor.dtype.size() as u64, dst)
    }

    /// A region into a row-major buffer of its own.
    pub fn row_major(leaf: u32, region: Region, itemsize: u64, dst: u32) -> Self {
        let Place { offset, strides } = Place::row_major(&region.extent, itemsize);
        Self { leaf, region, dst, dst_offset: offset, dst_strides: strides }
    }
}

/// Returns the copies of requests, in the order of the requests. Destinations are not checked: the
/// engine knows them.
pub fn copies(index: &Index, requests: &[Request]) -> Result<Vec<BoxCopy>> {
    copies::copies_of(index, requests)
}

/// The tensor of a leaf, aliases followed, with the number of the leaf that holds it.
pub(crate) fn tensor(index: &Index, leaf: u32) -> Result<(u32, &TensorRecord)> {
    let request = |what: &str| Error::Request { leaf: name(index, leaf), what: what.to_owned() };
    match index.resolve(leaf) {
        Some((source, LeafRecord::Tensor(tensor))) => Ok((source, tensor)),
        Some(_) => Err(request("it is an object, of which no region can be read")),
        None if leaf as usize >= index.leaves.len() => Err(request("the index has no such leaf")),
        None => Err(Error::Index {
            leaf: name(index, leaf),
            what: "its alias names no leaf that holds bytes".into(),
        }),
    }
}

pub(crate) fn name(index: &Index, leaf: u32) -> String {
    if index.tree.leaf_node(leaf).is_some() {
        index.tree.leaf_path(leaf).to_string()
    } else {
        format!("number {leaf}")
    }
}

#[cfg(test)]
mod tests;
