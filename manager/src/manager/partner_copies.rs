//! The copies that machines keep of each other's files, of a root on their local disks.
//!
//! The leader chooses the steps: the newest, one at a time. It waits until all machines have copied
//! their files of it ([`crate::machines`]). Retention leaves the last copied step alone, and the
//! one that is being copied, so the loss of a machine never finds the tier without a step.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use stepwell_core::deadline::{StallTimer, deadline_after};
use stepwell_core::format::manifest::Attempt;
use stepwell_core::sys::{lower_priority, spawn};

use super::Inner;
use super::tiers::{TierReport, what_is_due};
use crate::carry_queue::{CarryEnd, CarryQueue, NextStep, TierRule};
use crate::convert::SavePauses;
use crate::error::{Error, Result};
use crate::guard::guarded;
use crate::machines::{Copier, FoundReport, Machines};
use crate::periodic::Periodic;

/// The leader looks at the reports of the machines at this interval.
const REPORTS_INTERVAL: Duration = Duration::from_millis(50);
/// A machine looks for orders at this interval.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// The leader looks for work at this interval, if nobody wakes it.
const IDLE_INTERVAL: Duration = Duration::from_secs(60);

/// The most copied steps that are remembered.
const REMEMBERED: usize = 4096;

/// See the module documentation.
#[derive(Default)]
pub(super) struct PartnerCopies {
    state: Mutex<CopyState>,
    changed: Condvar,
    /// On the host of a machine.
    copier: Mutex<Option<Periodic>>,
}

/// The copies, as the leader knows them.
#[derive(Default)]
pub(super) struct CopyState {
    queue: CarryQueue,
    /// The attempts that all machines have copied in this session.
    copied: BTreeMap<u64, Attempt>,
    /// The attempt that is being copied, with its step.
    target: Option<(u64, Attempt)>,
    /// The number of the last order.
    ordered: u64,
    /// True once steps were removed in this session.
    has_removed: bool,
    progress: u64,
    given_up: Option<(u64, String)>,
    is_busy: bool,
    stop: bool,
}

