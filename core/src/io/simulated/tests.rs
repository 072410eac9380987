use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::*;
use crate::io::tests::conformance;
use crate::io::{Dir, Disk, File, LockKind, Rename, Transfer};
use crate::sys::Buffer;

fn root(disk: &SimDisk) -> Arc<dyn Dir> {
    disk.create_dir_all(Path::new("/run")).unwrap()
}

fn write(disk: &SimDisk, file: &Arc<dyn File>, parts: &[(u64, &[u8])]) -> Vec<Option<String>> {
    let mut queue = disk.queue(parts.len()).unwrap();
    for (token, (offset, data)) in parts.iter().enumerate() {
        let mut buffer = Buffer::alone(data.len()).unwrap();
        buffer[..data.len()].copy_from_slice(data);
        queue.submit(Transfer::Write, file, *offset, data.len(), buffer, token as u64);
    }
    std::iter::from_fn(|| queue.complete(Duration::ZERO))
        .map(|done| done.result.err())
        .map(|error| error.map(|error| error.errno().map_or(error.kind().into(), |errno| errno.to_string())))
        .collect()
}

fn labels(disk: &SimDisk) -> Vec<String> {
    disk.log().records.iter().map(ToString::to_string).collect()
}

#[test]
fn it_keeps_every_promise_of_the_traits() {
    for disk in [SimDisk::new(), SimDisk::new().with_alignment(4096), SimDisk::new().with_order(11)] {
        conformance::run(&disk, Path::new("/run/conformance"));
        assert_eq!(disk.open_handles(), 0);
    }
}

#[test]
fn effects_are_logged_by_inode_under_the_path_of_their_time() {
    let disk = SimDisk::new();
    let root = root(&disk);
    disk.settle();
    let tmp = root.create_dir(".tmp").unwrap();
    tmp.write_file("manifest", b"abc").unwrap();
    root.rename(".tmp", "step_1", Rename::NoReplace).unwrap();
    tmp.sync().unwrap();
    disk.mark("committed 1");
    root.remove_file("step_1/manifest").unwrap();
    assert_eq!(
        labels(&disk),
        [
            "mkdir run/.tmp",
            "create run/.tmp/manifest",
            "write run/.tmp/manifest [0, +3)",
            "fsync run/.tmp/manifest",
            "rename run/.tmp -> step_1",
            "fsync run/step_1/",
            "mark \"committed 1\"",
            "unlink run/step_1/manifest",
        ]
    );
}

#[test]
fn a_rename_moves_no_handle_and_no_lock() {
    let disk = SimDisk::new();
    let root = root(&disk);
    let step = root.create_dir("step_1").unwrap();
    let lease = step.try_lock(".lease", LockKind::Shared, true).unwrap().unwrap();
    root.rename("step_1", ".trash", Rename::NoReplace).unwrap();
    step.write_file("late", b"x").unwrap();
    assert_eq!(root.read_file(".trash/late", 10).unwrap(), b"x");
    assert!(root.try_lock(".trash/.lease", LockKind::Exclusive, false).unwrap().is_none());
    assert!(root.try_lock(".trash/.lease", LockKind::Shared, false).unwrap().is_some());
    drop(lease);
    assert!(root.try_lock(".trash/.lease", LockKind::Exclusive, false).unwrap().is_some());
}

#[test]
fn a_killed_process_loses_its_locks() {
    let disk = SimDisk::new();
    let root = root(&disk);
    let lock = root.try_lock("lock", LockKind::Exclusive, true).unwrap();
    assert!(lock.is_some());
    let other = disk.process();
    let others_root = other.open_dir(Path::new("/run")).unwrap();
    assert!(others_root.try_lock("lock", LockKind::Exclusive, true).unwrap().is_none());
    disk.kill_at(disk.operations() + 1);
    root.write_file("x", b"1").unwrap_err();
    assert!(disk.is_killed());
    assert_eq!(root.sync().unwrap_err().errno(), Some(KILLED));
    disk.mark("a dead process acknowledges nothing");
    assert!(!labels(&other).iter().any(|label| label.starts_with("mark")));
    assert_eq!(others_root.stat("x").unwrap().unwrap().len, 0);
    assert!(others_root.try_lock("lock", LockKind::Exclusive, true).unwrap().is_some());
}

