//! `save`: everything that can be wrong is found before it returns; then the bytes are captured on the caller's thread, while the persister writes them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use stepwell_core::deadline::deadline_after;
use stepwell_core::format::manifest::Attempt;
use stepwell_core::save::{Capture, Flush, SaveOptions, prepare};
use stepwell_core::staging::StagingPool;
use stepwell_reshard::subchunk;

use super::{Exists, Inner, Manager, SaveRequest, State};
use crate::commit::{Draft, Existing, Plan};
use crate::directory_layout;
use crate::discovery::damage;
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::options::Options;
use crate::persist::Job;
use crate::save::{Refusal, Save};
use crate::save_policy::Context;
use crate::state::{self, StateSource};
use crate::step_name::MAX_STEP;

/// What `save` would do with a step.
#[derive(Clone, Debug)]
pub enum Decision {
    /// It would save.
    Save,
    /// It would save, and replace the step that is there.
    Replace,
    /// It would do nothing.
    Refuse(Refusal),
    /// This step is being saved already, and `exists="skip"`.
    Pending(Save),
}

impl Manager {
    /// Whether the policy would save this step now. Answers of custom policies come by their name.
    pub fn should_save(&self, step: u64, custom: &BTreeMap<String, bool>) -> Result<bool> {
        self.inner.check_usable()?;
        Ok(!self.inner.options.read_only && self.inner.policy_says_yes(step, custom)?)
    }

    /// What `save` would do, before the state is even looked at: so a callable state runs only where it is needed. Raises a failure that nobody
    /// has seen, a step that exists, and one below the latest.
    pub fn decide(
        &self,
        step: u64,
        force: bool,
        exists: Exists,
        custom: &BTreeMap<String, bool>,
    ) -> Result<Decision> {
        self.inner.check_usable()?;
        self.inner.raise_unseen()?;
        self.inner.decide(step, force, exists, custom)
    }

    /// Saves a state. Returns when every byte is captured: the caller may change the state then. The commit follows in the background; its outcome
    /// comes through the handle.
    pub fn save(&self, request: SaveRequest) -> Result<Save> {
        self.save_with(request, &BTreeMap::new())
    }

    /// [`Manager::save`], with the answers of custom policies.
    pub fn save_with(&self, request: SaveRequest, custom: &BTreeMap<String, bool>) -> Result<Save> {
        let begun = Instant::now();
        let inner = &self.inner;
        inner.check_usable()?;
        inner.raise_unseen()?;
        let existing = match inner.decide(request.step, request.force, request.exists, custom)? {
            Decision::Save => Existing::Refuse,
            Decision::Replace => Existing::Replace,
            Decision::Refuse(refusal) => return Ok(Save::refused(request.step, refusal)),
            Decision::Pending(save) => return Ok(save),
        };
        let started_unix_ns = inner.environment.clock.unix_ns();
        let (mut draft, capture, flush) =
            job_parts(&inner.environment, &inner.options, &inner.pool, request.state, &request.cancel)?;
        draft.root.clone_from(&inner.path);
        draft.step = request.step;
        draft.started_unix_ns = started_unix_ns;
        draft.metrics = request.metrics;
        draft.custom_metadata = request.custom_metadata;
        check_draft(&draft)?;
        let _turn = inner.wait_for_a_place(request.step, begun, &request.cancel)?;

        let save = Save::begun(request.step, capture.progress(), begun, Arc::clone(&request.cancel));
        save.set_stats(|stats| stats.files = draft.items.len() as u64);
        inner.enqueue(&save, existing, draft, flush)?;
        match capture.run() {
            Ok(_) => {
                save.set_captured(true);
                Ok(save)
            }
            // The flush failed first; its error is the save's outcome, and told as every failure in the background is.
            Err(stepwell_core::Error::Cancelled(_)) if !request.cancel.load(Ordering::Acquire) => {
                save.set_captured(false);
                Ok(save)
            }
            // The caller is told here, and not kept: the flush may stand behind an earlier save's.
            Err(error @ stepwell_core::Error::Cancelled(_)) => {
                save.set_captured(false);
                save.acknowledge();
                Err(Error::SaveFailed { step: request.step, source: error })
            }
            Err(error) => {
                save.set_captured(false);
                // The caller has the cause; the flush that was cancelled by it ends by itself.
                let ended = save.wait(Some(inner.options.stall_timeout));
                if ended.is_none() {
                    save.acknowledge();
                }
                Err(match error {
                    error @ (stepwell_core::Error::Leaf { .. } | stepwell_core::Error::Forked(_)) => {
                        error.into()
                    }
                    source => Error::SaveFailed { step: request.step, source },
                })
            }
        }
    }

    /// Grows the staging memory for a state of so many bytes, so that the first save does not pay for it.
    pub fn prepare(&self, bytes: u64) -> Result<()> {
        self.inner.check_usable()?;
        pool_for(&self.inner.pool, &self.inner.options, bytes)
    }

