//! Which step comes next, whatever became of the saves before; and what a refused call costs.

mod common;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::*;
use stepwell_core::io::simulated::{Action, Fault, OperationKind};
use stepwell_manager::{
    Error, Exists, LeafSource, Manager, OnSaveError, Options, Refusal, SavePolicy, SaveRequest, StateSource,
};

/// Room for several saves that are held at once.
fn roomy() -> Options {
    let staging_bytes = Some(128 << 20);
    Options { max_pending: 8, on_save_error: OnSaveError::Warn, staging_bytes, ..options() }
}

/// One at a time: the staging memory is the process's, and a test that holds its writes holds
/// slots.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has the commit of that step fail: the temporary's name says which step it is.
fn fail(world: &World, step: u64) {
    let name = format!(".tmp-{}", stepwell_manager::directory_layout::label(step));
    world.disk.inject(Fault::on(OperationKind::Sync, Action::Fail(5)).at(name));
}

#[test]
fn a_pending_save_counts_and_one_that_failed_does_not() {
    let _alone = alone();
    let world = World::default();
    let manager = world.open(roomy());
    assert_eq!(manager.next_step().unwrap(), 0);
    commit(&manager, 10);
    let held = world.disk.hold_writes();
    let saves = [save(&manager, 11), save(&manager, 12), save(&manager, 13)];
    assert_eq!(manager.next_step().unwrap(), 14);
    fail(&world, 13);
    held.store(false, Ordering::SeqCst);
    for save in &saves {
        save.wait(Some(LONG)).unwrap();
    }
    assert_eq!(manager.next_step().unwrap(), 13, "the last one failed");
    assert_eq!(manager.all_steps().unwrap(), [10, 11, 12]);
}

#[test]
fn one_failing_callback_changes_nothing_for_others() {
    let _alone = alone();
    for (failing, next) in [(vec![11], 13), (vec![11, 12], 11), (vec![12], 12)] {
        let world = World::default();
        let manager = world.open(roomy());
        commit(&manager, 10);
        let held = world.disk.hold_writes();
        let saves = [save(&manager, 11), save(&manager, 12)];
        for &step in &failing {
            fail(&world, step);
        }
        held.store(false, Ordering::SeqCst);
        for save in &saves {
            save.wait(Some(LONG)).unwrap();
        }
        assert_eq!(manager.next_step().unwrap(), next, "{failing:?}");
    }
}

#[test]
fn after_a_failed_save_the_step_that_was_restored_counts_again() {
    let _alone = alone();
    let world = World::default();
    let manager = world.open(roomy());
    for step in [1, 2, 3] {
        commit(&manager, step);
    }
    manager.rewind(2, None).unwrap();
    assert_eq!(manager.next_step().unwrap(), 3);
    fail(&world, 3);
    save(&manager, 3).wait(Some(LONG)).unwrap();
    assert_eq!(manager.next_step().unwrap(), 3);
    manager.restored(1);
    assert_eq!(manager.next_step().unwrap(), 2);
}

/// A state that cannot be captured.
fn broken() -> StateSource {
    let StateSource { tree, mut leaves } = state(1);
    if let Some(LeafSource::Tensor { provider, .. }) = leaves.first_mut() {
        *provider = Arc::new(Broken);
    }
    StateSource { tree, leaves }
}

#[test]
fn an_uncaptured_save_holds_no_number() {
    let _alone = alone();
    let world = World::default();
    let manager = world.open(roomy());
    commit(&manager, 0);
    let held = world.disk.hold_writes();
    let first = save(&manager, 1);
    let error = std::thread::scope(|scope| {
        // The broken one waits for its flush, which stands behind the first one's.
        let (manager, held) = (&manager, &held);
        let broken = scope.spawn(move || manager.save(SaveRequest::new(5, broken())).unwrap_err());
        let begun = Instant::now();
        while manager.pending().unwrap().len() < 2 && begun.elapsed() < LONG {
            std::thread::yield_now();
        }
        while manager.next_step().unwrap() != 2 && begun.elapsed() < Duration::from_secs(10) {
            std::thread::yield_now();
        }
        let next = manager.next_step().unwrap();
        held.store(false, Ordering::SeqCst);
        assert_eq!(next, 2);
        broken.join().unwrap()
    });
    assert_eq!(error.kind(), "unsupported_leaf");
    committed(&first);
    assert_eq!(manager.next_step().unwrap(), 2);
    commit(&manager, 2);
}

