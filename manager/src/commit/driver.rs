//! The driver of the commit machine: it carries out the actions over a root directory.

use std::sync::Arc;
use std::time::Duration;

use stepwell_core::io::{Dir, Lock, retry_if_full};

use super::action::{Action, Event, Now, PolledVotes, TargetState};
use super::announcement::{Announcement, LeaderNews, Verdict};
use super::machine::Machine;
use super::vote::Vote;
use crate::delete_tree::delete_tree;
use crate::directory_layout::LEASE;
use crate::discovery::{damage, is_not_a_step, read_manifest};
use crate::environment::Clock;
use crate::error::Result;
use crate::lease::{OwnedTemporary, own_temporary};
use crate::state::item::ItemPart;

/// The verdict of a commit, and its durations.
#[derive(Debug)]
pub struct CommitOutcome {
    /// The verdict.
    pub verdict: Verdict,
    /// Time in the save pipeline.
    pub data: Duration,
    /// Time of all else: records, syncs, votes, the rename.
    pub commit: Duration,
}

/// The services that the driver needs beside the root directory.
pub trait World {
    /// Runs the save pipeline into the temporary. Called once at most.
    fn write_data(&mut self, temporary: &Arc<dyn Dir>) -> stepwell_core::Result<Vec<ItemPart>>;
    /// Deletes trash at once, because the disk is full. Returns true if there may be space then.
    fn reclaim_space(&mut self) -> bool;
    /// Returns the other writer that has taken the root over, if any.
    fn other_writer(&mut self) -> stepwell_core::Result<Option<String>>;
    /// Publishes this rank's vote.
    fn send_vote(&mut self, vote: &Vote) -> Result<()>;
    /// Returns the votes of these ranks that have come, and the last heartbeats of the others.
    fn poll_votes(&mut self, missing: &[u32], timeout: Duration) -> Result<PolledVotes>;
    /// Announces the verdict to the other ranks.
    fn announce(&mut self, announcement: &Announcement) -> Result<()>;
    /// Returns the leader's announcement, if it comes within that time, and its last heartbeat.
    fn listen(&mut self, timeout: Duration) -> Result<LeaderNews>;
}

/// Runs a commit to its end.
pub fn run(machine: Machine, root: &Arc<dyn Dir>, clock: &dyn Clock, world: &mut dyn World) -> CommitOutcome {
    let start = clock.monotonic();
    let mut data = Duration::ZERO;
    let mut commit = Commit::begin(machine);
    loop {
        let began = clock.monotonic();
        let is_data = commit.is_at_data();
        if let Some(verdict) = commit.step(root, clock, world) {
            let commit = clock.monotonic().saturating_sub(start).saturating_sub(data);
            return CommitOutcome { verdict, data, commit };
        }
        if is_data {
            data += clock.monotonic().saturating_sub(began);
        }
    }
}

/// A commit in progress, for callers that drive several of them action by action.
pub struct Commit {
    machine: Machine,
    action: Option<Action>,
    temporary: Temporary,
}

impl Commit {
    /// Begins a commit. Nothing is done yet.
    pub fn begin(mut machine: Machine) -> Self {
        let action = Some(machine.start());
        Self { machine, action, temporary: Temporary::default() }
    }

    /// True if the next action writes the data.
    pub fn is_at_data(&self) -> bool {
        matches!(self.action, Some(Action::WriteData))
    }

    /// Carries out the next action. Returns the verdict at the end.
    pub fn step(&mut self, root: &Arc<dyn Dir>, clock: &dyn Clock, world: &mut dyn World) -> Option<Verdict> {
        let action = self.action.take()?;
        tracing::trace!(?action, "commit");
        if let Action::Finish(verdict) = action {
            return Some(*verdict);
        }
        let event = execute(&self.machine, root, &mut self.temporary, world, action);
        let now = Now { monotonic: clock.monotonic(), unix_ns: clock.unix_ns() };
        self.action = Some(self.machine.on(event, now));
        None
    }
}

/// The temporary directory of a commit.
#[derive(Default)]
struct Temporary {
    dir: Option<Arc<dyn Dir>>,
    /// The lock on `.lease` of a singular checkpoint. While it is held, its owner is alive. The
    /// owner of a step holds the root's lock instead.
    lease: Option<Box<dyn Lock>>,
}

