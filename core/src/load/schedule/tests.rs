use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::load::file_set::FileInfo;
use crate::load::testing::flat;
use crate::read_plan::BoxCopy;

const BLOCK: u64 = 4096;

fn infos(data_end: u64) -> FileInfos {
    (0..2).map(|file| (file, Arc::new(FileInfo::of_blocks(BLOCK, data_end)))).collect()
}

fn prepared(copies: &[BoxCopy]) -> Vec<Strided> {
    copies.iter().map(|copy| Strided::new(copy).unwrap().unwrap()).collect()
}

fn reads(schedule: &Schedule) -> Vec<Range<u64>> {
    schedule.reads.iter().map(|read| read.bytes.clone()).collect()
}

#[test]
fn needed_blocks_that_are_near_are_one_read() {
    let copies = [
        flat(0, 0, 5000, 10),
        flat(0, 1, 9000, 5000),
        flat(0, 2, 16_384 + ReadLimits::LOCAL.max_gap_bytes + 1, 100),
    ];
    let data_end = 16_384 + ReadLimits::LOCAL.max_gap_bytes + 512;
    let (schedule, windows, lists) =
        Schedule::of_copies(&prepared(&copies), &infos(data_end), ReadLimits::LOCAL).unwrap();
    assert_eq!(reads(&schedule), vec![4096..data_end]);
    assert_eq!((lists, windows[0].copies.clone()), (vec![0, 1, 2], 0..3));
    let far = [flat(0, 0, 5000, 10), flat(0, 1, 16_384 + ReadLimits::LOCAL.max_gap_bytes, 100)];
    let (schedule, ..) = Schedule::of_copies(&prepared(&far), &infos(data_end), ReadLimits::LOCAL).unwrap();
    assert_eq!(reads(&schedule), [4096..8192, 16_384 + ReadLimits::LOCAL.max_gap_bytes..data_end]);
    assert_eq!(schedule.bytes(), 4096 + 512);
}

/// The first `columns` of 1024 in a matrix of 4 MiB.
fn columns(columns: u64) -> Vec<Strided> {
    let copy = BoxCopy {
        src_strides: [4096, 4].into_iter().collect(),
        extent: [1024, columns].into_iter().collect(),
        dst_strides: [4096, 4].into_iter().collect(),
        itemsize: 4,
        ..flat(0, 0, 0, 1)
    };
    prepared(&[copy])
}

#[test]
fn columns_that_are_few_are_a_sparse_read() {
    for (number, sparse) in [(1024, false), (768, false), (512, true), (1, true)] {
        let (schedule, ..) =
            Schedule::of_copies(&columns(number), &infos(8 << 20), ReadLimits::LOCAL).unwrap();
        assert_eq!(schedule.reads[0].sparse, sparse, "{number} columns");
    }
    let small = prepared(&[flat(0, 0, 0, 10)]);
    let (schedule, ..) = Schedule::of_copies(&small, &infos(8 << 20), ReadLimits::LOCAL).unwrap();
    assert!(!schedule.reads[0].sparse, "nothing is gained where little is read");
}

#[test]
fn a_long_range_is_cut_into_reads_and_cells() {
    let copies = [flat(0, 0, 4096, 10 << 20), flat(0, 1, 4096 + CELL_BYTES - 1, 2)];
    let (schedule, windows, lists) =
        Schedule::of_copies(&prepared(&copies), &infos(64 << 20), ReadLimits::LOCAL).unwrap();
    assert_eq!(schedule.reads.len(), 3);
    assert_eq!(schedule.cells.len(), 20);
    let of = |cell: usize| lists[windows[cell].copies.clone()].to_vec();
    assert_eq!((of(0), of(1), of(2)), (vec![0, 1], vec![0, 1], vec![0]));
    for (cell, window) in schedule.cells.iter().zip(&windows) {
        assert_eq!((cell.file, &cell.bytes), (window.file, &window.bytes));
    }
    for read in &schedule.reads {
        assert_eq!(schedule.cells[read.cells.start].bytes.start, read.bytes.start);
        assert_eq!(schedule.cells[read.cells.end - 1].bytes.end, read.bytes.end);
    }
}

#[test]
fn data_behind_the_blocks_are_damage() {
    let copies = prepared(&[flat(0, 0, 4096, 4097)]);
    assert_eq!(
        Schedule::of_copies(&copies, &infos(8192), ReadLimits::LOCAL).unwrap_err().kind(),
        "corrupt_checkpoint"
    );
}

