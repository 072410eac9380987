//! The copies into a buffer that devices were asked for, and their state.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::batch::{Queued, start_all};
use super::device::{Device, Event};
use crate::{Error, Result};

/// Between two looks whether copies have ended.
const FIRST_LOOK: Duration = Duration::from_micros(20);
const LAST_LOOK: Duration = Duration::from_micros(500);

/// The owner of the memory that is copied from.
pub(super) type Owner = Arc<dyn Any + Send + Sync>;

/// Copies into one buffer.
#[derive(Default)]
pub(in crate::sys) struct Arriving {
    from: Vec<Sender>,
    /// The first byte of the buffer behind all that was asked for.
    pub(in crate::sys) end: usize,
    /// The first failure, told when nothing is on its way any more.
    failed: Option<Error>,
}

/// One device that copies.
struct Sender {
    device: Arc<Device>,
    /// Behind the last of its copies; none as long as more may come, or where it could not be
    /// marked, or asked.
    mark: Option<Event>,
    owners: Vec<Owner>,
    /// Asked for, and started when nothing more is.
    queued: Vec<Queued>,
}

impl std::fmt::Debug for Arriving {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.from.iter().map(|one| &one.device)).finish()
    }
}

impl Arriving {
    /// A device is about to copy into the buffer, up to that byte, from memory that this keeps.
    pub(super) fn expect(&mut self, device: &Arc<Device>, end: usize, owner: &Owner) {
        self.end = self.end.max(end);
        let place = self.from.iter().position(|one| Arc::ptr_eq(&one.device, device));
        let place = place.unwrap_or_else(|| {
            let device = Arc::clone(device);
            self.from.push(Sender { device, mark: None, owners: Vec::new(), queued: Vec::new() });
            self.from.len() - 1
        });
        let Some(one) = self.from.get_mut(place) else { return };
        one.mark = None;
        // Most leaves of a state have one owner.
        if !one.owners.last().is_some_and(|last| Arc::ptr_eq(last, owner)) {
            one.owners.push(Arc::clone(owner));
        }
    }

    /// Has a device that is expected copy that once nothing more is asked for.
    pub(super) fn queue(&mut self, device: &Arc<Device>, copy: Queued) {
        if let Some(one) = self.from.iter_mut().find(|one| Arc::ptr_eq(&one.device, device)) {
            one.queued.push(copy);
        }
    }

    /// Starts the queued copies and marks their ends: no more copies follow. Waits for the whole
    /// stream of a copy whose end cannot be marked.
    ///
    /// # Safety
    /// The buffer begins at `base` and is as long as was said where the copies were queued; `known`
    /// says whether the driver was told of it. What they copy from is memory of their devices.
    pub(in crate::sys) unsafe fn close(&mut self, base: *mut u8, known: bool) {
        for one in &mut self.from {
            let queued = std::mem::take(&mut one.queued);
            // SAFETY: as the caller says; `owners` keeps what is copied from, and the buffer is
            // kept and shows nothing until all has arrived.
            if let Err(error) = unsafe { start_all(&one.device, base, known, &queued) } {
                self.failed.get_or_insert(error);
            }
            if one.mark.is_none() {
                one.mark = one.device.to_host().and_then(|stream| one.device.mark(stream)).ok();
            }
        }
    }

    /// Waits until nothing is on its way any more, or the deadline ([`Error::Timeout`]).
    pub(in crate::sys) fn settle(&mut self, deadline: Instant) -> Result<()> {
        let begun = Instant::now();
        let mut look = FIRST_LOOK;
        loop {
            let Self { from, failed, .. } = self;
            from.retain_mut(|one| {
                let ended = one.has_ended().or_else(|error| {
                    failed.get_or_insert(error);
                    // One error may be of the question alone; the work of a context that answers
                    // nothing else is over.
                    match one.mark.take() {
                        Some(_) => one.has_ended(),
                        None => Ok(true),
                    }
                });
                !ended.unwrap_or(true)
            });
            if self.from.is_empty() {
                return self.failed.take().map_or(Ok(()), Err);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let devices: Vec<String> = self.from.iter().map(|one| format!("{:?}", one.device)).collect();
                return Err(Error::Timeout {
                    waited_for: format!("copies from {}", devices.join(", ")),
                    seconds: begun.elapsed().as_secs_f64(),
                });
            }
            std::thread::sleep(look.min(left));
            look = (look * 2).min(LAST_LOOK);
        }
    }

    /// Leaks memory that a device may still copy from.
    pub(in crate::sys) fn forget(self) {
        for one in self.from {
            std::mem::forget(one.owners);
        }
    }
}

impl Sender {
    /// True if its copies have ended.
    fn has_ended(&self) -> Result<bool> {
        match &self.mark {
            Some(mark) => mark.is_passed(),
            None => self.device.is_idle(self.device.to_host()?),
        }
    }
}
