#![expect(
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "the numbers of these tests are small"
)]

use proptest::prelude::*;
use stepwell_core::dtype::Dtype;
use stepwell_core::format::index::{ChunkRegion, Codec, ElementLayout, LeafRecord, NegatedParts, Source};

use super::*;
use crate::testing::{Stored, checkpoint, execute, for_each_element};
use crate::tiling::Fault;

#[derive(Clone, Debug)]
struct Ask {
    leaf: prop::sample::Index,
    /// Begin and end along each dimension, as fractions.
    part: Vec<(prop::sample::Index, prop::sample::Index)>,
    transposed: bool,
    reversed: bool,
    padding: u64,
}

fn ask() -> impl Strategy<Value = Ask> {
    let part = prop::collection::vec(any::<(prop::sample::Index, prop::sample::Index)>(), 4);
    (any::<prop::sample::Index>(), part, any::<bool>(), any::<bool>(), 0_u64..3).prop_map(
        |(leaf, part, transposed, reversed, padding)| Ask { leaf, part, transposed, reversed, padding },
    )
}

proptest! {
    #[test]
    fn copies_fill_every_destination_with_its_slice(
        stored in checkpoint(),
        asks in prop::collection::vec(ask(), 1..6),
    ) {
        let (mut requests, mut destinations, mut expected) = (Vec::new(), Vec::new(), Vec::new());
        for ask in asks {
            let leaf = ask.leaf.index(stored.tensors.len()) as u32;
            let tensor = stored.tensor(leaf);
            let itemsize = tensor.dtype.size() as u64;
            let (mut offset, mut extent) = (Vec::new(), Vec::new());
            for (&n, (a, b)) in tensor.shape.iter().zip(&ask.part) {
                let (a, b) = (a.index(n as usize + 1) as u64, b.index(n as usize + 1) as u64);
                offset.push(a.min(b));
                extent.push(a.max(b) - a.min(b));
            }
            let region = Region { offset: offset.into(), extent: extent.into() };
            // The destination: padded, transposed or backwards along the first dimension.
            let ndim = region.ndim();
            let order: Vec<usize> = if ask.transposed { (0..ndim).rev().collect() } else { (0..ndim).collect() };
            let (mut strides, mut size) = (vec![0_i64; ndim], itemsize);
            for &d in order.iter().rev() {
                strides[d] = size as i64;
                size *= region.extent[d] + ask.padding;
            }
            let mut dst_offset = ask.padding;
            if ask.reversed && ndim > 0 && region.extent[0] > 0 {
                dst_offset += strides[0] as u64 * (region.extent[0] - 1);
                strides[0] = -strides[0];
            }
            let mut wanted = vec![0xAA_u8; (size + ask.padding) as usize];
            let mut element = 0;
            let data = &stored.tensors[leaf as usize];
            for_each_element(&tensor.shape, &region, |source| {
                let (mut rest, mut at) = (element, dst_offset as i64);
                for d in (0..ndim).rev() {
                    at += (rest % region.extent[d]) as i64 * strides[d];
                    rest /= region.extent[d];
                }
                let (at, source, itemsize) = (at as usize, source * itemsize as usize, itemsize as usize);
                wanted[at..at + itemsize].copy_from_slice(&data[source..source + itemsize]);
                element += 1;
            });
            destinations.push(vec![0xAA_u8; wanted.len()]);
            expected.push(wanted);
            let dst = requests.len() as u32;
            requests.push(Request { leaf, region, dst, dst_offset, dst_strides: strides.into() });
        }
        let copies = copies(&stored.index, &requests).unwrap();
        execute(&stored, &copies, &mut destinations);
        prop_assert_eq!(destinations, expected);
    }
}

fn matrix(chunk: &[u64]) -> Stored {
    let shape = [64_u64, 64];
    let mut stored = Stored::new(1);
    let mut chunks = Vec::new();
    for i in (0..shape[0]).step_by(chunk[0] as usize) {
        for j in (0..shape[1]).step_by(chunk[1] as usize) {
            chunks
                .push(ChunkRegion::Box(Region { offset: vec![i, j].into(), extent: chunk.to_vec().into() }));
        }
    }
    stored.push(Dtype::Int8, &shape, chunks, 64);
    stored.finish()
}

#[test]
fn a_contiguous_copy_has_one_dimension() {
    let stored = matrix(&[16, 64]);
    let copies = copies(&stored.index, &[Request::whole(0, stored.tensor(0), 0)]).unwrap();
    assert_eq!(copies.len(), 4);
    assert!(copies.iter().all(|copy| copy.extent[..] == [16 * 64]));
}

#[test]
fn a_column_needs_the_chunks_that_it_crosses() {
    let stored = matrix(&[16, 16]);
    let column = Region { offset: vec![0, 20].into(), extent: vec![64, 5].into() };
    let copies = copies(&stored.index, &[Request::row_major(0, column, 1, 0)]).unwrap();
    let offsets: Vec<u64> = copies.iter().map(|copy| copy.src_offset).collect();
    // The second of the four chunks of each row of chunks, from its fifth column on.
    assert_eq!(offsets, [1, 5, 9, 13].map(|chunk| 64 + chunk * 256 + 4));
}

#[test]
fn leaves_without_elements_need_no_copies() {
    let mut stored = Stored::new(1);
    for i in 0..100 {
        let shape = [if i % 10 == 0 { 0 } else { 5 }];
        stored.push(Dtype::Int8, &shape, vec![ChunkRegion::Box(Region::whole(&shape))], 64);
    }
    let stored = stored.finish();
    let requests: Vec<Request> =
        (0..100).map(|leaf| Request::whole(leaf, stored.tensor(leaf), leaf)).collect();
    assert_eq!(copies(&stored.index, &requests).unwrap().len(), 90);
}

