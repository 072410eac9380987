//! Machines that keep copies of each other's files: the loss of one loses no step, and brings none
//! back.

use std::collections::BTreeMap;
use std::sync::Barrier;
use std::time::Duration;

use stepwell_core::io::simulated::{Action, Fault, OperationKind};
use stepwell_manager::{Exists, FilesPer, Manager, Options, Result, Retention, SaveRequest};

use crate::common::{LONG, options, read, read_stats};
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
fn a_damaged_block_is_read_from_the_copy_of_a_partner() {
    for (machine, file) in [("a", "/00000.data"), ("b", "/00001.data")] {
        for at in [20, 4100] {
            let nodes = saved(&["a", "b"]);
            let damaged = nodes.data_files(machine, file);
            assert!(damaged.len() >= 2, "of two steps: {damaged:?}");
            for path in damaged {
                assert!(nodes.disk().corrupt(&path, |bytes| bytes[at] ^= 1), "{path}");
            }
            assert_steps(&nodes, &["a", "b"], &[1, 2], 2);
        }
    }
}

#[test]
fn a_damaged_copy_of_a_partner_does_not_stand_in() {
    let nodes = saved(&["a", "b"]);
    let headers = nodes.data_files("b", "/00001.data").into_iter().map(|path| (path, 20));
    let copies = nodes.copied_files("a", "/00001.data");
    assert!(!copies.is_empty());
    for (path, at) in headers.chain(copies.into_iter().map(|path| (path, 4100))) {
        assert!(nodes.disk().corrupt(&path, |bytes| bytes[at] ^= 1), "{path}");
    }
    nodes.run(&["a", "b"], &copying(keeping(2)), |_, manager| {
        let error = read_stats(&manager.checkpoint(Some(2)).unwrap()).unwrap_err();
        assert!(error.contains("00001.data"), "{error}");
    });
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

/// Two machines whose second copy was interrupted: machine a has one of two files.
fn interrupted() -> Nodes {
    let nodes = Nodes::new(1);
    left_early(&nodes, |rank, manager| {
        save_copied(manager, rank, 2, &[1]);
        if rank == 0 {
            let full = Fault::on(OperationKind::Write, Action::Fail(ENOSPC)).from_then_on();
            nodes.disk().inject(full.clone().at("/b/run/.copy-00000002"));
            nodes.disk().inject(full.at("/a/run/.copy-00000002").after(1));
        }
        manager.agree("the disks are full", Ok(())).unwrap();
        save(manager, rank, 2, &[2]);
        if rank == 0 {
            while manager.tiers().unwrap()[0].failure.is_none() {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        manager.agree("it has failed", Ok(())).unwrap();
    });
    nodes
}

/// Runs a job of two machines that does not wait for copies at its end.
fn left_early(nodes: &Nodes, rank: impl Fn(u32, &Manager) + Sync) {
    let run = |number, manager: Result<Manager>| {
        let manager = manager.unwrap();
        rank(number, &manager);
        let _ = manager.close(Some(Duration::from_millis(50)));
    };
    nodes.try_run(&["a", "b"], &copying(keeping(1)), |_| Vec::new(), run);
    nodes.disk().clear_faults();
}

#[test]
fn an_interrupted_copy_is_completed() {
    for lost in ["a", "b"] {
        let nodes = interrupted();
        // Retention has kept the copied step, in the next job, too.
        let left = if lost == "a" { "b" } else { "a" };
        nodes.run(&["a", "b"], &copying(keeping(1)), |rank, manager| {
            wait_until_copied(manager, rank);
            assert_eq!(manager.latest_step().unwrap(), Some(2));
        });
        nodes.lose(lost);
        nodes.run(&[left, "c"], &copying(keeping(1)), |_, manager| {
            assert_eq!(manager.latest_step().unwrap(), Some(2), "{lost}");
            assert_model(manager, 2, 2, 2);
        });
    }
}

#[test]
fn the_last_copied_step_stays_until_another_is_copied() {
    for lost in ["a", "b"] {
        let nodes = interrupted();
        let full = Fault::on(OperationKind::Write, Action::Fail(ENOSPC)).from_then_on();
        nodes.disk().inject(full.at("/run/.copy-"));
        left_early(&nodes, |rank, manager| save(manager, rank, 2, &[3]));
        nodes.lose(lost);
        let left = if lost == "a" { "b" } else { "a" };
        nodes.run(&[left, "c"], &copying(keeping(1)), |_, manager| {
            assert_eq!(manager.latest_step().unwrap(), Some(1), "{lost}");
            assert_model(manager, 1, 2, 1);
        });
    }
}

#[test]
fn a_job_without_copies_drops_those_of_removed_steps() {
    let nodes = saved(&["a", "b"]);
    nodes.run(&["a", "b"], &keeping(2), |_, manager| {
        manager.rewind(1, None).unwrap();
    });
    nodes.lose("a");
    assert_steps(&nodes, &["b", "c"], &[1], 2);
}

#[test]
fn a_machine_that_missed_a_rewind_brings_nothing_back() {
    let nodes = saved(&["a", "b"]);
    nodes.run(&["a", "c"], &copying(keeping(2)), |_, manager| {
        manager.rewind(1, None).unwrap();
    });
    // Machine b is back, and makes no copies.
    nodes.run(&["a", "b"], &keeping(2), |_, _| ());
    nodes.lose("a");
    nodes.run(&["b", "c"], &keeping(2), |_, manager| {
        assert!(!manager.all_steps().unwrap().contains(&2));
    });
}

#[test]
fn a_new_main_machine_may_be_lost_at_once() {
    let nodes = saved(&["a", "b", "c"]);
    // Machine b has copied what a has, and leads now. This job makes no copies.
    nodes.run(&["b", "a", "c"], &keeping(2), |_, manager| assert_eq!(manager.all_steps().unwrap(), [1, 2]));
    nodes.lose("b");
    for machines in [["a", "c"], ["c", "a"]] {
        assert_steps(&nodes, &machines, &[1, 2], 3);
    }
}

#[test]
fn a_branch_of_an_earlier_main_machine_is_no_step() {
    let nodes = saved(&["a", "b"]);
    nodes.run(&["a", "b"], &copying(keeping(2)), |_, manager| {
        manager.rewind(1, None).unwrap();
    });
    nodes.run(&["b", "a"], &keeping(2), |_, manager| assert_eq!(manager.all_steps().unwrap(), [1]));
    nodes.lose("b");
    assert_steps(&nodes, &["a", "c"], &[1], 2);
}

#[test]
fn the_steps_of_earlier_jobs_are_copied_again() {
    let nodes = saved(&["a", "b", "c"]);
    nodes.lose("a");
    nodes.run(&["b", "c", "d"], &copying(keeping(2)), |rank, manager| {
        while rank == 0 && !(manager.is_copied(1).unwrap() && manager.is_copied(2).unwrap()) {
            std::thread::sleep(Duration::from_millis(5));
        }
        manager.agree("all are copied", Ok(())).unwrap();
    });
    nodes.lose("b");
    assert_steps(&nodes, &["c", "d"], &[1, 2], 3);
}

#[test]
fn a_step_that_a_job_without_copies_replaced_stays_replaced() {
    let nodes = saved(&["a", "b"]);
    nodes.run(&["a", "b"], &keeping(2), |rank, manager| {
        let again = SaveRequest { exists: Exists::Replace, ..SaveRequest::new(2, model(rank, 2, 7)) };
        committed(&manager.save(again).unwrap());
        // The order of a removal is carried out after that of the replacement.
        manager.delete(1).unwrap();
    });
    nodes.lose("a");
    nodes.run(&["b", "c"], &keeping(2), |_, manager| assert!(manager.all_steps().unwrap().is_empty()));
}

#[test]
fn a_step_may_be_deleted_while_it_is_copied() {
    let nodes = Nodes::new(1);
    nodes.run(&["a", "b"], &copying(options()), |rank, manager| {
        for step in 1..=10 {
            save(manager, rank, 2, &[step, step + 100]);
            std::thread::sleep(Duration::from_millis(15 * (step % 5)));
            manager.agree("all have saved", Ok(())).unwrap();
            manager.delete(step + 100).unwrap();
        }
        wait_until_copied(manager, rank);
    });
}

#[test]
fn later_metrics_survive_with_the_copies() {
    for machines in [["b", "c"], ["c", "b"]] {
        let nodes = Nodes::new(1);
        nodes.run(&["a", "b"], &copying(options()), |rank, manager| {
            save(manager, rank, 2, &[1]);
            if rank == 0 {
                manager.add_metrics(1, &BTreeMap::from([("loss".to_owned(), 0.5)])).unwrap();
            }
            save_copied(manager, rank, 2, &[2]);
        });
        nodes.lose("a");
        nodes.run(&machines, &copying(options()), |_, manager| {
            assert_eq!(manager.metrics(1).unwrap().get("loss"), Some(&0.5), "{machines:?}");
        });
    }
}

#[test]
fn one_file_of_a_machine_is_copied_as_a_whole() {
    let together = Options { files_per: FilesPer::Node, ..copying(options()) };
    for (lost, left) in [("a", "b"), ("b", "a")] {
        let nodes = Nodes::new(2);
        nodes.run(&["a", "b"], &together, |rank, manager| save_copied(manager, rank, 4, &[1]));
        nodes.lose(lost);
        nodes.run(&[left, "c"], &together, |rank, manager| {
            assert_model(manager, 1, 4, 1);
            wait_until_copied(manager, rank);
        });
        nodes.lose(left);
        // Machine c has all of it: its own copies.
        nodes.run(&["c", "d"], &together, |_, manager| assert_eq!(manager.latest_step().unwrap(), Some(1)));
    }
}

#[test]
fn thinned_steps_survive_a_loss() {
    let head = Retention::KeepEvery { steps: 1, items: Some(vec!["head".to_owned()]) };
    let retention = Retention::Any { of: vec![Retention::keep_latest(1), head] };
    let thinning = Options { retention, ..copying(keeping(1)) };
    for lost in ["a", "b"] {
        let nodes = Nodes::new(1);
        nodes.run(&["a", "b"], &thinning, |rank, manager| {
            for step in 1..=4 {
                save_copied(manager, rank, 2, &[step]);
            }
        });
        nodes.lose(lost);
        let left = if lost == "a" { "b" } else { "a" };
        nodes.run(&[left, "c"], &thinning, |_, manager| {
            assert_eq!(manager.all_steps().unwrap(), [1, 2, 3, 4], "{lost}");
            assert_model(manager, 4, 2, 4);
            let head = read(&manager.checkpoint(Some(1)).unwrap());
            assert!(head.len() == 1 && head[0].0.contains("head"), "{head:?}");
        });
    }
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
                std::thread::sleep(Duration::from_millis(5));
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
