//! A root on the local disks of two machines: a crash of both at any instant leaves every step
//! whole on both, or not there. Each machine is a directory of the simulated disk.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use stepwell_core::io::simulated::SimDisk;
use stepwell_core::io::{Disk, Rename};
use stepwell_manager::coordination::testing::InProcess;
use stepwell_manager::environment::SystemClock;
use stepwell_manager::{Environment, Manager, Options, Outcome, SaveRequest, TierPlace, TierRule};
use stepwell_tests::crash::{Explorer, Marks, Options as Crash};
use stepwell_tests::steps::run::options;
use stepwell_tests::steps::{states, world};

use super::tiers::Promised;
use super::{bound, quick};

const HOME: &str = "home";
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs a job of one rank on each of these machines. Closes their managers.
fn run(
    disk: &SimDisk,
    seed: u64,
    machines: [&str; 2],
    copies: u32,
    rank: impl Fn(usize, &Manager) -> Result<(), String> + Sync,
) -> Result<(), String> {
    run_with_tiers(disk, seed, machines, copies, &|_| Vec::new(), rank)
}

/// With further tiers.
fn run_with_tiers(
    disk: &SimDisk,
    seed: u64,
    machines: [&str; 2],
    copies: u32,
    places: &(dyn Fn(usize) -> Vec<TierPlace> + Sync),
    rank: impl Fn(usize, &Manager) -> Result<(), String> + Sync,
) -> Result<(), String> {
    let one = |number: usize, board: InProcess| -> Result<(), String> {
        let environment = Environment {
            coordinator: Arc::new(board),
            clock: Arc::new(SystemClock::default()),
            ..world::environment(disk, seed + number as u64)
        };
        let spread = Options { per_machine: true, copies, ..options() };
        let path = Path::new(machines[number]).join("run");
        let manager = Manager::open_with_tiers(&path, spread, environment, &places(number))
            .map_err(|error| format!("opening: {error}"))?;
        let told = rank(number, &manager);
        let closed = manager.close(Some(PATIENCE)).map_err(|error| format!("closing: {error}"));
        told.and(closed)
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..).zip(InProcess::ranks(2, 1)).collect();
        let threads: Vec<_> =
            ranks.into_iter().map(|(number, board)| scope.spawn(move || one(number, board))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap())
    })
}

/// Saves a step on both ranks. Each writes a part of it.
fn save(manager: &Manager, disk: &SimDisk, rank: usize, step: u64, tag: &str) {
    if rank == 0 {
        disk.mark(&format!("saving {step} {tag}"));
    }
    // The other rank begins after the mark.
    manager.agree("the mark", Ok(())).unwrap();
    let mut request = SaveRequest::new(step, states::state(step, tag).unwrap());
    request.custom_metadata = serde_json::json!({ "tag": tag });
    let outcome = manager.save(request).unwrap().wait(Some(PATIENCE));
    assert!(matches!(outcome, Ok(Some(Outcome::Committed))), "{outcome:?}");
    if rank == 0 {
        disk.mark(&format!("committed {step} {tag}"));
    }
}

fn check(disk: &SimDisk, marks: &Marks) -> Result<(), String> {
    let promised = Promised::of(marks);
    for (seed, machines) in [(80, ["a", "b"]), (90, ["b", "a"])] {
        run(disk, seed, machines, 1, |rank, manager| {
            promised.check(manager, &promised.must, &format!("rank {rank} of {machines:?}"))
        })?;
    }
    Ok(())
}

#[test]
fn a_crash_of_all_machines_loses_and_resurrects_nothing() {
    let disk = SimDisk::new();
    run(&disk, 1, ["a", "b"], 1, |rank, manager| {
        save(manager, &disk, rank, 1, "a");
        save(manager, &disk, rank, 2, "a");
        if rank == 0 {
            disk.mark("deleting 1");
        }
        manager.delete(1).unwrap();
        if rank == 0 {
            disk.mark("deleted 1");
        }
        Ok(())
    })
    .unwrap();
    // Another machine leads.
    run(&disk, 10, ["b", "a"], 1, |rank, manager| {
        save(manager, &disk, rank, 3, "b");
        Ok(())
    })
    .unwrap();
    // Other machines look into the temporaries and the trash of the main one.
    let mut explorer = Explorer::new(Crash { unread: None, cap: bound(25, 1000), ..quick() });
    if let Err(failure) = explorer.explore(&disk.log(), &Marks::default(), check) {
        panic!("{failure}");
    }
    println!("{}", explorer.explored);
}

