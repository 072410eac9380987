//! The preparation of a save, for a step of a root or a singular checkpoint. [`plan`] finds every
//! error in the caller's data, before it captures a byte or touches the disk. The planned save is
//! then split into the [`SaveJob`] of a persister and the [`Capturing`] of the caller's thread.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use stepwell_core::format::manifest::Attempt;
use stepwell_core::limits::COMPARED_RANKS;
use stepwell_core::save::{Capture, Flush, SaveOptions};
use stepwell_core::staging::StagingPool;
use stepwell_core::sys::{UserStream, available_memory, can_map};
use stepwell_reshard::partition::Limit;
use stepwell_reshard::subchunk;

use super::Save;
use crate::commit::{CommitPlan, Draft, Existing, ItemPart};
use crate::coordination::team::Team;
use crate::directory_layout;
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::manager::SaveRequest;
use crate::options::{FilesPer, Options, WritersPer};
use crate::state::{self, Census, Writing};

/// Assumed free memory in bytes, if the system does not report it.
const UNKNOWN_MEMORY: u64 = 4 << 30;

/// The facts that a plan needs beside the request.
pub(crate) struct PlanContext<'a> {
    /// The root (or the path of a singular checkpoint), for messages.
    pub root: &'a Path,
    pub environment: &'a Environment,
    pub options: &'a Options,
    pub pool: &'a Arc<StagingPool>,
    /// The ranks that save.
    pub team: &'a Arc<Team>,
    /// The holders of plain leaves, from the last census.
    pub census: Option<&'a Census>,
}

/// The names of a save, and its place in its session.
pub(crate) struct SaveTarget {
    /// The label from which the names of its temporary and its trash are made.
    pub label: String,
    /// The name of its directory after the commit.
    pub target: String,
    pub existing: Existing,
    /// The save counter of the session.
    pub counter: u64,
    /// True for a step of a root, false for a singular checkpoint.
    pub in_root: bool,
    /// True if this rank's leaves have changed since the last census.
    pub stale: bool,
}

/// A planned save: all checks have passed.
pub(crate) struct PlannedSave {
    draft: Draft,
    unwritten: Vec<ItemPart>,
    capture: Capture,
    flush: Flush,
    /// Bytes of all tensors as they will be written.
    tensor_bytes: u64,
    pub cancel: Arc<AtomicBool>,
    streams: Streams,
    /// When the call began.
    pub begun: Instant,
    team: Arc<Team>,
}

/// The caller's streams, by device number.
pub type Streams = BTreeMap<u32, UserStream>;

/// A save in the queue of a persister.
pub(crate) struct SaveJob {
    pub save: Save,
    pub plan: CommitPlan,
    pub draft: Draft,
    /// This rank's tensors in items that other ranks write.
    pub unwritten: Vec<ItemPart>,
    pub flush: Flush,
    pub queued: Instant,
}

/// The capture of a save, or the rest of it after the caller continues.
pub(crate) struct Capturing {
    save: Save,
    capture: Capture,
    streams: Streams,
    /// True if its flush waits for no flush of an earlier save.
    alone: bool,
    /// Bytes of all tensors as they will be written.
    bytes: u64,
}

/// Orders the copies of a planned save after the earlier work on the caller's streams, and
/// allocates staging memory for it.
pub(crate) fn allocate_staging(
    prepared: &mut PlannedSave,
    options: &Options,
    pool: &Arc<StagingPool>,
) -> Result<()> {
    prepared.start_after_streams()?;
    // A late capture allocates its memory later. Two slots are enough until then.
    let hurry = prepared.has_eager();
    ensure_memory(pool, options, if hurry { prepared.tensor_bytes } else { 0 })?;
    if options.detect_torn {
        let step = prepared.draft.step;
        prepared.capture.read_first().map_err(|source| Error::SaveFailed { step, source })?;
    }
    Ok(())
}

