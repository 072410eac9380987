//! State providers: what turns a leaf into bytes in a slot.
//!
//! Capture calls a provider with the parts of its leaf that one slot holds; the provider copies them, or starts a copy that a
//! [`Fence`] will report. Objects and headers are bytes that the plan holds itself and need no provider.

mod host;
mod sharded;

use crate::Result;
use crate::region::Region;
use crate::staging::{Fence, Filling, Slot};

pub use host::HostProvider;
pub use sharded::ShardedProvider;

/// A leaf's bytes, from wherever they are.
pub trait StateProvider: Send + Sync {
    /// Puts the fills into the slot. All fills are of this provider's leaf and of one slot. On an error nothing may still be on its way into the slot.
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> Result<Ticket>;

    /// Whether its bytes stay what they are for as long as the provider lives, so that they may be captured when the caller has gone on.
    fn is_lazy(&self) -> bool {
        false
    }

    /// Whether this provider can give that region of its array, in elements of that many bytes; asked once per chunk before a save starts, so
    /// that a mistake is found before anything is written. An answer is a sentence for the user.
    fn check(&self, local: &Region, itemsize: usize) -> Result<(), String> {
        let _ = (local, itemsize);
        Ok(())
    }
}

/// A part of a chunk that lies in one slot.
#[derive(Clone, Copy, Debug)]
pub struct Fill<'a> {
    /// The chunk's box in the provider's array.
    pub local: &'a Region,
    /// First byte of the part, in the chunk's row-major bytes. It falls between elements.
    pub from: u64,
    /// Bytes in the part; whole elements.
    pub len: u64,
    /// Where in the slot it goes, in bytes.
    pub at: u64,
}

/// What a provider answers.
pub enum Ticket {
    /// The bytes are in the slot.
    Done,
    /// They will be when the fence is passed; until then the slot is [`crate::staging::Pending`].
    Event(Box<dyn Fence>),
}
