//! Shared by the manager's tests: a world in memory, states of a few tensors, and reading them
//! back.
#![allow(dead_code, reason = "every test file uses a part of it")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests end by them")]
#![allow(clippy::unnecessary_wraps, clippy::cast_sign_loss, missing_docs, reason = "tests")]

pub mod tiers;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use stepwell_core::dtype::Dtype;
use stepwell_core::io::simulated::{OperationKind, SimDisk};
use stepwell_core::leaf_path::Component;
use stepwell_core::load::{LoadOptions, LoadStats};
use stepwell_core::provider::{Fill, StateProvider};
use stepwell_core::staging::{DEFAULT_SLOT_BYTES, Filling, Slot, StagingPool};
use stepwell_core::sys::HostTarget;
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_manager::coordination::SingleProcess;
use stepwell_manager::{
    Checkpoint, Clock, Environment, LeafSource, Manager, Options, Outcome, Retention, Rng, Save, SaveRequest,
    StateSource,
};
use stepwell_reshard::matching::StoredSpec;
use stepwell_reshard::read_plan::Request;

/// The root of every test.
pub const ROOT: &str = "/run";
/// Long enough for any machine, short enough to see a hang.
pub const LONG: Duration = Duration::from_secs(60);

/// A clock that stands still until it is told otherwise.
#[derive(Default)]
pub struct TestClock(pub AtomicI64);

impl TestClock {
    pub fn advance(&self, seconds: i64) {
        self.0.fetch_add(seconds * 1_000_000_000, Ordering::SeqCst);
    }
}

impl Clock for TestClock {
    fn unix_ns(&self) -> i64 {
        self.0.load(Ordering::SeqCst)
    }

    fn monotonic(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::SeqCst) as u64)
    }

    fn pause(&self, how_long: Duration) {
        self.0.fetch_add(how_long.as_nanos() as i64, Ordering::SeqCst);
    }
}

/// Counts: so that a test's names are the same on every run.
#[derive(Default)]
pub struct TestRng(AtomicU64);

impl Rng for TestRng {
    fn next_u128(&self) -> u128 {
        u128::from(self.0.fetch_add(1, Ordering::SeqCst) + 1) << 64 | 0x5eed
    }
}

/// A world over a simulated disk. Several share one random source, as real processes never draw the
/// same number.
pub struct World {
    pub disk: SimDisk,
    pub clock: Arc<TestClock>,
    pub rng: Arc<TestRng>,
}

impl Default for World {
    fn default() -> Self {
        Self { disk: SimDisk::new(), clock: Arc::default(), rng: Arc::default() }
    }
}

impl World {
    pub fn environment(&self) -> Environment {
        self.environment_of(&self.disk)
    }

    pub fn environment_of(&self, disk: &SimDisk) -> Environment {
        Environment {
            disk: Arc::new(disk.clone()),
            clock: self.clock.clone(),
            rng: self.rng.clone(),
            coordinator: Arc::new(SingleProcess),
            staging: None,
        }
    }

    /// With staging memory of its own, as another process has: for what is saved while a write of
    /// another save, which holds some, is held up.
    pub fn environment_apart(&self, disk: &SimDisk) -> Environment {
        let staging = Some(StagingPool::new(32 << 20, DEFAULT_SLOT_BYTES).unwrap());
        Environment { staging, ..self.environment_of(disk) }
    }

    pub fn open(&self, options: Options) -> Manager {
        self.try_open(options).unwrap()
    }

    pub fn try_open(&self, options: Options) -> stepwell_manager::Result<Manager> {
        Manager::open(Path::new(ROOT), options, self.environment())
    }

    /// The names in the root that are not the root's own.
    pub fn names(&self) -> Vec<String> {
        let image = self.disk.image();
        let root = image.get(ROOT).unwrap();
        let names = root.entries().unwrap().iter().map(|(name, _)| name.to_string());
        names.filter(|name| name != ".stepwell").collect()
    }
}

/// Kills a process at its first write to a path with that part.
pub fn kill_at_write(process: &SimDisk, part: &'static str) {
    let kill = process.clone();
    process.set_hook(Some(Arc::new(move |_, operation| {
        if operation.kind == OperationKind::Write && operation.path.to_string_lossy().contains(part) {
            kill.kill();
        }
    })));
}

/// Small memory, and no second of waiting for a dead thing.
pub fn options() -> Options {
    Options { stall_timeout: Duration::from_secs(20), staging_bytes: Some(32 << 20), ..Options::default() }
}

/// [`options`] with a retention.
pub fn keeping(retention: Retention) -> Options {
    Options { retention, ..options() }
}

/// A 1-d tensor of bytes.
struct Bytes(Vec<u8>);

impl StateProvider for Bytes {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> stepwell_core::Result<()> {
        for fill in fills {
            let from = (fill.local.offset[0] + fill.from) as usize;
            slot.part(fill.at, fill.len)?.copy_from_slice(&self.0[from..from + fill.len as usize]);
        }
        Ok(())
    }
}

