//! Ranks that share conversions: each writes a part of the windows, and the leader publishes.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use stepwell_core::Kind;

use super::compare::{TensorPair, compare};
use super::file_plan::PlannedFile;
use super::windows::windows;
use crate::coordination::team::{RankHeartbeat, Team};
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::periodic::Periodic;
use crate::reader::Reader;

/// The most time that the leader waits for other ranks to leave.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Poll interval for failures of other ranks.
const FAILURE_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The session of ranks that share conversions, one after the other. All make the same calls, in
/// the same order.
pub struct Sharing {
    team: Arc<Team>,
    /// Changes as this rank gets on.
    progress: Arc<AtomicU64>,
    /// Tells the other ranks of the progress.
    heartbeat: Mutex<Option<Periodic>>,
}

/// Watches the other ranks while this one works.
pub(super) struct Watch<'a> {
    sharing: &'a Sharing,
    /// The bytes that are done.
    done: u64,
    polled: Instant,
    /// The failure of another rank.
    failure: Option<Error>,
}

impl Watch<'_> {
    /// Notes the progress of this rank. Returns false once another rank has failed.
    pub(super) fn go_on(&mut self, done: u64) -> bool {
        if done != self.done {
            self.done = done;
            self.sharing.advance();
        }
        if self.failure.is_none() && self.polled.elapsed() >= FAILURE_POLL_INTERVAL {
            self.polled = Instant::now();
            self.failure = self.sharing.failure();
        }
        self.failure.is_none()
    }

    /// [`Sharing::agree`] after the work. Other ranks that still work stop if this one has failed.
    /// If another rank failed first, its failure is the error of the call.
    pub(super) fn agree<S: Serialize + DeserializeOwned, T: Serialize + DeserializeOwned>(
        self,
        what: &str,
        mine: Result<S>,
        answer: impl FnOnce(Vec<S>) -> Result<T>,
    ) -> Result<T> {
        let Self { sharing, failure, .. } = self;
        let mine = match failure {
            Some(failure) => Err(failure),
            None => mine.inspect_err(|error| sharing.report_failure(error)),
        };
        let has_failed = mine.is_err();
        let agreed = sharing.agree(what, mine, answer);
        agreed.map_err(|error| if has_failed { error } else { sharing.failure().unwrap_or(error) })
    }
}

/// True for an error that a later try would meet again: a damaged source, or values that cannot be
/// cast.
pub(super) fn is_permanent(error: &Error) -> bool {
    [Kind::CorruptCheckpoint.name(), Kind::UnsupportedLeaf.name()].contains(&error.kind())
}

impl Sharing {
    /// Returns the session of a process that shares nothing.
    pub fn alone(environment: &Environment) -> Self {
        let team = Arc::new(Team::alone(environment.hex_id()));
        Self { team, progress: Arc::default(), heartbeat: Mutex::default() }
    }

    /// Meets the other ranks that share conversions of `what`. A wait for a rank ends after
    /// `timeout` without its progress.
    pub fn meet(what: &Path, environment: &Environment, timeout: Duration) -> Result<Self> {
        if environment.coordinator.world_size() == 1 {
            return Ok(Self::alone(environment));
        }
        let what = format!("conversions of {}", what.display());
        let team =
            Team::meet(&environment.coordinator, &what, Vec::new(), timeout, || Ok(environment.hex_id()))?;
        let (team, progress) = (Arc::new(team), Arc::new(AtomicU64::new(0)));
        let (ranks, counter) = (Arc::clone(&team), Arc::clone(&progress));
        let send = move || {
            // The leader is alive while it waits for others. Its own timeout names the missing.
            if ranks.is_collecting() {
                counter.fetch_add(1, Ordering::Relaxed);
            }
            let heartbeat = RankHeartbeat { save: 0, progress: counter.load(Ordering::Relaxed) };
            if let Err(error) = ranks.send_heartbeat(heartbeat) {
                tracing::debug!(%error, "sending a heartbeat to the other ranks failed");
            }
            true
        };
        let heartbeat = Periodic::start("stepwell-heartbeat", team.heartbeat_interval(), send)
            .map_err(|error| stepwell_core::Error::io("start a thread for", "<a conversion>", error))?;
        Ok(Self { team, progress, heartbeat: Mutex::new(Some(heartbeat)) })
    }

