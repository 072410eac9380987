//! Singular checkpoints: one state under one path, by the same machine. The temporary is a sibling of the path.
//!
//! There is no root here, and no writer's lock. What a killed writer left can therefore not be told from what a live one is writing: it stays, under its own name, until
//! someone who knows calls [`sweep`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use stepwell_core::format::manifest::Attempt;
use stepwell_core::io::EntryKind;

use crate::commit::{Existing, Plan, aside};
use crate::directory_layout;
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
    let pool = environment.pool();
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
            let deleter = Arc::new(Deleter::new(Arc::clone(&parent_dir)));
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

/// Removes what killed writers left beside a path: trash, and temporaries of sessions that `is_dead` vouches for. Nothing is removed by its age.
pub fn sweep(path: &Path, environment: &Environment, is_dead: impl Fn(&str) -> bool) -> Result<Vec<String>> {
    let (parent, name) = split(path)?;
    let parent = match environment.disk.open_dir(parent) {
        Ok(parent) => parent,
        Err(error) if error.is_not_found() => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let (mut renames, mut removed) = (Vec::new(), Vec::new());
    for entry in parent.entries()?.into_iter().filter(|entry| entry.kind == EntryKind::Dir) {
        if directory_layout::is_trash_of(&entry.name, &name) {
            removed.push(entry.name);
        } else if directory_layout::session_of_temporary(&entry.name, &name).is_some_and(|s| is_dead(&s)) {
            renames.push((entry.name, directory_layout::trash(&name, environment.rng.next_u128())));
        }
    }
    // Whoever left this may have been killed before it synced its renames; one that builds on them may last longer than they do.
    if !(removed.is_empty() && renames.is_empty()) {
        parent.sync()?;
    }
    aside::retire_all(&*parent, &renames)?;
    let deleter = Deleter::new(Arc::clone(&parent));
    deleter.enqueue(removed.iter().cloned());
    let (old, trash): (Vec<_>, Vec<_>) = renames.into_iter().unzip();
    deleter.enqueue(trash);
    deleter.stop(Duration::from_secs(600));
    removed.extend(old);
    Ok(removed)
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
