//! The agreements of several ranks. One process needs none of them.
//!
//! * If the policy needs only the step, and the step is above all that were ever begun, every rank
//!   decides by itself. Otherwise (clocks, signals, callables, a step that may exist) the leader's
//!   answer binds all.
//! * Every save has the same number on all ranks. A rank whose call of `save` fails after the
//!   decision still reports that it does not save ([`Ticket`]).
//! * The same call raises the failure of a save on all ranks: the first `save` before which that
//!   save has ended on each of them.
//! * A call without an answer ends the session: all later calls fail.
//! * Before the first save, and after a rank has reported changed leaves, the ranks exchange which
//!   leaves they have ([`Census`]).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::saves::QueuedSaves;
use super::{Exists, Inner, Manager};
use crate::commit::Announcement;
use crate::error::{Error, Result};
use crate::periodic::Periodic;
use crate::runs::{in_both, numbers_of, runs_of};
use crate::save::{Refusal, Save, participation};
use crate::save_policy::Facts;
use crate::state::{Census, StateSource, plain_leaves};

/// The state on which the ranks agree, beside their saves.
#[derive(Default)]
pub(super) struct Ranks {
    known: Mutex<AgreedState>,
    /// Held during a census: an interrupted call may still be in it when the next call begins.
    census_lock: Mutex<()>,
    /// This rank's heartbeat.
    heartbeat: Mutex<Option<Periodic>>,
}

#[derive(Default)]
struct AgreedState {
    /// The largest step of the root when it was opened, or of a save begun since. Equal on all
    /// ranks.
    highest: Option<u64>,
    /// The holders of plain leaves, from the last census.
    census: Option<Arc<Census>>,
    /// The step that the leader last chose for a restore.
    chosen: Option<u64>,
    /// This rank takes part in a restore: it sends heartbeats, however long it reads.
    restoring: bool,
    /// It is in a call of that restore which all ranks make.
    in_restore_call: bool,
    /// The reason why its caller left that call. The next call reports it.
    restore_left: Option<String>,
}

impl Ranks {
    fn lock(&self) -> MutexGuard<'_, AgreedState> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
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

/// The right to save one step. With several ranks it is also a duty: dropped unused, it reports to
/// the others that this rank does not save.
pub struct Ticket {
    inner: Arc<Inner>,
    pub(super) step: u64,
    /// True if the save replaces a step.
    pub(super) replaces: bool,
    /// True if this rank's leaves have changed since the last census. `None` before this rank has
    /// taken part in the census of this save.
    pub(super) stale: Option<bool>,
    /// True if the save has a number, or needs none.
    pub(super) used: bool,
    cause: Arc<OnceLock<String>>,
}

impl Ticket {
    pub(super) fn new(inner: &Arc<Inner>, step: u64, replaces: bool) -> Self {
        Self {
            inner: Arc::clone(inner),
            step,
            replaces,
            stale: None,
            used: inner.team.is_alone(),
            cause: Arc::default(),
        }
    }

    /// The step.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns the place for the reason of a drop, which the other ranks get. The first reason
    /// stays.
    pub fn cause(&self) -> Arc<OnceLock<String>> {
        Arc::clone(&self.cause)
    }

