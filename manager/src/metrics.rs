//! Metrics that come after a commit (an evaluator's): sidecars in the root's own directory, keyed
//! by attempt.
//!
//! One call writes one file, under a name that nobody else draws, first under a dotted name and
//! then renamed: so an evaluator needs no lock, and never meets the trainer. Sidecars never change;
//! they are read once. Of several values for one name the last written wins.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use stepwell_core::format::manifest::{Attempt, MetricNumber};
use stepwell_core::io::Dir;
use stepwell_core::limits::{MAX_METADATA_BYTES, MAX_METRICS, MAX_NAME_BYTES};

use crate::commit::aside::replace_file;
use crate::delete_tree::ignore_missing;
use crate::directory_layout::{self, METRICS, OwnName, control};
use crate::discovery::{Listing, is_not_a_step, read_manifest};
use crate::environment::Environment;
use crate::error::Result;
use crate::step_name::StepName;

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Sidecar {
    step: u64,
    unix_ns: i64,
    metrics: BTreeMap<String, MetricNumber>,
}

/// Writes a metrics file for a committed step. Refuses unreadable content before it writes: metrics
/// and their names have the limits of a manifest's.
pub fn add(
    root: &dyn Dir,
    attempt: &Attempt,
    step: u64,
    metrics: &BTreeMap<String, f64>,
    environment: &Environment,
) -> Result<()> {
    limit("the number of metrics", metrics.len() as u64, MAX_METRICS)?;
    for name in metrics.keys() {
        limit("the length of a metric's name in bytes", name.len() as u64, MAX_NAME_BYTES)?;
    }
    let sidecar = Sidecar {
        step,
        unix_ns: environment.clock.unix_ns(),
        metrics: metrics.iter().map(|(name, &value)| (name.clone(), value.into())).collect(),
    };
    let bytes = serde_json::to_vec(&sidecar).map_err(|error| crate::error::unencodable(&error))?;
    limit("the size of the metrics of one call in bytes", bytes.len() as u64, MAX_METADATA_BYTES)?;
    crate::control::make_control(root)?;
    let dir = root.open_dir(&control(METRICS))?;
    let name = format!("{}-{}-{}.json", attempt.session, attempt.counter, environment.hex_id());
    replace_file(&*dir, &name, &format!(".{name}.new"), &bytes)?;
    Ok(())
}

fn limit(what: &str, found: u64, limit: u64) -> stepwell_core::Result<()> {
    if found > limit {
        return Err(stepwell_core::Error::Limit { what: what.to_owned(), found, limit });
    }
    Ok(())
}

/// The metrics that came later, by attempt.
pub type Later = HashMap<Attempt, BTreeMap<String, f64>>;

/// Reads sidecars, and remembers them: what is there already costs a name's look.
#[derive(Debug, Default)]
pub struct Sidecars {
    read: Mutex<KnownSidecars>,
}

#[derive(Debug, Default)]
struct KnownSidecars {
    /// The files that were looked at, those among them that are no sidecars too.
    files: HashSet<String>,
    /// The sidecars of each attempt, by time and name.
    sidecars: HashMap<Attempt, Vec<(i64, String, Sidecar)>>,
    later: Arc<Later>,
}

impl Sidecars {
    /// The metrics that came later. A disk that does not answer ends it: without a metric the best
    /// step would look like one that has none, and retention would take it.
    pub fn all(&self, root: &dyn Dir) -> Result<Arc<Later>> {
        let dir = match root.open_dir(&control(METRICS)) {
            Ok(dir) => dir,
            Err(error) if error.is_not_found() => return Ok(Arc::default()),
            Err(error) => return Err(error.into()),
        };
        let entries = dir.unsorted_entries()?;
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let known = entries.iter().filter(|entry| read.files.contains(&entry.name)).count();
        if known < read.files.len() {
            read.forget_all_but(&entries.iter().map(|entry| entry.name.as_str()).collect());
        }
        for entry in entries {
            if read.files.contains(&entry.name) {
                continue;
            }
            let Some(attempt) = attempt_of(&entry.name) else { continue };
            match parse(&*dir, &entry.name) {
                Ok(sidecar) => read.add(attempt, &entry.name, sidecar),
                // Removed with its step, between the listing and now.
                Err(error) if error.is_gone() && dir.stat(&entry.name)?.is_none() => continue,
                Err(error) if is_not_a_step(&error) => {
                    tracing::warn!(file = %entry.name, %error, "what is no sidecar of metrics is left out");
                }
                Err(error) => return Err(error.into()),
            }
            read.files.insert(entry.name);
        }
        Ok(Arc::clone(&read.later))
    }

