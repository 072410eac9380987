//! Prefetched reads: used if the plan needs them, harmless otherwise.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::super::head_start::HeadStart;
use super::super::testing::{FILE, Item, Loaded, options, pattern};
use super::super::{FileSet, LoadOptions, execute};
use crate::sys::HostTarget;

const LENGTHS: [u64; 3] = [9 << 20, 11 << 20, 700_001];

fn load(item: &Item, files: &FileSet, leaves: &[usize], options: &LoadOptions) -> (Vec<Vec<u8>>, Loaded) {
    let mut into: Vec<Vec<u8>> =
        leaves.iter().map(|&leaf| vec![0xEE; item.extent(leaf).length as usize]).collect();
    let targets: Vec<HostTarget<'_>> = into.iter_mut().map(|bytes| bytes.as_mut_slice().into()).collect();
    let result = execute(&item.disk, files, &item.index, &item.plan(leaves), targets, options);
    (into, result)
}

/// Runs [`FileSet::begin`] on this thread.
fn begin(files: &FileSet, item: &Item, wanted: &[u32], options: &LoadOptions) {
    if let Ok(Some(head_start)) = HeadStart::begin(&item.disk, files, wanted, options) {
        files.keep_head_start(head_start);
    }
}

fn assert_right(found: &[Vec<u8>], leaves: &[usize]) {
    for (bytes, &leaf) in found.iter().zip(leaves) {
        assert!(*bytes == pattern(leaf as u64, LENGTHS[leaf]), "leaf {leaf}");
    }
}

#[test]
fn a_restore_of_everything_uses_what_was_begun_and_reads_nothing_twice() {
    // The threads' buffers come from the same budget.
    for (mib, threads, begins) in
        [(5, 2, 1), (12, 2, 2), (20, 2, 4), (20, 16, 3), (64, 2, 5), (64, 16, 5), (64, 64, 5)]
    {
        let item = Item::of_tensors(256 << 10, &LENGTHS);
        let options = LoadOptions { budget_bytes: mib << 20, threads, ..options() };
        let files = item.files();
        begin(&files, &item, &[0], &options);
        let begun = item.disk.knobs.direct_reads.load(Ordering::SeqCst);
        assert_eq!(begun, begins, "{mib} MiB, {threads} threads");
        let (found, result) = load(&item, &files, &[0, 1, 2], &options);
        assert_right(&found, &[0, 1, 2]);
        let stats = result.unwrap();
        assert_eq!(stats.reads, 6);
        assert!(stats.peak_buffer_bytes <= mib.max(9) << 20, "two reads at the least: {stats:?}");
        assert_eq!(item.disk.knobs.direct_reads.load(Ordering::SeqCst), 6);
        // Again, without a prefetch.
        let (found, result) = load(&item, &files, &[0, 1, 2], &options);
        assert_right(&found, &[0, 1, 2]);
        result.unwrap();
    }
}

#[test]
fn a_restore_of_something_else_lets_go_of_what_was_begun() {
    let item = Item::of_tensors(256 << 10, &LENGTHS);
    let files = item.files();
    // The budget is too small for both.
    let options = LoadOptions { budget_bytes: 20 << 20, ..options() };
    begin(&files, &item, &[0], &options);
    let (found, result) = load(&item, &files, &[1, 2], &options);
    assert_right(&found, &[1, 2]);
    result.unwrap();
    assert_eq!(item.disk.knobs.in_flight.load(Ordering::SeqCst), 0);
}

#[test]
fn a_small_read_before_a_restore_leaves_what_was_begun_to_it() {
    let item = Item::of_tensors(256 << 10, &LENGTHS);
    let files = item.files();
    begin(&files, &item, &[0], &options());
    let (found, result) = load(&item, &files, &[2], &options());
    assert_right(&found, &[2]);
    let small = result.unwrap().reads as usize;
    let (found, result) = load(&item, &files, &[0, 1, 2], &options());
    assert_right(&found, &[0, 1, 2]);
    result.unwrap();
    assert_eq!(item.disk.knobs.direct_reads.load(Ordering::SeqCst), 6 + small, "nothing was read twice");
}

