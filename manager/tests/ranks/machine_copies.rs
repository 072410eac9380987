//! Machines that keep copies of each other's files: the loss of one loses no step, and brings none
//! back.

use std::sync::Barrier;

use stepwell_core::io::simulated::{Action, Fault, OperationKind};
use stepwell_manager::{Exists, Manager, Options, SaveRequest};

use crate::common::{LONG, options};
use crate::job::committed;
use crate::machines::{Nodes, assert_model, keeping, model, open_and_die, save};

const ENOSPC: i32 = 28;

fn copying(options: Options) -> Options {
    Options { copies: 2, ..options }
}

/// Saves steps, and waits until all machines have copied the last one.
fn save_copied(manager: &Manager, rank: u32, ranks: u32, steps: &[u64]) {
    save(manager, rank, ranks, steps);
    wait_until_copied(manager, rank);
}

fn wait_until_copied(manager: &Manager, rank: u32) {
    let newest = manager.latest_step().unwrap().unwrap();
    if rank == 0 {
        manager.wait_until_carried(Some(LONG)).unwrap();
        assert!(manager.is_copied(newest).unwrap());
    }
    manager.agree("all machines have copied", Ok(())).unwrap();
}

/// The machines, after a job that has saved steps 1 and 2.
fn saved(names: &[&str]) -> Nodes {
    let nodes = Nodes::new(1);
    let ranks = names.len() as u32;
    nodes.run(names, &copying(keeping(2)), |rank, manager| {
        save_copied(manager, rank, ranks, &[1]);
        save_copied(manager, rank, ranks, &[2]);
    });
    nodes
}

fn assert_steps(nodes: &Nodes, machines: &[&str], steps: &[u64], ranks: u32) {
    nodes.run(machines, &copying(keeping(2)), |rank, manager| {
        assert_eq!(manager.all_steps().unwrap(), steps, "{machines:?}");
        for &step in steps {
            assert_model(manager, step, ranks, step);
        }
        wait_until_copied(manager, rank);
    });
}

#[test]
fn any_one_machine_may_be_lost() {
    for lost in ["a", "b", "c"] {
        let all = ["a", "b", "c"];
        let nodes = saved(&all);
        nodes.lose(lost);
        let left: Vec<&str> = all.into_iter().filter(|&name| name != lost).collect();
        for machines in [[left[0], left[1], "d"], [left[1], "e", left[0]]] {
            assert_steps(&nodes, &machines, &[1, 2], 3);
        }
    }
}

#[test]
fn the_run_goes_on_after_a_loss_and_copies_again() {
    let nodes = saved(&["a", "b", "c"]);
    let mut machines = vec!["a", "b", "c"];
    for (step, (lost, new)) in (3..).zip([("a", "d"), ("c", "e"), ("b", "f"), ("d", "g")]) {
        nodes.lose(lost);
        machines.retain(|&name| name != lost);
        machines.push(new);
        nodes.run(&machines, &copying(keeping(2)), |rank, manager| {
            assert_eq!(manager.all_steps().unwrap(), [step - 2, step - 1], "{machines:?}");
            assert_model(manager, step - 1, 3, step - 1);
            save_copied(manager, rank, 3, &[step]);
        });
    }
    assert_steps(&nodes, &machines, &[5, 6], 3);
}

#[test]
fn what_is_gone_leaves_no_copies() {
    let nodes = saved(&["a", "b"]);
    assert_eq!(nodes.names("a"), ["copy 1", "copy 2", "step_00000001", "step_00000002"]);
    assert_eq!(nodes.names("b"), ["copy 1", "copy 2", "part 1", "part 2"]);
    nodes.run(&["a", "b"], &copying(keeping(2)), |rank, manager| save_copied(manager, rank, 2, &[3]));
    for _ in 0..2 {
        // The next job removes the rest.
        nodes.run(&["a", "b"], &copying(keeping(2)), |_, _| ());
    }
    assert_eq!(nodes.names("a"), ["copy 2", "copy 3", "step_00000002", "step_00000003"]);
    assert_eq!(nodes.names("b"), ["copy 2", "copy 3", "part 2", "part 3"]);
}

#[test]
fn a_lost_machine_brings_no_removed_steps_back() {
    for lost in ["a", "b"] {
        let nodes = Nodes::new(1);
        nodes.run(&["a", "b"], &copying(options()), |rank, manager| {
            for step in 1..=4 {
                save_copied(manager, rank, 2, &[step]);
            }
            manager.rewind(3, None).unwrap();
            manager.delete(1).unwrap();
        });
        nodes.lose(lost);
        let left = if lost == "a" { "b" } else { "a" };
        assert_steps(&nodes, &[left, "c"], &[2, 3], 2);
    }
}

