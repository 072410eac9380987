//! Conversions: files of another format, made from an open checkpoint in constant memory.
//!
//! ```text
//! source ─Reader─▶ windows of the output, assembled in a ring of buffers ─▶ writer thread ─Disk─▶ partial output
//!                                                              partial output, complete and durable ─rename─▶ output
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | [`file_plan`] | the output files, piece by piece: what the writer of a format makes |
//! | `windows` | the files cut into aligned windows |
//! | `assembler` `checksums` | the bytes of a window |
//! | `written_part` | the windows of a rank: their memory, and the loop that reads them |
//! | `writer` `journal` | windows to disk, and how far they are durable |
//! | `partial_output` | the output until it has its name |
//! | `store_output` `stored_export` | an output in an object store, an export there |
//! | [`Sharing`] | ranks that write parts of one output |
//! | [`SavePauses`] | pauses for the saves of a manager |
//! | [`StoredProvider`] `bands` | tensors of a checkpoint as leaves of a save |
//! | [`compare()`] | the source and the output, read and compared |
//!
//! The output has a temporary name beside its own until it is complete and durable. A conversion
//! that was killed is resumed by one with the same plan: finished windows are not written again. An
//! output in a store has no temporary name, and is not resumed.

mod assembler;
mod bands;
mod checksums;
mod compare;
pub mod file_plan;
mod journal;
mod partial_output;
mod save_pauses;
mod sharing;
mod store_output;
mod stored_export;
mod stored_provider;
mod windows;
mod writer;
mod written_part;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use stepwell_core::io::{Dir, Lock};

use self::journal::{Journal, Recorded};
use self::partial_output::{PartialOutput, settle_lengths};
use self::sharing::is_permanent;
use self::store_output::StoreOutput;
use self::windows::{OutputWindow, WINDOW_ALIGNMENT, windows_in};
use self::writer::OutputFile;
use self::written_part::WrittenPart;
use crate::commit::aside;
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::reader::Reader;
use crate::singular;

pub use compare::{TensorPair, compare};
pub use file_plan::{ConversionPlan, NO_OWNER, PieceContent, PlannedFile, PlannedPiece};
pub use partial_output::{
    Leftover, LeftoverKind, discard, end_removal, leftovers, removal_of, remove, remove_file, write_record,
};
pub use save_pauses::SavePauses;
pub use sharing::Sharing;
pub use stored_export::{read_object, remove_objects, stored_level};
pub use stored_provider::{StoredProvider, StoredReads};

/// How long a write of an output or of its journal may take.
const WRITE_TIMEOUT: Duration = Duration::from_secs(120);

/// The kind of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputKind {
    /// A directory of all files.
    Directory,
    /// The only file.
    File,
}

/// Limits of a conversion.
#[derive(Clone, Debug)]
pub struct ConversionOptions {
    /// Limit on bytes of buffers: those of windows, and those that the source is read into.
    pub budget_bytes: u64,
    /// Bytes of a window, a multiple of 4096.
    pub window_bytes: u64,
    /// Bytes between two records of the journal: the most that is written again after a kill.
    pub journal_bytes: u64,
    /// The most time that nothing may be written while the thread that reads waits.
    pub stall_timeout: Duration,
}

/// A conversion that has its output's name to itself.
pub struct Conversion {
    plan: Arc<ConversionPlan>,
    options: ConversionOptions,
    environment: Environment,
    sharing: Arc<Sharing>,
    output: Output,
    /// `None` in a store.
    journal: Option<Journal>,
    /// Windows that an earlier process has finished, and its sums.
    recorded: Recorded,
    /// The windows of this rank.
    part: Range<u64>,
    /// Excludes another conversion to the same path. The leader has it.
    lock: Option<Arc<dyn Lock>>,
}

