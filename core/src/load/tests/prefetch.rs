//! Prefetched reads: used if the plan needs them, harmless otherwise.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::super::prefetch::Prefetch;
use super::super::testing::{FILE, Loaded, TestItem, options, pattern};
use super::super::{FileSet, LoadOptions, execute};
use crate::sys::HostTarget;

const LENGTHS: [u64; 3] = [9 << 20, 11 << 20, 700_001];

fn load(item: &TestItem, files: &FileSet, leaves: &[usize], options: &LoadOptions) -> (Vec<Vec<u8>>, Loaded) {
    let mut into: Vec<Vec<u8>> =
        leaves.iter().map(|&leaf| vec![0xEE; item.extent(leaf).length as usize]).collect();
    let targets: Vec<HostTarget<'_>> = into.iter_mut().map(|bytes| bytes.as_mut_slice().into()).collect();
    let result = execute(&item.disk, files, &item.index, &item.plan(leaves), targets, options);
    (into, result)
}

/// Runs [`FileSet::prefetch`] on this thread.
fn begin(files: &FileSet, item: &TestItem, wanted: &[u32], options: &LoadOptions) {
    if let Ok(Some(prefetch)) = Prefetch::begin(&item.disk, files, wanted, options) {
        files.keep_prefetch(prefetch);
    }
}

fn assert_right(found: &[Vec<u8>], leaves: &[usize]) {
    for (bytes, &leaf) in found.iter().zip(leaves) {
        assert!(*bytes == pattern(leaf as u64, LENGTHS[leaf]), "leaf {leaf}");
    }
}

#[test]
fn a_full_restore_uses_the_prefetched_reads_once() {
    // The threads' buffers come from the same budget.
    for (mib, threads, begins) in
        [(5, 2, 1), (12, 2, 2), (20, 2, 4), (20, 16, 3), (64, 2, 5), (64, 16, 5), (64, 64, 5)]
    {
        let item = TestItem::of_tensors(256 << 10, &LENGTHS);
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
fn another_restore_drops_the_prefetch() {
    let item = TestItem::of_tensors(256 << 10, &LENGTHS);
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
fn a_small_read_keeps_the_prefetch_for_the_next_restore() {
    let item = TestItem::of_tensors(256 << 10, &LENGTHS);
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
fn closing_the_files_waits_for_an_unused_prefetch() {
    let item = TestItem::of_tensors(256 << 10, &LENGTHS);
    let files = item.files();
    begin(&files, &item, &[0], &options());
    assert!(item.disk.knobs.in_flight.load(Ordering::SeqCst) > 0);
    drop(files);
    assert_eq!(item.disk.knobs.in_flight.load(Ordering::SeqCst), 0);
}

#[test]
fn a_failed_prefetch_is_harmless_and_damage_is_found() {
    let item = TestItem::of_tensors(256 << 10, &LENGTHS);
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
fn a_prefetch_on_a_hanging_disk_ends_at_the_deadline() {
    let item = TestItem::of_tensors(256 << 10, &LENGTHS);
    let files = item.files();
    let options = LoadOptions { stall_timeout: Duration::from_millis(100), ..options() };
    item.disk.knobs.hang.store(true, Ordering::SeqCst);
    begin(&files, &item, &[0], &options);
    drop(files);
}

#[test]
fn cached_bytes_are_not_prefetched() {
    let item = TestItem::of_tensors(256 << 10, &LENGTHS);
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
    tasks.filter_map(|task| name(task.ok()?)).filter(|name| name.trim() == "stepwell-fetch").count()
}

fn assert_soon(what: &str, holds: impl Fn() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(10), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_prefetch_thread_lives_until_its_reads_are_done() {
    let item = TestItem::of_tensors(256 << 10, &LENGTHS);
    let disk = || Arc::new(item.disk.clone());
    let files = Arc::new(item.files());
    files.prefetch(disk(), vec![0], options());
    files.wait_for_prefetch();
    assert_eq!(item.disk.knobs.direct_reads.load(Ordering::SeqCst), 5);
    assert_eq!(threads(), 1, "the answers to its reads would come late");
    let (found, result) = load(&item, &files, &[0, 1, 2], &options());
    assert_right(&found, &[0, 1, 2]);
    assert_eq!(result.unwrap().reads, 6);
    assert_soon("a thread outlives the run", || threads() == 0);

    // The set is dropped before anyone uses the prefetch.
    files.prefetch(disk(), vec![0], options());
    drop(files);
    assert_soon("a thread outlives the files", || threads() == 0);
    assert_eq!(item.disk.knobs.in_flight.load(Ordering::SeqCst), 0);

    // Opening the file blocks.
    item.disk.knobs.stuck.store(true, Ordering::SeqCst);
    let files = Arc::new(item.files());
    let begin = Instant::now();
    files.prefetch(disk(), vec![0], LoadOptions { stall_timeout: Duration::from_millis(100), ..options() });
    files.wait_for_prefetch();
    assert!(begin.elapsed() < Duration::from_secs(5), "waited for {:?}", begin.elapsed());
    item.disk.knobs.stuck.store(false, Ordering::SeqCst);
    let (found, result) = load(&item, &files, &[0, 1, 2], &options());
    assert_right(&found, &[0, 1, 2]);
    result.unwrap();
    assert_soon("a thread outlives a late answer", || threads() == 0);
}
