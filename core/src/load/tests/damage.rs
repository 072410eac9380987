//! Damage is found and named before a byte of its block is used.

use std::sync::atomic::Ordering;

use super::super::testing::{FILE, TestItem, bytes_tensor, data_file, extent, options, pattern};
use super::super::{FileSet, VerifyReport, execute, verify};
use crate::Error;
use crate::format::index::LeafRecord;
use crate::sys::HostTarget;

const BLOCK: u64 = 4096;

fn verified(item: &TestItem) -> VerifyReport {
    verify(&item.disk, &item.files(), &item.index, &options(), &mut |_| true).unwrap()
}

#[test]
fn every_flipped_data_bit_is_found_before_its_scatter() {
    let lengths = [3000, 100, 2500];
    let item = TestItem::of_tensors(BLOCK, &lengths);
    let end = item.extent(2).offset + 2500;
    // Flip one bit of every byte, and all bits of the bytes at block borders.
    for byte in 4096..end {
        let bits = if byte % BLOCK < 2 || byte % BLOCK > BLOCK - 3 { 0..8 } else { byte % 8..byte % 8 + 1 };
        for bit in bits {
            item.disk.change(FILE, |bytes| bytes[byte as usize] ^= 1 << bit);
            let (found, result) = item.load(&[0, 1, 2], &options());
            let holders: Vec<usize> = (0..3)
                .filter(|&leaf| {
                    let extent = item.extent(leaf);
                    let block = byte / BLOCK * BLOCK;
                    extent.offset < block + BLOCK && block < extent.offset + extent.length
                })
                .collect();
            let failure = result.unwrap_err();
            let Error::Corrupt { file, leaf, block, .. } = &failure.error else { panic!("{failure}") };
            assert_eq!((file.to_str(), *block), (Some("/step/i0/00000.data"), Some(byte / BLOCK)));
            let leaf = leaf.as_deref().unwrap();
            assert!(holders.iter().any(|&holder| leaf == format!("w{holder}")), "byte {byte}: {leaf}");
            for (number, found) in found.iter().enumerate() {
                let extent = item.extent(number);
                let good = pattern(number as u64, extent.length);
                for (i, found) in found.iter().enumerate() {
                    let bad_block = (extent.offset + i as u64) / BLOCK == byte / BLOCK;
                    assert!(*found == 0xEE || (!bad_block && *found == good[i]), "byte {i} of leaf {number}");
                    if *found != 0xEE {
                        assert!(failure.overwritten.contains(&(number as u32)));
                    }
                }
            }
            item.disk.change(FILE, |bytes| bytes[byte as usize] ^= 1 << bit);
        }
    }
}

#[test]
fn every_flipped_bit_of_header_footer_and_padding_is_found() {
    let item = TestItem::of_tensors(BLOCK, &[5000, 100]);
    let mut length = 0;
    item.disk.change(FILE, |bytes| length = bytes.len());
    let data_end = (item.extent(1).offset + 100) as usize;
    for byte in (0..4096).step_by(13).chain(data_end..length) {
        item.disk.change(FILE, |bytes| bytes[byte] ^= 1 << (byte % 8));
        let report = verified(&item);
        assert!(!report.damages.is_empty(), "the flip of byte {byte} was not seen");
        assert!(report.damages.iter().all(|damage| damage.file.ends_with(FILE)));
        item.disk.change(FILE, |bytes| bytes[byte] ^= 1 << (byte % 8));
    }
    assert!(verified(&item).damages.is_empty());
}

#[test]
fn damage_beside_what_is_wanted_does_not_matter() {
    let item = TestItem::of_tensors(BLOCK, &[3 * BLOCK, 3 * BLOCK, 3 * BLOCK]);
    item.disk.change(FILE, |bytes| bytes[5 * BLOCK as usize] ^= 1);
    // One read, with the damaged block in its gap.
    let (found, result) = item.load(&[0, 2], &options());
    assert_eq!(result.unwrap().reads, 1);
    assert_eq!(found, [pattern(0, 3 * BLOCK), pattern(2, 3 * BLOCK)]);
}

#[test]
fn a_file_that_is_cut_is_found() {
    let item = TestItem::of_tensors(BLOCK, &[5000]);
    let mut whole = Vec::new();
    item.disk.change(FILE, |bytes| whole.clone_from(bytes));
    for len in [0, 1, 4096, 8192, whole.len() - 4096, whole.len() - 1, whole.len() + 1] {
        let mut cut = whole.clone();
        cut.resize(len, 0);
        item.disk.put(FILE, cut);
        let (found, result) = item.load(&[0], &options());
        let failure = result.unwrap_err();
        assert_eq!(failure.error.kind(), "corrupt_checkpoint", "{len} bytes: {failure}");
        assert!(failure.overwritten.is_empty() && found[0].iter().all(|&b| b == 0xEE));
        assert_eq!(verified(&item).damages[0].leaves, vec![0]);
    }
}

#[test]
fn a_file_that_is_cut_while_it_is_read_is_found() {
    let item = TestItem::of_tensors(BLOCK, &[40 * BLOCK]);
    let files = item.files();
    files.block_bytes(0).unwrap();
    item.disk.change(FILE, |bytes| bytes.truncate(20 * BLOCK as usize));
    for cached in [false, true] {
        item.disk.knobs.cached.store(cached, Ordering::SeqCst);
        let mut into = vec![0; 40 * BLOCK as usize];
        let targets = [HostTarget::from(into.as_mut_slice())];
        let copies = item.copies(&[0]);
        let failure = execute(&item.disk, &files, &item.index, &copies, targets, &options()).unwrap_err();
        let Error::Corrupt { leaf, .. } = &failure.error else { panic!("{failure}") };
        assert_eq!(leaf.as_deref(), Some("w0"));
    }
}