#[test]
fn a_wait_without_a_deadline_ends_without_progress() {
    let _alone = alone();
    let world = World::default();
    let manager = world.open(Options { stall_timeout: Duration::from_millis(300), ..roomy() });
    let held = world.disk.hold_writes();
    let saves = [save(&manager, 1), save(&manager, 2)];
    for save in &saves {
        let begun = Instant::now();
        let error = save.wait(None).unwrap_err();
        assert!(begun.elapsed() >= Duration::from_millis(290));
        let Error::Timeout { waited_for, .. } = &error else { panic!("{error:?}") };
        assert_eq!(*waited_for, format!("the commit of the save of step {}", save.step()));
        assert_eq!(save.wait(Some(Duration::ZERO)).unwrap_err().kind(), "timeout");
        save.wait_captured(None).unwrap();
    }
    held.store(false, Ordering::SeqCst);
    manager.close(Some(LONG)).unwrap();
}

fn operations(world: &World, call: impl FnOnce()) -> u64 {
    let before = world.disk.operations();
    call();
    world.disk.operations() - before
}

fn refused(manager: &Manager, step: u64) {
    assert_eq!(save(manager, step).refusal(), Some(Refusal::Policy));
}

#[test]
fn a_refused_call_does_not_touch_the_disk() {
    let _alone = alone();
    let world = World::default();
    let policy = || Options { save_policy: SavePolicy::every_steps(100), ..options() };
    let manager = world.open(policy());
    commit(&manager, 0);
    manager.wait_until_finished(Some(LONG)).unwrap();
    let calls = || {
        for step in 1..100 {
            refused(&manager, step);
            assert!(!manager.should_save(step, &std::collections::BTreeMap::new()).unwrap());
            let skipped = SaveRequest { exists: Exists::Skip, ..request(step) };
            assert_eq!(manager.save(skipped).unwrap().refusal(), Some(Refusal::Policy));
        }
    };
    assert_eq!(operations(&world, calls), 0);
    commit(&manager, 100);
    manager.close(Some(LONG)).unwrap();

    // Nor after a restart: opening the root has shown that it is not empty.
    let manager = world.open(policy());
    let calls = || {
        for step in 101..200 {
            refused(&manager, step);
        }
    };
    assert_eq!(operations(&world, calls), 0);
    commit(&manager, 200);
}

#[test]
fn the_first_step_is_saved_after_a_failure_of_it() {
    let _alone = alone();
    let world = World::default();
    let manager = world.open(Options { save_policy: SavePolicy::every_steps(100), ..roomy() });
    fail(&world, 7);
    save(&manager, 7).wait(Some(LONG)).unwrap();
    world.disk.clear_faults();
    commit(&manager, 8);
    refused(&manager, 9);
}

#[test]
fn continuing_from_an_older_step_names_the_rewind() {
    let world = World::default();
    let manager = world.open(options());
    for step in [0, 10, 20, 30, 40, 50] {
        commit(&manager, step);
    }
    manager.restored(20);
    for (step, kind) in [(30, "step_exists"), (25, "step_order"), (21, "step_order")] {
        let error = manager.save(request(step)).unwrap_err();
        assert_eq!(error.kind(), kind);
        let text = error.to_string();
        assert!(text.contains("rewind to step 20 first") && text.contains("the latest step 50"), "{text}");
        assert!(!text.contains("Replace"), "it would be refused: {text}");
    }
    // The latest itself may be replaced.
    let text = manager.save(request(50)).unwrap_err().to_string();
    assert!(text.contains("exists already") && !text.contains("rewind"), "{text}");
    // Below the first one there is nothing to rewind to.
    let text = manager.save(request(0)).unwrap_err().to_string();
    assert!(text.contains("no step below 0") && !text.contains("rewind to step"), "{text}");
    // A damaged one is none that a rewind takes.
    assert!(world.disk.corrupt("/run/step_00000030/i0/00000.data", |bytes| bytes.truncate(5000)));
    let text = manager.save(request(35)).unwrap_err().to_string();
    assert!(text.contains("rewind to step 20 first"), "{text}");
    manager.rewind(20, None).unwrap();
    commit(&manager, 25);
    assert_eq!(manager.all_steps().unwrap(), [0, 10, 20, 25]);
}
