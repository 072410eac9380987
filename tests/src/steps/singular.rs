//! Singular checkpoints over a simulated disk: one path, no root. The marks are those of a root's
//! step 0.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use stepwell_core::io::simulated::SimDisk;
use stepwell_manager::{Checkpoint, Exists, Outcome, SaveRequest, singular};

use super::promises::Promises;
use super::run::{Run, options};
use super::{states, world};
use crate::crash::Marks;

/// The path of the checkpoint.
pub const PATH: &str = "models/best";
const PARENT: &str = "models";

/// Saves attempt `tag` over whatever is there, and waits for the outcome. One that is no commit is
/// an `Err`, and marked.
pub fn save(run: &Run, tag: &str, cancel: &Arc<AtomicBool>) -> Result<(), String> {
    let (state, metadata) = run.state(0, tag)?;
    let mut request = SaveRequest::new(0, state);
    request.custom_metadata = metadata;
    request.exists = Exists::Replace;
    request.cancel = Arc::clone(cancel);
    run.mark(&format!("replace 0 {tag}"));
    let save = match singular::save(Path::new(PATH), request, &options(), &run.environment()) {
        Ok(save) => save,
        Err(error) => {
            run.mark(&format!("failed 0 {tag}"));
            return Err(format!("saving: {error}"));
        }
    };
    match save.wait(Some(run.patience)).ok().flatten().ok_or("the save did not end")? {
        Outcome::Committed => {
            run.mark(&format!("committed 0 {tag}"));
            Ok(())
        }
        Outcome::NotCommitted(error) => {
            run.mark(&format!("failed 0 {tag}"));
            Err(format!("not committed: {error}"))
        }
        Outcome::DurabilityUncertain(error) => {
            run.mark(&format!("uncertain 0 {tag}"));
            Err(format!("uncertain: {error}"))
        }
    }
}

/// On a disk where attempt `a` was committed and is durable.
pub fn with_a_checkpoint() -> Result<Run, String> {
    let run = Run::earlier();
    save(&run, "a", &Arc::default())?;
    settle(&run);
    Ok(run)
}

/// Forgets how the disk came to be as it is; it holds attempt `a`.
pub fn settle(run: &Run) {
    run.disk.settle();
    run.mark("committed 0 a");
}

/// Removes what dead writers left: here all of them are dead.
pub fn sweep(disk: &SimDisk, seed: u64) -> Result<(), String> {
    let swept = singular::sweep(Path::new(PATH), &world::environment(disk, seed));
    swept.map(drop).map_err(|error| format!("sweeping: {error}"))
}

/// Checks crash states of scenarios with one singular checkpoint.
#[derive(Default)]
pub struct Checker {
    /// Checkpoints that were read and verified.
    verified: HashSet<(u64, String)>,
}

impl Checker {
    /// Checks that the path holds one complete permitted attempt, that sweeping removes only
    /// leftovers, and that sweeping twice equals sweeping once.
    pub fn check(&mut self, disk: &SimDisk, marks: &Marks) -> Result<(), String> {
        let promises = Promises::of(marks)?;
        let before = disk.image();
        self.view(disk, &promises).map_err(|message| format!("before sweeping: {message}"))?;
        if disk.image() != before {
            return Err("a reader has changed something".into());
        }
        sweep(disk, 1 << 40)?;
        self.view(disk, &promises).map_err(|message| format!("after sweeping: {message}"))?;
        let once = disk.image();
        let parent = once.get(PARENT).and_then(|parent| parent.entries()).unwrap_or_default();
        if let Some((name, _)) = parent.iter().find(|(name, _)| name.starts_with('.')) {
            return Err(format!("I16: {name} was left behind"));
        }
        sweep(disk, 1 << 41)?;
        if disk.image() != once {
            return Err("sweeping twice is not sweeping once".into());
        }
        match (disk.open_handles(), disk.locks_held()) {
            (0, 0) => Ok(()),
            (handles, locks) => Err(format!("I14: {handles} handles and {locks} locks are left")),
        }
    }

    fn view(&mut self, disk: &SimDisk, promises: &Promises) -> Result<(), String> {
        let promise = promises.steps.get(&0).cloned().unwrap_or_default();
        let image = disk.image();
        let Some(node) = image.get(PATH) else {
            return if promise.must { Err("I2: the committed checkpoint is lost".into()) } else { Ok(()) };
        };
        if promise.may.iter().any(|tag| self.verified.contains(&(node.hash(), tag.clone()))) {
            return Ok(());
        }
        let checkpoint = Checkpoint::open(Path::new(PATH), &world::environment(disk, 1 << 42));
        let tag = states::verify(&checkpoint.map_err(|error| format!("I1: {error}"))?)
            .map_err(|message| format!("I1: {message}"))?;
        if !promise.may.contains(&tag) {
            return Err(format!("I4, I10: it is attempt {tag}, none of {:?}", promise.may));
        }
        self.verified.insert((node.hash(), tag));
        Ok(())
    }
}