    /// Drops the ticket with the reason of a failure.
    pub(super) fn fail(self, error: &Error) {
        let _ = self.cause.set(error.to_string());
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.used && self.inner.birth.is_here() {
            let cause = self.cause.get_or_init(|| "its call of save was interrupted".to_owned());
            self.inner.report_no_save(self.step, self.stale.is_some(), cause);
        }
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
        self.settle_failures(step)?;
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

    /// Returns the leader's answer to a question that may depend on a preemption. A rank that got
    /// the signal leaves a mark on the board. Once the leader finds it, all ranks learn of it by
    /// the same answer. So the call needs no message of each rank.
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
    /// has not seen a failure of one of them, all ranks raise it.
    fn settle_failures(&self, step: u64) -> Result<()> {
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
        if queued.endings.unsettled(before).is_empty() {
            return Ok(());
        }
        let unseen = queued.endings.unseen().next().is_some();
        drop(queued);
        let answer = |unseen: Vec<bool>| Ok((unseen.contains(&true), self.team.census_stale_since()));
        let (raise, census_stale_since) =
            self.team.settle("save after one that failed", Ok(unseen), answer)?;
        // A rank that failed by itself has not read the verdict, which reports this too.
        if let Some(save) = census_stale_since {
            self.team.record_stale_census(save);
        }
        self.saves.lock().endings.set_settled_before(before);
        if raise { self.raise_failure(step) } else { Ok(()) }
    }

    /// Looks up verdicts that came too late for this rank. A save that the leader committed after
    /// all did not fail on the other ranks, so no agreement is needed.
    fn read_late_verdicts(&self, before: u64) -> Result<()> {
        if self.team.leads() {
            return Ok(());
        }
        let failed = self.saves.lock().endings.unsettled(before);
        for counter in failed {
            let Some(verdict) = self.team.verdict(counter, Duration::ZERO)? else { continue };
            if matches!(Announcement::decode(&verdict), Ok((Announcement::Committed, _))) {
                self.saves.lock().endings.set_settled(counter);
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

    /// Gives the save that this rank does not make a number, and reports that to the other ranks.
    fn report_no_save(&self, step: u64, in_census: bool, cause: &str) {
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
        // By then, all saves that may have reported it have ended on all ranks: see
        // `settle_failures`.
        let lag = self.options.max_pending as u64 + 2;
        let outdated = self.team.census_stale_since().is_some_and(|save| counter >= save + lag);
        self.ranks.lock().census.clone().filter(|_| !outdated)
    }

    /// Removes verdicts that all ranks have read, since they have voted on this save.
    pub(super) fn forget_verdicts(&self, counter: u64) {
        if self.team.is_alone() || !self.team.leads() {
            return;
        }
        let read = counter.saturating_sub(self.options.max_pending as u64 + 1);
        if let Err(error) = self.team.forget_verdicts(read) {
            tracing::debug!(%error, "removing read messages failed");
        }
    }
}

impl Manager {
    /// Returns the step that a restore takes (`None`: the latest). It is the leader's answer on
    /// every rank.
    pub fn choose(&self, step: Option<u64>) -> Result<u64> {
        self.inner.check_usable()?;
        self.in_restore_call(|| {
            let chosen = self.inner.team.ask("restore", || Ok(self.inner.root.find(step)?.manifest.step))?;
            // The leader has listed it, so it counts.
            self.inner.root.set_uncertain(chosen, false);
            let mut known = self.inner.ranks.lock();
            known.chosen = Some(chosen);
            known.restoring = true;
            Ok(chosen)
        })
    }

    /// Records that the caller of this rank has left a restore of all ranks, in one of its calls or
    /// between them. The others get the reason once that call is answered.
    pub fn leave_restore(&self, cause: &str) {
        if !self.inner.birth.is_here() {
            return;
        }
        let mut known = self.inner.ranks.lock();
        if known.in_restore_call {
            known.restore_left = Some(cause.to_owned());
        } else if known.restoring {
            drop(known);
            self.report_left(cause.to_owned());
        }
    }

    /// Ends the session, because a call of this rank failed before it knew which save it makes. The
    /// next saves of the others fail with the cause, until a call of theirs finds the session over.
    pub fn end_session(&self, cause: &str) {
        let inner = &self.inner;
        if inner.team.is_alone() || !inner.birth.is_here() || inner.check_usable().is_err() {
            return;
        }
        // After this, no heartbeat tells the others that this rank still writes.
        let _ = inner.drain(None);
        let (rank, counter) = (inner.team.rank(), inner.saves.lock().counter);
        for ahead in 0..=inner.options.max_pending as u64 + 1 {
            participation::abstain(&inner.team, counter.saturating_add(ahead), 0, cause);
        }
        inner.team.end_session(Error::RankFailed { rank, cause: cause.to_owned() });
    }

    fn report_left(&self, cause: String) {
        let failed = if self.inner.team.leads() {
            Error::RankFailed { rank: self.inner.team.rank(), cause }
        } else {
            Error::Invalid(cause)
        };
        // It gives that failure back.
        drop(self.inner.team.settle("restore", Err::<(), _>(failed), |_| Ok(())));
        self.inner.ranks.end_restore();
    }

    /// Runs one call of a restore. An error ends the restore on all ranks. Otherwise
    /// [`Manager::restored`] ends it.
    fn in_restore_call<T>(&self, ask: impl FnOnce() -> Result<T>) -> Result<T> {
        self.inner.ranks.lock().in_restore_call = true;
        let answer = ask();
        let left = {
            let mut known = self.inner.ranks.lock();
            known.in_restore_call = false;
            known.restoring &= answer.is_ok();
            known.restore_left.take()
        };
        if let (Some(cause), true) = (left, answer.is_ok()) {
            self.report_left(cause);
        }
        answer
    }

    /// Returns those of the given stored leaves, which this rank does not want, that no other rank
    /// wants. `None` if the ranks restore in different ways (`how`).
    pub fn wanted_by_none(&self, how: &str, mut unwanted: Vec<u32>) -> Result<Option<Vec<u32>>> {
        self.inner.check_usable()?;
        unwanted.sort_unstable();
        // Send runs: thousands of ranks each have thousands of unwanted leaves, and those of a
        // stage or an expert are adjacent.
        let mine = (how.to_owned(), runs_of(&unwanted));
        let found = self.restoring("restore", Ok(mine), |all| {
            let mut all = all.into_iter();
            let Some((how, first)) = all.next() else { return Ok(None) };
            let mut found = Some(first);
            for (other, unwanted) in all {
                found = found.filter(|_| other == how).map(|found| in_both(&found, &unwanted));
            }
            Ok(found)
        })?;
        Ok(found.map(numbers_of))
    }

    /// True if all ranks pass the same text.
    pub fn alike(&self, what: &str) -> Result<bool> {
        self.inner.check_usable()?;
        self.restoring("restore", Ok(what.to_owned()), |all| {
            Ok(all.windows(2).all(|two| matches!(two, [one, other] if one == other)))
        })
    }

    /// Makes one result of the results of all ranks: if one rank has failed, all fail with its
    /// cause.
    pub fn agree(&self, what: &str, mine: Result<()>) -> Result<()> {
        self.inner.check_usable()?;
        self.restoring(what, mine, |_| Ok(()))
    }

    /// Exchanges the reports of ranks in a restore.
    fn restoring<S: Serialize + for<'de> Deserialize<'de>, T: Serialize + for<'de> Deserialize<'de>>(
        &self,
        what: &str,
        mine: Result<S>,
        answer: impl FnOnce(Vec<S>) -> Result<T>,
    ) -> Result<T> {
        self.in_restore_call(|| self.inner.team.settle(what, mine, answer))
    }

    /// Returns this process's rank, and the number of ranks.
    pub fn ranks(&self) -> (u32, u32) {
        (self.inner.team.rank(), self.inner.team.world_size())
    }
}
