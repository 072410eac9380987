//! A leaf in several arrays, for example one process's shards of an array on several devices.

use std::sync::Arc;

use super::{CaptureTiming, Fill, StateProvider};
use crate::region::Region;
use crate::staging::{Filling, Slot};
use crate::sys::Device;
use crate::{Error, Result};

/// Providers of the shards of one array. Every fill lies within one shard.
pub struct ShardedProvider {
    /// Each shard's region of the array, and its bytes.
    shards: Vec<(Region, Arc<dyn StateProvider>)>,
    devices: Vec<Arc<Device>>,
}

impl ShardedProvider {
    /// Returns a provider of the array that has these shards, each with its region.
    pub fn new(shards: Vec<(Region, Arc<dyn StateProvider>)>) -> Self {
        let mut devices: Vec<Arc<Device>> = Vec::new();
        for device in shards.iter().flat_map(|(_, provider)| provider.devices()) {
            if devices.iter().all(|known| known.ordinal() != device.ordinal()) {
                devices.push(Arc::clone(device));
            }
        }
        Self { shards, devices }
    }

    /// Returns the shard that contains a region, and the region within that shard.
    fn shard(&self, region: &Region) -> Option<(&dyn StateProvider, Region)> {
        self.shards.iter().find_map(|(shard, provider)| {
            let same = region.ndim() == shard.ndim();
            let mut own = region.clone();
            for (at, &first) in own.offset.iter_mut().zip(&shard.offset) {
                *at = at.checked_sub(first)?;
            }
            (same && own.fits(&shard.extent)).then_some((&**provider, own))
        })
    }
}

impl StateProvider for ShardedProvider {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> Result<()> {
        for fill in fills {
            let (provider, own) = self.shard(fill.local).ok_or_else(|| {
                Error::internal("a shard that holds the region", format!("none that holds {:?}", fill.local))
            })?;
            provider.capture(&[Fill { local: &own, ..*fill }], slot)?;
        }
        Ok(())
    }

    fn peek(&self, local: &Region, from: u64, into: &mut [u8]) -> Result<bool> {
        match self.shard(local) {
            Some((provider, own)) => provider.peek(&own, from, into),
            None => Ok(false),
        }
    }

    fn has_gaps_in_rows(&self) -> bool {
        self.shards.iter().any(|(_, provider)| provider.has_gaps_in_rows())
    }

    fn timing(&self) -> CaptureTiming {
        self.shards.iter().map(|(_, provider)| provider.timing()).max().unwrap_or(CaptureTiming::Deferred)
    }

    fn devices(&self) -> &[Arc<Device>] {
        &self.devices
    }

    fn check(&self, local: &Region, itemsize: usize) -> Result<(), String> {
        match self.shard(local) {
            Some((provider, own)) => provider.check(&own, itemsize),
            None => Err(format!("no shard holds region {:?} + {:?}", local.offset, local.extent)),
        }
    }
}
