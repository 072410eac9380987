//! The steps that calls of one manager use: they hold, retire or replace them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use stepwell_core::deadline::deadline_after;

use crate::error::{Advice, Error, Result};

/// See the module documentation.
#[derive(Default)]
pub(super) struct Usage {
    used: Mutex<Used>,
    changed: Condvar,
}

#[derive(Default)]
struct Used {
    /// Steps that this manager holds, with the number of holds. A step is never here and in
    /// `retiring`.
    held: BTreeMap<u64, u64>,
    /// Steps that only retention leaves alone.
    kept: BTreeSet<u64>,
    /// Steps that are being retired or set aside.
    retiring: BTreeSet<u64>,
    /// Steps that pending saves will replace, one entry for each save.
    replacing: Vec<u64>,
}

impl Used {
    /// Refuses to replace a held step.
    fn check_replaceable(&self, step: u64) -> Result<()> {
        if !self.held.contains_key(&step) {
            return Ok(());
        }
        let by = "this manager holds it, and a held step is not replaced".to_owned();
        Err(Error::Held { step, by, advice: Some(Advice::ReleaseHold) })
    }
}

impl Usage {
    fn lock(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The steps that retention leaves alone.
    pub(super) fn kept(&self) -> BTreeSet<u64> {
        let used = self.lock();
        used.held.keys().copied().chain(used.kept.iter().copied()).collect()
    }

    /// Sets the steps that retention leaves alone, beside held ones. They may be replaced, deleted
    /// and rewound.
    pub(super) fn keep(&self, steps: BTreeSet<u64>) {
        self.lock().kept = steps;
    }

    /// Counts a step as held: retention leaves it alone from here on. First waits for a retirement
    /// in progress, and for a save that will replace the step.
    pub(super) fn hold(&self, step: u64, timeout: Duration) -> Result<()> {
        let (begun, deadline) = (Instant::now(), deadline_after(timeout));
        let mut used = self.lock();
        while used.retiring.contains(&step) || used.replacing.contains(&step) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let waited_for = format!("the removal or replacement of step {step}");
                return Err(Error::Timeout { waited_for, waited: begun.elapsed() });
            }
            used = self.changed.wait_timeout(used, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        *used.held.entry(step).or_default() += 1;
        Ok(())
    }

    /// Ends one hold.
    pub(super) fn release(&self, step: u64) {
        let mut used = self.lock();
        if let Some(count) = used.held.get_mut(&step) {
            *count -= 1;
            if *count == 0 {
                used.held.remove(&step);
            }
        }
    }

    /// Begins to retire those of these steps that this manager does not hold, and that no other
    /// call retires.
    pub(super) fn retiring(&self, steps: impl IntoIterator<Item = u64>) -> Retiring<'_> {
        let mut used = self.lock();
        let is_free = |step: &u64| !used.held.contains_key(step) && !used.retiring.contains(step);
        let steps: BTreeSet<u64> = steps.into_iter().filter(is_free).collect();
        used.retiring.extend(&steps);
        drop(used);
        Retiring { usage: self, steps }
    }

    /// Refuses to replace a held step.
    pub(super) fn check_replaceable(&self, step: u64) -> Result<()> {
        self.lock().check_replaceable(step)
    }

    /// Records that a save will replace this step: from here on a hold waits. Fails if the step is
    /// held.
    pub(super) fn replace(&self, step: u64) -> Result<()> {
        let mut used = self.lock();
        used.check_replaceable(step)?;
        used.replacing.push(step);
        Ok(())
    }

    /// Records that a save that replaces this step is over.
    pub(super) fn replaced(&self, step: u64) {
        let mut used = self.lock();
        if let Some(at) = used.replacing.iter().position(|&replacing| replacing == step) {
            used.replacing.swap_remove(at);
        }
        drop(used);
        self.changed.notify_all();
    }
}

/// The right to retire steps. A hold on one of them waits until it is dropped.
pub(super) struct Retiring<'a> {
    usage: &'a Usage,
    steps: BTreeSet<u64>,
}

impl Retiring<'_> {
    /// True if the step may be retired.
    pub(super) fn may_go(&self, step: u64) -> bool {
        self.steps.contains(&step)
    }
}

impl Drop for Retiring<'_> {
    fn drop(&mut self) {
        let mut used = self.usage.lock();
        for step in &self.steps {
            used.retiring.remove(step);
        }
        drop(used);
        self.usage.changed.notify_all();
    }
}
