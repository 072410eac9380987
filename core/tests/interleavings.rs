//! The staging pool, its helpers and the two halves of a save, under schedulers that may switch
//! threads at any operation on a lock, a condition, a channel or an atomic. No wait times out here
//! (see `stepwell_core::sync`). A thread that is never woken is a deadlock, and shuttle reports it
//! with a schedule that repeats it.
//!
//! `cargo test -p stepwell-core --features interleavings,test-support --test interleavings`;
//! `STEPWELL_SCHEDULES` says how many schedules each test has.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests end by them")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use stepwell_core::dtype::Dtype;
use stepwell_core::format::index::ChunkRegion;
use stepwell_core::io::simulated::{Action, Fault, OperationKind, SimDisk};
use stepwell_core::io::{Disk, NoReclaimer};
use stepwell_core::leaf_path::Component;
use stepwell_core::provider::{Fill, StateProvider};
use stepwell_core::region::Region;
use stepwell_core::save::{ChunkPlan, ItemPlan, LeafPlan, SaveOptions, prepare};
use stepwell_core::staging::{Filled, Filling, Slot, StagingPool};
use stepwell_core::sync::shuttle::{self, thread};
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_core::{Error, Result};

const SLOT: usize = 64 << 10;
/// Bytes of a leaf: one and its file's header fill a slot.
const LEAF: u64 = SLOT as u64 - 4096;
/// Never reached: time does not pass by waiting here.
const LONG: Duration = Duration::from_secs(3600);

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

fn acquire(pool: &StagingPool) -> Result<Slot<stepwell_core::staging::Free>> {
    pool.acquire(LONG, Duration::MAX, || None).map(|(slot, _)| slot)
}

fn full(slot: Slot<stepwell_core::staging::Free>) -> Slot<stepwell_core::staging::Full> {
    match slot.begin().finish() {
        Filled::Full(slot) => slot,
        Filled::Pending(_) => panic!("no device copies into it"),
    }
}

#[test]
fn whoever_waits_for_a_slot_gets_one_and_every_slot_comes_back() {
    every_interleaving(|| {
        let pool = StagingPool::of_slots(2, SLOT).unwrap();
        let threads: Vec<_> = (0..3_u8)
            .map(|number| {
                let pool = Arc::clone(&pool);
                thread::spawn(move || {
                    for _ in 0..2 {
                        let mut slot = acquire(&pool).unwrap().begin();
                        slot.part(0, 1).unwrap()[0] = number;
                        thread::yield_now();
                        assert_eq!(slot.part(0, 1).unwrap()[0], number, "a slot has one holder");
                        drop(slot);
                    }
                })
            })
            .collect();
        join(threads);
        assert_eq!(pool.free_slots(), 2);
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_wake_up_that_is_lost_would_be_found() {
    stepwell_core::sync::lose_wake_ups();
    every_interleaving(|| {
        let pool = StagingPool::of_slots(1, SLOT).unwrap();
        let held = acquire(&pool).unwrap();
        let waiting = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || drop(acquire(&pool).unwrap()))
        };
        drop(held);
        waiting.join().unwrap();
    });
}

#[test]
fn a_slot_that_goes_to_a_writer_comes_back_to_whoever_waits() {
    every_interleaving(|| {
        let pool = StagingPool::of_slots(1, SLOT).unwrap();
        let (sender, receiver) = stepwell_core::sync::unbounded();
        let writer = thread::spawn(move || {
            while let Ok(slot) = receiver.recv() {
                let slot: Slot<stepwell_core::staging::Full> = slot;
                let (buffer, flying) = slot.launch().unwrap();
                thread::yield_now();
                drop(flying.land(buffer).unwrap());
            }
        });
        for _ in 0..3 {
            sender.send(full(acquire(&pool).unwrap())).ok().unwrap();
        }
        drop(sender);
        writer.join().unwrap();
        assert_eq!(pool.free_slots(), 1);
    });
}

#[test]
fn a_cancelled_waiter_leaves_its_turn_to_the_next() {
    every_interleaving(|| {
        let pool = StagingPool::of_slots(1, SLOT).unwrap();
        let held = acquire(&pool).unwrap();
        let cancelled = Arc::new(AtomicBool::new(false));
        let first = {
            let (pool, cancelled) = (Arc::clone(&pool), Arc::clone(&cancelled));
            thread::spawn(move || {
                let ask = || {
                    let cancelled = cancelled.load(Ordering::SeqCst);
                    // Between the question and the sleep: what is called out now must not be lost.
                    thread::yield_now();
                    cancelled.then(|| Error::Cancelled("enough".into()))
                };
                pool.acquire(LONG, Duration::MAX, ask).map(drop).is_err()
            })
        };
        let second = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || drop(acquire(&pool).unwrap()))
        };
        let back = thread::spawn(move || drop(held));
        cancelled.store(true, Ordering::SeqCst);
        pool.wake();
        first.join().unwrap();
        second.join().unwrap();
        back.join().unwrap();
        assert_eq!(pool.free_slots(), 1);
        assert!(pool.try_acquire().unwrap().is_some(), "nobody stands in the queue any more");
    });
}

