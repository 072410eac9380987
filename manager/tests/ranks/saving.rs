//! Saves of several ranks: each byte once, and one process reads the whole.

use std::sync::{Arc, Barrier};

use stepwell_core::dtype::Dtype;
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_core::value::Value;
use stepwell_manager::coordination::SingleProcess;
use stepwell_manager::coordination::testing::InProcess;
use stepwell_manager::state::Holders;
use stepwell_manager::{Environment, LeafSource, Options, Retention, SavePolicy, SaveRequest, StateSource};

use crate::job::{
    Filled, Job, committed, expected, key, model_of_two, one_leaf, open, options, part, tensor,
};

const ROWS: u64 = 64;

const COLUMNS: u64 = 48;

/// A model over 4 ranks: rows cut over all of them, columns cut over pairs and held alike by two
/// ranks each, and what everybody has.
fn model(rank: u32, step: u64) -> StateSource {
    let seed = step as u8;
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    let params = tree.push_container(Some(root), key("params"), ContainerKind::Dict);
    for name in ["rows", "columns", "norm"] {
        tree.push_leaf(Some(params), key(name));
    }
    // A layer that only the second half of the ranks has.
    if rank >= 2 {
        tree.push_leaf(Some(params), key("head"));
    }
    tree.push_leaf(Some(root), key("step"));
    let quarter = ROWS / 4;
    let rows = part([quarter * u64::from(rank), 0], [quarter, COLUMNS], Holders::This);
    let pair: Arc<[u32]> = if rank.is_multiple_of(2) { [0, 2].into() } else { [1, 3].into() };
    let columns = part([0, COLUMNS / 2 * u64::from(rank % 2)], [ROWS, COLUMNS / 2], Holders::Ranks(pair));
    let everyone = |rows| vec![part([0, 0], [rows, COLUMNS], Holders::Everyone)];
    let mut leaves = vec![
        tensor(ROWS, COLUMNS, seed, vec![rows]),
        tensor(ROWS, COLUMNS, seed ^ 1, vec![columns]),
        tensor(8, COLUMNS, seed ^ 2, everyone(8)),
    ];
    if rank >= 2 {
        leaves.push(tensor(16, COLUMNS, seed ^ 3, everyone(16)));
    }
    leaves.push(LeafSource::Object(Value::Int(step as i64)));
    StateSource { tree, leaves }
}

fn assert_model(job: &Job, step: u64) {
    let seed = step as u8;
    let found = job.restored(step);
    let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["params/rows", "params/columns", "params/norm", "params/head", "step"]);
    assert_eq!(found[0].1, expected(ROWS, COLUMNS, seed));
    assert_eq!(found[1].1, expected(ROWS, COLUMNS, seed ^ 1));
    assert_eq!(found[2].1, expected(8, COLUMNS, seed ^ 2));
    assert_eq!(found[3].1, expected(16, COLUMNS, seed ^ 3));
}

/// A leaf cut into halves over pairs of ranks (0 and 2, 1 and 3) that know nothing of each other:
/// each declares only that every holder of its box has the same.
fn boxes(rank: u32, seed: u8) -> LeafSource {
    tensor(8, 4, seed, vec![part([4 * u64::from(rank % 2), 0], [4, 4], Holders::Everyone)])
}

#[test]
fn what_four_ranks_save_together_one_process_reads_as_a_whole() {
    let job = Job::new();
    job.run(4, 2, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        assert_eq!(manager.latest_step().unwrap(), None);
        for step in [10, 20, 30] {
            committed(&manager.save(SaveRequest::new(step, model(rank, step))).unwrap());
        }
        assert_eq!(manager.latest_step().unwrap(), Some(30));
        assert_eq!(manager.next_step().unwrap(), 31);
        manager.close(None).unwrap();
    });
    for step in [10, 20, 30] {
        assert_model(&job, step);
    }
}

#[test]
fn every_byte_is_written_once() {
    let job = Job::new();
    job.run(4, 4, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        committed(&manager.save(SaveRequest::new(1, model(rank, 1))).unwrap());
        manager.close(None).unwrap();
    });
    let stored: u64 = 2 * ROWS * COLUMNS + 24 * COLUMNS;
    let most = stored + job.data_bytes().len() as u64 * 5 * 4096;
    assert!(job.data_bytes().iter().sum::<u64>() < most, "{:?}", job.data_bytes());
}

