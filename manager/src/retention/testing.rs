//! Short forms of rules, for tests. Programs write the rules as data.

use std::ops::BitOr;

use super::{Mode, Retention};

impl Retention {
    /// Every step.
    pub fn keep_all() -> Self {
        Self::KeepAll
    }

    /// The newest `n`.
    pub fn keep_latest(n: u64) -> Self {
        Self::KeepLatest { n }
    }

    /// Steps divisible by `steps`.
    pub fn keep_every(steps: u64) -> Self {
        Self::KeepEvery { steps, items: None }
    }

    /// Keeps, of the steps divisible by `steps`, the items that match a glob.
    pub fn keep_every_items(steps: u64, items: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self::KeepEvery { steps, items: Some(items.into_iter().map(Into::into).collect()) }
    }

    /// The best `n` by a metric.
    pub fn keep_best(n: u64, metric: impl Into<String>, mode: Mode) -> Self {
        Self::KeepBest { n, metric: metric.into(), mode }
    }
}

impl BitOr for Retention {
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
