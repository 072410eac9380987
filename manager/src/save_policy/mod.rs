//! Save policies: the calls of `save` that write. Policies are pure: facts in, a yes or no out.
//!
//! Policies compose, and are plain data (JSON). A *deterministic* policy has the same answer on
//! every rank. Otherwise (clocks, signals, callables) the leader's answer binds all ranks. A policy
//! that needs only the step can refuse without a listing of the root, except for the first call,
//! when it is unknown if the root is empty.
//!
//! **The first save.** [`SavePolicy::EverySteps`] also says yes to the first step of an empty root,
//! whatever its number: a run that cannot save then fails at its start, and not after the first
//! interval. [`SavePolicy::AtSteps`] says yes to its steps only.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The facts that a policy may ask for. Each is looked up only when it is asked for. A
/// deterministic policy asks for none that has a default.
pub trait Facts {
    /// Returns the step in question.
    fn step(&self) -> u64;
    /// True if the root has no step, and none is being saved.
    fn is_first(&self) -> Result<bool>;
    /// Returns the seconds since the last save began. `None` if there was no save.
    fn seconds_since_save(&self) -> Result<Option<f64>> {
        Ok(None)
    }
    /// True if a save is being written.
    fn saving(&self) -> bool {
        false
    }
    /// True if the ranks have agreed that this job is to be preempted.
    fn preempted(&self) -> bool {
        false
    }
    /// Returns the answer of a custom policy, a callable of the front end. `false` if it was not
    /// called.
    fn custom(&self, name: &str) -> bool;
}

/// A save policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "policy", rename_all = "snake_case", deny_unknown_fields)]
pub enum SavePolicy {
    /// Steps that are divisible by `n`.
    EverySteps {
        /// The interval; at least 1.
        n: u64,
        /// True if the first step of an empty root is saved too.
        #[serde(default = "yes")]
        initial: bool,
    },
    /// These steps.
    AtSteps {
        /// The steps.
        steps: BTreeSet<u64>,
    },
    /// When that many seconds have passed since the last save began, or if there was no save.
    EverySeconds {
        /// The interval in seconds; at least 0.
        seconds: f64,
    },
    /// While no other save is being written.
    WhenIdle,
    /// When the job is to be preempted.
    OnPreemption,
    /// The answer of a callable of the front end.
    Custom {
        /// Its name in [`Facts::custom`]. A name without an answer says no.
        name: String,
    },
    /// One of the policies says yes. An empty list says no.
    Any {
        /// The alternatives.
        of: Vec<SavePolicy>,
    },
    /// All of the policies say yes. An empty list says yes.
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
        Self::EverySteps { n: 1, initial: true }
    }
}

impl SavePolicy {
    /// Refuses an interval of no steps, and a negative or infinite time.
    pub fn check(&self) -> Result<()> {
        match self {
            Self::EverySteps { n: 0, .. } => Err(Error::Invalid(
                "an interval of 0 steps between saves is not possible. Pass at least 1, or open the root to read only".to_owned(),
            )),
            Self::EverySeconds { seconds } if !(seconds.is_finite() && *seconds >= 0.0) => {
                Err(Error::Invalid(format!(
                    "an interval of {seconds} s between saves is not possible. It must be finite, and at least 0"
                )))
            }
            Self::Any { of } | Self::All { of } => of.iter().try_for_each(Self::check),
            _ => Ok(()),
        }
    }

    /// True if the step is to be saved.
    pub fn should_save(&self, facts: &dyn Facts) -> Result<bool> {
        Ok(match self {
            Self::EverySteps { n, initial } => {
                facts.step().checked_rem(*n) == Some(0) || (*initial && facts.is_first()?)
            }
            Self::AtSteps { steps } => steps.contains(&facts.step()),
            Self::EverySeconds { seconds } => {
                facts.seconds_since_save()?.is_none_or(|passed| passed >= *seconds)
            }
            Self::WhenIdle => !facts.saving(),
            Self::OnPreemption => facts.preempted(),
            Self::Custom { name } => facts.custom(name),
            Self::Any { of } => {
                for policy in of {
                    if policy.should_save(facts)? {
                        return Ok(true);
                    }
                }
                false
            }
            Self::All { of } => {
                for policy in of {
                    if !policy.should_save(facts)? {
                        return Ok(false);
                    }
                }
                true
            }
        })
    }

    /// True if every rank gets the same answer by itself, from the step and the agreed listing.
    pub fn is_deterministic(&self) -> bool {
        match self {
            Self::EverySteps { .. } | Self::AtSteps { .. } => true,
            Self::EverySeconds { .. } | Self::WhenIdle | Self::OnPreemption | Self::Custom { .. } => false,
            Self::Any { of } | Self::All { of } => of.iter().all(Self::is_deterministic),
        }
    }

    /// True if it depends on preemption.
    pub fn listens(&self) -> bool {
        match self {
            Self::OnPreemption => true,
            Self::Any { of } | Self::All { of } => of.iter().any(Self::listens),
            _ => false,
        }
    }
}

#[cfg(any(test, feature = "test-support"))]
mod testing;
#[cfg(test)]
mod tests;
