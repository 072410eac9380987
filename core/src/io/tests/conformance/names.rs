//! Promises about names: directories, small files, renames, locks.

use libc::{EEXIST, EINVAL, EISDIR, ENOENT, ENOTDIR, ENOTEMPTY, EPERM};

use super::{Check, Scene, assert_errno, is_limit};
use crate::io::{Dir, Entry, EntryKind, LockKind, Rename};

pub(super) const CHECKS: &[(&str, Check)] = &[
    ("create-dir-all-makes-what-is-missing", create_dir_all),
    ("a-directory-is-made-once", create_dir_is_exclusive),
    ("names-never-lead-out", names_never_lead_out),
    ("paths-below-work-like-names", paths_below),
    ("small-files-come-back", small_files),
    ("a-small-file-is-written-once", write_file_is_exclusive),
    ("read-file-has-a-limit", read_file_has_a_limit),
    ("entries-are-sorted", entries_are_sorted),
    ("stat-says-what-stands-there", stat_says_what_stands_there),
    ("an-open-directory-keeps-its-identity", an_open_directory_keeps_its_identity),
    ("rename-no-replace-never-replaces", no_replace_never_replaces),
    ("rename-replace-replaces-a-file", replace_replaces_a_file),
    ("rename-exchange-swaps", exchange_swaps),
    ("removal-is-by-kind", removal_is_by_kind),
    ("locks-exclude-within-one-process", locks_exclude),
    ("locks-end-with-their-holder", locks_end_with_their_holder),
    ("directories-sync", directories_sync),
];

fn create_dir_all(scene: &Scene<'_>) {
    let deep = scene.path.join("a/b/c");
    let made = scene.disk.create_dir_all(&deep).unwrap();
    made.write_file("x", b"1").unwrap();
    let again = scene.disk.create_dir_all(&deep).unwrap();
    assert_eq!(again.id().unwrap(), made.id().unwrap());
    assert_eq!(scene.dir.read_file("a/b/c/x", 10).unwrap(), b"1");
    assert_errno(scene.disk.open_dir(&scene.path.join("none")), &[ENOENT], "none");
}

fn create_dir_is_exclusive(scene: &Scene<'_>) {
    let made = scene.dir.create_dir("d").unwrap();
    assert_eq!(made.id().unwrap(), scene.dir.open_dir("d").unwrap().id().unwrap());
    assert!(made.path().ends_with("d"));
    assert_errno(scene.dir.create_dir("d"), &[EEXIST], "d");
    scene.dir.write_file("f", b"").unwrap();
    assert_errno(scene.dir.create_dir("f"), &[EEXIST], "f");
    assert_errno(scene.dir.create_dir("none/d"), &[ENOENT], "none/d");
    assert_errno(scene.dir.open_dir("none"), &[ENOENT], "none");
    assert_errno(scene.dir.open_dir("f"), &[ENOTDIR], "f");
}

fn names_never_lead_out(scene: &Scene<'_>) {
    let inner = scene.dir.create_dir("inner").unwrap();
    inner.create_dir("d").unwrap();
    inner.write_file("f", b"1").unwrap();
    scene.dir.write_file("outside", b"1").unwrap();
    let absolute = scene.path.join("outside");
    let absolute = absolute.to_str().unwrap();
    for bad in ["", ".", "..", "../outside", "d/../../outside", "d/./x", "d//x", "d/", "/", absolute, "a\0b"]
    {
        let refused = [
            inner.create_file(bad, 0).err(),
            inner.open_file(bad).err(),
            inner.write_file(bad, b"2").err(),
            inner.read_file(bad, 100).err(),
            inner.create_dir(bad).err(),
            inner.open_dir(bad).err(),
            inner.stat(bad).err(),
            inner.rename("f", bad, Rename::Replace).err(),
            inner.rename("f", bad, Rename::NoReplace).err(),
            inner.rename(bad, "g", Rename::Replace).err(),
            inner.remove_file(bad).err(),
            inner.remove_dir(bad).err(),
            inner.try_lock(bad, LockKind::Exclusive, true).err(),
        ];
        for (call, error) in refused.iter().enumerate() {
            assert!(error.is_some(), "call {call} took the name {bad:?}");
        }
    }
    assert_eq!(scene.names(), ["inner", "outside"]);
    assert_eq!(scene.dir.read_file("outside", 10).unwrap(), b"1");
    assert_eq!(inner.read_file("f", 10).unwrap(), b"1");
    assert_eq!(inner.entries().unwrap().len(), 2);
}

