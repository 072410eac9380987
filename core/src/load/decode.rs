//! Reads files that are compressed streams in other files ([`CompressedStream`]).
//!
//! No part of a stream can be found without decoding what is before it. So each stream is decoded
//! by one thread, from its start to the last cell that is needed, and several streams at a time.
//! The cells go to the same [`Sink`] as those of the pipeline. Memory of a thread: a buffer of
//! compressed bytes, one cell, and the decoder.
//!
//! Conversions and comparisons read a tensor piece by piece. So a file set keeps the readers of its
//! streams ([`PausedStreams`]), and the next read goes on where the last one ended.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::block_checksums::CheckedFile;
use super::buffers::ReadBuffers;
use super::destination::Started;
use super::file_set::{FileSet, short};
use super::options::{LoadOptions, LoadStats};
use super::pipeline::{self, OnProgress, Sink, aligned, read_cached};
use super::schedule::{Cell, Schedule, ScheduledRead};
use crate::compression::Decompressor;
use crate::format::checksum::ZipCrc;
use crate::format::index::CompressedStream;
use crate::io::{Disk, File, MemoryFile, Queue};
use crate::sys::{Buffer, Staged, each_polling};
use crate::{Error, Result};

/// Compressed bytes of one read: a multiple of any alignment.
const PIECE_BYTES: u64 = 1 << 20;
/// Memory of a thread that decodes, at most, with the window of its stream.
const STREAM_BYTES: u64 = 16 << 20;
/// Limits on the readers that a file set keeps, and on their memory. A tensor may be cut into
/// several streams, which a conversion reads in turns.
pub(super) const MAX_PAUSED: usize = 64;
pub(super) const MAX_PAUSED_BYTES: usize = 32 << 20;

