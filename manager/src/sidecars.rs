//! Sidecars: files that belong to a step, and come after its commit. They are in directories of the
//! root, and keyed by attempt, so they stay with a step that a rewind sets aside.
//!
//! Each call writes one file with a unique name, by a rename. So a process that adds a sidecar
//! needs no lock, and never conflicts with the trainer. Sidecars never change. They go with their
//! step.

use std::collections::HashSet;

use serde::Deserialize;
use stepwell_core::format::manifest::Attempt;
use stepwell_core::format::sealed_text;
use stepwell_core::io::Dir;
use stepwell_core::limits::MAX_METADATA_BYTES;

use crate::delete_tree::ignore_missing;
use crate::directory_layout::{self, METRICS, OwnName, TRACES, control};
use crate::discovery::{Listing, is_not_a_step, read_manifest};
use crate::environment::Environment;
use crate::error::Result;
use crate::step_name::StepName;

/// The directories of sidecars.
const DIRS: [&str; 2] = [METRICS, TRACES];

/// Writes a sidecar of a committed step into its directory.
pub(crate) fn write(dir: &dyn Dir, attempt: &Attempt, bytes: &[u8], environment: &Environment) -> Result<()> {
    let name = format!("{}-{}-{}.json", attempt.session, attempt.counter, environment.hex_id());
    dir.replace_file(&name, &format!(".{name}.new"), bytes)?;
    Ok(())
}

/// Removes the sidecars of deleted steps. A failure is no error, since they concern no existing
/// step.
pub(crate) fn remove(root: &dyn Dir, attempts: &[Attempt]) {
    if attempts.is_empty() {
        return;
    }
    let removed = |dir: &str| -> stepwell_core::Result<()> {
        let dir = root.open_dir(&control(dir))?;
        for entry in dir.unsorted_entries()? {
            if attempt_of(&entry.name).is_some_and(|attempt| attempts.contains(&attempt)) {
                dir.remove_file(&entry.name)?;
            }
        }
        Ok(())
    };
    for dir in DIRS {
        if let Err(error) = ignore_missing(removed(dir)) {
            tracing::debug!(%error, "removing the {dir} of a deleted step failed");
        }
    }
}

/// Removes, when a writer opens the root, sidecars of attempts that are no longer in the root, and
/// half-written ones. Such steps were deleted by hand, or retired by a writer that died before it
/// removed the sidecars. It keeps the sidecars of steps, branches and quarantined directories. If a
/// manifest there is unreadable, it keeps all sidecars of that number. `recorded` is the root's
/// former pattern of names. Returns the number of removed files. After an error, the next writer
/// removes the rest.
pub fn reclaim(root: &dyn Dir, names: &StepName, recorded: &StepName, listing: &Listing) -> Result<usize> {
    DIRS.iter().try_fold(0, |removed, dir| Ok(removed + reclaim_in(root, dir, names, recorded, listing)?))
}

fn reclaim_in(
    root: &dyn Dir,
    dir: &str,
    names: &StepName,
    recorded: &StepName,
    listing: &Listing,
) -> Result<usize> {
    let dir = match root.open_dir(&control(dir)) {
        Ok(dir) => dir,
        Err(error) if error.is_not_found() => return Ok(0),
        Err(error) => return Err(error.into()),
    };
    let of =
        |name: &str| attempt_of(name.strip_prefix('.').and_then(|n| n.strip_suffix(".new")).unwrap_or(name));
    let sidecars: Vec<(String, Attempt)> =
        dir.entries()?.into_iter().filter_map(|entry| of(&entry.name).map(|of| (entry.name, of))).collect();
    if sidecars.is_empty() {
        return Ok(0);
    }
    let Some(alive) = alive(root, names, recorded, listing)? else { return Ok(0) };
    let mut removed = 0;
    for (name, attempt) in sidecars {
        if alive.attempts.contains(&attempt) {
            continue;
        }
        // If all manifests are readable, the numbers are not needed.
        if !alive.numbers.is_empty() && step_of(&*dir, &name).is_none_or(|step| alive.numbers.contains(&step))
        {
            continue;
        }
        ignore_missing(dir.remove_file(&name))?;
        removed += 1;
    }
    Ok(removed)
}

/// The possible owners of sidecars.
#[derive(Default)]
struct Alive {
    attempts: HashSet<Attempt>,
    /// The numbers of unreadable steps.
    numbers: HashSet<u64>,
}

/// Returns the possible owners of sidecars. `None` if a directory is unreadable and its number
/// unknown.
fn alive(root: &dyn Dir, names: &StepName, recorded: &StepName, listing: &Listing) -> Result<Option<Alive>> {
    let number = |name: &str| names.parse(name).or_else(|| recorded.parse(name));
    let mut alive = Alive::default();
    alive.attempts.extend(listing.steps.values().map(|found| found.manifest.attempt.clone()));
    let mut others: Vec<(String, Option<u64>)> = listing
        .quarantined
        .iter()
        .map(|quarantined| (quarantined.name.clone(), number(&quarantined.name)))
        .collect();
    for entry in root.entries()? {
        match directory_layout::parse(&entry.name) {
            Some(OwnName::Branch { step_name, .. }) => others.push((entry.name, number(&step_name))),
            Some(OwnName::Quarantine { label }) => others.push((entry.name, number(&label))),
            Some(OwnName::Copy { session, counter, .. } | OwnName::Part { session, counter, .. }) => {
                alive.attempts.insert(Attempt { session, counter });
            }
            None if names.parse(&entry.name).is_none() => {
                if let Some(step) = recorded.parse(&entry.name) {
                    others.push((entry.name, Some(step)));
                }
            }
            _ => {}
        }
    }
    for (name, number) in others {
        match (read_manifest(root, &name), number) {
            (Ok(manifest), _) => drop(alive.attempts.insert(manifest.attempt)),
            (Err(error), _) if !error.is_gone() && !is_not_a_step(&error) => return Err(error.into()),
            // It is damaged, or has no manifest yet, as during a copy.
            (Err(_), Some(number)) => drop(alive.numbers.insert(number)),
            (Err(error), None) if error.is_gone() => {}
            (Err(_), None) => return Ok(None),
        }
    }
    Ok(Some(alive))
}

/// Returns the attempt of a sidecar's name.
pub(crate) fn attempt_of(name: &str) -> Option<Attempt> {
    let mut parts = name.strip_suffix(".json")?.split('-');
    let session = parts.next().filter(|s| s.len() == 32 && s.bytes().all(|b| b.is_ascii_hexdigit()))?;
    let counter = parts.next()?.parse().ok()?;
    parts.next()?;
    Some(Attempt { session: session.to_owned(), counter })
}

/// The number of a sidecar's step. `None` if it is unreadable, or has no number.
fn step_of(dir: &dyn Dir, name: &str) -> Option<u64> {
    #[derive(Deserialize)]
    struct OfStep {
        step: u64,
    }
    let bytes = dir.read_file(name, MAX_METADATA_BYTES).ok()?;
    // One that was not finished has no checksum.
    let body = sealed_text::unseal(&bytes).unwrap_or(&bytes);
    serde_json::from_slice::<OfStep>(body).ok().map(|found| found.step)
}
