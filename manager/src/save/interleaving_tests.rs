//! A save's handle and a whole save, under schedulers that may switch threads at any operation on a
//! lock or a condition. No wait times out here (see `stepwell_core::sync`). A thread that is never
//! woken is a deadlock, reported with the schedule that led to it.

#![expect(clippy::unwrap_used, clippy::panic, reason = "tests end by them")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use stepwell_core::dtype::Dtype;
use stepwell_core::io::Disk;
use stepwell_core::io::simulated::{Action, Fault, OperationKind, SimDisk};
use stepwell_core::leaf_path::Component;
use stepwell_core::provider::{Fill, StateProvider};
use stepwell_core::save::Progress;
use stepwell_core::staging::{Filling, Slot, StagingPool};
use stepwell_core::sync::shuttle::{self, thread};
use stepwell_core::tree::{ContainerKind, Tree};

use super::job::{self, PlanContext, SaveTarget};
use super::{Outcome, Save, persist};
use crate::commit::Existing;
use crate::coordination::SingleProcess;
use crate::coordination::team::Team;
use crate::environment::Environment;
use crate::error::Error;
use crate::manager::SaveRequest;
use crate::options::Options;
use crate::retire::Deleter;
use crate::state::{LeafSource, StateSource};

const SLOT: usize = 64 << 10;
const LONG: Duration = Duration::from_secs(3600);
/// The disk's answer: EIO.
const EIO: i32 = 5;

/// Half of the schedules at random, half of them by few changes of priority, which finds bugs of
/// few steps more surely.
fn every_interleaving(test: impl Fn() + Send + Sync + Copy + 'static) {
    let schedules = std::env::var("STEPWELL_SCHEDULES").map_or(10_000, |number| number.parse().unwrap());
    shuttle::check_random(test, schedules / 2);
    shuttle::check_pct(test, schedules - schedules / 2, 3);
}

fn join(threads: impl IntoIterator<Item = thread::JoinHandle<()>>) {
    for thread in threads {
        thread.join().unwrap();
    }
}

fn handle() -> Save {
    Save::begun(7, Arc::new(Progress::default()), Vec::new(), Instant::now(), Arc::default(), LONG)
}

fn failed() -> Outcome {
    Outcome::NotCommitted(Arc::new(Error::Invalid("it failed".to_owned())))
}

#[test]
fn every_waiter_hears_the_one_outcome() {
    every_interleaving(|| {
        let save = handle();
        let called = Arc::new(AtomicUsize::new(0));
        let waiting: Vec<_> = [None, Some(LONG)]
            .map(|timeout| {
                let save = save.clone();
                thread::spawn(move || {
                    save.wait_captured(timeout).unwrap();
                    save.wait(timeout).unwrap().unwrap().error().is_none()
                })
            })
            .into();
        let listening = {
            let (save, called) = (save.clone(), Arc::clone(&called));
            thread::spawn(move || {
                save.on_done(Box::new(move |_| {
                    called.fetch_add(1, Ordering::SeqCst);
                }));
            })
        };
        let ending: Vec<_> = [Outcome::Committed, failed()]
            .map(|outcome| {
                let save = save.clone();
                thread::spawn(move || {
                    save.set_captured(outcome.error().is_none());
                    let callbacks = save.set_outcome(outcome);
                    save.call(callbacks);
                })
            })
            .into();
        let heard: Vec<bool> = waiting.into_iter().map(|thread| thread.join().unwrap()).collect();
        join(ending);
        join([listening]);
        let ended = save.outcome().unwrap().error().is_none();
        assert!(heard.iter().all(|&heard| heard == ended), "one outcome for all");
        assert_eq!(called.load(Ordering::SeqCst), 1);
    });
}

#[test]
fn a_failure_that_nobody_waited_for_is_told_exactly_once() {
    every_interleaving(|| {
        let save = handle();
        let asking: Vec<_> = (0..2)
            .map(|_| {
                let save = save.clone();
                thread::spawn(move || usize::from(save.take_unseen().is_some()))
            })
            .collect();
        save.set_outcome(failed());
        let told: usize = asking.into_iter().map(|thread| thread.join().unwrap()).sum();
        let left = usize::from(save.take_unseen().is_some());
        assert_eq!(told + left, 1);
        assert!(!save.is_unseen());
    });
}

/// The injected failure.
#[derive(Clone, Copy, PartialEq)]
enum Trouble {
    Nothing,
    Source,
    Disk,
    Cancel,
}

struct Bytes {
    breaks: bool,
    returned: Arc<AtomicBool>,
}

impl StateProvider for Bytes {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> stepwell_core::Result<()> {
        for fill in fills {
            assert!(!self.returned.load(Ordering::SeqCst), "a source was read after save() had returned");
            thread::yield_now();
            slot.part(fill.at, fill.len)?.fill(7);
        }
        if self.breaks {
            return Err(stepwell_core::Error::Misuse("it broke".to_owned()));
        }
        Ok(())
    }
}

