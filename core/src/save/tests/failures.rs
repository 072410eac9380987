//! After any failure, both halves end with its cause, and every slot returns.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use super::*;
use crate::Error;
use crate::io::simulated::{Action, Fault, OperationKind};
use crate::provider::Fill;
use crate::staging::{Filling, Slot};

fn big() -> Vec<ItemPlan> {
    vec![
        item("i0", vec![bytes_leaf(&noise(40 * BLOCK, 1))]),
        item("i1", vec![bytes_leaf(&noise(40 * BLOCK, 2))]),
    ]
}

#[test]
fn any_failing_operation_fails_the_save_and_frees_slots() {
    let counted = SimDisk::new();
    save(big(), &pool(3, 4 * BLOCK), SaveOptions { capture_threads: 1, ..options(2) }, &counted);
    let before = {
        let disk = SimDisk::new();
        step_dir(&disk);
        disk.operations()
    };
    let operations = counted.operations() - before;
    assert!(operations > 20);
    for number in 0..operations {
        for (errno, action) in [
            (libc::EIO, Action::Fail(libc::EIO)),
            (libc::ENOSPC, Action::FailHalfway(libc::ENOSPC)),
            (libc::EDQUOT, Action::FailAfterwards(libc::EDQUOT)),
        ] {
            let disk = SimDisk::new();
            step_dir(&disk);
            let ring = pool(3, 4 * BLOCK);
            let parts = prepare(big(), &ring, SaveOptions { capture_threads: 1, ..options(2) }).unwrap();
            let opened = disk.operations();
            // `run_both` opens the step's directory, which is no part of the save.
            let skip = operations_of_step_dir();
            disk.inject(Fault::any(action).after(skip + number));
            let (captured, written) = run_both(parts, &disk);
            let error = written.map(|_| ()).expect_err("a failed operation went unnoticed");
            assert_eq!(error.errno(), Some(errno), "operation {number}: {error}");
            if let Err(error) = captured {
                assert!(matches!(&error, Error::Cancelled(_)), "operation {number}: {error}");
                assert!(error.to_string().contains("the flush failed"), "{error}");
            }
            assert_idle(&ring);
            assert!(disk.operations() > opened);
            disk.clear_faults();
            save(big(), &ring, options(2), &SimDisk::new());
        }
    }
}

fn operations_of_step_dir() -> u64 {
    let disk = SimDisk::new();
    step_dir(&disk);
    let made = disk.operations();
    step_dir(&disk);
    disk.operations() - made
}

#[test]
fn a_failed_write_or_sync_is_never_tried_again() {
    for kind in [OperationKind::Write, OperationKind::Sync] {
        let disk = SimDisk::new();
        let failures = Arc::new(AtomicU64::new(0));
        disk.inject(Fault::on(kind, Action::Fail(libc::EIO)).after(1).from_then_on());
        let seen = Arc::clone(&failures);
        disk.set_hook(Some(Arc::new(move |moment, operation| {
            if operation.kind == kind && moment == crate::io::simulated::Moment::After {
                seen.fetch_add(1, Ordering::Relaxed);
            }
        })));
        let options = SaveOptions { queue_depth: 1, ..options(2) };
        let (_, written) = run_both(prepare(big(), &pool(3, 4 * BLOCK), options).unwrap(), &disk);
        assert_eq!(written.expect_err("it failed").errno(), Some(libc::EIO));
        assert_eq!(
            failures.load(Ordering::Relaxed),
            2,
            "{kind:?}: one that passed, one that failed, and no more"
        );
    }
}

#[test]
fn a_hanging_write_ends_both_halves_by_the_timeout() {
    let disk = SimDisk::new();
    disk.inject(Fault::on(OperationKind::Write, Action::Stall).after(2));
    let ring = pool(3, 4 * BLOCK);
    let options = SaveOptions { stall_timeout: Duration::from_millis(200), queue_depth: 1, ..options(2) };
    let started = Instant::now();
    let (captured, written) = run_both(prepare(big(), &ring, options).unwrap(), &disk);
    assert!(started.elapsed() < Duration::from_secs(10));
    assert!(matches!(written, Err(Error::Timeout { .. })), "{written:?}");
    assert!(matches!(captured, Err(Error::Cancelled(_) | Error::Timeout { .. })), "{captured:?}");
    assert_eq!(ring.free_slots(), 2, "the kernel may still read the third");
}

#[test]
fn slots_of_a_stuck_disk_leave_the_pool() {
    let disk = SimDisk::new();
    disk.inject(Fault::on(OperationKind::Write, Action::Stall).from_then_on());
    let ring = pool(3, 4 * BLOCK);
    let before = ring.bytes();
    let options_of_stall =
        SaveOptions { stall_timeout: Duration::from_millis(200), queue_depth: 3, ..options(2) };
    let (_, written) = run_both(prepare(big(), &ring, options_of_stall).unwrap(), &disk);
    assert!(matches!(written, Err(Error::Timeout { .. })), "{written:?}");
    assert_eq!(ring.bytes(), 0, "three writes never end, and nobody may count on their memory");
    ring.ensure(before).unwrap();
    assert!(ring.bytes() >= before && ring.free_slots() >= 3);
    save(big(), &ring, options(2), &SimDisk::new());
    assert_idle(&ring);
}

