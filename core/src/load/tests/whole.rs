//! Data of any size at any place is restored.

use std::sync::atomic::Ordering;

use super::super::testing::{FILE, TestItem, flat, options, pattern};
use super::super::{FileSet, KnownFile, LoadOptions, ReadLimits, execute, plan};
use crate::format::index::Index;
use crate::read_plan::BoxCopy;
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
fn empty_leaves_read_nothing() {
    let item = TestItem::of_tensors(BLOCK, &[0, 0]);
    let (_, result) = item.load(&[0, 1], &options());
    assert_eq!(result.unwrap().reads, 0);
    assert_eq!(item.disk.knobs.opened.load(Ordering::SeqCst), 0);
}

#[test]
fn a_plan_names_the_reads_that_the_disk_gets() {
    let lengths = [9 << 20, 100, 100 << 10, 5, 200 << 10, 300, 5 << 20];
    let item = TestItem::of_tensors(BLOCK, &lengths);
    let rows = BoxCopy {
        src_strides: vec![200 << 10, 1].into(),
        extent: vec![20, 100].into(),
        dst_strides: vec![100, 1].into(),
        ..flat(0, 0, item.extent(0).offset + 5, 1)
    };
    let mut of_parts = item.copies(&[6, 1, 3, 5]);
    for copy in &mut of_parts {
        copy.dst += 1;
    }
    of_parts.push(rows);
    for (copies, lengths) in
        [(item.copies(&all(&item)), lengths.to_vec()), (of_parts, vec![2000, 5 << 20, 100, 5, 300])]
    {
        let planned = plan(&item.files(), &item.index, &copies, ReadLimits::LOCAL).unwrap();
        let mut into: Vec<Vec<u8>> = lengths.iter().map(|&len| vec![0; len as usize]).collect();
        let targets = into.iter_mut().map(|bytes| HostTarget::from(bytes.as_mut_slice()));
        let stats = execute(&item.disk, &item.files(), &item.index, &copies, targets, &options()).unwrap();
        let seen = std::mem::take(&mut *item.disk.knobs.seen.lock().unwrap());
        assert!(seen.len() > 2, "{seen:?}");
        assert_eq!(planned.iter().map(|file| file.wanted_bytes).collect::<Vec<_>>(), [stats.bytes_copied]);
        assert_eq!(planned[0].reads, seen);
    }
}

#[test]
fn bytes_that_several_copies_need_are_read_once() {
    let item = TestItem::of_tensors(BLOCK, &[6 * BLOCK]);
    let at = item.extent(0).offset;
    let copies = [flat(0, 0, at, 3 * BLOCK), flat(0, 1, at + BLOCK, 5 * BLOCK)];
    let (mut a, mut b) = (vec![0; 3 * BLOCK as usize], vec![0; 5 * BLOCK as usize]);
    let targets = [HostTarget::from(a.as_mut_slice()), HostTarget::from(b.as_mut_slice())];
    let stats = execute(&item.disk, &item.files(), &item.index, &copies, targets, &options()).unwrap();
    assert_eq!((stats.reads, stats.bytes_copied), (1, 8 * BLOCK));
    let whole = pattern(0, 6 * BLOCK);
    assert!(a == whole[..3 * BLOCK as usize] && b == whole[BLOCK as usize..]);
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
    let mut into = [0; 8];
    let targets = [HostTarget::from(into.as_mut_slice())];
    execute(&item.disk, &item.files(), &item.index, &[copy], targets, &options()).unwrap();
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
    let files = FileSet::foreign(item.disk.dir(), &[record], Vec::new(), &|_| KnownFile::default()).unwrap();
    for cached in [false, true] {
        item.disk.knobs.cached.store(cached, Ordering::SeqCst);
        let copies = [flat(0, 0, 3, 1_000_000)];
        let mut into = vec![0; 1_000_000];
        let targets = [HostTarget::from(into.as_mut_slice())];
        execute(&item.disk, &files, &Index::default(), &copies, targets, &options()).unwrap();
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
