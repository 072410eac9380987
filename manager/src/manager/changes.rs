//! What changes a root beside saving: rewind, delete, hold, prune, later metrics.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Inner, Manager};
use crate::checkpoint::Checkpoint;
use crate::commit::aside;
use crate::directory_layout;
use crate::error::{Error, Result};
use crate::metrics;

/// A step that stays as long as this lives: leased, and counted by this manager's retention.
pub struct Hold {
    step: u64,
    inner: Arc<Inner>,
    _checkpoint: Checkpoint,
}

impl Hold {
    /// The step.
    pub fn step(&self) -> u64 {
        self.step
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if !self.inner.birth.is_here() {
            return;
        }
        let mut state = self.inner.lock();
        if let Some(count) = state.held.get_mut(&self.step) {
            *count -= 1;
            if *count == 0 {
                state.held.remove(&self.step);
            }
        }
    }
}

impl Manager {
    /// Makes `step` the latest: newer steps move aside into a branch, newest first, so that an interruption leaves a root whose latest is between the two.
    /// They are kept as `.branch-<name>.<step>`. Returns the branch and the steps that went there.
    pub fn rewind(&self, step: u64, branch: Option<&str>) -> Result<(String, Vec<u64>)> {
        let inner = &self.inner;
        inner.check_writable("rewind")?;
        let branch = match branch {
            Some(name) if directory_layout::is_branch_name(name) => name.to_owned(),
            Some(name) => {
                return Err(Error::Invalid(format!(
                    "the branch name {name:?} must be made of letters, digits, `_` and `-`"
                )));
            }
            None => {
                let unique = inner.environment.hex_id();
                format!("{}-{}", directory_layout::label(step), unique.get(..8).unwrap_or(&unique))
            }
        };
        inner.drain(None)?;
        let steps = inner.list()?;
        if !steps.contains_key(&step) {
            return Err(inner.not_found(Some(step)));
        }
        let mut moved = Vec::new();
        for (number, found) in steps.range(step + 1..).rev() {
            aside::set_aside(&*inner.root, &found.name, &branch)?;
            moved.push(*number);
        }
        // Steps that may not be durable are newer or none of ours; they go too, so that "latest" is what was asked for.
        let uncertain: Vec<u64> = inner.lock().uncertain.range(step + 1..).rev().copied().collect();
        for number in uncertain {
            let name = inner.names.format(number);
            if inner.root.stat(&name)?.is_some() {
                aside::set_aside(&*inner.root, &name, &branch)?;
            }
            inner.lock().uncertain.remove(&number);
        }
        inner.lock().trail.restored(step);
        Ok((branch, moved))
    }

    /// Deletes a step: out of sight at once and durably, its files in the background. The newest one is deleted too if it is asked for by name.
    pub fn delete(&self, step: u64) -> Result<()> {
        let inner = &self.inner;
        inner.check_writable("delete a step")?;
        let found = inner.find(Some(step))?;
        let label = directory_layout::label(step);
        let trash = directory_layout::trash(&label, inner.environment.rng.next_u128());
        aside::retire(&*inner.root, &found.name, &trash)?;
        inner.sidecars.remove(&*inner.root, &found.manifest.attempt);
        inner.deleter.enqueue([trash]);
        Ok(())
    }

    /// Keeps a step from retention and deletion as long as the [`Hold`] lives.
    pub fn hold(&self, step: u64) -> Result<Hold> {
        let checkpoint = self.checkpoint(Some(step))?;
        *self.inner.lock().held.entry(step).or_default() += 1;
        Ok(Hold { step, inner: Arc::clone(&self.inner), _checkpoint: checkpoint })
    }

    /// Adds metrics to a committed step; of several values for one name the last wins.
    pub fn add_metrics(&self, step: u64, metrics: &BTreeMap<String, f64>) -> Result<()> {
        self.inner.check_writable("add metrics")?;
        let found = self.inner.find(Some(step))?;
        metrics::add(&*self.inner.root, &found.manifest.attempt, step, metrics, &self.inner.environment)
    }

    /// Applies retention now (it is applied after every commit anyway), and returns the steps that went.
    pub fn apply_retention(&self) -> Result<Vec<u64>> {
        self.inner.check_writable("apply retention")?;
        self.inner.drain(None)?;
        self.inner.apply_retention()
    }

    /// Waits until what was retired is deleted, but for what readers hold. `false` by the deadline.
    pub fn wait_for_deletions(&self, timeout: std::time::Duration) -> Result<bool> {
        self.inner.check_usable()?;
        Ok(self.inner.deleter.drain(timeout))
    }
}
