//! Save policies: which calls of `save` write. Small pure objects: a question in, a yes or no out.
//!
//! Policies compose with `|` and `&`, are plain data (JSON), and know whether they are *deterministic*: whether every rank comes to the same
//! answer by itself. Where not (clocks, signals, callables), the leader's answer binds all ranks.
//!
//! **The first save.** [`SavePolicy::every_steps`] also says yes to the first step that an empty root is asked for, whatever its number: a run
//! that cannot save shows it at its start and not after the first interval. [`SavePolicy::at_steps`] says yes to its steps and to no other.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{BitAnd, BitOr};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// What a policy may look at.
#[derive(Clone, Debug, Default)]
pub struct Context {
    /// The step that might be saved.
    pub step: u64,
    /// The newest step, committed or being saved; `None` in an empty root.
    pub latest: Option<u64>,
    /// Seconds since the last save began; `None` if there was none.
    pub seconds_since_save: Option<f64>,
    /// Whether a save is being written.
    pub saving: bool,
    /// Whether the ranks have agreed that this job is to be preempted.
    pub preempted: bool,
    /// The answers of custom policies (callables of the front end), by their name.
    pub custom: BTreeMap<String, bool>,
}

/// See the module documentation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "policy", rename_all = "snake_case", deny_unknown_fields)]
pub enum SavePolicy {
    /// Steps that are divisible by `n`.
    EverySteps {
        /// The interval; at least 1.
        n: u64,
        /// Whether the first step of an empty root is saved too.
        #[serde(default = "yes")]
        initial: bool,
    },
    /// These steps.
    AtSteps {
        /// The steps.
        steps: BTreeSet<u64>,
    },
    /// When so much time has passed since the last save began (or there was none).
    EverySeconds {
        /// The interval in seconds; at least 0.
        seconds: f64,
    },
    /// While no other save is being written.
    WhenIdle,
    /// When the job is to be preempted.
    OnPreemption,
    /// What a callable of the front end says.
    Custom {
        /// Its name in [`Context::custom`]; a name that is not answered says no.
        name: String,
    },
    /// One of them says yes. None: never.
    Any {
        /// The alternatives.
        of: Vec<SavePolicy>,
    },
    /// All of them say yes. None: always.
    All {
        /// The conditions.
        of: Vec<SavePolicy>,
    },
}

fn yes() -> bool {
    true
}

impl Default for SavePolicy {
    fn default() -> Self {
        Self::every_steps(1)
    }
}

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

    /// Refuses what can never work: an interval of no steps, a negative or endless time.
    pub fn check(&self) -> Result<()> {
        match self {
            Self::EverySteps { n: 0, .. } => Err(Error::Invalid(
                "every_steps(0) names no step; pass at least 1, or read_only=True to never save".to_owned(),
            )),
            Self::EverySeconds { seconds } if !(seconds.is_finite() && *seconds >= 0.0) => {
                Err(Error::Invalid(format!(
                    "every_seconds({seconds}) is no interval; pass a finite number of seconds, at least 0"
                )))
            }
            Self::Any { of } | Self::All { of } => of.iter().try_for_each(Self::check),
            _ => Ok(()),
        }
    }

    /// Whether to save.
    pub fn should_save(&self, context: &Context) -> bool {
        match self {
            Self::EverySteps { n, initial } => {
                context.step.checked_rem(*n) == Some(0) || (*initial && context.latest.is_none())
            }
            Self::AtSteps { steps } => steps.contains(&context.step),
            Self::EverySeconds { seconds } => {
                context.seconds_since_save.is_none_or(|passed| passed >= *seconds)
            }
            Self::WhenIdle => !context.saving,
            Self::OnPreemption => context.preempted,
            Self::Custom { name } => context.custom.get(name).copied().unwrap_or(false),
            Self::Any { of } => of.iter().any(|policy| policy.should_save(context)),
            Self::All { of } => of.iter().all(|policy| policy.should_save(context)),
        }
    }

    /// Whether every rank comes to the same answer by itself, from the step and the agreed listing alone.
    pub fn is_deterministic(&self) -> bool {
        match self {
            Self::EverySteps { .. } | Self::AtSteps { .. } => true,
            Self::EverySeconds { .. } | Self::WhenIdle | Self::OnPreemption | Self::Custom { .. } => false,
            Self::Any { of } | Self::All { of } => of.iter().all(Self::is_deterministic),
        }
    }

    /// The names of the callables that must be asked before a decision.
    pub fn custom_names(&self) -> BTreeSet<&str> {
        match self {
            Self::Custom { name } => BTreeSet::from([name.as_str()]),
            Self::Any { of } | Self::All { of } => of.iter().flat_map(Self::custom_names).collect(),
            _ => BTreeSet::new(),
        }
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

#[cfg(test)]
mod tests;
