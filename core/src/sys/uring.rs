//! An io_uring that owns the buffers and files of its transfers.
//!
//! A [`Flight`] is moved into the ring and returned with the kernel's result. Until then its memory
//! cannot be accessed, freed or unmapped, nor its file closed. Dropping a ring waits for its
//! flights. If the kernel does not complete them in time, the ring and its flights are leaked on
//! purpose.
//!
//! The ring does not use SQPOLL (it burns a core) or IOPOLL (virtio never completes it). It does
//! not use SINGLE_ISSUER and DEFER_TASKRUN either: with them only the submitting thread can reap.
//! If another thread dropped the ring, for example after a panic, it could never learn when the
//! memory is free.

use std::collections::VecDeque;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};

use super::fork::{self, Birth};
use super::{Buffer, Descriptor, Mapping};
use crate::deadline::StallTimer;

/// The kernel refuses to register more in one buffer.
const MAX_REGISTERED_BYTES: usize = 1 << 30;
/// The kernel refuses to register more buffers with one ring.
const MAX_REGISTERED_BUFFERS: usize = 1 << 14;

/// A transfer: its memory, its file and the caller's note.
#[derive(Debug)]
pub struct Flight<T> {
    /// The memory.
    pub buffer: Buffer,
    /// The file.
    pub descriptor: Arc<Descriptor>,
    /// The caller's note.
    pub note: T,
}

/// An io_uring with the flights that it owns.
pub struct Ring<T> {
    kernel: ManuallyDrop<IoUring>,
    fd: RawFd,
    birth: Birth,
    /// Indexed by the entry's user data. As many places as the ring has entries.
    flights: Vec<Option<Flight<T>>>,
    free: VecDeque<usize>,
    /// Windows of pinned memory, sorted by address. The index is the kernel's number of the window.
    registered: Vec<(usize, usize)>,
    /// Keeps the pinned memory mapped while it is registered.
    memory: Vec<Arc<Mapping>>,
    drop_timeout: Duration,
}

