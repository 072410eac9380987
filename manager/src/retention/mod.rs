//! Retention: which steps stay, and what of them. Small pure objects: committed steps in, an explained plan out.
//!
//! * Only committed steps are counted, ordered by their number.
//! * The newest committed step always stays whole, whatever the policy says.
//! * A union (`|`) keeps what any of its parts keeps; a step that one part keeps whole and another thins stays whole.
//! * Nothing is kept less than was asked: [`Retention::KeepBest`] counts steps without the metric only where there are not enough with it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::BitOr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

mod rank;

pub use rank::{Mode, best};

/// A committed step, as retention sees it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Candidate {
    /// Its number.
    pub step: u64,
    /// When it was committed: nanoseconds since 1970.
    pub committed_unix_ns: i64,
    /// Its metrics, those that came after the commit included.
    pub metrics: BTreeMap<String, f64>,
    /// The names of its items that are still there.
    pub items: Vec<String>,
    /// Whether this process holds it (`hold`).
    pub held: bool,
}

/// See the module documentation.
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
    /// Steps divisible by `steps`; with `items`, only the items that a glob matches: the rest is *thinned* away.
    KeepEvery {
        /// The interval; at least 1.
        steps: u64,
        /// Globs over item names; `None`: the whole step.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        items: Option<Vec<String>>,
    },
    /// The oldest step, and each that was committed at least so many seconds after the one that this rule kept before it; of them only `items`, as above.
    KeepEverySeconds {
        /// The interval in seconds.
        seconds: f64,
        /// Globs over item names; `None`: the whole step.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        items: Option<Vec<String>>,
    },
    /// The best `n` by a metric. NaN is worst; of equals the later is better.
    KeepBest {
        /// How many.
        n: u64,
        /// The metric.
        metric: String,
        /// Which end is best.
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
    /// What any of them keeps.
    Any {
        /// The parts.
        of: Vec<Retention>,
    },
}

/// What stays of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Items {
    /// All of it.
    All,
    /// These items.
    Only(BTreeSet<String>),
}

/// What happens to a step, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "decision", rename_all = "snake_case")]
pub enum Decision {
    /// It stays.
    Keep {
        /// What of it.
        items: Items,
        /// One reason per rule that keeps it.
        reasons: Vec<String>,
    },
    /// It goes.
    Delete {
        /// Why.
        reason: String,
    },
}

/// A plan, which explains itself: one decision per step, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// The decisions.
    pub steps: BTreeMap<u64, Decision>,
}

impl Plan {
    /// The steps that go, oldest first.
    pub fn deleted(&self) -> impl Iterator<Item = u64> + '_ {
        self.steps.iter().filter(|(_, d)| matches!(d, Decision::Delete { .. })).map(|(&step, _)| step)
    }

    /// The steps that stay in part, and what of them.
    pub fn thinned(&self) -> impl Iterator<Item = (u64, &BTreeSet<String>)> + '_ {
        self.steps.iter().filter_map(|(&step, decision)| match decision {
            Decision::Keep { items: Items::Only(items), .. } => Some((step, items)),
            _ => None,
        })
    }

    /// The steps that stay, wholly or in part.
    pub fn kept(&self) -> impl Iterator<Item = u64> + '_ {
        self.steps.iter().filter(|(_, d)| matches!(d, Decision::Keep { .. })).map(|(&step, _)| step)
    }
}

