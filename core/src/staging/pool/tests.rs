use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use super::*;
use crate::staging::Filled;

const SLOT: usize = 64 << 10;
const LONG: Duration = Duration::from_secs(20);

fn none() -> Option<Error> {
    None
}

#[test]
fn the_process_has_one_pool_while_somebody_holds_it() {
    let one = StagingPool::shared();
    let two = StagingPool::shared();
    assert!(Arc::ptr_eq(&one, &two));
    assert_eq!(one.bytes(), 0, "no memory before somebody asks for some");
    let gone = Arc::downgrade(&one);
    drop(one);
    assert!(gone.upgrade().is_some());
    drop(two);
    assert!(gone.upgrade().is_none(), "the last one frees it");
    let three = StagingPool::shared();
    three.ensure(1).unwrap();
    assert_eq!(three.bytes(), MIN_SLOTS * DEFAULT_SLOT_BYTES);
}

#[test]
fn a_pool_grows_when_more_is_asked_for_and_never_shrinks() {
    let pool = StagingPool::new(0, SLOT).unwrap();
    assert!(pool.bytes() >= 2 * SLOT);
    let held = pool.try_acquire().unwrap().unwrap();
    let before = pool.bytes();
    pool.ensure(3 << 20).unwrap();
    assert!(pool.bytes() >= 3 << 20);
    pool.ensure(1).unwrap();
    assert!(pool.bytes() > before);
    assert_eq!(pool.mappings().iter().map(|mapping| mapping.len()).sum::<usize>(), pool.bytes());
    drop(held);
    assert_eq!(pool.free_slots() * SLOT, pool.bytes());
}

#[test]
fn sizes_that_make_no_slots_are_refused() {
    for slot_bytes in [0, 1, 4095, 6000, SEGMENT_BYTES + 4096] {
        assert!(matches!(StagingPool::new(1 << 20, slot_bytes), Err(Error::Misuse(_))), "{slot_bytes}");
    }
}

#[test]
fn a_slot_dropped_in_any_state_comes_back() {
    let pool = StagingPool::of_slots(1, SLOT).unwrap();
    let take = || pool.try_acquire().unwrap().expect("it has come back");
    drop(take());
    drop(take().begin());
    drop(take().begin().finish());
    let full = |slot: Slot<Free>| match slot.begin().finish() {
        Filled::Full(slot) => slot,
        Filled::Pending(_) => panic!("no device copies into it"),
    };
    drop(full(take()));
    let (buffer, flushing) = full(take()).launch().unwrap();
    assert!(flushing.is_empty());
    assert!(pool.try_acquire().unwrap().is_none());
    drop(flushing.land(buffer).unwrap());
    drop(take());
}

#[test]
fn memory_of_another_slot_is_not_taken_for_this_one() {
    let pool = StagingPool::of_slots(2, SLOT).unwrap();
    let launch = || match pool.try_acquire().unwrap().unwrap().begin().finish() {
        Filled::Full(slot) => slot.launch().unwrap(),
        Filled::Pending(_) => panic!("no device copies into it"),
    };
    let (_one, first) = launch();
    let (two, _second) = launch();
    assert!(matches!(first.land(two), Err(Error::Internal { .. })));
}

#[test]
fn a_part_outside_the_slot_is_refused() {
    let pool = StagingPool::of_slots(1, SLOT).unwrap();
    let mut slot = pool.try_acquire().unwrap().unwrap().begin();
    assert_eq!(slot.part(0, SLOT as u64).unwrap().len(), SLOT);
    assert!(slot.part(SLOT as u64, 0).unwrap().is_empty());
    for (at, len) in [(1, SLOT as u64), (SLOT as u64 + 1, 0), (u64::MAX, 2), (0, u64::MAX)] {
        assert!(slot.part(at, len).is_err(), "{at} {len}");
    }
}

#[test]
fn slots_are_lent_in_the_order_in_which_they_were_asked_for() {
    let pool = StagingPool::of_slots(1, SLOT).unwrap();
    let held = pool.try_acquire().unwrap().unwrap();
    let turn = AtomicU32::new(0);
    thread::scope(|scope| {
        for i in 0..6 {
            let (pool, turn) = (&pool, &turn);
            scope.spawn(move || {
                let (slot, waited) = pool.acquire(LONG, Duration::MAX, none).unwrap();
                assert!(waited.is_some());
                assert_eq!(turn.fetch_add(1, Ordering::SeqCst), i);
                drop(slot);
            });
            while pool.shared.lock().queue.len() <= i as usize {
                thread::yield_now();
            }
        }
        assert!(pool.try_acquire().unwrap().is_none());
        drop(held);
    });
    assert_eq!(turn.load(Ordering::SeqCst), 6);
}

#[test]
fn a_wait_for_a_slot_ends_without_progress() {
    let pool = StagingPool::of_slots(2, SLOT).unwrap();
    let (one, two) = (pool.try_acquire().unwrap().unwrap(), pool.try_acquire().unwrap().unwrap());
    let error = pool.acquire(Duration::from_millis(30), Duration::MAX, none).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    assert!(pool.shared.lock().queue.is_empty(), "its place in the queue is gone");

    // Six wait; one slot goes from hand to hand, each time later than a quarter of the deadline.
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                let (slot, _) =
                    pool.acquire(Duration::from_secs(2), Duration::MAX, none).expect("it moves on");
                thread::sleep(Duration::from_millis(600));
                drop(slot);
            });
        }
        drop(one);
    });
    drop(two);
}

#[test]
fn who_waits_for_a_slot_is_woken_to_be_cancelled() {
    let pool = StagingPool::of_slots(2, SLOT).unwrap();
    let held = (pool.try_acquire().unwrap(), pool.try_acquire().unwrap());
    let cancelled = AtomicU32::new(0);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let ask = || (cancelled.load(Ordering::SeqCst) == 1).then(|| Error::Cancelled("enough".into()));
            pool.acquire(LONG, Duration::MAX, ask).map(|_| ()).unwrap_err()
        });
        while pool.shared.lock().queue.is_empty() {
            thread::yield_now();
        }
        let started = Instant::now();
        cancelled.store(1, Ordering::SeqCst);
        pool.wake();
        assert!(matches!(waiting.join().unwrap(), Error::Cancelled(_)));
        assert!(started.elapsed() < Duration::from_secs(5));
    });
    drop(held);
}

#[test]
fn slots_may_outlive_their_pool() {
    let pool = StagingPool::of_slots(2, SLOT).unwrap();
    let mut slot = pool.try_acquire().unwrap().unwrap().begin();
    drop(pool);
    slot.part(0, SLOT as u64).unwrap().fill(7);
}
