//! Leaves in the memory of a device. The device copies them while the caller computes.

use std::sync::Arc;

use super::{CaptureTiming, Fill, StateProvider};
use crate::Result;
use crate::region::Region;
use crate::staging::{Filling, Slot};
use crate::sys::{Device, DeviceSource};

/// A leaf on a device.
///
/// Its copies wait for the work that was on the caller's stream at the last
/// [`Device::send_after`]. The creator of a provider calls that.
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

    fn devices(&self) -> &[Arc<Device>] {
        std::slice::from_ref(self.source.device())
    }

    fn check(&self, local: &Region, itemsize: usize) -> Result<(), String> {
        super::check(local, itemsize, self.source.shape(), self.source.itemsize())
    }
}
