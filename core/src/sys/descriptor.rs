//! An owned file descriptor that is closed, and unusable, in a forked child.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use super::fork::{self, Birth};
use crate::Result;

/// A file descriptor. Every descriptor of this crate that outlives a call is a `Descriptor`.
#[derive(Debug)]
pub struct Descriptor {
    fd: ManuallyDrop<OwnedFd>,
    birth: Birth,
    what: &'static str,
}

impl Descriptor {
    /// Takes over `fd`; `what` names the handle in [`crate::Error::Forked`].
    pub fn new(fd: OwnedFd, what: &'static str) -> Self {
        let birth = Birth::now();
        fork::register(fd.as_raw_fd());
        Self { fd: ManuallyDrop::new(fd), birth, what }
    }

    /// Like [`Descriptor::new`] for the result of `open`, and guarantees that no forked child has a
    /// copy.
    pub fn unshared(what: &'static str, mut open: impl FnMut() -> Result<OwnedFd>) -> Result<Self> {
        fork::unshared(|| Ok(Self::new(open()?, what)))
    }

    /// Returns the descriptor, in the process that owns it.
    pub fn get(&self) -> Result<BorrowedFd<'_>> {
        self.birth.check(self.what)?;
        Ok(self.fd.as_fd())
    }

    /// True if this process owns the descriptor.
    pub fn is_here(&self) -> bool {
        self.birth.is_here()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        if self.birth.is_here() {
            fork::unregister(self.fd.as_raw_fd());
            // SAFETY: dropped once, here, and not used again.
            unsafe { ManuallyDrop::drop(&mut self.fd) };
        }
        // In a forked child the handler has already closed it, and its number may have been reused.
    }
}
