//! Files of a retired step are written over by the next save, and nobody who has one of them sees other bytes.

#![allow(clippy::unwrap_used, reason = "tests end by it")]

mod common;

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use common::*;
use stepwell_core::io::simulated::{Action, Fault, Kind};
use stepwell_core::io::{Disk, Engine};
use stepwell_core::load::LoadOptions;
use stepwell_manager::{Environment, Manager, Options, Retention, SaveRequest};

const ENOSPC: i32 = 28;

fn overwriting() -> Options {
    Options { overwrite_from_bytes: Some(1), ..keeping(Retention::keep_latest(1)) }
}

/// The identity of a step's first data file.
fn file_of(world: &World, name: &str) -> (u64, u64) {
    let root = world.disk.open_dir(Path::new(ROOT)).unwrap();
    root.stat(&format!("{name}/i0/00000.data")).unwrap().unwrap().id
}

#[test]
fn a_save_writes_over_the_files_of_the_step_that_was_retired_before() {
    let world = World::default();
    let manager = world.open(overwriting());
    commit(&manager, 1);
    let first = file_of(&world, "step_00000001");
    commit(&manager, 2);
    let names = world.names();
    assert_eq!((names.len(), names[0].starts_with(".trash-00000001-")), (2, true), "{names:?}");
    // One that is larger, and one that is smaller again: what was written before shows nowhere.
    for (step, len) in [(3_u64, 9000), (4, 8), (5, 3000)] {
        committed(&manager.save(SaveRequest::new(step, state_of(&vec![step as u8; len]))).unwrap());
        let checkpoint = manager.checkpoint(Some(step)).unwrap();
        assert_eq!(read(&checkpoint)[0].1, vec![step as u8; len]);
        assert!(checkpoint.verify(&LoadOptions::default(), &mut |_| true).unwrap().is_clean());
        drop(checkpoint);
        let files: Vec<_> = manager.manifest(Some(step)).unwrap().files.clone();
        let root = world.disk.open_dir(Path::new(ROOT)).unwrap();
        for file in files {
            let stat = root.stat(&format!("step_{step:08}/{}", file.path)).unwrap().unwrap();
            assert_eq!(stat.len, file.length);
        }
        assert_eq!(file_of(&world, &format!("step_{step:08}")) == first, step != 4, "step {step}");
    }
    assert!(manager.wait_for_deletions(LONG).unwrap());
    assert_eq!(world.names().len(), 2, "the one that waits for the next save");
    manager.close(Some(LONG)).unwrap();
    assert_eq!(world.names(), ["step_00000005"], "an end leaves nothing that waits");
}

#[test]
fn a_root_that_is_told_to_deletes_all_at_once() {
    let world = World::default();
    let manager = world.open(Options { overwrite_from_bytes: None, ..overwriting() });
    commit(&manager, 1);
    let first = file_of(&world, "step_00000001");
    for step in 2..=4 {
        commit(&manager, step);
        assert_ne!(file_of(&world, &format!("step_{step:08}")), first);
    }
    // And small files are not worth it.
    let manager = {
        manager.close(Some(LONG)).unwrap();
        world.open(Options { overwrite_from_bytes: Some(1 << 20), ..overwriting() })
    };
    let fourth = file_of(&world, "step_00000004");
    for step in 5..=7 {
        commit(&manager, step);
        assert_ne!(file_of(&world, &format!("step_{step:08}")), fourth);
    }
}

#[test]
fn a_step_that_is_being_read_is_not_written_over() {
    let world = World::default();
    let manager = world.open(overwriting());
    commit(&manager, 1);
    let reader = manager.checkpoint(Some(1)).unwrap();
    for step in 2..=5 {
        commit(&manager, step);
        assert_restores(&manager, step);
        assert_eq!(read(&reader)[0].1, vec![1; 3000], "after step {step}");
    }
}

