//! Messages that are lost, late or unreadable: every wait ends, and the ranks count alike
//! afterwards.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use stepwell_core::io::simulated::{Action, Fault, OperationKind};
use stepwell_manager::coordination::testing::InProcess;
use stepwell_manager::coordination::{Coordinator, Message};
use stepwell_manager::{Error, Exists, Manager, Options, Outcome, Result, SaveRequest};

use crate::common;
use crate::common::LONG;
use crate::job::{Job, committed, failed_rank, failure, open, options, whole};

const PATIENCE: Duration = Duration::from_secs(2);
const EIO: i32 = 5;

/// The treatment of a message, the first time that it is put.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Lost,
    Refused,
    Late(Duration),
    Garbled,
}

/// A board on which something happens to one message.
struct Flawed {
    board: InProcess,
    /// How its key ends.
    message: &'static str,
    fate: Fate,
    has_happened: AtomicBool,
}

impl Coordinator for Flawed {
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
        if !key.ends_with(self.message) || self.has_happened.swap(true, Ordering::SeqCst) {
            return self.board.put(key, message);
        }
        match self.fate {
            Fate::Lost => Ok(()),
            Fate::Refused => Err(Error::Unreachable("the board is gone".into())),
            Fate::Late(time) => {
                std::thread::sleep(time);
                self.board.put(key, message)
            }
            Fate::Garbled => self.board.put(key, b"?"),
        }
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Message>> {
        self.board.get(key, timeout)
    }

    fn remove(&self, key: &str) -> Result<()> {
        self.board.remove(key)
    }

    fn node(&self) -> String {
        self.board.node()
    }
}

