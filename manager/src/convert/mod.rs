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
//! | `writer` `journal` | windows to disk, and how far they are durable |
//! | [`StoredProvider`] | tensors of a checkpoint as leaves of a save |
//! | [`compare`] | the source and the output, read and compared |
//!
//! The output has a temporary name beside its own until it is complete and durable. A conversion
//! that was killed is resumed by one with the same plan: finished windows are not written again.

mod assembler;
mod checksums;
mod compare;
pub mod file_plan;
mod journal;
mod stored_provider;
mod windows;
mod writer;

use std::iter::Peekable;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};

use stepwell_core::Error as CoreError;
use stepwell_core::io::{Dir, EntryKind, File, Lock, LockKind};
use stepwell_core::sys::{Buffer, Mapping, spawn};

use self::assembler::Assembler;
use self::checksums::PieceSums;
use self::journal::{Journal, Recorded};
use self::windows::{OutputWindow, WINDOW_ALIGNMENT, windows};
use self::writer::{FilledWindow, OutputFile, WindowWriter};
use crate::commit::aside;
use crate::delete_tree::{delete_tree, ignore_missing};
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::reader::Reader;
use crate::singular;

pub use compare::{TensorPair, compare};
pub use file_plan::{ConversionPlan, PieceContent, PlannedFile, PlannedPiece};
pub use stored_provider::StoredProvider;

/// Marks the name of an incomplete output.
const PARTIAL: &str = ".partial";
/// Follows the name of an incomplete output, in the name of its journal.
const JOURNAL: &str = ".journal";
/// Windows that are read together, so that the disk has reads to do all the time.
const WINDOWS_READ_TOGETHER: usize = 4;
/// Poll interval for a request to stop, while all memory is being written.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(50);

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
}

/// A conversion that has its output's name to itself.
pub struct Conversion {
    plan: Arc<ConversionPlan>,
    kind: OutputKind,
    options: ConversionOptions,
    environment: Environment,
    parent: Arc<dyn Dir>,
    name: String,
    partial: String,
    journal: Journal,
    /// Windows that an earlier process has finished, and its sums.
    recorded: Recorded,
    /// Excludes another conversion to the same path.
    lock: Option<Box<dyn Lock>>,
}

impl Conversion {
    /// Prepares the conversion of `source` to a free path, and finds out what an earlier process
    /// has finished of it.
    pub fn begin(
        source: &Reader,
        plan: ConversionPlan,
        path: &Path,
        kind: OutputKind,
        environment: &Environment,
        options: ConversionOptions,
    ) -> Result<Self> {
        source.check_process()?;
        plan.check(source)?;
        if options.window_bytes == 0 || !options.window_bytes.is_multiple_of(WINDOW_ALIGNMENT) {
            return Err(Error::internal("windows of whole pages", format!("{} bytes", options.window_bytes)));
        }
        let (parent, name) = singular::split(path)?;
        let parent = environment.disk.create_dir_all(parent)?;
        check_free(&*parent, &name)?;
        let (partial, journal) = temporary_names(&name, kind);
        let is_there = parent.stat(&partial)?.is_some();
        let lock = own(&*parent, &journal, is_there)?;
        // Another process may have finished between the first check and the lock.
        check_free(&*parent, &name)?;
        let file = match parent.overwrite_file(&journal, 0) {
            // Without locks, nothing has created it.
            Err(error) if error.is_not_found() => parent.create_file(&journal, 0)?,
            opened => opened?,
        };
        let recorded = journal::read(&*file)?;
        if recorded.is_none() && (is_there || !journal::is_unwritten(&*file)?) {
            return Err(Error::Invalid(format!(
                "{} is in the way: it has the name of an incomplete conversion, and is none. Move or delete it",
                parent.path().join(if is_there { &partial } else { &journal }).display()
            )));
        }
        let plan = Arc::new(plan);
        let resumed = recorded.filter(|recorded| recorded.digest == plan.digest);
        let resumed = match resumed {
            Some(found)
                if is_there
                    && finished_are_there(&parent, &partial, kind, &plan, &options, found.finished)? =>
            {
                Some(found)
            }
            _ => None,
        };
        let disk = Arc::clone(&environment.disk);
        let (journal, recorded) = if let Some(recorded) = resumed {
            (Journal::resume(disk, file, &recorded), recorded)
        } else {
            if is_there {
                remove_partial(&*parent, &partial)?;
                parent.sync()?;
            }
            let started = Journal::start(disk, file, plan.digest, environment.rng.next_u128())?;
            parent.sync()?;
            (started, Recorded::default())
        };
        let environment = environment.clone();
        Ok(Self { plan, kind, options, environment, parent, name, partial, journal, recorded, lock })
    }