    /// The rank of this process, and the number of ranks.
    pub fn ranks(&self) -> (u32, u32) {
        (self.team.rank(), self.team.world_size())
    }

    /// True if this rank decides.
    pub fn leads(&self) -> bool {
        self.team.leads()
    }

    /// Returns the leader's answer, on every rank. `answer` runs only on the leader.
    pub fn ask<T: Serialize + DeserializeOwned>(
        &self,
        what: &str,
        answer: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        self.team.ask(what, answer)
    }

    /// Returns the leader's answer to the reports of all ranks, on every rank. A failed report
    /// fails the call on all.
    pub fn agree<S: Serialize + DeserializeOwned, T: Serialize + DeserializeOwned>(
        &self,
        what: &str,
        mine: Result<S>,
        answer: impl FnOnce(Vec<S>) -> Result<T>,
    ) -> Result<T> {
        self.team.agree(what, mine, answer)
    }

    /// Refuses, on all ranks, ranks with another `digest` of source and plan: the output would be a
    /// mixture. All must `verify` it, or none.
    pub fn check_equal(&self, digest: &str, verify: bool) -> Result<()> {
        self.agree("compare the sources", Ok((digest.to_owned(), verify)), |all| {
            match all.iter().position(|one| (one.0.as_str(), one.1) != (digest, verify)) {
                None => Ok(()),
                Some(rank) => Err(Error::Invalid(format!(
                    "rank {rank} converts another source than rank 0, or with other arguments. Pass the same to all ranks. For a root that is written to, name the step"
                ))),
            }
        })
    }

    /// [`compare`] by all ranks: each reads some of the pairs.
    pub fn compare(
        &self,
        source: &Reader,
        made: &Reader,
        pairs: &[TensorPair],
        go_on: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Vec<usize>> {
        let (rank, ranks) = self.ranks();
        let mine: Vec<usize> =
            (0..pairs.len()).filter(|number| number % ranks as usize == rank as usize).collect();
        let chosen: Vec<TensorPair> = mine.iter().filter_map(|&number| pairs.get(number).copied()).collect();
        let mut watch = self.watch();
        let different =
            compare(source, made, &chosen, &mut |done, total| watch.go_on(done) && go_on(done, total));
        let numbers = |found: Vec<usize>| found.into_iter().filter_map(|at| mine.get(at).copied()).collect();
        let different: Result<Vec<usize>> = different.map(numbers);
        watch.agree("verify a conversion", different, |all| Ok(all.concat()))
    }

    /// Notes that this rank gets on.
    pub fn advance(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns a watch over the other ranks, for the time that this one works.
    pub(super) fn watch(&self) -> Watch<'_> {
        Watch { sharing: self, done: u64::MAX, polled: Instant::now(), failure: None }
    }

    /// Ends the session, on all ranks.
    pub fn fail(&self, cause: &str) {
        if self.team.is_alone() {
            return;
        }
        let error = Error::Invalid(cause.to_owned());
        if self.failure().is_none() {
            self.report_failure(&error);
        }
        drop(self.team.end_session(error));
    }

    /// Reports the failure of this rank to ranks that work.
    fn report_failure(&self, error: &Error) {
        if !self.team.is_alone()
            && let Err(error) = self.team.report_failure(error, is_permanent(error))
        {
            tracing::debug!(%error, "reporting a failure to the other ranks failed");
        }
    }

    /// Returns the failure that a rank has reported.
    fn failure(&self) -> Option<Error> {
        if self.team.is_alone() {
            return None;
        }
        self.team.failure().unwrap_or_else(|error| {
            tracing::debug!(%error, "looking for failures of other ranks failed");
            None
        })
    }

    /// Waits until the session is over for all other ranks. Returns false after a timeout.
    pub(super) fn have_others_left(&self) -> bool {
        self.team.have_others_left(LEAVE_TIMEOUT).unwrap_or_else(|error| {
            tracing::debug!(%error, "waiting for the other ranks of a failed conversion failed");
            false
        })
    }

    /// Leaves the other ranks.
    pub fn leave(&self) {
        let heartbeat = self.heartbeat.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(heartbeat) = heartbeat else { return };
        heartbeat.stop();
        if !self.team.is_alone()
            && let Err(error) = self.team.leave(0, LEAVE_TIMEOUT)
        {
            tracing::debug!(%error, "the ranks of a conversion did not leave together");
        }
    }

    /// Returns the windows that this rank writes: about as many bytes as each other rank. A file
    /// with checksums is not divided, and without `divides` no file is.
    pub(super) fn part(&self, files: &[PlannedFile], window_bytes: u64, divides: bool) -> Range<u64> {
        let (rank, ranks) = self.ranks();
        let start = |rank| start_of(files, window_bytes, rank, ranks, divides);
        start(rank)..start(rank + 1)
    }
}

/// Returns the first window of a rank. That of the rank after the last is the number of windows.
fn start_of(files: &[PlannedFile], window_bytes: u64, rank: u32, ranks: u32, divides: bool) -> u64 {
    let total: u64 = files.iter().map(|file| file.length).sum();
    let start = (u128::from(total) * u128::from(rank) / u128::from(ranks)) as u64;
    let (mut before, mut end) = (0, 0);
    for window in windows(files, window_bytes) {
        let is_whole =
            window.offset > 0 && (!divides || files.get(window.file).is_some_and(PlannedFile::has_checksums));
        if before >= start && rank < ranks && !is_whole {
            return window.number;
        }
        before += window.len as u64;
        end = window.number + 1;
    }
    end
}

#[cfg(test)]
mod tests {
    use super::super::file_plan::{PieceContent, PlannedPiece};
    use super::*;

