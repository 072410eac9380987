//! A root on the local disks of several machines. Each is a directory of the simulated disk. They
//! read from each other over TCP.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use stepwell_core::io::simulated::{Action, Fault, OperationKind, SimDisk};
use stepwell_core::io::{Disk, Rename};
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_manager::coordination::SingleProcess;
use stepwell_manager::state::Holders;
use stepwell_manager::{
    Environment, Exists, FilesPer, Manager, Options, Outcome, Result, Retention, SaveRequest, StateSource,
    StepName, TierPlace, TierRule,
};

use crate::common::{LONG, kill_at_write, read};
use crate::job::{Job, committed, expected, failure, key, options, part, tensor};

const COLUMNS: u64 = 16;
/// The rows of each rank.
const ROWS: u64 = 4;
pub(crate) const HOME: &str = "/home/run";
const ENOSPC: i32 = 28;

/// Rows cut over the ranks, and an item of the last rank.
pub(crate) fn model(rank: u32, ranks: u32, seed: u64) -> StateSource {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    tree.push_leaf(Some(root), key("rows"));
    let rows = part([ROWS * u64::from(rank), 0], [ROWS, COLUMNS], Holders::This);
    let mut leaves = vec![tensor(ROWS * u64::from(ranks), COLUMNS, seed as u8, vec![rows])];
    if rank + 1 == ranks {
        let head = tree.push_container(Some(root), key("head"), ContainerKind::Dict);
        tree.push_leaf(Some(head), key("w"));
        let whole = part([0, 0], [8, COLUMNS], Holders::This);
        leaves.push(tensor(8, COLUMNS, seed as u8 ^ 1, vec![whole]));
    }
    StateSource { tree, leaves }
}

/// The step reads back whole, as `ranks` ranks have saved it.
pub(crate) fn assert_model(manager: &Manager, step: u64, ranks: u32, seed: u64) {
    let found = read(&manager.checkpoint(Some(step)).unwrap());
    assert_eq!(found[0].1, expected(ROWS * u64::from(ranks), COLUMNS, seed as u8));
    assert_eq!(found[1].1, expected(8, COLUMNS, seed as u8 ^ 1));
}

/// Tells a directory of a save by its step.
fn told(name: &str, prefix: &str, what: &str) -> Option<String> {
    let rest = name.strip_prefix(prefix)?;
    Some(format!("{what} {}", rest.split('-').next().unwrap().parse::<u64>().unwrap()))
}

/// Some machines, with as many ranks on each.
pub(crate) struct Nodes {
    job: Job,
    per_node: u32,
}

impl Nodes {
    pub(crate) fn new(per_node: u32) -> Self {
        Self { job: Job::new(), per_node }
    }

    pub(crate) fn per_node(&self) -> u32 {
        self.per_node
    }

    /// The environment of a process beside the jobs.
    pub(crate) fn environment(&self) -> Environment {
        self.job.environment(SingleProcess)
    }

    pub(crate) fn disk(&self) -> &SimDisk {
        &self.job.disk
    }

    /// Runs a job on these machines. Each rank gets its manager, or the reason why it has none.
    pub(crate) fn try_run<T: Send>(
        &self,
        nodes: &[&str],
        options: &Options,
        places: impl Fn(&Environment) -> Vec<TierPlace> + Sync,
        rank: impl Fn(u32, Result<Manager>) -> T + Sync,
    ) -> Vec<T> {
        let options = Options { per_machine: true, ..options.clone() };
        self.job.run(nodes.len() as u32 * self.per_node, self.per_node, |number, environment| {
            let path = format!("/{}/run", nodes[(number / self.per_node) as usize]);
            let places = places(&environment);
            rank(number, Manager::open_with_tiers(Path::new(&path), options.clone(), environment, &places))
        })
    }

    /// Without a further tier. Closes the managers.
    pub(crate) fn run<T: Send>(
        &self,
        nodes: &[&str],
        options: &Options,
        rank: impl Fn(u32, &Manager) -> T + Sync,
    ) -> Vec<T> {
        self.try_run(nodes, options, |_| Vec::new(), |number, manager| closed(number, manager, &rank))
    }

