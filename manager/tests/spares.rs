//! Files of a retired step are written over by the next save, and nobody who has one of them sees
//! other bytes.

#![allow(clippy::unwrap_used, reason = "tests end by it")]

mod common;

use std::collections::BTreeMap;
use std::io::{Read, Seek};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::*;
use stepwell_core::io::simulated::{Action, Fault, Moment, OperationKind};
use stepwell_core::io::{Disk, Engine};
use stepwell_core::load::LoadOptions;
use stepwell_core::sys::testing::absent;
use stepwell_manager::{Checkpoint, Environment, Manager, Options, Retention, SaveRequest};

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
fn a_save_overwrites_the_files_of_the_last_retired_step() {
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
        assert!(checkpoint.verify(&LoadOptions::default(), &mut |_| true).unwrap().damages.is_empty());
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
fn a_reader_of_a_retiring_step_hears_that_it_is_gone() {
    let world = World::default();
    let manager = world.open(overwriting());
    commit(&manager, 1);
    let other = world.disk.process();
    let (at_the_lease, retired) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (reached, may) = (Arc::clone(&at_the_lease), Arc::clone(&retired));
    world.disk.set_hook(Some(Arc::new(move |moment, operation| {
        if moment == Moment::Before && operation.process == 1 && operation.kind == OperationKind::Lock {
            reached.store(true, Ordering::SeqCst);
            while !may.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    })));
    let environment = world.environment_of(&other);
    let reader = std::thread::spawn(move || {
        let start = Instant::now();
        let opened = Checkpoint::open(Path::new("/run/step_00000001"), &environment).map(drop);
        (opened, start.elapsed())
    });
    let until = Instant::now() + LONG;
    while !at_the_lease.load(Ordering::SeqCst) {
        assert!(Instant::now() < until, "the reader has not come to the lease");
        std::thread::sleep(Duration::from_millis(1));
    }
    // Its lease is locked from now on, until the next save.
    commit(&manager, 2);
    assert!(world.names()[0].starts_with(".trash-00000001-"));
    retired.store(true, Ordering::SeqCst);
    let (opened, waited) = reader.join().unwrap();
    assert!(opened.is_err() && waited < Duration::from_secs(30), "{opened:?} after {waited:?}");
}

#[test]
fn an_open_file_without_a_lease_keeps_its_bytes() {
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
fn on_a_full_disk_spare_files_are_deleted_first() {
    let world = World::default();
    let manager = world.open(overwriting());
    commit(&manager, 1);
    commit(&manager, 2);
    assert_eq!(world.names().len(), 2);
    world.disk.inject(Fault::on(OperationKind::CreateDir, Action::Fail(ENOSPC)));
    let root = world.disk.open_dir(Path::new(ROOT)).unwrap();
    let waits = root.stat(&format!("{}/.spare-0", world.names()[0])).unwrap().unwrap().id;
    commit(&manager, 3);
    assert_ne!(file_of(&world, "step_00000003"), waits);
    assert_restores(&manager, 3);
}

#[test]
fn a_file_that_cannot_be_taken_over_is_made_anew() {
    for kind in [OperationKind::Rename, OperationKind::Allocate] {
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
    world.disk.inject(Fault::on(OperationKind::SyncDir, Action::Fail(5)).at(".trash-"));
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
            return absent("leases", &root.display());
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

/// Copies as `tar` and `rsync` do: it opens files through directory descriptors, whatever the
/// directories' current names.
fn copier(root: &Path, stop: &AtomicBool) -> (u64, u64) {
    let (mut opened, mut changed) = (0, 0);
    let mut dirs: BTreeMap<PathBuf, std::fs::File> = BTreeMap::new();
    while !stop.load(Ordering::Relaxed) {
        for entry in std::fs::read_dir(root).unwrap().flatten() {
            if entry.file_name().to_string_lossy().starts_with("step_")
                && let Ok(dir) = std::fs::File::open(entry.path().join("i0"))
            {
                dirs.entry(entry.path()).or_insert(dir);
            }
        }
        while dirs.len() > 3 {
            dirs.pop_first();
        }
        for _ in 0..200 {
            for dir in dirs.values() {
                let path = format!("/proc/self/fd/{}/00000.data", dir.as_raw_fd());
                let Ok(mut file) = std::fs::File::open(path) else { continue };
                opened += 1;
                // Looked at twice only where another step may be what was opened: that takes time,
                // and the file must be found closed now and then.
                let at = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
                if !at.to_string_lossy().contains("/.tmp-") {
                    continue;
                }
                let mut looks = [Vec::new(), Vec::new()];
                for look in &mut looks {
                    file.rewind().unwrap();
                    file.read_to_end(look).unwrap();
                    std::thread::sleep(Duration::from_millis(20));
                }
                changed += u64::from(looks[0] != looks[1]);
            }
        }
    }
    (opened, changed)
}

#[test]
fn a_link_during_the_open_of_a_retired_file_is_safe() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("run");
    let manager =
        Manager::open(&root, overwriting(), Environment::real(&root, Engine::Buffered).unwrap()).unwrap();
    commit(&manager, 1);
    let stop = AtomicBool::new(false);
    let (mut before, mut written_over) = ([0, inode(&root, 1)], 0);
    let (opened, changed) = std::thread::scope(|scope| {
        let copier = scope.spawn(|| copier(&root, &stop));
        let stopping = Stop(&stop);
        let start = Instant::now();
        for step in 2.. {
            committed(&manager.save(SaveRequest::new(step, state_of(&vec![step as u8; 200_000]))).unwrap());
            written_over += u64::from(inode(&root, step) == before[0]);
            before = [before[1], inode(&root, step)];
            std::thread::sleep(Duration::from_millis(5));
            if start.elapsed() > Duration::from_secs(5) {
                break;
            }
        }
        drop(stopping);
        copier.join().unwrap()
    });
    if written_over == 0 {
        return absent("leases", &format!("no file of {} was written over", root.display()));
    }
    assert!(opened > 100, "{opened}");
    assert_eq!(changed, 0, "of {opened}");
}

/// The inode of the step's data file.
fn inode(root: &Path, step: u64) -> u64 {
    std::fs::metadata(root.join(format!("step_{step:08}/i0/00000.data"))).unwrap().ino()
}

/// Says to another thread that the test is over, however it ends.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Links as `cp -al` does: it gives files of steps a second name, through directory descriptors.
/// Counts the links, and those whose content changed.
fn linker(root: &Path, links: &Path, stop: &AtomicBool, linked: &AtomicU64) -> u64 {
    let mut changed = 0;
    while !stop.load(Ordering::Relaxed) {
        let mut dirs: BTreeMap<u64, std::fs::File> = BTreeMap::new();
        for entry in std::fs::read_dir(root).unwrap().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if let Some(step) = name.strip_prefix("step_").and_then(|step| step.parse().ok())
                && let Ok(dir) = std::fs::File::open(entry.path().join("i0"))
            {
                dirs.insert(step, dir);
            }
        }
        for (step, dir) in dirs {
            let link = links.join(step.to_string());
            let name = format!("/proc/self/fd/{}/00000.data", dir.as_raw_fd());
            if std::fs::hard_link(name, &link).is_err() {
                continue; // it has been retired
            }
            std::thread::sleep(Duration::from_millis(step % 4 * 10));
            let bytes = std::fs::read(&link).unwrap();
            changed +=
                u64::from(bytes.get(4096..4096 + 200_000) != Some(&*vec![(step % 251) as u8; 200_000]));
            linked.fetch_add(1, Ordering::Relaxed);
            std::fs::remove_file(&link).unwrap();
        }
    }
    changed
}

#[test]
fn a_link_made_during_retirement_keeps_the_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let (root, links) = (directory.path().join("run"), directory.path().join("links"));
    std::fs::create_dir(&links).unwrap();
    let manager =
        Manager::open(&root, overwriting(), Environment::real(&root, Engine::Buffered).unwrap()).unwrap();
    let (stop, linked) = (AtomicBool::new(false), AtomicU64::new(0));
    let (mut before, mut written_over) = ([0; 2], 0);
    let changed = std::thread::scope(|scope| {
        let linker = scope.spawn(|| linker(&root, &links, &stop, &linked));
        let stopping = Stop(&stop);
        let start = Instant::now();
        for step in 0.. {
            let bytes = vec![(step % 251) as u8; 200_000];
            committed(&manager.save(SaveRequest::new(step, state_of(&bytes))).unwrap());
            written_over += u64::from(inode(&root, step) == before[0]);
            before = [before[1], inode(&root, step)];
            let enough = written_over > 20 && linked.load(Ordering::Relaxed) > 100;
            if enough || start.elapsed() > Duration::from_secs(20) {
                break;
            }
        }
        drop(stopping);
        linker.join().unwrap()
    });
    let linked = linked.into_inner();
    if written_over == 0 {
        absent("leases", &format!("no file of {} was written over", root.display()));
    }
    assert!(linked > 0);
    assert_eq!(changed, 0, "of {linked}");
}
