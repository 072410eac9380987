//! The same promises on the file system of this machine, through every engine; and singular
//! checkpoints.

#![allow(clippy::unwrap_used, reason = "tests end by it")]

mod common;

use std::path::Path;

use common::*;
use stepwell_core::io::simulated::{Action, Fault, OperationKind};
use stepwell_core::io::{Disk, Engine};
use stepwell_core::load::LoadOptions;
use stepwell_manager::{Checkpoint, Environment, Exists, Manager, Retention, SaveRequest, singular};

#[test]
fn every_engine_saves_restores_retires_and_leaves_nothing_else() {
    for engine in [Engine::Auto, Engine::Uring, Engine::Threads, Engine::Buffered] {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("runs/a");
        let environment = Environment::real(&root, engine).unwrap();
        let options = keeping(Retention::keep_latest(2));
        let manager = Manager::open(&root, options.clone(), environment.clone()).unwrap();
        for step in 1..=4 {
            commit(&manager, step);
        }
        assert_eq!(manager.all_steps().unwrap(), [3, 4]);
        assert_restores(&manager, 3);
        let report =
            manager.checkpoint(None).unwrap().verify(&LoadOptions::default(), &mut |_| true).unwrap();
        assert!(report.damages.is_empty() && report.blocks > 0);
        let second = Manager::open(&root, options.clone(), environment.clone()).err().unwrap();
        assert_eq!(second.kind(), "locked");
        manager.rewind(3, Some("b")).unwrap();
        manager.close(Some(LONG)).unwrap();
        let mut names: Vec<String> = std::fs::read_dir(&root)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, [".branch-b.step_00000004", ".stepwell", "step_00000003"]);
    }
}

#[test]
fn a_flipped_payload_byte_is_found_by_verify() {
    let directory = tempfile::tempdir().unwrap();
    let environment = Environment::real(directory.path(), Engine::Auto).unwrap();
    let manager = Manager::open(directory.path(), options(), environment).unwrap();
    commit(&manager, 1);
    let file = directory.path().join("step_00000001/i0/00000.data");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[4096 + 17] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let report = manager.checkpoint(Some(1)).unwrap().verify(&LoadOptions::default(), &mut |_| true).unwrap();
    assert_eq!(report.damages.len(), 1);
    assert_eq!(report.damages[0].leaves, [0]);
}

#[test]
fn a_checkpoint_that_is_moved_elsewhere_reads_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let environment = Environment::real(directory.path(), Engine::Auto).unwrap();
    let manager = Manager::open(&directory.path().join("a"), options(), environment.clone()).unwrap();
    commit(&manager, 1);
    manager.close(Some(LONG)).unwrap();
    std::fs::create_dir(directory.path().join("b")).unwrap();
    std::fs::rename(directory.path().join("a/step_00000001"), directory.path().join("b/step_00000001"))
        .unwrap();
    let manager = Manager::open(&directory.path().join("b"), options(), environment).unwrap();
    assert_restores(&manager, 1);
}

fn singular(world: &World, value: u8, exists: Exists) -> stepwell_manager::Result<stepwell_manager::Save> {
    let request = SaveRequest { exists, ..SaveRequest::new(0, state(value)) };
    singular::save(Path::new("/models/a"), request, &options(), &world.environment())
}

fn value(world: &World) -> u8 {
    read(&Checkpoint::open(Path::new("/models/a"), &world.environment()).unwrap())[0].1[0]
}

fn siblings(world: &World) -> Vec<String> {
    let image = world.disk.image();
    image.get("/models").unwrap().entries().unwrap().iter().map(|(name, _)| name.to_string()).collect()
}

#[test]
fn a_singular_checkpoint_is_saved_refused_and_replaced() {
    let world = World::default();
    committed(&singular(&world, 1, Exists::Error).unwrap());
    assert_eq!(singular(&world, 2, Exists::Error).unwrap_err().kind(), "step_exists");
    assert_eq!(value(&world), 1);
    committed(&singular(&world, 2, Exists::Replace).unwrap());
    assert_eq!(value(&world), 2);
    world.disk.inject(Fault::on(OperationKind::Exchange, Action::Fail(22)));
    let refused = singular(&world, 3, Exists::Replace).unwrap().wait(Some(LONG)).unwrap().unwrap();
    assert_eq!(refused.error().unwrap().kind(), "invalid");
    assert_eq!(value(&world), 2);
    assert_eq!(siblings(&world), ["a"]);
}