/// A provider that fails.
pub struct Broken;

impl StateProvider for Broken {
    fn capture(&self, _: &[Fill<'_>], _: &mut Slot<Filling>) -> stepwell_core::Result<()> {
        Err(stepwell_core::Error::Leaf { leaf: "params/w".into(), what: "it broke".into() })
    }
}

pub fn tensor(bytes: &[u8]) -> LeafSource {
    LeafSource::whole(Dtype::Uint8, vec![bytes.len() as u64], Arc::new(Bytes(bytes.to_vec())))
}

pub fn key(name: &str) -> Option<Component> {
    Some(Component::Key(name.into()))
}

/// `{"params": {"w": …}, "optimizer": {"m": …}, "lr": …}`, whose bytes are told by `value`.
pub fn state(value: u8) -> StateSource {
    state_of(&[value; 3000])
}

pub fn state_of(w: &[u8]) -> StateSource {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    let params = tree.push_container(Some(root), key("params"), ContainerKind::Dict);
    tree.push_leaf(Some(params), key("w"));
    tree.push_leaf(Some(root), key("lr"));
    let optimizer = tree.push_container(Some(root), key("optimizer"), ContainerKind::Dict);
    tree.push_leaf(Some(optimizer), key("m"));
    let first = w.first().copied().unwrap_or(0);
    StateSource { tree, leaves: vec![tensor(w), tensor(&[first; 8]), tensor(&[first ^ 0xff; 100])] }
}

pub fn request(step: u64) -> SaveRequest {
    SaveRequest::new(step, state(step as u8))
}

pub fn save(manager: &Manager, step: u64) -> Save {
    manager.save(request(step)).unwrap()
}

/// Saves and waits for the commit.
pub fn commit(manager: &Manager, step: u64) {
    committed(&save(manager, step));
}

pub fn committed(save: &Save) {
    match save.wait(Some(LONG)).unwrap() {
        Some(Outcome::Committed) => {}
        other => panic!("step {}: {other:?} {:?}", save.step(), save.refusal()),
    }
}

/// All leaves of a step by path.
pub fn read(checkpoint: &Checkpoint) -> Vec<(String, Vec<u8>)> {
    let (requests, mut buffers, names) = requests_of(checkpoint);
    read_into(checkpoint, &requests, &mut buffers);
    names.into_iter().zip(buffers).collect()
}

/// Requests of all leaves, a buffer for each, and their paths.
fn requests_of(checkpoint: &Checkpoint) -> (Vec<Request>, Vec<Vec<u8>>, Vec<String>) {
    let mut buffers = Vec::new();
    let mut requests = Vec::new();
    let mut names = Vec::new();
    for (leaf, stored) in checkpoint.leaves().iter().enumerate() {
        names.push(stored.path.to_string());
        let StoredSpec::Tensor { shape, dtype } = &stored.spec else {
            buffers.push(Vec::new());
            continue;
        };
        let dst = buffers.len() as u32;
        buffers.push(vec![0_u8; shape.iter().product::<u64>() as usize * dtype.size()]);
        let region = stepwell_core::region::Region::whole(shape);
        requests.push(Request::row_major(leaf as u32, region, dtype.size() as u64, dst));
    }
    (requests, buffers, names)
}

fn read_into(checkpoint: &Checkpoint, requests: &[Request], buffers: &mut [Vec<u8>]) {
    let targets: Vec<HostTarget<'_>> =
        buffers.iter_mut().map(|buffer| HostTarget::from(buffer.as_mut_slice())).collect();
    checkpoint.read(requests, targets, &LoadOptions::default()).map_err(|failure| failure.error).unwrap();
}

/// Reads all leaves of a step.
pub fn read_stats(checkpoint: &Checkpoint) -> Result<LoadStats, String> {
    let (requests, mut buffers, _) = requests_of(checkpoint);
    let targets: Vec<HostTarget<'_>> =
        buffers.iter_mut().map(|buffer| HostTarget::from(buffer.as_mut_slice())).collect();
    checkpoint.read(&requests, targets, &LoadOptions::default()).map_err(|failure| failure.error.to_string())
}

/// A step of this manager reads back as it was saved by [`save`].
pub fn assert_restores(manager: &Manager, step: u64) {
    assert_value(manager, step, step as u8);
}

pub fn assert_value(manager: &Manager, step: u64, value: u8) {
    let checkpoint = manager.checkpoint(Some(step)).unwrap();
    assert_eq!(checkpoint.step(), step);
    let read = read(&checkpoint);
    let paths: Vec<&str> = read.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(paths, ["params/w", "lr", "optimizer/m"]);
    assert_eq!(read[0].1, vec![value; 3000]);
    assert_eq!(read[1].1, vec![value; 8]);
    assert_eq!(read[2].1, vec![value ^ 0xff; 100]);
}
