//! A disk whose queues also read files of other machines.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::dir::ServedFile;
use crate::io::workers::{Job, TransferWorkers};
use crate::io::{Completion, Dir, Disk, EngineChoice, File, Queue, Transfer};
use crate::sys::{Buffer, Mapping};
use crate::{Error, Result};

/// The most requests of one queue to other machines that wait for an answer.
const CONNECTIONS: usize = 8;
/// A queue with transfers of both kinds looks at each of them at this interval.
const TURN: Duration = Duration::from_millis(1);

/// See the module documentation.
pub struct ServedDisk {
    disk: Arc<dyn Disk>,
}

impl ServedDisk {
    /// Adds files of other machines to the queues of a disk.
    pub fn new(disk: Arc<dyn Disk>) -> Self {
        Self { disk }
    }
}

impl Disk for ServedDisk {
    fn choice(&self) -> &EngineChoice {
        self.disk.choice()
    }

    fn open_dir(&self, path: &Path) -> Result<Arc<dyn Dir>> {
        self.disk.open_dir(path)
    }

    fn create_dir_all(&self, path: &Path) -> Result<Arc<dyn Dir>> {
        self.disk.create_dir_all(path)
    }

    fn open_foreign_dir(&self, path: &Path) -> Result<Arc<dyn Dir>> {
        self.disk.open_foreign_dir(path)
    }

    fn is_remote(&self) -> bool {
        self.disk.is_remote()
    }

    fn keeps_ledgers(&self) -> bool {
        self.disk.keeps_ledgers()
    }

    fn queue(&self, depth: usize) -> Result<Box<dyn Queue>> {
        Ok(Box::new(ServedQueue { ours: self.disk.queue(depth)?, served: None, depth }))
    }

    fn queue_for_reads(&self, depth: usize) -> Result<Box<dyn Queue>> {
        Ok(Box::new(ServedQueue { ours: self.disk.queue_for_reads(depth)?, served: None, depth }))
    }

    fn register(&self, memory: &[Arc<Mapping>]) -> Result<()> {
        self.disk.register(memory)
    }
}

/// A queue for files of this disk and of other machines.
struct ServedQueue {
    ours: Box<dyn Queue>,
    /// Made for the first file of another machine.
    served: Option<TransferWorkers<ServedRead>>,
    depth: usize,
}

struct ServedRead {
    file: Arc<dyn File>,
    offset: u64,
    len: usize,
    buffer: Buffer,
    token: u64,
}

impl Job for ServedRead {
    fn perform(self) -> Completion {
        let Self { file, offset, len, mut buffer, token } = self;
        let offset = file.base().saturating_add(offset);
        let served = file.as_any().downcast_ref::<ServedFile>();
        let result = if let (Some(served), Some(into)) = (served, buffer.get_mut(..len)) {
            served.read(offset, into)
        } else {
            let found = format!("{} and {len} bytes for {}", file.path().display(), buffer.len());
            Err(Error::internal("a file of another machine and a buffer for it", found))
        };
        Completion { token, buffer, result }
    }

    fn refuse(self, error: Error) -> Completion {
        Completion { token: self.token, buffer: self.buffer, result: Err(error) }
    }
}

impl Queue for ServedQueue {
    fn submit(
        &mut self,
        transfer: Transfer,
        file: &Arc<dyn File>,
        offset: u64,
        len: usize,
        buffer: Buffer,
        token: u64,
    ) {
        if transfer == Transfer::Write || !file.as_any().is::<ServedFile>() {
            return self.ours.submit(transfer, file, offset, len, buffer, token);
        }
        let read = ServedRead { file: Arc::clone(file), offset, len, buffer, token };
        if self.served.is_none() {
            match TransferWorkers::new(self.depth, CONNECTIONS) {
                Ok(workers) => self.served = Some(workers),
                // The queue of the disk reports it, as any other refusal.
                Err(error) => {
                    tracing::warn!(%error, "no threads for reads from other machines");
                    let ServedRead { file, offset, len, buffer, token } = read;
                    return self.ours.submit(transfer, &file, offset, len, buffer, token);
                }
            }
        }
        if let Some(served) = &mut self.served {
            served.submit(read);
        }
    }

    fn complete(&mut self, timeout: Duration) -> Option<Completion> {
        let deadline = crate::deadline::deadline_after(timeout);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(served) = self.served.as_mut().filter(|served| served.in_flight() > 0) else {
                return self.ours.complete(left);
            };
            if self.ours.in_flight() == 0 {
                return served.complete(left);
            }
            let turn = left.min(TURN);
            let completed = self.ours.complete(turn).or_else(|| served.complete(turn));
            if completed.is_some() || left.is_zero() {
                return completed;
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.ours.in_flight() + self.served.as_ref().map_or(0, TransferWorkers::in_flight)
    }
}
