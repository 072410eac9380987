//! The persist track of a save: runs the pipeline and the commit machine on a background thread,
//! and returns how the save ended.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use stepwell_core::format::manifest::Attempt;
use stepwell_core::io::{Dir, File, SpaceReclaimer};
use stepwell_core::save::{Flush, WrittenItem};

use super::job::SaveJob;
use super::{Outcome, Save, Stats};
use crate::commit::{self, Announcement, DraftItem, ItemPart, LeaderNews, Machine, Verdict, Vote};
use crate::commit::{PolledVotes, World};
use crate::coordination::LEADER;
use crate::coordination::team::Team;
use crate::environment::Environment;
use crate::error::{Error, Relayed, Result};
use crate::guard::guarded;
use crate::retire::Deleter;
use crate::root;

/// The longest wait for free space on a full disk.
const RECLAIM_TIMEOUT: Duration = Duration::from_secs(60);

/// The end of a job.
pub(crate) struct SaveEnd {
    pub outcome: Outcome,
    /// The trash name of a step that the commit replaced.
    pub replaced: Option<String>,
}

/// Runs a job to its end. A panic of the engine becomes a failure of the save. Calls `written` once
/// the data is durable, before it votes.
pub(crate) fn run(
    job: SaveJob,
    root: &Arc<dyn Dir>,
    environment: &Environment,
    team: &Team,
    deleter: &Arc<Deleter>,
    written: &dyn Fn() -> stepwell_core::Result<()>,
) -> (Save, SaveEnd) {
    let save = job.save.clone();
    let step = save.step();
    let ended = guarded("the engine", || commit(job, root, environment, team, deleter, written));
    let ended = ended.unwrap_or_else(|source| {
        // It may have panicked after the rename, so the step may exist.
        SaveEnd {
            outcome: Outcome::DurabilityUncertain(Arc::new(Error::DurabilityUncertain { step, source })),
            replaced: None,
        }
    });
    (save, ended)
}

/// Formats a size in decimal units.
fn size_text(bytes: u64) -> String {
    let mut scaled = bytes as f64;
    for unit in ["B", "kB", "MB", "GB"] {
        if scaled < 1000.0 {
            return if unit == "B" { format!("{bytes} B") } else { format!("{scaled:.1} {unit}") };
        }
        scaled /= 1000.0;
    }
    format!("{scaled:.1} TB")
}

/// Logs the commit of a save that is over, as one line on the leader. `what` was committed to
/// `place`.
pub(crate) fn log_commit(save: &Save, team: &Team, what: &str, place: &Path) {
    if team.leads() && matches!(save.outcome(), Some(Outcome::Committed)) {
        let Stats { pipeline, total_seconds, .. } = save.stats();
        let (size, place) = (size_text(pipeline.total_bytes), place.display());
        tracing::info!("committed {what} ({size} in {total_seconds:.2} s) to {place}");
    }
}

fn commit(
    job: SaveJob,
    root: &Arc<dyn Dir>,
    environment: &Environment,
    team: &Team,
    deleter: &Arc<Deleter>,
    written: &dyn Fn() -> stepwell_core::Result<()>,
) -> SaveEnd {
    let SaveJob { save, plan, draft, unwritten, flush, queued } = job;
    let _span = tracing::info_span!("save", step = save.step()).entered();
    save.set_stats(|stats| stats.queued_seconds = queued.elapsed().as_secs_f64());
    let temporary = plan.temporary.clone();
    let (attempt, stale, is_far) = (plan.attempt.clone(), plan.stale, plan.is_far);
    let counter = attempt.counter;
    let items = draft.items.iter().map(|item| (item.dir.clone(), item.clone())).collect();
    let machine = Machine::new(plan, draft);
    let mut world = SaveWorld {
        root,
        environment,
        team,
        deleter,
        save: &save,
        temporary,
        items,
        unwritten,
        flush: Some(flush),
        written,
        attempt,
        is_far,
        stale,
    };
    let result = commit::run(machine, root, &*environment.clock, &mut world);
    if team.leads() && !team.is_alone() {
        let missing = match &result.verdict {
            Verdict::NotCommitted(error) => error.missing().unwrap_or_default(),
            _ => &[],
        };
        team.record_missed(counter, missing);
    }
    save.set_stats(|stats| stats.commit_seconds = result.commit.as_secs_f64());
    let step = save.step();
    match result.verdict {
        Verdict::Committed { replaced } => SaveEnd { outcome: Outcome::Committed, replaced },
        Verdict::NotCommitted(error) => {
            // The outcome reports it to the caller.
            tracing::info!(%error, "not committed");
            SaveEnd { outcome: Outcome::NotCommitted(Arc::new(error)), replaced: None }
        }
        Verdict::Uncertain(source) => {
            let error = Error::DurabilityUncertain { step, source };
            tracing::info!(%error, "uncertain");
            SaveEnd { outcome: Outcome::DurabilityUncertain(Arc::new(error)), replaced: None }
        }
    }
}

