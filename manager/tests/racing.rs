//! A reader of a root in which a writer commits and retires at the same time.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests end by it")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::*;
use stepwell_core::io::simulated::{Moment, OperationKind};
use stepwell_core::io::{Disk, Engine};
use stepwell_manager::{Environment, Manager, Options, Retention};

fn reading() -> Options {
    Options { read_only: true, ..options() }
}

/// Has the writer commit a step (which retires the one before) in the middle of each of the next
/// `times` listings of the root by process `reader`, or right after it.
fn race(world: &World, writer: &Arc<Manager>, reader: usize, moment: Moment, times: u64) -> Arc<AtomicU64> {
    let raced = Arc::new(AtomicU64::new(0));
    let (writer, count) = (Arc::clone(writer), Arc::clone(&raced));
    world.disk.set_hook(Some(Arc::new(move |now, operation| {
        let here = operation.process == reader && operation.kind == OperationKind::Entries;
        if now != moment || !here || !operation.path.ends_with("run") {
            return;
        }
        if count.load(Ordering::SeqCst) < times {
            count.fetch_add(1, Ordering::SeqCst);
            let step = writer.next_step().unwrap();
            commit(&writer, step);
            assert!(writer.wait_for_deletions(LONG).unwrap());
        }
    })));
    raced
}

fn look_while_it_races(moment: Moment, times: u64, look: impl Fn(&Manager)) {
    let world = World::default();
    let writer = Arc::new(world.open(keeping(Retention::keep_latest(1))));
    commit(&writer, 1);
    let other = world.disk.process();
    let reader = Manager::open(std::path::Path::new(ROOT), reading(), world.environment_of(&other)).unwrap();
    let raced = race(&world, &writer, 1, moment, times);
    look(&reader);
    assert_eq!(raced.load(Ordering::SeqCst), times);
    world.disk.set_hook(None);
}

#[test]
fn a_listing_without_both_steps_is_repeated() {
    for moment in [Moment::Amid, Moment::After] {
        for times in 1..4 {
            look_while_it_races(moment, times, |reader| {
                assert_eq!(reader.latest_step().unwrap(), Some(times + 1), "{moment:?}");
            });
            look_while_it_races(moment, times, |reader| {
                assert_eq!(reader.all_steps().unwrap(), [times + 1], "{moment:?}");
            });
            look_while_it_races(moment, times, |reader| {
                assert_eq!(reader.manifest(None).unwrap().step, times + 1);
            });
        }
    }
}

#[test]
fn the_newest_step_is_looked_up_again_if_it_is_gone() {
    let world = World::default();
    let writer = Arc::new(world.open(keeping(Retention::keep_latest(1))));
    commit(&writer, 1);
    let other = world.disk.process();
    let reader = Manager::open(std::path::Path::new(ROOT), reading(), world.environment_of(&other)).unwrap();
    let raced = Arc::new(AtomicU64::new(0));
    let (count, saver) = (Arc::clone(&raced), Arc::clone(&writer));
    // Right before the directory of the step that was chosen is opened; more often than a few
    // times.
    world.disk.set_hook(Some(Arc::new(move |now, operation| {
        let opens = operation.process == 1
            && operation.kind == OperationKind::OpenDir
            && operation.path.to_string_lossy().contains("step_");
        if now == Moment::Before && opens && count.fetch_add(1, Ordering::SeqCst) < 20 {
            let step = saver.next_step().unwrap();
            commit(&saver, step);
            assert!(saver.wait_for_deletions(LONG).unwrap());
        }
    })));
    assert_eq!(reader.checkpoint(None).unwrap().step(), 21);
    world.disk.set_hook(None);
}

#[test]
fn metrics_of_an_open_step_survive_its_retirement() {
    let world = World::default();
    // A lease keeps a step listed for the grace period only.
    let writer = world.open(Options { grace: Duration::ZERO, ..keeping(Retention::keep_latest(1)) });
    let mut first = request(1);
    first.metrics.insert("loss".to_owned(), 0.5);
    committed(&writer.save(first).unwrap());
    let other = world.disk.process();
    let reader = Manager::open(std::path::Path::new(ROOT), reading(), world.environment_of(&other)).unwrap();
    let open = reader.checkpoint(None).unwrap();
    commit(&writer, 2);
    assert_eq!(reader.metrics(1).unwrap_err().kind(), "step_not_found");
    assert_eq!(reader.metrics_of(open.manifest()).unwrap().get("loss"), Some(&0.5));
}

