//! The checks of [`crate::steps::check`] on a real disk after a real accident: as a reader, as the
//! next writer, and as the one after that.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use stepwell_manager::{Checkpoint, Environment, Manager, Options, Outcome, SaveRequest};

use super::history::{PATIENCE, environment, opened, options};
use super::trials::leftovers;
use crate::crash::Marks;
use crate::steps::promises::Promises;
use crate::steps::states;

/// The number of valid things.
#[derive(Clone, Copy, Debug, Default)]
pub struct Found {
    /// Steps that are listed, each read and verified.
    pub steps: usize,
    /// Steps in branches, each read and verified.
    pub set_aside: usize,
}

/// The marks of a journal: what follows a line that was not written to its end, and lines about
/// errors, promise nothing.
pub fn marks(journal: &str) -> Marks {
    let mut marks = Marks::default();
    for line in journal.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
        if !line.starts_with("error ") {
            marks.push(&Arc::from(line));
        }
    }
    marks
}

/// Every invariant that a root must keep, whatever happened to its writer and its disk.
pub fn judge(root: &Path, marks: &Marks) -> Result<Found, String> {
    let promises = Promises::of(marks)?;
    if !root.exists() {
        promises.nothing_is_lost(&BTreeSet::new())?;
        return match &promises.opened {
            None => Ok(Found::default()),
            Some((id, _)) => Err(format!("I2: the root {id} is gone")),
        };
    }
    let reading = Options { read_only: true, ..options() };
    view(root, reading, &promises).map_err(|what| format!("before recovery: {what}"))?;
    let found = view(root, options(), &promises).map_err(|what| format!("after recovery: {what}"))?;
    nothing_is_left(root)?;
    let again = view(root, options(), &promises).map_err(|what| format!("after recovering twice: {what}"))?;
    if again.steps != found.steps || again.set_aside != found.set_aside {
        return Err(format!("I6: recovering twice is not recovering once: {found:?}, {again:?}"));
    }
    next_save(root).map_err(|what| format!("the next save: {what}"))?;
    nothing_is_left(root)?;
    Ok(found)
}

fn words(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn view(root: &Path, options: Options, promises: &Promises) -> Result<Found, String> {
    let environment = environment(root, None).map_err(words)?;
    let manager = Manager::open(root, options, environment.clone()).map_err(words)?;
    let mut seen = BTreeSet::new();
    for step in manager.all_steps().map_err(words)? {
        let (tag, items) =
            read(&manager.step_path(step), &environment).map_err(|what| format!("I1: {what}"))?;
        promises.steps.get(&step).cloned().unwrap_or_default().allows(step, &tag, &items)?;
        seen.insert(step);
    }
    promises.nothing_is_lost(&seen)?;
    if let Some((id, epoch)) = &promises.opened {
        let found = opened(root);
        if !found.as_ref().is_some_and(|(found, now)| found == id && now >= epoch) {
            return Err(format!("I2, I7: the root was {id} at epoch {epoch}, it is {found:?}"));
        }
    }
    let latest = manager.latest_step().map_err(words)?;
    if latest != seen.last().copied() {
        return Err(format!("the latest of {seen:?} is {latest:?}"));
    }
    if let Some(found) = manager.quarantined().map_err(words)?.first() {
        return Err(format!("I1, I4: {} is no step: {}", found.name, found.reason));
    }
    for (branch, step, tag) in &promises.branches {
        let name = format!(".branch-{branch}.{}", manager.step_name().format(*step));
        let (found, _) =
            read(&root.join(&name), &environment).map_err(|what| format!("I2: branch {name}: {what}"))?;
        if found != *tag {
            return Err(format!("{name} is attempt {found}, not {tag}"));
        }
    }
    manager.close(Some(PATIENCE)).map_err(words)?;
    Ok(Found { steps: seen.len(), set_aside: promises.branches.len() })
}

/// Restores and verifies a step directory; gives its attempt and its items.
fn read(path: &Path, environment: &Environment) -> Result<(String, BTreeSet<String>), String> {
    let checkpoint =
        Checkpoint::open(path, environment).map_err(|error| format!("{}: {error}", path.display()))?;
    let tag = states::verify(&checkpoint)?;
    Ok((tag, checkpoint.manifest().items.iter().map(|item| item.name.clone()).collect()))
}

/// I16: what dead writers left behind is gone once there was a writer again.
fn nothing_is_left(root: &Path) -> Result<(), String> {
    let mut left = leftovers(root, &[".tmp-", ".trash-", ".stepwell-probe", ".quarantine-"])?;
    left.extend(leftovers(&root.join(".stepwell"), &[".", "beat-"])?);
    if left.is_empty() { Ok(()) } else { Err(format!("I16: left behind: {left:?}")) }
}

fn next_save(root: &Path) -> Result<(), String> {
    let environment = environment(root, None).map_err(words)?;
    let manager = Manager::open(root, options(), environment.clone()).map_err(words)?;
    let step = manager.latest_step().map_err(words)?.map_or(1, |latest| latest + 1);
    let mut request = SaveRequest::new(step, states::state_of(step, "afterwards", states::MANY)?);
    request.custom_metadata = states::metadata("afterwards", states::MANY);
    match manager.save(request).map_err(words)?.wait(Some(PATIENCE)).map_err(words)? {
        Some(Outcome::Committed) => {}
        other => return Err(format!("{other:?}")),
    }
    read(&manager.step_path(step), &environment)?;
    manager.close(Some(PATIENCE)).map_err(words)
}