    /// With a further tier on a disk that all share.
    pub(crate) fn run_with_home<T: Send>(
        &self,
        nodes: &[&str],
        options: &Options,
        rank: impl Fn(u32, &Manager) -> T + Sync,
    ) -> Vec<T> {
        self.try_run(nodes, options, home, |number, manager| closed(number, manager, &rank))
    }

    /// With a further tier that takes these steps.
    fn run_with_rule(
        &self,
        nodes: &[&str],
        options: &Options,
        rule: TierRule,
        rank: impl Fn(u32, &Manager) + Sync,
    ) {
        let ruled = |environment: &Environment| -> Vec<TierPlace> {
            home(environment).into_iter().map(|place| TierPlace { rule, ..place }).collect()
        };
        self.try_run(nodes, options, ruled, |number, manager| closed(number, manager, &rank));
    }

    /// Saves these steps, as ranks of these machines.
    pub(crate) fn save(&self, nodes: &[&str], options: &Options, steps: &[u64]) {
        let ranks = nodes.len() as u32 * self.per_node;
        self.run(nodes, options, |rank, manager| save(manager, rank, ranks, steps));
    }

    /// The names in the root of a machine that are not the root's own. A part is told by its step.
    pub(crate) fn names(&self, node: &str) -> Vec<String> {
        self.names_at(&format!("/{node}/run"))
    }

    /// The names in a root that are not the root's own.
    pub(crate) fn names_at(&self, root: &str) -> Vec<String> {
        let image = self.disk().image();
        let Some(root) = image.get(root) else { return Vec::new() };
        let names = root.entries().unwrap().iter().map(|(name, _)| name.to_string());
        let of_save = |name: &str| told(name, ".part-", "part").or_else(|| told(name, ".copy-", "copy"));
        names.filter(|name| name != ".stepwell").map(|name| of_save(&name).unwrap_or(name)).collect()
    }

    /// The path of a file of the first item, in the first part on a machine.
    pub(crate) fn part_file(&self, node: &str, name: &str) -> String {
        let image = self.disk().image();
        let root = image.get(&format!("/{node}/run")).unwrap();
        let part = root.entries().unwrap().iter().find(|(name, _)| name.starts_with(".part-")).unwrap();
        let item = part.1.entries().unwrap().iter().find(|(_, node)| node.entries().is_some()).unwrap();
        format!("/{node}/run/{}/{}{name}", part.0, item.0)
    }

    /// The paths of the data files on a machine that end so, without copies of others.
    pub(crate) fn data_files(&self, node: &str, end: &str) -> Vec<String> {
        self.files_of(node, end, |dir| !dir.starts_with(".copy-"))
    }

    /// The paths of the copies of data files of others on a machine that end so.
    pub(crate) fn copied_files(&self, node: &str, end: &str) -> Vec<String> {
        self.files_of(node, end, |dir| dir.starts_with(".copy-"))
    }

    fn files_of(&self, node: &str, end: &str, is_chosen: impl Fn(&str) -> bool) -> Vec<String> {
        let image = self.disk().image();
        let mut found = Vec::new();
        for (step, dir) in image.get(&format!("/{node}/run")).unwrap().entries().unwrap() {
            for (item, _) in dir.entries().into_iter().flatten().filter(|_| is_chosen(step)) {
                let path = format!("/{node}/run/{step}/{item}{end}");
                found.extend(image.get(&path).map(|_| path));
            }
        }
        found
    }

    /// A machine whose disk is lost.
    pub(crate) fn lose(&self, node: &str) {
        self.disk()
            .open_dir(Path::new("/"))
            .unwrap()
            .rename(node, &format!("lost-{node}"), Rename::NoReplace)
            .unwrap();
    }
}

fn closed<T>(number: u32, manager: Result<Manager>, rank: impl Fn(u32, &Manager) -> T) -> T {
    let manager = manager.unwrap();
    let told = rank(number, &manager);
    manager.close(Some(LONG)).unwrap();
    told
}

