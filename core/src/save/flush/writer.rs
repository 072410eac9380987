//! The loop that keeps the queue full.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::FlushParts;
use crate::deadline::StallTimer;
use crate::format::index::Within;
use crate::format::{block, footer};
use crate::io::{
    Completion, Dir, Disk, File, LockKind, Queue, Section, SpaceReclaimer, Transfer, retry_if_full,
};
use crate::save::capture::Message;
use crate::save::windows::Windows;
use crate::staging::{Filled, Flushing, Full, Slot, Written};
use crate::sync::{RecvTimeoutError, TryRecvError};
use crate::sys::Buffer;
use crate::{Error, Result};

/// Poll interval while the capture runs: a full slot may arrive while the queue has room.
const CAPTURE_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Poll interval when only a completion or a cancellation can arrive.
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Poll interval for the lock under which another rank of the node reserves its part of a file.
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// How a file ended.
pub(super) struct FileEnd {
    pub length: u64,
    pub trailer_crc: u32,
    pub within: Option<Within>,
}

/// Writes and syncs all files.
pub(super) fn write(
    parts: &FlushParts,
    disk: &dyn Disk,
    step_dir: &Arc<dyn Dir>,
    reclaimer: &mut dyn SpaceReclaimer,
) -> Result<Vec<FileEnd>> {
    let started = Instant::now();
    if let Err(error) = disk.register(&parts.pool.mappings()) {
        tracing::warn!(%error, "the staging ring is not registered; writes cost a little more");
    }
    let files = create(parts, step_dir, reclaimer)?;
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
        done_with: None,
        timer: StallTimer::new(parts.options.stall_timeout),
    };
    let outcome = writer.run();
    parts.progress.written_since(started);
    if let Err(error) = outcome {
        // Capture must not wait for slots that nobody will free any more.
        parts.link.stop(format!("the flush failed: {error}"));
        writer.abandon();
        return Err(error);
    }
    let started = Instant::now();
    let ends = writer.files.iter().map(OpenFile::end).collect();
    parts.progress.synced_since(started);
    ends
}

fn create(
    parts: &FlushParts,
    step_dir: &Arc<dyn Dir>,
    reclaimer: &mut dyn SpaceReclaimer,
) -> Result<Vec<OpenFile>> {
    let mut files: Vec<OpenFile> = Vec::with_capacity(parts.items.len());
    for item in &parts.items {
        let dir = match retry_if_full(&mut || reclaimer.reclaim(), || step_dir.create_dir(&item.dir)) {
            // Another rank's save of the same step has made it.
            Err(error) if error.already_exists() => step_dir.open_dir(&item.dir)?,
            other => other?,
        };
        let blocks = item.data_bytes.div_ceil(parts.options.block_bytes) as usize;
        let crcs = vec![0; blocks];
        let part = match (parts.options.node, parts.indexes.get(files.len())) {
            (Some(node), Some(index)) => {
                // The footer is as long whatever the checksums are: a part has its exact length
                // from the beginning.
                let footer =
                    footer::encode(item.file_id, parts.options.block_bytes, item.data_bytes, index, &crcs)?;
                let length = item.data_bytes + footer.bytes.len() as u64;
                part_of_file(
                    &*dir,
                    &format!("n{node:05}.data"),
                    length,
                    reclaimer,
                    parts.options.stall_timeout,
                )?
            }
            _ => None,
        };
        let (file, within) = if let Some((file, within)) = part {
            (file, Some(within))
        } else {
            let len = item.data_bytes + item.footer_hint;
            let file = match reclaimer.take_over(&format!("{}/{}", item.dir, item.file_name), len) {
                Some(file) => file,
                None => create_file(&*dir, &item.file_name, len, reclaimer)?,
            };
            (file, None)
        };
        files.push(OpenFile { file, within, crcs, unsummed: 0, footer: None });
    }
    for window in &parts.windows {
        if let Some(file) = files.get_mut(window.item as usize) {
            file.unsummed += 1;
        }
    }
    Ok(files)
}

fn create_file(
    dir: &dyn Dir,
    name: &str,
    len: u64,
    reclaimer: &mut dyn SpaceReclaimer,
) -> Result<Arc<dyn File>> {
    let mut again = false;
    retry_if_full(&mut || reclaimer.reclaim(), || {
        if std::mem::replace(&mut again, true) {
            // The first try may have made it before it found the disk full.
            match dir.remove_file(name) {
                Err(error) if !error.is_not_found() => return Err(error),
                _ => {}
            }
        }
        dir.create_file(name, len)
    })
}

