//! Metrics that come after a commit, from an evaluator: [`crate::sidecars`]. They are read once. Of
//! several values for one name, the last written wins.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use stepwell_core::format::manifest::{Attempt, MetricNumber};
use stepwell_core::format::sealed_text;
use stepwell_core::io::Dir;
use stepwell_core::limits::{MAX_METADATA_BYTES, MAX_METRICS, MAX_NAME_BYTES};

use crate::directory_layout::{METRICS, control};
use crate::discovery::is_not_a_step;
use crate::environment::Environment;
use crate::error::Result;
use crate::sidecars::{self, attempt_of};

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
    let mut bytes = serde_json::to_vec(&sidecar).map_err(|error| crate::error::unencodable(&error))?;
    sealed_text::seal(&mut bytes);
    limit("the size of the metrics of one call in bytes", bytes.len() as u64, MAX_METADATA_BYTES)?;
    crate::control::make_control(root)?;
    sidecars::write(&*root.open_dir(&control(METRICS))?, attempt, &bytes, environment)
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

fn parse(dir: &dyn Dir, name: &str) -> stepwell_core::Result<Sidecar> {
    let bytes = dir.read_file(name, MAX_METADATA_BYTES)?;
    let file = dir.path().join(name);
    sealed_text::parse(&bytes).map_err(|what| stepwell_core::Error::Format { file, what })
}
