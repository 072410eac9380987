//! Permitted changes during a capture.

use std::sync::atomic::Ordering;
use std::time::Duration;

use stepwell_core::provider::CaptureTiming;
use stepwell_core::sys::HostSource;
use stepwell_tests::fake_cuda::{FakeCuda, Stream};

use crate::world::*;

const LENGTHS: [usize; 5] = [3 << 20, 700, 1, 900 << 10, 5 << 20];

#[test]
fn a_guarded_update_waits_on_the_device_only() {
    let fake = FakeCuda::alone();
    fake.random(7, 300);
    let world = World::new(12);
    let stream = fake.stream(0);
    let arrays = arrays(&fake, &stream, &LENGTHS, 1);
    // The devices are stalled: a wait for one of them never ends.
    fake.stall(true);
    let save = world.save(1, lazily(&arrays), &[&stream]);
    guard(&save, &[&stream]);
    update(&stream, &arrays, 2);
    assert!(!save.captured());
    assert_eq!(save.devices(), [0]);
    fake.stall(false);
    committed(&save);
    assert_version(&fake, &world.read(1), 1);
    stream.synchronize();
    for array in &arrays {
        assert!(array.peek() == fake.pattern(0, array.bytes(), 2));
    }
    assert_eq!(fake.calls("cuCtxSynchronize"), 0);
    world.assert_idle();
}

#[test]
fn an_unguarded_update_races_the_capture() {
    let fake = FakeCuda::alone();
    fake.forgive();
    let world = World::new(12);
    let stream = fake.stream(0);
    let arrays = arrays(&fake, &stream, &LENGTHS, 1);
    let save = world.save(1, lazily(&arrays), &[&stream]);
    update(&stream, &arrays, 2);
    committed(&save);
    let found = fake.violations();
    assert!(found.iter().any(|line| line.contains("races")), "{found:?}");
}

#[test]
fn a_save_without_the_stream_races_the_writer() {
    let fake = FakeCuda::alone();
    fake.forgive();
    let world = World::new(12);
    let stream = fake.stream(0);
    let arrays = arrays(&fake, &stream, &LENGTHS, 1);
    committed(&world.save(1, lazily(&arrays), &[]));
    assert!(fake.violations().iter().any(|line| line.contains("races")));
}

#[test]
fn what_only_has_to_be_started_is_fenced_when_the_call_returns() {
    let fake = FakeCuda::alone();
    fake.random(3, 200);
    let world = World::new(12);
    let stream = fake.stream(0);
    let arrays = arrays(&fake, &stream, &LENGTHS, 1);
    fake.stall(true);
    let save = world.save(1, with_timing(&arrays, CaptureTiming::Enqueued), &[&stream]);
    // No guard: the forward changes them.
    update(&stream, &arrays, 2);
    assert!(!save.captured() && save.started());
    fake.stall(false);
    committed(&save);
    assert_version(&fake, &world.read(1), 1);
    stream.synchronize();
}

#[test]
fn what_must_be_captured_is_there_when_the_call_returns() {
    let fake = FakeCuda::alone();
    fake.random(3, 200);
    let world = World::new(3);
    let (stream, other) = (fake.stream(0), fake.stream(0));
    let arrays = arrays(&fake, &stream, &LENGTHS, 1);
    let save = world.save(1, with_timing(&arrays, CaptureTiming::Copied), &[&stream]);
    assert!(save.captured());
    // On any stream: nothing reads them any more.
    update(&other, &arrays, 2);
    committed(&save);
    assert_version(&fake, &world.read(1), 1);
    other.synchronize();
}

#[test]
fn a_small_ring_makes_the_guard_wait_for_writes_only() {
    let fake = FakeCuda::alone();
    let world = World::new(3);
    let stream = fake.stream(0);
    let arrays = arrays(&fake, &stream, &LENGTHS, 1);
    let held = world.disk.hold_writes();
    let save = world.save(1, lazily(&arrays), &[&stream]);
    assert!(save.wait_started(Some(Duration::from_millis(300))).is_err(), "three slots hold ten");
    held.store(false, Ordering::SeqCst);
    guard(&save, &[&stream]);
    update(&stream, &arrays, 2);
    committed(&save);
    assert_version(&fake, &world.read(1), 1);
    world.assert_idle();
    stream.synchronize();
}

#[test]
fn small_host_arrays_are_captured_on_return() {
    let fake = FakeCuda::alone();
    let world = World::new(40);
    let stream = fake.stream(0);
    let arrays = arrays(&fake, &stream, &[900 << 10; 20], 1);
    let mut leaves = Vec::new();
    for (n, array) in (0..).zip(&arrays) {
        leaves.push((array.bytes() as u64, array.provider(CaptureTiming::Deferred) as _));
        let source = HostSource::owned(vec![n; 4], 0, 1, &[4], &[1]).unwrap();
        leaves.push((4, std::sync::Arc::new(stepwell_core::provider::HostProvider::new(source)) as _));
    }
    fake.stall(true);
    let save = world.save(1, state(leaves), &[&stream]);
    // Leaves in the same first window are fenced, and the rest has not started.
    assert!(!save.captured());
    guard(&save, &[&stream]);
    update(&stream, &arrays, 2);
    fake.stall(false);
    committed(&save);
    let (even, odd): (Vec<_>, Vec<_>) =
        world.read(1).into_iter().enumerate().partition(|(number, _)| number % 2 == 0);
    assert_version(&fake, &even.into_iter().map(|(_, bytes)| bytes).collect::<Vec<_>>(), 1);
    assert!((0..).zip(odd).all(|(n, (_, bytes))| bytes == [n; 4]));
    world.assert_idle();
}

