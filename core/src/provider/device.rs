//! Leaves in the memory of a device: copied by its own engine, while its caller computes.

use std::sync::Arc;

use super::{CaptureTiming, Fill, StateProvider};
use crate::Result;
use crate::region::Region;
use crate::staging::{CopyQueue, Filling, Slot};
use crate::sys::DeviceSource;

/// A leaf on a device.
///
/// Its copies wait for the work that was on the caller's stream at the last [`CopyQueue::follow`].
/// The creator of a provider calls that.
pub struct DeviceProvider {
    source: DeviceSource,
    timing: CaptureTiming,
}

impl DeviceProvider {
    /// A provider of that array.
    pub fn new(source: DeviceSource, timing: CaptureTiming) -> Self {
        Self { source, timing }
    }
}

impl StateProvider for DeviceProvider {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> Result<()> {
        for fill in fills {
            slot.receive(&self.source, fill.local, fill.from, fill.len, fill.at)?;
        }
        Ok(())
    }

    fn timing(&self) -> CaptureTiming {
        self.timing
    }

    fn queues(&self, see: &mut dyn FnMut(Arc<dyn CopyQueue>)) {
        see(Arc::clone(self.source.device()) as Arc<dyn CopyQueue>);
    }

    fn check(&self, local: &Region, itemsize: usize) -> Result<(), String> {
        super::check(local, itemsize, self.source.shape(), self.source.itemsize())
    }
}
