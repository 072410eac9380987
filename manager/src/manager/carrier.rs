//! The carriers: one thread for each further tier, which copies committed steps there. Other
//! machines of the near tier help it ([`super::machine_carrying`]).
//!
//! It runs at the lowest priority, pauses for saves, and keeps to the tier's rate. Every block is
//! checked while it is read, so damage of the near tier stays there. A step gets its name in the
//! tier when it is whole and durable. After a crash, the next leader carries what the tier lacks. A
//! failed step is tried again, as long as no newer one is due.

use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use stepwell_core::format::manifest::Attempt;
use stepwell_core::sys::{lower_priority, spawn};

use super::Inner;
use super::machine_carrying::OtherMachines;
use super::tiers::Tier;
use crate::carry_queue::{CarryEnd, NextStep};
use crate::checkpoint::Checkpoint;
use crate::convert::SavePauses;
use crate::copy::{CopyProgress, OtherWriters};
use crate::error::{Error, Result};
use crate::guard::guarded;
use crate::machines::CopyTarget;

/// A carrier that has nothing to do looks for work at this interval, if nobody wakes it.
const IDLE_INTERVAL: Duration = Duration::from_secs(60);
/// A carrier that waits looks at this interval if it is still wanted.
const PAUSE_INTERVAL: Duration = Duration::from_millis(20);
/// A step whose files give an I/O error is given up after so many tries, in 15 seconds. Without an
/// end, newer steps would never be carried.
const MOST_READ_TRIES: u32 = 5;
const EIO: i32 = 5;

impl Inner {
    /// Takes steps out of the listing that were left behind or are incomplete, on the leader. Then
    /// it begins to copy and to carry.
    pub(super) fn begin_at_leader(self: &Arc<Self>) -> Result<()> {
        if !self.carries() {
            return Ok(());
        }
        self.finish_rewind()?;
        self.set_left_steps_aside()?;
        self.set_incomplete_steps_aside()?;
        self.begin_partner_copies()?;
        self.start_carriers()
    }

    /// Starts the carriers. They begin with the steps that an earlier process has left.
    fn start_carriers(self: &Arc<Self>) -> Result<()> {
        if self.tiers.is_empty() {
            return Ok(());
        }
        let listing = self.root.list_changes()?;
        for tier in &self.tiers {
            let newest = tier.lock().steps.keys().next_back().copied();
            for (&step, found) in &listing.steps {
                let attempt = &found.manifest.attempt;
                let is_newer = newest.is_none_or(|newest| step > newest);
                let is_other = tier.lock().steps.get(&step).is_some_and(|theirs| theirs != attempt);
                if is_newer || is_other {
                    tier.commit(step, Some(attempt));
                }
            }
            tier.lock().has_carrier = true;
            let (near, carried) = (Arc::downgrade(self), Arc::clone(tier));
            spawn("stepwell-carry", move || run(&near, &carried))
                .map_err(|error| stepwell_core::Error::io("start a thread for", &self.root.path, error))?;
        }
        Ok(())
    }

    /// Makes a step due in the tiers that take it, and for copies on other machines.
    pub(super) fn carry_later(&self, step: u64) {
        self.tiers.iter().for_each(|tier| tier.commit(step, None));
        self.copy_later(step);
    }

    /// Carries a step to a tier.
    fn carry(&self, tier: &Tier, step: u64) -> Result<CarryEnd> {
        let gone = || CarryEnd::GivenUp("the near tier does not have it any more".to_owned());
        let Some(found) = self.root.committed(step)? else { return Ok(gone()) };
        let attempt = found.manifest.attempt.clone();
        if found.manifest.adopted.is_some() {
            let why = "its bytes are files of another library, which are not carried".to_owned();
            return Ok(CarryEnd::GivenUp(why));
        }
        if tier.lock().steps.get(&step) == Some(&attempt) {
            self.arrived(tier, step, &attempt)?;
            return Ok(CarryEnd::Arrived);
        }
        if let Some(damage) = self.root.damage(&found)? {
            return Ok(CarryEnd::GivenUp(damage));
        }
        let load = self.options.load_options(&*self.environment.disk, false);
        let copied = match self.root.lease_found(&found, self.options.stall_timeout, load) {
            Ok(Some(source)) => self.copy(tier, &source, found.name),
            Ok(None) => return Ok(gone()),
            Err(error) => Err(error),
        };
        match copied {
            Ok(()) => {}
            Err(Error::Core(error)) if is_damage_outside(&tier.root().path, &error) => {
                tracing::error!(step, tier = %tier.name, %error, "a damaged step is not carried");
                return Ok(CarryEnd::GivenUp(error.to_string()));
            }
            Err(Error::Locked { owner, .. }) => {
                let by = owner.unwrap_or_else(|| "unknown".to_owned());
                return Ok(CarryEnd::GivenUp(format!("another writer has the tier: {by}")));
            }
            Err(error) => {
                // Perhaps it is there, and only the answer was lost.
                tier.root().discovery.forget();
                return Err(error);
            }
        }
        self.arrived(tier, step, &attempt)?;
        Ok(CarryEnd::Arrived)
    }

