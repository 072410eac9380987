//! Operations that fail: an error is never a commit, nothing that was committed suffers, and the
//! next save works.

use stepwell_core::io::simulated::{Action, Fault, OperationKind, SimDisk};
use stepwell_manager::Retention;
use stepwell_tests::crash::{Explorer, Marks, sweep};
use stepwell_tests::steps::check::Checker;
use stepwell_tests::steps::run::{Run, close, options};

use super::{keeping, quick, survives};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// Runs `scenario` on the steps 1 and 2, each operation failing in turn, and checks every crash
/// state of each run.
fn survives_failures(action: Action, from_then_on: bool, scenario: impl Fn(&Run)) {
    let base = Run::with_steps([1, 2]).unwrap();
    let image = base.disk.image();
    let mut explorer = Explorer::new(quick());
    let mut checker = Checker::new(options());
    let runs = sweep::failures(
        action,
        from_then_on,
        || {
            let run = Run::on(SimDisk::from_image(&image));
            run.settle(&[1, 2]);
            run.disk
        },
        |disk| scenario(&Run::on(disk.clone())),
        |disk| {
            explorer
                .explore(&disk.log(), &Marks::default(), |disk, marks| checker.check(disk, marks))
                .map_err(|failure| failure.to_string())
        },
    );
    let runs = runs.unwrap_or_else(|failure| panic!("{failure}"));
    println!("{runs} failures; {}", explorer.explored);
    assert!(runs > 40, "{runs}");
}

fn save_one(run: &Run) {
    if let Ok(manager) = run.open(options()) {
        drop(run.save(&manager, 3, "b"));
        drop(close(&manager));
    }
}

#[test]
fn any_operation_of_a_save_fails_once() {
    survives_failures(Action::Fail(EIO), false, save_one);
}

#[test]
fn any_operation_of_a_save_and_all_after_it_fail() {
    survives_failures(Action::Fail(EIO), true, save_one);
}

#[test]
fn any_operation_of_a_save_is_done_and_its_answer_lost() {
    survives_failures(Action::FailAfterwards(EIO), false, save_one);
}

#[test]
fn the_disk_is_full_from_any_operation_on() {
    survives_failures(Action::FailHalfway(ENOSPC), true, save_one);
}

#[test]
fn any_operation_of_a_replacement_fails_once() {
    survives_failures(Action::Fail(EIO), false, |run| {
        if let Ok(manager) = run.open(options()) {
            drop(run.replace(&manager, 2, "b"));
            drop(close(&manager));
        }
    });
}

#[test]
fn any_operation_of_a_replacement_is_done_and_its_answer_lost() {
    survives_failures(Action::FailAfterwards(EIO), false, |run| {
        if let Ok(manager) = run.open(options()) {
            drop(run.replace(&manager, 2, "b"));
            drop(close(&manager));
        }
    });
}

#[test]
fn any_operation_of_retention_fails_once() {
    survives_failures(Action::Fail(EIO), false, |run| {
        if let Ok(manager) = run.open(keeping(Retention::keep_latest(1))) {
            run.mark("may go 1 once 3");
            run.mark("may go 2 once 3");
            drop(run.save(&manager, 3, "b"));
            drop(close(&manager));
        }
    });
}

/// The second save writes over what the first one retired.
fn save_over_a_retired_step(run: &Run) {
    if let Ok(manager) = run.open(keeping(Retention::keep_latest(1))) {
        for step in [3, 4] {
            for gone in 1..step {
                run.mark(&format!("may go {gone} once {step}"));
            }
            drop(run.save(&manager, step, "b"));
        }
        drop(close(&manager));
    }
}

#[test]
fn any_operation_of_a_save_over_a_retired_step_fails_once() {
    survives_failures(Action::Fail(EIO), false, save_over_a_retired_step);
}

#[test]
fn any_lost_answer_of_an_overwriting_save_is_survived() {
    survives_failures(Action::FailAfterwards(EIO), false, save_over_a_retired_step);
}

#[test]
fn any_operation_of_a_thinning_fails_once() {
    survives_failures(Action::Fail(EIO), false, |run| {
        let rule = Retention::Any {
            of: vec![Retention::keep_latest(2), Retention::keep_every_items(1, ["params"])],
        };
        if let Ok(manager) = run.open(keeping(rule)) {
            run.mark("may thin 1 once 3");
            drop(run.save(&manager, 3, "b"));
            drop(close(&manager));
        }
    });
}

