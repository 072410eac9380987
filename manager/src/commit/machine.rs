//! The commit machine. [`Machine::start`] returns the first action. [`Machine::on`] takes its
//! result and returns the next one, until [`Action::Finish`]. The machine itself touches no file,
//! no clock and no other rank.
//!
//! ```text
//! every rank:          create the temporary ─▶ write data ─▶ vote ─┐
//! first of its node:   ◀───────────────────────────── its node's votes ─▶ one vote ─┐
//! leader:              ◀──────────────────────────────────────────── a vote of every node
//!              indexes, lease, manifest, directories bottom-up ─▶ fence ─▶ rename (the commit point) ─▶ fsync(root) ─▶ verdict
//! ```
//!
//! Invariants: a rename follows the syncs of everything below it. A failed write or sync is never
//! retried. Only the creation of the temporary is retried, once, after the trash was emptied. An
//! error before the rename is `NotCommitted` and removes the temporary. An error after it is
//! `Uncertain` and keeps everything. An invalid step under the target name is renamed aside,
//! durably, before the name is used.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use stepwell_core::format::manifest::Attempt;

use super::announcement::{Announcement, LeaderNews, Verdict, failure};
use super::records::{self, Draft, Vote};
use crate::coordination::LEADER;
use crate::error::{Error, Relayed};
use crate::state::item::ItemPart;

/// The longest wait of one action for votes or for the verdict. The machine checks its deadlines in
/// between.
const VOTE_POLL_INTERVAL: Duration = Duration::from_millis(250);

/// The task of a commit.
#[derive(Clone, Debug)]
pub struct CommitPlan {
    /// The step, for messages.
    pub step: u64,
    /// The id of this save.
    pub attempt: Attempt,
    /// The name of the directory while it is written.
    pub temporary: String,
    /// The name of a directory that marks that a rank has given up on the leader.
    pub given_up: String,
    /// The name that the directory gets.
    pub target: String,
    /// The treatment of an existing step.
    pub existing: Existing,
    /// The new name for a replaced step.
    pub trash: String,
    /// The new name for an invalid step.
    pub quarantine: String,
    /// This rank.
    pub rank: u32,
    /// The number of ranks.
    pub world_size: u32,
    /// For each rank, the number of its node. Missing ranks are on node 0. The first rank of a node
    /// gathers its votes.
    pub nodes: Arc<[u32]>,
    /// The longest time without progress of another rank.
    pub stall_timeout: Duration,
    /// True if the root has an epoch file to check before the rename.
    pub fenced: bool,
    /// True if this rank's leaves have changed since the last census.
    pub stale: bool,
}

impl CommitPlan {
    fn node(&self, rank: u32) -> u32 {
        self.nodes.get(rank as usize).copied().unwrap_or(0)
    }

    /// Returns the ranks whose votes this rank gathers. The first rank of a node gathers its node's
    /// votes. The leader also gathers those of the first ranks of all other nodes.
    fn awaited(&self) -> Vec<u32> {
        let mut gathered = BTreeSet::new();
        // Ranks in order, and whether each is the first of its node.
        let ranks: Vec<(u32, bool)> =
            (0..self.world_size).map(|rank| (rank, gathered.insert(self.node(rank)))).collect();
        let is_first = ranks.get(self.rank as usize).is_some_and(|&(_, first)| first);
        let node = self.node(self.rank);
        let comes_here = |&(rank, first): &(u32, bool)| {
            (is_first && self.node(rank) == node) || (self.rank == LEADER && first)
        };
        ranks.into_iter().filter(comes_here).map(|(rank, _)| rank).filter(|&rank| rank != self.rank).collect()
    }
}

/// The treatment of an existing step with the target name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Existing {
    /// The step stays, and the commit fails.
    Refuse,
    /// The step is swapped with the new one in one operation, then retired.
    Replace,
}