impl<T> Ring<T> {
    /// Creates a ring for `depth` flights.
    pub fn new(depth: usize, drop_timeout: Duration) -> io::Result<Self> {
        let depth = depth.clamp(1, 4096);
        let birth = Birth::now();
        let ring = build(depth as u32)?;
        if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS)); // before Linux 5.11: no timeouts, lost completions
        }
        let fd = ring.as_raw_fd();
        fork::register(fd);
        Ok(Self {
            kernel: ManuallyDrop::new(ring),
            fd,
            birth,
            flights: (0..depth).map(|_| None).collect(),
            free: (0..depth).collect(),
            registered: Vec::new(),
            memory: Vec::new(),
            drop_timeout,
        })
    }

    /// Pins memory once per ring, before the first flight. Transfers of its buffers then skip the
    /// pinning.
    pub fn register(&mut self, memory: Vec<Arc<Mapping>>) -> io::Result<()> {
        if !self.birth.is_here() || !self.memory.is_empty() || memory.is_empty() {
            return Ok(());
        }
        let mut windows: Vec<(usize, usize)> = memory.iter().flat_map(|mapping| windows(mapping)).collect();
        windows.sort_unstable();
        windows.dedup();
        windows.truncate(MAX_REGISTERED_BUFFERS);
        let vectors: Vec<libc::iovec> = windows
            .iter()
            .map(|&(start, len)| libc::iovec { iov_base: start as *mut libc::c_void, iov_len: len })
            .collect();
        // SAFETY: every window is in one of the mappings. They stay mapped while `self.memory`
        // holds them, until they are unregistered.
        unsafe { self.kernel.submitter().register_buffers(&vectors) }?;
        self.registered = windows;
        self.memory = memory;
        Ok(())
    }

    /// True in the process that created the ring.
    pub fn is_here(&self) -> bool {
        self.birth.is_here()
    }

    /// Returns the number of flights that have not completed.
    pub fn in_flight(&self) -> usize {
        self.flights.len() - self.free.len()
    }

    /// Queues a flight that moves `range` of its buffer to (`write`) or from its file at `offset`.
    /// It starts with the next [`Ring::enter`]. Returns it with an error if the ring is full or the
    /// range is outside the buffer.
    pub fn push(
        &mut self,
        write: bool,
        offset: u64,
        range: Range<usize>,
        flight: Flight<T>,
    ) -> Result<(), (Flight<T>, io::Error)> {
        let refuse = |flight, errno| Err((flight, io::Error::from_raw_os_error(errno)));
        let Ok(file) = flight.descriptor.get().map(|fd| types::Fd(fd.as_raw_fd())) else {
            return refuse(flight, libc::EBADF);
        };
        if !self.birth.is_here() {
            return refuse(flight, libc::EBADF);
        }
        if range.start > range.end || range.end > flight.buffer.len() {
            return refuse(flight, libc::EFAULT);
        }
        let Ok(len) = u32::try_from(range.len()) else { return refuse(flight, libc::EINVAL) };
        let Some(slot) = self.free.pop_front() else { return refuse(flight, libc::EBUSY) };
        let address = flight.buffer.as_ptr().wrapping_add(range.start);
        let entry = match (write, self.registration(address as usize, range.len())) {
            (true, Some(index)) => opcode::WriteFixed::new(file, address, len, index).offset(offset).build(),
            (true, None) => opcode::Write::new(file, address, len).offset(offset).build(),
            (false, Some(index)) => opcode::ReadFixed::new(file, address, len, index).offset(offset).build(),
            (false, None) => opcode::Read::new(file, address, len).offset(offset).build(),
        }
        .user_data(slot as u64);
        // SAFETY: the entry names bytes of the flight's buffer (`range` was checked) and its
        // descriptor. `self.flights` takes the flight below, before anything submits the entry, and
        // keeps it until it has completed. A ring that is dropped earlier leaks it.
        if let Err(full) = unsafe { self.push_entry(&entry) } {
            self.free.push_front(slot);
            return Err((flight, full));
        }
        if let Some(place) = self.flights.get_mut(slot) {
            *place = Some(flight);
        }
        Ok(())
    }

    /// Queues an entry for the next [`Ring::enter`].
    ///
    /// # Safety
    /// The memory and the descriptor of the entry stay valid, and nobody else uses that memory,
    /// until its completion was seen. If it is never seen, they stay so permanently.
    unsafe fn push_entry(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        // SAFETY: as promised by the caller.
        unsafe { self.kernel.submission().push(entry) }.map_err(|_| io::Error::from_raw_os_error(libc::EBUSY))
    }

    /// Returns the kernel's number of the registered window that contains these bytes.
    fn registration(&self, address: usize, len: usize) -> Option<u16> {
        let after = self.registered.partition_point(|&(start, _)| start <= address);
        let index = after.checked_sub(1)?;
        let &(start, window) = self.registered.get(index)?;
        (address + len <= start + window).then_some(u16::try_from(index).ok()?)
    }

    /// Submits the queued entries. With `wait`, returns after a completion or after that time.
    /// Entries that the kernel cannot take now stay queued. An error is permanent.
    pub fn enter(&mut self, wait: Option<Duration>) -> io::Result<()> {
        if !self.birth.is_here() {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        let answer = match wait {
            None => self.kernel.submit(),
            Some(timeout) => {
                let time =
                    types::Timespec::new().sec(timeout.as_secs().min(3600)).nsec(timeout.subsec_nanos());
                let args = types::SubmitArgs::new().timespec(&time);
                self.kernel.submitter().submit_with_args(1, &args)
            }
        };
        match answer {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                Some(libc::ETIME | libc::EINTR) => Ok(()),
                Some(libc::EAGAIN | libc::EBUSY) => {
                    // The kernel lacks memory for requests, or completions must be reaped first:
                    // wait for some.
                    if self.kernel.completion().is_empty() && wait.is_some_and(|wait| !wait.is_zero()) {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    Ok(())
                }
                _ => Err(error),
            },
        }
    }

    /// Returns a completed flight with the kernel's result: bytes, or a negative errno.
    pub fn take_finished(&mut self) -> Option<(Flight<T>, i32)> {
        if !self.birth.is_here() {
            return None;
        }
        loop {
            let entry = self.kernel.completion().next()?;
            let slot = usize::try_from(entry.user_data()).ok()?;
            if let Some(flight) = self.flights.get_mut(slot).and_then(Option::take) {
                self.free.push_back(slot);
                return Some((flight, entry.result()));
            }
        }
    }

    /// Waits for all flights, as long as one completes every `drop_timeout`. True if all
    /// completed.
    fn drain(&mut self) -> bool {
        let mut timer = StallTimer::new(self.drop_timeout);
        while self.in_flight() > 0 {
            if self.take_finished().is_some() {
                continue;
            }
            let left = timer.left(self.in_flight());
            if left.is_zero() || self.enter(Some(left)).is_err() {
                // Completed flights are not leaked.
                while self.take_finished().is_some() {}
                return self.in_flight() == 0;
            }
        }
        true
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        if !self.birth.is_here() {
            // In a forked child: the ring belongs to the parent, its memory is not mapped here, and
            // its descriptor has been closed.
            std::mem::forget(std::mem::take(&mut self.flights));
            std::mem::forget(std::mem::take(&mut self.memory));
            return;
        }
        if !self.drain() {
            let bytes: u64 = self.flights.iter().flatten().map(|flight| flight.buffer.len() as u64).sum();
            tracing::error!(
                transfers = self.in_flight(),
                bytes,
                seconds = self.drop_timeout.as_secs_f64(),
                "the kernel does not return; this ring and its memory are left to it"
            );
            std::mem::forget(std::mem::take(&mut self.flights));
            std::mem::forget(std::mem::take(&mut self.memory));
            return;
        }
        if !self.registered.is_empty() {
            // Closing unregisters too, but later, and locked memory counts against a limit until
            // then.
            let _ = self.kernel.submitter().unregister_buffers();
        }
        fork::unregister(self.fd);
        // SAFETY: dropped once, here, and not used again.
        unsafe { ManuallyDrop::drop(&mut self.kernel) };
    }
}

