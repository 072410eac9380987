//! A file system of the kernel, seen through one of the real engines.

use std::path::Path;
use std::sync::{Arc, Mutex, Weak};

use super::{Settings, create_dir_all, open_dir};
use crate::Result;
use crate::io::threaded::ThreadedQueue;
use crate::io::{Dir, Disk, EngineChoice, Queue};
use crate::sys::Mapping;

/// Who moves large data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mover {
    /// The kernel's ring.
    Uring,
    /// Threads of ours.
    Threads,
}

/// See the module documentation.
#[derive(Debug)]
pub struct PosixDisk {
    choice: EngineChoice,
    settings: Arc<Settings>,
    mover: Mover,
    /// What [`Disk::register`] was told of. Weak, so that a staging pool is freed by its users alone.
    memory: Mutex<Vec<Weak<Mapping>>>,
}

impl PosixDisk {
    /// A disk as the probe found it.
    pub fn new(choice: EngineChoice, settings: Arc<Settings>, mover: Mover) -> Self {
        Self { choice, settings, mover, memory: Mutex::default() }
    }
}

impl Disk for PosixDisk {
    fn choice(&self) -> &EngineChoice {
        &self.choice
    }

    fn open_dir(&self, path: &Path) -> Result<Arc<dyn Dir>> {
        Ok(Arc::new(open_dir(&self.settings, path)?))
    }

    fn create_dir_all(&self, path: &Path) -> Result<Arc<dyn Dir>> {
        Ok(Arc::new(create_dir_all(&self.settings, path)?))
    }

    fn queue(&self, depth: usize) -> Result<Box<dyn Queue>> {
        Ok(Box::new(ThreadedQueue::new(depth, self.settings.alignment)?))
    }
}
