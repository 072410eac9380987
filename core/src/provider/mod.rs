//! State providers: what turns a leaf into bytes in a slot.
//!
//! Capture calls a provider with the parts of its leaf that one slot holds; the provider copies
//! them, or has a device copy them ([`Slot::receive`]). Objects and headers are bytes that the plan
//! holds itself and need no provider.

mod cast;
mod device;
mod host;
mod sharded;

use std::sync::Arc;

use crate::Result;
use crate::region::Region;
use crate::staging::{CopyQueue, Filling, Slot};

pub use cast::{CastProvider, can_cast, cast};
pub use device::DeviceProvider;
pub use host::HostProvider;
pub use sharded::ShardedProvider;

/// A leaf's bytes, from wherever they are.
pub trait StateProvider: Send + Sync {
    /// Copies the fills into the slot, or starts copies of a device ([`Slot::receive`]), which the
    /// slot waits for. All fills are of this provider's leaf and of one slot.
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> Result<()>;

    /// Copies some of the row-major bytes of a region, from `from` on, here and now: for a look at
    /// values that should be the same elsewhere. `false`: it cannot (they are not in host memory).
    fn peek(&self, local: &Region, from: u64, into: &mut [u8]) -> Result<bool> {
        let _ = (local, from, into);
        Ok(false)
    }

    /// Returns how much of its bytes is captured before the caller continues.
    fn timing(&self) -> CaptureTiming {
        CaptureTiming::Copied
    }

    /// Gives the queues of the devices that its bytes come from.
    fn queues(&self, see: &mut dyn FnMut(Arc<dyn CopyQueue>)) {
        let _ = see;
    }

    /// Checks that this provider has that region in its array, in elements of that many bytes.
    /// Called once per chunk before anything is written. The error is a sentence for the user.
    fn check(&self, local: &Region, itemsize: usize) -> Result<(), String> {
        let _ = (local, itemsize);
        Ok(())
    }
}

/// How much of a leaf is captured before `save` returns, in the order of urgency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CaptureTiming {
    /// Nothing. Its bytes do not change while the provider lives, or until the caller asks.
    Deferred,
    /// Its copies are enqueued: the caller's work on the device can be made to wait for them.
    Enqueued,
    /// Its bytes are in slots.
    Copied,
}

/// The part of a chunk in one slot.
#[derive(Clone, Copy, Debug)]
pub struct Fill<'a> {
    /// The chunk's box in the provider's array.
    pub local: &'a Region,
    /// First byte of the part, in the chunk's row-major bytes. It falls between elements.
    pub from: u64,
    /// Bytes in the part; whole elements.
    pub len: u64,
    /// Its offset in the slot, in bytes.
    pub at: u64,
}

/// Checks that an array of that shape and element size has that region.
fn check(local: &Region, itemsize: usize, shape: &[u64], own_itemsize: usize) -> Result<(), String> {
    if own_itemsize != itemsize {
        return Err(format!("its elements have {own_itemsize} bytes in memory, {itemsize} in the tensor"));
    }
    if !local.fits(shape) {
        return Err(format!(
            "region {:?} + {:?} passes the end of an array of shape {shape:?}",
            local.offset, local.extent
        ));
    }
    Ok(())
}
