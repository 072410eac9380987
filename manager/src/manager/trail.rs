//! The steps that a manager restored and saved, in the order in which it did: what
//! [`super::Manager::next_step`] goes on from.

use crate::save::Save;

/// See the module documentation. Short: what can never be asked for again is dropped.
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
