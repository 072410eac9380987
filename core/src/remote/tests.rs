//! A store as a disk: uploads in any order, reads, small objects, and requests that fail.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::simulated::{Fate, SimStore};
use super::{StoreDisk, StoreOptions};
use crate::Result;
use crate::io::{Completion, Dir, Disk, EntryKind, Queue, Transfer};
use crate::sys::Buffer;

const URL: &str = "s3://bucket/runs";
const PART: usize = 4096;

fn disk(store: &Arc<SimStore>) -> StoreDisk {
    let options =
        StoreOptions { part_bytes: PART as u64, connections: 4, create_timeout: Duration::from_secs(5) };
    StoreDisk::new(Arc::clone(store) as _, options)
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251) as u8).collect()
}

fn next(queue: &mut dyn Queue) -> Completion {
    queue.complete(Duration::from_secs(20)).unwrap()
}

/// Writes pieces of a file, in this order, and ends it. Returns the first error.
fn upload(
    disk: &StoreDisk,
    dir: &dyn Dir,
    name: &str,
    content: &[u8],
    pieces: &[(usize, usize)],
) -> Result<()> {
    let file = dir.create_file(name, content.len() as u64)?;
    let mut queue = disk.queue(4)?;
    let mut results = Vec::new();
    for (number, &(offset, len)) in pieces.iter().enumerate() {
        let mut buffer = Buffer::alone(len.max(1))?;
        buffer[..len].copy_from_slice(&content[offset..offset + len]);
        if queue.in_flight() == 4 {
            results.push(next(queue.as_mut()));
        }
        queue.submit(Transfer::Write, &file, offset as u64, len, buffer, number as u64);
    }
    while queue.in_flight() > 0 {
        results.push(next(queue.as_mut()));
    }
    for done in results {
        assert_eq!(done.result?, pieces[done.token as usize].1);
    }
    file.set_len(content.len() as u64)?;
    file.sync()
}

/// Cuts a file into windows of data and of the footer.
fn cut(len: usize, data: usize, window: usize) -> Vec<(usize, usize)> {
    let mut pieces: Vec<_> = (0..data).step_by(window).map(|at| (at, window.min(data - at))).collect();
    pieces.extend((data..len).step_by(window).map(|at| (at, window.min(len - at))));
    pieces
}

