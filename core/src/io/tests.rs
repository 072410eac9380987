//! The real engines, on this machine: every promise, every fallback, forks.
//!
//! Tests that change their process (forbidden system calls, limits, forks) run themselves again in
//! one of their own.

pub(super) mod conformance;

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::Error;
use crate::sys::testing::{absent, fork, refuse_syscall};

/// On the file system of the sources, which is a disk where the system's temporary directory may be
/// memory.
fn tempdir() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap()
}

const ENGINES: [(Engine, &str); 3] =
    [(Engine::Uring, "io_uring"), (Engine::Threads, "threads"), (Engine::Buffered, "buffered")];

/// The engine itself, not a fallback; `None` (with a word) where this machine has none.
fn engine(dir: &Path, wanted: Engine, name: &str) -> Option<Arc<dyn Disk>> {
    let disk = open_disk(dir, wanted).unwrap();
    if disk.choice().engine != name {
        let subject = if wanted == Engine::Uring { "uring" } else { "direct" };
        absent(subject, &format!("{name}: {:?}", disk.choice().reasons));
        return None;
    }
    Some(disk)
}

fn conforms(wanted: Engine, name: &str) {
    let dir = tempdir();
    if let Some(disk) = engine(dir.path(), wanted, name) {
        conformance::run(disk.as_ref(), &dir.path().join("not/yet"));
    }
}

#[test]
fn io_uring_keeps_every_promise() {
    conforms(Engine::Uring, "io_uring");
}

#[test]
fn threads_keep_every_promise() {
    conforms(Engine::Threads, "threads");
}

#[test]
fn the_page_cache_engine_keeps_every_promise() {
    conforms(Engine::Buffered, "buffered");
}

#[test]
fn every_engine_keeps_every_promise_in_memory_file_systems() {
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
        return absent("shm", &"no /dev/shm");
    };
    for (wanted, _) in ENGINES {
        conformance::run(open_disk(dir.path(), wanted).unwrap().as_ref(), &dir.path().join("root"));
    }
}

/// Writes a file in odd portions and order, with an unaligned end.
fn write_sample(disk: &dyn Disk, dir: &Path) {
    let file = disk.open_dir(dir).unwrap().create_file("f", 3 << 20).unwrap();
    let mut queue = disk.queue(4).unwrap();
    for (i, blocks) in [(0_u64, 200), (500, 17), (200, 300), (517, 1)] {
        let mut buffer = Buffer::alone(blocks * 4096).unwrap();
        buffer.iter_mut().enumerate().for_each(|(at, byte)| *byte = ((at as u64 + i) % 251) as u8);
        queue.submit(Transfer::Write, &file, i * 4096, blocks * 4096, buffer, i);
    }
    while let Some(done) = queue.complete(Duration::from_secs(60)) {
        done.result.unwrap();
    }
    file.set_len(518 * 4096 - 1234).unwrap();
    file.sync().unwrap();
}

#[test]
fn every_engine_writes_the_same_bytes() {
    let mut files = Vec::new();
    for (wanted, name) in ENGINES {
        let dir = tempdir();
        if let Some(disk) = engine(dir.path(), wanted, name) {
            write_sample(disk.as_ref(), dir.path());
            files.push(std::fs::read(dir.path().join("f")).unwrap());
        }
    }
    assert_eq!(files[0].len(), 518 * 4096 - 1234);
    assert!(files.len() > 1 && files.iter().all(|file| *file == files[0]));
}

