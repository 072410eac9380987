//! A root in an object store: the life of its steps, take-over, and every request that is lost,
//! late or the last of its process.

#![allow(clippy::unwrap_used, reason = "tests end by it")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use common::*;
use stepwell_core::remote::StoreOptions;
use stepwell_core::remote::simulated::{Fate, SimRequest, SimStore};
use stepwell_core::staging::{DEFAULT_SLOT_BYTES, StagingPool};
use stepwell_manager::coordination::SingleProcess;
use stepwell_manager::ledger::{LedgerDisk, LedgerPatience};
use stepwell_manager::{Environment, Exists, Manager, Options, Outcome, Retention, SaveRequest};

const URL: &str = "s3://bucket/run";

/// A store, and what all its processes share.
struct StoreWorld {
    store: Arc<SimStore>,
    clock: Arc<TestClock>,
    rng: Arc<TestRng>,
    staging: Arc<StagingPool>,
}

impl StoreWorld {
    fn new() -> Self {
        // New memory for each of a thousand runs would be most of their time.
        static STAGING: OnceLock<Arc<StagingPool>> = OnceLock::new();
        let staging = STAGING.get_or_init(|| StagingPool::new(64 << 20, DEFAULT_SLOT_BYTES).unwrap());
        Self {
            store: SimStore::new("s3://bucket"),
            clock: Arc::default(),
            rng: Arc::default(),
            staging: Arc::clone(staging),
        }
    }

    /// The environment of a process with this client.
    fn environment(&self, store: &Arc<SimStore>) -> Environment {
        let patience = LedgerPatience {
            full: Duration::from_millis(40),
            ending: Duration::from_millis(40),
            pause: Duration::from_millis(2),
        };
        let parts =
            StoreOptions { part_bytes: 8 << 20, connections: 4, create_timeout: Duration::from_millis(40) };
        let disk = LedgerDisk::new(Arc::clone(store) as _, parts, patience, self.rng.clone());
        Environment {
            disk: Arc::new(disk),
            clock: self.clock.clone(),
            rng: self.rng.clone(),
            coordinator: Arc::new(SingleProcess),
            staging: Some(Arc::clone(&self.staging)),
        }
    }

    fn try_open(&self, store: &Arc<SimStore>, options: Options) -> stepwell_manager::Result<Manager> {
        Manager::open(Path::new(URL), options, self.environment(store))
    }

    /// Opens the root in a new process.
    fn open(&self, options: Options) -> Manager {
        self.try_open(&self.store.process(), options).unwrap()
    }

    fn keys_below(&self, part: &str) -> Vec<String> {
        self.store.keys().into_iter().filter(|key| key.contains(part)).collect()
    }
}

#[test]
fn what_was_saved_is_restored() {
    let world = StoreWorld::new();
    let manager = world.open(options());
    assert_eq!(manager.latest_step().unwrap(), None);
    for step in 0..3 {
        commit(&manager, step);
    }
    assert_eq!(manager.all_steps().unwrap(), [0, 1, 2]);
    assert_restores(&manager, 1);
    manager.close(Some(LONG)).unwrap();
    let reader = world.open(Options { read_only: true, ..options() });
    assert_eq!(reader.latest_step().unwrap(), Some(2));
    assert_restores(&reader, 0);
    let second = world.open(options());
    assert_eq!(second.all_steps().unwrap(), [0, 1, 2]);
    commit(&second, 3);
    assert_eq!(reader.all_steps().unwrap(), [0, 1, 2, 3]);
    assert_restores(&reader, 3);
}

#[test]
fn retired_steps_are_deleted_after_the_grace_period() {
    let world = StoreWorld::new();
    let manager = world.open(keeping(Retention::keep_latest(1)));
    commit(&manager, 1);
    let early = world.keys_below("/00000001.");
    commit(&manager, 2);
    manager.wait_until_finished(Some(LONG)).unwrap();
    assert_eq!(manager.all_steps().unwrap(), [2]);
    assert!(!early.is_empty());
    assert_eq!(world.keys_below("/00000001."), early, "a reader may still use it");
    world.clock.advance(31 * 60);
    assert!(manager.wait_for_deletions(LONG).unwrap());
    manager.close(Some(LONG)).unwrap();
    let second = world.open(options());
    world.clock.advance(31 * 60);
    assert!(second.wait_for_deletions(LONG).unwrap());
    assert_eq!(world.keys_below("/00000001."), Vec::<String>::new());
    assert_restores(&second, 2);
}

