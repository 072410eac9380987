//! Retention: the steps, or parts of steps, that stay. Rules are pure: committed steps in, an
//! explained plan out.
//!
//! * Only committed steps count, ordered by number.
//! * The newest committed step always stays whole.
//! * A union keeps what any of its rules keeps. A step that one rule keeps whole and another thins
//!   stays whole.
//! * [`Retention::KeepBest`] counts steps without the metric only if too few have it.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use stepwell_core::format::manifest::Manifest;
use stepwell_reshard::glob::GlobList;

use crate::error::{Error, Result};

mod forecast;
mod rank;

pub use forecast::{RegularSaves, SizedStep};
pub use rank::{Mode, best};

/// A committed step, as retention sees it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Candidate<'a> {
    /// Its number.
    pub step: u64,
    /// The time of its commit, in nanoseconds since 1970.
    pub committed_unix_ns: i64,
    /// Its metrics.
    pub metrics: Metrics<'a>,
    /// The names of its items that were not dropped.
    pub items: Names<'a>,
    /// True if this process holds it.
    pub held: bool,
}

/// The metrics of a step that the rules use ([`Retention::metrics`]).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics<'a> {
    /// Their names.
    pub names: &'a [String],
    /// Their values in this step, in that order. They include metrics that came after the commit.
    pub values: Cow<'a, [Option<f64>]>,
}

impl Metrics<'_> {
    fn get(&self, metric: &str) -> Option<f64> {
        self.names.iter().zip(&*self.values).find(|(name, _)| *name == metric).and_then(|(_, value)| *value)
    }
}

/// The names of a step's items.
#[derive(Clone, Debug, PartialEq)]
pub enum Names<'a> {
    /// The names in its manifest, which most rules do not read.
    Of(&'a Manifest),
    /// These.
    Given(Vec<&'a str>),
}

impl Default for Names<'_> {
    fn default() -> Self {
        Self::Given(Vec::new())
    }
}

impl<'a> Names<'a> {
    fn list(&self) -> Vec<&'a str> {
        match self {
            Self::Of(manifest) => manifest.items.iter().map(|item| item.name.as_str()).collect(),
            Self::Given(names) => names.clone(),
        }
    }
}

/// A rule of retention.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "policy", rename_all = "snake_case", deny_unknown_fields)]
pub enum Retention {
    /// Every step.
    #[default]
    KeepAll,
    /// The newest `n`.
    KeepLatest {
        /// How many.
        n: u64,
    },
    /// Steps divisible by `steps`. With `items`, only the items that a glob matches: the step is
    /// *thinned*.
    KeepEvery {
        /// The interval; at least 1.
        steps: u64,
        /// Globs over item names; `None`: the whole step.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        items: Option<Vec<String>>,
    },
    /// The oldest step, and each that was committed at least so many seconds after the last one
    /// that this rule keeps. With `items`, only those items.
    KeepEverySeconds {
        /// The interval in seconds.
        seconds: f64,
        /// Globs over item names; `None`: the whole step.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        items: Option<Vec<String>>,
    },
    /// The best `n` by a metric. NaN is worst. Of equals, the later is better.
    KeepBest {
        /// How many.
        n: u64,
        /// The metric.
        metric: String,
        /// The best end of the metric.
        mode: Mode,
    },
    /// These steps.
    KeepSteps {
        /// The steps.
        steps: BTreeSet<u64>,
    },
    /// Steps that were committed less than so many seconds ago.
    KeepNewerThan {
        /// The age in seconds.
        seconds: f64,
    },
    /// The union of what the rules keep.
    Any {
        /// The parts.
        of: Vec<Retention>,
    },
}

/// The part of a step that stays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KeptItems {
    /// All of it.
    All,
    /// These items.
    Only(BTreeSet<String>),
}

/// The decision on a step, with its reasons.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "decision", rename_all = "snake_case")]
pub enum StepDecision {
    /// It stays.
    Keep {
        /// The part that stays.
        items: KeptItems,
        /// One reason per rule that keeps it.
        reasons: Vec<String>,
    },
    /// It goes.
    Delete {
        /// Why.
        reason: String,
    },
}

