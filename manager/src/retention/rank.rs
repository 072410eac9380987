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

/// The best `n` of some steps, best first, each by its place and its value: real values, then NaN,
/// then those without the metric; of equals the later first.
pub(super) fn ranked(
    steps: &[&Candidate<'_>],
    metric: &str,
    mode: Mode,
    n: usize,
) -> Vec<(usize, Option<f64>)> {
    // Looked up once: a comparison is asked for many times.
    let values = steps.iter().map(|candidate| candidate.metrics.get(metric));
    let mut ranked: Vec<(usize, Option<f64>, u64)> =
        values.zip(steps).enumerate().map(|(at, (value, candidate))| (at, value, candidate.step)).collect();
    let order = |a: &(usize, Option<f64>, u64), b: &(usize, Option<f64>, u64)| {
        compare(a.1, b.1, mode).then_with(|| b.2.cmp(&a.2))
    };
    if n < ranked.len() {
        if n > 0 {
            ranked.select_nth_unstable_by(n - 1, order);
        }
        ranked.truncate(n);
    }
    ranked.sort_unstable_by(order);
    ranked.into_iter().map(|(at, value, _)| (at, value)).collect()
}

/// The best step that has the metric; `None` where none has.
pub fn best<'a, 'b>(steps: &'b [Candidate<'a>], metric: &str, mode: Mode) -> Option<&'b Candidate<'a>> {
    let steps: Vec<&Candidate<'a>> = steps.iter().collect();
    match ranked(&steps, metric, mode, 1).first() {
        Some(&(at, Some(_))) => steps.get(at).copied(),
        _ => None,
    }
}

fn compare(a: Option<f64>, b: Option<f64>, mode: Mode) -> Ordering {
    let class = |value: Option<f64>| match value {
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