fn execute(
    machine: &Machine,
    root: &Arc<dyn Dir>,
    temporary: &mut Temporary,
    world: &mut dyn World,
    action: Action,
) -> Event {
    let plan = machine.plan();
    let opened = |temporary: &Temporary| {
        temporary
            .dir
            .clone()
            .ok_or_else(|| stepwell_core::Error::internal("a temporary directory", "none yet"))
    };
    let done = |result: stepwell_core::Result<()>| match result {
        Ok(()) => Event::Done,
        Err(error) => Event::Failed(error),
    };
    match action {
        Action::CreateTemporary => {
            let made = retry_if_full(&mut || world.reclaim_space(), || create(machine, &**root));
            match made.and_then(|made| Ok((made, is_given_up(machine, &**root)?))) {
                Ok((made, false)) => {
                    *temporary = made;
                    Event::Done
                }
                Ok((_, true)) => Event::GivenUp,
                Err(error) => Event::Failed(error),
            }
        }
        Action::MarkGivenUp => match root.create_dir(&plan.given_up) {
            Err(error) if !error.already_exists() => Event::Failed(error),
            _ => Event::Done,
        },
        Action::WriteData => match opened(temporary).and_then(|dir| world.write_data(&dir)) {
            Ok(parts) => Event::Data(parts),
            Err(error) => Event::Failed(error),
        },
        Action::SendVote(vote) => reached(world.send_vote(&vote).map(|()| Event::Done)),
        Action::PollVotes { missing, timeout } => {
            reached(world.poll_votes(&missing, timeout).map(Event::Votes))
        }
        // The file exists, empty and locked. In a store nothing can lock it.
        Action::WriteFile { path, .. }
            if path == LEASE && (temporary.lease.is_some() || root.fence().is_some()) =>
        {
            Event::Done
        }
        Action::WriteFile { path, bytes } => {
            done(opened(temporary).and_then(|dir| dir.write_file(&path, &bytes)))
        }
        Action::FindFiles(files) => done(opened(temporary).and_then(|dir| find(&*dir, &files))),
        Action::SyncDir(path) => done(
            opened(temporary)
                .and_then(|dir| if path.is_empty() { dir.sync() } else { dir.open_dir(&path)?.sync() }),
        ),
        Action::CheckWriter => match world.other_writer() {
            Ok(writer) => Event::OtherWriter(writer),
            Err(error) => Event::Failed(error),
        },
        Action::InspectTarget(name) => match inspect(root, &name, plan.in_root.then_some(plan.step)) {
            Ok(target) => Event::TargetState(target),
            Err(error) => Event::Failed(error),
        },
        Action::Rename { from, to, how } => done(root.rename(&from, &to, how)),
        Action::SyncRoot => done(root.sync()),
        Action::RemoveTemporary => {
            drop(std::mem::take(temporary));
            match delete_tree(&**root, &plan.temporary) {
                Err(error) if !error.is_not_found() => {
                    tracing::warn!(%error, "removing the temporary of a failed save failed. The next writer removes it");
                }
                _ => {}
            }
            if plan.world_size > 1 {
                // It rarely exists.
                let _ = root.remove_dir(&plan.given_up);
            }
            Event::Done
        }
        Action::Announce(announcement) => reached(world.announce(&announcement).map(|()| Event::Done)),
        Action::Listen { timeout } => reached(world.listen(timeout).map(Event::LeaderNews)),
        // The caller has returned before.
        Action::Finish(_) => Event::Done,
    }
}

/// Creates the temporary, or opens the one that another rank created.
fn create(machine: &Machine, root: &dyn Dir) -> stepwell_core::Result<Temporary> {
    let plan = machine.plan();
    if !plan.in_root {
        let OwnedTemporary { dir, lease } = own_temporary(root, &plan.temporary, plan.world_size > 1)?;
        return Ok(Temporary { dir: Some(dir), lease });
    }
    let dir = match root.create_dir(&plan.temporary) {
        Err(error) if plan.world_size > 1 && error.already_exists() => root.open_dir(&plan.temporary),
        made => made,
    };
    Ok(Temporary { dir: Some(dir?), lease: None })
}

/// True if a rank has given up on the leader. Call it after the temporary was created, so that a
/// later leader finds the mark.
fn is_given_up(machine: &Machine, root: &dyn Dir) -> stepwell_core::Result<bool> {
    let plan = machine.plan();
    Ok(plan.world_size > 1 && root.stat(&plan.given_up)?.is_some())
}

/// Checks files. Returns ENOENT for the first one that is missing or has another length.
fn find(dir: &dyn Dir, files: &[(String, u64)]) -> stepwell_core::Result<()> {
    let lengths = dir.lengths("")?;
    for (path, length) in files {
        let found = match &lengths {
            Some(lengths) => lengths.get(path).copied(),
            None => dir.stat(path)?.map(|stat| stat.len),
        };
        if found != Some(*length) {
            let gone = std::io::Error::from(std::io::ErrorKind::NotFound);
            return Err(stepwell_core::Error::io("find", dir.path().join(path), gone));
        }
    }
    Ok(())
}

fn reached(result: Result<Event>) -> Event {
    result.unwrap_or_else(Event::Unreachable)
}

/// Returns the state of a name. In a root the name implies the number `step`. The name of a
/// singular checkpoint implies nothing.
fn inspect(root: &Arc<dyn Dir>, name: &str, step: Option<u64>) -> stepwell_core::Result<TargetState> {
    if root.stat(name)?.is_none() {
        return Ok(TargetState::Absent);
    }
    match read_manifest(&**root, name) {
        Ok(manifest) if step.is_some_and(|step| step != manifest.step) => {
            Ok(TargetState::NotAStep(format!("its manifest says that it is step {}", manifest.step)))
        }
        Ok(manifest) if step.is_some() => Ok(match damage(&**root, name, &manifest)? {
            Some(damage) => TargetState::NotAStep(damage),
            None => TargetState::Committed(manifest.attempt),
        }),
        Ok(manifest) => Ok(TargetState::Committed(manifest.attempt)),
        Err(error) if error.is_not_found() => Ok(TargetState::NotAStep("it has no manifest".to_owned())),
        Err(error) if is_not_a_step(&error) => Ok(TargetState::NotAStep(error.to_string())),
        Err(error) => Err(error),
    }
}
