//! `save`: everything that can be wrong is found before it returns; then the bytes are captured on
//! the caller's thread, while the persister writes them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use stepwell_core::deadline::deadline_after;
use stepwell_core::limits::MAX_STEP;
use stepwell_core::staging::StagingPool;
use stepwell_core::sys::driver;

use super::together::Ticket;
use super::{Exists, Inner, Manager, SaveRequest, State};
use crate::commit::Existing;
use crate::directory_layout;
use crate::discovery::{Found, damage};
use crate::error::{Error, Result};
use crate::save::job::{self, Capturing, Order, Place, Prepared};
use crate::save::{Refusal, Save};
use crate::save_policy::Facts;
use crate::state::StateSource;

/// The treatment of a step by `save`.
pub enum Decision {
    /// It would save.
    Save(Ticket),
    /// It would do nothing.
    Refuse(Refusal),
    /// This step is being saved already, and `exists="skip"`.
    Pending(Save),
}

/// A [`Decision`], as the leader announces it.
#[derive(Serialize, Deserialize)]
pub(super) enum Said {
    Save,
    Replace,
    Refuse(Refusal),
    Pending,
}

/// A save that is planned and that nothing is wrong with, and not begun.
pub struct Ready {
    ticket: Ticket,
    prepared: Prepared,
    cancel: Arc<AtomicBool>,
    begun: Instant,
}

impl Manager {
    /// True if the policy would save this step now. Answers of custom policies come by their name.
    pub fn should_save(&self, step: u64, custom: &BTreeMap<String, bool>) -> Result<bool> {
        let inner = &self.inner;
        inner.check_usable()?;
        if inner.options.read_only {
            return Ok(false);
        }
        if inner.options.save_policy.is_deterministic() && !inner.team.is_alone() {
            return inner.says_yes_alike(step, custom);
        }
        inner.ask_with_signals("should_save", || inner.policy_says_yes(step, custom))
    }

    /// Decides before the state is looked at, so that a callable state runs only if needed. Fails
    /// for a step that exists, and for one below the latest.
    pub fn decide(
        &self,
        step: u64,
        force: bool,
        exists: Exists,
        custom: &BTreeMap<String, bool>,
    ) -> Result<Decision> {
        let inner = &self.inner;
        inner.check_usable()?;
        let said = if inner.team.is_alone() || inner.options.read_only || step > MAX_STEP {
            inner.decide(step, force, exists, custom)?
        } else {
            inner.decide_together(step, force, exists, custom)?
        };
        Ok(match said {
            Said::Save => Decision::Save(Ticket::new(inner, step, false)),
            Said::Replace => Decision::Save(Ticket::new(inner, step, true)),
            Said::Refuse(refusal) => Decision::Refuse(refusal),
            Said::Pending => {
                let state = inner.lock();
                // It may have failed here, and the leader be at what follows.
                match state.pending.iter().chain(&state.last_failure).find(|save| save.step() == step) {
                    Some(pending) => Decision::Pending(pending.clone()),
                    // It has ended on this rank meanwhile.
                    None => Decision::Refuse(Refusal::Exists),
                }
            }
        })
    }

    /// Saves a state: [`Manager::check_before_saving`], [`Manager::decide`], [`Manager::plan`] and
    /// [`Manager::begin`]. Returns when of every leaf has happened what its provider asks for
    /// (`Haste`): the caller may change then what he may by that. The commit follows in the
    /// background; its outcome comes through the handle.
    pub fn save(&self, request: SaveRequest) -> Result<Save> {
        self.check_before_saving(request.step)?;
        match self.decide(request.step, request.force, request.exists, &BTreeMap::new())? {
            Decision::Save(ticket) => self.begin(self.plan(ticket, request)?),
            Decision::Refuse(refusal) => Ok(Save::refused(request.step, refusal)),
            Decision::Pending(save) => Ok(save),
        }
    }

    /// Plans a save that was decided: all checks of the state, and the whole plan. It waits for
    /// nothing but the processor, and before the first save for the other ranks.
    pub fn plan(&self, mut ticket: Ticket, request: SaveRequest) -> Result<Ready> {
        let begun = Instant::now();
        let cancel = Arc::clone(&request.cancel);
        match self.prepared(&mut ticket, request, begun) {
            Ok(prepared) => Ok(Ready { ticket, prepared, cancel, begun }),
            Err(error) => {
                ticket.fail(&error);
                Err(error)
            }
        }
    }

    fn prepared(&self, ticket: &mut Ticket, request: SaveRequest, begun: Instant) -> Result<Prepared> {
        let inner = &self.inner;
        inner.check_usable()?;
        let (census, stale) = inner.census(ticket, &request.state)?.unzip();
        let order = Order {
            root: inner.path.clone(),
            step: ticket.step,
            state: request.state,
            metrics: request.metrics,
            custom_metadata: request.custom_metadata,
            cancel: request.cancel,
            streams: request.streams,
            begun,
            team: Arc::clone(&inner.team),
            census,
            stale: stale.unwrap_or(false),
        };
        job::plan(&inner.environment, &inner.options, &inner.pool(), order)
    }