pub(crate) fn home(environment: &Environment) -> Vec<TierPlace> {
    vec![TierPlace {
        name: "home".to_owned(),
        path: PathBuf::from(HOME),
        options: options(),
        environment: Environment { coordinator: Arc::new(SingleProcess), ..environment.clone() },
        rule: TierRule { every: 1, all: true },
        bytes_per_second: None,
        compress: Vec::new(),
    }]
}

pub(crate) fn save(manager: &Manager, rank: u32, ranks: u32, steps: &[u64]) {
    for &step in steps {
        committed(&manager.save(SaveRequest::new(step, model(rank, ranks, step))).unwrap());
    }
}

pub(crate) fn keeping(steps: u32) -> Options {
    Options { retention: Retention::keep_latest(steps.into()), grace: Duration::ZERO, ..options() }
}

const STEP_1: &str = "step_00000001";
const STEP_2: &str = "step_00000002";

#[test]
fn each_machine_keeps_its_files_and_all_ranks_read_the_whole() {
    let nodes = Nodes::new(2);
    nodes.run(&["a", "b"], &options(), |rank, manager| {
        assert_eq!(manager.latest_step().unwrap(), None);
        save(manager, rank, 4, &[1, 2]);
        assert_eq!(manager.all_steps().unwrap(), [1, 2]);
        assert_model(manager, 1, 4, 1);
        assert_model(manager, 2, 4, 2);
    });
    assert_eq!(nodes.names("a"), [STEP_1, STEP_2]);
    assert_eq!(nodes.names("b"), ["part 1", "part 2"]);
    nodes.run(&["a", "b"], &options(), |rank, manager| {
        assert_eq!(manager.latest_step().unwrap(), Some(2));
        assert_model(manager, 1, 4, 1);
        save(manager, rank, 4, &[3]);
        assert_model(manager, 3, 4, 3);
    });
    assert_eq!(nodes.names("b"), ["part 1", "part 2", "part 3"]);
}

#[test]
fn all_ranks_read_the_shared_file_of_each_machine() {
    let nodes = Nodes::new(2);
    let together = Options { files_per: FilesPer::Node, ..options() };
    nodes.run(&["a", "b", "c"], &together, |rank, manager| {
        save(manager, rank, 6, &[1]);
        assert_model(manager, 1, 6, 1);
    });
    nodes.run(&["c", "d", "b", "a"], &together, |_, manager| assert_model(manager, 1, 6, 1));
}

#[test]
fn another_machine_may_lead_and_the_ranks_may_be_others() {
    let nodes = Nodes::new(2);
    nodes.save(&["a", "b"], &options(), &[1, 2]);
    nodes.run(&["b", "a"], &options(), |rank, manager| {
        assert_eq!(manager.all_steps().unwrap(), [1, 2]);
        assert_model(manager, 2, 4, 2);
        save(manager, rank, 4, &[3]);
    });
    assert_eq!(nodes.names("b"), [STEP_1, STEP_2, "step_00000003"]);
    assert_eq!(nodes.names("a"), ["part 1", "part 2", "part 3"]);
    // A new machine leads, with other ranks.
    let nodes = Nodes { per_node: 1, ..nodes };
    nodes.run(&["c", "a", "b"], &options(), |rank, manager| {
        assert_eq!(manager.all_steps().unwrap(), [1, 2, 3]);
        for step in 1..=3 {
            assert_model(manager, step, 4, step);
        }
        save(manager, rank, 3, &[4]);
        assert_model(manager, 4, 3, 4);
    });
    assert_eq!(nodes.names("b"), ["part 1", "part 2", "part 3", "part 4"]);
    nodes.run(&["a", "b", "c"], &options(), |_, manager| {
        assert_eq!(manager.all_steps().unwrap(), [1, 2, 3, 4]);
        assert_model(manager, 1, 4, 1);
        assert_model(manager, 4, 3, 4);
    });
}

