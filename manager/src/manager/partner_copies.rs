//! The copies that machines keep of each other's files, of a root on their local disks.
//!
//! The leader chooses the steps: the newest, one at a time, then those of earlier jobs. It waits
//! until all machines have copied their files of it ([`crate::machines`]). Retention leaves the
//! last copied step alone, and the one that is being copied, so the loss of a machine never finds
//! the tier without a step.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use stepwell_core::deadline::{StallTimer, deadline_after};
use stepwell_core::format::manifest::Attempt;
use stepwell_core::sys::{lower_priority, spawn};

use super::Inner;
use super::tiers::{TierReport, what_is_due};
use crate::carry_queue::{CarryEnd, CarryQueue, NextStep};
use crate::convert::SavePauses;
use crate::error::{Error, Result};
use crate::guard::guarded;
use crate::machines::{Copier, CopyTarget, FoundReport, Machines};

/// The leader looks at the reports of the machines at this interval.
const REPORTS_INTERVAL: Duration = Duration::from_millis(50);
/// A machine looks for orders at this interval.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Each machine of the job lengthens these intervals by so much.
const INTERVAL_PER_MACHINE: Duration = Duration::from_millis(1);
/// The leader looks for work at this interval, if nobody wakes it.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);
/// The longest pause for a save, in which a machine reads no orders.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// The most copied steps that are remembered.
const REMEMBERED: usize = 4096;

/// See the module documentation.
#[derive(Default)]
pub(super) struct PartnerCopies {
    state: Mutex<CopyState>,
    changed: Condvar,
    /// Held while an order is written.
    orders: Mutex<()>,
}

/// The copies, as the leader knows them.
#[derive(Default)]
pub(super) struct CopyState {
    queue: CarryQueue,
    /// The attempts that all machines have copied in this session.
    copied: BTreeMap<u64, Attempt>,
    /// The steps of earlier sessions. Some of them lack copies.
    earlier: BTreeSet<u64>,
    /// The attempt that is being copied.
    target: Option<CopyTarget>,
    /// The step that machines may still read: that of an order that they have not ended.
    read: Option<u64>,
    /// The number of the last order.
    ordered: u64,
    /// True once steps were removed in this session.
    has_removed: bool,
    progress: u64,
    /// The bytes that all machines have copied, as they have reported last.
    bytes: u64,
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
    /// The machines that are to get orders: they make copies, or have some of an earlier job.
    fn ordered_machines(&self) -> Option<&Arc<Machines>> {
        let machines = self.machines.as_ref().filter(|_| !self.options.read_only)?;
        let has_copies = self.options.copies > 1 || machines.had_manifests();
        Some(machines).filter(|machines| has_copies && machines.count() > 1)
    }

    /// The machines, if they make copies.
    fn copying_machines(&self) -> Option<&Arc<Machines>> {
        self.ordered_machines().filter(|_| self.options.copies > 1)
    }

    /// Chooses the first step to copy, on the leader.
    pub(super) fn begin_partner_copies(&self) -> Result<()> {
        let copies = self.options.copies;
        if let Some(machines) = self.machines.as_ref().map(|machines| machines.count())
            && machines < copies as usize
        {
            tracing::warn!(machines, copies, "this job has fewer machines than copies");
        }
        let Some(machines) = self.ordered_machines() else { return Ok(()) };
        if self.copying_machines().is_some() {
            let steps = &self.root.list()?.steps;
            let is_ours = |step: &u64| steps.get(step).is_some_and(|one| one.manifest.adopted.is_none());
            self.partners.lock().earlier = steps.keys().copied().filter(is_ours).collect();
            self.copy_newest()?;
        }
        self.give_order(machines).map(drop)
    }

    /// Starts the thread of the leader, and that of the host of each machine.
    pub(super) fn start_partner_copies(self: &Arc<Self>) -> Result<()> {
        let thread_error = |error| stepwell_core::Error::io("start a thread for", &self.root.path, error);
        let Some(machines) = self.ordered_machines() else { return Ok(()) };
        if self.team.leads() && self.copying_machines().is_some() {
            let inner = Arc::downgrade(self);
            spawn("stepwell-partners", move || lead(&inner)).map_err(thread_error)?;
        }
        if machines.is_host() {
            let mut copier = Copier::new(Arc::clone(machines), self.options.copies);
            let interval = spaced(LOOK_INTERVAL, machines);
            let what = "looking for what this machine is to copy";
            let mut is_first = true;
            self.start_host_thread("stepwell-copy", interval, what, move |inner| {
                if std::mem::take(&mut is_first) {
                    lower_priority();
                }
                inner.look_for_orders(&mut copier)
            })?;
        }
        Ok(())
    }

