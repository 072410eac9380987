//! The agreements of several ranks on their saves. A single process needs none of them.
//!
//! * If the policy needs only the step, and the step is above all that were ever begun, every rank
//!   decides by itself. Otherwise (clocks, signals, callables, a step that may exist) the leader's
//!   answer binds all.
//! * Every save has the same number on all ranks. If a rank's call of `save` fails after the
//!   decision, the rank reports that it does not save ([`Ticket`]).
//! * All ranks raise the failure of a save in the same call: the first `save` that begins after the
//!   failed save has ended on all ranks.
//! * A call without an answer ends the session: all later calls fail.
//! * Before the first save, and after a rank has reported changed leaves, the ranks exchange which
//!   leaves they have ([`Census`]).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::saves::QueuedSaves;
use super::ticket::Ticket;
use super::{Exists, Inner, Manager};
use crate::commit::Announcement;
use crate::error::{Error, Result};
use crate::periodic::Periodic;
use crate::save::{Refusal, Save, participation};
use crate::save_policy::Facts;
use crate::state::{Census, StateSource, plain_leaves};

/// The state on which the ranks agree, beside their saves.
#[derive(Default)]
pub(super) struct Ranks {
    state: Mutex<AgreedState>,
    /// Held during a census: an interrupted call may still be in it when the next call begins.
    census_lock: Mutex<()>,
    /// This rank's heartbeat.
    heartbeat: Mutex<Option<Periodic>>,
}

#[derive(Default)]
pub(super) struct AgreedState {
    /// The largest step of the root when it was opened, or of a save begun since. Equal on all
    /// ranks.
    highest: Option<u64>,
    /// The holders of plain leaves, from the last census.
    census: Option<Arc<Census>>,
    /// The step that the leader last chose for a restore.
    pub chosen: Option<u64>,
    /// True while this rank takes part in a restore. It then sends heartbeats, even during long
    /// reads.
    pub restoring: bool,
    /// True while this rank makes a call of that restore that all ranks make.
    pub in_restore_call: bool,
    /// The reason why the caller left that call. It is reported after the call.
    pub restore_left: Option<String>,
}

impl Ranks {
    pub(super) fn lock(&self) -> MutexGuard<'_, AgreedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins after the ranks have met.
    pub(super) fn begin(&self, newest: Option<u64>, heartbeat: Periodic) {
        self.lock().highest = newest;
        *self.heartbeat.lock().unwrap_or_else(PoisonError::into_inner) = Some(heartbeat);
    }

    /// Ends the heartbeat.
    pub(super) fn end(&self) {
        let heartbeat = self.heartbeat.lock().unwrap_or_else(PoisonError::into_inner).take();
        heartbeat.into_iter().for_each(Periodic::stop);
    }

    /// Records that a save of that step was begun.
    pub(super) fn raise_highest(&self, step: u64) {
        let mut known = self.lock();
        known.highest = known.highest.max(Some(step));
    }

    /// Sets the newest step, after a rewind.
    pub(super) fn set_highest(&self, step: u64) {
        self.lock().highest = Some(step);
    }

    pub(super) fn chosen(&self) -> Option<u64> {
        self.lock().chosen
    }

    pub(super) fn is_restoring(&self) -> bool {
        self.lock().restoring
    }

    pub(super) fn end_restore(&self) {
        self.lock().restoring = false;
    }
}

/// A decision, as the leader announces it.
#[derive(Serialize, Deserialize)]
pub(super) enum AgreedDecision {
    Save,
    Replace,
    Refuse(Refusal),
    Pending,
}

/// The facts for a policy that every rank knows.
struct AgreedFacts<'a> {
    step: u64,
    is_first: bool,
    custom: &'a BTreeMap<String, bool>,
}

impl Facts for AgreedFacts<'_> {
    fn step(&self) -> u64 {
        self.step
    }

    fn is_first(&self) -> Result<bool> {
        Ok(self.is_first)
    }

    fn custom(&self, name: &str) -> bool {
        self.custom.get(name).copied().unwrap_or(false)
    }
}

