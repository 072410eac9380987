//! Mapped memory: page-aligned, in huge pages where possible, excluded from forked children.
//!
//! A [`Mapping`] is cut into [`Buffer`]s. Each is the only access to its window and keeps the
//! mapping alive. So memory is never unmapped while a transfer or a registration uses it. A buffer
//! that a device copies into hides its bytes until the copies have ended.

use std::collections::TryReserveError;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::cuda::arriving::Arriving;
use super::cuda::registered::Registered;
use super::{Birth, Device};
use crate::{Error, Result};

/// Anonymous memory, zeroed, aligned to 2 MiB, `MADV_HUGEPAGE` and `MADV_DONTFORK`.
#[derive(Debug)]
pub struct Mapping {
    address: NonNull<u8>,
    len: usize,
    mapped: (NonNull<u8>, usize),
    birth: Birth,
    registration: Mutex<Registration>,
}

/// The state of a mapping's registration with a driver.
#[derive(Debug, Default)]
enum Registration {
    #[default]
    None,
    /// The driver refused at this time.
    Refused(Instant),
    /// The registration. Dropping the mapping ends it; dropping this alone leaves it in force.
    Done(Registered),
}

/// Time until a refused registration is tried again.
const REFUSED_FOR: Duration = Duration::from_secs(10);

/// Minimum bytes of a mapping to touch its pages from several threads.
const TOUCH_TOGETHER: usize = 64 << 20;

/// Size and alignment of a huge page, in bytes.
pub const HUGE_PAGE: usize = 2 << 20;

// SAFETY: a Mapping is plain memory that any thread may use. Its bytes are only accessed through
// Buffers, which are disjoint windows.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives no access to the bytes.
unsafe impl Sync for Mapping {}

/// Allocate pages on first touch. (Miri, which runs the tests of this memory, supports neither this
/// flag nor advice.)
const LAZILY: libc::c_int = if cfg!(miri) { 0 } else { libc::MAP_NORESERVE };

/// Maps anonymous memory without allocating pages.
fn map(len: usize) -> Result<NonNull<u8>> {
    // SAFETY: an anonymous private mapping at an address of the kernel's choice touches no existing
    // memory.
    let raw = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | LAZILY,
            -1,
            0,
        )
    };
    if raw == libc::MAP_FAILED {
        return Err(Error::io("mmap", format!("<{len} bytes of memory>"), io::Error::last_os_error()));
    }
    NonNull::new(raw.cast::<u8>()).ok_or_else(|| Error::internal("an address from mmap", "the null page"))
}

/// Checks that the system can map this much address space now: maps it and unmaps it. A process
/// limit or disabled overcommit can prevent it.
pub fn can_map(len: usize) -> Result<()> {
    let len = len.max(1);
    let base = map(len)?;
    // SAFETY: the range was just mapped, and nothing refers to it.
    let _ = unsafe { libc::munmap(base.as_ptr().cast(), len) };
    Ok(())
}

/// Reserves capacity for `count` more values, in huge pages as far as whole ones fit. For memory
/// that is filled soon, allocating page by page takes the kernel longer than the writes take.
pub fn try_reserve_huge<T>(values: &mut Vec<T>, count: usize) -> std::result::Result<(), TryReserveError> {
    values.try_reserve_exact(count)?;
    let room = values.spare_capacity_mut();
    let first = room.as_mut_ptr().cast::<u8>();
    let skip = first.align_offset(HUGE_PAGE);
    let len = size_of_val(room).saturating_sub(skip) / HUGE_PAGE * HUGE_PAGE;
    if len > 0 && !cfg!(miri) {
        // SAFETY: whole pages in the spare capacity of this vector, which nobody else uses. Advice
        // changes only where they are kept, never their content. Refused advice costs only speed.
        let _ = unsafe { libc::madvise(first.wrapping_add(skip).cast(), len, libc::MADV_HUGEPAGE) };
    }
    Ok(())
}

impl Mapping {
    /// Maps at least `len` bytes (rounded up to whole huge pages) and touches every page, so that
    /// later use never faults.
    pub fn new(len: usize) -> Result<Arc<Self>> {
        let len = len.max(1).next_multiple_of(HUGE_PAGE);
        let mapped_len = len + HUGE_PAGE;
        let base = map(mapped_len)?;
        let skip = base.as_ptr().align_offset(HUGE_PAGE);
        // SAFETY: the mapping is longer than `len` by HUGE_PAGE, and `skip` is less than that.
        let address = unsafe { base.add(skip) };
        let advice = [libc::MADV_HUGEPAGE, libc::MADV_DONTFORK];
        for advice in advice.into_iter().filter(|_| !cfg!(miri)) {
            // SAFETY: the range is in the mapping just made. Refused advice costs only speed.
            let _ = unsafe { libc::madvise(address.as_ptr().cast(), len, advice) };
        }
        let mapping = Self {
            address,
            len,
            mapped: (base, mapped_len),
            birth: Birth::now(),
            registration: Mutex::default(),
        };
        mapping.touch();
        Ok(Arc::new(mapping))
    }

