//! A scenario: a manager over a simulated disk, and marks for everything that it was told.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use stepwell_core::format::sealed_text;
use stepwell_core::io::simulated::{ImageNode, SimDisk};
use stepwell_core::staging::StagingPool;
use stepwell_manager::{Environment, Exists, Manager, Options, Outcome, SaveRequest, StateSource};

use super::{ROOT, states, world};

const PATIENCE: Duration = Duration::from_secs(60);

/// The tools of a scenario.
pub struct Run {
    /// The disk, as the scenario's process sees it.
    pub disk: SimDisk,
    /// How long a wait lasts that has no reason to last.
    pub patience: Duration,
    elements: u64,
    staging: Option<Arc<StagingPool>>,
    opened: AtomicU64,
}

/// Options that are quick on tiny states.
pub fn options() -> Options {
    Options {
        block_bytes: 4096,
        // A save writes over every file that it can.
        overwrite_from_bytes: Some(1),
        capture_threads: Some(1),
        queue_depth: Some(2),
        staging_bytes: Some(1),
        stall_timeout: PATIENCE,
        ..Options::default()
    }
}

impl Run {
    /// On an empty disk: making the root is part of the scenario.
    pub fn fresh() -> Self {
        Self::on(SimDisk::new())
    }

    /// As [`Run::fresh`], for what was there before a scenario: its identities are not drawn again
    /// by a process that starts from its image.
    pub fn earlier() -> Self {
        Self { opened: AtomicU64::new(500), ..Self::fresh() }
    }

    /// On this disk.
    pub fn on(disk: SimDisk) -> Self {
        Self { disk, patience: PATIENCE, elements: states::FEW, staging: None, opened: AtomicU64::new(1) }
    }

    /// This scenario with `params` of ten blocks, saved through a ring of so many slots of three
    /// blocks: they take four.
    pub fn with_windows(mut self, slots: usize) -> Result<Self, String> {
        let ring = StagingPool::of_slots(slots, 3 * 4096).map_err(|error| error.to_string())?;
        (self.elements, self.staging) = (states::MANY, Some(ring));
        Ok(self)
    }

    /// On a disk with steps that were committed and are durable; each is attempt `a`.
    pub fn with_steps(steps: impl IntoIterator<Item = u64>) -> Result<Self, String> {
        let run = Self::earlier();
        let manager = run.open(options())?;
        let steps: Vec<u64> = steps.into_iter().collect();
        for &step in &steps {
            run.save(&manager, step, "a")?;
        }
        close(&manager)?;
        drop(manager);
        run.settle(&steps);
        Ok(run)
    }

    /// The same scenario, gone on with by another process.
    #[must_use]
    pub fn next_process(&self) -> Self {
        let opened = self.opened.load(Ordering::Relaxed);
        Self {
            disk: self.disk.process(),
            // Nothing hangs for it, so that only the machine may be slow.
            patience: PATIENCE,
            elements: self.elements,
            staging: self.staging.clone(),
            opened: AtomicU64::new(opened + 1000),
        }
    }

    /// The world of the next manager that this process opens.
    pub fn environment(&self) -> Environment {
        let seed = self.opened.fetch_add(1, Ordering::Relaxed);
        Environment { staging: self.staging.clone(), ..world::environment(&self.disk, seed) }
    }

    /// A state of this scenario's size.
    pub fn state(&self, step: u64, tag: &str) -> Result<(StateSource, serde_json::Value), String> {
        Ok((states::state_of(step, tag, self.elements)?, states::metadata(tag, self.elements)))
    }

    /// Notes something that was asked for, or told.
    pub fn mark(&self, label: &str) {
        self.disk.mark(label);
    }

    /// Puts something there, durably, that has a step's name and is none: everything of the root's
    /// first step but its manifest, as of a copy that somebody began. The root holds `steps`, all
    /// of attempt `a`.
    pub fn plant_torn(&self, name: &str, steps: &[u64]) -> Result<(), String> {
        let image = self.disk.image();
        let root = image.get(ROOT).and_then(|root| root.entries()).unwrap_or_default();
        let step =
            root.iter().find(|(name, _)| name.starts_with("step_")).and_then(|(_, step)| step.entries());
        let torn = step.ok_or("there is no step to copy")?.iter();
        let torn =
            ImageNode::dir(torn.filter(|(name, _)| name.as_ref() != "manifest.json").cloned().collect());
        self.disk.plant(&format!("{ROOT}/{name}"), &torn).map_err(|error| error.to_string())?;
        self.settle(steps);
        self.mark(&format!("quarantined {name} {}", torn.hash()));
        Ok(())
    }

    /// Opens the root.
    pub fn open(&self, options: Options) -> Result<Manager, String> {
        let manager = Manager::open(Path::new(ROOT), options, self.environment());
        let manager = manager.map_err(|error| format!("opening: {error}"))?;
        self.mark_opened();
        Ok(manager)
    }

