//! Host memory that a restore writes into: a numpy array, a torch tensor on the CPU, a `Vec<u8>`.
//!
//! A [`HostTarget`] is an exclusive borrow of that memory. Only [`super::Scatter`] writes through
//! it, and never after the restore that took it has returned.
//!
//! A target is neither `Copy` nor `Clone`, and a restore takes its targets. So safe code cannot
//! give the same memory to two restores. This compiles:
//!
//! ```
//! use stepwell_core::{load::Destination, sys::HostTarget};
//! let mut bytes = vec![0_u8; 8];
//! let target = HostTarget::from(bytes.as_mut_slice());
//! let first = Destination::from(target);
//! ```
//!
//! One more use of the target does not:
//!
//! ```compile_fail,E0382
//! use stepwell_core::{load::Destination, sys::HostTarget};
//! let mut bytes = vec![0_u8; 8];
//! let target = HostTarget::from(bytes.as_mut_slice());
//! let first = Destination::from(target);
//! let second = Destination::from(target); // it was moved
//! ```
//!
//! nor does a copy of the destination:
//!
//! ```compile_fail,E0599
//! use stepwell_core::{load::Destination, sys::HostTarget};
//! let mut bytes = vec![0_u8; 8];
//! let target = HostTarget::from(bytes.as_mut_slice());
//! let first = Destination::from(target);
//! let second = first.clone(); // there is no such method
//! ```
//!
//! nor do two threads that fill one target:
//!
//! ```compile_fail,E0382
//! use stepwell_core::{load::Destination, sys::HostTarget};
//! let mut bytes = vec![0_u8; 8];
//! let target = HostTarget::from(bytes.as_mut_slice());
//! std::thread::scope(|scope| {
//!     scope.spawn(move || drop(Destination::from(target)));
//!     scope.spawn(move || drop(Destination::from(target))); // it was moved
//! });
//! ```
//!
//! nor two threads with a target each of the same memory:
//!
//! ```compile_fail,E0499
//! use stepwell_core::{load::Destination, sys::HostTarget};
//! let mut bytes = vec![0_u8; 8];
//! let first = HostTarget::from(bytes.as_mut_slice());
//! let second = HostTarget::from(bytes.as_mut_slice()); // it is borrowed
//! std::thread::scope(|scope| {
//!     scope.spawn(move || drop(Destination::from(first)));
//!     scope.spawn(move || drop(Destination::from(second)));
//! });
//! ```

use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::{Error, Result};

/// A destination in host memory, borrowed exclusively for `'a`.
#[derive(Debug)]
pub struct HostTarget<'a> {
    address: NonNull<u8>,
    len: usize,
    borrowed: PhantomData<&'a mut [u8]>,
}

// SAFETY: an exclusive borrow of plain bytes (see `new`), which any thread may write.
unsafe impl Send for HostTarget<'_> {}
// SAFETY: `&HostTarget` gives no access to the bytes. Only `Scatter` writes, and it takes the
// target.
unsafe impl Sync for HostTarget<'_> {}

impl HostTarget<'_> {
    /// Wraps memory by its address. Several targets of one restore may share memory.
    ///
    /// # Safety
    /// For all of `'a`, `len` bytes from `address` are valid for writes from any thread, and any
    /// bytes are valid values there. While a restore into this target runs, nobody else reads or
    /// writes them. That includes another restore whose targets share the memory.
    pub unsafe fn new(address: *mut u8, len: usize) -> Result<Self> {
        let address = match NonNull::new(address) {
            Some(address) => address,
            // An empty array may have no memory.
            None if len == 0 => NonNull::dangling(),
            None => {
                return Err(Error::internal(format!("an address of a target of {len} bytes"), "none"));
            }
        };
        if isize::try_from(len).is_err() || (address.as_ptr() as usize).checked_add(len).is_none() {
            return Err(Error::internal(
                "a target in the address space",
                format!("one of {len} bytes at {address:p}"),
            ));
        }
        Ok(Self { address, len, borrowed: PhantomData })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if it is empty.
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
