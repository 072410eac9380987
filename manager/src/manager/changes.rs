//! Changes of a root beside saves: rewind, delete, hold, add a step, later metrics.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use stepwell_core::format::manifest::Attempt;
use stepwell_core::io::{Dir, EntryKind, LockKind};

use super::tiers::Tier;
use super::usage::Retiring;
use super::{Inner, Manager};
use crate::adopted_step::AdoptedStep;
use crate::checkpoint::Checkpoint;
use crate::commit::aside;
use crate::coordination::LEADER;
use crate::copy;
use crate::directory_layout::{self, LEASE, OwnName};
use crate::error::{Advice, Error, Result};
use crate::metrics;
use crate::removals::{Removals, Rewound, UnfinishedRewind};
use crate::sidecars;

/// A held step: leased, and kept by retention, until this is dropped.
pub struct Hold {
    step: u64,
    inner: Arc<Inner>,
    _checkpoint: Checkpoint,
    /// The farther tiers that keep their copies, too.
    farther: Vec<Arc<Tier>>,
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
            for tier in &self.farther {
                tier.manager.inner.usage.release(self.step);
            }
        }
    }
}

/// A move of steps of a root into a branch. All checks have passed.
pub(super) struct MoveAside<'a> {
    inner: &'a Inner,
    branch: String,
    /// The steps, with their names and saves.
    steps: BTreeMap<u64, (String, Attempt)>,
    uncertain: Vec<u64>,
    _retiring: Retiring<'a>,
}