#[test]
fn a_pool_that_grows_wakes_who_waits_for_it() {
    every_interleaving(|| {
        let pool = StagingPool::of_slots(1, 1 << 20).unwrap();
        let held = acquire(&pool).unwrap();
        let waiting = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || drop(acquire(&pool).unwrap()))
        };
        pool.ensure(2 << 20).unwrap();
        waiting.join().unwrap();
        drop(held);
        assert_eq!(pool.free_slots() << 20, pool.bytes());
    });
}

/// A leaf whose bytes are its number, and which says when somebody reads it after it was let go.
struct Watched {
    value: u8,
    alive: Arc<AtomicBool>,
    captured: Arc<AtomicU64>,
    fails: bool,
}

impl StateProvider for Watched {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> Result<()> {
        for fill in fills {
            assert!(self.alive.load(Ordering::SeqCst), "a source was read after the capture had returned");
            thread::yield_now();
            slot.part(fill.at, fill.len)?.fill(self.value);
            self.captured.fetch_add(fill.len, Ordering::SeqCst);
        }
        if self.fails { Err(Error::Misuse("it broke".into())) } else { Ok(()) }
    }
}

/// The failure that a test injects into a save.
#[derive(Clone, Copy, PartialEq)]
enum Trouble {
    Nothing,
    /// A provider fails.
    Source,
    /// A write fails.
    Disk,
    /// The caller wants it no more.
    Cancel,
    /// The flush is dropped.
    NoFlush,
    /// The capture is dropped.
    NoCapture,
}

/// Three windows of one slot each through a ring of two, on two capturing threads and one that
/// writes.
fn save(trouble: Trouble) {
    let pool = StagingPool::of_slots(2, SLOT).unwrap();
    let disk = SimDisk::new();
    let dir = disk.create_dir_all(Path::new("/step")).unwrap();
    if trouble == Trouble::Disk {
        disk.inject(Fault::on(OperationKind::Write, Action::Fail(libc_eio())));
    }
    let alive = Arc::new(AtomicBool::new(true));
    let captured_bytes = Arc::new(AtomicU64::new(0));
    let leaves = (0..3_u8).map(|value| {
        let (alive, captured) = (Arc::clone(&alive), Arc::clone(&captured_bytes));
        leaf(Watched { value, alive, captured, fails: trouble == Trouble::Source && value == 1 })
    });
    let cancel = Arc::new(AtomicBool::new(false));
    let options = SaveOptions {
        block_bytes: 4096,
        file_ids: vec![1],
        capture_threads: 2,
        stall_timeout: LONG,
        queue_depth: 2,
        cancel: (trouble == Trouble::Cancel).then(|| Arc::clone(&cancel)),
        ..SaveOptions::default()
    };
    let (capture, flush) = prepare(vec![item(leaves.collect())], &pool, options).unwrap();
    let writer = {
        let disk = disk.clone();
        thread::spawn(move || {
            if trouble == Trouble::NoFlush {
                drop(flush);
                None
            } else {
                Some(flush.run(&disk, &dir, &mut NoReclaimer))
            }
        })
    };
    let canceller = (trouble == Trouble::Cancel).then(|| {
        let (pool, cancel) = (Arc::clone(&pool), Arc::clone(&cancel));
        thread::spawn(move || {
            cancel.store(true, Ordering::SeqCst);
            // The product asks every 20 ms; here nobody asks unless he is woken.
            pool.wake();
        })
    });
    let captured = if trouble == Trouble::NoCapture {
        drop(capture);
        None
    } else {
        Some(capture.run())
    };
    alive.store(false, Ordering::SeqCst);
    let written = writer.join().unwrap();
    join(canceller);
    match (&captured, &written) {
        (Some(Ok(())), Some(Ok(items))) => {
            assert!(matches!(trouble, Trouble::Nothing | Trouble::Cancel), "trouble that nobody heard of");
            assert_eq!(items.len(), 1);
            assert_eq!(captured_bytes.load(Ordering::SeqCst), 3 * LEAF, "every byte once");
        }
        // A complete capture may still fail to be written. An incomplete one is never written.
        (Some(Ok(())), Some(Err(error))) => assert!(trouble == Trouble::Disk, "{error}"),
        (_, Some(Ok(_))) => panic!("a save that was not captured was written"),
        (Some(Ok(())), None) => panic!("a save that nobody writes was captured"),
        (Some(Err(error)), _) => match trouble {
            Trouble::Nothing => panic!("{error}"),
            Trouble::Source => {
                assert!(error.to_string().contains("it broke"), "the first cause is told: {error}");
            }
            _ => assert!(matches!(error, Error::Cancelled(_)), "{error}"),
        },
        (None, Some(Err(error))) => assert!(matches!(error, Error::Cancelled(_)), "{error}"),
        (None, None) => panic!("nobody did anything"),
    }
    if trouble == Trouble::Disk
        && let Some(Err(error)) = &written
    {
        assert_eq!(error.errno(), Some(libc_eio()), "the disk's own answer is told: {error}");
    }
    drop((captured, written));
    assert_eq!(pool.free_slots(), 2, "every slot comes back");
}

