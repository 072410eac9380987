//! Immutable leaves are captured after the caller continues. Shards are stored once.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::Error;
use crate::provider::{CaptureTiming, ShardedProvider};

fn held(bytes: &[u8]) -> LeafPlan {
    let shape = [bytes.len() as u64];
    let source = HostSource::owned(bytes.to_vec(), 0, 1, &shape, &[1]).unwrap();
    tensor_leaf(bytes.len(), Arc::new(HostProvider::new(source).lazy(true)))
}

#[test]
fn caller_and_thread_share_the_copies_of_one_file() {
    let (now, later) = (noise(5 * BLOCK, 1), noise(40 * BLOCK, 2));
    let leaves = || vec![held(&later), bytes_leaf(&now), held(&later)];
    let expected = SimDisk::new();
    save(vec![item("i0", leaves())], &pool(100, 2 * BLOCK), options(1), &expected);
    for slots in [2, 5, 100] {
        let ring = pool(slots, 2 * BLOCK);
        let disk = SimDisk::new();
        let (capture, flush) = prepare(vec![item("i0", leaves())], &ring, options(1)).unwrap();
        assert!(capture.has_eager());
        let dir = step_dir(&disk);
        std::thread::scope(|scope| {
            let flushed = scope.spawn(|| flush.run(&disk, &dir, &mut NoReclaimer));
            let rest = capture.run_eager().unwrap().expect("most of it can wait");
            // The windows of the other leaf, the first in the file: its own bytes and those beside
            // them.
            let copied = rest.progress().snapshot().captured_bytes;
            assert!((now.len()..now.len() + 3 * BLOCK).contains(&(copied as usize)), "{copied}");
            assert!(!rest.has_eager());
            scope.spawn(|| rest.run().unwrap());
            flushed.join().unwrap().unwrap();
        });
        assert_idle(&ring);
        let path = "root/step/i0/00000.data";
        assert_eq!(disk.bytes(path), expected.bytes(path), "{slots} slots");
    }
}

#[test]
fn a_state_of_held_leaves_alone_waits_for_no_slot() {
    let ring = pool(2, 2 * BLOCK);
    let leaves = vec![held(&noise(60 * BLOCK, 3))];
    let (capture, flush) = prepare(vec![item("i0", leaves)], &ring, options(1)).unwrap();
    assert!(!capture.has_eager());
    // Nobody frees slots yet.
    let rest = capture.run_eager().unwrap().expect("all of it can wait");
    assert_eq!(rest.progress().snapshot().captured_bytes, 0);
    let disk = SimDisk::new();
    let (captured, written) = run_both((rest, flush), &disk);
    captured.unwrap();
    written.unwrap();
    assert_idle(&ring);
}

#[test]
fn a_rest_that_is_dropped_or_cancelled_ends_its_flush() {
    for cancelled in [false, true] {
        let ring = pool(4, 2 * BLOCK);
        let cancel = Arc::new(AtomicBool::new(false));
        let options = SaveOptions { cancel: Some(Arc::clone(&cancel)), ..options(1) };
        let (capture, flush) =
            prepare(vec![item("i0", vec![held(&noise(60 * BLOCK, 4))])], &ring, options).unwrap();
        let disk = SimDisk::new();
        let dir = step_dir(&disk);
        std::thread::scope(|scope| {
            let flushed = scope.spawn(|| flush.run(&disk, &dir, &mut NoReclaimer));
            let rest = capture.run_eager().unwrap().unwrap();
            if cancelled {
                cancel.store(true, Ordering::Release);
                assert!(matches!(rest.run(), Err(Error::Cancelled(_))));
            } else {
                drop(rest);
            }
            assert!(matches!(flushed.join().unwrap(), Err(Error::Cancelled(_))));
        });
        assert_idle(&ring);
    }
}

#[test]
fn shards_are_stored_as_what_they_are_parts_of() {
    // Four boxes of a matrix, each in memory of its own.
    let (rows, columns) = (64_u64, 96_u64);
    let whole = noise((rows * columns) as usize, 5);
    let mut shards: Vec<(Region, Arc<dyn StateProvider>)> = Vec::new();
    let mut chunks = Vec::new();
    for (top, left) in [(0, 0), (0, 32), (40, 0), (40, 32)] {
        let (height, width) = (if top == 0 { 40 } else { 24 }, if left == 0 { 32 } else { 64 });
        let bytes: Vec<u8> = (0..height * width)
            .map(|i| whole[((top + i / width) * columns + left + i % width) as usize])
            .collect();
        let source = HostSource::owned(bytes, 0, 1, &[height, width], &[width as i64, 1]).unwrap();
        let region =
            Region { offset: [top, left].as_slice().into(), extent: [height, width].as_slice().into() };
        shards.push((region.clone(), Arc::new(HostProvider::new(source).lazy(true))));
        for half in [0, height / 2] {
            let part = Region {
                offset: [top + half, left].as_slice().into(),
                extent: [height / 2, width].as_slice().into(),
            };
            chunks.push(ChunkPlan { region: ChunkRegion::Box(part.clone()), local: part, band: 0 });
        }
    }
    let provider = Arc::new(ShardedProvider::new(shards));
    assert_eq!(provider.timing(), CaptureTiming::Deferred);
    let over_a_border = Region { offset: [30, 0].as_slice().into(), extent: [20, 8].as_slice().into() };
    assert!(provider.check(&over_a_border, 1).is_err());
    let regions: Vec<Region> = chunks.iter().map(|chunk: &ChunkPlan| chunk.local.clone()).collect();
    let leaf = LeafPlan::Tensor { dtype: Dtype::Uint8, shape: vec![rows, columns], chunks, provider };
    let disk = SimDisk::new();
    let written = save(vec![item("i0", vec![leaf])], &pool(4, 2 * BLOCK), options(1), &disk);
    let file = disk.bytes("root/step/i0/00000.data").unwrap();
    let crate::format::index::LeafRecord::Tensor(tensor) = &written[0].index.leaves[0] else { panic!() };
    for (chunk, region) in tensor.chunks.iter().zip(regions) {
        let stored = &file[chunk.extent.offset as usize..][..chunk.extent.length as usize];
        let expected: Vec<u8> = (0..region.extent[0] * region.extent[1])
            .map(|i| {
                let (row, column) = (i / region.extent[1], i % region.extent[1]);
                whole[((region.offset[0] + row) * columns + region.offset[1] + column) as usize]
            })
            .collect();
        assert_eq!(stored, expected);
    }
}
