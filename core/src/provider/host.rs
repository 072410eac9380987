//! Leaves in host memory: numpy arrays, torch CPU tensors, any strided buffer.

use super::{CaptureTiming, Fill, StateProvider};
use crate::Result;
use crate::region::Region;
use crate::staging::{Filling, Slot};
use crate::sys::HostSource;

/// A leaf in host memory, with the owner of that memory.
pub struct HostProvider<O = ()> {
    source: HostSource,
    lazy: bool,
    _owner: O,
}

impl HostProvider {
    /// Returns a provider without an owner: the creator of `source` keeps the memory alive.
    pub fn new(source: HostSource) -> Self {
        Self { source, lazy: false, _owner: () }
    }
}

impl<O: Send + Sync> HostProvider<O> {
    /// Returns a provider that holds the owner of its memory until the capture is over. The owner
    /// may be dropped on any thread.
    pub fn with_owner(source: HostSource, owner: O) -> Self {
        Self { source, lazy: false, _owner: owner }
    }

    /// Sets whether the memory stays unchanged until the provider is dropped. If so, the capture
    /// is deferred.
    #[must_use]
    pub fn lazy(mut self, lazy: bool) -> Self {
        self.lazy = lazy;
        self
    }
}

impl<O: Send + Sync> StateProvider for HostProvider<O> {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> Result<()> {
        for fill in fills {
            self.source.copy(fill.local, fill.from, slot.part(fill.at, fill.len)?)?;
        }
        Ok(())
    }

    fn peek(&self, local: &Region, from: u64, into: &mut [u8]) -> Result<bool> {
        self.source.copy(local, from, into).map(|()| true)
    }

    fn has_gaps_in_rows(&self) -> bool {
        self.source.has_gaps_in_rows()
    }

    fn timing(&self) -> CaptureTiming {
        if self.lazy { CaptureTiming::Deferred } else { CaptureTiming::Copied }
    }

    fn check(&self, local: &Region, itemsize: usize) -> Result<(), String> {
        super::check(local, itemsize, self.source.shape(), self.source.itemsize())
    }
}
