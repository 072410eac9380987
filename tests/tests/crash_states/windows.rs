//! Data files of several windows, each of several blocks; and a leaf that is larger than the whole
//! ring, which streams through it.

use stepwell_core::io::simulated::{Action, Fault, OperationKind, SimDisk};
use stepwell_manager::Retention;
use stepwell_tests::steps::run::{Run, close, options};

use super::{keeping, survives};

/// Slots that hold a whole state, and slots that `params` alone do not fit into.
const AMPLE: usize = 16;
const SCARCE: usize = 2;

/// The windows of the large file, as they were written: offset and length.
fn windows(run: &Run) -> Vec<(u64, usize)> {
    use stepwell_core::io::simulated::Op;
    let log = run.disk.log();
    let files = log.records.iter().filter_map(|record| match &record.op {
        Op::Submit { ino, offset, data, .. } => Some((*ino, *offset, data.len())),
        _ => None,
    });
    let all: Vec<_> = files.collect();
    let large = all.iter().find(|(_, offset, _)| *offset == 3 * 3 * 4096).unwrap().0;
    all.into_iter().filter(|(ino, ..)| *ino == large).map(|(_, offset, len)| (offset, len)).collect()
}

#[test]
fn a_save_of_several_windows() {
    let run = Run::with_steps([1]).unwrap().with_windows(AMPLE).unwrap();
    let manager = run.open(options()).unwrap();
    run.settle(&[1]);
    run.save(&manager, 2, "a").unwrap();
    close(&manager).unwrap();
    let mut written = windows(&run);
    written.sort_unstable();
    assert_eq!(written[..4], [(0, 12288), (12288, 12288), (24576, 12288), (36864, 4096)]);
    survives(&run);
}

#[test]
fn a_leaf_larger_than_the_ring() {
    let run = Run::with_steps([1]).unwrap().with_windows(SCARCE).unwrap();
    let manager = run.open(options()).unwrap();
    run.settle(&[1]);
    run.save(&manager, 2, "a").unwrap();
    run.save(&manager, 3, "a").unwrap();
    close(&manager).unwrap();
    assert!(windows(&run).len() >= 5, "four windows and a footer");
    survives(&run);
}

#[test]
fn windows_that_complete_out_of_order_and_in_pieces() {
    for (seed, slots) in [(3, AMPLE), (4, SCARCE)] {
        let run = Run::on(SimDisk::new().with_order(seed)).with_windows(slots).unwrap();
        let manager = run.open(options()).unwrap();
        run.settle(&[]);
        run.disk.inject(Fault::on(OperationKind::Write, Action::Short).from_then_on());
        run.save(&manager, 1, "a").unwrap();
        close(&manager).unwrap();
        survives(&run);
    }
}

#[test]
fn a_replacement_and_retention_of_several_windows() {
    let run = Run::with_steps([1]).unwrap().with_windows(SCARCE).unwrap();
    let manager = run.open(keeping(Retention::keep_latest(1))).unwrap();
    run.replace(&manager, 1, "b").unwrap();
    run.mark("may go 1 once 2");
    run.save(&manager, 2, "a").unwrap();
    run.mark("gone 1");
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn a_window_that_fails_fails_its_save_and_the_next_one_works() {
    for (slots, window) in [(AMPLE, 0), (SCARCE, 1), (AMPLE, 2), (SCARCE, 3)] {
        let run = Run::with_steps([1]).unwrap().with_windows(slots).unwrap();
        let manager = run.open(options()).unwrap();
        run.settle(&[1]);
        let fault = Fault::on(OperationKind::Write, Action::FailHalfway(5)).at("data").after(window);
        run.disk.inject(fault);
        run.save(&manager, 2, "a").unwrap_err();
        assert_eq!(manager.all_steps().unwrap(), [1]);
        drop(manager.check_for_errors());
        run.save(&manager, 2, "b").unwrap();
        close(&manager).unwrap();
        survives(&run);
    }
}
