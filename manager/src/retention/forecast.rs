//! The number of saves until a disk is full, under a retention rule.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{Candidate, KeptItems, Metrics, Names, Retention, StepDecision};
use crate::error::Result;

/// The most decisions that one forecast makes. Beyond them it extends the growth as a line.
const MAX_DECISIONS: usize = 1 << 19;

/// A committed step and the bytes of its items.
#[derive(Clone, Debug, Deserialize)]
pub struct SizedStep {
    /// Its number.
    pub step: u64,
    /// The time of its commit, in nanoseconds since 1970.
    pub committed_unix_ns: i64,
    /// The bytes of its items, by name.
    pub items: BTreeMap<String, u64>,
    /// Its metrics.
    pub metrics: BTreeMap<String, f64>,
}

/// The saves to come: all as large as the newest step, and without metrics.
#[derive(Clone, Copy, Debug)]
pub struct RegularSaves {
    /// Steps from one save to the next.
    pub steps: u64,
    /// Nanoseconds from one save to the next.
    pub ns: i64,
}

impl Retention {
    /// Returns the number of saves that fit into `free` bytes, or `None` if all of them do. A save
    /// needs its space before retention deletes older steps. `kept` are the present steps, by
    /// number.
    #[expect(clippy::cast_precision_loss, reason = "forecasts need no more precision")]
    pub fn saves_until_full(
        &self,
        mut kept: Vec<SizedStep>,
        every: RegularSaves,
        free: u64,
    ) -> Result<Option<f64>> {
        let Some(mut next) = kept.last().cloned() else { return Ok(None) };
        next.metrics.clear();
        let size: i128 = next.items.values().map(|&bytes| i128::from(bytes)).sum();
        let names = self.metrics();
        let mut free = i128::from(free);
        let mut history = Vec::new();
        let mut decisions = 0;
        while decisions <= MAX_DECISIONS {
            if size > free {
                return Ok(Some(history.len() as f64));
            }
            next.step = next.step.saturating_add(every.steps);
            next.committed_unix_ns = next.committed_unix_ns.saturating_add(every.ns);
            kept.push(next.clone());
            decisions += kept.len();
            free += self.reclaim(&mut kept, &names, next.committed_unix_ns)? - size;
            history.push(free);
        }
        let half = history.len() / 2;
        let earlier = history.get(half).copied().unwrap_or(free);
        let growth = (earlier - free) as f64 / (history.len() - 1 - half).max(1) as f64;
        let saves = (history.len() + 1) as f64 + (free - size) as f64 / growth;
        Ok((growth > 0.0).then_some(saves))
    }

    /// Applies the rule to the steps. Returns the freed bytes.
    fn reclaim(&self, kept: &mut Vec<SizedStep>, names: &[String], now: i64) -> Result<i128> {
        let candidates: Vec<Candidate<'_>> = kept
            .iter()
            .map(|step| Candidate {
                step: step.step,
                committed_unix_ns: step.committed_unix_ns,
                metrics: Metrics {
                    names,
                    values: names.iter().map(|name| step.metrics.get(name).copied()).collect(),
                },
                items: Names::Given(step.items.keys().map(String::as_str).collect()),
                held: false,
            })
            .collect();
        let plan = self.changes(&candidates, now)?;
        let mut freed = 0;
        kept.retain_mut(|step| match plan.steps.get(&step.step) {
            Some(StepDecision::Delete { .. }) => {
                freed += step.items.values().map(|&bytes| i128::from(bytes)).sum::<i128>();
                false
            }
            Some(StepDecision::Keep { items: KeptItems::Only(items), .. }) => {
                step.items.retain(|name, bytes| {
                    let stays = items.contains(name);
                    freed += if stays { 0 } else { i128::from(*bytes) };
                    stays
                });
                true
            }
            _ => true,
        });
        Ok(freed)
    }
}