impl Inner {
    /// [`Inner::decide`] for several ranks: all get the same decision.
    pub(super) fn decide_together(
        &self,
        step: u64,
        force: bool,
        exists: Exists,
        custom: &BTreeMap<String, bool>,
    ) -> Result<AgreedDecision> {
        self.team.check_session()?;
        self.agree_on_failures(step)?;
        if force || self.options.save_policy.is_deterministic() {
            if !force && !self.agreed_policy_answer(step, custom)? {
                return Ok(AgreedDecision::Refuse(Refusal::Policy));
            }
            if self.ranks.lock().highest.is_none_or(|highest| step > highest) {
                return Ok(AgreedDecision::Save);
            }
        }
        self.ask_with_preemption("save", || self.decide(step, force, exists, custom))
    }

    /// Returns the answer of a deterministic policy, from facts that every rank knows.
    pub(super) fn agreed_policy_answer(&self, step: u64, custom: &BTreeMap<String, bool>) -> Result<bool> {
        let is_first = self.ranks.lock().highest.is_none();
        self.options.save_policy.should_save(&AgreedFacts { step, is_first, custom })
    }

    /// Returns the leader's answer to a question that may depend on a preemption. A rank that gets
    /// the signal puts a mark on the board. When the leader finds it, its answer reports the
    /// preemption to all ranks. So the call needs no message from each rank.
    pub(super) fn ask_with_preemption<T: Serialize + for<'de> Deserialize<'de>>(
        &self,
        what: &str,
        answer: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if !self.options.save_policy.listens() {
            return self.team.ask(what, answer);
        }
        let (mine, known) = {
            let done = self.history.lock();
            (done.preemption_asked, done.preempted.is_some())
        };
        if mine
            && !known
            && !self.team.leads()
            && let Err(error) = self.team.report_preemption()
        {
            // Go on: the others make this call too. The next call reports it again.
            tracing::warn!(%error, "announcing the preemption to the other ranks failed");
        }
        let (answer, preempted) = self.team.ask(what, || {
            if !known && self.team.is_preemption_reported()? {
                self.history.lock().preemption_asked = true;
            }
            let answer = answer()?;
            Ok((answer, self.history.lock().preempted))
        })?;
        if preempted.is_some() {
            self.history.lock().preempted = preempted;
        }
        Ok(answer)
    }

    /// Waits until all saves that must end before the next one have ended on this rank. If a rank
    /// has an unseen failure of one of them, all ranks raise it.
    fn agree_on_failures(&self, step: u64) -> Result<()> {
        let lag = self.options.max_pending as u64 + 1;
        let before = self.saves.lock().counter.saturating_sub(lag);
        let begun = Instant::now();
        let are_pending = |queued: &QueuedSaves| !queued.endings.are_over(before);
        let Some(mut queued) = self.saves.wait_while(self.options.stall_timeout, false, are_pending) else {
            let waited_for = "an earlier save to end".to_owned();
            return Err(self.team.end_session(Error::Timeout { waited_for, waited: begun.elapsed() }));
        };
        queued.endings.forget(before);
        drop(queued);
        self.team.forget_votes(before);
        self.read_late_verdicts(before).map_err(|error| self.team.end_session(error))?;
        let queued = self.saves.lock();
        if queued.endings.open_failures(before).is_empty() {
            return Ok(());
        }
        let unseen = queued.endings.unseen().next().is_some();
        drop(queued);
        let answer = |unseen: Vec<bool>| Ok((unseen.contains(&true), self.team.census_stale_since()));
        let (raise, census_stale_since) = self.team.agree("save after a failed save", Ok(unseen), answer)?;
        // The verdict reports this too. A rank whose own part failed has not read it.
        if let Some(save) = census_stale_since {
            self.team.record_stale_census(save);
        }
        self.saves.lock().endings.close_failures(before);
        if raise { self.raise_failure(step) } else { Ok(()) }
    }

    /// Reads verdicts that came too late for this rank. A save that the leader committed has not
    /// failed, so the ranks need not agree on its failure.
    fn read_late_verdicts(&self, before: u64) -> Result<()> {
        if self.team.leads() {
            return Ok(());
        }
        let failed = self.saves.lock().endings.open_failures(before);
        for counter in failed {
            let Some(verdict) = self.team.verdict(counter, Duration::ZERO)? else { continue };
            if matches!(Announcement::decode(&verdict), Ok((Announcement::Committed, _))) {
                self.saves.lock().endings.close_failure(counter);
            }
        }
        Ok(())
    }

