//! Tiers with compressed copies: the same promises as those of other tiers, and smaller files.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests end by it")]

mod common;

use std::path::Path;
use std::sync::Arc;

use common::tiers::*;
use common::*;
use stepwell_core::dtype::Dtype;
use stepwell_core::format::index::LeafRecord;
use stepwell_core::format::manifest::{COMPRESSED_CHUNKS, Manifest};
use stepwell_core::load::LoadOptions;
use stepwell_core::provider::HostProvider;
use stepwell_core::region::Region;
use stepwell_core::sys::{HostSource, HostTarget};
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_core::value::Value;
use stepwell_manager::{
    Checkpoint, LeafSource, Manager, Options, Retention, SaveRequest, StateSource, copy, repair,
};
use stepwell_reshard::read_plan::Request;

/// Values of this many bytes, whose planes differ as those of weights do.
fn weights(bytes: usize, planes: usize, seed: u64) -> Vec<u8> {
    let mut seed = seed.wrapping_add(1);
    let mut random = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 56) as u8
    };
    let byte = |at| if at % planes == planes - 1 { 60 + random() % 3 } else { random() };
    (0..bytes).map(byte).collect()
}

fn array(dtype: Dtype, shape: &[u64], bytes: Vec<u8>) -> LeafSource {
    let item = dtype.size() as i64;
    let mut strides = vec![item; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d] as i64;
    }
    let source = HostSource::owned(bytes, 0, dtype.size(), shape, &strides).unwrap();
    LeafSource::whole(dtype, shape.to_vec(), Arc::new(HostProvider::new(source)))
}

/// A state of two items with large tensors, and of small leaves.
fn large(seed: u64) -> StateSource {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    let params = tree.push_container(Some(root), key("params"), ContainerKind::Dict);
    tree.push_leaf(Some(params), key("w"));
    tree.push_leaf(Some(params), key("noise"));
    let optimizer = tree.push_container(Some(root), key("optimizer"), ContainerKind::Dict);
    tree.push_leaf(Some(optimizer), key("m"));
    tree.push_leaf(Some(optimizer), key("zeros"));
    for name in ["empty", "one", "text"] {
        tree.push_leaf(Some(root), key(name));
    }
    let noise: Vec<u8> = weights(3 << 20, 3, seed).chunks(3).flat_map(|bytes| [bytes[0], bytes[1]]).collect();
    let leaves = vec![
        array(Dtype::Bfloat16, &[3000, 2048], weights(3000 * 4096, 2, seed)),
        array(Dtype::Uint8, &[2 << 20], noise),
        array(Dtype::Float32, &[1000, 1037], weights(4_148_000, 4, seed + 1)),
        array(Dtype::Float64, &[300_000], vec![0; 2_400_000]),
        array(Dtype::Float32, &[0, 7], Vec::new()),
        array(Dtype::Uint8, &[], vec![seed as u8]),
        LeafSource::Object(Value::Str("text".repeat(100))),
    ];
    StateSource { tree, leaves }
}

fn stored_bytes(manifest: &Manifest) -> u64 {
    manifest.files.iter().map(|file| file.length).sum()
}

fn is_compressed(manifest: &Manifest) -> bool {
    manifest.required_features.iter().any(|name| name == COMPRESSED_CHUNKS)
}

fn assert_intact(checkpoint: &Checkpoint) {
    let report = checkpoint.verify(&LoadOptions::default(), &mut |_| true).unwrap();
    assert!(report.damages.is_empty(), "{:?}", report.damages);
}

/// A run whose steps hold a large state.
fn carried_large(compress: &[&str]) -> (Worlds, Manager) {
    let worlds = Worlds::compressing(compress);
    let manager = worlds.open(quick(), EACH);
    committed(&manager.save(SaveRequest::new(1, large(1))).unwrap());
    carried(&manager);
    (worlds, manager)
}

#[test]
fn a_compressed_copy_has_the_values_of_its_source() {
    let (worlds, manager) = carried_large(&["**"]);
    let (near, home) = (manager.manifest(Some(1)).unwrap(), worlds.read_home().manifest(Some(1)).unwrap());
    assert_eq!((&near.attempt, &near.metrics), (&home.attempt, &home.metrics));
    assert!(!is_compressed(&near) && is_compressed(&home));
    assert!(
        stored_bytes(&home) * 4 < stored_bytes(&near) * 3,
        "{} {}",
        stored_bytes(&home),
        stored_bytes(&near)
    );
    let copy = worlds.read_home().checkpoint(Some(1)).unwrap();
    assert_intact(&copy);
    assert_eq!(read(&copy), read(&manager.checkpoint(Some(1)).unwrap()));
}

