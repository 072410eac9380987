//! Tests of failing runs.

use super::super::testing::{TestItem, options};
use super::*;
use crate::load::ReadLimits;

/// Panics at one cell.
struct Bomb(usize);

impl Sink for Bomb {
    fn cell(&self, cell: usize, _: &Staged, _: &mut Started) -> Result<()> {
        assert_ne!(cell, self.0, "boom");
        Ok(())
    }
    fn failed(&self, _: Range<usize>, error: Error) -> Result<()> {
        Err(error)
    }
}

fn run_all(item: &TestItem, sink: Bomb) -> Result<LoadStats> {
    let files = item.files();
    let mut schedule = Schedule::new(ReadLimits::LOCAL);
    schedule.push(0, 0..files.info(0)?.data_end, item.block, false);
    run(&item.disk, &files, schedule, &Arc::new(sink), &options(), &mut |_| true)
}

#[test]
fn a_panic_of_a_worker_is_an_error_and_nothing_hangs() {
    let item = TestItem::of_tensors(4096, &[9 << 20]);
    for cached in [false, true] {
        item.disk.knobs.cached.store(cached, Ordering::SeqCst);
        let error = run_all(&item, Bomb(7)).unwrap_err();
        assert!(error.to_string().contains("panicked") && error.to_string().contains("boom"), "{error}");
        run_all(&item, Bomb(usize::MAX)).unwrap();
    }
    assert_eq!(item.disk.knobs.in_flight.load(Ordering::SeqCst), 0);
}

#[test]
fn an_error_of_the_disk_ends_the_run_with_everything_given_back() {
    let item = TestItem::of_tensors(4096, &[30 << 20]);
    item.disk.knobs.bad_byte.store(5 << 20, Ordering::SeqCst);
    assert_eq!(run_all(&item, Bomb(usize::MAX)).unwrap_err().errno(), Some(libc::EIO));
    assert_eq!(item.disk.knobs.in_flight.load(Ordering::SeqCst), 0);
}
