//! Changes of a root beside saves: rewind, delete, hold, add a step, later metrics.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use stepwell_core::io::{EntryKind, LockKind};

use super::{Inner, Manager};
use crate::adopted_step::AdoptedStep;
use crate::checkpoint::Checkpoint;
use crate::commit::aside;
use crate::coordination::LEADER;
use crate::copy;
use crate::directory_layout::{self, LEASE, OwnName};
use crate::error::{Error, Result};
use crate::metrics;
use crate::sidecars;

/// A held step: leased, and kept by retention, until this is dropped.
pub struct Hold {
    step: u64,
    inner: Arc<Inner>,
    _checkpoint: Checkpoint,
}

impl Hold {
    /// The step.
    pub fn step(&self) -> u64 {
        self.step
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.inner.birth.is_here() {
            self.inner.usage.release(self.step);
        }
    }
}

impl Inner {
    /// Refuses a branch that exists. A branch is one line of steps, and a name that is taken would
    /// stop a rewind halfway.
    fn check_branch_is_new(&self, branch: &str) -> Result<()> {
        let is_of_it = |name: &str| matches!(directory_layout::parse(name), Some(OwnName::Branch { branch: other, .. }) if other == branch);
        match self.root.dir.entries()?.into_iter().find(|entry| is_of_it(&entry.name)) {
            Some(entry) => Err(Error::BranchExists {
                root: self.root.path.clone(),
                branch: branch.to_owned(),
                example: entry.name,
            }),
            None => Ok(()),
        }
    }

    /// Retires a step that nobody holds. A reader that comes now waits for the exclusive lease,
    /// then finds the step gone.
    fn retire_unheld(&self, step: u64, name: &str, trash: &str) -> Result<()> {
        let retiring = self.usage.retiring([step]);
        if !retiring.may_go(step) {
            let by = "this manager holds it (hold()), or is removing it already; release the hold first"
                .to_owned();
            return Err(Error::Held { step, by });
        }
        let dir = self.root.dir.open_dir(name)?;
        let _lease = match dir.try_lock(LEASE, LockKind::Exclusive, false) {
            Ok(Some(lease)) => Some(lease),
            Ok(None) => {
                let lease = dir.path().join(LEASE);
                let by = format!(
                    "a reader has it leased (an open checkpoint, hold() or watch(), of this process or of another: `lsof {0}` lists who has {0} open); close that first",
                    lease.display()
                );
                return Err(Error::Held { step, by });
            }
            // Without locks nobody can hold it, and its files stay for the grace period.
            Err(error) if error.is_not_found() || error.is_without_locks() => None,
            Err(error) => return Err(error.into()),
        };
        self.root.check_writer()?;
        aside::retire(&*self.root.dir, name, trash)?;
        Ok(())
    }
}

impl Manager {
    /// Makes `step` the latest. Newer steps move into a branch, newest first, so that an
    /// interruption leaves a latest step between the two. They are kept as `.branch-<name>.<step>`.
    /// Returns the branch and the moved steps. Fails before it moves any if the step is damaged or
    /// the branch exists ([`Error::BranchExists`]).
    pub fn rewind(&self, step: u64, branch: Option<&str>) -> Result<(String, Vec<u64>)> {
        let inner = &self.inner;
        inner.check_writable("rewind")?;
        let branch = match branch {
            Some(name) if directory_layout::is_branch_name(name) => name.to_owned(),
            Some(name) => {
                return Err(Error::Invalid(format!(
                    "the branch name {name:?} must be made of letters, digits, `_` and `-`"
                )));
            }
            None => {
                let unique = inner.environment.hex_id();
                format!("{}-{}", directory_layout::label(step), unique.get(..8).unwrap_or(&unique))
            }
        };
        let drained = inner.drain(None);
        let (branch, moved) = inner.team.agree("rewind", drained, |_| inner.set_newer_aside(step, branch))?;
        inner.history.lock().trail.restored(step);
        inner.ranks.set_highest(step);
        Ok((branch, moved))
    }

