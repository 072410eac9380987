//! Queries of a root. They list only committed steps. [`Manager::pending`] lists saves in progress.
//! Steps that may not be durable are not listed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;
use stepwell_core::deadline::deadline_after;
use stepwell_core::format::manifest::{AdoptedFiles, Manifest};
use stepwell_core::limits::MAX_STEP;
use stepwell_core::sys::{cores, each};

use super::Manager;
use super::retaining::values;
use crate::checkpoint::Checkpoint;
use crate::discovery::{Found, Listing, Quarantined, REQUESTS_AT_ONCE};
use crate::error::{Error, Result};
use crate::metrics::Later;
use crate::retention::{self, Mode, RetentionPlan};
use crate::root::{Root, VISIBLE_WITHIN};

/// The most keys of a step's metadata in a report.
const MAX_METADATA_KEYS: usize = 16;

/// A report uses one thread for so many steps.
const STEPS_PER_THREAD: usize = 256;

/// A directory with a step's name, for `ls`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct StepReport {
    /// Its number, if it is a step.
    pub step: Option<u64>,
    /// The directory's name.
    pub name: String,
    /// Bytes of its data files.
    pub bytes: u64,
    /// Its items.
    pub items: Vec<ItemReport>,
    /// Its items that were thinned away.
    pub dropped: Vec<String>,
    /// The files of another library that have its bytes.
    pub adopted: Option<AdoptedFiles>,
    /// Its metrics, including later ones.
    pub metrics: BTreeMap<String, String>,
    /// The first keys of its metadata, if that is an object.
    pub metadata_keys: Vec<String>,
    /// The start of its save, in nanoseconds since 1970.
    pub started_unix_ns: i64,
    /// The time of its commit, in nanoseconds since 1970.
    pub committed_unix_ns: i64,
    /// Its damage, if any.
    pub damage: Option<String>,
}

/// An item of a step.
#[derive(Clone, Debug, Serialize)]
pub struct ItemReport {
    /// Its name.
    pub name: String,
    /// Bytes of its data files, which dropping it would free.
    pub bytes: u64,
    /// Number of its leaves.
    pub leaves: u64,
}

impl StepReport {
    fn of(found: &Found, metrics: BTreeMap<String, f64>, damage: Option<String>) -> Self {
        let manifest = &found.manifest;
        let metadata = manifest.custom_metadata.as_object();
        let mut below: BTreeMap<&str, u64> = BTreeMap::new();
        for file in &manifest.files {
            let bytes = below.entry(file.path.split('/').next().unwrap_or_default()).or_default();
            *bytes = bytes.saturating_add(file.length);
        }
        let items = manifest.items.iter().map(|item| ItemReport {
            name: item.name.clone(),
            bytes: below.get(item.dir.as_str()).copied().unwrap_or_default(),
            leaves: item.leaves,
        });
        Self {
            step: Some(manifest.step),
            name: found.name.clone(),
            bytes: below.values().copied().fold(0, u64::saturating_add),
            items: items.collect(),
            dropped: manifest.dropped.iter().map(|tombstone| tombstone.item.clone()).collect(),
            adopted: manifest.adopted.clone(),
            metrics: metrics.into_iter().map(|(name, value)| (name, value.to_string())).collect(),
            metadata_keys: metadata
                .map(|map| map.keys().take(MAX_METADATA_KEYS).cloned().collect())
                .unwrap_or_default(),
            started_unix_ns: manifest.started_unix_ns,
            committed_unix_ns: manifest.committed_unix_ns,
            damage,
        }
    }

    fn of_quarantined(Quarantined { name, reason, .. }: Quarantined) -> Self {
        Self { name, damage: Some(reason), ..Self::default() }
    }
}

impl Manager {
    /// Returns the newest whole step: its manifest is valid, and its files have the listed lengths.
    /// Skips damaged steps with a warning.
    pub fn latest_step(&self) -> Result<Option<u64>> {
        let inner = &self.inner;
        inner.check_usable()?;
        inner.team.ask("latest_step", || inner.newest_step())
    }

