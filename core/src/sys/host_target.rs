//! Host memory that a restore writes into: a numpy array, a torch tensor on the CPU, a `Vec<u8>`.
//!
//! A [`HostTarget`] says where the memory is and for how long it may be written. Only
//! [`super::Scatter`] writes through it, and never after the restore that was given it has
//! returned.

use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::{Error, Result};

/// A destination in host memory, borrowed for `'a`.
#[derive(Clone, Copy, Debug)]
pub struct HostTarget<'a> {
    address: NonNull<u8>,
    len: usize,
    borrowed: PhantomData<&'a mut [u8]>,
}

// SAFETY: it is an exclusive borrow of plain bytes (see `new`), which may be written from any
// thread.
unsafe impl Send for HostTarget<'_> {}
// SAFETY: `&HostTarget` gives no access to the bytes; writes go through `Scatter`, which sees to it
// that they do not race.
unsafe impl Sync for HostTarget<'_> {}

impl HostTarget<'_> {
    /// Memory that is known by its address only. Several targets may share memory.
    ///
    /// # Safety
    /// For all of `'a`, `len` bytes from `address` on are valid for writes, from any thread, and
    /// nobody reads or writes them while a restore into this target runs (one that uses the same
    /// memory in another target included). Any bytes are valid values there.
    pub unsafe fn new(address: *mut u8, len: usize) -> Result<Self> {
        let address = match NonNull::new(address) {
            Some(address) => address,
            // An empty array may have no memory.
            None if len == 0 => NonNull::dangling(),
            None => return Err(Error::Misuse(format!("a target of {len} bytes has no address"))),
        };
        if isize::try_from(len).is_err() || (address.as_ptr() as usize).checked_add(len).is_none() {
            return Err(Error::Misuse(format!("a target of {len} bytes does not fit the address space")));
        }
        Ok(Self { address, len, borrowed: PhantomData })
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if it holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn address(&self) -> NonNull<u8> {
        self.address
    }
}

impl<'a> From<&'a mut [u8]> for HostTarget<'a> {
    fn from(bytes: &'a mut [u8]) -> Self {
        Self { len: bytes.len(), address: NonNull::from(bytes).cast(), borrowed: PhantomData }
    }
}
