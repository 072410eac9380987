//! The common actions of several ranks. One process needs none of them.
//!
//! * Nobody asks the leader whether a step is saved where every rank can know: the policy needs
//!   nothing but the step, and the step is above all that were ever begun. Else (clocks, signals,
//!   callables, a step that may be there) the leader's answer binds all.
//! * Every save has the same number on all ranks. So a rank whose call of `save` fails after the
//!   decision still takes part: it reports that it does not save ([`Ticket`]).
//! * The failure of a save is raised by the same call on all ranks: by the first `save` before
//!   which that save has ended on each of them.
//! * A call without an answer ends the session: all later calls raise.
//! * Before the first save, and after one of which a rank has said that its leaves are others, the
//!   ranks tell each other which leaves they have ([`Census`]).

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use stepwell_core::deadline::deadline_after;
use stepwell_core::format::manifest::Attempt;

use super::saving::Said;
use super::{Exists, Inner, Manager};
use crate::commit::{Announcement, Verdict, Vote};
use crate::error::{Error, Result};
use crate::runs::{in_both, numbers_of, runs_of};
use crate::save::{Refusal, Save};
use crate::save_policy::Facts;
use crate::state::{Census, StateSource, plain_leaves};

/// A rank, and what it has ([`plain_leaves`]).
type Told = (u32, Vec<u64>);

/// Facts that every rank knows alike.
struct Alike<'a> {
    step: u64,
    is_first: bool,
    custom: &'a BTreeMap<String, bool>,
}

impl Facts for Alike<'_> {
    fn step(&self) -> u64 {
        self.step
    }

    fn is_first(&self) -> Result<bool> {
        Ok(self.is_first)
    }

    fn seconds_since_save(&self) -> Result<Option<f64>> {
        Ok(None)
    }

    fn saving(&self) -> bool {
        false
    }

    fn preempted(&self) -> bool {
        false
    }

    fn custom(&self, name: &str) -> bool {
        self.custom.get(name).copied().unwrap_or(false)
    }
}

/// The right to save one step, which a decision gives; of several ranks also the duty to take part.
/// Dropped unused, it reports to the other ranks that this one does not save.
pub struct Ticket {
    inner: Arc<Inner>,
    pub(super) step: u64,
    /// True if the save replaces a step.
    pub(super) replaces: bool,
    /// True if this rank has taken part in the census of this save, or needs none.
    told: bool,
    /// True if the save has its number.
    pub(super) used: bool,
    cause: Arc<OnceLock<String>>,
}

impl Ticket {
    pub(super) fn new(inner: &Arc<Inner>, step: u64, replaces: bool) -> Self {
        Self {
            inner: Arc::clone(inner),
            step,
            replaces,
            told: false,
            used: inner.team.is_alone(),
            cause: Arc::default(),
        }
    }

    /// The step.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The place for the reason why the ticket is dropped, for the other ranks. The first one
    /// stays.
    pub fn cause(&self) -> Arc<OnceLock<String>> {
        Arc::clone(&self.cause)
    }

    /// Ends the ticket with the reason of a failure.
    pub(super) fn fail(self, error: &Error) {
        let _ = self.cause.set(error.to_string());
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.used && self.inner.birth.is_here() {
            let cause = self.cause.get_or_init(|| "its call of save was interrupted".to_owned());
            self.inner.take_no_part(self.step, self.told, cause);
        }
    }
}

impl Inner {
    /// [`Inner::decide`], where there are others: the same on all ranks.
    pub(super) fn decide_together(
        &self,
        step: u64,
        force: bool,
        exists: Exists,
        custom: &BTreeMap<String, bool>,
    ) -> Result<Said> {
        self.team.check_session()?;
        self.settle_failures(step)?;
        if force || self.options.save_policy.is_deterministic() {
            if !force && !self.says_yes_alike(step, custom)? {
                return Ok(Said::Refuse(Refusal::Policy));
            }
            if self.lock().highest.is_none_or(|highest| step > highest) {
                return Ok(Said::Save);
            }
        }
        self.ask_with_signals("save", || self.decide(step, force, exists, custom))
    }

