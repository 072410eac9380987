//! Slots: windows of data files in staging memory, with one type per state.
//!
//! ```text
//! Free ─begin▶ Filling ─finish▶ Full ─launch▶ Flushing (+ the buffer, with the queue) ─land▶ Written ─drop▶ back in the pool
//!                         └───▶ Pending ─wait▶ Full            (copies that a device still makes)
//! ```
//!
//! Only a `Filling` slot is writable. Only a `Full` slot can be launched, once. Memory that a queue
//! has is not accessible. A dropped slot returns to the pool, with two exceptions: a slot that a
//! device may still write to returns when its copies have ended. A slot that a queue never returns
//! is lost, and the pool counts it.
//!
//! Misuse does not compile. A free slot is not writable:
//!
//! ```compile_fail,E0599
//! # let pool = stepwell_core::staging::StagingPool::new(1, 4096)?;
//! let mut slot = pool.try_acquire()?.unwrap();
//! slot.part(0, 1)?; // it was not begun
//! # Ok::<(), stepwell_core::Error>(())
//! ```
//!
//! Neither is a finished one, because `finish` takes the slot:
//!
//! ```compile_fail,E0382
//! # let pool = stepwell_core::staging::StagingPool::new(1, 4096)?;
//! let mut slot = pool.try_acquire()?.unwrap().begin();
//! let filled = slot.finish();
//! slot.part(0, 1)?;
//! # Ok::<(), stepwell_core::Error>(())
//! ```
//!
//! A slot that is not full cannot be launched:
//!
//! ```compile_fail,E0599
//! # let pool = stepwell_core::staging::StagingPool::new(1, 4096)?;
//! let slot = pool.try_acquire()?.unwrap().begin();
//! slot.launch()?; // not finished
//! # Ok::<(), stepwell_core::Error>(())
//! ```
//!
//! The full life of a slot:
//!
//! ```
//! # let pool = stepwell_core::staging::StagingPool::new(1, 4096)?;
//! use stepwell_core::staging::Filled;
//! let mut slot = pool.try_acquire()?.unwrap().begin();
//! slot.part(0, 3)?.copy_from_slice(b"abc");
//! let Filled::Full(slot) = slot.finish() else { panic!("no device copies into it") };
//! let (buffer, slot) = slot.launch()?;
//! // … a queue writes `buffer` and returns it …
//! let slot = slot.land(buffer)?;
//! assert_eq!(&slot.bytes()[..3], b"abc");
//! # Ok::<(), stepwell_core::Error>(())
//! ```

use std::time::Instant;

use super::lease::Lease;
use crate::region::Region;
use crate::sys::{Buffer, DeviceSource};
use crate::{Error, Result};

/// One slot. `S` is its state: [`Free`], [`Filling`], [`Pending`], [`Full`], [`Flushing`] or
/// [`Written`].
pub struct Slot<S> {
    lease: Lease,
    state: S,
}

/// The slot is empty.
pub struct Free(());
/// One thread fills the slot.
pub struct Filling(());
/// The slot is filled, except for copies that a device still makes.
pub struct Pending(());
/// The slot has all its bytes.
pub struct Full(());
/// A queue has the slot's memory.
pub struct Flushing {
    address: usize,
}
/// The bytes are written to the file, but not durable. They stay readable for the checksum.
pub struct Written(());

/// A slot after its filling.
pub enum Filled {
    /// It has all its bytes.
    Full(Slot<Full>),
    /// A device still writes to it.
    Pending(Slot<Pending>),
}

impl Slot<Free> {
    pub(super) fn lend(lease: Lease) -> Self {
        Self { lease, state: Free(()) }
    }

    /// Starts the filling.
    pub fn begin(self) -> Slot<Filling> {
        Slot { lease: self.lease, state: Filling(()) }
    }
}

impl Slot<Filling> {
    /// Returns bytes `at .. at + len`, for writing.
    pub fn part(&mut self, at: u64, len: u64) -> Result<&mut [u8]> {
        let size = self.lease.size();
        let place = usize::try_from(at).ok().zip(usize::try_from(len).ok());
        place.and_then(|(at, len)| self.lease.buffer.as_mut()?.part_mut(at, len)).ok_or_else(|| {
            Error::internal(format!("free bytes of a slot of {size}"), format!("{len} bytes from byte {at}"))
        })
    }

    /// Starts a copy of bytes `from .. from + len` of the row-major bytes of `region`, a region of
    /// a device array, to byte `at`. Earlier bytes of the slot are no longer writable.
    pub fn receive(
        &mut self,
        source: &DeviceSource,
        region: &Region,
        from: u64,
        len: u64,
        at: u64,
    ) -> Result<()> {
        let buffer = self.lease.buffer.as_mut();
        let buffer = buffer.ok_or_else(|| Error::internal("memory in the slot", "none"))?;
        source.start(region, from, len, buffer, at)
    }

    /// Ends the filling, and starts the requested copies of devices.
    pub fn finish(mut self) -> Filled {
        if let Some(buffer) = &mut self.lease.buffer {
            buffer.close();
        }
        if self.lease.is_arriving() {
            Filled::Pending(Slot { lease: self.lease, state: Pending(()) })
        } else {
            Filled::Full(Slot { lease: self.lease, state: Full(()) })
        }
    }
}

impl Slot<Pending> {
    /// Waits for the copies of devices. After an error, the memory returns to the pool once no
    /// device writes to it.
    pub fn wait(mut self, deadline: Instant) -> Result<Slot<Full>> {
        if let Some(buffer) = &mut self.lease.buffer {
            buffer.wait_arrived(deadline)?;
        }
        Ok(Slot { lease: self.lease, state: Full(()) })
    }
}

impl<S> Slot<S> {
    /// Returns its size in bytes.
    pub fn len(&self) -> usize {
        self.lease.size()
    }

    /// True if a queue has its memory.
    pub fn is_empty(&self) -> bool {
        self.lease.buffer.is_none()
    }
}

impl Slot<Full> {
    /// The filled bytes.
    pub fn bytes(&self) -> &[u8] {
        self.lease.bytes()
    }

    /// Takes the memory out for a queue. [`Slot::land`] puts it back.
    pub fn launch(mut self) -> Result<(Buffer, Slot<Flushing>)> {
        let buffer = self.lease.buffer.take();
        let buffer = buffer.ok_or_else(|| Error::internal("memory in the slot", "none"))?;
        let address = buffer.as_ptr() as usize;
        Ok((buffer, Slot { lease: self.lease, state: Flushing { address } }))
    }
}

impl Slot<Flushing> {
    /// Puts back the memory that [`Slot::launch`] took out.
    pub fn land(mut self, buffer: Buffer) -> Result<Slot<Written>> {
        if buffer.as_ptr() as usize != self.state.address {
            return Err(Error::internal("the memory of this slot back from the queue", "that of another"));
        }
        self.lease.buffer = Some(buffer);
        Ok(Slot { lease: self.lease, state: Written(()) })
    }
}

impl Slot<Written> {
    /// The written bytes.
    pub fn bytes(&self) -> &[u8] {
        self.lease.bytes()
    }
}
