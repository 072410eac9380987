//! A job of several ranks, which are threads over one simulated disk, and what they save.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use stepwell_core::dtype::Dtype;
use stepwell_core::io::simulated::SimDisk;
use stepwell_core::leaf_path::Component;
use stepwell_core::provider::{Fill, StateProvider};
use stepwell_core::region::Region;
use stepwell_core::staging::{Filling, Slot};
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_manager::coordination::SingleProcess;
use stepwell_manager::coordination::testing::InProcess;
use stepwell_manager::environment::SystemClock;
use stepwell_manager::state::{Holders, Part};
use stepwell_manager::{Environment, Error, LeafSource, Manager, Options, Outcome, Result, StateSource};

use crate::common;
use crate::common::{LONG, TestRng, read};

/// Several ranks, and what they share.
pub struct Job {
    pub disk: SimDisk,
    rng: Arc<TestRng>,
}

impl Job {
    pub fn new() -> Self {
        Self { disk: SimDisk::new(), rng: Arc::default() }
    }

    pub fn environment(
        &self,
        coordinator: impl stepwell_manager::coordination::Coordinator + 'static,
    ) -> Environment {
        Environment {
            disk: Arc::new(self.disk.clone()),
            clock: Arc::new(SystemClock::default()),
            rng: self.rng.clone(),
            coordinator: Arc::new(coordinator),
            staging: None,
        }
    }

    /// Runs one function per rank, each on a thread of its own, and gives what they return.
    pub fn run<T: Send>(
        &self,
        ranks: u32,
        per_node: u32,
        rank: impl Fn(u32, Environment) -> T + Sync,
    ) -> Vec<T> {
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0_u32..)
                .zip(InProcess::ranks(ranks, per_node))
                .map(|(number, coordinator)| {
                    let environment = self.environment(coordinator);
                    let rank = &rank;
                    scope.spawn(move || rank(number, environment))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// The state that one process restores: the bytes of each leaf, by path.
    pub fn restored(&self, step: u64) -> Vec<(String, Vec<u8>)> {
        let options = Options { read_only: true, ..options() };
        let manager =
            Manager::open(Path::new(common::ROOT), options, self.environment(SingleProcess)).unwrap();
        read(&manager.checkpoint(Some(step)).unwrap())
    }

    pub fn data_bytes(&self) -> Vec<u64> {
        let image = self.disk.image();
        let mut lengths = Vec::new();
        let mut open = vec![common::ROOT.to_owned()];
        while let Some(path) = open.pop() {
            let Some(node) = image.get(&path) else { continue };
            match node.entries() {
                Some(entries) => open.extend(entries.iter().map(|(name, _)| format!("{path}/{name}"))),
                None if Path::new(&path).extension().is_some_and(|extension| extension == "data") => {
                    lengths.push(node.bytes().map_or(0, |bytes| bytes.len() as u64));
                }
                None => {}
            }
        }
        lengths
    }
}

pub fn options() -> Options {
    Options { stall_timeout: Duration::from_secs(20), staging_bytes: Some(32 << 20), ..Options::default() }
}

pub fn open(environment: Environment, options: Options) -> Result<Manager> {
    Manager::open(Path::new(common::ROOT), options, environment)
}

/// Elements whose values are their places in the whole tensor. Any region can be requested.
pub struct Places {
    columns: u64,
    seed: u8,
}

impl Places {
    fn at(&self, row: u64, column: u64) -> u8 {
        ((row * self.columns + column) as u8).wrapping_mul(31).wrapping_add(self.seed)
    }
}

impl StateProvider for Places {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> stepwell_core::Result<()> {
        for fill in fills {
            let width = fill.local.extent[1];
            for (n, byte) in (fill.from..).zip(slot.part(fill.at, fill.len)?) {
                *byte = self.at(fill.local.offset[0] + n / width, fill.local.offset[1] + n % width);
            }
        }
        Ok(())
    }
}

pub fn key(name: &str) -> Option<Component> {
    Some(Component::Key(name.into()))
}

/// `rows` × `columns` bytes; this rank holds these parts.
pub fn tensor(rows: u64, columns: u64, seed: u8, parts: Vec<Part>) -> LeafSource {
    let provider = Arc::new(Places { columns, seed });
    LeafSource::Tensor { dtype: Dtype::Uint8, shape: vec![rows, columns], parts, provider }
}

pub fn part(offset: [u64; 2], extent: [u64; 2], holders: Holders) -> Part {
    let region = Region { offset: offset.as_slice().into(), extent: extent.as_slice().into() };
    Part { region, holders }
}

pub fn expected(rows: u64, columns: u64, seed: u8) -> Vec<u8> {
    let places = Places { columns, seed };
    (0..rows)
        .flat_map(|row| (0..columns).map(move |column| (row, column)))
        .map(|(r, c)| places.at(r, c))
        .collect()
}

pub fn committed(save: &stepwell_manager::Save) {
    match save.wait(Some(LONG)).unwrap() {
        Some(Outcome::Committed) => {}
        other => panic!("step {}: {other:?} {:?}", save.step(), save.refusal()),
    }
}

pub fn failure(save: &stepwell_manager::Save) -> Arc<Error> {
    match save.wait(Some(LONG)).unwrap() {
        Some(Outcome::NotCommitted(error)) => error,
        other => panic!("step {}: {other:?}", save.step()),
    }
}

pub fn whole(step: u64) -> StateSource {
    one_leaf(tensor(4, 4, step as u8, vec![part([0, 0], [4, 4], Holders::Everyone)]))
}

pub fn model_of_two(rank: u32, step: u64) -> StateSource {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    tree.push_leaf(Some(root), key("w"));
    let half = part([4 * u64::from(rank), 0], [4, 4], Holders::This);
    StateSource { tree, leaves: vec![tensor(8, 4, step as u8, vec![half])] }
}

pub fn one_leaf(leaf: LeafSource) -> StateSource {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    tree.push_leaf(Some(root), key("w"));
    StateSource { tree, leaves: vec![leaf] }
}

/// As many of one byte as are asked for.
pub struct Filled(pub u8);

impl StateProvider for Filled {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> stepwell_core::Result<()> {
        for fill in fills {
            slot.part(fill.at, fill.len)?.fill(self.0);
        }
        Ok(())
    }

    fn peek(&self, _: &Region, _: u64, into: &mut [u8]) -> stepwell_core::Result<bool> {
        into.fill(self.0);
        Ok(true)
    }
}

/// The rank that a failed save names, on any rank.
pub fn failed_rank(error: &Error) -> Option<u32> {
    match error {
        Error::RankFailed { rank, .. } => Some(*rank),
        Error::Relayed(relayed) if error.kind() == "rank_failed" => relayed.rank,
        _ => None,
    }
}
