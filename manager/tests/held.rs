//! Held steps stay; retired steps are deleted.

#![allow(clippy::unwrap_used, reason = "tests end by it")]

mod common;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use common::*;
use stepwell_core::io::Disk;
use stepwell_core::io::simulated::{Action, Fault, Moment, OperationKind};
use stepwell_manager::retire::Deleter;
use stepwell_manager::{Advice, Checkpoint, Exists, Retention, SaveRequest};

#[test]
fn a_step_that_this_manager_holds_is_not_deleted() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    let hold = manager.hold(1).unwrap();
    let error = manager.delete(1).unwrap_err();
    assert_eq!(error.kind(), "locked");
    assert!(error.to_string().contains("step 1") && error.to_string().contains("this manager"), "{error}");
    assert_restores(&manager, 1);
    drop(hold);
    manager.delete(1).unwrap();
    assert_eq!(manager.all_steps().unwrap(), [] as [u64; 0]);
}

#[test]
fn a_step_that_this_manager_holds_is_not_replaced() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    let again = || SaveRequest { exists: Exists::Replace, ..SaveRequest::new(1, state(9)) };
    let hold = manager.hold(1).unwrap();
    let error = manager.save(again()).unwrap_err();
    assert_eq!(error.kind(), "locked");
    let text = error.to_string();
    assert!(text.contains("step 1") && text.contains("this manager holds it"), "{text}");
    assert_eq!(error.advice(), Some(Advice::ReleaseHold));
    assert_restores(&manager, 1);
    drop(hold);
    committed(&manager.save(again()).unwrap());
    assert_value(&manager, 1, 9);
}

#[test]
fn a_hold_of_a_step_that_is_being_replaced_gets_the_new_one() {
    let world = World::default();
    let manager = Arc::new(world.open(options()));
    commit(&manager, 1);
    let held = world.disk.hold_writes();
    let save =
        manager.save(SaveRequest { exists: Exists::Replace, ..SaveRequest::new(1, state(9)) }).unwrap();
    let (holder, other) = (mpsc::channel(), Arc::clone(&manager));
    let holding = std::thread::spawn(move || {
        let hold = other.hold(1).unwrap();
        holder.0.send(()).unwrap();
        hold
    });
    assert!(holder.1.recv_timeout(Duration::from_millis(100)).is_err());
    held.store(false, Ordering::SeqCst);
    committed(&save);
    let hold = holding.join().unwrap();
    assert_value(&manager, 1, 9);
    assert_eq!(manager.delete(1).unwrap_err().kind(), "locked");
    drop(hold);
}

#[test]
fn a_step_that_another_process_has_leased_is_not_deleted() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    let other = world.disk.process();
    let reader = Checkpoint::open(Path::new("/run/step_00000001"), &world.environment_of(&other)).unwrap();
    let error = manager.delete(1).unwrap_err();
    assert_eq!(error.kind(), "locked");
    assert!(error.to_string().contains("/run/step_00000001/.lease"), "{error}");
    assert_eq!(read(&reader)[0].1, vec![1; 3000]);
    assert_restores(&manager, 1);
    drop(reader);
    manager.delete(1).unwrap();
    manager.close(Some(LONG)).unwrap();
    assert_eq!(world.names(), [] as [&str; 0]);
}

#[test]
fn a_hold_of_a_step_that_is_not_there_leaves_nothing_held() {
    let world = World::default();
    let manager = world.open(options());
    assert_eq!(manager.hold(1).err().unwrap().kind(), "step_not_found");
    commit(&manager, 1);
    manager.delete(1).unwrap();
}

#[test]
fn retention_that_comes_while_a_step_is_being_held_leaves_it() {
    let world = World::default();
    let manager = Arc::new(world.open(keeping(Retention::keep_latest(1))));
    commit(&manager, 1);
    let (saver, once) = (Arc::clone(&manager), AtomicBool::new(false));
    // Right after the hold has leased the step.
    world.disk.set_hook(Some(Arc::new(move |moment, operation| {
        let leased = moment == Moment::After && operation.kind == OperationKind::Lock;
        if leased && operation.path.ends_with("step_00000001/.lease") && !once.swap(true, Ordering::SeqCst) {
            commit(&saver, 2);
        }
    })));
    let hold = manager.hold(1).unwrap();
    world.disk.set_hook(None);
    assert_eq!(manager.all_steps().unwrap(), [1, 2]);
    assert_eq!(hold.step(), 1);
    drop(hold);
}