#[test]
fn another_file_in_its_place_is_found() {
    let item = TestItem::of_tensors(BLOCK, &[5000]);
    // The same leaves and length, with other bytes and another id.
    let (other, _) = data_file(
        8,
        BLOCK,
        &pattern(99, 5000),
        &crate::format::index::Index { files: vec![], ..item.index.clone() },
    );
    item.disk.put(FILE, other);
    let (_, result) = item.load(&[0], &options());
    let failure = result.unwrap_err();
    assert!(failure.error.to_string().contains("another file"), "{failure}");
}

#[test]
fn a_missing_file_is_said_to_be_missing() {
    let item = TestItem::of_tensors(BLOCK, &[5000]);
    let mut index = item.index.clone();
    index.files[0].name = "gone.data".into();
    let files = FileSet::new(item.disk.dir(), &index.files);
    assert!(files.block_bytes(0).unwrap_err().is_not_found());
    let report = verify(&item.disk, &files, &index, &options(), &mut |_| true).unwrap();
    assert_eq!((report.damages.len(), report.damages[0].leaves.as_slice()), (1, &[0][..]));
}

#[test]
fn a_name_that_leaves_the_item_is_refused() {
    for name in ["../00000.data", "/etc/passwd", "", "a//b", ".", "a/.."] {
        let item = TestItem::of_tensors(BLOCK, &[10]);
        let mut records = item.index.files.clone();
        records[0].name = name.into();
        let error = FileSet::new(item.disk.dir(), &records).block_bytes(0).unwrap_err();
        assert_eq!(error.kind(), "corrupt_checkpoint", "{name}");
    }
    let item = TestItem::of_tensors(BLOCK, &[10]);
    assert_eq!(item.files().block_bytes(1).unwrap_err().kind(), "corrupt_checkpoint");
}

#[test]
fn an_index_that_points_behind_the_blocks_is_damage() {
    let mut item = TestItem::of_tensors(BLOCK, &[5000]);
    for (offset, length) in [(4096, 1 << 40), (1 << 40, 10), (12_288, 1)] {
        item.index.leaves[0] = bytes_tensor(extent(0, offset, length));
        let mut into = vec![0; 10];
        let mut copies = item.copies(&[0]);
        copies[0].extent[0] = length.min(10);
        copies[0].src_offset = offset + length - length.min(10);
        let targets = [HostTarget::from(into.as_mut_slice())];
        let result = execute(&item.disk, &item.files(), &item.index, &copies, targets, &options());
        assert_eq!(result.unwrap_err().error.kind(), "corrupt_checkpoint");
        assert_eq!(verified(&item).damages[0].leaves, vec![0]);
    }
}

#[test]
fn verification_names_every_bad_block_with_the_leaves_in_it() {
    let mut item = TestItem::of_tensors(BLOCK, &[2 * BLOCK, 100, 200, 20 * BLOCK]);
    item.index.leaves.push(LeafRecord::Alias { of: 1 });
    assert!(verified(&item).damages.is_empty());
    for block in [1, 3, 7, 8] {
        item.disk.change(FILE, |bytes| bytes[block * BLOCK as usize + 5] ^= 0x10);
    }
    let report = verified(&item);
    let found: Vec<_> = report.damages.iter().map(|damage| (damage.block, damage.leaves.clone())).collect();
    assert_eq!(
        found,
        vec![(Some(1), vec![0]), (Some(3), vec![1, 2, 3, 4]), (Some(7), vec![3]), (Some(8), vec![3])]
    );
    assert_eq!(report.blocks * BLOCK, report.bytes);
}

#[test]
fn verification_tells_an_unreadable_block_from_its_neighbours() {
    let item = TestItem::of_tensors(BLOCK, &[2 * BLOCK, 2 * BLOCK]);
    item.disk.knobs.bad_byte.store(3 * BLOCK + 17, Ordering::SeqCst);
    for cached in [false, true] {
        item.disk.knobs.cached.store(cached, Ordering::SeqCst);
        let report = verified(&item);
        let found: Vec<_> =
            report.damages.iter().map(|damage| (damage.block, damage.leaves.clone())).collect();
        assert_eq!(found, vec![(Some(3), vec![1])]);
        let (_, result) = item.load(&[1], &options());
        assert_eq!(result.unwrap_err().error.errno(), Some(libc::EIO));
    }
}

#[test]
fn verification_tells_how_far_it_is_and_stops_when_asked() {
    let item = TestItem::of_tensors(256 << 10, &[30 << 20]);
    let mut last = (0, 0);
    let mut watch = |progress: super::super::VerifyProgress| {
        assert!(progress.done >= last.0 && progress.done <= progress.total);
        last = (progress.done, progress.total);
        true
    };
    let report = verify(&item.disk, &item.files(), &item.index, &options(), &mut watch).unwrap();
    assert_eq!(last, (report.bytes, report.bytes));
    let stopped = verify(&item.disk, &item.files(), &item.index, &options(), &mut |p| p.done == 0);
    assert_eq!(stopped.unwrap_err().kind(), "cancelled");
}