impl PartnerCopies {
    fn lock(&self) -> MutexGuard<'_, CopyState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, CopyState>, how_long: Duration) -> MutexGuard<'a, CopyState> {
        self.changed.wait_timeout(state, how_long).unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Inner {
    /// The machines of a root whose files are copied to others.
    fn copied_machines(&self) -> Option<&Arc<Machines>> {
        let wanted = self.options.copies > 1 && !self.options.read_only;
        self.machines.as_ref().filter(|machines| wanted && machines.count() > 1)
    }

    /// Starts the copying: on the leader, and on the host of each machine.
    pub(super) fn start_partner_copies(self: &Arc<Self>) -> Result<()> {
        let thread_error = |error| stepwell_core::Error::io("start a thread for", &self.root.path, error);
        if self.team.leads() && self.options.copies > 1 {
            let there = self.machines.as_ref().map_or(1, |machines| machines.count());
            if there < self.options.copies as usize {
                tracing::warn!(
                    machines = there,
                    copies = self.options.copies,
                    "this job has fewer machines than copies. Each machine has one copy at most"
                );
            }
        }
        let Some(machines) = self.copied_machines() else { return Ok(()) };
        if self.team.leads() {
            self.partners.lock().queue = CarryQueue::new(TierRule::default());
            self.give_order(machines)?;
            self.copy_newest()?;
            let inner = Arc::downgrade(self);
            spawn("stepwell-partners", move || lead(&inner)).map_err(thread_error)?;
        }
        if machines.is_host() {
            let mut copier = Copier::new(Arc::clone(machines), self.options.copies);
            let inner = Arc::downgrade(self);
            let mut is_first = true;
            let look = move || {
                if std::mem::take(&mut is_first) {
                    lower_priority();
                }
                let Some(inner) = inner.upgrade() else { return false };
                let looked = guarded("the copier of a machine", || inner.look_for_orders(&mut copier));
                if let Err(error) = looked.map_err(Error::from).and_then(|looked| looked) {
                    tracing::warn!(%error, "looking for what this machine is to copy failed. It is tried again");
                }
                true
            };
            let thread = Periodic::start("stepwell-copy", LOOK_INTERVAL, look).map_err(thread_error)?;
            *self.partners.copier.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        }
        Ok(())
    }

    /// Ends the work of a host.
    pub(super) fn stop_copier(&self) {
        self.partners.lock().stop = true;
        let copier = self.partners.copier.lock().unwrap_or_else(PoisonError::into_inner).take();
        copier.into_iter().for_each(Periodic::stop);
    }

    fn look_for_orders(&self, copier: &mut Copier) -> Result<()> {
        let mut pauses = SavePauses::default();
        let load = self.options.load_options(&*self.environment.disk, false);
        copier.look(&self.root, &load, self.options.stall_timeout, &mut || {
            let goes_on = || !self.partners.lock().stop;
            pauses.wait(|| goes_on() && !self.saves.lock().pending.is_empty());
            goes_on()
        })
    }

    /// Makes a step due.
    pub(super) fn copy_later(&self, step: u64) {
        if self.copied_machines().is_none() {
            return;
        }
        let mut state = self.partners.lock();
        state.queue.committed(step, false);
        state.progress += 1;
        drop(state);
        self.partners.changed.notify_all();
    }

    /// Makes the newest step due, unless the machines have it.
    fn copy_newest(&self) -> Result<()> {
        if let Some(newest) = self.root.newest()?.filter(|found| found.manifest.adopted.is_none()) {
            let (step, attempt) = (newest.manifest.step, &newest.manifest.attempt);
            let is_due = self.partners.lock().queue.due().any(|due| due == step);
            if !is_due && !self.is_copied(step, attempt) {
                self.copy_later(step);
            }
        }
        Ok(())
    }

    /// Gives an order, to copy the target. Returns its number.
    fn give_order(&self, machines: &Machines) -> Result<u64> {
        // Under the lock, so that the last number is in the file.
        let mut state = self.partners.lock();
        machines.order(state.ordered + 1, state.target.clone(), state.has_removed)?;
        state.ordered += 1;
        Ok(state.ordered)
    }

    /// Has all machines copy a step.
    fn copy_step(&self, machines: &Machines, step: u64) -> Result<CarryEnd> {
        let Some(found) = self.root.committed(step)? else {
            return Ok(CarryEnd::GivenUp("it is gone".to_owned()));
        };
        if found.manifest.adopted.is_some() {
            let why = "its bytes are files of another library, which are not copied".to_owned();
            return Ok(CarryEnd::GivenUp(why));
        }
        let attempt = found.manifest.attempt.clone();
        self.partners.lock().target = Some((step, attempt.clone()));
        let copied = self.give_order(machines).and_then(|_| self.wait_for_machines(machines, step, &attempt));
        self.partners.lock().target = None;
        copied
    }

    /// Waits until all machines have copied the target.
    fn wait_for_machines(&self, machines: &Machines, step: u64, attempt: &Attempt) -> Result<CarryEnd> {
        let is_wanted = || {
            let state = self.partners.lock();
            !state.stop && state.queue.is_wanted(step)
        };
        while is_wanted() {
            // A removal of steps repeats the order.
            let number = self.partners.lock().ordered;
            let reports = machines.copy_reports();
            let mut bytes = 0_u64;
            let mut have_ended = true;
            for FoundReport { place, report } in reports {
                let report = report?;
                bytes = bytes.wrapping_add(report.bytes);
                have_ended &= report.ended >= number;
                if let Some(why) = report.failure.filter(|_| report.ended == number) {
                    let why = std::io::Error::other(why);
                    return Err(stepwell_core::Error::io("copy files to", place, why).into());
                }
            }
            let found = if have_ended { self.root.committed(step)? } else { None };
            let has_arrived = found.is_some_and(|found| found.manifest.attempt == *attempt);
            let mut state = self.partners.lock();
            state.progress = state.progress.wrapping_add(bytes);
            if has_arrived {
                state.copied.insert(step, attempt.clone());
                while state.copied.len() > REMEMBERED {
                    state.copied.pop_first();
                }
                return Ok(CarryEnd::Arrived);
            }
            if have_ended {
                return Ok(CarryEnd::GivenUp("it is gone".to_owned()));
            }
            drop(self.partners.wait(state, REPORTS_INTERVAL));
        }
        Ok(CarryEnd::Superseded)
    }

    /// Waits until no machine can bring back steps that were removed, even if this one is lost.
    pub(super) fn forget_partner_copies(&self, is_removed: impl Fn(u64) -> bool) -> Result<()> {
        let Some(machines) = self.copied_machines() else { return Ok(()) };
        let mut state = self.partners.lock();
        state.copied.retain(|&step, _| !is_removed(step));
        state.has_removed = true;
        drop(state);
        let number = self.give_order(machines)?;
        self.copy_newest()?;
        let (begun, deadline) = (Instant::now(), deadline_after(self.options.stall_timeout));
        loop {
            let late = machines.copy_reports().into_iter().find_map(|FoundReport { place, report }| {
                let is_current = report.is_ok_and(|report| report.current >= number);
                (!is_current).then_some(place)
            });
            let Some(place) = late else { return Ok(()) };
            if Instant::now() >= deadline {
                let waited_for = format!(
                    "{place} to drop its copies of steps that were removed. It may bring them back if this machine is lost. Repeat the call"
                );
                return Err(Error::Timeout { waited_for, waited: begun.elapsed() });
            }
            std::thread::sleep(REPORTS_INTERVAL);
        }
    }

    /// Forgets due steps that a call removes. Returns them.
    pub(super) fn stop_copying(
        &self,
        is_removed: impl Fn(u64) -> bool,
        timeout: Duration,
    ) -> Result<Vec<u64>> {
        let (begun, deadline) = (Instant::now(), deadline_after(timeout));
        let mut state = self.partners.lock();
        let forgotten = state.queue.due().filter(|&step| is_removed(step)).collect();
        while state.queue.forget(&is_removed) {
            if Instant::now() >= deadline {
                let waited_for = "the machines to stop copying a step".to_owned();
                return Err(Error::Timeout { waited_for, waited: begun.elapsed() });
            }
            state = self.partners.wait(state, REPORTS_INTERVAL);
        }
        Ok(forgotten)
    }

    /// Returns the steps that retention leaves alone.
    pub(super) fn kept_for_copies(&self) -> BTreeSet<u64> {
        let state = self.partners.lock();
        state.queue.due().chain(state.copied.keys().next_back().copied()).collect()
    }

    /// True if all machines have copied their files of a step in this session.
    pub(super) fn is_copied(&self, step: u64, attempt: &Attempt) -> bool {
        self.partners.lock().copied.get(&step) == Some(attempt)
    }

    /// Waits until nothing is due. Without a timeout, as long as there is progress.
    pub(super) fn wait_until_copied(&self, timeout: Option<Duration>) -> Result<()> {
        let (begun, deadline) = (Instant::now(), timeout.map(deadline_after));
        let mut timer = StallTimer::new(self.options.stall_timeout);
        let mut state = self.partners.lock();
        while state.is_busy || state.queue.due().next().is_some() {
            let is_late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if is_late || (timeout.is_none() && timer.left(state.progress).is_zero()) {
                let waited_for = format!("copies on other machines of {}", what_is_due(&state.queue));
                return Err(Error::Timeout { waited_for, waited: begun.elapsed() });
            }
            state = self.partners.wait(state, REPORTS_INTERVAL);
        }
        Ok(())
    }

    /// Waits until the other machines have copies of a step.
    pub(super) fn wait_copied(&self, step: u64, timeout: Duration) -> Result<()> {
        if self.copied_machines().is_none() {
            return Ok(());
        }
        let (begun, deadline) = (Instant::now(), deadline_after(timeout));
        let mut state = self.partners.lock();
        loop {
            let is_due = state.queue.due().any(|due| due == step);
            let why = match state.queue.end_of(step) {
                _ if is_due => None,
                _ if state.copied.contains_key(&step) => return Ok(()),
                Some(CarryEnd::Superseded) => Some("a newer step took its place".to_owned()),
                Some(CarryEnd::GivenUp(why)) => Some(why.clone()),
                Some(CarryEnd::Arrived) | None => Some("it was removed, or is of an earlier job".to_owned()),
            };
            if let Some(why) = why {
                return Err(Error::NotCarried { step, tier: String::new(), why });
            }
            if Instant::now() >= deadline {
                let waited_for = format!("copies on other machines of {}", what_is_due(&state.queue));
                return Err(Error::Timeout { waited_for, waited: begun.elapsed() });
            }
            state = self.partners.wait(state, REPORTS_INTERVAL);
        }
    }

    /// Adds what is known of copies to the report of the near tier.
    pub(super) fn report_copies(&self, report: &mut TierReport) {
        let state = self.partners.lock();
        let failure = state.queue.failure().map(|(step, why)| (step, why.to_owned()));
        report.due = state.queue.due().collect();
        report.superseded = state.queue.superseded();
        report.failure = failure.or_else(|| state.given_up.clone());
    }

    /// A value that changes while machines copy.
    pub(super) fn copy_progress(&self) -> u64 {
        self.partners.lock().progress
    }

    /// Describes what is due. `None`: nothing is.
    pub(super) fn due_copies(&self) -> Option<String> {
        let state = self.partners.lock();
        state.queue.due().next()?;
        Some(format!("copies on other machines of {}", what_is_due(&state.queue)))
    }
}

/// The body of the leader's thread.
fn lead(inner: &Weak<Inner>) {
    let begun = Instant::now();
    loop {
        let Some(inner) = inner.upgrade() else { return };
        let partners = &inner.partners;
        let mut state = partners.lock();
        if state.stop {
            return;
        }
        let step = match state.queue.take(begun.elapsed()) {
            NextStep::Carry(step) => step,
            next => {
                let wait = match next {
                    NextStep::NotBefore(at) => at.saturating_sub(begun.elapsed()).min(IDLE_INTERVAL),
                    _ => IDLE_INTERVAL,
                };
                drop(partners.wait(state, wait.min(Duration::from_secs(1))));
                continue;
            }
        };
        state.is_busy = true;
        drop(state);
        let Some(machines) = inner.copied_machines() else { return };
        let copied = guarded("the copies of a step", || inner.copy_step(machines, step));
        let mut state = partners.lock();
        match copied.map_err(Error::from).and_then(|copied| copied) {
            Ok(end) => {
                state.given_up = match &end {
                    CarryEnd::GivenUp(why) => Some((step, why.clone())),
                    _ => None,
                };
                state.progress += 1;
                state.queue.ended(step, end);
            }
            Err(error) => {
                if !state.stop && state.queue.is_wanted(step) {
                    tracing::warn!(step, %error, "copying a step to other machines failed. It is tried again");
                }
                state.queue.failed(step, error.to_string(), begun.elapsed());
            }
        }
        drop(state);
        partners.changed.notify_all();
        // The root has kept older steps until now.
        if let Err(error) = inner.apply_retention() {
            tracing::warn!(%error, "applying retention failed. It is tried again after the next commit");
        }
        partners.lock().is_busy = false;
        partners.changed.notify_all();
    }
}
