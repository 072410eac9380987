//! Metrics that come after a commit, from an evaluator: sidecar files in the root's own directory,
//! keyed by attempt.
//!
//! Each call writes one file with a unique name, by a rename. So an evaluator needs no lock, and
//! never conflicts with the trainer. Sidecars never change, and are read once. Of several values
//! for one name, the last written wins.

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

/// Writes a sidecar for a committed step. Refuses metrics that exceed the limits of a manifest's.
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

/// Later metrics, by attempt.
pub type Later = HashMap<Attempt, BTreeMap<String, f64>>;

/// Reads and caches sidecars. A known one costs only its entry in a listing.
#[derive(Debug, Default)]
pub struct Sidecars {
    read: Mutex<KnownSidecars>,
}

#[derive(Debug, Default)]
struct KnownSidecars {
    /// The known files, including invalid ones.
    files: HashSet<String>,
    /// The sidecars of each attempt, sorted by time and name.
    sidecars: HashMap<Attempt, Vec<(i64, String, Sidecar)>>,
    later: Arc<Later>,
}

impl Sidecars {
    /// Returns all later metrics. Fails on a disk error: the best step would otherwise seem to have
    /// no metric, and retention would delete it.
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
                // It was removed with its step, since the listing.
                Err(error) if error.is_gone() && dir.stat(&entry.name)?.is_none() => continue,
                Err(error) if is_not_a_step(&error) => {
                    tracing::warn!(file = %entry.name, %error, "ignoring invalid metrics file");
                }
                Err(error) => return Err(error.into()),
            }
            read.files.insert(entry.name);
        }
        Ok(Arc::clone(&read.later))
    }

    /// Removes the sidecars of deleted steps. A failure is no error, since they concern no existing
    /// step.
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
            tracing::debug!(%error, "removing the metrics of a deleted step failed");
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

/// Removes, when a writer opens the root, sidecars of attempts that are no longer in the root, and
/// half-written ones. Such steps were deleted by hand, or retired by a writer that died before it
/// removed the sidecars. It keeps the sidecars of steps, branches and quarantined directories. If a
/// manifest there is unreadable, it keeps all sidecars of that number. `recorded` is the root's
/// former pattern of names. Returns the number of removed files. After an error, the next writer
/// removes the rest.
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
        // If all manifests are readable, the numbers are not needed.
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
