//! A rank raises, breaks off, is silent or gone: the save fails on all ranks with its cause, and
//! the next one works.

use std::collections::BTreeMap;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use stepwell_core::tree::Tree;
use stepwell_manager::coordination::SingleProcess;
use stepwell_manager::coordination::in_process::InProcess;
use stepwell_manager::state::Holders;
use stepwell_manager::{
    Decision, Environment, Error, Exists, LeafSource, Manager, Options, Outcome, SavePolicy, SaveRequest,
    StateSource,
};

use crate::common;
use crate::common::LONG;
use crate::job::{Job, committed, expected, failure, model_of_two, open, options, part, tensor, whole};

/// A rank that raises in a call of `save` which all have begun.
fn breaks_off(manager: &Manager, step: u64) {
    let decision = manager.decide(step, false, Exists::Error, &BTreeMap::new()).unwrap();
    assert!(matches!(decision, Decision::Save));
    // Told twice, once where it broke and once where that was caught: it counts once.
    manager.abstain(step, "KeyboardInterrupt");
    manager.abstain(step, "KeyboardInterrupt");
}

#[test]
fn a_rank_whose_save_raises_fails_the_save_of_all_and_the_next_one_works() {
    let job = Job::new();
    job.run(3, 3, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        let simple = |step: u64| {
            let mut tree = Tree::new();
            tree.push_leaf(None, None);
            StateSource {
                tree,
                leaves: vec![tensor(4, 4, step as u8, vec![part([0, 0], [4, 4], Holders::Everyone)])],
            }
        };
        committed(&manager.save(SaveRequest::new(1, simple(1))).unwrap());
        let mut broken = simple(2);
        if rank == 1 {
            broken.leaves.clear();
        }
        let saved = manager.save(SaveRequest::new(2, broken));
        if rank == 1 {
            assert!(saved.unwrap_err().to_string().contains("found 0"));
        } else {
            let error = failure(&saved.unwrap());
            assert!(
                matches!(&*error, Error::RankFailed { rank: 1, cause } if cause.contains("found 0")),
                "{error}"
            );
        }
        committed(&manager.save(SaveRequest::new(3, simple(3))).unwrap());
        manager.close(None).unwrap();
    });
    assert_eq!(job.restored(3)[0].1, expected(4, 4, 3));
}

#[test]
fn a_failure_that_one_rank_has_not_seen_is_raised_by_the_same_call_on_all() {
    let job = Job::new();
    let raised = job.run(2, 2, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        let simple = |step: u64| {
            let mut tree = Tree::new();
            tree.push_leaf(None, None);
            let mut leaf = tensor(4, 4, step as u8, vec![part([0, 0], [4, 4], Holders::Everyone)]);
            if let (LeafSource::Tensor { provider, .. }, 1, 2) = (&mut leaf, rank, step) {
                *provider = Arc::new(common::Broken);
            }
            StateSource { tree, leaves: vec![leaf] }
        };
        let mut raised = Vec::new();
        for step in 1..12 {
            match manager.save(SaveRequest::new(step, simple(step))) {
                // Rank 0 looks at everything, rank 1 at nothing.
                Ok(save) if rank == 0 => drop(save.wait(Some(LONG))),
                Ok(_) => {}
                Err(error) => raised.push((step, error.kind())),
            }
        }
        let _ = manager.close(None);
        raised
    });
    // Its own provider breaks on rank 1 within the call; the others hear of it later, all by the
    // same call.
    assert_eq!(raised[1].first().map(|(step, _)| *step), Some(2), "{raised:?}");
    let later: Vec<u64> = raised[0].iter().map(|(step, _)| *step).collect();
    let others: Vec<u64> = raised[1].iter().skip(1).map(|(step, _)| *step).collect();
    assert_eq!(later, others, "{raised:?}");
}

