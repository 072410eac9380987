//! The persist track of a save: runs the pipeline and the commit machine, on a thread of its own, and says how it ended.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use stepwell_core::io::{Dir, Entry, File, Lock, LockKind, Rename, Stat};
use stepwell_core::save::Flush;

use crate::commit::driver::World;
use crate::commit::{self, Announcement, Heard, ItemPart, Machine, Verdict, Vote};
use crate::coordination::Coordinator;
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::retire::Deleter;
use crate::root;
use crate::save::{Outcome, Save};

/// What a full disk answers: the trash is emptied once and the file is tried once more.
const ENOSPC: i32 = 28;
const EDQUOT: i32 = 122;
/// How long a save waits for room on a full disk.
const MAKING_ROOM: Duration = Duration::from_secs(60);

/// How a job ended.
pub(crate) struct Ended {
    pub outcome: Outcome,
    /// Trash that the commit made.
    pub replaced: Option<String>,
}

/// Runs a job to its end. Panics of the engine become a failure of the save.
pub(crate) fn run(
    job: Job,
    root: &Arc<dyn Dir>,
    environment: &Environment,
    deleter: &Arc<Deleter>,
) -> (Save, Ended) {
    let save = job.save.clone();
    let step = save.step();
    let run = AssertUnwindSafe(|| commit(job, root, environment, deleter));
    let ended = catch_unwind(run).unwrap_or_else(|panic| {
        let what = panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_default();
        let source =
            stepwell_core::Error::Misuse(format!("the engine panicked, which is a defect of it: {what}"));
        // It may have panicked after the rename: nothing is claimed.
        Ended {
            outcome: Outcome::DurabilityUncertain(Arc::new(Error::DurabilityUncertain { step, source })),
            replaced: None,
        }
    });
    (save, ended)
}

fn commit(job: Job, root: &Arc<dyn Dir>, environment: &Environment, deleter: &Arc<Deleter>) -> Ended {
    let Job { save, plan, draft, flush, queued } = job;
    let _span = tracing::info_span!("save", step = save.step()).entered();
    save.set_stats(|stats| stats.queued_seconds = queued.elapsed().as_secs_f64());
    let session = plan.attempt.session.clone();
    let round = format!("{session}-{}", plan.attempt.counter);
    let mut machine = Machine::new(plan, draft);
    let mut world = SaveWorld { root, environment, deleter, flush: Some(flush), session, round };
    let result = commit::run(&mut machine, root, &*environment.clock, &mut world);
    let files = save.stats().files;
    save.set_stats(|stats| {
        stats.commit_seconds = result.commit.as_secs_f64();
        stats.files = files;
    });
    let step = save.step();
    match result.verdict {
        Verdict::Committed { replaced } => {
            tracing::info!(
                data_seconds = result.data.as_secs_f64(),
                commit_seconds = result.commit.as_secs_f64(),
                "committed"
            );
            Ended { outcome: Outcome::Committed, replaced }
        }
        Verdict::NotCommitted(error) => {
            // Told through the outcome, to whoever is to hear it.
            tracing::info!(%error, "not committed");
            Ended { outcome: Outcome::NotCommitted(Arc::new(error)), replaced: None }
        }
        Verdict::Uncertain(source) => {
            let error = Error::DurabilityUncertain { step, source };
            tracing::info!(%error, "uncertain");
            Ended { outcome: Outcome::DurabilityUncertain(Arc::new(error)), replaced: None }
        }
    }
}

struct SaveWorld<'a> {
    root: &'a Arc<dyn Dir>,
    environment: &'a Environment,
    deleter: &'a Arc<Deleter>,
    flush: Option<Flush>,
    session: String,
    round: String,
}

impl SaveWorld<'_> {
    fn coordinator(&self) -> &dyn Coordinator {
        &*self.environment.coordinator
    }
}