    /// Forgets how the disk came to be as it is, and notes what it holds: `steps`, all of attempt
    /// `a`.
    pub fn settle(&self, steps: &[u64]) {
        self.disk.settle();
        self.mark_opened();
        for step in steps {
            self.mark(&format!("committed {step} a"));
        }
    }

    fn mark_opened(&self) {
        if let Some((id, epoch)) = opened(&self.disk) {
            self.mark(&format!("opened {id} {epoch}"));
        }
    }

    /// Saves a step and waits for its outcome, and for all that it made superfluous to be deleted.
    /// An outcome that is no commit is an `Err`, and marked.
    pub fn save(&self, manager: &Manager, step: u64, tag: &str) -> Result<(), String> {
        self.save_with(manager, step, tag, |request| request)
    }

    /// As [`Run::save`], over the step that is there.
    pub fn replace(&self, manager: &Manager, step: u64, tag: &str) -> Result<(), String> {
        self.save_with(manager, step, tag, |request| SaveRequest { exists: Exists::Replace, ..request })
    }

    /// As [`Run::save`], with metrics.
    pub fn save_metric(&self, manager: &Manager, step: u64, tag: &str, value: f64) -> Result<(), String> {
        let metrics = BTreeMap::from([("loss".to_owned(), value)]);
        self.save_with(manager, step, tag, |request| SaveRequest { metrics, ..request })
    }

    fn save_with(
        &self,
        manager: &Manager,
        step: u64,
        tag: &str,
        change: impl FnOnce(SaveRequest) -> SaveRequest,
    ) -> Result<(), String> {
        let (state, metadata) = self.state(step, tag)?;
        let mut request = SaveRequest::new(step, state);
        request.custom_metadata = metadata;
        let request = change(request);
        let verb = if request.exists == Exists::Replace { "replace" } else { "begin" };
        self.mark(&format!("{verb} {step} {tag}"));
        let outcome = match manager.save(request) {
            Ok(save) => save.wait(Some(self.patience)).ok().flatten().ok_or("the save did not end")?,
            Err(error) => {
                self.mark(&format!("failed {step} {tag}"));
                return Err(format!("saving step {step}: {error}"));
            }
        };
        match outcome {
            Outcome::Committed => self.mark(&format!("committed {step} {tag}")),
            Outcome::NotCommitted(error) => {
                self.mark(&format!("failed {step} {tag}"));
                // Seen here, not by the next call.
                drop(manager.check_for_errors());
                return Err(format!("step {step} was not committed: {error}"));
            }
            Outcome::DurabilityUncertain(error) => {
                self.mark(&format!("uncertain {step} {tag}"));
                drop(manager.check_for_errors());
                return Err(format!("step {step} is uncertain: {error}"));
            }
        }
        drop(manager.wait_for_deletions(self.patience));
        Ok(())
    }

    /// Deletes a step.
    pub fn delete(&self, manager: &Manager, step: u64) -> Result<(), String> {
        self.mark(&format!("may go {step}"));
        manager.delete(step).map_err(|error| format!("deleting step {step}: {error}"))?;
        self.mark(&format!("gone {step}"));
        drop(manager.wait_for_deletions(PATIENCE));
        Ok(())
    }

    /// Goes back to a step; the steps of `newer`, attempts `a`, move aside.
    pub fn rewind(&self, manager: &Manager, step: u64, branch: &str, newer: &[u64]) -> Result<(), String> {
        // Newest first: whenever it is cut short, what is left is a beginning of what was there.
        let mut above = None;
        for other in newer.iter().rev() {
            match above.replace(other) {
                None => self.mark(&format!("may go {other}")),
                Some(above) => self.mark(&format!("may go {other} after {above}")),
            }
        }
        let (branch, moved) =
            manager.rewind(step, Some(branch)).map_err(|error| format!("rewinding to {step}: {error}"))?;
        for other in moved.into_iter().rev() {
            self.mark(&format!("gone {other}"));
            self.mark(&format!("branch {branch} {other} a"));
        }
        Ok(())
    }

    /// Adds a metric to a step.
    pub fn add_metric(&self, manager: &Manager, step: u64, value: f64) -> Result<(), String> {
        let metrics = BTreeMap::from([("accuracy".to_owned(), value)]);
        manager.add_metrics(step, &metrics).map_err(|error| format!("metrics of {step}: {error}"))?;
        self.mark(&format!("metric {step} accuracy {value}"));
        Ok(())
    }
}

/// The root's id and its epoch, from the disk.
pub fn opened(disk: &SimDisk) -> Option<(String, u64)> {
    let read = |name: &str| -> Option<serde_json::Value> {
        let bytes = disk.bytes(&format!("{ROOT}/.stepwell/{name}"))?;
        serde_json::from_slice(sealed_text::unseal(&bytes).unwrap_or(&bytes)).ok()
    };
    let id = read("root.json")?.get("root_id")?.as_str()?.to_owned();
    Some((id, read("epoch")?.get("epoch")?.as_u64()?))
}

/// Closes a manager.
pub fn close(manager: &Manager) -> Result<(), String> {
    manager.close(Some(PATIENCE)).map_err(|error| format!("closing: {error}"))
}
