//! The hand-over of the steps to the machine that leads.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use stepwell_core::format::manifest::{Attempt, Manifest};
use stepwell_core::io::{Dir, EntryKind};
use stepwell_core::limits;
use stepwell_core::served::ServedDir;

use super::dir::NamedAttempt;
use super::meeting::MachineReport;
use super::part_of;
use crate::commit::aside;
use crate::delete_tree::ignore_missing;
use crate::directory_layout::{self, ASIDE, LEASE, MANIFEST, METRICS, STALE, TRACES, control};
use crate::environment::Environment;
use crate::error::Result;
use crate::step_name::StepName;

/// The machine that leads now.
pub(super) struct NewMain<'a> {
    pub(super) local: &'a Arc<dyn Dir>,
    pub(super) own: u32,
    pub(super) reports: &'a BTreeMap<u32, MachineReport>,
    pub(super) others: &'a BTreeMap<u32, Arc<ServedDir>>,
    pub(super) environment: &'a Environment,
    /// The pattern of step names.
    pub(super) names: &'a StepName,
    /// The machines whose copies take the place of the last main machine, which is absent.
    pub(super) stand_ins: &'a [u32],
}

impl NewMain<'_> {
    /// Takes the steps of the machine that was main last, and all branches. Steps that other
    /// machines still have go into a branch: they have been absent since.
    pub(super) fn take_steps_over(&self, last: Option<u32>) -> Result<()> {
        let (of_last, mut current) = (last.into_iter().chain(self.stand_ins.iter().copied()), HashSet::new());
        let of_last = of_last.flat_map(|machine| self.named_of(machine));
        current.extend(of_last.filter(|named| named.is_step()).map(|named| &named.attempt));
        let mut steps: HashSet<u64> = self.current_steps(&current);
        let mut from_copies = Vec::new();
        for &stand_in in self.stand_ins {
            for named in self.reports.get(&stand_in).map_or(&[][..], |report| &report.copied) {
                if !current.contains(&named.attempt) && steps.insert(named.step) {
                    from_copies.push((stand_in, named));
                }
            }
        }
        current.extend(from_copies.iter().map(|(_, named)| &named.attempt));
        // First: metrics without a step are removed, and a step without its metrics may be, too.
        self.others.values().try_for_each(|from| take_sidecars_over(&**self.local, &**from))?;
        let mut there: HashSet<&Attempt> = HashSet::new();
        let stale = self.environment.new_branch(STALE);
        for named in self.named_of(self.own) {
            there.insert(&named.attempt);
            if named.is_step() && !current.contains(&named.attempt) {
                tracing::warn!(step = named.step, branch = %stale, "another machine has led this run since: a step was moved into a branch");
                aside::set_aside(&**self.local, &named.name, &stale)?;
            }
        }
        for (stand_in, named) in from_copies {
            if !there.insert(&named.attempt) {
                continue;
            }
            let from = self.others.get(&stand_in).map_or(&**self.local, |other| &**other as &dyn Dir);
            let target = self.free_name(named, self.names.format(named.step), &stale)?;
            if stand_in == self.own && named.name == part_of(named.step, &named.attempt) {
                aside::name_part(&**self.local, &named.name, &target)?;
            } else {
                self.take_step_over(from, named, &target)?;
            }
            tracing::warn!(step = named.step, from = %from.path().display(), "the main machine of this run is absent: a step was taken from the copy of another one");
        }
        // Those of the last main machine come first, so that no other gets their names.
        let rest = self.others.keys().copied().filter(|&machine| Some(machine) != last);
        for machine in last.into_iter().chain(rest) {
            let Some(from) = self.others.get(&machine) else { continue };
            let stale = self.environment.new_branch(STALE);
            let mut taken = Vec::new();
            for named in self.named_of(machine) {
                if !there.insert(&named.attempt) {
                    continue;
                }
                let is_left = named.is_step() && !current.contains(&named.attempt);
                let target =
                    if is_left { directory_layout::branch(&stale, &named.name) } else { named.name.clone() };
                let target = self.free_name(named, target, &stale)?;
                self.take_step_over(&**from, named, &target)?;
                taken.push(target);
            }
            if !taken.is_empty() {
                tracing::info!(from = %from.path().display(), steps = ?taken, "took steps over from another machine");
            }
        }
        Ok(())
    }

    /// Returns the numbers of these steps.
    fn current_steps(&self, current: &HashSet<&Attempt>) -> HashSet<u64> {
        let named = self.reports.values().flat_map(|report| &report.named);
        named.filter(|named| current.contains(&named.attempt)).map(|named| named.step).collect()
    }

    fn named_of(&self, machine: u32) -> &[NamedAttempt] {
        self.reports.get(&machine).map_or(&[], |report| &report.named)
    }

    /// Makes room for a step: an invalid directory with its name is quarantined. A branch that has
    /// another attempt of the step stays.
    fn free_name(&self, named: &NamedAttempt, target: String, stale: &str) -> Result<String> {
        if self.local.stat(&target)?.is_none() {
            return Ok(target);
        }
        if named.is_step() {
            let quarantine = directory_layout::quarantine(&target, self.environment.rng.next_u128());
            tracing::warn!(name = %target, to = %quarantine, "an invalid directory has the name of a step");
            aside::name_part(&**self.local, &target, &quarantine)?;
            return Ok(target);
        }
        Ok(directory_layout::branch(stale, &named.step_name()))
    }

    /// Copies manifest and indexes of a step to this machine, beside the files that it has of it,
    /// and gives it its name.
    fn take_step_over(&self, from: &dyn Dir, named: &NamedAttempt, target: &str) -> Result<()> {
        let local = &**self.local;
        let part = part_of(named.step, &named.attempt);
        let dir = match local.open_dir(&part) {
            Err(error) if error.is_gone() => local.create_dir(&part)?,
            opened => opened?,
        };
        let path = format!("{}/{MANIFEST}", named.name);
        let bytes = from.read_file(&path, limits::MAX_MANIFEST_BYTES)?;
        let manifest = Manifest::decode(&bytes, &from.path().join(path))?;
        let write = |name: &str, bytes: &[u8]| -> stepwell_core::Result<()> {
            // An earlier try was interrupted.
            ignore_missing(dir.remove_file(name))?;
            dir.write_file(name, bytes)
        };
        for item in &manifest.items {
            match dir.create_dir(&item.dir) {
                Err(error) if !error.already_exists() => return Err(error.into()),
                _ => {}
            }
            let index =
                from.read_file(&format!("{}/{}", named.name, item.index.path), limits::MAX_INDEX_BYTES)?;
            write(&item.index.path, &index)?;
            dir.open_dir(&item.dir)?.sync()?;
        }
        write(LEASE, &[])?;
        write(MANIFEST, &bytes)?;
        dir.sync()?;
        Ok(aside::name_part(local, &part, target)?)
    }
}

