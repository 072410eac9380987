//! A disk that does not answer is not taken for an answer: no step is left out of a listing for an
//! I/O error.

#![allow(clippy::unwrap_used, reason = "tests end by it")]

mod common;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::*;
use stepwell_core::format::manifest::Manifest;
use stepwell_core::io::Engine;
use stepwell_core::io::simulated::{Action, Fault, ImageNode, OperationKind};
use stepwell_manager::{Environment, Manager, Mode, Options, Retention};

const EIO: i32 = 5;
const EACCES: i32 = 13;
const EMFILE: i32 = 24;
const ESTALE: i32 = 116;

#[test]
fn an_error_in_reading_a_manifest_reveals_no_older_step() {
    let world = World::default();
    let manager = world.open(options());
    for step in 1..=3 {
        commit(&manager, step);
    }
    for errno in [EIO, EACCES, EMFILE] {
        for kind in [OperationKind::Stat, OperationKind::OpenFile, OperationKind::Read] {
            let manager = world.open(Options { read_only: true, ..options() });
            world.disk.inject(Fault::on(kind, Action::Fail(errno)).at("step_00000003/manifest.json"));
            let error = manager.latest_step().unwrap_err();
            assert_eq!((error.kind(), error.errno()), ("io", Some(errno)), "{kind:?}");
            assert!(error.to_string().contains("step_00000003/manifest.json"), "{error}");
            world.disk.clear_faults();
            assert_eq!(manager.latest_step().unwrap(), Some(3));
        }
    }
}

#[test]
fn an_error_of_a_file_length_reveals_no_older_step() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    commit(&manager, 2);
    world.disk.inject(Fault::on(OperationKind::Stat, Action::Fail(EIO)).at("step_00000002/i0/00000.data"));
    let error = manager.latest_step().unwrap_err();
    assert_eq!((error.kind(), error.errno()), ("io", Some(EIO)));
    assert_eq!(manager.latest_step().unwrap(), Some(2));
}

#[test]
fn retention_deletes_nothing_while_it_cannot_count() {
    let world = World::default();
    let manager = world.open(options());
    for step in 1..=4 {
        commit(&manager, step);
    }
    manager.close(Some(LONG)).unwrap();
    let manager = world.open(Options { retention: Retention::keep_latest(2), ..options() });
    let eio = |kind| Fault::on(kind, Action::Fail(EIO));
    world.disk.inject(eio(OperationKind::Stat).at("step_00000004/i0/00000.data"));
    assert_eq!(manager.apply_retention().unwrap_err().errno(), Some(EIO));
    // Forgotten, and not read again by this; nor by what comes then.
    let unreadable = || world.disk.inject(eio(OperationKind::Read).at("step_00000004/manifest.json"));
    unreadable();
    assert_eq!(manager.reload().unwrap_err().errno(), Some(EIO));
    unreadable();
    assert_eq!(manager.apply_retention().unwrap_err().errno(), Some(EIO));
    assert_eq!(manager.all_steps().unwrap(), [1, 2, 3, 4]);
    assert_eq!(manager.apply_retention().unwrap(), [1, 2]);
}

#[test]
fn unreadable_metrics_are_reported_and_delete_nothing() {
    let world = World::default();
    let best = || Options { retention: Retention::keep_best(1, "accuracy", Mode::Max), ..options() };
    let manager = world.open(options());
    for (step, accuracy) in [(1, 0.9), (2, 0.5), (3, 0.1)] {
        commit(&manager, step);
        manager.add_metrics(step, &BTreeMap::from([("accuracy".to_owned(), accuracy)])).unwrap();
    }
    let first = manager.manifest(Some(1)).unwrap().attempt.clone();
    let sidecar = format!("metrics/{}-{}-", first.session, first.counter);
    manager.close(Some(LONG)).unwrap();
    for errno in [EIO, EACCES, EMFILE, ESTALE] {
        for kind in [OperationKind::OpenFile, OperationKind::Read] {
            let fail = || world.disk.inject(Fault::on(kind, Action::Fail(errno)).at(&sidecar));
            let manager = world.open(best());
            fail();
            let error = manager.apply_retention().unwrap_err();
            assert_eq!((error.kind(), error.errno()), ("io", Some(errno)), "{kind:?}");
            fail();
            assert_eq!(manager.best_step(None).unwrap_err().errno(), Some(errno));
            fail();
            assert_eq!(manager.metrics(1).unwrap_err().errno(), Some(errno));
            fail();
            assert_eq!(manager.report().unwrap_err().errno(), Some(errno));
            assert_eq!(manager.all_steps().unwrap(), [1, 2, 3]);
            manager.close(Some(LONG)).unwrap();
        }
    }
    // Foreign and missing files say nothing about any step.
    let other = format!("/run/.stepwell/metrics/{}-7-{}.json", "a".repeat(32), "b".repeat(32));
    world.disk.plant(&other, &ImageNode::file(Arc::new(b"no json".to_vec()))).unwrap();
    let manager = world.open(Options { read_only: true, ..best() });
    assert_eq!(manager.best_step(None).unwrap(), Some(1));
    let manager = world.open(best());
    assert_eq!(manager.apply_retention().unwrap(), [2]);
    assert_eq!(manager.all_steps().unwrap(), [1, 3]);
}

