//! Several processes on one root.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use stepwell_core::io::simulated::{Action, Fault, Moment, OperationKind, SimDisk};
use stepwell_manager::{Checkpoint, Error, Manager, Options, Retention};
use stepwell_tests::steps::run::{Run, close, options};
use stepwell_tests::steps::{states, world};

use super::{keeping, survives};

#[test]
fn a_second_writer_is_refused_at_any_moment_and_harms_nothing() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(options()).unwrap();
    let other = run.disk.process();
    let refused = Arc::new(Mutex::new(0));
    let count = Arc::clone(&refused);
    run.disk.set_hook(Some(Arc::new(move |moment, operation| {
        if moment == Moment::Before && operation.process == 0 && operation.number % 7 == 0 {
            let options = Options { create: false, ..options() };
            match Manager::open(Path::new("run"), options, world::environment(&other, 99)) {
                Err(Error::Locked { .. }) => *count.lock().unwrap() += 1,
                Err(error) => panic!("refused for another reason: {error}"),
                Ok(_) => panic!("two writers"),
            }
        }
    })));
    run.save(&manager, 2, "a").unwrap();
    run.disk.set_hook(None);
    close(&manager).unwrap();
    assert!(*refused.lock().unwrap() >= 5);
    survives(&run);
}

#[test]
fn a_writer_takes_over_from_a_killed_one() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(options()).unwrap();
    run.disk.kill_at(run.disk.operations() + 25);
    run.save(&manager, 2, "a").unwrap_err();
    let next = run.next_process();
    let second = next.open(options()).unwrap();
    next.save(&second, 2, "b").unwrap();
    close(&second).unwrap();
    drop(manager);
    survives(&next);
}

#[test]
fn without_locks_an_older_writer_is_fenced_before_its_rename() {
    let run = Run::with_steps([1]).unwrap();
    let no_locks = || Fault::on(OperationKind::Lock, Action::Fail(37)).from_then_on();
    let alone = || Options { take_over: true, ..options() };
    run.disk.inject(no_locks());
    let manager = run.open(alone()).unwrap();
    let next = Arc::new(run.next_process());
    next.disk.inject(no_locks());
    let taker = Arc::clone(&next);
    let once = Mutex::new(false);
    run.disk.set_hook(Some(Arc::new(move |moment, operation| {
        let path = operation.path.to_string_lossy();
        // Its own, after the root was listed: a listing that sees the other's step refuses the save
        // at once.
        let own = path.contains(".tmp-") && path.ends_with("manifest.json");
        let now = moment == Moment::Before && operation.process == 0 && own;
        if now && !std::mem::replace(&mut *once.lock().unwrap(), true) {
            let second = taker.open(alone()).unwrap();
            taker.save(&second, 2, "b").unwrap();
            close(&second).unwrap();
        }
    })));
    let error = run.save(&manager, 2, "a").unwrap_err();
    run.disk.set_hook(None);
    assert!(error.contains("not committed"), "{error}");
    drop(close(&manager));
    survives(&run);
}

#[test]
fn a_killed_writer_without_locks_is_taken_over() {
    let run = Run::on(SimDisk::new().without_locks());
    let alone = || Options { take_over: true, ..keeping(Retention::keep_latest(1)) };
    let manager = run.open(alone()).unwrap();
    run.save(&manager, 1, "a").unwrap();
    run.mark("may go 1 once 2");
    run.save(&manager, 2, "a").unwrap();
    run.mark("gone 1");
    run.disk.kill_at(run.disk.operations() + 25);
    run.mark("may go 2 once 3");
    run.save(&manager, 3, "a").unwrap_err();
    let next = run.next_process();
    let second = next.open(alone()).unwrap();
    next.save(&second, 3, "b").unwrap();
    close(&second).unwrap();
    drop(manager);
    survives(&next);
}

#[test]
fn what_a_reader_holds_is_deleted_when_it_lets_go() {
    let run = Run::with_steps([1]).unwrap();
    let reader = run.disk.process();
    let held = Checkpoint::open(Path::new("run/step_00000001"), &world::environment(&reader, 50)).unwrap();
    // A lease keeps a step listed for the grace period only.
    let retention = keeping(Retention::keep_latest(1));
    let manager = run.open(Options { grace: Duration::ZERO, ..retention }).unwrap();
    run.mark("may go 1 once 2");
    run.save(&manager, 2, "a").unwrap();
    run.mark("gone 1");
    assert_eq!(states::verify(&held).unwrap(), "a", "a leased step is read to its end");
    drop(held);
    close(&manager).unwrap();
    survives(&run);
}

/// A reader opens and reads the newest step around every operation of a change: it gets one
/// attempt, whole, or a typed error.
fn readers_see_one_attempt(run: &Run, change: impl FnOnce(&Manager), manager: &Manager) {
    let reader = run.disk.process();
    let seen = Arc::new(Mutex::new(std::collections::BTreeMap::new()));
    let notes = Arc::clone(&seen);
    run.disk.set_hook(Some(Arc::new(move |_, operation| {
        if operation.process != 0 {
            return;
        }
        let environment = world::environment(&reader, 60);
        let manager =
            Manager::open(Path::new("run"), Options { read_only: true, ..options() }, environment).unwrap();
        let note = match manager.checkpoint(None) {
            Ok(checkpoint) => format!("{} {}", checkpoint.step(), states::verify(&checkpoint).unwrap()),
            Err(error) => error.kind().to_owned(),
        };
        *notes.lock().unwrap().entry(note).or_insert(0) += 1;
    })));
    change(manager);
    run.disk.set_hook(None);
    println!("{:?}", seen.lock().unwrap());
    let kinds: Vec<String> = seen.lock().unwrap().keys().cloned().collect();
    for kind in &kinds {
        assert!(kind.contains(' ') || kind == "step_gone", "{kinds:?}");
    }
    assert!(kinds.len() >= 2, "both were seen: {kinds:?}");
}

#[test]
fn a_reader_of_a_step_that_is_replaced_sees_one_attempt() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(options()).unwrap();
    readers_see_one_attempt(&run, |manager| run.replace(manager, 1, "b").unwrap(), &manager);
    close(&manager).unwrap();
}

#[test]
fn a_reader_of_a_step_that_is_retired_sees_one_attempt() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(keeping(Retention::keep_latest(1))).unwrap();
    readers_see_one_attempt(&run, |manager| run.save(manager, 2, "b").unwrap(), &manager);
    close(&manager).unwrap();
}
