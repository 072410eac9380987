//! How long a save keeps its caller: `Capture::run` beside a plain parallel copy of the same bytes into warm memory.
//!
//! ```text
//! cargo run --release --example capture_speed -- [slot MiB …]
//! ```
//!
//! The ring holds the whole state and nothing is written, so that only the copying is measured. Both sides use the same sources; every memory is touched before
//! the clock starts, and reused.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a measurement prints, and stops where it cannot go on"
)]

use std::sync::Arc;
use std::time::Instant;

use stepwell_core::Result;
use stepwell_core::dtype::Dtype;
use stepwell_core::format::index::ChunkRegion;
use stepwell_core::leaf_path::Component;
use stepwell_core::provider::HostProvider;
use stepwell_core::region::Region;
use stepwell_core::save::{ChunkPlan, ItemPlan, LeafPlan, SaveOptions, prepare};
use stepwell_core::staging::StagingPool;
use stepwell_core::sys::HostSource;
use stepwell_core::tree::{ContainerKind, Tree};

const ROUNDS: usize = 9;
const MIB: usize = 1 << 20;
/// Chunks of the large tensors.
const CHUNK: usize = 8 * MIB;

fn main() -> Result<()> {
    let mut slots: Vec<usize> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    if slots.is_empty() {
        slots.push(8);
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    println!("{threads} threads, median (fastest) of {ROUNDS}, milliseconds");
    for (name, sizes) in [("1 GiB, 300 tensors", large()), ("20 000 leaves, 1-64 KiB", small())] {
        let sources = sources(&sizes)?;
        let bytes: usize = sizes.iter().sum();
        let mut warm = vec![1_u8; bytes];
        for &slot in &slots {
            let pool = StagingPool::new(bytes + bytes / 8 + 4 * slot * MIB, slot * MIB)?;
            let (mut plain, mut plan, mut run) = (Vec::new(), Vec::new(), Vec::new());
            for _ in 0..ROUNDS {
                plain.push(copy(&sources, &mut warm, threads));
                let (items, options) = items(&sources, threads);
                let started = Instant::now();
                let (capture, flush) = prepare(items, &pool, options)?;
                plan.push(started.elapsed().as_secs_f64() * 1e3);
                let started = Instant::now();
                let stats = capture.run()?;
                run.push(started.elapsed().as_secs_f64() * 1e3);
                assert_eq!(stats.slots_waited, 0);
                drop(flush);
            }
            let (plain, plan, run) = (middle(plain), middle(plan), middle(run));
            println!(
                "{name}, {slot} MiB slots: plain copy {:.1} ({:.1}) = {:.1} GB/s; Capture::run {:.1} ({:.1}) = {:.1} GB/s, {:.2} x; prepare {:.1} ({:.1})",
                plain.0,
                plain.1,
                bytes as f64 / plain.0 / 1e6,
                run.0,
                run.1,
                bytes as f64 / run.0 / 1e6,
                run.0 / plain.0,
                plan.0,
                plan.1,
            );
        }
    }
    Ok(())
}

/// Layers of a transformer: matrices of some MiB, and the small vectors between them.
fn large() -> Vec<usize> {
    let mut sizes = Vec::new();
    while sizes.iter().sum::<usize>() < 1024 * MIB {
        sizes.extend([8 * MIB, 2 * MIB, 2 * MIB, 8 * MIB, 22 * MIB + 4096, 22 * MIB + 4096, 8192, 8192]);
    }
    sizes
}

/// 1 to 64 KiB each, spread evenly over the powers of two between.
fn small() -> Vec<usize> {
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f64 / f64::from(1_u32 << 31)
    };
    (0..20_000).map(|_| (1024.0 * 64_f64.powf(next())) as usize / 4 * 4).collect()
}

fn sources(sizes: &[usize]) -> Result<Vec<Arc<HostProvider>>> {
    let make = |(i, &size): (usize, &usize)| {
        let memory = vec![i as u8 | 1; size];
        Ok(Arc::new(HostProvider::new(HostSource::owned(memory, 0, 4, &[size as u64 / 4], &[4])?)))
    };
    sizes.iter().enumerate().map(make).collect()
}

fn items(sources: &[Arc<HostProvider>], threads: usize) -> (Vec<ItemPlan>, SaveOptions) {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    let mut leaves = Vec::with_capacity(sources.len());
    for (i, provider) in sources.iter().enumerate() {
        tree.push_leaf(Some(root), Some(Component::Key(format!("layers.{i}.weight").into())));
        let elements = provider.source().shape()[0];
        let step = CHUNK as u64 / 4;
        let chunks = (0..elements).step_by(CHUNK / 4).map(|start| {
            let region = Region { offset: vec![start], extent: vec![step.min(elements - start)] };
            ChunkPlan { region: ChunkRegion::Box(region.clone()), local: region }
        });
        leaves.push(LeafPlan::Tensor {
            dtype: Dtype::Float32,
            shape: vec![elements],
            chunks: chunks.collect(),
            provider: Arc::clone(provider) as _,
        });
    }
    let item = ItemPlan { dir: "i0".into(), tree, leaves };
    (vec![item], SaveOptions { file_ids: vec![1], capture_threads: threads, ..SaveOptions::default() })
}

/// Every leaf into its place, each thread an equal part of the bytes.
fn copy(sources: &[Arc<HostProvider>], into: &mut [u8], threads: usize) -> f64 {
    let started = Instant::now();
    let share = into.len().div_ceil(threads);
    std::thread::scope(|scope| {
        let (mut rest, mut next) = (into, 0);
        for thread in 0..threads {
            let mut work = Vec::new();
            let mut bytes = 0;
            while next < sources.len() && (bytes < share || thread + 1 == threads) {
                let from = sources[next].source().memory().unwrap();
                let (to, after) = std::mem::take(&mut rest).split_at_mut(from.len());
                work.push((from, to));
                (rest, next, bytes) = (after, next + 1, bytes + from.len());
            }
            let copy = move || work.into_iter().for_each(|(from, to)| to.copy_from_slice(from));
            if thread + 1 == threads { copy() } else { drop(scope.spawn(copy)) }
        }
    });
    started.elapsed().as_secs_f64() * 1e3
}

fn middle(mut times: Vec<f64>) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[0])
}