    /// The answer of a deterministic policy, from facts that every rank knows.
    pub(super) fn says_yes_alike(&self, step: u64, custom: &BTreeMap<String, bool>) -> Result<bool> {
        let is_first = self.lock().highest.is_none();
        self.options.save_policy.should_save(&Alike { step, is_first, custom })
    }

    /// The leader's answer to a question that may depend on a preemption. A rank that got the
    /// signal leaves a mark. Once the leader has found it, all ranks learn of it by the same
    /// answer. So the call costs as much as any call to the leader, without a message of each rank.
    pub(super) fn ask_with_signals<T: Serialize + for<'de> Deserialize<'de>>(
        &self,
        what: &str,
        answer: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if !self.options.save_policy.listens() {
            return self.team.ask(what, answer);
        }
        let (mine, known) = {
            let state = self.lock();
            (state.preemption_asked, state.preempted.is_some())
        };
        if mine
            && !known
            && !self.team.leads()
            && let Err(error) = self.team.tell_signal()
        {
            // The call is made all the same, as the others make it; the next one tells it again.
            tracing::warn!(%error, "the other ranks could not be told that the job is to be preempted");
        }
        let (answer, preempted) = self.team.ask(what, || {
            if !known && self.team.is_told_signal()? {
                self.lock().preemption_asked = true;
            }
            let answer = answer()?;
            Ok((answer, self.lock().preempted))
        })?;
        let mut state = self.lock();
        if preempted.is_some() {
            state.preempted = preempted;
        }
        Ok(answer)
    }

    /// Waits until all saves have ended, on this rank, that must have before the next one may be
    /// begun. Raises the failure of one of them, on all ranks, if one of them has not seen it.
    fn settle_failures(&self, step: u64) -> Result<()> {
        let before = {
            let state = self.lock();
            state.counter.saturating_sub(self.options.max_pending as u64 + 1)
        };
        let begun = Instant::now();
        let limit = self.options.stall_timeout;
        let mut deadline = deadline_after(limit);
        let mut seen = None;
        let mut state = self.lock();
        while (state.over_before..before).any(|counter| !state.over.contains(&counter)) {
            let progress = state.pending.first().map(|first| (first.step(), first.moved()));
            if progress != seen {
                seen = progress;
                deadline = deadline_after(limit);
            }
            if Instant::now() >= deadline {
                let waited_for = "an earlier save to end".to_owned();
                drop(state);
                return Err(self.team.lose(Error::Timeout { waited_for, waited: begun.elapsed() }));
            }
            let pause = deadline_after(Duration::from_millis(20));
            state = match self.wait(state, pause.min(deadline)) {
                Some(state) => state,
                None => self.lock(),
            };
        }
        for counter in state.over_before..before {
            state.over.remove(&counter);
        }
        state.over_before = state.over_before.max(before);
        drop(state);
        self.team.forget_votes(before);
        self.hear_late(before).map_err(|error| self.team.lose(error))?;
        let state = self.lock();
        if state.unsettled.range(..before).next().is_none() {
            return Ok(());
        }
        let unseen = state.failed.iter().any(Save::is_unseen);
        drop(state);
        let answer = |unseen: Vec<bool>| Ok((unseen.contains(&true), self.team.outdated_by()));
        let (raise, outdated_by) = self.team.settle("save after one that failed", Ok(unseen), answer)?;
        // With the verdict, which a rank that had failed by itself has not heard.
        if let Some(save) = outdated_by {
            self.team.is_outdated_by(save);
        }
        let mut state = self.lock();
        state.unsettled = state.unsettled.split_off(&before);
        drop(state);
        if raise { self.raise_failure(step) } else { Ok(()) }
    }

    /// Saves whose end this rank has not heard, and that the leader has committed after all, are
    /// none that have failed: the others do not count them among those.
    fn hear_late(&self, before: u64) -> Result<()> {
        if self.team.leads() {
            return Ok(());
        }
        let failed: Vec<u64> = self.lock().unsettled.range(..before).copied().collect();
        for counter in failed {
            let Some(verdict) = self.team.verdict(counter, Duration::ZERO)? else { continue };
            if matches!(Announcement::decode(&verdict), Ok((Announcement::Committed, _))) {
                self.lock().unsettled.remove(&counter);
            }
        }
        Ok(())
    }

