//! Protects descriptors and handles when the process forks.
//!
//! A forked child shares every open file description with its parent. A lock lives on while the
//! child keeps its copy, and a ring that the child submits to corrupts the parent's I/O. So a
//! handler of `pthread_atfork` closes, in the child, every descriptor that [`super::Descriptor`]
//! registered here, and increments the [`generation`]. A handle from an older generation returns
//! [`crate::Error::Forked`] and frees nothing when it is dropped.
//!
//! The child's handler may only make async-signal-safe calls. It uses static atomics and
//! `close(2)`. Children of `vfork`, `posix_spawn` and bare `clone` run no handler; they exec, and
//! all descriptors are close-on-exec.

use std::os::fd::RawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::{Error, Result};

/// Words of a bitmap with one bit per descriptor number. Higher numbers (more than a million open
/// files) stay open in a child.
const WORDS: usize = (1 << 20) / 64;

static OPEN: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];
/// One more than the highest word ever used: a child scans only these words.
static USED: AtomicUsize = AtomicUsize::new(0);
static GENERATION: AtomicU32 = AtomicU32::new(0);
/// Numbers of begun and of finished forks. They differ while a fork is running.
static BEGUN: AtomicU64 = AtomicU64::new(0);
static DONE: AtomicU64 = AtomicU64::new(0);

/// Returns the number of forks between the first process and this one.
pub fn generation() -> u32 {
    GENERATION.load(Ordering::Acquire)
}

/// The process that created a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Birth(u32);

impl Birth {
    /// Returns the current process.
    pub fn now() -> Self {
        install();
        Self(generation())
    }

    /// True in the process that created the handle.
    pub fn is_here(self) -> bool {
        self.0 == generation()
    }

    /// Returns [`Error::Forked`] in any other process. `what` names the handle.
    pub fn check(self, what: &'static str) -> Result<()> {
        if self.is_here() { Ok(()) } else { Err(Error::Forked(what)) }
    }
}

/// Installs the handlers, once per process tree.
fn install() {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        // SAFETY: the three handlers are `extern "C"`, never unwind, and live as long as the
        // program.
        let code = unsafe { libc::pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child)) };
        if code != 0 {
            tracing::warn!(
                errno = code,
                "fork handlers could not be installed; forked children keep open files"
            );
        }
    });
}

extern "C" fn before() {
    BEGUN.fetch_add(1, Ordering::SeqCst);
}

extern "C" fn after_in_parent() {
    DONE.fetch_add(1, Ordering::SeqCst);
}

extern "C" fn after_in_child() {
    GENERATION.fetch_add(1, Ordering::SeqCst);
    DONE.store(BEGUN.load(Ordering::SeqCst), Ordering::SeqCst);
    let used = USED.load(Ordering::SeqCst).min(WORDS);
    for (index, word) in OPEN.iter().enumerate().take(used) {
        let mut bits = word.swap(0, Ordering::SeqCst);
        while bits != 0 {
            let bit = bits.trailing_zeros() as usize;
            bits &= bits - 1;
            // SAFETY: a Descriptor of the parent owns the number. Its copy in this process never
            // closes it, since its generation is over. `close` is async-signal-safe.
            unsafe { libc::close(RawFd::try_from(index * 64 + bit).unwrap_or(-1)) };
        }
    }
}

/// Marks a descriptor as one to close in children.
pub(super) fn register(fd: RawFd) {
    let Ok(fd) = usize::try_from(fd) else { return };
    if let Some(word) = OPEN.get(fd / 64) {
        USED.fetch_max(fd / 64 + 1, Ordering::SeqCst);
        word.fetch_or(1 << (fd % 64), Ordering::SeqCst);
    }
}

/// Removes the mark. Call it before closing the descriptor, since its number may be reused at once.
pub(super) fn unregister(fd: RawFd) {
    let Ok(fd) = usize::try_from(fd) else { return };
    if let Some(word) = OPEN.get(fd / 64) {
        word.fetch_and(!(1 << (fd % 64)), Ordering::SeqCst);
    }
}

/// Opens a descriptor that no child ever has a copy of. `open` must open and register it. If the
/// process forked between the two, the child has an unregistered copy: this function opens again.
pub(super) fn unshared<T>(mut open: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        let begun = BEGUN.load(Ordering::SeqCst);
        if begun != DONE.load(Ordering::SeqCst) {
            std::thread::yield_now();
            continue;
        }
        let made = open()?;
        if BEGUN.load(Ordering::SeqCst) == begun {
            return Ok(made);
        }
    }
}