fn paths_below(scene: &Scene<'_>) {
    scene.dir.create_dir("a").unwrap();
    scene.dir.create_dir("a/b").unwrap();
    scene.dir.write_file("a/b/f", b"1").unwrap();
    scene.dir.create_file("a/b/g", 0).unwrap();
    assert_eq!(scene.dir.stat("a/b/f").unwrap().unwrap().len, 1);
    scene.dir.rename("a/b/f", "a/h", Rename::NoReplace).unwrap();
    assert_eq!(scene.dir.open_dir("a").unwrap().read_file("h", 10).unwrap(), b"1");
    assert!(scene.dir.stat("a/b/f").unwrap().is_none());
    assert!(scene.dir.stat("none/f").unwrap().is_none());
    scene.dir.remove_file("a/b/g").unwrap();
    scene.dir.remove_dir("a/b").unwrap();
    assert_errno(scene.dir.open_file("a/b/g"), &[ENOENT], "a/b/g");
}

fn small_files(scene: &Scene<'_>) {
    for len in [0, 1, 4095, 4096, 4097, 300_000] {
        let name = format!("f{len}");
        let bytes = super::pattern(len, len as u64);
        scene.dir.write_file(&name, &bytes).unwrap();
        assert_eq!(scene.dir.read_file(&name, 1 << 20).unwrap(), bytes);
        assert_eq!(scene.dir.open_file(&name).unwrap().len().unwrap(), len as u64);
    }
    assert_errno(scene.dir.read_file("none", 10), &[ENOENT], "none");
    assert!(scene.dir.read_file("none", 10).unwrap_err().is_not_found());
    scene.dir.create_dir("d").unwrap();
    assert!(scene.dir.read_file("d", 10).is_err());
}

fn write_file_is_exclusive(scene: &Scene<'_>) {
    scene.dir.write_file("f", b"first").unwrap();
    assert_errno(scene.dir.write_file("f", b"second"), &[EEXIST], "f");
    assert_eq!(scene.dir.read_file("f", 10).unwrap(), b"first");
    scene.dir.create_dir("d").unwrap();
    assert_errno(scene.dir.write_file("d", b"x"), &[EEXIST], "d");
    assert_errno(scene.dir.write_file("none/f", b"x"), &[ENOENT], "none/f");
}

fn read_file_has_a_limit(scene: &Scene<'_>) {
    scene.dir.write_file("f", &[7; 5000]).unwrap();
    assert_eq!(scene.dir.read_file("f", 5000).unwrap().len(), 5000);
    assert!(is_limit(&scene.dir.read_file("f", 4999).unwrap_err()));
    assert!(is_limit(&scene.dir.read_file("f", 0).unwrap_err()));
}

fn entries_are_sorted(scene: &Scene<'_>) {
    let mut expected = Vec::new();
    for i in (0..50).rev() {
        let (dir, file) = (format!("d{i:02}"), format!("f{i:02}"));
        scene.dir.create_dir(&dir).unwrap();
        scene.dir.write_file(&file, b"").unwrap();
        for (name, kind) in [(dir, EntryKind::Dir), (file, EntryKind::File)] {
            let inode = scene.dir.stat(&name).unwrap().unwrap().id.1;
            expected.push(Entry { name, kind, inode });
        }
    }
    expected.sort();
    assert_eq!(scene.dir.entries().unwrap(), expected);
    let changed = scene.dir.changed().unwrap();
    assert_eq!(scene.dir.changed().unwrap(), changed, "to look is no change");
    // Past the tick of any file system's clock.
    std::thread::sleep(std::time::Duration::from_millis(30));
    scene.dir.rename("d00", "d", Rename::NoReplace).unwrap();
    assert_ne!(scene.dir.changed().unwrap(), changed);
    scene.dir.rename("d", "d00", Rename::NoReplace).unwrap();
    assert_eq!(scene.dir.entries().unwrap(), expected, "a second listing starts from the beginning");
    assert_eq!(scene.dir.open_dir("d00").unwrap().entries().unwrap(), []);
}

