//! A leaf in several arrays, each a box of it: one process's shards of an array on several devices.

use std::sync::Arc;

use super::{CaptureTiming, Fill, StateProvider};
use crate::region::Region;
use crate::staging::{CopyQueue, Filling, Slot};
use crate::{Error, Result};

/// Providers of boxes of one array. No fill may reach over the border of one.
pub struct ShardedProvider {
    shards: Vec<(Region, Arc<dyn StateProvider>)>,
}

impl ShardedProvider {
    /// A provider of the array that these boxes are of.
    pub fn new(shards: Vec<(Region, Arc<dyn StateProvider>)>) -> Self {
        Self { shards }
    }

    /// The shard that holds a region, and the region in the shard's own array.
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

    fn timing(&self) -> CaptureTiming {
        self.shards.iter().map(|(_, provider)| provider.timing()).max().unwrap_or(CaptureTiming::Deferred)
    }

    fn queues(&self, see: &mut dyn FnMut(Arc<dyn CopyQueue>)) {
        self.shards.iter().for_each(|(_, provider)| provider.queues(see));
    }

    fn check(&self, local: &Region, itemsize: usize) -> Result<(), String> {
        match self.shard(local) {
            Some((provider, own)) => provider.check(&own, itemsize),
            None => Err(format!("no shard holds region {:?} + {:?}", local.offset, local.extent)),
        }
    }
}
