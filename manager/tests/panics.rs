//! A defect on an engine's thread is told, and ends neither the thread nor anybody's wait.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::*;
use stepwell_core::io::simulated::{Moment, OperationKind};
use stepwell_manager::{Retention, SaveRequest, singular};

/// Has the next operation of that kind at a name with that part panic.
fn panic_once(world: &World, kind: OperationKind, part: &'static str) {
    let left = AtomicU64::new(1);
    world.disk.set_hook(Some(Arc::new(move |moment, operation| {
        let path = operation.path.display().to_string();
        let meant = moment == Moment::Before && operation.kind == kind && path.contains(part);
        assert!(!meant || left.swap(0, Ordering::SeqCst) == 0, "a defect at {path}");
    })));
}

#[test]
fn a_panic_in_retention_leaves_the_save_committed() {
    let world = World::default();
    let manager = world.open(keeping(Retention::keep_latest(1)));
    commit(&manager, 1);
    panic_once(&world, OperationKind::Rename, "step_00000001");
    commit(&manager, 2);
    assert_eq!(manager.all_steps().unwrap(), [1, 2], "it was to retire step 1");
    commit(&manager, 3);
    assert_eq!(manager.all_steps().unwrap(), [3], "it is tried again after the next commit");
    assert!(manager.pending().unwrap().is_empty());
    manager.close(Some(LONG)).unwrap();
}

#[test]
fn a_panicking_callback_spares_other_callbacks_and_saves() {
    let world = World::default();
    let manager = world.open(options());
    let called = Arc::new(AtomicU64::new(0));
    // Until both callbacks are there.
    let held = world.disk.hold_writes();
    let first = save(&manager, 1);
    first.on_done(Box::new(|_| panic!("a callback of the user's")));
    let counted = Arc::clone(&called);
    first.on_done(Box::new(move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
    }));
    held.store(false, Ordering::SeqCst);
    committed(&first);
    commit(&manager, 2);
    assert_eq!(called.load(Ordering::SeqCst), 1);
    manager.close(Some(LONG)).unwrap();
}

#[test]
fn an_engine_that_panics_claims_nothing_and_the_next_save_works() {
    let world = World::default();
    let manager = world.open(options());
    panic_once(&world, OperationKind::CreateFile, "i0");
    let error = save(&manager, 1).wait(Some(LONG)).unwrap().unwrap().error().cloned().unwrap();
    assert!(error.to_string().contains("the engine panicked: a defect at"), "{error}");
    commit(&manager, 2);
    assert!(manager.all_steps().unwrap().contains(&2));
}

#[test]
fn a_singular_save_is_settled_whatever_panics_around_it() {
    let world = World::default();
    let save = |step| {
        let request =
            SaveRequest { exists: stepwell_manager::Exists::Replace, ..SaveRequest::new(0, state(step)) };
        singular::save(Path::new("/run/x"), request, &options(), &world.environment()).unwrap()
    };
    committed(&save(1));
    // The look for leftovers; then the deletion of what is replaced.
    panic_once(&world, OperationKind::Entries, "/run");
    committed(&save(2));
    panic_once(&world, OperationKind::RemoveFile, ".trash-");
    committed(&save(3));
    world.disk.set_hook(None);
    committed(&save(4));
    assert_eq!(world.names(), ["x"]);
}
