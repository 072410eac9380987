//! The capturer: one thread per manager that captures what saves have left to be captured late, in
//! the order in which the saves were called.
//!
//! One save of a manager is captured at a time, here or on its caller's thread: a later one would
//! take slots that only its flush frees, which stands behind the earlier one's.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use stepwell_core::sys::spawn;

use super::{Inner, State};
use crate::error::Result;
use crate::guard::guarded;
use crate::save::job::Rest;

impl Inner {
    /// Hands over what is left of a capture. `first`: it belongs to the save that is being
    /// captured, and comes before what waits.
    pub(super) fn capture_later(self: &Arc<Self>, state: &mut State, rest: Rest, first: bool) -> Result<()> {
        if state.capturer.is_none() {
            let inner = Arc::clone(self);
            let thread = spawn("stepwell-capture", move || inner.capture())
                .map_err(|error| stepwell_core::Error::io("start a thread for", &self.path, error))?;
            state.capturer = Some(thread);
        }
        if first {
            state.rests.push_front(rest);
        } else {
            state.rests.push_back(rest);
        }
        Ok(())
    }

    /// The body of the capturer's thread. It ends when it is told to and nothing is left.
    fn capture(self: &Arc<Self>) {
        loop {
            let rest = {
                let mut state = self.lock();
                loop {
                    if !state.capturing
                        && let Some(rest) = state.rests.pop_front()
                    {
                        state.capturing = true;
                        break rest;
                    }
                    if state.stop && state.rests.is_empty() {
                        return;
                    }
                    let wait = self.changed.wait_timeout(state, Duration::from_secs(60));
                    state = wait.unwrap_or_else(PoisonError::into_inner).0;
                }
            };
            let pool = self.pool();
            if let Err(error) = guarded("the capture", || rest.run(&pool, &self.options)) {
                tracing::warn!(%error, "what was left of a capture failed");
            }
            self.lock().capturing = false;
            self.changed.notify_all();
        }
    }
}