/// What one rule keeps of one step.
struct Vote {
    items: Items,
    reason: String,
}

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

    /// Of the steps divisible by `steps`, the items that a glob matches.
    pub fn keep_every_items(steps: u64, items: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self::KeepEvery { steps, items: Some(items.into_iter().map(Into::into).collect()) }
    }

    /// The best `n` by a metric.
    pub fn keep_best(n: u64, metric: impl Into<String>, mode: Mode) -> Self {
        Self::KeepBest { n, metric: metric.into(), mode }
    }

    /// Refuses what can never work.
    pub fn check(&self) -> Result<()> {
        match self {
            Self::KeepEvery { steps: 0, .. } => {
                Err(Error::Invalid("keep_every(steps=0) names no step; pass at least 1".to_owned()))
            }
            Self::KeepEverySeconds { seconds, .. } if !(seconds.is_finite() && *seconds > 0.0) => {
                Err(Error::Invalid(format!(
                    "keep_every(seconds={seconds}) is no interval; pass a finite number of seconds, more than 0"
                )))
            }
            Self::KeepEvery { items: Some(globs), .. }
            | Self::KeepEverySeconds { items: Some(globs), .. } => {
                if globs.is_empty() {
                    return Err(Error::Invalid(
                        "keep_every(items=[]) would keep steps without anything in them; leave items out to keep them whole"
                            .to_owned(),
                    ));
                }
                matcher(globs).map(drop)
            }
            Self::KeepNewerThan { seconds } if !(seconds.is_finite() && *seconds >= 0.0) => {
                Err(Error::Invalid(format!(
                    "keep_newer_than({seconds}) is no age; pass a finite number of seconds, at least 0"
                )))
            }
            Self::Any { of } => of.iter().try_for_each(Self::check),
            _ => Ok(()),
        }
    }

    /// The first [`Retention::KeepBest`] in it: what `best_step` means when it is not told.
    pub fn metric(&self) -> Option<(&str, Mode)> {
        match self {
            Self::KeepBest { metric, mode, .. } => Some((metric, *mode)),
            Self::Any { of } => of.iter().find_map(Self::metric),
            _ => None,
        }
    }

    /// What stays and what goes. `steps` are the committed ones, in any order.
    pub fn plan(&self, steps: &[Candidate], now_unix_ns: i64) -> Result<Plan> {
        self.check()?;
        let mut sorted: Vec<&Candidate> = steps.iter().collect();
        sorted.sort_by_key(|candidate| candidate.step);
        let mut votes: BTreeMap<u64, Vec<Vote>> =
            sorted.iter().map(|candidate| (candidate.step, Vec::new())).collect();
        if let Some(newest) = sorted.last() {
            keep(&mut votes, newest.step, Items::All, "the newest committed step always stays".to_owned());
        }
        for candidate in &sorted {
            if candidate.held {
                keep(&mut votes, candidate.step, Items::All, "it is held".to_owned());
            }
        }
        self.vote(&sorted, now_unix_ns, &mut votes)?;
        let steps = votes.into_iter().map(|(step, votes)| (step, decide(votes, &sorted, step))).collect();
        Ok(Plan { steps })
    }

    fn vote(&self, sorted: &[&Candidate], now: i64, votes: &mut BTreeMap<u64, Vec<Vote>>) -> Result<()> {
        match self {
            Self::KeepAll => {
                for candidate in sorted {
                    keep(votes, candidate.step, Items::All, "keep_all".to_owned());
                }
            }
            Self::KeepLatest { n } => {
                for candidate in sorted.iter().rev().take(count(*n)) {
                    keep(votes, candidate.step, Items::All, format!("keep_latest({n})"));
                }
            }
            Self::KeepEvery { steps, items } => {
                let of = sorted.iter().filter(|c| c.step.checked_rem(*steps) == Some(0));
                keep_items(votes, of.copied(), items.as_deref(), &format!("steps={steps}"))?;
            }
            Self::KeepEverySeconds { seconds, items } => {
                let of = apart(sorted, *seconds);
                keep_items(votes, of.into_iter(), items.as_deref(), &format!("seconds={seconds}"))?;
            }
            Self::KeepBest { n, metric, mode } => {
                for candidate in rank::ranked(sorted, metric, *mode).into_iter().take(count(*n)) {
                    let value = match candidate.metrics.get(metric) {
                        Some(value) => format!("{metric}={value}"),
                        None => format!("no {metric} yet"),
                    };
                    keep(
                        votes,
                        candidate.step,
                        Items::All,
                        format!("keep_best({n}, {metric:?}, {mode}): {value}"),
                    );
                }
            }
            Self::KeepSteps { steps } => {
                for &step in steps {
                    keep(votes, step, Items::All, "keep_steps".to_owned());
                }
            }
            Self::KeepNewerThan { seconds } => {
                for candidate in sorted {
                    // A clock that was set back makes a step younger, never older: nothing is deleted too early.
                    #[expect(clippy::cast_precision_loss, reason = "a microsecond more or less is no age")]
                    let age = (now.saturating_sub(candidate.committed_unix_ns)) as f64 / 1e9;
                    if age < *seconds {
                        keep(votes, candidate.step, Items::All, format!("keep_newer_than({seconds} s)"));
                    }
                }
            }
            Self::Any { of } => of.iter().try_for_each(|part| part.vote(sorted, now, votes))?,
        }
        Ok(())
    }
}