#[test]
fn a_save_cancelled_after_its_last_copy_completes() {
    /// Sets the flag while it gives its bytes.
    struct Last(Arc<AtomicBool>);

    impl StateProvider for Last {
        fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> Result<()> {
            for fill in fills {
                slot.part(fill.at, fill.len)?.fill(7);
            }
            self.0.store(true, Ordering::SeqCst);
            Ok(())
        }
    }

    let cancel = Arc::new(AtomicBool::new(false));
    let leaf = tensor_leaf(100, Arc::new(Last(Arc::clone(&cancel))));
    let options = SaveOptions { cancel: Some(cancel), capture_threads: 1, ..options(1) };
    let parts = prepare(vec![item("i0", vec![leaf])], &pool(3, 4 * BLOCK), options).unwrap();
    let (captured, written) = run_both(parts, &SimDisk::new());
    assert!(captured.is_ok() && written.is_ok(), "{captured:?} {written:?}");
}

#[test]
fn a_capture_whose_flush_never_starts_ends_by_the_stall_timeout() {
    let ring = pool(2, 4 * BLOCK);
    let options = SaveOptions { stall_timeout: Duration::from_millis(100), ..options(2) };
    let (capture, flush) = prepare(big(), &ring, options).unwrap();
    let error = capture.run().expect_err("nobody frees a slot");
    assert!(
        matches!(error.inner(), Error::Timeout { waited_for, .. } if waited_for.contains("staging slot")),
        "{error}"
    );
    let disk = SimDisk::new();
    let failed = flush.run(&disk, &step_dir(&disk), &mut NoReclaimer).expect_err("the capture is gone");
    assert_eq!(failed.to_string(), error.to_string(), "both halves tell the same");
    assert_idle(&ring);
}

#[test]
fn a_flush_whose_capture_never_starts_ends_by_the_stall_timeout() {
    let ring = pool(2, 4 * BLOCK);
    let options = SaveOptions { stall_timeout: Duration::from_millis(100), ..options(2) };
    let (capture, flush) = prepare(big(), &ring, options).unwrap();
    let disk = SimDisk::new();
    let error = flush.run(&disk, &step_dir(&disk), &mut NoReclaimer).expect_err("nothing arrives");
    assert!(matches!(&error, Error::Timeout { waited_for, .. } if waited_for.contains("capture")), "{error}");
    assert!(matches!(capture.run(), Err(Error::Cancelled(_))));
    assert_idle(&ring);
}

#[test]
fn a_dropped_half_cancels_the_other() {
    let ring = pool(2, 4 * BLOCK);
    let (capture, flush) = prepare(big(), &ring, options(2)).unwrap();
    drop(flush);
    let error = capture.run().expect_err("its flush is gone");
    assert!(matches!(&error, Error::Cancelled(cause) if cause.contains("dropped")), "{error}");
    assert_idle(&ring);

    let (capture, flush) = prepare(big(), &ring, options(2)).unwrap();
    let disk = SimDisk::new();
    std::thread::scope(|scope| {
        let flushed = scope.spawn(|| flush.run(&disk, &step_dir(&disk), &mut NoReclaimer));
        std::thread::sleep(Duration::from_millis(20));
        drop(capture);
        let error = flushed.join().unwrap().expect_err("its capture is gone");
        assert!(matches!(&error, Error::Cancelled(cause) if cause.contains("dropped")), "{error}");
    });
    assert_idle(&ring);

    // A capture that waits for a slot is woken.
    let (capture, flush) = prepare(big(), &ring, options(2)).unwrap();
    std::thread::scope(|scope| {
        let captured = scope.spawn(|| capture.run());
        std::thread::sleep(Duration::from_millis(50));
        let started = Instant::now();
        drop(flush);
        assert!(matches!(captured.join().unwrap(), Err(Error::Cancelled(_))));
        assert!(started.elapsed() < Duration::from_secs(5));
    });
    assert_idle(&ring);
}

/// Fails (or panics) at its third call.
struct Failing {
    calls: AtomicU64,
    panics: bool,
}

impl StateProvider for Failing {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> Result<()> {
        if self.calls.fetch_add(1, Ordering::Relaxed) == 2 {
            assert!(!self.panics, "a defect");
            return Err(Error::Misuse("the device is gone".into()));
        }
        for fill in fills {
            slot.part(fill.at, fill.len)?.fill(1);
        }
        Ok(())
    }
}

