//! The commit machine. [`Machine::start`] returns the first action. [`Machine::on`] takes its
//! result and returns the next one, until [`Action::Finish`]. The machine itself touches no file,
//! no clock and no other rank.
//!
//! ```text
//! every rank:          create the temporary ─▶ write data ─▶ vote ─┐
//! first of its node:   ◀───────────────────────────── its node's votes ─▶ one vote ─┐
//! leader:              ◀──────────────────────────────────────────── a vote of every node
//!              indexes, lease, manifest, directories bottom-up ─▶ check writer ─▶ rename (the commit point) ─▶ fsync(root) ─▶ verdict
//! ```
//!
//! Invariants: a rename follows the syncs of everything below it. A failed write or sync is never
//! retried. Only the creation of the temporary is retried, once, after the trash was emptied. An
//! error before the rename is `NotCommitted` and removes the temporary. An error after it is
//! `Uncertain` and keeps everything. An invalid step under the target name is renamed aside,
//! durably, before the name is used.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use stepwell_core::io::Rename;

use super::action::{Action, Event, Now, PolledVotes, TargetState};
use super::announcement::{Announcement, LeaderNews, Verdict, failure};
use super::draft::Draft;
use super::plan::{CommitPlan, Existing};
use super::records;
use super::vote::{Vote, merge_votes};
use crate::coordination::LEADER;
use crate::error::{Error, Relayed};
use crate::state::item::ItemPart;

/// The longest wait of one action for votes or for the verdict. The machine checks its deadlines in
/// between.
const VOTE_POLL_INTERVAL: Duration = Duration::from_millis(250);