impl World for SaveWorld<'_> {
    fn write_data(&mut self, temporary: &Arc<dyn Dir>) -> stepwell_core::Result<Vec<ItemPart>> {
        let flush = self
            .flush
            .take()
            .ok_or_else(|| stepwell_core::Error::Misuse("the data was written already".to_owned()))?;
        let roomy: Arc<dyn Dir> =
            Arc::new(RoomMaker { inner: Arc::clone(temporary), deleter: Arc::clone(self.deleter) });
        let written = flush.run(&*self.environment.disk, &roomy)?;
        Ok(written
            .into_iter()
            .map(|item| ItemPart { dir: item.dir, index: item.index, tensor_bytes: item.tensor_bytes })
            .collect())
    }

    fn empty_trash(&mut self) {
        self.deleter.empty_now(MAKING_ROOM);
    }

    fn usurper(&mut self) -> stepwell_core::Result<Option<String>> {
        let epoch = root::read_epoch(&**self.root)?;
        Ok(epoch.filter(|epoch| epoch.session != self.session).map(|epoch| epoch.owner))
    }

    fn send_vote(&mut self, vote: &Vote) -> Result<()> {
        self.coordinator().send(&format!("vote-{}", self.round), vote.encode()?)
    }

    fn poll_votes(&mut self, have: usize, timeout: Duration) -> Result<Vec<Vote>> {
        // The leader's own vote is not sent.
        let messages =
            self.coordinator().poll(&format!("vote-{}", self.round), have.saturating_sub(1), timeout)?;
        messages.iter().map(|(rank, message)| Vote::decode(*rank, message)).collect()
    }

    fn announce(&mut self, announcement: &Announcement) -> Result<()> {
        self.coordinator().send(&format!("verdict-{}", self.round), announcement.encode()?)
    }

    fn listen(&mut self, timeout: Duration) -> Result<Heard> {
        let messages = self.coordinator().poll(&format!("verdict-{}", self.round), 0, timeout)?;
        if let Some((_, message)) = messages.first() {
            return Ok(Heard { announcement: Some(Announcement::decode(message)?), votes: 0 });
        }
        let votes = self.coordinator().poll(&format!("vote-{}", self.round), 0, Duration::ZERO)?.len();
        Ok(Heard { announcement: None, votes })
    }
}

/// A directory whose files get a second chance on a full disk: the trash is emptied, then the file is made once more. Only *making* a file is ever repeated,
/// never a write or a sync.
struct RoomMaker {
    inner: Arc<dyn Dir>,
    deleter: Arc<Deleter>,
}

impl RoomMaker {
    fn with_room<T>(&self, mut make: impl FnMut() -> stepwell_core::Result<T>) -> stepwell_core::Result<T> {
        match make() {
            Err(error) if matches!(error.errno(), Some(ENOSPC | EDQUOT)) => {
                tracing::info!(%error, "the disk is full: emptying the trash and trying once more");
                self.deleter.empty_now(MAKING_ROOM);
                make()
            }
            other => other,
        }
    }

    fn wrap(&self, inner: Arc<dyn Dir>) -> Arc<dyn Dir> {
        Arc::new(Self { inner, deleter: Arc::clone(&self.deleter) })
    }
}

impl Dir for RoomMaker {
    fn path(&self) -> &Path {
        self.inner.path()
    }

    fn open_dir(&self, name: &str) -> stepwell_core::Result<Arc<dyn Dir>> {
        self.inner.open_dir(name).map(|dir| self.wrap(dir))
    }

    fn create_dir(&self, name: &str) -> stepwell_core::Result<Arc<dyn Dir>> {
        self.with_room(|| self.inner.create_dir(name)).map(|dir| self.wrap(dir))
    }

    fn entries(&self) -> stepwell_core::Result<Vec<Entry>> {
        self.inner.entries()
    }

    fn stat(&self, name: &str) -> stepwell_core::Result<Option<Stat>> {
        self.inner.stat(name)
    }

    fn id(&self) -> stepwell_core::Result<(u64, u64)> {
        self.inner.id()
    }

    fn create_file(&self, name: &str, len_hint: u64) -> stepwell_core::Result<Arc<dyn File>> {
        let mut first = true;
        self.with_room(|| {
            if !std::mem::take(&mut first) {
                // The first try may have made it before it found no room for it.
                match self.inner.remove_file(name) {
                    Err(error) if !error.is_not_found() => return Err(error),
                    _ => {}
                }
            }
            self.inner.create_file(name, len_hint)
        })
    }

    fn open_file(&self, name: &str) -> stepwell_core::Result<Arc<dyn File>> {
        self.inner.open_file(name)
    }

    fn read_file(&self, name: &str, limit: u64) -> stepwell_core::Result<Vec<u8>> {
        self.inner.read_file(name, limit)
    }

    fn write_file(&self, name: &str, bytes: &[u8]) -> stepwell_core::Result<()> {
        self.inner.write_file(name, bytes)
    }

    fn rename(&self, from: &str, to: &str, how: Rename) -> stepwell_core::Result<()> {
        self.inner.rename(from, to, how)
    }

    fn remove_file(&self, name: &str) -> stepwell_core::Result<()> {
        self.inner.remove_file(name)
    }

    fn remove_dir(&self, name: &str) -> stepwell_core::Result<()> {
        self.inner.remove_dir(name)
    }

    fn sync(&self) -> stepwell_core::Result<()> {
        self.inner.sync()
    }

    fn try_lock(
        &self,
        name: &str,
        kind: LockKind,
        create: bool,
    ) -> stepwell_core::Result<Option<Box<dyn Lock>>> {
        self.inner.try_lock(name, kind, create)
    }

    fn free_bytes(&self) -> stepwell_core::Result<u64> {
        self.inner.free_bytes()
    }
}