    /// Raises the failure that this rank has not seen, or has: another has not.
    fn raise_failure(&self, step: u64) -> Result<()> {
        self.raise_unseen(Some(step))?;
        let last = self.lock().last_failure.clone();
        match last {
            Some(save) if self.options.on_save_error == crate::options::OnSaveError::Raise => {
                let error = save.outcome().and_then(|outcome| outcome.error().cloned());
                error.map_or(Ok(()), |source| Err(Error::Earlier { unsaved: Some(step), save, source }))
            }
            _ => Ok(()),
        }
    }

    /// Gives the save of this rank, which makes none, its number, and reports it to the others.
    fn take_no_part(&self, step: u64, told: bool, cause: &str) {
        if !told {
            // They may wait for what this rank has.
            let _telling = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
            if self.known_census().is_none() {
                let cause = cause.to_owned();
                let failed = if self.team.leads() {
                    Error::RankFailed { rank: self.team.rank(), cause }
                } else {
                    Error::Invalid(cause)
                };
                // It gives that failure back.
                drop(self.team.settle("save: who holds what", Err::<Told, _>(failed), Ok));
            }
        }
        let counter = {
            let mut state = self.lock();
            let counter = state.counter;
            state.counter += 1;
            state.highest = state.highest.max(Some(step));
            state.over.insert(counter);
            state.unsettled.insert(counter);
            // By the call that raises the failure on ranks that have not seen it, this one raises
            // too.
            let error = Error::RankFailed { rank: self.team.rank(), cause: cause.to_owned() };
            state.last_failure = Some(Save::broken_off(step, error));
            counter
        };
        let told = if self.team.leads() {
            let error = Error::RankFailed { rank: 0, cause: cause.to_owned() };
            let announcement = Announcement::of(&Verdict::NotCommitted(error), self.team.rank());
            announcement.encode(false).and_then(|verdict| self.team.send_verdict(counter, &verdict, true))
        } else {
            let attempt = Attempt { session: self.team.session().to_owned(), counter };
            let failure = Announcement::RankFailed { rank: self.team.rank(), cause: cause.to_owned() };
            let vote = Vote::failed(self.team.rank(), step, attempt, failure);
            vote.encode().and_then(|vote| self.team.send_vote(counter, &vote))
        };
        if let Err(error) = told {
            tracing::warn!(step, %error, "the other ranks could not be told that this one does not save");
        }
    }

    /// The holders of plain leaves. Exchanged now if they are unknown or outdated. Also returns
    /// true if this rank's leaves have changed.
    pub(super) fn census(
        &self,
        ticket: &mut Ticket,
        state: &StateSource,
    ) -> Result<Option<(Arc<Census>, bool)>> {
        if self.team.is_alone() {
            return Ok(None);
        }
        let leaves = plain_leaves(state);
        let rank = self.team.rank();
        let _telling = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
        ticket.told = true;
        if let Some(census) = self.known_census() {
            let stale = !census.has(rank, &leaves);
            return Ok(Some((census, stale)));
        }
        let told = |all: Vec<Told>| Ok(Census::new(&all).told());
        let census =
            Arc::new(Census::of_told(self.team.settle("save: who holds what", Ok((rank, leaves)), told)?));
        let mut state = self.lock();
        state.census = Some(Arc::clone(&census));
        self.team.have_told(state.counter);
        drop(state);
        Ok(Some((census, false)))
    }

    /// What the ranks have told each other of their leaves; `None` where nobody has yet or that is
    /// no longer so, and they are to before the next save.
    fn known_census(&self) -> Option<Arc<Census>> {
        let state = self.lock();
        // All saves that may have said so have ended on all ranks: see `settle_failures`.
        let lag = self.options.max_pending as u64 + 2;
        let outdated = self.team.outdated_by().is_some_and(|save| state.counter >= save + lag);
        state.census.clone().filter(|_| !outdated)
    }

