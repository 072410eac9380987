//! Machines that carry their own files to a further tier.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use stepwell_core::format::index::LeafRecord;
use stepwell_core::format::manifest::COMPRESSED_CHUNKS;
use stepwell_core::load::LoadOptions;
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_manager::state::Holders;
use stepwell_manager::{
    Environment, Error, FilesPer, Manager, Options, SaveRequest, StateSource, TierPlace, TierRule,
};

use crate::common::tiers::{HOME as STORE, Worlds};
use crate::common::{LONG, read};
use crate::job::{committed, expected, key, options, part, tensor};
use crate::machines::{HOME, Nodes, assert_model, home, model, save};

/// The file of rank 1 in the item of all ranks.
const OF_RANK_1: &str = "/00001.data";

/// The columns of a tensor whose rows are cut into several chunks.
const WIDE: u64 = 1 << 20;

fn small(rank: u32, ranks: u32) -> StateSource {
    model(rank, ranks, 1)
}

/// A tensor of two wide rows for each rank.
fn wide(rank: u32, ranks: u32) -> StateSource {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    tree.push_leaf(Some(root), key("rows"));
    let rows = part([2 * u64::from(rank), 0], [2, WIDE], Holders::This);
    StateSource { tree, leaves: vec![tensor(2 * u64::from(ranks), WIDE, 1, vec![rows])] }
}

/// Opens the home as its only user.
fn read_home(nodes: &Nodes) -> Manager {
    let options = Options { read_only: true, ..options() };
    Manager::open(Path::new(HOME), options, nodes.environment()).unwrap()
}

fn assert_intact(home: &Manager, step: u64) {
    let report = home.checkpoint(Some(step)).unwrap().verify(&LoadOptions::default(), &mut |_| true).unwrap();
    assert!(report.damages.is_empty(), "{:?}", report.damages);
}

/// Saves step 1 on these machines, and carries it. Returns the reads that each rank has answered.
fn carried(
    nodes: &Nodes,
    machines: &[&str],
    options: &Options,
    state: impl Fn(u32, u32) -> StateSource + Sync,
    place: impl Fn(TierPlace) -> TierPlace + Sync,
) -> Vec<u64> {
    let ranks = machines.len() as u32 * nodes.per_node();
    let homes = |environment: &Environment| home(environment).into_iter().map(&place).collect();
    nodes.try_run(machines, options, homes, |rank, manager| {
        let manager = manager.unwrap();
        committed(&manager.save(SaveRequest::new(1, state(rank, ranks))).unwrap());
        if rank == 0 {
            manager.wait_carried(1, "home", LONG).unwrap();
            assert_eq!(manager.tiers().unwrap()[1].failure, None);
        }
        manager.agree("it is carried", Ok(())).unwrap();
        let reads = if rank == 0 { 0 } else { manager.carry_progress() };
        manager.close(Some(LONG)).unwrap();
        reads
    })
}

#[test]
fn each_machine_writes_its_own_files() {
    for files in [FilesPer::Rank, FilesPer::Node] {
        let nodes = Nodes::new(2);
        let options = Options { files_per: files, ..options() };
        let reads = carried(&nodes, &["a", "b", "c"], &options, small, |place| place);
        assert_eq!(reads, [0; 6], "no data pass through the main machine");
        let home = read_home(&nodes);
        assert_model(&home, 1, 6, 1);
        assert_intact(&home, 1);
        assert_eq!(nodes.names_at(HOME), ["step_00000001"]);
    }
}

#[test]
fn steps_of_earlier_jobs_are_carried_by_those_that_have_them() {
    let nodes = Nodes::new(1);
    nodes.save(&["a", "b", "c"], &options(), &[1, 2]);
    let reads = nodes.try_run(&["c", "d", "a", "b"], &options(), home, |rank, manager| {
        let manager = manager.unwrap();
        if rank == 0 {
            manager.wait_until_carried(Some(LONG)).unwrap();
        }
        manager.agree("they are carried", Ok(())).unwrap();
        let reads = if rank == 0 { 0 } else { manager.carry_progress() };
        manager.close(Some(LONG)).unwrap();
        reads
    });
    assert_eq!(reads, [0; 4]);
    for step in [1, 2] {
        assert_model(&read_home(&nodes), step, 3, step);
    }
}

#[test]
fn each_machine_compresses_its_own_files() {
    let compress = |place: TierPlace| TierPlace { compress: vec!["**".to_owned()], ..place };
    for files in [FilesPer::Rank, FilesPer::Node] {
        let nodes = Nodes::new(2);
        let options = Options { files_per: files, ..options() };
        carried(&nodes, &["a", "b"], &options, wide, compress);
        let home = read_home(&nodes);
        let manifest = home.manifest(Some(1)).unwrap();
        assert!(manifest.required_features.iter().any(|name| name == COMPRESSED_CHUNKS), "{files:?}");
        let index = home.checkpoint(Some(1)).unwrap().index().unwrap();
        assert!(index.leaves.iter().all(LeafRecord::is_compressed), "{files:?}");
        let found = read(&home.checkpoint(Some(1)).unwrap());
        assert_eq!(found[0].1, expected(8, WIDE, 1), "{files:?}");
        assert_intact(&home, 1);
    }
}

#[test]
fn machines_carry_to_a_store() {
    for compress in [vec![], vec!["**".to_owned()]] {
        let (nodes, worlds) = (Nodes::new(1), Worlds::new());
        carried(&nodes, &["a", "b", "c"], &options(), small, |place| TierPlace {
            path: PathBuf::from(STORE),
            environment: worlds.home_environment(&worlds.store),
            compress: compress.clone(),
            ..place
        });
        let home = worlds.read_home();
        assert_model(&home, 1, 3, 1);
        assert_intact(&home, 1);
    }
}