#[test]
fn what_is_no_checkpoint_is_never_replaced() {
    let world = World::default();
    let notes = stepwell_core::io::simulated::ImageNode::dir(vec![]);
    world.disk.plant("/models", &notes).unwrap();
    world.disk.plant("/models/a", &notes).unwrap();
    assert_eq!(singular(&world, 1, Exists::Replace).unwrap_err().kind(), "not_a_step");
    assert_eq!(siblings(&world), ["a"]);
}

/// A singular save of another process that is killed while it writes.
fn killed(world: &World, exists: Exists) {
    let process = world.disk.process();
    kill_at_write(&process, ".tmp-a-");
    let request = SaveRequest { exists, ..SaveRequest::new(0, state(9)) };
    let save =
        singular::save(Path::new("/models/a"), request, &options(), &world.environment_of(&process)).unwrap();
    assert!(save.wait(Some(LONG)).unwrap().unwrap().error().is_some());
    world.disk.set_hook(None);
    assert_eq!(siblings(world).iter().filter(|name| name.starts_with(".tmp-a-")).count(), 1);
}

#[test]
fn dead_path_saves_go_with_the_next_save_to_the_path() {
    let world = World::default();
    killed(&world, Exists::Error);
    committed(&singular(&world, 1, Exists::Error).unwrap());
    assert_eq!((siblings(&world), value(&world)), (vec!["a".to_owned()], 1));
    killed(&world, Exists::Replace);
    committed(&singular(&world, 2, Exists::Replace).unwrap());
    assert_eq!((siblings(&world), value(&world)), (vec!["a".to_owned()], 2));
}

#[test]
fn a_singular_save_takes_nothing_from_others() {
    let world = World::default();
    world.disk.create_dir_all(Path::new("/models")).unwrap();
    let other = stepwell_core::io::simulated::ImageNode::dir(vec![]);
    world.disk.plant(&format!("/models/.tmp-ab-{}-0", "a".repeat(32)), &other).unwrap();
    let environment = world.environment_apart(&world.disk.process());
    let once = std::sync::atomic::AtomicBool::new(false);
    world.disk.set_hook(Some(std::sync::Arc::new(move |_, operation| {
        let first = operation.process == 0 && operation.kind == OperationKind::Write;
        if first && !once.swap(true, std::sync::atomic::Ordering::SeqCst) {
            let request = SaveRequest::new(0, state(2));
            committed(&singular::save(Path::new("/models/a"), request, &options(), &environment).unwrap());
        }
    })));
    let late = singular(&world, 1, Exists::Error).unwrap().wait(Some(LONG)).unwrap().unwrap();
    world.disk.set_hook(None);
    assert_eq!(late.error().unwrap().kind(), "step_exists", "its temporary was there to the end");
    assert_eq!(value(&world), 2);
    assert_eq!(siblings(&world).len(), 2, "{:?}", siblings(&world));
}

#[test]
fn a_writer_takes_nothing_from_a_live_path_save() {
    // The second one is named as the temporaries of steps are.
    for name in ["best", "20240101"] {
        let world = World::default();
        world.open(options()).close(Some(LONG)).unwrap();
        let other = world.environment_of(&world.disk.process());
        let once = std::sync::atomic::AtomicBool::new(false);
        let (environment, part) = (world.environment_apart(&world.disk), format!("{name}-"));
        world.disk.set_hook(Some(std::sync::Arc::new(move |_, operation| {
            let writes = operation.process == 1 && operation.kind == OperationKind::Write;
            if writes
                && operation.path.to_string_lossy().contains(&part)
                && !once.swap(true, std::sync::atomic::Ordering::SeqCst)
            {
                let writer = Manager::open(Path::new(ROOT), options(), environment.clone()).unwrap();
                commit(&writer, 1);
                writer.close(Some(LONG)).unwrap();
            }
        })));
        let path = Path::new(ROOT).join(name);
        committed(&singular::save(&path, SaveRequest::new(0, state(2)), &options(), &other).unwrap());
        world.disk.set_hook(None);
        assert_eq!(read(&Checkpoint::open(&path, &world.environment()).unwrap())[0].1, vec![2; 3000]);
        let mut names = [name, "step_00000001"];
        names.sort_unstable();
        assert_eq!(world.names(), names);
    }
}

