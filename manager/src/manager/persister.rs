//! The persister: one thread per manager that writes and commits, first in, first out, and applies retention after each commit.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::Inner;
use crate::commit::Existing;
use crate::commit::aside::{self, Thinned};
use crate::directory_layout;
use crate::discovery::Found;
use crate::error::{Error, Result};
use crate::guard::guarded;
use crate::recovery;
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
                self.apply_retention()?;
            }
            Outcome::DurabilityUncertain(_) => {
                self.lock().uncertain.insert(step);
            }
            Outcome::NotCommitted(_) => {}
        }
        Ok(())
    }

    /// Retires what no rule keeps, and thins what is kept in part. Called after a newer step is committed, never before.
    pub(super) fn apply_retention(&self) -> Result<Vec<u64>> {
        if self.options.retention == crate::retention::Retention::KeepAll {
            return Ok(Vec::new());
        }
        let (plan, found) = self.retention_plan()?;
        self.check_fence()?;
        // What was held since the plan was made stays.
        let retiring = self.retiring(plan.deleted());
        let mut victims: Vec<u64> = plan.deleted().filter(|&step| retiring.may_go(step)).collect();
        let mut renames = Vec::with_capacity(victims.len());
        let mut attempts = Vec::with_capacity(victims.len());
        for step in &victims {
            if let Some(found) = found.get(step) {
                let label = directory_layout::label(*step);
                let trash = directory_layout::trash(&label, self.environment.rng.next_u128());
                renames.push((found.name.clone(), trash));
                attempts.push(found.manifest.attempt.clone());
            }
        }
        let retired = aside::retire_all(&*self.root, &renames);
        drop(retiring);
        // Also where it was cut short: what is out of sight, and durably so, is deleted.
        let deletable = retired.deletable();
        for attempt in attempts.iter().take(deletable) {
            self.sidecars.remove(&*self.root, attempt);
        }
        victims.truncate(retired.renamed);
        self.deleter.enqueue(renames.into_iter().take(deletable).map(|(_, trash)| trash));
        if let Some(error) = retired.error {
            return Err(error.into());
        }
        for (step, keep) in plan.thinned() {
            let Some(found) = found.get(&step) else { continue };
            match aside::thin(&*self.root, &found.name, keep, self.environment.clock.unix_ns())? {
                Thinned::Dropped(items) => tracing::info!(step, ?items, "thinned"),
                Thinned::Later(items) => {
                    tracing::info!(step, ?items, "thinned; the files go after the grace period");
                }
                Thinned::Held => tracing::info!(step, "not thinned now: it is being read"),
                Thinned::Nothing => {}
            }
        }
        self.finish_thinnings(&found);
        Ok(victims)
    }

    /// Where there are no locks, a thinning leaves its files for the grace period: those whose time has come are deleted.
    fn finish_thinnings(&self, found: &BTreeMap<u64, Found>) {
        if self.lock().lock.is_some() {
            return;
        }
        for (step, found) in found.iter().filter(|(_, found)| !found.manifest.dropped.is_empty()) {
            let finished = self.root.open_dir(&found.name).and_then(|dir| {
                let now = self.environment.clock.unix_ns();
                recovery::finish_thinning(&dir, found, now, self.options.grace)
            });
            if let Err(error) = finished {
                tracing::debug!(step, %error, "what was thinned away stays for now");
            }
        }
    }
}