    /// Returns all committed steps, in order.
    pub fn all_steps(&self) -> Result<Vec<u64>> {
        self.inner.check_usable()?;
        Ok(self.inner.all_steps()?.into_iter().collect())
    }

    /// Returns the invalid directories with a step's name, each with its reason.
    pub fn quarantined(&self) -> Result<Vec<Quarantined>> {
        self.inner.check_usable()?;
        let root = &self.inner.root;
        Ok(root.discovery.list(&*root.dir, &root.names)?.quarantined.clone())
    }

    /// Returns the best step by a metric: the given one, or else the one that retention names.
    /// Steps without the metric, and those with NaN, do not count. `None` if the root has no steps,
    /// or if none has a number for the metric of retention yet. [`Error::Invalid`] if no step has a
    /// number for the given metric.
    pub fn best_step(&self, metric: Option<(&str, Mode)>) -> Result<Option<u64>> {
        self.inner.check_usable()?;
        let asked = metric.is_some();
        let Some((metric, mode)) = metric.or_else(|| self.inner.options.retention.metric()) else {
            return Err(Error::Invalid(
                "the best step needs a metric and a mode: the retention names none".to_owned(),
            ));
        };
        let inner = &self.inner;
        inner.team.ask("best_step", || {
            let names = [metric.to_owned()];
            let mut found = BTreeMap::new();
            for root in inner.roots() {
                let later = root.sidecars.all(&*root.dir)?;
                for (&step, one) in &root.list_changes()?.steps {
                    let value = values(&one.manifest, &later, &names).first().copied().flatten();
                    found.entry(step).or_insert(value);
                }
            }
            let best = retention::best(found.iter().map(|(&step, &value)| (step, value)), mode);
            if best.is_none() && asked && !found.is_empty() {
                if found.values().any(Option::is_some) {
                    return Err(Error::Invalid(format!(
                        "no step is the best by the metric `{metric}`: it is NaN in every step that has it. Choose another metric, or a step by its number"
                    )));
                }
                let later = inner.root.sidecars.all(&*inner.root.dir)?;
                return Err(Error::Invalid(no_such_metric(metric, &*inner.root.list()?, &later)));
            }
            Ok(best)
        })
    }

    /// Returns this manager's last saved or restored step + 1, else the latest + 1, else 0. Pending
    /// saves count. Failed ones do not.
    pub fn next_step(&self) -> Result<u64> {
        let inner = &self.inner;
        inner.check_usable()?;
        inner.team.ask("next_step", || {
            let last = inner.history.lock().trail.last();
            let last = match last {
                Some(last) => Some(last),
                None => inner.newest_step()?,
            };
            Ok(last.map_or(0, |last| last.saturating_add(1).min(MAX_STEP)))
        })
    }

    /// Returns the manifest of a step (`None`: the latest). Reads no tensors.
    pub fn manifest(&self, step: Option<u64>) -> Result<Arc<Manifest>> {
        self.inner.check_usable()?;
        Ok(self.inner.find(step)?.1.manifest)
    }

    /// Returns the metrics of a step, including later ones.
    pub fn metrics(&self, step: u64) -> Result<BTreeMap<String, f64>> {
        self.inner.check_usable()?;
        self.metrics_of(&self.inner.find(Some(step))?.1.manifest)
    }

    /// [`Manager::metrics`] of a step by its manifest. It also serves an open step that was retired
    /// since.
    pub fn metrics_of(&self, manifest: &Manifest) -> Result<BTreeMap<String, f64>> {
        self.inner.check_usable()?;
        let mut metrics = manifest.metrics.clone();
        for root in self.inner.roots() {
            let later = root.sidecars.all(&*root.dir)?;
            metrics.extend(later.get(&manifest.attempt).cloned().unwrap_or_default());
        }
        Ok(metrics)
    }