    /// Touches every page. Several threads do it, because one cannot saturate the memory bus with
    /// zeroing.
    fn touch(&self) {
        let shares = if self.len < TOUCH_TOGETHER { 1 } else { super::cores().min(8) };
        let share = self.len.div_ceil(shares).next_multiple_of(HUGE_PAGE);
        let starts: Vec<usize> = (0..self.len).step_by(share).collect();
        super::each("stepwell-touch", shares, &starts, |&start| {
            self.touch_range(start, (start + share).min(self.len));
        });
    }

    fn touch_range(&self, start: usize, end: usize) {
        for page in (start..end).step_by(4096) {
            // SAFETY: `page < len`, inside the mapping, which only `new` has access to. The
            // threads' parts are disjoint.
            unsafe { self.address.add(page).write_volatile(0) };
        }
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false; it exists because `len` does.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Cuts the mapping into buffers of `size` bytes (a multiple of 4096). A remainder stays
    /// unused. Takes the only handle, so that no window is issued twice.
    pub fn into_buffers(self: Arc<Self>, size: usize) -> Result<Vec<Buffer>> {
        if size == 0 || !size.is_multiple_of(4096) {
            return Err(Error::internal("buffers of whole pages", format!("buffers of {size} bytes")));
        }
        if Arc::strong_count(&self) != 1 {
            return Err(Error::internal("the only handle of a mapping", "one of several"));
        }
        let windows = self.len / size;
        let window = |i| Buffer { mapping: Arc::clone(&self), offset: i * size, len: size, arriving: None };
        Ok((0..windows).map(window).collect())
    }

    /// Registers the mapping with a device's driver, once for all devices, so that copies are
    /// asynchronous. A refusal is logged and makes copies slower. It is retried only after a while,
    /// because a refused attempt is as slow as a successful one.
    pub fn register_with(&self, device: &Arc<Device>) {
        let mut registration = self.registration.lock().unwrap_or_else(PoisonError::into_inner);
        match *registration {
            Registration::Done(_) => return,
            Registration::Refused(when) if when.elapsed() < REFUSED_FOR => return,
            Registration::None | Registration::Refused(_) => {}
        }
        // SAFETY: the memory stays mapped while this value lives, and the value ends the
        // registration before it unmaps.
        *registration = match unsafe { Registered::new(device, self.address, self.len) } {
            Ok(registered) => Registration::Done(registered),
            Err(error) => {
                tracing::warn!(bytes = self.len, %error, "memory is not registered with the device; copies take longer");
                Registration::Refused(Instant::now())
            }
        };
    }

    /// True if the mapping is registered with a driver.
    fn is_registered(&self) -> bool {
        let registration = self.registration.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(*registration, Registration::Done(_))
    }

    /// Returns the address of the first byte, for registration with the kernel.
    pub fn address(&self) -> NonNull<u8> {
        self.address
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if !self.birth.is_here() {
            return; // MADV_DONTFORK: in a forked child these addresses were never mapped, and may be someone else's by now
        }
        let registration = self.registration.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Registration::Done(registered) = std::mem::take(registration)
            && let Err(error) = registered.end()
        {
            tracing::warn!(bytes = self.len, %error, "memory stays mapped: it is still registered with a device");
            return;
        }
        // SAFETY: exactly the mapped range. No Buffer is left, since each holds an Arc of this
        // value.
        let _ = unsafe { libc::munmap(self.mapped.0.as_ptr().cast(), self.mapped.1) };
    }
}

/// An exclusively owned, page-aligned window of a [`Mapping`].
#[derive(Debug)]
pub struct Buffer {
    mapping: Arc<Mapping>,
    offset: usize,
    len: usize,
    /// The copies to this buffer that may still be under way.
    arriving: Option<Box<Arriving>>,
}

impl Buffer {
    /// Creates a buffer with its own mapping; `len` is rounded up to a multiple of 4096.
    pub fn alone(len: usize) -> Result<Self> {
        let len = len.max(1).next_multiple_of(4096);
        let mapping = Mapping::new(len)?;
        Ok(Self { mapping, offset: 0, len, arriving: None })
    }