/// Reads everything in the schedule and passes it to the sink: other files by the pipeline, then
/// compressed streams.
pub(super) fn run<S: Sink>(
    disk: &dyn Disk,
    files: &FileSet,
    mut schedule: Schedule,
    sink: &Arc<S>,
    options: &LoadOptions,
    progress: OnProgress<'_>,
) -> Result<LoadStats> {
    let is_stream = |read: &ScheduledRead| files.stream(read.file).is_some();
    if !schedule.reads.iter().any(is_stream) {
        return pipeline::run(disk, files, schedule, sink, options, progress);
    }
    let (streams, plain): (Vec<_>, Vec<_>) = schedule.reads.into_iter().partition(is_stream);
    let cells = schedule.cells.clone();
    schedule.reads = plain;
    let mut stats = pipeline::run(disk, files, schedule, sink, options, &mut *progress)?;
    let groups: Vec<&[ScheduledRead]> = streams.chunk_by(|a, b| a.file == b.file).collect();
    let done = AtomicU64::new(stats.bytes_read + stats.bytes_cached);
    let over = AtomicBool::new(false);
    let decode = |reads: &[ScheduledRead], go_on: &mut dyn FnMut(u64) -> bool| {
        if over.load(Ordering::Acquire) {
            return Ok((0, 0));
        }
        let mut go_on = |bytes| {
            let done = done.fetch_add(bytes, Ordering::AcqRel) + bytes;
            go_on(done) && !over.load(Ordering::Acquire)
        };
        let decoded = decode_stream(disk, files, reads, &cells, &**sink, options, &mut go_on);
        // The others end early.
        decoded.inspect_err(|_| over.store(true, Ordering::Release))
    };
    // While one thread waits for the disk, another decodes.
    let threads = 2 * options.threads.max(1) as u64;
    let threads = (options.budget_bytes / STREAM_BYTES).clamp(1, threads) as usize;
    let mut cancelled = false;
    let decoded = if threads.min(groups.len()) == 1 {
        groups.iter().map(|reads| decode(reads, &mut *progress)).collect()
    } else {
        let work = |reads: &&[ScheduledRead]| decode(reads, &mut |_| true);
        each_polling("stepwell-decode", threads, &groups, work, &mut || {
            if !cancelled && !progress(done.load(Ordering::Acquire)) {
                cancelled = true;
                over.store(true, Ordering::Release);
            }
        })
    };
    let (mut failed, mut stopped) = (None, None);
    for decoded in decoded {
        match decoded {
            Ok((reads, bytes)) => {
                stats.reads += reads;
                stats.bytes_read += bytes;
            }
            Err(error @ Error::Cancelled(_)) => stopped = Some(error),
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    match failed.or(stopped) {
        Some(error) => Err(error),
        None if cancelled || !progress(done.into_inner()) => Err(Error::Cancelled("by the caller".into())),
        None => Ok(stats),
    }
}

/// Decodes one stream, as far as its reads need it. Returns the reads in its file, and their bytes.
fn decode_stream(
    disk: &dyn Disk,
    files: &FileSet,
    reads: &[ScheduledRead],
    cells: &[Cell],
    sink: &impl Sink,
    options: &LoadOptions,
    go_on: &mut dyn FnMut(u64) -> bool,
) -> Result<(u64, u64)> {
    let (Some(first), Some(last)) = (reads.first(), reads.last()) else { return Ok((0, 0)) };
    let all = first.cells.start..last.cells.end;
    let paused = files.paused().take(first.file, first.bytes.start);
    let reader = match paused {
        Some(paused) => paused.resume(disk, options.stall_timeout),
        None => StreamReader::open(disk, files, first.file, options.stall_timeout),
    };
    let decoded = reader.and_then(|mut reader| {
        let cells = all.clone().filter_map(|number| Some((number, cells.get(number)?)));
        reader.cells(cells, sink, go_on)?;
        let read = (reader.reads, reader.bytes_read);
        files.paused().give(reader.pause());
        Ok(read)
    });
    match decoded {
        Err(error @ (Error::Corrupt { .. } | Error::Io { .. })) => sink.failed(all, error).map(|()| (0, 0)),
        decoded => decoded,
    }
}

/// The readers of a file set's streams between two reads, the last used one at the end.
#[derive(Default)]
pub(super) struct PausedStreams(Mutex<Vec<StreamReader>>);

impl PausedStreams {
    /// Takes the reader of a file that is nearest before `start`. A read of a whole stream begins a
    /// new one, so that it sees what the disk has.
    fn take(&self, number: u32, start: u64) -> Option<StreamReader> {
        let mut readers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let usable = |reader: &StreamReader| {
            reader.number == number && reader.decoded - reader.tail.len() as u64 <= start
        };
        let usable = readers.iter().enumerate().filter(|(_, reader)| start > 0 && usable(reader));
        let (at, _) = usable.max_by_key(|(_, reader)| reader.decoded)?;
        Some(readers.remove(at))
    }

    /// Returns the number of readers, and the bytes of their memory.
    #[cfg(test)]
    pub(super) fn kept(&self) -> (usize, usize) {
        let readers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (readers.len(), readers.iter().map(StreamReader::memory_bytes).sum())
    }

    /// Keeps a reader, and drops those that were used longest ago.
    fn give(&self, reader: StreamReader) {
        let mut readers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        readers.retain(|other| (other.number, other.decoded) != (reader.number, reader.decoded));
        readers.push(reader);
        let mut count = readers.len();
        let mut bytes: usize = readers.iter().map(StreamReader::memory_bytes).sum();
        let mut surplus = 0;
        for reader in readers.iter() {
            if count <= MAX_PAUSED && bytes <= MAX_PAUSED_BYTES {
                break;
            }
            count -= 1;
            bytes -= reader.memory_bytes();
            surplus += 1;
        }
        let dropped: Vec<StreamReader> = readers.drain(..surplus).collect();
        drop(readers);
        drop(dropped);
    }
}

/// Decodes one stream.
struct StreamReader {
    /// Ordinal of the file that is the stream.
    number: u32,
    file: Arc<dyn File>,
    queue: Option<Box<dyn Queue>>,
    alignment: u64,
    stall_timeout: Duration,
    stream: CompressedStream,
    /// Bytes of the decoded file, and of its blocks.
    length: u64,
    block_bytes: u64,
    /// The stream's first byte in its file, and the next one that is read.
    begin: u64,
    at: u64,
    /// A read part of the stream, and the bytes of it that were not decoded.
    buffer: Option<Buffer>,
    waiting: Range<usize>,
    /// The same bytes of a paused reader. Its buffer is given back, because a forked child has no
    /// buffers of its parent.
    unread: Vec<u8>,
    decoder: Decompressor,
    ended: bool,
    /// Decoded bytes so far, and their checksum.
    decoded: u64,
    crc: ZipCrc,
    /// The last decoded block. The next read may need it again: it may begin in it.
    tail: Vec<u8>,
    /// Reads since the reader was opened or resumed, and their bytes of the stream.
    reads: u64,
    bytes_read: u64,
}

impl StreamReader {
    fn open(disk: &dyn Disk, files: &FileSet, number: u32, stall_timeout: Duration) -> Result<Self> {
        let info = files.info(number)?;
        let Some((stream, begin)) = files.stream(number) else {
            return Err(Error::internal("a compressed stream", format!("file {number}")));
        };
        Ok(Self {
            number,
            file: files.ready(number, &(0..0))?,
            queue: Some(disk.queue_for_reads(1)?),
            alignment: disk.choice().alignment.max(1) as u64,
            stall_timeout,
            stream: *stream,
            length: info.data_end,
            block_bytes: info.block_bytes,
            begin,
            at: begin,
            buffer: None,
            waiting: 0..0,
            unread: Vec::new(),
            decoder: Decompressor::new(stream.compression),
            ended: false,
            decoded: 0,
            crc: ZipCrc::default(),
            tail: Vec::new(),
            reads: 0,
            bytes_read: 0,
        })
    }

    /// Gives back what only a running reader needs.
    fn pause(mut self) -> Self {
        self.queue = None;
        if let Some(buffer) = self.buffer.take() {
            self.unread = buffer.get(self.waiting.clone()).unwrap_or_default().to_vec();
            ReadBuffers::shared().give(buffer);
        }
        self
    }

    /// Goes on after a pause.
    fn resume(mut self, disk: &dyn Disk, stall_timeout: Duration) -> Result<Self> {
        self.queue = Some(disk.queue_for_reads(1)?);
        self.stall_timeout = stall_timeout;
        (self.reads, self.bytes_read) = (0, 0);
        let unread = std::mem::take(&mut self.unread);
        if !unread.is_empty() {
            let mut buffer = ReadBuffers::shared().take(PIECE_BYTES as usize)?;
            self.waiting = 0..unread.len();
            buffer.get_mut(self.waiting.clone()).unwrap_or_default().copy_from_slice(&unread);
            self.buffer = Some(buffer);
        }
        Ok(self)
    }

    /// Bytes of memory of a paused reader.
    fn memory_bytes(&self) -> usize {
        self.decoder.memory_bytes() + self.unread.len() + self.tail.len()
    }

    /// Decodes up to the last cell, and gives the cells to the sink. `go_on` gets the bytes of
    /// each, and zero while bytes before a cell are skipped.
    fn cells<'c>(
        &mut self,
        cells: impl Iterator<Item = (usize, &'c Cell)>,
        sink: &impl Sink,
        go_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<()> {
        for (number, cell) in cells {
            let len = (cell.bytes.end - cell.bytes.start) as usize;
            let mut buffer = ReadBuffers::shared().take(len)?;
            while self.decoded < cell.bytes.start {
                let left = usize::try_from(cell.bytes.start - self.decoded).unwrap_or(usize::MAX);
                let size = buffer.len().min(left);
                self.fill(buffer.get_mut(..size).unwrap_or_default())?;
                if !go_on(0) {
                    return Err(Error::Cancelled("by the caller".into()));
                }
            }
            // The bytes of the cell that were decoded before.
            let again = (self.decoded - cell.bytes.start) as usize;
            let known = self.tail.len().checked_sub(again).and_then(|from| self.tail.get(from..));
            let Some((known, target)) = known.zip(buffer.get_mut(..again)) else {
                return Err(Error::internal(
                    "a stream before its next cell",
                    format!("{again} bytes behind"),
                ));
            };
            target.copy_from_slice(known);
            self.fill(buffer.get_mut(again..len).unwrap_or_default())?;
            self.tail.clear();
            let last = len.saturating_sub(self.block_bytes as usize);
            self.tail.extend_from_slice(buffer.get(last..len).unwrap_or_default());
            if self.decoded == self.length {
                self.check_end()?;
            }
            let buffer = Arc::new(buffer);
            let bytes = Staged::new(&buffer, 0..len)
                .ok_or_else(|| Error::internal("a cell inside its buffer", "one that passes its end"))?;
            let mut started = Started::new(self.stall_timeout);
            let worked = sink.cell(number, &bytes, &mut started);
            // Wait also after an error: started copies must end before the run does.
            let ended = started.wait();
            drop((bytes, started));
            if let Some(buffer) = Arc::into_inner(buffer) {
                ReadBuffers::shared().give(buffer);
            }
            worked.and(ended)?;
            if !go_on(len as u64) {
                return Err(Error::Cancelled("by the caller".into()));
            }
        }
        Ok(())
    }

    /// Decodes as many bytes as `output` has.
    fn fill(&mut self, output: &mut [u8]) -> Result<()> {
        let mut at = 0;
        while let Some(rest) = output.get_mut(at..).filter(|rest| !rest.is_empty()) {
            let written = self.step(rest)?;
            if self.ended && written < rest.len() {
                let found = self.decoded + written as u64;
                return Err(self.corrupt(&format!("it ends after {found} of {} bytes", self.length)));
            }
            self.crc.update(rest.get(..written).unwrap_or_default());
            self.decoded += written as u64;
            at += written;
        }
        Ok(())
    }

    /// Checks the checksum, and that the stream ends here if it has an end.
    fn check_end(&mut self) -> Result<()> {
        let mut more = [0; 1];
        let has_end = self.stream.compression.has_end();
        while has_end && !self.ended {
            if self.step(&mut more)? > 0 {
                return Err(self.corrupt(&format!("it goes on behind its {} bytes", self.length)));
            }
        }
        if has_end && (!self.waiting.is_empty() || self.at < self.begin + self.stream.length) {
            return Err(self.corrupt("it ends before its last compressed byte"));
        }
        match (self.stream.crc, self.crc.value()) {
            (Some(written), found) if written != found => {
                Err(self
                    .corrupt(&format!("its checksum is {found:08x}, but it was written with {written:08x}")))
            }
            _ => Ok(()),
        }
    }

    /// Decodes one piece to the start of `output`. Returns its length, which may be zero.
    fn step(&mut self, output: &mut [u8]) -> Result<usize> {
        if self.ended {
            return Ok(0);
        }
        if self.waiting.is_empty() {
            self.read()?;
        }
        let input = self.buffer.as_ref().and_then(|buffer| buffer.get(self.waiting.clone()));
        let input = input.unwrap_or_default();
        let stuck = input.is_empty();
        let piece = self.decoder.step(input, output).map_err(|what| self.corrupt(what))?;
        if (piece.used, piece.written, piece.ended) == (0, 0, false) {
            let what = if stuck { "it has no end" } else { "it cannot be decoded" };
            return Err(self.corrupt(what));
        }
        self.waiting.start += piece.used;
        self.ended = piece.ended;
        Ok(piece.written)
    }

    /// Reads the next piece, if there is one.
    fn read(&mut self) -> Result<()> {
        let last = self.at / self.alignment * self.alignment + PIECE_BYTES;
        let end = (self.begin + self.stream.length).min(last);
        if self.at == end {
            return Ok(());
        }
        let (offset, len) = aligned(&(self.at..end), self.alignment);
        let buffer = match self.buffer.take() {
            Some(buffer) => buffer,
            None => ReadBuffers::shared().take(PIECE_BYTES as usize)?,
        };
        let file = self.file.as_any();
        if file.is::<MemoryFile>() || file.is::<CheckedFile>() {
            return self.read_unqueued(end, buffer);
        }
        let Some(mut queue) = self.queue.take() else {
            return Err(Error::internal("a queue for each stream", "a stream without one"));
        };
        let read = read_cached(&mut queue, &self.file, offset, len, buffer, self.stall_timeout);
        if matches!(read, Err(Error::Timeout { .. })) {
            // The disk hangs. This leaks the queue and its buffer: dropping them would hang too.
            std::mem::forget(queue);
            return read.map(|_| ());
        }
        self.queue = Some(queue);
        let completion = read?;
        let count = completion.result?;
        self.waiting = (self.at - offset) as usize..(end - offset) as usize;
        if count < self.waiting.end {
            return Err(short(self.file.path(), offset + count as u64, end));
        }
        self.buffer = Some(completion.buffer);
        self.bytes_read += end - self.at;
        self.at = end;
        self.reads += 1;
        Ok(())
    }

    /// Reads up to `end` of bytes that are in memory, or are checked.
    fn read_unqueued(&mut self, end: u64, mut buffer: Buffer) -> Result<()> {
        let bytes = self.file.read_at(self.at, (end - self.at) as usize)?;
        self.waiting = 0..bytes.len();
        if let Some(target) = buffer.get_mut(self.waiting.clone()) {
            target.copy_from_slice(&bytes);
        }
        self.buffer = Some(buffer);
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn corrupt(&self, what: &str) -> Error {
        Error::corrupt(self.file.path(), format!("its compressed part at byte {}: {what}", self.begin))
    }
}

impl Drop for StreamReader {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            ReadBuffers::shared().give(buffer);
        }
    }
}