#[test]
fn a_hold_during_retention_is_honest() {
    let world = World::default();
    let manager = Arc::new(world.open(keeping(Retention::keep_latest(1))));
    commit(&manager, 1);
    let (sender, held) = mpsc::channel();
    let (holder, once) = (Arc::clone(&manager), AtomicBool::new(false));
    // Retention has decided, and is about to rename.
    world.disk.set_hook(Some(Arc::new(move |moment, operation| {
        let rename = moment == Moment::Before && operation.kind == OperationKind::Rename;
        if rename && operation.path.ends_with("step_00000001") && !once.swap(true, Ordering::SeqCst) {
            let (sender, holder) = (sender.clone(), Arc::clone(&holder));
            let thread = std::thread::spawn(move || sender.send(holder.hold(1).map(drop)).unwrap());
            let end = Instant::now() + Duration::from_millis(200);
            while !thread.is_finished() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    })));
    commit(&manager, 2);
    let answer = held.recv_timeout(LONG).unwrap();
    world.disk.set_hook(None);
    assert_eq!(answer.unwrap_err().kind(), "step_not_found");
    assert_eq!(manager.all_steps().unwrap(), [2]);
}

#[test]
fn what_retention_had_taken_away_before_it_failed_is_deleted() {
    let world = World::default();
    let manager = world.open(options());
    for step in 1..=3 {
        commit(&manager, step);
    }
    manager.close(Some(LONG)).unwrap();
    let manager = world.open(keeping(Retention::keep_latest(1)));
    world.disk.inject(Fault::on(OperationKind::Rename, Action::Fail(5)).at("step_00000002"));
    assert_eq!(manager.apply_retention().unwrap_err().errno(), Some(5));
    assert!(manager.wait_for_deletions(LONG).unwrap());
    assert_eq!(world.names(), ["step_00000002", "step_00000003"]);
    assert_eq!(manager.apply_retention().unwrap(), [2]);
}

#[test]
fn what_is_out_of_sight_but_not_durably_so_is_not_deleted() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    commit(&manager, 2);
    manager.close(Some(LONG)).unwrap();
    let manager = world.open(keeping(Retention::keep_latest(1)));
    world.disk.inject(Fault::on(OperationKind::SyncDir, Action::Fail(5)));
    manager.apply_retention().unwrap_err();
    assert!(manager.wait_for_deletions(LONG).unwrap());
    let names = world.names();
    assert!(names.len() == 2 && names[0].starts_with(".trash-"), "{names:?}");
    manager.close(Some(LONG)).unwrap();
    world.open(options()).close(Some(LONG)).unwrap();
    assert_eq!(world.names(), ["step_00000002"]);
}

#[test]
fn a_hanging_deletion_blocks_no_save_on_a_full_disk() {
    let world = World::default();
    let root = world.disk.create_dir_all(Path::new(ROOT)).unwrap();
    root.create_dir(".trash-x").unwrap().write_file("f", b"1").unwrap();
    let (release, released) = mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    world.disk.set_hook(Some(Arc::new(move |moment, operation| {
        if moment == Moment::Before && operation.kind == OperationKind::RemoveFile {
            let _ = released.lock().unwrap().recv();
        }
    })));
    let deleter = Deleter::new(root, world.clock.clone(), Duration::ZERO, None);
    deleter.enqueue([".trash-x".to_owned()]);
    let begun = Instant::now();
    assert!(!deleter.empty_now(Duration::from_millis(50)));
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert!(!deleter.drain(Duration::ZERO), "it is not done, and does not say so");
    drop(release);
    assert!(deleter.drain(LONG));
    assert!(deleter.stop(LONG));
}

#[test]
fn a_deleter_that_is_idle_knows_what_readers_hold() {
    let world = World::default();
    let manager = world.open(options());
    for step in 0..30 {
        commit(&manager, step);
    }
    let root = world.disk.open_dir(Path::new(ROOT)).unwrap();
    let deleter = Deleter::new(root, world.clock.clone(), Duration::ZERO, None);
    for step in 0..30 {
        let name = format!("step_{step:08}");
        let held = Checkpoint::open(Path::new(&format!("{ROOT}/{name}")), &world.environment()).unwrap();
        let before = deleter.held().len();
        deleter.enqueue([name]);
        assert!(deleter.drain(LONG));
        assert_eq!(deleter.held().len(), before + 1, "{step}");
        // Kept: it is tried again and again.
        std::mem::forget(held);
    }
    assert!(deleter.stop(LONG));
}

#[test]
fn an_uncertain_name_is_settled_by_the_next_save() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    let root_sync = || Fault::on(OperationKind::SyncDir, Action::Fail(5)).at("/run").after(4);
    world.disk.inject(root_sync());
    assert_eq!(
        save(&manager, 2).wait(Some(LONG)).unwrap().unwrap().error().unwrap().kind(),
        "durability_uncertain"
    );
    assert_eq!(manager.all_steps().unwrap(), [1]);
    // The root can be synced again: it is there, and listed.
    assert_eq!(manager.save(request(2)).unwrap_err().kind(), "step_exists");
    assert_eq!(manager.all_steps().unwrap(), [1, 2]);
    assert_restores(&manager, 2);

    // It still cannot: the new save takes its place.
    world.disk.inject(root_sync());
    assert!(save(&manager, 3).wait(Some(LONG)).unwrap().unwrap().error().is_some());
    world.disk.inject(Fault::on(OperationKind::SyncDir, Action::Fail(5)).at("/run"));
    committed(&manager.save(SaveRequest::new(3, state(33))).unwrap());
    assert_eq!(manager.all_steps().unwrap(), [1, 2, 3]);
    assert_value(&manager, 3, 33);
    manager.close(Some(LONG)).unwrap();
    assert_eq!(world.names().len(), 3);
}