impl Conversion {
    /// Prepares the conversion of `source` to a free path, and finds out what an earlier process
    /// has finished of it. All ranks of `sharing` begin the same conversion.
    pub fn begin(
        source: &Reader,
        plan: ConversionPlan,
        path: &Path,
        kind: OutputKind,
        sharing: &Arc<Sharing>,
        environment: &Environment,
        options: ConversionOptions,
    ) -> Result<Self> {
        source.check_process()?;
        plan.check(source)?;
        if options.window_bytes == 0 || !options.window_bytes.is_multiple_of(WINDOW_ALIGNMENT) {
            return Err(Error::internal("windows of whole pages", format!("{} bytes", options.window_bytes)));
        }
        if environment.disk.keeps_ledgers() {
            return Self::begin_in_store(plan, path, kind, sharing, environment, options);
        }
        let (parent, name) = singular::split(path)?;
        let part = sharing.part(&plan.files, options.window_bytes, true);
        let this = Beginning { plan: Arc::new(plan), options, environment, part };
        let (prepared, has_files) = this.prepare(parent, &name, kind, sharing)?;
        let mut started = None;
        let generation = sharing.agree("begin a conversion", has_files, |have_files| {
            let Some((output, recorded, _)) = &prepared else {
                return Err(Error::internal("a locked output", "none"));
            };
            let is_resumed = recorded.is_some() && have_files.iter().all(|&has_files| has_files);
            let generation = match recorded {
                Some(found) if is_resumed => found.generation,
                _ => environment.rng.next_u128(),
            };
            if !is_resumed {
                output.remove()?;
                started = Some(this.start(output, 0, generation)?);
                output.create()?;
            }
            output.create_files(&this.plan)?;
            Ok(generation)
        })?;
        let Some((output, recorded, lock)) = prepared else {
            return Err(Error::internal("a prepared output", "none"));
        };
        let recorded = recorded.filter(|found| found.generation == generation);
        let journal = match (started, &recorded) {
            (Some(journal), _) => journal,
            (None, Some(found)) => this.resume(&output, sharing.ranks().0, found)?,
            (None, None) => this.start(&output, sharing.ranks().0, generation)?,
        };
        let recorded = recorded.unwrap_or_default();
        let Beginning { plan, options, part, .. } = this;
        let (environment, sharing) = (environment.clone(), Arc::clone(sharing));
        let (output, journal) = (Output::Partial(output), Some(journal));
        Ok(Self { plan, options, environment, sharing, output, journal, recorded, part, lock })
    }

    fn begin_in_store(
        mut plan: ConversionPlan,
        path: &Path,
        kind: OutputKind,
        sharing: &Arc<Sharing>,
        environment: &Environment,
        options: ConversionOptions,
    ) -> Result<Self> {
        let (output, last) = StoreOutput::new(&*environment.disk, path, kind, &mut plan)?;
        sharing.ask("begin a conversion", || output.check_free(environment))?;
        Ok(Self {
            part: sharing.part(&plan.files, options.window_bytes, false),
            plan: Arc::new(plan),
            options,
            environment: environment.clone(),
            sharing: Arc::clone(sharing),
            output: Output::Store(output, last),
            journal: None,
            recorded: Recorded::default(),
            lock: None,
        })
    }

    /// Returns the session of the ranks that share it.
    pub fn sharing(&self) -> &Arc<Sharing> {
        &self.sharing
    }

    /// Returns the temporary path of the output. In a store it is the final one.
    pub fn partial(&self) -> PathBuf {
        self.output.path()
    }

    /// Returns the bytes of this rank's part that an earlier process has written.
    pub fn resumed_bytes(&self) -> u64 {
        let finished = self.part.start..self.recorded.finished.min(self.part.end);
        windows_in(&self.plan.files, self.options.window_bytes, finished)
            .map(|window| window.len as u64)
            .sum()
    }

