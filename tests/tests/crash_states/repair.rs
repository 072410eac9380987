//! A repair: at every crash state the step is as before or repaired, and nothing is lost.

use std::path::Path;

use stepwell_core::io::Disk;
use stepwell_core::io::simulated::SimDisk;
use stepwell_manager::Checkpoint;
use stepwell_manager::repair::{forget_damaged, repair};
use stepwell_tests::crash::{Profile, explore};
use stepwell_tests::steps::singular::{PATH, settle, with_a_checkpoint};
use stepwell_tests::steps::{states, world};

use super::crash;

const DAMAGED: &[u8] = b"no index";

fn item(disk: &SimDisk) -> std::sync::Arc<dyn stepwell_core::io::Dir> {
    disk.open_dir(Path::new(&format!("{PATH}/i0"))).unwrap()
}

fn restored(disk: &SimDisk, seed: u64) -> Result<String, String> {
    let opened = Checkpoint::open(Path::new(PATH), &world::environment(disk, seed));
    states::verify(&opened.map_err(|error| error.to_string())?)
}

/// The step restores, or its damaged index is kept; repairing it (again) makes it restore.
fn check(disk: &SimDisk) -> Result<(), String> {
    if restored(disk, 1 << 40).is_err() {
        let dir = item(disk);
        let kept = |name| dir.read_file(name, 1 << 20).is_ok_and(|bytes| bytes == DAMAGED);
        if !kept("index") && !kept(".index.damaged") {
            return Err("the damaged index is lost before there is a repaired one".to_owned());
        }
        let environment = world::environment(disk, 1 << 41);
        repair(Path::new(PATH), &environment, false).map_err(|error| error.to_string())?;
    }
    match restored(disk, 1 << 42)?.as_str() {
        "a" => Ok(()),
        other => Err(format!("it holds attempt {other}")),
    }
}

#[test]
fn a_crash_in_a_repair_leaves_the_step_as_it_was_or_repaired() {
    for kept in [true, false] {
        let run = with_a_checkpoint().unwrap();
        let dir = item(&run.disk);
        let whole = dir.read_file("index", 1 << 20).unwrap();
        dir.remove_file("index").unwrap();
        dir.write_file("index", DAMAGED).unwrap();
        dir.sync().unwrap();
        settle(&run);
        assert!(restored(&run.disk, 1).is_err());
        let before = run.disk.image();
        let dry = repair(Path::new(PATH), &run.environment(), true).unwrap();
        assert_eq!(run.disk.image(), before, "a dry run writes nothing");
        settle(&run);
        let report = repair(Path::new(PATH), &run.environment(), false).unwrap();
        assert_eq!(report, dry);
        let damaged: Vec<_> = report.iter().filter(|index| index.damage.is_some()).collect();
        assert_eq!(damaged.len(), 1);
        assert!(!damaged[0].recorded, "the manifest's checksum holds of the rebuilt index");
        assert_eq!(dir.read_file("index", 1 << 20).unwrap(), whole);
        assert_eq!(dir.read_file(".index.damaged", 1 << 20).unwrap(), DAMAGED);
        if !kept {
            forget_damaged(Path::new(PATH), &run.environment()).unwrap();
            assert!(dir.stat(".index.damaged").unwrap().is_none());
        }
        let log = run.disk.log();
        for profile in [Profile::PosixMinimal, Profile::OrderedMetadata] {
            match explore(&log, &crash(profile), |disk, _| check(disk)) {
                Ok(explored) => assert!(explored.distinct > 1),
                Err(failure) => panic!("{profile:?}: {failure}\nthe scenario:\n{log}"),
            }
        }
    }
}
