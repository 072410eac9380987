//! The content of the files.
#![expect(
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "the numbers of these tests are small"
)]

use proptest::prelude::*;

use super::*;
use crate::format::checksum::crc32c;
use crate::format::index::{Extent, Index, LeafRecord};
use crate::io::simulated::{Op, Record};
use crate::io::{Engine, open_disk};
use crate::save::{PAGE_ALIGNED_FROM, SMALL_ALIGNMENT};
use crate::value::Value;

/// One leaf of a generated state, with its bytes in row-major order.
#[derive(Clone, Debug)]
enum Sample {
    Tensor { dtype: Dtype, shape: Vec<u64>, order: Order, cut: u64, seed: u64 },
    Flat { len: u64, cut: u64, seed: u64 },
    Object(String),
    Alias(u32),
}

#[derive(Clone, Copy, Debug)]
enum Order {
    C,
    Fortran,
    Reversed,
    Broadcast,
}

fn dtype() -> impl Strategy<Value = Dtype> {
    prop_oneof![
        Just(Dtype::Uint8),
        Just(Dtype::Bfloat16),
        Just(Dtype::Float32),
        Just(Dtype::Float64),
        Just(Dtype::Complex128)
    ]
}

fn sample() -> impl Strategy<Value = Sample> {
    let order =
        prop_oneof![Just(Order::C), Just(Order::Fortran), Just(Order::Reversed), Just(Order::Broadcast)];
    let side = prop_oneof![8 => 1_u64..9, 2 => 30_u64..50, 1 => Just(0_u64)];
    prop_oneof![
        6 => (dtype(), prop::collection::vec(side, 0..4), order, 1_u64..40, any::<u64>())
            .prop_map(|(dtype, shape, order, cut, seed)| Sample::Tensor { dtype, shape, order, cut, seed }),
        2 => (1_u64..100_000, 1_u64..80_000, any::<u64>())
            .prop_map(|(len, cut, seed)| Sample::Flat { len, cut, seed }),
        2 => "[a-z]{0,200}".prop_map(Sample::Object),
        1 => (0_u32..20).prop_map(Sample::Alias),
    ]
}

/// Runs are dealt to three bands.
fn band(region: &ChunkRegion) -> u32 {
    match region {
        ChunkRegion::Run { start, .. } => (start % 3) as u32,
        ChunkRegion::Box(_) => 0,
    }
}

/// The leaf's plan, and what its chunks must hold.
fn plan(sample: &Sample, samples: &[Sample]) -> (LeafPlan, Vec<Vec<u8>>) {
    match sample {
        Sample::Tensor { dtype, shape, order, cut, seed } => tensor(*dtype, shape, *order, *cut, *seed),
        Sample::Flat { len, cut, seed } => {
            let bytes = noise(*len as usize, *seed);
            let source = HostSource::owned(bytes.clone(), 0, 1, &[*len], &[1]).unwrap();
            let starts = (0..*len).step_by(*cut as usize);
            let runs = starts.map(|start| (start, (*cut).min(len - start)));
            let chunks = runs
                .clone()
                .map(|(start, len)| {
                    let region = ChunkRegion::Run { start, len };
                    let local = Region { offset: vec![start].into(), extent: vec![len].into() };
                    ChunkPlan { band: band(&region), region, local }
                })
                .collect();
            let contents = runs.map(|(start, len)| bytes[start as usize..(start + len) as usize].to_vec());
            let provider = Arc::new(HostProvider::new(source));
            let leaf = LeafPlan::Tensor { dtype: Dtype::Uint8, shape: vec![*len], chunks, provider };
            (leaf, contents.collect())
        }
        Sample::Object(text) => (LeafPlan::Object(Value::Str(text.clone())), vec![]),
        Sample::Alias(of) => match samples.get(*of as usize) {
            None | Some(Sample::Alias(_)) => (LeafPlan::Object(Value::None), vec![]),
            Some(_) => (LeafPlan::Alias { of: *of }, vec![]),
        },
    }
}

