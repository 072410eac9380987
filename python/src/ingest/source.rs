//! Held buffers as what the engine reads from and writes to.

use std::sync::Arc;

use stepwell_core::provider::{Fill, HostProvider, StateProvider, Ticket};
use stepwell_core::region::Region;
use stepwell_core::staging::{Filling, Slot};
use stepwell_core::sys::{HostSource, HostTarget};
use stepwell_core::{Error, Result};

use super::HeldBuffer;
use crate::events::{Loan, Parcel};

/// A provider over the `buffer` of an array leaf of a parcel; it shares the parcel, so that the memory stays for as long as the provider lives.
/// `lazy`: nobody writes to that memory meanwhile.
pub fn provider_of(parcel: &Arc<Parcel>, buffer: &HeldBuffer, lazy: bool) -> Result<Arc<dyn StateProvider>> {
    let source = source_of(buffer)?;
    Ok(Arc::new(HostProvider::with_owner(source, Arc::clone(parcel)).lazy(lazy)))
}

/// A provider over such a buffer that takes a share of the parcel for each read only, so that the memory can go back before the provider does.
pub fn returnable_provider_of(loan: &Arc<Loan>, buffer: &HeldBuffer) -> Result<Arc<dyn StateProvider>> {
    let inner = HostProvider::new(source_of(buffer)?);
    Ok(Arc::new(Returnable { inner, loan: Arc::clone(loan) }))
}

struct Returnable {
    inner: HostProvider,
    loan: Arc<Loan>,
}

impl StateProvider for Returnable {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> Result<Ticket> {
        let Some(_share) = self.loan.share() else {
            return Err(Error::Misuse("its memory was given back before it was captured".into()));
        };
        self.inner.capture(fills, slot)
    }

    fn check(&self, local: &Region, itemsize: usize) -> Result<(), String> {
        self.inner.check(local, itemsize)
    }
}

fn source_of(buffer: &HeldBuffer) -> Result<HostSource> {
    let strides: Vec<i64> = buffer.strides().iter().map(|&stride| stride as i64).collect();
    // SAFETY: the exporter of a held buffer keeps every element that shape and strides name readable until the buffer is released, and the
    // callers store the source beside a share of the parcel that holds it, or read through it with such a share in hand only. That nobody writes meanwhile is what `save` demands of its caller.
    unsafe { HostSource::new(buffer.address(), buffer.itemsize(), &buffer.dims(), &strides) }
}

/// The memory of a held, writable buffer, from its lowest element to its highest.
pub fn target_of(buffer: &HeldBuffer) -> Result<HostTarget<'_>> {
    let (below, len) = buffer.span();
    // SAFETY: the exporter of a held, writable buffer keeps everything between its lowest and highest element mapped and writable until the
    // buffer is released, which outlives the target by the borrow. That nobody else reads or writes it meanwhile is what `restore` demands of its caller.
    unsafe { HostTarget::new(buffer.address().wrapping_sub(below), len) }
}
