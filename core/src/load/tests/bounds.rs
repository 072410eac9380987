//! Restores respect their limits on memory and time, and never write outside the caller's memory.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::super::buffers::ReadBuffers;
use super::super::testing::{TestItem, options, pattern};
use super::super::{LoadOptions, execute, verify};
use crate::read_plan::BoxCopy;
use crate::sys::HostTarget;

#[test]
fn buffers_stay_within_the_budget() {
    let item = TestItem::of_tensors(256 << 10, &[40 << 20]);
    for (budget, cached) in [(32_u64, false), (16, false), (16, true), (32, true)] {
        item.disk.knobs.cached.store(cached, Ordering::SeqCst);
        let options = LoadOptions { budget_bytes: budget << 20, queue_depth: 100, threads: 8, ..options() };
        let (found, result) = item.load(&[0], &options);
        let stats = result.unwrap();
        assert!(stats.peak_buffer_bytes <= budget << 20, "{stats:?}");
        assert!(stats.peak_buffer_bytes > 0);
        assert!(found[0] == pattern(0, 40 << 20));
    }
}

#[test]
fn a_budget_below_two_reads_is_raised_to_that() {
    let item = TestItem::of_tensors(256 << 10, &[9 << 20]);
    let options = LoadOptions { budget_bytes: 0, queue_depth: 0, threads: 0, ..options() };
    let (found, result) = item.load(&[0], &options);
    assert_eq!(result.unwrap().peak_buffer_bytes, 8 << 20);
    assert!(found[0] == pattern(0, 9 << 20));
}

#[test]
fn buffers_are_kept_for_the_next_restore() {
    let user = ReadBuffers::shared();
    let item = TestItem::of_tensors(256 << 10, &[9 << 20]);
    item.load(&[0], &options()).1.unwrap();
    assert!(user.idle_bytes() > 0);
}

#[test]
fn a_disk_that_hangs_ends_in_an_error_and_not_in_a_wait() {
    for cached in [false, true] {
        let item = TestItem::of_tensors(4096, &[1 << 20]);
        let files = item.files();
        files.block_bytes(0).unwrap();
        item.disk.knobs.cached.store(cached, Ordering::SeqCst);
        item.disk.knobs.hang.store(true, Ordering::SeqCst);
        let options = LoadOptions { stall_timeout: Duration::from_millis(300), ..options() };
        let started = Instant::now();
        let mut into = vec![0xEE; 1 << 20];
        let targets = [HostTarget::from(into.as_mut_slice())];
        let failure =
            execute(&item.disk, &files, &item.index, &item.copies(&[0]), targets, &options).unwrap_err();
        assert_eq!(failure.error.kind(), "timeout", "{failure}");
        assert!(failure.overwritten.is_empty());
        assert!(started.elapsed() < Duration::from_secs(60));
        let stalled = verify(&item.disk, &files, &item.index, &options, &mut |_| true);
        assert_eq!(stalled.unwrap_err().kind(), "timeout");
        // The disk answers too late: the caller has its memory back.
        item.disk.knobs.hang.store(false, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(200));
        assert!(into.iter().all(|&b| b == 0xEE));
    }
}

fn refused(copies: &[BoxCopy], len: usize) -> String {
    let item = TestItem::of_tensors(4096, &[10_000]);
    let mut into = vec![0xEE; len];
    let targets = [HostTarget::from(into.as_mut_slice())];
    let failure = execute(&item.disk, &item.files(), &item.index, copies, targets, &options()).unwrap_err();
    assert!(failure.overwritten.is_empty());
    assert!(into.iter().all(|&b| b == 0xEE));
    assert_eq!(failure.error.kind(), "internal");
    failure.error.to_string()
}

#[test]
fn a_copy_outside_its_destination_is_refused_unread() {
    let item = TestItem::of_tensors(4096, &[10_000]);
    let with = |change: &dyn Fn(&mut BoxCopy)| {
        let mut copies = item.copies(&[0]);
        change(&mut copies[0]);
        copies
    };
    assert!(refused(&with(&|_| ()), 9_999).contains("inside the 9999 bytes of destination 0"));
    assert!(refused(&with(&|copy| copy.dst_offset = 1), 10_000).contains("ends at byte 10001"));
    assert!(refused(&with(&|copy| copy.dst_offset = u64::MAX), 10_000).contains("64 bits"));
    assert!(refused(&with(&|copy| copy.dst_strides[0] = -1), 10_000).contains("before the first byte"));
    assert!(refused(&with(&|copy| copy.dst_strides[0] = 2), 10_000).contains("ends at byte"));
    assert!(refused(&with(&|copy| copy.dst_strides[0] = 0), 10_000).contains("overlaps itself"));
    assert!(refused(&with(&|copy| copy.dst = 1), 10_000).contains("one to destination 1"));
    assert!(refused(&with(&|copy| copy.dst_strides.clear()), 10_000).contains("w0"));
}

#[test]
fn copies_to_the_same_place_do_not_race() {
    // Both leaves go to one destination. Each byte comes from one of them.
    let item = TestItem::of_tensors(4096, &[3 << 20, 3 << 20]);
    let mut copies = item.copies(&[0, 1]);
    copies[1].dst = 0;
    let mut into = vec![0; 3 << 20];
    let targets = [HostTarget::from(into.as_mut_slice())];
    execute(&item.disk, &item.files(), &item.index, &copies, targets, &options()).unwrap();
    let (a, b) = (pattern(0, 3 << 20), pattern(1, 3 << 20));
    assert!(into.iter().zip(a.iter().zip(&b)).all(|(found, (a, b))| found == a || found == b));
}
