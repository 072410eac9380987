//! Tiers: further roots, which get copies of the steps of the manager's own root (the near tier).
//!
//! A tier is a root with a [`Manager`] of its own. The leader opens it as its writer and carries
//! steps there ([`super::carrier`]). Other ranks only read it. Reads choose among the copies of a
//! step ([`super::copies`]).

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use stepwell_core::deadline::{StallTimer, deadline_after};
use stepwell_core::format::manifest::Attempt;

use super::{Inner, Manager};
use crate::carry_queue::{CarryEnd, CarryQueue, TierRule};
use crate::checkpoint::Checkpoint;
use crate::compressed_copy;
use crate::coordination::team::Team;
use crate::discovery::Found;
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::options::Options;
use crate::root::{Root, VISIBLE_WITHIN};

/// The longest wait for a carrier to stop carrying a step.
const STOP_CARRYING: Duration = Duration::from_secs(60);
/// The bytes that show how fast a carrier is. The time of fewer bytes is that of requests.
const MEASURED_BYTES: u64 = 4 << 20;
/// Waits for a carrier look at it at this interval.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A tier that a manager is to open.
pub struct TierPlace {
    /// Its name.
    pub name: String,
    /// Its root.
    pub path: PathBuf,
    /// Its retention, and the other options of its root.
    pub options: Options,
    /// Its disk. One process.
    pub environment: Environment,
    /// The steps that it takes.
    pub rule: TierRule,
    /// The most bytes that a carrier writes to it per second.
    pub bytes_per_second: Option<u64>,
    /// Globs of tensors that are compressed there.
    pub compress: Vec<String>,
}

/// The state of a tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TierReport {
    /// Its name.
    pub name: String,
    /// Its root.
    pub path: PathBuf,
    /// The steps that it has.
    pub steps: Vec<u64>,
    /// The steps that it is to get.
    pub due: Vec<u64>,
    /// The step that is on its way, with the bytes that have arrived and all bytes.
    pub carried: Option<(u64, u64, u64)>,
    /// The number of steps that were passed over for newer ones.
    pub superseded: u64,
    /// The last failure of a step that is due, or why the last one was given up.
    pub failure: Option<(u64, String)>,
}

/// See the module documentation.
pub(super) struct Tier {
    /// Counts the further tiers from 0.
    pub(super) number: usize,
    pub(super) name: String,
    pub(super) manager: Manager,
    pub(super) bytes_per_second: Option<u64>,
    pub(super) compress: Vec<String>,
    /// True once the globs were compared with the leaves of a step.
    has_checked_globs: AtomicBool,
    state: Mutex<TierState>,
    pub(super) changed: Condvar,
}

pub(super) struct TierState {
    pub(super) queue: CarryQueue,
    /// The steps of the tier, as its only writer knows them.
    pub(super) steps: BTreeMap<u64, Attempt>,
    /// Bytes of the carried step that have arrived, and all of its bytes.
    pub(super) arrived: (u64, u64),
    /// Bytes per second of the carrier, without its pauses. `None` before it has carried enough.
    pub(super) speed: Option<u64>,
    /// Little time is left: until then, the carrier makes no pauses for saves and knows no rate.
    pub(super) hurried_until: Option<Instant>,
    /// The step that was carried last, and the most of its bytes that have arrived in a try.
    pub(super) farthest: (u64, u64),
    /// Changes with all progress. A further try that repeats bytes makes none.
    pub(super) progress: u64,
    pub(super) given_up: Option<(u64, String)>,
    /// True while the carrier is at work on a step, and on what follows its end.
    pub(super) is_busy: bool,
    /// The number of the last order to other machines.
    pub(super) ordered: u64,
    /// This machine carries alone until then, since another one has failed.
    pub(super) alone_until: Option<Instant>,
    /// The number of such failures, one after the other.
    pub(super) failed_together: u32,
    /// True once the carrier was started.
    pub(super) has_carrier: bool,
    /// The carrier ends.
    pub(super) stop: bool,
}

impl TierState {
    pub(super) fn is_hurried(&self) -> bool {
        self.hurried_until.is_some_and(|end| Instant::now() < end)
    }

