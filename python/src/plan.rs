//! Dry runs: what a read would read, file by file. The plan is the one that the read makes.

use std::collections::BTreeMap;

use stepwell_core::format::index::{Extent, LeafRecord, Source};
use stepwell_core::region::Region;
use stepwell_manager::Error;
use stepwell_reshard::read_plan::Request;

use crate::checkpoint::Engined;

/// The reads of one data file.
#[derive(Default)]
pub struct FilePlan {
    /// Relative to the step.
    pub path: String,
    /// Reads that the disk is asked for, at least.
    pub reads: u64,
    /// Blocks that are read and checked.
    pub blocks: u64,
    /// Bytes of these reads.
    pub read_bytes: u64,
    /// Of them, those that are asked for.
    pub wanted_bytes: u64,
}

/// Plans reads of leading parts of tensors, and of objects, in the order of the files.
pub fn files(
    inner: &Engined,
    tensors: Vec<(u32, Vec<u64>)>,
    objects: &[u32],
) -> Result<Vec<FilePlan>, Error> {
    let mut requests = Vec::with_capacity(tensors.len());
    for (leaf, extent) in tensors {
        let LeafRecord::Tensor(tensor) = record(inner, leaf)? else { return Err(no_leaf(leaf)) };
        let region = Region { offset: vec![0; extent.len()].into(), extent: extent.into() };
        requests.push(Request::row_major(leaf, region, tensor.dtype.size() as u64, requests.len() as u32));
    }
    let mut found: BTreeMap<u32, FilePlan> = BTreeMap::new();
    let plan = inner.plan(&requests, false)?;
    for run in &plan.runs {
        let block = inner.block_bytes(run.file)?;
        let file = found.entry(run.file).or_default();
        file.reads += 1;
        file.blocks += run.len.div_ceil(block.max(1));
        file.read_bytes += run.len;
    }
    for copy in &plan.copies {
        let elements = copy.extent.iter().fold(1_u64, |n, &m| n.saturating_mul(m));
        found.entry(copy.file).or_default().wanted_bytes += elements.saturating_mul(u64::from(copy.itemsize));
    }
    // Objects are read by their own extents, whole blocks of the file around them.
    let mut blocks: BTreeMap<u32, Vec<(u64, u64)>> = BTreeMap::new();
    for &leaf in objects {
        let LeafRecord::Object(Extent {
            source: Source::Own(file) | Source::Range(file),
            offset,
            length,
            ..
        }) = record(inner, leaf)?
        else {
            return Err(no_leaf(leaf));
        };
        let block = inner.block_bytes(*file)?.max(1);
        let last = offset.saturating_add(length.saturating_sub(1));
        blocks.entry(*file).or_default().push((offset / block, last / block));
        let file = found.entry(*file).or_default();
        file.read_bytes += length;
        file.wanted_bytes += length;
    }
    for (file, mut ranges) in blocks {
        ranges.sort_unstable();
        let mut next = 0;
        let found = found.entry(file).or_default();
        for (first, last) in ranges {
            let first = first.max(next);
            if last >= first {
                found.blocks += last - first + 1;
                found.reads += 1;
                next = last + 1;
            }
        }
    }
    for (file, plan) in &mut found {
        plan.path = inner
            .outline()
            .files
            .get(*file as usize)
            .map(|record| record.stored_name().to_owned())
            .unwrap_or_default();
    }
    Ok(found.into_values().collect())
}

/// The record of a leaf, with ties resolved.
fn record(inner: &Engined, leaf: u32) -> Result<&LeafRecord, Error> {
    inner.outline().resolve(leaf).map(|(_, record)| record).ok_or_else(|| no_leaf(leaf))
}

fn no_leaf(leaf: u32) -> Error {
    Error::internal("a leaf of the kind that is asked for", format!("leaf {leaf}"))
}
