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
//! | `<session>/failed` | any rank | its failure, for ranks that work |
//! | `<session>/carried` | the leader | it closes, and carries no more steps |
//! | `<session>/read/<rank>` | each rank | the last answer that it has read |
//! | `<session>/bye/<rank>` | each rank | it has closed |
//!
//! All ranks make the same calls in the same order. A rank that makes another call gets an error. A
//! rank whose call ends without an answer (a timeout, an unreachable board) does not know what the
//! others do. So the session is over for it: its later calls fail with [`Error::SessionLost`], and
//! its last heartbeat ([`RankHeartbeat::LEFT`]) ends the session of each rank that waits for it. A
//! rank that closes sends that heartbeat too.
//! The leader removes messages that all ranks have read.

mod board;
mod calls;
mod heartbeat;
mod meeting;
mod votes;

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use stepwell_core::deadline::deadline_after;

use self::board::{Board, decoded, encoded};
use self::meeting::Places;
use self::votes::SaveNotes;
use super::{Coordinator, LEADER};
use crate::error::{Error, Relayed, Result};

pub use self::heartbeat::RankHeartbeat;

/// Poll interval for ranks that leave.
const LEAVE_POLL_INTERVAL: Duration = Duration::from_millis(20);

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
    /// The first call whose answer is still on the board.
    first_answer: AtomicU64,
    notes: Mutex<SaveNotes>,
    /// True while the leader collects reports.
    is_collecting: AtomicBool,
}

/// The end of a session.
struct SessionEnd {
    /// The ranks that did not answer.
    missing: Vec<u32>,
    cause: String,
}

impl Team {
    /// Returns the session of a single process.
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
            first_answer: AtomicU64::new(0),
            notes: Mutex::default(),
            is_collecting: AtomicBool::new(false),
        }
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

    fn notes(&self) -> MutexGuard<'_, SaveNotes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn key(&self, what: &str) -> String {
        format!("{}/{what}", self.session)
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

    /// Announces that the leader carries no more steps.
    pub fn report_carried(&self) -> Result<()> {
        if self.is_alone() { Ok(()) } else { self.coordinator.put(&self.key("carried"), b"") }
    }

    /// True if the session is over for that rank.
    pub fn has_left(&self, rank: u32) -> Result<bool> {
        Ok(self.heartbeat_of(rank)? == RankHeartbeat::LEFT)
    }

    /// Returns the progress of the leader. `None` if it carries no more steps, or has left.
    pub fn leader_progress(&self) -> Result<Option<u64>> {
        if self.coordinator.get(&self.key("carried"), Duration::ZERO)?.is_some() {
            return Ok(None);
        }
        let heartbeat = self.heartbeat_of(LEADER)?;
        Ok((heartbeat != RankHeartbeat::LEFT).then_some(heartbeat.progress))
    }

    /// Announces that this rank makes no further call.
    pub fn announce_leaving(&self) -> Result<()> {
        self.send_heartbeat(RankHeartbeat::LEFT)
    }

    /// Announces the failure of this rank to ranks that work. They raise its kind if it
    /// `keeps_kind`, and otherwise the failure of a rank.
    pub fn report_failure(&self, error: &Error, keeps_kind: bool) -> Result<()> {
        let failed = Relayed::of_rank(self.rank(), error, keeps_kind);
        self.coordinator.put(&self.key("failed"), &encoded(&failed)?)
    }

    /// Returns the failure that a rank has announced.
    pub fn failure(&self) -> Result<Option<Error>> {
        let Some(message) = self.coordinator.get(&self.key("failed"), Duration::ZERO)? else {
            return Ok(None);
        };
        Ok(Some(Error::Relayed(decoded(self.rank(), &message)?)))
    }

    /// Waits until the session is over for all other ranks. Returns false after the timeout.
    pub fn have_others_left(&self, timeout: Duration) -> Result<bool> {
        let deadline = deadline_after(timeout);
        for rank in (0..self.world_size()).filter(|&rank| rank != self.rank()) {
            while !self.has_left(rank)? {
                if Instant::now() >= deadline {
                    return Ok(false);
                }
                std::thread::sleep(LEAVE_POLL_INTERVAL);
            }
        }
        Ok(true)
    }

    /// Leaves the session. The leader waits until all ranks have left, then clears the board.
    /// `saves` is the number of saves. It does not wait for dead ranks, nor after a lost session.
    /// Returns true if every rank has left.
    pub fn leave(&self, saves: u64, timeout: Duration) -> Result<bool> {
        if !self.leads() {
            // Ends the wait of ranks that expect another call of this rank.
            self.send_heartbeat(RankHeartbeat::LEFT)?;
            self.coordinator.put(&self.key(&format!("bye/{}", self.rank())), b"")?;
            return Ok(false);
        }
        if self.lost.get().is_some() {
            return Ok(false);
        }
        // One deadline for all ranks, because a dead machine may have several.
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
        self.remove_answers(calls)?;
        self.remove_verdicts(saves)?;
        for rank in 0..self.world_size() {
            for what in ["bye", "heartbeat", "read"] {
                self.coordinator.remove(&self.key(&format!("{what}/{rank}")))?;
            }
            self.coordinator.remove(&format!("{}/hello/{rank}", self.namespace))?;
        }
        for what in ["signal", "failed", "carried"] {
            self.coordinator.remove(&self.key(what))?;
        }
        self.coordinator.remove(&format!("{}/welcome", self.namespace))?;
        Ok(true)
    }
}
