//! The capturer: one thread per manager for late captures, in the order of the saves.
//!
//! One save of a manager is captured at a time, here or on its caller's thread. A second one would
//! take slots that only its own flush frees, and that flush follows the earlier one's.

use std::sync::Arc;
use std::time::Duration;

use stepwell_core::sys::spawn;

use super::Inner;
use super::saves::Captures;
use crate::error::Result;
use crate::guard::guarded;
use crate::save::job::Capturing;

impl Inner {
    /// Hands over the rest of a capture. `first`: it belongs to the save that is being captured,
    /// and precedes the waiting ones.
    pub(super) fn capture_later(
        self: &Arc<Self>,
        captures: &mut Captures,
        rest: Capturing,
        first: bool,
    ) -> Result<()> {
        if captures.thread.is_none() {
            let inner = Arc::clone(self);
            let thread = spawn("stepwell-capture", move || inner.capture())
                .map_err(|error| stepwell_core::Error::io("start a thread for", &self.root.path, error))?;
            captures.thread = Some(thread);
        }
        if first {
            captures.rests.push_front(rest);
        } else {
            captures.rests.push_back(rest);
        }
        Ok(())
    }

    /// The body of the capturer's thread. It ends after a stop, when no capture is left.
    fn capture(self: &Arc<Self>) {
        loop {
            let rest = {
                let mut queued = self.saves.lock();
                loop {
                    if !queued.captures.capturing
                        && let Some(rest) = queued.captures.rests.pop_front()
                    {
                        queued.captures.capturing = true;
                        break rest;
                    }
                    if queued.end.stop && queued.captures.rests.is_empty() {
                        return;
                    }
                    queued = self.saves.wait(queued, Duration::from_secs(60));
                }
            };
            let pool = self.pool();
            if let Err(error) = guarded("the capture", || rest.run_rest(&pool, &self.options)) {
                tracing::warn!(%error, "a late capture failed");
            }
            self.saves.lock().captures.capturing = false;
            self.saves.changed.notify_all();
        }
    }
}