#[test]
fn a_tie_is_read_where_it_is_stored_and_an_object_is_refused() {
    let mut stored = matrix(&[64, 64]);
    stored.index.leaves.push(LeafRecord::Alias { of: 0 });
    let object = stored.tensor(0).chunks[0].extent;
    stored.index.leaves.push(LeafRecord::Object(object));
    stored.index.leaves.push(LeafRecord::Alias { of: 3 });
    let request = |leaf| Request { leaf, ..Request::whole(0, stored.tensor(0), 0) };
    let tied = copies(&stored.index, &[request(1)]).unwrap();
    assert_eq!((tied[0].leaf, tied[0].src_offset), (1, 64));
    let error = |leaf| copies(&stored.index, &[request(leaf)]).unwrap_err();
    assert_eq!(
        (error(2).kind(), error(3).kind(), error(9).kind()),
        ("invalid", "corrupt_checkpoint", "invalid")
    );
}

#[test]
fn a_contradictory_index_is_refused() {
    type Damage = fn(&mut TensorRecord);
    fn layout(strides: &[u64], negated: NegatedParts) -> Codec {
        let strides = strides.to_vec().into();
        Codec::Elements(Box::new(ElementLayout { strides, big_endian: false, negated }))
    }
    let cases: [(&str, Damage); 12] = [
        ("no chunk holds [0:16, 16:32]", |t| drop(t.chunks.remove(1))),
        ("chunks 0 and 4 both hold", |t| t.chunks[4].region = t.chunks[0].region.clone()),
        ("chunk 2 does not lie in the tensor", |t| {
            t.chunks[2].region =
                ChunkRegion::Box(Region { offset: vec![0, u64::MAX].into(), extent: vec![16, 16].into() });
        }),
        ("chunk 3 has 255 bytes, but its region has 256", |t| t.chunks[3].extent.length = 255),
        ("lies in file 7", |t| t.chunks[0].extent.source = Source::Own(7)),
        ("of 00000.data, which has", |t| t.chunks[0].extent.offset = u64::MAX - 3),
        ("supplied by reader 5", |t| t.chunks[0].extent.source = Source::Pulled(5)),
        ("does not lie in its shape [64, 63]", |t| t.shape[1] = 63),
        ("chunk 0 has 256 bytes, but its region has more than 64 bits", |t| {
            t.chunks[0].codec = layout(&[u64::MAX / 2, 1], NegatedParts::None);
        }),
        ("chunk 0 has 256 bytes, but its region has 271", |t| {
            t.chunks[0].codec = layout(&[17, 1], NegatedParts::None);
        }),
        ("chunk 0 has 256 bytes, but its region has more than 64 bits", |t| {
            t.chunks[0].codec = layout(&[1], NegatedParts::None);
        }),
        ("int8 has no sign that could be inverted", |t| {
            t.chunks[0].codec = layout(&[16, 1], NegatedParts::All);
        }),
    ];
    for (says, damage) in cases {
        let mut stored = matrix(&[16, 16]);
        let request = Request::whole(0, stored.tensor(0), 0);
        let LeafRecord::Tensor(tensor) = &mut stored.index.leaves[0] else { unreachable!() };
        damage(tensor);
        let error = copies(&stored.index, &[request]).unwrap_err().to_string();
        assert!(error.contains(says) && error.contains("leaf `t0`"), "{says}: {error}");
    }
    let stored = matrix(&[64, 64]);
    let request = Request::whole(0, stored.tensor(0), 0);
    let strides = Request { dst_strides: vec![1].into(), ..request.clone() };
    let before = Request {
        dst_strides: vec![-64, 1].into(),
        region: Region { offset: vec![0, 0].into(), extent: vec![64, 1].into() },
        ..request
    };
    for (request, says) in
        [(strides, "1 strides for 2 dimensions"), (before, "to byte -4032 of the destination")]
    {
        let error = copies(&stored.index, &[request]).unwrap_err();
        assert_eq!(error.kind(), "invalid", "{error}");
        assert!(error.to_string().contains(says), "{error}");
    }
}

#[test]
fn a_single_chunk_outside_of_its_tensor_is_named() {
    let mut stored = matrix(&[64, 64]);
    let request = Request::whole(0, stored.tensor(0), 0);
    let LeafRecord::Tensor(tensor) = &mut stored.index.leaves[0] else { unreachable!() };
    tensor.chunks[0].region = ChunkRegion::Box(Region::whole(&[64, 65]));
    let error = copies(&stored.index, &[request]).unwrap_err().to_string();
    assert!(error.contains("chunk 0 does not lie in the tensor"), "{error}");
}

#[test]
fn a_hole_in_a_tensor_of_one_chunk_is_named() {
    let mut stored = matrix(&[64, 64]);
    let request = Request::whole(0, stored.tensor(0), 0);
    let LeafRecord::Tensor(tensor) = &mut stored.index.leaves[0] else { unreachable!() };
    tensor.chunks[0].region =
        ChunkRegion::Box(Region { offset: vec![0, 0].into(), extent: vec![64, 60].into() });
    match copies(&stored.index, &[request]).unwrap_err() {
        Error::Tiling { fault, .. } => {
            let region = Region { offset: vec![0, 60].into(), extent: vec![64, 4].into() };
            assert_eq!(*fault, Fault::Hole { region });
        }
        other => panic!("{other}"),
    }
}
