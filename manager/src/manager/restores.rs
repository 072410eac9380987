//! The agreements of several ranks in a restore.

use serde::{Deserialize, Serialize};

use super::Manager;
use crate::error::{Error, Result};
use crate::runs::{in_both, numbers_of, runs_of};

impl Manager {
    /// Returns the step that a restore takes (`None`: the latest). It is the leader's answer on
    /// every rank.
    pub fn choose(&self, step: Option<u64>) -> Result<u64> {
        self.inner.check_usable()?;
        self.in_restore_call(|| {
            let chosen = self.inner.team.ask("restore", || Ok(self.inner.find(step)?.1.manifest.step))?;
            // The leader has listed the step, so its durability is no longer uncertain.
            self.inner.root.set_uncertain(chosen, false);
            let mut known = self.inner.ranks.lock();
            known.chosen = Some(chosen);
            known.restoring = true;
            Ok(chosen)
        })
    }

    /// Records that this rank's caller has left a restore of all ranks, during a call or between
    /// two. The other ranks get the cause after that call.
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

    fn report_left(&self, cause: String) {
        let failed = if self.inner.team.leads() {
            Error::RankFailed { rank: self.inner.team.rank(), cause }
        } else {
            Error::Invalid(cause)
        };
        // The call returns this failure.
        drop(self.inner.team.agree("restore", Err::<(), _>(failed), |_| Ok(())));
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
        // Send runs of numbers, because thousands of ranks may each have thousands of unwanted
        // leaves. Those of a pipeline stage or an expert are adjacent.
        let mine = (how.to_owned(), runs_of(&unwanted));
        let found = self.agree_in_restore("restore", Ok(mine), |all| {
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
        self.agree_in_restore("restore", Ok(what.to_owned()), |all| {
            Ok(all.windows(2).all(|two| matches!(two, [one, other] if one == other)))
        })
    }

    /// Fails on all ranks with the cause of a failed rank, if there is one.
    pub fn agree(&self, what: &str, mine: Result<()>) -> Result<()> {
        self.inner.check_usable()?;
        self.agree_in_restore(what, mine, |_| Ok(()))
    }

    /// Exchanges the reports of ranks in a restore.
    fn agree_in_restore<
        S: Serialize + for<'de> Deserialize<'de>,
        T: Serialize + for<'de> Deserialize<'de>,
    >(
        &self,
        what: &str,
        mine: Result<S>,
        answer: impl FnOnce(Vec<S>) -> Result<T>,
    ) -> Result<T> {
        self.in_restore_call(|| self.inner.team.agree(what, mine, answer))
    }
}