#[test]
fn steps_are_replaced_deleted_set_aside_and_thinned() {
    let world = StoreWorld::new();
    let manager = world.open(options());
    for step in 1..=4 {
        commit(&manager, step);
    }
    let again = SaveRequest { exists: Exists::Replace, ..SaveRequest::new(4, state(77)) };
    committed(&manager.save(again).unwrap());
    assert_value(&manager, 4, 77);
    assert!(manager.save(request(4)).is_err());
    manager.delete(1).unwrap();
    let (branch, dropped) = manager.rewind(3, Some("b")).unwrap();
    assert_eq!((branch.as_str(), dropped), ("b", vec![4]));
    assert_eq!(manager.all_steps().unwrap(), [2, 3]);
    manager.add_metrics(3, &[("loss".to_owned(), 0.5)].into()).unwrap();
    manager.close(Some(LONG)).unwrap();
    let thinning = Retention::keep_latest(1) | Retention::keep_every_items(1, ["params"]);
    let second = world.open(keeping(thinning));
    assert_eq!(second.all_steps().unwrap(), [2, 3]);
    assert_restores(&second, 2);
    assert!((second.metrics(3).unwrap()["loss"] - 0.5).abs() < 1e-9);
    second.delete_branch("b").unwrap();
    commit(&second, 5);
    second.wait_until_finished(Some(LONG)).unwrap();
    let items = |step| second.manifest(Some(step)).unwrap().items.len();
    assert_eq!((items(3), items(5)), (1, 3));
}

#[test]
fn a_writer_that_was_taken_over_commits_nothing_any_more() {
    let world = StoreWorld::new();
    let first = world.open(options());
    commit(&first, 1);
    // It is suspended, and silent.
    let second = world.open(options());
    assert_eq!(first.delete(1).unwrap_err().kind(), "locked");
    let late = save(&first, 2);
    assert!(matches!(late.wait(Some(LONG)).unwrap(), Some(Outcome::NotCommitted(_))));
    commit(&second, 2);
    assert_value(&second, 2, 2);
    assert_eq!(second.all_steps().unwrap(), [1, 2]);
}

/// The steps that a run has heard to be committed, and those that it heard never to be.
#[derive(Debug, Default)]
struct Heard {
    committed: Vec<u64>,
    never: Vec<u64>,
}

/// Opens the root, saves three steps, and keeps two. Returns what it has heard.
fn run(world: &StoreWorld, store: &Arc<SimStore>) -> Heard {
    let mut heard = Heard::default();
    let mut options = keeping(Retention::keep_latest(2));
    options.stall_timeout = Duration::from_secs(5);
    let Ok(manager) = world.try_open(store, options) else { return heard };
    for step in 1..=3 {
        let Ok(save) = manager.save(request(step)) else { continue };
        match save.wait(Some(LONG)) {
            Ok(Some(Outcome::Committed)) => heard.committed.push(step),
            Ok(Some(Outcome::NotCommitted(_))) => heard.never.push(step),
            _ => {}
        }
    }
    let _ = manager.close(Some(LONG));
    heard
}

/// The number of requests of a whole run.
fn requests_of_a_run() -> u64 {
    let world = StoreWorld::new();
    let store = world.store.process();
    let heard = run(&world, &store);
    assert_eq!(heard.committed, [1, 2, 3]);
    store.requests().len() as u64
}

/// The next writer finds all that was committed, nothing else, and goes on.
fn check(world: &StoreWorld, heard: &Heard, what: &str) {
    world.store.land_late();
    let next = world.open(options());
    let steps = next.all_steps().unwrap();
    for step in &steps {
        assert!(!heard.never.contains(step), "{what}: step {step} came back: {heard:?}");
        assert_restores(&next, *step);
    }
    // The newest two were kept.
    let kept: Vec<u64> = heard.committed.iter().rev().take(2).copied().collect();
    let is_kept = |step: &u64| steps.contains(step) || *step < steps.last().copied().unwrap_or(0);
    assert!(kept.iter().all(is_kept), "{what}: {heard:?}, and there are {steps:?}");
    assert!(
        kept.first().is_none_or(|newest| steps.contains(newest)),
        "{what}: {heard:?}, there are {steps:?}"
    );
    commit(&next, 9);
    assert_restores(&next, 9);
    next.close(Some(LONG)).unwrap();
}

#[test]
fn a_writer_is_killed_at_each_request() {
    for number in 0..requests_of_a_run() {
        for fate in [Fate::Killed, Fate::KilledAfterwards] {
            let world = StoreWorld::new();
            let store = world.store.process();
            store.script(move |request| if request.number == number { fate } else { Fate::Served });
            let heard = run(&world, &store);
            check(&world, &heard, &format!("{fate:?} at request {number}"));
        }
    }
}

#[test]
fn each_request_is_lost_or_late() {
    for number in 0..requests_of_a_run() {
        for fate in [Fate::AnswerLost, Fate::Dropped, Fate::Late, Fate::SaidToExist] {
            let world = StoreWorld::new();
            let store = world.store.process();
            store.script(move |request| if request.number == number { fate } else { Fate::Served });
            let heard = run(&world, &store);
            check(&world, &heard, &format!("{fate:?} at request {number}"));
        }
    }
}

