//! Calls that all ranks make: the leader answers, from its own knowledge or from all reports.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use stepwell_core::Kind;
use stepwell_core::deadline::deadline_after;

use super::Team;
use super::board::{Answer, BOARD_POLL_INTERVAL, decoded, encoded};
use crate::coordination::{LEADER, Message};
use crate::error::{Error, Relayed, Result};

/// The time for which a failed put of an important message is retried.
const PUT_RETRY_TIMEOUT: Duration = Duration::from_secs(10);
/// The number of calls after which each rank reports how many answers it has read.
const CALLS_KEPT: u64 = 64;

/// A rank's report in a call of all ranks, or the text of its failure.
type CallReport<T> = std::result::Result<T, String>;

impl Team {
    /// Returns the leader's answer, on every rank. `answer` runs only on the leader. `what` names
    /// the call. A rank that makes another call gets an error.
    pub fn ask<T: Serialize + DeserializeOwned>(
        &self,
        what: &str,
        answer: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if self.is_alone() {
            return answer();
        }
        self.call(|number| {
            if self.leads() {
                let answer = answer();
                self.put_answer(number, what, &answer)?;
                return Ok(answer);
            }
            self.await_answer(number, what)
        })
    }

    /// Returns the leader's answer to the reports of all ranks, on every rank. `answer` runs only
    /// on the leader, with the reports by rank. If one rank reports a failure, the call fails on
    /// all.
    pub fn agree<S: Serialize + DeserializeOwned, T: Serialize + DeserializeOwned>(
        &self,
        what: &str,
        mine: Result<S>,
        answer: impl FnOnce(Vec<S>) -> Result<T>,
    ) -> Result<T> {
        if self.is_alone() {
            return answer(vec![mine?]);
        }
        self.call(|number| {
            if !self.leads() {
                let report = mine.as_ref().map_err(ToString::to_string);
                self.put_with_retries(&self.report_key(number, self.rank()), &encoded(&report)?)?;
                // Report this rank's own failure as it is, not in the leader's words.
                return match mine {
                    Ok(_) => self.await_answer(number, what),
                    Err(error) => Ok(Err(error)),
                };
            }
            let answer = mine.and_then(|mine| {
                self.is_collecting.store(true, Ordering::Relaxed);
                let reports = self.collect_reports(number, what, mine);
                self.is_collecting.store(false, Ordering::Relaxed);
                answer(reports?)
            });
            self.put_answer(number, what, &answer)?;
            Ok(answer)
        })
    }

    /// Collects the reports of a call, by rank. The leader's own report is the first one.
    fn collect_reports<S: DeserializeOwned>(&self, number: u64, what: &str, mine: S) -> Result<Vec<S>> {
        let mut reports = vec![mine];
        for rank in 1..self.world_size() {
            let key = self.report_key(number, rank);
            let message = self.wait(&key, rank, what).map_err(|error| self.all_missing(error, number))?;
            let report: CallReport<S> = decoded(rank, &message)?;
            self.coordinator.remove(&key)?;
            reports.push(report.map_err(|cause| Error::RankFailed { rank, cause })?);
        }
        Ok(reports)
    }

    /// Adds all other ranks without a report in that call to a timeout.
    fn all_missing(&self, mut error: Error, number: u64) -> Error {
        if let Error::CoordinationTimeout { missing, .. } = &mut error {
            let from = missing.first().map_or(1, |first| first.saturating_add(1));
            missing.extend((from..self.world_size()).filter(|&rank| {
                let report = self.coordinator.get(&self.report_key(number, rank), Duration::ZERO);
                matches!(report, Ok(None))
            }));
        }
        error
    }

    /// True while the leader collects reports. It is then alive, and its own timeout names the
    /// missing ranks.
    pub fn is_collecting(&self) -> bool {
        self.is_collecting.load(Ordering::Relaxed)
    }

    fn report_key(&self, number: u64, rank: u32) -> String {
        self.key(&format!("part/{number}/{rank}"))
    }

