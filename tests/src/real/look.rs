//! Everything that a reader does before it trusts a step, in the order in which a reader does it:
//! list, compare lengths, open, restore, verify.

use std::path::{Path, PathBuf};
use std::time::Duration;

use stepwell_core::io::{Engine, open_disk};
use stepwell_manager::{Checkpoint, Environment, Error, Manager, Options, Outcome, SaveRequest};

use super::states;

/// Bytes of a block of the roots made here: the smallest there are, so that a small state has many.
pub const BLOCK_BYTES: u64 = 4096;

/// The reader that finds damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum By {
    /// The listing: it is quarantined, or no step at all.
    Listing,
    /// The comparison of lengths, which every choice of a step makes.
    Lengths,
    /// Opening the step.
    Opening,
    /// Restoring it.
    Restoring,
    /// Verifying it: damage that no restore could ever meet.
    Verifying,
}

/// Damage that was found.
#[derive(Clone, Debug)]
pub struct Found {
    /// By whom.
    pub by: By,
    /// Of this file, where the finder names one by itself.
    pub file: Option<PathBuf>,
    /// In this block.
    pub block: Option<u64>,
    /// The leaf that would have been damaged.
    pub leaf: Option<String>,
    /// The message.
    pub what: String,
}

impl Found {
    /// Classifies an error; `Err` if it is not about damage.
    pub fn of(by: By, error: &Error) -> Result<Self, String> {
        let what = error.to_string();
        match (error, error.core()) {
            (_, Some(stepwell_core::Error::Corrupt { file, leaf, block, .. })) => {
                Ok(Self { by, file: Some(file.clone()), block: *block, leaf: leaf.clone(), what })
            }
            (_, Some(stepwell_core::Error::Format { file, .. })) => {
                Ok(Self { by, file: Some(file.clone()), block: None, leaf: None, what })
            }
            // Something else than a file has its name: ENOTDIR, EISDIR, ELOOP, or no regular file.
            (_, Some(stepwell_core::Error::Io { path, source, .. }))
                if matches!(source.raw_os_error(), Some(20 | 21 | 40))
                    || source.kind() == std::io::ErrorKind::InvalidInput =>
            {
                Ok(Self { by, file: Some(path.clone()), block: None, leaf: None, what })
            }
            // A damaged manifest may contain anything. Opening it without a listing reports missing
            // files.
            (Error::NotAStep { path, .. } | Error::StepGone { path, .. }, _) => {
                Ok(Self { by, file: Some(path.clone()), block: None, leaf: None, what })
            }
            _ => Err(format!("{by:?} failed, but not for damage: {error:?}")),
        }
    }
}

/// A root on a real disk, and a reader of it.
pub struct Reader {
    /// Its path.
    pub root: PathBuf,
    /// Its world.
    pub environment: Environment,
    manager: Manager,
}

/// Options for small states: many blocks and chunks, little memory.
pub fn options() -> Options {
    Options {
        block_bytes: BLOCK_BYTES,
        chunk_bytes: 8 << 10,
        min_row_bytes: 64,
        overwrite_from_bytes: Some(1),
        staging_bytes: Some(16 << 20),
        stall_timeout: Duration::from_secs(60),
        ..Options::default()
    }
}

/// The real world, through the page cache: what is damaged is read again a hundred thousand times.
pub fn environment(root: &Path) -> Result<Environment, Error> {
    environment_with(root, Engine::Buffered)
}

/// The real world, through that engine.
pub fn environment_with(root: &Path, engine: Engine) -> Result<Environment, Error> {
    Ok(Environment::single_process(open_disk(root, engine)?))
}

/// Saves these steps into a root, and closes it.
pub fn save(root: &Path, steps: &[u64], options: Options, environment: &Environment) -> Result<(), Error> {
    let manager = Manager::open(root, options, environment.clone())?;
    for &step in steps {
        let save = manager.save(SaveRequest::new(step, states::state(step)))?;
        match save.wait(Some(Duration::from_secs(60)))? {
            Some(Outcome::Committed) => {}
            other => return Err(Error::Invalid(format!("step {step}: {other:?}"))),
        }
    }
    manager.close(None)
}

impl Reader {
    /// Opens a root for reading.
    pub fn open(root: &Path) -> Result<Self, Error> {
        Self::open_with(root, Engine::Buffered)
    }

