//! Saving and reading back: the promises of the basic cycle, of handles and of errors in the
//! background.

mod common;

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use common::*;
use stepwell_core::io::simulated::{Action, Fault, Moment, OperationKind};
use stepwell_manager::{
    Error, Exists, Mode, OnSaveError, Options, Outcome, Refusal, Retention, SavePolicy, SaveRequest,
};

#[test]
fn what_was_saved_is_restored_in_the_order_that_was_saved() {
    let world = World::default();
    let manager = world.open(options());
    assert_eq!(manager.latest_step().unwrap(), None);
    assert_eq!(manager.next_step().unwrap(), 0);
    for step in 0..3 {
        commit(&manager, step);
    }
    assert_eq!(manager.all_steps().unwrap(), [0, 1, 2]);
    assert_eq!(manager.latest_step().unwrap(), Some(2));
    assert_eq!(manager.next_step().unwrap(), 3);
    assert_restores(&manager, 1);
    manager.close(Some(LONG)).unwrap();

    let second = world.open(options());
    assert_eq!(second.all_steps().unwrap(), [0, 1, 2]);
    assert_restores(&second, 0);
    assert_restores(&second, 2);
    let items: Vec<String> =
        second.manifest(None).unwrap().items.iter().map(|item| item.name.clone()).collect();
    assert_eq!(items, ["params", ".", "optimizer"]);
}

#[test]
fn nothing_is_left_of_a_root_that_was_closed_but_its_steps() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 5);
    manager.close(Some(LONG)).unwrap();
    assert_eq!(world.names(), ["step_00000005"]);
    assert_eq!(world.disk.locks_held(), 0);
    drop(manager);
    assert_eq!(world.disk.open_handles(), 0);
}

#[test]
fn an_unknown_step_is_not_found_and_says_what_there_is() {
    let world = World::default();
    let manager = world.open(options());
    assert!(matches!(manager.checkpoint(None), Err(Error::StepNotFound { step: None, latest: None, .. })));
    commit(&manager, 3);
    for error in [manager.checkpoint(Some(7)).err().unwrap(), manager.delete(7).unwrap_err()] {
        assert_eq!(error.kind(), "step_not_found");
        assert!(error.to_string().contains("the latest is 3"), "{error}");
    }
}

#[test]
fn a_closed_manager_says_so() {
    let world = World::default();
    let manager = world.open(options());
    manager.close(Some(LONG)).unwrap();
    manager.close(Some(LONG)).unwrap();
    assert_eq!(manager.save(request(0)).unwrap_err().kind(), "closed");
    assert_eq!(manager.latest_step().unwrap_err().kind(), "closed");
}

/// Operations of that kind, on a path that holds `part`, wait until what is returned is dropped.
fn hang(world: &World, kind: OperationKind, part: &'static str) -> std::sync::mpsc::Sender<()> {
    let (release, released) = std::sync::mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    world.disk.set_hook(Some(Arc::new(move |moment, operation| {
        if moment == Moment::Before
            && operation.kind == kind
            && operation.path.to_string_lossy().contains(part)
        {
            let _ = released.lock().unwrap_or_else(PoisonError::into_inner).recv();
        }
    })));
    release
}

const SHORT: Duration = Duration::from_millis(50);

#[test]
fn a_second_close_waits_for_the_rest() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    let release = hang(&world, OperationKind::Sync, "manifest");
    let save = save(&manager, 2);
    for _ in 0..3 {
        let error = manager.close(Some(SHORT)).unwrap_err();
        assert!(error.kind() == "timeout" && error.to_string().contains("step 2"), "{error}");
        assert_eq!(world.try_open(options()).err().unwrap().kind(), "locked", "it may still write");
    }
    drop(release);
    manager.close(Some(LONG)).unwrap();
    committed(&save);
    manager.close(Some(SHORT)).unwrap();
    let next = world.open(options());
    assert_eq!(next.all_steps().unwrap(), [1, 2]);
}