#[test]
fn nothing_is_left_of_what_the_ranks_have_said() {
    let job = Job::new();
    let ranks: Vec<Arc<InProcess>> = InProcess::ranks(3, 1).into_iter().map(Arc::new).collect();
    std::thread::scope(|scope| {
        for coordinator in &ranks {
            let environment =
                Environment { coordinator: coordinator.clone(), ..job.environment(SingleProcess) };
            scope.spawn(move || {
                let manager = open(environment, options()).unwrap();
                for step in 0..5 {
                    let mut state = model(3, step);
                    // All of it on all ranks.
                    state.leaves.iter_mut().for_each(|leaf| {
                        if let LeafSource::Tensor { shape, parts, .. } = leaf {
                            *parts = vec![part([0, 0], [shape[0], shape[1]], Holders::Everyone)];
                        }
                    });
                    let _ = manager.save(SaveRequest::new(step, state)).unwrap();
                    for _ in 0..100 {
                        manager.latest_step().unwrap();
                    }
                }
                manager.close(None).unwrap();
            });
        }
    });
    assert_eq!(ranks[0].left(), Vec::<String>::new());
}

#[test]
fn ranks_with_different_top_entries_save_one_step() {
    let job = Job::new();
    job.run(3, 3, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        let mut tree = Tree::new();
        let root = tree.push_container(None, None, ContainerKind::Dict);
        let entries = [&["step", "encoder"][..], &["decoder", "step"], &["lr", "head", "step"]];
        let mut leaves = Vec::new();
        for &entry in entries[rank as usize] {
            if let "step" | "lr" = entry {
                tree.push_leaf(Some(root), key(entry));
            } else {
                let inside = tree.push_container(Some(root), key(entry), ContainerKind::Dict);
                tree.push_leaf(Some(inside), key("w"));
            }
            leaves.push(tensor(4, 4, entry.len() as u8, vec![part([0, 0], [4, 4], Holders::Everyone)]));
        }
        committed(&manager.save(SaveRequest::new(1, StateSource { tree, leaves })).unwrap());
        manager.close(None).unwrap();
    });
    let mut found = job.restored(1);
    found.sort();
    let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["decoder/w", "encoder/w", "head/w", "lr", "step"]);
    for (name, bytes) in &found {
        let entry = name.split('/').next().unwrap();
        assert_eq!(*bytes, expected(4, 4, entry.len() as u8), "{name}");
    }
}

#[test]
fn a_tie_between_items_is_stored_whole_in_both() {
    let job = Job::new();
    job.run(2, 2, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        let state = || {
            let mut tree = Tree::new();
            let root = tree.push_container(None, None, ContainerKind::Dict);
            for item in ["params", "head"] {
                let inside = tree.push_container(Some(root), key(item), ContainerKind::Dict);
                tree.push_leaf(Some(inside), key("cut"));
                tree.push_leaf(Some(inside), key("whole"));
            }
            let half = part([4 * u64::from(rank), 0], [4, 4], Holders::This);
            let cut = tensor(8, 4, 1, vec![half]);
            let whole = tensor(8, 4, 2, vec![part([0, 0], [8, 4], Holders::Everyone)]);
            StateSource { tree, leaves: vec![cut, whole, LeafSource::Alias(0), LeafSource::Alias(1)] }
        };
        committed(&manager.save(SaveRequest::new(1, model_of_two(rank, 1))).unwrap());
        // Its leaves are new: both ranks write what is simply there.
        committed(&manager.save(SaveRequest::new(2, state())).unwrap());
        for step in 3..8 {
            committed(&manager.save(SaveRequest::new(step, state())).unwrap());
        }
        manager.close(None).unwrap();
    });
    for step in 2..8 {
        let bytes: Vec<Vec<u8>> = job.restored(step).into_iter().map(|(_, bytes)| bytes).collect();
        let (cut, whole) = (expected(8, 4, 1), expected(8, 4, 2));
        assert_eq!(bytes, [cut.clone(), whole.clone(), cut, whole]);
    }
}

#[test]
fn leaves_that_come_and_go_are_saved_once_and_then_shared_anew() {
    let job = Job::new();
    job.run(3, 3, |_, environment| {
        let manager = open(environment, options()).unwrap();
        for step in 0..10_u64 {
            let mut tree = Tree::new();
            let root = tree.push_container(None, None, ContainerKind::Dict);
            let params = tree.push_container(Some(root), key("params"), ContainerKind::Dict);
            let mut leaves = Vec::new();
            for number in 0..=(step / 3) {
                tree.push_leaf(Some(params), key(&format!("w{number}")));
                leaves.push(tensor(8, 4, step as u8, vec![part([0, 0], [8, 4], Holders::Everyone)]));
            }
            committed(&manager.save(SaveRequest::new(step, StateSource { tree, leaves })).unwrap());
        }
        manager.close(None).unwrap();
    });
    for step in 0..10 {
        let found = job.restored(step);
        assert_eq!(found.len() as u64, step / 3 + 1);
        assert!(found.iter().all(|(_, bytes)| *bytes == expected(8, 4, step as u8)));
    }
}