/// A request of the machine.
#[derive(Debug)]
pub enum Action {
    /// Create [`CommitPlan::temporary`]. With several ranks, another one may have created it, or
    /// given the save up: [`Event::GivenUp`].
    CreateTemporary,
    /// Create [`CommitPlan::given_up`]. Another rank may have created it.
    GiveUp,
    /// Run the save pipeline into the temporary. The result is [`Event::Data`].
    WriteData,
    /// Publish this rank's vote.
    SendVote(Box<Vote>),
    /// Read the votes of these ranks.
    PollVotes {
        /// The ranks that have not voted.
        missing: Vec<u32>,
        /// At most so long.
        timeout: Duration,
    },
    /// Write and sync a small file below the temporary.
    WriteFile {
        /// Relative to the temporary.
        path: String,
        /// Its content.
        bytes: Vec<u8>,
    },
    /// Check that the files of all ranks are below the temporary, each with its length.
    FindFiles(Vec<(String, u64)>),
    /// Sync a directory of the temporary. An empty path is the temporary itself.
    SyncDir(String),
    /// Read the epoch file, to check that this is still the root's writer.
    CheckFence,
    /// Inspect this name.
    InspectTarget(String),
    /// Rename within the root.
    Rename {
        /// From.
        from: String,
        /// To.
        to: String,
        /// How.
        how: stepwell_core::io::Rename,
    },
    /// Make the root's entries durable.
    SyncRoot,
    /// Remove the temporary with its content, and its given-up mark. A failure is no error: the
    /// next writer removes them.
    RemoveTemporary,
    /// Announce the verdict to the other ranks.
    Announce(Announcement),
    /// Wait for the leader's announcement, and read its heartbeat.
    Listen {
        /// At most so long.
        timeout: Duration,
    },
    /// End the commit.
    Finish(Box<Verdict>),
}

/// The result of an action.
#[derive(Debug)]
pub enum Event {
    /// The action succeeded.
    Done,
    /// The action failed.
    Failed(stepwell_core::Error),
    /// A rank has given up on the leader, so no rank may go on.
    GivenUp,
    /// The data files of this rank are written and synced.
    Data(Vec<ItemPart>),
    /// The votes that have come.
    Votes {
        /// They.
        votes: Vec<Vote>,
        /// The heartbeats of ranks that have not voted: rank, and a number that changes with
        /// progress.
        heartbeats: Vec<(u32, u64)>,
    },
    /// The state of the inspected name.
    TargetState(TargetState),
    /// The fence: `None` if this is still the writer, else the other writer.
    Fence(Option<String>),
    /// The news from the leader.
    LeaderNews(LeaderNews),
    /// The other ranks could not be reached.
    Unreachable(Error),
}

/// The state of the target name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetState {
    /// Nothing.
    Absent,
    /// A committed step, with its attempt.
    Committed(Attempt),
    /// An invalid step, with the reason.
    NotAStep(String),
}

/// The time of an event.
#[derive(Clone, Copy, Debug, Default)]
pub struct Now {
    /// Monotonic.
    pub monotonic: Duration,
    /// Wall clock, nanoseconds since 1970.
    pub unix_ns: i64,
}

#[derive(Debug)]
enum CommitState {
    Creating,
    Writing,
    Voting,
    Gathering,
    /// Between two reads of votes, checks if the leader has decided without them.
    CheckingVerdict,
    Recording(VecDeque<Action>),
    Fencing,
    /// Inspects the target before the rename, if the save may replace a step.
    InspectingTarget,
    Renaming {
        exchange: bool,
    },
    /// A rename has failed: checks which attempt has the target name.
    InspectingAfterRename {
        exchange: bool,
        error: stepwell_core::Error,
    },
    Quarantining,
    SyncingAside,
    Syncing {
        exchange: bool,
    },
    RetiringOld,
    SyncingOld,
    /// Announces the failure to the other ranks.
    AnnouncingFailure(Error),
    Removing(Error),
    Awaiting {
        progress: Duration,
        /// The leader's last heartbeat.
        heartbeat: u64,
    },
    /// The leader is silent: marks the save, so that later participants leave it.
    GivingUp(Error),
    /// Renames the temporary away, to prevent a late rename by the leader.
    BlockingLeader(Error),
    /// The leader has renamed, or another rank was faster: checks if the step exists.
    InspectingBlocked(Error),
    Announcing(Verdict),
    Finished,
}