    /// Returns the temporary path of the output.
    pub fn partial(&self) -> PathBuf {
        self.parent.path().join(&self.partial)
    }

    /// Returns the bytes that an earlier process has written.
    pub fn resumed_bytes(&self) -> u64 {
        let all = windows(&self.plan.files, self.options.window_bytes);
        all.take_while(|window| window.number < self.recorded.finished).map(|window| window.len as u64).sum()
    }

    /// Writes all files below the temporary name, completely and durably. `go_on` gets the bytes
    /// done and in all, and stops it by `false`. After an error, the finished windows stay, to be
    /// resumed, unless the source is damaged or cannot be cast.
    pub fn write(self, source: &Reader, go_on: &mut dyn FnMut(u64, u64) -> bool) -> Result<Complete> {
        let dir = match self.kind {
            OutputKind::File => Arc::clone(&self.parent),
            OutputKind::Directory => match self.parent.create_dir(&self.partial) {
                Err(error) if error.already_exists() => self.parent.open_dir(&self.partial)?,
                made => {
                    let made = made?;
                    self.parent.sync()?;
                    made
                }
            },
        };
        let Self { plan, kind, options, environment, parent, name, partial, journal, recorded, lock } = self;
        let file = |planned: &PlannedFile| OutputFile {
            name: if kind == OutputKind::File { partial.clone() } else { planned.name.clone() },
            length: planned.length,
        };
        let (pending, written) = (windows(&plan.files, options.window_bytes), Arc::new(AtomicU64::new(0)));
        let mut pending = pending.peekable();
        while let Some(window) = pending.next_if(|window| window.number < recorded.finished) {
            written.fetch_add(window.len as u64, Ordering::Relaxed);
        }
        let mut memory = Ring::new(&options, plan.total())?;
        let (stop, (free, freed)) = (Arc::new(AtomicBool::new(false)), unbounded());
        for buffer in memory.windows.drain(..) {
            let _ = free.send(buffer);
        }
        if let Err(error) = environment.disk.register(std::slice::from_ref(&memory.mapping)) {
            tracing::warn!(%error, "the windows of a conversion are not registered; writes cost a little more");
        }
        let writer = WindowWriter {
            disk: Arc::clone(&environment.disk),
            dir: Arc::clone(&dir),
            files: plan.files.iter().map(file).collect(),
            journal,
            journal_bytes: options.journal_bytes,
            written: Arc::clone(&written),
            stop: Arc::clone(&stop),
            free,
        };
        let (filled, windows_to_write) = unbounded();
        let (ended, end) = bounded(1);
        let thread = spawn("stepwell-convert", move || drop(ended.send(writer.run(&windows_to_write))));
        thread.map_err(|source| stepwell_core::Error::io("start a thread for", "<a conversion>", source))?;
        let reading = Reading {
            plan: &plan,
            sums: pending
                .peek()
                .map(|window| PieceSums::resumed(&plan.files, window, &recorded.sums))
                .unwrap_or_default(),
            assembler: Assembler::new(source, memory.scratch),
            written: &written,
            go_on: &mut *go_on,
        };
        let mut read = reading.run(pending, &freed, &filled);
        drop(filled);
        let wrote = loop {
            stop.fetch_or(read.is_err(), Ordering::Relaxed);
            match end.recv_timeout(STOP_POLL_INTERVAL) {
                Ok(wrote) => break wrote,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::internal("an answer of the writer", "none"));
                }
                Err(RecvTimeoutError::Timeout) if read.is_ok() => {
                    if !go_on(written.load(Ordering::Relaxed), plan.total()) {
                        read = Err(stopped());
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        };
        // A failed writer is why the reader ended.
        if let Err(error) = wrote.and(read) {
            let core = error.core().map(CoreError::inner);
            let is_final = matches!(core, Some(CoreError::Corrupt { .. } | CoreError::Leaf { .. }));
            // A later try would fail at the same place.
            if is_final && let Err(error) = give_up(&*parent, &partial) {
                tracing::warn!(%error, "a failed conversion left its output, which may be deleted");
            }
            return Err(error);
        }
        settle_lengths(&*dir, plan.files.iter().map(file))?;
        dir.sync()?;
        if !go_on(plan.total(), plan.total()) {
            return Err(stopped());
        }
        Ok(Complete { parent, name, partial, lock })
    }
}

/// A conversion whose output is complete and durable, below its temporary name.
pub struct Complete {
    parent: Arc<dyn Dir>,
    name: String,
    partial: String,
    lock: Option<Box<dyn Lock>>,
}

impl Complete {
    /// Returns the temporary path of the output.
    pub fn partial(&self) -> PathBuf {
        self.parent.path().join(&self.partial)
    }

