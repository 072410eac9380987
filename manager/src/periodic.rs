//! A thread that does its work periodically, until it is stopped.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use stepwell_core::sys::spawn;

/// A periodic thread. A drop ends the thread without a wait, since a forked child has this value
/// without the thread.
pub(crate) struct Periodic {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Periodic {
    /// Calls `work` after each interval, until it returns false.
    pub(crate) fn start(
        name: &str,
        interval: Duration,
        mut work: impl FnMut() -> bool + Send + 'static,
    ) -> std::io::Result<Self> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let stop_flag = Arc::clone(&stop);
        let thread = spawn(name, move || {
            loop {
                let stopped = stop_flag.0.lock().unwrap_or_else(PoisonError::into_inner);
                let wait = stop_flag.1.wait_timeout_while(stopped, interval, |stopped| !*stopped);
                if *wait.unwrap_or_else(PoisonError::into_inner).0 || !work() {
                    return;
                }
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Ends the thread. Waits for its end for a second at most, as it may hang in the kernel.
    pub(crate) fn stop(mut self) {
        *self.stop.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take() {
            for _ in 0..100 {
                if thread.is_finished() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

impl Drop for Periodic {
    fn drop(&mut self) {
        if let Ok(mut stop) = self.stop.0.try_lock() {
            *stop = true;
        }
        self.stop.1.notify_all();
    }
}