/// Creates a ring, without the flags that an older kernel does not know.
fn build(entries: u32) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.dontfork().setup_clamp();
    let plain = builder.clone();
    // Completions need not interrupt a running thread: it polls for them. (Linux 5.19)
    builder.setup_coop_taskrun();
    match builder.build(entries) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => plain.build(entries),
        answer => answer,
    }
}

fn windows(mapping: &Mapping) -> impl Iterator<Item = (usize, usize)> {
    let (start, len) = (mapping.address().as_ptr() as usize, mapping.len());
    (0..len).step_by(MAX_REGISTERED_BYTES).map(move |at| (start + at, MAX_REGISTERED_BYTES.min(len - at)))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::Instant;

    use super::super::testing::absent;
    use super::*;

    fn ring(timeout: Duration) -> Option<Ring<u32>> {
        Ring::new(2, timeout).map_err(|error| absent("uring", &error)).ok()
    }

    /// Returns a read of a pipe, which lasts until something is written to it.
    fn flight(from: io::PipeReader) -> Flight<u32> {
        let descriptor = Arc::new(Descriptor::new(from.into(), "pipe"));
        Flight { buffer: Buffer::alone(4096).unwrap(), descriptor, note: 5 }
    }

    #[test]
    fn a_flight_comes_back_with_its_bytes_and_its_note() {
        let Some(mut ring) = ring(Duration::from_secs(10)) else { return };
        let (from, mut to) = io::pipe().unwrap();
        ring.push(false, u64::MAX, 0..16, flight(from)).unwrap();
        let begun = Instant::now();
        ring.enter(Some(Duration::from_millis(50))).unwrap();
        assert!(ring.take_finished().is_none() && begun.elapsed() >= Duration::from_millis(40));
        to.write_all(b"hello").unwrap();
        ring.enter(Some(Duration::from_secs(10))).unwrap();
        let (flight, answer) = ring.take_finished().unwrap();
        assert_eq!((answer, flight.note, &flight.buffer[..6]), (5, 5, &b"hello\0"[..]));
        assert_eq!(ring.in_flight(), 0);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_flight() {
        let Some(mut ring) = ring(Duration::from_millis(50)) else { return };
        let pipes: Vec<_> = (0..3).map(|_| io::pipe().unwrap()).collect();
        let (mut from, to): (Vec<_>, Vec<_>) = pipes.into_iter().unzip();
        let (flight, error) = ring.push(false, 0, 4000..4097, flight(from.pop().unwrap())).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
        for from in from {
            ring.push(false, u64::MAX, 0..1, self::flight(from)).unwrap();
        }
        let (_, error) = ring.push(false, u64::MAX, 0..1, flight).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBUSY));
        for mut to in to {
            let _ = to.write_all(b"x");
        }
    }

    #[test]
    fn a_dropped_ring_waits_for_its_flights() {
        let Some(mut ring) = ring(Duration::from_secs(30)) else { return };
        let (from, mut to) = io::pipe().unwrap();
        let flight = flight(from);
        let memory = Arc::downgrade(flight.buffer.mapping());
        ring.push(false, u64::MAX, 0..16, flight).unwrap();
        ring.enter(None).unwrap();
        let writer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            to.write_all(b"hello").unwrap();
        });
        let begun = Instant::now();
        drop(ring);
        assert!(begun.elapsed() >= Duration::from_millis(90) && begun.elapsed() < Duration::from_secs(20));
        assert!(memory.upgrade().is_none());
        writer.join().unwrap();
    }

    #[test]
    fn a_ring_whose_flight_never_ends_is_left_with_its_memory() {
        let Some(mut ring) = ring(Duration::from_millis(100)) else { return };
        let (from, to) = io::pipe().unwrap();
        let flight = flight(from);
        let memory = Arc::downgrade(flight.buffer.mapping());
        ring.push(false, u64::MAX, 0..16, flight).unwrap();
        drop(ring);
        assert!(memory.upgrade().is_some(), "memory that the kernel may still write to was freed");
        drop(to);
    }
}