    /// Gives the output its name.
    pub fn publish(self) -> Result<()> {
        match aside::publish_copy(&*self.parent, &self.partial, &self.name) {
            Err(error) if error.already_exists() => return Err(taken(&*self.parent, &self.name)),
            published => published?,
        }
        // The output has its name. Its journal counts for nothing, and may stay.
        if let Err(error) = self.parent.remove_file(&format!("{}{JOURNAL}", self.partial)) {
            tracing::warn!(%error, "a finished conversion left its journal, which may be deleted");
        }
        drop(self.lock);
        Ok(())
    }

    /// Removes the output.
    pub fn discard(self) -> Result<()> {
        give_up(&*self.parent, &self.partial)?;
        drop(self.lock);
        Ok(())
    }
}

/// The memory of a conversion.
struct Ring {
    mapping: Arc<Mapping>,
    windows: Vec<Buffer>,
    scratch: Buffer,
}

impl Ring {
    fn new(options: &ConversionOptions, total: u64) -> Result<Self> {
        let size = usize::try_from(options.window_bytes).unwrap_or(usize::MAX);
        let wanted = total.div_ceil(options.window_bytes).min(options.budget_bytes / options.window_bytes);
        // Two windows overlap reading with writing, and one holds elements before their cast.
        let count = usize::try_from(wanted).unwrap_or(usize::MAX).max(2) + 1;
        let mut windows = Mapping::new(count.saturating_mul(size))?.into_buffers(size)?;
        windows.truncate(count);
        let scratch = windows.pop().ok_or_else(|| Error::internal("a buffer of a mapping", "none"))?;
        Ok(Self { mapping: Arc::clone(scratch.mapping()), windows, scratch })
    }
}

/// The reading half of a conversion.
struct Reading<'a> {
    plan: &'a ConversionPlan,
    sums: PieceSums,
    assembler: Assembler<'a>,
    written: &'a AtomicU64,
    go_on: &'a mut dyn FnMut(u64, u64) -> bool,
}

impl Reading<'_> {
    /// Fills windows and sends them to the writer.
    fn run(
        mut self,
        mut pending: Peekable<impl Iterator<Item = OutputWindow>>,
        freed: &Receiver<Buffer>,
        filled: &Sender<FilledWindow>,
    ) -> Result<()> {
        let total = self.plan.total();
        loop {
            let (mut batch, mut buffers) = (Vec::new(), Vec::new());
            while batch.len() < WINDOWS_READ_TOGETHER && pending.peek().is_some() {
                let Some(buffer) = self.buffer(freed, batch.is_empty(), total)? else { break };
                let Some(window) = pending.next() else { break };
                batch.push(window);
                buffers.push(buffer);
            }
            if batch.is_empty() {
                return Ok(());
            }
            let (written, go_on) = (self.written, &mut *self.go_on);
            let mut go_on = || go_on(written.load(Ordering::Relaxed), total);
            self.assembler.assemble(&self.plan.files, &batch, &mut buffers, &mut go_on)?;
            for (window, mut buffer) in batch.into_iter().zip(buffers) {
                let sums = self.sums.add(&self.plan.files, &window, &mut buffer);
                if filled.send(FilledWindow { window, buffer, sums }).is_err() {
                    return Err(stopped());
                }
            }
        }
    }

    /// Returns the memory for a window: waits for it, or takes what there is.
    fn buffer(&mut self, freed: &Receiver<Buffer>, waits: bool, total: u64) -> Result<Option<Buffer>> {
        if !waits {
            return Ok(freed.try_recv().ok());
        }
        loop {
            if !(self.go_on)(self.written.load(Ordering::Relaxed), total) {
                return Err(stopped());
            }
            match freed.recv_timeout(STOP_POLL_INTERVAL) {
                Ok(buffer) => return Ok(Some(buffer)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(stopped()),
            }
        }
    }
}

