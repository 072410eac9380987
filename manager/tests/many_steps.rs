//! A root of many steps: what a save costs there, and what its writer sees of what others do to
//! them.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests end by it")]

mod common;

use std::path::Path;
use std::sync::{Arc, Mutex};

use common::*;
use stepwell_core::io::simulated::Moment;
use stepwell_core::io::{Disk as _, Rename};
use stepwell_manager::{Manager, Retention};

fn grown(world: &World, steps: u64) -> Manager {
    let manager = world.open(keeping(Retention::keep_latest(steps)));
    for step in 0..steps {
        commit(&manager, step);
    }
    manager
}

/// Calls of the file system for one more save, retention and deletion included.
fn calls_of_a_save(steps: u64) -> u64 {
    let world = World::default();
    let manager = grown(&world, steps);
    // The first that retires a step.
    commit(&manager, steps);
    manager.close(Some(LONG)).unwrap();
    let manager = world.open(keeping(Retention::keep_latest(steps)));
    // The first of a manager looks into all.
    commit(&manager, steps + 1);
    assert!(manager.wait_for_deletions(LONG).unwrap());
    let before = world.disk.operations();
    commit(&manager, steps + 2);
    assert_eq!(manager.latest_step().unwrap(), Some(steps + 2));
    manager.wait_until_finished(Some(LONG)).unwrap();
    assert!(manager.wait_for_deletions(LONG).unwrap());
    world.disk.operations() - before
}

#[test]
fn a_save_asks_the_disk_no_more_where_there_are_more_steps() {
    let (some, many) = (calls_of_a_save(80), calls_of_a_save(320));
    // A listing is repeated where the directory changes meanwhile, as the deleter does that works
    // beside it.
    assert!(many <= some + 20, "{some} calls with 80 steps, {many} with 320");
}

#[test]
fn training_looks_up_no_name_where_a_step_was_retired() {
    let world = World::default();
    let manager = grown(&world, 3);
    for step in 3..6 {
        commit(&manager, step);
    }
    manager.wait_until_finished(Some(LONG)).unwrap();
    assert!(manager.wait_for_deletions(LONG).unwrap());
    let (training, asked) = (std::thread::current().id(), Arc::new(Mutex::new(Vec::new())));
    let note = Arc::clone(&asked);
    world.disk.set_hook(Some(Arc::new(move |moment, operation| {
        if moment == Moment::Before && std::thread::current().id() == training {
            note.lock().unwrap().push(operation.path.to_owned());
        }
    })));
    let save = save(&manager, 6);
    world.disk.set_hook(None);
    committed(&save);
    // A look at the root itself waits for nothing; for a name it would wait until a disk that is
    // busy with deleting lets the directory go.
    let asked = asked.lock().unwrap();
    assert!(!asked.is_empty());
    assert!(asked.iter().all(|path| path == Path::new(ROOT)), "{asked:?}");
}

#[test]
fn a_writer_sees_what_is_done_to_its_steps_by_hand() {
    let world = World::default();
    let manager = grown(&world, 5);
    let hand = world.disk.process().open_dir(Path::new(ROOT)).unwrap();
    assert_eq!(manager.latest_step().unwrap(), Some(4));

    hand.open_dir("step_00000004").unwrap().remove_file("manifest.json").unwrap();
    assert_eq!(manager.latest_step().unwrap(), Some(3), "its manifest is gone");
    hand.rename("step_00000003", "elsewhere", Rename::NoReplace).unwrap();
    assert_eq!(manager.latest_step().unwrap(), Some(2), "the whole of it is gone");
    assert!(manager.manifest(Some(3)).is_err());
    hand.rename("elsewhere", "step_00000003", Rename::NoReplace).unwrap();
    assert_eq!(manager.latest_step().unwrap(), Some(3), "it is back");
    assert_eq!(manager.manifest(Some(3)).unwrap().step, 3);
    hand.rename("step_00000001", "elsewhere", Rename::NoReplace).unwrap();
    assert_eq!(manager.all_steps().unwrap(), [0, 2, 3]);
    commit(&manager, 5);
    assert_eq!(manager.all_steps().unwrap(), [0, 2, 3, 5]);
}

#[test]
fn a_step_that_loses_a_file_is_soon_not_counted() {
    let world = World::default();
    let manager = grown(&world, 100);
    let hand = world.disk.process().open_dir(Path::new(ROOT)).unwrap();
    hand.open_dir("step_00000090/i0").unwrap().remove_file("00000.data").unwrap();
    // Two rounds through all of them at most.
    for step in 100..104 {
        commit(&manager, step);
    }
    manager.wait_until_finished(Some(LONG)).unwrap();
    let steps = manager.all_steps().unwrap();
    assert!(steps.contains(&90), "a damaged step is not deleted");
    assert_eq!(steps.len(), 101, "a hundred whole ones are kept beside it");
}

#[test]
fn a_step_that_was_thinned_is_known_by_what_is_left_of_it() {
    let world = World::default();
    let manager = world.open(keeping(Retention::keep_latest(1) | Retention::keep_every_items(1, ["params"])));
    for step in 0..3 {
        commit(&manager, step);
    }
    manager.wait_until_finished(Some(LONG)).unwrap();
    let items: Vec<String> =
        manager.manifest(Some(0)).unwrap().items.iter().map(|item| item.name.clone()).collect();
    assert_eq!(items, ["params"]);
}