    /// Asks for preemption: the next step that is asked about is the one at which the job counts as preempted.
    pub fn request_preemption(&self) {
        if self.inner.birth.is_here() {
            self.inner.lock().preemption_asked = true;
        }
    }

    /// Whether the job counts as preempted at this step.
    pub fn reached_preemption(&self, step: u64) -> Result<bool> {
        self.inner.check_usable()?;
        Ok(self.inner.preempted(step))
    }

    /// Says that a step was restored: [`Manager::next_step`] goes on from it.
    pub fn restored(&self, step: u64) {
        if self.inner.birth.is_here() {
            self.inner.lock().last = Some(step);
        }
    }
}

impl Inner {
    fn preempted(&self, step: u64) -> bool {
        let mut state = self.lock();
        if state.preemption_asked && state.preempted.is_none() {
            state.preempted = Some(step);
        }
        state.preempted.is_some_and(|from| step >= from)
    }

    fn policy_says_yes(&self, step: u64, custom: &BTreeMap<String, bool>) -> Result<bool> {
        let preempted = self.preempted(step);
        let latest = self.latest_or_pending()?;
        let now = self.environment.clock.monotonic();
        let (saving, since) = {
            let state = self.lock();
            (!state.pending.is_empty(), state.last_save.map(|then| now.saturating_sub(then).as_secs_f64()))
        };
        let since = match since {
            Some(since) => Some(since),
            // The last save was another process's: its record has wall-clock time.
            None => self.newest()?.map(|found| {
                let passed = self.environment.clock.unix_ns().saturating_sub(found.manifest.started_unix_ns);
                Duration::from_nanos(u64::try_from(passed).unwrap_or(0)).as_secs_f64()
            }),
        };
        let context =
            Context { step, latest, seconds_since_save: since, saving, preempted, custom: custom.clone() };
        Ok(self.options.save_policy.should_save(&context))
    }

    fn decide(
        &self,
        step: u64,
        force: bool,
        exists: Exists,
        custom: &BTreeMap<String, bool>,
    ) -> Result<Decision> {
        if step > MAX_STEP {
            return Err(Error::Invalid(format!("step {step} is more than 2^63 - 1, the largest there is")));
        }
        if self.options.read_only {
            return Ok(Decision::Refuse(Refusal::ReadOnly));
        }
        let pending = self.lock().pending.iter().find(|save| save.step() == step).cloned();
        // After it, a step that was uncertain is there, or is to be replaced: whichever of the two a power cut leaves, it is a whole one.
        let uncertain = pending.is_none() && self.settle_uncertain(step);
        // What has lost files is no step any more: a good one may take its number, and the commit sets the rest aside.
        let whole = || -> Result<bool> {
            let Some(found) = self.committed(step)? else { return Ok(false) };
            Ok(damage(&*self.root, &found.name, &found.manifest)?.is_none())
        };
        let there = pending.is_some() || whole()?;
        // An existing step is told before an order: a final save that repeats the last one is no step back.
        if there && exists == Exists::Skip {
            return Ok(pending.map_or(Decision::Refuse(Refusal::Exists), Decision::Pending));
        }
        if !force && !self.policy_says_yes(step, custom)? {
            return Ok(Decision::Refuse(Refusal::Policy));
        }
        if there && exists == Exists::Error {
            return Err(Error::StepExists { step, root: self.path.clone() });
        }
        if let Some(latest) = self.latest_or_pending()?.filter(|&latest| step < latest) {
            return Err(Error::StepOrder { step, latest });
        }
        // Asked for even where nothing is there now: a pending save of this step may stand there by then.
        Ok(if exists == Exists::Replace || uncertain { Decision::Replace } else { Decision::Save })
    }