    /// Deletes a step. It is unlisted at once and durably. Its files go in the background. The
    /// newest step is deleted too (decision 011). Fails with [`Error::Held`] for a step that a
    /// process holds or reads.
    pub fn delete(&self, step: u64) -> Result<()> {
        let inner = &self.inner;
        inner.check_writable("delete a step")?;
        inner.team.ask("delete", || inner.delete(step))
    }

    /// Deletes a branch of a rewind. Its files go in the background, once no reader has them.
    /// Returns the names that its steps had.
    pub fn delete_branch(&self, branch: &str) -> Result<Vec<String>> {
        let inner = &self.inner;
        inner.check_writable("delete a branch")?;
        inner.team.ask("delete a branch", || inner.delete_branch(branch))
    }

    /// Copies an open checkpoint into this root, as its step: see [`copy`].
    pub fn add(
        &self,
        source: &Checkpoint,
        part: &copy::CopySelection,
        progress: copy::Progress<'_>,
    ) -> Result<()> {
        let (inner, step) = (&self.inner, source.manifest().step);
        let name = self.free_name(step, "add a step")?;
        let label = directory_layout::label(step);
        copy::into(source, part, &inner.root.dir, &name, &label, &inner.environment, progress)
    }

    /// Returns the name of a step that the root does not have yet. `what` is what the caller does
    /// with it.
    pub fn free_name(&self, step: u64, what: &'static str) -> Result<String> {
        let inner = &self.inner;
        inner.check_writable(what)?;
        if !inner.team.is_alone() {
            return Err(Error::Invalid(format!("to {what}, open a manager of one process")));
        }
        inner.drain(None)?;
        let root = &inner.root;
        let name = root.names.format(step);
        if root.list()?.steps.contains_key(&step) {
            return Err(Error::PathExists { path: root.path.join(name) });
        }
        root.check_writer()?;
        Ok(name)
    }

    /// Commits a step whose bytes are files of another library: see [`AdoptedStep`].
    pub fn adopt(&self, adopted: &AdoptedStep) -> Result<()> {
        let (inner, step) = (&self.inner, adopted.step);
        let name = self.free_name(step, "adopt a checkpoint")?;
        let label = directory_layout::label(step);
        let manifest = adopted.manifest(inner.environment.hex_id());
        copy::publish(&inner.root.dir, &name, &label, &inner.environment, |dir, _| {
            copy::write_manifest(dir, &manifest)
        })
    }

    /// Protects a step from retention and deletion until the [`Hold`] is dropped. With several
    /// ranks, only the leader can.
    pub fn hold(&self, step: u64) -> Result<Hold> {
        // A reader's lease protects the files of a step, but not its place in the listing.
        self.inner.check_writable(
            "hold a step in its place (an open checkpoint keeps its files until it is closed)",
        )?;
        if !self.inner.team.leads() {
            return Err(Error::Invalid(format!(
                "rank {} cannot hold step {step} in its place: rank {LEADER} retires steps, and holds them; an open checkpoint keeps its files, on any rank",
                self.inner.team.rank()
            )));
        }
        // Count it before the lease: retention could retire it in between.
        self.inner.usage.hold(step, self.inner.options.stall_timeout)?;
        match self.checkpoint(Some(step)) {
            Ok(checkpoint) => Ok(Hold { step, inner: Arc::clone(&self.inner), _checkpoint: checkpoint }),
            Err(error) => {
                self.inner.usage.release(step);
                Err(error)
            }
        }
    }

    /// Sets the steps that retention leaves alone. Only the leader retires steps.
    pub fn keep(&self, steps: BTreeSet<u64>) {
        self.inner.usage.keep(steps);
    }

    /// Adds metrics to a committed step. Of several values for one name the last wins.
    pub fn add_metrics(&self, step: u64, metrics: &BTreeMap<String, f64>) -> Result<()> {
        self.inner.check_writable("add metrics")?;
        let found = self.inner.root.find(Some(step))?;
        metrics::add(&*self.inner.root.dir, &found.manifest.attempt, step, metrics, &self.inner.environment)
    }

