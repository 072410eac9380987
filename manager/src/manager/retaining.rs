//! Retention, applied after each commit and on request.
//!
//! It counts only whole steps: a damaged step neither counts nor is deleted. After each commit it
//! inspects the new steps and [`REINSPECTED`] others in turn. So the cost of a save does not grow
//! with the number of steps, and damage is still found.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use smallvec::SmallVec;
use stepwell_core::format::manifest::{Attempt, Manifest};
use stepwell_core::io::{Lock, LockKind};

use super::Inner;
use super::queries::no_such_metric;
use crate::commit::aside::{self, Thinned};
use crate::directory_layout::LEASE;
use crate::discovery::{Found, Listing};
use crate::error::{Error, Result};
use crate::metrics::Later;
use crate::recovery;
use crate::retention::{Candidate, Metrics, Names, Retention, RetentionPlan};
use crate::root::MAX_LISTINGS;
use crate::sidecars;

/// The number of steps that are inspected again after each commit.
const REINSPECTED: usize = 64;
/// The most steps that are locked while they are renamed. Each lock takes a descriptor.
const MAX_LOCKED: usize = 64;
/// Exclusive leases of steps that are being renamed.
type Locks = VecDeque<Box<dyn Lock>>;
/// The values of the metrics that the rules use.
type Values = SmallVec<[Option<f64>; 2]>;

/// The steps that were found whole.
#[derive(Debug, Default)]
pub(super) struct Inspection(Mutex<Inspected>);

#[derive(Debug, Default)]
struct Inspected {
    /// The whole steps, by number.
    whole: BTreeMap<u64, WholeStep>,
    /// The step at which the next inspection begins.
    next: u64,
    /// The last step of which a verification found every byte intact.
    verified: Option<Attempt>,
    /// Steps that a verification found damaged, each with its first damage.
    corrupt: Vec<(Attempt, String)>,
    /// Metrics of the rules that no step had when others were to go. Each is reported once.
    without: BTreeSet<String>,
    /// Leased steps that no rule keeps, with the Unix time since which they are known.
    leased: BTreeMap<u64, i64>,
}

/// A step that was found whole, with the facts that retention needs. They are copied here because
/// the manifests of many steps are far apart in memory: reading each would be most of the work
/// after a commit.
#[derive(Debug)]
struct WholeStep {
    /// Its manifest at that time.
    manifest: Arc<Manifest>,
    committed_unix_ns: i64,
    /// The values of the metrics that the rules use.
    values: Values,
}

impl Inspected {
    /// Returns the steps of a listing that are to be inspected now, and the step at which the next
    /// inspection begins.
    fn due(&self, listing: &Listing) -> (Vec<Found>, u64) {
        let mut turn = listing.steps.range(self.next..).chain(listing.steps.range(..self.next));
        let again: BTreeSet<u64> = turn.by_ref().take(REINSPECTED).map(|(&step, _)| step).collect();
        let next = turn.next().map_or(0, |(&step, _)| step);
        // Both are sorted by number, so walk them side by side: a lookup for each of many steps is
        // slow.
        let mut whole = self.whole.iter().peekable();
        let mut due = Vec::new();
        for (step, found) in &listing.steps {
            while whole.next_if(|(known, _)| *known < step).is_some() {}
            let is_known = |(known, then): &(&u64, &WholeStep)| {
                *known == step && Arc::ptr_eq(&then.manifest, &found.manifest)
            };
            if again.contains(step) || !whole.peek().is_some_and(is_known) {
                due.push(found.clone());
            }
        }
        (due, next)
    }
}

/// A listing, and its steps that do not count.
struct CountedSteps {
    listing: Arc<Listing>,
    damaged: BTreeSet<u64>,
}

impl CountedSteps {
    fn steps(&self) -> impl Iterator<Item = &Found> {
        let is_whole = |step: &u64| self.damaged.is_empty() || !self.damaged.contains(step);
        self.listing.steps.iter().filter(move |(step, _)| is_whole(step)).map(|(_, found)| found)
    }

    fn get(&self, step: u64) -> Option<&Found> {
        self.listing.steps.get(&step)
    }
}