    fn file(length: u64, has_checksum: bool) -> PlannedFile {
        let content = PieceContent::Crc32 { first: 0, last: 0 };
        let pieces = if has_checksum { vec![PlannedPiece { offset: 0, length: 4, content }] } else { vec![] };
        PlannedFile { name: "f".to_owned(), length, pieces }
    }

    #[test]
    fn parts_of_ranks_are_all_windows_once() {
        let files = [file(1000, false), file(5000, true), file(1, true), file(3000, false)];
        for ranks in [1, 2, 3, 7, 64] {
            let starts: Vec<u64> = (0..=ranks).map(|rank| start_of(&files, 100, rank, ranks, true)).collect();
            assert_eq!((starts[0], starts[ranks as usize]), (0, 91));
            assert!(starts.is_sorted(), "{starts:?}");
            // The windows of the second file are 10..60.
            assert!(starts.iter().all(|start| !(11..60).contains(start)), "{starts:?}");
            let of_files = (0..=ranks).map(|rank| start_of(&files, 100, rank, ranks, false));
            assert!(of_files.into_iter().all(|start| [0, 10, 60, 61, 91].contains(&start)));
        }
    }

    #[test]
    fn a_rank_gets_on_only_when_bytes_are_done() {
        let team = Arc::new(Team::alone("session".to_owned()));
        let sharing = Sharing { team, progress: Arc::default(), heartbeat: Mutex::default() };
        let mut watch = sharing.watch();
        for done in [0, 0, 0, 7, 7, 9] {
            assert!(watch.go_on(done));
        }
        assert_eq!(sharing.progress.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn parts_of_ranks_have_about_the_same_bytes() {
        let files = [file(100_000, false), file(300_000, false)];
        let starts: Vec<u64> = (0..=4).map(|rank| start_of(&files, 1000, rank, 4, true)).collect();
        assert_eq!(starts, [0, 100, 200, 300, 400]);
    }
}