fn tensor(dtype: Dtype, shape: &[u64], order: Order, cut: u64, seed: u64) -> (LeafPlan, Vec<Vec<u8>>) {
    let item = dtype.size();
    let elements: u64 = shape.iter().product();
    let memory = noise(elements as usize * item, seed);
    let mut strides = vec![item as i64; shape.len()];
    let mut first = 0;
    match order {
        Order::C | Order::Reversed | Order::Broadcast => {
            for d in (1..shape.len()).rev() {
                strides[d - 1] = strides[d] * shape[d] as i64;
            }
        }
        Order::Fortran => {
            for d in 1..shape.len() {
                strides[d] = strides[d - 1] * shape[d - 1] as i64;
            }
        }
    }
    if elements > 0 {
        match (order, shape.first()) {
            (Order::Reversed, Some(&n)) => {
                first = (n - 1) as usize * strides[0] as usize;
                strides[0] = -strides[0];
            }
            (Order::Broadcast, Some(_)) => strides[0] = 0,
            _ => {}
        }
    }
    // Chunks: slabs along the first axis.
    let rows = shape.first().copied().unwrap_or(1);
    let regions: Vec<Region> = if shape.is_empty() {
        vec![Region::whole(shape)]
    } else {
        (0..rows.max(1))
            .step_by(cut as usize)
            .map(|start| {
                let mut region = Region::whole(shape);
                region.offset[0] = start.min(rows);
                region.extent[0] = cut.min(rows - start.min(rows));
                region
            })
            .collect()
    };
    let contents = regions.iter().map(|region| naive(&memory, first, item, &strides, region)).collect();
    let chunks = regions
        .into_iter()
        .map(|region| ChunkPlan { region: ChunkRegion::Box(region.clone()), local: region, band: 0 })
        .collect();
    let source = HostSource::owned(memory, first, item, shape, &strides).unwrap();
    let provider = Arc::new(HostProvider::new(source));
    (LeafPlan::Tensor { dtype, shape: shape.to_vec(), chunks, provider }, contents)
}

/// A region's bytes, one element after the other.
fn naive(memory: &[u8], first: usize, item: usize, strides: &[i64], region: &Region) -> Vec<u8> {
    let mut bytes = Vec::new();
    let count = region.volume().unwrap();
    for mut element in 0..count {
        let mut at = first as i64;
        for d in (0..region.ndim()).rev() {
            at += (region.offset[d] + element % region.extent[d]) as i64 * strides[d];
            element /= region.extent[d];
        }
        bytes.extend_from_slice(&memory[at as usize..at as usize + item]);
    }
    bytes
}

fn extents(index: &Index) -> Vec<Extent> {
    let mut extents = Vec::new();
    for leaf in &index.leaves {
        match leaf {
            LeafRecord::Tensor(tensor) => extents.extend(tensor.chunks.iter().map(|chunk| chunk.extent)),
            LeafRecord::Object(extent) => extents.push(*extent),
            LeafRecord::Alias { .. } => {}
        }
    }
    extents
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn a_file_is_the_plain_serialisation_of_its_leaves(
        samples in prop::collection::vec(sample(), 0..20),
        blocks_per_slot in 1_usize..6,
        slots in 2_usize..5,
        threads in 1_usize..4,
        depth in 1_usize..5,
        order in any::<u64>(),
    ) {
        let build = || {
            let plans: Vec<_> = samples.iter().map(|sample| plan(sample, &samples)).collect();
            let contents: Vec<_> = plans.iter().map(|(_, contents)| contents.clone()).collect();
            (item("i0", plans.into_iter().map(|(plan, _)| plan).collect()), contents)
        };
        let disk = SimDisk::new().with_alignment(4096).with_order(order);
        let (first, contents) = build();
        let ring = pool(slots, blocks_per_slot * BLOCK);
        let mut options = SaveOptions { capture_threads: threads, queue_depth: depth, ..options(1) };
        let written = save(vec![first], &ring, options.clone(), &disk);
        assert_idle(&ring);
        let [written] = &written[..] else { panic!("one item") };
        let file = disk.bytes("root/step/i0/00000.data").unwrap();
        prop_assert_eq!(file.len() as u64, written.length);
        prop_assert_eq!(written.index.files[0].length, written.length);
        prop_assert_eq!(written.index.files[0].trailer_crc, written.trailer_crc);

        // Every chunk is where the index says, aligned, disjoint, those of lower bands first; what
        // is in no extent is zero.
        let mut expected = vec![0_u8; file.len()];
        expected[..4096].copy_from_slice(&file[..4096]);
        let mut chunks = Vec::new();
        for (record, contents) in written.index.leaves.iter().zip(&contents) {
            if let LeafRecord::Tensor(tensor) = record {
                prop_assert_eq!(tensor.chunks.len(), contents.len());
                for (chunk, bytes) in tensor.chunks.iter().zip(contents) {
                    chunks.push((band(&chunk.region), chunk.extent.offset, chunk.extent.length, bytes));
                }
            }
        }
        chunks.sort_by_key(|(band, ..)| *band);
        let mut end = 4096;
        for (_, offset, length, bytes) in chunks {
            prop_assert_eq!(length, bytes.len() as u64);
            prop_assert!(offset >= end, "overlap");
            let aligned = if length >= PAGE_ALIGNED_FROM { 4096 } else { SMALL_ALIGNMENT };
            prop_assert_eq!(offset % aligned, 0);
            prop_assert!(offset - end < aligned, "a gap wider than it must be");
            expected[offset as usize..][..bytes.len()].copy_from_slice(bytes);
            end = offset + length;
        }
        for (record, sample) in written.index.leaves.iter().zip(&samples) {
            if let (LeafRecord::Object(extent), Sample::Object(text)) = (record, sample) {
                let bytes = crate::format::object::encode(&Value::Str(text.clone())).unwrap();
                prop_assert_eq!(extent.length, bytes.len() as u64);
                prop_assert!(extent.offset >= end);
                end = extent.offset + extent.length;
            }
            if let (LeafRecord::Object(extent), _) = (record, sample) {
                let range = extent.offset as usize..(extent.offset + extent.length) as usize;
                expected[range.clone()].copy_from_slice(&file[range]);
            }
        }
        let last = extents(&written.index).iter().map(|e| e.offset + e.length).max().unwrap_or(0).max(4096);
        let data = last.next_multiple_of(4096) as usize;
        prop_assert_eq!(&file[..data], &expected[..data]);
        let crcs: Vec<u32> = file[..data].chunks(BLOCK).map(crc32c).collect();
        let footer = crate::format::footer::encode(1, BLOCK as u64, data as u64, &written.index, &crcs).unwrap();
        prop_assert_eq!(&file[data..], &footer.bytes[..]);

        // Another ring, other threads, another order of completions: the same file.
        let other = SimDisk::new().with_order(order.wrapping_add(1));
        options.capture_threads = 1;
        options.queue_depth = 1;
        save(vec![build().0], &pool(40, 8 * BLOCK), options, &other);
        prop_assert_eq!(&file, &other.bytes("root/step/i0/00000.data").unwrap());
    }
}

