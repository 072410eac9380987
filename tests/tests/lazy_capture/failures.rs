//! A device that fails: the save fails with its name, the ring comes back, older steps and the
//! manager go on.

use std::time::Duration;

use stepwell_core::provider::CaptureTiming;
use stepwell_manager::{Outcome, StateSource};
use stepwell_tests::fake_cuda::{FakeCuda, How, Stream};

use crate::world::*;

const LENGTHS: [usize; 5] = [3 << 20, 700, 1, 900 << 10, 5 << 20];

/// The message of a save or its guard, and true if it is committed.
fn try_save(world: &World, state: StateSource, stream: &Stream) -> (Option<String>, bool) {
    let save = match world.try_save(2, state, &[stream]) {
        Err(error) => return (Some(error.to_string()), false),
        Ok(save) => save,
    };
    // A guard must not hang, whatever becomes of the save.
    save.wait_started(Some(LONG)).unwrap();
    let guarded = save.fence(&named(&[stream])).err().map(|error| error.to_string());
    match save.wait(Some(LONG)).unwrap() {
        Some(Outcome::NotCommitted(error)) => (Some(error.to_string()), false),
        Some(Outcome::Committed) => (guarded, true),
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_call_that_fails_fails_that_save_and_nothing_else() {
    let fake = FakeCuda::alone();
    let world = World::new(6);
    let stream = fake.stream(0);
    let good = arrays(&fake, &stream, &LENGTHS, 7);
    committed(&world.save(1, lazily(&good), &[&stream]));
    // Copies that a batch cannot start are started one by one.
    let small = arrays(&fake, &stream, &[4000; 50], 3);
    let singles = fake.calls("cuMemcpyDtoHAsync_v2");
    committed(&world.save(2, lazily(&small), &[&stream]));
    assert_eq!(fake.calls("cuMemcpyDtoHAsync_v2"), singles, "batches");
    world.manager.delete(2).unwrap();
    fake.fail("cuMemcpyBatchAsync", 0, 1, How::Once);
    committed(&world.save(2, lazily(&small), &[&stream]));
    assert_eq!(fake.calls("cuMemcpyDtoHAsync_v2"), singles + 50);
    assert_version(&fake, &world.read(2), 3);
    world.manager.delete(2).unwrap();
    let calls = [
        "cuCtxPushCurrent_v2",
        "cuStreamIsCapturing",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuMemcpyDtoHAsync_v2",
        "cuEventQuery",
        "copy",
    ];
    for timing in [CaptureTiming::Deferred, CaptureTiming::Enqueued, CaptureTiming::Copied] {
        for call in calls {
            for (nth, how) in [(0, How::Once), (1, How::Once), (3, How::Always), (2, How::Sticky)] {
                let arrays = arrays(&fake, &stream, &LENGTHS, 1);
                stream.synchronize();
                let state = with_timing(&arrays, timing);
                let before = fake.calls(call);
                fake.fail(call, nth, 719, how);
                if call == "cuMemcpyDtoHAsync_v2" {
                    // Which is for what a batch has not started.
                    fake.fail("cuMemcpyBatchAsync", 0, 1, How::Always);
                }
                let (told, committed) = try_save(&world, state, &stream);
                let reached = fake.calls(call) > before + nth;
                fake.heal();
                match told {
                    Some(told) => assert!(told.contains("719"), "{timing:?} {call} {nth} {how:?}: {told}"),
                    // It was not called so often; or what failed was a mark, whose place the end of
                    // all that is on the stream takes.
                    None => assert!(!reached || call == "cuEventRecord", "{timing:?} {call} {nth} {how:?}"),
                }
                if committed {
                    assert_version(&fake, &world.read(2), 1);
                    world.manager.delete(2).unwrap();
                }
                world.assert_idle();
            }
        }
    }
    assert_version(&fake, &world.read(1), 7);
    let after = world.save(2, lazily(&good), &[&stream]);
    committed(&after);
    assert_version(&fake, &world.read(2), 7);
}

#[test]
fn a_silent_device_ends_the_save_at_the_deadline() {
    let fake = FakeCuda::alone();
    let world = World::with(6, Duration::from_millis(500));
    let stream = fake.stream(0);
    let arrays = arrays(&fake, &stream, &LENGTHS, 1);
    fake.stall(true);
    let save = world.save(1, lazily(&arrays), &[&stream]);
    let Some(Outcome::NotCommitted(error)) = save.wait(Some(LONG)).unwrap() else { panic!("committed") };
    assert!(error.to_string().contains("waited"), "{error}");
    drop(arrays);
    assert!(world.ring.free_slots() < 6, "the device still writes to its slots");
    fake.stall(false);
    world.assert_idle();
}

#[test]
fn memory_that_cannot_be_registered_costs_time_and_no_save() {
    let fake = FakeCuda::alone();
    fake.forgive();
    fake.fail("cuMemHostRegister_v2", 0, 719, How::Always);
    let world = World::new(6);
    let stream = fake.stream(0);
    let arrays = arrays(&fake, &stream, &LENGTHS, 1);
    let save = world.save(1, lazily(&arrays), &[&stream]);
    guard(&save, &[&stream]);
    update(&stream, &arrays, 2);
    committed(&save);
    assert_version(&fake, &world.read(1), 1);
    stream.synchronize();
    let found = fake.violations();
    assert!(found.iter().all(|line| line.contains("not registered")), "{found:?}");
}

#[test]
fn the_ring_is_registered_once_and_no_more_when_it_is_gone() {
    let fake = FakeCuda::alone();
    let before = fake.registered();
    let world = World::new(6);
    let stream = fake.stream(0);
    let arrays = arrays(&fake, &stream, &LENGTHS, 1);
    let calls = fake.calls("cuMemHostRegister_v2");
    for step in 1..=3 {
        committed(&world.save(step, lazily(&arrays), &[&stream]));
    }
    assert_eq!(fake.calls("cuMemHostRegister_v2") - calls, 1);
    assert!(fake.registered() > before);
    world.manager.close(Some(LONG)).unwrap();
    drop(world);
    assert_eq!(fake.registered(), before);
}
