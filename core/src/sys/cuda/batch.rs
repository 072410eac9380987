//! Starts many copies to the host in one call (`cuMemcpyBatchAsync`, from CUDA 12.8 on). So a state
//! of many small leaves costs one call per slot instead of one per leaf.

use cudarc::driver::sys;

use super::api::{Address, SUCCESS};
use super::device::Device;
use super::{Direction, Rows, start};
use crate::Result;

/// A requested copy that has not started.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queued {
    /// Offset in the buffer.
    pub(super) at: usize,
    pub(super) from: Address,
    pub(super) len: usize,
}

/// Starts copies into a buffer that begins at `base`, in any order. `known` says that the driver
/// has registered that memory.
///
/// # Safety
/// As for [`start`], for each copy.
pub(super) unsafe fn start_all(device: &Device, base: *mut u8, known: bool, copies: &[Queued]) -> Result<()> {
    if copies.is_empty() {
        return Ok(());
    }
    let entered = device.enter()?;
    let stream = device.to_host()?;
    // For unregistered memory, a batch may have more requirements than single copies.
    let call = entered.api.cuMemcpyBatchAsync.filter(|_| known && copies.len() > 1);
    if let Some(call) = call {
        let mut to: Vec<Address> = copies.iter().map(|copy| base.wrapping_add(copy.at) as Address).collect();
        let mut from: Vec<Address> = copies.iter().map(|copy| copy.from).collect();
        let mut lens: Vec<usize> = copies.iter().map(|copy| copy.len).collect();
        // SAFETY: a structure of numbers for which zero is valid: no hints, no flags.
        let mut how: sys::CUmemcpyAttributes = unsafe { std::mem::zeroed() };
        // The copy sees the stream's earlier work, like any other copy there.
        how.srcAccessOrder = sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        let (mut since, mut failed) = (0_usize, usize::MAX);
        // SAFETY: three lists of that length, and one attribute for all copies. They outlive the
        // call. The copies are as the caller promises.
        let code = unsafe {
            call(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                lens.as_mut_ptr(),
                copies.len(),
                &raw mut how,
                &raw mut since,
                1,
                &raw mut failed,
                stream.0,
            )
        };
        if code == SUCCESS {
            return Ok(());
        }
        // Copies that the batch has already started are repeated, to the same place. A lasting
        // error shows up in the single copies.
        tracing::debug!(?device, code, "copies are started one by one: cuMemcpyBatchAsync does not");
    }
    copies.iter().try_for_each(|&Queued { at, from, len }| {
        let host = base.wrapping_add(at);
        let rows = Rows { host, device: from, width: len, height: 1, host_pitch: len, device_pitch: 0 };
        // SAFETY: as the caller promises.
        unsafe { start(&entered, stream, Direction::FromDevice, rows) }
    })
}