#[test]
fn an_upload_that_cannot_start_is_tried_once() {
    let store = SimStore::new(URL);
    let disk = disk(&store);
    let dir = disk.create_dir_all(Path::new(URL)).unwrap();
    store.script(|request| if request.call == "start_upload" { Fate::Dropped } else { Fate::Served });
    let content = bytes(8 * PART);
    let error = upload(&disk, &*dir, "x", &content, &cut(content.len(), content.len(), PART)).unwrap_err();
    assert!(error.errno().is_some(), "the store's own answer: {error}");
    let starts = store.requests().iter().filter(|request| request.call == "start_upload").count();
    assert_eq!(starts, 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    /// Windows and a footer, in any order, make the same object; all its parts but the last are of
    /// one length.
    #[test]
    fn pieces_in_any_order_make_the_object(
        data in 0_usize..6 * PART, footer in 0_usize..2 * PART,
        window in prop_oneof![Just(PART), 1000_usize..3 * PART], seed: u64,
    ) {
        let store = SimStore::new(URL);
        let disk = disk(&store);
        let content = bytes(data + footer);
        let mut pieces = cut(content.len(), data, window);
        let mut dice = seed;
        for at in (1..pieces.len()).rev() {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            pieces.swap(at, (dice >> 33) as usize % (at + 1));
        }
        let dir = disk.create_dir_all(&Path::new(URL).join("a")).unwrap();
        upload(&disk, &*dir, "f", &content, &pieces).unwrap();
        prop_assert_eq!(store.bytes("a/f"), Some(content.clone()));
        prop_assert_eq!(store.open_uploads(), 0);
        let file = dir.open_file("f").unwrap();
        prop_assert_eq!(file.len().unwrap(), content.len() as u64);
        prop_assert_eq!(file.read_at(3, 2 * PART).unwrap(), content.get(3..).map_or(&[][..], |rest| &rest[..rest.len().min(2 * PART)]));
        let sent = store.requests().iter().filter(|one| one.call == "put_part").count();
        let parts = content.len().div_ceil(PART);
        // One that is no longer than a part may be sent either way.
        prop_assert!(sent == parts || (sent == 0 && content.len() <= PART), "{} parts of {}", sent, parts);
    }
}

#[test]
fn a_queue_reads_ranges_to_the_end_of_the_object() {
    let store = SimStore::new(URL);
    let disk = disk(&store);
    let dir = disk.create_dir_all(Path::new(URL)).unwrap();
    let content = bytes(10_000);
    dir.write_file("f", &content).unwrap();
    let file = dir.open_file("f").unwrap();
    let mut queue = disk.queue_for_reads(2).unwrap();
    queue.submit(Transfer::Read, &file, 8192, PART, Buffer::alone(PART).unwrap(), 5);
    let done = next(queue.as_mut());
    assert_eq!((done.token, done.result.unwrap()), (5, 10_000 - 8192));
    assert_eq!(done.buffer[..10_000 - 8192], content[8192..]);
}

#[test]
fn names_are_those_of_the_level() {
    let store = SimStore::new(URL);
    let disk = disk(&store);
    assert!(disk.open_dir(&Path::new(URL).join("run")).err().unwrap().is_not_found());
    let run = disk.create_dir_all(&Path::new(URL).join("run")).unwrap();
    run.write_file("b", b"1").unwrap();
    run.create_dir("a").unwrap().write_file("c/d", b"22").unwrap();
    disk.create_dir_all(&Path::new(URL).join("run2")).unwrap().write_file("e", b"").unwrap();
    let names: Vec<_> = run.entries().unwrap().into_iter().map(|one| (one.name, one.kind)).collect();
    assert_eq!(names, [("a".to_owned(), EntryKind::Dir), ("b".to_owned(), EntryKind::File)]);
    assert_eq!(run.stat("a").unwrap().unwrap().kind, EntryKind::Dir);
    assert_eq!(run.stat("a/c/d").unwrap().unwrap().len, 2);
    assert_eq!(run.stat("nothing").unwrap(), None);
    assert_eq!(run.open_dir("a").unwrap().read_file("c/d", 2).unwrap(), b"22");
    assert!(run.open_file("nothing").err().unwrap().is_not_found());
    run.replace_file("b", ".b.new", b"333").unwrap();
    assert_eq!(run.read_file("b", 3).unwrap(), b"333");
    run.remove_file("b").unwrap();
    assert_eq!(run.stat("b").unwrap(), None);
    for refused in [run.rename("a", "z", crate::io::Rename::NoReplace), run.extend_file("f", 1).map(drop)] {
        assert_eq!(refused.unwrap_err().errno(), Some(libc::EOPNOTSUPP));
    }
}

#[test]
fn a_small_object_is_stored_whatever_is_answered() {
    for fate in [Fate::AnswerLost, Fate::Dropped, Fate::SaidToExist] {
        let store = SimStore::new(URL);
        let dir = disk(&store).create_dir_all(Path::new(URL)).unwrap();
        store.script(move |request| if request.number == 0 { fate } else { Fate::Served });
        dir.write_file("f", b"mine").unwrap();
        assert_eq!(store.bytes("f").unwrap(), b"mine", "{fate:?}");
        assert!(dir.write_file("f", b"other").unwrap_err().already_exists(), "{fate:?}");
        assert_eq!(store.bytes("f").unwrap(), b"mine", "{fate:?}");
    }
}

#[test]
fn a_failed_request_fails_the_file_and_its_parts_are_deleted() {
    let content = bytes(3 * PART + 100);
    for number in 0..6 {
        let store = SimStore::new(URL);
        let disk = disk(&store);
        let dir = disk.create_dir_all(Path::new(URL)).unwrap();
        store.script(move |request| if request.number == number { Fate::Dropped } else { Fate::Served });
        let error = upload(&disk, &*dir, "f", &content, &cut(content.len(), 3 * PART, PART)).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ETIMEDOUT), "request {number}: {error}");
        assert_eq!((store.bytes("f"), store.open_uploads()), (None, 0), "request {number}");
    }
}

#[test]
fn a_copy_goes_through_in_parts() {
    let store = SimStore::new(URL);
    let disk = disk(&store);
    let dir = disk.create_dir_all(Path::new(URL)).unwrap();
    let content = bytes(2 * PART + 5);
    dir.write_file("f", &content).unwrap();
    let mut copied = 0;
    let from = dir.open_file("f").unwrap();
    dir.copy_file("g", &*from, &mut |bytes| {
        copied += bytes;
        true
    })
    .unwrap();
    assert_eq!((store.bytes("g").unwrap(), copied), (content, 2 * PART as u64 + 5));
    assert!(dir.copy_file("h", &*from, &mut |_| false).is_err());
    assert_eq!((store.bytes("h"), store.open_uploads()), (None, 0));
}

#[test]
fn a_lost_answer_to_the_end_of_an_upload_loses_nothing() {
    let content = bytes(3 * PART + 100);
    let store = SimStore::new(URL);
    let disk = disk(&store);
    let dir = disk.create_dir_all(Path::new(URL)).unwrap();
    store.script(|request| match request.call {
        "complete_upload" => Fate::AnswerLost,
        _ => Fate::Served,
    });
    upload(&disk, &*dir, "f", &content, &cut(content.len(), 3 * PART, PART)).unwrap();
    assert_eq!(store.bytes("f").unwrap(), content);
}
