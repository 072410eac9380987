//! Host memory that the driver knows: copies to and from it run by themselves, at full speed.
//! (Other memory is copied through the driver's own, by the thread that asks.)

use std::ptr::NonNull;
use std::sync::Arc;

use super::device::Device;
use crate::Result;

/// `CU_MEMHOSTREGISTER_PORTABLE`: for all devices. (Never write-combined: what is checksummed and
/// written to disk is read.)
const PORTABLE: u32 = 1;

/// A registration.
pub(in crate::sys) struct Registered {
    device: Arc<Device>,
    address: NonNull<u8>,
}

// SAFETY: an address that is only given back to the driver, from whatever thread.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl std::fmt::Debug for Registered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Registered with {:?}", self.device)
    }
}

impl Registered {
    /// Registers memory.
    ///
    /// # Safety
    /// The memory is mapped, and stays so until the registration has ended.
    pub(in crate::sys) unsafe fn new(device: &Arc<Device>, address: NonNull<u8>, len: usize) -> Result<Self> {
        let entered = device.enter()?;
        // SAFETY: as promised by the caller.
        let code = unsafe { (entered.api.cuMemHostRegister_v2)(address.as_ptr().cast(), len, PORTABLE) };
        device.check("cuMemHostRegister", code)?;
        Ok(Self { device: Arc::clone(device), address })
    }

    /// Ends it. On an error the driver may know the memory still: it must stay mapped.
    pub(in crate::sys) fn end(self) -> Result<()> {
        let entered = self.device.enter()?;
        // SAFETY: what was registered, still mapped, with no copy under way (a buffer with one
        // keeps its mapping).
        let code = unsafe { (entered.api.cuMemHostUnregister)(self.address.as_ptr().cast()) };
        self.device.check("cuMemHostUnregister", code)
    }
}
