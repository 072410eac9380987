//! The session of ranks that opened one manager together. The keys of their messages begin with the
//! session:
//!
//! | key | sender | content |
//! |---|---|---|
//! | `<namespace>/hello/<rank>`, `<namespace>/welcome` | each rank, the leader | the introduction; the session, or its failure |
//! | `<session>/call/<n>` | the leader | its answer to the n-th call that all make |
//! | `<session>/part/<n>/<rank>` | each rank | its report in that call, if the leader gathers reports |
//! | `<session>/vote/<save>/<rank>`, `<session>/verdict/<save>` | each rank, the leader | the commit |
//! | `<session>/heartbeat/<rank>` | each rank | its progress ([`RankHeartbeat`]) |
//! | `<session>/signal` | any rank | the job is to be preempted |
//! | `<session>/read/<rank>` | each rank | the last answer that it has read |
//! | `<session>/bye/<rank>` | each rank | it has closed |
//!
//! All ranks make the same calls in the same order. A rank that makes another call gets an error. A
//! rank whose call ends without an answer (a timeout, an unreachable board) does not know what the
//! others do. So the session is over for it: its later calls fail with [`Error::SessionLost`], and
//! its last heartbeat ([`RankHeartbeat::LEFT`]) ends the session of each rank that waits for it. A
//! rank that closes sends that heartbeat too.
//! The leader removes messages that all ranks have read.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};
use stepwell_core::Kind;
use stepwell_core::deadline::{StallTimer, deadline_after};

use super::{Coordinator, LEADER, Message};
use crate::error::{Error, Relayed, Result};
use crate::runs::repeats;

/// The timeout of one read of the board. Between two reads, a waiting rank checks heartbeats.
const BOARD_POLL_INTERVAL: Duration = Duration::from_millis(200);
/// The time for which a failed put of an important message is retried.
const PUT_RETRY_TIMEOUT: Duration = Duration::from_secs(10);
/// After so many calls, each rank reports how far it has read.
const CALLS_KEPT: u64 = 64;

/// A rank's introduction when it arrives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The version of stepwell: all ranks must plan alike.
    version: String,
    /// The path that it opens.
    what: String,
    /// The name of its machine.
    node: String,
    /// Its socket on that machine, if it is bound to one.
    socket: Option<u32>,
    /// The settings that must be equal on all ranks, each with its name.
    agreed: Vec<(String, String)>,
}

/// The leader's welcome.
#[derive(Serialize, Deserialize)]
struct Welcome {
    session: String,
    places: Places,
}

/// An answer of the leader.
type Answer<T> = std::result::Result<T, Relayed>;

/// A rank's report in a call of all ranks, or the text of its failure.
type CallReport<T> = std::result::Result<T, String>;

/// A rank's heartbeat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankHeartbeat {
    /// The first save on which it still has to report: its vote, or the leader's verdict.
    pub save: u64,
    /// A number that changes with the progress of its saves.
    pub progress: u64,
}

impl RankHeartbeat {
    /// The last heartbeat of a rank for which the session is over.
    const LEFT: Self = Self { save: u64::MAX, progress: u64::MAX };

    /// Returns the progress for a rank that waits for a report on that save. `None` if this rank
    /// already sent the report. Without this, two live ranks would wait for each other permanently
    /// after a lost message.
    pub fn in_save(self, save: u64) -> Option<u64> {
        (self.save <= save).then_some(self.progress)
    }

    fn encode(self) -> Message {
        [self.save.to_le_bytes(), self.progress.to_le_bytes()].concat()
    }

    fn decode(message: &[u8]) -> Option<Self> {
        let (save, progress) = message.split_first_chunk()?;
        Some(Self {
            save: u64::from_le_bytes(*save),
            progress: u64::from_le_bytes(progress.try_into().ok()?),
        })
    }
}

/// A rank's side of a session.
pub struct Team {
    coordinator: Arc<dyn Coordinator>,
    /// The namespace of the meeting.
    namespace: String,
    session: String,
    places: Places,
    timeout: Duration,
    /// The number of calls that all ranks have made. Locked during a call, so that calls have one
    /// order.
    calls: Mutex<u64>,
    /// The reason why the session is over for this rank.
    lost: OnceLock<SessionEnd>,
    notes: Mutex<Notes>,
    /// True while the leader gathers reports.
    is_gathering: AtomicBool,
}

