//! The persister: writes and commits, first in, first out, and has retention applied after each
//! commit.
//!
//! Threads take turns, one for each save that may be pending. One save is written at a time, one is
//! committed at a time, in the order of their calls. If a commit takes long (slow ranks) and the
//! next capture waits for staging memory, the next save is written meanwhile: writes free slots,
//! commits do not. If nobody waits for memory, the next save is written after the commit, so that
//! it finds the files of the step that retention has retired ([`crate::spares`]).

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use stepwell_core::sys::spawn;

use super::{Inner, State};
use crate::commit::Existing;
use crate::error::{Error, Result};
use crate::guard::guarded;
use crate::save::Outcome;
use crate::save::job::Job;
use crate::save::persist::{self, Ended};

/// How often it is looked whether somebody waits for staging memory, while a commit goes on.
const LOOK: Duration = Duration::from_millis(5);

/// The turns of the saves, numbered as they leave the queue.
#[derive(Clone, Copy, Default)]
pub(super) struct Turns {
    /// How many have been taken, how many are not being written any more, and how many have ended.
    taken: u64,
    written: u64,
    ended: u64,
}

impl Turns {
    fn has_been_written(&mut self, turn: u64) {
        self.written = self.written.max(turn + 1);
    }
}

impl Inner {
    /// Has a thread there for one more save, where the others may be busy with commits.
    pub(super) fn start_persister(self: &Arc<Self>, state: &mut State) -> Result<()> {
        let others = state.queue.len() as u64 + state.turns.taken - state.turns.ended;
        if state.persisters.len() <= self.options.max_pending && state.persisters.len() as u64 <= others {
            let inner = Arc::clone(self);
            let thread = spawn("stepwell-persist", move || inner.persist())
                .map_err(|error| stepwell_core::Error::io("start a thread for", &self.path, error))?;
            state.persisters.push(thread);
        }
        Ok(())
    }

    /// The body of a persister's thread. It ends when it is told to and nothing is left.
    fn persist(self: &Arc<Self>) {
        while let Some((job, turn)) = self.next_job() {
            let replaces = job.plan.existing == Existing::Replace;
            let counter = job.plan.attempt.counter;
            let written = || {
                self.lock().turns.has_been_written(turn);
                self.changed.notify_all();
                self.wait_for_turn(turn);
            };
            let (save, ended) =
                persist::run(job, &self.root, &self.environment, &self.team, &self.deleter, &written);
            // A save that was not written.
            self.wait_for_turn(turn);
            let Ended { outcome, replaced } = ended;
            self.forget_verdicts(counter);
            // A failure to clean up is no failure of the save, nor is a defect: it is settled in
            // any case.
            let cleaned = guarded("what follows a save", || self.follow_up(save.step(), &outcome, replaced));
            if let Err(error) = cleaned.map_err(Error::from).and_then(|applied| applied) {
                tracing::warn!(%error, "retention could not be applied; it is tried again after the next commit");
            }
            let callbacks = {
                // In one step: a caller that sees the outcome must not find the save pending, and
                // one that finds nothing pending must find the failure.
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
                    state.last_failure = Some(save.clone());
                    state.unsettled.insert(counter);
                }
                state.over.insert(counter);
                state.turns.ended += 1;
                // It failed before or during the write.
                state.turns.has_been_written(turn);
                callbacks
            };
            save.call(callbacks);
            persist::log_commit(&save, &self.team, &format!("step {}", save.step()), &self.path);
            self.changed.notify_all();
        }
    }

    /// The next save to be written, once it may be; `None` when there will be none.
    fn next_job(&self) -> Option<(Job, u64)> {
        let mut state = self.lock();
        loop {
            let Turns { taken, written, ended } = state.turns;
            let starved = || state.pool.as_ref().is_some_and(|pool| pool.is_starved());
            let may = written == taken && (ended == taken || starved());
            if may && let Some(job) = state.queue.pop_front() {
                state.turns.taken += 1;
                return Some((job, taken));
            }
            if state.stop && state.queue.is_empty() {
                return None;
            }
            let pause =
                if state.queue.is_empty() || written < taken { Duration::from_secs(60) } else { LOOK };
            state = self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until all saves before this one have ended; each of them does, by its own deadlines.
    fn wait_for_turn(&self, turn: u64) {
        let mut state = self.lock();
        while state.turns.ended < turn {
            state = self
                .changed
                .wait_timeout(state, Duration::from_secs(60))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn follow_up(&self, step: u64, outcome: &Outcome, replaced: Option<String>) -> Result<()> {
        match outcome {
            Outcome::Committed => {
                self.lock().uncertain.remove(&step);
                self.deleter.enqueue(replaced);
                if self.team.leads() {
                    self.discovery.refresh(&*self.root, &self.names)?;
                    self.apply_retention()?;
                }
            }
            Outcome::DurabilityUncertain(_) => {
                self.lock().uncertain.insert(step);
            }
            Outcome::NotCommitted(_) => {}
        }
        Ok(())
    }
}