    /// Raises a failure that this rank, or another one, has not seen.
    fn raise_failure(&self, step: u64) -> Result<()> {
        self.raise_unseen(Some(step))?;
        let last = self.saves.lock().endings.last_failure().cloned();
        match last {
            Some(save) if self.options.on_save_error == crate::options::OnSaveError::Raise => {
                let error = save.outcome().and_then(|outcome| outcome.error().cloned());
                error.map_or(Ok(()), |source| Err(Error::Earlier { unsaved: Some(step), source }))
            }
            _ => Ok(()),
        }
    }

    /// Counts a save that this rank does not make, and reports that to the other ranks.
    pub(super) fn report_no_save(&self, step: u64, in_census: bool, cause: &str) {
        if !in_census {
            // The others may wait for this rank's leaves in a census.
            let _census = self.ranks.census_lock.lock().unwrap_or_else(PoisonError::into_inner);
            if self.known_census().is_none() {
                participation::abstain_from_exchange(&self.team, cause);
            }
        }
        let error = Error::RankFailed { rank: self.team.rank(), cause: cause.to_owned() };
        let counter = self.saves.lock().end_unbegun(Save::failed_unbegun(step, error));
        self.ranks.raise_highest(step);
        participation::abstain(&self.team, counter, step, cause);
    }

    /// Returns the holders of plain leaves. Without a census, or with a stale one, the ranks hold a
    /// census now. Sets on the ticket if this rank's leaves have changed since the census.
    pub(super) fn census(&self, ticket: &mut Ticket, state: &StateSource) -> Result<Option<Arc<Census>>> {
        if self.team.is_alone() {
            return Ok(None);
        }
        let leaves = plain_leaves(state);
        let _census = self.ranks.census_lock.lock().unwrap_or_else(PoisonError::into_inner);
        ticket.stale = Some(false);
        if let Some(census) = self.known_census() {
            ticket.stale = Some(!census.has(self.team.rank(), &leaves));
            return Ok(Some(census));
        }
        let census = Arc::new(participation::exchange_leaves(&self.team, Ok(leaves))?);
        self.ranks.lock().census = Some(Arc::clone(&census));
        self.team.record_census(self.saves.lock().counter);
        Ok(Some(census))
    }

    /// Returns the last census. `None` if there was none yet, or if it is stale: then the ranks
    /// hold one before the next save.
    fn known_census(&self) -> Option<Arc<Census>> {
        let counter = self.saves.lock().counter;
        // After this many saves, all saves that may have reported it have ended on all ranks: see
        // `agree_on_failures`.
        let lag = self.options.max_pending as u64 + 2;
        let outdated = self.team.census_stale_since().is_some_and(|save| counter >= save + lag);
        self.ranks.lock().census.clone().filter(|_| !outdated)
    }

    /// Removes verdicts that all ranks have read, since they have voted on this save.
    pub(super) fn remove_read_verdicts(&self, counter: u64) {
        if self.team.is_alone() || !self.team.leads() {
            return;
        }
        let read = counter.saturating_sub(self.options.max_pending as u64 + 1);
        if let Err(error) = self.team.remove_verdicts(read) {
            tracing::debug!(%error, "removing read messages failed");
        }
    }
}

impl Manager {
    /// Ends the session, because a call of this rank failed before it knew which save it makes. The
    /// next saves of the others fail with the cause, until a call of theirs finds the session over.
    pub fn end_session(&self, cause: &str) {
        let inner = &self.inner;
        if inner.team.is_alone() || !inner.birth.is_here() || inner.check_usable().is_err() {
            return;
        }
        // Finish the pending saves first: this rank sends no heartbeats after the end.
        let _ = inner.drain(None);
        let (rank, counter) = (inner.team.rank(), inner.saves.lock().counter);
        for ahead in 0..=inner.options.max_pending as u64 + 1 {
            participation::abstain(&inner.team, counter.saturating_add(ahead), 0, cause);
        }
        inner.team.end_session(Error::RankFailed { rank, cause: cause.to_owned() });
    }

    /// Returns this process's rank, and the number of ranks.
    pub fn ranks(&self) -> (u32, u32) {
        (self.inner.team.rank(), self.inner.team.world_size())
    }
}
