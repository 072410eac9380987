//! Which of two steps is better by a metric.

use std::cmp::Ordering;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::Candidate;

/// Which end of a metric is best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Small is good (a loss).
    Min,
    /// Large is good (an accuracy).
    Max,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Min => "min",
            Self::Max => "max",
        })
    }
}

/// All steps, best first: real values, then NaN, then those without the metric; of equals the later first.
pub(super) fn ranked<'a>(steps: &[&'a Candidate], metric: &str, mode: Mode) -> Vec<&'a Candidate> {
    let mut ranked = steps.to_vec();
    ranked.sort_by(|a, b| {
        compare(a.metrics.get(metric), b.metrics.get(metric), mode).then_with(|| b.step.cmp(&a.step))
    });
    ranked
}

/// The best step that has the metric; `None` where none has.
pub fn best<'a>(steps: &'a [Candidate], metric: &str, mode: Mode) -> Option<&'a Candidate> {
    let with_metric: Vec<&Candidate> = steps.iter().filter(|c| c.metrics.contains_key(metric)).collect();
    ranked(&with_metric, metric, mode).first().copied()
}

fn compare(a: Option<&f64>, b: Option<&f64>, mode: Mode) -> Ordering {
    let class = |value: Option<&f64>| match value {
        Some(value) if !value.is_nan() => 0,
        Some(_) => 1,
        None => 2,
    };
    class(a).cmp(&class(b)).then_with(|| {
        let order = a.partial_cmp(&b).unwrap_or(Ordering::Equal);
        match mode {
            Mode::Min => order,
            Mode::Max => order.reverse(),
        }
    })
}