#[test]
fn a_close_that_meets_another_one_waits_for_it() {
    let world = World::default();
    let manager = Arc::new(world.open(options()));
    let release = hang(&world, OperationKind::Sync, "manifest");
    let save = save(&manager, 1);
    let first = Arc::clone(&manager);
    let first = std::thread::spawn(move || first.close(Some(LONG)));
    while !manager.is_closed() {
        std::thread::yield_now();
    }
    let error = manager.close(Some(SHORT)).unwrap_err();
    assert_eq!(error.kind(), "timeout", "{error}");
    let second = Arc::clone(&manager);
    let second = std::thread::spawn(move || {
        second.close(Some(LONG)).unwrap();
        assert!(save.outcome().is_some_and(|outcome| outcome.error().is_none()), "it said that all is over");
    });
    std::thread::sleep(SHORT);
    drop(release);
    first.join().unwrap().unwrap();
    second.join().unwrap();
}

#[test]
fn a_close_with_a_hanging_deletion_says_so_each_time() {
    let world = World::default();
    let manager = world.open(Options { retention: Retention::keep_latest(1), ..options() });
    commit(&manager, 1);
    let release = hang(&world, OperationKind::RemoveFile, ".trash-");
    commit(&manager, 2);
    for _ in 0..2 {
        let error = manager.close(Some(SHORT)).unwrap_err();
        assert!(error.kind() == "timeout" && error.to_string().contains("deletion"), "{error}");
    }
    drop(release);
    manager.close(Some(LONG)).unwrap();
    drop(manager);

    let manager = world.open(options());
    let _release = hang(&world, OperationKind::Sync, "manifest");
    drop(save(&manager, 3));
    manager.close(Some(SHORT)).unwrap_err();
    let begun = std::time::Instant::now();
    drop(manager);
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_refused_save_leaves_nothing_and_force_overrides_it() {
    let world = World::default();
    let policy = SavePolicy::every_steps(2);
    let manager = world.open(Options { save_policy: policy, ..options() });
    for step in 0..6 {
        let save = save(&manager, step);
        if step % 2 == 0 {
            committed(&save);
        } else {
            assert_eq!(save.refusal(), Some(Refusal::Policy));
            assert!(save.is_done() && save.wait(None).unwrap().is_none());
        }
    }
    assert_eq!(manager.all_steps().unwrap(), [0, 2, 4]);
    committed(&manager.save(SaveRequest { force: true, ..request(5) }).unwrap());
    let error = manager.save(SaveRequest { force: true, ..request(4) }).unwrap_err();
    assert_eq!(error.kind(), "step_exists");
    assert_eq!(manager.save(SaveRequest { force: true, ..request(3) }).unwrap_err().kind(), "step_order");
}

#[test]
fn a_step_that_exists_is_an_error_or_skipped_or_replaced() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    assert_eq!(manager.save(request(1)).unwrap_err().kind(), "step_exists");
    assert_restores(&manager, 1);
    let skipped = manager.save(SaveRequest { exists: Exists::Skip, ..request(1) }).unwrap();
    assert_eq!(skipped.refusal(), Some(Refusal::Exists));
    let replaced = SaveRequest { exists: Exists::Replace, ..SaveRequest::new(1, state(77)) };
    committed(&manager.save(replaced).unwrap());
    assert_value(&manager, 1, 77);
    commit(&manager, 2);
    manager.close(Some(LONG)).unwrap();
    assert_eq!(world.names(), ["step_00000001", "step_00000002"]);
}

#[test]
fn a_replacement_that_fails_leaves_the_old_step() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    world.disk.inject(Fault::on(OperationKind::Sync, Action::Fail(5)).at("data"));
    let replaced = SaveRequest { exists: Exists::Replace, ..SaveRequest::new(1, state(77)) };
    let save = manager.save(replaced).unwrap();
    assert!(matches!(save.wait(Some(LONG)).unwrap(), Some(Outcome::NotCommitted(_))));
    assert_restores(&manager, 1);
    assert_eq!(world.names(), ["step_00000001"]);
}

#[test]
fn a_failed_save_leaves_only_its_error() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    world.disk.inject(Fault::on(OperationKind::Write, Action::Fail(28)).at(".tmp-"));
    drop(save(&manager, 2));
    let error = manager.wait_until_finished(Some(LONG)).unwrap_err();
    assert_eq!((error.kind(), error.errno()), ("save_failed", Some(28)));
    assert!(!error.to_string().contains("was not saved"), "no save was refused for it: {error}");
    manager.check_for_errors().unwrap();
    manager.put_back(&error); // as whoever could not tell it does
    assert_eq!(manager.check_for_errors().unwrap_err().kind(), "save_failed");
    manager.check_for_errors().unwrap();
    assert_eq!(world.names(), ["step_00000001"]);
    assert_eq!(manager.all_steps().unwrap(), [1]);
    commit(&manager, 2);
    assert_restores(&manager, 2);
}