    /// Opens a root for reading through that engine.
    pub fn open_with(root: &Path, engine: Engine) -> Result<Self, Error> {
        let environment = environment_with(root, engine)?;
        let manager = Manager::open(root, Options { read_only: true, ..options() }, environment.clone())?;
        Ok(Self { root: root.to_owned(), environment, manager })
    }

    /// The reading manager.
    pub fn manager(&self) -> &Manager {
        &self.manager
    }

    /// The path of a step.
    pub fn step_path(&self, step: u64) -> PathBuf {
        self.manager.step_path(step)
    }

    /// True if a fresh listing quarantines the step; `None` where it lists it.
    pub fn listing(&self, step: u64) -> Result<Option<Found>, String> {
        let name = self.manager.step_name().format(step);
        self.manager.reload().map_err(|error| error.to_string())?;
        let quarantined = self.manager.quarantined().map_err(|error| error.to_string())?;
        let reason = quarantined.into_iter().find(|quarantined| quarantined.name == name);
        let listed = self.manager.all_steps().map_err(|error| error.to_string())?.contains(&step);
        match reason {
            Some(_) if listed => Err(format!("{name} is quarantined and listed")),
            None if !listed => Err(format!("{name} is neither listed nor quarantined")),
            None => Ok(None),
            Some(quarantined) => {
                let what = quarantined.reason;
                Ok(Some(Found { by: By::Listing, file: None, block: None, leaf: None, what }))
            }
        }
    }

    /// True if the lengths of the step's files are found wrong.
    pub fn lengths(&self, step: u64) -> Result<Option<Found>, String> {
        let reports = self.manager.report().map_err(|error| error.to_string())?;
        let report = reports.into_iter().find(|report| report.step == Some(step));
        let damage = report.ok_or("the step is not in the report")?.damage;
        Ok(damage.map(|what| Found { by: By::Lengths, file: None, block: None, leaf: None, what }))
    }

    /// Opens a step past the listing, by its path.
    pub fn checkpoint(&self, step: u64) -> Result<Result<Checkpoint, Found>, String> {
        match Checkpoint::open(&self.step_path(step), &self.environment) {
            Ok(checkpoint) => Ok(Ok(checkpoint)),
            Err(error) => Found::of(By::Opening, &error).map(Err),
        }
    }

    /// All of it. `None`: the step is whole, and every value is the one that was saved. `Err`:
    /// somebody was given something wrong.
    pub fn look(&self, step: u64) -> Result<Option<Found>, String> {
        if let Some(found) = self.listing(step)? {
            return Ok(Some(found));
        }
        if let Some(found) = self.lengths(step)? {
            return Ok(Some(found));
        }
        self.look_inside(step)
    }

    /// The findings of a reader that opens the step by its path, without a listing.
    pub fn look_inside(&self, step: u64) -> Result<Option<Found>, String> {
        match self.checkpoint(step)? {
            Err(found) => Ok(Some(found)),
            Ok(checkpoint) => look_into(&checkpoint, step),
        }
    }
}

/// Restores and verifies an open step.
pub fn look_into(checkpoint: &Checkpoint, step: u64) -> Result<Option<Found>, String> {
    match states::read_all(checkpoint) {
        Err(error) => return Found::of(By::Restoring, &error).map(Some),
        Ok(values) if values != states::contents(step) => {
            return Err(format!("step {step} was restored with wrong values"));
        }
        Ok(_) => {}
    }
    verify(checkpoint)
}

/// Verifies an open step; the first damage.
pub fn verify(checkpoint: &Checkpoint) -> Result<Option<Found>, String> {
    let report = match checkpoint.verify(&states::load_options(), &mut |_| true) {
        Ok(report) => report,
        Err(error) => return Found::of(By::Verifying, &error).map(Some),
    };
    let leaves = checkpoint.leaves();
    Ok(report.damages.into_iter().next().map(|damage| {
        let leaf = damage.leaves.first().and_then(|&leaf| leaves.get(leaf as usize));
        Found {
            by: By::Verifying,
            file: Some(damage.file),
            block: damage.block,
            leaf: leaf.map(|leaf| leaf.path.to_string()),
            what: damage.what,
        }
    }))
}

/// A copy of the root for somebody who wants to damage it alone.
pub fn copy_tree(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_tree(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}