/// A plan: one decision per step, by number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RetentionPlan {
    /// The decisions.
    pub steps: BTreeMap<u64, StepDecision>,
}

impl RetentionPlan {
    /// Returns the deleted steps, oldest first.
    pub fn deleted(&self) -> impl Iterator<Item = u64> + '_ {
        self.steps.iter().filter(|(_, d)| matches!(d, StepDecision::Delete { .. })).map(|(&step, _)| step)
    }

    /// Returns the thinned steps, each with the items that stay.
    pub fn thinned(&self) -> impl Iterator<Item = (u64, &BTreeSet<String>)> + '_ {
        self.steps.iter().filter_map(|(&step, decision)| match decision {
            StepDecision::Keep { items: KeptItems::Only(items), .. } => Some((step, items)),
            _ => None,
        })
    }

    /// Returns the steps that stay, whole or thinned.
    pub fn kept(&self) -> impl Iterator<Item = u64> + '_ {
        self.steps.iter().filter(|(_, d)| matches!(d, StepDecision::Keep { .. })).map(|(&step, _)| step)
    }
}

impl Retention {
    /// Refuses a rule that can never work.
    pub fn check(&self) -> Result<()> {
        match self {
            Self::KeepEvery { steps: 0, .. } => Err(Error::Invalid(
                "an interval of 0 steps between kept steps is not possible. It must be at least 1".to_owned(),
            )),
            Self::KeepEverySeconds { seconds, .. } if !(seconds.is_finite() && *seconds > 0.0) => {
                Err(Error::Invalid(format!(
                    "an interval of {seconds} s between kept steps is not possible. It must be finite, and more than 0"
                )))
            }
            Self::KeepEvery { items: Some(globs), .. }
            | Self::KeepEverySeconds { items: Some(globs), .. } => {
                if globs.is_empty() {
                    return Err(Error::Invalid(
                        "a rule that keeps some items of steps names none. Name items, or keep the steps whole"
                            .to_owned(),
                    ));
                }
                matcher(globs).map(drop)
            }
            Self::KeepNewerThan { seconds } if !(seconds.is_finite() && *seconds >= 0.0) => {
                Err(Error::Invalid(format!(
                    "an age of {seconds} s for kept steps is not possible. It must be finite, and at least 0"
                )))
            }
            Self::Any { of } => of.iter().try_for_each(Self::check),
            _ => Ok(()),
        }
    }

    /// True if it may drop items of steps.
    pub fn thins(&self) -> bool {
        match self {
            Self::KeepEvery { items, .. } | Self::KeepEverySeconds { items, .. } => items.is_some(),
            Self::Any { of } => of.iter().any(Self::thins),
            _ => false,
        }
    }

    /// Returns the metric of the first [`Retention::KeepBest`], the default of `best_step`.
    pub fn metric(&self) -> Option<(&str, Mode)> {
        match self {
            Self::KeepBest { metric, mode, .. } => Some((metric, *mode)),
            Self::Any { of } => of.iter().find_map(Self::metric),
            _ => None,
        }
    }

    /// Returns the metrics that its rules use, each once.
    pub fn metrics(&self) -> Vec<String> {
        fn add(rule: &Retention, names: &mut Vec<String>) {
            match rule {
                Retention::KeepBest { metric, .. } if !names.contains(metric) => names.push(metric.clone()),
                Retention::Any { of } => of.iter().for_each(|part| add(part, names)),
                Retention::KeepBest { .. }
                | Retention::KeepAll
                | Retention::KeepLatest { .. }
                | Retention::KeepEvery { .. }
                | Retention::KeepEverySeconds { .. }
                | Retention::KeepSteps { .. }
                | Retention::KeepNewerThan { .. } => {}
            }
        }
        let mut names = Vec::new();
        add(self, &mut names);
        names
    }