#[test]
fn a_leaf_larger_than_the_ring_streams_through_two_slots() {
    let disk = SimDisk::new().with_alignment(4096);
    let ring = pool(2, 2 * BLOCK);
    let bytes = noise(61 * BLOCK + 77, 5);
    let written = save(vec![item("i0", vec![bytes_leaf(&bytes)])], &ring, options(1), &disk);
    let file = disk.bytes("root/step/i0/00000.data").unwrap();
    assert_eq!(&file[4096..][..bytes.len()], &bytes[..]);
    assert_eq!(written[0].tensor_bytes, bytes.len() as u64);
    assert_idle(&ring);
}

#[test]
fn every_item_has_a_file_of_its_own_and_small_leaves_are_packed() {
    let disk = SimDisk::new();
    let ring = pool(3, 4 * BLOCK);
    let leaf = |i: u64| bytes_leaf(&noise(100, i));
    let items = (0..5).map(|i| item(&format!("i{i}"), (0..i * 50).map(leaf).collect())).collect();
    let written = save(items, &ring, options(5), &disk);
    assert_eq!(written.iter().map(|w| w.dir.as_str()).collect::<Vec<_>>(), ["i0", "i1", "i2", "i3", "i4"]);
    for (i, item) in written.iter().enumerate() {
        let file = disk.bytes(&format!("root/step/i{i}/00000.data")).unwrap();
        assert_eq!(file.len() as u64, item.length);
        assert_eq!(item.file_id, i as u128 + 1);
        let Some(last) = extents(&item.index).last().copied() else { continue };
        assert_eq!(last.offset, 4096 + 128 * (i as u64 * 50 - 1), "100 bytes in two cache lines each");
    }
}

#[test]
fn a_file_is_cut_and_synced_once_after_all_writes() {
    let disk = SimDisk::new().with_order(7);
    let items = (0..3).map(|i| item(&format!("i{i}"), vec![bytes_leaf(&noise(30 * BLOCK, i))])).collect();
    save(items, &pool(4, 2 * BLOCK), options(3), &disk);
    for i in 0..3 {
        let path = format!("i{i}/00000.data");
        let ops: Vec<Op> = disk
            .log()
            .records
            .iter()
            .filter(|r| r.path.contains(&path))
            .map(|r: &Record| r.op.clone())
            .collect();
        let at = |wanted: fn(&Op) -> bool| {
            ops.iter().enumerate().filter(move |(_, op)| wanted(op)).map(|(at, _)| at)
        };
        let last_write = at(|op| matches!(op, Op::Complete { .. })).max().unwrap();
        let submitted = at(|op| matches!(op, Op::Submit { .. })).count();
        assert_eq!(submitted, at(|op| matches!(op, Op::Complete { .. })).count());
        let cut = at(|op| matches!(op, Op::SetLen { .. })).max().unwrap();
        let syncs: Vec<usize> = at(|op| matches!(op, Op::Fsync { .. })).collect();
        assert_eq!(syncs.len(), 1);
        assert!(last_write < cut && cut < syncs[0], "{ops:?}");
        let windows = (31 * BLOCK).div_ceil(2 * BLOCK);
        assert!(submitted <= windows + 2, "a window is written once");
    }
}