#[test]
fn the_nth_operation_fails_as_told_once() {
    let disk = SimDisk::new();
    let root = root(&disk);
    disk.inject(Fault::on(OperationKind::Sync, Action::Fail(libc::EIO)).after(1));
    root.write_file("a", b"1").unwrap();
    assert_eq!(root.write_file("b", b"1").unwrap_err().errno(), Some(libc::EIO));
    assert_eq!(labels(&disk)[labels(&disk).len() - 2..], ["failed fsync run/b", "unlink run/b"]);
    root.write_file("c", b"1").unwrap();

    disk.inject(Fault::on(OperationKind::Rename, Action::FailAfterwards(libc::EIO)));
    root.rename("a", "z", Rename::NoReplace).unwrap_err();
    assert!(root.stat("a").unwrap().is_none() && root.stat("z").unwrap().is_some());

    disk.inject(Fault::on(OperationKind::OpenDir, Action::FailAfterwards(libc::EIO)));
    disk.open_dir(Path::new("/run")).err().unwrap();
}

#[test]
fn a_full_disk_answers_enospc_and_a_rename_still_works() {
    let disk = SimDisk::new();
    let root = root(&disk);
    root.write_file("old", &[1; 5000]).unwrap();
    disk.set_capacity(Some(6 * 4096));
    assert_eq!(root.free_bytes().unwrap(), 2 * 4096);
    assert_eq!(root.create_file("big", 3 * 4096).err().unwrap().errno(), Some(libc::ENOSPC));
    assert!(root.stat("big").unwrap().is_none(), "what could not be finished is taken away");
    let file = root.create_file("fits", 0).unwrap();
    assert_eq!(write(&disk, &file, &[(0, &[7; 3 * 4096])]), [Some(libc::ENOSPC.to_string())]);
    assert_eq!(file.len().unwrap(), 2 * 4096);
    root.rename("old", "older", Rename::NoReplace).unwrap();
    root.remove_file("fits").unwrap();
    assert_eq!(root.free_bytes().unwrap(), 0, "an unlinked file holds its space while it is open");
    drop(file);
    assert_eq!(root.free_bytes().unwrap(), 2 * 4096);
}

#[test]
fn transfers_complete_in_a_seeded_order_and_take_effect_then() {
    let order = |seed| {
        let disk = SimDisk::new().with_order(seed);
        let root = root(&disk);
        let file = root.create_file("data", 0).unwrap();
        let parts: Vec<[u8; 1]> = (0..6).map(|i| [i]).collect();
        let parts: Vec<(u64, &[u8])> =
            parts.iter().enumerate().map(|(i, part)| (i as u64, &part[..])).collect();
        assert!(write(&disk, &file, &parts).iter().all(Option::is_none));
        assert_eq!(*disk.bytes("run/data").unwrap(), [0, 1, 2, 3, 4, 5]);
        let ids = disk.log().records.into_iter().filter_map(|record| match record.op {
            Op::Complete { id, .. } => Some(id),
            _ => None,
        });
        ids.collect::<Vec<_>>()
    };
    assert!(order(0).is_sorted());
    assert_eq!(order(7), order(7));
    assert!((1..20).any(|seed| !order(seed).is_sorted()));
}

#[test]
fn short_transfers_continue_and_stalled_ones_stay_away() {
    let disk = SimDisk::new();
    let root = root(&disk);
    let file = root.create_file("data", 0).unwrap();
    disk.inject(Fault::on(OperationKind::Write, Action::Short));
    let before = disk.operations();
    assert_eq!(write(&disk, &file, &[(0, b"abcdefgh")]), [None]);
    assert_eq!(disk.operations() - before, 2, "the rest is an operation of its own");
    assert_eq!(*disk.bytes("run/data").unwrap(), b"abcdefgh");

    let reading = root.open_file("data").unwrap();
    disk.inject(Fault::on(OperationKind::Read, Action::Short));
    let mut queue = disk.queue(1).unwrap();
    queue.submit(Transfer::Read, &reading, 4, 100, Buffer::alone(100).unwrap(), 9);
    let done = queue.complete(Duration::ZERO).unwrap();
    assert_eq!((done.token, done.result.unwrap(), &done.buffer[..4]), (9, 4, &b"efgh"[..]));

    disk.inject(Fault::on(OperationKind::Write, Action::Stall));
    queue.submit(Transfer::Write, &file, 0, 1, Buffer::alone(1).unwrap(), 10);
    assert!(queue.complete(Duration::from_millis(1)).is_none());
    assert_eq!(queue.in_flight(), 1);
}

