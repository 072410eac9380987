use proptest::prelude::*;

use super::*;

/// Numbers whose planes differ: some compress, some do not.
fn numbers(count: usize, planes: usize) -> Vec<u8> {
    let mut seed = 1_u64;
    let mut random = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 56) as u8
    };
    (0..count * planes)
        .map(|at| if at % planes == planes - 1 { 60 + random() % 4 } else { random() })
        .collect()
}

fn encode(bytes: &[u8], dtype: Dtype) -> Option<Vec<u8>> {
    PlanesEncoder::new().unwrap().encode(bytes, dtype).unwrap()
}

/// A float of so many bytes.
fn float(planes: usize) -> Dtype {
    match planes {
        1 => Dtype::Float8E4m3fn,
        2 => Dtype::Bfloat16,
        4 => Dtype::Float32,
        _ => Dtype::Float64,
    }
}

fn decoded(stored: &[u8], planes: usize, length: usize) -> Result<Vec<u8>, String> {
    let mut out = vec![0xEE; length];
    decode(stored, planes, &mut out).map(|()| out)
}

#[test]
fn a_dtype_has_a_plane_for_each_byte_of_a_number() {
    for &dtype in Dtype::ALL {
        let planes = count(dtype);
        assert!((1..=MAX_PLANES).contains(&planes) && dtype.size().is_multiple_of(planes), "{dtype}");
    }
    let counts = [Dtype::Bfloat16, Dtype::Float32, Dtype::Complex64, Dtype::Complex128, Dtype::Bool];
    assert_eq!(counts.map(count), [2, 4, 4, 8, 1]);
}

#[test]
fn planes_of_mantissas_stay_raw() {
    let bytes = numbers(100_000, 2);
    let stored = encode(&bytes, Dtype::Bfloat16).unwrap();
    let entry = |number: usize| u32::from_le_bytes(stored[4 * number..4 * number + 4].try_into().unwrap());
    assert_eq!((entry(0) & !RAW, entry(0) & RAW), (100_000, RAW));
    assert!(entry(1) < 30_000, "two bits of eight, and a table");
    assert_eq!(decoded(&stored, 2, bytes.len()).unwrap(), bytes);
}

#[test]
fn chunks_that_save_nothing_stay_raw() {
    let random: Vec<u8> = numbers(50_000, 3).chunks(3).flat_map(|bytes| bytes[..2].to_vec()).collect();
    assert_eq!(encode(&random, Dtype::Bfloat16), None);
    assert_eq!(encode(&[], Dtype::Bfloat16), None);
    assert_eq!(encode(&[7], Dtype::Uint8), None);
    assert_eq!(encode(&[0; 3], Dtype::Bfloat16), None, "half a number");
}

#[test]
fn a_plane_is_exactly_as_long_as_its_numbers() {
    for planes in [1, 2] {
        let zeros = encode(&vec![0; 1 << 16], float(planes)).unwrap();
        for length in [(1 << 16) - planes, (1 << 16) + planes, planes, 0] {
            assert!(decoded(&zeros, planes, length).is_err(), "{length} of {planes}");
        }
        assert!(decoded(&zeros, planes, 1 << 16).is_ok());
    }
}

/// A chunk of one plane with this frame.
fn chunk_of(frame: &[u8]) -> Vec<u8> {
    [&(frame.len() as u32).to_le_bytes()[..], frame].concat()
}

fn frame_of(bytes: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; zstd_safe::compress_bound(bytes.len())];
    let length = zstd_safe::compress(frame.as_mut_slice(), bytes, 3).unwrap();
    frame.truncate(length);
    frame
}

#[test]
fn bombs_cost_no_memory_and_are_refused() {
    let bomb = frame_of(&vec![0; 32 << 20]);
    assert!(bomb.len() < 4096);
    assert!(decoded(&chunk_of(&bomb), 1, 4096).is_err());
    // A frame that says 2^62 bytes, and has one empty block.
    let claims =
        [&0xfd2f_b528_u32.to_le_bytes()[..], &[0xe0], &(1_u64 << 62).to_le_bytes(), &[1, 0, 0]].concat();
    assert!(decoded(&chunk_of(&claims), 1, 4096).is_err());
}

#[test]
fn anything_beside_one_frame_is_refused() {
    let frame = frame_of(&[1; 4096]);
    assert!(decoded(&chunk_of(&frame), 1, 4096).is_ok());
    let half = frame_of(&[1; 2048]);
    let skippable = [&0x184d_2a50_u32.to_le_bytes()[..], &[1, 0, 0, 0, 9]].concat();
    let mut behind = chunk_of(&frame);
    behind.push(0);
    let mut longer = chunk_of(&frame);
    longer[0] += 1;
    for (hostile, what) in [
        (chunk_of(&[half.clone(), half].concat()), "two frames"),
        (chunk_of(&[skippable.clone(), frame.clone()].concat()), "a skippable frame before it"),
        (chunk_of(&[frame.clone(), skippable].concat()), "a skippable frame behind it"),
        (chunk_of(&frame[..frame.len() - 1]), "a frame that is cut"),
        (chunk_of(&[]), "no frame"),
        (behind, "bytes behind the planes"),
        (longer, "a plane behind the chunk"),
        (Vec::new(), "no table"),
    ] {
        assert!(decoded(&hostile, 1, 4096).is_err(), "{what}");
    }
    assert!(decoded(&chunk_of(&frame), 9, 9 * 4096).is_err(), "more planes than a number can have");
    assert!(decoded(&chunk_of(&frame), 0, 0).is_err());
}

proptest! {
    #[test]
    fn planes_round_trip_for_every_dtype(
        dtype in prop::sample::select(Dtype::ALL),
        elements in 0_usize..4000,
        random in prop::collection::vec(any::<u8>(), 1..40),
        sparse in 1_usize..40,
    ) {
        let planes = count(dtype);
        let byte = |at: usize| if at.is_multiple_of(sparse) { random[at % random.len()] } else { random[at % planes % random.len()] };
        let bytes: Vec<u8> = (0..elements * dtype.size()).map(byte).collect();
        if let Some(stored) = encode(&bytes, dtype) {
            prop_assert!(stored.len() < bytes.len());
            prop_assert!(bytes.len() as u64 <= most_decoded(stored.len() as u64));
            prop_assert_eq!(encode(&bytes, dtype), Some(stored.clone()), "equal bytes");
            prop_assert_eq!(decoded(&stored, planes, bytes.len()), Ok(bytes));
        }
    }

    #[test]
    fn no_cut_or_change_of_a_chunk_panics(
        planes in prop::sample::select(&[1_usize, 2, 4, 8][..]),
        cut: prop::sample::Index,
        at: prop::sample::Index,
        bits in 1_u8..,
        length in 0_usize..5000,
    ) {
        let bytes = if planes == 1 { vec![7; 500] } else { numbers(500, planes) };
        let stored = encode(&bytes, float(planes)).unwrap();
        let cut = &stored[..cut.index(stored.len())];
        prop_assert!(decoded(cut, planes, bytes.len()).is_err());
        let mut changed = stored.clone();
        changed[at.index(stored.len())] ^= bits;
        let _ = decoded(&changed, planes, bytes.len());
        let _ = decoded(&changed, planes, length);
    }
}
