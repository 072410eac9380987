//! Ranks that meet in a directory: what one meeting has written is its own, stays as long as
//! somebody may read it, and then goes.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use stepwell_core::io::{Dir, Disk};
use stepwell_manager::coordination::shared_directory::{Membership, SharedDirectory};
use stepwell_manager::coordination::{Coordinator, Message, SingleProcess};
use stepwell_manager::{Environment, Error, Manager, Options, Result, SaveRequest};

use crate::common;
use crate::job::{Job, committed, open, options, whole};

const OTHER_ROOT: &str = "/other";
const MEETINGS: &str = "/meetings";
const RANKS: u32 = 3;

/// A rank of a job that meets in a directory.
struct Rank<'a> {
    job: &'a Job,
    number: u32,
    together: &'a Barrier,
}

impl Rank<'_> {
    fn meet(&self, patience: Duration) -> Result<SharedDirectory> {
        let rng = self.job.environment(SingleProcess).rng;
        let membership = Membership { rank: self.number, world_size: RANKS, job_id: "j".to_owned() };
        SharedDirectory::meet(&meetings(self.job), membership, &*rng, patience)
    }

    fn environment(&self) -> Environment {
        self.job.environment(self.meet(common::LONG).unwrap())
    }

    fn open(&self) -> Manager {
        open(self.environment(), options()).unwrap()
    }
}

fn meetings(job: &Job) -> Arc<dyn Dir> {
    job.disk.create_dir_all(Path::new(MEETINGS)).unwrap()
}

/// Names in the directory in which they meet, and in that of the job.
fn left(job: &Job) -> Vec<String> {
    let dir = meetings(job);
    let mut names = Vec::new();
    for entry in dir.entries().unwrap() {
        let inside = dir.open_dir(&entry.name).unwrap().entries().unwrap();
        names.extend(inside.into_iter().map(|inner| format!("{}/{}", entry.name, inner.name)));
        names.push(entry.name);
    }
    names
}

