//! Says for a rank, from a thread of its own, that its saves get on: a rank that writes for long is
//! none that is lost.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use stepwell_core::sys::spawn;

use super::team::{Beat, Team};

/// See the module documentation. Dropping it ends the thread.
pub(crate) struct Pulse {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Pulse {
    /// Looks at `life` every now and then, and tells the others where it has changed; `None`: there
    /// is nothing to tell.
    pub(crate) fn start(
        team: Arc<Team>,
        life: impl Fn() -> Option<Beat> + Send + 'static,
    ) -> std::io::Result<Self> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let told = Arc::clone(&stop);
        let thread = spawn("stepwell-pulse", move || {
            let mut last = None;
            let (stop, changed) = &*told;
            let mut stopped = stop.lock().unwrap_or_else(PoisonError::into_inner);
            while !*stopped {
                drop(stopped);
                let now = life();
                if let Some(beat) = now
                    && now != last
                {
                    last = now;
                    if let Err(error) = team.beat(beat) {
                        tracing::debug!(%error, "the other ranks could not be told that this one lives");
                    }
                }
                stopped = stop.lock().unwrap_or_else(PoisonError::into_inner);
                if !*stopped {
                    let waited = changed.wait_timeout(stopped, team.beat_interval());
                    stopped = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        *self.stop.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take() {
            // It ends after the message that it is at.
            let _ = thread.join();
        }
    }
}
