//! A world in memory that is the same on every run, and checkpoints in it: saved, planted, read.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use stepwell_core::dtype::Dtype;
use stepwell_core::io::simulated::{ImageNode, SimDisk};
use stepwell_core::load::LoadOptions;
use stepwell_core::region::Region;
use stepwell_core::staging::StagingPool;
use stepwell_core::sys::HostTarget;
use stepwell_core::value::Value;
use stepwell_manager::coordination::SingleProcess;
use stepwell_manager::{
    Checkpoint, Clock, Environment, Error, Options, Outcome, Result, Rng, SaveRequest, StateSource, singular,
};
use stepwell_reshard::matching::StoredSpec;
use stepwell_reshard::read_plan::Request;

/// The path of the checkpoint.
pub const STEP: &str = "/step";
/// Small slots, so that small states take several.
const SLOT: usize = 64 << 10;
/// Nothing in memory takes that long: a wait that does is a hang.
const STALL: Duration = Duration::from_secs(20);
/// Tensors of more bytes are not restored here. They are in the files that were planted: a few MiB
/// at most.
const MAX_RESTORED: u64 = 16 << 20;

struct Still;

impl Clock for Still {
    fn unix_ns(&self) -> i64 {
        1_700_000_000_000_000_000
    }

    fn monotonic(&self) -> Duration {
        Duration::ZERO
    }
}

#[derive(Default)]
struct Counted(AtomicU64);

impl Rng for Counted {
    fn next_u128(&self) -> u128 {
        u128::from(self.0.fetch_add(1, Ordering::Relaxed) + 1) << 64 | 0x5eed
    }
}

/// Everything but the disk is made once: mapping memory takes longer than a save.
pub fn environment(disk: &SimDisk) -> Environment {
    static POOL: OnceLock<Arc<StagingPool>> = OnceLock::new();
    let pool = POOL.get_or_init(|| StagingPool::new(128 * SLOT, SLOT).expect("a few MiB of memory"));
    Environment {
        disk: Arc::new(disk.clone()),
        clock: Arc::new(Still),
        rng: Arc::new(Counted::default()),
        coordinator: Arc::new(SingleProcess),
        staging: Some(Arc::clone(pool)),
    }
}

/// How small states are saved.
pub fn options(block_bytes: u64, chunk_bytes: u64) -> Options {
    Options {
        block_bytes,
        chunk_bytes,
        min_row_bytes: 64,
        capture_threads: Some(2),
        stall_timeout: STALL,
        ..Options::default()
    }
}

fn load_options() -> LoadOptions {
    LoadOptions {
        budget_bytes: 1 << 20,
        queue_depth: 2,
        threads: 1,
        stall_timeout: STALL,
        ..LoadOptions::default()
    }
}

/// Saves a state as a checkpoint of its own and waits for the end.
pub fn save(disk: &SimDisk, state: StateSource, options: &Options) -> Result<()> {
    let save = singular::save(Path::new(STEP), SaveRequest::new(0, state), options, &environment(disk))?;
    match save.wait(Some(2 * STALL))? {
        Some(Outcome::Committed) => Ok(()),
        other => panic!("the save was accepted, and is not committed: {other:?}"),
    }
}

/// Opens the checkpoint.
pub fn open(disk: &SimDisk) -> Result<Checkpoint> {
    Checkpoint::open(Path::new(STEP), &environment(disk)).inspect_err(no_hang)
}

/// Puts files where the checkpoint belongs. Paths that no file can have are left out.
pub fn plant(disk: &SimDisk, files: &BTreeMap<String, Arc<Vec<u8>>>) -> bool {
    disk.plant(STEP, &directory(files.iter().map(|(path, bytes)| (path.as_str(), bytes)).collect())).is_ok()
}

/// A path and its content.
type File<'a> = (&'a str, &'a Arc<Vec<u8>>);

fn directory(files: Vec<File<'_>>) -> Arc<ImageNode> {
    let mut entries: BTreeMap<&str, Arc<ImageNode>> = BTreeMap::new();
    let mut below: BTreeMap<&str, Vec<File<'_>>> = BTreeMap::new();
    for (path, bytes) in files {
        match path.split_once('/') {
            Some((dir, rest)) => below.entry(dir).or_default().push((rest, bytes)),
            None => {
                entries.insert(path, ImageNode::file(Arc::clone(bytes)));
            }
        }
    }
    for (dir, files) in below {
        entries.insert(dir, directory(files));
    }
    let plain = |name: &str| !matches!(name, "" | "." | "..") && !name.contains('\0');
    let entries = entries.into_iter().filter(|(name, _)| plain(name));
    ImageNode::dir(entries.map(|(name, node)| (Arc::from(name), node)).collect())
}

