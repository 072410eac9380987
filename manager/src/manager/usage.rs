//! The steps that calls of one manager use: held, being taken out of sight, to be replaced.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use stepwell_core::deadline::deadline_after;

use crate::error::{Error, Result};

/// See the module documentation.
#[derive(Default)]
pub(super) struct Usage {
    used: Mutex<Used>,
    changed: Condvar,
}

#[derive(Default)]
struct Used {
    /// Steps that this manager holds, and how often. A step is never here and in `retiring` at
    /// once.
    held: BTreeMap<u64, u64>,
    /// Steps that are being taken out of sight at this moment.
    retiring: BTreeSet<u64>,
    /// Steps that pending saves are to replace, one for each save.
    replacing: Vec<u64>,
}

impl Used {
    /// A step that is held is neither removed nor replaced.
    fn check_replaceable(&self, step: u64) -> Result<()> {
        if !self.held.contains_key(&step) {
            return Ok(());
        }
        let by = "this manager holds it (hold()), and what is held is not replaced; release the hold first"
            .to_owned();
        Err(Error::Held { step, by })
    }
}

impl Usage {
    fn lock(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The held steps.
    pub(super) fn held(&self) -> BTreeSet<u64> {
        self.lock().held.keys().copied().collect()
    }

    /// Counts a step as held, before anything is known of it: retention leaves it from here on.
    /// Waits for a retirement that has begun, and for a save that is to replace the step.
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

    /// Begins to take steps out of sight: all of these that this manager does not hold, and that no
    /// other call is taking away.
    pub(super) fn retiring(&self, steps: impl IntoIterator<Item = u64>) -> Retiring<'_> {
        let mut used = self.lock();
        let is_free = |step: &u64| !used.held.contains_key(step) && !used.retiring.contains(step);
        let steps: BTreeSet<u64> = steps.into_iter().filter(is_free).collect();
        used.retiring.extend(&steps);
        drop(used);
        Retiring { usage: self, steps }
    }

    /// Refuses to replace a step that is held.
    pub(super) fn check_replaceable(&self, step: u64) -> Result<()> {
        self.lock().check_replaceable(step)
    }

    /// A save is to replace this step: from here on a hold waits. Refused if it is held.
    pub(super) fn replace(&self, step: u64) -> Result<()> {
        let mut used = self.lock();
        used.check_replaceable(step)?;
        used.replacing.push(step);
        Ok(())
    }

    /// A save that was to replace this step is over.
    pub(super) fn replaced(&self, step: u64) {
        let mut used = self.lock();
        if let Some(at) = used.replacing.iter().position(|&replacing| replacing == step) {
            used.replacing.swap_remove(at);
        }
        drop(used);
        self.changed.notify_all();
    }
}

/// The right to take steps out of sight: as long as it lives, a hold on one of them waits.
pub(super) struct Retiring<'a> {
    usage: &'a Usage,
    steps: BTreeSet<u64>,
}

impl Retiring<'_> {
    /// True if a step is among those that may go.
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