/// A box of up to three dimensions, row-major in a file of 1 MiB.
fn boxes() -> impl Strategy<Value = BoxCopy> {
    let dim = (1_u64..12, 0_u64..4);
    (0_u32..2, 0_u64..1000, prop::sample::select(vec![1_u64, 8, 100, 5000]), prop::collection::vec(dim, 0..3))
        .prop_map(|(file, start, itemsize, dims)| {
            let mut strides = vec![itemsize; dims.len()];
            let mut size = itemsize;
            for (stride, (extent, padding)) in strides.iter_mut().zip(&dims).rev() {
                *stride = size;
                size *= extent + padding;
            }
            BoxCopy {
                file,
                src_offset: start * 300,
                src_strides: strides.iter().copied().collect(),
                extent: dims.iter().map(|dim| dim.0).collect(),
                itemsize: itemsize as u32,
                dst_strides: strides.iter().map(|stride| stride.cast_signed()).collect(),
                ..flat(0, 0, 0, 1)
            }
        })
}

/// Calls `each` with the byte range of every element.
fn elements(copy: &BoxCopy, each: &mut dyn FnMut(Range<u64>)) {
    for n in 0..copy.extent.iter().product::<u64>() {
        let (mut rest, mut at) = (n, copy.src_offset);
        for (extent, stride) in copy.extent.iter().zip(&copy.src_strides).rev() {
            at += rest % extent * stride;
            rest /= extent;
        }
        each(at..at + u64::from(copy.itemsize));
    }
}

proptest! {
    #[test]
    fn needed_blocks_are_read_once_and_little_else(
        copies in prop::collection::vec(boxes(), 1..12),
        max_gap in prop::sample::select(vec![0_u64, 5000, ReadLimits::LOCAL.max_gap_bytes]),
    ) {
        let infos = infos(4 << 20);
        let needs = needs(&prepared(&copies), &infos, max_gap).unwrap();
        let (schedule, windows, lists) = Schedule::of_needs(&needs, &infos, ReadLimits { max_gap_bytes: max_gap, ..ReadLimits::LOCAL });
        let mut needed: BTreeSet<(u32, u64)> = BTreeSet::new();
        for (number, copy) in (0..).zip(&copies) {
            elements(copy, &mut |bytes| {
                for byte in [bytes.start, bytes.end - 1] {
                    let holds = |window: &&ScatterWindow| window.file == copy.file && window.bytes.contains(&byte);
                    let window = windows.iter().find(holds).expect("a cell with the byte");
                    assert!(lists[window.copies.clone()].contains(&number), "the cell lists the copy");
                    needed.insert((copy.file, byte / BLOCK));
                }
                needed.extend((bytes.start / BLOCK..=(bytes.end - 1) / BLOCK).map(|block| (copy.file, block)));
            });
        }
        // Whole blocks, in order, none twice.
        let mut read: Vec<(u32, u64)> = Vec::new();
        for one in &schedule.reads {
            assert!(one.bytes.start.is_multiple_of(BLOCK) && one.bytes.end.is_multiple_of(BLOCK));
            read.extend((one.bytes.start / BLOCK..one.bytes.end / BLOCK).map(|block| (one.file, block)));
        }
        assert!(read.is_sorted_by(|a, b| a < b));
        // Every needed block is read. Between two needed ones, no more than the gap is.
        let mut gap = 0;
        for block in &read {
            gap = if needed.remove(block) { 0 } else { gap + BLOCK };
            assert!(gap <= max_gap.max(BLOCK - 1), "a gap of {gap} bytes");
        }
        assert!(needed.is_empty() && gap == 0, "{needed:?}");
    }
}

#[test]
fn reads_from_several_machines_are_mixed_by_their_bytes() {
    let mut schedule = Schedule::new(ReadLimits::LOCAL);
    let read = ReadLimits::LOCAL.read_bytes;
    for (file, reads) in [(0, 4), (1, 2), (2, 2)] {
        schedule.push(file, 0..reads * read, BLOCK, false);
    }
    let order = |schedule: &Schedule| -> Vec<(u32, u64)> {
        schedule.reads.iter().map(|one| (one.file, one.bytes.start / read)).collect()
    };
    let in_file_order = order(&schedule);
    schedule.mix(|_| 7);
    assert_eq!(order(&schedule), in_file_order, "one machine");
    // Files 1 and 2 are on the same machine.
    schedule.mix(|file| u64::from(file > 0));
    let mixed = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (2, 0), (0, 3), (2, 1)];
    assert_eq!(order(&schedule), mixed);
    let cells: BTreeSet<usize> = schedule.reads.iter().flat_map(|one| one.cells.clone()).collect();
    assert_eq!(cells.len(), schedule.cells.len());
}
