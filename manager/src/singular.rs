//! Singular checkpoints: one state under one path, by the same machine. The temporary is a sibling of the path.
//!
//! There is no root here, and no writer's lock. So a writer holds the lease of its temporary as long as it lives, and the next save to the same path removes the
//! temporaries whose lease nobody holds. On a file system without locks they stay.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use stepwell_core::format::manifest::Attempt;
use stepwell_core::io::{Dir, EntryKind};
use stepwell_core::staging::StagingPool;

use crate::commit::{Existing, Plan, aside};
use crate::directory_layout::{self, CONTROL, OwnName};
use crate::discovery::read_manifest;
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::manager::{Exists, job_parts};
use crate::options::Options;
use crate::persist::{self, Job};
use crate::retire::Deleter;
use crate::save::Save;
use crate::state::StateSource;

/// What is saved under a path.
pub struct SingularRequest {
    /// The directory that the checkpoint becomes.
    pub path: PathBuf,
    /// The state.
    pub state: StateSource,
    /// Recorded as the step's number; 0 where it means nothing.
    pub step: u64,
    /// Metrics.
    pub metrics: BTreeMap<String, f64>,
    /// Metadata.
    pub custom_metadata: serde_json::Value,
    /// What to do where a checkpoint is there.
    pub exists: Exists,
    /// As [`crate::SaveRequest::cancel`].
    pub cancel: Arc<AtomicBool>,
}

impl SingularRequest {
    /// A save of a state, with nothing else said.
    pub fn new(path: impl Into<PathBuf>, state: StateSource) -> Self {
        Self {
            path: path.into(),
            state,
            step: 0,
            metrics: BTreeMap::new(),
            custom_metadata: serde_json::Value::Null,
            exists: Exists::Error,
            cancel: Arc::default(),
        }
    }
}

/// Saves a state under a path. Returns when it is captured; the outcome comes through the handle.
pub fn save(request: SingularRequest, options: &Options, environment: &Environment) -> Result<Save> {
    let begun = Instant::now();
    options.check()?;
    let (parent, name) = split(&request.path)?;
    let parent_dir = if options.create {
        environment.disk.create_dir_all(parent)?
    } else {
        environment.disk.open_dir(parent)?
    };
    let there = parent_dir.stat(&name)?.is_some();
    let existing = match (there, request.exists) {
        (true, Exists::Skip) => return Ok(Save::refused(request.step, crate::save::Refusal::Exists)),
        (true, Exists::Error) => {
            return Err(Error::StepExists { step: request.step, root: request.path.clone() });
        }
        (true, Exists::Replace) => {
            // Only a checkpoint is ever replaced: what else is there is somebody's.
            if let Err(error) = read_manifest(&*parent_dir, &name) {
                let path = request.path.clone();
                return Err(Error::NotAStep { path, reason: format!("it is not replaced: {error}") });
            }
            Existing::Replace
        }
        (false, _) => Existing::Refuse,
    };
    let pool = StagingPool::shared();
    let started_unix_ns = environment.clock.unix_ns();
    let (mut draft, capture, flush) = job_parts(environment, options, &pool, request.state, &request.cancel)?;
    draft.root.clone_from(&request.path);
    draft.step = request.step;
    draft.started_unix_ns = started_unix_ns;
    draft.metrics = request.metrics;
    draft.custom_metadata = request.custom_metadata;
    let session = environment.hex_id();
    let plan = Plan {
        step: request.step,
        temporary: directory_layout::temporary(&name, &session, 0),
        trash: directory_layout::trash(&name, environment.rng.next_u128()),
        quarantine: directory_layout::quarantine(&name, environment.rng.next_u128()),
        target: name,
        existing,
        attempt: Attempt { session, counter: 0 },
        rank: environment.coordinator.rank(),
        world_size: environment.coordinator.world_size(),
        stall_timeout: options.stall_timeout,
        fenced: false,
    };
    let save = Save::begun(request.step, capture.progress(), begun, Arc::clone(&request.cancel));
    save.set_stats(|stats| stats.files = draft.items.len() as u64);
    let job = Job { save: save.clone(), plan, draft, flush, queued: Instant::now() };
    let world = environment.clone();
    std::thread::Builder::new()
        .name("stepwell-persist".to_owned())
        .spawn(move || {
            let deleter = Arc::new(Deleter::new(
                Arc::clone(&parent_dir),
                Arc::clone(&world.clock),
                // No writer comes back here later: where there are no locks, a reader of what is replaced is told that it is gone.
                Duration::ZERO,
            ));
            match sweep(&*parent_dir, &job.plan.target, &world) {
                Ok(trash) => deleter.enqueue(trash),
                Err(error) => {
                    tracing::warn!(%error, "what a killed save left beside this path stays for now");
                }
            }
            let (save, ended) = persist::run(job, &parent_dir, &world, &deleter);
            deleter.enqueue(ended.replaced);
            deleter.stop(Duration::from_secs(600));
            let callbacks = save.settle(ended.outcome);
            save.call(callbacks);
        })
        .map_err(|error| stepwell_core::Error::io("start a thread for", &request.path, error))?;
    match capture.run() {
        Ok(_) => {
            save.set_captured(true);
            Ok(save)
        }
        // The flush failed first; its error is the save's outcome.
        Err(stepwell_core::Error::Cancelled(_)) if !request.cancel.load(Ordering::Acquire) => {
            save.set_captured(false);
            Ok(save)
        }
        Err(error) => {
            save.set_captured(false);
            save.wait(Some(options.stall_timeout));
            Err(match error {
                error @ stepwell_core::Error::Leaf { .. } => error.into(),
                source => Error::SaveFailed { step: request.step, source },
            })
        }
    }
}

