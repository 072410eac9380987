//! A job: as many managers as ranks, each on a thread of its own, over one disk in memory; and its
//! root, as a reader finds it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use stepwell_core::io::Disk;
use stepwell_core::io::simulated::SimDisk;
use stepwell_core::staging::StagingPool;
use stepwell_manager::coordination::testing::InProcess;
use stepwell_manager::{
    Checkpoint, Environment, FilesPer, Manager, Options, Outcome, SaveRequest, StateSource, WritersPer,
};

use crate::dice::Dice;

pub const ROOT: &str = "/run";
/// Long enough for any machine, short enough to see a hang.
pub const LONG: Duration = Duration::from_secs(100);

/// How a job saves.
#[derive(Clone, Debug)]
pub struct Setting {
    pub world: u32,
    per_node: u32,
    writers: Option<u32>,
    writers_per: WritersPer,
    files_per: FilesPer,
    pub chunk_bytes: u64,
    min_row_bytes: u64,
    block_bytes: u64,
    slots: usize,
    slot_bytes: usize,
}

impl Setting {
    /// Small blocks, small windows, few of them, and mostly many chunks.
    pub fn random(dice: &mut Dice, world: u32) -> Self {
        let block_bytes = *dice.pick(&[4096, 4096, 8192, 1 << 16]);
        Self {
            world,
            per_node: dice.between(1, u64::from(world)) as u32,
            writers: if dice.once_in(4) { Some(dice.between(1, 2) as u32) } else { None },
            writers_per: *dice.pick(&[WritersPer::Node, WritersPer::Socket]),
            files_per: *dice.pick(&[FilesPer::Rank, FilesPer::Rank, FilesPer::Node]),
            chunk_bytes: *dice.pick(&[100, 500, 3000, 8 << 20]),
            min_row_bytes: *dice.pick(&[0, 8, 64, 4096]),
            block_bytes,
            slots: *dice.pick(&[2, 4]),
            slot_bytes: (block_bytes * dice.between(1, 2)) as usize,
        }
    }

    /// As a user has it, with that many ranks on each machine.
    pub fn usual(world: u32, per_node: u32) -> Self {
        let Options { chunk_bytes, min_row_bytes, block_bytes, .. } = Options::default();
        Self {
            world,
            per_node,
            writers: None,
            writers_per: WritersPer::Node,
            files_per: FilesPer::Rank,
            chunk_bytes,
            min_row_bytes,
            block_bytes,
            slots: 4,
            slot_bytes: 1 << 20,
        }
    }

    fn options(&self) -> Options {
        Options {
            staging_bytes: Some((self.slots * self.slot_bytes) as u64),
            chunk_bytes: self.chunk_bytes,
            min_row_bytes: self.min_row_bytes,
            block_bytes: self.block_bytes,
            writers: self.writers,
            writers_per: self.writers_per,
            files_per: self.files_per,
            capture_threads: Some(1),
            stall_timeout: LONG,
            ..Options::default()
        }
    }
}

thread_local! {
    /// Rings of the jobs of this thread, by rank and kind: they are mapped once.
    static RINGS: RefCell<HashMap<(u32, usize, usize), Arc<StagingPool>>> = RefCell::default();
}

fn ring(rank: u32, setting: &Setting) -> Arc<StagingPool> {
    let make = || StagingPool::of_slots(setting.slots, setting.slot_bytes).unwrap();
    let key = (rank, setting.slots, setting.slot_bytes);
    RINGS.with_borrow_mut(|rings| Arc::clone(rings.entry(key).or_insert_with(make)))
}

fn environment(disk: &SimDisk) -> Environment {
    Environment::single_process(Arc::new(disk.clone()))
}

/// The result of a save on one rank.
pub type Ended = Result<(), String>;

/// Runs a job that saves these states, as steps from 0 on: what became of each on every rank.
pub fn save(
    dice: &mut Dice,
    disk: &SimDisk,
    setting: &Setting,
    steps: u64,
    state: impl Fn(&mut Dice, u32, u64) -> StateSource + Sync,
) -> Vec<Vec<Ended>> {
    let state = &state;
    let coordinators = InProcess::ranks(setting.world, setting.per_node);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..)
            .zip(coordinators)
            .map(|(rank, coordinator)| {
                let environment = Environment {
                    coordinator: Arc::new(coordinator),
                    staging: Some(ring(rank, setting)),
                    ..environment(disk)
                };
                let mut dice = Dice::new(dice.number());
                scope.spawn(move || {
                    let manager = Manager::open(Path::new(ROOT), setting.options(), environment).unwrap();
                    let ended = (0..steps).map(|step| {
                        let save = manager.save(SaveRequest::new(step, state(&mut dice, rank, step)));
                        match save.map_err(|error| error.to_string())?.wait(Some(LONG)).unwrap() {
                            Some(Outcome::Committed) => Ok(()),
                            Some(Outcome::NotCommitted(error)) => Err(error.to_string()),
                            other => panic!("rank {rank}, step {step}: {other:?}"),
                        }
                    });
                    let ended = ended.collect();
                    manager.close(None).unwrap();
                    ended
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The path of a step.
pub fn step_path(step: u64) -> String {
    format!("{ROOT}/step_{step:08}")
}

pub fn open(disk: &SimDisk, step: u64) -> Checkpoint {
    Checkpoint::open(Path::new(&step_path(step)), &environment(disk)).unwrap()
}

/// The steps that anybody sees.
pub fn steps(disk: &SimDisk) -> Vec<String> {
    let names =
        disk.open_dir(Path::new(ROOT)).unwrap().entries().unwrap().into_iter().map(|entry| entry.name);
    names.filter(|name| !name.starts_with('.')).collect()
}
