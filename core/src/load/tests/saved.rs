//! Restores read everything that the save pipeline writes: chunked tensors, ties and objects, in
//! any order of disk completions.

use std::path::Path;
use std::sync::Arc;

use super::super::testing::{options, pattern};
use super::super::{FileSet, execute, read_objects, verify};
use crate::dtype::Dtype;
use crate::format::index::{ChunkRegion, Index, LeafRecord, Source};
use crate::io::simulated::SimDisk;
use crate::io::{Disk, NoReclaimer};
use crate::leaf_path::Component;
use crate::provider::HostProvider;
use crate::read_plan::BoxCopy;
use crate::region::{Region, row_major_strides};
use crate::save::{ChunkPlan, ItemPlan, LeafPlan, SaveOptions, prepare};
use crate::staging::StagingPool;
use crate::sys::{HostSource, HostTarget};
use crate::tree::{ContainerKind, Tree};
use crate::value::Value;

const SHAPE: [u64; 2] = [300, 500];

fn tensor(seed: u64, cut: u64) -> LeafPlan {
    let bytes = pattern(seed, SHAPE[0] * SHAPE[1] * 4);
    let source = HostSource::owned(bytes, 0, 4, &SHAPE, &[SHAPE[1].cast_signed() * 4, 4]).unwrap();
    let chunks = [(0, cut), (cut, SHAPE[1] - cut)].into_iter().filter(|(_, extent)| *extent > 0).map(
        |(at, extent)| {
            let region = Region { offset: vec![0, at].into(), extent: vec![SHAPE[0], extent].into() };
            ChunkPlan { region: ChunkRegion::Box(region.clone()), local: region, band: 0 }
        },
    );
    LeafPlan::Tensor {
        dtype: Dtype::Float32,
        shape: SHAPE.to_vec(),
        chunks: chunks.collect(),
        provider: Arc::new(HostProvider::new(source)),
    }
}

fn item() -> ItemPlan {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    for name in ["whole", "cut", "step", "tied", "empty"] {
        tree.push_leaf(Some(root), Some(Component::Key(name.into())));
    }
    let empty = HostSource::owned(Vec::new(), 0, 8, &[0, 3], &[24, 8]).unwrap();
    let none = Region::whole(&[0, 3]);
    let leaves = vec![
        tensor(1, 0),
        tensor(2, 123),
        LeafPlan::Object(Value::Int(1200)),
        LeafPlan::Alias { of: 1 },
        LeafPlan::Tensor {
            dtype: Dtype::Int64,
            shape: vec![0, 3],
            chunks: vec![ChunkPlan { region: ChunkRegion::Box(none.clone()), local: none, band: 0 }],
            provider: Arc::new(HostProvider::new(empty)),
        },
    ];
    ItemPlan { dir: "i0".into(), tree, leaves }
}

fn save(disk: &SimDisk) -> Index {
    let pool = StagingPool::new(4 << 20, 256 << 10).unwrap();
    let options = SaveOptions { block_bytes: 16 << 10, file_ids: vec![77], ..SaveOptions::default() };
    let (capture, flush) = prepare(vec![item()], &pool, options).unwrap();
    let dir = disk.create_dir_all(Path::new("/root/step")).unwrap();
    std::thread::scope(|scope| {
        let flushed = scope.spawn(|| flush.run(disk, &dir, &mut NoReclaimer));
        capture.run().unwrap();
        flushed.join().unwrap().unwrap().remove(0).index
    })
}

/// Returns the copies of every chunk of a leaf to a destination with these strides (in elements).
fn copies(index: &Index, leaf: u32, strides: [u64; 2]) -> Vec<BoxCopy> {
    let LeafRecord::Tensor(tensor) = &index.leaves[leaf as usize] else { panic!("no tensor") };
    let size = tensor.dtype.size() as u64;
    let mut copies = Vec::new();
    for chunk in &tensor.chunks {
        let (ChunkRegion::Box(region), Source::Own(file)) = (&chunk.region, chunk.extent.source) else {
            panic!()
        };
        if chunk.extent.length == 0 {
            continue;
        }
        copies.push(BoxCopy {
            leaf,
            file,
            src_offset: chunk.extent.offset,
            src_strides: row_major_strides(&region.extent).iter().map(|s| s * size).collect(),
            extent: region.extent.iter().copied().collect(),
            itemsize: size as u32,
            dst: 0,
            dst_offset: region.offset.iter().zip(&strides).map(|(o, s)| o * s * size).sum(),
            dst_strides: strides.iter().map(|&s| (s * size).cast_signed()).collect(),
            inverted: 0,
            encoded: None,
        });
    }
    copies
}

#[test]
fn what_was_saved_is_restored_whatever_the_order_of_answers() {
    for seed in 0..4 {
        let disk = SimDisk::new().with_order(seed);
        let index = save(&disk);
        let files = FileSet::new(disk.open_dir(Path::new("/root/step/i0")).unwrap(), &index.files);
        for (leaf, content) in [(0, 1), (1, 2)] {
            let saved = pattern(content, SHAPE[0] * SHAPE[1] * 4);
            let mut into = vec![0; saved.len()];
            let targets = [HostTarget::from(into.as_mut_slice())];
            let straight = copies(&index, leaf, [SHAPE[1], 1]);
            execute(&disk, &files, &index, &straight, targets, &options()).unwrap();
            assert!(into == saved);

            let targets = [HostTarget::from(into.as_mut_slice())];
            let transposed = copies(&index, leaf, [1, SHAPE[0]]);
            execute(&disk, &files, &index, &transposed, targets, &options()).unwrap();
            for (row, col) in [(0, 0), (299, 499), (17, 122), (17, 123), (255, 1)] {
                let (from, to) = ((row * 500 + col) * 4, (col * 300 + row) * 4);
                assert_eq!(into[to..to + 4], saved[from..from + 4]);
            }
        }
        assert!(copies(&index, 4, [3, 1]).is_empty());
        let found = read_objects(&disk, &files, &index, &[2], &options()).unwrap();
        assert_eq!(found, vec![Value::Int(1200)]);
        let report = verify(&disk, &files, &index, &options(), &mut |_| true).unwrap();
        assert!(report.damages.is_empty() && report.blocks > 0, "{:?}", report.damages);
    }
}