#[test]
fn what_is_deleted_leaves_all_machines() {
    let nodes = Nodes::new(1);
    nodes.save(&["a", "b", "c"], &keeping(2), &[1, 2, 3, 4]);
    nodes.run(&["a", "b", "c"], &keeping(2), |_, manager| {
        assert_eq!(manager.all_steps().unwrap(), [3, 4]);
        manager.agree("all have looked", Ok(())).unwrap();
        manager.delete(3).unwrap();
    });
    for _ in 0..2 {
        // The next job removes the rest.
        nodes.run(&["a", "b", "c"], &keeping(2), |_, _| ());
    }
    assert_eq!(nodes.names("a"), ["step_00000004"]);
    assert_eq!(nodes.names("b"), ["part 4"]);
    assert_eq!(nodes.names("c"), ["part 4"]);
}

#[test]
fn a_job_without_a_machine_goes_on_from_a_further_tier() {
    let nodes = Nodes::new(1);
    nodes.run_with_home(&["a", "b", "c"], &keeping(1), |rank, manager| save(manager, rank, 3, &[1, 2]));
    nodes.lose("b");
    nodes.run_with_home(&["a", "c", "d"], &keeping(1), |rank, manager| {
        assert_eq!(manager.latest_step().unwrap(), Some(2));
        assert_model(manager, 2, 3, 2);
        save(manager, rank, 3, &[3]);
        assert_model(manager, 3, 3, 3);
    });
    nodes.run_with_home(&["a", "c", "d"], &keeping(1), |_, manager| {
        assert_eq!(manager.all_steps().unwrap(), [1, 2, 3]);
        assert_model(manager, 1, 3, 1);
    });
    assert_eq!(nodes.names("a"), ["step_00000003"]);
    assert_eq!(nodes.names("c"), ["part 3"]);
    assert_eq!(nodes.names("d"), ["part 3"]);
}

#[test]
fn a_job_without_its_main_machine_goes_on_from_a_further_tier() {
    let nodes = Nodes::new(1);
    nodes.run_with_home(&["a", "b"], &keeping(1), |rank, manager| save(manager, rank, 2, &[1, 2]));
    nodes.lose("a");
    nodes.run_with_home(&["b", "c"], &keeping(1), |rank, manager| {
        assert_eq!(manager.latest_step().unwrap(), Some(2));
        assert_model(manager, 2, 2, 2);
        save(manager, rank, 2, &[3]);
    });
    nodes.run_with_home(&["b", "c"], &keeping(1), |_, manager| {
        assert_eq!(manager.all_steps().unwrap(), [1, 2, 3]);
    });
    // The parts of steps that were on the lost machine go once the run has gone on.
    assert_eq!(nodes.names("b"), ["step_00000003"]);
    assert_eq!(nodes.names("c"), ["part 3"]);
}

#[test]
fn a_step_that_lacks_a_machine_waits_for_it_in_a_branch() {
    let nodes = Nodes::new(1);
    nodes.run_with_home(&["a", "b"], &options(), |rank, manager| {
        save(manager, rank, 2, &[1]);
        if rank == 0 {
            manager.wait_until_carried(Some(LONG)).unwrap();
        }
    });
    // Not carried: this job knows of no further tier.
    nodes.save(&["a", "b"], &options(), &[2]);
    nodes.run_with_home(&["a", "c"], &options(), |_, manager| {
        assert_eq!(manager.latest_step().unwrap(), Some(1));
        assert_model(manager, 1, 2, 1);
    });
    let names = nodes.names("a");
    assert!(
        names.iter().any(|name| name.starts_with(".branch-incomplete-") && name.ends_with(STEP_2)),
        "{names:?}"
    );
    assert!(nodes.names("b").contains(&"part 2".to_owned()));
    // It is back.
    nodes.run_with_home(&["a", "b"], &options(), |_, manager| {
        assert_eq!(manager.all_steps().unwrap(), [1, 2]);
        assert_model(manager, 2, 2, 2);
    });
}

