//! Short forms of policies, for tests. Programs write the policies as data.

use std::ops::{BitAnd, BitOr};

use super::SavePolicy;

impl SavePolicy {
    /// Steps that are divisible by `n`, and the first of an empty root.
    pub fn every_steps(n: u64) -> Self {
        Self::EverySteps { n, initial: true }
    }

    /// These steps and no others.
    pub fn at_steps(steps: impl IntoIterator<Item = u64>) -> Self {
        Self::AtSteps { steps: steps.into_iter().collect() }
    }

    /// When so many seconds have passed since the last save began.
    pub fn every_seconds(seconds: f64) -> Self {
        Self::EverySeconds { seconds }
    }

    /// When the job is to be preempted.
    pub fn on_preemption() -> Self {
        Self::OnPreemption
    }
}

impl BitOr for SavePolicy {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        let mut of = match self {
            Self::Any { of } => of,
            one => vec![one],
        };
        match other {
            Self::Any { of: more } => of.extend(more),
            one => of.push(one),
        }
        Self::Any { of }
    }
}

impl BitAnd for SavePolicy {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        let mut of = match self {
            Self::All { of } => of,
            one => vec![one],
        };
        match other {
            Self::All { of: more } => of.extend(more),
            one => of.push(one),
        }
        Self::All { of }
    }
}
