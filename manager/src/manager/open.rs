//! Opening and closing a manager.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use stepwell_core::deadline::deadline_after;
use stepwell_core::sys::Birth;

use super::history::History;
use super::partner_copies::PartnerCopies;
use super::parts::{self, Parts};
use super::retaining::Inspection;
use super::saves::Saves;
use super::tiers::{self, TierPlace};
use super::together::Ranks;
use super::usage::Usage;
use super::{Inner, Manager};
use crate::coordination::team::{RankHeartbeat, Team};
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::options::{OnSaveError, Options};
use crate::periodic::Periodic;
use crate::recovery;
use crate::root::Root;

/// The time of the other machines to leave, after the leader has carried the last step.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

impl Manager {
    /// Opens a root. A writer first recovers it from a crash. A read-only manager changes nothing.
    /// With several ranks, all must open it, and the leader is the writer.
    pub fn open(path: &Path, options: Options, environment: Environment) -> Result<Self> {
        Self::open_with_tiers(path, options, environment, &[])
    }

    /// [`Manager::open`], with further tiers that get copies of the steps. All ranks pass the same.
    pub fn open_with_tiers(
        path: &Path,
        options: Options,
        environment: Environment,
        places: &[TierPlace],
    ) -> Result<Self> {
        let manager = Self::open_tier(path, options, environment, places)?;
        let inner = &manager.inner;
        if places.is_empty() && !inner.options.read_only && inner.team.is_alone() {
            // The tiers of its run are absent.
            inner.finish_rewind()?;
        }
        Ok(manager)
    }

    /// Opens a root, which may be the further tier of another manager.
    pub(super) fn open_tier(
        path: &Path,
        options: Options,
        environment: Environment,
        places: &[TierPlace],
    ) -> Result<Self> {
        options.check()?;
        let is_spread = options.per_machine && !options.read_only;
        let environment = if is_spread { parts::with_served_files(&environment) } else { environment };
        let mut led = None;
        let mut lead = || {
            let session = environment.hex_id();
            led = Some(Root::open(path, &session, &options, &environment, !options.read_only)?);
            Ok(session)
        };
        let team = if environment.coordinator.world_size() == 1 {
            lead().map(Team::alone)
        } else {
            // The local disks of machines may be mounted in different places.
            let shown = if is_spread { path.file_name().map_or(path, Path::new) } else { path };
            let what = shown.display().to_string();
            let timeout = options.stall_timeout;
            Team::meet(&environment.coordinator, &what, agreed(&options), timeout, lead)
        };
        let team = match team {
            Ok(team) => team,
            Err(error) => {
                // The other ranks have not come: give up the writer's rights.
                if let Some(root) = led {
                    root.release();
                    root.deleter.stop(Duration::from_millis(100));
                }
                return Err(error);
            }
        };
        let (root, machines) = if is_spread {
            let met = parts::meet(&team, &mut led, path, &options, &environment);
            if let Some(root) = &led {
                root.release();
                root.deleter.stop(Duration::from_millis(100));
            }
            let (root, machines) = met?;
            (root, Some(machines))
        } else {
            let beside = || Root::open_beside(path, team.session(), &options, &environment);
            (led.map_or_else(beside, Ok)?, None)
        };
        let tiers = tiers::open(places, &team, &options).inspect_err(|_| {
            if let Some(machines) = &machines {
                machines.stop();
            }
            root.release();
            root.deleter.stop(Duration::from_millis(100));
        })?;
        let manager = Self {
            inner: Arc::new(Inner {
                root,
                options,
                environment,
                team: Arc::new(team),
                ranks: Ranks::default(),
                saves: Saves::default(),
                history: History::default(),
                usage: Usage::default(),
                inspection: Inspection::default(),
                tiers,
                machines,
                parts: Parts::default(),
                partners: PartnerCopies::default(),
                birth: Birth::now(),
            }),
        };
        if !places.is_empty() || manager.inner.machines.is_some() {
            // The other ranks hear of a failure.
            manager.inner.team.ask("open the tiers", || manager.inner.begin_at_leader())?;
        }
        manager.inner.join()?;
        manager.inner.start_removing_parts()?;
        manager.inner.start_partner_copies()?;
        manager.inner.start_file_carriers()?;
        Ok(manager)
    }

    /// Waits until every save is over and retention was applied. Raises a failure that nobody has
    /// seen.
    pub fn wait_until_finished(&self, timeout: Option<Duration>) -> Result<()> {
        self.inner.birth.check("manager")?;
        self.inner.drain(timeout)?;
        self.check_for_errors()
    }

    /// Raises a background failure that nobody has seen, once.
    pub fn check_for_errors(&self) -> Result<()> {
        self.inner.birth.check("manager")?;
        self.inner.raise_unseen(None)
    }

    /// [`Manager::check_for_errors`] before a save. The error says that the save was not begun.
    /// With several ranks [`Manager::decide`] raises it, in the same call on all.
    pub fn check_before_saving(&self, step: u64) -> Result<()> {
        self.inner.birth.check("manager")?;
        if self.inner.team.is_alone() { self.inner.raise_unseen(Some(step)) } else { Ok(()) }
    }