#[test]
fn a_save_that_raises_an_earlier_failure_starts_nothing() {
    let world = World::default();
    let manager = world.open(options());
    world.disk.inject(Fault::on(OperationKind::Sync, Action::Fail(5)));
    let failed = save(&manager, 1);
    while !failed.is_done() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let error = manager.save(request(2)).unwrap_err();
    assert_eq!((error.kind(), error.errno()), ("save_failed", Some(5)));
    let text = error.to_string();
    assert!(text.contains("saving step 1 failed") && text.contains("step 2 was not saved"), "{text}");
    assert!(text.contains("step 2 was not saved. Save it again"), "{text}");
    assert_eq!(manager.pending().unwrap(), [] as [u64; 0]);
    commit(&manager, 2);
    assert_eq!(manager.all_steps().unwrap(), [2]);
}

#[test]
fn a_failure_that_was_waited_for_is_not_repeated() {
    let world = World::default();
    let manager = world.open(options());
    world.disk.inject(Fault::on(OperationKind::Sync, Action::Fail(5)));
    assert!(save(&manager, 1).wait(Some(LONG)).unwrap().unwrap().error().is_some());
    manager.check_for_errors().unwrap();
    manager.close(Some(LONG)).unwrap();

    let manager = world.open(Options { on_save_error: OnSaveError::Warn, ..options() });
    world.disk.inject(Fault::on(OperationKind::Sync, Action::Fail(5)).at("data"));
    drop(save(&manager, 1));
    manager.wait_until_finished(Some(LONG)).unwrap();
}

#[test]
fn a_leaf_that_cannot_be_captured_fails_before_return() {
    let world = World::default();
    let manager = world.open(options());
    let mut state = state(1);
    if let stepwell_manager::LeafSource::Tensor { provider, .. } = &mut state.leaves[0] {
        *provider = Arc::new(Broken);
    }
    let error = manager.save(SaveRequest::new(1, state)).unwrap_err();
    assert_eq!(error.kind(), "unsupported_leaf", "{error}");
    manager.wait_until_finished(Some(LONG)).unwrap();
    assert_eq!(world.names(), [] as [&str; 0]);
    commit(&manager, 1);
}

#[test]
fn a_rename_whose_sync_fails_is_uncertain_and_not_counted() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    let steps = manager.all_steps().unwrap();
    world.disk.set_hook(None);
    // The only sync of the root in a commit is the one after its rename.
    let root_sync = Fault::on(OperationKind::SyncDir, Action::Fail(5));
    world.disk.inject(root_sync.clone().at("/run").after(4));
    let save = save(&manager, 2);
    match save.wait(Some(LONG)).unwrap() {
        Some(Outcome::DurabilityUncertain(error)) => assert_eq!(error.kind(), "durability_uncertain"),
        other => panic!("{other:?}: the temporary has 3 items and itself, whose syncs come before"),
    }
    assert_eq!(manager.all_steps().unwrap(), steps);
    assert_eq!(manager.latest_step().unwrap(), Some(1));
    manager.close(Some(LONG)).unwrap();
    // The next writer settles it: it is whole, and now it is durable.
    assert_eq!(world.open(options()).latest_step().unwrap(), Some(2));
}

#[test]
fn a_lost_rename_answer_is_settled_by_the_attempt() {
    let world = World::default();
    let manager = world.open(options());
    world.disk.inject(Fault::on(OperationKind::Rename, Action::FailAfterwards(5)).at("step_").after(0));
    commit(&manager, 1);
    assert_restores(&manager, 1);
}

#[test]
fn saves_commit_in_the_order_of_their_calls() {
    let world = World::default();
    let manager = world.open(Options { max_pending: 4, ..options() });
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    for step in 0..4 {
        let order = Arc::clone(&order);
        save(&manager, step).on_done(Box::new(move |_| order.lock().unwrap().push(step)));
    }
    manager.wait_until_finished(Some(LONG)).unwrap();
    manager.close(Some(LONG)).unwrap();
    assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3]);
}