    /// Runs one call of all ranks. `make` gets the call's number, and returns the leader's answer.
    /// If it fails instead, this rank does not know what the others do. Then the session is over
    /// for it.
    fn call<T>(&self, make: impl FnOnce(u64) -> Result<Result<T>>) -> Result<T> {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        self.check_session()?;
        match make(*calls) {
            Ok(answer) => {
                *calls += 1;
                answer.map_err(|error| if is_lost(&error) { self.end_session(error) } else { error })
            }
            // The other ranks made another call: this one does not count.
            Err(error @ Error::Invalid(_)) => Err(error),
            Err(error) => Err(self.end_session(error)),
        }
    }

    fn put_answer<T: Serialize>(&self, number: u64, what: &str, answer: &Result<T>) -> Result<()> {
        let answer = answer.as_ref().map_err(Relayed::of);
        self.put_with_retries(&self.key(&format!("call/{number}")), &encoded(&(what, answer))?)?;
        if number % CALLS_KEPT == CALLS_KEPT - 1 {
            self.remove_read_answers()?;
        }
        Ok(())
    }

    /// Waits for the leader's answer.
    fn await_answer<T: DeserializeOwned>(&self, number: u64, what: &str) -> Result<Result<T>> {
        let message = self.wait(&self.key(&format!("call/{number}")), LEADER, what)?;
        // Check the call's name before its answer: other calls have answers of other types.
        let (called, _): (String, IgnoredAny) = decoded(LEADER, &message)?;
        if called != what {
            let rank = self.rank();
            return Err(Error::Invalid(format!(
                "rank {rank} called {what}, and rank {LEADER} called {called}. Make the same calls of a manager on all ranks, in the same order"
            )));
        }
        if number % CALLS_KEPT == CALLS_KEPT - 1 {
            let read = self.key(&format!("read/{}", self.rank()));
            self.coordinator.put(&read, &number.to_le_bytes())?;
        }
        let (_, answer): (String, Answer<T>) = decoded(LEADER, &message)?;
        Ok(answer.map_err(Error::Relayed))
    }

    /// Waits for the message of a rank, as long as its heartbeat changes.
    fn wait(&self, key: &str, rank: u32, what: &str) -> Result<Message> {
        self.board().wait(key, rank, &format!("to call {what}"), || self.heartbeat_of(rank))
    }

    /// Removes the answers that all ranks have read.
    fn remove_read_answers(&self) -> Result<()> {
        let mut read_by_all = u64::MAX;
        for rank in 1..self.world_size() {
            let read = self.coordinator.get(&self.key(&format!("read/{rank}")), Duration::ZERO)?;
            let number = read.and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes);
            let Some(number) = number else { return Ok(()) };
            read_by_all = read_by_all.min(number);
        }
        self.remove_answers(read_by_all.saturating_add(1))
    }

    /// Removes the answers to calls below that number.
    pub(super) fn remove_answers(&self, end: u64) -> Result<()> {
        let from = self.first_answer.load(Ordering::Relaxed);
        for number in from..end {
            self.coordinator.remove(&self.key(&format!("call/{number}")))?;
        }
        self.first_answer.store(end.max(from), Ordering::Relaxed);
        Ok(())
    }

    /// Puts a message that the others wait for. Retries for a while, because it is sent only once.
    pub(super) fn put_with_retries(&self, key: &str, message: &[u8]) -> Result<()> {
        let deadline = deadline_after((self.timeout / 4).min(PUT_RETRY_TIMEOUT));
        loop {
            match self.coordinator.put(key, message) {
                Err(error) if Instant::now() < deadline => {
                    tracing::debug!(%error, key, "retrying to put a message on the board");
                    std::thread::sleep(BOARD_POLL_INTERVAL.min(self.timeout / 16));
                }
                put => return put,
            }
        }
    }
}

/// True for the end of a session, also if the leader relays it.
fn is_lost(error: &Error) -> bool {
    error.kind() == Kind::SessionLost.name()
}