    /// Blocks while another save is captured (two at once would starve each other: the later one takes slots that only its flush frees, which stands
    /// behind the earlier one's), and while `max_pending` saves wait beside the one that is being written; as long as there is progress.
    fn wait_for_a_place(&self, step: u64, begun: Instant, cancel: &AtomicBool) -> Result<Turn<'_>> {
        let mut state = self.lock();
        let mut told = false;
        let mut seen = None;
        let mut deadline = deadline_after(self.options.stall_timeout);
        while state.capturing || state.pending.len() > self.options.max_pending {
            if cancel.load(Ordering::Acquire) {
                let source = stepwell_core::Error::Cancelled("its caller cancelled it".to_owned());
                return Err(Error::SaveFailed { step, source });
            }
            let first = state.pending.first();
            let now = first.map(|first| (first.step(), first.bytes_done()));
            if !std::mem::replace(&mut told, true) {
                tracing::info!(step, "this save waits until an earlier one has ended");
            }
            if now != seen {
                seen = now;
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
        state.capturing = true;
        Ok(Turn(self))
    }

    fn enqueue(self: &Arc<Self>, save: &Save, existing: Existing, draft: Draft, flush: Flush) -> Result<()> {
        let step = save.step();
        let now = self.environment.clock.monotonic();
        let mut state = self.lock();
        if state.closed {
            return Err(Error::Closed { root: self.path.clone() });
        }
        let counter = state.counter;
        state.counter += 1;
        let label = directory_layout::label(step);
        let plan = Plan {
            step,
            temporary: directory_layout::temporary(&label, &self.session, counter),
            target: self.names.format(step),
            existing,
            trash: directory_layout::trash(&label, self.environment.rng.next_u128()),
            quarantine: directory_layout::quarantine(
                &self.names.format(step),
                self.environment.rng.next_u128(),
            ),
            attempt: Attempt { session: self.session.clone(), counter },
            rank: self.environment.coordinator.rank(),
            world_size: self.environment.coordinator.world_size(),
            stall_timeout: self.options.stall_timeout,
            fenced: true,
        };
        self.start_persister(&mut state)?;
        state.last_save = Some(now);
        state.last = Some(step);
        state.pending.push(save.clone());
        state.queue.push_back(Job { save: save.clone(), plan, draft, flush, queued: Instant::now() });
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    fn start_persister(self: &Arc<Self>, state: &mut State) -> Result<()> {
        if state.thread.is_none() {
            let inner = Arc::clone(self);
            let thread = std::thread::Builder::new()
                .name("stepwell-persist".to_owned())
                .spawn(move || inner.persist())
                .map_err(|error| stepwell_core::Error::io("start a thread for", &self.path, error))?;
            state.thread = Some(thread);
        }
        Ok(())
    }
}

/// The right to capture; one save of a manager has it at a time.
struct Turn<'a>(&'a Inner);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.lock().capturing = false;
        self.0.changed.notify_all();
    }
}

/// How tensors are cut.
fn cut_options(options: &Options) -> subchunk::Options {
    subchunk::Options { target_bytes: options.chunk_bytes, min_row_bytes: options.min_row_bytes }
}

/// Plans a save: items, chunks, both halves of the pipeline. Every check of the user's data is in here; nothing is written.
#[expect(
    clippy::needless_pass_by_value,
    reason = "the plan holds the providers from here on, and lets go of them early"
)]
pub(crate) fn job_parts(
    environment: &Environment,
    options: &Options,
    pool: &Arc<StagingPool>,
    state: StateSource,
    cancel: &Arc<AtomicBool>,
) -> Result<(Draft, Capture, Flush)> {
    let items = state::items(&state, &cut_options(options))?;
    // Planning, headers and footers come on top of the tensors.
    pool_for(pool, options, items.tensor_bytes)?;
    let mut save_options = SaveOptions {
        block_bytes: options.block_bytes,
        rank: environment.coordinator.rank(),
        file_ids: items.plans.iter().map(|_| environment.rng.next_u128()).collect(),
        stall_timeout: options.stall_timeout,
        queue_depth: options.queue_depth,
        cancel: Some(Arc::clone(cancel)),
        ..SaveOptions::default()
    };
    if let Some(threads) = options.capture_threads {
        save_options.capture_threads = threads.max(1);
    }
    let (capture, flush) = prepare(items.plans, pool, save_options)?;
    let draft = Draft { plan_hash: items.plan_hash, items: items.drafts, ..Draft::default() };
    Ok((draft, capture, flush))
}

/// Makes sure that there is staging memory for a state of so many bytes: all of it where that is allowed, and two slots at least.
fn pool_for(pool: &Arc<StagingPool>, options: &Options, state_bytes: u64) -> Result<()> {
    let slot = pool.slot_bytes() as u64;
    let wanted = if let Some(bytes) = options.staging_bytes {
        bytes
    } else {
        let whole = state_bytes.saturating_add(4 << 20).div_ceil(slot).saturating_add(1).saturating_mul(slot);
        whole.min(free_memory() / 4)
    };
    let bytes =
        usize::try_from(wanted.max(2 * slot)).map_err(|_| Error::Invalid("staging_bytes".to_owned()))?;
    if bytes > pool.bytes() {
        pool.ensure(bytes)?;
    }
    Ok(())
}

/// Bytes of memory that may be taken without swapping, as the system says.
fn free_memory() -> u64 {
    const GUESS: u64 = 4 << 30;
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    text.lines()
        .find_map(|line| {
            line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
        })
        .map_or(GUESS, |kilobytes| kilobytes.saturating_mul(1024))
}

/// What the manifest would refuse at the commit is refused now.
fn check_draft(draft: &Draft) -> Result<()> {
    use stepwell_core::limits::MAX_METADATA_BYTES;
    let bytes = serde_json::to_vec(&draft.custom_metadata).map_or(u64::MAX, |bytes| bytes.len() as u64);
    if bytes > MAX_METADATA_BYTES {
        return Err(stepwell_core::Error::Limit {
            what: "the size of custom_metadata in bytes".to_owned(),
            found: bytes,
            limit: MAX_METADATA_BYTES,
        }
        .into());
    }
    Ok(())
}