#[test]
fn a_rank_that_breaks_off_a_save_ends_it_for_all_at_once_and_the_next_one_works() {
    for (broken, first) in [(0, 1), (1, 1), (0, 2), (1, 2)] {
        let job = Job::new();
        // It makes no other call until they have.
        let heard = &Barrier::new(3);
        job.run(3, 3, |rank, environment| {
            let manager = open(environment, options()).unwrap();
            for step in 1..=4 {
                // In the first save the ranks wait for what each has.
                if step != first {
                    committed(&manager.save(SaveRequest::new(step, whole(step))).unwrap());
                    if rank == broken {
                        // Too late: it has taken part.
                        manager.abstain(step, "KeyboardInterrupt");
                    }
                } else if rank == broken {
                    breaks_off(&manager, step);
                    heard.wait();
                } else {
                    let error = match manager.save(SaveRequest::new(step, whole(step))) {
                        Ok(save) => failure(&save).to_string(),
                        Err(error) => error.to_string(),
                    };
                    heard.wait();
                    let named = format!("rank {broken} failed: KeyboardInterrupt");
                    assert!(error.contains(&named), "{error}");
                }
            }
            // Without a common call there is no duty to the others.
            manager.abstain(9, "a step that the policy refuses");
            committed(&manager.save(SaveRequest::new(10, whole(10))).unwrap());
            manager.close(None).unwrap();
        });
    }
}

#[test]
fn nothing_is_left_of_votes_on_saves_that_nobody_has_counted() {
    let job = Job::new();
    let ranks: Vec<Arc<InProcess>> = InProcess::ranks(4, 2).into_iter().map(Arc::new).collect();
    std::thread::scope(|scope| {
        for (rank, coordinator) in ranks.iter().enumerate() {
            let environment =
                Environment { coordinator: coordinator.clone(), ..job.environment(SingleProcess) };
            scope.spawn(move || {
                let manager = open(environment, options()).unwrap();
                committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
                // The leader does not look for what the others say; nor does the first of a node,
                // in the second one.
                for (step, breaking) in [(2, [0, 3]), (30, [2, 3])] {
                    if breaking.contains(&rank) {
                        breaks_off(&manager, step);
                    } else {
                        failure(&manager.save(SaveRequest::new(step, whole(step))).unwrap());
                    }
                    // Raised once, on all ranks, by the first call of them that comes late enough.
                    for later in 10 * step..10 * step + 8 {
                        if let Ok(save) = manager.save(SaveRequest::new(later, whole(later))) {
                            committed(&save);
                        }
                    }
                }
                manager.close(None).unwrap();
            });
        }
    });
    assert_eq!(ranks[0].left(), Vec::<String>::new());
}

#[test]
fn a_call_of_save_that_is_left_before_its_answer_takes_no_part_once_that_is_there() {
    let job = Job::new();
    let left = &Barrier::new(2);
    job.run(2, 2, |rank, environment| {
        // Only the leader knows the time.
        let save_policy = SavePolicy::EverySeconds { seconds: 0.0 };
        let manager = open(environment, Options { save_policy, ..options() }).unwrap();
        committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
        if rank == 0 {
            left.wait();
            let error = failure(&manager.save(SaveRequest::new(2, whole(2))).unwrap());
            assert!(matches!(&*error, Error::RankFailed { rank: 1, cause } if cause == "SIGINT"), "{error}");
        } else {
            std::thread::scope(|scope| {
                let asking = scope.spawn(|| manager.decide(2, false, Exists::Error, &BTreeMap::new()));
                for _ in 0..100 {
                    // At one of them the call is under way.
                    manager.abstain(2, "SIGINT");
                    std::thread::sleep(Duration::from_millis(10));
                }
                left.wait();
                assert!(matches!(asking.join().unwrap().unwrap(), Decision::Save));
            });
        }
        committed(&manager.save(SaveRequest::new(3, whole(3))).unwrap());
        manager.close(None).unwrap();
    });
}

#[test]
fn a_failure_of_a_rank_that_took_no_part_is_raised_by_the_same_call_on_all_and_once() {
    let job = Job::new();
    let over = &Barrier::new(2);
    let raised = job.run(2, 2, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
        if rank == 0 {
            breaks_off(&manager, 2);
        } else {
            let save = manager.save(SaveRequest::new(2, whole(2))).unwrap();
            while !save.is_done() {
                std::thread::yield_now(); // and nobody looks how it has ended
            }
        }
        over.wait();
        let raised: Vec<u64> =
            (3..9).filter(|&step| manager.save(SaveRequest::new(step, whole(step))).is_err()).collect();
        manager.close(None).unwrap();
        raised
    });
    assert_eq!(raised[0].len(), 1, "{raised:?}");
    assert_eq!(raised[0], raised[1]);
}

