//! Data of any size at any place is restored.

use std::sync::atomic::Ordering;

use super::super::testing::{FILE, TestItem, flat, options, pattern};
use super::super::{FileSet, LoadOptions, execute};
use crate::format::index::Index;
use crate::read_plan::{BoxCopy, ReadPlan, ReadRun};
use crate::sys::HostTarget;

const BLOCK: u64 = 16 << 10;

/// Sizes: empty, one byte, around block borders, and several reads.
const LENGTHS: &[u64] =
    &[0, 1, 63, 64, 65, BLOCK - 4096, BLOCK, BLOCK + 1, 3 * BLOCK - 7, 9 << 20, 5, 700_001];

fn all(item: &TestItem) -> Vec<usize> {
    (0..item.index.leaves.len()).collect()
}

#[test]
fn every_leaf_comes_back_past_the_cache_and_through_it() {
    for block in [4096, BLOCK, 256 << 10, 1 << 20, 8 << 20] {
        let item = TestItem::of_tensors(block, LENGTHS);
        for cached in [false, true] {
            item.disk.knobs.cached.store(cached, Ordering::SeqCst);
            let (found, result) = item.load(&all(&item), &options());
            let stats = result.unwrap();
            for (leaf, bytes) in found.iter().enumerate() {
                assert!(*bytes == pattern(leaf as u64, LENGTHS[leaf]), "leaf {leaf}, blocks of {block}");
            }
            assert_eq!(stats.bytes_copied, LENGTHS.iter().sum::<u64>());
            assert_eq!((stats.bytes_read == 0, stats.bytes_cached == 0), (cached, !cached));
        }
    }
}

#[test]
fn a_part_is_read_without_the_rest() {
    let item = TestItem::of_tensors(BLOCK, LENGTHS);
    let (found, result) = item.load(&[10, 2], &options());
    assert_eq!(found, vec![pattern(10, 5), pattern(2, 63)]);
    // Each of the two is in one block.
    assert_eq!(result.unwrap().bytes_read, 2 * BLOCK);
}

#[test]
fn many_small_leaves_share_their_reads() {
    let lengths = vec![100_u64; 20_000];
    let item = TestItem::of_tensors(256 << 10, &lengths);
    let (found, result) = item.load(&all(&item), &options());
    assert!(found.iter().enumerate().all(|(leaf, bytes)| *bytes == pattern(leaf as u64, 100)));
    assert_eq!(result.unwrap().reads, 1);
}

#[test]
fn an_empty_plan_reads_nothing() {
    let item = TestItem::of_tensors(BLOCK, &[0, 0]);
    let (_, result) = item.load(&[0, 1], &options());
    assert_eq!(result.unwrap().reads, 0);
    assert_eq!(item.disk.knobs.opened.load(Ordering::SeqCst), 0);
}

#[test]
fn a_plan_that_leaves_bytes_unfilled_is_refused() {
    let item = TestItem::of_tensors(BLOCK, &[4 * BLOCK]);
    let mut plan = item.plan(&[0]);
    plan.runs[0].len -= 2 * BLOCK;
    let mut into = vec![0; 4 * BLOCK as usize];
    let targets = [HostTarget::from(into.as_mut_slice())];
    let failure = execute(&item.disk, &item.files(), &item.index, &plan, targets, &options()).unwrap_err();
    assert!(failure.error.to_string().contains("a read plan that fills"), "{failure}");
    assert_eq!(failure.overwritten, vec![0]);
}

#[test]
fn runs_that_overlap_or_touch_are_read_once() {
    let item = TestItem::of_tensors(BLOCK, &[6 * BLOCK]);
    let at = item.extent(0).offset;
    let plan = ReadPlan {
        runs: vec![
            ReadRun { file: 0, offset: at, len: 3 * BLOCK, copies: vec![0] },
            ReadRun { file: 0, offset: at + BLOCK, len: 5 * BLOCK, copies: vec![0] },
        ],
        copies: vec![flat(0, 0, at, 6 * BLOCK)],
    };
    let mut into = vec![0; 6 * BLOCK as usize];
    let targets = [HostTarget::from(into.as_mut_slice())];
    let stats = execute(&item.disk, &item.files(), &item.index, &plan, targets, &options()).unwrap();
    assert_eq!((stats.reads, stats.bytes_copied), (1, 6 * BLOCK));
    assert_eq!(into, pattern(0, 6 * BLOCK));
}

#[test]
fn a_scalar_is_an_array_of_no_dimensions() {
    let item = TestItem::of_tensors(BLOCK, &[8]);
    let copy = BoxCopy {
        src_strides: vec![].into(),
        extent: vec![].into(),
        dst_strides: vec![].into(),
        itemsize: 8,
        ..flat(0, 0, item.extent(0).offset, 8)
    };
    let plan = ReadPlan {
        runs: vec![ReadRun { file: 0, offset: 0, len: BLOCK, copies: vec![0] }],
        copies: vec![copy],
    };
    let mut into = [0; 8];
    let targets = [HostTarget::from(into.as_mut_slice())];
    execute(&item.disk, &item.files(), &item.index, &plan, targets, &options()).unwrap();
    assert_eq!(into.to_vec(), pattern(0, 8));
}

#[test]
fn a_foreign_file_of_odd_length_is_read_whole() {
    let item = TestItem::of_tensors(BLOCK, &[10]);
    let bytes = pattern(3, 1_000_003);
    item.disk.put("model.safetensors", bytes.clone());
    let record = crate::format::index::FileRecord {
        name: "model.safetensors".into(),
        length: bytes.len() as u64,
        file_id: 0,
        trailer_crc: 0,
        within: None,
    };
    let files = FileSet::foreign(item.disk.dir(), &[record]);
    for cached in [false, true] {
        item.disk.knobs.cached.store(cached, Ordering::SeqCst);
        let plan = ReadPlan {
            runs: vec![ReadRun { file: 0, offset: 0, len: 1_000_003, copies: vec![0] }],
            copies: vec![flat(0, 0, 3, 1_000_000)],
        };
        let mut into = vec![0; 1_000_000];
        let targets = [HostTarget::from(into.as_mut_slice())];
        execute(&item.disk, &files, &Index::default(), &plan, targets, &options()).unwrap();
        assert_eq!(into, bytes[3..]);
    }
}

#[test]
fn the_default_options_are_sound() {
    let item = TestItem::of_tensors(256 << 10, &[20 << 20]);
    let (found, result) = item.load(&[0], &LoadOptions::default());
    assert!(found[0] == pattern(0, 20 << 20));
    assert!(result.unwrap().peak_buffer_bytes <= LoadOptions::default().budget_bytes);
    assert!(item.files().path(0).ends_with(FILE));
}