/// The state machine of one commit.
#[derive(Debug)]
pub struct Machine {
    plan: CommitPlan,
    draft: Draft,
    state: CommitState,
    votes: BTreeMap<u32, Vote>,
    /// The ranks that have not voted, each with its last heartbeat and its time.
    missing: BTreeMap<u32, (u64, Duration)>,
    quarantined: bool,
}

impl Machine {
    /// Returns a commit that has not begun.
    pub fn new(plan: CommitPlan, draft: Draft) -> Self {
        let state = CommitState::Creating;
        Self { plan, draft, state, votes: BTreeMap::new(), missing: BTreeMap::new(), quarantined: false }
    }

    /// Returns its plan.
    pub fn plan(&self) -> &CommitPlan {
        &self.plan
    }

    /// Returns the first action.
    pub fn start(&mut self) -> Action {
        self.state = CommitState::Creating;
        Action::CreateTemporary
    }

    /// Returns the next action after an event.
    pub fn on(&mut self, event: Event, now: Now) -> Action {
        match (std::mem::replace(&mut self.state, CommitState::Finished), event) {
            (CommitState::Creating, Event::Done) => self.to(CommitState::Writing, Action::WriteData),
            (CommitState::Creating, Event::GivenUp) => self.given_up(),
            (CommitState::Creating | CommitState::Writing, Event::Failed(error)) => self.own_failure(error),
            (CommitState::Writing, Event::Data(parts)) => {
                let vote = self.own_vote(Ok(parts));
                self.vote(vote, now)
            }
            (CommitState::Voting, Event::Done) => {
                self.to(
                    CommitState::Awaiting { progress: now.monotonic, heartbeat: 0 },
                    Action::Listen { timeout: VOTE_POLL_INTERVAL },
                )
            }
            // Without this rank's vote the save fails. Report the reason to the leader if possible.
            (CommitState::Gathering | CommitState::CheckingVerdict, Event::Unreachable(error)) => self.give_up(error),
            // The vote may have come through, and the leader may commit on it.
            (CommitState::Voting | CommitState::Awaiting { .. }, Event::Unreachable(error)) => self.block_leader(error),
            (CommitState::Gathering, Event::Votes { votes, heartbeats }) => self.gather(votes, &heartbeats, now),
            (CommitState::CheckingVerdict, Event::LeaderNews(news)) => match news.announcement {
                Some(announcement) => self.follow_leader(announcement),
                None => self.poll_votes(),
            },
            (CommitState::Recording(actions), Event::Done) => self.record(actions),
            (CommitState::Fencing, Event::Fence(None)) => self.before_rename(),
            (CommitState::Fencing, Event::Fence(Some(owner))) => {
                let error = Error::Locked { root: self.draft.root.clone(), owner: Some(owner) };
                self.abort(error)
            }
            (CommitState::InspectingTarget, Event::TargetState(target)) => match target {
                TargetState::Absent => self.rename(false),
                TargetState::Committed(_) => self.rename(true),
                TargetState::NotAStep(_) => self.set_aside(),
            },
            (CommitState::Renaming { exchange }, Event::Done) => self.to(CommitState::Syncing { exchange }, Action::SyncRoot),
            (CommitState::Renaming { exchange: true }, Event::Failed(error)) if error.is_unknown_request() => {
                self.abort(Error::Invalid(format!(
                    "{} cannot swap two directories ({error}), so that replacing step {} could lose both; delete it first",
                    self.draft.root.display(),
                    self.plan.step
                )))
            }
            (CommitState::Renaming { exchange }, Event::Failed(error)) => {
                let inspect = Action::InspectTarget(self.plan.target.clone());
                self.to(CommitState::InspectingAfterRename { exchange, error }, inspect)
            }
            (CommitState::InspectingAfterRename { exchange, error }, Event::TargetState(target)) => self.resolve_rename(exchange, error, target),
            // The outcome is unknown, or the step may not be durable: leave everything.
            (CommitState::InspectingAfterRename { error, .. }, Event::Failed(_)) | (CommitState::Syncing { .. }, Event::Failed(error)) => {
                self.end(Verdict::Uncertain(error))
            }
            // Sync before the name has another owner: a power cut could keep the second rename
            // without the first, and lose the invalid step.
            (CommitState::Quarantining, Event::Done) => self.to(CommitState::SyncingAside, Action::SyncRoot),
            // A sync may take long, so check the owner of the root and the name again.
            (CommitState::SyncingAside, Event::Done) => self.fence(),
            (CommitState::Syncing { exchange: false }, Event::Done) => self.end(Verdict::Committed { replaced: None }),
            (CommitState::Syncing { exchange: true }, Event::Done) => {
                let (from, to) = (self.plan.temporary.clone(), self.plan.trash.clone());
                let how = stepwell_core::io::Rename::NoReplace;
                self.to(CommitState::RetiringOld, Action::Rename { from, to, how })
            }
            (CommitState::RetiringOld, Event::Done) => self.to(CommitState::SyncingOld, Action::SyncRoot),
            (CommitState::SyncingOld, Event::Done) => {
                let replaced = Some(self.plan.trash.clone());
                self.end(Verdict::Committed { replaced })
            }
            // The new step is durable. The next writer retires the old one.
            (CommitState::RetiringOld | CommitState::SyncingOld, Event::Failed(_)) => {
                self.end(Verdict::Committed { replaced: None })
            }
            // Even if they could not be reached.
            (CommitState::AnnouncingFailure(error), _) => self.to(CommitState::Removing(error), Action::RemoveTemporary),
            (CommitState::Removing(error), _) | (CommitState::BlockingLeader(error), Event::Done) => {
                self.finish(Verdict::NotCommitted(error))
            }
            (CommitState::Awaiting { progress, heartbeat }, Event::LeaderNews(news)) => self.await_leader(progress, heartbeat, news, now),
            (CommitState::GivingUp(error), Event::Done) => {
                let (from, to) = (self.plan.temporary.clone(), self.plan.trash.clone());
                let how = stepwell_core::io::Rename::NoReplace;
                self.to(CommitState::BlockingLeader(error), Action::Rename { from, to, how })
            }
            // If the directory is gone, the leader or another rank was faster. If it may still
            // exist, its fate is unknown.
            (CommitState::BlockingLeader(error), Event::Failed(failed)) if failed.is_not_found() => {
                let inspect = Action::InspectTarget(self.plan.target.clone());
                self.to(CommitState::InspectingBlocked(error), inspect)
            }
            (CommitState::GivingUp(_) | CommitState::BlockingLeader(_), Event::Failed(failed)) => self.finish(Verdict::Uncertain(failed)),
            (CommitState::InspectingBlocked(error), event) => self.blocked(error, &event),
            (CommitState::Announcing(verdict), _) => Action::Finish(Box::new(verdict)),
            (_, Event::Failed(error)) => self.abort(self.failed(error)),
            (state, event) => {
                let expected = format!("an event that the commit machine takes in {state:?}");
                self.abort(Error::internal(expected, format!("{event:?}")))
            }
        }
    }

