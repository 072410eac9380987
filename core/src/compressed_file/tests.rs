use proptest::prelude::*;

use super::*;

fn region(shape: &[u64]) -> ChunkRegion {
    ChunkRegion::Box(Region::whole(shape))
}

#[test]
fn a_chunk_is_cut_along_its_outer_axes() {
    let cut = |shape: &[u64], itemsize| {
        let parts = regions(&region(shape), itemsize).into_iter();
        parts
            .map(|part| match part {
                ChunkRegion::Box(part) => part.extent.to_vec(),
                ChunkRegion::Run { len, .. } => vec![len],
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(cut(&[2048, 2048], 2), vec![[256, 2048]; 8]);
    assert_eq!(cut(&[3, 1 << 20], 1), vec![[1, 1 << 20]; 3]);
    assert_eq!(cut(&[1, 2, 1 << 20], 2), vec![[1, 1, 1 << 19]; 4]);
    assert_eq!(cut(&[], 8), [[0_u64; 0]]);
    assert_eq!(cut(&[7], 4), [[7]]);
    let run = ChunkRegion::Run { start: 5, len: (1 << 20) + 1 };
    let parts = [(5, (1 << 19) + 1), (5 + (1 << 19) + 1, 1 << 19)]
        .map(|(start, len)| ChunkRegion::Run { start, len });
    assert_eq!(regions(&run, 1), parts);
}

proptest! {
    #[test]
    fn the_parts_of_a_chunk_follow_each_other_in_its_bytes(
        shape in prop::collection::vec(prop_oneof![1_u64..4, 200_u64..300, 3000_u64..4000], 0..4),
        itemsize in prop::sample::select(&[1_u64, 2, 4, 8, 16][..]),
    ) {
        let volume = shape.iter().product::<u64>();
        prop_assume!(volume * itemsize <= MAX_PLANES_BYTES);
        let parts = regions(&region(&shape), itemsize);
        let mut next = 0;
        for part in parts {
            let ChunkRegion::Box(part) = part else { panic!("a box") };
            let bytes = part.volume().unwrap() * itemsize;
            prop_assert!(bytes <= CHUNK_BYTES && bytes > 0);
            // The first element, and that the part is contiguous behind it.
            let mut first = 0;
            let mut is_inner = false;
            for d in 0..shape.len() {
                first = first * shape[d] + part.offset[d];
                let is_whole = part.extent[d] == shape[d];
                prop_assert!(!is_inner || is_whole, "{shape:?} {part:?}");
                is_inner |= part.extent[d] > 1;
            }
            prop_assert_eq!(first * itemsize, next);
            next += bytes;
        }
        prop_assert_eq!(next, volume * itemsize);
    }
}
