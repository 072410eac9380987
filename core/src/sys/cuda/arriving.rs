//! The copies from devices into one buffer.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::batch::{Queued, start_all};
use super::device::{Device, Event};
use crate::{Error, Result};

/// First poll interval for the end of copies.
const FIRST_POLL_INTERVAL: Duration = Duration::from_micros(20);
const LAST_POLL_INTERVAL: Duration = Duration::from_micros(500);

/// The owner of the source memory.
pub(super) type Owner = Arc<dyn Any + Send + Sync>;

/// The copies into one buffer.
#[derive(Default)]
pub(in crate::sys) struct Arriving {
    from: Vec<CopiesFrom>,
    /// End of the requested bytes in the buffer.
    pub(in crate::sys) end: usize,
    /// The first failure. Reported when no copy is running any more.
    failed: Option<Error>,
}

/// The copies of one device.
struct CopiesFrom {
    device: Arc<Device>,
    /// An event after the last copy. `None` while more copies may follow, or if marking or querying
    /// failed.
    mark: Option<Event>,
    owners: Vec<Owner>,
    /// Requested copies. They start when the buffer is closed.
    queued: Vec<Queued>,
}

impl std::fmt::Debug for Arriving {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.from.iter().map(|one| &one.device)).finish()
    }
}

impl Arriving {
    /// Registers a device that will copy into the buffer, up to byte `end`, from memory that
    /// `owner` keeps.
    pub(super) fn expect(&mut self, device: &Arc<Device>, end: usize, owner: &Owner) {
        self.end = self.end.max(end);
        let place = self.from.iter().position(|one| Arc::ptr_eq(&one.device, device));
        let place = place.unwrap_or_else(|| {
            let device = Arc::clone(device);
            self.from.push(CopiesFrom { device, mark: None, owners: Vec::new(), queued: Vec::new() });
            self.from.len() - 1
        });
        let Some(one) = self.from.get_mut(place) else { return };
        one.mark = None;
        // Most leaves of a state share one owner.
        if !one.owners.last().is_some_and(|last| Arc::ptr_eq(last, owner)) {
            one.owners.push(Arc::clone(owner));
        }
    }

    /// Queues a copy of a registered device. It starts when the buffer is closed.
    pub(super) fn queue(&mut self, device: &Arc<Device>, copy: Queued) {
        if let Some(one) = self.from.iter_mut().find(|one| Arc::ptr_eq(&one.device, device)) {
            one.queued.push(copy);
        }
    }

    /// Starts the queued copies and marks their ends: no more copies follow. Waits for the whole
    /// stream of a copy whose end cannot be marked.
    ///
    /// # Safety
    /// The buffer begins at `base` and has the length that was given when the copies were queued.
    /// `known` is true only if the driver has registered the memory. The source is memory of the
    /// copies' devices.
    pub(in crate::sys) unsafe fn close(&mut self, base: *mut u8, known: bool) {
        for one in &mut self.from {
            let queued = std::mem::take(&mut one.queued);
            // SAFETY: as promised by the caller. `owners` keeps the source. The buffer is kept and
            // hides its bytes until all copies have ended.
            if let Err(error) = unsafe { start_all(&one.device, base, known, &queued) } {
                self.failed.get_or_insert(error);
            }
            if one.mark.is_none() {
                one.mark = one.device.to_host().and_then(|stream| one.device.mark(stream)).ok();
            }
        }
    }

    /// Waits until all copies have ended, or for the deadline ([`Error::Timeout`]).
    pub(in crate::sys) fn wait_arrived(&mut self, deadline: Instant) -> Result<()> {
        let begun = Instant::now();
        let mut interval = FIRST_POLL_INTERVAL;
        loop {
            let Self { from, failed, .. } = self;
            from.retain_mut(|one| {
                let ended = one.has_ended().or_else(|error| {
                    failed.get_or_insert(error);
                    // One error may concern the query alone. If the context answers nothing else
                    // either, its work is over.
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
            std::thread::sleep(interval.min(left));
            interval = (interval * 2).min(LAST_POLL_INTERVAL);
        }
    }

    /// Leaks memory that a device may still copy from.
    pub(in crate::sys) fn forget(self) {
        for one in self.from {
            std::mem::forget(one.owners);
        }
    }
}

impl CopiesFrom {
    /// True if its copies have ended.
    fn has_ended(&self) -> Result<bool> {
        match &self.mark {
            Some(mark) => mark.is_passed(),
            None => self.device.is_idle(self.device.to_host()?),
        }
    }
}