#[test]
fn arrays_of_two_devices_and_of_the_host_are_one_state() {
    let fake = FakeCuda::alone();
    fake.random(11, 200);
    let world = World::new(4);
    let streams = [fake.stream(0), fake.stream(1)];
    let first = arrays(&fake, &streams[0], &LENGTHS, 1);
    let second = arrays(&fake, &streams[1], &LENGTHS, 2);
    let host: Vec<u8> = fake.pattern(0, 2 << 20, 3);
    let source = HostSource::owned(host.clone(), 0, 1, &[host.len() as u64], &[1]).unwrap();
    let mut leaves = Vec::new();
    for (one, two) in first.iter().zip(&second) {
        leaves.push((one.bytes() as u64, one.provider(CaptureTiming::Deferred) as _));
        leaves.push((two.bytes() as u64, two.provider(CaptureTiming::Deferred) as _));
    }
    leaves.push((
        host.len() as u64,
        std::sync::Arc::new(stepwell_core::provider::HostProvider::new(source)) as _,
    ));
    let both = [&streams[0], &streams[1]];
    let save = world.save(1, state(leaves), &both);
    guard(&save, &both);
    update(&streams[0], &first, 9);
    update(&streams[1], &second, 9);
    committed(&save);
    streams.iter().for_each(Stream::synchronize);
    let mut found = world.read(1);
    assert!(found.pop() == Some(host));
    let (even, odd): (Vec<_>, Vec<_>) =
        found.into_iter().enumerate().partition(|(number, _)| number % 2 == 0);
    assert_version(&fake, &even.into_iter().map(|(_, bytes)| bytes).collect::<Vec<_>>(), 1);
    assert_version(&fake, &odd.into_iter().map(|(_, bytes)| bytes).collect::<Vec<_>>(), 2);
}

#[test]
fn a_dropped_array_stays_until_it_is_captured() {
    let fake = FakeCuda::alone();
    let world = World::new(12);
    let stream = fake.stream(0);
    let arrays = arrays(&fake, &stream, &LENGTHS, 1);
    fake.stall(true);
    let save = world.save(1, lazily(&arrays), &[&stream]);
    // The driver tells where memory is used that was freed.
    drop(arrays);
    fake.stall(false);
    committed(&save);
    assert_version(&fake, &world.read(1), 1);
}

#[test]
fn a_stream_that_captures_a_graph_is_refused() {
    let fake = FakeCuda::alone();
    let world = World::new(12);
    let stream = fake.stream(0);
    let arrays = arrays(&fake, &stream, &LENGTHS, 1);
    stream.synchronize();
    stream.capturing(true);
    let error = world.try_save(1, lazily(&arrays), &[&stream]).unwrap_err();
    assert!(error.to_string().contains("CUDA graph"), "{error}");
    stream.capturing(false);
    committed(&world.save(1, lazily(&arrays), &[&stream]));
    let save = world.save(2, lazily(&arrays), &[&stream]);
    save.wait_started(Some(LONG)).unwrap();
    stream.capturing(true);
    if !save.captured() {
        assert!(save.fence(&named(&[&stream])).is_err());
    }
    stream.capturing(false);
    committed(&save);
}

#[test]
fn changes_before_the_capture_are_found_if_asked() {
    let fake = FakeCuda::alone();
    let world = World::detecting(12);
    let stream = fake.stream(0);
    let arrays = arrays(&fake, &stream, &LENGTHS, 1);
    committed(&world.save(1, lazily(&arrays), &[&stream]));
    // Guarded, nothing is found.
    let save = world.save(2, lazily(&arrays), &[&stream]);
    guard(&save, &[&stream]);
    update(&stream, &arrays, 2);
    committed(&save);
    assert_version(&fake, &world.read(2), 1);
    stream.synchronize();
    // Unguarded: the capture comes after the update, which stands before it on the device.
    fake.forgive();
    let held = world.disk.hold_writes();
    let filling = world.save(3, lazily(&arrays), &[&stream]);
    let torn = world.save(4, lazily(&arrays), &[&stream]);
    // It has its copies, not only begun them: the next one waits for slots.
    filling.wait_captured(Some(LONG)).unwrap();
    stream.update(&arrays[3], 3);
    stream.synchronize();
    held.store(false, Ordering::SeqCst);
    committed(&filling);
    let outcome = torn.wait(Some(LONG)).unwrap();
    let Some(stepwell_manager::Outcome::NotCommitted(error)) = outcome else { panic!("{outcome:?}") };
    assert_eq!(error.kind(), "torn_snapshot", "{error}");
    assert!(error.to_string().contains("`3` was changed after its save"), "{error}");
    world.assert_idle();
}
