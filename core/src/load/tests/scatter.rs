//! Any box of a chunk arrives at its place, for any order, direction and padding of the
//! destination. ndarray is the oracle.

use ndarray::{ArrayD, IxDyn, Slice};
use proptest::prelude::*;

use super::super::execute;
use super::super::testing::{TestItem, options, pattern};
use crate::read_plan::BoxCopy;
use crate::sys::HostTarget;

#[derive(Clone, Debug)]
struct Case {
    /// Shape of the stored chunk, in elements.
    stored: Vec<usize>,
    target: Vec<usize>,
    from: Vec<usize>,
    to: Vec<usize>,
    extent: Vec<usize>,
    /// Order of the destination's dimensions in memory, outermost first.
    order: Vec<usize>,
    block: u64,
    shift: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = prop::sample::select(vec![1_usize, 2, 3, 7, 40, 130]);
    let dim = (sizes, 0_usize..9, 0_usize..9, 0_usize..9, 0_usize..9);
    let order = prop::sample::subsequence(vec![0_usize, 1, 2], 3).prop_shuffle();
    (prop::collection::vec(dim, 0..=3), order, prop::sample::select(vec![4096_u64, 16_384]), 0_u64..64)
        .prop_map(|(dims, order, block, shift)| Case {
            stored: dims.iter().map(|d| d.0 + d.1 + d.2).collect(),
            target: dims.iter().map(|d| d.0 + d.3 + d.4).collect(),
            from: dims.iter().map(|d| d.1).collect(),
            to: dims.iter().map(|d| d.3).collect(),
            extent: dims.iter().map(|d| d.0).collect(),
            order: order.into_iter().filter(|&d| d < dims.len()).collect(),
            block,
            shift,
        })
}

fn strides(shape: &[usize], order: &[usize]) -> Vec<usize> {
    let mut strides = vec![0; shape.len()];
    let mut size = 1;
    for &d in order.iter().rev() {
        strides[d] = size;
        size *= shape[d];
    }
    strides
}

/// Restores the case's box as elements of type `T` and compares it with ndarray.
fn check<T: Copy + PartialEq + std::fmt::Debug + Default>(case: &Case, from_bytes: fn(&[u8]) -> T) {
    let item_size = size_of::<T>() as u64;
    let count: usize = case.stored.iter().product();
    let item = TestItem::of_tensors(case.block, &[case.shift, count as u64 * item_size]);
    let stored: Vec<T> =
        pattern(1, count as u64 * item_size).chunks(item_size as usize).map(from_bytes).collect();
    let stored = ArrayD::from_shape_vec(IxDyn(&case.stored), stored).unwrap();

    let row_major: Vec<usize> = (0..case.stored.len()).collect();
    let src_strides = strides(&case.stored, &row_major);
    let dst_strides = strides(&case.target, &case.order);
    let dot = |a: &[usize], b: &[usize]| a.iter().zip(b).map(|(a, b)| a * b).sum::<usize>() as u64;
    let copy = BoxCopy {
        leaf: 1,
        file: 0,
        src_offset: item.extent(1).offset + dot(&case.from, &src_strides) * item_size,
        src_strides: src_strides.iter().map(|&s| s as u64 * item_size).collect(),
        extent: case.extent.iter().map(|&n| n as u64).collect(),
        itemsize: item_size as u32,
        dst: 0,
        dst_offset: dot(&case.to, &dst_strides) * item_size,
        dst_strides: dst_strides.iter().map(|&s| (s as u64 * item_size).cast_signed()).collect(),
        inverted: 0,
        encoded: None,
    };
    let len: usize = case.target.iter().product();
    let mut into = vec![0_u8; len * item_size as usize];
    let targets = [HostTarget::from(into.as_mut_slice())];
    let stats = execute(&item.disk, &item.files(), &item.index, &[copy], targets, &options()).unwrap();
    let volume: usize = case.extent.iter().product();
    assert_eq!(stats.bytes_copied, volume as u64 * item_size);

    let zero = from_bytes(&vec![0; item_size as usize]);
    let mut expected = ArrayD::from_elem(IxDyn(&case.target), zero);
    let cut = |offset: &[usize], d: usize| Slice::from(offset[d]..offset[d] + case.extent[d]);
    let part = stored.slice_each_axis(|axis| cut(&case.from, axis.axis.index()));
    expected.slice_each_axis_mut(|axis| cut(&case.to, axis.axis.index())).assign(&part);
    let found: Vec<T> = into.chunks(item_size as usize).map(from_bytes).collect();
    for (index, expected) in expected.indexed_iter() {
        let at: usize = (0..case.target.len()).map(|d| index[d] * dst_strides[d]).sum();
        assert_eq!(found[at], *expected, "at {index:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, ..ProptestConfig::default() })]

    #[test]
    fn a_box_lands_where_ndarray_puts_it(case in cases()) {
        check::<u8>(&case, |b| b[0]);
        check::<[u8; 2]>(&case, |b| [b[0], b[1]]);
        check::<u32>(&case, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        check::<[u8; 3]>(&case, |b| [b[0], b[1], b[2]]);
        check::<u128>(&case, |b| u128::from_le_bytes(b.try_into().unwrap()));
    }
}

#[test]
fn a_copy_inverts_bits_of_every_byte() {
    let item = TestItem::of_tensors(4096, &[10_000]);
    let mut copy = item.copies(&[0]).remove(0);
    copy.inverted = 0x80;
    let mut into = vec![0_u8; 10_000];
    let targets = [HostTarget::from(into.as_mut_slice())];
    execute(&item.disk, &item.files(), &item.index, &[copy], targets, &options()).unwrap();
    let inverted: Vec<u8> = pattern(0, 10_000).iter().map(|byte| byte ^ 0x80).collect();
    assert!(into == inverted);
}