    fn to(&mut self, state: CommitState, action: Action) -> Action {
        self.state = state;
        action
    }

    fn is_leader(&self) -> bool {
        self.plan.rank == LEADER
    }

    fn failed(&self, source: stepwell_core::Error) -> Error {
        if self.is_leader() && self.plan.world_size > 1 && source.is_not_found() {
            return self.late();
        }
        Error::SaveFailed { step: self.plan.step, source }
    }

    fn late(&self) -> Error {
        Error::GivenUpOn { step: self.plan.step, seconds: self.plan.stall_timeout.as_secs_f64() }
    }

    /// This rank comes to a save that another rank has given up.
    fn given_up(&mut self) -> Action {
        if self.is_leader() {
            return self.abort(self.late());
        }
        let error = self.late();
        let vote = self.own_vote(Err(failure(self.plan.rank, &error)));
        self.to(CommitState::Announcing(Verdict::NotCommitted(error)), Action::SendVote(Box::new(vote)))
    }

    /// This rank could not write its data. It reports that, and ends.
    fn own_failure(&mut self, error: stepwell_core::Error) -> Action {
        if self.is_leader() {
            return self.abort(self.failed(error));
        }
        let rank = self.plan.rank;
        let named = Error::RankFailed { rank, cause: error.to_string() };
        let vote = self.own_vote(Err(failure(rank, &named)));
        self.to(
            CommitState::Announcing(Verdict::NotCommitted(self.failed(error))),
            Action::SendVote(Box::new(vote)),
        )
    }

