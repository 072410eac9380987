//! The close of a manager, which several callers may wait for.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::Error;

/// The close of a manager, on its own thread. It runs once. Callers of `close` wait for it. An
/// interrupt or a timeout ends only their wait.
#[derive(Default)]
pub(super) struct Closing {
    state: Mutex<ClosingState>,
    changed: Condvar,
}

#[derive(Default)]
struct ClosingState {
    over: bool,
    /// A failure that no caller has got yet.
    failure: Option<Error>,
}

impl Closing {
    /// Waits for the end, and returns the result. Only one caller gets a failure. `None` after the
    /// timeout.
    pub(super) fn wait(&self, timeout: Duration) -> Option<Result<(), Error>> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut state, _) = self
            .changed
            .wait_timeout_while(state, timeout, |state| !state.over)
            .unwrap_or_else(PoisonError::into_inner);
        state.over.then(|| state.failure.take().map_or(Ok(()), Err))
    }

    /// Sets the result.
    pub(super) fn end(&self, result: Result<(), Error>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.over = true;
        state.failure = result.err();
        self.changed.notify_all();
    }

    /// Takes back a failure that could not be raised. The next caller gets it.
    pub(super) fn put_back(&self, error: Error) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).failure = Some(error);
    }

    /// True if it has ended and a caller has got its failure.
    pub(super) fn is_over(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.over && state.failure.is_none()
    }
}