impl MoveAside<'_> {
    /// Moves the steps, newest first. Returns them.
    pub(super) fn carry_out(self) -> Result<Vec<u64>> {
        let root = &self.inner.root;
        let mut moved = Vec::new();
        for (number, (name, _)) in self.steps.into_iter().rev() {
            aside::set_aside(&*root.dir, &name, &self.branch)?;
            moved.push(number);
        }
        for number in self.uncertain {
            let name = root.names.format(number);
            if root.dir.stat(&name)?.is_some() {
                aside::set_aside(&*root.dir, &name, &self.branch)?;
            }
            self.inner.went(number);
            root.set_uncertain(number, false);
        }
        Ok(moved)
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

    /// Retires a step that nobody holds, and records that for tiers that are absent. A reader that
    /// comes now waits for the exclusive lease, then finds the step gone.
    fn retire_unheld(&self, step: u64, name: &str, trash: &str, attempt: &Attempt) -> Result<()> {
        let retiring = self.usage.retiring([step]);
        if !retiring.may_go(step) {
            let by = "this manager holds it, or is removing it already".to_owned();
            return Err(Error::Held { step, by, advice: Some(Advice::ReleaseHold) });
        }
        let dir = self.root.dir.open_dir(name)?;
        let _lease = match dir.try_lock(LEASE, LockKind::Exclusive, false) {
            Ok(Some(lease)) => Some(lease),
            Ok(None) => {
                let lease = dir.path().join(LEASE);
                let by = format!(
                    "a reader of this process or of another has it leased (`lsof {0}` lists who has {0} open)",
                    lease.display()
                );
                return Err(Error::Held { step, by, advice: Some(Advice::CloseReader) });
            }
            // Without locks nobody can hold it, and its files stay for the grace period.
            Err(error) if error.is_not_found() || error.is_without_locks() => None,
            Err(error) => return Err(error.into()),
        };
        self.root.check_writer()?;
        self.record_removal(|home| Removals::add_deleted(home, attempt))?;
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
        let (branch, moved) = inner.team.agree("rewind", drained, |_| inner.rewind(step, branch))?;
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
        inner.team.ask("delete", || inner.delete_everywhere(step))
    }

    /// Deletes a branch of a rewind in every tier. Its files go in the background, once no reader
    /// has them. Returns the names that its steps had.
    pub fn delete_branch(&self, branch: &str) -> Result<Vec<String>> {
        let inner = &self.inner;
        inner.check_writable("delete a branch")?;
        inner.team.ask("delete a branch", || inner.delete_branch_everywhere(branch))
    }

    /// Copies an open checkpoint into this root, as its step: see [`copy`].
    pub fn add(
        &self,
        source: &Checkpoint,
        part: &copy::CopySelection,
        progress: copy::Progress<'_>,
    ) -> Result<()> {
        let name = self.free_name(source.manifest().step, "add a step")?;
        let place = self.place_of(name, source.manifest().step, None);
        let inner = &self.inner;
        let (place, environment) = (&place, &inner.environment);
        let (check, last) = (copy::CopyCheck::Whole, &|| Ok(()));
        copy::CopyTask { source, part, check, place, environment, others: None, last }.run(progress)?;
        inner.carry_later(source.manifest().step);
        Ok(())
    }

    /// Copies a step of a nearer tier into this root, where it replaces another attempt.
    pub(super) fn add_carried(
        &self,
        source: &Checkpoint,
        compress: &[String],
        others: Option<&dyn copy::OtherWriters>,
        progress: copy::Progress<'_>,
    ) -> Result<()> {
        let (inner, step) = (&self.inner, source.manifest().step);
        let root = &inner.root;
        let (name, trash) = match root.list_changes()?.steps.get(&step) {
            Some(found)
                if found.manifest.attempt == source.manifest().attempt && root.damage(found)?.is_none() =>
            {
                return Ok(());
            }
            Some(found) => (found.name.clone(), Some(root.trash(step))),
            None => (root.names.format(step), None),
        };
        let place = self.place_of(name, step, trash.clone());
        let part = copy::CopySelection { compress: compress.to_vec(), ..copy::CopySelection::default() };
        let (part, place, environment) = (&part, &place, &inner.environment);
        let (check, last) = (copy::CopyCheck::WhileReading, &|| root.check_writer());
        copy::CopyTask { source, part, check, place, environment, others, last }.run(progress)?;
        if trash.is_some() {
            inner.went(step);
            root.deleter.enqueue(trash);
        }
        Ok(())
    }

    /// Returns the place of a step of this root.
    fn place_of(&self, name: String, step: u64, trash: Option<String>) -> copy::CopyPlace {
        let parent = Arc::clone(&self.inner.root.dir);
        copy::CopyPlace { parent, name, label: directory_layout::label(step), trash }
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
        if root.list()?.steps.contains_key(&step) || inner.newest_carried(step..=step).is_some() {
            return Err(Error::PathExists { path: root.path.join(name), advice: Advice::DeleteStep });
        }
        root.check_writer()?;
        Ok(name)
    }

    /// Commits a step whose bytes are files of another library: see [`AdoptedStep`].
    pub fn adopt(&self, adopted: &AdoptedStep) -> Result<()> {
        let (inner, step) = (&self.inner, adopted.step);
        let name = self.free_name(step, "adopt a checkpoint")?;
        let manifest = adopted.manifest(inner.environment.hex_id());
        let place = self.place_of(name, step, None);
        copy::publish(&place, &inner.environment, |dir, _| copy::write_manifest(dir, &manifest))
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
        if let Some(tier) = self.inner.only_tier_of(step)? {
            return tier.manager.hold(step);
        }
        // Count it before the lease: retention could retire it in between.
        self.inner.usage.hold(step, self.inner.options.stall_timeout)?;
        match self.checkpoint(Some(step)) {
            Ok(checkpoint) => {
                let inner = Arc::clone(&self.inner);
                let mut hold = Hold { step, inner, _checkpoint: checkpoint, farther: Vec::new() };
                for tier in &self.inner.tiers {
                    if tier.lock().steps.contains_key(&step) {
                        tier.manager.inner.usage.hold(step, self.inner.options.stall_timeout)?;
                        hold.farther.push(Arc::clone(tier));
                    }
                }
                Ok(hold)
            }
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
        let (_, found) = self.inner.find(Some(step))?;
        let attempt = &found.manifest.attempt;
        for root in self.inner.roots() {
            if root.committed(step)?.is_some_and(|theirs| theirs.manifest.attempt == *attempt) {
                metrics::add(&*root.dir, attempt, step, metrics, &self.inner.environment)?;
            }
        }
        Ok(())
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
    /// The leader's part of a rewind, in every tier. Everything is checked before the first move.
    /// The last tier has a record of the rewind meanwhile, so that the next writer ends it after a
    /// crash.
    fn rewind(&self, step: u64, branch: String) -> Result<(String, Vec<u64>)> {
        let (root, target) = self.find(Some(step))?;
        // Before any move: a step that cannot be restored must not become the latest.
        if let Some(damage) = root.damage(&target)? {
            let what = format!(
                "{damage}; nothing was moved: rewind to a step that is whole (a verification says which are)"
            );
            return Err(stepwell_core::Error::corrupt(root.path.join(&target.name), what).into());
        }
        if !target.manifest.dropped.is_empty() {
            let gone: Vec<&str> = target.manifest.dropped.iter().map(|one| one.item.as_str()).collect();
            tracing::warn!(step, ?gone, "rewinding to a thinned step: it does not have these items");
        }
        let moved = self.removing(
            |other| other > step,
            || {
                let first = step + 1;
                let moves = self.moves_aside(first, None, &branch, true)?;
                self.record_that_run_goes_on()?;
                let moved = moves.iter().flat_map(|one| one.steps.values());
                let rewind = UnfinishedRewind {
                    rewound: Rewound {
                        id: self.environment.hex_id(),
                        first,
                        session: self.team.session().to_owned(),
                        next_save: self.saves.lock().counter,
                    },
                    branch: branch.clone(),
                    moved: moved.map(|(_, attempt)| attempt.clone()).collect(),
                };
                if !self.tiers.is_empty() {
                    rewind.record(self.home())?;
                }
                let moved = self.carry_out_rewind(&rewind, moves)?;
                if !self.tiers.is_empty() {
                    if let Err(error) = self.know_rewind(&rewind.rewound.id) {
                        // Steps that this session saves later are not removed by it.
                        tracing::warn!(%error, "recording a rewind failed. The next manager looks at it again");
                    }
                    UnfinishedRewind::forget(self.home())?;
                }
                Ok(moved)
            },
        )?;
        Ok((branch, moved))
    }

    /// Ends a rewind that a crash has interrupted. Steps that were saved since stay.
    pub(super) fn finish_rewind(&self) -> Result<()> {
        let Some(rewind) = UnfinishedRewind::read(self.home())? else { return Ok(()) };
        let moves = self.moves_aside(rewind.rewound.first, Some(&rewind.moved), &rewind.branch, false)?;
        let moved = self.carry_out_rewind(&rewind, moves)?;
        tracing::warn!(?moved, branch = %rewind.branch, "an interrupted rewind was ended");
        UnfinishedRewind::forget(self.home())
    }

    /// Records a rewind for the tiers that are absent, and moves the steps of the others.
    fn carry_out_rewind(&self, rewind: &UnfinishedRewind, moves: Vec<MoveAside<'_>>) -> Result<Vec<u64>> {
        let UnfinishedRewind { rewound, branch, .. } = rewind;
        self.record_removal(|home| Removals::add_rewind(home, rewound))?;
        let moved = self.carry_out(moves)?;
        self.move_incomplete(branch, &|step, attempt| rewound.removes(step, attempt))?;
        Ok(moved)
    }

    /// Records a removal for the tiers that are absent. A full disk does not stop it: it may make
    /// room.
    fn record_removal(&self, record: impl FnOnce(&dyn Dir) -> Result<()>) -> Result<()> {
        // No other writer has the records of the run.
        self.tiers.last().map_or(Ok(()), |tier| tier.root().check_writer())?;
        match record(self.home()) {
            Err(Error::Core(error)) if error.is_full() => {
                tracing::warn!(%error, "a removal is not recorded: its steps may come back with a tier that is absent");
                Ok(())
            }
            recorded => recorded,
        }
    }

    /// The directory of the last tier, which has the records of the run.
    fn home(&self) -> &dyn Dir {
        self.tiers.last().map_or(&*self.root.dir, |tier| &*tier.root().dir)
    }

    /// Returns the moves of a rewind, of the last tier first.
    fn moves_aside(
        &self,
        first: u64,
        only: Option<&HashSet<Attempt>>,
        branch: &str,
        is_new: bool,
    ) -> Result<Vec<MoveAside<'_>>> {
        let farther = self.tiers.iter().rev().map(|tier| &*tier.manager.inner);
        farther.chain([self]).map(|inner| inner.move_aside(first, only, branch, is_new)).collect()
    }

    /// Moves steps into a branch, newest first. Returns them.
    fn carry_out(&self, moves: Vec<MoveAside<'_>>) -> Result<Vec<u64>> {
        let mut all = BTreeSet::new();
        for (number, one) in moves.into_iter().enumerate() {
            let moved = one.carry_out()?;
            if let Some(tier) = self.tiers.iter().rev().nth(number) {
                tier.lock().steps.retain(|step, _| !moved.contains(step));
            }
            all.extend(moved);
        }
        Ok(all.into_iter().rev().collect())
    }

    /// Prepares the move of the steps from this one on into a branch: a new one, if `is_new`. With
    /// `only`, only these saves are moved.
    pub(super) fn move_aside(
        &self,
        first: u64,
        only: Option<&HashSet<Attempt>>,
        branch: &str,
        is_new: bool,
    ) -> Result<MoveAside<'_>> {
        let root = &self.root;
        let listing = root.list()?;
        let is_moved = |attempt: &Attempt| only.is_none_or(|only| only.contains(attempt));
        let steps: BTreeMap<u64, (String, Attempt)> = listing
            .steps
            .range(first..)
            .map(|(&step, found)| (step, (found.name.clone(), found.manifest.attempt.clone())))
            .filter(|(_, (_, attempt))| is_moved(attempt))
            .collect();
        // Those that may not be durable go too, so that the one below becomes the latest.
        let uncertain = if only.is_none() { root.uncertain_from(first) } else { Vec::new() };
        let newer: BTreeSet<u64> = steps.keys().chain(&uncertain).copied().collect();
        // A new hold waits until all are moved.
        let retiring = self.usage.retiring(newer.iter().copied());
        if let Some(&held) = newer.iter().find(|&&newer| !retiring.may_go(newer)) {
            let by = "this manager holds it, or is removing it already, and a rewind would set it aside. Nothing was moved".to_owned();
            return Err(Error::Held { step: held, by, advice: Some(Advice::ReleaseHold) });
        }
        if is_new && !newer.is_empty() {
            self.check_branch_is_new(branch)?;
        }
        root.check_writer()?;
        Ok(MoveAside { inner: self, branch: branch.to_owned(), steps, uncertain, _retiring: retiring })
    }

    /// Deletes a branch in every tier that has it. Returns the names that its steps had.
    fn delete_branch_everywhere(&self, branch: &str) -> Result<Vec<String>> {
        let mut steps = BTreeSet::from_iter(self.delete_branch(branch)?);
        for tier in &self.tiers {
            steps.extend(tier.manager.inner.delete_branch(branch)?);
        }
        if steps.is_empty() {
            return Err(Error::Invalid(format!("{} has no branch {branch:?}", self.root.path.display())));
        }
        Ok(steps.into_iter().collect())
    }

    /// Deletes a branch in this root. Returns the names that its steps had. None: it has none.
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
            return Ok(steps);
        }
        self.root.check_writer()?;
        let retired = aside::retire_all(&*self.root.dir, &renames);
        self.root.deleter.enqueue(renames.into_iter().take(retired.deletable()).map(|(_, trash)| trash));
        match retired.error {
            Some(error) => Err(error.into()),
            None => Ok(steps),
        }
    }

    /// Returns the tier that has a step which the near tier lacks.
    fn only_tier_of(&self, step: u64) -> Result<Option<&Tier>> {
        if self.tiers.is_empty() || self.root.committed(step)?.is_some() {
            return Ok(None);
        }
        let (root, _) = self.find(Some(step))?;
        Ok(self.tiers.iter().map(|tier| &**tier).find(|tier| std::ptr::eq(tier.root(), root)))
    }

    /// Deletes a step in every tier, the nearest first: it may be in use there.
    fn delete_everywhere(&self, step: u64) -> Result<()> {
        self.removing(
            |other| other == step,
            || {
                // Each tier must answer before the step is deleted in the first one.
                let has_it = |tier: &Arc<Tier>| Ok(tier.root().committed(step)?.is_some());
                let have_it = self.tiers.iter().map(has_it).collect::<Result<Vec<bool>>>()?;
                if self.tiers.is_empty() || self.root.committed(step)?.is_some() {
                    self.delete(step)?;
                } else {
                    self.find(Some(step))?;
                }
                for (tier, has_it) in self.tiers.iter().zip(have_it) {
                    if has_it {
                        tier.manager.delete(step)?;
                    }
                    tier.lock().steps.remove(&step);
                }
                Ok(())
            },
        )
    }

    /// Records a removal before it is made. The main machine of the last job may be absent. It does
    /// not bring the steps back then.
    fn record_that_run_goes_on(&self) -> Result<()> {
        self.machines.as_ref().map_or(Ok(()), |machines| Ok(machines.record_session()?))
    }

    fn delete(&self, step: u64) -> Result<()> {
        let root = &self.root;
        root.sync_uncertain(step);
        let found = root.find(Some(step))?;
        let trash = root.trash(step);
        self.record_that_run_goes_on()?;
        self.retire_unheld(step, &found.name, &trash, &found.manifest.attempt)?;
        self.went(step);
        sidecars::remove(&*root.dir, std::slice::from_ref(&found.manifest.attempt));
        root.deleter.enqueue([trash]);
        Ok(())
    }
}