/// The files of the checkpoint, by their paths below it.
pub fn files(disk: &SimDisk) -> BTreeMap<String, Arc<Vec<u8>>> {
    fn walk(node: &ImageNode, path: &str, out: &mut BTreeMap<String, Arc<Vec<u8>>>) {
        for (name, child) in node.entries().unwrap_or_default() {
            let path = if path.is_empty() { name.to_string() } else { format!("{path}/{name}") };
            match child.bytes() {
                Some(bytes) => {
                    out.insert(path, Arc::clone(bytes));
                }
                None => walk(child, &path, out),
            }
        }
    }
    let mut out = BTreeMap::new();
    if let Some(step) = disk.image().get(STEP) {
        walk(step, "", &mut out);
    }
    out
}

/// A leaf that was restored.
#[derive(Clone, Debug)]
pub enum Restored {
    /// Dtype, shape and row-major bytes.
    Tensor(Dtype, Vec<u64>, Vec<u8>),
    /// An object.
    Object(Value),
}

/// Bytes of all tensors of a checkpoint, if they are to be restored here.
pub fn fits(checkpoint: &Checkpoint) -> bool {
    let bytes = checkpoint.leaves().iter().try_fold(0_u64, |bytes, leaf| match &leaf.spec {
        StoredSpec::Tensor { shape, dtype } => shape
            .iter()
            .try_fold(dtype.size() as u64, |bytes, &n| bytes.checked_mul(n))
            .and_then(|more| bytes.checked_add(more)),
        _ => Some(bytes),
    });
    bytes.is_some_and(|bytes| bytes <= MAX_RESTORED)
}

/// The leaf that holds the bytes of this one.
fn holder(checkpoint: &Checkpoint, leaf: usize) -> usize {
    match &checkpoint.leaves()[leaf].spec {
        StoredSpec::Alias { of } => *of as usize,
        _ => leaf,
    }
}

/// True if the leaf is a tensor, or tied to one.
pub fn is_tensor(checkpoint: &Checkpoint, leaf: usize) -> bool {
    matches!(checkpoint.leaves()[holder(checkpoint, leaf)].spec, StoredSpec::Tensor { .. })
}

/// Restores these leaves.
pub fn read(checkpoint: &Checkpoint, leaves: &[usize]) -> Result<Vec<Restored>> {
    let stored = checkpoint.leaves();
    let leaves: Vec<usize> = leaves.iter().map(|&leaf| holder(checkpoint, leaf)).collect();
    let mut buffers: Vec<Vec<u8>> = Vec::new();
    let mut requests = Vec::new();
    let mut objects = Vec::new();
    for &leaf in &leaves {
        match &stored[leaf].spec {
            StoredSpec::Tensor { shape, dtype } => {
                let bytes = shape.iter().product::<u64>() * dtype.size() as u64;
                let region = Region::whole(shape);
                requests.push(Request::row_major(
                    leaf as u32,
                    region,
                    dtype.size() as u64,
                    buffers.len() as u32,
                ));
                buffers.push(vec![0xEE; bytes as usize]);
            }
            StoredSpec::Object => objects.push(leaf as u32),
            StoredSpec::Alias { .. } => panic!("a tie of a tie"),
        }
    }
    let targets: Vec<HostTarget<'_>> =
        buffers.iter_mut().map(|buffer| HostTarget::from(buffer.as_mut_slice())).collect();
    checkpoint
        .read(&requests, targets, &load_options())
        .map_err(|failure| failure.error)
        .inspect_err(no_hang)?;
    let objects = checkpoint.read_objects(&objects, &load_options()).inspect_err(no_hang)?;
    let (mut buffers, mut objects) = (buffers.into_iter(), objects.into_iter());
    Ok(leaves
        .iter()
        .map(|&leaf| match &stored[leaf].spec {
            StoredSpec::Tensor { shape, dtype } => {
                Restored::Tensor(*dtype, shape.to_vec(), buffers.next().expect("one for each"))
            }
            StoredSpec::Object => Restored::Object(objects.next().expect("one for each")),
            StoredSpec::Alias { .. } => panic!("a tie of a tie"),
        })
        .collect())
}

/// True if a whole verification finds nothing.
pub fn is_clean(checkpoint: &Checkpoint) -> bool {
    checkpoint
        .verify(&load_options(), &mut |_| true)
        .inspect_err(no_hang)
        .is_ok_and(|report| report.damages.is_empty())
}

/// A disk in memory answers at once, so a timeout means a lost wake-up.
fn no_hang(error: &Error) {
    assert_ne!(error.kind(), "timeout", "{error}");
}
