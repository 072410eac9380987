//! The thread that writes windows. It makes them durable from time to time, and then records them
//! in the journal.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crossbeam_channel::{Receiver, Sender, TryRecvError};

use stepwell_core::io::{Dir, Disk, File, Queue, Transfer};
use stepwell_core::sys::Buffer;

use super::WRITE_TIMEOUT;
use super::checksums::PieceSum;
use super::journal::Journal;
use super::windows::{OutputWindow, WINDOW_ALIGNMENT};
use crate::error::{Error, Result};

/// Writes in flight. Windows are large: more are not faster.
const QUEUE_DEPTH: usize = 4;

/// A window with its bytes.
pub(super) struct FilledWindow {
    pub window: OutputWindow,
    pub buffer: Buffer,
    /// Sums of pieces that it has changed.
    pub sums: Vec<PieceSum>,
}

/// A file to write, by its name in the directory of the output.
pub(super) struct OutputFile {
    pub name: String,
    pub length: u64,
}

/// See the module documentation.
pub(super) struct WindowWriter {
    pub disk: Arc<dyn Disk>,
    pub dir: Arc<dyn Dir>,
    pub files: Vec<OutputFile>,
    /// `None`: the files are objects, which are whole when they appear.
    pub journal: Option<Journal>,
    /// Bytes between two records of the journal.
    pub journal_bytes: u64,
    /// Written bytes, for progress.
    pub written: Arc<AtomicU64>,
    /// True if windows that have come are not written any more.
    pub stop: Arc<AtomicBool>,
    /// True if nobody waits for this thread any more. Another conversion may use the journal.
    pub is_abandoned: Arc<AtomicBool>,
    /// Returns the memory of written windows.
    pub free: Sender<Buffer>,
}

/// The state of the thread.
struct WriterState {
    queue: Box<dyn Queue>,
    /// The windows in flight: number and bytes of each.
    in_flight: Vec<(u64, u64)>,
    /// The file of the last window.
    file: Option<(usize, Arc<dyn File>)>,
    /// The record of the windows that were submitted since, and their bytes.
    next: JournalRecord,
    bytes: u64,
    /// A record whose windows may be in flight. Later ones are written meanwhile.
    begun: Option<JournalRecord>,
}

impl WriterState {
    fn begin_record(&mut self) {
        self.begun = Some(std::mem::take(&mut self.next));
        self.bytes = 0;
    }
}

/// A record of the journal.
#[derive(Default)]
struct JournalRecord {
    /// Windows before this one are finished, all files together.
    finished: u64,
    sums: Vec<PieceSum>,
}

impl WindowWriter {
    /// Writes windows until no more come.
    pub(super) fn run(mut self, windows: &Receiver<FilledWindow>) -> Result<()> {
        let mut at = WriterState {
            queue: self.disk.queue(QUEUE_DEPTH)?,
            in_flight: Vec::new(),
            file: None,
            next: JournalRecord::default(),
            bytes: 0,
            begun: None,
        };
        while let Some(FilledWindow { window, buffer, sums }) = self.next(&mut at, windows)? {
            let file = self.open(&mut at, &window)?;
            let len = match self.journal {
                Some(_) => window.len.next_multiple_of(WINDOW_ALIGNMENT as usize),
                None => window.len,
            };
            while at.queue.in_flight() >= QUEUE_DEPTH {
                self.complete(&mut at)?;
            }
            at.queue.submit(Transfer::Write, &file, window.offset, len, buffer, window.number);
            at.in_flight.push((window.number, window.len as u64));
            at.next.sums.extend(sums);
            at.next.finished = window.number + 1;
            at.bytes += window.len as u64;
            if at.bytes >= self.journal_bytes && at.begun.is_none() {
                at.begin_record();
            }
        }
        self.finish_file(&mut at)?;
        if at.bytes > 0 {
            at.begin_record();
            self.record(&mut at)?;
        }
        Ok(())
    }

    /// Returns the next window. Until it comes, the memory of finished writes is returned: the
    /// reader may need it. `None`: no more come, or none is wanted.
    fn next(
        &mut self,
        at: &mut WriterState,
        windows: &Receiver<FilledWindow>,
    ) -> Result<Option<FilledWindow>> {
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            match windows.try_recv() {
                Ok(window) => return Ok(Some(window)),
                Err(TryRecvError::Disconnected) => return Ok(None),
                Err(TryRecvError::Empty) if at.queue.in_flight() == 0 => return Ok(windows.recv().ok()),
                Err(TryRecvError::Empty) => self.complete(at)?,
            }
        }
    }

    /// Returns the open file of a window.
    fn open(&mut self, at: &mut WriterState, window: &OutputWindow) -> Result<Arc<dyn File>> {
        if let Some((number, file)) = &at.file
            && *number == window.file
        {
            return Ok(Arc::clone(file));
        }
        self.finish_file(at)?;
        let Some(planned) = self.files.get(window.file) else {
            return Err(Error::internal("a planned file", format!("file {}", window.file)));
        };
        let length = planned.length.next_multiple_of(WINDOW_ALIGNMENT);
        let file = match self.journal {
            Some(_) => self.dir.overwrite_file(&planned.name, length)?,
            None => self.dir.create_file(&planned.name, length)?,
        };
        at.file = Some((window.file, Arc::clone(&file)));
        Ok(file)
    }

    /// Waits for one write, and returns its memory. Makes the record that was begun, if all its
    /// windows are written.
    fn complete(&mut self, at: &mut WriterState) -> Result<()> {
        let Some(completion) = at.queue.complete(WRITE_TIMEOUT) else {
            let waited_for = format!("a write below {}", self.dir.path().display());
            return Err(Error::Timeout { waited_for, waited: WRITE_TIMEOUT });
        };
        completion.result?;
        if let Some(place) = at.in_flight.iter().position(|&(number, _)| number == completion.token) {
            self.written.fetch_add(at.in_flight.swap_remove(place).1, Ordering::Relaxed);
        }
        // Nobody waits for it at the end.
        let _ = self.free.send(completion.buffer);
        self.record(at)
    }

    /// Gives a file whose windows have all come its length, and makes it durable.
    fn finish_file(&mut self, at: &mut WriterState) -> Result<()> {
        while at.queue.in_flight() > 0 {
            self.complete(at)?;
        }
        if let Some((number, file)) = at.file.take() {
            // An incomplete file loses only the space that was allocated behind its end.
            if let Some(planned) = self.files.get(number)
                && (self.journal.is_none() || file.len()? > planned.length)
            {
                file.set_len(planned.length)?;
            }
            file.sync()?;
        }
        Ok(())
    }

    /// Makes the windows of the record that was begun durable, and writes it, if none of them is in
    /// flight. Earlier files are durable.
    fn record(&mut self, at: &mut WriterState) -> Result<()> {
        let is_written =
            |record: &mut JournalRecord| at.in_flight.iter().all(|&(number, _)| number >= record.finished);
        let Some(record) = at.begun.take_if(is_written) else { return Ok(()) };
        let Some(journal) = &mut self.journal else { return Ok(()) };
        if let Some((_, file)) = &at.file {
            file.sync()?;
        }
        if self.is_abandoned.load(Ordering::Relaxed) {
            return Err(stepwell_core::Error::Cancelled("the conversion was given up".to_owned()).into());
        }
        journal.append(record.finished, &record.sums)
    }
}