/// This rank's notes on the messages of the others.
#[derive(Default)]
struct Notes {
    /// The first call whose answer was not removed.
    calls_from: u64,
    /// The first save whose verdict was not removed.
    verdicts_from: u64,
    /// Failed saves of the leader whose verdict was not removed.
    failed: BTreeSet<u64>,
    /// Saves on which this rank has voted.
    voted: BTreeSet<u64>,
    /// The save before which the ranks held the last census.
    census_agreed_at: u64,
    /// The first save since then in which a rank reported changed leaves.
    census_stale_since: Option<u64>,
    /// The leader's last save, and the ranks that did not vote in time, each with its last
    /// heartbeat.
    missed: (u64, BTreeMap<u32, RankHeartbeat>),
}

/// The end of a session.
struct SessionEnd {
    /// The ranks that did not answer.
    missing: Vec<u32>,
    cause: String,
}

impl Team {
    /// The session of one process, which asks nobody.
    pub fn alone(session: String) -> Self {
        let places = Places { nodes: vec![0], sockets: vec![0] };
        Self::new(Arc::new(super::SingleProcess), String::new(), session, places, Duration::ZERO)
    }

    fn new(
        coordinator: Arc<dyn Coordinator>,
        namespace: String,
        session: String,
        places: Places,
        timeout: Duration,
    ) -> Self {
        Self {
            coordinator,
            namespace,
            session,
            places,
            timeout,
            calls: Mutex::default(),
            lost: OnceLock::new(),
            notes: Mutex::default(),
            is_gathering: AtomicBool::new(false),
        }
    }

    /// Meets the other ranks. `what` names what is opened, and `agreed` what must be the same on
    /// all ranks. On the leader, `lead` runs once everybody has come. All ranks get the session
    /// that it returns, or its failure.
    pub fn meet(
        coordinator: &Arc<dyn Coordinator>,
        what: &str,
        agreed: Vec<(String, String)>,
        timeout: Duration,
        lead: impl FnOnce() -> Result<String>,
    ) -> Result<Self> {
        let namespace = coordinator.namespace();
        let hello = Hello {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            what: what.to_owned(),
            node: coordinator.node(),
            socket: coordinator.socket(),
            agreed,
        };
        let (rank, size) = (coordinator.rank(), coordinator.world_size());
        let board = Board { coordinator, timeout };
        let welcome_key = format!("{namespace}/welcome");
        let Welcome { session, places } = if rank == LEADER {
            let places = board.gather_hellos(&namespace, &hello, size);
            let welcome = places.and_then(|places| Ok(Welcome { session: lead()?, places }));
            coordinator.put(&welcome_key, &encoded(&welcome.as_ref().map_err(Relayed::of))?)?;
            welcome?
        } else {
            coordinator.put(&format!("{namespace}/hello/{rank}"), &encoded(&hello)?)?;
            board.answer(&welcome_key, "to open")?
        };
        Ok(Self::new(Arc::clone(coordinator), namespace, session, places, timeout))
    }

    /// The rank of this process.
    pub fn rank(&self) -> u32 {
        self.coordinator.rank()
    }

    /// The number of ranks.
    pub fn world_size(&self) -> u32 {
        self.coordinator.world_size()
    }

    /// True if this rank is the leader.
    pub fn leads(&self) -> bool {
        self.rank() == LEADER
    }

    /// True if there is no other rank.
    pub fn is_alone(&self) -> bool {
        self.world_size() == 1
    }

    /// The id of the session.
    pub fn session(&self) -> &str {
        &self.session
    }

    /// For each rank, the number of its node.
    pub fn nodes(&self) -> &[u32] {
        &self.places.nodes
    }

    /// The number of this rank's node, if other ranks are on it.
    pub fn shared_node(&self) -> Option<u32> {
        let own = *self.nodes().get(self.rank() as usize)?;
        (self.nodes().iter().filter(|&&node| node == own).count() > 1).then_some(own)
    }

    /// For each rank, the number of its socket, counted over all nodes. The unbound ranks of a node
    /// count as one socket.
    pub fn sockets(&self) -> &[u32] {
        &self.places.sockets
    }

    fn board(&self) -> Board<'_> {
        Board { coordinator: &self.coordinator, timeout: self.timeout }
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn key(&self, what: &str) -> String {
        format!("{}/{what}", self.session)
    }

    /// Returns the leader's answer, on every rank. `answer` runs on the leader alone. `what` names
    /// the call, for ranks that make another one.
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

