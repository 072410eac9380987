//! The promises at the time of the power cut: the marks of a scenario, added up.
//!
//! | mark | the scenario |
//! |---|---|
//! | `begin N t` | starts to save step N, as attempt `t` |
//! | `replace N t` | starts to save over the step N that is there |
//! | `committed N t` | was told that it is committed: from here on it stays, bit for bit |
//! | `seen N t` | a writer has seen it, after it opened the root: from here on it stays, as `committed` |
//! | `failed N t` | was told that it is not: it is never seen |
//! | `uncertain N t` | was told that nobody knows |
//! | `may go N` | asks for something that takes N away |
//! | `may go N once M` | starts a save of M, after which retention takes N away |
//! | `may go N after M` | asks for something that takes M away, and then N |
//! | `gone N` | was told that N is away: it never comes back |
//! | `unrecorded N` | takes N away on a full disk, where that may not be recorded |
//! | `may thin N once M` | starts a save of M, after which retention thins N to `params` |
//! | `thinned N` | was told that N is thinned |
//! | `branch B N t` | was told that N was moved to branch B |
//! | `metric N name v` | was told that this metric is recorded |
//! | `opened ID E` | was told that it is the writer: the root keeps this id, and never goes back behind epoch E |
//! | `quarantined NAME HASH` | has put something there that has a step's name and is none: it stays, whole, there or set aside |

use std::collections::{BTreeMap, BTreeSet};

use super::states;
use crate::crash::Marks;

/// The possible and the required states of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Promise {
    /// Attempts that may be seen under this number.
    pub may: BTreeSet<String>,
    /// It must be seen, as one of `may`, unless something may have taken it away.
    pub must: bool,
    /// The operations that may have removed it.
    pub may_go: Vec<MayGo>,
    /// It may have been thinned since.
    pub may_thin: bool,
    /// It must have been thinned.
    pub thinned: bool,
    /// Metrics that must be there as long as it is.
    pub metrics: BTreeMap<String, String>,
}

impl Promise {
    /// True if a deletion or a rewind, and no retention, may take it away, and records that.
    fn is_removed_by_user(&self) -> bool {
        let is_unrecorded = |may_go: &MayGo| matches!(may_go, MayGo::Once(_) | MayGo::Unrecorded);
        !self.may_go.is_empty() && !self.may_go.iter().any(is_unrecorded)
    }

    /// Checks that the attempt under the name of `step` may be visible, complete or thinned.
    pub fn allows(&self, step: u64, tag: &str, items: &BTreeSet<String>) -> Result<(), String> {
        if !self.may.contains(tag) {
            return Err(format!("I4, I10: step {step} is attempt {tag}, none of {:?}", self.may));
        }
        let whole = states::ITEMS.iter().all(|item| items.contains(*item));
        let thinned = items.iter().eq(["params"]);
        if (whole && !self.thinned) || (thinned && self.may_thin) {
            return Ok(());
        }
        Err(format!("I5: step {step} has the items {items:?}"))
    }
}

/// When a step may be away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MayGo {
    /// At any time.
    Now,
    /// At any time, on a full disk, where that may not be recorded.
    Unrecorded,
    /// Once another step is there.
    Once(u64),
    /// Once another step is away.
    After(u64),
}

/// Everything that was promised.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Promises {
    /// By step.
    pub steps: BTreeMap<u64, Promise>,
    /// Steps that were deleted or rewound, and are gone.
    pub removed: BTreeSet<u64>,
    /// Branches: name, step, attempt.
    pub branches: BTreeSet<(String, u64, String)>,
    /// The root's id, and the last writer's epoch.
    pub opened: Option<(String, u64)>,
    /// Directories that are no steps, with the hash of what they hold.
    pub quarantined: BTreeMap<String, u64>,
}

impl Promises {
    /// Adds up marks; one that is none of the table is an error of the scenario.
    pub fn of(marks: &Marks) -> Result<Self, String> {
        let mut promises = Self::default();
        for mark in marks.iter() {
            let words: Vec<&str> = mark.split(' ').collect();
            promises.add(&words).ok_or_else(|| format!("a mark that means nothing: {mark}"))?;
        }
        Ok(promises)
    }

    /// True if of what must be there something is missing, where these steps are seen.
    pub fn nothing_is_lost(&self, seen: &BTreeSet<u64>) -> Result<(), String> {
        for (step, promise) in self.steps.iter().filter(|(_, promise)| promise.must) {
            let taken = promise.may_go.iter().any(|may_go| match may_go {
                MayGo::Now | MayGo::Unrecorded => true,
                MayGo::Once(other) => seen.contains(other),
                MayGo::After(other) => !seen.contains(other),
            });
            if !seen.contains(step) && !taken {
                return Err(format!("I2, I3, I5: committed step {step} is lost; there are {seen:?}"));
            }
        }
        Ok(())
    }

    /// Returns the steps that were deleted or rewound, where these are seen.
    pub fn removed(&self, seen: &BTreeSet<u64>) -> BTreeSet<u64> {
        let missing = self
            .steps
            .iter()
            .filter(|(step, promise)| promise.must && promise.is_removed_by_user() && !seen.contains(step));
        missing.map(|(&step, _)| step).chain(self.removed.iter().copied()).collect()
    }

    fn add(&mut self, words: &[&str]) -> Option<()> {
        match *words {
            ["begin" | "replace", step, tag] => {
                self.step(step)?.may.insert(tag.into());
            }
            ["committed", step, tag] => {
                // A step that is saved again owes nothing to its predecessor.
                let may = [tag.into()].into();
                *self.step(step)? = Promise { may, must: true, ..Promise::default() };
            }
            // What was taken away before stays as it was: a step may be seen that retention then
            // takes.
            ["seen", step, tag] => {
                let promise = self.step(step)?;
                (promise.may, promise.must) = ([tag.into()].into(), true);
                promise.may_go.clear();
            }
            ["failed", step, tag] => {
                self.step(step)?.may.remove(tag);
            }
            ["uncertain", ..] => {}
            ["may", "go", step] => self.step(step)?.may_go.push(MayGo::Now),
            ["may", "go", step, "once", other] => {
                let other = other.parse().ok()?;
                self.step(step)?.may_go.push(MayGo::Once(other));
            }
            ["may", "go", step, "after", other] => {
                let other = other.parse().ok()?;
                self.step(step)?.may_go.push(MayGo::After(other));
            }
            ["opened", id, epoch] => self.opened = Some((id.into(), epoch.parse().ok()?)),
            ["gone", step] => {
                let promise = std::mem::take(self.step(step)?);
                if promise.is_removed_by_user() {
                    self.removed.insert(step.parse().ok()?);
                }
            }
            ["unrecorded", step] => self.step(step)?.may_go.push(MayGo::Unrecorded),
            ["may", "thin", step, "once", _] => self.step(step)?.may_thin = true,
            ["thinned", step] => {
                let promise = self.step(step)?;
                (promise.may_thin, promise.thinned) = (true, true);
            }
            ["branch", branch, step, tag] => {
                self.branches.insert((branch.into(), step.parse().ok()?, tag.into()));
            }
            ["metric", step, name, value] => {
                self.step(step)?.metrics.insert(name.into(), value.into());
            }
            ["quarantined", name, hash] => {
                self.quarantined.insert(name.into(), hash.parse().ok()?);
            }
            _ => return None,
        }
        Some(())
    }

    fn step(&mut self, step: &str) -> Option<&mut Promise> {
        Some(self.steps.entry(step.parse().ok()?).or_default())
    }
}