/// Plans items, chunks, both halves of the pipeline, and the known part of the manifest. Makes
/// every check of the user's data. Reads no data, and creates nothing.
pub(crate) fn plan(context: &PlanContext<'_>, request: SaveRequest, begun: Instant) -> Result<PlannedSave> {
    let &PlanContext { root, environment, options, pool, team, census } = context;
    let SaveRequest {
        step,
        state,
        unsupported,
        metrics,
        custom_metadata,
        cancel,
        streams,
        drops_providers,
        ..
    } = request;
    let started_unix_ns = environment.clock.unix_ns();
    let cut = subchunk::SubchunkOptions {
        target_bytes: options.chunk_bytes,
        min_row_bytes: options.min_row_bytes,
        min_band_row_bytes: options.min_row_bytes.min(subchunk::SubchunkOptions::HOST.min_band_row_bytes),
    };
    let writing = Writing {
        rank: team.rank(),
        world_size: team.world_size(),
        nodes: team.nodes(),
        limit: options.writers.map(|writers| Limit {
            writers,
            places: match options.writers_per {
                WritersPer::Node => team.nodes(),
                WritersPer::Socket => team.sockets(),
            },
        }),
        compares: options.compare_replicas && team.nodes().len() <= COMPARED_RANKS,
        census,
    };
    let items = state::items(&state, &cut, &writing)?;
    // The plan holds the providers from here on, and releases each as early as it can.
    drop(state);
    let draft = Draft {
        root: root.to_owned(),
        step,
        started_unix_ns,
        plan_hash: items.plan_hash,
        items: items.drafts,
        claims: items.claims,
        unsupported,
        metrics,
        custom_metadata,
    };
    draft.check(team.session(), team.world_size())?;
    let tensor_bytes = items.tensor_bytes;
    let mut save_options = SaveOptions {
        block_bytes: options.block_bytes,
        rank: team.rank(),
        node: match options.files_per {
            FilesPer::Rank => None,
            FilesPer::Node => team.shared_node(),
        },
        file_ids: items.plans.iter().map(|_| environment.rng.next_u128()).collect(),
        stall_timeout: options.stall_timeout,
        queue_depth: options.write_depth(),
        drops_providers,
        cancel: Some(Arc::clone(&cancel)),
        ..SaveOptions::default()
    };
    if let Some(threads) = options.capture_threads {
        save_options.capture_threads = threads.max(1);
    }
    let (capture, flush) = stepwell_core::save::prepare(items.plans, pool, save_options)?;
    Ok(PlannedSave {
        draft,
        unwritten: items.unwritten,
        capture,
        flush,
        tensor_bytes,
        cancel,
        streams,
        begun,
        team: Arc::clone(team),
    })
}

impl PlannedSave {
    /// Orders the copies after the earlier work on the caller's streams.
    fn start_after_streams(&self) -> Result<()> {
        for device in self.capture.devices() {
            if let Some(stream) = self.streams.get(&device.ordinal()) {
                device.send_after(*stream)?;
            }
        }
        Ok(())
    }

    /// True if a part of the capture must happen before the caller continues.
    pub(crate) fn has_eager(&self) -> bool {
        self.capture.has_eager()
    }

    /// Makes the names, and splits the save into its write and its capture.
    pub(crate) fn split(
        self,
        environment: &Environment,
        options: &Options,
        place: SaveTarget,
    ) -> (SaveJob, Capturing) {
        let Self { draft, unwritten, capture, flush, tensor_bytes, cancel, streams, begun, team } = self;
        let session = team.session().to_owned();
        let SaveTarget { label, target, existing, counter, in_root, stale } = place;
        let stall_timeout = options.stall_timeout;
        let plan = CommitPlan {
            step: draft.step,
            temporary: directory_layout::temporary(&label, &session, counter),
            given_up: directory_layout::given_up(&label, &session, counter),
            trash: directory_layout::trash(&label, environment.rng.next_u128()),
            quarantine: directory_layout::quarantine(&target, environment.rng.next_u128()),
            target,
            existing,
            attempt: Attempt { session, counter },
            rank: team.rank(),
            world_size: team.world_size(),
            nodes: team.nodes().into(),
            stall_timeout,
            in_root,
            is_far: in_root
                && options.per_machine
                && team.nodes().get(team.rank() as usize) != team.nodes().first(),
            stale,
        };
        let (progress, devices) = (capture.progress(), capture.devices().to_vec());
        let save = Save::begun(draft.step, progress, devices, begun, cancel, stall_timeout);
        let started = save.clone();
        capture.when_started(Box::new(move || started.set_started()));
        save.set_stats(|stats| stats.files = draft.items.len() as u64);
        let capturing =
            Capturing { save: save.clone(), capture, streams, alone: !in_root, bytes: tensor_bytes };
        (SaveJob { save, plan, draft, unwritten, flush, queued: Instant::now() }, capturing)
    }
}

