#![expect(
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "the numbers of these tests are small"
)]

use super::*;

/// For each element of the buffer, the number (plus one) of its element in the row-major logical
/// tensor; 0 if it has no element.
fn contents(layout: &[Segment], shape: &[u64], itemsize: u64, buffer_elements: u64) -> Vec<u64> {
    let mut buffer = vec![0; buffer_elements as usize];
    let strides = row_major_strides(shape);
    for Segment { region, place } in layout {
        for n in 0..region.volume().unwrap() {
            let (mut rest, mut element, mut at) = (n, 0, place.offset as i64);
            for d in (0..shape.len()).rev() {
                let i = rest % region.extent[d];
                rest /= region.extent[d];
                element += (region.offset[d] + i) * strides[d];
                at += i as i64 * place.strides[d];
            }
            assert_eq!(at % itemsize as i64, 0);
            let slot = &mut buffer[(at / itemsize as i64) as usize];
            assert_eq!(*slot, 0, "two elements in one place");
            *slot = element + 1;
        }
    }
    buffer
}

fn segment(offset: &[u64], extent: &[u64], at: u64, strides: &[i64]) -> Segment {
    let region = Region { offset: offset.to_vec().into(), extent: extent.to_vec().into() };
    Segment { region, place: Place { offset: at, strides: strides.into() } }
}

#[test]
fn a_flat_shard_of_a_fused_parameter_names_its_elements() {
    // A rank's own 4 × 3 parameter: rows 0 and 2 are rows 5 and 6 of the tensor, rows 1 and 3 are
    // rows 1 and 2; columns 4..7 of 8.
    let own = [segment(&[5, 4], &[2, 3], 0, &[24, 4]), segment(&[1, 4], &[2, 3], 12, &[24, 4])];
    let shape = [8, 8];
    let all = contents(&own, &shape, 4, 12);
    for start in 0..=12 {
        for len in 0..=12 - start {
            let part = flat(&own, &[4, 3], 4, start, len, 8).unwrap();
            let found = contents(&part, &shape, 4, 2 + len);
            assert_eq!(found[2..], all[start as usize..(start + len) as usize], "{start} {len}");
        }
    }
    assert_eq!(flat(&own, &[4, 3], 4, 10, 3, 0), None, "beyond the parameter");
}

#[test]
fn a_flat_shard_follows_a_transposition() {
    let own = [segment(&[0, 0], &[3, 5], 0, &[2, 6])]; // local array: 5 × 3
    let all = contents(&own, &[3, 5], 2, 15);
    let part = flat(&own, &[5, 3], 2, 4, 7, 0).unwrap();
    assert_eq!(contents(&part, &[3, 5], 2, 7), all[4..11]);
}

#[test]
fn a_flat_shard_meets_single_rows_and_has_no_empty_segments() {
    // Rows 3 and 1 of the tensor, one segment each.
    let own = [segment(&[3, 0], &[1, 4], 0, &[4, 1]), segment(&[1, 0], &[1, 4], 4, &[4, 1])];
    for (start, len, rows) in [(0, 8, &[3, 1][..]), (1, 2, &[3]), (5, 3, &[1])] {
        let part = flat(&own, &[2, 4], 1, start, len, 0).unwrap();
        assert_eq!(part.iter().map(|segment| segment.region.offset[0]).collect::<Vec<_>>(), rows);
        assert!(part.iter().all(|segment| !segment.region.is_empty()), "{part:?}");
    }
}

#[test]
fn segments_that_are_not_aligned_with_the_array_are_refused() {
    for (offset, extent, at, strides, why) in [
        (&[0, 0][..], &[2, 1][..], 0, &[16, 4][..], "a step is one and a third rows"),
        (&[0, 0], &[2, 1], 0, &[0, 4], "it does not step"),
        (&[0, 0], &[2, 1], 0, &[-12, 4], "it steps backwards"),
        (&[0, 0], &[2, 2], 0, &[24, 12], "two axes along one dimension"),
        (&[0, 0], &[5, 1], 0, &[12, 4], "it exceeds the array"),
        (&[0, 0], &[1, 1], 2, &[12, 4], "between two elements"),
        (&[0, 0], &[1, 1], 48, &[12, 4], "behind the array"),
    ] {
        let own = [segment(offset, extent, at, strides)];
        assert_eq!(flat(&own, &[4, 3], 4, 0, 12, 0), None, "{why}");
    }
    assert_eq!(flat(&[segment(&[0], &[1], 0, &[1])], &[4], 0, 0, 4, 0), None, "no bytes");
    assert!(flat(&[segment(&[0, 0], &[4, 3], 0, &[12, 4])], &[4, 3], 4, 0, 12, 0).is_some());
}
