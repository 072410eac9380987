//! The part of the output that a rank writes: windows are read by the calling thread into a ring of
//! buffers, and written by another thread.

use std::iter::Peekable;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};

use stepwell_core::deadline::StallTimer;
use stepwell_core::io::{Dir, Disk, Lock};
use stepwell_core::sys::{Buffer, Mapping, spawn};

use super::ConversionOptions;
use super::Output;
use super::assembler::Assembler;
use super::checksums::PieceSums;
use super::file_plan::ConversionPlan;
use super::journal::{Journal, Recorded};
use super::windows::{OutputWindow, windows_in};
use super::writer::{FilledWindow, WindowWriter};
use crate::error::{Error, Result};
use crate::reader::Reader;

/// Windows that are read together, so that the disk has reads to do all the time.
const WINDOWS_READ_TOGETHER: usize = 4;
/// Poll interval for a request to stop, while all memory is being written.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A rank's part of the output, while it is written.
pub(super) struct WrittenPart<'a> {
    pub plan: &'a ConversionPlan,
    pub options: &'a ConversionOptions,
    pub disk: &'a Arc<dyn Disk>,
    pub dir: Arc<dyn Dir>,
    /// The numbers of its windows.
    pub part: Range<u64>,
    /// The lock of the output, for the thread that writes.
    pub lock: Option<Arc<dyn Lock>>,
}

impl WrittenPart<'_> {
    /// Writes the windows that are not recorded, and makes them durable. `go_on` as of
    /// [`super::Conversion::write`].
    pub(super) fn write(
        self,
        source: &Reader,
        journal: Option<Journal>,
        recorded: &Recorded,
        output: &Output,
        go_on: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<()> {
        let Self { plan, options, disk, dir, part, lock } = self;
        let all = || windows_in(&plan.files, options.window_bytes, part.clone());
        let (total, written) = (all().map(|window| window.len as u64).sum(), Arc::new(AtomicU64::new(0)));
        let mut pending = all().peekable();
        while let Some(window) = pending.next_if(|window| window.number < recorded.finished) {
            written.fetch_add(window.len as u64, Ordering::Relaxed);
        }
        let mut memory = Ring::new(options, total)?;
        let (stop, is_abandoned) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (free, freed) = unbounded();
        for buffer in memory.windows.drain(..) {
            let _ = free.send(buffer);
        }
        if let Err(error) = disk.register(std::slice::from_ref(&memory.mapping)) {
            tracing::warn!(%error, "the windows of a conversion are not registered; writes cost a little more");
        }
        let writer = WindowWriter {
            disk: Arc::clone(disk),
            dir,
            files: output.files(plan),
            journal,
            journal_bytes: options.journal_bytes,
            written: Arc::clone(&written),
            stop: Arc::clone(&stop),
            is_abandoned: Arc::clone(&is_abandoned),
            free,
        };
        let (filled, windows_to_write) = unbounded();
        let (ended, end) = bounded(1);
        let thread = spawn("stepwell-convert", move || {
            let wrote = writer.run(&windows_to_write);
            drop(lock);
            drop(ended.send(wrote));
        });
        thread.map_err(|source| stepwell_core::Error::io("start a thread for", "<a conversion>", source))?;
        let mut wait = WriterWait::new(output.path(), options.stall_timeout, &written);
        let reading = Reading {
            plan,
            total,
            sums: pending
                .peek()
                .map(|window| PieceSums::resumed(&plan.files, window, &recorded.sums))
                .unwrap_or_default(),
            assembler: Assembler::new(source, memory.scratch),
            writer: &mut wait,
            go_on: &mut *go_on,
        };
        let mut read = reading.run(pending, &freed, &filled);
        drop(filled);
        wait.begin();
        let wrote = loop {
            stop.fetch_or(read.is_err(), Ordering::Relaxed);
            match end.recv_timeout(STOP_POLL_INTERVAL) {
                Ok(wrote) => break wrote,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::internal("an answer of the writer", "none"));
                }
                Err(RecvTimeoutError::Timeout) => {
                    if read.is_ok() && !go_on(written.load(Ordering::Relaxed), total) {
                        read = Err(stopped());
                    }
                    if let Err(error) = wait.check() {
                        // The thread keeps its memory, its files and the lock until it ends.
                        stop.store(true, Ordering::Relaxed);
                        is_abandoned.store(true, Ordering::Relaxed);
                        return Err(error);
                    }
                }
            }
        };
        // A failed writer is why the reader ended.
        wrote.and(read)?;
        if go_on(total, total) { Ok(()) } else { Err(stopped()) }
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
    /// Bytes of this rank's part.
    total: u64,
    sums: PieceSums,
    assembler: Assembler<'a>,
    writer: &'a mut WriterWait,
    go_on: &'a mut dyn FnMut(u64, u64) -> bool,
}

/// The wait for the thread that writes, which may hang in a call of the system.
struct WriterWait {
    output: PathBuf,
    limit: Duration,
    written: Arc<AtomicU64>,
    timer: StallTimer<u64>,
    is_over: bool,
}

impl WriterWait {
    fn new(output: PathBuf, limit: Duration, written: &Arc<AtomicU64>) -> Self {
        let (timer, written) = (StallTimer::new(limit), Arc::clone(written));
        Self { output, limit, written, timer, is_over: false }
    }

    /// Begins another wait, unless one has reached its deadline.
    fn begin(&mut self) {
        if !self.is_over {
            self.timer = StallTimer::new(self.limit);
        }
    }

    /// Fails once nothing was written for too long.
    fn check(&mut self) -> Result<()> {
        if !self.timer.left(self.written.load(Ordering::Relaxed)).is_zero() {
            return Ok(());
        }
        self.is_over = true;
        let waited_for = format!("the writer of {}", self.output.display());
        Err(Error::Timeout { waited_for, waited: self.limit })
    }
}

impl Reading<'_> {
    /// Fills windows and sends them to the writer.
    fn run(
        mut self,
        mut pending: Peekable<impl Iterator<Item = OutputWindow>>,
        freed: &Receiver<Buffer>,
        filled: &Sender<FilledWindow>,
    ) -> Result<()> {
        let total = self.total;
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
            let (written, go_on) = (&self.writer.written, &mut *self.go_on);
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
        self.writer.begin();
        loop {
            if !(self.go_on)(self.writer.written.load(Ordering::Relaxed), total) {
                return Err(stopped());
            }
            match freed.recv_timeout(STOP_POLL_INTERVAL) {
                Ok(buffer) => return Ok(Some(buffer)),
                Err(RecvTimeoutError::Timeout) => self.writer.check()?,
                Err(RecvTimeoutError::Disconnected) => return Err(stopped()),
            }
        }
    }
}

fn stopped() -> Error {
    stepwell_core::Error::Cancelled("the conversion was stopped".to_owned()).into()
}