    /// Records the bytes of a carried step that have arrived, all of its bytes, and the time of the
    /// carrier's work.
    pub(super) fn record_arrival(&mut self, step: u64, done: u64, total: u64, worked: Duration) {
        self.arrived = (done, total);
        if done >= MEASURED_BYTES {
            let micros = u64::try_from(worked.as_micros()).unwrap_or(u64::MAX).max(1);
            self.speed = Some(done.saturating_mul(1_000_000) / micros);
        }
        if self.farthest.0 != step || self.farthest.1 < done {
            self.farthest = (step, done);
            self.progress += 1;
        }
    }
}

impl Tier {
    fn new(number: usize, place: &TierPlace, manager: Manager) -> Result<Self> {
        let listing = manager.inner.root.list()?;
        let known = |(&step, found): (&u64, &Found)| (step, found.manifest.attempt.clone());
        let steps = listing.steps.iter().map(known).collect();
        let state = TierState {
            queue: CarryQueue::new(place.rule),
            steps,
            arrived: (0, 0),
            speed: None,
            hurried_until: None,
            farthest: (0, 0),
            progress: 0,
            given_up: None,
            is_busy: false,
            ordered: 0,
            alone_until: None,
            failed_together: 0,
            has_carrier: false,
            stop: false,
        };
        Ok(Self {
            number,
            name: place.name.clone(),
            manager,
            bytes_per_second: place.bytes_per_second,
            compress: place.compress.clone(),
            has_checked_globs: AtomicBool::new(false),
            state: Mutex::new(state),
            changed: Condvar::new(),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, TierState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a step due, if the tier takes it. `attempt` is its attempt in the near tier.
    pub(super) fn commit(&self, step: u64, attempt: Option<&Attempt>) {
        let mut state = self.lock();
        let theirs = state.steps.get(&step);
        let replaces = theirs.is_some() && theirs != attempt;
        state.queue.committed(step, replaces);
        state.progress += 1;
        drop(state);
        self.changed.notify_all();
    }

    /// True if this process is the tier's only writer. Then it knows the steps without asking.
    pub(super) fn is_written_here(&self) -> bool {
        !self.manager.inner.options.read_only
    }

    /// Returns the steps that are known of the tier, if this process is its only writer.
    pub(super) fn known_steps(&self) -> Option<BTreeSet<u64>> {
        self.is_written_here().then(|| self.lock().steps.keys().copied().collect())
    }

    /// True if the tier is known to lack a step, or this attempt of it.
    pub(super) fn is_known_to_lack(&self, step: u64, attempt: Option<&Attempt>) -> bool {
        let is_it = |theirs: &Attempt| attempt.is_none_or(|attempt| attempt == theirs);
        self.is_written_here() && !self.lock().steps.get(&step).is_some_and(is_it)
    }

    pub(super) fn root(&self) -> &Root {
        &self.manager.inner.root
    }

    /// Forgets steps that a call removes, and waits until none of them is carried. `forgotten` gets
    /// those that were due.
    fn forget(&self, is_removed: impl Fn(u64) -> bool, forgotten: &mut Vec<u64>) -> Result<()> {
        let (begun, deadline) = (Instant::now(), deadline_after(STOP_CARRYING));
        let mut state = self.lock();
        forgotten.extend(state.queue.due().filter(|&step| is_removed(step)));
        while state.queue.forget(&is_removed) {
            if Instant::now() >= deadline {
                let waited_for = format!("the carrier of the tier `{}` to stop carrying a step", self.name);
                return Err(Error::Timeout { waited_for, waited: begun.elapsed() });
            }
            state = self.wait(state, POLL_INTERVAL);
        }
        Ok(())
    }

    pub(super) fn wait<'a>(
        &self,
        state: MutexGuard<'a, TierState>,
        how_long: Duration,
    ) -> MutexGuard<'a, TierState> {
        self.changed.wait_timeout(state, how_long).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits until nothing is due. Without a timeout, as long as there is progress.
    pub(super) fn wait_until_idle(&self, timeout: Option<Duration>, stall_timeout: Duration) -> Result<()> {
        let begun = Instant::now();
        let deadline = timeout.map(deadline_after);
        let mut timer = StallTimer::new(stall_timeout);
        let mut state = self.lock();
        while state.is_busy || state.queue.due().next().is_some() {
            let is_late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if is_late || (timeout.is_none() && timer.left(state.progress).is_zero()) {
                let waited_for = format!("the tier `{}` to get {}", self.name, what_is_due(&state.queue));
                return Err(Error::Timeout { waited_for, waited: begun.elapsed() });
            }
            state = self.wait(state, POLL_INTERVAL);
        }
        Ok(())
    }

    /// Warns of globs that select no tensor, at the first step that is carried.
    pub(super) fn check_globs(&self, step: &Checkpoint) -> Result<()> {
        if self.compress.is_empty() || self.has_checked_globs.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        for glob in compressed_copy::unmatched(&self.compress, &*step.index()?)? {
            tracing::warn!(tier = %self.name, glob, step = step.step(), "no tensor of this step matches a glob of those that are compressed in a tier");
        }
        Ok(())
    }

    fn report(&self) -> TierReport {
        let state = self.lock();
        let failure = state.queue.failure().map(|(step, why)| (step, why.to_owned()));
        TierReport {
            name: self.name.clone(),
            path: self.manager.path().to_owned(),
            steps: state.steps.keys().copied().collect(),
            due: state.queue.due().collect(),
            carried: state.queue.carried().map(|step| (step, state.arrived.0, state.arrived.1)),
            superseded: state.queue.superseded(),
            failure: failure.or_else(|| state.given_up.clone()),
        }
    }
}

/// Describes the steps that a tier is to get, and the last failure.
pub(super) fn what_is_due(queue: &CarryQueue) -> String {
    let steps: Vec<String> = queue.due().map(|step| step.to_string()).collect();
    let failed = queue.failure().map(|(step, why)| format!(". Carrying step {step} failed: {why}"));
    format!("step(s) {}{}", steps.join(", "), failed.unwrap_or_default())
}

/// Opens the tiers of a manager: the leader as their writer. All ranks make this call.
pub(super) fn open(places: &[TierPlace], team: &Team, options: &Options) -> Result<Vec<Arc<Tier>>> {
    if places.is_empty() {
        return Ok(Vec::new());
    }
    let mut led = Vec::new();
    team.ask("open the tiers", || {
        for (number, place) in places.iter().enumerate() {
            match open_one(number, place, options.read_only) {
                // It is not there before a step was carried.
                Err(error) if options.read_only && is_missing(&error) => {}
                opened => led.push(opened?),
            }
        }
        Ok(())
    })?;
    if team.is_alone() {
        return Ok(led);
    }
    let mine = if team.leads() {
        Ok(led)
    } else {
        places.iter().enumerate().map(|(number, place)| open_beside(number, place)).collect()
    };
    let (opened, mine) = match mine {
        Ok(opened) => (opened, Ok(())),
        Err(error) => (Vec::new(), Err(error)),
    };
    team.agree("open the tiers", mine, |_| Ok(()))?;
    Ok(opened)
}

fn open_one(number: usize, place: &TierPlace, read_only: bool) -> Result<Arc<Tier>> {
    compressed_copy::chosen(&place.compress)?;
    let options = Options { read_only, ..place.options.clone() };
    let manager = Manager::open_tier(&place.path, options, place.environment.clone(), &[])?;
    Tier::new(number, place, manager).map(Arc::new)
}

/// Opens a tier for reading that the leader has just made. A network file system may not show it
/// yet.
fn open_beside(number: usize, place: &TierPlace) -> Result<Arc<Tier>> {
    let deadline = deadline_after(VISIBLE_WITHIN);
    loop {
        match open_one(number, place, true) {
            Err(error) if is_missing(&error) && Instant::now() < deadline => {
                std::thread::sleep(POLL_INTERVAL);
            }
            opened => return opened,
        }
    }
}

fn is_missing(error: &Error) -> bool {
    error.core().is_some_and(stepwell_core::Error::is_gone)
}

impl Inner {
    /// Returns the newest step of the further tiers that is in this range, as far as it is known.
    pub(super) fn newest_carried(&self, range: impl std::ops::RangeBounds<u64> + Clone) -> Option<u64> {
        let newest =
            |tier: &Arc<Tier>| tier.lock().steps.range(range.clone()).next_back().map(|(&step, _)| step);
        self.tiers.iter().filter_map(newest).max()
    }

    /// Returns the steps that retention leaves alone.
    pub(super) fn kept(&self) -> BTreeSet<u64> {
        let mut kept = self.usage.kept();
        for tier in &self.tiers {
            kept.extend(tier.lock().queue.due());
        }
        kept.extend(self.kept_for_copies());
        kept
    }

    /// Removes steps, which are not carried meanwhile. After an error, those that were due are due
    /// again.
    pub(super) fn removing<T>(
        &self,
        is_removed: impl Fn(u64) -> bool,
        remove: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let mut forgotten = vec![Vec::new(); self.tiers.len()];
        let mut forget = || {
            let mut all = self.tiers.iter().zip(&mut forgotten);
            all.try_for_each(|(tier, forgotten)| tier.forget(&is_removed, forgotten))
        };
        let mut uncopied = Vec::new();
        let mut stop = || {
            uncopied = self.forget_due_copies(&is_removed, STOP_CARRYING)?;
            forget()
        };
        let removed = stop().and_then(|()| remove());
        if removed.is_err() {
            for step in uncopied {
                self.copy_later(step);
            }
            for (tier, forgotten) in self.tiers.iter().zip(forgotten) {
                for step in forgotten {
                    tier.commit(step, None);
                }
            }
        }
        let removed = removed?;
        self.forget_partner_copies(is_removed)?;
        Ok(removed)
    }

    /// Waits until every due step has arrived, then ends the carriers and closes the tiers.
    pub(super) fn close_tiers(&self, deadline: Instant) -> Result<()> {
        let left = || Some(deadline.saturating_duration_since(Instant::now()));
        let mut all = Ok(());
        for tier in &self.tiers {
            let has_carrier = tier.lock().has_carrier;
            let wait = || match self.machines {
                Some(_) => self.wait_while_machines_are_here(deadline, &|left| {
                    tier.wait_until_idle(left, self.options.stall_timeout)
                }),
                None => tier.wait_until_idle(left(), self.options.stall_timeout),
            };
            let idle = if has_carrier { wait() } else { Ok(()) };
            tier.lock().stop = true;
            tier.changed.notify_all();
            all = all.and(idle).and(tier.manager.close(left()));
        }
        all
    }

    /// Returns a value that changes while steps are carried.
    pub(super) fn carry_progress(&self) -> u64 {
        self.tiers.iter().fold(self.copy_progress(), |sum, tier| tier.lock().progress.wrapping_add(sum))
    }

    /// True if this process carries steps.
    pub(super) fn carries(&self) -> bool {
        !self.options.read_only && self.team.leads()
    }
}

impl Manager {
    /// Returns the states of all tiers, nearest first: of this manager's root, without a name, and
    /// of the further ones.
    pub fn tiers(&self) -> Result<Vec<TierReport>> {
        let inner = &self.inner;
        inner.check_usable()?;
        let mut near = TierReport { path: inner.root.path.clone(), ..TierReport::default() };
        inner.report_copies(&mut near);
        let mut reports = vec![near];
        reports.extend(inner.tiers.iter().map(|tier| tier.report()));
        for (report, root) in reports.iter_mut().zip(inner.roots()) {
            // The carrier knows the steps of a tier, even if its store does not answer.
            if report.name.is_empty() || !inner.carries() {
                report.steps = root.list()?.steps.keys().copied().collect();
            }
        }
        Ok(reports)
    }

    /// Waits until every save is over and no step is due in any tier. Without a timeout, it waits
    /// as long as steps get on. Only the leader knows what is due.
    pub fn wait_until_carried(&self, timeout: Option<Duration>) -> Result<()> {
        self.inner.check_carrying()?;
        let deadline = timeout.map(deadline_after);
        let stall_timeout = self.inner.options.stall_timeout;
        // Pending saves will be due.
        self.inner.drain(timeout)?;
        for tier in &self.inner.tiers {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            tier.wait_until_idle(left, stall_timeout)?;
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        self.inner.wait_until_copied(left)
    }

    /// Waits until a tier has a committed step. An empty name: until other machines have copies of
    /// it, if they keep some. Fails with [`Error::NotCarried`] if that will not happen, and with
    /// [`Error::Timeout`] if it has not happened by then.
    pub fn wait_carried(&self, step: u64, name: &str, timeout: Duration) -> Result<()> {
        if name.is_empty() {
            return self.inner.wait_copied(step, timeout);
        }
        self.inner.check_carrying()?;
        let Some(tier) = self.inner.tiers.iter().find(|tier| tier.name == name) else {
            let names: Vec<&str> = self.inner.tiers.iter().map(|tier| &*tier.name).collect();
            return Err(Error::Invalid(format!(
                "this manager has no further tier `{name}`. It has {}",
                if names.is_empty() { "none".to_owned() } else { names.join(", ") }
            )));
        };
        let (begun, deadline) = (Instant::now(), deadline_after(timeout));
        let mut state = tier.lock();
        loop {
            let is_due = state.queue.due().any(|due| due == step);
            let why = match state.queue.end_of(step) {
                _ if is_due => None,
                Some(CarryEnd::Arrived) => return Ok(()),
                None if state.steps.contains_key(&step) => return Ok(()),
                Some(CarryEnd::Superseded) => Some("a newer step took its place".to_owned()),
                Some(CarryEnd::GivenUp(why)) => Some(why.clone()),
                None if !state.queue.takes(step) => Some("the tier does not take this step".to_owned()),
                None => Some("it was removed".to_owned()),
            };
            if let Some(why) = why {
                return Err(Error::NotCarried { step, tier: name.to_owned(), why });
            }
            if Instant::now() >= deadline {
                let waited_for = format!("the tier `{name}` to get {}", what_is_due(&state.queue));
                return Err(Error::Timeout { waited_for, waited: begun.elapsed() });
            }
            state = tier.wait(state, POLL_INTERVAL);
        }
    }

    /// Returns the names of the tiers that have the newest attempt of a step. The near tier has an
    /// empty name.
    pub fn tiers_of(&self, step: u64) -> Result<Vec<String>> {
        let inner = &self.inner;
        inner.birth.check("manager")?;
        let mut names = Vec::new();
        let near = inner.root.committed(step)?.map(|found| found.manifest.attempt.clone());
        if near.is_some() {
            names.push(String::new());
        }
        for tier in &inner.tiers {
            let theirs = tier.lock().steps.get(&step).cloned();
            if theirs.is_some() && (near.is_none() || theirs == near) {
                names.push(tier.name.clone());
            }
        }
        Ok(names)
    }

    /// True if the loss of one machine loses no file of a committed step: others have copies, which
    /// this session has made. Only the leader knows it.
    pub fn is_copied(&self, step: u64) -> Result<bool> {
        let inner = &self.inner;
        inner.birth.check("manager")?;
        let found = inner.root.committed(step)?;
        Ok(found.is_some_and(|found| inner.is_copied(step, &found.manifest.attempt)))
    }

    /// Describes what the tiers are still to get. Empty if nothing is due.
    pub fn due_in_tiers(&self) -> String {
        let due = self.inner.tiers.iter().filter_map(|tier| {
            let state = tier.lock();
            state.queue.due().next()?;
            Some(format!("the tier `{}` to get {}", tier.name, what_is_due(&state.queue)))
        });
        self.inner.due_copies().into_iter().chain(due).collect::<Vec<_>>().join("; ")
    }

    /// Returns a number that changes whenever a carrier gets on.
    pub fn carry_progress(&self) -> u64 {
        // Others read from this machine meanwhile.
        let served = self.inner.machines.as_ref().map_or(0, |machines| machines.reads());
        self.inner.carry_progress().wrapping_add(served)
    }
}

impl Inner {
    /// Passes after a close, too: what has arrived is still known.
    pub(super) fn check_carrying(&self) -> Result<()> {
        self.birth.check("manager")?;
        if self.carries() {
            return Ok(());
        }
        Err(Error::Invalid(format!(
            "only the first rank of a manager that saves knows which steps of {} are carried to which tier: ask there",
            self.root.path.display()
        )))
    }
}