    /// Applies retention now, as after every commit. Returns the retired steps.
    pub fn apply_retention(&self) -> Result<Vec<u64>> {
        self.inner.check_writable("apply retention")?;
        self.inner.drain(None)?;
        self.inner.reinspect_all();
        self.inner.apply_retention()
    }
}

impl Inner {
    /// The leader's part of a rewind.
    fn set_newer_aside(&self, step: u64, branch: String) -> Result<(String, Vec<u64>)> {
        let root = &self.root;
        let listing = root.list()?;
        let steps = &listing.steps;
        let target = steps.get(&step).ok_or_else(|| root.not_found(Some(step)))?;
        // Before any move: a step that cannot be restored must not become the latest.
        if let Some(damage) = root.damage(target)? {
            let what = format!(
                "{damage}; nothing was moved: rewind to a step that is whole (a verification says which are)"
            );
            return Err(stepwell_core::Error::corrupt(root.path.join(&target.name), what).into());
        }
        if !target.manifest.dropped.is_empty() {
            let gone: Vec<&str> = target.manifest.dropped.iter().map(|one| one.item.as_str()).collect();
            tracing::warn!(step, ?gone, "rewinding to a thinned step: it does not have these items");
        }
        // Newer steps that may not be durable go too, so that `step` becomes the latest.
        let uncertain = root.uncertain_above(step);
        let newer: BTreeSet<u64> =
            steps.range(step + 1..).map(|(&newer, _)| newer).chain(uncertain.iter().copied()).collect();
        // A new hold waits until all are moved.
        let retiring = self.usage.retiring(newer.iter().copied());
        if let Some(&held) = newer.iter().find(|&&newer| !retiring.may_go(newer)) {
            let by = format!(
                "this manager holds it (hold()), or is removing it already, and a rewind to step {step} would set it aside; release the hold first. Nothing was moved"
            );
            return Err(Error::Held { step: held, by });
        }
        if !newer.is_empty() {
            self.check_branch_is_new(&branch)?;
        }
        root.check_writer()?;
        let mut moved = Vec::new();
        for (number, found) in steps.range(step + 1..).rev() {
            aside::set_aside(&*root.dir, &found.name, &branch)?;
            moved.push(*number);
        }
        for number in uncertain {
            let name = root.names.format(number);
            if root.dir.stat(&name)?.is_some() {
                aside::set_aside(&*root.dir, &name, &branch)?;
            }
            self.went(number);
            root.set_uncertain(number, false);
        }
        drop(retiring);
        Ok((branch, moved))
    }

    fn delete_branch(&self, branch: &str) -> Result<Vec<String>> {
        let mut steps = Vec::new();
        let mut renames = Vec::new();
        for entry in self.root.dir.entries()?.into_iter().filter(|entry| entry.kind == EntryKind::Dir) {
            match directory_layout::parse(&entry.name) {
                Some(OwnName::Branch { branch: of, step_name }) if of == branch => {
                    let label = directory_layout::label_of_path(&step_name);
                    renames.push((
                        entry.name,
                        directory_layout::trash(&label, self.environment.rng.next_u128()),
                    ));
                    steps.push(step_name);
                }
                _ => {}
            }
        }
        if steps.is_empty() {
            return Err(Error::Invalid(format!("{} has no branch {branch:?}", self.root.path.display())));
        }
        self.root.check_writer()?;
        let retired = aside::retire_all(&*self.root.dir, &renames);
        self.root.deleter.enqueue(renames.into_iter().take(retired.deletable()).map(|(_, trash)| trash));
        match retired.error {
            Some(error) => Err(error.into()),
            None => Ok(steps),
        }
    }

    fn delete(&self, step: u64) -> Result<()> {
        let root = &self.root;
        root.sync_uncertain(step);
        let found = root.find(Some(step))?;
        let trash = root.trash(step);
        self.retire_unheld(step, &found.name, &trash)?;
        self.went(step);
        sidecars::remove(&*root.dir, std::slice::from_ref(&found.manifest.attempt));
        root.deleter.enqueue([trash]);
        Ok(())
    }
}