#[test]
fn a_machine_that_comes_back_brings_no_old_steps_back() {
    let nodes = Nodes::new(1);
    nodes.run_with_home(&["a", "b"], &options(), |rank, manager| save(manager, rank, 2, &[1, 2]));
    nodes.run_with_home(&["b", "c"], &options(), |rank, manager| {
        assert_eq!(manager.latest_step().unwrap(), Some(2));
        manager.delete(2).unwrap();
        let again = SaveRequest::new(2, model(rank, 2, 22));
        committed(&manager.save(again).unwrap());
    });
    for machines in [["a", "b"], ["b", "a"]] {
        nodes.run_with_home(&machines, &options(), |_, manager| {
            assert_eq!(manager.all_steps().unwrap(), [1, 2], "{machines:?}");
            assert_model(manager, 2, 2, 22);
            assert_model(manager, 1, 2, 1);
        });
    }
}

#[test]
fn a_step_that_is_saved_again_is_replaced_on_all_machines() {
    let nodes = Nodes::new(1);
    nodes.run(&["a", "b"], &options(), |rank, manager| {
        save(manager, rank, 2, &[1]);
        let again = SaveRequest { exists: Exists::Replace, ..SaveRequest::new(1, model(rank, 2, 7)) };
        committed(&manager.save(again).unwrap());
        assert_model(manager, 1, 2, 7);
    });
    nodes.run(&["a", "b"], &options(), |_, manager| assert_model(manager, 1, 2, 7));
    nodes.run(&["a", "b"], &options(), |_, _| ());
    assert_eq!(nodes.names("a"), [STEP_1]);
    assert_eq!(nodes.names("b"), ["part 1"]);
}

#[test]
fn steps_of_a_branch_keep_their_files_on_all_machines() {
    let nodes = Nodes::new(1);
    nodes.run(&["a", "b"], &options(), |rank, manager| {
        save(manager, rank, 2, &[1, 2]);
        manager.rewind(1, Some("before")).unwrap();
        let again = SaveRequest::new(2, model(rank, 2, 5));
        committed(&manager.save(again).unwrap());
    });
    nodes.run(&["b", "a"], &options(), |_, manager| assert_model(manager, 2, 2, 5));
    assert_eq!(nodes.names("a"), ["part 1", "part 2", "part 2"]);
    nodes.run(&["a", "b"], &options(), |_, manager| {
        assert_eq!(manager.delete_branch("before").unwrap().len(), 1);
    });
    nodes.run(&["a", "b"], &options(), |_, manager| assert_eq!(manager.all_steps().unwrap(), [1, 2]));
    assert_eq!(nodes.names("b"), ["part 1", "part 2"]);
}

#[test]
fn a_save_that_fails_on_one_machine_leaves_nothing() {
    let nodes = Nodes::new(1);
    let barrier = Barrier::new(3);
    nodes.run(&["a", "b", "c"], &options(), |rank, manager| {
        save(manager, rank, 3, &[1]);
        barrier.wait();
        if rank == 0 {
            nodes
                .disk()
                .inject(Fault::on(OperationKind::Write, Action::Fail(ENOSPC)).at("/b/run/.part-00000002"));
        }
        barrier.wait();
        let save = manager.save(SaveRequest::new(2, model(rank, 3, 2))).unwrap();
        failure(&save);
        barrier.wait();
        nodes.disk().clear_faults();
        barrier.wait();
        committed(&manager.save(SaveRequest::new(3, model(rank, 3, 3))).unwrap());
        assert_eq!(manager.all_steps().unwrap(), [1, 3]);
    });
    nodes.run(&["a", "b", "c"], &options(), |_, manager| assert_model(manager, 3, 3, 3));
    for node in ["b", "c"] {
        assert_eq!(nodes.names(node), ["part 1", "part 3"], "{node}");
    }
}

#[test]
fn a_rewind_removes_steps_that_wait_for_a_machine() {
    for removed_at_home in [false, true] {
        let nodes = Nodes::new(1);
        let second = TierRule { every: 2, all: true };
        nodes.run_with_rule(&["a", "b"], &options(), second, |rank, manager| {
            save(manager, rank, 2, &[1, 2, 3, 5]);
            if rank == 0 {
                manager.wait_until_carried(Some(LONG)).unwrap();
            }
        });
        nodes.run_with_rule(&["a", "c"], &options(), second, |_, manager| {
            assert_eq!(manager.all_steps().unwrap(), [2]);
            if !removed_at_home {
                manager.rewind(2, None).unwrap();
            }
        });
        if removed_at_home {
            let home = Manager::open(Path::new(HOME), options(), nodes.environment()).unwrap();
            home.rewind(2, None).unwrap();
        }
        nodes.run_with_rule(&["a", "b"], &options(), second, |_, manager| {
            assert_eq!(manager.latest_step().unwrap(), Some(2), "{removed_at_home}");
        });
    }
}

