//! Ranks that share conversions: each writes a part of the windows, and the leader publishes.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

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

/// The session of ranks that share conversions, one after the other. All make the same calls, in
/// the same order.
pub struct Sharing {
    team: Arc<Team>,
    /// Changes as this rank gets on.
    progress: Arc<AtomicU64>,
    /// Tells the other ranks of the progress.
    heartbeat: Option<Periodic>,
}

impl Sharing {
    /// Returns the session of a process that shares nothing.
    pub fn alone(environment: &Environment) -> Self {
        let team = Arc::new(Team::alone(environment.hex_id()));
        Self { team, progress: Arc::default(), heartbeat: None }
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
        Ok(Self { team, progress, heartbeat: Some(heartbeat) })
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
    /// mixture.
    pub fn check_equal(&self, digest: &str) -> Result<()> {
        self.agree("compare the sources", Ok(digest.to_owned()), |all| {
            match all.iter().position(|one| one != digest) {
                None => Ok(()),
                Some(rank) => Err(Error::Invalid(format!(
                    "rank {rank} converts another source than rank 0, or with other arguments. Pass the same to all ranks, and step= for a root that is written to"
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
        let different = compare(source, made, &chosen, &mut |done, total| {
            self.advance();
            go_on(done, total)
        });
        let numbers = |found: Vec<usize>| found.into_iter().filter_map(|at| mine.get(at).copied()).collect();
        let different: Result<Vec<usize>> = different.map(numbers);
        self.agree("verify a conversion", different, |all| Ok(all.concat()))
    }

    /// Notes that this rank gets on.
    pub fn advance(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends the session, on all ranks that wait for this one.
    pub fn fail(&self, cause: &str) {
        if !self.team.is_alone() {
            drop(self.team.end_session(Error::Invalid(cause.to_owned())));
        }
    }

    /// Leaves the other ranks.
    pub fn leave(mut self) {
        if let Some(heartbeat) = self.heartbeat.take() {
            heartbeat.stop();
        }
        if !self.team.is_alone()
            && let Err(error) = self.team.leave(0, LEAVE_TIMEOUT)
        {
            tracing::debug!(%error, "the ranks of a conversion did not leave together");
        }
    }

    /// Returns the windows that this rank writes: about as many bytes as each other rank. A file
    /// with checksums is not divided.
    pub(super) fn part(&self, files: &[PlannedFile], window_bytes: u64) -> Range<u64> {
        let (rank, ranks) = self.ranks();
        start_of(files, window_bytes, rank, ranks)..start_of(files, window_bytes, rank + 1, ranks)
    }
}

/// Returns the first window of a rank. That of the rank after the last is the number of windows.
fn start_of(files: &[PlannedFile], window_bytes: u64, rank: u32, ranks: u32) -> u64 {
    let total: u64 = files.iter().map(|file| file.length).sum();
    let start = (u128::from(total) * u128::from(rank) / u128::from(ranks)) as u64;
    let (mut before, mut end) = (0, 0);
    for window in windows(files, window_bytes) {
        let is_whole = window.offset > 0 && files.get(window.file).is_some_and(PlannedFile::has_checksums);
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
            let starts: Vec<u64> = (0..=ranks).map(|rank| start_of(&files, 100, rank, ranks)).collect();
            assert_eq!((starts[0], starts[ranks as usize]), (0, 91));
            assert!(starts.is_sorted(), "{starts:?}");
            // The windows of the second file are 10..60.
            assert!(starts.iter().all(|start| !(11..60).contains(start)), "{starts:?}");
        }
    }

    #[test]
    fn parts_of_ranks_have_about_the_same_bytes() {
        let files = [file(100_000, false), file(300_000, false)];
        let starts: Vec<u64> = (0..=4).map(|rank| start_of(&files, 1000, rank, 4)).collect();
        assert_eq!(starts, [0, 100, 200, 300, 400]);
    }
}