    /// True if [`Manager::begin`] would return at once: nothing is captured on its thread, and
    /// nothing is in its way.
    pub fn begins_at_once(&self, ready: &Ready) -> bool {
        let memory = self.inner.pool().bytes() as u64;
        let has_memory = memory > 0 && self.inner.options.staging_bytes.is_none_or(|asked| memory >= asked);
        let state = self.inner.lock();
        has_memory
            && !ready.prepared.has_eager()
            && !self.inner.options.detect_torn
            && !state.claimed
            && state.pending.len() <= self.inner.options.max_pending
    }

    /// Begins a planned save, and captures what its caller may change after the return.
    pub fn begin(&self, ready: Ready) -> Result<Save> {
        let Ready { mut ticket, mut prepared, cancel, begun } = ready;
        let inner = &self.inner;
        let made = job::make_ready(&mut prepared, &inner.options, &inner.pool());
        let placed = made.and_then(|()| {
            let turn = inner.wait_for_a_place(ticket.step, begun, &cancel, prepared.has_eager())?;
            Ok((turn, inner.enqueue(&mut ticket, prepared)?))
        });
        let (_turn, enqueued) = match placed {
            Ok(placed) => placed,
            Err(error) => {
                ticket.fail(&error);
                return Err(error);
            }
        };
        let capturing = match enqueued {
            Enqueued::Later(save) => return Ok(save),
            Enqueued::Now(capturing) => capturing,
        };
        let (save, rest) = capturing.run()?;
        if let Some(rest) = rest {
            inner.capture_later(&mut inner.lock(), rest, true)?;
        }
        Ok(save)
    }

    /// Raises what [`Manager::save`] would raise about a state, and saves nothing: nothing is
    /// captured, and no memory made.
    pub fn check(&self, state: StateSource) -> Result<()> {
        let inner = &self.inner;
        inner.check_usable()?;
        let order = Order {
            root: inner.path.clone(),
            step: MAX_STEP,
            state,
            metrics: BTreeMap::new(),
            custom_metadata: serde_json::Value::Null,
            cancel: Arc::default(),
            streams: BTreeMap::new(),
            begun: Instant::now(),
            team: Arc::clone(&inner.team),
            census: None,
            stale: false,
        };
        job::plan(&inner.environment, &inner.options, &inner.pool(), order).map(drop)
    }

    /// Grows the staging memory for a state of so many bytes, and has these devices know it, so
    /// that the first save does not pay for it.
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

    /// Asks for preemption: the next step that is asked about is the one at which the job counts as
    /// preempted.
    pub fn request_preemption(&self) {
        if self.inner.birth.is_here() {
            self.inner.lock().preemption_asked = true;
        }
    }

    /// True if the job counts as preempted at this step: not where the save policy was asked about
    /// it before that was known, since it may not have been saved.
    pub fn reached_preemption(&self, step: u64) -> Result<bool> {
        self.inner.check_usable()?;
        self.inner.ask_with_signals("reached_preemption", || {
            let mut state = self.inner.lock();
            let first = if state.decided >= Some(step) { step.saturating_add(1) } else { step };
            Ok(state.is_preempted(step, first))
        })
    }

    /// Says that a step was restored: [`Manager::next_step`] goes on from it.
    pub fn restored(&self, step: u64) {
        if self.inner.birth.is_here() {
            let mut state = self.inner.lock();
            state.trail.restored(step);
            state.restoring = false;
        }
    }
}

impl Inner {
    pub(super) fn policy_says_yes(&self, step: u64, custom: &BTreeMap<String, bool>) -> Result<bool> {
        let preempted = {
            let mut state = self.lock();
            state.decided = state.decided.max(Some(step));
            state.is_preempted(step, step)
        };
        let asked = Asked { inner: self, step, preempted, custom };
        self.options.save_policy.should_save(&asked)
    }

