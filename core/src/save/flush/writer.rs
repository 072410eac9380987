//! The loop that writes full slots and footers. It keeps the queue full.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::FlushParts;
use super::data_file::{self, DataFile, FinishedFile, FooterEnd};
use crate::deadline::StallTimer;
use crate::format::{block, footer};
use crate::io::{Completion, Dir, Disk, Queue, SpaceReclaimer, Transfer};
use crate::save::capture::Message;
use crate::save::windows::Windows;
use crate::staging::{Filled, Flushing, Full, Slot, Written};
use crate::sync::{RecvTimeoutError, TryRecvError};
use crate::sys::{Buffer, each};
use crate::{Error, Result};

/// Poll interval while the capture runs: a full slot may arrive while the queue has room.
const CAPTURE_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Poll interval when only a completion or a cancellation can arrive.
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Objects of a store that are ended at once.
const OBJECTS_AT_ONCE: usize = 32;

/// Writes and syncs all files.
pub(super) fn write(
    parts: &FlushParts,
    disk: &dyn Disk,
    step_dir: &Arc<dyn Dir>,
    reclaimer: &mut dyn SpaceReclaimer,
) -> Result<Vec<FinishedFile>> {
    let started = Instant::now();
    if let Err(error) = disk.register(&parts.pool.mappings()) {
        tracing::warn!(%error, "the staging ring is not registered; writes cost a little more");
    }
    let files = data_file::create(parts, step_dir, reclaimer)?;
    let queue = disk.queue(parts.options.queue_depth.max(1))?;
    let mut writer = FlushWriter {
        parts,
        queue,
        files,
        pending: VecDeque::new(),
        in_flight: Vec::new(),
        written: Vec::new(),
        next_token: 0,
        received: 0,
        over: false,
        captured_windows: None,
        timer: StallTimer::new(parts.options.stall_timeout),
    };
    let outcome = writer.run();
    parts.progress.written_since(started);
    if let Err(error) = outcome {
        // Slots no longer return to the pool, so the capture must not wait for them.
        parts.link.stop(format!("the flush failed: {error}"));
        writer.abandon();
        return Err(error);
    }
    let started = Instant::now();
    // The end of an object is a request, which waits for a network.
    let is_remote = writer.files.iter().all(|file| file.file.is_object());
    let threads = if is_remote { OBJECTS_AT_ONCE } else { 1 };
    let ends = each("stepwell-finish", threads, &writer.files, DataFile::finish).into_iter().collect();
    parts.progress.synced_since(started);
    ends
}

/// The content of a write.
#[derive(Clone, Copy)]
enum WriteContent {
    Window {
        window: usize,
        /// True if its checksums are known.
        summed: bool,
    },
    Footer,
}

/// A write that waits for the queue.
struct ReadyWrite {
    content: WriteContent,
    item: u32,
    offset: u64,
    len: u64,
    memory: WriteBuffer,
}

/// The memory of a write. A footer gets its own if no slot is free.
enum WriteBuffer {
    Slot(Slot<Full>),
    Own(Buffer),
}

/// A write in the queue.
struct PendingWrite {
    token: u64,
    content: WriteContent,
    len: u64,
    slot: Option<Slot<Flushing>>,
}

struct FlushWriter<'a> {
    parts: &'a FlushParts,
    queue: Box<dyn Queue>,
    files: Vec<DataFile>,
    pending: VecDeque<ReadyWrite>,
    in_flight: Vec<PendingWrite>,
    /// Written windows without a checksum.
    written: Vec<(usize, Slot<Written>)>,
    next_token: u64,
    /// The number of windows that have arrived.
    received: usize,
    /// True once the capture sends no more messages.
    over: bool,
    /// The capture's windows, to be dropped here.
    captured_windows: Option<Box<Windows>>,
    /// Measures progress: windows that have arrived, submitted writes, writes in flight.
    timer: StallTimer<(usize, u64, usize)>,
}