impl Capturing {
    /// Captures on this thread what the caller may change after the return. The job's flush must
    /// run, or must start to run. Another thread's [`Capturing::run_rest`] does the rest, after all
    /// earlier captures.
    pub(crate) fn run_eager(self) -> Result<(Save, Option<Self>)> {
        let Self { save, capture, streams, alone, bytes } = self;
        let fenced = capture.is_fenced();
        let captured = capture.run_eager();
        // Also after a failure: started copies still read.
        let ordered = if fenced { save.fence(&streams) } else { Ok(()) };
        let captured = captured.and_then(|rest| ordered.map(|()| rest));
        let error = match captured {
            Ok(Some(capture)) => {
                return Ok((save.clone(), Some(Self { save, capture, streams, alone, bytes })));
            }
            Ok(None) => {
                save.set_captured(true);
                return Ok((save, None));
            }
            Err(error) => error,
        };
        save.set_captured(false);
        let cancelled = matches!(error.inner(), stepwell_core::Error::Cancelled(_));
        if cancelled && !save.cancel_flag().load(Ordering::Acquire) {
            // The flush failed first. Its error is the save's outcome, and is reported as every
            // background failure.
            return Ok((save, None));
        }
        // The caller gets the error here, and the cancelled flush ends by itself. A cancelled
        // caller does not wait for it if an earlier save's flush comes first.
        let waits = alone || !cancelled;
        if !waits || save.wait(Some(save.stall_timeout())).is_err() {
            save.acknowledge();
        }
        Err(match error.inner() {
            stepwell_core::Error::Leaf { .. } | stepwell_core::Error::Forked(_) => error.into(),
            _ => Error::SaveFailed { step: save.step(), source: error },
        })
    }

    /// Captures the rest, on this thread. A capture that fails cancels its flush with its error,
    /// which becomes the save's outcome.
    pub(crate) fn run_rest(self, pool: &Arc<StagingPool>, options: &Options) {
        let Self { save, capture, bytes, .. } = self;
        if let Err(error) = ensure_memory(pool, options, bytes) {
            // Two slots exist: the save takes longer, and does not fail.
            tracing::warn!(step = save.step(), %error, "the staging ring stays smaller than wanted: this save takes longer");
        }
        save.set_captured(capture.run().is_ok());
    }
}

/// Grows the staging ring for a state of that size: up to the allowed size, and at least two slots.
/// If no size was requested and the system refuses the memory, the ring stays smaller. The save
/// then takes longer, but does not fail.
pub(crate) fn ensure_memory(pool: &Arc<StagingPool>, options: &Options, state_bytes: u64) -> Result<()> {
    let slot = pool.slot_bytes() as u64;
    let least = 2 * slot;
    let wanted = if let Some(bytes) = options.staging_bytes {
        bytes
    } else {
        let whole = state_bytes.saturating_add(4 << 20).div_ceil(slot).saturating_add(1).saturating_mul(slot);
        if pool.bytes() as u64 >= whole {
            return Ok(());
        }
        // Asking the kernel takes longer than planning a small save.
        let is_small = whole <= least;
        if is_small { least } else { whole.min(available_memory().unwrap_or(UNKNOWN_MEMORY) / 4) }
    };
    let wanted = wanted.max(least);
    let refused = |source| Error::NoStagingMemory { wanted, there: pool.bytes() as u64, source };
    let bytes = usize::try_from(wanted).map_err(|_| {
        Error::Invalid(format!("staging_bytes={wanted} is more than this machine can address: pass fewer"))
    })?;
    let mut more = bytes.saturating_sub(pool.bytes());
    if more == 0 {
        return Ok(());
    }
    // Ask for all of it first: a ring never shrinks again.
    if options.staging_bytes.is_some() {
        can_map(more).map_err(refused)?;
        return pool.ensure(bytes).map_err(refused);
    }
    let few = 2 * pool.slot_bytes();
    // Leave half as much again for other memory of the process, mainly for threads.
    while more > few && can_map(more.saturating_add(more / 2)).is_err() {
        more = (more / 2).max(few);
    }
    match pool.ensure(bytes.min(pool.bytes() + more)) {
        Err(error) if pool.bytes() < few => Err(refused(error)),
        Err(error) => {
            tracing::warn!(wanted, there = pool.bytes(), %error, "the staging ring stays smaller than wanted: saves take longer");
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}
