//! The same restore from every engine, on a real file system and on the simulated one.

use super::super::testing::{FILE, TestItem, options, pattern};
use super::super::{FileSet, LoadOptions, execute, verify};
use crate::io::{Engine, Transfer, open_disk};
use crate::read_plan::BoxCopy;
use crate::sys::HostTarget;

const LENGTHS: &[u64] = &[3 << 20, 1, 0, 700_001, 5 << 20, 63];

#[test]
fn every_engine_restores_the_same_bytes_cold_and_cached() {
    let item = TestItem::of_tensors(256 << 10, LENGTHS);
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = Vec::new();
    item.disk.change(FILE, |file| bytes.clone_from(file));
    std::fs::write(dir.path().join(FILE), &bytes).unwrap();
    for engine in [Engine::Auto, Engine::Uring, Engine::Threads, Engine::Buffered] {
        let disk = open_disk(dir.path(), engine).unwrap();
        let leaves: Vec<usize> = (0..LENGTHS.len()).collect();
        let copies = item.copies(&leaves);
        for round in 0..2 {
            if round == 0 {
                // Writes are still in the page cache: drop them if the system allows it.
                let file = std::fs::File::open(dir.path().join(FILE)).unwrap();
                file.sync_all().unwrap();
                rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            } else {
                drop(std::fs::read(dir.path().join(FILE)).unwrap());
            }
            let files = FileSet::new(disk.open_dir(dir.path()).unwrap(), &item.index.files);
            let mut into: Vec<Vec<u8>> = LENGTHS.iter().map(|&len| vec![0xEE; len as usize]).collect();
            let targets: Vec<_> =
                into.iter_mut().map(|bytes| HostTarget::from(bytes.as_mut_slice())).collect();
            let stats = execute(disk.as_ref(), &files, &item.index, &copies, targets, &options()).unwrap();
            assert_eq!(stats.bytes_copied, LENGTHS.iter().sum::<u64>());
            for (leaf, found) in into.iter().enumerate() {
                assert!(*found == pattern(leaf as u64, LENGTHS[leaf]), "leaf {leaf}, {engine:?}");
            }
            let report = verify(disk.as_ref(), &files, &item.index, &options(), &mut |_| true).unwrap();
            assert!(report.damages.is_empty(), "{engine:?}: {:?}", report.damages);
        }
    }
}

#[test]
fn columns_go_through_the_page_cache_if_other_ranks_read_too() {
    let item = TestItem::of_tensors(256 << 10, LENGTHS);
    let dir = tempfile::tempdir().unwrap();
    item.disk.change(FILE, |bytes| std::fs::write(dir.path().join(FILE), bytes).unwrap());
    let disk = open_disk(dir.path(), Engine::Auto).unwrap();
    // Leaf 0 is a matrix of bytes with 4096 columns. The first 1024 are wanted.
    let columns = BoxCopy {
        src_strides: vec![4096, 1].into(),
        extent: vec![768, 1024].into(),
        dst_strides: vec![1024, 1].into(),
        ..item.copies(&[0]).remove(0)
    };
    let whole = pattern(0, LENGTHS[0]);
    for shares in [false, true] {
        let file = std::fs::File::open(dir.path().join(FILE)).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let opened = disk.open_dir(dir.path()).unwrap();
        let is_known = opened.open_file(FILE).unwrap().cached(0, 1).is_some();
        let files = FileSet::new(opened, &item.index.files);
        let mut found = vec![0xEE; 768 * 1024];
        let targets = vec![HostTarget::from(found.as_mut_slice())];
        let options = LoadOptions { shares, ..options() };
        let copies = std::slice::from_ref(&columns);
        let stats = execute(disk.as_ref(), &files, &item.index, copies, targets, &options).unwrap();
        assert!(found.chunks(1024).eq(whole.chunks(4096).map(|row| &row[..1024])));
        assert_eq!(stats.bytes_cached > 0, shares && is_known);
    }
}

#[test]
fn a_read_through_the_page_cache_answers_on_the_calling_thread() {
    // Handing cached bytes to another thread would cost more than the copy.
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(FILE), vec![7; 1 << 20]).unwrap();
    for engine in [Engine::Uring, Engine::Threads, Engine::Buffered] {
        let disk = open_disk(dir.path(), engine).unwrap();
        let file = disk.open_dir(dir.path()).unwrap().open_file(FILE).unwrap();
        let mut queue = disk.queue(1).unwrap();
        let buffer = crate::sys::Buffer::alone(1 << 20).unwrap();
        queue.submit(Transfer::ReadCached, &file, 0, 1 << 20, buffer, 3);
        let done = queue.complete(std::time::Duration::ZERO);
        let done = done.unwrap_or_else(|| panic!("{engine:?} has not answered"));
        assert!(matches!(done.result, Ok(count) if count == 1 << 20));
        assert!(done.buffer.iter().all(|&byte| byte == 7));
    }
}