fn stopped() -> Error {
    stepwell_core::Error::Cancelled("the conversion was stopped".to_owned()).into()
}

/// Returns the names of an incomplete output and of its journal. Readers know a file by the end of
/// its name, which stays.
fn temporary_names(name: &str, kind: OutputKind) -> (String, String) {
    let partial = match name.rsplit_once('.') {
        Some((stem, suffix)) if kind == OutputKind::File && !stem.is_empty() => {
            format!("{stem}{PARTIAL}.{suffix}")
        }
        _ => format!("{name}{PARTIAL}"),
    };
    let journal = format!("{partial}{JOURNAL}");
    (partial, journal)
}

fn check_free(parent: &dyn Dir, name: &str) -> Result<()> {
    if parent.stat(name)?.is_some() { Err(taken(parent, name)) } else { Ok(()) }
}

fn taken(parent: &dyn Dir, name: &str) -> Error {
    let path = parent.path().join(name);
    Error::Invalid(format!("{} exists already. Pass a free path, or move what is there away", path.display()))
}

/// Locks the journal, which is created if it is missing. `None` without locks.
fn own(parent: &dyn Dir, journal: &str, is_there: bool) -> Result<Option<Box<dyn Lock>>> {
    let output = || parent.path().join(journal.trim_end_matches(JOURNAL));
    let lock = match parent.try_lock(journal, LockKind::Exclusive, !is_there) {
        Err(error) if error.is_without_locks() => return Ok(None),
        Err(error) if is_there && error.is_not_found() => {
            return Err(Error::Invalid(format!(
                "{} is in the way: it has the name of an incomplete conversion, and is none. Move or delete it",
                output().display()
            )));
        }
        lock => lock?,
    };
    // The process that held it has removed it.
    if lock.is_none() || parent.stat(journal)?.is_none() {
        return Err(Error::Invalid(format!(
            "another process writes {}. Wait for it, or pass another path",
            output().display()
        )));
    }
    Ok(lock)
}

/// True if the files of finished windows are there, and long enough.
fn finished_are_there(
    parent: &Arc<dyn Dir>,
    partial: &str,
    kind: OutputKind,
    plan: &ConversionPlan,
    options: &ConversionOptions,
    finished: u64,
) -> Result<bool> {
    let below = |name: &str| match kind {
        OutputKind::File => parent.stat(partial),
        OutputKind::Directory => parent.stat(&format!("{partial}/{name}")),
    };
    let mut all = windows(&plan.files, options.window_bytes)
        .take_while(|window| window.number < finished)
        .filter(|window| window.offset == 0);
    all.try_fold(true, |all, window| {
        let Some(planned) = plan.files.get(window.file) else { return Ok(false) };
        let stat = match below(&planned.name) {
            Err(error) if error.is_no_directory() => None,
            stat => stat?,
        };
        Ok(all && stat.is_some_and(|stat| stat.kind == EntryKind::File && stat.len >= planned.length))
    })
}

/// Gives files their exact lengths: a process may have been killed before it cut what was allocated
/// behind their ends.
fn settle_lengths(dir: &dyn Dir, files: impl Iterator<Item = OutputFile>) -> Result<()> {
    for OutputFile { name, length } in files {
        let stat = dir.stat(&name)?;
        if stat.is_some_and(|stat| stat.len == length) {
            continue;
        }
        let file: Arc<dyn File> = dir.overwrite_file(&name, 0)?;
        file.set_len(length)?;
        file.sync()?;
    }
    Ok(())
}

/// Removes an incomplete output and its journal.
fn give_up(parent: &dyn Dir, partial: &str) -> Result<()> {
    remove_partial(parent, partial)?;
    // The output goes first: with its journal, it can be told from a stranger's file.
    parent.sync()?;
    Ok(ignore_missing(parent.remove_file(&format!("{partial}{JOURNAL}")))?)
}

/// Removes an incomplete output, whatever its kind.
fn remove_partial(parent: &dyn Dir, partial: &str) -> Result<()> {
    match parent.stat(partial)?.map(|stat| stat.kind) {
        None => {}
        Some(EntryKind::Dir) => ignore_missing(delete_tree(parent, partial))?,
        Some(_) => ignore_missing(parent.remove_file(partial))?,
    }
    Ok(())
}
