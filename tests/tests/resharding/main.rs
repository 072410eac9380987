//! Random layouts on both sides: what several ranks save of tensors that are cut, replicated,
//! flattened, padded and strided in any way is refused or stored once, and read by any other ranks
//! bit for bit. The oracle is ndarray: whole tensors, and slices of them.
//!
//! One seed is one case. A seed that fails is printed, and `STEPWELL_SEED` runs it alone;
//! `STEPWELL_LONG` runs a hundred times as many.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::indexing_slicing,
    reason = "tests end by them"
)]

mod balance;
mod dice;
mod local;
mod reading;
mod refusals;
mod round_trip;
mod states;
mod tensors;
mod world;

use std::panic::{catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

/// Runs so many cases, each by its seed.
fn cases(count: u64, case: fn(u64)) {
    if let Ok(seed) = std::env::var("STEPWELL_SEED") {
        return case(seed.parse().unwrap());
    }
    let count = if std::env::var_os("STEPWELL_LONG").is_some() { 100 * count } else { count };
    let next = &AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(move || {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= count {
                        return;
                    }
                    if let Err(failure) = catch_unwind(|| case(seed)) {
                        eprintln!("STEPWELL_SEED={seed}");
                        next.store(u64::MAX / 2, Ordering::Relaxed);
                        resume_unwind(failure);
                    }
                }
            });
        }
    });
}
