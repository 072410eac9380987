//! Computed cells reach host memory and devices with stored bytes beside them.

use std::sync::Arc;

use super::super::testing::{TestItem, flat, options, pattern};
use super::super::{ComputedCells, Destination, LoadFailure, LoadStats, execute_computing};
use super::devices::{Card, Temper};
use crate::read_plan::BoxCopy;
use crate::sys::HostTarget;
use crate::{Error, Result};

const BLOCK: u64 = 16 << 10;

/// Reads a stored tensor into the host target behind 100 computed bytes. Computes 4000 bytes of the
/// card, transposed.
fn run(
    card: &Arc<Card>,
    host: &mut [u8],
    go_on: &mut dyn FnMut(u64) -> bool,
    mut compute: impl FnMut(usize) -> Result<Vec<Vec<u8>>>,
) -> Result<LoadStats, LoadFailure> {
    let item = TestItem::of_tensors(BLOCK, &[50_000]);
    let stored = [BoxCopy { dst_offset: 100, ..item.copies(&[0]).remove(0) }];
    let turned = BoxCopy {
        src_strides: vec![80, 1].into(),
        extent: vec![50, 80].into(),
        dst_strides: vec![1, 50].into(),
        ..flat(7, 1, 0, 0)
    };
    let copies = vec![flat(7, 0, 0, 60), BoxCopy { dst_offset: 60, ..flat(7, 0, 0, 40) }, turned];
    let targets = [Destination::Host(HostTarget::from(host)), Destination::Device(card.target())];
    let mut compute = |number: usize, go_on: &mut dyn FnMut(u64) -> bool| {
        if go_on(0) { compute(number) } else { Err(Error::Cancelled("by the caller".into())) }
    };
    let cells = ComputedCells { copies, compute: &mut compute };
    card.running(|| {
        let index = (&item.index, &stored[..]);
        execute_computing(&item.disk, &item.files(), index, Some(cells), targets, &options(), go_on)
    })
}

#[test]
fn computed_cells_reach_the_host_and_late_devices() {
    let (card, mut host) = (Card::new(4000, Temper::Late), vec![0xEE; 50_100]);
    let cells = [vec![1; 60], vec![2; 40], pattern(3, 4000)];
    let stats = run(&card, &mut host, &mut |_| true, |first| {
        // A batch of one cell, then one of two.
        Ok(cells[first..if first == 0 { 1 } else { 3 }].to_vec())
    });
    assert_eq!(stats.unwrap().bytes_copied, 54_100);
    assert!(host[..60] == [1; 60] && host[60..100] == [2; 40] && host[100..] == pattern(0, 50_000));
    let memory = card.memory();
    assert!((0..4000).all(|at| memory[at % 80 * 50 + at / 80] == cells[2][at]));
}

#[test]
fn a_cell_that_fails_or_has_another_length_ends_the_read() {
    for (answer, says) in [
        (Err(Error::Misuse("it overflows".into())), "it overflows"),
        (Ok(Vec::new()), "a computed cell"),
        (Ok(vec![vec![0; 61]]), "60 bytes for window"),
    ] {
        let (card, mut host) = (Card::new(4000, Temper::Late), vec![0xEE; 50_100]);
        let mut answer = Some(answer);
        let failure = run(&card, &mut host, &mut |_| true, |_| answer.take().unwrap()).unwrap_err();
        assert!(failure.to_string().contains(says), "{failure}");
        assert_eq!(failure.overwritten, [0], "the stored part was there before");
    }
    let (card, mut host) = (Card::new(4000, Temper::Late), vec![0xEE; 50_100]);
    let failure = run(&card, &mut host, &mut |_| false, |_| panic!("it was cancelled")).unwrap_err();
    assert!(matches!(failure.error, Error::Cancelled(_)), "{failure}");
}