fn state(breaks: bool, returned: &Arc<AtomicBool>) -> StateSource {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::List);
    let leaves = (0..3_u32).map(|number| {
        tree.push_leaf(Some(root), Some(Component::Index(number)));
        let provider = Bytes { breaks: breaks && number == 1, returned: Arc::clone(returned) };
        LeafSource::whole(Dtype::Uint8, vec![SLOT as u64 - 4096], Arc::new(provider))
    });
    let leaves = leaves.collect();
    StateSource { tree, leaves }
}

/// A save as [`crate::singular::save`] makes it: a thread that writes and commits, this one that
/// captures, and one that waits and listens.
fn save(trouble: Trouble) {
    let disk = SimDisk::new();
    let root = disk.create_dir_all(Path::new("/")).unwrap();
    if trouble == Trouble::Disk {
        disk.inject(Fault::on(OperationKind::Write, Action::Fail(EIO)).at(".data"));
    }
    let pool = StagingPool::of_slots(2, SLOT).unwrap();
    let environment = Environment {
        staging: Some(Arc::clone(&pool)),
        coordinator: Arc::new(SingleProcess),
        ..Environment::single_process(Arc::new(disk.clone()))
    };
    let options = Options {
        block_bytes: 4096,
        capture_threads: Some(2),
        staging_bytes: Some(2 * SLOT as u64),
        stall_timeout: Duration::from_secs(1_000_000),
        ..Options::default()
    };
    let (returned, cancel) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let team = Arc::new(Team::alone("0".repeat(32)));
    let request = SaveRequest {
        cancel: Arc::clone(&cancel),
        ..SaveRequest::new(7, state(trouble == Trouble::Source, &returned))
    };
    let context = PlanContext {
        root: Path::new("/step"),
        environment: &environment,
        options: &options,
        pool: &pool,
        team: &team,
        census: None,
    };
    let prepared = job::plan(&context, request, Instant::now()).unwrap();
    let place = SaveTarget {
        label: "path".to_owned(),
        target: "step".to_owned(),
        existing: Existing::Refuse,
        counter: 0,
        in_root: false,
        stale: false,
    };
    let (job, capturing) = prepared.split(&environment, &options, place);
    let save = job.save.clone();
    let called = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&called);
    save.on_done(Box::new(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
    }));
    let persister = thread::spawn(move || {
        let deleter =
            Arc::new(Deleter::new(Arc::clone(&root), Arc::clone(&environment.clock), Duration::ZERO, None));
        let (save, ended) = persist::run(job, &root, &environment, &team, &deleter, &|| Ok(()));
        let callbacks = save.set_outcome(ended.outcome);
        save.call(callbacks);
    });
    let canceller = (trouble == Trouble::Cancel).then(|| {
        let (save, pool) = (save.clone(), Arc::clone(&pool));
        thread::spawn(move || {
            save.cancel();
            // The product asks every 20 ms; here nobody asks unless he is woken.
            pool.wake();
        })
    });
    let captured = capturing.run_eager();
    returned.store(true, Ordering::SeqCst);
    let outcome = save.wait(Some(LONG)).unwrap().unwrap();
    join([persister]);
    join(canceller);
    let stands = disk.image().get("/step/manifest.json").is_some();
    assert_eq!(outcome.error().is_none(), stands, "the outcome says what stands on the disk: {outcome:?}");
    match (&captured, trouble) {
        (Ok(_), Trouble::Nothing | Trouble::Cancel) => assert!(stands, "{outcome:?}"),
        (Ok(_), Trouble::Disk) | (Err(_), Trouble::Source | Trouble::Cancel) => assert!(!stands),
        (Ok(_), Trouble::Source) => panic!("a state that was not captured was taken for captured"),
        (Err(error), Trouble::Nothing | Trouble::Disk) => panic!("the call that captures failed: {error}"),
    }
    assert_eq!(called.load(Ordering::SeqCst), 1, "called back once");
    assert!(!save.is_unseen(), "whoever waited has seen it");
    assert_eq!(pool.free_slots(), 2, "every slot comes back");
}

#[test]
fn a_save_is_committed_whatever_thread_goes_first() {
    every_interleaving(|| save(Trouble::Nothing));
}

#[test]
fn a_failing_source_leaves_nothing_in_any_order() {
    every_interleaving(|| save(Trouble::Source));
}

#[test]
fn a_disk_that_fails_leaves_nothing_whatever_thread_goes_first() {
    every_interleaving(|| save(Trouble::Disk));
}

#[test]
fn a_save_that_is_cancelled_is_committed_or_leaves_nothing() {
    every_interleaving(|| save(Trouble::Cancel));
}
