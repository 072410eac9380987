//! The commit machine. One action at a time: [`Machine::start`] gives the first, [`Machine::on`]
//! takes what came of it and gives the next, until [`Action::Finish`]. It never touches a file, a
//! clock or another rank itself.
//!
//! ```text
//! every rank:          create the temporary ─▶ write data ─▶ vote ─┐
//! first of its node:   ◀───────────────────────────── its node's votes ─▶ one vote ─┐
//! leader:              ◀──────────────────────────────────────────── a vote of every node
//!              indexes, lease, manifest, directories bottom-up ─▶ fence ─▶ rename (the commit point) ─▶ fsync(root) ─▶ verdict
//! ```
//!
//! Invariants: a rename follows the syncs of everything below it. A failed write or sync is never
//! retried; only *creating* the temporary is, once, after the trash was emptied. An error before
//! the rename is `NotCommitted` and removes the temporary. An error after it is `Uncertain` and
//! keeps everything. An invalid step under the name is renamed aside, and that is synced, before
//! the name is used.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use stepwell_core::format::manifest::Attempt;

use super::announcement::{Announcement, LeaderNews, Verdict, failure};
use super::records::{self, Draft, Vote};
use crate::coordination::LEADER;
use crate::error::{Error, Relayed};
use crate::state::item::ItemPart;

/// How long one look for votes or for the verdict takes at most, so that deadlines are kept.
const VOTE_POLL_INTERVAL: Duration = Duration::from_millis(250);

/// The task of a commit.
#[derive(Clone, Debug)]
pub struct CommitPlan {
    /// The step, for messages.
    pub step: u64,
    /// The save.
    pub attempt: Attempt,
    /// The directory while it is written.
    pub temporary: String,
    /// A directory that says, where there is one, that a rank has given up on the leader.
    pub given_up: String,
    /// The name that it gets.
    pub target: String,
    /// The treatment of an existing step.
    pub existing: Existing,
    /// The name that a replaced step gets.
    pub trash: String,
    /// The new name for an invalid step.
    pub quarantine: String,
    /// This rank and all ranks.
    pub rank: u32,
    /// All ranks.
    pub world_size: u32,
    /// For each rank the number of its node; ranks beyond are of node 0. The first rank of a node
    /// gathers its votes.
    pub nodes: Arc<[u32]>,
    /// How long nothing may happen while others are waited for.
    pub stall_timeout: Duration,
    /// True if there is an epoch file to look at before the rename.
    pub fenced: bool,
    /// This rank's leaves are others than it has told the ranks.
    pub stale: bool,
}

impl CommitPlan {
    fn node(&self, rank: u32) -> u32 {
        self.nodes.get(rank as usize).copied().unwrap_or(0)
    }

    /// The ranks whose votes come to this one: those of its node, if it is the first there; on the
    /// leader also the first ones of all other nodes.
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

/// The treatment of an existing step with the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Existing {
    /// It stays; the commit is refused.
    Refuse,
    /// It is swapped with the new one in one operation, then retired.
    Replace,
}

/// A request of the machine.
#[derive(Debug)]
pub enum Action {
    /// Make [`CommitPlan::temporary`]; another rank may have made it (world size > 1), or be
    /// through with it: [`Event::GivenUp`].
    CreateTemporary,
    /// Make [`CommitPlan::given_up`]; another rank may have.
    GiveUp,
    /// Run the save pipeline into the temporary; answer with [`Event::Data`].
    WriteData,
    /// Publish this rank's vote.
    SendVote(Box<Vote>),
    /// Look for the votes of these ranks.
    PollVotes {
        /// Those that have not voted.
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
    /// Look whether these files of all ranks are below the temporary: paths and lengths.
    FindFiles(Vec<(String, u64)>),
    /// Sync a directory: of the temporary (relative path), or the temporary itself (empty).
    SyncDir(String),
    /// Read the epoch: is this still the root's writer?
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
    /// Remove the temporary and all in it, and what says that it was given up; failing to is no
    /// error (the next writer does it).
    RemoveTemporary,
    /// Tell the other ranks.
    Announce(Announcement),
    /// Look for the leader's announcement, and for what else there is to know.
    Listen {
        /// At most so long.
        timeout: Duration,
    },
    /// The end.
    Finish(Box<Verdict>),
}

/// The result of an action.
#[derive(Debug)]
pub enum Event {
    /// It was done.
    Done,
    /// It failed.
    Failed(stepwell_core::Error),
    /// A rank has given up on the leader: nobody may go on.
    GivenUp,
    /// The data files of this rank are written and synced.
    Data(Vec<ItemPart>),
    /// The votes that have come.
    Votes {
        /// They.
        votes: Vec<Vote>,
        /// Of ranks that have not voted: a number that changes as long as they get on.
        heartbeats: Vec<(u32, u64)>,
    },
    /// The state of the inspected name.
    TargetState(TargetState),
    /// The fence: `None` if this is still the writer, else who is.
    Fence(Option<String>),
    /// This rank's knowledge of the others.
    LeaderNews(LeaderNews),
    /// Ranks could not be reached.
    Unreachable(Error),
}

/// The state of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetState {
    /// Nothing.
    Absent,
    /// A step, of this attempt.
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
    /// Between two looks for votes, whether the leader has decided without them.
    CheckingVerdict,
    Recording(VecDeque<Action>),
    Fencing,
    /// Looking at the target before the rename (only where a step may be replaced).
    InspectingTarget,
    Renaming {
        exchange: bool,
    },
    /// A rename has failed: whose attempt is there now?
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
    /// The others are told that it is over.
    AnnouncingFailure(Error),
    Removing(Error),
    Awaiting {
        progress: Duration,
        /// The leader's last heartbeat.
        heartbeat: u64,
    },
    /// The leader is silent: later participants of this save must leave it.
    GivingUp(Error),
    /// Prevents a late rename by the leader.
    BlockingLeader(Error),
    /// The leader has renamed, or another rank was faster: does the step exist?
    InspectingBlocked(Error),
    Announcing(Verdict),
    Finished,
}