#[test]
fn hooks_see_every_operation_and_may_use_the_disk() {
    let disk = SimDisk::new();
    let root = root(&disk);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let count = Arc::new(AtomicU64::new(0));
    let (inner, notes, calls) = (disk.process(), Arc::clone(&seen), Arc::clone(&count));
    disk.set_hook(Some(Arc::new(move |moment, operation| {
        calls.fetch_add(1, Ordering::Relaxed);
        if moment == Moment::Before && operation.kind == OperationKind::Rename {
            notes.lock().unwrap().push(operation.path.to_path_buf());
            inner.open_dir(Path::new("run")).unwrap().write_file("b", b"first").unwrap();
        }
    })));
    root.write_file("a", b"second").unwrap();
    let raced = root.rename("a", "b", Rename::NoReplace).unwrap_err();
    assert_eq!(raced.errno(), Some(libc::EEXIST));
    assert_eq!(*seen.lock().unwrap(), [Path::new("/run/a")]);
    assert_eq!(count.load(Ordering::Relaxed), 2 * 4, "create, write, fsync, rename");
    disk.set_hook(None);
}

#[test]
fn names_are_resolved_beneath_the_directory_only() {
    let disk = SimDisk::new();
    let root = root(&disk);
    root.create_dir("a").unwrap().write_file("x", b"1").unwrap();
    disk.plant("run/link", &ImageNode::other()).unwrap();
    for (name, errno) in [("../run/a", libc::EINVAL), ("link", libc::ELOOP), ("a/x/y", libc::ENOTDIR)] {
        assert_eq!(root.open_dir(name).err().unwrap().errno(), Some(errno), "{name}");
    }
    root.rename("a/x", "y", Rename::NoReplace).unwrap();
    assert_eq!(root.read_file("y", 1).unwrap(), b"1");
    root.create_dir("a/b").unwrap();
    assert_eq!(root.rename("a/b", "b", Rename::NoReplace).unwrap_err().errno(), Some(libc::EXDEV));
}

#[test]
fn an_image_holds_names_and_bytes_and_nothing_else() {
    let disk = SimDisk::new();
    let root = root(&disk);
    root.create_dir("a").unwrap().write_file("x", b"1").unwrap();
    let image = disk.image();
    let copy = SimDisk::from_image(&image);
    assert_eq!(copy.image(), image);
    assert!(copy.corrupt("run/a/x", |bytes| bytes[0] ^= 1));
    assert_ne!(copy.image(), image);
    assert_eq!(copy.open_handles(), 0);
    assert_eq!(image.get("run/a/x").unwrap().bytes().unwrap().as_slice(), b"1");
}

#[test]
fn every_handle_is_counted_until_it_is_dropped() {
    let disk = SimDisk::new();
    let root = root(&disk);
    let file = root.create_file("f", 1).unwrap();
    let lock = root.try_lock("l", LockKind::Shared, true).unwrap();
    assert_eq!((disk.open_handles(), disk.locks_held()), (3, 1));
    drop((file, lock, root));
    assert_eq!((disk.open_handles(), disk.locks_held()), (0, 0));
}

#[test]
fn alignment_is_demanded_where_it_is_asked_for() {
    let disk = SimDisk::new().with_alignment(512);
    let file = root(&disk).create_file("data", 0).unwrap();
    assert_eq!(write(&disk, &file, &[(0, &[1; 512]), (512, &[1; 100])]), [Some("internal".into()), None]);
}
