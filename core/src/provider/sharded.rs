//! A leaf in several arrays, each a box of it: one process's shards of an array on several devices.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::{Fill, Haste, StateProvider, Ticket};
use crate::region::Region;
use crate::staging::{CopyQueue, Fence, Filling, Slot};
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
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> Result<Ticket> {
        let mut fences = Vec::new();
        for fill in fills {
            let captured = match self.shard(fill.local) {
                Some((provider, own)) => provider.capture(&[Fill { local: &own, ..*fill }], slot),
                None => Err(Error::internal(
                    "a shard that holds the region",
                    format!("none that holds {:?}", fill.local),
                )),
            };
            match captured {
                Ok(Ticket::Done) => {}
                Ok(Ticket::Event(fence)) => fences.push(fence),
                Err(error) if fences.is_empty() => return Err(error),
                Err(error) => {
                    // What other shards were asked for may still be on its way into the slot: told
                    // when it has arrived.
                    fences.push(Box::new(Failed(Mutex::new(Some(error)))));
                    break;
                }
            }
        }
        Ok(if fences.is_empty() { Ticket::Done } else { Ticket::Event(Box::new(All(fences))) })
    }

    fn peek(&self, local: &Region, from: u64, into: &mut [u8]) -> Result<bool> {
        match self.shard(local) {
            Some((provider, own)) => provider.peek(&own, from, into),
            None => Ok(false),
        }
    }

    fn haste(&self) -> Haste {
        self.shards.iter().map(|(_, provider)| provider.haste()).max().unwrap_or(Haste::Later)
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

/// Several fences as one.
struct All(Vec<Box<dyn Fence>>);

impl Fence for All {
    fn host_wait(&self, deadline: Instant) -> Result<()> {
        let mut failed = Ok(());
        for fence in &self.0 {
            match fence.host_wait(deadline) {
                // Nothing may be on its way any more when another error is told.
                Err(timeout @ Error::Timeout { .. }) => return Err(timeout),
                Err(error) if failed.is_ok() => failed = Err(error),
                _ => {}
            }
        }
        failed
    }
}

/// A copy that was never begun.
struct Failed(Mutex<Option<Error>>);

impl Fence for Failed {
    fn host_wait(&self, _deadline: Instant) -> Result<()> {
        let error = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        Err(error.unwrap_or_else(|| Error::Cancelled("the copy of another shard has failed".into())))
    }
}
