//! `save`: it finds every error in the caller's data before it captures. The bytes are captured on
//! the caller's thread while the persister writes them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use stepwell_core::limits::MAX_STEP;
use stepwell_core::staging::StagingPool;
use stepwell_core::sys::driver;

use super::ticket::Ticket;
use super::together::AgreedDecision;
use super::{Exists, Inner, Manager, SaveRequest};
use crate::commit::Existing;
use crate::convert::Sharing;
use crate::directory_layout;
use crate::discovery::Found;
use crate::error::{Error, Result};
use crate::save::job::{self, Capturing, PlanContext, PlannedSave, SaveTarget};
use crate::save::{Refusal, Save};
use crate::save_policy::Facts;
use crate::state::{Census, StateSource};

/// The decision on a call of `save`.
pub enum Decision {
    /// The step is to be saved.
    Save(Ticket),
    /// Nothing is to be saved.
    Refuse(Refusal),
    /// This step is being saved already, and the caller asked to skip it.
    Pending(Save),
}

/// A planned save that is not begun. All checks have passed.
pub struct Ready {
    ticket: Ticket,
    prepared: PlannedSave,
}

impl Manager {
    /// True if the policy would save this step now. `custom` has the answers of custom policies, by
    /// name.
    pub fn should_save(&self, step: u64, custom: &BTreeMap<String, bool>) -> Result<bool> {
        let inner = &self.inner;
        inner.check_usable()?;
        if inner.options.read_only {
            return Ok(false);
        }
        if inner.options.save_policy.is_deterministic() && !inner.team.is_alone() {
            return inner.agreed_policy_answer(step, custom);
        }
        inner.ask_with_preemption("should_save", || inner.policy_answer(step, custom))
    }

    /// Decides whether a step is saved, before the state is flattened: a callable state runs only
    /// if needed. Fails for a step that exists, and for one below the latest.
    pub fn decide(
        &self,
        step: u64,
        force: bool,
        exists: Exists,
        custom: &BTreeMap<String, bool>,
    ) -> Result<Decision> {
        let inner = &self.inner;
        inner.check_usable()?;
        let decision = if inner.team.is_alone() || inner.options.read_only || step > MAX_STEP {
            inner.decide(step, force, exists, custom)?
        } else {
            inner.decide_together(step, force, exists, custom)?
        };
        Ok(match decision {
            AgreedDecision::Save => Decision::Save(Ticket::new(inner, step, false)),
            AgreedDecision::Replace => Decision::Save(Ticket::new(inner, step, true)),
            AgreedDecision::Refuse(refusal) => Decision::Refuse(refusal),
            AgreedDecision::Pending => {
                let queued = inner.saves.lock();
                // It may have failed here while the leader has already gone on.
                let mut known = queued.pending.iter().chain(queued.endings.last_failure());
                match known.find(|save| save.step() == step) {
                    Some(pending) => Decision::Pending(pending.clone()),
                    // It has ended on this rank since.
                    None => Decision::Refuse(Refusal::Exists),
                }
            }
        })
    }

    /// Saves a state: [`Manager::check_before_saving`], [`Manager::decide`], [`Manager::plan`] and
    /// [`Manager::begin`]. Returns once every leaf is captured as far as its provider demands. The
    /// commit follows in the background. The handle has its outcome.
    pub fn save(&self, request: SaveRequest) -> Result<Save> {
        self.check_before_saving(request.step)?;
        match self.decide(request.step, request.force, request.exists, &BTreeMap::new())? {
            Decision::Save(ticket) => self.begin(self.plan(ticket, request)?),
            Decision::Refuse(refusal) => Ok(Save::refused(request.step, refusal)),
            Decision::Pending(save) => Ok(save),
        }
    }

    /// Plans a decided save: all checks of the state, and the whole plan. Waits for the other ranks
    /// only if they have to exchange a census.
    pub fn plan(&self, mut ticket: Ticket, request: SaveRequest) -> Result<Ready> {
        match self.prepared(&mut ticket, request) {
            Ok(prepared) => Ok(Ready { ticket, prepared }),
            Err(error) => {
                ticket.fail(&error);
                Err(error)
            }
        }
    }

    fn prepared(&self, ticket: &mut Ticket, request: SaveRequest) -> Result<PlannedSave> {
        let begun = Instant::now();
        let inner = &self.inner;
        inner.check_usable()?;
        let census = inner.census(ticket, &request.state)?;
        let request = SaveRequest { step: ticket.step, ..request };
        job::plan(&inner.context(&inner.pool(), census.as_deref()), request, begun)
    }