#[test]
fn a_deletion_shared_with_others_completes() {
    for kind in [OperationKind::RemoveFile, OperationKind::RemoveDir] {
        let world = World::default();
        let writer = world.open(keeping(Retention::keep_latest(1)));
        commit(&writer, 1);
        let other = world.disk.process();
        let raced = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&raced);
        world.disk.set_hook(Some(Arc::new(move |now, operation| {
            let ours = operation.process == 0 && operation.kind == kind && now == Moment::Before;
            if !ours || !operation.path.to_string_lossy().contains(".trash-") {
                return;
            }
            let above = other.open_dir(operation.path.parent().unwrap()).unwrap();
            let name = operation.path.file_name().unwrap().to_str().unwrap();
            let removed = if kind == OperationKind::RemoveFile {
                above.remove_file(name)
            } else {
                above.remove_dir(name)
            };
            removed.unwrap();
            count.fetch_add(1, Ordering::SeqCst);
        })));
        commit(&writer, 2);
        assert!(writer.wait_for_deletions(LONG).unwrap());
        world.disk.set_hook(None);
        assert!(raced.load(Ordering::SeqCst) > 2, "{kind:?}: nobody came first");
        assert_eq!(world.names(), ["step_00000002"], "{kind:?}");
    }
}

#[test]
fn a_root_without_steps_is_told_at_once() {
    let world = World::default();
    let writer = world.open(options());
    assert_eq!(writer.latest_step().unwrap(), None);
    let begun = Instant::now();
    assert_eq!(writer.checkpoint(None).err().unwrap().kind(), "step_not_found");
    assert!(begun.elapsed() < Duration::from_secs(2));
}

#[test]
fn a_reader_always_finds_the_one_kept_step() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("run");
    let environment = Environment::real(&root, Engine::Auto).unwrap();
    let writer = Manager::open(&root, keeping(Retention::keep_latest(1)), environment.clone()).unwrap();
    commit(&writer, 0);
    let over = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&over);
    let saving = std::thread::spawn(move || {
        let mut step = 1;
        while !stop.load(Ordering::SeqCst) {
            commit(&writer, step);
            step += 1;
        }
        writer.close(Some(LONG)).unwrap();
        step
    });
    let looked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let reader = Manager::open(&root, reading(), environment.clone()).unwrap();
        let begun = Instant::now();
        let mut looks = 0_u64;
        let mut last = 0;
        while begun.elapsed() < Duration::from_secs(2) {
            let step = reader.latest_step().unwrap().expect("there always was a step");
            assert!(step >= last, "{step} after {last}");
            last = step;
            assert!(!reader.all_steps().unwrap().is_empty());
            // As one who has never looked before.
            let fresh = Manager::open(&root, reading(), environment.clone()).unwrap();
            assert!(!fresh.all_steps().unwrap().is_empty());
            let open = fresh.checkpoint(None).unwrap();
            reader.metrics_of(open.manifest()).unwrap();
            looks += 1;
        }
        looks
    }));
    over.store(true, Ordering::SeqCst);
    let steps = saving.join().unwrap();
    assert!(looked.unwrap() > 20 && steps > 20);
}

#[test]
fn threads_of_one_manager_list_every_committed_step() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 0);
    let newest = AtomicU64::new(0);
    let until = Instant::now() + Duration::from_secs(2);
    let goes_on = || Instant::now() < until;
    std::thread::scope(|scope| {
        for look in [
            // Forgets all steps, and lists them again.
            (|manager: &Manager, _| manager.reload().unwrap()) as fn(&Manager, u64),
            |manager, newest| assert!(manager.all_steps().unwrap().contains(&newest)),
            |manager, newest| assert_eq!(manager.manifest(Some(newest)).unwrap().step, newest),
            |manager, newest| assert!(manager.latest_step().unwrap() >= Some(newest)),
        ] {
            let (manager, newest) = (&manager, &newest);
            scope.spawn(move || {
                while goes_on() {
                    look(manager, newest.load(Ordering::SeqCst));
                }
            });
        }
        for step in (1..).take_while(|_| goes_on()) {
            commit(&manager, step);
            newest.store(step, Ordering::SeqCst);
        }
    });
    assert!(newest.load(Ordering::SeqCst) > 10);
}
