//! A device array that somebody else owns, as a source of bytes.

use std::sync::Arc;

use super::arriving::Owner;
use super::batch::Queued;
use super::device::Device;
use super::{Direction, Rows, start};
use crate::region::Region;
use crate::sys::Buffer;
use crate::sys::gather::Dim;
use crate::sys::strided::{StridedMemory, StridedRun};
use crate::{Error, Result};

/// An n-dimensional array on a device, of any strides. [`crate::sys::HostSource`] is its
/// counterpart on the host.
pub struct DeviceSource {
    device: Arc<Device>,
    first: u64,
    memory: StridedMemory,
    owner: Owner,
}

impl DeviceSource {
    /// Wraps an array of `shape` with `strides` in bytes, whose element at index zero is at
    /// `first`. [`Error::Misuse`] if shape and strides do not make an addressable array.
    ///
    /// # Safety
    /// While `owner` lives, every element that `shape` and `strides` can name is memory of that
    /// device. The order of streams prevents concurrent writes. An array that changes during a copy
    /// yields mixed bytes, but no undefined behaviour.
    pub unsafe fn new(
        device: Arc<Device>,
        first: u64,
        itemsize: usize,
        shape: &[u64],
        strides: &[i64],
        owner: Owner,
    ) -> Result<Self> {
        let memory = StridedMemory::new(first, itemsize, shape, strides)?;
        Ok(Self { device, first, memory, owner })
    }

    /// Returns the device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Returns the extent of each dimension, in elements.
    pub fn shape(&self) -> &[u64] {
        self.memory.shape()
    }

    /// Returns the bytes per element.
    pub fn itemsize(&self) -> usize {
        self.memory.itemsize()
    }

    /// Copies the bytes `from .. from + len` of the row-major bytes of `region` to byte `at` of a
    /// buffer. The copy starts when the buffer is closed, at the latest, and follows the earlier
    /// work of the device's stream. Both ends are between elements. After an error some copies may
    /// be running; the buffer tracks them.
    pub fn start(&self, region: &Region, from: u64, len: u64, into: &mut Buffer, at: u64) -> Result<()> {
        let room = at.checked_add(len).and_then(|end| usize::try_from(end).ok());
        let Some(end) = room.filter(|&end| end <= into.size()) else {
            return Err(Error::internal(
                format!("bytes of a buffer of {}", into.size()),
                format!("{len} bytes from byte {at}"),
            ));
        };
        if len == 0 {
            return Ok(());
        }
        into.mapping().register_with(&self.device);
        let stream = self.device.to_host()?;
        let entered = self.device.enter()?;
        let at_first = at as usize;
        let base = into.as_ptr().wrapping_add(at_first);
        let arriving = into.arriving();
        arriving.expect(&self.device, end, &self.owner);
        let mut outcome = Ok(());
        let itemsize = self.itemsize();
        self.memory.runs(region, from, len, |run| {
            if outcome.is_err() {
                return;
            }
            outcome = match run {
                StridedRun::Contiguous { offset, at, len } => {
                    let from = self.first.wrapping_add_signed(offset as i64);
                    arriving.queue(&self.device, Queued { at: at_first + at, from, len });
                    Ok(())
                }
                StridedRun::Strided { offset, at, dims, count } => {
                    let first = self.first.wrapping_add_signed(offset as i64);
                    each_rows(base.wrapping_add(at), first, itemsize, dims, count, &mut |rows| {
                        // SAFETY: rows of a box of elements of the array. The owner keeps the
                        // array, and the buffer keeps the owner until the copies have ended. The
                        // buffer has as many bytes from `at` on, and hides them until then.
                        unsafe { start(&entered, stream, Direction::FromDevice, rows) }
                    })
                }
            };
        })?;
        outcome
    }
}

/// Yields a box of elements as rows; `first` replaces the extent of `dims[0]`.
fn each_rows(
    host: *mut u8,
    device: u64,
    itemsize: usize,
    dims: &[Dim],
    first: u64,
    copy: &mut dyn FnMut(Rows) -> Result<()>,
) -> Result<()> {
    let extent = |d: usize| if d == 0 { first } else { dims.get(d).map_or(1, |dim| dim.extent) };
    let mut outer = dims.len();
    let mut width = itemsize;
    // The innermost dimension is a row where its elements touch each other.
    if let Some(inner) = dims.last()
        && inner.stride == itemsize as i64
    {
        outer -= 1;
        width = itemsize * extent(outer) as usize;
    }
    let (height, device_pitch) = match outer.checked_sub(1).and_then(|d| Some((d, dims.get(d)?))) {
        Some((d, dim)) => {
            outer = d;
            (extent(d), dim.stride)
        }
        None => (1, 0),
    };
    // Iterate over the outer dimensions.
    let mut index = vec![0_u64; outer];
    let mut host = host;
    loop {
        let place = index
            .iter()
            .zip(dims)
            .fold(0_i64, |place, (&i, dim)| place.wrapping_add(i.cast_signed().wrapping_mul(dim.stride)));
        let device = device.wrapping_add_signed(place);
        copy(Rows { host, device, width, height, host_pitch: width, device_pitch })?;
        host = host.wrapping_add(width * height as usize);
        let Some(d) = (0..outer).rev().find(|&d| index[d] + 1 < extent(d)) else { return Ok(()) };
        index[d] += 1;
        index[d + 1..].fill(0);
    }
}