    /// Removes the sidecars of steps that were deleted. Failing to is no error: they say nothing of
    /// any step that is there.
    pub fn remove(&self, root: &dyn Dir, attempts: &[Attempt]) {
        if attempts.is_empty() {
            return;
        }
        let removed = (|| -> stepwell_core::Result<()> {
            let dir = root.open_dir(&control(METRICS))?;
            for entry in dir.unsorted_entries()? {
                if attempt_of(&entry.name).is_some_and(|attempt| attempts.contains(&attempt)) {
                    dir.remove_file(&entry.name)?;
                }
            }
            Ok(())
        })();
        if let Err(error) = removed {
            tracing::debug!(%error, "the metrics of a deleted step stay");
        }
    }
}

impl KnownSidecars {
    fn add(&mut self, attempt: Attempt, name: &str, sidecar: Sidecar) {
        let sidecars = self.sidecars.entry(attempt.clone()).or_default();
        sidecars.push((sidecar.unix_ns, name.to_owned(), sidecar));
        sidecars.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        let metrics = merged(sidecars);
        Arc::make_mut(&mut self.later).insert(attempt, metrics);
    }

    fn forget_all_but(&mut self, there: &HashSet<&str>) {
        self.files.retain(|name| there.contains(name.as_str()));
        self.sidecars.retain(|_, sidecars| {
            sidecars.retain(|(_, name, _)| there.contains(name.as_str()));
            !sidecars.is_empty()
        });
        let later = self.sidecars.iter().map(|(attempt, sidecars)| (attempt.clone(), merged(sidecars)));
        self.later = Arc::new(later.collect());
    }
}

/// Of several values for one name the last written wins.
fn merged(sidecars: &[(i64, String, Sidecar)]) -> BTreeMap<String, f64> {
    let values = sidecars.iter().flat_map(|(_, _, sidecar)| &sidecar.metrics);
    values.map(|(name, &value)| (name.clone(), f64::from(value))).collect()
}

/// Removes, at a writer's open, the sidecars of attempts that are nowhere in the root any more
/// (deleted by hand, or retired by a writer that died before it came to them), half-written ones
/// among them. Kept is whatever may still belong to something: to a step, to one in a branch or in
/// quarantine, and, where a manifest there cannot be read, whatever is of that number; also what
/// has a step's name by `recorded` alone, the root's pattern up to now. Gives how many went; an
/// error leaves the rest for the next writer.
pub fn reclaim(root: &dyn Dir, names: &StepName, recorded: &StepName, listing: &Listing) -> Result<usize> {
    let dir = match root.open_dir(&control(METRICS)) {
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
        // If all manifests are readable, the number adds nothing.
        if !alive.numbers.is_empty()
            && parse(&*dir, &name).map_or(true, |found| alive.numbers.contains(&found.step))
        {
            continue;
        }
        ignore_missing(dir.remove_file(&name))?;
        removed += 1;
    }
    Ok(removed)
}

/// The possible owners of metrics files.
#[derive(Default)]
struct Alive {
    attempts: HashSet<Attempt>,
    /// Numbers of what cannot be read.
    numbers: HashSet<u64>,
}

/// `None`: something cannot be read, and nobody knows its number.
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
            // Damaged, or without a manifest, as while it is being copied.
            (Err(_), Some(number)) => drop(alive.numbers.insert(number)),
            (Err(error), None) if error.is_gone() => {}
            (Err(_), None) => return Ok(None),
        }
    }
    Ok(Some(alive))
}

fn attempt_of(name: &str) -> Option<Attempt> {
    let mut parts = name.strip_suffix(".json")?.split('-');
    let session = parts.next().filter(|s| s.len() == 32 && s.bytes().all(|b| b.is_ascii_hexdigit()))?;
    let counter = parts.next()?.parse().ok()?;
    parts.next()?;
    Some(Attempt { session: session.to_owned(), counter })
}

fn parse(dir: &dyn Dir, name: &str) -> stepwell_core::Result<Sidecar> {
    let bytes = dir.read_file(name, MAX_METADATA_BYTES)?;
    let file = dir.path().join(name);
    serde_json::from_slice(&bytes)
        .map_err(|error| stepwell_core::Error::Format { file, what: error.to_string() })
}
