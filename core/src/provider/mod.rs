//! State providers copy the bytes of a leaf into slots.
//!
//! Capture calls a provider with the parts of its leaf that one slot holds. The provider copies
//! them, or starts copies on a device ([`Slot::receive`]). Objects and headers need no provider:
//! the plan holds their bytes.

mod cast;
mod device;
mod host;
mod sharded;

use std::sync::Arc;

use crate::Result;
use crate::region::Region;
use crate::staging::{Filling, Slot};
use crate::sys::Device;

pub use cast::{CastProvider, can_cast, cast};
pub use device::DeviceProvider;
pub use host::HostProvider;
pub use sharded::ShardedProvider;

/// The source of a leaf's bytes.
pub trait StateProvider: Send + Sync {
    /// Copies the fills into the slot, or starts copies from a device ([`Slot::receive`]), which
    /// the slot waits for. All fills belong to this provider's leaf and to one slot.
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> Result<()>;

    /// Copies row-major bytes of a region, from byte `from` on, for comparisons between ranks.
    /// Returns false if the bytes are not in host memory.
    fn peek(&self, local: &Region, from: u64, into: &mut [u8]) -> Result<bool> {
        let _ = (local, from, into);
        Ok(false)
    }

    /// Returns true if neighbours in a row are apart in host memory. Then several rows are read
    /// faster together.
    fn has_gaps_in_rows(&self) -> bool {
        false
    }

    /// Returns how much of its bytes is captured before the caller continues.
    fn timing(&self) -> CaptureTiming {
        CaptureTiming::Copied
    }

    /// `Some`: it reads whole rows, at most so many bytes together, for all chunks that have a part
    /// of each. A plan then cuts the leaf into slabs of whole rows first, and has the chunks of a
    /// slab captured one after the other.
    fn slab_bytes(&self) -> Option<u64> {
        None
    }

    /// Reads the bytes of a chunk that is captured soon. Returns false if there is nothing to read.
    fn read_ahead(&self, local: &Region) -> bool {
        let _ = local;
        false
    }

    /// Returns the devices that its bytes come from, each once.
    fn devices(&self) -> &[Arc<Device>] {
        &[]
    }

    /// Checks that its array contains the region, with elements of `itemsize` bytes. Called once
    /// per chunk before anything is written. The error is a sentence for the user.
    fn check(&self, local: &Region, itemsize: usize) -> Result<(), String> {
        let _ = (local, itemsize);
        Ok(())
    }
}

/// How much of a leaf is captured before `save` returns, in the order of urgency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CaptureTiming {
    /// Nothing. Its bytes stay unchanged while the provider lives, or until the caller waits.
    Deferred,
    /// Its copies are enqueued. Later work on the caller's stream waits for them.
    Enqueued,
    /// Its bytes are in slots.
    Copied,
}

/// The part of a chunk in one slot.
#[derive(Clone, Copy, Debug)]
pub struct Fill<'a> {
    /// The chunk's box in the provider's array.
    pub local: &'a Region,
    /// First byte of the part, in the chunk's row-major bytes. It is a multiple of the item size.
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