/// The answers of the manager about a step.
#[derive(Clone, Debug, Default)]
struct Told {
    /// The values that it may have. None: it must not come back.
    values: BTreeSet<u8>,
    /// It has one of them.
    must: bool,
    /// It may have lost all items but `params`.
    may_be_thinned: bool,
}

/// The answers about each step.
type Life = BTreeMap<u64, Told>;

/// Saves a value, and records the answer.
fn save_value(manager: &Manager, life: &mut Life, step: u64, value: u8) {
    let told = life.entry(step).or_default();
    let before = told.clone();
    told.values.insert(value);
    let exists = Exists::Replace;
    let outcome = manager
        .save(SaveRequest { exists, ..SaveRequest::new(step, state(value)) })
        .map(|save| save.wait(Some(LONG)));
    match outcome {
        Ok(Ok(Some(Outcome::Committed))) => {
            *told = Told { values: [value].into(), must: true, ..Told::default() };
        }
        Ok(Ok(Some(Outcome::NotCommitted(_)))) | Err(_) => *told = before,
        _ => {}
    }
}

/// Takes steps away, and records the answer.
fn take_away(life: &mut Life, is_taken: impl Fn(u64) -> bool, take: impl FnOnce() -> bool) {
    let mut taken: Vec<&mut Told> =
        life.iter_mut().filter(|(step, _)| is_taken(**step)).map(|(_, told)| told).collect();
    for told in &mut taken {
        told.must = false;
    }
    if take() {
        for told in taken {
            *told = Told::default();
        }
    }
}

/// Saves, replaces, deletes, rewinds and thins, by two processes one after the other. Returns the
/// answers.
fn live(world: &StoreWorld, store: &Arc<SimStore>, second: &Arc<SimStore>) -> Life {
    let mut life = Life::new();
    let quick = |retention| Options { stall_timeout: Duration::from_secs(5), ..keeping(retention) };
    if let Ok(manager) = world.try_open(store, quick(Retention::KeepAll)) {
        (1..=4).for_each(|step| save_value(&manager, &mut life, step, step as u8));
        save_value(&manager, &mut life, 4, 77);
        take_away(&mut life, |step| step == 1, || manager.delete(1).is_ok());
        take_away(&mut life, |step| step > 2, || manager.rewind(2, Some("b")).is_ok());
        save_value(&manager, &mut life, 3, 33);
        let _ = manager.close(Some(LONG));
    }
    world.store.land_late();
    world.clock.advance(31 * 60);
    let thinning = Retention::keep_latest(1) | Retention::keep_every_items(1, ["params"]);
    if let Ok(manager) = world.try_open(second, quick(thinning)) {
        for told in life.values_mut() {
            told.may_be_thinned = true;
        }
        // All that was uncertain is certain now.
        if let Ok(steps) = manager.all_steps() {
            for (step, told) in &mut life {
                match steps.contains(step) {
                    true => told.must = true,
                    false if !told.must => told.values.clear(),
                    false => {}
                }
            }
        }
        save_value(&manager, &mut life, 5, 5);
        let _ = manager.delete_branch("b");
        let _ = manager.close(Some(LONG));
    }
    world.store.land_late();
    world.clock.advance(31 * 60);
    life
}

/// Checks that the next writer finds what the answers say, and goes on.
fn check_life(world: &StoreWorld, life: &Life, what: &str) {
    let next = world.open(options());
    let steps = next.all_steps().unwrap();
    assert!(steps.iter().all(|step| life.contains_key(step)), "{what}: {steps:?} of {life:?}");
    for (step, told) in life {
        assert!(!told.must || steps.contains(step), "{what}: step {step} is lost: {steps:?}, {life:?}");
        if !steps.contains(step) {
            continue;
        }
        let found = read(&next.checkpoint(Some(*step)).unwrap());
        let value = found[0].1[0];
        assert!(told.values.contains(&value), "{what}: step {step} has {value}: {life:?}");
        if found.len() == 1 {
            assert!(told.may_be_thinned, "{what}: step {step} was thinned");
            assert_eq!(found, [("params/w".to_owned(), vec![value; 3000])], "{what}");
        } else {
            assert_value(&next, *step, value);
        }
    }
    assert!(next.wait_for_deletions(LONG).unwrap());
    commit(&next, 9);
    assert_restores(&next, 9);
    next.close(Some(LONG)).unwrap();
}

