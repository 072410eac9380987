//! An owned file descriptor that a forked child closes, and that is dead there.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use super::fork::{self, Birth};
use crate::Result;

/// Every descriptor of this crate that outlives a call is one of these.
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

    /// As [`Descriptor::new`] of what `open` returns, with the promise that no forked child has a
    /// copy of it.
    pub fn unshared(what: &'static str, mut open: impl FnMut() -> Result<OwnedFd>) -> Result<Self> {
        fork::unshared(|| Ok(Self::new(open()?, what)))
    }

    /// The descriptor, in the process that it belongs to.
    pub fn get(&self) -> Result<BorrowedFd<'_>> {
        self.birth.check(self.what)?;
        Ok(self.fd.as_fd())
    }

    /// True if this process is the one that it belongs to.
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
        // In a forked child the handler has closed it already, and its number may be someone
        // else's.
    }
}
