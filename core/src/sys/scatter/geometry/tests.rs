//! A clip yields every byte of the copy in the window, once, with the right destination.

#![expect(
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "the numbers of these tests are small"
)]

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// Maps source bytes to destination bytes, element by element.
fn naive(copy: &BoxCopy) -> Vec<(u64, u64)> {
    let mut places = vec![(copy.src_offset as i64, copy.dst_offset as i64)];
    for d in 0..copy.extent.len() {
        places = places
            .into_iter()
            .flat_map(|(src, dst)| {
                (0..copy.extent[d] as i64)
                    .map(move |i| (src + i * copy.src_strides[d] as i64, dst + i * copy.dst_strides[d]))
            })
            .collect();
    }
    let bytes = i64::from(copy.itemsize);
    places.into_iter().flat_map(|(s, d)| (0..bytes).map(move |b| ((s + b) as u64, (d + b) as u64))).collect()
}

fn tile_bytes(tile: &Tile) -> Vec<(u64, u64)> {
    let copy = BoxCopy {
        leaf: 0,
        file: 0,
        src_offset: tile.src,
        src_strides: vec![tile.rows.src, tile.cols.src, 1].into(),
        extent: vec![tile.rows.extent, tile.cols.extent, tile.unit].into(),
        itemsize: 1,
        dst: 0,
        dst_offset: tile.dst,
        dst_strides: vec![tile.rows.dst, tile.cols.dst, 1].into(),
        inverted: 0,
        encoded: None,
    };
    naive(&copy)
}

/// Generates boxes of a chunk with destinations of any order and direction, padded rows included.
pub(crate) fn copies() -> impl Strategy<Value = BoxCopy> {
    let dims = prop::collection::vec((1_u64..5, 0_u64..3, 0_u64..3, any::<bool>()), 0..4);
    (dims, prop::sample::select(vec![1_u32, 2, 4, 8, 16, 3]), 0_u64..100, any::<prop::sample::Index>())
        .prop_map(|(dims, itemsize, src_offset, order)| {
            let n = dims.len();
            let mut src_strides = vec![0; n];
            let mut size = u64::from(itemsize);
            for d in (0..n).rev() {
                src_strides[d] = size;
                size *= dims[d].0 + dims[d].1;
            }
            // Any order of the destination's dimensions.
            let mut rank: Vec<usize> = (0..n).collect();
            if n > 0 {
                rank.rotate_left(order.index(n));
                if order.index(2) == 1 {
                    rank.reverse();
                }
            }
            let mut dst_strides = vec![0_i64; n];
            let mut size = i64::from(itemsize);
            let mut dst_offset = 0;
            for &d in &rank {
                dst_strides[d] = if dims[d].3 { -size } else { size };
                if dims[d].3 {
                    dst_offset += size * (dims[d].0 as i64 - 1);
                }
                size *= (dims[d].0 + dims[d].2) as i64;
            }
            BoxCopy {
                leaf: 0,
                file: 0,
                src_offset,
                src_strides: src_strides.into(),
                extent: dims.iter().map(|d| d.0).collect(),
                itemsize,
                dst: 0,
                dst_offset: dst_offset as u64,
                dst_strides: dst_strides.into(),
                inverted: 0,
                encoded: None,
            }
        })
}

proptest! {
    #[test]
    fn a_clip_holds_exactly_the_bytes_of_its_window(copy in copies(), start in 0_u64..400, len in 1_u64..400) {
        let strided = Strided::new(&copy).unwrap().unwrap();
        let window = start..start + len;
        let mut expected: Vec<_> = naive(&copy).into_iter().filter(|(s, _)| window.contains(s)).collect();
        let mut found = Vec::new();
        strided.clip(&window, &mut |tile| {
            assert_eq!(tile.bytes() as usize, tile_bytes(&tile).len());
            found.extend(tile_bytes(&tile));
        });
        expected.sort_unstable();
        found.sort_unstable();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn windows_that_tile_the_file_give_every_byte_once(copy in copies(), step in 1_u64..200) {
        let strided = Strided::new(&copy).unwrap().unwrap();
        let mut written = BTreeMap::new();
        let mut at = 0;
        while at < strided.src.end {
            strided.clip(&(at..at + step), &mut |tile| {
                for (s, d) in tile_bytes(&tile) {
                    assert!(written.insert(d, s).is_none(), "destination byte {d} is written twice");
                }
            });
            at += step;
        }
        let expected: BTreeMap<_, _> = naive(&copy).into_iter().map(|(s, d)| (d, s)).collect();
        prop_assert_eq!(&written, &expected);
        prop_assert_eq!(strided.bytes() as usize, expected.len());
        prop_assert_eq!(strided.dst_span.start, *expected.keys().next().unwrap());
        prop_assert_eq!(strided.dst_span.end, *expected.keys().next_back().unwrap() + 1);
        prop_assert!(strided.is_injective());
    }
}

fn copy(extent: &[u64], src: &[u64], dst: &[i64]) -> BoxCopy {
    BoxCopy {
        leaf: 0,
        file: 0,
        src_offset: 0,
        src_strides: src.to_vec().into(),
        extent: extent.to_vec().into(),
        itemsize: 4,
        dst: 0,
        dst_offset: 0,
        dst_strides: dst.to_vec().into(),
        inverted: 0,
        encoded: None,
    }
}

#[test]
fn a_contiguous_copy_is_one_unit() {
    let strided = Strided::new(&copy(&[3, 5, 7], &[140, 28, 4], &[140, 28, 4])).unwrap().unwrap();
    assert_eq!((strided.unit, strided.dims.len()), (420, 0));
}

#[test]
fn rows_of_a_wider_array_stay_rows() {
    let strided = Strided::new(&copy(&[3, 5, 7], &[140, 28, 4], &[280, 56, 4])).unwrap().unwrap();
    assert_eq!(
        (strided.unit, strided.dims.as_slice()),
        (28, &[CopyDim { extent: 15, src: 28, dst: 56 }][..])
    );
}

#[test]
fn a_copy_onto_itself_is_not_injective() {
    assert!(!Strided::new(&copy(&[3, 5], &[20, 4], &[0, 4])).unwrap().unwrap().is_injective());
    assert!(!Strided::new(&copy(&[3, 5], &[20, 4], &[8, 4])).unwrap().unwrap().is_injective());
}

#[test]
fn nothing_to_copy_is_no_copy() {
    assert_eq!(Strided::new(&copy(&[3, 0], &[0, 4], &[0, 4])).unwrap(), None);
    assert_eq!(Strided::new(&copy(&[], &[], &[])).unwrap().unwrap().unit, 4);
}

#[test]
fn hostile_numbers_are_refused() {
    assert!(Strided::new(&copy(&[u64::MAX], &[u64::MAX], &[1])).is_err());
    assert!(Strided::new(&copy(&[u64::MAX], &[4], &[4])).is_err());
    assert!(Strided::new(&copy(&[2], &[4], &[-4])).is_err());
    assert!(Strided::new(&copy(&[2], &[4], &[i64::MIN])).is_err());
    assert!(Strided::new(&copy(&[2], &[4], &[])).is_err());
    assert!(Strided::new(&BoxCopy { src_offset: u64::MAX - 2, ..copy(&[], &[], &[]) }).is_err());
    assert!(Strided::new(&copy(&[1 << 40, 1 << 40], &[0, 0], &[0, 0])).is_err());
}
