//! The persister: writes and commits saves, first in, first out, and applies retention after each
//! commit.
//!
//! It has one thread for each save that may be pending. One save is written at a time, and one is
//! committed at a time, in the order of the calls. If a commit takes long (slow ranks) and the next
//! capture waits for staging memory, the next save is written during the commit: writes free slots,
//! commits do not. Otherwise the next save is written after the commit. It then finds the files of
//! the step that retention has retired ([`crate::spares`]).

use std::sync::Arc;
use std::time::Duration;

use stepwell_core::sys::spawn;

use super::Inner;
use super::saves::{QueuedSaves, Writes};
use crate::commit::Existing;
use crate::error::{Error, Result};
use crate::guard::guarded;
use crate::save::Outcome;
use crate::save::job::SaveJob;
use crate::save::persist::{self, SaveEnd};

/// During a commit, the next thread checks at this interval if a capture waits for staging memory.
const STARVATION_POLL_INTERVAL: Duration = Duration::from_millis(5);

impl Inner {
    /// Starts a thread for one more save, if the others may be busy with commits.
    pub(super) fn start_persister(self: &Arc<Self>, writes: &mut Writes) -> Result<()> {
        let others = writes.queue.len() as u64 + writes.taken - writes.ended;
        if writes.threads.len() <= self.options.max_pending && writes.threads.len() as u64 <= others {
            let inner = Arc::clone(self);
            let thread = spawn("stepwell-persist", move || inner.persist())
                .map_err(|error| stepwell_core::Error::io("start a thread for", &self.root.path, error))?;
            writes.threads.push(thread);
        }
        Ok(())
    }

    /// The body of a persister's thread. It ends after a stop, when no save is left.
    fn persist(self: &Arc<Self>) {
        while let Some((job, turn)) = self.next_job() {
            let replaces = job.plan.existing == Existing::Replace;
            let counter = job.plan.attempt.counter;
            let written = || {
                self.saves.lock().writes.has_been_written(turn);
                self.saves.changed.notify_all();
                self.wait_for_turn(turn);
                self.machines.as_ref().map_or(Ok(()), |machines| machines.record_session())
            };
            let (save, ended) = persist::run(
                job,
                &self.root.dir,
                &self.environment,
                &self.team,
                &self.root.deleter,
                &written,
            );
            // A failed save may not have waited for its turn yet.
            self.wait_for_turn(turn);
            let SaveEnd { outcome, replaced } = ended;
            self.remove_read_verdicts(counter);
            // A failed clean-up is not a failed save: set the outcome of the save in any case.
            let cleaned = guarded("what follows a save", || self.follow_up(save.step(), &outcome, replaced));
            if let Err(error) = cleaned.map_err(Error::from).and_then(|applied| applied) {
                tracing::warn!(%error, "applying retention failed. It is tried again after the next commit");
            }
            let callbacks = {
                // Under one lock: a caller that sees the outcome must not find the save pending,
                // and one that finds no pending save must find the failure.
                let mut queued = self.saves.lock();
                queued.pending.retain(|pending| !pending.is(&save));
                let failed = outcome.error().is_some();
                let callbacks = save.set_outcome(outcome);
                queued.endings.add(counter, &save, failed);
                queued.writes.ended += 1;
                // It failed before or during the write.
                queued.writes.has_been_written(turn);
                callbacks
            };
            if replaces {
                self.usage.replaced(save.step());
            }
            save.call(callbacks);
            persist::log_commit(&save, &self.team, &format!("step {}", save.step()), &self.root.path);
            // Callbacks run in the order of the saves.
            self.saves.changed.notify_all();
        }
    }

    /// Waits for the next save that may be written. `None` after a stop.
    fn next_job(&self) -> Option<(SaveJob, u64)> {
        let mut queued = self.saves.lock();
        loop {
            let QueuedSaves { writes, pool, end, .. } = &mut *queued;
            let starved = || pool.as_ref().is_some_and(|pool| pool.is_starved());
            let may = writes.written == writes.taken && (writes.ended == writes.taken || starved());
            if may && let Some(job) = writes.queue.pop_front() {
                writes.taken += 1;
                return Some((job, writes.taken - 1));
            }
            if end.stop && writes.queue.is_empty() {
                return None;
            }
            let is_idle = writes.queue.is_empty() || writes.written < writes.taken;
            queued = self
                .saves
                .wait(queued, if is_idle { Duration::from_secs(60) } else { STARVATION_POLL_INTERVAL });
        }
    }

    /// Waits until all saves before this one have ended. Each of them has its own deadlines.
    fn wait_for_turn(&self, turn: u64) {
        let mut queued = self.saves.lock();
        while queued.writes.ended < turn {
            queued = self.saves.wait(queued, Duration::from_secs(60));
        }
    }

    fn follow_up(&self, step: u64, outcome: &Outcome, replaced: Option<String>) -> Result<()> {
        match outcome {
            Outcome::Committed => {
                self.root.set_uncertain(step, false);
                self.root.deleter.enqueue(replaced);
                if self.team.leads() {
                    self.carry_later(step);
                    self.root.discovery.refresh(&*self.root.dir, &self.root.names)?;
                    self.apply_retention()?;
                }
            }
            Outcome::DurabilityUncertain(_) => {
                self.root.set_uncertain(step, true);
            }
            Outcome::NotCommitted(_) => {}
        }
        Ok(())
    }
}