#[test]
fn a_box_that_is_simply_there_on_several_ranks_is_written_once() {
    let job = Job::new();
    job.run(4, 2, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        for step in 1..=3 {
            committed(&manager.save(SaveRequest::new(step, one_leaf(boxes(rank, step as u8)))).unwrap());
        }
        manager.close(None).unwrap();
    });
    for step in 1..=3 {
        assert_eq!(job.restored(step)[0].1, expected(8, 4, step as u8));
    }
}

#[test]
fn boxes_that_nobody_has_heard_of_are_taken_once() {
    let job = Job::new();
    job.run(4, 2, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        for step in 0..6 {
            let mut state = one_leaf(boxes(rank, step as u8));
            if step >= 2 {
                // As the slots of an optimizer, which come with its first step.
                state.tree.push_leaf(Some(0), key("slot"));
                state.leaves.push(boxes(rank, step as u8 + 100));
            }
            committed(&manager.save(SaveRequest::new(step, state)).unwrap());
        }
        manager.close(None).unwrap();
    });
    for step in 2..6 {
        assert_eq!(job.restored(step)[1].1, expected(8, 4, step as u8 + 100));
    }
}

#[test]
fn a_leaf_that_some_ranks_had_before_others_is_taken_once() {
    for first in 0..3 {
        let job = Job::new();
        job.run(3, 3, |rank, environment| {
            let manager = open(environment, options()).unwrap();
            for step in 0..6 {
                let mut state = one_leaf(tensor(8, 4, 7, vec![part([0, 0], [8, 4], Holders::Everyone)]));
                if step >= 2 || rank == first {
                    state.tree.push_leaf(Some(0), key("late"));
                    state.leaves.push(tensor(8, 4, 9, vec![part([0, 0], [8, 4], Holders::Everyone)]));
                }
                committed(&manager.save(SaveRequest::new(step, state)).unwrap());
            }
            manager.close(None).unwrap();
        });
        for step in 0..6 {
            assert_eq!(job.restored(step)[1].1, expected(8, 4, 9));
        }
    }
}

#[test]
fn retention_and_changes_are_seen_by_every_rank() {
    let job = Job::new();
    job.run(2, 2, |rank, environment| {
        let retention = Retention::keep_latest(2);
        let manager = open(environment, Options { retention, ..options() }).unwrap();
        for step in 1..=4 {
            committed(&manager.save(SaveRequest::new(step, model_of_two(rank, step))).unwrap());
        }
        assert_eq!(manager.latest_step().unwrap(), Some(4));
        let (_, moved) = manager.rewind(3, None).unwrap();
        assert_eq!(moved, [4]);
        assert_eq!(manager.latest_step().unwrap(), Some(3));
        let Err(error) = manager.save(SaveRequest::new(2, model_of_two(rank, 2))) else {
            panic!("it is below")
        };
        assert_eq!(error.kind(), "step_order", "{error}");
        committed(&manager.save(SaveRequest::new(4, model_of_two(rank, 4))).unwrap());
        manager.delete(4).unwrap();
        assert_eq!(manager.choose(None).unwrap(), 3);
        assert_eq!(manager.choose(Some(9)).unwrap_err().kind(), "step_not_found");
        manager.close(None).unwrap();
    });
}

#[test]
fn what_may_drift_is_stored_as_the_first_rank_has_it() {
    let job = Job::new();
    job.run(3, 3, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        let mut tree = Tree::new();
        let root = tree.push_container(None, None, ContainerKind::Dict);
        tree.push_leaf(Some(root), key("w"));
        tree.push_leaf(Some(root), key("n"));
        let w = LeafSource::whole(Dtype::Uint8, vec![300_000], Arc::new(Filled(rank as u8 + 7))).of_first();
        let leaves = vec![w, LeafSource::Drifting(Value::Int(i64::from(rank)))];
        committed(&manager.save(SaveRequest::new(1, StateSource { tree, leaves })).unwrap());
        manager.close(None).unwrap();
    });
    assert!(job.restored(1)[0].1.iter().all(|&byte| byte == 7), "not stitched from several ranks");
}

#[test]
fn a_signal_to_one_rank_ends_all_after_the_same_step() {
    let job = Job::new();
    let trained = &Barrier::new(4);
    let last = job.run(4, 2, |rank, environment| {
        let policy = SavePolicy::every_steps(100) | SavePolicy::on_preemption();
        let manager = open(environment, Options { save_policy: policy, ..options() }).unwrap();
        let end = (0..50).find(|&step| {
            trained.wait();
            if (rank, step) == (3, 7) {
                manager.request_preemption();
            }
            let save = manager.save(SaveRequest::new(step, model(rank, step))).unwrap();
            if save.refusal().is_none() {
                committed(&save);
            }
            manager.reached_preemption(step).unwrap()
        });
        manager.close(None).unwrap();
        end.unwrap()
    });
    assert!((7..9).contains(&last[0]) && last.iter().all(|&step| step == last[0]), "{last:?}");
    assert_model(&job, last[0]);
}
