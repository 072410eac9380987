//! Destinations of verified bytes: host memory, or a device that copies asynchronously.
//!
//! A [`DeviceTarget`] receives a [`Piece`] and returns a [`Fence`]. It is the counterpart of the
//! save side's state providers. A piece holds its read buffer: the memory is neither reused nor
//! freed until the last clone is dropped, even if the restore fails. A target keeps the piece until
//! its copies are complete. A copy that never ends costs only its buffer.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::deadline::deadline_after;
use crate::sys::{DeviceCopies, DeviceMemory, Elsewhere, HostTarget, Piece};
use crate::{Error, Result};

/// The destination of one tensor or of a part of one. It is not `Clone`: one restore takes it.
#[derive(Debug)]
pub enum Destination<'a> {
    /// Host memory. The restore writes to it directly.
    Host(HostTarget<'a>),
    /// A device that takes the bytes from read buffers.
    Device(Arc<dyn DeviceTarget>),
}

impl<'a> From<HostTarget<'a>> for Destination<'a> {
    fn from(target: HostTarget<'a>) -> Self {
        Self::Host(target)
    }
}

impl From<Arc<dyn DeviceTarget>> for Destination<'_> {
    fn from(target: Arc<dyn DeviceTarget>) -> Self {
        Self::Device(target)
    }
}

/// A destination without an address in this process.
pub trait DeviceTarget: Send + Sync + fmt::Debug {
    /// Returns the length in bytes.
    fn bytes(&self) -> u64;

    /// Starts to copy a piece to its place. The restore returns once every fence has passed. Called
    /// from several threads, in any order, with every byte once. An error here or from a fence ends
    /// the restore.
    fn put(&self, piece: Piece) -> Result<Box<dyn Fence>>;
}

/// A point in a queue of copies.
pub trait Fence: Send {
    /// Waits on this thread. [`crate::Error::Timeout`] at the deadline; it may be asked again. Any
    /// other error says that the copies failed, and that nothing is on its way any more.
    fn host_wait(&self, deadline: Instant) -> Result<()>;
}

impl DeviceTarget for DeviceMemory {
    fn bytes(&self) -> u64 {
        self.len()
    }

    fn put(&self, piece: Piece) -> Result<Box<dyn Fence>> {
        Ok(Box::new(self.copy_from(piece)?))
    }
}

impl Fence for DeviceCopies {
    fn host_wait(&self, deadline: Instant) -> Result<()> {
        self.wait(deadline)
    }
}

/// Started copies to devices that have not been seen to end.
pub(crate) struct Started {
    fences: Vec<Box<dyn Fence>>,
    stall_timeout: Duration,
}

impl Started {
    pub(crate) fn new(stall_timeout: Duration) -> Self {
        Self { fences: Vec::new(), stall_timeout }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.fences.is_empty()
    }

    /// Waits until all copies have ended, even after an error, and returns the first error. The
    /// deadline limits lack of progress: it restarts whenever a copy ends.
    pub(crate) fn wait(&mut self) -> Result<()> {
        let mut outcome = Ok(());
        for fence in self.fences.drain(..) {
            // After one timeout, the other copies are only polled.
            let stuck = matches!(outcome, Err(Error::Timeout { .. }));
            let timeout = if stuck { Duration::ZERO } else { self.stall_timeout };
            let passed = fence.host_wait(deadline_after(timeout));
            outcome = outcome.and(passed);
        }
        outcome
    }
}

/// The device targets of a restore, by the numbers of its destinations.
pub(super) type Devices = Vec<Option<Arc<dyn DeviceTarget>>>;

/// Sends the pieces of one cell to their devices.
pub(super) struct ToDevices<'a> {
    pub(super) devices: &'a Devices,
    pub(super) started: &'a mut Started,
}

impl Elsewhere for ToDevices<'_> {
    fn put(&mut self, dst: u32, piece: Piece) -> Result<()> {
        let device = self.devices.get(dst as usize).and_then(Option::as_ref).ok_or_else(|| {
            Error::internal("a device for each target without an address", format!("none for target {dst}"))
        })?;
        self.started.fences.push(device.put(piece)?);
        Ok(())
    }

    fn settle(&mut self) -> Result<()> {
        self.started.wait()
    }
}