    /// Returns the decisions that retention would make now, with reasons.
    pub fn plan_retention(&self) -> Result<RetentionPlan> {
        self.inner.check_usable()?;
        self.inner.retention_plan()
    }

    /// Reports on every directory with a step's name. It reports the nearest whole copy of a
    /// step.
    pub fn report(&self) -> Result<Vec<StepReport>> {
        self.inner.check_usable()?;
        let mut rows = report(&self.inner.root)?;
        for tier in &self.inner.tiers {
            for row in report(tier.root())? {
                match rows.iter_mut().find(|known| known.step == row.step && row.step.is_some()) {
                    Some(known) if known.damage.is_some() && row.damage.is_none() => *known = row,
                    Some(_) => {}
                    None => rows.push(row),
                }
            }
        }
        rows.sort_by_key(|row| (row.step.is_none(), row.step));
        Ok(rows)
    }

    /// Forgets all cached facts about the root, and lists it again.
    pub fn reload(&self) -> Result<()> {
        self.inner.check_usable()?;
        self.inner.root.discovery.forget();
        self.inner.root.list().map(drop)
    }

    /// Opens a step for reading (`None`: the latest). It is leased until the [`Checkpoint`] is
    /// dropped.
    pub fn checkpoint(&self, step: Option<u64>) -> Result<Checkpoint> {
        self.inner.check_usable()?;
        let inner = &self.inner;
        let deadline = deadline_after(VISIBLE_WITHIN);
        let is_chosen = !inner.team.leads() && step.is_some() && inner.ranks.chosen() == step;
        loop {
            match inner.lease(step) {
                // The leader has listed it, but this machine may not see it yet.
                Err(Error::StepNotFound { .. }) if is_chosen && Instant::now() < deadline => {
                    inner.root.discovery.forget();
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
                leased => return leased,
            }
        }
    }
}

/// Reports on every directory of a root with a step's name.
fn report(root: &Root) -> Result<Vec<StepReport>> {
    let listing = root.discovery.list(&*root.dir, &root.names)?;
    let later = root.sidecars.all(&*root.dir)?;
    let mut out = Vec::new();
    let steps: Vec<&Found> = listing.steps.values().collect();
    let threads = if root.dir.fence().is_some() {
        REQUESTS_AT_ONCE
    } else {
        cores().min(steps.len() / STEPS_PER_THREAD).max(1)
    };
    let looked = each("stepwell-report", threads, &steps, |found| root.damage_if_current(found));
    for (found, looked) in steps.into_iter().zip(looked) {
        let (damage, stands) = looked?;
        if !stands {
            // It was retired or replaced after the listing, which is no damage.
            continue;
        }
        let mut metrics = found.manifest.metrics.clone();
        metrics.extend(later.get(&found.manifest.attempt).cloned().unwrap_or_default());
        out.push(StepReport::of(found, metrics, damage));
    }
    out.extend(listing.quarantined.iter().cloned().map(StepReport::of_quarantined));
    Ok(out)
}

/// The most metrics that an error lists.
const MAX_LISTED_METRICS: usize = 8;

/// The message for a metric that no step has. It lists the metrics of the steps.
pub(super) fn no_such_metric(metric: &str, listing: &Listing, later: &Later) -> String {
    let manifests = listing.steps.values().map(|found| &found.manifest);
    let names = manifests.flat_map(|manifest| {
        manifest.metrics.keys().chain(later.get(&manifest.attempt).into_iter().flat_map(BTreeMap::keys))
    });
    let names: BTreeSet<&str> = names.map(String::as_str).collect();
    let mut names: Vec<&str> = names.into_iter().collect();
    let more = names.len().saturating_sub(MAX_LISTED_METRICS);
    names.truncate(MAX_LISTED_METRICS);
    let listed = if names.is_empty() {
        "the steps have no metrics at all".to_owned()
    } else {
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        format!("the steps have `{}`{more}", names.join("`, `"))
    };
    format!("no committed step has the metric `{metric}`: {listed}")
}