#[test]
fn a_failing_provider_fails_the_save_by_leaf() {
    for panics in [false, true] {
        for threads in [1, 3] {
            let ring = pool(3, 2 * BLOCK);
            let failing = Arc::new(Failing { calls: AtomicU64::new(0), panics });
            let leaves = vec![bytes_leaf(&noise(9000, 1)), tensor_leaf(30 * BLOCK, failing)];
            let options = SaveOptions { capture_threads: threads, ..options(1) };
            let disk = SimDisk::new();
            let (captured, written) =
                run_both(prepare(vec![item("i0", leaves)], &ring, options).unwrap(), &disk);
            let error = captured.expect_err("the provider failed");
            let message = error.to_string();
            if panics {
                assert!(message.contains("panicked: a defect"), "{message}");
            } else {
                assert!(matches!(error.inner(), Error::Leaf { leaf, .. } if leaf == "a[1]"), "{message}");
                assert!(message.contains("the device is gone"), "{message}");
            }
            let failed = written.expect_err("its capture failed");
            assert_eq!(
                (failed.kind(), failed.to_string()),
                (error.kind(), message),
                "both halves tell the same"
            );
            assert_idle(&ring);
        }
    }
}

#[test]
fn providers_are_kept_from_capture_to_flush() {
    struct Watched {
        over: Arc<AtomicBool>,
        dropped: Arc<AtomicBool>,
    }
    impl StateProvider for Watched {
        fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> Result<()> {
            for fill in fills {
                slot.part(fill.at, fill.len)?.fill(1);
                std::thread::sleep(Duration::from_micros(200));
            }
            assert!(!self.over.load(Ordering::SeqCst), "read after the capture had returned");
            Ok(())
        }
    }
    impl Drop for Watched {
        fn drop(&mut self) {
            self.dropped.store(true, Ordering::SeqCst);
        }
    }
    for fails in [false, true] {
        let disk = SimDisk::new();
        if fails {
            disk.inject(Fault::on(OperationKind::Write, Action::Fail(libc::EIO)).after(5));
        }
        let (over, dropped) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let watched = Watched { over: Arc::clone(&over), dropped: Arc::clone(&dropped) };
        let leaf = tensor_leaf(60 * BLOCK, Arc::new(watched));
        let options = SaveOptions { capture_threads: 4, ..options(1) };
        let (capture, flush) = prepare(vec![item("i0", vec![leaf])], &pool(4, BLOCK), options).unwrap();
        let dir = step_dir(&disk);
        std::thread::scope(|scope| {
            let flushed = scope.spawn(|| flush.run(&disk, &dir, &mut NoReclaimer));
            assert_eq!(capture.run().is_err(), fails);
            over.store(true, Ordering::SeqCst);
            assert_eq!(flushed.join().unwrap().is_err(), fails);
            assert!(dropped.load(Ordering::SeqCst), "the provider is still held");
        });
    }
}

/// Sets the flag when it is asked for the `after`-th time, and counts what it is asked later.
struct CancelsItself {
    flag: Arc<AtomicBool>,
    after: u64,
    calls: AtomicU64,
}

impl StateProvider for CancelsItself {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> Result<()> {
        for fill in fills {
            slot.part(fill.at, fill.len)?.fill(1);
        }
        if self.calls.fetch_add(1, Ordering::SeqCst) + 1 == self.after {
            self.flag.store(true, Ordering::SeqCst);
        }
        Ok(())
    }
}

#[test]
fn a_cancelled_capture_ends_after_its_current_copy() {
    let flag = Arc::new(AtomicBool::new(false));
    let provider = Arc::new(CancelsItself { flag: Arc::clone(&flag), after: 3, calls: AtomicU64::new(0) });
    // Five leaves to a slot, so that the third copy is in the middle of one.
    let leaves = (0..20).map(|_| tensor_leaf(3 * BLOCK / 4, Arc::clone(&provider) as _)).collect();
    let ring = pool(3, 4 * BLOCK);
    let options = SaveOptions { capture_threads: 1, cancel: Some(flag), ..options(1) };
    let (captured, written) =
        run_both(prepare(vec![item("i0", leaves)], &ring, options).unwrap(), &SimDisk::new());
    let error = captured.expect_err("it was cancelled");
    assert!(matches!(&error, Error::Cancelled(why) if why.contains("caller")), "{error}");
    assert!(matches!(written, Err(Error::Cancelled(_))), "{written:?}");
    assert_eq!(provider.calls.load(Ordering::SeqCst), 3, "it went on reading");
    assert_idle(&ring);
}

#[test]
fn a_capture_that_waits_for_a_slot_can_be_cancelled() {
    let flag = Arc::new(AtomicBool::new(false));
    let ring = pool(2, 4 * BLOCK);
    let (capture, flush) =
        prepare(big(), &ring, SaveOptions { cancel: Some(Arc::clone(&flag)), ..options(2) }).unwrap();
    let started = Instant::now();
    let error = std::thread::scope(|scope| {
        let captured = scope.spawn(move || capture.run());
        while ring.free_slots() > 0 {
            std::thread::yield_now();
        }
        flag.store(true, Ordering::SeqCst);
        captured.join().unwrap().expect_err("nobody frees a slot")
    });
    assert!(matches!(&error, Error::Cancelled(why) if why.contains("caller")), "{error}");
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    drop(flush);
    assert_idle(&ring);
}
