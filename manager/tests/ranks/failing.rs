//! A rank raises, breaks off, is silent or gone: the save fails on all ranks with its cause, and
//! the next one works.

use std::collections::BTreeMap;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use stepwell_core::tree::Tree;
use stepwell_manager::coordination::SingleProcess;
use stepwell_manager::coordination::testing::InProcess;
use stepwell_manager::state::Holders;
use stepwell_manager::{
    Decision, Environment, Error, Exists, LeafSource, Manager, Options, SaveRequest, StateSource, Ticket,
};

use crate::common;
use crate::common::LONG;
use crate::job::{
    Job, committed, expected, failed_rank, failure, model_of_two, open, options, part, tensor, whole,
};

/// The right to save a step that all ranks save.
fn decided(manager: &Manager, step: u64) -> Ticket {
    match manager.decide(step, false, Exists::Error, &BTreeMap::new()).unwrap() {
        Decision::Save(ticket) => ticket,
        _ => panic!("step {step} is not saved"),
    }
}

/// A rank whose call of `save` raises after the decision.
fn breaks_off(manager: &Manager, step: u64) {
    let ticket = decided(manager, step);
    ticket.cause().set("KeyboardInterrupt".to_owned()).unwrap();
}

#[test]
fn a_rank_that_raises_fails_the_save_of_all() {
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
            assert!(failed_rank(&error) == Some(1) && error.to_string().contains("found 0"), "{error}");
        }
        committed(&manager.save(SaveRequest::new(3, simple(3))).unwrap());
        manager.close(None).unwrap();
    });
    assert_eq!(job.restored(3)[0].1, expected(4, 4, 3));
}

#[test]
fn an_unseen_failure_of_a_rank_is_raised_on_all() {
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
fn a_rank_that_aborts_a_save_ends_it_for_all() {
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
fn a_ticket_that_nobody_takes_ends_the_save_on_all_ranks() {
    let job = Job::new();
    job.run(2, 2, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
        if rank == 0 {
            let error = failure(&manager.save(SaveRequest::new(2, whole(2))).unwrap());
            let named = failed_rank(&error) == Some(1) && error.to_string().contains("interrupted");
            assert!(named, "{error}");
        } else {
            // As a call whose caller was interrupted before it had the decision.
            drop(decided(&manager, 2));
        }
        committed(&manager.save(SaveRequest::new(3, whole(3))).unwrap());
        manager.close(None).unwrap();
    });
}

#[test]
fn a_failure_is_raised_once_by_all_ranks() {
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
fn a_rank_that_missed_a_call_is_named_on_all() {
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
fn a_rank_that_votes_late_is_named_on_all() {
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
fn a_call_without_an_answer_ends_the_session_of_all_ranks() {
    let job = Job::new();
    let (left, called) = (&Barrier::new(3), &Barrier::new(3));
    job.run(3, 1, |rank, environment| {
        let patience = Duration::from_secs(1);
        let impatient = Options { stall_timeout: patience, ..options() };
        let manager = open(environment, impatient).unwrap();
        committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
        if rank == 1 {
            let error = manager.latest_step().unwrap_err();
            assert!(
                matches!(&error, Error::CoordinationTimeout { missing, .. } if missing == &[0]),
                "{error}"
            );
        }
        left.wait();
        let begun = Instant::now();
        // The leader hears of it where it waits for that rank, and the others from the leader.
        let error = manager.agree("restore", Ok(())).unwrap_err();
        assert_eq!(error.kind(), "session_lost", "rank {rank}: {error}");
        assert!(error.to_string().contains(if rank == 1 { "[0]" } else { "rank 1" }), "rank {rank}: {error}");
        assert!(begun.elapsed() < patience, "rank {rank}: {:?}", begun.elapsed());
        called.wait();
        // Each later call says it at once; what is there is still there to look at.
        for error in
            [manager.latest_step().unwrap_err(), manager.save(SaveRequest::new(2, whole(2))).unwrap_err()]
        {
            assert_eq!(error.kind(), "session_lost", "rank {rank}: {error}");
            assert!(error.to_string().contains("open the root again on all ranks"), "{error}");
        }
        assert_eq!(manager.all_steps().unwrap(), [1]);
        called.wait();
        manager.close(None).unwrap();
    });
    // The job goes on with managers of its own.
    job.run(3, 1, |_, environment| {
        let manager = open(environment, options()).unwrap();
        committed(&manager.save(SaveRequest::new(2, whole(2))).unwrap());
        manager.close(None).unwrap();
    });
}

#[test]
fn a_leader_that_fails_ends_the_calls_of_the_others() {
    let job = Job::new();
    let begun = Instant::now();
    job.run(2, 1, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        if rank == 0 {
            manager.leave_at_once();
            let _ = manager.close(Some(LONG));
        } else {
            assert_eq!(manager.latest_step().unwrap_err().kind(), "session_lost");
        }
    });
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[test]
fn a_leader_that_was_left_says_so_within_the_next_saves() {
    let job = Job::new();
    let left = &Barrier::new(2);
    job.run(2, 1, |rank, environment| {
        let impatient = Options { stall_timeout: Duration::from_millis(500), ..options() };
        let manager = open(environment, impatient).unwrap();
        committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
        if rank == 1 {
            assert_eq!(manager.latest_step().unwrap_err().kind(), "coordination_timeout");
        }
        left.wait();
        let mut kinds = Vec::new();
        for step in 2..9 {
            kinds.push(match manager.save(SaveRequest::new(step, whole(step))) {
                Ok(save) => failure(&save).kind(),
                Err(error) => error.kind(),
            });
        }
        let last = if rank == 1 { kinds.len() } else { 3 };
        assert!(kinds.iter().rev().take(last).all(|kind| *kind == "session_lost"), "rank {rank}: {kinds:?}");
        let _ = manager.close(None);
    });
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