    /// Stops the copying.
    pub(super) fn stop_copying(&self) {
        self.partners.lock().stop = true;
    }

    fn look_for_orders(&self, copier: &mut Copier) -> Result<()> {
        let mut pauses = SavePauses::default();
        let load = self.options.load_options(&*self.environment.disk, false);
        copier.look(&self.root, &load, self.options.stall_timeout, &mut || {
            let (begun, goes_on) = (Instant::now(), || !self.partners.lock().stop);
            pauses.wait(|| {
                goes_on() && begun.elapsed() < LONGEST_PAUSE && !self.saves.lock().pending.is_empty()
            });
            goes_on()
        })
    }

    /// Makes a step due.
    pub(super) fn copy_later(&self, step: u64) {
        if self.copying_machines().is_none() {
            // Another attempt of the step may have copies of an earlier job.
            let ordered = self.ordered_machines().map_or(Ok(0), |machines| self.give_order(machines));
            if let Err(error) = ordered {
                tracing::warn!(step, %error, "ordering other machines to look at their copies failed");
            }
            return;
        }
        let mut state = self.partners.lock();
        state.copied.remove(&step);
        state.queue.committed(step, false);
        state.progress += 1;
        drop(state);
        self.partners.changed.notify_all();
    }

    /// Makes the newest step due, unless the machines have it.
    fn copy_newest(&self) -> Result<()> {
        if self.copying_machines().is_none() {
            return Ok(());
        }
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
        // One after the other, so that the last number is in the file.
        let _turn = self.partners.orders.lock().unwrap_or_else(PoisonError::into_inner);
        let (number, target, has_removed) = {
            let state = self.partners.lock();
            (state.ordered + 1, state.target.clone(), state.has_removed)
        };
        let read = target.as_ref().map(|target| target.step);
        machines.order(number, target, has_removed)?;
        let mut state = self.partners.lock();
        (state.ordered, state.read) = (number, read.or(state.read));
        Ok(number)
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
        let target = CopyTarget { step, name: found.name, attempt: attempt.clone() };
        self.partners.lock().target = Some(target);
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
        let begun = Instant::now();
        let mut timer = StallTimer::new(self.options.stall_timeout);
        while is_wanted() {
            // A removal of steps repeats the order.
            let number = self.partners.lock().ordered;
            let (mut bytes, mut failure, mut late) = (0_u64, None, None);
            for FoundReport { place, report } in machines.copy_reports() {
                let report = report?;
                bytes = bytes.wrapping_add(report.bytes);
                if report.ended < number {
                    late = Some(place);
                } else if let Some(why) = report.failure {
                    failure = Some((place, why));
                }
            }
            let mut state = self.partners.lock();
            if std::mem::replace(&mut state.bytes, bytes) != bytes {
                state.progress += 1;
            }
            let Some(late) = late else {
                state.read = None;
                drop(state);
                let there = self.root.committed(step)?;
                return match failure {
                    Some((place, why)) => {
                        let why = std::io::Error::other(why);
                        Err(stepwell_core::Error::io("copying", place, why).into())
                    }
                    None if there.is_some_and(|found| found.manifest.attempt == *attempt) => {
                        self.record_copied(step, attempt);
                        Ok(CarryEnd::Arrived)
                    }
                    None => Ok(CarryEnd::GivenUp("it is gone".to_owned())),
                };
            };
            if timer.left(bytes).is_zero() {
                let waited_for = format!("{late} to copy the files of another machine");
                return Err(Error::Timeout { waited_for, waited: begun.elapsed() });
            }
            drop(self.partners.wait(state, spaced(REPORTS_INTERVAL, machines)));
        }
        Ok(CarryEnd::Superseded)
    }

    fn record_copied(&self, step: u64, attempt: &Attempt) {
        let mut state = self.partners.lock();
        state.earlier.remove(&step);
        state.copied.insert(step, attempt.clone());
        while state.copied.len() > REMEMBERED {
            state.copied.pop_first();
        }
    }