#[test]
fn only_the_chosen_tensors_are_compressed() {
    for (globs, expected) in [
        (&["optimizer"][..], &["optimizer/m", "optimizer/zeros"][..]),
        (&["params/w", "**/zeros"], &["params/w", "optimizer/zeros"]),
        (&["params/noise", "one", "empty", "text"], &[]),
        (&["nothing"], &[]),
    ] {
        let (worlds, manager) = carried_large(globs);
        let copy = worlds.read_home().checkpoint(Some(1)).unwrap();
        let index = copy.index().unwrap();
        let is_compressed = |leaf: &usize| index.leaves[*leaf].is_compressed();
        let paths =
            (0..index.leaves.len()).filter(is_compressed).map(|leaf| copy.leaves()[leaf].path.to_string());
        assert_eq!(paths.collect::<Vec<_>>(), expected, "{globs:?}");
        assert_eq!(read(&copy), read(&manager.checkpoint(Some(1)).unwrap()));
        assert_intact(&copy);
        manager.close(Some(LONG)).unwrap();
    }
}

#[test]
fn files_without_a_chosen_tensor_are_copied_byte_for_byte() {
    let (worlds, manager) = carried_large(&["optimizer"]);
    let (near, home) = (manager.manifest(Some(1)).unwrap(), worlds.read_home().manifest(Some(1)).unwrap());
    let same = near.files.iter().filter(|file| home.files.contains(file)).count();
    assert_eq!((near.files.len() - same, home.files.len()), (1, near.files.len()));
    let same = near.items.iter().filter(|item| home.items.contains(item)).count();
    assert_eq!(near.items.len() - same, 1);
}

#[test]
fn a_part_of_a_compressed_step_reads_only_its_chunks() {
    let (worlds, _manager) = carried_large(&["**"]);
    let copy = worlds.read_home().checkpoint(Some(1)).unwrap();
    let region = Region { offset: vec![1500, 17].into(), extent: vec![2, 5].into() };
    let mut rows = vec![0_u8; 20];
    let request = Request::row_major(0, region, 2, 0);
    let options = LoadOptions::default();
    let planned = copy.plan(std::slice::from_ref(&request), &[]).unwrap();
    let stats = copy.read(&[request], [HostTarget::from(rows.as_mut_slice())], &options).unwrap();
    let all = weights(3000 * 4096, 2, 1);
    let row = |row: usize| &all[row * 4096 + 34..row * 4096 + 44];
    assert_eq!(rows, [row(1500), row(1501)].concat());
    assert!(stats.bytes_read + stats.bytes_cached < 1 << 20, "{stats:?}");
    assert_eq!((planned.len(), planned[0].wanted_bytes), (1, 20));
    let bytes: u64 = planned[0].reads.iter().map(|read| read.end - read.start).sum();
    assert_eq!(bytes, stats.bytes_read + stats.bytes_cached);
}

#[test]
fn equal_steps_become_equal_copies() {
    let worlds = World::default();
    let manager = worlds.open(quick());
    committed(&manager.save(SaveRequest::new(1, large(1))).unwrap());
    let source = manager.checkpoint(Some(1)).unwrap();
    let part = copy::CopySelection { compress: vec!["**".to_owned()], ..copy::CopySelection::default() };
    for path in ["/a", "/b"] {
        copy::to_path(&source, &part, Path::new(path), &worlds.environment(), &mut |_| true).unwrap();
    }
    let open = |path: &str| Checkpoint::open(Path::new(path), &worlds.environment()).unwrap();
    let manifests = ["/a", "/b"].map(|path| open(path).manifest().clone());
    assert!(is_compressed(&manifests[0]));
    assert_eq!((&manifests[0].files, &manifests[0].items), (&manifests[1].files, &manifests[1].items));
    let image = worlds.disk.image();
    for file in &manifests[0].files {
        let bytes = ["/a", "/b"].map(|path| image.get(&format!("{path}/{}", file.path)).unwrap().bytes());
        assert!(bytes[0] == bytes[1], "{}", file.path);
    }
    // A copy of a copy keeps what is compressed.
    for (path, part) in [("/c", &part), ("/d", &copy::CopySelection::default())] {
        copy::to_path(&open("/a"), part, Path::new(path), &worlds.environment(), &mut |_| true).unwrap();
        let lengths = |manifest: &Manifest| manifest.files.iter().map(|file| file.length).collect::<Vec<_>>();
        assert_eq!(lengths(open(path).manifest()), lengths(&manifests[0]));
        assert_intact(&open(path));
        assert_eq!(read(&open(path)), read(&source));
    }
}

#[test]
fn a_cancelled_copy_leaves_nothing() {
    let worlds = World::default();
    let manager = worlds.open(quick());
    committed(&manager.save(SaveRequest::new(1, large(1))).unwrap());
    let source = manager.checkpoint(Some(1)).unwrap();
    let part = copy::CopySelection { compress: vec!["**".to_owned()], ..copy::CopySelection::default() };
    for calls in 0..4 {
        let (mut left, mut last) = (calls, copy::CopyProgress::default());
        let mut progress = |at: copy::CopyProgress| {
            assert!(at.done >= last.done && at.done <= at.total && at.written <= at.done, "{at:?}");
            last = at;
            left -= 1;
            left >= 0
        };
        copy::to_path(&source, &part, Path::new("/a"), &worlds.environment(), &mut progress).unwrap_err();
        let names: Vec<String> = worlds
            .disk
            .image()
            .get("/")
            .unwrap()
            .entries()
            .unwrap()
            .iter()
            .map(|(name, _)| name.to_string())
            .collect();
        assert_eq!(names, ["run"], "after {calls} calls");
    }
}

