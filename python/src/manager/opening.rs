//! Openings of roots whose call was interrupted. The thread goes on, and drops the manager that it
//! opened. Until then it has the root, so the next opening of that root waits for it.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;

use crate::wait;

/// Interrupted openings. A receiver is disconnected when its opening has let go of the root.
static INTERRUPTED: Mutex<Vec<(PathBuf, Receiver<()>)>> = Mutex::new(Vec::new());

/// Opens a root on a thread of its own, after interrupted openings of it have ended. Waits for
/// those at most for `limit`, since the root reports its lock.
pub fn on_thread<T: Send + 'static>(
    py: Python<'_>,
    root: &Path,
    limit: Duration,
    open: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    wait::poll(py, Some(limit), |interval| ended(root, interval))?;
    let (has_root, let_go): (Sender<()>, _) = channel();
    // A tuple drops its fields in order: the answer of an interrupted call before the sender.
    match wait::on_thread(py, move || (open(), has_root)) {
        Ok((opened, _)) => Ok(opened),
        Err(interrupt) => {
            interrupted().push((root.to_owned(), let_go));
            Err(interrupt)
        }
    }
}

/// Returns something when no interrupted opening has the root. Waits a part of `interval` for it.
fn ended(root: &Path, interval: Duration) -> Option<()> {
    let mut all = interrupted();
    all.retain(|(_, let_go)| let_go.try_recv() != Err(TryRecvError::Disconnected));
    let is_free = all.iter().all(|(other, _)| other != root);
    drop(all);
    if !is_free {
        std::thread::sleep(interval / 4);
    }
    is_free.then_some(())
}

fn interrupted() -> MutexGuard<'static, Vec<(PathBuf, Receiver<()>)>> {
    INTERRUPTED.lock().unwrap_or_else(PoisonError::into_inner)
}