    /// True if [`Manager::begin`] would return at once: it captures nothing, and waits for no other
    /// save.
    pub fn begins_at_once(&self, ready: &Ready) -> bool {
        let memory = self.inner.pool().bytes() as u64;
        let has_memory = memory > 0 && self.inner.options.staging_bytes.is_none_or(|asked| memory >= asked);
        let queued = self.inner.saves.lock();
        has_memory
            && !ready.prepared.has_eager()
            && !self.inner.options.detect_torn
            && !queued.captures.claimed
            && queued.pending.len() <= self.inner.options.max_pending
    }

    /// Begins a planned save, and captures every leaf that the caller may change after the return.
    pub fn begin(&self, ready: Ready) -> Result<Save> {
        let Ready { mut ticket, mut prepared } = ready;
        let inner = &self.inner;
        let made = job::allocate_staging(&mut prepared, &inner.options, &inner.pool());
        let placed = made.and_then(|()| {
            let turn = inner.wait_for_a_place(ticket.step, &prepared)?;
            Ok((turn, inner.enqueue(&mut ticket, prepared)?))
        });
        let (_turn, save, capturing) = match placed {
            Ok((turn, (save, capturing))) => (turn, save, capturing),
            Err(error) => {
                ticket.fail(&error);
                return Err(error);
            }
        };
        let Some(capturing) = capturing else { return Ok(save) };
        let (save, rest) = capturing.run_eager()?;
        if let Some(rest) = rest {
            inner.capture_later(&mut inner.saves.lock().captures, rest, true)?;
        }
        Ok(save)
    }

    /// Makes the checks of a state that [`Manager::save`] makes. Captures nothing, and allocates no
    /// staging memory.
    pub fn check(&self, state: StateSource) -> Result<()> {
        let inner = &self.inner;
        inner.check_usable()?;
        let request = SaveRequest::new(MAX_STEP, state);
        job::plan(&inner.context(&inner.pool(), None), request, Instant::now()).map(drop)
    }

    /// Grows the staging memory for a state of so many bytes, and registers it with these devices,
    /// so that the first save is as fast as later ones.
    pub fn prepare(&self, bytes: u64, devices: &[u32]) -> Result<()> {
        self.inner.check_usable()?;
        let pool = self.inner.pool();
        job::ensure_memory(&pool, &self.inner.options, bytes)?;
        for &device in devices {
            let device = driver()?.device(device)?;
            pool.mappings().iter().for_each(|mapping| mapping.register_with(&device));
        }
        Ok(())
    }

    /// True while a save is not over.
    pub fn is_saving(&self) -> bool {
        !self.inner.saves.lock().pending.is_empty()
    }

    /// Returns the session in which the ranks of this manager share conversions. All ranks make
    /// this call.
    pub fn sharing(&self) -> Result<Sharing> {
        self.inner.check_usable()?;
        let Inner { root, environment, options, .. } = &*self.inner;
        Sharing::meet(&root.path, environment, options.stall_timeout)
    }

    /// Announces preemption. The job counts as preempted from the next step that the policy is
    /// asked about.
    pub fn request_preemption(&self) {
        if self.inner.birth.is_here() {
            self.inner.history.lock().preemption_asked = true;
        }
    }

    /// True if the job counts as preempted at this step. False if the policy was asked about the
    /// step before the preemption was known, since the step may not have been saved.
    pub fn reached_preemption(&self, step: u64) -> Result<bool> {
        self.inner.check_usable()?;
        self.inner.ask_with_preemption("reached_preemption", || {
            let mut done = self.inner.history.lock();
            let first = if done.decided >= Some(step) { step.saturating_add(1) } else { step };
            Ok(done.is_preempted(step, first))
        })
    }

    /// Records that a step was restored: [`Manager::next_step`] continues from it.
    pub fn restored(&self, step: u64) {
        if self.inner.birth.is_here() {
            self.inner.history.lock().trail.restored(step);
            self.inner.ranks.end_restore();
        }
    }
}

impl Inner {
    pub(super) fn policy_answer(&self, step: u64, custom: &BTreeMap<String, bool>) -> Result<bool> {
        let preempted = {
            let mut done = self.history.lock();
            done.decided = done.decided.max(Some(step));
            done.is_preempted(step, step)
        };
        let asked = LocalFacts { inner: self, step, preempted, custom };
        self.options.save_policy.should_save(&asked)
    }

