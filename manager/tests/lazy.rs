//! Immutable states are captured after the call returns. Saves stay in order on any thread.

#![expect(clippy::unwrap_used, reason = "tests end by them")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::*;
use stepwell_core::dtype::Dtype;
use stepwell_core::io::simulated::{Moment, OperationKind};
use stepwell_core::provider::HostProvider;
use stepwell_core::region::Region;
use stepwell_core::sys::HostSource;
use stepwell_manager::state::{Holders, Part};
use stepwell_manager::{LeafSource, Manager, Options, SaveRequest, StateSource};

/// The state of so many bytes, of which nothing changes.
fn held(bytes: &[u8]) -> StateSource {
    let mut state = state_of(bytes);
    let first = bytes.first().copied().unwrap_or(0);
    for (leaf, bytes) in
        state.leaves.iter_mut().zip([bytes.to_vec(), vec![first; 8], vec![first ^ 0xff; 100]])
    {
        let shape = [bytes.len() as u64];
        let source = HostSource::owned(bytes, 0, 1, &shape, &[1]).unwrap();
        let provider = Arc::new(HostProvider::new(source).lazy(true));
        *leaf = LeafSource::whole(Dtype::Uint8, shape.to_vec(), provider);
    }
    state
}

fn assert_filled(manager: &Manager, step: u64, len: usize) {
    let read = read(&manager.checkpoint(Some(step)).unwrap());
    assert_eq!(read[0].1.len(), len);
    assert!(read[0].1.iter().all(|&byte| byte == step as u8), "step {step}");
    assert_eq!(read[2].1, vec![step as u8 ^ 0xff; 100]);
}

#[test]
fn a_save_of_what_nobody_changes_returns_before_it_is_captured() {
    let world = World::default();
    // More than the slots take, so that the capture cannot be over before something is written.
    let manager = world.open(Options { staging_bytes: Some(16 << 20), ..options() });
    let hold = world.disk.hold_writes();
    let save = manager.save(SaveRequest::new(7, held(&vec![7; 40 << 20]))).unwrap();
    assert!(!save.captured(), "the call waited for the capture");
    hold.store(false, Ordering::SeqCst);
    save.wait_captured(Some(LONG)).unwrap();
    assert!(save.captured());
    committed(&save);
    assert_filled(&manager, 7, 40 << 20);
}

#[test]
fn saves_of_all_kinds_take_turns_and_none_starves_another() {
    let world = World::default();
    let staging = Options { staging_bytes: Some(16 << 20), max_pending: 6, ..options() };
    let manager = world.open(Options { stall_timeout: Duration::from_secs(10), ..staging });
    // Each takes more slots than there are.
    let saves: Vec<_> = (1..=6_u64)
        .map(|step| {
            let bytes = vec![step as u8; 40 << 20];
            let state = if step % 3 == 0 { state_of(&bytes) } else { held(&bytes) };
            manager.save(SaveRequest::new(step, state)).unwrap()
        })
        .collect();
    for save in &saves {
        committed(save);
    }
    assert_eq!(manager.all_steps().unwrap(), [1, 2, 3, 4, 5, 6]);
    for step in 1..=6 {
        assert_filled(&manager, step, 40 << 20);
    }
    manager.close(Some(LONG)).unwrap();
}

#[test]
fn a_slow_commit_delays_no_later_capture() {
    let world = World::default();
    let staging = Options { staging_bytes: Some(16 << 20), max_pending: 6, ..options() };
    let manager = world.open(staging);
    // A first step, so that opening and making things is behind us.
    commit(&manager, 1);
    let hold = Arc::new(AtomicBool::new(true));
    let held = Arc::clone(&hold);
    world.disk.set_hook(Some(Arc::new(move |moment, operation| {
        let is_commit =
            operation.kind == OperationKind::Rename && operation.path.to_string_lossy().contains("tmp");
        while moment == Moment::Before && is_commit && held.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
    })));
    let slow = save(&manager, 2);
    // Far more than the slots take: they have to come back.
    let next = manager.save(SaveRequest::new(3, held_state(3))).unwrap();
    next.wait_captured(Some(LONG)).unwrap();
    assert!(!slow.is_done() && !next.is_done());
    hold.store(false, Ordering::SeqCst);
    committed(&next);
    assert!(slow.is_done(), "saves commit in the order of their calls");
    committed(&slow);
    assert_filled(&manager, 3, 40 << 20);
    manager.close(Some(LONG)).unwrap();
}

fn held_state(value: u8) -> StateSource {
    held(&vec![value; 40 << 20])
}

#[test]
fn closing_waits_for_what_is_left_to_capture() {
    let world = World::default();
    let manager = world.open(options());
    for step in 1..=2 {
        manager.save(SaveRequest::new(step, held(&vec![step as u8; 10 << 20]))).unwrap();
    }
    manager.close(Some(LONG)).unwrap();
    let reader = world.open(Options { read_only: true, ..options() });
    assert_filled(&reader, 2, 10 << 20);
}

#[test]
fn boxes_that_do_not_tile_a_tensor_are_refused_by_path() {
    let world = World::default();
    let manager = world.open(options());
    let shard = |offset: u64| {
        let source = HostSource::owned(vec![1; 4], 0, 1, &[4], &[1]).unwrap();
        let region = Region { offset: [offset].as_slice().into(), extent: [4].as_slice().into() };
        let part = Part { region, holders: Holders::This };
        (part, Arc::new(HostProvider::new(source)) as Arc<dyn stepwell_core::provider::StateProvider>)
    };
    for (offsets, fits) in [([0, 4], true), ([0, 3], false), ([4, 4], false)] {
        let mut state = state_of(&[0; 8]);
        let shards = offsets.map(shard).to_vec();
        let tensor = state.leaves.iter_mut().find(|leaf| matches!(leaf, LeafSource::Tensor { .. }));
        *tensor.unwrap() = LeafSource::sharded(Dtype::Uint8, vec![8], shards);
        let checked = manager.check(state);
        assert_eq!(checked.is_ok(), fits, "{offsets:?}: {checked:?}");
    }
}
