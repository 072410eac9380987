//! Rewinding, deleting, metrics that come later.

use stepwell_manager::Retention;
use stepwell_tests::steps::run::{Run, close, options};

use super::{keeping, survives};

#[test]
fn deleting_the_oldest_step() {
    let run = Run::with_steps([1, 2]).unwrap();
    let manager = run.open(options()).unwrap();
    run.delete(&manager, 1).unwrap();
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn deleting_the_newest_step() {
    let run = Run::with_steps([1, 2]).unwrap();
    let manager = run.open(options()).unwrap();
    run.delete(&manager, 2).unwrap();
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn deleting_everything_and_saving_again() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(options()).unwrap();
    run.delete(&manager, 1).unwrap();
    run.save(&manager, 1, "b").unwrap();
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn rewinding_over_two_steps() {
    let run = Run::with_steps([1, 2, 3]).unwrap();
    let manager = run.open(options()).unwrap();
    run.rewind(&manager, 1, "old").unwrap();
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn rewinding_and_going_on_with_the_same_numbers() {
    let run = Run::with_steps([1, 2]).unwrap();
    let manager = run.open(options()).unwrap();
    run.rewind(&manager, 1, "old").unwrap();
    run.save(&manager, 2, "b").unwrap();
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn rewinding_twice() {
    let run = Run::with_steps([1, 2, 3]).unwrap();
    let manager = run.open(options()).unwrap();
    run.rewind(&manager, 2, "one").unwrap();
    run.rewind(&manager, 1, "two").unwrap();
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn metrics_that_come_after_the_commit() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(options()).unwrap();
    run.add_metric(&manager, 1, 0.25).unwrap();
    run.save(&manager, 2, "a").unwrap();
    run.add_metric(&manager, 2, 0.5).unwrap();
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn metrics_go_with_their_step() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(keeping(Retention::keep_latest(1))).unwrap();
    run.add_metric(&manager, 1, 0.25).unwrap();
    run.mark("may go 1 once 2");
    run.save(&manager, 2, "a").unwrap();
    run.mark("gone 1");
    close(&manager).unwrap();
    let left = run.disk.image().get("run/.stepwell/metrics").unwrap().entries().unwrap().len();
    assert_eq!(left, 0);
    survives(&run);
}