#[test]
fn no_call_follows_a_symlink_or_waits_for_a_pipe() {
    let dir = tempdir();
    std::fs::write(dir.path().join("secret"), "s").unwrap();
    let inner = dir.path().join("inner");
    std::fs::create_dir(&inner).unwrap();
    for (link, target) in [("up", ".."), ("file", "../secret"), ("dangling", "../made")] {
        std::os::unix::fs::symlink(target, inner.join(link)).unwrap();
    }
    assert!(Command::new("mkfifo").arg(inner.join("pipe")).status().unwrap().success());
    for (wanted, _) in ENGINES {
        let disk = open_disk(dir.path(), wanted).unwrap();
        let dir = disk.open_dir(&inner).unwrap();
        assert!(dir.open_dir("up").is_err());
        for name in ["up/secret", "file", "dangling", "pipe"] {
            assert!(dir.open_file(name).is_err(), "{name}");
            assert!(dir.read_file(name, 100).is_err(), "{name}");
            assert!(dir.create_file(name, 0).is_err(), "{name}");
            assert!(dir.write_file(name, b"x").is_err(), "{name}");
        }
        assert!(dir.try_lock("dangling", LockKind::Exclusive, true).is_err());
        assert!(dir.rename("pipe", "up/out", Rename::NoReplace).is_err());
        assert!(dir.remove_file("up/secret").is_err());
        assert_eq!(dir.stat("file").unwrap().unwrap().kind, EntryKind::Other);
        assert!(dir.entries().unwrap().iter().all(|entry| entry.kind == EntryKind::Other));
    }
    assert!(!dir.path().join("made").exists());
    assert_eq!(std::fs::read(dir.path().join("secret")).unwrap(), b"s");
}

#[test]
fn a_probe_leaves_nothing_behind() {
    let dir = tempdir();
    let there = open_disk(dir.path(), Engine::Auto).unwrap();
    let not_yet = open_disk(&dir.path().join("a/b"), Engine::Auto).unwrap();
    assert_eq!(there.choice(), not_yet.choice());
    assert!(!there.choice().reasons.is_empty());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    let on_a_file = dir.path().join("f");
    std::fs::write(&on_a_file, "").unwrap();
    assert!(open_disk(&on_a_file.join("x"), Engine::Auto).is_err());
}

#[test]
fn a_file_that_cannot_be_had_leaves_nothing() {
    // More than the whole file system is refused at once in memory; a disk would first be filled to
    // the brim.
    let full = tempfile::tempdir_in("/dev/shm").ok().map(|dir| (dir, 1 << 50, libc::ENOSPC));
    for (dir, len, errno) in full.into_iter().chain([(tempdir(), 1 << 62, libc::EFBIG)]) {
        for (wanted, _) in ENGINES {
            let open = open_disk(dir.path(), wanted).unwrap().open_dir(dir.path()).unwrap();
            let error = open.create_file("f", len).err().unwrap();
            assert_eq!(error.errno(), Some(errno), "{error}");
            assert!(error.file().unwrap().ends_with("f"));
            assert!(open.stat("f").unwrap().is_none(), "half a file was left");
        }
    }
}

// ---- tests in processes of their own ----

/// Runs one of the ignored tests below in a new process, perhaps as another user, and returns its
/// output. Panics where it fails.
fn run_alone(test: &str, argument: &str, user: Option<u32>) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([&format!("io::tests::{test}"), "--exact", "--ignored", "--nocapture"]);
    command.env("STEPWELL_TEST_ARGUMENT", argument).env_remove(probe::ENGINE_VARIABLE);
    if let Some(user) = user {
        command.uid(user).gid(user);
    }
    let output = command.output().unwrap();
    let text =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success() && text.contains("1 passed"), "{test} {argument}: {text}");
    text
}

fn argument() -> Vec<String> {
    let all = std::env::var("STEPWELL_TEST_ARGUMENT").unwrap();
    all.split(' ').map(str::to_owned).collect()
}

