//! The order of steps by a metric.

use std::cmp::Ordering;
use std::fmt;

use serde::{Deserialize, Serialize};

/// The best end of a metric.
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

/// Returns the best `n` of some steps, given as (number, value). The result is (index, value), best
/// first: real values, then NaN, then no value. Of equals, the later comes first.
pub(super) fn ranked(
    steps: impl Iterator<Item = (u64, Option<f64>)>,
    mode: Mode,
    n: usize,
) -> Vec<(usize, Option<f64>)> {
    let mut ranked: Vec<(usize, (u64, Option<f64>))> = steps.enumerate().collect();
    let order = |(_, a): &(usize, (u64, Option<f64>)), (_, b): &(usize, (u64, Option<f64>))| {
        compare(a.1, b.1, mode).then_with(|| b.0.cmp(&a.0))
    };
    if n < ranked.len() {
        if n > 0 {
            ranked.select_nth_unstable_by(n - 1, order);
        }
        ranked.truncate(n);
    }
    ranked.sort_unstable_by(order);
    ranked.into_iter().map(|(at, (_, value))| (at, value)).collect()
}

/// Returns the best of some steps, given as (number, value). NaN never is the best. `None` if no
/// step has a real value.
pub fn best(steps: impl IntoIterator<Item = (u64, Option<f64>)>, mode: Mode) -> Option<u64> {
    let known = steps.into_iter().filter(|(_, value)| value.is_some_and(|value| !value.is_nan()));
    known.min_by(|a, b| compare(a.1, b.1, mode).then_with(|| b.0.cmp(&a.0))).map(|(step, _)| step)
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
