//! The link between the two halves of a save. A half that ends early reports its reason to the
//! other.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, atomic};
use std::time::Duration;

use crate::Error;
use crate::staging::StagingPool;
use crate::sync::{AtomicBool, Mutex};

/// Shared by [`super::Capture`] and [`super::Flush`].
pub(super) struct Link {
    stopped: AtomicBool,
    cause: Mutex<Option<Cause>>,
    /// Set by the caller that cancels the save.
    unwanted: Option<Arc<atomic::AtomicBool>>,
    pool: Arc<StagingPool>,
}

enum Cause {
    /// One half ended early.
    Ended(String),
    /// The capture failed; what the flush ends by is the same.
    Failed(Arc<Error>),
}

impl Link {
    pub(super) fn new(pool: Arc<StagingPool>, unwanted: Option<Arc<atomic::AtomicBool>>) -> Self {
        Self { stopped: AtomicBool::new(false), cause: Mutex::new(None), unwanted, pool }
    }

    /// Why the capture must stop, if it must: [`Link::cancelled`], and what the caller asked for.
    /// The flush does not ask this: what is captured whole may be committed.
    pub(super) fn unwanted(&self) -> Option<Error> {
        // Asked under the pool's lock too, so that nothing is stopped here: the thread that gets
        // this answer does that.
        let unwanted = self.unwanted.as_ref().is_some_and(|unwanted| unwanted.load(Ordering::Acquire));
        self.cancelled().or_else(|| unwanted.then(|| Error::Cancelled("its caller cancelled it".to_owned())))
    }

    /// How long a wait may last until that is asked again: nothing announces what a caller asked
    /// for.
    pub(super) fn poll_interval(&self) -> Duration {
        if self.unwanted.is_some() { Duration::from_millis(20) } else { Duration::MAX }
    }

    /// Stops both halves. The first cause stays.
    pub(super) fn stop(&self, cause: impl Into<String>) {
        self.stop_by(Cause::Ended(cause.into()));
    }

    /// [`Link::stop`] by an error of the capture.
    pub(super) fn fail(&self, error: &Arc<Error>) {
        self.stop_by(Cause::Failed(Arc::clone(error)));
    }

    fn stop_by(&self, cause: Cause) {
        self.cause.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(cause);
        self.stopped.store(true, Ordering::Release);
        self.pool.wake();
    }

    /// Why this half must stop, if it must.
    pub(super) fn cancelled(&self) -> Option<Error> {
        if !self.stopped.load(Ordering::Acquire) {
            return None;
        }
        let cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner);
        Some(Error::Cancelled(match &*cause {
            Some(Cause::Ended(why)) => why.clone(),
            Some(Cause::Failed(error)) => format!("the capture failed: {error}"),
            None => String::new(),
        }))
    }

    /// The error of the capture, where that is why the flush ended.
    pub(super) fn failure(&self) -> Option<Error> {
        match &*self.cause.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(Cause::Failed(error)) => Some(Error::Shared(Arc::clone(error))),
            _ => None,
        }
    }
}