/// The oldest step, and each that was committed at least so many seconds after the one that was taken before it. What is taken stays taken when the others
/// are gone.
fn apart<'a>(sorted: &[&'a Candidate], seconds: f64) -> Vec<&'a Candidate> {
    let mut taken: Vec<&Candidate> = Vec::new();
    for &candidate in sorted {
        #[expect(clippy::cast_precision_loss, reason = "a microsecond more or less is no interval")]
        let is_due = taken.last().is_none_or(|last| {
            candidate.committed_unix_ns.saturating_sub(last.committed_unix_ns) as f64 / 1e9 >= seconds
        });
        if is_due {
            taken.push(candidate);
        }
    }
    taken
}

/// Keeps steps whole, or the items of them that a glob matches.
fn keep_items<'a>(
    votes: &mut BTreeMap<u64, Vec<Vote>>,
    steps: impl Iterator<Item = &'a Candidate>,
    items: Option<&[String]>,
    interval: &str,
) -> Result<()> {
    let matcher = items.map(matcher).transpose()?;
    for candidate in steps {
        let rule = match items {
            None => format!("keep_every({interval})"),
            Some(globs) => format!("keep_every({interval}, items={globs:?})"),
        };
        let Some(globs) = &matcher else {
            keep(votes, candidate.step, Items::All, rule);
            continue;
        };
        let kept: BTreeSet<String> =
            candidate.items.iter().filter(|item| globs.is_match(item)).cloned().collect();
        if kept.is_empty() {
            // A rule that says "keep a part" never means "delete it all": more likely the glob is mistyped, or the state's items have other names.
            let have = candidate.items.join(", ");
            let reason = format!("{rule}: none of its items ({have}) matches, so it is kept whole");
            keep(votes, candidate.step, Items::All, reason);
        } else {
            keep(votes, candidate.step, Items::Only(kept), rule);
        }
    }
    Ok(())
}

fn keep(votes: &mut BTreeMap<u64, Vec<Vote>>, step: u64, items: Items, reason: String) {
    if let Some(votes) = votes.get_mut(&step) {
        votes.push(Vote { items, reason });
    }
}

fn decide(votes: Vec<Vote>, sorted: &[&Candidate], step: u64) -> Decision {
    if votes.is_empty() {
        return Decision::Delete { reason: "no rule keeps it".to_owned() };
    }
    let mut kept = BTreeSet::new();
    let mut all = false;
    let mut reasons = Vec::with_capacity(votes.len());
    for vote in votes {
        match vote.items {
            Items::All => all = true,
            Items::Only(items) => kept.extend(items),
        }
        reasons.push(vote.reason);
    }
    let has_more = sorted
        .iter()
        .find(|candidate| candidate.step == step)
        .is_some_and(|candidate| candidate.items.iter().any(|item| !kept.contains(item)));
    let items = if all || !has_more { Items::All } else { Items::Only(kept) };
    Decision::Keep { items, reasons }
}

fn count(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

fn matcher(globs: &[String]) -> Result<globset::GlobSet> {
    let mut set = globset::GlobSetBuilder::new();
    for glob in globs {
        let glob = globset::GlobBuilder::new(glob)
            .literal_separator(true)
            .build()
            .map_err(|error| Error::Invalid(format!("keep_every(items=…): {error}")))?;
        set.add(glob);
    }
    set.build().map_err(|error| Error::Invalid(format!("keep_every(items=…): {error}")))
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

#[cfg(test)]
mod tests;