/// Runs one function per rank, where that happens to the message.
fn run<T: Send>(
    ranks: u32,
    per_node: u32,
    message: &'static str,
    fate: Fate,
    rank: impl Fn(u32, Manager) -> T + Sync,
) -> Vec<T> {
    let job = Job::new();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0_u32..)
            .zip(InProcess::ranks(ranks, per_node))
            .map(|(number, board)| {
                let board = Flawed { board, message, fate, has_happened: AtomicBool::new(false) };
                let environment = job.environment(board);
                let rank = &rank;
                let impatient = Options { stall_timeout: PATIENCE, ..options() };
                scope.spawn(move || rank(number, open(environment, impatient).unwrap()))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Saves these steps, and gives those that are committed. A failure that is raised by the next call
/// is looked at by nobody.
fn saved(manager: &Manager, steps: std::ops::Range<u64>) -> Vec<u64> {
    let ends = |step: &u64| {
        let save = manager.save(SaveRequest::new(*step, whole(*step)));
        matches!(save.map(|save| save.wait(Some(LONG)).unwrap()), Ok(Some(Outcome::Committed)))
    };
    steps.filter(ends).collect()
}

#[test]
fn a_lost_vote_fails_its_save_while_its_rank_lives() {
    let told = run(2, 1, "vote/1/1", Fate::Lost, |_, manager| {
        let told = saved(&manager, 1..9);
        manager.close(Some(LONG)).unwrap();
        told
    });
    assert_eq!(told[0], told[1]);
    assert!(told[0].contains(&1) && !told[0].contains(&2) && told[0].contains(&8), "{told:?}");
}

#[test]
fn a_vote_and_a_verdict_that_cannot_be_put_are_put_again() {
    for message in ["vote/1/1", "verdict/1"] {
        let told = run(2, 1, message, Fate::Refused, |_, manager| {
            let told = saved(&manager, 1..4);
            manager.close(Some(LONG)).unwrap();
            told
        });
        assert_eq!(told, [[1, 2, 3], [1, 2, 3]], "{message}");
    }
}

#[test]
fn a_step_whose_verdict_comes_too_late_is_none_that_has_failed() {
    let told = run(2, 1, "verdict/1", Fate::Late(PATIENCE * 3 / 2), |rank, manager| {
        committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
        let late = manager.save(SaveRequest::new(2, whole(2))).unwrap().wait(Some(LONG)).unwrap().unwrap();
        assert_eq!(matches!(late, Outcome::Committed), rank == 0, "{late:?}");
        let told = saved(&manager, 3..12);
        manager.close(Some(LONG)).unwrap();
        told
    });
    assert_eq!(told[0], told[1]);
    assert!(told[0].contains(&11), "{told:?}");
}

#[test]
fn an_unreadable_vote_is_reported_by_all() {
    run(4, 2, "vote/1/3", Fate::Garbled, |_, manager| {
        committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
        let error = failure(&manager.save(SaveRequest::new(2, whole(2))).unwrap());
        assert!(failed_rank(&error) == Some(3) && error.to_string().contains("cannot be read"), "{error}");
        committed(&manager.save(SaveRequest::new(3, whole(3))).unwrap());
        manager.close(Some(LONG)).unwrap();
    });
}

#[test]
fn a_report_and_an_answer_that_cannot_be_put_are_put_again() {
    for message in ["part/2/1", "call/2"] {
        run(2, 1, message, Fate::Refused, |_, manager| {
            committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
            assert!(manager.alike("x").unwrap());
            manager.close(Some(LONG)).unwrap();
        });
    }
}

#[test]
fn a_restore_that_is_left_in_one_of_its_calls_ends_on_all_ranks() {
    let left = &Barrier::new(2);
    run(2, 1, "nothing", Fate::Lost, |rank, manager| {
        committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
        if rank == 1 {
            std::thread::scope(|scope| {
                let asking = scope.spawn(|| manager.choose(None));
                std::thread::sleep(Duration::from_millis(100));
                manager.leave_restore("KeyboardInterrupt");
                left.wait();
                assert_eq!(asking.join().unwrap().unwrap(), 1);
            });
        } else {
            left.wait();
            assert_eq!(manager.choose(None).unwrap(), 1);
            let error = manager.agree("restore", Ok(())).unwrap_err();
            assert!(
                matches!(&error, Error::RankFailed { rank: 1, cause } if cause == "KeyboardInterrupt"),
                "{error}"
            );
        }
        // And between two of them.
        assert_eq!(manager.choose(None).unwrap(), 1);
        if rank == 1 {
            manager.leave_restore("KeyboardInterrupt");
        } else {
            assert_eq!(manager.agree("restore", Ok(())).unwrap_err().kind(), "rank_failed");
        }
        committed(&manager.save(SaveRequest::new(2, whole(2))).unwrap());
        manager.close(Some(LONG)).unwrap();
    });
}

#[test]
fn a_replaced_step_stays_until_the_new_one_is_certain() {
    let mut uncertain = 0;
    for skip in 0.. {
        let job = Job::new();
        let ended = job.run(2, 1, |rank, environment| {
            let manager = open(environment, options()).unwrap();
            committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
            let disk = job.disk.clone();
            if rank == 0 {
                let fault = Fault::on(OperationKind::SyncDir, Action::Fail(EIO)).at(common::ROOT);
                disk.inject(fault.after(skip).from_then_on());
            }
            let replaced = SaveRequest { exists: Exists::Replace, ..SaveRequest::new(1, whole(2)) };
            let outcome = manager.save(replaced).unwrap().wait(Some(LONG)).unwrap().unwrap();
            let _ = manager.close(Some(LONG));
            drop(manager);
            outcome
        });
        let there = |name: &str| job.disk.image().get(&format!("{}/{name}", common::ROOT)).is_some();
        match &ended[0] {
            Outcome::Committed => break,
            Outcome::NotCommitted(_) => {}
            Outcome::DurabilityUncertain(_) => {
                uncertain += 1;
                let root = job.disk.image().get(common::ROOT).cloned().unwrap();
                let names: Vec<String> =
                    root.entries().unwrap().iter().map(|(name, _)| name.to_string()).collect();
                let old =
                    names.iter().find(|name| name.starts_with(".tmp")).unwrap_or_else(|| panic!("{names:?}"));
                assert!(
                    there("step_00000001/manifest.json") && there(&format!("{old}/manifest.json")),
                    "{names:?}"
                );
            }
        }
        job.disk.clear_faults();
    }
    assert!(uncertain > 0);
}
