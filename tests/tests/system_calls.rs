//! Killed, or fed an errno, at every system call of saves with retention: nothing is torn, no
//! committed step is lost, every error is told as what it is.
//!
//! The subject is a real process on a real file system, through every engine; `strace` injects. By
//! default, kills happen at every call that changes the disk (a kill before another call equals a
//! kill before the next of these), and errors at a sample of all calls (another one with
//! `STEPWELL_SEED=n`). `STEPWELL_LONG=1` covers every call. Without a tracer, the sweeps print
//! SKIPPED and the reason.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use stepwell_core::io::simulated::mix;
use stepwell_core::sys::testing::absent;
use stepwell_tests::real::look::copy_tree;
use stepwell_tests::real::tracing::{self, Ran, Subject};
use stepwell_tests::real::trials;

const ENGINES: [&str; 3] = ["uring", "threads", "buffered"];
const STEPS: u64 = 4;
const FIRST: u64 = 10;
const WORKERS: usize = 2;

const ERRNOS: [(&str, i32); 8] = [
    ("ENOSPC", 28),
    ("EIO", 5),
    ("EDQUOT", 122),
    ("EINTR", 4),
    ("EAGAIN", 11),
    ("EMFILE", 24),
    ("ENOMEM", 12),
    ("EROFS", 30),
];

/// Calls that an error is injected into: all that work on files, rings or threads. Not those of the
/// memory allocator, whose refusal ends any program, nor `close`, whose errors nobody can act on.
const FALLIBLE: [&str; 40] = [
    "open",
    "openat",
    "openat2",
    "mkdir",
    "mkdirat",
    "fallocate",
    "pwrite64",
    "pwritev",
    "pwritev2",
    "write",
    "writev",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "fsync",
    "fdatasync",
    "sync_file_range",
    "fadvise64",
    "rename",
    "renameat",
    "renameat2",
    "unlink",
    "unlinkat",
    "rmdir",
    "ftruncate",
    "getdents64",
    "statx",
    "stat",
    "newfstatat",
    "fstat",
    "statfs",
    "fstatfs",
    "fcntl",
    "lseek",
    "pread64",
    "preadv",
    "read",
    "clone3",
    "memfd_create",
    "flock",
];

/// Calls that change what is on the disk: a kill before any other is a kill before the next of
/// these.
const CHANGING: [&str; 15] = [
    "openat2",
    "mkdir",
    "mkdirat",
    "fallocate",
    "pwrite64",
    "write",
    "io_uring_enter",
    "fsync",
    "sync_file_range",
    "rename",
    "renameat",
    "renameat2",
    "unlinkat",
    "rmdir",
    "ftruncate",
];

fn long() -> bool {
    std::env::var_os("STEPWELL_LONG").is_some()
}

/// A directory on the disk of the project, not on a tmpfs: that has no direct I/O.
fn scratch() -> tempfile::TempDir {
    let at = std::env::var_os("STEPWELL_TEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    tempfile::Builder::new().prefix("system-calls-").tempdir_in(at).unwrap()
}

fn subject(scratch: &Path, engine: &'static str) -> Subject {
    Subject { program: PathBuf::from(env!("CARGO_BIN_EXE_saver")), engine, scratch: scratch.to_owned() }
}

/// The subject of a sweep; `None`, and said, where there can be none.
fn traced(scratch: &Path, engine: &'static str) -> Option<Subject> {
    let subject = subject(scratch, engine);
    match tracing::unavailable(&subject) {
        None => Some(subject),
        Some(reason) => {
            absent("strace", &reason);
            None
        }
    }
}

/// Every (system call, n) of an undisturbed run on a root that holds a step.
fn points(subject: &Subject, template: &Path) -> Vec<(String, u64)> {
    let root = subject.scratch.join(format!("{}-counted", subject.engine));
    copy_tree(template, &root).unwrap();
    let ran = tracing::run(subject, &root, FIRST, STEPS, &[]).unwrap();
    assert_eq!(ran.lines.last().unwrap(), "closed", "{ran:?}");
    std::fs::remove_dir_all(&root).unwrap();
    let calls = tracing::calls(&ran);
    for needed in ["fsync", "renameat2", "unlinkat", "openat2"] {
        assert!(calls.contains_key(needed), "the trace shows no {needed}: {calls:?}");
    }
    calls.into_iter().flat_map(|(call, count)| (1..=count).map(move |n| (call.clone(), n))).collect()
}

/// A root that holds step 1.
fn template(scratch: &Path) -> PathBuf {
    let root = scratch.join("template");
    trials::check(&root, &[]).unwrap();
    let done = Command::new(env!("CARGO_BIN_EXE_saver")).arg(&root).args(["1", "1"]).output().unwrap();
    assert!(String::from_utf8_lossy(&done.stdout).contains("committed 1"), "{done:?}");
    root
}

/// Runs `work` on each of the cases, several at a time.
fn each<T: Sync>(cases: &[T], work: impl Fn(usize, &T) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(case) = cases.get(number) else { return };
                    work(number, case);
                }
            });
        }
    });
}