    pub(super) fn decide(
        &self,
        step: u64,
        force: bool,
        exists: Exists,
        custom: &BTreeMap<String, bool>,
    ) -> Result<Said> {
        if step > MAX_STEP {
            return Err(Error::Invalid(format!("step {step} is more than 2^63 - 1, the largest there is")));
        }
        if self.options.read_only {
            // A forced save must happen.
            if force {
                return Err(Error::ReadOnly { what: "save a step", root: self.path.clone() });
            }
            return Ok(Said::Refuse(Refusal::ReadOnly));
        }
        let is_it = |save: &Save| save.step() == step && !save.has_failed();
        let is_pending = self.lock().pending.iter().any(is_it);
        if exists == Exists::Skip && is_pending {
            return Ok(Said::Pending);
        }
        // Before the root is looked at: most calls end here, and a policy of steps alone needs
        // nothing but the step.
        if !force && !self.policy_says_yes(step, custom)? {
            return Ok(Said::Refuse(Refusal::Policy));
        }
        // After it, a step that was uncertain is there, or is to be replaced: whichever of the two
        // a power cut leaves, it is a whole one.
        let uncertain = !is_pending && self.settle_uncertain(step);
        let listing = self.look()?;
        let steps = &listing.steps;
        // A step that has lost files is invalid. A good one may take its number, and the commit
        // quarantines the rest.
        let there = is_pending
            || match if steps.contains_key(&step) { self.committed(step)? } else { None } {
                Some(found) => damage(&*self.root, &found.name, &found.manifest)?.is_none(),
                None => false,
            };
        // An existing step is told before an order: a final save that repeats the last one is no
        // step back.
        if there && exists == Exists::Skip {
            return Ok(Said::Refuse(Refusal::Exists));
        }
        if there && exists == Exists::Error {
            let latest = self.latest_above(step, steps)?;
            let rewind_to = if latest.is_some() { self.newest_below(step, steps)? } else { None };
            return Err(Error::StepExists { step, root: self.path.clone(), latest, rewind_to });
        }
        if there && exists == Exists::Replace {
            self.lock().may_be_replaced(step)?;
        }
        if let Some(latest) = self.latest_above(step, steps)? {
            return Err(Error::StepOrder { step, latest, rewind_to: self.newest_below(step, steps)? });
        }
        // Needed even if the step does not exist now: a pending save of it may be committed by
        // then.
        Ok(if exists == Exists::Replace || uncertain { Said::Replace } else { Said::Save })
    }

    /// The latest step, where it is above this one: the latest that a restore would take, as one
    /// that is damaged is passed over there, and must not hold up training here. Most saves find
    /// nothing above them.
    fn latest_above(&self, step: u64, steps: &BTreeMap<u64, Found>) -> Result<Option<u64>> {
        let above = step + 1;
        let whole = if steps.range(above..).next().is_some() { self.newest_from(above)? } else { None };
        let latest = whole.map(|found| found.manifest.step).max(self.latest_pending());
        Ok(latest.filter(|&latest| step < latest))
    }

    /// The newest whole step below this one, or the newest that is being saved: what a rewind may
    /// name.
    fn newest_below(&self, step: u64, steps: &BTreeMap<u64, Found>) -> Result<Option<u64>> {
        let pending = {
            let state = self.lock();
            let live = state.pending.iter().filter(|save| !save.has_failed());
            live.map(Save::step).filter(|&pending| pending < step).max()
        };
        for (&older, found) in steps.range(..step).rev() {
            if damage(&*self.root, &found.name, &found.manifest)?.is_none() {
                return Ok(pending.max(Some(older)));
            }
        }
        Ok(pending)
    }