/// The values of metrics in a step. They include metrics that came after the commit.
pub(super) fn values(manifest: &Manifest, later: &Later, names: &[String]) -> Values {
    let later = later.get(&manifest.attempt);
    let value = |name: &String| {
        later.and_then(|later| later.get(name)).or_else(|| manifest.metrics.get(name)).copied()
    };
    names.iter().map(value).collect()
}

impl Inner {
    /// Returns the decisions of retention, after an inspection of every step.
    pub(super) fn retention_plan(&self) -> Result<RetentionPlan> {
        self.reinspect_all();
        let mut inspected = self.inspected();
        self.whole_steps(&mut inspected)?;
        self.rules(&inspected, true)
    }

    /// Makes the next listing inspect every step again.
    pub(super) fn reinspect_all(&self) {
        let mut inspected = self.inspected();
        let without = std::mem::take(&mut inspected.without);
        *inspected = Inspected { without, ..Inspected::default() };
    }

    /// Forgets a step that was deleted or set aside by a call.
    pub(super) fn went(&self, step: u64) {
        self.inspected().whole.remove(&step);
    }

    fn inspected(&self) -> MutexGuard<'_, Inspected> {
        self.inspection.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lists all committed steps, and inspects those that are due. `inspected` then has all whole
    /// ones.
    fn whole_steps(&self, inspected: &mut Inspected) -> Result<CountedSteps> {
        let begun = Instant::now();
        let metrics = self.options.retention.metrics();
        'listing: for _ in 0..MAX_LISTINGS {
            let listing = self.root.list_changes()?;
            let (due, next) = inspected.due(&listing);
            let mut damaged = BTreeSet::new();
            for found in due {
                if !self.root.discovery.is_as_listed(&*self.root.dir, &found)? {
                    continue 'listing;
                }
                let step = found.manifest.step;
                let corrupt = inspected.corrupt.iter().find(|(one, _)| *one == found.manifest.attempt);
                let damage = match corrupt {
                    Some((_, damage)) => Some(damage.clone()),
                    None => self.root.damage(&found)?,
                };
                if let Some(damage) = damage {
                    inspected.whole.remove(&step);
                    damaged.insert(step);
                    self.root.report_damaged(&found, &damage);
                } else {
                    let manifest = found.manifest;
                    let values = values(&manifest, &Later::new(), &metrics);
                    let committed_unix_ns = manifest.committed_unix_ns;
                    inspected.whole.insert(step, WholeStep { manifest, committed_unix_ns, values });
                }
            }
            inspected.next = next;
            // Each step of the listing is in one of the two. A surplus step is gone.
            if inspected.whole.len() + damaged.len() > listing.steps.len() {
                inspected.whole.retain(|step, _| listing.steps.contains_key(step));
            }
            let counted = CountedSteps { listing, damaged };
            debug_assert!(
                inspected.whole.keys().eq(counted.steps().map(|found| &found.manifest.step)),
                "a step is counted that is not there, or one that is there is not"
            );
            return Ok(counted);
        }
        Err(self.root.unstable_listing(begun))
    }

    /// Returns the plan of the rules for the steps that were found whole.
    fn rules<'a>(&self, inspected: &'a Inspected, explained: bool) -> Result<RetentionPlan> {
        let later = self.root.sidecars.all(&*self.root.dir)?;
        let retention = &self.options.retention;
        let (names, kept) = (retention.metrics(), self.kept());
        let candidate = |(&step, whole): (&'a u64, &'a WholeStep)| Candidate {
            step,
            committed_unix_ns: whole.committed_unix_ns,
            metrics: Metrics {
                names: &names,
                values: match later.get(&whole.manifest.attempt) {
                    None => Cow::Borrowed(&whole.values),
                    Some(_) => Cow::Owned(values(&whole.manifest, &later, &names).into_vec()),
                },
            },
            items: Names::Of(&whole.manifest),
            held: kept.contains(&step),
        };
        let candidates: Vec<Candidate<'_>> = inspected.whole.iter().map(candidate).collect();
        let now = self.environment.clock.unix_ns();
        if explained { retention.plan(&candidates, now) } else { retention.changes(&candidates, now) }
    }

    /// Retires the steps that no rule keeps, and thins the steps that are kept in part. Call it
    /// after a newer step is committed, never before.
    pub(super) fn apply_retention(&self) -> Result<Vec<u64>> {
        if self.options.retention == Retention::KeepAll {
            return Ok(Vec::new());
        }
        let (mut inspected, counted, changes) = loop {
            let mut inspected = self.inspected();
            let counted = self.whole_steps(&mut inspected)?;
            let changes = self.rules(&inspected, false)?;
            let newest = counted.steps().last().cloned();
            let is_idle = changes.deleted().next().is_none() && changes.thinned().next().is_none();
            let unverified =
                newest.filter(|newest| inspected.verified.as_ref() != Some(&newest.manifest.attempt));
            let Some(newest) = unverified.filter(|_| self.options.verify_before_retiring && !is_idle) else {
                break (inspected, counted, changes);
            };
            // Release the lock while this step is read.
            drop(inspected);
            if newest.manifest.adopted.is_some() {
                let step = newest.manifest.step;
                tracing::warn!(
                    step,
                    "the newest step has files of another library, which retention does not verify; it keeps older steps"
                );
                return Ok(Vec::new());
            }
            let damage = self.verified(&newest)?;
            let mut inspected = self.inspected();
            let attempt = newest.manifest.attempt.clone();
            match damage {
                None => inspected.verified = Some(attempt),
                Some(damage) => {
                    let step = newest.manifest.step;
                    tracing::error!(step, %damage, "the newest step is damaged; retention keeps older ones");
                    inspected.whole.remove(&step);
                    inspected.corrupt.push((attempt, damage));
                }
            }
        };
        self.root.check_writer()?;
        if changes.deleted().next().is_some() {
            self.report_metrics_without_steps(&counted, &mut inspected)?;
        }
        // Keep the lock: no other plan is made before this one is carried out.
        let victims = self.retire(&counted, changes.deleted().collect(), &mut inspected)?;
        drop(inspected);
        let mut has_thinned = false;
        for (step, keep) in changes.thinned() {
            has_thinned = true;
            let Some(found) = counted.get(step) else { continue };
            let thinned = aside::thin(&*self.root.dir, &found.name, keep, self.environment.clock.unix_ns())?;
            if let Thinned::Dropped(_) | Thinned::Later(_) = thinned {
                self.root.discovery.touch(&found.name);
            }
            match thinned {
                Thinned::Dropped(items) => tracing::info!(step, ?items, "thinned"),
                Thinned::Later(items) => {
                    tracing::info!(step, ?items, "thinned. Its files are deleted after the grace period");
                }
                Thinned::Held => tracing::info!(step, "not thinned now: a reader holds it"),
                Thinned::Nothing => {}
            }
        }
        if has_thinned {
            self.refresh_listing();
        }
        self.finish_thinnings(&counted);
        Ok(victims)
    }

    /// Warns of each metric of the rules that no step has, once: its name may be misspelt.
    fn report_metrics_without_steps(&self, counted: &CountedSteps, inspected: &mut Inspected) -> Result<()> {
        for metric in self.options.retention.metrics() {
            if inspected.without.contains(&metric) {
                continue;
            }
            let later = self.root.sidecars.all(&*self.root.dir)?;
            let name = [metric];
            let has_value = |found: &Found| values(&found.manifest, &later, &name) != [None].into();
            if counted.steps().any(has_value) {
                continue;
            }
            let [metric] = name;
            let why = no_such_metric(&metric, &counted.listing, &later);
            tracing::warn!("keep_best chooses steps without a value: {why}");
            inspected.without.insert(metric);
        }
        Ok(())
    }

    /// Reads every byte of a step and returns its first damage. See
    /// [`crate::Options::verify_before_retiring`].
    fn verified(&self, found: &Found) -> Result<Option<String>> {
        let (timeout, load) =
            (self.options.stall_timeout, self.options.load_options(&*self.environment.disk, false));
        let leased = self.root.lease_found(found, timeout, load.clone());
        let report = leased.and_then(|checkpoint| {
            let checkpoint = checkpoint.ok_or_else(|| self.root.not_found(Some(found.manifest.step)))?;
            checkpoint.verify(&load, &mut |_| true)
        });
        match report {
            Ok(report) => Ok(report.damages.first().map(|damage| {
                let block = damage.block.map_or_else(String::new, |block| format!(", block {block}"));
                format!("{}{block}: {}", damage.file.display(), damage.what)
            })),
            Err(Error::Core(error @ stepwell_core::Error::Corrupt { .. })) => Ok(Some(error.to_string())),
            Err(error) => Err(error),
        }
    }

    /// Lists the changes that were just made. Otherwise the next save would list them, and training
    /// would wait for a disk that is busy with deleting. The next listing reports an error again.
    fn refresh_listing(&self) {
        let _ = self.root.discovery.list_changes(&*self.root.dir, &self.root.names);
    }

    /// Retires steps. Returns those that were renamed.
    fn retire(
        &self,
        counted: &CountedSteps,
        mut steps: Vec<u64>,
        inspected: &mut Inspected,
    ) -> Result<Vec<u64>> {
        // Steps that were held after the plan was made stay.
        let retiring = self.usage.retiring(steps.iter().copied());
        steps.retain(|&step| retiring.may_go(step));
        let found = steps.into_iter().filter_map(|step| counted.get(step)).collect();
        let (found, locks) = self.unleased(found, inspected)?;
        if found.is_empty() {
            return Ok(Vec::new());
        }
        let rename = |found: &&Found| (found.name.clone(), self.root.trash(found.manifest.step));
        let renames: Vec<(String, String)> = found.iter().map(rename).collect();
        let retired = aside::retire_all(&*self.root.dir, &renames);
        drop((retiring, locks));
        for found in found.iter().take(retired.renamed) {
            inspected.whole.remove(&found.manifest.step);
        }
        if retired.renamed > 0 {
            self.refresh_listing();
        }
        // Also after an error: delete the steps whose rename is durable.
        let deletable = retired.deletable();
        let attempts: Vec<Attempt> =
            found.iter().take(deletable).map(|found| found.manifest.attempt.clone()).collect();
        sidecars::remove(&*self.root.dir, &attempts);
        let files = found.iter().take(deletable).next_back().map_or(&[][..], |last| &last.manifest.files);
        self.root
            .deleter
            .retire(renames.into_iter().take(deletable).map(|(_, trash)| trash).collect(), files);
        match retired.error {
            Some(error) => Err(error.into()),
            None => Ok(found.iter().take(retired.renamed).map(|found| found.manifest.step).collect()),
        }
    }

    /// Leaves out the steps that a reader has leased: an evaluator may still add metrics that save
    /// them. A lease keeps a step listed for the grace period at most. Locks the others, so that no
    /// reader opens them while they are renamed; of many, only the last [`MAX_LOCKED`].
    fn unleased<'a>(
        &self,
        steps: Vec<&'a Found>,
        inspected: &mut Inspected,
    ) -> Result<(Vec<&'a Found>, Locks)> {
        let now = self.environment.clock.unix_ns();
        let grace = i64::try_from(self.options.grace.as_nanos()).unwrap_or(i64::MAX);
        let before = std::mem::take(&mut inspected.leased);
        let (mut unleased, mut locks) = (Vec::with_capacity(steps.len()), Locks::new());
        for found in steps {
            let step = found.manifest.step;
            let dir = self.root.dir.open_dir(&found.name)?;
            match dir.try_lock(LEASE, LockKind::Exclusive, false) {
                Ok(Some(lock)) => {
                    locks.push_back(lock);
                    if locks.len() > MAX_LOCKED {
                        locks.pop_front();
                    }
                }
                Ok(None) => {
                    let since = before.get(&step).copied().unwrap_or(now);
                    inspected.leased.insert(step, since);
                    if now.saturating_sub(since) < grace {
                        tracing::debug!(step, "not retired now: a reader holds it");
                        continue;
                    }
                }
                Err(error) if error.is_not_found() || error.is_without_locks() => {}
                Err(error) => return Err(error.into()),
            }
            unleased.push(found);
        }
        Ok((unleased, locks))
    }

    /// Deletes the files of thinnings whose grace period is over. Only a file system without locks
    /// needs that.
    fn finish_thinnings(&self, counted: &CountedSteps) {
        if self.root.is_locked() {
            return;
        }
        for found in counted.steps().filter(|found| !found.manifest.dropped.is_empty()) {
            let finished = self.root.dir.open_dir(&found.name).and_then(|dir| {
                let now = self.environment.clock.unix_ns();
                recovery::finish_thinning(&dir, found, now, self.options.grace)
            });
            if let Err(error) = finished {
                let step = found.manifest.step;
                tracing::debug!(step, %error, "deleting thinned files failed. It is tried again after the next commit");
            }
        }
    }
}
