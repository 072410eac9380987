//! The steps that a manager has decided and saved. Save policies and [`super::Manager::next_step`]
//! ask for them.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::save::Save;

/// See the module documentation.
#[derive(Default)]
pub(super) struct History(Mutex<HistoryState>);

#[derive(Default)]
pub(super) struct HistoryState {
    /// The saved and restored steps, in order.
    pub(super) trail: Trail,
    /// The time at which the last save began, on the monotonic clock.
    pub(super) last_save: Option<Duration>,
    /// The newest step that the save policy was asked about.
    pub(super) decided: Option<u64>,
    /// The first step at which the job counts as preempted.
    pub(super) preempted: Option<u64>,
    pub(super) preemption_asked: bool,
}

impl History {
    pub(super) fn lock(&self) -> MutexGuard<'_, HistoryState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HistoryState {
    /// True if the job counts as preempted at `step`. A new preemption counts from `first` on.
    pub(super) fn is_preempted(&mut self, step: u64, first: u64) -> bool {
        if self.preemption_asked && self.preempted.is_none() {
            self.preempted = Some(first);
        }
        self.preempted.is_some_and(|from| step >= from)
    }
}

/// The steps that a manager restored and saved. It keeps only those that a later question may need.
#[derive(Default)]
pub(super) struct Trail {
    /// The last step that was restored, or saved for certain.
    certain: Option<u64>,
    /// The saves since then, in order.
    saves: Vec<Save>,
}

impl Trail {
    /// A step was restored, or rewound to.
    pub(super) fn restored(&mut self, step: u64) {
        *self = Self { certain: Some(step), saves: Vec::new() };
    }

    /// A save was begun. It counts until it fails.
    pub(super) fn saving(&mut self, save: &Save) {
        self.saves.retain(|save| !save.has_failed());
        if let Some(last) = self.saves.iter().rposition(Save::is_done) {
            self.certain = self.saves.drain(..=last).next_back().map(|save| save.step());
        }
        self.saves.push(save.clone());
    }

    /// The step that was restored or saved last. A save that has failed does not count.
    pub(super) fn last(&self) -> Option<u64> {
        let saved = self.saves.iter().rev().find(|save| !save.has_failed());
        saved.map(Save::step).or(self.certain)
    }
}