    /// Waits until no machine can bring back steps that were removed, even if this one is lost.
    pub(super) fn forget_partner_copies(&self, is_removed: impl Fn(u64) -> bool) -> Result<()> {
        let Some(machines) = self.ordered_machines() else { return Ok(()) };
        let mut state = self.partners.lock();
        state.copied.retain(|&step, _| !is_removed(step));
        state.has_removed = true;
        drop(state);
        self.copy_newest()?;
        self.wait_for_orders(
            machines,
            "drop its copies of steps that were removed. It drops them once it answers. Until then, it may bring them back if this machine is lost",
        )
    }

    /// Gives an order, and waits until all machines carry it out. `what` is what they are to do.
    fn wait_for_orders(&self, machines: &Machines, what: &str) -> Result<()> {
        let number = self.give_order(machines)?;
        // The other ranks wait for this one no longer than the stall timeout.
        let (begun, deadline) = (Instant::now(), deadline_after(self.options.stall_timeout / 2));
        loop {
            let late = machines.copy_reports().into_iter().find_map(|FoundReport { place, report }| {
                let has_answered = report.is_ok_and(|report| report.dropped >= number);
                (!has_answered).then_some(place)
            });
            let Some(place) = late else { return Ok(()) };
            if Instant::now() >= deadline {
                let waited_for = format!("{place} to {what}");
                return Err(Error::Timeout { waited_for, waited: begun.elapsed() });
            }
            std::thread::sleep(spaced(REPORTS_INTERVAL, machines));
        }
    }

    /// Forgets due steps that a call removes, and waits until no machine reads their files. Returns
    /// them.
    pub(super) fn forget_due_copies(
        &self,
        is_removed: impl Fn(u64) -> bool,
        timeout: Duration,
    ) -> Result<Vec<u64>> {
        let (begun, deadline) = (Instant::now(), deadline_after(timeout));
        let mut state = self.partners.lock();
        let is_read = state.read.is_some_and(&is_removed);
        let forgotten = state.queue.due().filter(|&step| is_removed(step)).collect();
        while state.queue.forget(&is_removed) {
            if Instant::now() >= deadline {
                let waited_for = "the copying of a step to end".to_owned();
                return Err(Error::Timeout { waited_for, waited: begun.elapsed() });
            }
            state = self.partners.wait(state, REPORTS_INTERVAL);
        }
        drop(state);
        if let Some(machines) = self.copying_machines().filter(|_| is_read) {
            self.wait_for_orders(machines, "stop copying a step that is to be removed")?;
        }
        Ok(forgotten)
    }

    /// Returns the steps that retention leaves alone.
    pub(super) fn kept_for_copies(&self) -> BTreeSet<u64> {
        let state = self.partners.lock();
        let copied = state.copied.keys().next_back().copied();
        let earlier = state.earlier.iter().copied().filter(|_| copied.is_none());
        state.queue.due().chain(copied).chain(earlier).collect()
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
        if self.copying_machines().is_none() {
            if self.options.copies == 1 {
                return Ok(());
            }
            let why = "this job has one machine only".to_owned();
            return Err(Error::NotCarried { step, tier: String::new(), why });
        }
        self.check_carrying()?;
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

/// Returns an interval at which the leader of these machines is not asked too often.
pub(super) fn spaced(interval: Duration, machines: &Machines) -> Duration {
    let machines = u32::try_from(machines.count()).unwrap_or(u32::MAX);
    interval.saturating_add(INTERVAL_PER_MACHINE.saturating_mul(machines))
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
            NextStep::Nothing if !state.earlier.is_empty() => {
                if let Some(step) = state.earlier.pop_last().filter(|step| !state.copied.contains_key(step)) {
                    state.queue.committed(step, false);
                }
                continue;
            }
            next => {
                let wait = match next {
                    NextStep::NotBefore(at) => at.saturating_sub(begun.elapsed()).min(IDLE_INTERVAL),
                    _ => IDLE_INTERVAL,
                };
                drop(partners.wait(state, wait));
                continue;
            }
        };
        state.is_busy = true;
        drop(state);
        let Some(machines) = inner.copying_machines() else { return };
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
        let stop = state.stop;
        drop(state);
        partners.changed.notify_all();
        if stop {
            return;
        }
        // The root has kept older steps until now.
        if let Err(error) = inner.apply_retention() {
            tracing::warn!(%error, "applying retention failed. It is tried again after the next commit");
        }
        partners.lock().is_busy = false;
        partners.changed.notify_all();
    }
}