/// Runs both processes with this fate of each request of the two processes.
fn live_with(fate_of: impl Fn(usize, u64) -> Fate + Send + Sync + 'static, what: &str) {
    let world = StoreWorld::new();
    let stores = [world.store.process(), world.store.process()];
    let fate_of = Arc::new(fate_of);
    for (process, store) in stores.iter().enumerate() {
        let fate_of = Arc::clone(&fate_of);
        store.script(move |request| fate_of(process, request.number));
    }
    let life = live(&world, &stores[0], &stores[1]);
    check_life(&world, &life, what);
}

/// The numbers of the requests of the two processes.
fn requests_of_a_life() -> Vec<(usize, u64)> {
    let world = StoreWorld::new();
    let stores = [world.store.process(), world.store.process()];
    let life = live(&world, &stores[0], &stores[1]);
    let there: Vec<u64> = life.iter().filter(|(_, told)| told.must).map(|(step, _)| *step).collect();
    assert_eq!(there, [2, 3, 5]);
    check_life(&world, &life, "without a fault");
    let of_process =
        |process: usize| (0..stores[process].requests().len() as u64).map(move |number| (process, number));
    of_process(0).chain(of_process(1)).collect()
}

const FATES: [Fate; 6] =
    [Fate::Killed, Fate::KilledAfterwards, Fate::AnswerLost, Fate::Dropped, Fate::Late, Fate::SaidToExist];

/// One of so many lives is tried, unless `STEPWELL_LONG` is set.
fn stride(short: usize) -> usize {
    if std::env::var_os("STEPWELL_LONG").is_some() { 1 } else { short }
}

#[test]
fn every_operation_survives_a_fault_at_each_request() {
    let faults = requests_of_a_life().into_iter().flat_map(|at| FATES.map(|fate| (at, fate)));
    for (at, fate) in faults.step_by(stride(5)) {
        let what = format!("{fate:?} at request {at:?}");
        live_with(move |process, number| if (process, number) == at { fate } else { Fate::Served }, &what);
    }
}

#[test]
fn every_operation_survives_two_faults() {
    let requests = requests_of_a_life();
    // A stride without a common factor reaches all pairs of fates and places.
    let pairs = (0..requests.len() * FATES.len()).step_by(stride(7)).map(|number| {
        let (first, second) = (number / FATES.len(), number * 131 % requests.len());
        let fates = (FATES[number % FATES.len()], FATES[number / 5 % FATES.len()]);
        ((requests[first], fates.0), (requests[second], fates.1))
    });
    for (one, other) in pairs {
        let what = format!("{one:?} and {other:?}");
        live_with(
            move |process, number| match (process, number) {
                at if at == one.0 => one.1,
                at if at == other.0 => other.1,
                _ => Fate::Served,
            },
            &what,
        );
    }
}

#[test]
fn a_store_that_falls_silent_leaves_nothing_unsaid() {
    // A create and all requests after it get no answer for longer than the ledger waits.
    for first in 0..12 {
        for fate in [Fate::AnswerLost, Fate::Dropped, Fate::Late] {
            let world = StoreWorld::new();
            let store = world.store.process();
            let (creates, silent) = (AtomicU64::new(0), AtomicU64::new(0));
            store.script(move |request: &SimRequest| {
                let is_create = request.call == "create" && request.key.contains("/ledger/");
                let number = if is_create { creates.fetch_add(1, Ordering::SeqCst) } else { 0 };
                if is_create && number == first {
                    silent.store(400, Ordering::SeqCst);
                }
                match silent.load(Ordering::SeqCst) {
                    0 => Fate::Served,
                    left => {
                        silent.store(left - 1, Ordering::SeqCst);
                        fate
                    }
                }
            });
            let heard = run(&world, &store);
            check(&world, &heard, &format!("{fate:?} from create {first} on"));
        }
    }
}

#[test]
fn a_store_that_ignores_conditions_gets_no_root() {
    let world = StoreWorld::new();
    world.store.script(|request| match request.call {
        "create" => Fate::Overwritten,
        _ => Fate::Served,
    });
    let error = world.try_open(&world.store, options()).map(drop).unwrap_err();
    assert!(error.to_string().contains("must not have a root"), "{error}");
    assert!(world.store.keys().iter().all(|key| !key.contains("probe") && !key.contains("ledger/0")));
}

#[test]
fn no_root_is_opened_inside_another_one() {
    let world = StoreWorld::new();
    let manager = world.open(options());
    commit(&manager, 1);
    let before = world.store.keys();
    for read_only in [true, false] {
        let environment = world.environment(&world.store.process());
        let path = Path::new(URL).join("step_00000001");
        let opened = Manager::open(&path, Options { read_only, ..options() }, environment);
        let error = opened.map(drop).unwrap_err();
        assert!(error.to_string().contains("is in a root or a checkpoint. Pass s3://"), "{error}");
    }
    assert_eq!(world.store.keys(), before);
    assert_eq!(manager.all_steps().unwrap(), [1]);
}