#[derive(Debug)]
enum CommitState {
    Creating,
    Writing,
    Voting,
    Gathering,
    /// Between two reads of votes, checks if the leader has decided without them.
    CheckingVerdict,
    Recording(VecDeque<Action>),
    CheckingWriter,
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
    /// The leader is silent: marks the save as given up, so that late ranks do not take part.
    MarkingGivenUp(Error),
    /// Renames the temporary away, to prevent a late rename by the leader.
    BlockingLeader(Error),
    /// The temporary is gone: checks whether the leader has renamed it to the target.
    InspectingTargetAfterBlock(Error),
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
    /// True once an invalid step was renamed away from the target name.
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
            (CommitState::Creating, Event::GivenUp) => self.leave_given_up(),
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
            (CommitState::Gathering | CommitState::CheckingVerdict, Event::Unreachable(error)) => self.report_failure(error),
            // The vote may have come through, and the leader may commit on it.
            (CommitState::Voting | CommitState::Awaiting { .. }, Event::Unreachable(error)) => self.block_leader(error),
            (CommitState::Gathering, Event::Votes(PolledVotes { votes, heartbeats })) => self.gather(votes, &heartbeats, now),
            (CommitState::CheckingVerdict, Event::LeaderNews(news)) => match news.announcement {
                Some(announcement) => self.follow_leader(announcement),
                None => self.poll_votes(),
            },
            (CommitState::Recording(actions), Event::Done) => self.record(actions),
            (CommitState::CheckingWriter, Event::OtherWriter(None)) => self.before_rename(),
            (CommitState::CheckingWriter, Event::OtherWriter(Some(owner))) => {
                let error = Error::Locked { root: self.draft.root.clone(), owner: Some(owner) };
                self.abort(error)
            }
            (CommitState::InspectingTarget, Event::TargetState(target)) => match target {
                TargetState::Absent => self.rename(false),
                TargetState::Committed(_) => self.rename(true),
                TargetState::NotAStep(_) => self.quarantine(),
            },
            (CommitState::Renaming { exchange }, Event::Done) => self.to(CommitState::Syncing { exchange }, Action::SyncRoot),
            (CommitState::Renaming { exchange: true }, Event::Failed(error)) if error.is_unknown_request() => {
                self.abort(Error::Invalid(format!(
                    "{} cannot swap two directories ({error}), so replacing step {} could lose both. Delete the step first",
                    self.draft.root.display(),
                    self.plan.step
                )))
            }
            (CommitState::Renaming { exchange }, Event::Failed(error)) => {
                let inspect = Action::InspectTarget(self.plan.target.clone());
                self.to(CommitState::InspectingAfterRename { exchange, error }, inspect)
            }
            (CommitState::InspectingAfterRename { exchange, error }, Event::TargetState(target)) => self.resolve_rename(exchange, error, target),
            // It is unknown whether the step exists or is durable. Keep everything.
            (CommitState::InspectingAfterRename { error, .. }, Event::Failed(_)) | (CommitState::Syncing { .. }, Event::Failed(error)) => {
                self.end(Verdict::Uncertain(error))
            }
            // Sync before the name has another owner: a power cut could keep the second rename
            // without the first, and lose the invalid step.
            (CommitState::Quarantining, Event::Done) => self.to(CommitState::SyncingAside, Action::SyncRoot),
            // A sync may take long, so check the owner of the root and the name again.
            (CommitState::SyncingAside, Event::Done) => self.check_writer(),
            (CommitState::Syncing { exchange: false }, Event::Done) => self.end(Verdict::Committed { replaced: None }),
            (CommitState::Syncing { exchange: true }, Event::Done) => {
                let (from, to) = (self.plan.temporary.clone(), self.plan.trash.clone());
                let how = Rename::NoReplace;
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
            // Remove the temporary even if the announcement failed.
            (CommitState::AnnouncingFailure(error), _) => self.to(CommitState::Removing(error), Action::RemoveTemporary),
            (CommitState::Removing(error), _) | (CommitState::BlockingLeader(error), Event::Done) => {
                self.finish(Verdict::NotCommitted(error))
            }
            (CommitState::Awaiting { progress, heartbeat }, Event::LeaderNews(news)) => self.await_leader(progress, heartbeat, news, now),
            (CommitState::MarkingGivenUp(error), Event::Done) => {
                let (from, to) = (self.plan.temporary.clone(), self.plan.trash.clone());
                let how = Rename::NoReplace;
                self.to(CommitState::BlockingLeader(error), Action::Rename { from, to, how })
            }
            // If the directory is gone, the leader or another rank was faster. If it may still
            // exist, its fate is unknown.
            (CommitState::BlockingLeader(error), Event::Failed(failed)) if failed.is_not_found() => {
                let inspect = Action::InspectTarget(self.plan.target.clone());
                self.to(CommitState::InspectingTargetAfterBlock(error), inspect)
            }
            (CommitState::MarkingGivenUp(_) | CommitState::BlockingLeader(_), Event::Failed(failed)) => self.finish(Verdict::Uncertain(failed)),
            (CommitState::InspectingTargetAfterBlock(error), event) => self.after_block(error, &event),
            (CommitState::Announcing(verdict), _) => Action::Finish(Box::new(verdict)),
            (_, Event::Failed(error)) => self.abort(self.save_failed(error)),
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

    /// Returns the error of a failed save. If the leader does not find its files, the other ranks
    /// have given up on it.
    fn save_failed(&self, source: stepwell_core::Error) -> Error {
        if self.is_leader() && self.plan.world_size > 1 && source.is_not_found() {
            return self.given_up_error();
        }
        Error::SaveFailed { step: self.plan.step, source }
    }

    fn given_up_error(&self) -> Error {
        Error::GivenUpOn { step: self.plan.step, seconds: self.plan.stall_timeout.as_secs_f64() }
    }

    /// Ends because another rank has given up on the leader in this save.
    fn leave_given_up(&mut self) -> Action {
        if self.is_leader() {
            return self.abort(self.given_up_error());
        }
        let error = self.given_up_error();
        let vote = self.own_vote(Err(failure(self.plan.rank, &error)));
        self.to(CommitState::Announcing(Verdict::NotCommitted(error)), Action::SendVote(Box::new(vote)))
    }

    /// Ends because this rank could not write its data, and reports the failure.
    fn own_failure(&mut self, error: stepwell_core::Error) -> Action {
        if self.is_leader() {
            return self.abort(self.save_failed(error));
        }
        let rank = self.plan.rank;
        let named = Error::RankFailed { rank, cause: error.to_string() };
        let vote = self.own_vote(Err(failure(rank, &named)));
        self.to(
            CommitState::Announcing(Verdict::NotCommitted(self.save_failed(error))),
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
            unsupported: self.draft.unsupported.clone(),
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
                        "it saves step {}, and rank {} saves step {}. Make the same calls on all ranks, in the same order",
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
            return self.report_failure(Error::Relayed(failure.clone()));
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
                return self.report_failure(Error::CoordinationTimeout {
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
            let vote = merge_votes(&self.draft, &self.plan.attempt, self.plan.rank, votes);
            return self.to(CommitState::Voting, Action::SendVote(Box::new(vote)));
        }
        match records::records(&self.draft, &self.plan.attempt, self.plan.world_size, votes, now.unix_ns) {
            Ok((data, files)) => {
                let mut actions = VecDeque::new();
                if self.plan.world_size > 1 {
                    // Other ranks may have given up on this rank, and renamed the temporary away.
                    // Another rank may have created it again, without their files.
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

    /// Ends because a gathered vote is missing or reports a failure. The leader aborts. Another
    /// rank reports the failure to the leader, which decides.
    fn report_failure(&mut self, error: Error) -> Action {
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
            None => self.check_writer(),
        }
    }

    /// Checks before the rename that this is still the root's writer.
    fn check_writer(&mut self) -> Action {
        if self.plan.in_root {
            return self.to(CommitState::CheckingWriter, Action::CheckWriter);
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
        let (from, to) = (self.plan.temporary.clone(), self.plan.target.clone());
        let how = if exchange { Rename::Exchange } else { Rename::NoReplace };
        self.to(CommitState::Renaming { exchange }, Action::Rename { from, to, how })
    }

    fn quarantine(&mut self) -> Action {
        let (from, to) = (self.plan.target.clone(), self.plan.quarantine.clone());
        self.quarantined = true;
        self.to(CommitState::Quarantining, Action::Rename { from, to, how: Rename::NoReplace })
    }

    /// Decides after a rename that reported an error. The attempt under the target name decides,
    /// not the errno, because a network file system may lose the answer to a successful rename.
    fn resolve_rename(&mut self, exchange: bool, error: stepwell_core::Error, target: TargetState) -> Action {
        match target {
            TargetState::Committed(attempt) if attempt == self.plan.attempt => {
                self.to(CommitState::Syncing { exchange }, Action::SyncRoot)
            }
            TargetState::Committed(_) if error.is_occupied() => {
                let root = self.draft.root.clone();
                self.abort(Error::StepExists { step: self.plan.step, root, latest: None, rewind_to: None })
            }
            TargetState::NotAStep(_) if !self.quarantined && error.is_occupied() => self.quarantine(),
            _ => self.abort(self.save_failed(error)),
        }
    }

    /// Waits as long as the leader's heartbeat changes. The leader writes, or waits for other ranks
    /// with its own deadline.
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

    /// Blocks a silent leader in two actions. The first marks the save as given up, so that late
    /// ranks do not create the directory again. The second renames the directory away. If that
    /// succeeds, the step will never exist: all ranks have created or found the directory before
    /// the leader's rename, so no rank creates another one.
    fn block_leader(&mut self, error: Error) -> Action {
        if self.plan.existing == Existing::Replace {
            // The temporary may be the replaced step by now. It must stay until the replacement is
            // durable.
            return self.uncertain("the leader to announce whether it has replaced the step");
        }
        if self.plan.is_far {
            return self.uncertain("the leader to announce whether it has committed the step");
        }
        self.to(CommitState::MarkingGivenUp(error), Action::MarkGivenUp)
    }

    /// Decides after the temporary was gone. If the step exists, the leader has renamed it, but may
    /// not have synced it. If it does not exist, it never will, because its directory is gone.
    fn after_block(&mut self, error: Error, event: &Event) -> Action {
        match event {
            Event::TargetState(TargetState::Committed(attempt)) if *attempt == self.plan.attempt => {
                self.uncertain("the leader to announce that the step is durable")
            }
            Event::Failed(_) => self.uncertain("the inspection of the step"),
            _ => self.finish(Verdict::NotCommitted(error)),
        }
    }

    /// Ends as uncertain: the silent leader may have committed, or may still commit.
    fn uncertain(&mut self, waited_for: &str) -> Action {
        let (waited_for, seconds) = (waited_for.to_owned(), self.plan.stall_timeout.as_secs_f64());
        self.finish(Verdict::Uncertain(stepwell_core::Error::Timeout { waited_for, seconds }))
    }

    /// Fails before the rename, so nothing is visible. Only the leader removes the temporary, after
    /// its announcement, because other ranks may still write there.
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
