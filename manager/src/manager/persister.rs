//! The persister: one thread per manager that writes and commits, first in, first out, and has retention applied after each commit.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::Inner;
use crate::commit::Existing;
use crate::error::{Error, Result};
use crate::guard::guarded;
use crate::save::Outcome;
use crate::save::persist::{self, Ended};

impl Inner {
    /// The body of the persister's thread. It ends when it is told to and nothing is left.
    pub(super) fn persist(self: &Arc<Self>) {
        loop {
            let job = {
                let mut state = self.lock();
                loop {
                    if let Some(job) = state.queue.pop_front() {
                        break job;
                    }
                    if state.stop {
                        return;
                    }
                    let wait = self.changed.wait_timeout(state, Duration::from_secs(60));
                    state = wait.unwrap_or_else(PoisonError::into_inner).0;
                }
            };
            let replaces = job.plan.existing == Existing::Replace;
            let (save, ended) = persist::run(job, &self.root, &self.environment, &self.deleter);
            let Ended { outcome, replaced } = ended;
            // A failure to clean up is no failure of the save, nor is a defect: it is settled in any case.
            let cleaned = guarded("what follows a save", || self.follow_up(save.step(), &outcome, replaced));
            if let Err(error) = cleaned.map_err(Error::from).and_then(|applied| applied) {
                tracing::warn!(%error, "retention could not be applied; it is tried again after the next commit");
            }
            let callbacks = {
                // In one step: whoever sees the outcome finds the save pending no more, and whoever finds nothing pending finds the failure.
                let mut state = self.lock();
                state.pending.retain(|pending| !pending.is(&save));
                if replaces {
                    state.is_replaced(save.step());
                }
                let failed = outcome.error().is_some();
                let callbacks = save.settle(outcome);
                state.failed.retain(crate::save::Save::is_unseen);
                if failed {
                    state.failed.push(save.clone());
                }
                callbacks
            };
            save.call(callbacks);
            self.changed.notify_all();
        }
    }

    fn follow_up(&self, step: u64, outcome: &Outcome, replaced: Option<String>) -> Result<()> {
        match outcome {
            Outcome::Committed => {
                self.lock().uncertain.remove(&step);
                self.deleter.enqueue(replaced);
                self.discovery.refresh(&*self.root, &self.names)?;
                self.apply_retention()?;
            }
            Outcome::DurabilityUncertain(_) => {
                self.lock().uncertain.insert(step);
            }
            Outcome::NotCommitted(_) => {}
        }
        Ok(())
    }
}