/// A part of so many bytes of the file that the ranks of a node share, reserved. `None`: there are
/// no locks, and without them two ranks would reserve the same.
fn part_of_file(
    dir: &dyn Dir,
    name: &str,
    length: u64,
    reclaimer: &mut dyn SpaceReclaimer,
    timeout: Duration,
) -> Result<Option<(Arc<dyn File>, Within)>> {
    let begun = Instant::now();
    let lock = loop {
        match dir.try_lock(name, LockKind::Exclusive, true) {
            Ok(Some(lock)) => break lock,
            Ok(None) if begun.elapsed() < timeout => std::thread::sleep(LOCK_POLL_INTERVAL),
            Ok(None) => {
                let waited_for = format!("another rank of the node to reserve its part of {name}");
                return Err(Error::Timeout { waited_for, seconds: begun.elapsed().as_secs_f64() });
            }
            Err(error) if error.is_without_locks() => {
                tracing::info!(name, "no locks here: this rank writes a file of its own");
                return Ok(None);
            }
            Err(error) => return Err(error),
        }
    };
    let (file, offset) = retry_if_full(&mut || reclaimer.reclaim(), || dir.extend_file(name, length))?;
    drop(lock);
    let part: Arc<dyn File> = Arc::new(Section::new(file, offset, length));
    Ok(Some((part, Within { name: name.into(), offset })))
}

/// A data file being written.
struct OpenFile {
    file: Arc<dyn File>,
    /// The file that it is a part of.
    within: Option<Within>,
    /// Of its blocks.
    crcs: Vec<u32>,
    /// Windows not yet checksummed.
    unsummed: usize,
    footer: Option<FileEnd>,
}

impl OpenFile {
    /// Cuts and syncs it: all its writes have completed.
    fn end(&self) -> Result<FileEnd> {
        let Some(FileEnd { length, trailer_crc, .. }) = self.footer else {
            return Err(Error::internal(format!("a footer of {}", self.file.path().display()), "none"));
        };
        self.file.set_len(length)?;
        self.file.sync()?;
        Ok(FileEnd { length, trailer_crc, within: self.within.clone() })
    }
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
struct Ready {
    content: WriteContent,
    item: u32,
    offset: u64,
    len: u64,
    memory: WriteBuffer,
}

/// Staging memory where there is some; footers may have to take their own.
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
    files: Vec<OpenFile>,
    pending: VecDeque<Ready>,
    in_flight: Vec<PendingWrite>,
    /// Written windows that are still to be checksummed.
    written: Vec<(usize, Slot<Written>)>,
    next_token: u64,
    /// Windows that have arrived.
    received: usize,
    /// True if nothing arrives any more.
    over: bool,
    /// The capture's windows, kept to be dropped here.
    done_with: Option<Box<Windows>>,
    /// Its progress: windows that have arrived, submitted writes, writes in flight.
    timer: StallTimer<(usize, u64, usize)>,
}

impl FlushWriter<'_> {
    fn run(&mut self) -> Result<()> {
        loop {
            if let Some(error) = self.parts.link.cancelled() {
                return Err(error);
            }
            self.receive()?;
            self.submit()?;
            while let Some(completion) = self.queue.complete(Duration::ZERO) {
                self.land(completion)?;
                self.submit()?;
            }
            if self.checksum_one()? || self.footer()? || self.done_with.take().is_some() {
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
    fn captured(&self) -> bool {
        self.received == self.parts.windows.len()
    }

    fn receive(&mut self) -> Result<()> {
        while !self.over {
            match self.parts.receiver.try_recv() {
                Ok(message) => self.take_in(message),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) if self.captured() => self.over = true,
                Err(TryRecvError::Disconnected) => return Err(self.capture_ended()),
            }
        }
        Ok(())
    }

    fn capture_ended(&self) -> Error {
        let ended = || Error::Cancelled("the capture has ended before it was complete".into());
        self.parts.link.cancelled().unwrap_or_else(ended)
    }

    fn take_in(&mut self, message: Message) {
        let (window, slot) = match message {
            Message::Window(window, slot) => (window, slot),
            Message::Over(windows) => {
                self.done_with = Some(windows);
                return;
            }
        };
        self.received += 1;
        if let Some(plan) = self.parts.windows.get(window) {
            self.pending.push_back(Ready {
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
            let Some(Ready { content, item, offset, len, memory }) = self.pending.pop_front() else { break };
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
        let starved = !self.captured() && self.parts.pool.is_starved();
        if !self.captured() && !starved {
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
            // Refused where it is not what was reserved: behind it is another rank's part.
            file.file.set_len(length)?;
        }
        file.footer = Some(FileEnd { length, trailer_crc: footer.trailer_crc, within: None });
        let mut offset = item.data_bytes;
        for bytes in footer.bytes.chunks(self.parts.pool.slot_bytes()) {
            let len = bytes.len() as u64;
            let memory = self.footer_memory(bytes)?;
            self.pending.push_back(Ready {
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

    /// A slot if one is free (this thread must not wait for one: it is who frees them).
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

    /// Waits for a completion or a window.
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
                Ok(message) => self.take_in(message),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) if self.captured() => self.over = true,
                Err(RecvTimeoutError::Disconnected) => return Err(self.capture_ended()),
            }
        } else {
            let interval = if self.captured() { IDLE_POLL_INTERVAL } else { CAPTURE_POLL_INTERVAL };
            if let Some(completion) = self.queue.complete(left.min(interval)) {
                self.land(completion)?;
            }
        }
        Ok(())
    }

    /// After a failure: gives back every slot as its write completes. Writes that never complete
    /// keep their memory, and the queue stays with them, on purpose: the kernel may still read it.
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
                // The first error is the one that is reported.
                let _ = self.land(completion);
                self.written.clear();
            }
        }
    }
}