struct SaveWorld<'a> {
    root: &'a Arc<dyn Dir>,
    environment: &'a Environment,
    team: &'a Team,
    deleter: &'a Arc<Deleter>,
    save: &'a Save,
    /// The name of its temporary directory.
    temporary: String,
    /// The items, by directory.
    items: HashMap<String, DraftItem>,
    /// This rank's parts of items that other ranks write.
    unwritten: Vec<ItemPart>,
    flush: Option<Flush>,
    written: &'a dyn Fn() -> stepwell_core::Result<()>,
    attempt: Attempt,
    /// True if the leader is on another machine, and does not sync this rank's directory.
    is_far: bool,
    /// True if a rank reported that its leaves have changed since the last census.
    stale: bool,
}

/// Reclaims space from retired steps.
struct SaveReclaimer<'a> {
    deleter: &'a Deleter,
    temporary: &'a str,
}

impl SpaceReclaimer for SaveReclaimer<'_> {
    fn reclaim(&mut self) -> bool {
        self.deleter.empty_now(RECLAIM_TIMEOUT);
        // Also after a timeout: some of it may be deleted.
        true
    }

    fn take_over(&mut self, path: &str, len_hint: u64) -> Option<Arc<dyn File>> {
        self.deleter.spares().take(path, &format!("{}/{path}", self.temporary), len_hint)
    }
}

impl World for SaveWorld<'_> {
    fn write_data(&mut self, temporary: &Arc<dyn Dir>) -> stepwell_core::Result<Vec<ItemPart>> {
        let flush = self
            .flush
            .take()
            .ok_or_else(|| stepwell_core::Error::internal("data that is still to be written", "none"))?;
        let disk = Arc::clone(&self.environment.disk);
        let mut reclaimer = SaveReclaimer { deleter: self.deleter, temporary: &self.temporary };
        let written = flush.run(&*disk, temporary, &mut reclaimer);
        let synced = if written.is_ok() { self.deleter.spares().sync() } else { Ok(()) };
        // Give up the unused spares now: the next save would not use them either. Not before the
        // sync: a deleted directory cannot be synced.
        self.deleter.give_up_spares();
        let written = written?;
        synced?;
        if self.is_far {
            temporary.sync()?;
        }
        (self.written)()?;
        let part = |written: WrittenItem| {
            let item = self.items.remove(&written.dir)?;
            Some(ItemPart { item, index: written.index, tensor_bytes: written.tensor_bytes })
        };
        Ok(written.into_iter().filter_map(part).chain(std::mem::take(&mut self.unwritten)).collect())
    }

    fn reclaim_space(&mut self) -> bool {
        SaveReclaimer { deleter: self.deleter, temporary: &self.temporary }.reclaim()
    }

    fn other_writer(&mut self) -> stepwell_core::Result<Option<String>> {
        // A fence refuses the commit itself.
        if self.root.fence().is_some() {
            return Ok(None);
        }
        root::other_writer(&**self.root, &self.attempt.session)
    }

    fn send_vote(&mut self, vote: &Vote) -> Result<()> {
        self.team.send_vote(self.attempt.counter, &vote.encode()?)
    }

    fn poll_votes(&mut self, missing: &[u32], timeout: Duration) -> Result<PolledVotes> {
        self.save.record_progress();
        let messages = self.team.votes(self.attempt.counter, missing, timeout)?;
        let step = self.save.step();
        let vote = |rank: u32, message: &[u8]| {
            Vote::decode(rank, message)
                .unwrap_or_else(|error| Vote::failed(rank, step, self.attempt.clone(), Relayed::of(&error)))
        };
        let votes: Vec<Vote> = messages.iter().map(|(rank, message)| vote(*rank, message)).collect();
        self.stale |= votes.iter().any(|vote| vote.stale);
        let voted = |rank: u32| votes.iter().any(|vote| vote.rank == rank);
        let silent = missing.iter().copied().filter(|&rank| !voted(rank));
        let mut heartbeats = Vec::new();
        for rank in silent {
            heartbeats.extend(self.heartbeat_in_save(rank)?.map(|progress_counter| (rank, progress_counter)));
        }
        Ok(PolledVotes { votes, heartbeats })
    }

    fn announce(&mut self, announcement: &Announcement) -> Result<()> {
        if self.stale {
            self.team.record_stale_census(self.attempt.counter);
        }
        let has_failed = !matches!(announcement, Announcement::Committed);
        self.team.send_verdict(self.attempt.counter, &announcement.encode(self.stale)?, has_failed)
    }

    fn listen(&mut self, timeout: Duration) -> Result<LeaderNews> {
        if let Some(message) = self.team.verdict(self.attempt.counter, timeout)? {
            let (announcement, stale) = Announcement::decode(&message)?;
            if stale {
                self.team.record_stale_census(self.attempt.counter);
            }
            return Ok(LeaderNews { announcement: Some(announcement), heartbeat: 0 });
        }
        // The waiter must not time out first: the leader's timeout names the silent rank.
        self.save.record_progress();
        Ok(LeaderNews { announcement: None, heartbeat: self.heartbeat_in_save(LEADER)?.unwrap_or_default() })
    }
}

impl SaveWorld<'_> {
    /// A rank's last heartbeat, if it still has to report on this save.
    fn heartbeat_in_save(&self, rank: u32) -> Result<Option<u64>> {
        Ok(self.team.heartbeat_of(rank)?.in_save(self.attempt.counter))
    }
}
