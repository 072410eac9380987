//! The right to save one step.

use std::sync::{Arc, OnceLock};

use super::Inner;
use crate::error::Error;

/// The right to save one step. If it is dropped unused, it reports to the other ranks that this
/// rank does not save.
pub struct Ticket {
    inner: Arc<Inner>,
    pub(super) step: u64,
    /// True if the save replaces a step.
    pub(super) replaces: bool,
    /// True if this rank's leaves have changed since the last census. `None` before this rank has
    /// taken part in the census of this save.
    pub(super) stale: Option<bool>,
    /// True if there is nothing to report: the save has begun, or there are no other ranks.
    pub(super) used: bool,
    cause: Arc<OnceLock<String>>,
}

impl Ticket {
    pub(super) fn new(inner: &Arc<Inner>, step: u64, replaces: bool) -> Self {
        Self {
            inner: Arc::clone(inner),
            step,
            replaces,
            stale: None,
            used: inner.team.is_alone(),
            cause: Arc::default(),
        }
    }

    /// The step.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns a cell for the reason of a drop, which the other ranks get. The first reason stays.
    pub fn cause(&self) -> Arc<OnceLock<String>> {
        Arc::clone(&self.cause)
    }

    /// Drops the ticket with the reason of a failure.
    pub(super) fn fail(self, error: &Error) {
        let _ = self.cause.set(error.to_string());
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.used && self.inner.birth.is_here() {
            let cause = self.cause.get_or_init(|| "its call of save was interrupted".to_owned());
            self.inner.report_no_save(self.step, self.stale.is_some(), cause);
        }
    }
}