/// See the module documentation.
#[derive(Debug)]
pub struct Machine {
    plan: CommitPlan,
    draft: Draft,
    state: CommitState,
    votes: BTreeMap<u32, Vote>,
    /// Ranks without a vote: the last heartbeat of each, and its time.
    missing: BTreeMap<u32, (u64, Duration)>,
    quarantined: bool,
}

impl Machine {
    /// A commit that has not begun.
    pub fn new(plan: CommitPlan, draft: Draft) -> Self {
        let state = CommitState::Creating;
        Self { plan, draft, state, votes: BTreeMap::new(), missing: BTreeMap::new(), quarantined: false }
    }

    /// Its task.
    pub fn plan(&self) -> &CommitPlan {
        &self.plan
    }

    /// The first action.
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
            // Without this rank's vote the step fails. Report the reason to the leader if possible.
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
            // Durable before the name has another owner: a power cut could keep the second rename
            // without the first, and what was set aside would be nowhere.
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
            // The new step is durable; what is left of the old one is the next writer's.
            (CommitState::RetiringOld | CommitState::SyncingOld, Event::Failed(_)) => {
                self.end(Verdict::Committed { replaced: None })
            }
            // True if or not they could be told.
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

    /// This rank comes to a save that another one has left.
    fn given_up(&mut self) -> Action {
        if self.is_leader() {
            return self.abort(self.late());
        }
        let error = self.late();
        let vote = self.own_vote(Err(failure(self.plan.rank, &error)));
        self.to(CommitState::Announcing(Verdict::NotCommitted(error)), Action::SendVote(Box::new(vote)))
    }

    /// This rank's data could not be written: the others are told, then it is over here.
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
            // A straggler of a dead attempt does not count.
            if vote.attempt == self.plan.attempt && self.missing.remove(&vote.rank).is_some() {
                if vote.step != self.plan.step {
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
                    // Ranks that gave up on this one have removed the temporary with their files,
                    // and it may have been recreated.
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

    /// Votes that are gathered cannot be had, or one of them says no: the leader is told, and
    /// decides.
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

    /// After a rename that reported an error: the attempt under the name decides, not the errno (a
    /// network file system loses answers).
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

    /// As long as the leader gives signs of life it is waited for: it writes, or waits for others,
    /// and has a deadline for them.
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

    /// The leader is silent. First announce that to anyone who recreates the directory, then rename
    /// it aside. If that succeeds, the step will never exist. (Before the leader's rename, all
    /// ranks have created or found the directory, so nobody puts another one in its place.)
    fn block_leader(&mut self, error: Error) -> Action {
        if self.plan.existing == Existing::Replace {
            // The temporary may be what was replaced by now, which is nobody's to take away before
            // that is durable.
            return self.uncertain("the leader to say what became of the step that is replaced");
        }
        self.to(CommitState::GivingUp(error), Action::GiveUp)
    }

    /// The silent leader may have renamed before. If the step exists, its durability is unknown. If
    /// it does not, it never will, because its directory is gone.
    fn blocked(&mut self, error: Error, event: &Event) -> Action {
        match event {
            Event::TargetState(TargetState::Committed(attempt)) if *attempt == self.plan.attempt => {
                self.uncertain("the leader to say that it is durable")
            }
            Event::Failed(_) => self.uncertain("the step to be looked at"),
            _ => self.finish(Verdict::NotCommitted(error)),
        }
    }

    /// The leader has fallen silent, and may have committed or commit still.
    fn uncertain(&mut self, waited_for: &str) -> Action {
        let (waited_for, seconds) = (waited_for.to_owned(), self.plan.stall_timeout.as_secs_f64());
        self.finish(Verdict::Uncertain(stepwell_core::Error::Timeout { waited_for, seconds }))
    }

    /// Before the rename: nothing is visible, and the temporary goes. Only the leader removes it,
    /// since other ranks may still write there; they are told first.
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