    /// Copies a step, as fast as the tier's rate and the saves of this manager allow.
    /// Other machines carry their files. `name` is that of the step in the near tier.
    fn copy(&self, tier: &Tier, source: &Checkpoint, name: String) -> Result<()> {
        tier.check_globs(source)?;
        let step = source.manifest().step;
        let target = CopyTarget { step, name, attempt: source.manifest().attempt.clone() };
        let others = OtherMachines::of(self, tier, target);
        let mut pauses = SavePauses::default();
        let begun = Instant::now();
        let (mut worked, mut resumed) = (Duration::ZERO, begun);
        let goes_on = || {
            let state = tier.lock();
            !state.stop && state.queue.is_wanted(step)
        };
        let may_pause = || goes_on() && !tier.lock().is_hurried();
        let writers = others.as_ref().map(|others| others as &dyn OtherWriters);
        let copied = tier.manager.add_carried(source, &tier.compress, writers, &mut |at| {
            let CopyProgress { done, total, written } = at;
            worked += resumed.elapsed();
            let theirs = others.as_ref().map_or(0, OtherMachines::bytes);
            tier.lock().record_arrival(step, done.saturating_add(theirs), total, worked);
            pauses.wait(|| may_pause() && !self.saves.lock().pending.is_empty());
            let rate = others.as_ref().map_or(tier.bytes_per_second, OtherMachines::bytes_per_second);
            if let Some(rate) = rate {
                let due = Duration::from_secs_f64(written as f64 / rate.max(1) as f64);
                while begun.elapsed() < due && may_pause() {
                    std::thread::sleep(PAUSE_INTERVAL.min(due.saturating_sub(begun.elapsed())));
                }
            }
            resumed = Instant::now();
            goes_on()
        });
        if let Some(others) = others {
            others.end(copied.is_ok());
        }
        copied
    }

    /// Records a step of a tier, adds its later metrics, and applies the retention of the tier.
    fn arrived(&self, tier: &Tier, step: u64, attempt: &Attempt) -> Result<()> {
        tier.lock().steps.insert(step, attempt.clone());
        let later = self.root.sidecars.all(&*self.root.dir)?;
        if let Some(metrics) = later.get(attempt) {
            tier.manager.add_metrics(step, metrics)?;
        }
        let theirs = &tier.manager.inner;
        theirs.root.discovery.refresh(&*theirs.root.dir, &theirs.root.names)?;
        match theirs.apply_retention() {
            Ok(retired) => {
                let mut state = tier.lock();
                state.steps.retain(|step, _| !retired.contains(step));
            }
            Err(error) => {
                tracing::warn!(tier = %tier.name, %error, "applying the retention of a tier failed. It is tried again after the next step");
            }
        }
        Ok(())
    }
}

/// True if a file is damaged that is not in this directory. The near tier's may be on any machine.
fn is_damage_outside(dir: &Path, error: &stepwell_core::Error) -> bool {
    matches!(error, stepwell_core::Error::Corrupt { file, .. } if !file.starts_with(dir))
}

/// True if the disk cannot read a file that is not in this directory.
fn is_unreadable(dir: &Path, error: &Error) -> bool {
    let is_outside = |error: &stepwell_core::Error| error.file().is_some_and(|file| !file.starts_with(dir));
    error.core().is_some_and(|error| error.errno() == Some(EIO) && is_outside(error))
}

/// The body of a carrier's thread.
fn run(near: &Weak<Inner>, tier: &Arc<Tier>) {
    lower_priority();
    let begun = Instant::now();
    while let Some(step) = next(tier, begun) {
        let Some(near) = near.upgrade() else { return };
        let carried =
            guarded("a carrier", || near.carry(tier, step)).map_err(Error::from).and_then(|end| end);
        let mut state = tier.lock();
        state.arrived = (0, 0);
        let is_last_try =
            !state.steps.contains_key(&step) && state.queue.failures(step) + 1 >= MOST_READ_TRIES;
        let carried = match carried {
            Err(error) if is_last_try && is_unreadable(&tier.root().path, &error) => {
                tracing::error!(step, tier = %tier.name, %error, "a step whose files cannot be read is not carried");
                Ok(CarryEnd::GivenUp(format!("its files cannot be read: {error}")))
            }
            carried => carried,
        };
        match carried {
            Ok(end) => {
                state.progress += 1;
                match &end {
                    CarryEnd::GivenUp(why) => state.given_up = Some((step, why.clone())),
                    _ if state.given_up.as_ref().is_some_and(|(other, _)| *other == step) => {
                        state.given_up = None;
                    }
                    _ => {}
                }
                state.queue.ended(step, end);
            }
            Err(error) => {
                if !state.stop && state.queue.is_wanted(step) {
                    tracing::warn!(step, tier = %tier.name, %error, "carrying a step failed. It is tried again");
                }
                state.queue.failed(step, error.to_string(), begun.elapsed());
            }
        }
        drop(state);
        tier.changed.notify_all();
        // The near tier has kept the step until now.
        if let Err(error) = near.apply_retention() {
            tracing::warn!(%error, "applying retention failed. It is tried again after the next commit");
        }
        tier.lock().is_busy = false;
        tier.changed.notify_all();
    }
}

/// Waits for the next step to carry. `None` when the carrier ends.
fn next(tier: &Tier, begun: Instant) -> Option<u64> {
    let mut state = tier.lock();
    loop {
        if state.stop {
            return None;
        }
        let wait = match state.queue.take(begun.elapsed()) {
            NextStep::Carry(step) => {
                state.is_busy = true;
                return Some(step);
            }
            NextStep::NotBefore(at) => at.saturating_sub(begun.elapsed()).min(IDLE_INTERVAL),
            NextStep::Nothing => IDLE_INTERVAL,
        };
        state = tier.wait(state, wait);
    }
}
