//! A device array, as the destination of a restore.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::arriving::Owner;
use super::device::{Device, Event};
use super::{Direction, Rows, start};
use crate::sys::{CopyDim, Piece, Staged};
use crate::{Error, Result};

/// Poll interval for the end of a copy.
const POLL_INTERVAL: std::time::Duration = std::time::Duration::from_micros(50);

/// Bytes on a device that a restore fills.
pub struct DeviceMemory {
    device: Arc<Device>,
    address: u64,
    len: u64,
    owner: Owner,
}

impl std::fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes on {:?}", self.len, self.device)
    }
}

impl DeviceMemory {
    /// Wraps `len` bytes from `address` on.
    ///
    /// # Safety
    /// While `owner` lives, they are memory of that device, and any bytes are valid values there.
    pub unsafe fn new(device: Arc<Device>, address: u64, len: u64, owner: Owner) -> Self {
        Self { device, address, len, owner }
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True if it is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Starts to copy a piece to its place.
    pub fn copy_from(&self, piece: Piece) -> Result<DeviceCopies> {
        if !piece.is_inside(self.len) {
            return Err(Error::internal(
                format!("a piece inside its target of {} bytes", self.len),
                format!("one of {} rows that leaves it", piece.rows.extent),
            ));
        }
        piece.staged.mapping().register_with(&self.device);
        let stream = self.device.to_device()?;
        let Piece { staged, from, to, unit, mut rows, mut cols } = piece;
        let base = staged.as_ptr().cast_mut();
        // Keeps the piece until the copies have ended, also after an error.
        let mut sent = DeviceCopies {
            device: Arc::clone(&self.device),
            mark: None,
            passed: AtomicBool::new(false),
            kept: Some((staged, Arc::clone(&self.owner))),
        };
        let touch = |dim: &CopyDim| dim.extent == 1 || (dim.src == unit && dim.dst.cast_unsigned() == unit);
        if !touch(&cols) && touch(&rows) {
            std::mem::swap(&mut rows, &mut cols);
        }
        let entered = self.device.enter()?;
        let put = |from: u64, to: u64, width: u64, steps: CopyDim| {
            let rows = Rows {
                host: base.wrapping_add(from as usize),
                device: self.address.wrapping_add(to),
                width: width as usize,
                height: steps.extent,
                host_pitch: steps.src as usize,
                device_pitch: steps.dst,
            };
            // SAFETY: the check above proved that the piece is inside the target and the staged
            // bytes. Both are kept until the copies have ended.
            unsafe { start(&entered, stream, Direction::ToDevice, rows) }
        };
        if touch(&cols) {
            put(from, to, unit * cols.extent, rows)?;
        } else {
            for row in 0..rows.extent {
                let to = to.wrapping_add_signed(row.cast_signed().wrapping_mul(rows.dst));
                put(from + row * rows.src, to, unit, cols)?;
            }
        }
        sent.mark = Some(self.device.mark(stream)?);
        Ok(sent)
    }
}

/// Started copies to a device, and the memory that they use.
pub struct DeviceCopies {
    device: Arc<Device>,
    /// An event after the copies. `None` if not all could be started.
    mark: Option<Event>,
    /// True after the copies were seen to have ended.
    passed: AtomicBool,
    kept: Option<(Staged, Owner)>,
}

impl DeviceCopies {
    fn has_ended(&self) -> Result<bool> {
        match &self.mark {
            Some(mark) => mark.is_passed(),
            None => self.is_all_over(),
        }
    }

    /// True if no copy to the device is running.
    fn is_all_over(&self) -> Result<bool> {
        self.device.is_idle(self.device.to_device()?)
    }

    /// Waits until they have ended. [`Error::Timeout`] at the deadline; it may be asked again. Any
    /// other error says that they failed, and that none is running any more.
    pub fn wait(&self, deadline: Instant) -> Result<()> {
        let begun = Instant::now();
        while !self.has_ended()? {
            if Instant::now() >= deadline {
                return Err(Error::Timeout {
                    waited_for: format!("copies to {:?}", self.device),
                    seconds: begun.elapsed().as_secs_f64(),
                });
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        self.passed.store(true, Ordering::Release);
        Ok(())
    }
}

impl Drop for DeviceCopies {
    fn drop(&mut self) {
        if *self.passed.get_mut() {
            return;
        }
        // One error may concern the query alone. If the context answers nothing else either, its
        // work is over.
        let ended = self.has_ended().or_else(|_| self.is_all_over());
        if matches!(ended, Ok(false)) {
            // The device may still read the piece and write to the target.
            std::mem::forget(self.kept.take());
        }
    }
}