    /// Takes back a raised failure that could not be reported, so that it is raised again. Ignores
    /// other errors.
    pub fn put_back(&self, error: &Error) {
        if let Error::Earlier { source, .. } = error
            && self.inner.birth.is_here()
        {
            self.inner.saves.lock().endings.put_back(source);
        }
    }

    /// Finishes all saves and deletions, and releases the root. Ends by its deadline: it leaks what
    /// the kernel does not return, and reports it. After a complete close, it does nothing. After
    /// an incomplete one, it waits for the rest.
    pub fn close(&self, timeout: Option<Duration>) -> Result<()> {
        self.inner.birth.check("manager")?;
        self.inner.close(timeout.unwrap_or(self.inner.options.stall_timeout))
    }

    /// True if `close` was called, even if it still runs or has given up. True in a forked child,
    /// which must never release the lock.
    pub fn is_closed(&self) -> bool {
        !self.inner.birth.is_here() || self.inner.saves.lock().end.closed
    }
}

/// The options that must be equal on all ranks, as the plans and the save numbers depend on them.
pub(crate) fn agreed(options: &Options) -> Vec<(String, String)> {
    let writers = options.writers.map_or_else(
        || "all".to_owned(),
        |most| format!("{most} per {:?}", options.writers_per).to_lowercase(),
    );
    [
        ("read_only", options.read_only.to_string()),
        ("per_machine", options.per_machine.to_string()),
        ("copies", options.copies.to_string()),
        ("max_pending", options.max_pending.to_string()),
        ("chunk_bytes", options.chunk_bytes.to_string()),
        ("min_row_bytes", options.min_row_bytes.to_string()),
        ("block_bytes", options.block_bytes.to_string()),
        ("writers", writers),
        ("files_per", format!("{:?}", options.files_per).to_lowercase()),
        ("save_policy", serde_json::to_string(&options.save_policy).unwrap_or_default()),
        ("on_save_error", format!("{:?}", options.on_save_error)),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

impl Inner {
    /// Learns the newest step from the leader, and starts this rank's heartbeat.
    fn join(self: &Arc<Self>) -> Result<()> {
        if self.team.is_alone() {
            return Ok(());
        }
        let newest = self.team.ask("open", || self.newest_step())?;
        let inner = Arc::downgrade(self);
        let mut polls = 0;
        let mut life = move |inner: &Self| {
            let queued = inner.saves.lock();
            let save = queued.first_open(|save| inner.team.has_voted(save));
            if inner.ranks.is_restoring() || inner.team.is_collecting() {
                polls += 1;
                return Some(RankHeartbeat { save, progress: polls });
            }
            if queued.pending.is_empty() {
                // The hosts of other machines wait for what the leader carries.
                let carries = inner.machines.is_some() && inner.carries();
                return carries.then(|| RankHeartbeat { save, progress: inner.carry_progress() });
            }
            let moved =
                queued.pending.iter().fold(0_u64, |sum, save| sum.wrapping_add(save.progress_counter()));
            let moved = moved.wrapping_add(queued.counter.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            Some(RankHeartbeat { save, progress: moved })
        };
        let (team, mut last) = (Arc::clone(&self.team), None);
        // A rank that writes for long must not count as lost.
        let heartbeat = move || {
            let Some(inner) = inner.upgrade() else { return false };
            let now = life(&inner);
            drop(inner);
            if let Some(heartbeat) = now
                && now != last
            {
                last = now;
                if let Err(error) = team.send_heartbeat(heartbeat) {
                    tracing::debug!(%error, "sending a heartbeat to the other ranks failed");
                }
            }
            true
        };
        let heartbeat = Periodic::start("stepwell-heartbeat", self.team.heartbeat_interval(), heartbeat)
            .map_err(|error| stepwell_core::Error::io("start a thread for", &self.root.path, error))?;
        self.ranks.begin(newest, heartbeat);
        Ok(())
    }

    /// Waits until no save is pending. Without a timeout, it waits as long as there is progress.
    pub(super) fn drain(&self, timeout: Option<Duration>) -> Result<()> {
        let begun = Instant::now();
        let limit = timeout.unwrap_or(self.options.stall_timeout);
        let drained = self.saves.wait_while(limit, timeout.is_some(), |queued| !queued.pending.is_empty());
        if drained.is_some() {
            return Ok(());
        }
        let waited_for = {
            let queued = self.saves.lock();
            let Some(first) = queued.pending.first() else { return Ok(()) };
            format!("{} save(s), the oldest of step {}", queued.pending.len(), first.step())
        };
        Err(Error::Timeout { waited_for, waited: begun.elapsed() })
    }

    /// Begins to close. `None` if the manager is closed. A second call waits for the first, and
    /// goes on if that gave up.
    fn begin_closing(&self, deadline: Instant) -> Result<Option<Closing<'_>>> {
        let begun = Instant::now();
        self.saves.lock().end.closed = true;
        let left = deadline.saturating_duration_since(begun);
        let Some(mut queued) = self.saves.wait_while(left, true, |queued| queued.end.closing) else {
            let waited_for = "another close of this manager".to_owned();
            return Err(Error::Timeout { waited_for, waited: begun.elapsed() });
        };
        if queued.end.ended {
            return Ok(None);
        }
        queued.end.closing = true;
        Ok(Some(Closing(self)))
    }

    pub(super) fn raise_unseen(&self, unsaved: Option<u64>) -> Result<()> {
        let mut queued = self.saves.lock();
        while let Some(save) = queued.endings.take() {
            let Some(error) = save.take_unseen() else { continue };
            if self.options.on_save_error == OnSaveError::Warn {
                tracing::warn!(step = save.step(), %error, "a save failed; training goes on");
                continue;
            }
            return Err(Error::Earlier { unsaved, source: error });
        }
        Ok(())
    }

    pub(super) fn close(&self, timeout: Duration) -> Result<()> {
        let deadline = deadline_after(timeout);
        let left = || deadline.saturating_duration_since(Instant::now());
        let Some(_closing) = self.begin_closing(deadline)? else { return Ok(()) };
        let drained = self.drain(Some(timeout));
        self.saves.lock().end.stop = true;
        self.saves.changed.notify_all();
        if drained.is_ok() {
            let threads = {
                let mut queued = self.saves.lock();
                let mut threads = std::mem::take(&mut queued.writes.threads);
                threads.extend(queued.captures.thread.take());
                threads
            };
            for thread in threads {
                // It ends at once, since no work is left.
                let _ = thread.join();
            }
        }
        // After a lost session, other machines do not answer any more.
        let carries = drained.is_ok() && (self.machines.is_none() || self.team.check_session().is_ok());
        let carry = || {
            if !carries {
                return Ok(());
            }
            let copied = self.wait_while_machines_are_here(deadline, &|left| self.wait_until_copied(left));
            self.close_tiers(deadline).and(copied)
        };
        let (carried, left_together) = if self.machines.is_some() {
            // The leader carries files of other machines, so these leave later.
            let carried = carry();
            let served = self.serve_until_carried(deadline);
            let patience = left().min(self.options.stall_timeout).max(LEAVE_TIMEOUT);
            let left_together = if drained.is_ok() { served.and(self.leave(patience)) } else { served };
            self.leave_machines();
            (carried, left_together)
        } else {
            let left_together =
                if drained.is_ok() { self.leave(left().min(self.options.stall_timeout)) } else { Ok(()) };
            (carry(), left_together)
        };
        // After the deadline, still wait a moment: a deletion stops between two files.
        let stopped = self.root.deleter.stop(left().max(Duration::from_millis(100)));
        if drained.is_ok() {
            // After a timeout keep it, so that a new writer sees that this one still writes.
            self.root.release();
            // Free the memory here: a program may keep a handle until its end.
            let pool = self.saves.lock().pool.take();
            drop(pool);
        }
        drained?;
        self.saves.lock().end.ended = stopped && carried.is_ok();
        carried?;
        left_together?;
        self.raise_unseen(None)?;
        if let Some(error) = self.root.deleter.take_failures().into_iter().next() {
            return Err(error.into());
        }
        if stopped {
            Ok(())
        } else {
            Err(Error::Timeout { waited_for: "a deletion".to_owned(), waited: timeout })
        }
    }
}

impl Inner {
    /// Reports to the other ranks that this one closes. When all have, the leader retires what late
    /// ranks wrote for saves that were over.
    fn leave(&self, timeout: Duration) -> Result<()> {
        self.ranks.end();
        if self.team.is_alone() {
            return Ok(());
        }
        let mut timeout = timeout;
        if self.team.leads() && self.parts.leaves_at_once() {
            // The others may wait for a call that this process will not make.
            self.team.announce_leaving()?;
            timeout = timeout.min(LEAVE_TIMEOUT);
        }
        let saves = self.saves.lock().counter;
        if self.team.leave(saves, timeout)? && !self.options.read_only {
            let ours = recovery::of_session(&*self.root.dir, self.team.session())?;
            if !ours.is_empty() {
                // One of them may be a replaced step. First make the step that replaced it durable.
                self.root.dir.sync()?;
                self.root.deleter.enqueue(ours);
            }
        }
        Ok(())
    }
}

/// The right to close. One call has it at a time.
struct Closing<'a>(&'a Inner);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.saves.lock().end.closing = false;
        self.0.saves.changed.notify_all();
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        // A close that missed its deadline was reported. Do not wait again.
        if self.is_closed() {
            return;
        }
        if let Err(error) = self.inner.close(self.inner.options.stall_timeout) {
            tracing::error!(%error, root = %self.inner.root.path.display(), "a manager was dropped and not closed");
        }
    }
}