#[test]
fn who_waits_for_a_save_is_told_which_rank_was_silent() {
    let job = Job::new();
    let given_up = &Barrier::new(4);
    job.run(4, 2, |rank, environment| {
        let manager =
            open(environment, Options { stall_timeout: Duration::from_secs(1), ..options() }).unwrap();
        committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
        // Without its own deadline it uses the timeout of the save.
        let save = (rank != 0).then(|| manager.save(SaveRequest::new(2, whole(2))).unwrap());
        let ended = save.map(|save| save.wait(None));
        given_up.wait();
        if let Some(ended) = ended {
            let error = ended.unwrap().unwrap().error().cloned().unwrap();
            assert_eq!(error.kind(), "coordination_timeout", "{error}");
        }
    });
}

#[test]
fn a_close_waits_for_all_missing_ranks_at_once_and_names_them() {
    let job = Job::new();
    let patience = Duration::from_secs(3);
    let given_up = &Barrier::new(4);
    job.run(4, 2, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
        let closed = match rank {
            0 => Some(manager.close(Some(patience))),
            2 => Some(manager.close(None)),
            _ => None,
        };
        given_up.wait();
        if rank == 0 {
            let error = closed.unwrap().unwrap_err();
            let Error::CoordinationTimeout { missing, seconds, .. } = error else { panic!("{error}") };
            assert_eq!(missing, [1, 3]);
            assert!(seconds < 1.5 * patience.as_secs_f64(), "one after the other: {seconds}");
        }
        // They were only late: what is closed again finds them.
        manager.close(None).unwrap();
    });
}

#[test]
fn a_rank_that_was_missed_is_not_waited_for_again_at_the_close() {
    let job = Job::new();
    job.run(2, 1, |rank, environment| {
        let manager =
            open(environment, Options { stall_timeout: Duration::from_secs(1), ..options() }).unwrap();
        committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
        if rank == 1 {
            // As one that is killed: it does not say that it goes.
            std::mem::forget(manager);
            return;
        }
        let error = failure(&manager.save(SaveRequest::new(2, whole(2))).unwrap());
        assert!(matches!(&*error, Error::CoordinationTimeout { missing, .. } if missing == &[1]), "{error}");
        let error = manager.close(Some(LONG)).unwrap_err();
        let Error::CoordinationTimeout { missing, seconds, .. } = error else { panic!("{error}") };
        assert_eq!(missing, [1]);
        assert!(seconds < LONG.as_secs_f64(), "{seconds}");
        manager.close(Some(LONG)).unwrap();
    });
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let job = Job::new();
    let mut ranks = InProcess::ranks(3, 1);
    let present = [ranks.remove(0), ranks.remove(0)];
    std::thread::scope(|scope| {
        for coordinator in present {
            let environment = job.environment(coordinator);
            scope.spawn(move || {
                let options = Options { stall_timeout: Duration::from_millis(300), ..options() };
                let Err(error) = open(environment, options) else { panic!("rank 2 is not there") };
                assert_eq!(error.kind(), "coordination_timeout", "{error}");
                assert!(error.to_string().contains("[2]") || error.to_string().contains("[0]"), "{error}");
            });
        }
    });
}

#[test]
fn a_rank_that_has_not_made_a_call_of_all_is_named_on_all_also_on_those_that_came_before_the_leader() {
    let job = Job::new();
    let patience = Duration::from_secs(2);
    let (came, given_up) = (&Barrier::new(2), &Barrier::new(3));
    job.run(3, 1, |rank, environment| {
        let manager = open(environment, Options { stall_timeout: patience, ..options() }).unwrap();
        // They tell each other what they have, before the first save.
        let error = (rank < 2).then(|| {
            came.wait();
            std::thread::sleep(if rank == 0 { patience / 2 } else { Duration::ZERO });
            manager.save(SaveRequest::new(1, whole(1))).map(drop)
        });
        given_up.wait();
        drop(manager);
        let Some(error) = error else { return };
        let error = error.unwrap_err();
        assert_eq!(error.kind(), "coordination_timeout", "{error}");
        assert!(error.to_string().contains("[2]"), "rank {rank}: {error}");
    });
}

