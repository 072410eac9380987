//! Reads of computed leaves: cell by cell, in batches of bounded size.

use stepwell_core::Error as CoreError;
use stepwell_core::format::index::LeafRecord;
use stepwell_core::leaf_path::named;
use stepwell_core::load::{self, LoadOptions, LoadStats};
use stepwell_core::read_plan::BoxCopy;
use stepwell_core::region::row_major_strides;
use stepwell_core::sys::{HostTarget, each};
use stepwell_reshard::computed::{Assembly, Computations};
use stepwell_reshard::read_plan::{self, Request};

use super::Reader;
use super::operands::SharedOperands;
use crate::error::{Error, Result};

/// Bytes in memory for a cell.
const CELL_BYTES: u64 = 2 << 20;
/// Bytes in memory for a batch of cells, which are read and computed together.
pub(super) const BATCH_BYTES: u64 = 16 << 20;

/// A cell of a request.
pub(super) struct ComputedCell {
    holder: u32,
    itemsize: u32,
    /// The request, for this cell only.
    request: Request,
}

/// Cuts requests of computed leaves into cells.
pub(super) fn cells(
    reader: &Reader,
    computations: &Computations,
    requests: &[Request],
) -> Result<Vec<ComputedCell>> {
    let mut cells = Vec::new();
    for request in requests {
        let holder = reader.holder(request.leaf);
        let outline = reader.outline();
        let shape = match outline.resolve(holder) {
            Some((_, LeafRecord::Tensor(tensor))) if request.region.fits(&tensor.shape) => tensor,
            _ => return Err(Error::internal("a region of a computed leaf", format!("{request:?}"))),
        };
        let itemsize = shape.dtype.size() as u32;
        for region in computations.cells(holder, request.region.clone(), CELL_BYTES) {
            let steps = region.offset.iter().zip(&request.region.offset).zip(&request.dst_strides);
            #[expect(clippy::cast_possible_wrap, reason = "the engine refuses a place outside its target")]
            let ahead = steps.fold(0_i64, |ahead, ((at, first), stride)| {
                ahead.wrapping_add(((at - first) as i64).wrapping_mul(*stride))
            });
            let dst_offset = request.dst_offset.wrapping_add_signed(ahead);
            let request = Request { region, dst_offset, ..request.clone() };
            cells.push(ComputedCell { holder, itemsize, request });
        }
    }
    Ok(cells)
}

impl ComputedCell {
    /// Returns the assembly of the cell.
    pub(super) fn assembly<'c>(&self, computations: &'c Computations) -> Result<Assembly<'c>> {
        let assembly = computations.assembly(self.holder, self.request.region.clone());
        assembly.ok_or_else(|| Error::internal("a computed leaf", self.holder.to_string()))
    }

    /// The place of its bytes.
    pub(super) fn copy(&self) -> BoxCopy {
        let Request { leaf, region, dst, dst_offset, dst_strides } = &self.request;
        let strides = row_major_strides(&region.extent);
        BoxCopy {
            leaf: *leaf,
            file: 0,
            src_offset: 0,
            src_strides: strides.iter().map(|n| n * u64::from(self.itemsize)).collect(),
            extent: region.extent.iter().copied().collect(),
            itemsize: self.itemsize,
            dst: *dst,
            dst_offset: *dst_offset,
            dst_strides: dst_strides.iter().copied().collect(),
            inverted: 0,
            encoded: None,
        }
    }
}

/// Computes the first cells: as many as a batch has. Adds what it read to `stats`.
pub(super) fn compute(
    reader: &Reader,
    computations: &Computations,
    cells: &[ComputedCell],
    shared: &mut SharedOperands,
    options: &LoadOptions,
    stats: &mut LoadStats,
    go_on: &mut dyn FnMut(u64) -> bool,
) -> Result<Vec<Vec<u8>>> {
    let (mut batch, mut bytes) = (Vec::new(), 0);
    for cell in cells {
        let assembly = cell.assembly(computations)?;
        bytes += assembly.bytes_needed();
        if bytes > BATCH_BYTES && !batch.is_empty() {
            break;
        }
        batch.push(assembly);
    }
    read(reader, computations, &mut batch, shared, options, stats, go_on)?;
    let computed = each("stepwell-compute", options.threads, &batch, |assembly| {
        assembly.bytes().map(std::borrow::Cow::into_owned)
    });
    let whole = computed.into_iter().zip(cells).map(|(bytes, cell)| {
        bytes.map_err(|overflow| {
            let leaf = reader.tree().leaf_path(cell.request.leaf).to_string();
            let what = format!("a value of it is too large for {}; map it to a wider dtype", overflow.0);
            CoreError::Leaf { leaf, what }.into()
        })
    });
    whole.collect()
}

/// Reads the operands of assemblies.
fn read(
    reader: &Reader,
    computations: &Computations,
    batch: &mut [Assembly<'_>],
    shared: &mut SharedOperands,
    options: &LoadOptions,
    stats: &mut LoadStats,
    go_on: &mut dyn FnMut(u64) -> bool,
) -> Result<()> {
    let (mut requests, mut bytes) = (Vec::new(), Vec::new());
    for read in batch.iter().flat_map(Assembly::all_reads) {
        if let Some((request, length)) = shared.reserve(read.leaf, bytes.len() as u32) {
            requests.push(request);
            bytes.push(vec![0; length]);
        }
    }
    let targets = bytes.iter_mut().map(|bytes| HostTarget::from(bytes.as_mut_slice())).collect();
    execute(reader, computations, &requests, targets, options, stats, go_on)?;
    for (request, bytes) in requests.iter().zip(bytes) {
        shared.keep(request.leaf, bytes)?;
    }
    let (mut requests, mut targets, mut copied) = (Vec::new(), Vec::new(), Ok(()));
    for assembly in batch {
        assembly.for_each_read(&mut |reads, target| {
            match shared.copy(reads, target) {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => copied = Err(error),
            }
            let dst = targets.len() as u32;
            requests.extend(reads.iter().map(|read| Request { dst, ..read.clone() }));
            targets.push(HostTarget::from(target.as_mut_slice()));
        });
    }
    copied?;
    execute(reader, computations, &requests, targets, options, stats, go_on)
}

/// Reads stored parts. Adds what it read to `stats`.
fn execute(
    reader: &Reader,
    computations: &Computations,
    requests: &[Request],
    targets: Vec<HostTarget<'_>>,
    options: &LoadOptions,
    stats: &mut LoadStats,
    go_on: &mut dyn FnMut(u64) -> bool,
) -> Result<()> {
    if requests.is_empty() {
        return Ok(());
    }
    let index = &computations.index;
    let copies = read_plan::copies(index, requests)?;
    let done = stats.bytes_read + stats.bytes_cached;
    let mut go_on = |bytes| go_on(done + bytes);
    let disk = &*reader.environment.disk;
    let read = load::execute_while(disk, &reader.files, index, &copies, targets, options, &mut go_on);
    let read = read.map_err(|failure| reader.gone_or(failure.error))?;
    stats.bytes_read += read.bytes_read;
    stats.bytes_cached += read.bytes_cached;
    stats.reads += read.reads;
    Ok(())
}

/// Refuses a map of a checkpoint that a map computes.
pub(super) fn refuse(reader: &Reader, holder: u32) -> Error {
    let path = named(&reader.tree().leaf_path(holder).to_string());
    Error::Invalid(format!(
        "{path}: a map computes it, and a second map cannot take it. Give the rules of both in one map"
    ))
}
