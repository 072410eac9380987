//! Requests for data in flight, each on a thread that waits for its answer.

use std::sync::Arc;
use std::time::Duration;

use super::file::StoreFile;
use crate::io::workers::{Job, TransferWorkers};
use crate::io::{Completion, File, Queue, Transfer};
use crate::sys::Buffer;
use crate::{Error, Result};

/// See the module documentation.
pub(super) struct StoreQueue {
    workers: TransferWorkers<StoreJob>,
}

struct StoreJob {
    transfer: Transfer,
    file: Arc<dyn File>,
    offset: u64,
    len: usize,
    buffer: Buffer,
    token: u64,
}

impl StoreQueue {
    pub(super) fn new(depth: usize, connections: usize) -> Result<Self> {
        Ok(Self { workers: TransferWorkers::new(depth, connections)? })
    }
}

impl Job for StoreJob {
    fn perform(self) -> Completion {
        let Self { transfer, file, offset, len, mut buffer, token } = self;
        let Some(ours) = file.as_any().downcast_ref::<StoreFile>() else {
            let found = format!("{} from another", file.path().display());
            return Completion { token, buffer, result: Err(Error::internal("a file of this store", found)) };
        };
        let offset = file.base() + offset;
        let (buffer, result) = match (transfer, buffer.get_mut(..len)) {
            (_, None) => {
                let found = format!("{len} bytes for a buffer of {}", buffer.len());
                (buffer, Err(Error::internal("a transfer that fits its buffer", found)))
            }
            (Transfer::Write, Some(_)) => ours.write(offset, buffer, len),
            (Transfer::Read | Transfer::ReadCached, Some(into)) => {
                let read = ours.read(offset, into);
                (buffer, read)
            }
        };
        Completion { token, buffer, result }
    }

    fn refuse(self, error: Error) -> Completion {
        Completion { token: self.token, buffer: self.buffer, result: Err(error) }
    }
}

impl Queue for StoreQueue {
    fn submit(
        &mut self,
        transfer: Transfer,
        file: &Arc<dyn File>,
        offset: u64,
        len: usize,
        buffer: Buffer,
        token: u64,
    ) {
        let file = Arc::clone(file);
        self.workers.submit(StoreJob { transfer, file, offset, len, buffer, token });
    }

    fn complete(&mut self, timeout: Duration) -> Option<Completion> {
        self.workers.complete(timeout)
    }

    fn in_flight(&self) -> usize {
        self.workers.in_flight()
    }
}
