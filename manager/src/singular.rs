//! Singular checkpoints: one state under one path, by the same machine. The temporary is a sibling
//! of the path.
//!
//! There is no root here, and no writer's lock. A writer holds the lease of its temporary while it
//! lives. The next save to the same path removes temporaries without a held lease; if the path is
//! inside a root, so does that root's next writer. On a file system without locks they stay.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use stepwell_core::io::{Dir, EntryKind};
use stepwell_core::sys::spawn;

use crate::commit::{Existing, aside};
use crate::coordination::team::Team;
use crate::directory_layout::{self, CONTROL, OwnName};
use crate::discovery::read_manifest;
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::guard::guarded;
use crate::manager::{Exists, SaveRequest};
use crate::options::Options;
use crate::retire::Deleter;
use crate::save::Save;
use crate::save::job::{self, Place, Scene};
use crate::save::persist;

/// Saves a state under a path. Returns when it is captured. The outcome comes through the handle.
/// The manifest records the request's step, although it has no meaning here.
pub fn save(path: &Path, request: SaveRequest, options: &Options, environment: &Environment) -> Result<Save> {
    let begun = Instant::now();
    options.check()?;
    let (parent, name) = split(path)?;
    let parent_dir = if options.create {
        environment.disk.create_dir_all(parent)?
    } else {
        environment.disk.open_dir(parent)?
    };
    let there = parent_dir.stat(&name)?.is_some();
    let existing = match (there, request.exists) {
        (true, Exists::Skip) => return Ok(Save::refused(request.step, crate::save::Refusal::Exists)),
        (true, Exists::Error) => {
            return Err(Error::PathExists { path: path.to_owned() });
        }
        (true, Exists::Replace) => {
            // Only a checkpoint is ever replaced: what else is there is somebody's.
            if let Err(error) = read_manifest(&*parent_dir, &name) {
                let path = path.to_owned();
                return Err(Error::NotAStep { path, reason: format!("it is not replaced: {error}") });
            }
            Existing::Replace
        }
        (false, _) => Existing::Refuse,
    };
    let pool = environment.pool();
    let team = Arc::new(Team::alone(environment.hex_id()));
    let scene = Scene { root: path, environment, options, pool: &pool, team: &team, census: None };
    let mut prepared = job::plan(&scene, request, begun)?;
    job::make_ready(&mut prepared, options, &pool)?;
    let (label, shown) = (directory_layout::label_of_path(&name), path.to_owned());
    let place = Place { label, target: name, existing, counter: 0, fenced: false, stale: false };
    let (job, capturing) = prepared.split(environment, options, place);
    let world = environment.clone();
    spawn("stepwell-persist", move || {
        let deleter = Arc::new(Deleter::new(
            Arc::clone(&parent_dir),
            Arc::clone(&world.clock),
            // No writer comes back here later: where there are no locks, a reader of what is
            // replaced is told that it is gone.
            Duration::ZERO,
        ));
        // Around the save itself nothing may keep it from being settled.
        let found = guarded("the removal of leftovers", || leftovers(&*parent_dir, &job.plan.target, &world));
        match found.and_then(|trash| trash) {
            Ok(trash) => deleter.enqueue(trash),
            Err(error) => {
                tracing::warn!(%error, "what a killed save left beside this path stays for now");
            }
        }
        let (save, ended) = persist::run(job, &parent_dir, &world, &team, &deleter, &|| ());
        let cleaned = guarded("the deleter", || {
            deleter.enqueue(ended.replaced);
            deleter.stop(Duration::from_secs(600));
        });
        if let Err(error) = cleaned {
            tracing::warn!(%error, "what was replaced stays for now");
        }
        let callbacks = save.settle(ended.outcome);
        save.call(callbacks);
        persist::log_commit(&save, &team, "a checkpoint", &shown);
    })
    .map_err(|error| stepwell_core::Error::io("start a thread for", path, error))?;
    let (save, rest) = capturing.run()?;
    if let Some(rest) = rest {
        let options = options.clone();
        spawn("stepwell-capture", move || rest.run(&pool, &options))
            .map_err(|error| stepwell_core::Error::io("start a thread for", path, error))?;
    }
    Ok(save)
}

/// Removes what killed writers left beside a path, as the next save to it does; gives the names.
pub fn sweep(path: &Path, environment: &Environment) -> Result<Vec<String>> {
    let (parent, name) = split(path)?;
    let parent = match environment.disk.open_dir(parent) {
        Ok(parent) => parent,
        Err(error) if error.is_not_found() => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let trash = leftovers(&*parent, &name, environment)?;
    let deleter = Deleter::new(Arc::clone(&parent), Arc::clone(&environment.clock), Duration::ZERO);
    deleter.enqueue(trash.iter().cloned());
    deleter.stop(Duration::from_secs(600));
    Ok(trash)
}

/// Takes out of sight what killed writers left beside a path: temporaries (a replaced checkpoint is
/// one) whose lease nobody holds. Gives all trash of that path, ready to be deleted. Nothing is
/// removed by its age, and nothing where there are no locks.
fn leftovers(parent: &dyn Dir, name: &str, environment: &Environment) -> stepwell_core::Result<Vec<String>> {
    let mut trash = Vec::new();
    let mut found = Vec::new();
    if parent.stat(CONTROL)?.is_some() {
        // A root: its writer's temporaries are spoken for by its lock, and its next writer removes
        // what is left there, also of dead saves to a path.
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
        // One of them may be what a replacement has just swapped out: nothing of it is touched
        // before that swap is durable.
        parent.sync()?;
    }
    for temporary in found {
        let label = directory_layout::label_of_path(name);
        let new = directory_layout::trash(&label, environment.rng.next_u128());
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

pub(crate) fn split(path: &Path) -> Result<(&Path, String)> {
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
