//! Into arrays on a device.

use std::sync::Arc;
use stepwell_core::load::Destination;
use stepwell_core::load::DeviceTarget;
use stepwell_core::provider::CaptureTiming;
use stepwell_core::sys::HostTarget;
use stepwell_tests::fake_cuda::{FakeCuda, How};

use crate::world::*;

const LENGTHS: [usize; 5] = [3 << 20, 700, 1, 900 << 10, 5 << 20];

#[test]
fn a_step_is_restored_to_devices_and_host_at_once() {
    let fake = FakeCuda::alone();
    fake.random(21, 200);
    let world = World::new(12);
    let stream = fake.stream(0);
    let saved = arrays(&fake, &stream, &LENGTHS, 1);
    committed(&world.save(1, with_timing(&saved, CaptureTiming::Copied), &[&stream]));
    for cached in [false, true] {
        let into: Vec<_> =
            LENGTHS.iter().enumerate().map(|(i, &bytes)| fake.array((i % 2) as u32, bytes)).collect();
        let mut host = vec![0_u8; LENGTHS[4]];
        let mut targets: Vec<Destination<'_>> = into
            .iter()
            .take(4)
            .map(|array| Destination::Device(array.target() as Arc<dyn DeviceTarget>))
            .collect();
        targets.push(HostTarget::from(host.as_mut_slice()).into());
        world.read_into(1, targets).unwrap();
        for array in into.iter().take(4) {
            assert!(array.peek() == fake.pattern(0, array.bytes(), 1), "cached: {cached}");
        }
        assert!(host == fake.pattern(0, LENGTHS[4], 1));
    }
}

#[test]
fn stream_work_on_an_array_ends_before_its_fill() {
    let fake = FakeCuda::alone();
    fake.random(22, 300);
    let world = World::new(12);
    let stream = fake.stream(0);
    let saved = arrays(&fake, &stream, &LENGTHS, 1);
    committed(&world.save(1, lazily(&saved), &[&stream]));
    update(&stream, &saved, 2);
    // Without this the driver would tell of a race.
    saved[0].device().receive_after(stream.user()).unwrap();
    let targets: Vec<Destination<'_>> =
        saved.iter().map(|array| Destination::Device(array.target() as Arc<dyn DeviceTarget>)).collect();
    world.read_into(1, targets).unwrap();
    for array in &saved {
        assert!(array.peek() == fake.pattern(0, array.bytes(), 1));
    }
}

#[test]
fn a_failing_device_ends_the_restore_by_name() {
    let fake = FakeCuda::alone();
    // A buffer of a restore that finds the device lost stays unregistered for a while.
    fake.forgive();
    let world = World::new(12);
    let stream = fake.stream(0);
    let saved = arrays(&fake, &stream, &LENGTHS, 1);
    committed(&world.save(1, lazily(&saved), &[&stream]));
    stream.synchronize();
    let targets = || -> Vec<Destination<'_>> {
        saved.iter().map(|array| Destination::Device(array.target() as Arc<dyn DeviceTarget>)).collect()
    };
    for (call, how) in
        [("cuMemcpyHtoDAsync_v2", How::Once), ("copy", How::Sticky), ("cuEventRecord", How::Sticky)]
    {
        fake.fail(call, 2, 719, how);
        let error = world.read_into(1, targets()).unwrap_err();
        assert_eq!(error.kind(), "device", "{call}: {error}");
        assert!(error.to_string().contains("Fake GPU 0") && error.to_string().contains("719"), "{error}");
        fake.heal();
    }
    fake.stall(true);
    let error = world.read_into(1, targets()).unwrap_err();
    assert_eq!(error.kind(), "timeout", "{error}");
    fake.stall(false);
    world.read_into(1, targets()).unwrap();
    for array in &saved {
        assert!(array.peek() == fake.pattern(0, array.bytes(), 1));
    }
    let found = fake.violations();
    assert!(found.iter().all(|line| line.contains("not registered")), "{found:?}");
    // Buffers are kept for the next restore, and what a driver has refused is not tried again for
    // ten seconds: other tests would find it so.
    std::thread::sleep(std::time::Duration::from_secs(11));
}
