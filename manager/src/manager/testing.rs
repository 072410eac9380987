//! Questions that only tests ask a manager.

use std::path::PathBuf;
use std::time::Duration;

use super::Manager;
use crate::error::Result;
use crate::step_name::StepName;

impl Manager {
    /// The pattern of its steps' names.
    pub fn step_name(&self) -> &StepName {
        &self.inner.root.names
    }

    /// Waits until retired steps are deleted, except for those that readers hold or the next save
    /// overwrites. `false` at the deadline.
    pub fn wait_for_deletions(&self, timeout: Duration) -> Result<bool> {
        self.inner.check_usable()?;
        Ok(self.inner.root.deleter.drain(timeout))
    }

    /// Returns the path of a step, for messages.
    pub fn step_path(&self, step: u64) -> PathBuf {
        self.inner.root.path.join(self.inner.root.names.format(step))
    }

    /// Returns the steps of pending saves, in the order of their commits.
    pub fn pending(&self) -> Result<Vec<u64>> {
        self.inner.check_usable()?;
        Ok(self.inner.saves.lock().pending.iter().map(crate::save::Save::step).collect())
    }
}