    fn own_vote(&self, parts: Result<Vec<ItemPart>, Relayed>) -> Vote {
        let CommitPlan { rank, step, stale, .. } = self.plan;
        Vote {
            rank,
            step,
            attempt: self.plan.attempt.clone(),
            stale,
            claims: self.draft.claims.clone(),
            parts,
        }
    }

    fn vote(&mut self, vote: Vote, now: Now) -> Action {
        let awaited = self.plan.awaited();
        if !self.is_leader() && awaited.is_empty() {
            return self.to(CommitState::Voting, Action::SendVote(Box::new(vote)));
        }
        self.missing = awaited.into_iter().map(|rank| (rank, (0, now.monotonic))).collect();
        self.votes.insert(vote.rank, vote);
        self.decide(now)
    }

    fn gather(&mut self, votes: Vec<Vote>, heartbeats: &[(u32, u64)], now: Now) -> Action {
        for mut vote in votes {
            // Ignore late votes of an earlier attempt.
            if vote.attempt == self.plan.attempt && self.missing.remove(&vote.rank).is_some() {
                if vote.step != self.plan.step && vote.parts.is_ok() {
                    let cause = format!(
                        "it saves step {} where rank {} saves step {}: all ranks make the same calls, in the same order",
                        vote.step, self.plan.rank, self.plan.step
                    );
                    vote.parts = Err(Relayed::of(&Error::RankFailed { rank: vote.rank, cause }));
                }
                self.votes.insert(vote.rank, vote);
            }
        }
        for (rank, heartbeat) in heartbeats {
            if let Some((last, since)) = self.missing.get_mut(rank)
                && last != heartbeat
            {
                (*last, *since) = (*heartbeat, now.monotonic);
            }
        }
        self.decide(now)
    }