#[test]
fn any_operation_of_a_rewind_fails_once() {
    survives_failures(Action::Fail(EIO), false, |run| {
        if let Ok(manager) = run.open(options()) {
            drop(run.rewind(&manager, 1, "old", &[2]));
            drop(close(&manager));
        }
    });
}

#[test]
fn a_save_that_failed_leaves_no_trace_and_the_next_one_works() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(options()).unwrap();
    run.disk.inject(Fault::on(OperationKind::Sync, Action::Fail(EIO)).at("data"));
    run.save(&manager, 2, "a").unwrap_err();
    assert_eq!(manager.all_steps().unwrap(), [1]);
    let names = run.disk.image().get("run").unwrap().entries().unwrap().len();
    assert_eq!(names, 2, "the control directory and step 1");
    run.save(&manager, 2, "b").unwrap();
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn a_lost_answer_to_the_rename_is_settled_by_looking() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(options()).unwrap();
    run.disk.inject(Fault::on(OperationKind::Rename, Action::FailAfterwards(EIO)).at(".tmp-"));
    run.save(&manager, 2, "a").unwrap();
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn a_failed_sync_of_the_root_is_uncertain_and_never_counted() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(keeping(Retention::keep_latest(1))).unwrap();
    let syncs = Fault::on(OperationKind::SyncDir, Action::Fail(EIO)).after(4);
    run.disk.inject(syncs);
    let error = run.save(&manager, 2, "a").unwrap_err();
    assert!(error.contains("uncertain"), "{error}");
    assert_eq!(manager.all_steps().unwrap(), [1], "not listed, not counted");
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn an_uncertain_step_is_committed_by_its_next_save() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(options()).unwrap();
    run.disk.inject(Fault::on(OperationKind::SyncDir, Action::Fail(EIO)).after(4));
    run.save(&manager, 2, "a").unwrap_err();
    let error = run.save(&manager, 2, "b").unwrap_err();
    assert!(error.contains("exists already"), "{error}");
    assert_eq!(manager.all_steps().unwrap(), [1, 2]);
    // The caller may build on a step that was reported to exist.
    run.mark("seen 2 a");
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn an_uncertain_step_is_replaced_by_the_next_save() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(options()).unwrap();
    run.disk.inject(Fault::on(OperationKind::SyncDir, Action::Fail(EIO)).after(4));
    run.save(&manager, 2, "a").unwrap_err();
    run.disk.inject(Fault::on(OperationKind::SyncDir, Action::Fail(EIO)));
    run.save(&manager, 2, "b").unwrap();
    assert_eq!(manager.all_steps().unwrap(), [1, 2]);
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn any_operation_of_a_deletion_fails_once() {
    survives_failures(Action::Fail(EIO), false, |run| {
        if let Ok(manager) = run.open(options()) {
            drop(run.delete(&manager, 1));
            drop(close(&manager));
        }
    });
}

#[test]
fn any_sync_of_the_root_fails_and_the_step_is_saved_again() {
    survives_failures(Action::Fail(EIO), false, |run| {
        if let Ok(manager) = run.open(options()) {
            if run.save(&manager, 3, "b").is_err() && run.save(&manager, 3, "c").is_ok() {
                assert_eq!(manager.all_steps().map_err(|error| error.to_string()), Ok(vec![1, 2, 3]));
            }
            drop(close(&manager));
        }
    });
}

#[test]
fn a_full_disk_gets_room_from_the_trash_and_loses_no_step() {
    let run = Run::with_steps([1, 2]).unwrap();
    let manager = run.open(options()).unwrap();
    run.disk.set_capacity(Some(0));
    run.save(&manager, 3, "a").unwrap_err();
    assert_eq!(manager.all_steps().unwrap(), [1, 2]);
    run.mark("unrecorded 1");
    run.delete(&manager, 1).unwrap();
    run.disk.set_capacity(None);
    run.save(&manager, 3, "b").unwrap();
    close(&manager).unwrap();
    survives(&run);
}
