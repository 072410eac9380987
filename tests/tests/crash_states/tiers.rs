//! Two tiers: a crash at any instant, also of the carrier, leaves every copy whole or not there. No
//! step is lost, and none comes back after a rewind.

use std::path::{Path, PathBuf};
use std::time::Duration;

use stepwell_core::io::simulated::{Image, SimDisk};
use stepwell_manager::{Manager, Options, Outcome, Retention, SaveRequest, TierPlace, TierRule};
use stepwell_tests::crash::{Explorer, Marks, Options as Crash};
use stepwell_tests::steps::run::options;
use stepwell_tests::steps::{ROOT, states, world};

use super::{keeping, quick};

const HOME: &str = "shared/home";
const PATIENCE: Duration = Duration::from_secs(60);

/// Opens a near tier with one step, and a home tier with all, compressed by those globs.
fn open(disk: &SimDisk, seed: u64, compress: &[&str]) -> Result<Manager, String> {
    let home = TierPlace {
        name: "home".to_owned(),
        path: PathBuf::from(HOME),
        options: options(),
        environment: world::environment(disk, seed + 1),
        rule: TierRule { every: 1, all: true },
        bytes_per_second: None,
        compress: compress.iter().map(|&glob| glob.to_owned()).collect(),
    };
    let near = keeping(Retention::keep_latest(1));
    Manager::open_with_tiers(Path::new(ROOT), near, world::environment(disk, seed), &[home])
        .map_err(|error| format!("opening: {error}"))
}

fn save(manager: &Manager, disk: &SimDisk, step: u64, tag: &str) {
    disk.mark(&format!("saving {step} {tag}"));
    let mut request = SaveRequest::new(step, states::state(step, tag).unwrap());
    request.custom_metadata = serde_json::json!({ "tag": tag });
    let save = manager.save(request).unwrap();
    assert!(matches!(save.wait(Some(PATIENCE)), Ok(Some(Outcome::Committed))));
    disk.mark(&format!("committed {step} {tag}"));
}

fn arrived(manager: &Manager, disk: &SimDisk, step: u64, tag: &str) {
    manager.wait_carried(step, "home", PATIENCE).unwrap();
    disk.mark(&format!("arrived {step} {tag}"));
}

/// The promises of the marks: attempts of steps that may be there, and those that must be.
#[derive(Default)]
pub(super) struct Promised {
    may: Vec<(u64, String)>,
    pub(super) must: Vec<(u64, String)>,
    pub(super) arrived: Vec<(u64, String)>,
}

impl Promised {
    pub(super) fn of(marks: &Marks) -> Self {
        let mut promised = Self::default();
        for mark in marks.iter() {
            let words: Vec<&str> = mark.split(' ').collect();
            let step = || words[1].parse::<u64>().unwrap();
            match words[0] {
                "saving" => promised.may.push((step(), words[2].to_owned())),
                "committed" => promised.must.push((step(), words[2].to_owned())),
                "arrived" => promised.arrived.push((step(), words[2].to_owned())),
                // It may have happened or not.
                "rewinding" => {
                    promised.must.retain(|(other, _)| *other <= step());
                    promised.arrived.retain(|(other, _)| *other <= step());
                }
                "deleting" => {
                    promised.must.retain(|(other, _)| *other != step());
                    promised.arrived.retain(|(other, _)| *other != step());
                }
                "deleted" => promised.may.retain(|(other, _)| *other != step()),
                "rewound" => promised.may.retain(|(other, _)| *other <= step()),
                other => panic!("{other}"),
            }
        }
        promised
    }

    /// Compares the steps of a manager with what was promised.
    pub(super) fn check(&self, manager: &Manager, must: &[(u64, String)], what: &str) -> Result<(), String> {
        let steps = manager.all_steps().map_err(|error| format!("{what}: {error}"))?;
        let mut found = Vec::new();
        for step in steps {
            let checkpoint = manager.checkpoint(Some(step)).map_err(|error| format!("{what}: {error}"))?;
            let tag = states::verify(&checkpoint).map_err(|error| format!("{what}, step {step}: {error}"))?;
            found.push((step, tag));
        }
        if let Some(extra) = found.iter().find(|one| !self.may.contains(one)) {
            return Err(format!("{what}: {extra:?} is there"));
        }
        match must.iter().find(|one| !found.contains(one)) {
            Some(lost) => Err(format!("{what}: {lost:?} is lost; there are {found:?}")),
            None => Ok(()),
        }
    }

    /// Opens a tier alone, for reading. It has the steps that have arrived.
    pub(super) fn check_alone(&self, disk: &SimDisk, home: &str, what: &str) -> Result<(), String> {
        let options = Options { read_only: true, ..options() };
        match Manager::open(Path::new(home), options, world::environment(disk, 70)) {
            Ok(home) => self.check(&home, &self.arrived, what),
            Err(_) if self.arrived.is_empty() => Ok(()),
            Err(error) => Err(format!("{what}: {error}")),
        }
    }
}

fn check(disk: &SimDisk, marks: &Marks, compress: &[&str]) -> Result<(), String> {
    let promised = Promised::of(marks);
    promised.check_alone(disk, HOME, "home")?;
    let manager = open(disk, 80, compress)?;
    promised.check(&manager, &promised.must, "both tiers")?;
    manager.wait_until_carried(Some(PATIENCE)).map_err(|error| error.to_string())?;
    let newest = manager.latest_step().map_err(|error| error.to_string())?;
    let tiers = manager.tiers().map_err(|error| error.to_string())?;
    manager.close(Some(PATIENCE)).map_err(|error| error.to_string())?;
    drop(manager);
    // The machine is lost.
    let without: Image = disk.image();
    let alone = SimDisk::from_image(&without);
    let home = Manager::open(
        Path::new(HOME),
        Options { read_only: true, ..options() },
        world::environment(&alone, 75),
    )
    .map_err(|error| format!("home after recovery: {error}"))?;
    let theirs = home.latest_step().map_err(|error| error.to_string())?;
    if theirs == newest {
        return Ok(());
    }
    Err(format!("home has {theirs:?}, and the newest is {newest:?}; the tiers: {tiers:?}"))
}

#[test]
fn a_crash_of_a_run_with_tiers_loses_and_resurrects_nothing() {
    explore(&[]);
}

#[test]
fn a_crash_of_a_run_with_compressed_copies_loses_nothing() {
    explore(&["**"]);
}

fn explore(compress: &[&str]) {
    let disk = SimDisk::new();
    let manager = open(&disk, 1, compress).unwrap();
    for step in 1..=3 {
        save(&manager, &disk, step, "a");
    }
    for step in 1..=3 {
        arrived(&manager, &disk, step, "a");
    }
    disk.mark("rewinding 1");
    manager.rewind(1, Some("b")).unwrap();
    disk.mark("rewound 1");
    save(&manager, &disk, 2, "b");
    arrived(&manager, &disk, 2, "b");
    manager.close(Some(PATIENCE)).unwrap();
    drop(manager);
    // The next carrier reads what it has written into a temporary.
    let mut explorer = Explorer::new(Crash { unread: None, ..quick() });
    if let Err(failure) =
        explorer.explore(&disk.log(), &Marks::default(), |disk, marks| check(disk, marks, compress))
    {
        panic!("{failure}");
    }
    println!("{}", explorer.explored);
}
