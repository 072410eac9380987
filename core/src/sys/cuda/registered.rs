//! Host memory that is registered with the driver. Copies to and from it are asynchronous and run
//! at full speed. (The calling thread copies other memory through the driver's own buffers.)

use std::ptr::NonNull;
use std::sync::Arc;

use super::device::Device;
use crate::Result;

/// `CU_MEMHOSTREGISTER_PORTABLE`: for all devices. (Never write-combined: the host reads the bytes
/// for checksums and writes.)
const PORTABLE: u32 = 1;

/// Registered memory.
pub(in crate::sys) struct Registered {
    device: Arc<Device>,
    address: NonNull<u8>,
}

// SAFETY: the address is only passed back to the driver, which accepts it from any thread.
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

    /// Ends the registration. After an error the driver may still use the memory: it must stay
    /// mapped.
    pub(in crate::sys) fn end(self) -> Result<()> {
        let entered = self.device.enter()?;
        // SAFETY: the address was registered and is still mapped. No copy is running: a buffer with
        // a copy keeps its mapping.
        let code = unsafe { (entered.api.cuMemHostUnregister)(self.address.as_ptr().cast()) };
        self.device.check("cuMemHostUnregister", code)
    }
}
