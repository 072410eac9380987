//! Operands that several cells of a read need, such as the adapters of a merge. They are read once,
//! if they are small.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use stepwell_core::format::index::LeafRecord;
use stepwell_core::region::Region;
use stepwell_core::sys::HostSource;
use stepwell_reshard::computed::Computations;
use stepwell_reshard::layout::Place;
use stepwell_reshard::read_plan::{self, Request};

use super::compute::ComputedCell;
use crate::error::Result;

/// Bytes in memory for shared operands.
pub(super) const SHARED_BYTES: u64 = 32 << 20;

/// The shared operands of the cells of a read, by leaf of [`Computations::index`].
pub(super) struct SharedOperands(HashMap<u32, SharedOperand>);

struct SharedOperand {
    /// The elements that the cells need, and the bytes of each.
    region: Region,
    itemsize: u64,
    /// The elements of all reads of the cells.
    wanted: u64,
    /// The number of the last cell that needs it.
    last: usize,
    is_read: bool,
    content: Option<HostSource>,
}

impl SharedOperands {
    /// Finds the operands of which the cells read some elements more than once.
    pub(super) fn of(computations: &Computations, cells: &[ComputedCell]) -> Result<Self> {
        let mut found: HashMap<u32, SharedOperand> = HashMap::new();
        for (number, cell) in cells.iter().enumerate() {
            for read in cell.assembly(computations)?.all_reads() {
                match found.entry(read.leaf) {
                    Entry::Occupied(mut entry) => entry.get_mut().add(&read.region, number),
                    Entry::Vacant(entry) => {
                        entry.insert(SharedOperand::new(computations, read, number));
                    }
                }
            }
        }
        found.retain(|&leaf, operand| {
            // A leaf with computed parts does not have all elements of the region.
            operand.region.volume().is_some_and(|elements| elements < operand.wanted)
                && operand.bytes() <= SHARED_BYTES
                && read_plan::copies(&computations.index, &[operand.request(leaf, 0)]).is_ok()
        });
        Ok(Self(found))
    }

    /// Frees the operands that no cell from that one on needs.
    pub(super) fn free(&mut self, first: usize) {
        self.0.retain(|_, operand| operand.last >= first);
    }

    /// Returns the read of a shared operand, and its bytes. `None` if it is read already, or if
    /// there is no space for it.
    pub(super) fn reserve(&mut self, leaf: u32, dst: u32) -> Option<(Request, usize)> {
        let others = self.0.values().filter(|one| one.is_read).map(SharedOperand::bytes).sum::<u64>();
        let operand = self.0.get_mut(&leaf).filter(|operand| !operand.is_read)?;
        operand.is_read = others + operand.bytes() <= SHARED_BYTES;
        operand.is_read.then(|| (operand.request(leaf, dst), operand.bytes() as usize))
    }

    /// Keeps the bytes of a shared operand.
    pub(super) fn keep(&mut self, leaf: u32, bytes: Vec<u8>) -> Result<()> {
        if let Some(operand) = self.0.get_mut(&leaf) {
            let (shape, itemsize) = (&operand.region.extent, operand.itemsize);
            let Place { strides, .. } = Place::row_major(shape, itemsize);
            operand.content = Some(HostSource::owned(bytes, 0, itemsize as usize, shape, &strides)?);
        }
        Ok(())
    }

    /// Fills a target with the bytes of a shared operand. False if its reads are to be made.
    pub(super) fn copy(&self, reads: &[Request], target: &mut [u8]) -> Result<bool> {
        let [Request { leaf, region, .. }] = reads else { return Ok(false) };
        let Some((operand, content)) = self.0.get(leaf).and_then(|one| Some((one, one.content.as_ref()?)))
        else {
            return Ok(false);
        };
        if region.volume().and_then(|n| n.checked_mul(operand.itemsize)) != Some(target.len() as u64) {
            return Ok(false);
        }
        let mut region = region.clone();
        for (at, first) in region.offset.iter_mut().zip(&operand.region.offset) {
            *at -= first;
        }
        content.copy(&region, 0, target)?;
        Ok(true)
    }
}

impl SharedOperand {
    fn new(computations: &Computations, read: Request, number: usize) -> Self {
        let itemsize = match computations.index.resolve(read.leaf) {
            Some((_, LeafRecord::Tensor(tensor))) => tensor.dtype.size() as u64,
            _ => 0,
        };
        let wanted = read.region.volume().unwrap_or(u64::MAX);
        Self { region: read.region, itemsize, wanted, last: number, is_read: false, content: None }
    }

    fn bytes(&self) -> u64 {
        self.region.volume().unwrap_or(u64::MAX).saturating_mul(self.itemsize)
    }

    fn request(&self, leaf: u32, dst: u32) -> Request {
        Request::row_major(leaf, self.region.clone(), self.itemsize, dst)
    }

    /// Adds the elements that one more read needs.
    fn add(&mut self, region: &Region, number: usize) {
        self.wanted = self.wanted.saturating_add(region.volume().unwrap_or(u64::MAX));
        self.last = number;
        let own = &mut self.region;
        for axis in 0..own.ndim() {
            let end = (own.offset[axis] + own.extent[axis]).max(region.offset[axis] + region.extent[axis]);
            own.offset[axis] = own.offset[axis].min(region.offset[axis]);
            own.extent[axis] = end - own.offset[axis];
        }
    }
}