    fn decide(&mut self, now: Now) -> Action {
        let failed = self.votes.values().find_map(|vote| vote.parts.as_ref().err());
        if let Some(failure) = failed {
            return self.give_up(Error::Relayed(failure.clone()));
        }
        if !self.missing.is_empty() {
            let silent = |since: Duration| now.monotonic.saturating_sub(since);
            let is_silent = |since: Duration| silent(since) >= self.plan.stall_timeout;
            let over: Vec<(u32, Duration)> = self
                .missing
                .iter()
                .filter(|(_, (_, since))| is_silent(*since))
                .map(|(&rank, &(_, since))| (rank, silent(since)))
                .collect();
            if let Some(waited) = over.iter().map(|&(_, waited)| waited).max() {
                return self.give_up(Error::CoordinationTimeout {
                    missing: over.into_iter().map(|(rank, _)| rank).collect(),
                    waited_for: format!("to vote on step {}, which was not committed", self.plan.step),
                    seconds: waited.as_secs_f64(),
                });
            }
            if self.is_leader() {
                return self.poll_votes();
            }
            return self.to(CommitState::CheckingVerdict, Action::Listen { timeout: Duration::ZERO });
        }
        let votes: Vec<Vote> = std::mem::take(&mut self.votes).into_values().collect();
        if !self.is_leader() {
            let vote = records::gather(&self.draft, &self.plan.attempt, self.plan.rank, votes);
            return self.to(CommitState::Voting, Action::SendVote(Box::new(vote)));
        }
        match records::records(&self.draft, &self.plan.attempt, self.plan.world_size, votes, now.unix_ns) {
            Ok((data, files)) => {
                let mut actions = VecDeque::new();
                if self.plan.world_size > 1 {
                    // Ranks that gave up on this one have removed the temporary with their files.
                    // It may have been created again.
                    actions.push_back(Action::FindFiles(data));
                }
                for (dir, file) in files {
                    actions.push_back(Action::WriteFile { path: file.path, bytes: file.bytes });
                    if let Some(dir) = dir {
                        actions.push_back(Action::SyncDir(dir));
                    }
                }
                actions.push_back(Action::SyncDir(String::new()));
                self.record(actions)
            }
            Err(error) => self.abort(error),
        }
    }

    fn poll_votes(&mut self) -> Action {
        let missing = self.missing.keys().copied().collect();
        self.to(CommitState::Gathering, Action::PollVotes { missing, timeout: VOTE_POLL_INTERVAL })
    }

    /// A gathered vote is missing or a failure. Reports it to the leader, which decides.
    fn give_up(&mut self, error: Error) -> Action {
        if self.is_leader() {
            return self.abort(error);
        }
        let vote = self.own_vote(Err(failure(self.plan.rank, &error)));
        self.to(CommitState::Voting, Action::SendVote(Box::new(vote)))
    }

    fn follow_leader(&mut self, announcement: Announcement) -> Action {
        let target = self.draft.root.join(&self.plan.target);
        self.finish(announcement.verdict(&target))
    }

    fn record(&mut self, mut actions: VecDeque<Action>) -> Action {
        match actions.pop_front() {
            Some(action) => self.to(CommitState::Recording(actions), action),
            None => self.fence(),
        }
    }

    fn fence(&mut self) -> Action {
        if self.plan.fenced {
            return self.to(CommitState::Fencing, Action::CheckFence);
        }
        self.before_rename()
    }

    fn before_rename(&mut self) -> Action {
        match self.plan.existing {
            Existing::Refuse => self.rename(false),
            Existing::Replace => {
                let inspect = Action::InspectTarget(self.plan.target.clone());
                self.to(CommitState::InspectingTarget, inspect)
            }
        }
    }

    fn rename(&mut self, exchange: bool) -> Action {
        use stepwell_core::io::Rename;
        let (from, to) = (self.plan.temporary.clone(), self.plan.target.clone());
        let how = if exchange { Rename::Exchange } else { Rename::NoReplace };
        self.to(CommitState::Renaming { exchange }, Action::Rename { from, to, how })
    }

    fn set_aside(&mut self) -> Action {
        let (from, to) = (self.plan.target.clone(), self.plan.quarantine.clone());
        self.quarantined = true;
        self.to(
            CommitState::Quarantining,
            Action::Rename { from, to, how: stepwell_core::io::Rename::NoReplace },
        )
    }