/// `cases`, or about `most` of them: the same on every run, but where `STEPWELL_SEED` says
/// otherwise.
fn sampled<T>(cases: Vec<T>, most: usize) -> Vec<T> {
    let all = cases.len();
    if long() || all <= most {
        return cases;
    }
    let seed = std::env::var("STEPWELL_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(11);
    let drawn = |at: usize| mix(at as u64, seed) % all as u64 <= most as u64;
    cases.into_iter().enumerate().filter(|(at, _)| drawn(*at)).map(|(_, case)| case).collect()
}

fn sweep_kills(engine: &'static str) {
    let scratch = scratch();
    let Some(subject) = traced(scratch.path(), engine) else { return };
    let template = template(scratch.path());
    let mut swept = points(&subject, &template);
    let all = swept.len();
    if !long() {
        swept.retain(|(call, _)| CHANGING.contains(&call.as_str()));
    }
    let killed = AtomicUsize::new(0);
    let begun = Instant::now();
    each(&swept, |number, (call, n)| {
        let root = scratch.path().join(format!("{engine}-kill-{number}"));
        copy_tree(&template, &root).unwrap();
        let inject = format!("inject={call}:signal=SIGKILL:when={n}");
        let ran =
            tracing::run(&subject, &root, FIRST, STEPS, &["-e", &format!("trace={call}"), "-e", &inject]);
        let ran = ran.unwrap_or_else(|error| panic!("killed at {call} number {n}: {error}"));
        killed.fetch_add(usize::from(!ran.succeeded), Ordering::Relaxed);
        let acknowledged = [vec![1], ran.committed()].concat();
        if let Err(what) = trials::check(&root, &acknowledged) {
            panic!("killed at {call} number {n} ({engine}): {what}\n{:?}\n{}", ran.lines, listing(&root));
        }
        std::fs::remove_dir_all(&root).unwrap();
    });
    let killed = killed.into_inner();
    println!(
        "{engine}: killed at {killed} of {} system calls ({all} with those that change nothing) in {:.0?}: nothing torn, nothing lost, nothing left",
        swept.len(),
        begun.elapsed()
    );
    assert!(killed * 10 >= swept.len() * 8, "{killed} of {}", swept.len());
}

fn listing(root: &Path) -> String {
    let out = Command::new("ls").args(["-laR"]).arg(root).output();
    out.map(|out| String::from_utf8_lossy(&out.stdout).into_owned()).unwrap_or_default()
}

#[test]
fn kills_at_any_system_call_tear_nothing_with_io_uring() {
    sweep_kills("uring");
}

#[test]
fn kills_at_any_system_call_tear_nothing_with_threads() {
    sweep_kills("threads");
}

#[test]
fn kills_at_any_system_call_tear_nothing_with_buffers() {
    sweep_kills("buffered");
}

/// Checks the output of a run with one injected errno.
fn judge(ran: &Ran, call: &str, errno: i32) -> Result<(), String> {
    if !ran.succeeded {
        return Err("it did not end by itself".to_owned());
    }
    if ran.errors.contains("panicked") {
        return Err("it panicked".to_owned());
    }
    let mut accidents = 0;
    for line in &ran.lines {
        let words: Vec<&str> = line.split(' ').collect();
        let error = match words[..] {
            ["committed", _] | ["closed"] => continue,
            ["open" | "close", "failed", kind, code] => (kind, code),
            ["failed" | "uncertain", _, kind, code] => {
                accidents += 1;
                (kind, code)
            }
            _ => return Err(format!("it said `{line}`")),
        };
        let told = error.1 == errno.to_string();
        // A lock that answers EAGAIN is held by someone, as far as anyone can know.
        let locked = error.0 == "locked" && errno == 11;
        // The C library says EAGAIN of every thread that could not be started for want of memory.
        let thread = call.starts_with("clone") && errno == 12 && error.1 == "11";
        if !told && !locked && !thread {
            return Err(format!("`{line}`: the errno was lost"));
        }
    }
    if accidents > ran.injected.len() {
        return Err(format!("{accidents} saves failed for {} errors", ran.injected.len()));
    }
    Ok(())
}

fn sweep_errnos(engine: &'static str, most: usize) {
    let scratch = scratch();
    let Some(subject) = traced(scratch.path(), engine) else { return };
    let template = template(scratch.path());
    let mut points = points(&subject, &template);
    points.retain(|(call, _)| FALLIBLE.contains(&call.as_str()));
    let all: Vec<(String, u64, &str, i32)> = points
        .iter()
        .flat_map(|(call, n)| ERRNOS.map(|(name, errno)| (call.clone(), *n, name, errno)))
        .collect();
    let everything = all.len();
    let cases = sampled(all, most);
    let outcomes: Mutex<BTreeMap<String, u64>> = Mutex::default();
    let failures: Mutex<Vec<String>> = Mutex::default();
    let (reached, doubled) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let begun = Instant::now();
    each(&cases, |number, (call, n, name, errno)| {
        let root = scratch.path().join(format!("{engine}-errno-{number}"));
        copy_tree(&template, &root).unwrap();
        let inject = format!("inject={call}:error={name}:when={n}");
        let ran =
            tracing::run(&subject, &root, FIRST, STEPS, &["-e", &format!("trace={call}"), "-e", &inject]);
        let answer = ran.and_then(|ran| {
            reached.fetch_add(usize::from(!ran.injected.is_empty()), Ordering::Relaxed);
            doubled.fetch_add(usize::from(ran.injected.len() > 1), Ordering::Relaxed);
            let told =
                |what: String| format!("{what}\n{:#?}\n{:#?}\n{}", ran.lines, ran.injected, ran.errors);
            for line in &ran.lines {
                let kind: Vec<&str> = line.split(' ').filter(|word| word.parse::<i64>().is_err()).collect();
                *outcomes.lock().unwrap().entry(kind.join(" ")).or_default() += 1;
            }
            judge(&ran, call, *errno).map_err(told)?;
            let acknowledged = [vec![1], ran.committed()].concat();
            // The process lives: exactly the newest two that it acknowledged are there, whatever
            // else is.
            for step in acknowledged.iter().rev().take(2) {
                if !root.join(format!("step_{step:08}")).exists() {
                    return Err(told(format!("step {step} is lost")));
                }
            }
            let left = trials::leftovers(&root, &[".tmp-", ".stepwell-probe"])?;
            // A second error may have hit the cleaning up.
            if !left.is_empty() && ran.injected.len() <= 1 && !ran.lines[0].starts_with("open failed") {
                return Err(told(format!("left behind: {left:?}")));
            }
            trials::check(&root, &acknowledged).map_err(told)
        });
        if let Err(what) = answer {
            failures
                .lock()
                .unwrap()
                .push(format!("{call} number {n} failing with {name} ({engine}): {what}"));
        }
        std::fs::remove_dir_all(&root).unwrap();
    });
    let failures = failures.into_inner().unwrap();
    println!(
        "{engine}: {} of {everything} injections ({} system calls × {} errnos), {reached:?} reached, {doubled:?} in more than one thread, in {:.0?}; what the program said: {:?}",
        cases.len(),
        points.len(),
        ERRNOS.len(),
        begun.elapsed(),
        outcomes.into_inner().unwrap()
    );
    assert!(failures.is_empty(), "{} injections went wrong:\n{}", failures.len(), failures.join("\n\n"));
    assert!(reached.into_inner() * 10 >= cases.len() * 8);
}

#[test]
fn any_errno_is_a_typed_error_with_io_uring() {
    sweep_errnos("uring", 400);
}

#[test]
fn any_errno_is_a_typed_error_with_threads() {
    sweep_errnos("threads", 200);
}

#[test]
fn any_errno_is_a_typed_error_with_buffers() {
    sweep_errnos("buffered", 200);
}

#[test]
fn a_randomly_killed_process_continues_from_its_commits() {
    let scratch = scratch();
    let kills = if long() { 10_000 } else { 1_000 };
    let roots: Vec<u64> = (0..WORKERS as u64).collect();
    let (committed, deepest) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let begun = Instant::now();
    each(&roots, |_, &seed| {
        let root = scratch.path().join(format!("random-{seed}"));
        let (mut first, mut newest) = (1, 0);
        // How late a kill may come, at most: a slow machine needs longer to commit anything.
        let mut latest_kill = 28_000;
        for kill in 0..kills / WORKERS as u64 {
            let engine = ENGINES[(kill % 3) as usize];
            let mut process = Command::new(env!("CARGO_BIN_EXE_saver"))
                .arg(&root)
                .args([first.to_string(), "1000".to_owned()])
                .env("STEPWELL_ENGINE", engine)
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            std::thread::sleep(Duration::from_micros(2_000 + mix(seed, kill) % latest_kill));
            process.kill().unwrap();
            process.wait().unwrap();
            let mut output = String::new();
            process.stdout.take().unwrap().read_to_string(&mut output).unwrap();
            let acknowledged: Vec<u64> = output
                .split_inclusive('\n')
                .filter(|line| line.ends_with('\n'))
                .map(|line| match line.trim_end().split_once(' ') {
                    Some(("committed", step)) => step.parse().unwrap(),
                    _ => panic!("killed, it said {line:?}"),
                })
                .collect();
            committed.fetch_add(acknowledged.len(), Ordering::Relaxed);
            latest_kill = if acknowledged.is_empty() {
                (latest_kill + latest_kill / 16).min(2_000_000)
            } else {
                (latest_kill - latest_kill / 8).max(28_000)
            };
            deepest.fetch_max(acknowledged.len(), Ordering::Relaxed);
            newest = acknowledged.last().copied().unwrap_or(newest);
            if !root.exists() {
                assert_eq!(newest, 0);
                continue;
            }
            let environment = stepwell_tests::real::look::environment(&root).unwrap();
            let options = stepwell_manager::Options { read_only: true, ..trials::options() };
            let manager = stepwell_manager::Manager::open(&root, options, environment).unwrap();
            let latest = manager.latest_step().unwrap();
            assert!(
                latest.unwrap_or(0) >= newest,
                "kill {kill}: {newest} was acknowledged, {latest:?} is the latest"
            );
            assert_eq!(manager.quarantined().unwrap(), []);
            for step in manager.all_steps().unwrap() {
                trials::is_whole(&manager.checkpoint(Some(step)).unwrap()).unwrap();
            }
            first = latest.unwrap_or(0) + 1;
        }
        trials::check(&root, &[newest]).unwrap();
    });
    println!(
        "{kills} kills at random moments, {committed:?} acknowledged steps (up to {deepest:?} between two kills), in {:.0?}: nothing torn, nothing lost",
        begun.elapsed()
    );
    assert!(committed.into_inner() > 100);
}
