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