#[test]
fn damage_of_the_near_tier_is_mended_from_a_compressed_copy() {
    let (worlds, manager) = carried_large(&["**"]);
    let near = manager.checkpoint(Some(1)).unwrap();
    let whole = read(&near);
    let index = near.index().unwrap();
    let mut places = Vec::new();
    for leaf in &index.leaves {
        for extent in leaf.extents().filter(|extent| extent.length > 0) {
            let name = index.files[extent.source.file().unwrap() as usize].name.to_string();
            for at in [0, extent.length / 2, extent.length - 1] {
                places.push((name.clone(), (extent.offset + at) as usize));
            }
        }
    }
    drop(near);
    assert!(places.len() > 12);
    for (name, at) in places {
        let path = manager.step_path(1).join(&name);
        let flip = || assert!(worlds.near.disk.corrupt(path.to_str().unwrap(), |bytes| bytes[at] ^= 4));
        flip();
        let damaged = manager.checkpoint(Some(1)).unwrap();
        assert_eq!(read(&damaged), whole, "byte {at} of {name}");
        let objects: Vec<u32> = (0..index.leaves.len() as u32)
            .filter(|&leaf| matches!(index.leaves[leaf as usize], LeafRecord::Object(_)))
            .collect();
        let values = damaged.read_objects(&objects, &LoadOptions::default()).unwrap();
        assert_eq!(values, [Value::Str("text".repeat(100))]);
        flip();
    }
}

#[test]
fn a_wrong_copy_does_not_mend() {
    let (worlds, manager) = carried_large(&["**"]);
    damage(&worlds, &manager, 1);
    // The copy is damaged where the near tier is.
    let home = worlds.read_home().manifest(Some(1)).unwrap();
    for file in &home.files {
        let keys = worlds.store.keys().into_iter().filter(|key| key.ends_with(&file.path));
        let changed = keys.map(|key| worlds.store.corrupt(&key, |bytes| bytes[4200] ^= 1));
        assert_eq!(changed.collect::<Vec<_>>(), [true]);
    }
    let error = read_stats(&manager.checkpoint(Some(1)).unwrap()).unwrap_err();
    assert!(error.contains("checksum"), "{error}");
}

#[test]
fn an_index_of_a_compressed_step_is_rebuilt_from_its_files() {
    let worlds = World::default();
    let manager = worlds.open(quick());
    committed(&manager.save(SaveRequest::new(1, large(1))).unwrap());
    let source = manager.checkpoint(Some(1)).unwrap();
    let part = copy::CopySelection { compress: vec!["params".to_owned()], ..copy::CopySelection::default() };
    copy::to_path(&source, &part, Path::new("/a"), &worlds.environment(), &mut |_| true).unwrap();
    let manifest = Checkpoint::open(Path::new("/a"), &worlds.environment()).unwrap().manifest().clone();
    for item in &manifest.items {
        assert!(worlds.disk.corrupt(&format!("/a/{}", item.index.path), |bytes| bytes[300] ^= 1));
    }
    let report = repair::repair(Path::new("/a"), &worlds.environment(), false).unwrap();
    assert!(report.iter().all(|index| index.damage.is_some() && !index.recorded), "{report:?}");
    let copy = Checkpoint::open(Path::new("/a"), &worlds.environment()).unwrap();
    assert_intact(&copy);
    assert_eq!(read(&copy), read(&source));
}

#[test]
fn an_unknown_glob_is_refused_when_the_tier_is_opened() {
    let worlds = Worlds::compressing(&["a["]);
    let opened = worlds.try_open_with(&worlds.near.disk, &worlds.store.process(), quick(), EACH);
    let error = opened.err().unwrap();
    assert_eq!(error.kind(), "invalid");
    assert!(error.to_string().contains("compressed"), "{error}");
}

#[test]
fn a_run_goes_on_from_compressed_copies() {
    let worlds = Worlds::compressing(&["**"]);
    let near = Options { retention: Retention::keep_latest(1), ..quick() };
    let manager = worlds.open(near, EACH);
    for step in 1..=3 {
        commit(&manager, step);
    }
    carried(&manager);
    assert_restores(&manager, 1);
    manager.rewind(2, None).unwrap();
    committed(&manager.save(SaveRequest::new(3, state(33))).unwrap());
    manager.close(Some(LONG)).unwrap();
    let worlds = worlds.on_a_new_node();
    let second = worlds.open(quick(), EACH);
    assert_eq!((second.latest_step().unwrap(), second.all_steps().unwrap()), (Some(3), vec![1, 2, 3]));
    assert_value(&second, 3, 33);
    assert_restores(&second, 2);
    second.delete(2).unwrap();
    commit(&second, 4);
    second.close(Some(LONG)).unwrap();
    assert_eq!(worlds.read_home().all_steps().unwrap(), [1, 3, 4]);
    assert!(is_compressed(&worlds.read_home().manifest(Some(4)).unwrap()));
}

#[test]
fn a_process_ends_at_each_request_of_its_carrier() {
    end_at_each_request(&["**"], 7);
}
