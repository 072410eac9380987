//! The steps that a manager has decided and saved so far. Save policies and
//! [`super::Manager::next_step`] ask for them.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::save::Save;

/// See the module documentation.
#[derive(Default)]
pub(super) struct History(Mutex<Done>);

#[derive(Default)]
pub(super) struct Done {
    /// The saved and restored steps, in order.
    pub(super) trail: Trail,
    /// When the last save began.
    pub(super) last_save: Option<Duration>,
    /// The newest step that the save policy was asked about.
    pub(super) decided: Option<u64>,
    /// The step from which on the job counts as preempted.
    pub(super) preempted: Option<u64>,
    pub(super) preemption_asked: bool,
}

impl History {
    pub(super) fn lock(&self) -> MutexGuard<'_, Done> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Done {
    /// True if the job counts as preempted at `step`; from `first` on where nobody has known it
    /// yet.
    pub(super) fn is_preempted(&mut self, step: u64, first: u64) -> bool {
        if self.preemption_asked && self.preempted.is_none() {
            self.preempted = Some(first);
        }
        self.preempted.is_some_and(|from| step >= from)
    }
}

/// The steps that a manager restored and saved, in the order in which it did. Short: what can never
/// be asked for again is dropped.
#[derive(Default)]
pub(super) struct Trail(Vec<Mark>);

enum Mark {
    Restored(u64),
    Saved(Save),
}

impl Mark {
    fn step(&self) -> u64 {
        match self {
            Self::Restored(step) => *step,
            Self::Saved(save) => save.step(),
        }
    }

    /// True if it can count no more.
    fn is_void(&self) -> bool {
        matches!(self, Self::Saved(save) if save.has_failed())
    }

    /// True if it counts permanently.
    fn is_firm(&self) -> bool {
        match self {
            Self::Restored(_) => true,
            Self::Saved(save) => save.outcome().is_some() && !save.has_failed(),
        }
    }
}

impl Trail {
    /// A step was restored, or rewound to.
    pub(super) fn restored(&mut self, step: u64) {
        self.0.clear();
        self.0.push(Mark::Restored(step));
    }

    /// A save was begun: it counts until it fails.
    pub(super) fn saving(&mut self, save: &Save) {
        self.0.retain(|mark| !mark.is_void());
        if let Some(firm) = self.0.iter().rposition(Mark::is_firm) {
            self.0.drain(..firm);
        }
        self.0.push(Mark::Saved(save.clone()));
    }

    /// The step that was restored, saved or begun to be saved last, of those that have not failed.
    pub(super) fn last(&self) -> Option<u64> {
        self.0.iter().rev().find(|mark| !mark.is_void()).map(Mark::step)
    }
}
