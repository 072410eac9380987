//! Promises of the save pipeline, on the simulated disk.

mod content;
mod failures;
mod helpers;
mod lazy;
mod refusals;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::{Capture, ChunkPlan, Flush, ItemPlan, LeafPlan, SaveOptions, WrittenItem, prepare};
use crate::Result;
use crate::dtype::Dtype;
use crate::format::index::ChunkRegion;
use crate::io::simulated::SimDisk;
use crate::io::{Dir, Disk, NoReclaimer};
use crate::leaf_path::Component;
use crate::provider::{HostProvider, StateProvider};
use crate::region::Region;
use crate::staging::StagingPool;
use crate::sys::HostSource;
use crate::tree::{ContainerKind, Tree};

const BLOCK: usize = 4096;

fn options(items: usize) -> SaveOptions {
    SaveOptions {
        block_bytes: BLOCK as u64,
        file_ids: (1..=items as u128).collect(),
        capture_threads: 2,
        stall_timeout: Duration::from_secs(20),
        queue_depth: 3,
        ..SaveOptions::default()
    }
}

/// Bytes that are the same nowhere else.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .collect()
}

/// A tensor of bytes in one chunk.
fn bytes_leaf(bytes: &[u8]) -> LeafPlan {
    let shape = [bytes.len() as u64];
    let source = HostSource::owned(bytes.to_vec(), 0, 1, &shape, &[1]).unwrap();
    tensor_leaf(bytes.len(), Arc::new(HostProvider::new(source)))
}

/// The same, from any provider.
fn tensor_leaf(len: usize, provider: Arc<dyn StateProvider>) -> LeafPlan {
    let region = Region::whole(&[len as u64]);
    LeafPlan::Tensor {
        dtype: Dtype::Uint8,
        shape: vec![len as u64],
        chunks: vec![ChunkPlan { region: ChunkRegion::Box(region.clone()), local: region, band: 0 }],
        provider,
    }
}

/// An item whose leaves are `a[0]`, `a[1]`, …
fn item(dir: &str, leaves: Vec<LeafPlan>) -> ItemPlan {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    let list = tree.push_container(Some(root), Some(Component::Key("a".into())), ContainerKind::List);
    for i in 0..leaves.len() {
        tree.push_leaf(Some(list), Some(Component::Index(i as u32)));
    }
    ItemPlan { dir: dir.into(), tree, leaves }
}

fn pool(slots: usize, slot_bytes: usize) -> Arc<StagingPool> {
    // Mappings are whole huge pages; a ring of exactly so many slots is what these tests are about.
    StagingPool::of_slots(slots, slot_bytes).unwrap()
}

fn step_dir(disk: &SimDisk) -> Arc<dyn Dir> {
    disk.create_dir_all(Path::new("/root/step")).unwrap()
}

/// Both halves, on two threads.
fn run_both((capture, flush): (Capture, Flush), disk: &SimDisk) -> (Result<()>, Result<Vec<WrittenItem>>) {
    let dir = step_dir(disk);
    std::thread::scope(|scope| {
        let flushed = scope.spawn(move || flush.run(disk, &dir, &mut NoReclaimer));
        let captured = capture.run();
        (captured, flushed.join().unwrap())
    })
}

fn save(
    items: Vec<ItemPlan>,
    pool: &Arc<StagingPool>,
    options: SaveOptions,
    disk: &SimDisk,
) -> Vec<WrittenItem> {
    let (captured, written) = run_both(prepare(items, pool, options).unwrap(), disk);
    captured.unwrap();
    written.unwrap()
}

fn assert_idle(pool: &StagingPool) {
    assert_eq!(pool.free_slots() * pool.slot_bytes(), pool.bytes(), "a slot is missing");
}