/// Takes out of sight what killed writers left beside a path: temporaries (a replaced checkpoint is one) whose lease nobody holds. Gives all trash of that path, ready to
/// be deleted. Nothing is removed by its age, and nothing where there are no locks.
fn sweep(parent: &dyn Dir, name: &str, environment: &Environment) -> stepwell_core::Result<Vec<String>> {
    let mut trash = Vec::new();
    let mut found = Vec::new();
    if parent.stat(CONTROL)?.is_some() {
        // A root: its writer's temporaries are spoken for by its lock, and its next writer removes what is left there.
        return Ok(trash);
    }
    for entry in parent.entries()?.into_iter().filter(|entry| entry.kind == EntryKind::Dir) {
        match directory_layout::parse(&entry.name) {
            Some(OwnName::Temporary { label, .. }) if directory_layout::is_label_of(&label, name) => {
                found.push(entry.name);
            }
            Some(OwnName::Trash { label }) if directory_layout::is_label_of(&label, name) => {
                trash.push(entry.name);
            }
            _ => {}
        }
    }
    if !found.is_empty() {
        // One of them may be what a replacement has just swapped out: nothing of it is touched before that swap is durable.
        parent.sync()?;
    }
    for temporary in found {
        let new = directory_layout::trash(name, environment.rng.next_u128());
        if aside::retire_abandoned(parent, &temporary, &new)? {
            tracing::info!(%temporary, "removing what a killed save left");
            trash.push(new);
        }
    }
    if !trash.is_empty() {
        parent.sync()?;
    }
    Ok(trash)
}

fn split(path: &Path) -> Result<(&Path, String)> {
    let bad = || Error::Invalid(format!("{} cannot be the path of a checkpoint", path.display()));
    let name = path.file_name().and_then(|name| name.to_str()).ok_or_else(bad)?;
    if name.starts_with('.') {
        return Err(Error::Invalid(format!(
            "{}: a checkpoint's name does not start with a dot; those names are temporary ones",
            path.display()
        )));
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((parent, name.to_owned()))
}