#[test]
fn what_was_captured_does_not_change_with_its_source() {
    struct Changing;
    impl StateProvider for Changing {
        fn capture(
            &self,
            fills: &[crate::provider::Fill<'_>],
            slot: &mut crate::staging::Slot<crate::staging::Filling>,
        ) -> Result<()> {
            for fill in fills {
                slot.part(fill.at, fill.len)?.copy_from_slice(&noise(fill.len as usize, rand()));
            }
            Ok(())
        }
    }
    fn rand() -> u64 {
        std::time::Instant::now().elapsed().as_nanos() as u64
    }
    let disk = SimDisk::new();
    let leaf = tensor_leaf(20 * BLOCK, Arc::new(Changing));
    let written = save(vec![item("i0", vec![leaf])], &pool(2, 2 * BLOCK), options(1), &disk);
    let file = disk.bytes("root/step/i0/00000.data").unwrap();
    let data = 21 * BLOCK;
    let crcs: Vec<u32> = file[..data].chunks(BLOCK).map(crc32c).collect();
    let footer =
        crate::format::footer::encode(1, BLOCK as u64, data as u64, &written[0].index, &crcs).unwrap();
    assert_eq!(file[data..], footer.bytes[..]);
}

#[test]
fn every_engine_writes_the_same_file() {
    let bytes = noise(100 * BLOCK + 13, 3);
    let items = || {
        let leaves = vec![bytes_leaf(&bytes), LeafPlan::Object(Value::Int(7)), bytes_leaf(&noise(77, 4))];
        vec![item("i0", leaves)]
    };
    let simulated = SimDisk::new();
    save(items(), &pool(3, 4 * BLOCK), options(1), &simulated);
    let expected = simulated.bytes("root/step/i0/00000.data").unwrap();
    for engine in [Engine::Auto, Engine::Uring, Engine::Threads, Engine::Buffered] {
        let root = tempfile::tempdir().unwrap();
        let Ok(disk) = open_disk(root.path(), engine) else {
            assert_eq!(engine, Engine::Uring, "the others work everywhere");
            continue;
        };
        let ring = pool(3, 4 * BLOCK);
        for step in ["one", "two"] {
            let dir = disk.open_dir(root.path()).unwrap().create_dir(step).unwrap();
            let (capture, flush) = prepare(items(), &ring, options(1)).unwrap();
            let written = std::thread::scope(|scope| {
                let flushed = scope.spawn(|| flush.run(&*disk, &dir, &mut NoReclaimer));
                capture.run().unwrap();
                flushed.join().unwrap().unwrap()
            });
            let file = std::fs::read(root.path().join(step).join("i0/00000.data")).unwrap();
            assert!(file == **expected, "{engine:?}");
            assert_eq!(written[0].length, file.len() as u64);
        }
        assert_idle(&ring);
    }
}

#[test]
fn an_empty_save_and_an_empty_item_are_files_too() {
    let disk = SimDisk::new();
    let ring = pool(2, BLOCK);
    assert!(save(vec![], &ring, options(0), &disk).is_empty());
    let written = save(vec![item("i0", vec![])], &ring, options(1), &disk);
    assert_eq!(disk.bytes("root/step/i0/00000.data").unwrap().len() as u64, written[0].length);
}

#[test]
fn saves_share_a_ring_of_two_slots_and_all_end() {
    let ring = pool(2, 2 * BLOCK);
    std::thread::scope(|scope| {
        for i in 0..4 {
            let ring = Arc::clone(&ring);
            scope.spawn(move || {
                let disk = SimDisk::new().with_order(i);
                let bytes = noise(80 * BLOCK, i);
                save(vec![item("i0", vec![bytes_leaf(&bytes)])], &ring, options(1), &disk);
                let file = disk.bytes("root/step/i0/00000.data").unwrap();
                assert!(file[4096..][..bytes.len()] == bytes[..]);
            });
        }
    });
    assert_idle(&ring);
}

#[test]
fn the_counters_tell_what_was_done() {
    let disk = SimDisk::new();
    let ring = pool(2, 2 * BLOCK);
    let parts =
        prepare(vec![item("i0", vec![bytes_leaf(&noise(50 * BLOCK, 1))])], &ring, options(1)).unwrap();
    let progress = parts.1.progress();
    let (captured, written) = run_both(parts, &disk);
    captured.unwrap();
    let (written, stats) = (written.unwrap(), progress.snapshot());
    assert_eq!(stats.total_bytes, 51 * BLOCK as u64);
    assert_eq!(stats.captured_bytes, stats.total_bytes);
    assert_eq!(stats.written_bytes, written[0].length);
    assert!(stats.checksum_seconds > 0.0 && stats.write_seconds >= stats.checksum_seconds);
    assert!(stats.capture_seconds > 0.0 && stats.plan_seconds > 0.0 && stats.sync_seconds > 0.0);
}