/// Runs one function per rank, each on a thread of its own.
fn run<T: Send>(job: &Job, rank: impl Fn(Rank<'_>) -> T + Sync) -> Vec<T> {
    let together = &Barrier::new(RANKS as usize);
    std::thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> =
            (0..RANKS).map(|number| scope.spawn(move || rank(Rank { job, number, together }))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_dropped_manager_takes_nothing_from_the_next() {
    let job = Job::new();
    run(&job, |rank| {
        let mut old = rank.open();
        for step in 1..4 {
            committed(&old.save(SaveRequest::new(step, whole(step))).unwrap());
            old.close(None).unwrap();
            let new = rank.open();
            rank.together.wait();
            old = new;
            rank.together.wait();
            assert_eq!(old.latest_step().unwrap(), Some(step));
        }
        old.close(None).unwrap();
    });
    assert_eq!(left(&job), [""; 0]);
}

#[test]
fn open_managers_of_one_job_do_not_hear_each_other() {
    let job = Job::new();
    run(&job, |rank| {
        let one = rank.open();
        committed(&one.save(SaveRequest::new(1, whole(1))).unwrap());
        let other = || Manager::open(Path::new(OTHER_ROOT), options(), rank.environment()).unwrap();
        // An answer of the leader that the others have not heard when the next manager is opened.
        let before = (rank.number == 0).then(|| one.latest_step().unwrap());
        let two = other();
        assert_eq!(before.unwrap_or_else(|| one.latest_step().unwrap()), Some(1));
        committed(&two.save(SaveRequest::new(7, whole(7))).unwrap());
        committed(&one.save(SaveRequest::new(2, whole(2))).unwrap());
        assert_eq!((one.latest_step().unwrap(), two.latest_step().unwrap()), (Some(2), Some(7)));
        two.close(None).unwrap();
        drop(two);
        rank.together.wait();
        assert_eq!(one.latest_step().unwrap(), Some(2));
        let two = other();
        one.close(None).unwrap();
        drop(one);
        rank.together.wait();
        assert_eq!(two.latest_step().unwrap(), Some(7));
        two.close(None).unwrap();
    });
    assert_eq!(left(&job), [""; 0]);
}

/// A rank that looks for the leader's answer when the leader has ended.
struct Late {
    board: SharedDirectory,
    ended: Arc<Barrier>,
    has_waited: AtomicBool,
}

impl Coordinator for Late {
    fn rank(&self) -> u32 {
        self.board.rank()
    }

    fn world_size(&self) -> u32 {
        self.board.world_size()
    }

    fn namespace(&self) -> String {
        self.board.namespace()
    }

    fn put(&self, key: &str, message: &[u8]) -> Result<()> {
        self.board.put(key, message)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Message>> {
        if key.ends_with("/welcome") && !self.has_waited.swap(true, Ordering::SeqCst) {
            self.ended.wait();
        }
        self.board.get(key, timeout)
    }

    fn remove(&self, key: &str) -> Result<()> {
        self.board.remove(key)
    }
}

#[test]
fn a_failed_open_of_the_leader_is_heard_afterwards() {
    for (is_locked, is_killed) in [(true, false), (false, false), (true, true)] {
        let job = Job::new();
        let _writer = is_locked.then(|| open(job.environment(SingleProcess), options()).unwrap());
        let ended = &Arc::new(Barrier::new(RANKS as usize));
        run(&job, |rank| {
            let board = rank.meet(common::LONG).unwrap();
            let error = if rank.number == 0 {
                let environment = job.environment(board);
                if is_killed {
                    // Leaks the coordinator, as a killed process would.
                    std::mem::forget(Arc::clone(&environment.coordinator));
                }
                let error = open(environment, options()).err();
                ended.wait();
                error
            } else {
                // Or one that does not mean the same.
                let max_pending = if is_locked { 1 } else { 1 + rank.number as usize };
                let late = Late { board, ended: Arc::clone(ended), has_waited: AtomicBool::new(false) };
                open(job.environment(late), Options { max_pending, ..options() }).err()
            };
            let error = error.unwrap_or_else(|| panic!("rank {} has opened it", rank.number));
            let kind = if is_locked { "locked" } else { "invalid" };
            assert_eq!(error.kind(), kind, "rank {}: {error}", rank.number);
        });
        assert_eq!(left(&job).is_empty(), !is_killed, "{:?}", left(&job));
    }
}

#[test]
fn leftovers_of_killed_ranks_go() {
    let job = Job::new();
    let dir = meetings(&job).create_dir("ranks-j").unwrap();
    let dead = "00000000000000000000000000000bad";
    dir.create_dir(dead).unwrap().write_file("0-welcome", b"not for these").unwrap();
    for name in
        ["hello-0", "hello-1", "hello-7", "meeting", &format!("seen-{dead}-1"), "met-of-another-version"]
    {
        dir.write_file(name, b"torn").unwrap();
    }
    run(&job, |rank| {
        let manager = rank.open();
        rank.together.wait();
        assert_eq!(manager.latest_step().unwrap(), None);
        let there = left(&job);
        assert!(there.iter().all(|name| !name.contains("hello") && !name.contains("bad")), "{there:?}");
        rank.together.wait();
        manager.close(None).unwrap();
    });
    assert_eq!(left(&job), [""; 0]);
}

#[test]
fn a_failed_meeting_names_the_absent_and_leaves_nothing() {
    let job = Job::new();
    let missing = run(&job, |rank| match rank.number {
        2 => Vec::new(),
        _ => match rank.meet(Duration::from_millis(300)) {
            Err(Error::CoordinationTimeout { missing, .. }) => missing,
            other => panic!("{:?}", other.err()),
        },
    });
    assert_eq!(missing, [vec![2], vec![0], vec![]]);
    assert_eq!(left(&job), [""; 0]);
}

#[test]
fn simultaneous_puts_of_one_message_all_succeed() {
    let job = Job::new();
    run(&job, |rank| {
        let board = rank.meet(common::LONG).unwrap();
        let mut failed = Vec::new();
        for _ in 0..200 {
            rank.together.wait();
            failed.extend(board.put("signal", b"").err());
        }
        rank.together.wait();
        assert!(failed.is_empty(), "{failed:?}");
        assert_eq!(board.get("signal", Duration::ZERO).unwrap(), Some(Message::new()));
    });
}
