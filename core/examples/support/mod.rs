//! States to measure with.
#![expect(
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "the numbers of a measurement are small"
)]

use std::sync::Arc;

use stepwell_core::Result;
use stepwell_core::dtype::Dtype;
use stepwell_core::format::index::ChunkRegion;
use stepwell_core::leaf_path::Component;
use stepwell_core::provider::HostProvider;
use stepwell_core::region::Region;
use stepwell_core::save::{ChunkPlan, ItemPlan, LeafPlan, SaveOptions};
use stepwell_core::sys::HostSource;
use stepwell_core::tree::{ContainerKind, Tree};

pub const MIB: usize = 1 << 20;
/// Chunks of the large tensors.
const CHUNK: usize = 8 * MIB;

/// Layers of a transformer: matrices of some MiB, and the small vectors between them.
pub fn large(mib: usize) -> Vec<usize> {
    let mut sizes = Vec::new();
    while sizes.iter().sum::<usize>() < mib * MIB {
        sizes.extend([8 * MIB, 2 * MIB, 2 * MIB, 8 * MIB, 22 * MIB + 4096, 22 * MIB + 4096, 8192, 8192]);
    }
    sizes
}

/// 1 to 64 KiB each, spread evenly over the powers of two between.
pub fn small() -> Vec<usize> {
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f64 / f64::from(1_u32 << 31)
    };
    (0..20_000).map(|_| (1024.0 * 64_f64.powf(next())) as usize / 4 * 4).collect()
}

/// Memory of the leaves, touched.
pub fn sources(sizes: &[usize]) -> Vec<Arc<Vec<u8>>> {
    sizes.iter().enumerate().map(|(i, &size)| Arc::new(vec![i as u8 | 1; size])).collect()
}

/// The input of a save, created again each time, as a save does.
pub fn items(sources: &[Arc<Vec<u8>>], threads: usize) -> Result<(Vec<ItemPlan>, SaveOptions)> {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    let mut leaves = Vec::with_capacity(sources.len());
    for (i, memory) in sources.iter().enumerate() {
        tree.push_leaf(Some(root), Some(Component::Key(format!("layers.{i}.weight").into())));
        let elements = memory.len() as u64 / 4;
        let source = HostSource::owned(Arc::clone(memory), 0, 4, &[elements], &[4])?;
        let step = CHUNK as u64 / 4;
        let chunks = (0..elements).step_by(CHUNK / 4).map(|start| {
            let region =
                Region { offset: vec![start].into(), extent: vec![step.min(elements - start)].into() };
            ChunkPlan { region: ChunkRegion::Box(region.clone()), local: region, band: 0 }
        });
        leaves.push(LeafPlan::Tensor {
            dtype: Dtype::Float32,
            shape: vec![elements],
            chunks: chunks.collect(),
            provider: Arc::new(HostProvider::new(source)),
        });
    }
    let item = ItemPlan { dir: "i0".into(), tree, leaves };
    Ok((vec![item], SaveOptions { file_ids: vec![1], capture_threads: threads, ..SaveOptions::default() }))
}

/// The median and the least.
pub fn middle(mut times: Vec<f64>) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[0])
}
