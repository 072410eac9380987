//! File systems without locks: who may become the writer, and how long readers are safe.

#![allow(clippy::unwrap_used, reason = "tests end by it")]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::*;
use stepwell_core::io::simulated::SimDisk;
use stepwell_manager::{Checkpoint, Environment, Manager, Options, Retention};

fn world() -> World {
    World { disk: SimDisk::new().without_locks(), ..World::default() }
}

fn alone() -> Options {
    Options { take_over: true, ..options() }
}

fn beats(disk: &SimDisk) -> usize {
    let image = disk.image();
    let control = image.get("/run/.stepwell").unwrap().entries().unwrap();
    control.iter().filter(|(name, _)| name.starts_with("beat-")).count()
}

fn open(environment: &Environment, options: Options) -> stepwell_manager::Result<Manager> {
    Manager::open(Path::new(ROOT), options, environment.clone())
}

#[test]
fn a_writer_is_refused_unless_it_says_that_it_takes_over() {
    let world = world();
    assert_eq!(world.try_open(options()).err().unwrap().kind(), "no_locks");
    let manager = world.open(alone());
    commit(&manager, 1);
    manager.close(Some(LONG)).unwrap();
    assert_eq!(beats(&world.disk), 0, "a writer that has ended is not waited for");
    let before = world.clock.0.load(Ordering::SeqCst);
    assert_restores(&world.open(alone()), 1);
    assert_eq!(world.clock.0.load(Ordering::SeqCst), before);
}

#[test]
fn only_a_silent_writer_is_taken_over() {
    let world = world();
    // Every 10 ms.
    let lively = Options { silence: Duration::from_millis(60), ..alone() };
    let first = world.open(lively.clone());
    commit(&first, 1);
    // The second watches by the real clock, as its process would.
    let second = Environment {
        clock: Arc::new(stepwell_manager::environment::SystemClock::default()),
        ..world.environment_of(&world.disk.process())
    };
    let watching = Options { silence: Duration::from_secs(2), ..alone() };
    let error = open(&second, watching).err().unwrap();
    assert_eq!(error.kind(), "locked");
    assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
    assert_eq!(beats(&world.disk), 1, "who was refused leaves nothing");
    commit(&first, 2);

    world.disk.kill();
    let second = world.disk.process();
    let begun = Instant::now();
    let second = open(&world.environment_of(&second), alone()).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(20), "the injected clock is watched");
    assert!(world.clock.0.load(Ordering::SeqCst) >= 60_000_000_000);
    assert_eq!(beats(&world.disk), 1);
    commit(&second, 3);
    assert_eq!(second.all_steps().unwrap(), [1, 2, 3]);
    second.close(Some(LONG)).unwrap();
    drop(first);
}

#[test]
fn of_two_that_take_over_at_once_one_at_most_becomes_the_writer() {
    let world = world();
    let lively = || Options { silence: Duration::from_millis(600), ..alone() };
    let dead = world.disk.process();
    let manager = open(&world.environment_of(&dead), lively()).unwrap();
    dead.kill();
    drop(manager);
    let both: Vec<_> = (0..2)
        .map(|_| {
            // By the real clock, as their processes would.
            let clock = Arc::new(stepwell_manager::environment::SystemClock::default());
            let environment = Environment { clock, ..world.environment_of(&world.disk.process()) };
            std::thread::spawn(move || open(&environment, lively()))
        })
        .collect();
    let mut opened = Vec::new();
    for thread in both {
        match thread.join().unwrap() {
            Ok(manager) => opened.push(manager),
            Err(error) => assert_eq!(error.kind(), "locked"),
        }
    }
    assert!(opened.len() <= 1);
}

#[test]
fn a_writer_that_was_taken_over_takes_nothing_away_any_more() {
    let world = world();
    let retention = Retention::keep_latest(1);
    let first = world.open(alone());
    for step in 1..=3 {
        commit(&first, step);
    }
    first.close(Some(LONG)).unwrap();
    let rules = || Options { retention: retention.clone(), ..alone() };
    let first = world.open(rules());
    // It is suspended, and silent: another one becomes the writer, whom nobody tells it of.
    let second = world.environment_of(&world.disk.process());
    let second = open(&second, alone()).unwrap();
    assert_eq!(first.delete(2).unwrap_err().kind(), "locked");
    assert_eq!(first.rewind(1, Some("b")).unwrap_err().kind(), "locked");
    let error = first.apply_retention().unwrap_err();
    assert_eq!(error.kind(), "locked");
    assert!(error.to_string().contains("another live writer"), "{error}");
    assert_eq!(second.all_steps().unwrap(), [1, 2, 3]);
    assert_eq!(world.names(), ["step_00000001", "step_00000002", "step_00000003"]);
    second.delete(2).unwrap();
    assert_eq!(second.all_steps().unwrap(), [1, 3]);
}

#[test]
fn the_files_of_a_retired_step_stay_for_the_grace_period() {
    let world = world();
    let grace = Duration::from_secs(100);
    let manager = world.open(Options { retention: Retention::keep_latest(1), grace, ..alone() });
    commit(&manager, 1);
    let reader = Checkpoint::open(Path::new("/run/step_00000001"), &world.environment()).unwrap();
    assert!(!reader.is_leased());
    commit(&manager, 2);
    assert_eq!(manager.all_steps().unwrap(), [2]);
    assert!(manager.wait_for_deletions(LONG).unwrap());
    assert_eq!(read(&reader)[0].1, vec![1; 3000], "it is read to its end");
    world.clock.advance(99);
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(world.names().len(), 2, "{:?}", world.names());
    world.clock.advance(1);
    let end = Instant::now() + LONG;
    while world.names().len() > 1 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(world.names(), ["step_00000002"]);
}

#[test]
fn what_is_left_in_its_grace_period_is_the_next_writers() {
    let world = world();
    let manager = world.open(Options { retention: Retention::keep_latest(1), ..alone() });
    commit(&manager, 1);
    commit(&manager, 2);
    manager.close(Some(LONG)).unwrap();
    assert_eq!(world.names().len(), 2);
    let manager = world.open(Options { grace: Duration::ZERO, ..alone() });
    assert!(manager.wait_for_deletions(LONG).unwrap());
    assert_eq!(world.names(), ["step_00000002"]);
}

#[test]
fn what_is_thinned_away_stays_for_the_grace_period() {
    let world = world();
    let rule = Retention::keep_latest(1) | Retention::keep_every_items(1, ["params"]);
    let grace = Duration::from_secs(100);
    let manager = world.open(Options { retention: rule, grace, ..alone() });
    commit(&manager, 1);
    let reader = Checkpoint::open(Path::new("/run/step_00000001"), &world.environment()).unwrap();
    commit(&manager, 2);
    assert_eq!(read(&manager.checkpoint(Some(1)).unwrap()).len(), 1);
    assert_eq!(read(&reader).len(), 3, "who has opened it before reads all of it");
    assert!(world.disk.image().get("/run/step_00000001/i2").is_some());
    world.clock.advance(100);
    manager.apply_retention().unwrap();
    assert!(world.disk.image().get("/run/step_00000001/i2").is_none());
    assert_eq!(read(&manager.checkpoint(Some(1)).unwrap()).len(), 1);
}