#[test]
fn a_state_larger_than_the_staging_memory_streams_through_it() {
    let world = World::default();
    let manager = world.open(Options { staging_bytes: Some(0), ..options() });
    let w: Vec<u8> = (0..60_000_000_u32).map(|i| (i ^ (i >> 9)) as u8).collect();
    committed(&manager.save(SaveRequest::new(0, state_of(&w))).unwrap());
    assert_eq!(read(&manager.checkpoint(None).unwrap())[0].1, w);
}

#[test]
fn a_read_only_manager_writes_nothing() {
    let world = World::default();
    let writer = world.open(options());
    commit(&writer, 1);
    let before = world.disk.image();
    let reader = world.open(Options { read_only: true, ..options() });
    assert_eq!(world.disk.image().hash(), before.hash());
    commit(&writer, 2);
    assert_eq!(reader.all_steps().unwrap(), [1, 2]);
    writer.delete(2).unwrap();
    assert!(writer.wait_for_deletions(LONG).unwrap());
    let before = world.disk.image();
    assert_eq!(reader.save(request(2)).unwrap().refusal(), Some(Refusal::ReadOnly));
    assert_restores(&reader, 1);
    assert_eq!(reader.delete(1).unwrap_err().kind(), "read_only");
    assert_eq!(reader.rewind(1, None).unwrap_err().kind(), "read_only");
    assert_eq!(reader.add_metrics(1, &BTreeMap::new()).unwrap_err().kind(), "read_only");
    reader.close(Some(LONG)).unwrap();
    assert_eq!(world.disk.image().hash(), before.hash());
}

#[test]
fn a_second_live_writer_is_refused_and_told_who_the_first_is() {
    let world = World::default();
    let first = world.open(options());
    let error = world.try_open(options()).err().unwrap();
    assert_eq!(error.kind(), "locked");
    assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
    first.close(Some(LONG)).unwrap();
    world.open(options());
}

#[test]
fn metrics_and_metadata_come_back_and_later_ones_are_added() {
    let world = World::default();
    let manager = world.open(Options { root_metadata: serde_json::json!({"run": 1}), ..options() });
    let metrics = BTreeMap::from([("loss".to_owned(), f64::NAN), ("acc".to_owned(), 0.5)]);
    let custom_metadata = serde_json::json!({"tokens": 12});
    committed(
        &manager
            .save(SaveRequest { metrics, custom_metadata: custom_metadata.clone(), ..request(1) })
            .unwrap(),
    );
    commit(&manager, 2);
    assert!(manager.metrics(1).unwrap()["loss"].is_nan());
    assert_eq!(manager.manifest(Some(1)).unwrap().custom_metadata, custom_metadata);
    manager.add_metrics(1, &BTreeMap::from([("loss".to_owned(), 0.25)])).unwrap();
    manager.add_metrics(2, &BTreeMap::from([("loss".to_owned(), f64::INFINITY)])).unwrap();
    assert_eq!(
        manager.metrics(1).unwrap(),
        BTreeMap::from([("acc".to_owned(), 0.5), ("loss".to_owned(), 0.25)])
    );
    assert_eq!(manager.best_step(Some(("loss", Mode::Min))).unwrap(), Some(1));
    assert_eq!(manager.best_step(Some(("loss", Mode::Max))).unwrap(), Some(2));
    let error = manager.best_step(Some(("los", Mode::Min))).unwrap_err().to_string();
    assert!(error.contains("`los`: the steps have `acc`, `loss`"), "{error}");
    manager.close(Some(LONG)).unwrap();
    let again = world.open(Options { root_metadata: serde_json::json!({"run": 2}), ..options() });
    assert_eq!(again.root_metadata(), Some(&serde_json::json!({"run": 1})));
}

#[test]
fn steps_beyond_a_signed_integer_are_refused() {
    let world = World::default();
    let manager = world.open(options());
    assert_eq!(manager.save(request(1 << 63)).unwrap_err().kind(), "invalid");
    commit(&manager, (1 << 63) - 1);
    assert_eq!(manager.latest_step().unwrap(), Some((1 << 63) - 1));
}

#[test]
fn preemption_is_agreed_for_the_next_step_that_is_asked_about() {
    let world = World::default();
    let policy = SavePolicy::every_steps(100) | SavePolicy::on_preemption();
    let manager = world.open(Options { save_policy: policy, ..options() });
    commit(&manager, 0);
    assert!(!manager.reached_preemption(6).unwrap());
    manager.request_preemption();
    assert!(manager.reached_preemption(7).unwrap());
    commit(&manager, 7);
}