    pub(super) fn decide(
        &self,
        step: u64,
        force: bool,
        exists: Exists,
        custom: &BTreeMap<String, bool>,
    ) -> Result<AgreedDecision> {
        if step > MAX_STEP {
            return Err(Error::Invalid(format!("step {step} is more than 2^63 - 1, the largest there is")));
        }
        if self.options.read_only {
            // A forced save must happen.
            if force {
                return Err(Error::ReadOnly { what: "save a step", root: self.root.path.clone() });
            }
            return Ok(AgreedDecision::Refuse(Refusal::ReadOnly));
        }
        let is_pending = self.saves.lock().live().any(|save| save.step() == step);
        if exists == Exists::Skip && is_pending {
            return Ok(AgreedDecision::Pending);
        }
        // Before a listing of the root: most calls end here, and a policy of steps needs only the
        // step.
        if !force && !self.policy_answer(step, custom)? {
            return Ok(AgreedDecision::Refuse(Refusal::Policy));
        }
        // Sync an uncertain step now. If that fails, the save replaces it. After a power cut, one
        // of the two is there, whole.
        let uncertain = !is_pending && self.root.sync_uncertain(step);
        let listing = self.root.list_changes()?;
        let steps = &listing.steps;
        // A step that has lost files is invalid. A new step may take its number. The commit
        // quarantines the old one.
        let there = is_pending
            || match if steps.contains_key(&step) { self.root.committed(step)? } else { None } {
                Some(found) => self.root.damage(&found)?.is_none(),
                None => self.newest_carried(step..=step).is_some(),
            };
        // Report an existing step before a wrong order: a final save that repeats the last step is
        // not a step back.
        if there && exists == Exists::Skip {
            return Ok(AgreedDecision::Refuse(Refusal::Exists));
        }
        if there && exists == Exists::Error {
            let latest = self.latest_above(step, steps)?;
            let rewind_to = if latest.is_some() { self.newest_below(step, steps)? } else { None };
            return Err(Error::StepExists { step, root: self.root.path.clone(), latest, rewind_to });
        }
        if there && exists == Exists::Replace {
            self.usage.check_replaceable(step)?;
        }
        if let Some(latest) = self.latest_above(step, steps)? {
            return Err(Error::StepOrder { step, latest, rewind_to: self.newest_below(step, steps)? });
        }
        // Replace even if the step does not exist now: a pending save may commit it first.
        Ok(if exists == Exists::Replace || uncertain {
            AgreedDecision::Replace
        } else {
            AgreedDecision::Save
        })
    }

    /// Returns the latest step if it is above this one. It is the latest that a restore would take:
    /// a damaged step must not block training. Most saves find no step above them.
    fn latest_above(&self, step: u64, steps: &BTreeMap<u64, Found>) -> Result<Option<u64>> {
        let above = step + 1;
        let whole = if steps.range(above..).next().is_some() { self.root.newest_from(above)? } else { None };
        // A save whose capture has failed does not count, even before its failure is reported.
        let pending = self.saves.lock().live().map(Save::step).max();
        let latest = whole.map(|found| found.manifest.step).max(pending);
        Ok(latest.max(self.newest_carried(above..)).filter(|&latest| step < latest))
    }

    /// Returns the newest whole or pending step below this one, to which a rewind could go.
    fn newest_below(&self, step: u64, steps: &BTreeMap<u64, Found>) -> Result<Option<u64>> {
        let pending = self.saves.lock().live().map(Save::step).filter(|&pending| pending < step).max();
        for (&older, found) in steps.range(..step).rev() {
            if self.root.damage(found)?.is_none() {
                return Ok(pending.max(Some(older)));
            }
        }
        Ok(pending.max(self.newest_carried(..step)))
    }