    /// Blocks while `max_pending` saves wait beside the one that is being written, and, where there
    /// is something to capture `now`, until all earlier saves are captured (two at once would
    /// starve each other: the later one takes slots that only its flush frees, which stands behind
    /// the earlier one's); as long as there is progress. The turn is that of who captures now.
    fn wait_for_a_place(
        &self,
        step: u64,
        begun: Instant,
        cancel: &AtomicBool,
        now: bool,
    ) -> Result<Option<Turn<'_>>> {
        let captures = |state: &State| state.capturing || !state.rests.is_empty();
        let mut state = self.lock();
        let mut told = false;
        let mut seen = None;
        let mut deadline = deadline_after(self.options.stall_timeout);
        // A capture for this call is written first. It may need all of the memory, which only its
        // own writes free.
        while (now && captures(&state))
            || (!now && state.claimed)
            || state.pending.len() > self.options.max_pending
        {
            if cancel.load(Ordering::Acquire) {
                let source = stepwell_core::Error::Cancelled("its caller cancelled it".to_owned());
                return Err(Error::SaveFailed { step, source });
            }
            if !std::mem::replace(&mut told, true) {
                tracing::info!(step, "this save waits until an earlier one has ended");
            }
            let first = state.pending.first();
            let progress = first.map(|first| (first.step(), first.moved()));
            if progress != seen {
                seen = progress;
                deadline = deadline_after(self.options.stall_timeout);
            }
            if Instant::now() >= deadline {
                let waited_for = match first {
                    Some(first) => format!("the save of step {} to end", first.step()),
                    None => "another save to be planned".to_owned(),
                };
                return Err(Error::Timeout { waited_for, waited: begun.elapsed() });
            }
            let pause = deadline_after(Duration::from_millis(20));
            state = match self.wait(state, pause.min(deadline)) {
                Some(state) => state,
                None => self.lock(),
            };
        }
        if !now {
            return Ok(None);
        }
        state.capturing = true;
        state.claimed = true;
        Ok(Some(Turn(self)))
    }

    fn enqueue(self: &Arc<Self>, ticket: &mut Ticket, prepared: Prepared) -> Result<Enqueued> {
        let step = ticket.step;
        let existing = if ticket.replaces { Existing::Replace } else { Existing::Refuse };
        let now = self.environment.clock.monotonic();
        let mut state = self.lock();
        if state.closed {
            return Err(Error::Closed { root: self.path.clone() });
        }
        if existing == Existing::Replace {
            // It may have been held since that was decided.
            state.may_be_replaced(step)?;
        }
        let counter = state.counter;
        let place = Place {
            label: directory_layout::label(step),
            target: self.names.format(step),
            existing,
            counter,
            fenced: true,
        };
        let now_in_part = prepared.has_eager();
        let (job, capturing) = prepared.split(&self.environment, &self.options, place);
        self.start_persister(&mut state)?;
        let enqueued = if now_in_part {
            Enqueued::Now(Box::new(capturing))
        } else {
            // In the order in which they will be written, so under the same lock.
            self.capture_later(&mut state, capturing.into_rest(), false)?;
            Enqueued::Later(job.save.clone())
        };
        state.counter += 1;
        ticket.used = true;
        if existing == Existing::Replace {
            // From here on a hold waits.
            state.replacing.push(step);
        }
        state.last_save = Some(now);
        state.highest = state.highest.max(Some(step));
        job.save.stands_behind(&state.pending);
        state.trail.saving(&job.save);
        state.pending.push(job.save.clone());
        state.queue.push_back(job);
        if now_in_part {
            state.claimed = false;
        }
        drop(state);
        self.changed.notify_all();
        Ok(enqueued)
    }

    pub(super) fn pool(&self) -> Arc<StagingPool> {
        Arc::clone(self.lock().pool.get_or_insert_with(|| self.environment.pool()))
    }
}

impl State {
    /// A step that is held is neither removed nor replaced.
    fn may_be_replaced(&self, step: u64) -> Result<()> {
        if !self.held.contains_key(&step) {
            return Ok(());
        }
        let by = "this manager holds it (hold()), and what is held is not replaced; release the hold first"
            .to_owned();
        Err(Error::Held { step, by })
    }

    /// True if the job counts as preempted at `step`; from `first` on where nobody has known it
    /// yet.
    fn is_preempted(&mut self, step: u64, first: u64) -> bool {
        if self.preemption_asked && self.preempted.is_none() {
            self.preempted = Some(first);
        }
        self.preempted.is_some_and(|from| step >= from)
    }

    /// A save that was to replace this step is over.
    pub(super) fn is_replaced(&mut self, step: u64) {
        if let Some(at) = self.replacing.iter().position(|&replacing| replacing == step) {
            self.replacing.swap_remove(at);
        }
    }
}

/// A save that is in the persister's queue.
enum Enqueued {
    /// To be captured by its caller, at once.
    Now(Box<Capturing>),
    /// To be captured by the capturer, all of it.
    Later(Save),
}

/// The right to capture; one save of a manager has it at a time.
struct Turn<'a>(&'a Inner);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.capturing = false;
        state.claimed = false;
        drop(state);
        self.0.changed.notify_all();
    }
}

/// The facts for a policy, looked up when it asks.
struct Asked<'a> {
    inner: &'a Inner,
    step: u64,
    preempted: bool,
    custom: &'a BTreeMap<String, bool>,
}

impl Facts for Asked<'_> {
    fn step(&self) -> u64 {
        self.step
    }

    fn is_first(&self) -> Result<bool> {
        {
            let state = self.inner.lock();
            if state.populated || state.trail.last().is_some() {
                return Ok(false);
            }
        }
        Ok(self.inner.look()?.steps.is_empty())
    }

    fn seconds_since_save(&self) -> Result<Option<f64>> {
        let clock = &self.inner.environment.clock;
        let last = self.inner.lock().last_save;
        if let Some(then) = last {
            return Ok(Some(clock.monotonic().saturating_sub(then).as_secs_f64()));
        }
        // The last save was another process's: its record has wall-clock time.
        Ok(self.inner.newest()?.map(|found| {
            let passed = clock.unix_ns().saturating_sub(found.manifest.started_unix_ns);
            Duration::from_nanos(u64::try_from(passed).unwrap_or(0)).as_secs_f64()
        }))
    }

    fn saving(&self) -> bool {
        !self.inner.lock().pending.is_empty()
    }

    fn preempted(&self) -> bool {
        self.preempted
    }

    fn custom(&self, name: &str) -> bool {
        self.custom.get(name).copied().unwrap_or(false)
    }
}