    /// Makes one answer of all ranks' reports. If one rank has failed, all fail. `answer` runs on
    /// the leader alone, with the reports by rank.
    pub fn settle<S: Serialize + DeserializeOwned, T: Serialize + DeserializeOwned>(
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
                let part = mine.as_ref().map_err(ToString::to_string);
                self.put_surely(&self.part_key(number, self.rank()), &encoded(&part)?)?;
                // Report this rank's own failure as it is, not in the leader's words.
                return match mine {
                    Ok(_) => self.await_answer(number, what),
                    Err(error) => Ok(Err(error)),
                };
            }
            let answer = mine.and_then(|mine| {
                self.is_gathering.store(true, Ordering::Relaxed);
                let reports = self.gather(number, what, mine);
                self.is_gathering.store(false, Ordering::Relaxed);
                answer(reports?)
            });
            self.put_answer(number, what, &answer)?;
            Ok(answer)
        })
    }

    /// Returns the reports of a call, by rank; the leader's own comes first.
    fn gather<S: DeserializeOwned>(&self, number: u64, what: &str, mine: S) -> Result<Vec<S>> {
        let mut reports = vec![mine];
        for rank in 1..self.world_size() {
            let key = self.part_key(number, rank);
            let message = self.wait(&key, rank, what).map_err(|error| self.all_missing(error, number))?;
            let part: CallReport<S> = decoded(rank, &message)?;
            self.coordinator.remove(&key)?;
            reports.push(part.map_err(|cause| Error::RankFailed { rank, cause })?);
        }
        Ok(reports)
    }

    /// Adds the other ranks whose report in that call is missing too to a timeout.
    fn all_missing(&self, mut error: Error, number: u64) -> Error {
        if let Error::CoordinationTimeout { missing, .. } = &mut error {
            let from = missing.first().map_or(1, |first| first.saturating_add(1));
            missing.extend((from..self.world_size()).filter(|&rank| {
                let part = self.coordinator.get(&self.part_key(number, rank), Duration::ZERO);
                matches!(part, Ok(None))
            }));
        }
        error
    }

    /// True while the leader gathers reports: it is alive, and its own timeout names the missing
    /// ranks.
    pub fn is_gathering(&self) -> bool {
        self.is_gathering.load(Ordering::Relaxed)
    }

    fn part_key(&self, number: u64, rank: u32) -> String {
        self.key(&format!("part/{number}/{rank}"))
    }

    /// Runs one call of all ranks, by its number. `make` returns the answer, or an error without
    /// one: then this rank does not know what the others do, and the session is over for it.
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

    /// Fails with [`Error::SessionLost`] once the session is over for this rank.
    pub fn check_session(&self) -> Result<()> {
        let lost = |SessionEnd { missing, cause }: &SessionEnd| Error::SessionLost {
            missing: missing.clone(),
            cause: cause.clone(),
        };
        self.lost.get().map_or(Ok(()), |why| Err(lost(why)))
    }

    /// Ends the session for this rank, for that reason. Its last heartbeat tells the others.
    pub fn end_session(&self, error: Error) -> Error {
        let cause = match &error {
            Error::SessionLost { cause, .. } => cause.clone(),
            _ => error.to_string(),
        };
        let missing = error.missing().unwrap_or_default().to_vec();
        if self.lost.set(SessionEnd { missing, cause }).is_ok()
            && let Err(error) = self.send_heartbeat(RankHeartbeat::LEFT)
        {
            tracing::debug!(%error, "reporting the end of the session to the other ranks failed");
        }
        error
    }

    /// Announces that the job is to be preempted.
    pub fn report_preemption(&self) -> Result<()> {
        self.coordinator.put(&self.key("signal"), b"")
    }

    /// True if a rank has announced preemption.
    pub fn is_preemption_reported(&self) -> Result<bool> {
        Ok(!self.is_alone() && self.coordinator.get(&self.key("signal"), Duration::ZERO)?.is_some())
    }

    fn put_answer<T: Serialize>(&self, number: u64, what: &str, answer: &Result<T>) -> Result<()> {
        let answer = answer.as_ref().map_err(Relayed::of);
        self.put_surely(&self.key(&format!("call/{number}")), &encoded(&(what, answer))?)?;
        if number % CALLS_KEPT == CALLS_KEPT - 1 {
            self.forget_read()?;
        }
        Ok(())
    }

    /// Waits for the leader's answer.
    fn await_answer<T: DeserializeOwned>(&self, number: u64, what: &str) -> Result<Result<T>> {
        let message = self.wait(&self.key(&format!("call/{number}")), LEADER, what)?;
        // The answer to another call has another type.
        let (called, _): (String, IgnoredAny) = decoded(LEADER, &message)?;
        if called != what {
            let rank = self.rank();
            return Err(Error::Invalid(format!(
                "rank {rank} has called {what} where rank {LEADER} has called {called}: all ranks make the same calls of a manager, in the same order"
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
    fn forget_read(&self) -> Result<()> {
        let mut read_by_all = u64::MAX;
        for rank in 1..self.world_size() {
            let read = self.coordinator.get(&self.key(&format!("read/{rank}")), Duration::ZERO)?;
            let number = read.and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes);
            let Some(number) = number else { return Ok(()) };
            read_by_all = read_by_all.min(number);
        }
        self.forget_calls(read_by_all.saturating_add(1))
    }

    fn forget_calls(&self, end: u64) -> Result<()> {
        let from = self.notes().calls_from;
        for number in from..end {
            self.coordinator.remove(&self.key(&format!("call/{number}")))?;
        }
        self.notes().calls_from = end.max(from);
        Ok(())
    }

    /// Publishes this rank's vote on a save.
    pub fn send_vote(&self, save: u64, vote: &[u8]) -> Result<()> {
        let put = self.put_surely(&self.key(&format!("vote/{save}/{}", self.rank())), vote);
        // Also after a failure: the vote is sent only once.
        self.notes().voted.insert(save);
        put
    }

    /// True if this rank has voted on a save.
    pub fn has_voted(&self, save: u64) -> bool {
        self.notes().voted.contains(&save)
    }

    /// Forgets this rank's votes on saves below that number.
    pub fn forget_votes(&self, before: u64) {
        let mut notes = self.notes();
        notes.voted = notes.voted.split_off(&before);
    }

    /// Puts a message that the others wait for. Retries for a while, because it is sent only once.
    fn put_surely(&self, key: &str, message: &[u8]) -> Result<()> {
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

    /// Returns the votes of these ranks that have come. Waits up to `timeout` for the first rank's
    /// vote.
    pub fn votes(&self, save: u64, of: &[u32], timeout: Duration) -> Result<Vec<(u32, Message)>> {
        let mut found = Vec::new();
        for &rank in of {
            let wait = if found.is_empty() && Some(&rank) == of.first() { timeout } else { Duration::ZERO };
            let key = self.key(&format!("vote/{save}/{rank}"));
            if let Some(vote) = self.coordinator.get(&key, wait)? {
                self.coordinator.remove(&key)?;
                found.push((rank, vote));
            }
        }
        Ok(found)
    }

    /// Announces the verdict on a save. A failed save may leave unread votes, which are removed
    /// with its verdict.
    pub fn send_verdict(&self, save: u64, verdict: &[u8], has_failed: bool) -> Result<()> {
        if has_failed {
            self.notes().failed.insert(save);
        }
        self.put_surely(&self.key(&format!("verdict/{save}")), verdict)
    }

    /// Records that a rank reported changed leaves in that save. All ranks learn of it with the
    /// verdict. A save that was planned before the last census is ignored.
    pub fn record_stale_census(&self, save: u64) {
        let mut notes = self.notes();
        if save >= notes.census_agreed_at {
            notes.census_stale_since = Some(notes.census_stale_since.map_or(save, |first| first.min(save)));
        }
    }

    /// Returns the first save since the last census in which a rank reported changed leaves.
    pub fn census_stale_since(&self) -> Option<u64> {
        self.notes().census_stale_since
    }

    /// Records that the ranks held a census before that save.
    pub fn record_census(&self, save: u64) {
        let mut notes = self.notes();
        (notes.census_agreed_at, notes.census_stale_since) = (save, None);
    }

    /// Removes the verdicts on saves below that number, which all ranks have read.
    pub fn forget_verdicts(&self, before: u64) -> Result<()> {
        let from = self.notes().verdicts_from;
        for save in from..before {
            self.coordinator.remove(&self.key(&format!("verdict/{save}")))?;
            let has_failed = self.notes().failed.remove(&save);
            for rank in (0..self.world_size()).filter(|_| has_failed) {
                self.coordinator.remove(&self.key(&format!("vote/{save}/{rank}")))?;
            }
        }
        self.notes().verdicts_from = before.max(from);
        Ok(())
    }

    /// Returns the verdict on a save, if the leader announces it within that time.
    pub fn verdict(&self, save: u64, timeout: Duration) -> Result<Option<Message>> {
        self.coordinator.get(&self.key(&format!("verdict/{save}")), timeout)
    }

    /// Sends this rank's heartbeat.
    pub fn send_heartbeat(&self, heartbeat: RankHeartbeat) -> Result<()> {
        let heartbeat = if self.lost.get().is_some() { RankHeartbeat::LEFT } else { heartbeat };
        self.coordinator.put(&self.key(&format!("heartbeat/{}", self.rank())), &heartbeat.encode())
    }

    /// Returns a rank's last heartbeat.
    pub fn heartbeat_of(&self, rank: u32) -> Result<RankHeartbeat> {
        let heartbeat = self.coordinator.get(&self.key(&format!("heartbeat/{rank}")), Duration::ZERO)?;
        Ok(heartbeat.and_then(|message| RankHeartbeat::decode(&message)).unwrap_or_default())
    }

    /// Records the ranks that did not vote on the leader's save in time.
    pub fn record_missed(&self, save: u64, ranks: &[u32]) {
        let heartbeats =
            ranks.iter().map(|&rank| (rank, self.heartbeat_of(rank).unwrap_or_default())).collect();
        self.notes().missed = (save, heartbeats);
    }

    /// True if the rank missed the last save, and has sent neither a heartbeat nor a late vote
    /// since.
    fn is_gone(&self, rank: u32) -> Result<bool> {
        let (save, heartbeat) = {
            let notes = self.notes();
            let Some(&heartbeat) = notes.missed.1.get(&rank) else { return Ok(false) };
            (notes.missed.0, heartbeat)
        };
        let vote = self.coordinator.get(&self.key(&format!("vote/{save}/{rank}")), Duration::ZERO)?;
        Ok(vote.is_none() && self.heartbeat_of(rank)? == heartbeat)
    }

    /// The interval of heartbeats, short enough that no rank counts as silent.
    pub fn heartbeat_interval(&self) -> Duration {
        (self.timeout / 8).clamp(Duration::from_millis(10), Duration::from_secs(5))
    }

    /// Leaves the session. The leader waits until all ranks have left, then clears the board.
    /// `saves` is the number of saves. It does not wait for dead ranks, nor after a lost session.
    /// Returns true if every rank has left.
    pub fn leave(&self, saves: u64, timeout: Duration) -> Result<bool> {
        if !self.leads() {
            // A rank that waits for another call of this one gets an error at once.
            self.send_heartbeat(RankHeartbeat::LEFT)?;
            self.coordinator.put(&self.key(&format!("bye/{}", self.rank())), b"")?;
            return Ok(false);
        }
        if self.lost.get().is_some() {
            return Ok(false);
        }
        // One deadline for all ranks: a dead machine takes several with it.
        let (begun, deadline) = (Instant::now(), deadline_after(timeout));
        let mut missing = Vec::new();
        for rank in 1..self.world_size() {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = if self.is_gone(rank)? { Duration::ZERO } else { left };
            let board = Board { coordinator: &self.coordinator, timeout };
            match board
                .wait(&self.key(&format!("bye/{rank}")), rank, "to close", || Ok(RankHeartbeat::default()))
            {
                Err(Error::CoordinationTimeout { .. }) => missing.push(rank),
                answer => drop(answer?),
            }
        }
        if !missing.is_empty() {
            let (waited_for, seconds) = ("to close".to_owned(), begun.elapsed().as_secs_f64());
            return Err(Error::CoordinationTimeout { missing, waited_for, seconds });
        }
        let calls = *self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        self.forget_calls(calls)?;
        self.forget_verdicts(saves)?;
        for rank in 0..self.world_size() {
            for what in ["bye", "heartbeat", "read"] {
                self.coordinator.remove(&self.key(&format!("{what}/{rank}")))?;
            }
            self.coordinator.remove(&format!("{}/hello/{rank}", self.namespace))?;
        }
        self.coordinator.remove(&self.key("signal"))?;
        self.coordinator.remove(&format!("{}/welcome", self.namespace))?;
        Ok(true)
    }
}

/// Waits on the board, each wait with the same timeout.
struct Board<'a> {
    coordinator: &'a Arc<dyn Coordinator>,
    timeout: Duration,
}

impl Board<'_> {
    /// Waits for a message as long as the result of `life` changes.
    fn wait(
        &self,
        key: &str,
        rank: u32,
        what: &str,
        life: impl Fn() -> Result<RankHeartbeat>,
    ) -> Result<Message> {
        let begun = Instant::now();
        let mut timer = StallTimer::new(self.timeout);
        let mut left = timer.left(None);
        loop {
            if let Some(message) = self.coordinator.get(key, left.min(BOARD_POLL_INTERVAL))? {
                return Ok(message);
            }
            let now = life()?;
            if now == RankHeartbeat::LEFT {
                // It may have sent the message just before it left.
                if let Some(message) = self.coordinator.get(key, Duration::ZERO)? {
                    return Ok(message);
                }
                let cause = format!(
                    "rank {rank} has left it: it has closed its manager, or a call of it failed and had no answer"
                );
                return Err(Error::SessionLost { missing: vec![rank], cause });
            }
            left = timer.left(Some(now));
            if left.is_zero() {
                return Err(Error::CoordinationTimeout {
                    missing: vec![rank],
                    waited_for: what.to_owned(),
                    seconds: begun.elapsed().as_secs_f64(),
                });
            }
        }
    }

    fn answer<T: DeserializeOwned>(&self, key: &str, what: &str) -> Result<T> {
        let message = self.wait(key, LEADER, what, || Ok(RankHeartbeat::default()))?;
        decoded::<Answer<T>>(LEADER, &message)?.map_err(Error::Relayed)
    }

    /// Collects the introductions of all ranks. Refuses ranks with other settings.
    fn gather_hellos(&self, namespace: &str, own: &Hello, size: u32) -> Result<Places> {
        let mut nodes = Numbered::default();
        let mut sockets = Numbered::default();
        nodes.add(own.node.clone());
        sockets.add((own.node.clone(), own.socket));
        let deadline = deadline_after(self.timeout);
        let begun = Instant::now();
        for rank in 1..size {
            let key = format!("{namespace}/hello/{rank}");
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(message) = self.coordinator.get(&key, left)? else {
                let mut missing = Vec::new();
                for rank in rank..size {
                    if self.coordinator.get(&format!("{namespace}/hello/{rank}"), Duration::ZERO)?.is_none() {
                        missing.push(rank);
                    }
                }
                let seconds = begun.elapsed().as_secs_f64();
                let waited_for = format!("to open {}", own.what);
                return Err(Error::CoordinationTimeout { missing, waited_for, seconds });
            };
            let hello: Hello = decoded(rank, &message)?;
            own.check(rank, &hello)?;
            nodes.add(hello.node.clone());
            sockets.add((hello.node, hello.socket));
        }
        Ok(Places { nodes: nodes.of, sockets: sockets.of })
    }
}

/// The node and socket number of each rank. Ranks of one node are mostly adjacent, so it is encoded
/// as repeats.
#[derive(Serialize, Deserialize)]
struct Places {
    #[serde(with = "repeats")]
    nodes: Vec<u32>,
    #[serde(with = "repeats")]
    sockets: Vec<u32>,
}

/// Numbers for names, in the order of their first mention.
struct Numbered<T> {
    known: HashMap<T, u32>,
    of: Vec<u32>,
}

impl<T> Default for Numbered<T> {
    fn default() -> Self {
        Self { known: HashMap::new(), of: Vec::new() }
    }
}

impl<T: Eq + Hash> Numbered<T> {
    fn add(&mut self, name: T) {
        let next = self.known.len() as u32;
        self.of.push(*self.known.entry(name).or_insert(next));
    }
}

impl Hello {
    fn check(&self, rank: u32, other: &Self) -> Result<()> {
        let differ = |what: &str, here: &str, there: &str| {
            Err(Error::Invalid(format!(
                "the ranks do not agree on {what}: {here} on rank {LEADER}, {there} on rank {rank}"
            )))
        };
        if self.version != other.version {
            return differ("the version of stepwell", &self.version, &other.version);
        }
        if self.what != other.what {
            return differ("what they open", &self.what, &other.what);
        }
        for ((name, here), (_, there)) in self.agreed.iter().zip(&other.agreed) {
            if here != there {
                return differ(name, here, there);
            }
        }
        Ok(())
    }
}

/// True for the end of a session, also if the leader relays it.
fn is_lost(error: &Error) -> bool {
    error.kind() == Kind::SessionLost.name()
}

fn encoded(value: &impl Serialize) -> Result<Message> {
    serde_json::to_vec(value).map_err(|error| crate::error::unencodable(&error))
}

fn decoded<T: DeserializeOwned>(rank: u32, message: &[u8]) -> Result<T> {
    serde_json::from_slice(message).map_err(|error| {
        let cause = format!("its message cannot be read ({error}); are all ranks of one version?");
        Error::RankFailed { rank, cause }
    })
}
