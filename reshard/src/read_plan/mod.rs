//! Plans reads and copies: regions of stored tensors → box copies → coalesced reads of whole
//! blocks. A restore calls it after the match, and the engine runs the plan.
//!
//! * Every element of every request is copied exactly once, or planning fails. The caller never
//!   sees unfilled memory.
//! * Runs are in file order, are whole blocks, and do not overlap within a file. Unneeded blocks
//!   are read only inside gaps of at most [`PlanOptions::max_gap_bytes`].
//! * Copies are in file order, too. A copy whose bytes are in several runs is listed by each.
//! * A request without elements reads nothing.
//!
//! The numbers of an index are hostile: sums and products are checked, and contradictions are
//! errors that name the leaf.

mod copies;
mod runs;

use stepwell_core::format::index::{Index, LeafRecord, TensorRecord};
use stepwell_core::read_plan::{BoxCopy, ReadPlan};
use stepwell_core::region::{Dims, Region};

use crate::segment::Place;
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

/// How reads are made of blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanOptions {
    /// Bytes per block: runs begin and end at multiples of it (or at the end of the file).
    pub block_bytes: u64,
    /// The same for files that differ, by their ordinals in the index; `None` and missing entries
    /// mean `block_bytes`.
    pub file_block_bytes: Vec<Option<u64>>,
    /// No run is longer, but for a single block that is.
    pub max_run_bytes: u64,
    /// Bytes that nobody needs are read along where two reads would be no farther apart.
    pub max_gap_bytes: u64,
}

impl PlanOptions {
    /// A local disk. With several in flight a request costs it about as much as 64 KiB more in
    /// another: bridging smaller gaps is cheaper than a second request. Runs of 8 MiB are as fast
    /// as longer ones, and eight of them fit a restore's 64 MiB.
    pub fn local(block_bytes: u64) -> Self {
        Self { block_bytes, file_block_bytes: Vec::new(), max_run_bytes: 8 << 20, max_gap_bytes: 64 << 10 }
    }

    /// A parallel or network file system. A request costs a round trip of about a millisecond, in
    /// which several MiB come: bridge more, ask for more at once.
    pub fn network(block_bytes: u64) -> Self {
        Self { max_run_bytes: 16 << 20, max_gap_bytes: 2 << 20, ..Self::local(block_bytes) }
    }

    /// Nothing that is not needed: what a partial read cannot do with less. For dry runs and tests.
    pub fn least(block_bytes: u64) -> Self {
        Self { max_gap_bytes: 0, ..Self::local(block_bytes) }
    }

    fn block_of(&self, file: u32) -> u64 {
        self.file_block_bytes.get(file as usize).copied().flatten().unwrap_or(self.block_bytes).max(1)
    }
}

/// Plans the reads of `requests`. Destinations are not checked: who executes the plan knows them.
pub fn plan(index: &Index, requests: &[Request], options: &PlanOptions) -> Result<ReadPlan> {
    of_copies(index, copies(index, requests)?, options)
}

/// Which part of which chunk goes where, for some of the requests of a plan. It is most of what
/// planning costs where leaves are small, and may be done for shares of the requests on several
/// threads.
pub fn copies(index: &Index, requests: &[Request]) -> Result<Vec<BoxCopy>> {
    copies::copies_of(index, requests)
}

/// The plan of all [`copies`], in whatever order.
pub fn of_copies(index: &Index, mut copies: Vec<BoxCopy>, options: &PlanOptions) -> Result<ReadPlan> {
    if copies.len() > u32::MAX as usize {
        let what = format!("the plan has {} copies, more than a plan can number", copies.len());
        return Err(Error::Request { leaf: name(index, 0), what });
    }
    copies.sort_by(|a, b| {
        let order = (a.file, a.src_offset).cmp(&(b.file, b.src_offset));
        order.then_with(|| (a.dst, a.dst_offset).cmp(&(b.dst, b.dst_offset)))
    });
    let runs = runs::runs(index, &copies, options);
    Ok(ReadPlan { runs, copies })
}

/// The size of a plan's reads, for dry runs and reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanStats {
    /// Files that are opened.
    pub files: u64,
    /// Reads.
    pub runs: u64,
    /// Bytes that are read.
    pub read_bytes: u64,
    /// Bytes that are copied: what the caller asked for.
    pub wanted_bytes: u64,
}

impl PlanStats {
    /// Counts a plan.
    pub fn of(plan: &ReadPlan) -> Self {
        let mut stats = Self { runs: plan.runs.len() as u64, ..Self::default() };
        let mut last = None;
        for run in &plan.runs {
            stats.files += u64::from(last != Some(run.file));
            last = Some(run.file);
            stats.read_bytes += run.len;
        }
        for copy in &plan.copies {
            stats.wanted_bytes += copy.extent.iter().product::<u64>() * u64::from(copy.itemsize);
        }
        stats
    }
}

/// The tensor of a leaf, aliases followed, with the number of the leaf that holds it.
fn tensor(index: &Index, leaf: u32) -> Result<(u32, &TensorRecord)> {
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

fn name(index: &Index, leaf: u32) -> String {
    if index.tree.leaf_node(leaf).is_some() {
        index.tree.leaf_path(leaf).to_string()
    } else {
        format!("number {leaf}")
    }
}

#[cfg(test)]
mod tests;