    /// Writes all files below the temporary name, completely and durably, and waits for the other
    /// ranks. `go_on` gets the bytes of this rank's part, done and in all, and stops it by `false`.
    /// After an error, the finished windows stay, to be resumed, unless the source is damaged or
    /// cannot be cast, or the output is in a store. The session of the ranks is then over.
    pub fn write(self, source: &Reader, go_on: &mut dyn FnMut(u64, u64) -> bool) -> Result<Complete> {
        let Self { plan, options, environment, sharing, output, journal, recorded, part, lock } = self;
        let mut watch = sharing.watch();
        let wrote = output.dir().and_then(|dir| {
            let lock = lock.clone();
            let part =
                WrittenPart { plan: &plan, options: &options, disk: &environment.disk, dir, part, lock };
            part.write(source, journal, &recorded, &output, &mut |done, total| {
                watch.go_on(done) && go_on(done, total)
            })
        });
        // A removed output is the cause of other errors.
        let wrote = wrote.or_else(|error| output.check_there().and(Err(error)));
        let finished = watch.agree("write a conversion", wrote, |_| output.settle(&plan));
        if let Err(error) = finished {
            sharing.fail(&error.to_string());
            // The leader keeps its lock until no other rank writes.
            if sharing.leads()
                && sharing.have_others_left()
                && (is_permanent(&error) || matches!(output, Output::Store(..)))
                && let Err(error) = output.give_up()
            {
                tracing::warn!(%error, "a failed conversion left its output, which may be deleted");
            }
            return Err(error);
        }
        Ok(Complete { sharing, output, lock })
    }
}

/// The place of an output.
enum Output {
    Partial(PartialOutput),
    /// With the files that are written last.
    Store(StoreOutput, Vec<PlannedFile>),
}

impl Output {
    fn path(&self) -> PathBuf {
        match self {
            Self::Partial(output) => output.path(),
            Self::Store(output, _) => output.path().to_owned(),
        }
    }

    fn dir(&self) -> Result<Arc<dyn Dir>> {
        match self {
            Self::Partial(output) => output.dir(),
            Self::Store(output, _) => Ok(output.dir()),
        }
    }

    /// Returns the files that ranks write, by their names in [`Self::dir`].
    fn files(&self, plan: &ConversionPlan) -> Vec<OutputFile> {
        match self {
            Self::Partial(output) => output.files(plan),
            Self::Store(..) => StoreOutput::files(plan),
        }
    }

    fn check_there(&self) -> Result<()> {
        match self {
            Self::Partial(output) => output.check_there(),
            Self::Store(..) => Ok(()),
        }
    }

    /// Completes the output after all ranks have written their parts.
    fn settle(&self, plan: &ConversionPlan) -> Result<()> {
        match self {
            Self::Partial(output) => {
                let dir = output.dir()?;
                settle_lengths(&*dir, &output.files(plan))?;
                Ok(dir.sync()?)
            }
            Self::Store(output, last) => output.write_last(last),
        }
    }

    fn give_up(&self) -> Result<()> {
        match self {
            Self::Partial(output) => output.give_up(),
            Self::Store(output, _) => output.give_up(),
        }
    }
}

/// A conversion before its output is prepared.
struct Beginning<'a> {
    plan: Arc<ConversionPlan>,
    options: ConversionOptions,
    environment: &'a Environment,
    part: Range<u64>,
}

/// The output, this rank's windows that an earlier process has finished, and the leader's lock.
type Prepared = (PartialOutput, Option<Recorded>, Option<Arc<dyn Lock>>);