/// A forbidden system call, the engine that is left, and what the reasons must say of it.
#[test]
fn what_a_sandbox_forbids_is_done_without_and_explained() {
    if engine(tempdir().path(), Engine::Auto, "io_uring").is_none() {
        return;
    }
    let cases = [
        (libc::SYS_io_uring_setup, libc::EPERM, "threads", "seccomp"),
        (libc::SYS_io_uring_setup, libc::ENOSYS, "threads", "kernel"),
        (libc::SYS_io_uring_setup, libc::ENOMEM, "threads", "ulimit -l"),
        (libc::SYS_io_uring_enter, libc::EPERM, "threads", "io_uring_enter"),
        (libc::SYS_io_uring_register, libc::EPERM, "io_uring unregistered", "io_uring_register"),
        (libc::SYS_io_uring_register, libc::ENOMEM, "io_uring unregistered", "ulimit -l"),
        (libc::SYS_openat2, libc::ENOSYS, "io_uring", ""),
        (libc::SYS_openat2, libc::EPERM, "io_uring", ""),
        (libc::SYS_renameat2, libc::ENOSYS, "io_uring", ""),
        (libc::SYS_renameat2, libc::EINVAL, "io_uring", ""),
        (libc::SYS_fallocate, libc::EOPNOTSUPP, "io_uring", ""),
        (libc::SYS_statx, libc::ENOSYS, "io_uring", "assumed"),
        (451, libc::ENOSYS, "io_uring", ""), // cachestat
        (libc::SYS_sync_file_range, libc::ENOSYS, "buffered", ""),
    ];
    std::thread::scope(|threads| {
        for cases in cases.chunks(4) {
            threads.spawn(move || {
                for (call, errno, left, said) in cases {
                    let dir = tempdir();
                    let argument = format!("{} {call} {errno} {left}", dir.path().display());
                    let output = run_alone("conformance_without_a_system_call", &argument, None);
                    assert!(output.contains(said), "{argument}: {said} is not in {output}");
                }
            });
        }
    });
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn conformance_without_a_system_call() {
    let argument = argument();
    let [dir, call, errno, left @ ..] = argument.as_slice() else { panic!("{argument:?}") };
    refuse_syscall(call.parse().unwrap(), errno.parse().unwrap()).unwrap();
    let wanted = if left[0] == "buffered" { Engine::Buffered } else { Engine::Auto };
    let disk = open_disk(Path::new(dir), wanted).unwrap();
    println!("{:?}", disk.choice());
    assert_eq!(disk.choice().engine, left[0]);
    assert_eq!(disk.choice().registered, left[0] == "io_uring" && left.get(1).is_none());
    conformance::run(disk.as_ref(), &Path::new(dir).join("root"));
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn conformance_without_rings_after_the_probe() {
    let dir = tempdir();
    let disk = open_disk(dir.path(), Engine::Uring).unwrap();
    refuse_syscall(libc::SYS_io_uring_setup, libc::EPERM).unwrap();
    conformance::run(disk.as_ref(), &dir.path().join("root"));
}

#[test]
fn a_ring_that_is_forbidden_later_is_replaced_by_threads() {
    run_alone("conformance_without_rings_after_the_probe", "", None);
}

#[test]
fn a_directory_for_reading_only_is_probed_without_writing() {
    let dir = tempfile::tempdir().unwrap();
    let mode = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
    std::fs::set_permissions(dir.path(), mode(0o777)).unwrap();
    write_sample(open_disk(dir.path(), Engine::Auto).unwrap().as_ref(), dir.path());
    std::fs::set_permissions(dir.path(), mode(0o555)).unwrap();
    let user = rustix::process::geteuid().is_root().then_some(65534);
    run_alone("read_where_nothing_may_be_written", &dir.path().display().to_string(), user);
    std::fs::set_permissions(dir.path(), mode(0o777)).unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn read_where_nothing_may_be_written() {
    let path = PathBuf::from(&argument()[0]);
    let expected = std::fs::read(path.join("f")).unwrap();
    for (wanted, name) in ENGINES {
        let Some(disk) = engine(&path, wanted, name) else { continue };
        let dir = disk.open_dir(&path).unwrap();
        assert_eq!(dir.create_file("g", 0).err().and_then(|error| error.errno()), Some(libc::EACCES));
        let file = dir.open_file("f").unwrap();
        let mut queue = disk.queue(1).unwrap();
        queue.submit(Transfer::Read, &file, 0, 4 << 20, Buffer::alone(4 << 20).unwrap(), 0);
        let done = queue.complete(Duration::from_secs(60)).unwrap();
        let count = done.result.unwrap();
        assert!(done.buffer[..count] == expected, "{name}");
    }
}

#[test]
fn a_small_limit_on_locked_memory_costs_registration_only() {
    const NOBODY: u32 = 65534;
    let root = rustix::process::geteuid().is_root();
    for (limit, buffer) in [(0, 1 << 20), (64 << 10, 1 << 20), (8 << 20, 64 << 20)] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        let argument = format!("{} {limit} {buffer}", dir.path().display());
        // Root may lock as much as it likes.
        run_alone("conformance_with_little_locked_memory", &argument, root.then_some(NOBODY));
    }
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn conformance_with_little_locked_memory() {
    let argument = argument();
    let (limit, bytes): (u64, usize) = (argument[1].parse().unwrap(), argument[2].parse().unwrap());
    let lowered = rustix::process::Rlimit { current: Some(limit), maximum: Some(limit) };
    rustix::process::setrlimit(rustix::process::Resource::Memlock, lowered).unwrap();
    let disk = open_disk(Path::new(&argument[0]), Engine::Auto).unwrap();
    println!("{:?}", disk.choice());
    assert!(disk.choice().direct, "the limit has nothing to do with O_DIRECT");
    let mapping = Mapping::new(bytes).unwrap();
    if disk.choice().registered {
        assert_eq!(disk.register(&[mapping]).unwrap_err().errno(), Some(libc::ENOMEM));
    } else {
        assert!(disk.choice().reasons.iter().any(|reason| reason.contains("ulimit -l")));
    }
    conformance::run(disk.as_ref(), &PathBuf::from(&argument[0]).join("root"));
}

#[test]
fn the_environment_chooses_where_the_caller_does_not() {
    for (name, engine) in [("threads", "threads"), ("buffered", "buffered")] {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["io::tests::print_the_choice", "--exact", "--ignored", "--nocapture"]);
        let output = command.env(probe::ENGINE_VARIABLE, name).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains(&format!("engine: \"{engine}\"")), "{text}");
        assert!(text.contains("STEPWELL_ENGINE"), "{text}");
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["io::tests::print_the_choice", "--exact", "--ignored", "--nocapture"]);
    let output = command.env(probe::ENGINE_VARIABLE, "warp").output().unwrap();
    assert!(!output.status.success());
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn print_the_choice() {
    let dir = tempdir();
    println!("{:?}", open_disk(dir.path(), Engine::Auto).unwrap().choice());
    assert_eq!(open_disk(dir.path(), Engine::Buffered).unwrap().choice().engine, "buffered");
}

#[test]
fn handles_are_dead_in_a_forked_child_and_alive_in_the_parent() {
    for (_, name) in ENGINES {
        let dir = tempdir();
        run_alone("fork_with_handles", &format!("{} {name}", dir.path().display()), None);
    }
}

/// Waits for a file that the other process makes.
fn wait_for(path: &Path) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !path.exists() {
        assert!(Instant::now() < deadline, "{} did not come", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn fork_with_handles() {
    let argument = argument();
    let path = PathBuf::from(&argument[0]);
    let disk = open_disk(&path, argument[1].parse().unwrap()).unwrap();
    write_sample(disk.as_ref(), &path);
    let dir = disk.open_dir(&path).unwrap();
    let file = dir.open_file("f").unwrap();
    file.read_at(1, 10).unwrap();
    let mut lock = dir.try_lock("lock", LockKind::Exclusive, true).unwrap();
    let mut queue = disk.queue(4).unwrap();
    let in_flight = Mapping::new(4 << 20).unwrap().into_buffers(1 << 20).unwrap();
    disk.register(&[Arc::clone(in_flight[0].mapping())]).unwrap();
    let mut handles = Some((in_flight, queue.as_mut()));
    let (mut buffers, queue) = handles.take().unwrap();
    queue.submit(Transfer::Read, &file, 0, 1 << 20, buffers.pop().unwrap(), 1);

    let child = fork(|| {
        let ours = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| {
            let target = std::fs::read_link(entry.unwrap().path()).ok()?;
            let text = target.to_string_lossy().into_owned();
            (text.starts_with(&argument[0]) || text.contains("io_uring")).then_some(text)
        });
        let left: Vec<_> = ours.collect();
        assert!(left.is_empty(), "open in the child: {left:?}");
        let forked = |error: Option<Error>| matches!(error, Some(Error::Forked(_)));
        assert!(forked(disk.open_dir(&path).err()) && forked(disk.queue(1).err()));
        assert!(forked(dir.entries().err()) && forked(dir.write_file("x", b"").err()));
        assert!(forked(dir.try_lock("lock", LockKind::Shared, false).err()));
        assert!(forked(file.read_at(0, 10).err()) && forked(file.sync().err()));
        assert_eq!(queue.in_flight(), 0);
        assert!(queue.complete(Duration::from_secs(30)).is_none());
        // The parent's memory is not there; the child brings its own.
        queue.submit(Transfer::Read, &file, 0, 4096, Buffer::alone(4096).unwrap(), 9);
        let refused = queue.complete(Duration::ZERO).unwrap();
        assert!(refused.token == 9 && forked(refused.result.err()));
        // Handles of the child work, the lock is visible, and the dead handles may be dropped.
        let fresh = open_disk(&path, argument[1].parse().unwrap()).unwrap();
        let root = fresh.open_dir(&path).unwrap();
        assert!(root.try_lock("lock", LockKind::Shared, false).unwrap().is_none());
        drop((lock.take(), std::mem::take(&mut buffers)));
        assert!(root.try_lock("lock", LockKind::Shared, false).unwrap().is_none());
        std::fs::create_dir(path.join("child")).unwrap();
        conformance::run(fresh.as_ref(), &path.join("child"));
        std::fs::write(path.join("child-done"), "").unwrap();
        wait_for(&path.join("parent-done"));
        0
    })
    .unwrap();

    let child_done = path.join("child-done");
    let done = queue.complete(Duration::from_secs(30)).unwrap();
    assert_eq!((done.token, done.result.unwrap()), (1, 1 << 20), "the parent's transfer ends in the parent");
    let deadline = Instant::now() + Duration::from_secs(60);
    while !child_done.exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(dir.try_lock("lock", LockKind::Shared, false).unwrap().is_none(), "the child released the lock");
    drop(lock);
    assert!(dir.try_lock("lock", LockKind::Exclusive, false).unwrap().is_some(), "the child keeps the lock");
    assert_eq!(file.read_at(0, 4096).unwrap(), std::fs::read(path.join("f")).unwrap()[..4096]);
    std::fs::write(path.join("parent-done"), "").unwrap();
    assert_eq!(child.wait().unwrap(), 0);
}

#[test]
fn a_directory_that_cannot_be_opened_is_removed() {
    run_alone("make_a_directory_without_descriptors", "", None);
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn make_a_directory_without_descriptors() {
    let dir = tempdir();
    let disk = open_disk(dir.path(), Engine::Buffered).unwrap();
    let opened = disk.open_dir(dir.path()).unwrap();
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let next = std::os::fd::AsRawFd::as_raw_fd(&std::fs::File::open("/").unwrap()).unsigned_abs().into();
    let none = rustix::process::Rlimit { current: Some(next), ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, none).unwrap();
    let error = opened.create_dir("d").err().unwrap();
    assert_eq!(error.errno(), Some(libc::EMFILE), "{error}");
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    assert_eq!(opened.stat("d").unwrap(), None);
    opened.create_dir("d").unwrap();
}

#[test]
fn a_file_with_own_permissions_is_not_overwritten() {
    use rustix::fs::{Mode, XattrFlags};

    let base = tempdir();
    let disk = open_disk(base.path(), Engine::Buffered).unwrap();
    let dir = disk.open_dir(base.path()).unwrap();
    drop((dir.create_dir("a").unwrap(), dir.create_dir("b").unwrap()));
    let path = base.path().join("a/f");
    let make = || dir.write_file("a/f", b"before").unwrap();
    let take = || {
        let taken = dir.take_over("a/f", "b/f", 0).unwrap().is_some();
        dir.remove_file(if taken { "b/f" } else { "a/f" }).unwrap();
        taken
    };
    make();
    if !take() {
        return absent("leases", &"this file system does not report open files");
    }
    make();
    rustix::fs::chmod(&path, Mode::from_raw_mode(0o666)).unwrap();
    let loose = 0o666 == rustix::fs::stat(base.path().join("b")).unwrap().st_mode & 0o666;
    assert_eq!(take(), loose, "others could write the file of the new step");
    make();
    match rustix::fs::setxattr(&path, "user.checksum", b"of before", XattrFlags::CREATE) {
        Ok(()) => assert!(!take(), "it would speak of other bytes"),
        Err(error) => absent("attributes", &error),
    }
    make();
    if rustix::fs::chown(&path, Some(rustix::fs::Uid::from_raw(12_345)), None).is_ok() {
        assert!(!take(), "it would be another's");
    }
}
