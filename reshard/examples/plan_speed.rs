//! How long planning takes: `cargo run --release -p stepwell-reshard --example plan_speed`.

use std::time::Instant;

use stepwell_core::dtype::Dtype;
use stepwell_core::format::index::{
    ChunkRecord, ChunkRegion, Codec, Extent, FileRecord, Index, Integrity, LeafRecord, Source, TensorRecord,
};
use stepwell_core::leaf_path::Component;
use stepwell_core::region::Region;
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_reshard::matching::{MatchOptions, Spec, Wanted, match_state, stored_leaves};
use stepwell_reshard::read_plan::{Request, copies};
use stepwell_reshard::selection::{Renames, Selection};
use stepwell_reshard::{subchunk, tiling};

fn tensor(shape: &[u64], regions: Vec<Region>, at: &mut u64) -> LeafRecord {
    let chunks = regions.into_iter().map(|region| {
        let length = 4 * region.volume().unwrap_or(0);
        let extent = Extent { source: Source::Own(0), offset: *at, length, integrity: Integrity::BlockCrc };
        *at += length.next_multiple_of(64);
        ChunkRecord { region: ChunkRegion::Box(region), extent, codec: Codec::Raw }
    });
    let chunks = chunks.collect();
    LeafRecord::Tensor(TensorRecord { dtype: Dtype::Float32, shape: shape.into(), chunks })
}

/// `params/layers[i]/block/tensor{j}/weight`, a thousand layers.
fn many_leaves(count: u32) -> Index {
    let (mut tree, mut leaves, mut at) = (Tree::new(), Vec::new(), 4096);
    let key = |name: &str| Some(Component::Key(name.into()));
    let root = tree.push_container(None, None, ContainerKind::Dict);
    let params = tree.push_container(Some(root), key("params"), ContainerKind::Dict);
    let layers = tree.push_container(Some(params), key("layers"), ContainerKind::List);
    for layer in 0..count / 100 {
        let layer = tree.push_container(Some(layers), Some(Component::Index(layer)), ContainerKind::Dict);
        let block = tree.push_container(Some(layer), key("block"), ContainerKind::Dict);
        for j in 0..100 {
            let place = tree.push_container(Some(block), key(&format!("tensor{j}")), ContainerKind::Dict);
            tree.push_leaf(Some(place), key("weight"));
            leaves.push(tensor(&[16, 16], vec![Region::whole(&[16, 16])], &mut at));
        }
    }
    let files =
        vec![FileRecord { name: "00000.data".into(), length: at, file_id: 0, trailer_crc: 0, within: None }];
    Index { tree, leaves, files }
}

fn timed<T>(what: &str, mut f: impl FnMut() -> T) -> T {
    let best = (0..5).map(|_| {
        let start = Instant::now();
        f();
        start.elapsed()
    });
    println!("{:>9.2} ms  {what}", best.min().unwrap_or_default().as_secs_f64() * 1e3);
    f()
}

fn main() -> Result<(), stepwell_reshard::Error> {
    let index = many_leaves(20_000);
    let request = |leaf: usize| match &index.leaves[leaf] {
        LeafRecord::Tensor(tensor) => Request::whole(leaf as u32, tensor, leaf as u32),
        _ => unreachable!("every leaf here is a tensor"),
    };
    let requests: Vec<Request> = (0..index.leaves.len()).map(request).collect();
    let small = timed("plan 20 000 small leaves", || copies(&index, &requests))?;
    println!("              {} copies", small.len());

    let index = many_leaves(100_000);
    let stored = timed("list 100 000 stored leaves", || stored_leaves(&index));
    let wanted = |stored: &stepwell_reshard::matching::StoredLeaf| Wanted {
        path: stored.path.clone(),
        spec: Spec::Tensor { dtype: Some(Dtype::Float32), shape: Some(vec![16, 16]) },
        holds_value: false,
    };
    let mut wanted: Vec<Wanted> = stored.iter().map(wanted).collect();
    timed("match 100 000 leaves, all fit", || match_state(&wanted, &stored, &MatchOptions::default()));
    let options = MatchOptions {
        selection: Selection::new(Some(&["params/**"]), &["**/tensor1?/bias", "**norm**"])?,
        renames: Renames::new([("model", "params"), ("params/layer_*", "params/layers[*]")])?,
        ..MatchOptions::default()
    };
    timed("match 100 000 leaves, with include, exclude and renames", || {
        match_state(&wanted, &stored, &options)
    });
    for wanted in &mut wanted {
        if let Some(Component::Key(name)) = wanted.path.0.last_mut() {
            *name = "kernel".into();
        }
    }
    let report = timed("match 100 000 leaves, none fits, with suggestions", || {
        match_state(&wanted, &stored, &MatchOptions::default())
    });
    println!("              {} missing; {:?}", report.missing.len(), report.missing[0].near);

    let shape = [65536, 32768];
    let chunks: Vec<Region> = subchunk::cut(
        &Region::whole(&shape),
        &shape,
        4,
        &subchunk::SubchunkOptions {
            target_bytes: 256 << 10,
            min_row_bytes: 1024,
            ..subchunk::SubchunkOptions::HOST
        },
    )
    .collect();
    let regions: Vec<ChunkRegion> = chunks.iter().cloned().map(ChunkRegion::Box).collect();
    println!("              one tensor in {} chunks of {:?}", chunks.len(), chunks[0].extent);
    timed("check its tiling", || tiling::check(&shape, &regions)).ok();
    let mut at = 4096;
    let big = tensor(&shape, chunks, &mut at);
    let files =
        vec![FileRecord { name: "00000.data".into(), length: at, file_id: 0, trailer_crc: 0, within: None }];
    let index = Index { tree: Tree::new(), leaves: vec![big], files };
    let columns =
        |rank: u64| Region { offset: vec![0, rank * 4096].into(), extent: vec![65536, 4096].into() };
    let requests: Vec<Request> =
        (0..8).map(|rank| Request::row_major(0, columns(rank), 4, rank as u32)).collect();
    let all = timed("plan it for 8 column ranks", || copies(&index, &requests))?;
    println!("              {} copies", all.len());
    Ok(())
}