#[test]
fn damage_on_one_machine_is_read_from_a_further_tier() {
    let nodes = Nodes::new(1);
    nodes.run_with_home(&["a", "b"], &options(), |rank, manager| {
        save(manager, rank, 2, &[1]);
        if rank == 0 {
            manager.wait_until_carried(Some(LONG)).unwrap();
        }
    });
    let path = nodes.part_file("b", "/00001.data");
    assert!(nodes.disk().corrupt(&path, |bytes| bytes[4100] ^= 1), "{path}");
    nodes.run_with_home(&["a", "b"], &options(), |_, manager| assert_model(manager, 1, 2, 1));
}

#[test]
fn a_killed_process_leaves_nothing_and_loses_nothing() {
    for killed in [0, 1] {
        let nodes = Nodes::new(1);
        nodes.save(&["a", "b"], &options(), &[1]);
        let told = nodes.job.run(2, 1, |rank, environment| {
            let process = nodes.disk().process();
            let environment = Environment { disk: Arc::new(process.clone()), ..environment };
            let impatient = Options { per_machine: true, stall_timeout: Duration::from_secs(2), ..options() };
            let path = ["/a/run", "/b/run"][rank as usize];
            let manager = Manager::open(Path::new(path), impatient, environment).unwrap();
            if rank == killed {
                kill_at_write(&process, "00000002");
            }
            let save = manager.save(SaveRequest::new(2, model(rank, 2, 2)));
            let outcome = save.map(|save| save.wait(Some(LONG)).unwrap());
            let _ = manager.close(Some(Duration::from_secs(1)));
            matches!(outcome, Ok(Some(Outcome::Committed)))
        });
        assert_eq!(told, [false, false]);
        nodes.run(&["a", "b"], &options(), |_, manager| {
            assert_eq!(manager.all_steps().unwrap(), [1]);
            assert_model(manager, 1, 2, 1);
        });
        nodes.run(&["a", "b"], &options(), |_, _| ());
        assert_eq!(nodes.names("a"), [STEP_1]);
        assert_eq!(nodes.names("b"), ["part 1"]);
    }
}

#[test]
fn parts_of_an_absent_main_machine_stay_at_first() {
    let nodes = Nodes::new(1);
    nodes.run_with_home(&["a", "b"], &options(), |rank, manager| {
        save(manager, rank, 2, &[1]);
        if rank == 0 {
            manager.wait_until_carried(Some(LONG)).unwrap();
        }
    });
    // Not carried.
    nodes.save(&["a", "b"], &options(), &[2]);
    for _ in 0..2 {
        nodes.run_with_home(&["b", "c"], &options(), |_, manager| {
            assert_eq!(manager.latest_step().unwrap(), Some(1));
        });
        assert!(nodes.names("b").contains(&"part 2".to_owned()), "{:?}", nodes.names("b"));
    }
    // It is back, and the run has not gone on.
    nodes.run_with_home(&["a", "b"], &options(), |_, manager| {
        assert_eq!(manager.all_steps().unwrap(), [1, 2]);
        assert_model(manager, 2, 2, 2);
    });
    nodes.run_with_home(&["b", "c"], &options(), |rank, manager| {
        save(manager, rank, 2, &[3]);
        if rank == 0 {
            manager.wait_until_carried(Some(LONG)).unwrap();
        }
    });
    nodes.run_with_home(&["b", "c"], &options(), |_, manager| {
        assert_eq!(manager.latest_step().unwrap(), Some(3));
    });
    nodes.run_with_home(&["a", "b"], &options(), |_, manager| {
        assert_eq!(manager.latest_step().unwrap(), Some(3));
    });
}