impl Beginning<'_> {
    /// Locks the output on the leader, and finds what an earlier process has finished. Also returns
    /// whether the files of it are there. No rank writes or creates a file before all have looked
    /// for theirs.
    fn prepare(
        &self,
        parent: &Path,
        name: &str,
        kind: OutputKind,
        sharing: &Sharing,
    ) -> Result<(Option<Prepared>, Result<bool>)> {
        let (disk, name) = (&self.environment.disk, name.to_owned());
        let mut led = None;
        let found = sharing.ask("convert", || {
            let output = PartialOutput::new(disk.create_dir_all(parent)?, name.clone(), kind);
            let (output, recorded, lock) = self.lead(output)?;
            let found = recorded.as_ref().map(|found| found.generation);
            led = Some((output, recorded, lock));
            Ok(found)
        })?;
        let follow = || {
            let output = PartialOutput::new(disk.open_dir(parent)?, name, kind);
            let recorded = found.map(|generation| self.recorded(&output, sharing.ranks().0, generation));
            Ok((output, recorded.transpose()?.flatten(), None))
        };
        Ok(match led.map_or_else(follow, Ok) {
            Ok(prepared) => {
                let has_files = self.has_files(&prepared.0, prepared.1.as_ref());
                (Some(prepared), has_files)
            }
            Err(error) => (None, Err(error)),
        })
    }

    /// Locks the output.
    fn lead(&self, output: PartialOutput) -> Result<Prepared> {
        output.check_free()?;
        let is_there = output.is_there()?;
        let lock = output.lock(is_there)?;
        // Another process may have finished between the first check and the lock.
        output.check_free()?;
        let recorded = output.read_journal(&output.journal)?;
        match &recorded {
            None if is_there => return Err(output.in_the_way(&output.partial)),
            Some(found) if is_there && ![found.owner, NO_OWNER].contains(&self.plan.owner) => {
                return Err(output.of_another_owner());
            }
            _ => {}
        }
        let recorded = recorded.filter(|found| is_there && self.is_same(found));
        Ok((output, recorded, lock.map(Arc::from)))
    }

    /// Returns the windows of a rank that an earlier process has finished. `generation` tells what
    /// belongs to this conversion from what an earlier one has left.
    fn recorded(&self, output: &PartialOutput, rank: u32, generation: u128) -> Result<Option<Recorded>> {
        let recorded = output.read_journal(&output.journal_of(rank))?;
        Ok(recorded.filter(|found| self.is_same(found) && found.generation == generation))
    }

    /// True if a journal is of this plan and owner.
    fn is_same(&self, found: &Recorded) -> bool {
        (found.digest, found.owner) == (self.plan.digest, self.plan.owner)
    }

    /// True if the files of this rank's finished windows are there.
    fn has_files(&self, output: &PartialOutput, recorded: Option<&Recorded>) -> Result<bool> {
        recorded.map_or(Ok(true), |found| output.has_files_of(&self.plan, self.finished(found.finished)))
    }

    /// Begins the journal of a rank.
    fn start(&self, output: &PartialOutput, rank: u32, generation: u128) -> Result<Journal> {
        let file = output.open_journal(&output.journal_of(rank))?;
        let ConversionPlan { digest, owner, .. } = *self.plan;
        let journal = Journal::start(Arc::clone(&self.environment.disk), file, digest, owner, generation)?;
        output.parent.sync()?;
        Ok(journal)
    }

    /// Goes on with the journal of a rank.
    fn resume(&self, output: &PartialOutput, rank: u32, recorded: &Recorded) -> Result<Journal> {
        let file = output.open_journal(&output.journal_of(rank))?;
        Ok(Journal::resume(Arc::clone(&self.environment.disk), file, recorded))
    }

    /// Returns the windows of this rank that are finished.
    fn finished(&self, finished: u64) -> impl Iterator<Item = OutputWindow> {
        let finished = self.part.start..finished.min(self.part.end);
        windows_in(&self.plan.files, self.options.window_bytes, finished)
    }
}

/// A conversion whose output is complete and durable, below its temporary name. In a store it has
/// its name.
pub struct Complete {
    sharing: Arc<Sharing>,
    output: Output,
    lock: Option<Arc<dyn Lock>>,
}

impl Complete {
    /// Returns the temporary path of the output.
    pub fn partial(&self) -> PathBuf {
        self.output.path()
    }

    /// Gives the output its name.
    pub fn publish(self) -> Result<()> {
        let Self { sharing, output, lock } = self;
        let Output::Partial(output) = output else { return Ok(()) };
        sharing.ask("publish a conversion", || {
            match aside::publish_copy(&*output.parent, &output.partial, &output.name) {
                Err(error) if error.already_exists() => return Err(output.taken()),
                published => published?,
            }
            // The output has its name. Its journal counts for nothing, and may stay.
            if let Err(error) = output.remove_journals() {
                tracing::warn!(%error, "a finished conversion left its journal, which may be deleted");
            }
            drop(lock);
            Ok(())
        })
    }

    /// Removes the output.
    pub fn discard(self) -> Result<()> {
        if self.sharing.leads() { self.output.give_up() } else { Ok(()) }
    }
}
