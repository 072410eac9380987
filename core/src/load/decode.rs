//! Reads files that are compressed streams in other files ([`CompressedStream`]).
//!
//! No part of a stream can be found without decoding what is before it. So the calling thread
//! decodes one stream after the other, each from its start to the last cell that is needed, and
//! gives the cells to the same [`Sink`] as the pipeline. Memory: a buffer of compressed bytes, and
//! one cell.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::buffers::ReadBuffers;
use super::destination::Started;
use super::file_set::{FileSet, short};
use super::options::{LoadOptions, LoadStats};
use super::pipeline::{self, OnProgress, Sink, aligned, read_cached};
use super::schedule::{Cell, Schedule, ScheduledRead};
use crate::compression::Decompressor;
use crate::format::checksum::ZipCrc;
use crate::format::index::CompressedStream;
use crate::io::{Disk, File, Queue};
use crate::sys::{Buffer, Staged};
use crate::{Error, Result};

/// Compressed bytes of one read: a multiple of any alignment.
const PIECE_BYTES: u64 = 1 << 20;

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
    let mut done = stats.bytes_read + stats.bytes_cached;
    for reads in streams.chunk_by(|a, b| a.file == b.file) {
        let (Some(first), Some(last)) = (reads.first(), reads.last()) else { continue };
        let all = first.cells.start..last.cells.end;
        let decoded =
            StreamReader::open(disk, files, first.file, options.stall_timeout).and_then(|mut reader| {
                let cells = all.clone().filter_map(|number| Some((number, cells.get(number)?)));
                let decoded = reader.cells(cells, &**sink, &mut |bytes| {
                    done += bytes;
                    progress(done)
                });
                stats.bytes_read += reader.at - reader.begin;
                stats.reads += reader.reads;
                decoded
            });
        match decoded {
            Err(error @ (Error::Corrupt { .. } | Error::Io { .. })) => sink.failed(all, error)?,
            decoded => decoded?,
        }
    }
    Ok(stats)
}

/// Decodes one stream.
struct StreamReader<'a> {
    file: Arc<dyn File>,
    queue: Option<Box<dyn Queue>>,
    alignment: u64,
    stall_timeout: Duration,
    stream: &'a CompressedStream,
    /// Bytes of the decoded file.
    length: u64,
    /// The stream's first byte in its file, and the next one that is read.
    begin: u64,
    at: u64,
    /// A read part of the stream, and the bytes of it that were not decoded.
    buffer: Option<Buffer>,
    waiting: Range<usize>,
    decoder: Decompressor,
    ended: bool,
    /// Decoded bytes so far, and their checksum.
    decoded: u64,
    crc: ZipCrc,
    reads: u64,
}

impl<'a> StreamReader<'a> {
    fn open(disk: &dyn Disk, files: &'a FileSet, file: u32, stall_timeout: Duration) -> Result<Self> {
        let length = files.info(file)?.data_end;
        let Some((stream, begin)) = files.stream(file) else {
            return Err(Error::internal("a compressed stream", format!("file {file}")));
        };
        Ok(Self {
            file: files.ready(file, &(0..0))?,
            queue: Some(disk.queue_for_reads(1)?),
            alignment: disk.choice().alignment.max(1) as u64,
            stall_timeout,
            stream,
            length,
            begin,
            at: begin,
            buffer: None,
            waiting: 0..0,
            decoder: Decompressor::new(stream.compression),
            ended: false,
            decoded: 0,
            crc: ZipCrc::default(),
            reads: 0,
        })
    }

    /// Decodes up to the last cell, and gives the cells to the sink. `go_on` gets the bytes of
    /// each.
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
            }
            self.fill(buffer.get_mut(..len).unwrap_or_default())?;
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
                Err(self.corrupt(&format!("its checksum is {found:08x}, what was written had {written:08x}")))
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
        self.at = end;
        self.reads += 1;
        Ok(())
    }

    fn corrupt(&self, what: &str) -> Error {
        Error::corrupt(self.file.path(), format!("its compressed part at byte {}: {what}", self.begin))
    }
}

impl Drop for StreamReader<'_> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            ReadBuffers::shared().give(buffer);
        }
    }
}