    /// Verdicts that all ranks have read, since they have voted on this save.
    pub(super) fn forget_verdicts(&self, counter: u64) {
        if self.team.is_alone() || !self.team.leads() {
            return;
        }
        let read = counter.saturating_sub(self.options.max_pending as u64 + 1);
        if let Err(error) = self.team.forget_verdicts(read) {
            tracing::debug!(%error, "what all ranks have read stays for now");
        }
    }
}

impl Manager {
    /// The step that a restore takes (`None`: the latest): the leader's answer, on every rank.
    pub fn choose(&self, step: Option<u64>) -> Result<u64> {
        self.inner.check_usable()?;
        self.asking(|| {
            let chosen = self.inner.team.ask("restore", || Ok(self.inner.find(step)?.manifest.step))?;
            let mut state = self.inner.lock();
            state.chosen = Some(chosen);
            // The leader has it.
            state.uncertain.remove(&chosen);
            state.restoring = true;
            Ok(chosen)
        })
    }

    /// The caller of this rank has left a restore that all make, in one of its calls or between
    /// them: once that call is answered, the others are told why.
    pub fn leave_restore(&self, cause: &str) {
        if !self.inner.birth.is_here() {
            return;
        }
        let mut state = self.inner.lock();
        if state.asking {
            state.restore_left = Some(cause.to_owned());
        } else if state.restoring {
            drop(state);
            self.say_left(cause.to_owned());
        }
    }

    fn say_left(&self, cause: String) {
        let failed = if self.inner.team.leads() {
            Error::RankFailed { rank: self.inner.team.rank(), cause }
        } else {
            Error::Invalid(cause)
        };
        // It gives that failure back.
        drop(self.inner.team.settle("restore", Err::<(), _>(failed), |_| Ok(())));
        self.inner.lock().restoring = false;
    }

    /// One call of a restore. By an error it ends on all ranks; else by [`Manager::restored`].
    fn asking<T>(&self, ask: impl FnOnce() -> Result<T>) -> Result<T> {
        self.inner.lock().asking = true;
        let answer = ask();
        let left = {
            let mut state = self.inner.lock();
            state.asking = false;
            state.restoring &= answer.is_ok();
            state.restore_left.take()
        };
        if let (Some(cause), true) = (left, answer.is_ok()) {
            self.say_left(cause);
        }
        answer
    }

    /// Returns the stored leaves (of the given numbers, which this rank does not want) that no
    /// other rank wants either. `None` if the ranks do not all restore in the same way (`how`).
    pub fn wanted_by_none(&self, how: &str, mut unwanted: Vec<u32>) -> Result<Option<Vec<u32>>> {
        self.inner.check_usable()?;
        unwanted.sort_unstable();
        // The leaves of a stage or an expert are adjacent: a few runs, although thousands of ranks
        // each have thousands of unwanted leaves.
        let said = (how.to_owned(), runs_of(&unwanted));
        let found = self.restoring("restore", Ok(said), |all| {
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

    /// True if all ranks say the same.
    pub fn alike(&self, what: &str) -> Result<bool> {
        self.inner.check_usable()?;
        self.restoring("restore", Ok(what.to_owned()), |all| {
            Ok(all.windows(2).all(|two| matches!(two, [one, other] if one == other)))
        })
    }

    /// Makes one result of the results of all ranks: if one has failed, all fail with its cause.
    pub fn agree(&self, what: &str, mine: Result<()>) -> Result<()> {
        self.inner.check_usable()?;
        self.restoring(what, mine, |_| Ok(()))
    }

    /// The messages of ranks in a restore.
    fn restoring<S: Serialize + for<'de> Deserialize<'de>, T: Serialize + for<'de> Deserialize<'de>>(
        &self,
        what: &str,
        mine: Result<S>,
        answer: impl FnOnce(Vec<S>) -> Result<T>,
    ) -> Result<T> {
        self.asking(|| self.inner.team.settle(what, mine, answer))
    }

    /// This process, and all of them.
    pub fn ranks(&self) -> (u32, u32) {
        (self.inner.team.rank(), self.inner.team.world_size())
    }
}