fn stat_says_what_stands_there(scene: &Scene<'_>) {
    assert!(scene.dir.stat("f").unwrap().is_none());
    scene.dir.write_file("f", &[1; 123]).unwrap();
    scene.dir.write_file("g", &[1; 123]).unwrap();
    let (f, g) = (scene.dir.stat("f").unwrap().unwrap(), scene.dir.stat("g").unwrap().unwrap());
    assert_eq!((f.kind, f.len), (EntryKind::File, 123));
    assert_ne!(f.id, g.id, "two files have two identities");
    scene.dir.rename("f", "h", Rename::NoReplace).unwrap();
    assert_eq!(scene.dir.stat("h").unwrap().unwrap().id, f.id, "a rename changes no identity");
    let d = scene.dir.create_dir("d").unwrap();
    let stat = scene.dir.stat("d").unwrap().unwrap();
    assert_eq!((stat.kind, stat.id), (EntryKind::Dir, d.id().unwrap()));
}

fn an_open_directory_keeps_its_identity(scene: &Scene<'_>) {
    let d = scene.dir.create_dir("d").unwrap();
    let id = d.id().unwrap();
    scene.dir.rename("d", "e", Rename::NoReplace).unwrap();
    let other = scene.dir.create_dir("d").unwrap();
    assert_ne!(other.id().unwrap(), id);
    d.write_file("f", b"1").unwrap();
    assert_eq!(scene.dir.read_file("e/f", 10).unwrap(), b"1", "it is worked in wherever it is now");
    assert_eq!(other.entries().unwrap(), []);
    assert_eq!(d.id().unwrap(), id);
}

fn no_replace_never_replaces(scene: &Scene<'_>) {
    let dir = &scene.dir;
    dir.create_dir("from").unwrap().write_file("f", b"new").unwrap();
    dir.create_dir("empty").unwrap();
    dir.create_dir("full").unwrap().write_file("f", b"old").unwrap();
    dir.write_file("file", b"old").unwrap();
    for taken in ["empty", "full", "file"] {
        assert_errno(dir.rename("from", taken, Rename::NoReplace), &[EEXIST], taken);
        assert_errno(dir.rename("file", "full", Rename::NoReplace), &[EEXIST], "full");
    }
    assert_eq!(dir.open_dir("empty").unwrap().entries().unwrap(), [], "nothing moved into the empty one");
    assert_eq!(dir.read_file("full/f", 10).unwrap(), b"old");
    assert_eq!(dir.read_file("from/f", 10).unwrap(), b"new");
    assert_errno(dir.rename("none", "free", Rename::NoReplace), &[ENOENT], "none");
    dir.rename("from", "free", Rename::NoReplace).unwrap();
    assert_eq!(dir.read_file("free/f", 10).unwrap(), b"new");
    assert!(dir.stat("from").unwrap().is_none());
}

fn replace_replaces_a_file(scene: &Scene<'_>) {
    let dir = &scene.dir;
    dir.write_file("old", b"old").unwrap();
    dir.write_file("new", b"new").unwrap();
    let held = dir.open_file("old").unwrap();
    dir.rename("new", "old", Rename::Replace).unwrap();
    assert_eq!(dir.read_file("old", 10).unwrap(), b"new");
    assert_eq!(scene.names(), ["old"]);
    assert_eq!(held.read_at(0, 10).unwrap(), b"old", "whoever has the old one open keeps it");
    dir.rename("old", "free", Rename::Replace).unwrap();
    assert_eq!(scene.names(), ["free"]);
    assert_errno(dir.rename("none", "free", Rename::Replace), &[ENOENT], "none");
}

fn exchange_swaps(scene: &Scene<'_>) {
    let dir = &scene.dir;
    dir.create_dir("a").unwrap().write_file("f", b"1").unwrap();
    dir.create_dir("b").unwrap().write_file("f", b"2").unwrap();
    let (a, b) = (dir.stat("a").unwrap().unwrap().id, dir.stat("b").unwrap().unwrap().id);
    match dir.rename("a", "b", Rename::Exchange) {
        Ok(()) => {
            assert_eq!(dir.stat("a").unwrap().unwrap().id, b);
            assert_eq!(dir.stat("b").unwrap().unwrap().id, a);
            assert_eq!(dir.read_file("a/f", 10).unwrap(), b"2");
            assert_eq!(dir.read_file("b/f", 10).unwrap(), b"1");
            assert_errno(dir.rename("a", "none", Rename::Exchange), &[ENOENT], "a");
            assert_eq!(scene.names(), ["a", "b"]);
        }
        refused => {
            assert_errno(refused, &[EINVAL], "a");
            assert_eq!(dir.stat("a").unwrap().unwrap().id, a, "a refusal changes nothing");
        }
    }
}