#[test]
fn a_file_that_somebody_has_open_without_a_lease_keeps_its_bytes() {
    let world = World::default();
    let manager = world.open(overwriting());
    commit(&manager, 1);
    let root = world.disk.open_dir(Path::new(ROOT)).unwrap();
    let copied = root.open_file("step_00000001/i0/00000.data").unwrap();
    let before = copied.read_at(0, 1 << 20).unwrap();
    for step in 2..=4 {
        commit(&manager, step);
    }
    assert_eq!(copied.read_at(0, 1 << 20).unwrap(), before);
    assert_restores(&manager, 4);
}

#[test]
fn on_a_full_disk_what_waits_to_be_written_over_is_deleted_first() {
    let world = World::default();
    let manager = world.open(overwriting());
    commit(&manager, 1);
    commit(&manager, 2);
    assert_eq!(world.names().len(), 2);
    world.disk.inject(Fault::on(Kind::CreateDir, Action::Fail(ENOSPC)));
    let before = file_of(&world, &world.names()[0]);
    commit(&manager, 3);
    assert_ne!(file_of(&world, "step_00000003"), before);
    assert_restores(&manager, 3);
}

#[test]
fn a_file_that_cannot_be_taken_over_is_made_anew() {
    for kind in [Kind::Rename, Kind::Allocate] {
        for action in [Action::Fail(5), Action::FailAfterwards(5), Action::Fail(ENOSPC)] {
            let world = World::default();
            let manager = world.open(overwriting());
            commit(&manager, 1);
            commit(&manager, 2);
            world.disk.inject(Fault::on(kind, action).at("/i0/00000.data"));
            // Larger than what it would write over, so that room is asked for.
            committed(&manager.save(SaveRequest::new(3, state_of(&[3; 9000]))).unwrap());
            assert_eq!(
                read(&manager.checkpoint(Some(3)).unwrap())[0].1,
                vec![3; 9000],
                "{kind:?} {action:?}"
            );
            commit(&manager, 4);
            manager.close(Some(LONG)).unwrap();
            assert_eq!(world.names(), ["step_00000004"], "{kind:?} {action:?}");
        }
    }
}

#[test]
fn a_save_whose_old_place_cannot_be_synced_is_not_committed() {
    let world = World::default();
    let manager = world.open(overwriting());
    commit(&manager, 1);
    commit(&manager, 2);
    world.disk.inject(Fault::on(Kind::SyncDir, Action::Fail(5)).at(".trash-"));
    let error = save(&manager, 3).wait(Some(LONG)).unwrap().unwrap().error().unwrap().kind();
    assert_eq!(error, "save_failed");
    assert_eq!(manager.all_steps().unwrap(), [2]);
    commit(&manager, 3);
    assert_restores(&manager, 3);
}

#[test]
fn on_a_real_disk_hard_links_and_open_files_keep_their_bytes() {
    for engine in [Engine::Auto, Engine::Buffered] {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("run");
        let environment = Environment::real(&root, engine).unwrap();
        let manager = Manager::open(&root, overwriting(), environment).unwrap();
        let file = |step: u64| root.join(format!("step_{step:08}/i0/00000.data"));
        let inode = |step| std::fs::metadata(file(step)).unwrap().ino();
        commit(&manager, 1);
        let first = inode(1);
        commit(&manager, 2);
        commit(&manager, 3);
        if inode(3) != first {
            eprintln!("SKIPPED: the file system of {} gives no leases", root.display());
            return;
        }
        // A backup of hard links, and a copy that is under way.
        let third = std::fs::read(file(3)).unwrap();
        std::fs::hard_link(file(3), directory.path().join("backup")).unwrap();
        commit(&manager, 4);
        let fourth = std::fs::read(file(4)).unwrap();
        let mut open = std::fs::File::open(file(4)).unwrap();
        for step in 5..=8 {
            commit(&manager, step);
            assert_restores(&manager, step);
        }
        assert_eq!(std::fs::read(directory.path().join("backup")).unwrap(), third);
        let mut still = Vec::new();
        open.read_to_end(&mut still).unwrap();
        assert_eq!(still, fourth);
        manager.close(Some(LONG)).unwrap();
        let left = std::fs::read_dir(&root).unwrap().count();
        assert_eq!(left, 2, "the step, and .stepwell");
    }
}