#[test]
fn a_job_that_saves_nothing_sets_no_step_aside() {
    let nodes = Nodes::new(1);
    nodes.save(&["a", "b"], &options(), &[1, 2]);
    nodes.run_with_home(&["b", "c"], &options(), |_, manager| {
        assert_eq!(manager.latest_step().unwrap(), None);
    });
    nodes.run_with_home(&["a", "c"], &options(), |_, manager| {
        assert_eq!(manager.latest_step().unwrap(), None);
    });
    for machines in [["a", "b"], ["b", "a"]] {
        nodes.run_with_home(&machines, &options(), |_, manager| {
            assert_eq!(manager.all_steps().unwrap(), [1, 2], "{machines:?}");
            assert_model(manager, 2, 2, 2);
        });
    }
}

#[test]
fn a_part_of_a_run_is_not_opened_as_a_whole() {
    let nodes = Nodes::new(1);
    nodes.save(&["a", "b"], &options(), &[1]);
    for path in ["/a/run", "/b/run"] {
        let refused = Manager::open(Path::new(path), options(), nodes.job.environment(SingleProcess));
        let error = refused.map(drop).unwrap_err();
        assert!(error.to_string().contains("one machine's part"), "{error}");
    }
    nodes.run(&["a", "b"], &options(), |_, manager| assert_model(manager, 1, 2, 1));
    // One machine has all of it.
    nodes.save(&["c"], &options(), &[1]);
    Manager::open(Path::new("/c/run"), options(), nodes.job.environment(SingleProcess)).unwrap();
}

#[test]
fn a_machine_that_has_led_often_is_not_the_newest_for_that() {
    let nodes = Nodes::new(1);
    for step in 1..=5 {
        nodes.save(&["a", "b"], &options(), &[step]);
    }
    nodes.save(&["b", "c"], &options(), &[51, 52]);
    for machines in [["a", "b", "c"], ["c", "a", "b"]] {
        nodes.run(&machines, &options(), |_, manager| {
            let steps = manager.all_steps().unwrap();
            assert!(steps.ends_with(&[51, 52]), "{machines:?}: {steps:?}");
            assert_model(manager, 52, 2, 52);
        });
    }
}

/// Opens a job of two machines, one of which dies at an operation. Returns the operations that it
/// did.
pub(crate) fn open_and_die(nodes: &Nodes, paths: [&str; 2], dies: u32, at: Option<u64>) -> u64 {
    let told = nodes.job.run(2, 1, |rank, environment| {
        let process = nodes.disk().process();
        let environment = Environment { disk: Arc::new(process.clone()), ..environment };
        let impatient = Options { per_machine: true, stall_timeout: Duration::from_millis(700), ..options() };
        if rank == dies
            && let Some(at) = at
        {
            process.kill_at(at);
        }
        let opened = Manager::open(Path::new(paths[rank as usize]), impatient, environment);
        let operations = process.operations();
        if let Ok(manager) = opened {
            let _ = manager.close(Some(Duration::from_millis(200)));
        }
        operations
    });
    told[dies as usize]
}

#[test]
fn a_hand_over_may_end_at_any_operation() {
    // A run takes a second.
    let stride = if std::env::var_os("STEPWELL_LONG").is_some() { 1 } else { 23 };
    let nodes = || {
        let nodes = Nodes::new(1);
        nodes.save(&["a", "b"], &options(), &[1, 2]);
        nodes
    };
    let paths = ["/b/run", "/a/run"];
    for dies in [0, 1] {
        let operations = open_and_die(&nodes(), paths, dies, None);
        assert!(operations > 20);
        for at in (1..operations).step_by(stride) {
            let nodes = nodes();
            open_and_die(&nodes, paths, dies, Some(at));
            for machines in [["b", "a"], ["a", "b"]] {
                nodes.run(&machines, &options(), |_, manager| {
                    let what = format!("rank {dies} at {at}, {machines:?}");
                    assert_eq!(manager.all_steps().unwrap(), [1, 2], "{what}");
                    assert_model(manager, 1, 2, 1);
                    assert_model(manager, 2, 2, 2);
                });
            }
        }
    }
}