#[test]
fn what_was_begun_and_never_wanted_is_waited_for_when_the_files_are_closed() {
    let item = Item::of_tensors(256 << 10, &LENGTHS);
    let files = item.files();
    begin(&files, &item, &[0], &options());
    assert!(item.disk.knobs.in_flight.load(Ordering::SeqCst) > 0);
    drop(files);
    assert_eq!(item.disk.knobs.in_flight.load(Ordering::SeqCst), 0);
}

#[test]
fn a_head_start_that_fails_is_no_failure_and_one_that_is_damaged_is_found() {
    let item = Item::of_tensors(256 << 10, &LENGTHS);
    begin(&item.files(), &item, &[0, 7], &options());

    item.disk.change(FILE, |bytes| bytes[5 << 20] ^= 1);
    let files = item.files();
    begin(&files, &item, &[0], &options());
    let failure = load(&item, &files, &[0, 1, 2], &options()).1.unwrap_err();
    assert_eq!(failure.error.kind(), "corrupt_checkpoint");
    item.disk.change(FILE, |bytes| bytes[5 << 20] ^= 1);

    let bad = 6 << 20;
    item.disk.knobs.bad_byte.store(bad, Ordering::SeqCst);
    let files = item.files();
    begin(&files, &item, &[0], &options());
    assert_eq!(load(&item, &files, &[0, 1, 2], &options()).1.unwrap_err().error.errno(), Some(5));
}

#[test]
fn a_disk_that_hangs_in_a_head_start_holds_nobody_up_for_longer_than_the_deadline() {
    let item = Item::of_tensors(256 << 10, &LENGTHS);
    let files = item.files();
    let options = LoadOptions { stall_timeout: Duration::from_millis(100), ..options() };
    item.disk.knobs.hang.store(true, Ordering::SeqCst);
    begin(&files, &item, &[0], &options);
    drop(files);
}

#[test]
fn what_the_page_cache_holds_is_not_begun() {
    let item = Item::of_tensors(256 << 10, &LENGTHS);
    item.disk.knobs.cached.store(true, Ordering::SeqCst);
    let files = item.files();
    begin(&files, &item, &[0], &options());
    assert_eq!(item.disk.knobs.direct_reads.load(Ordering::SeqCst), 0);
    let (found, result) = load(&item, &files, &[0, 1, 2], &options());
    assert_right(&found, &[0, 1, 2]);
    assert_eq!(result.unwrap().bytes_read, 0);
}

/// Counts the prefetch threads of this process. Only the test below starts any.
fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    tasks.filter_map(|task| name(task.ok()?)).filter(|name| name.trim() == "stepwell-ahead").count()
}

fn assert_soon(what: &str, holds: impl Fn() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(10), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_thread_that_begins_lives_until_its_reads_are_done_and_is_waited_for_until_the_deadline_only() {
    let item = Item::of_tensors(256 << 10, &LENGTHS);
    let disk = || Arc::new(item.disk.clone());
    let files = Arc::new(item.files());
    files.begin(disk(), vec![0], options());
    files.has_begun();
    assert_eq!(item.disk.knobs.direct_reads.load(Ordering::SeqCst), 5);
    assert_eq!(threads(), 1, "the answers to its reads would come late");
    let (found, result) = load(&item, &files, &[0, 1, 2], &options());
    assert_right(&found, &[0, 1, 2]);
    assert_eq!(result.unwrap().reads, 6);
    assert_soon("a thread outlives the run", || threads() == 0);

    // The set is dropped before anyone uses the prefetch.
    files.begin(disk(), vec![0], options());
    drop(files);
    assert_soon("a thread outlives the files", || threads() == 0);
    assert_eq!(item.disk.knobs.in_flight.load(Ordering::SeqCst), 0);

    // Opening the file blocks.
    item.disk.knobs.stuck.store(true, Ordering::SeqCst);
    let files = Arc::new(item.files());
    let begin = Instant::now();
    files.begin(disk(), vec![0], LoadOptions { stall_timeout: Duration::from_millis(100), ..options() });
    files.has_begun();
    assert!(begin.elapsed() < Duration::from_secs(5), "waited for {:?}", begin.elapsed());
    item.disk.knobs.stuck.store(false, Ordering::SeqCst);
    let (found, result) = load(&item, &files, &[0, 1, 2], &options());
    assert_right(&found, &[0, 1, 2]);
    result.unwrap();
    assert_soon("a thread outlives a late answer", || threads() == 0);
}
