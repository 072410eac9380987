//! How long a save keeps its caller: `Capture::run` beside a plain parallel copy of the same bytes
//! into warm memory.
//!
//! ```text
//! cargo run --release --example capture_speed -- [slot MiB …]
//! ```
//!
//! The ring holds the whole state and nothing is written, so that only the copying is measured.
//! Both sides use the same sources; every memory is touched before the clock starts, and reused.
#![expect(clippy::cast_precision_loss, reason = "the numbers of a measurement are small")]

#[path = "support/mod.rs"]
mod support;

use std::sync::Arc;
use std::time::Instant;

use stepwell_core::Result;
use stepwell_core::save::prepare;
use stepwell_core::staging::StagingPool;
use support::{MIB, items, large, middle, small, sources};

const ROUNDS: usize = 9;

fn main() -> Result<()> {
    let mut slots: Vec<usize> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    if slots.is_empty() {
        slots.push(8);
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    println!("{threads} threads, median (fastest) of {ROUNDS}, milliseconds");
    for (name, sizes) in [("1 GiB, 300 tensors", large(1024)), ("20 000 leaves, 1-64 KiB", small())] {
        let sources = sources(&sizes);
        let bytes: usize = sizes.iter().sum();
        let mut warm = vec![1_u8; bytes];
        for &slot in &slots {
            let pool = StagingPool::new(bytes + bytes / 8 + 4 * slot * MIB, slot * MIB)?;
            let (mut plain, mut plan, mut run) = (Vec::new(), Vec::new(), Vec::new());
            for _ in 0..ROUNDS {
                plain.push(copy(&sources, &mut warm, threads));
                let (items, options) = items(&sources, threads)?;
                let started = Instant::now();
                let (capture, flush) = prepare(items, &pool, options)?;
                plan.push(started.elapsed().as_secs_f64() * 1e3);
                let started = Instant::now();
                let progress = capture.progress();
                capture.run()?;
                run.push(started.elapsed().as_secs_f64() * 1e3);
                assert_eq!(progress.snapshot().slots_waited, 0);
                drop(flush);
            }
            let (plain, plan, run) = (middle(plain), middle(plan), middle(run));
            println!(
                "{name}, {slot} MiB slots: plain copy {:.1} ({:.1}) = {:.1} GB/s; Capture::run {:.1} ({:.1}) = {:.1} GB/s, {:.2} x; prepare {:.1} ({:.1})",
                plain.0,
                plain.1,
                bytes as f64 / plain.0 / 1e6,
                run.0,
                run.1,
                bytes as f64 / run.0 / 1e6,
                run.0 / plain.0,
                plan.0,
                plan.1,
            );
        }
    }
    Ok(())
}

/// Every leaf into its place, each thread an equal part of the bytes.
fn copy(sources: &[Arc<Vec<u8>>], into: &mut [u8], threads: usize) -> f64 {
    let started = Instant::now();
    let share = into.len().div_ceil(threads);
    std::thread::scope(|scope| {
        let (mut rest, mut next) = (into, 0);
        for thread in 0..threads {
            let mut work = Vec::new();
            let mut bytes = 0;
            while next < sources.len() && (bytes < share || thread + 1 == threads) {
                let from = sources[next].as_slice();
                let (to, after) = std::mem::take(&mut rest).split_at_mut(from.len());
                work.push((from, to));
                (rest, next, bytes) = (after, next + 1, bytes + from.len());
            }
            let copy = move || work.into_iter().for_each(|(from, to)| to.copy_from_slice(from));
            if thread + 1 == threads { copy() } else { drop(scope.spawn(copy)) }
        }
    });
    started.elapsed().as_secs_f64() * 1e3
}
