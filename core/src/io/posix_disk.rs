//! A file system of the kernel, seen through one of the real engines.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::posix::{Settings, create_dir_all, open_dir};
use super::threaded::ThreadedQueue;
use super::uring::{self, UringQueue};
use super::{Dir, Disk, EngineChoice, Queue};
use crate::Result;
use crate::sys::{Birth, Mapping};

/// The mover of large data.
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
    /// Memory announced by [`Disk::register`]. Weak, so that only its users keep a staging pool
    /// alive.
    memory: Mutex<Vec<Weak<Mapping>>>,
    birth: Birth,
}

impl PosixDisk {
    /// A disk as the probe found it.
    pub fn new(choice: EngineChoice, settings: Arc<Settings>, mover: Mover) -> Self {
        Self { choice, settings, mover, memory: Mutex::default(), birth: Birth::now() }
    }

    /// In a forked child not even a disk is of use: its locks may be held by threads that do not
    /// exist there.
    fn check(&self) -> Result<()> {
        self.birth.check("disk")
    }

    fn queue_with(&self, depth: usize, memory: Vec<Arc<Mapping>>) -> Result<Box<dyn Queue>> {
        self.check()?;
        if self.mover == Mover::Uring {
            match UringQueue::new(depth, self.settings.alignment, memory) {
                Ok(queue) => return Ok(Box::new(queue)),
                // It worked when the disk was opened. A limit or a sandbox may refuse it by now.
                Err(error) => announce_threads(&error),
            }
        }
        Ok(Box::new(ThreadedQueue::new(depth, self.settings.alignment)?))
    }

    /// True if this is the process that made it.
    pub fn is_here(&self) -> bool {
        self.birth.is_here()
    }

    /// The registered memory that still exists.
    fn memory(&self) -> Vec<Arc<Mapping>> {
        self.memory
            .lock()
            .map_or_else(|_| Vec::new(), |memory| memory.iter().filter_map(Weak::upgrade).collect())
    }
}

/// Warns once in the life of a process: a run makes a queue for each save.
fn announce_threads(error: &crate::Error) {
    static ANNOUNCED: AtomicBool = AtomicBool::new(false);
    if ANNOUNCED.swap(true, Ordering::Relaxed) {
        tracing::debug!(%error, "no io_uring for this queue; it uses threads");
    } else {
        tracing::warn!(%error, "no io_uring to be had any more; transfers use threads");
    }
}

impl Disk for PosixDisk {
    fn choice(&self) -> &EngineChoice {
        &self.choice
    }

    fn open_dir(&self, path: &Path) -> Result<Arc<dyn Dir>> {
        self.check()?;
        Ok(Arc::new(open_dir(&self.settings, path)?))
    }

    fn create_dir_all(&self, path: &Path) -> Result<Arc<dyn Dir>> {
        self.check()?;
        Ok(Arc::new(create_dir_all(&self.settings, path)?))
    }

    fn queue(&self, depth: usize) -> Result<Box<dyn Queue>> {
        self.queue_with(depth, self.memory())
    }

    fn queue_for_reads(&self, depth: usize) -> Result<Box<dyn Queue>> {
        // The staging memory of saves is none of a reader's, and registering it again takes longer
        // than many a read.
        self.queue_with(depth, Vec::new())
    }

    fn register(&self, memory: &[Arc<Mapping>]) -> Result<()> {
        self.check()?;
        if !self.choice.registered {
            return Ok(());
        }
        let mut all = self.memory();
        let known = all.len();
        for mapping in memory {
            if !all.iter().any(|other| Arc::ptr_eq(other, mapping)) {
                all.push(Arc::clone(mapping));
            }
        }
        if all.len() == known {
            // As at every save but the first: a trial of a GiB takes milliseconds.
            return Ok(());
        }
        let weak = all.iter().map(Arc::downgrade).collect();
        uring::try_register(all)?;
        if let Ok(mut memory) = self.memory.lock() {
            *memory = weak;
        }
        Ok(())
    }
}
