//! Views of any strides, cut into any chunks, arrive as what they are.

use stepwell_core::dtype::Dtype;
use stepwell_core::provider::{CaptureTiming, DeviceProvider};
use stepwell_manager::LeafSource;
use stepwell_tests::fake_cuda::FakeCuda;

use crate::world::*;

/// The elements of a view of an array in memory, in row-major order.
fn elements(memory: &[u8], first: u64, itemsize: usize, shape: &[u64], strides: &[i64]) -> Vec<u8> {
    let count: u64 = shape.iter().product();
    let mut out = Vec::with_capacity(count as usize * itemsize);
    for number in 0..count {
        let mut left = number;
        let mut at = first.cast_signed();
        for (&n, &stride) in shape.iter().zip(strides).rev() {
            at += (left % n).cast_signed() * stride;
            left /= n;
        }
        let at = usize::try_from(at).unwrap();
        out.extend_from_slice(&memory[at..at + itemsize]);
    }
    out
}

#[test]
fn views_of_any_strides_arrive_row_by_row() {
    let fake = FakeCuda::alone();
    fake.random(5, 50);
    let world = World::new(6);
    let stream = fake.stream(0);
    let array = fake.array(0, 6 << 20);
    stream.update(&array, 4);
    stream.synchronize();
    let memory = array.peek();
    // First byte, element, shape, strides.
    let views: Vec<(u64, usize, Vec<u64>, Vec<i64>)> = vec![
        (0, 4, vec![600, 700], vec![2800, 4]),
        // A part of each row.
        (400, 4, vec![600, 500], vec![2800, 4]),
        // Transposed.
        (0, 2, vec![300, 200], vec![2, 600]),
        // Every third row, backwards, and a broadcast.
        (700_000, 8, vec![40, 50], vec![-9000, 8]),
        (16, 4, vec![30, 20], vec![0, 4]),
        (16, 4, vec![30, 20], vec![4, 0]),
        // Three and four dimensions, none of them next to another.
        (64, 4, vec![20, 30, 40], vec![50_000, 400, 4]),
        (64, 1, vec![3, 4, 5, 6], vec![100_000, 7000, 90, 3]),
        // One element, and none.
        (77, 1, vec![], vec![]),
        (0, 4, vec![0, 5], vec![20, 4]),
    ];
    let leaves = views
        .iter()
        .map(|(first, itemsize, shape, strides)| {
            let source = array.source(*first, *itemsize, shape, strides);
            let dtype = match itemsize {
                1 => Dtype::Uint8,
                2 => Dtype::Uint16,
                4 => Dtype::Uint32,
                _ => Dtype::Uint64,
            };
            LeafSource::whole(
                dtype,
                shape.clone(),
                std::sync::Arc::new(DeviceProvider::new(source, CaptureTiming::Deferred)),
            )
        })
        .collect();
    committed(&world.save(1, state_of(leaves), &[&stream]));
    for (number, (found, (first, itemsize, shape, strides))) in world.read(1).iter().zip(&views).enumerate() {
        assert!(*found == elements(&memory, *first, *itemsize, shape, strides), "view {number}");
    }
}