/// EIO of the kernel's interface.
fn libc_eio() -> i32 {
    5
}

fn leaf(provider: Watched) -> LeafPlan {
    let region = Region::whole(&[LEAF]);
    LeafPlan::Tensor {
        dtype: Dtype::Uint8,
        shape: vec![LEAF],
        chunks: vec![ChunkPlan { region: ChunkRegion::Box(region.clone()), local: region, band: 0 }],
        provider: Arc::new(provider),
    }
}

fn item(leaves: Vec<LeafPlan>) -> ItemPlan {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::List);
    for number in 0..leaves.len() as u32 {
        tree.push_leaf(Some(root), Some(Component::Index(number)));
    }
    ItemPlan { dir: "i0".into(), tree, leaves }
}

#[test]
fn a_save_ends_whole_whatever_thread_goes_first() {
    every_interleaving(|| save(Trouble::Nothing));
}

#[test]
fn a_source_that_fails_ends_both_halves_and_tells_why() {
    every_interleaving(|| save(Trouble::Source));
}

#[test]
fn a_disk_that_fails_ends_both_halves_and_tells_why() {
    every_interleaving(|| save(Trouble::Disk));
}

#[test]
fn a_caller_that_wants_a_save_no_more_ends_it_or_comes_too_late() {
    every_interleaving(|| save(Trouble::Cancel));
}

#[test]
fn a_capture_hears_that_it_is_over_while_others_hold_all_slots() {
    every_interleaving(|| {
        let pool = StagingPool::of_slots(2, SLOT).unwrap();
        let others = (acquire(&pool).unwrap(), acquire(&pool).unwrap());
        let (alive, captured) = (Arc::new(AtomicBool::new(true)), Arc::default());
        let leaves = vec![leaf(Watched { value: 1, alive, captured, fails: false })];
        let options = SaveOptions {
            block_bytes: 4096,
            file_ids: vec![1],
            stall_timeout: LONG,
            ..SaveOptions::default()
        };
        let (capture, flush) = prepare(vec![item(leaves)], &pool, options).unwrap();
        let leaving = thread::spawn(move || drop(flush));
        let error = capture.run().unwrap_err();
        assert!(matches!(error, Error::Cancelled(_)), "{error}");
        join([leaving]);
        drop(others);
        assert_eq!(pool.free_slots(), 2);
    });
}

#[test]
fn a_half_that_is_dropped_ends_the_other() {
    every_interleaving(|| save(Trouble::NoFlush));
    every_interleaving(|| save(Trouble::NoCapture));
}
