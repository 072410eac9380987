//! After any crash of a root: committed steps are complete, uncommitted ones are invisible, nothing
//! else is lost, nothing is left behind.
//!
//! Each scenario drives the real manager over a simulated disk; then every crash state of it is
//! recovered and checked, and every crash state of those recoveries. The state is tiny, the
//! protocol is the real one.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod changes;
mod conversions;
mod copies;
mod failures;
mod kills;
mod machines;
mod mutants;
mod processes;
mod repair;
mod retention;
mod saves;
mod singular;
mod singular_leftovers;
mod stalls;
mod tiers;
mod windows;

use std::time::Instant;

use stepwell_manager::{Options, Retention};
use stepwell_tests::crash::{Options as Crash, Profile, explore_nested};
use stepwell_tests::steps::check::Checker;
use stepwell_tests::steps::run::{Run, options};

/// Temporaries and trash are only ever deleted: nobody reads their bytes.
fn is_leftover(name: &str) -> bool {
    name.starts_with(".tmp-") || name.starts_with(".trash-")
}

/// Returns the first bound, or the second one with `STEPWELL_LONG`.
fn bound(short: usize, long: usize) -> usize {
    if std::env::var_os("STEPWELL_LONG").is_some() { long } else { short }
}

fn crash(profile: Profile) -> Crash {
    let (cap, nested_cap) = (bound(700, 10_000), bound(60, 600) as u64);
    Crash { unread: Some(is_leftover), cap, nested_cap, ..Crash::default().profile(profile) }
}

/// For sweeps, which explore a hundred histories that differ in one operation.
fn quick() -> Crash {
    Crash { cap: bound(50, 1000), ..crash(Profile::PosixMinimal) }
}

fn keeping(retention: Retention) -> Options {
    Options { retention, ..options() }
}

/// Explores every crash state of a scenario, with crashes inside the recovery, under both profiles.
fn survives(run: &Run) {
    let log = run.disk.log();
    for profile in [Profile::PosixMinimal, Profile::OrderedMetadata] {
        let mut checker = Checker::new(options());
        let begin = Instant::now();
        match explore_nested(&log, &crash(profile), |disk, marks| checker.check(disk, marks)) {
            Ok((outer, inner)) => {
                let effects = log.records.len();
                let elapsed = begin.elapsed();
                println!(
                    "{effects} effects, {profile:?}: {outer}; inside recoveries: {inner}; {elapsed:.1?}"
                );
                assert!(outer.distinct > 1);
            }
            Err(failure) => panic!("{profile:?}: {failure}\nthe scenario:\n{log}"),
        }
    }
}