#[test]
fn a_step_retired_by_another_process_is_gone() {
    let world = World::default();
    let writer = world.open(options());
    commit(&writer, 1);
    commit(&writer, 2);
    for kind in [OperationKind::Stat, OperationKind::OpenFile] {
        let reader = world.disk.process();
        let environment = world.environment_of(&reader);
        let read_only = Options { read_only: true, ..options() };
        let manager = Manager::open(Path::new(ROOT), read_only, environment).unwrap();
        reader.inject(Fault::on(kind, Action::Fail(ESTALE)).at("step_00000002/manifest.json").from_then_on());
        assert_eq!(manager.latest_step().unwrap(), Some(1), "{kind:?}");
        reader.clear_faults();
        assert_eq!(manager.latest_step().unwrap(), Some(2));
    }
}

#[test]
fn a_step_replaced_during_a_listing_is_not_damaged() {
    let world = World::default();
    let writer = std::sync::Arc::new(world.open(options()));
    commit(&writer, 1);
    commit(&writer, 2);
    let reader = world.disk.process();
    let environment = world.environment_of(&reader);
    let manager =
        Manager::open(Path::new(ROOT), Options { read_only: true, ..options() }, environment).unwrap();
    let once = std::sync::atomic::AtomicBool::new(false);
    let replacer = std::sync::Arc::clone(&writer);
    world.disk.set_hook(Some(std::sync::Arc::new(move |moment, operation| {
        let look = moment == stepwell_core::io::simulated::Moment::Before && operation.process == 1;
        if look
            && operation.path.ends_with("step_00000002/i0/00000.data")
            && !once.swap(true, std::sync::atomic::Ordering::SeqCst)
        {
            let exists = stepwell_manager::Exists::Replace;
            let state = state_of(&[7; 9000]);
            let request = stepwell_manager::SaveRequest::new(2, state);
            committed(&replacer.save(stepwell_manager::SaveRequest { exists, ..request }).unwrap());
        }
    })));
    assert_eq!(manager.latest_step().unwrap(), Some(2));
    world.disk.set_hook(None);
}

#[test]
fn a_writer_is_not_opened_on_a_root_that_it_cannot_read() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    manager.close(Some(LONG)).unwrap();
    world.disk.inject(Fault::on(OperationKind::Read, Action::Fail(EIO)).at("step_00000001/manifest.json"));
    let error = world.try_open(options()).err().unwrap();
    assert_eq!((error.kind(), error.errno()), ("io", Some(EIO)));
    assert_eq!(world.open(options()).latest_step().unwrap(), Some(1));
}

#[test]
fn a_manifest_replaced_in_place_is_read_again() {
    let directory = tempfile::tempdir().unwrap();
    let environment = Environment::real(directory.path(), Engine::Auto).unwrap();
    let manager = Manager::open(directory.path(), options(), environment).unwrap();
    commit(&manager, 1);
    let before = manager.manifest(Some(1)).unwrap();
    let file = directory.path().join("step_00000001/manifest.json");
    let changed = Manifest { committed_unix_ns: before.committed_unix_ns ^ 1, ..(*before).clone() };
    let bytes = changed.encode().unwrap();
    assert_eq!(bytes.len() as u64, std::fs::metadata(&file).unwrap().len());
    // Past the tick of the file system's clock.
    std::thread::sleep(Duration::from_millis(50));
    std::fs::OpenOptions::new().write(true).open(&file).unwrap().write_all_at(&bytes, 0).unwrap();
    assert_eq!(manager.manifest(Some(1)).unwrap().committed_unix_ns, changed.committed_unix_ns);
}