#[test]
fn a_replaced_step_is_copied_again() {
    let nodes = saved(&["a", "b"]);
    nodes.run(&["a", "b"], &copying(keeping(2)), |rank, manager| {
        let again = SaveRequest { exists: Exists::Replace, ..SaveRequest::new(2, model(rank, 2, 7)) };
        committed(&manager.save(again).unwrap());
        wait_until_copied(manager, rank);
    });
    nodes.lose("a");
    nodes.run(&["b", "c"], &copying(keeping(2)), |_, manager| {
        assert_eq!(manager.all_steps().unwrap(), [1, 2]);
        assert_model(manager, 2, 2, 7);
    });
}

#[test]
fn a_main_machine_that_is_back_has_its_newer_steps() {
    let nodes = saved(&["a", "b"]);
    // This job makes no copies.
    nodes.save(&["a", "b"], &keeping(3), &[3]);
    assert_steps(&nodes, &["b", "c"], &[1, 2], 2);
    // Nothing was saved, so the run has not gone on.
    nodes.run(&["a", "b"], &keeping(3), |_, manager| {
        assert_eq!(manager.all_steps().unwrap(), [1, 2, 3]);
        assert_model(manager, 3, 2, 3);
    });
}

#[test]
fn a_run_that_went_on_without_its_main_machine_stays() {
    let nodes = saved(&["a", "b"]);
    nodes.save(&["a", "b"], &keeping(3), &[3]);
    nodes.run(&["b", "c"], &copying(keeping(3)), |rank, manager| {
        assert_eq!(manager.all_steps().unwrap(), [1, 2]);
        save_copied(manager, rank, 2, &[4]);
    });
    for machines in [["a", "b"], ["b", "a"]] {
        nodes.run(&machines, &copying(keeping(3)), |_, manager| {
            assert_eq!(manager.all_steps().unwrap(), [1, 2, 4], "{machines:?}");
        });
    }
}

#[test]
fn a_lost_machine_is_made_up_for_beside_a_further_tier() {
    let nodes = Nodes::new(1);
    let near = copying(keeping(1));
    nodes.run_with_home(&["a", "b"], &near, |rank, manager| save_copied(manager, rank, 2, &[1, 2]));
    nodes.lose("a");
    nodes.run_with_home(&["b", "c"], &near, |_, manager| {
        assert_eq!(manager.all_steps().unwrap(), [1, 2]);
        assert_model(manager, 2, 2, 2);
        // From the copy, not from home.
        assert_eq!(manager.tiers_of(2).unwrap(), ["", "home"]);
    });
}

#[test]
fn a_full_disk_delays_a_copy() {
    let nodes = Nodes::new(1);
    let barrier = Barrier::new(2);
    nodes.run(&["a", "b"], &copying(options()), |rank, manager| {
        if rank == 0 {
            nodes.disk().inject(Fault::on(OperationKind::Write, Action::Fail(ENOSPC)).at("/b/run/.copy-"));
        }
        barrier.wait();
        save(manager, rank, 2, &[1]);
        if rank == 0 {
            while manager.tiers().unwrap()[0].failure.is_none() {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            assert!(!manager.is_copied(1).unwrap());
            let (step, why) = manager.tiers().unwrap()[0].failure.clone().unwrap();
            assert!(step == 1 && why.contains("/b/run"), "{why}");
            nodes.disk().clear_faults();
        }
        wait_until_copied(manager, rank);
    });
}

#[test]
fn a_hand_over_of_copies_may_end_at_any_operation() {
    let stride = if std::env::var_os("STEPWELL_LONG").is_some() { 1 } else { 31 };
    let nodes = || {
        let nodes = saved(&["a", "b", "c"]);
        nodes.lose("a");
        nodes
    };
    let paths = ["/c/run", "/b/run"];
    for dies in [0, 1] {
        let operations = open_and_die(&nodes(), paths, dies, None);
        assert!(operations > 20);
        for at in (1..operations).step_by(stride) {
            let nodes = nodes();
            open_and_die(&nodes, paths, dies, Some(at));
            for machines in [["c", "b"], ["b", "c"]] {
                nodes.run(&machines, &copying(keeping(2)), |_, manager| {
                    let what = format!("rank {dies} at {at}, {machines:?}");
                    assert_eq!(manager.all_steps().unwrap(), [1, 2], "{what}");
                    assert_model(manager, 1, 3, 1);
                    assert_model(manager, 2, 3, 2);
                });
            }
        }
    }
}
