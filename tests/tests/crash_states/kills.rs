//! `kill -9` at every operation; another process goes on from what it finds; then the power goes.

use stepwell_manager::{Checkpoint, Retention};
use stepwell_tests::crash::{Explorer, Marks, sweep};
use stepwell_tests::steps::check::Checker;
use stepwell_tests::steps::run::{Run, close, options};
use stepwell_tests::steps::{states, world};

use super::{keeping, quick};

/// Runs `scenario` on the steps 1 and 2, killed at each operation in turn. Another process opens
/// the root, and trusts what it sees there (and goes on to save step 9, where `goes_on` says so);
/// every crash state of that whole history is checked.
fn survives_kills(goes_on: bool, scenario: impl Fn(&Run)) {
    let base = Run::with_steps([1, 2]).unwrap();
    let image = base.disk.image();
    let mut explorer = Explorer::new(quick());
    let mut checker = Checker::new(options());
    let runs = sweep::kills(
        || {
            let run = Run::on(stepwell_core::io::simulated::SimDisk::from_image(&image));
            run.settle(&[1, 2]);
            run.disk
        },
        |disk| scenario(&Run::on(disk.clone())),
        |disk| {
            let next = Run::on(disk.clone()).next_process();
            trust(&next, goes_on)?;
            explorer
                .explore(&disk.log(), &Marks::default(), |disk, marks| checker.check(disk, marks))
                .map_err(|failure| failure.to_string())
        },
    );
    let runs = runs.unwrap_or_else(|failure| panic!("{failure}"));
    println!("{runs} kills; {}", explorer.explored);
    assert!(runs > 40, "{runs}");
}

/// Checks that everything is complete, promises it from here on, and checks the next save.
pub(super) fn trust(run: &Run, goes_on: bool) -> Result<(), String> {
    let manager = run.open(options())?;
    for step in manager.all_steps().map_err(|error| error.to_string())? {
        let path = format!("run/{}", manager.step_name().format(step));
        let checkpoint = Checkpoint::open(std::path::Path::new(&path), &world::environment(&run.disk, 7));
        let tag = states::verify(&checkpoint.map_err(|error| error.to_string())?)?;
        run.mark(&format!("seen {step} {tag}"));
    }
    if goes_on {
        run.save(&manager, 9, "z")?;
    }
    close(&manager)
}

#[test]
fn in_a_save() {
    survives_kills(true, |run| {
        if let Ok(manager) = run.open(options()) {
            drop(run.save(&manager, 3, "b"));
        }
    });
}

#[test]
fn in_a_replacement() {
    survives_kills(false, |run| {
        if let Ok(manager) = run.open(options()) {
            drop(run.replace(&manager, 2, "b"));
        }
    });
}

#[test]
fn in_retention() {
    survives_kills(false, |run| {
        if let Ok(manager) = run.open(keeping(Retention::keep_latest(1))) {
            run.mark("may go 1 once 3");
            run.mark("may go 2 once 3");
            drop(run.save(&manager, 3, "b"));
        }
    });
}

#[test]
fn in_a_save_over_a_retired_step() {
    survives_kills(false, |run| {
        if let Ok(manager) = run.open(keeping(Retention::keep_latest(1))) {
            for step in [3, 4] {
                for gone in 1..step {
                    run.mark(&format!("may go {gone} once {step}"));
                }
                drop(run.save(&manager, step, "b"));
            }
        }
    });
}

#[test]
fn in_retention_of_a_step_with_later_metrics() {
    survives_kills(false, |run| {
        if let Ok(manager) = run.open(keeping(Retention::keep_latest(1))) {
            drop(run.add_metric(&manager, 1, 0.25));
            run.mark("may go 1 once 3");
            run.mark("may go 2 once 3");
            drop(run.save(&manager, 3, "b"));
        }
    });
}

#[test]
fn in_thinning() {
    survives_kills(false, |run| {
        let rule = Retention::Any {
            of: vec![Retention::keep_latest(2), Retention::keep_every_items(1, ["params"])],
        };
        if let Ok(manager) = run.open(keeping(rule)) {
            run.mark("may thin 1 once 3");
            drop(run.save(&manager, 3, "b"));
        }
    });
}

#[test]
fn in_a_rewind() {
    survives_kills(false, |run| {
        if let Ok(manager) = run.open(options()) {
            drop(run.rewind(&manager, 1, "old", &[2]));
        }
    });
}

#[test]
fn in_a_deletion() {
    survives_kills(false, |run| {
        if let Ok(manager) = run.open(options()) {
            drop(run.delete(&manager, 1));
        }
    });
}