fn removal_is_by_kind(scene: &Scene<'_>) {
    let dir = &scene.dir;
    dir.create_dir("d").unwrap().write_file("f", b"1").unwrap();
    dir.write_file("f", b"1").unwrap();
    assert_errno(dir.remove_dir("d"), &[ENOTEMPTY, EEXIST], "d");
    assert_errno(dir.remove_file("d"), &[EISDIR, EPERM], "d");
    assert_errno(dir.remove_dir("f"), &[ENOTDIR], "f");
    assert_errno(dir.remove_file("none"), &[ENOENT], "none");
    assert_errno(dir.remove_dir("none"), &[ENOENT], "none");
    dir.remove_file("d/f").unwrap();
    dir.remove_dir("d").unwrap();
    dir.remove_file("f").unwrap();
    assert_eq!(dir.entries().unwrap(), []);
}

fn locks_exclude(scene: &Scene<'_>) {
    let free = |kind| scene.dir.try_lock("lock", kind, false).unwrap().is_some();
    assert_errno(scene.dir.try_lock("lock", LockKind::Exclusive, false), &[ENOENT], "lock");
    let held = scene.dir.try_lock("lock", LockKind::Exclusive, true).unwrap().unwrap();
    assert!(!free(LockKind::Exclusive));
    assert!(!free(LockKind::Shared));
    assert!(scene.dir.try_lock("other", LockKind::Exclusive, true).unwrap().is_some());
    drop(held);
    let first = scene.dir.try_lock("lock", LockKind::Shared, false).unwrap().unwrap();
    let second = scene.dir.try_lock("lock", LockKind::Shared, true).unwrap().unwrap();
    assert!(!free(LockKind::Exclusive));
    drop(first);
    assert!(!free(LockKind::Exclusive), "the other reader still holds it");
    drop(second);
    assert!(free(LockKind::Exclusive));
    assert_eq!(scene.names(), ["lock", "other"]);
}

fn locks_end_with_their_holder(scene: &Scene<'_>) {
    let held = scene.dir.try_lock("lock", LockKind::Exclusive, true).unwrap().unwrap();
    // Opening, reading and closing the file elsewhere releases nothing (as it would with POSIX
    // record locks).
    scene.dir.read_file("lock", 10).unwrap();
    drop(scene.dir.open_file("lock").unwrap());
    drop(scene.dir.try_lock("lock", LockKind::Shared, false).unwrap());
    assert!(scene.dir.try_lock("lock", LockKind::Exclusive, false).unwrap().is_none());
    // The lock is on the file, not on its name.
    scene.dir.rename("lock", "moved", Rename::NoReplace).unwrap();
    assert_eq!(held.id().unwrap(), scene.dir.stat("moved").unwrap().unwrap().id);
    assert!(scene.dir.try_lock("moved", LockKind::Exclusive, false).unwrap().is_none());
    assert!(scene.dir.try_lock("lock", LockKind::Exclusive, true).unwrap().is_some());
    std::thread::scope(|threads| {
        threads.spawn(move || drop(held));
    });
    assert!(scene.dir.try_lock("moved", LockKind::Exclusive, false).unwrap().is_some());
}

fn directories_sync(scene: &Scene<'_>) {
    let dir = scene.dir.create_dir("d").unwrap();
    dir.write_file("f", b"1").unwrap();
    dir.sync().unwrap();
    scene.dir.sync().unwrap();
    assert!(scene.dir.free_bytes().unwrap() > 0);
    let from_path: std::sync::Arc<dyn Dir> = scene.disk.open_dir(&scene.path.join("d")).unwrap();
    assert_eq!(from_path.id().unwrap(), dir.id().unwrap());
}