#[test]
fn the_leader_carries_alone_if_another_machine_cannot() {
    let nodes = Nodes::new(1);
    let of_b = nodes.disk().process();
    let newest_only = |environment: &Environment| {
        let rule = TierRule { every: 1, all: false };
        let mut places = home(environment);
        for place in &mut places {
            place.rule = rule;
            if environment.coordinator.rank() == 1 {
                place.environment.disk = Arc::new(of_b.clone());
            }
        }
        places
    };
    nodes.try_run(&["a", "b"], &options(), newest_only, |rank, manager| {
        let manager = manager.unwrap();
        save(&manager, rank, 2, &[1]);
        if rank == 0 {
            manager.wait_carried(1, "home", LONG).unwrap();
        }
        manager.agree("step 1 is carried", Ok(())).unwrap();
        if rank == 1 {
            assert_eq!(manager.carry_progress(), 0);
            of_b.kill();
        }
        manager.agree("the tier is away", Ok(())).unwrap();
        save(&manager, rank, 2, &[2]);
        if rank == 0 {
            manager.wait_carried(2, "home", LONG).unwrap();
        }
        manager.agree("step 2 is carried", Ok(())).unwrap();
        let reads = manager.carry_progress();
        for step in 3..=5 {
            save(&manager, rank, 2, &[step]);
            if rank == 0 {
                manager.wait_carried(step, "home", Duration::from_secs(5)).unwrap();
            }
            manager.agree("it is carried", Ok(())).unwrap();
        }
        // The leader has read the files of the other machine.
        assert!(rank == 0 || manager.carry_progress() >= reads + 3);
        manager.close(Some(LONG)).unwrap();
    });
    for step in 1..=5 {
        assert_model(&read_home(&nodes), step, 2, step);
    }
    assert_eq!(nodes.names_at(HOME).len(), 5, "nothing else is left");
}

#[test]
fn the_globs_of_the_leader_count() {
    for leader in [true, false] {
        let nodes = Nodes::new(1);
        let homes = |environment: &Environment| -> Vec<TierPlace> {
            let is_leader = environment.coordinator.rank() == 0;
            let globs = if is_leader == leader { vec!["**".to_owned()] } else { Vec::new() };
            home(environment)
                .into_iter()
                .map(|place| TierPlace { compress: globs.clone(), ..place })
                .collect()
        };
        nodes.try_run(&["a", "b"], &options(), homes, |rank, manager| {
            let manager = manager.unwrap();
            committed(&manager.save(SaveRequest::new(1, wide(rank, 2))).unwrap());
            if rank == 0 {
                manager.wait_carried(1, "home", LONG).unwrap();
            }
            manager.close(Some(LONG)).unwrap();
        });
        let home = read_home(&nodes);
        let index = home.checkpoint(Some(1)).unwrap().index().unwrap();
        assert_eq!(index.leaves.iter().any(LeafRecord::is_compressed), leader);
        assert_intact(&home, 1);
    }
}

#[test]
fn damage_on_another_machine_stays_there() {
    let nodes = Nodes::new(1);
    nodes.save(&["a", "b"], &options(), &[1]);
    let path = nodes.part_file("b", OF_RANK_1);
    assert!(nodes.disk().corrupt(&path, |bytes| bytes[4100] ^= 1), "{path}");
    nodes.try_run(&["a", "b"], &options(), home, |rank, manager| {
        let manager = manager.unwrap();
        if rank == 0 {
            let error = manager.wait_carried(1, "home", LONG).unwrap_err();
            assert!(matches!(&error, Error::NotCarried { why, .. } if why.contains(OF_RANK_1)), "{error}");
        }
        manager.agree("the damage is found", Ok(())).unwrap();
        assert_eq!(nodes.names_at(HOME), [""; 0], "nothing is left");
        // Each machine still carries its own files.
        let reads = manager.carry_progress();
        save(&manager, rank, 2, &[2]);
        if rank == 0 {
            manager.wait_carried(2, "home", LONG).unwrap();
        }
        manager.agree("step 2 is carried", Ok(())).unwrap();
        assert!(rank == 0 || manager.carry_progress() == reads, "the leader has read its files");
        manager.close(Some(LONG)).unwrap();
    });
}

#[test]
fn a_removed_step_is_not_carried_on() {
    for removed in ["delete", "rewind"] {
        let nodes = Nodes::new(1);
        // At this rate, a step takes minutes.
        let slow = |environment: &Environment| {
            home(environment)
                .into_iter()
                .map(|place| TierPlace { bytes_per_second: Some(40), ..place })
                .collect()
        };
        let begun = Instant::now();
        nodes.try_run(&["a", "b"], &options(), slow, |rank, manager| {
            let manager = manager.unwrap();
            save(&manager, rank, 2, &[1]);
            manager.agree("it is saved", Ok(())).unwrap();
            if removed == "delete" {
                std::thread::sleep(Duration::from_secs(1));
                manager.delete(1).unwrap();
            } else {
                save(&manager, rank, 2, &[2]);
                std::thread::sleep(Duration::from_secs(1));
                manager.rewind(1, None).unwrap();
                manager.delete(1).unwrap();
            }
            manager.close(Some(LONG)).unwrap();
        });
        assert!(begun.elapsed() < Duration::from_secs(20), "{removed}: {:?}", begun.elapsed());
        assert_eq!(nodes.names_at(HOME), [""; 0], "{removed}");
    }
}
