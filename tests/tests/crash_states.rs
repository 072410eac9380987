//! Whatever a crash leaves of a root: what was committed is there, whole; what was not is not seen; nothing else is lost, nothing is left behind.

use stepwell_core::io::simulated::SimDisk;
use stepwell_manager::{Manager, Options, Retention};
use stepwell_tests::crash::{Options as Crash, Profile, explore_nested};
use stepwell_tests::steps::check::Checker;
use stepwell_tests::steps::run::{Run, close, options};

/// Explores every crash state of a scenario, with crashes inside the recovery, under both profiles.
fn survives(run: &Run) {
    let log = run.disk.log();
    for profile in [Profile::PosixMinimal, Profile::OrderedMetadata] {
        let mut checker = Checker::new(options());
        let begin = std::time::Instant::now();
        match explore_nested(&log, &Crash::default().profile(profile), |disk, marks| {
            checker.check(disk, marks)
        }) {
            Ok((outer, inner)) => {
                println!(
                    "{} effects, {profile:?}: {outer}; inside recoveries: {inner}; {:.1?}",
                    log.records.len(),
                    begin.elapsed()
                );
            }
            Err(failure) => panic!("{profile:?}: {failure}\nthe scenario:\n{log}"),
        }
    }
}

#[test]
fn a_first_save_into_a_new_root() {
    let run = Run::fresh();
    let manager = run.open(options()).unwrap();
    run.save(&manager, 1, "a").unwrap();
    close(&manager).unwrap();
    survives(&run);
}