    /// Waits while `max_pending` saves wait beside the one that is being written. A save with an
    /// eager capture also waits until all earlier saves are captured, and gets the right to
    /// capture. Two captures at once would starve each other: the later one takes slots that only
    /// its own flush frees, and that flush follows the earlier one's. Fails after the stall timeout
    /// without progress.
    fn wait_for_a_place(&self, step: u64, prepared: &PlannedSave) -> Result<Option<CaptureTurn<'_>>> {
        let (now, is_cancelled) = (prepared.has_eager(), || prepared.cancel.load(Ordering::Acquire));
        let mut logged = false;
        // A claimed capture enters the queue first. It may need all of the memory, which only its
        // own writes free.
        let turn = self.saves.wait_while(self.options.stall_timeout, false, |queued| {
            let blocked = (now && queued.captures.are_under_way())
                || (!now && queued.captures.claimed)
                || queued.pending.len() > self.options.max_pending;
            let waits = blocked && !is_cancelled();
            if waits && !std::mem::replace(&mut logged, true) {
                tracing::info!(step, "this save waits until an earlier one has ended");
            }
            waits
        });
        if is_cancelled() {
            let source = stepwell_core::Error::Cancelled("its caller cancelled it".to_owned());
            return Err(Error::SaveFailed { step, source });
        }
        let Some(mut queued) = turn else {
            let waited_for = match self.saves.lock().pending.first() {
                Some(first) => format!("the save of step {} to end", first.step()),
                None => "another save to be planned".to_owned(),
            };
            return Err(Error::Timeout { waited_for, waited: prepared.begun.elapsed() });
        };
        if !now {
            return Ok(None);
        }
        queued.captures.capturing = true;
        queued.captures.claimed = true;
        Ok(Some(CaptureTurn(self)))
    }

    /// Gives a save its number and puts it into the persister's queue. Returns the capture if the
    /// caller must begin it at once. Otherwise the capturer has it.
    fn enqueue(
        self: &Arc<Self>,
        ticket: &mut Ticket,
        prepared: PlannedSave,
    ) -> Result<(Save, Option<Capturing>)> {
        let step = ticket.step;
        let existing = if ticket.replaces { Existing::Replace } else { Existing::Refuse };
        let now = self.environment.clock.monotonic();
        let mut queued = self.saves.lock();
        self.check_open(&queued)?;
        self.start_persister(&mut queued.writes)?;
        if existing == Existing::Replace {
            // The step may have been held since the decision.
            self.usage.replace(step)?;
        }
        let counter = queued.counter;
        let place = SaveTarget {
            label: directory_layout::label(step),
            target: self.root.names.format(step),
            existing,
            counter,
            in_root: true,
            stale: ticket.stale.unwrap_or(false),
        };
        let now_in_part = prepared.has_eager();
        let (job, capturing) = prepared.split(&self.environment, &self.options, place);
        let save = job.save.clone();
        let enqueued = if now_in_part {
            Ok(Some(capturing))
        } else {
            // Under the same lock, so that captures have the order of the writes.
            self.capture_later(&mut queued.captures, capturing, false).map(|()| None)
        };
        if enqueued.is_err() && existing == Existing::Replace {
            self.usage.replaced(step);
        }
        let capturing = enqueued?;
        queued.counter += 1;
        ticket.used = true;
        self.ranks.raise_highest(step);
        {
            let mut done = self.history.lock();
            done.last_save = Some(now);
            done.trail.saving(&save);
        }
        save.set_ahead(&queued.pending);
        queued.pending.push(save.clone());
        queued.writes.queue.push_back(job);
        if now_in_part {
            queued.captures.claimed = false;
        }
        drop(queued);
        self.saves.changed.notify_all();
        Ok((save, capturing))
    }

    fn context<'a>(&'a self, pool: &'a Arc<StagingPool>, census: Option<&'a Census>) -> PlanContext<'a> {
        let Self { root, environment, options, team, .. } = self;
        PlanContext { root: &root.path, environment, options, pool, team, census }
    }

    pub(super) fn pool(&self) -> Arc<StagingPool> {
        Arc::clone(self.saves.lock().pool.get_or_insert_with(|| self.environment.pool()))
    }
}

/// The right to capture. One save of a manager has it at a time.
struct CaptureTurn<'a>(&'a Inner);

impl Drop for CaptureTurn<'_> {
    fn drop(&mut self) {
        let mut queued = self.0.saves.lock();
        queued.captures.capturing = false;
        queued.captures.claimed = false;
        drop(queued);
        self.0.saves.changed.notify_all();
    }
}

/// The facts for a policy. Each is looked up when the policy asks.
struct LocalFacts<'a> {
    inner: &'a Inner,
    step: u64,
    preempted: bool,
    custom: &'a BTreeMap<String, bool>,
}

impl Facts for LocalFacts<'_> {
    fn step(&self) -> u64 {
        self.step
    }

    fn is_first(&self) -> Result<bool> {
        if self.inner.root.is_populated() || self.inner.history.lock().trail.last().is_some() {
            return Ok(false);
        }
        Ok(self.inner.root.list_changes()?.steps.is_empty())
    }

    fn seconds_since_save(&self) -> Result<Option<f64>> {
        let clock = &self.inner.environment.clock;
        let last = self.inner.history.lock().last_save;
        if let Some(then) = last {
            return Ok(Some(clock.monotonic().saturating_sub(then).as_secs_f64()));
        }
        // Another process made the last save. Its manifest has wall-clock time.
        Ok(self.inner.root.newest()?.map(|found| {
            let passed = clock.unix_ns().saturating_sub(found.manifest.started_unix_ns);
            Duration::from_nanos(u64::try_from(passed).unwrap_or(0)).as_secs_f64()
        }))
    }

    fn saving(&self) -> bool {
        !self.inner.saves.lock().pending.is_empty()
    }

    fn preempted(&self) -> bool {
        self.preempted
    }

    fn custom(&self, name: &str) -> bool {
        self.custom.get(name).copied().unwrap_or(false)
    }
}