#[test]
fn dead_path_saves_in_a_root_go_with_its_next_writer() {
    let world = World::default();
    world.open(options()).close(Some(LONG)).unwrap();
    let process = world.disk.process();
    let kill = process.clone();
    world.disk.set_hook(Some(std::sync::Arc::new(move |_, operation| {
        if operation.kind == OperationKind::Write && operation.path.to_string_lossy().contains(".tmp-best-") {
            kill.kill();
        }
    })));
    let request = SaveRequest::new(0, state(9));
    let save =
        singular::save(Path::new("/run/best"), request, &options(), &world.environment_of(&process)).unwrap();
    assert!(save.wait(Some(LONG)).unwrap().unwrap().error().is_some());
    world.disk.set_hook(None);
    assert_eq!(world.names().len(), 1, "{:?}", world.names());
    world.open(options()).close(Some(LONG)).unwrap();
    assert_eq!(world.names(), [] as [&str; 0]);
}

#[test]
fn a_live_temporary_is_told_from_a_dead_one_on_a_real_disk() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a");
    let environment = Environment::real(directory.path(), Engine::Auto).unwrap();
    let parent = environment.disk.open_dir(directory.path()).unwrap();
    let name = format!(".tmp-a-{}-0", "a".repeat(32));
    let owned = stepwell_manager::lease::own_temporary(&*parent, &name, false).unwrap();
    owned.dir.write_file("x", b"1").unwrap();
    std::fs::create_dir(directory.path().join(format!(".tmp-a-{}-0", "b".repeat(32)))).unwrap();
    let save = |exists| {
        let request = SaveRequest { exists, ..SaveRequest::new(0, state(1)) };
        committed(&singular::save(&path, request, &options(), &environment).unwrap());
        let names = std::fs::read_dir(directory.path()).unwrap();
        names
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != "a")
            .collect()
    };
    let left: Vec<String> = save(Exists::Error);
    assert_eq!(left, [name]);
    drop(owned);
    let left: Vec<String> = save(Exists::Replace);
    assert_eq!(left, [] as [&str; 0]);
}

#[test]
fn trash_of_a_killed_path_save_is_removed() {
    let world = World::default();
    committed(&singular(&world, 1, Exists::Error).unwrap());
    let left = stepwell_core::io::simulated::ImageNode::dir(vec![]);
    let session = "a".repeat(32);
    let long = "n".repeat(200);
    world.disk.plant(&format!("/models/.trash-a-{session}"), &left).unwrap();
    world.disk.plant(&format!("/models/.trash-ab-{session}"), &left).unwrap();
    world.disk.plant(&format!("/models/.tmp-{}-{session}-0", &long[..128]), &left).unwrap();
    for name in ["a", &long] {
        singular::sweep(&Path::new("/models").join(name), &world.environment()).unwrap();
    }
    assert_eq!(siblings(&world), [format!(".trash-ab-{session}"), "a".to_owned()]);
}

#[test]
fn a_disk_filled_by_a_killed_save_is_reopened() {
    let world = World::default();
    let process = world.disk.process();
    let killed = Manager::open(Path::new(ROOT), options(), world.environment_of(&process)).unwrap();
    commit(&killed, 1);
    kill_at_write(&process, ".tmp-");
    assert!(save(&killed, 2).wait(Some(LONG)).unwrap().unwrap().error().is_some());
    drop(killed);
    assert_eq!(world.names().len(), 2, "{:?}", world.names());

    // There is no room for anything.
    let full = || Fault::on(OperationKind::Write, Action::Fail(28));
    world.disk.inject(full().from_then_on());
    assert_eq!(world.try_open(options()).err().unwrap().errno(), Some(28));
    assert_eq!(world.names(), ["step_00000001"], "what the killed save left is gone all the same");
    world.disk.clear_faults();

    // There is room once that is gone.
    world.disk.inject(full());
    let manager = world.open(options());
    assert_restores(&manager, 1);
    commit(&manager, 2);
    assert_eq!(manager.all_steps().unwrap(), [1, 2]);
}
