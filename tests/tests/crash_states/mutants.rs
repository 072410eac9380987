//! The checker, checked: every fsync and rename of the protocol left out, every two neighbours swapped.

use stepwell_core::io::simulated::SimDisk;
use stepwell_manager::Retention;
use stepwell_tests::crash::mutants::{Explained, judge};
use stepwell_tests::crash::{Options, Profile};
use stepwell_tests::steps::check::Checker;
use stepwell_tests::steps::run::{Run, close, options};

use super::{crash, keeping};

/// Judges every mutant of what a scenario did.
fn mutants_are_caught(run: &Run, explained: &[Explained]) {
    let log = run.disk.log();
    let options_ = Options { ..crash(Profile::PosixMinimal) };
    let mut checker = Checker::new(options());
    let report = judge(&log, &options_, explained, |disk: &SimDisk, marks| checker.check(disk, marks));
    let report = report.unwrap_or_else(|failure| panic!("{failure}\nthe scenario:\n{log}"));
    println!("{report}");
    assert_eq!(report.survivors(), Vec::<&str>::new());
    assert_eq!(report.unused, Vec::<&str>::new());
}

#[test]
fn of_a_save() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(options()).unwrap();
    run.save(&manager, 2, "a").unwrap();
    close(&manager).unwrap();
    mutants_are_caught(&run, &[]);
}

#[test]
fn of_a_save_under_retention() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(keeping(Retention::keep_latest(1))).unwrap();
    run.mark("may go 1 once 2");
    run.save(&manager, 2, "a").unwrap();
    run.mark("gone 1");
    close(&manager).unwrap();
    mutants_are_caught(&run, &[]);
}