    /// Returns the mapping.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Returns the offset in the mapping, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Returns the length in bytes, also while the bytes are hidden.
    pub fn size(&self) -> usize {
        self.len
    }

    /// Returns the address of the first byte, for the I/O engines.
    pub fn as_ptr(&self) -> *mut u8 {
        // SAFETY: the offset is inside the mapping by construction.
        unsafe { self.mapping.address.as_ptr().add(self.offset) }
    }

    /// Returns the copies from devices to this buffer.
    pub(in crate::sys) fn arriving(&mut self) -> &mut Arriving {
        self.arriving.get_or_insert_default()
    }

    /// True while devices may copy into the buffer. Its bytes are hidden then.
    pub fn is_arriving(&self) -> bool {
        self.arriving.is_some()
    }

    /// Returns the bytes `at .. at + len`, which must be after all bytes requested from devices.
    pub fn part_mut(&mut self, at: usize, len: usize) -> Option<&mut [u8]> {
        let end = at.checked_add(len).filter(|&end| end <= self.len)?;
        if self.arriving.as_ref().is_some_and(|arriving| at < arriving.end) {
            return None;
        }
        // SAFETY: as in `deref_mut`; devices write only to bytes before `at`.
        Some(unsafe { std::slice::from_raw_parts_mut(self.as_ptr().add(at), end - at) })
    }

    /// Starts all requested copies. The buffer accepts no further requests.
    pub fn close(&mut self) {
        let base = self.as_ptr();
        if let Some(arriving) = &mut self.arriving {
            // SAFETY: `DeviceSource::start` has checked the copies against this buffer's length.
            // The source's creator has promised the rest.
            unsafe { arriving.close(base, self.mapping.is_registered()) };
        }
    }

    /// Waits until all requested copies have ended. [`Error::Timeout`] at the deadline; the call
    /// may be repeated. Any other error means that copies failed and none is running.
    pub fn wait_arrived(&mut self, deadline: Instant) -> Result<()> {
        self.close();
        let Some(arriving) = &mut self.arriving else { return Ok(()) };
        let arrived = arriving.wait_arrived(deadline);
        if !matches!(arrived, Err(Error::Timeout { .. })) {
            self.arriving = None;
        }
        arrived
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(mut arriving) = self.arriving.take()
            && matches!(arriving.wait_arrived(Instant::now()), Err(Error::Timeout { .. }))
        {
            // A device may still write to it: leak the buffer and the source of the copies.
            arriving.forget();
            std::mem::forget(Arc::clone(&self.mapping));
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        if self.arriving.is_some() {
            return &[];
        }
        // SAFETY: the window is mapped, initialised (zeroed by the kernel) and reachable through
        // this value only.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        if self.arriving.is_some() {
            return &mut [];
        }
        // SAFETY: as in `deref`, and `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_cannot_be_had_is_refused_with_its_size() {
        can_map(1 << 20).unwrap();
        let error = can_map(1 << 55).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOMEM));
        assert!(error.to_string().contains("36028797018963968 bytes"), "{error}");
    }

    #[test]
    fn huge_pages_keep_contents_or_are_refused() {
        let before = HUGE_PAGE + 12_345;
        for bytes in [0, 1, HUGE_PAGE - 1, 5 * HUGE_PAGE + 3] {
            let mut values = vec![7_u8; before];
            try_reserve_huge(&mut values, bytes).unwrap();
            assert!(values.capacity() >= before + bytes);
            values.resize(before + bytes, 9);
            let (old, new) = values.split_at(before);
            assert!(old.iter().all(|&value| value == 7) && new.iter().all(|&value| value == 9));
        }
        try_reserve_huge(&mut Vec::<u64>::new(), usize::MAX / 8).unwrap_err();
        try_reserve_huge(&mut Vec::<()>::new(), 1 << 40).unwrap();
    }

    #[test]
    fn buffers_are_page_aligned_disjoint_and_zeroed() {
        let mut buffers = Mapping::new(1 << 20).unwrap().into_buffers(64 << 10).unwrap();
        assert_eq!(buffers.len(), HUGE_PAGE / (64 << 10));
        for (i, buffer) in buffers.iter_mut().enumerate() {
            assert_eq!(buffer.as_ptr().align_offset(4096), 0);
            assert!(buffer.iter().all(|&b| b == 0));
            buffer.fill(i as u8);
        }
        for (i, buffer) in buffers.iter().enumerate() {
            assert!(buffer.iter().all(|&b| b == i as u8));
        }
    }
}
