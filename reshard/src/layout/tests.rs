#![expect(
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "the numbers of these tests are small"
)]

use proptest::prelude::*;

use super::*;

/// For each element of the buffer, the number (plus one) of its element in the row-major logical
/// tensor; 0 if it has no element.
fn contents(layout: &Layout, shape: &[u64], itemsize: u64, buffer_elements: u64) -> Vec<u64> {
    let mut buffer = vec![0; buffer_elements as usize];
    let strides = row_major_strides(shape);
    for segment in &layout.0 {
        for (region, place) in segment.boxes(shape).unwrap() {
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
    }
    buffer
}

fn segment(offset: &[u64], extent: &[u64], at: u64, strides: &[i64]) -> Segment {
    let region = ChunkRegion::Box(Region { offset: offset.to_vec().into(), extent: extent.to_vec().into() });
    Segment { region, place: Place { offset: at, strides: strides.into() } }
}

#[test]
fn a_flat_shard_of_a_fused_and_cut_parameter_names_the_elements_that_it_holds() {
    // A rank's own 4 × 3 parameter: rows 0 and 2 are rows 5 and 6 of the tensor, rows 1 and 3 are
    // rows 1 and 2; columns 4..7 of 8.
    let own = Layout(vec![segment(&[5, 4], &[2, 3], 0, &[24, 4]), segment(&[1, 4], &[2, 3], 12, &[24, 4])]);
    let shape = [8, 8];
    let all = contents(&own, &shape, 4, 12);
    for start in 0..=12 {
        for len in 0..=12 - start {
            let flat = own.flat(&[4, 3], 4, start, len, 8).unwrap();
            let found = contents(&flat, &shape, 4, 2 + len);
            assert_eq!(found[2..], all[start as usize..(start + len) as usize], "{start} {len}");
        }
    }
    assert_eq!(own.flat(&[4, 3], 4, 10, 3, 0), None, "beyond the parameter");
}

#[test]
fn a_flat_shard_of_a_transposed_parameter_follows_the_transposition() {
    let own = Layout::whole(&[3, 5], 2, Some(vec![2, 6].into())); // local array: 5 × 3
    let all = contents(&own, &[3, 5], 2, 15);
    let flat = own.flat(&[5, 3], 2, 4, 7, 0).unwrap();
    assert_eq!(contents(&flat, &[3, 5], 2, 7), all[4..11]);
}

#[test]
fn padding_is_asked_for_by_nobody() {
    let layout = Layout::whole(&[6, 4], 4, None);
    let requests = layout.requests(7, &[6, 4], &Region::whole(&[5, 4]), 3).unwrap();
    let expected = Request {
        leaf: 7,
        region: Region::whole(&[5, 4]),
        dst: 3,
        dst_offset: 0,
        dst_strides: vec![16, 4].into(),
    };
    assert_eq!(requests, [expected]);
    let second_half =
        Layout::one_box(Region { offset: vec![3, 0].into(), extent: vec![3, 4].into() }, 4, None);
    let requests = second_half.requests(7, &[6, 4], &Region::whole(&[2, 4]), 3).unwrap();
    assert!(requests.is_empty());
}

#[test]
fn a_segment_outside_of_its_tensor_or_its_buffer_is_named() {
    let shape = [4, 4];
    let check =
        |segment: Segment, bytes| Layout(vec![segment]).check(&shape, 4, bytes).map_err(|e| e.to_string());
    assert_eq!(check(segment(&[0, 0], &[4, 4], 0, &[16, 4]), 64), Ok(()));
    let backwards = segment(&[0, 0], &[4, 4], 48, &[-16, 4]);
    assert_eq!(check(backwards, 64), Ok(()));
    assert_eq!(
        check(segment(&[0, 0], &[4, 4], 4, &[16, 4]), 64),
        Err("segment 0 does not lie in its buffer of 64 bytes".into())
    );
    assert!(check(segment(&[0, 0], &[4, 4], 44, &[-16, 4]), 64).unwrap_err().contains("buffer"));
    assert!(check(segment(&[1, 0], &[4, 4], 0, &[16, 4]), 64).unwrap_err().contains("shape [4, 4]"));
    assert!(check(segment(&[0, 0], &[4, 4], 0, &[4]), 64).unwrap_err().contains("1 strides for 2"));
    let run = |start, len| Segment {
        region: ChunkRegion::Run { start, len },
        place: Place { offset: 0, strides: vec![4].into() },
    };
    assert_eq!(check(run(8, 8), 32), Ok(()));
    assert!(check(run(8, 9), 64).is_err() && check(run(u64::MAX, 2), 64).is_err());
    assert!(check(segment(&[0, 0], &[4, 4], u64::MAX, &[i64::MAX, i64::MAX]), 64).is_err());
}

proptest! {
    #[test]
    fn a_run_segment_is_the_same_places_as_boxes(
        (shape, start, len) in prop::collection::vec(1_u64..6, 1..4).prop_flat_map(|shape| {
            let n = volume(&shape).unwrap();
            (Just(shape), 0..n).prop_flat_map(move |(shape, start)| (Just(shape), Just(start), 0..=n - start))
        }),
        step in 1_i64..3,
    ) {
        let place = Place { offset: 4, strides: vec![2 * step].into() };
        let layout = Layout(vec![Segment { region: ChunkRegion::Run { start, len }, place }]);
        prop_assert!(layout.check(&shape, 2, 4 + 2 * len * step as u64).is_ok());
        let found = contents(&layout, &shape, 2, 2 + len * step as u64);
        for (i, &element) in found.iter().enumerate() {
            let i = i as i64 - 2;
            let expected = if i >= 0 && i % step == 0 { start + (i / step) as u64 + 1 } else { 0 };
            prop_assert_eq!(element, expected);
        }
    }
}