impl FlushWriter<'_> {
    fn run(&mut self) -> Result<()> {
        loop {
            if let Some(error) = self.parts.link.stopped() {
                return Err(error);
            }
            self.receive()?;
            self.submit()?;
            while let Some(completion) = self.queue.complete(Duration::ZERO) {
                self.land(completion)?;
                self.submit()?;
            }
            if self.checksum_one()? || self.footer()? || self.captured_windows.take().is_some() {
                continue;
            }
            if self.pending.is_empty()
                && self.in_flight.is_empty()
                && self.files.iter().all(|f| f.footer.is_some())
            {
                return Ok(());
            }
            self.wait()?;
        }
    }

    /// True if every window has arrived.
    fn has_all_windows(&self) -> bool {
        self.received == self.parts.windows.len()
    }

    fn receive(&mut self) -> Result<()> {
        while !self.over {
            match self.parts.receiver.try_recv() {
                Ok(message) => self.handle(message),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) if self.has_all_windows() => self.over = true,
                Err(TryRecvError::Disconnected) => return Err(self.capture_ended()),
            }
        }
        Ok(())
    }

    fn capture_ended(&self) -> Error {
        let ended = || Error::Cancelled("the capture has ended before it was complete".into());
        self.parts.link.stopped().unwrap_or_else(ended)
    }

    fn handle(&mut self, message: Message) {
        let (window, slot) = match message {
            Message::Window(window, slot) => (window, slot),
            Message::Over(windows) => {
                self.captured_windows = Some(windows);
                return;
            }
        };
        self.received += 1;
        if let Some(plan) = self.parts.windows.get(window) {
            self.pending.push_back(ReadyWrite {
                content: WriteContent::Window { window, summed: false },
                item: plan.item,
                offset: plan.offset,
                len: plan.len,
                memory: WriteBuffer::Slot(slot),
            });
        }
    }

    fn submit(&mut self) -> Result<()> {
        while self.queue.in_flight() < self.parts.options.queue_depth.max(1) {
            let Some(ReadyWrite { content, item, offset, len, memory }) = self.pending.pop_front() else {
                break;
            };
            let Some(file) = self.files.get(item as usize) else { continue };
            let (buffer, slot) = match memory {
                WriteBuffer::Slot(slot) => {
                    let (buffer, slot) = slot.launch()?;
                    (buffer, Some(slot))
                }
                WriteBuffer::Own(buffer) => (buffer, None),
            };
            let token = self.next_token;
            self.next_token += 1;
            self.queue.submit(Transfer::Write, &file.file, offset, len as usize, buffer, token);
            self.in_flight.push(PendingWrite { token, content, len, slot });
        }
        Ok(())
    }

    fn land(&mut self, completion: Completion) -> Result<()> {
        let Completion { token, buffer, result } = completion;
        let place = self.in_flight.iter().position(|flight| flight.token == token);
        let flight = place.map(|place| self.in_flight.swap_remove(place));
        let Some(PendingWrite { content, len, slot, .. }) = flight else {
            return Err(Error::internal("a write that was submitted", format!("write {token}")));
        };
        let slot = slot.map(|slot| slot.land(buffer)).transpose()?;
        let done = result?;
        if done as u64 != len {
            return Err(Error::internal(
                format!("{len} bytes written, or an error"),
                format!("{done} bytes and none"),
            ));
        }
        self.parts.progress.written(len);
        if let (WriteContent::Window { window, summed: false }, Some(slot)) = (content, slot) {
            self.written.push((window, slot));
        }
        Ok(())
    }

    /// Checksums one window, if the capture is over or waits for slots. Returns true if it found
    /// one.
    fn checksum_one(&mut self) -> Result<bool> {
        let starved = !self.has_all_windows() && self.parts.pool.is_starved();
        if !self.has_all_windows() && !starved {
            return Ok(false);
        }
        // A checksum of a written window frees its slot. One that waits for the queue uses idle
        // time.
        if let Some((window, slot)) = self.written.pop() {
            self.checksum(window, slot.bytes())?;
            return Ok(true);
        }
        let waiting = self.pending.iter_mut().enumerate().find_map(|(i, ready)| match &mut ready.content {
            WriteContent::Window { window, summed } if !*summed => {
                *summed = true;
                Some((i, *window))
            }
            _ => None,
        });
        let Some((place, window)) = waiting else { return Ok(false) };
        let Some(ready) = self.pending.remove(place) else { return Ok(false) };
        if let WriteBuffer::Slot(slot) = &ready.memory {
            self.checksum(window, slot.bytes())?;
        }
        self.pending.insert(place, ready);
        Ok(true)
    }

    fn checksum(&mut self, window: usize, bytes: &[u8]) -> Result<()> {
        let started = Instant::now();
        let block_bytes = self.parts.options.block_bytes;
        let missing =
            || Error::internal("a place for each window in its file", format!("none for window {window}"));
        let window = self.parts.windows.get(window).ok_or_else(missing)?;
        let file = self.files.get_mut(window.item as usize).ok_or_else(missing)?;
        let first = (window.offset / block_bytes) as usize;
        let data = bytes.get(..window.len as usize).ok_or_else(missing)?;
        let crcs = file.crcs.get_mut(first..).ok_or_else(missing)?;
        for (place, crc) in crcs.iter_mut().zip(block::crcs(data, block_bytes)) {
            *place = crc;
        }
        file.unsummed = file.unsummed.saturating_sub(1);
        self.parts.progress.checksummed_since(started);
        Ok(())
    }

    /// Encodes the footer of one file whose checksums are all known, and queues it. Returns true if
    /// it found one.
    fn footer(&mut self) -> Result<bool> {
        let next = self.files.iter().position(|file| file.unsummed == 0 && file.footer.is_none());
        let Some(number) = next else { return Ok(false) };
        let (Some(item), Some(index), Some(file)) =
            (self.parts.items.get(number), self.parts.indexes.get(number), self.files.get_mut(number))
        else {
            return Ok(false);
        };
        let block_bytes = self.parts.options.block_bytes;
        let footer = footer::encode(item.file_id, block_bytes, item.data_bytes, index, &file.crcs)?;
        let length = item.data_bytes + footer.bytes.len() as u64;
        if file.within.is_some() {
            // Fails if it is not the reserved length: another rank's part follows.
            file.file.set_len(length)?;
        }
        file.footer = Some(FooterEnd { length, trailer_crc: footer.trailer_crc });
        let mut offset = item.data_bytes;
        for bytes in footer.bytes.chunks(self.parts.pool.slot_bytes()) {
            let len = bytes.len() as u64;
            let memory = self.footer_memory(bytes)?;
            self.pending.push_back(ReadyWrite {
                content: WriteContent::Footer,
                item: number as u32,
                offset,
                len,
                memory,
            });
            offset += len;
        }
        Ok(true)
    }

    /// Returns memory with these bytes. Takes a slot if one is free. This thread must not wait for
    /// a slot, because it returns the slots to the pool.
    fn footer_memory(&self, bytes: &[u8]) -> Result<WriteBuffer> {
        if let Some(slot) = self.parts.pool.try_acquire()? {
            let mut slot = slot.begin();
            slot.part(0, bytes.len() as u64)?.copy_from_slice(bytes);
            if let Filled::Full(slot) = slot.finish() {
                return Ok(WriteBuffer::Slot(slot));
            }
        }
        let mut buffer = Buffer::alone(bytes.len())?;
        if let Some(start) = buffer.get_mut(..bytes.len()) {
            start.copy_from_slice(bytes);
        }
        Ok(WriteBuffer::Own(buffer))
    }

    /// Returns the time until the stall timeout.
    fn time_left(&mut self) -> Duration {
        self.timer.left((self.received, self.next_token, self.in_flight.len()))
    }

    /// Waits for a completion or a message of the capture.
    fn wait(&mut self) -> Result<()> {
        let left = self.time_left();
        if left.is_zero() {
            let waited_for = if self.in_flight.is_empty() {
                format!(
                    "the capture ({} of {} windows have arrived)",
                    self.received,
                    self.parts.windows.len()
                )
            } else {
                format!("{} writes to complete", self.in_flight.len())
            };
            let seconds = self.parts.options.stall_timeout.as_secs_f64();
            return Err(Error::Timeout { waited_for, seconds });
        }
        if self.in_flight.is_empty() {
            match self.parts.receiver.recv_timeout(left.min(IDLE_POLL_INTERVAL)) {
                Ok(message) => self.handle(message),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) if self.has_all_windows() => self.over = true,
                Err(RecvTimeoutError::Disconnected) => return Err(self.capture_ended()),
            }
        } else {
            let interval = if self.has_all_windows() { IDLE_POLL_INTERVAL } else { CAPTURE_POLL_INTERVAL };
            if let Some(completion) = self.queue.complete(left.min(interval)) {
                self.land(completion)?;
            }
        }
        Ok(())
    }

    /// Cleans up after a failure: returns each slot when its write completes. Writes that never
    /// complete leak their memory and the queue, because the kernel may still read that memory.
    fn abandon(mut self) {
        self.pending.clear();
        self.written.clear();
        self.timer = StallTimer::new(self.parts.options.stall_timeout);
        while self.queue.in_flight() > 0 {
            let left = self.time_left();
            if left.is_zero() {
                tracing::error!(
                    writes = self.in_flight.len(),
                    "writes never completed; their memory is leaked"
                );
                std::mem::forget(self.queue);
                return;
            }
            while self.parts.receiver.try_recv().is_ok() {}
            if let Some(completion) = self.queue.complete(left.min(IDLE_POLL_INTERVAL)) {
                // Only the first error is reported.
                let _ = self.land(completion);
                self.written.clear();
            }
        }
    }
}