/// Copies the later metrics and traces that this machine lacks.
pub(super) fn take_sidecars_over(local: &dyn Dir, from: &dyn Dir) -> Result<()> {
    for dir in [METRICS, TRACES].map(control) {
        let there = match from.open_dir(&dir) {
            Err(error) if error.is_gone() => continue,
            opened => opened?,
        };
        let entries = there.entries()?.into_iter().filter(|entry| entry.kind == EntryKind::File);
        let here = match local.create_dir(&dir) {
            Err(error) if error.already_exists() => local.open_dir(&dir),
            made => made,
        }?;
        for entry in entries {
            if here.stat(&entry.name)?.is_none() {
                let bytes = there.read_file(&entry.name, limits::MAX_TRACE_BYTES)?;
                here.replace_file(&entry.name, &format!(".{}.new", entry.name), &bytes)?;
            }
        }
    }
    Ok(())
}

/// Turns the steps of a machine that is not main into parts. They keep their manifests, so that the
/// steps survive a loss of the new main machine. Those of a branch get a mark: they are no steps.
pub(super) fn demote(local: &dyn Dir, named: &[NamedAttempt]) -> Result<()> {
    for one in named {
        let NamedAttempt { name, step, attempt } = one;
        let mark = format!("{name}/{ASIDE}");
        if !one.is_step() && local.stat(&mark)?.is_none() {
            local.write_file(&mark, &[])?;
            local.open_dir(name)?.sync()?;
        }
        match aside::name_part(local, name, &part_of(*step, attempt)) {
            Err(error) if error.already_exists() => {
                tracing::warn!(%name, "this machine has the files of a step twice; this copy stays");
            }
            renamed => renamed?,
        }
    }
    Ok(())
}