/// Runs a call between two marks of the first rank.
fn marked(manager: &Manager, disk: &SimDisk, rank: usize, marks: [&str; 2], call: impl FnOnce()) {
    if rank == 0 {
        disk.mark(marks[0]);
    }
    manager.agree("the mark", Ok(())).unwrap();
    call();
    if rank == 0 {
        disk.mark(marks[1]);
    }
}

/// Saves a step, and waits until the other machine has a copy.
fn save_copied(manager: &Manager, disk: &SimDisk, rank: usize, step: u64, tag: &str) {
    save(manager, disk, rank, step, tag);
    if rank == 0 {
        manager.wait_until_carried(Some(PATIENCE)).unwrap();
        disk.mark(&format!("arrived {step} {tag}"));
    }
    manager.agree("the copy", Ok(())).unwrap();
}

/// After the crash, one of the machines is lost.
fn check_a_loss(disk: &SimDisk, marks: &Marks) -> Result<(), String> {
    let promised = Promised::of(marks);
    let image = disk.image();
    for (seed, lost, machines) in [(80, "a", ["b", "c"]), (90, "a", ["c", "b"]), (100, "b", ["a", "c"])] {
        let disk = SimDisk::from_image(&image);
        let above = disk.open_dir(Path::new("")).map_err(|error| error.to_string())?;
        if above.stat(lost).map_err(|error| error.to_string())?.is_some() {
            above.rename(lost, "lost", Rename::NoReplace).map_err(|error| error.to_string())?;
        }
        run(&disk, seed, machines, 1, |rank, manager| {
            promised.check(manager, &promised.arrived, &format!("rank {rank} of {machines:?}"))
        })?;
    }
    Ok(())
}

#[test]
fn a_loss_of_a_machine_with_copies_loses_nothing() {
    let disk = SimDisk::new();
    run(&disk, 1, ["a", "b"], 2, |rank, manager| {
        save_copied(manager, &disk, rank, 1, "a");
        save_copied(manager, &disk, rank, 2, "a");
        marked(manager, &disk, rank, ["rewinding 1", "rewound 1"], || {
            manager.rewind(1, None).unwrap();
        });
        save_copied(manager, &disk, rank, 2, "b");
        marked(manager, &disk, rank, ["deleting 1", "deleted 1"], || manager.delete(1).unwrap());
        Ok(())
    })
    .unwrap();
    let mut explorer = Explorer::new(Crash { unread: None, cap: bound(10, 1000), ..quick() });
    if let Err(failure) = explorer.explore(&disk.log(), &Marks::default(), check_a_loss) {
        panic!("{failure}");
    }
    println!("{}", explorer.explored);
}

/// A directory that both machines have, beside their own disks. With compressed copies.
fn home(disk: &SimDisk, seed: u64) -> Vec<TierPlace> {
    vec![TierPlace {
        name: "home".to_owned(),
        path: PathBuf::from(HOME),
        options: options(),
        environment: world::environment(disk, seed),
        rule: TierRule { every: 1, all: true },
        bytes_per_second: None,
        compress: vec!["**".to_owned()],
    }]
}

/// After the crash, both machines are there, or none.
fn check_home(disk: &SimDisk, marks: &Marks) -> Result<(), String> {
    let promised = Promised::of(marks);
    promised.check_alone(disk, HOME, "home")?;
    let places = |number: usize| home(disk, 60 + number as u64);
    run_with_tiers(disk, 80, ["b", "a"], 1, &places, |rank, manager| {
        promised.check(manager, &promised.must, &format!("rank {rank}"))
    })?;
    promised.check_alone(disk, HOME, "home after a further job")
}

#[test]
fn a_crash_of_machines_that_carry_loses_no_arrived_step() {
    let disk = SimDisk::new();
    let places = |number: usize| home(&disk, 40 + number as u64);
    run_with_tiers(&disk, 1, ["a", "b"], 1, &places, |rank, manager| {
        for step in 1..=2 {
            save_copied(manager, &disk, rank, step, "a");
        }
        marked(manager, &disk, rank, ["deleting 1", "deleted 1"], || manager.delete(1).unwrap());
        Ok(())
    })
    .unwrap();
    let mut explorer = Explorer::new(Crash { unread: None, cap: bound(5, 1000), ..quick() });
    if let Err(failure) = explorer.explore(&disk.log(), &Marks::default(), check_home) {
        panic!("{failure}");
    }
    println!("{}", explorer.explored);
}