    /// Decides after a rename that reported an error. The attempt under the target name counts, not
    /// the errno: a network file system loses answers.
    fn resolve_rename(&mut self, exchange: bool, error: stepwell_core::Error, target: TargetState) -> Action {
        match target {
            TargetState::Committed(attempt) if attempt == self.plan.attempt => {
                self.to(CommitState::Syncing { exchange }, Action::SyncRoot)
            }
            TargetState::Committed(_) if error.is_occupied() => {
                let root = self.draft.root.clone();
                self.abort(Error::StepExists { step: self.plan.step, root, latest: None, rewind_to: None })
            }
            TargetState::NotAStep(_) if !self.quarantined && error.is_occupied() => self.set_aside(),
            _ => self.abort(self.failed(error)),
        }
    }

    /// Waits as long as the leader's heartbeat changes: it writes, or waits for others with a
    /// deadline of its own.
    fn await_leader(&mut self, progress: Duration, heartbeat: u64, news: LeaderNews, now: Now) -> Action {
        if let Some(announcement) = news.announcement {
            return self.follow_leader(announcement);
        }
        let progress = if news.heartbeat == heartbeat { progress } else { now.monotonic };
        let waited = now.monotonic.saturating_sub(progress);
        if waited < self.plan.stall_timeout {
            return self.to(
                CommitState::Awaiting { progress, heartbeat: news.heartbeat },
                Action::Listen { timeout: VOTE_POLL_INTERVAL },
            );
        }
        let error = Error::CoordinationTimeout {
            missing: vec![LEADER],
            waited_for: format!("to decide on step {}, which was not committed", self.plan.step),
            seconds: waited.as_secs_f64(),
        };
        self.block_leader(error)
    }

    /// Blocks a silent leader. First mark the save as given up, for ranks that would create the
    /// directory again. Then rename the directory away. If that succeeds, the step will never
    /// exist. (All ranks have created or found the directory before the leader's rename, so no rank
    /// creates another one.)
    fn block_leader(&mut self, error: Error) -> Action {
        if self.plan.existing == Existing::Replace {
            // The temporary may be the replaced step by now. It must stay until the replacement is
            // durable.
            return self.uncertain("the leader to say what became of the step that is replaced");
        }
        self.to(CommitState::GivingUp(error), Action::GiveUp)
    }

    /// The silent leader may have renamed before. If the step exists, its durability is unknown. If
    /// it does not, it never will, since its directory is gone.
    fn blocked(&mut self, error: Error, event: &Event) -> Action {
        match event {
            Event::TargetState(TargetState::Committed(attempt)) if *attempt == self.plan.attempt => {
                self.uncertain("the leader to say that it is durable")
            }
            Event::Failed(_) => self.uncertain("the step to be looked at"),
            _ => self.finish(Verdict::NotCommitted(error)),
        }
    }

    /// Ends as uncertain: the silent leader may have committed, or may still commit.
    fn uncertain(&mut self, waited_for: &str) -> Action {
        let (waited_for, seconds) = (waited_for.to_owned(), self.plan.stall_timeout.as_secs_f64());
        self.finish(Verdict::Uncertain(stepwell_core::Error::Timeout { waited_for, seconds }))
    }

    /// Fails before the rename: nothing is visible. Only the leader removes the temporary, after
    /// its announcement, since other ranks may still write there.
    fn abort(&mut self, error: Error) -> Action {
        if !self.is_leader() {
            return self.finish(Verdict::NotCommitted(error));
        }
        if self.plan.world_size == 1 {
            return self.to(CommitState::Removing(error), Action::RemoveTemporary);
        }
        let announcement = Announcement::NotCommitted(failure(LEADER, &error));
        self.to(CommitState::AnnouncingFailure(error), Action::Announce(announcement))
    }

    fn end(&mut self, verdict: Verdict) -> Action {
        if self.plan.world_size == 1 || !self.is_leader() {
            return self.finish(verdict);
        }
        let announcement = Announcement::of(&verdict);
        self.to(CommitState::Announcing(verdict), Action::Announce(announcement))
    }

    fn finish(&mut self, verdict: Verdict) -> Action {
        self.to(CommitState::Finished, Action::Finish(Box::new(verdict)))
    }
}