#[test]
fn the_names_of_the_steps_follow_the_run() {
    let nodes = Nodes::new(1);
    let named = Options { step_name: Some(StepName::new("ckpt-", 5).unwrap()), ..options() };
    nodes.save(&["a", "b"], &named, &[1]);
    nodes.save(&["b", "a"], &options(), &[2]);
    assert_eq!(nodes.names("b"), ["ckpt-00001", "ckpt-00002"]);
    nodes.run(&["a", "b"], &options(), |_, manager| {
        assert_eq!(manager.all_steps().unwrap(), [1, 2]);
        assert_model(manager, 1, 2, 1);
    });
    let other = Options { step_name: Some(StepName::new("x-", 5).unwrap()), ..options() };
    let refused = |_: u32, manager: Result<Manager>| manager.map(drop).unwrap_err().to_string();
    let told = nodes.try_run(&["b", "a"], &other, |_| Vec::new(), refused);
    assert!(told.iter().all(|error| error.contains("ckpt-")), "{told:?}");
}

#[test]
fn machines_that_share_a_directory_are_refused() {
    let nodes = Nodes::new(2);
    let refused = |_: u32, manager: Result<Manager>| manager.map(drop).unwrap_err().to_string();
    let told = nodes.try_run(&["a", "a"], &options(), |_| Vec::new(), refused);
    assert!(told.iter().all(|error| error.contains("several machines share /a/run")), "{told:?}");
    // The directory works for one machine.
    nodes.save(&["a"], &options(), &[1]);
    let told = nodes.job.run(2, 2, |rank, environment| {
        let path = ["/a/run", "/b/run"][rank as usize];
        let spread = Options { per_machine: true, ..options() };
        Manager::open(Path::new(path), spread, environment).map(drop).unwrap_err().to_string()
    });
    assert!(told.iter().all(|error| error.contains("have several directories")), "{told:?}");
    assert_eq!(nodes.names("a"), [STEP_1]);
}

#[test]
fn a_root_is_opened_again_in_the_same_processes() {
    let nodes = Nodes::new(1);
    nodes.run(&["a", "b"], &options(), |rank, manager| save(manager, rank, 2, &[1]));
    nodes.job.run(2, 1, |rank, environment| {
        let path = ["/a/run", "/b/run"][rank as usize];
        let open = |environment: &Environment| {
            let spread = Options { per_machine: true, ..options() };
            Manager::open(Path::new(path), spread, environment.clone()).unwrap()
        };
        let first = open(&environment);
        let read = first.checkpoint(Some(1)).unwrap();
        first.close(Some(LONG)).unwrap();
        let second = open(&environment);
        save(&second, rank, 2, &[2]);
        second.close(Some(LONG)).unwrap();
        drop(read);
    });
}

#[test]
fn a_failed_rank_does_not_wait_for_the_leader() {
    let nodes = Nodes::new(1);
    let barrier = Barrier::new(2);
    nodes.try_run(&["a", "b"], &options(), home, |rank, manager| {
        let manager = manager.unwrap();
        if rank == 1 {
            let begun = Instant::now();
            manager.leave_at_once();
            manager.close(Some(LONG)).unwrap();
            assert!(begun.elapsed() < Duration::from_secs(5));
        }
        barrier.wait();
        if rank == 0 {
            let _ = manager.close(Some(LONG));
        }
    });
}

#[test]
fn a_reader_on_another_machine_keeps_a_retired_step() {
    let nodes = Nodes::new(1);
    let barrier = Barrier::new(2);
    nodes.run(&["a", "b"], &keeping(1), |rank, manager| {
        save(manager, rank, 2, &[1]);
        let held = (rank == 1).then(|| manager.checkpoint(Some(1)).unwrap());
        save(manager, rank, 2, &[2, 3]);
        // The host of the other machine looks for parts every two seconds.
        std::thread::sleep(Duration::from_secs(5));
        if let Some(held) = held {
            let found = read(&held);
            assert_eq!(found[0].1, expected(ROWS * 2, COLUMNS, 1));
        }
        barrier.wait();
    });
}