    /// Returns the decision on each step. `steps` are the committed ones, in any order.
    pub fn plan(&self, steps: &[Candidate<'_>], now_unix_ns: i64) -> Result<RetentionPlan> {
        self.decide(steps, now_unix_ns, true)
    }

    /// [`Retention::plan`] without reasons. Most of many steps stay, and the texts would be most of
    /// the work.
    pub fn changes(&self, steps: &[Candidate<'_>], now_unix_ns: i64) -> Result<RetentionPlan> {
        self.decide(steps, now_unix_ns, false)
    }

    fn decide(&self, steps: &[Candidate<'_>], now: i64, explained: bool) -> Result<RetentionPlan> {
        self.check()?;
        let mut ballot = Ballot::new(steps, explained);
        if let Some(newest) = ballot.steps.len().checked_sub(1) {
            ballot.keep(newest, KeptItems::All, || "the newest committed step always stays".to_owned());
        }
        for at in 0..ballot.steps.len() {
            if ballot.steps.get(at).is_some_and(|candidate| candidate.held) {
                ballot.keep(at, KeptItems::All, || "it is held".to_owned());
            }
        }
        self.vote(now, &mut ballot)?;
        Ok(ballot.plan())
    }

    fn vote(&self, now: i64, ballot: &mut Ballot<'_>) -> Result<()> {
        let steps = ballot.steps.clone();
        let all = 0..steps.len();
        match self {
            Self::KeepAll => {
                for at in all {
                    ballot.keep(at, KeptItems::All, || "keep_all".to_owned());
                }
            }
            Self::KeepLatest { n } => {
                for at in all.rev().take(count(*n)) {
                    ballot.keep(at, KeptItems::All, || format!("keep_latest({n})"));
                }
            }
            Self::KeepEvery { steps: interval, items } => {
                let of = steps.iter().map(|candidate| candidate.step.checked_rem(*interval) == Some(0));
                ballot.keep_items(
                    &of.collect::<Vec<bool>>(),
                    items.as_deref(),
                    &format!("steps={interval}"),
                )?;
            }
            Self::KeepEverySeconds { seconds, items } => {
                ballot.keep_items(
                    &apart(&steps, *seconds),
                    items.as_deref(),
                    &format!("seconds={seconds}"),
                )?;
            }
            Self::KeepBest { n, metric, mode } => {
                let values = steps.iter().map(|candidate| (candidate.step, candidate.metrics.get(metric)));
                for (at, value) in rank::ranked(values, *mode, count(*n)) {
                    ballot.keep(at, KeptItems::All, || {
                        let value = match value {
                            Some(value) => format!("{metric}={value}"),
                            None => format!("no {metric} yet"),
                        };
                        format!("keep_best({n}, {metric:?}, {mode}): {value}")
                    });
                }
            }
            Self::KeepSteps { steps: kept } => {
                for at in all {
                    if steps.get(at).is_some_and(|candidate| kept.contains(&candidate.step)) {
                        ballot.keep(at, KeptItems::All, || "keep_steps".to_owned());
                    }
                }
            }
            Self::KeepNewerThan { seconds } => {
                for (at, candidate) in steps.iter().enumerate() {
                    // A clock that was set back makes a step younger, so nothing is deleted too
                    // early.
                    #[expect(clippy::cast_precision_loss, reason = "ages need no more precision")]
                    let age = (now.saturating_sub(candidate.committed_unix_ns)) as f64 / 1e9;
                    if age < *seconds {
                        ballot.keep(at, KeptItems::All, || format!("keep_newer_than({seconds} s)"));
                    }
                }
            }
            Self::Any { of } => of.iter().try_for_each(|part| part.vote(now, ballot))?,
        }
        Ok(())
    }
}

/// The votes of all rules on all steps.
struct Ballot<'a> {
    /// The steps, by number.
    steps: Vec<&'a Candidate<'a>>,
    /// One tally for each step.
    tallies: Vec<Tally>,
    /// True if reasons are wanted.
    explained: bool,
}

/// The votes of all rules on one step.
#[derive(Clone, Default)]
struct Tally {
    /// All of it.
    whole: bool,
    /// The items that rules keep.
    items: BTreeSet<String>,
    reasons: Vec<String>,
}

impl<'a> Ballot<'a> {
    fn new(steps: &'a [Candidate<'a>], explained: bool) -> Self {
        let mut steps: Vec<&Candidate<'_>> = steps.iter().collect();
        steps.sort_by_key(|candidate| candidate.step);
        let tallies = vec![Tally::default(); steps.len()];
        Self { steps, tallies, explained }
    }

    fn keep(&mut self, at: usize, items: KeptItems, reason: impl FnOnce() -> String) {
        let Some(tally) = self.tallies.get_mut(at) else { return };
        match items {
            KeptItems::All => tally.whole = true,
            KeptItems::Only(items) => tally.items.extend(items),
        }
        if self.explained {
            tally.reasons.push(reason());
        }
    }

    /// Keeps the `wanted` steps: whole, or only the items that a glob matches.
    fn keep_items(&mut self, wanted: &[bool], items: Option<&[String]>, interval: &str) -> Result<()> {
        let matcher = items.map(matcher).transpose()?;
        let rule = || match items {
            None => format!("keep_every({interval})"),
            Some(globs) => format!("keep_every({interval}, items={globs:?})"),
        };
        for (at, candidate) in self.steps.clone().into_iter().enumerate() {
            if wanted.get(at) != Some(&true) {
                continue;
            }
            let Some(globs) = &matcher else {
                self.keep(at, KeptItems::All, rule);
                continue;
            };
            let items = candidate.items.list();
            let of_it = items.iter().filter(|item| globs.selects(item).unwrap_or(false));
            let kept: BTreeSet<String> = of_it.map(|&item| item.to_owned()).collect();
            if kept.is_empty() {
                // A rule for a part of a step never means to delete all of it. Probably the glob
                // has a typo, or the items have other names.
                self.keep(at, KeptItems::All, || {
                    let have = items.join(", ");
                    format!("{}: none of its items ({have}) matches, so it is kept whole", rule())
                });
            } else {
                self.keep(at, KeptItems::Only(kept), rule);
            }
        }
        Ok(())
    }

    fn plan(self) -> RetentionPlan {
        let decided = self.steps.into_iter().zip(self.tallies);
        RetentionPlan { steps: decided.map(|(step, tally)| (step.step, tally.decide(step))).collect() }
    }
}

impl Tally {
    fn decide(self, candidate: &Candidate<'_>) -> StepDecision {
        let Self { whole, items: kept, reasons } = self;
        if !whole && kept.is_empty() {
            return StepDecision::Delete { reason: "no rule keeps it".to_owned() };
        }
        let has_more = !whole && candidate.items.list().into_iter().any(|item| !kept.contains(item));
        StepDecision::Keep { items: if has_more { KeptItems::Only(kept) } else { KeptItems::All }, reasons }
    }
}

/// Selects the oldest step, and each that was committed at least so many seconds after the last
/// selected one. The selection does not change when the others are deleted.
fn apart(steps: &[&Candidate<'_>], seconds: f64) -> Vec<bool> {
    let mut last: Option<i64> = None;
    let is_due = |candidate: &&Candidate<'_>| {
        let at = candidate.committed_unix_ns;
        #[expect(clippy::cast_precision_loss, reason = "intervals need no more precision")]
        let is_due = last.is_none_or(|last| at.saturating_sub(last) as f64 / 1e9 >= seconds);
        if is_due {
            last = Some(at);
        }
        is_due
    };
    steps.iter().map(is_due).collect()
}

fn count(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// Selects items as a restore selects leaves: `params/**` is all of the item `params`.
pub(crate) fn matcher(globs: &[String]) -> Result<GlobList> {
    GlobList::new(globs.iter().map(|glob| glob.strip_suffix("/**").unwrap_or(glob)))
        .map_err(|error| Error::Invalid(format!("a glob of items: {error}")))
}

#[cfg(any(test, feature = "test-support"))]
mod testing;
#[cfg(test)]
mod tests;