#[test]
fn a_rank_that_votes_not_in_time_is_named_on_all_and_the_next_save_works() {
    let job = Job::new();
    let given_up = &Barrier::new(2);
    job.run(2, 1, |rank, environment| {
        let manager =
            open(environment, Options { stall_timeout: Duration::from_secs(2), ..options() }).unwrap();
        committed(&manager.save(SaveRequest::new(1, model_of_two(rank, 1))).unwrap());
        if rank == 1 {
            // It hangs in its training until the leader has given up, which tells it so.
            given_up.wait();
        }
        let error = failure(&manager.save(SaveRequest::new(2, model_of_two(rank, 2))).unwrap());
        assert_eq!(error.kind(), "coordination_timeout", "{error}");
        assert!(error.to_string().contains("[1]"), "{error}");
        if rank == 0 {
            given_up.wait();
        }
        committed(&manager.save(SaveRequest::new(3, model_of_two(rank, 3))).unwrap());
        manager.close(None).unwrap();
    });
    let names: Vec<String> = job
        .disk
        .image()
        .get(common::ROOT)
        .unwrap()
        .entries()
        .unwrap()
        .iter()
        .map(|(name, _)| name.to_string())
        .collect();
    assert_eq!(names, [".stepwell", "step_00000001", "step_00000003"]);
}

#[test]
fn a_rank_that_leaves_a_call_before_its_answer_makes_up_for_it_and_counts_as_the_others_do() {
    // True if a step is saved is the leader's to say, each time; then only where a save has failed
    // before.
    for policy in [SavePolicy::every_seconds(0.0), SavePolicy::every_steps(1)] {
        let job = Job::new();
        let left = &Barrier::new(2);
        let named = job.run(2, 1, |rank, environment| {
            let impatient =
                Options { stall_timeout: Duration::from_secs(1), save_policy: policy.clone(), ..options() };
            let manager = open(environment, impatient).unwrap();
            committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
            if policy.is_deterministic() {
                breaks_off(&manager, 2);
                // The ranks tell each other, by one of the next saves, who has seen that.
                let mut late = false;
                for step in 3..9 {
                    if rank == 0 && step == 5 {
                        left.wait();
                    }
                    let save = manager.save(SaveRequest::new(step, whole(step)));
                    if rank == 1
                        && !late
                        && matches!(&save, Err(error) if error.kind() == "coordination_timeout")
                    {
                        late = true;
                        left.wait();
                    }
                }
                if rank == 1 && !late {
                    left.wait();
                }
            } else {
                if rank == 0 {
                    left.wait();
                }
                let save = manager.save(SaveRequest::new(2, whole(2)));
                if rank == 1 {
                    assert_eq!(save.unwrap_err().kind(), "coordination_timeout");
                    left.wait();
                } else {
                    // The other one says so with its next call.
                    let _ = save.unwrap();
                }
            }
            let mut told = Vec::new();
            for step in 20..26 {
                match manager.save(SaveRequest::new(step, whole(step))) {
                    Ok(save) if matches!(save.wait(Some(LONG)).unwrap(), Some(Outcome::Committed)) => {
                        told.push(step);
                    }
                    _ => {}
                }
            }
            manager.close(Some(LONG)).unwrap();
            told
        });
        assert_eq!(named[0], named[1]);
        assert!(named[0].contains(&25), "{named:?}");
        let there: Vec<u64> = (20..26).filter(|&step| job.has(step)).collect();
        assert_eq!(there, named[0]);
    }
}

#[test]
fn the_leader_alone_holds_a_step_in_its_place() {
    let job = Job::new();
    job.run(2, 1, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
        match manager.hold(1) {
            Ok(hold) if rank == 0 => drop(hold),
            Err(error) if rank == 1 => assert!(error.to_string().contains("rank 0 retires"), "{error}"),
            other => panic!("rank {rank}: {:?}", other.map(drop)),
        }
        manager.close(None).unwrap();
    });
}

#[test]
fn a_rank_that_reads_for_long_is_waited_for() {
    let job = Job::new();
    job.run(2, 1, |rank, environment| {
        let impatient = Options { stall_timeout: Duration::from_secs(1), ..options() };
        let manager = open(environment, impatient).unwrap();
        committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
        assert_eq!(manager.choose(None).unwrap(), 1);
        assert_eq!(manager.wanted_by_none("", vec![]).unwrap(), Some(vec![]));
        if rank == 1 {
            std::thread::sleep(Duration::from_secs(3));
        }
        manager.agree("restore", Ok(())).unwrap();
        manager.close(None).unwrap();
    });
}
