//! Providers that only start their copies: slots that are captured, pending.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Instant;

use super::*;
use crate::Error;
use crate::provider::{Fill, Ticket};
use crate::staging::{Fence, Filling, Slot};

/// A device whose copies arrive late: what a fill must hold is known when its fence has been
/// passed. (The slot's memory cannot be written from elsewhere in safe code, so the bytes are there
/// at once; what the test sees is that nobody used the slot before.)
struct LateDevice {
    delay: Duration,
    passed: Arc<AtomicU64>,
    started: AtomicU64,
    fails: bool,
}

struct Late {
    ready: Instant,
    passed: Arc<AtomicU64>,
    fails: bool,
}

impl Fence for Late {
    fn host_wait(&self, deadline: Instant) -> Result<()> {
        if deadline < self.ready {
            std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
            return Err(Error::Timeout { waited_for: "the device".into(), seconds: 0.0 });
        }
        std::thread::sleep(self.ready.saturating_duration_since(Instant::now()));
        self.passed.fetch_add(1, Ordering::SeqCst);
        if self.fails { Err(Error::Misuse("the copy failed".into())) } else { Ok(()) }
    }
}

impl StateProvider for LateDevice {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> Result<Ticket> {
        for fill in fills {
            slot.part(fill.at, fill.len)?.fill(7);
        }
        self.started.fetch_add(1, Ordering::SeqCst);
        let ready = Instant::now() + self.delay;
        Ok(Ticket::Event(Box::new(Late { ready, passed: Arc::clone(&self.passed), fails: self.fails })))
    }
}

fn device(delay_ms: u64, fails: bool) -> (Arc<LateDevice>, Arc<AtomicU64>) {
    let passed = Arc::new(AtomicU64::new(0));
    let device = LateDevice {
        delay: Duration::from_millis(delay_ms),
        passed: Arc::clone(&passed),
        started: AtomicU64::new(0),
        fails,
    };
    (Arc::new(device), passed)
}

#[test]
fn the_capture_is_over_when_every_fence_has_been_passed() {
    for slots in [2, 3, 40] {
        let (device, passed) = device(3, false);
        let leaves = vec![bytes_leaf(&noise(9000, 1)), tensor_leaf(30 * BLOCK, Arc::clone(&device) as _)];
        let ring = pool(slots, 2 * BLOCK);
        let (capture, flush) = prepare(vec![item("i0", leaves)], &ring, options(1)).unwrap();
        let disk = SimDisk::new();
        let dir = step_dir(&disk);
        std::thread::scope(|scope| {
            let flushed = scope.spawn(|| flush.run(&disk, &dir));
            capture.run().unwrap();
            assert_eq!(passed.load(Ordering::SeqCst), device.started.load(Ordering::SeqCst));
            flushed.join().unwrap().unwrap();
        });
        assert_idle(&ring);
        let file = disk.bytes("root/step/i0/00000.data").unwrap();
        assert!(file[4096 * 4..][..30 * BLOCK].iter().all(|&b| b == 7));
    }
}

#[test]
fn copies_of_several_windows_are_under_way_at_the_same_time() {
    let (device, _) = device(30, false);
    let ring = pool(40, 2 * BLOCK);
    let started = Instant::now();
    let items = vec![item("i0", vec![tensor_leaf(60 * BLOCK, device)])];
    save(items, &ring, SaveOptions { capture_threads: 1, ..options(1) }, &SimDisk::new());
    assert!(started.elapsed() < Duration::from_millis(30 * 15), "thirty windows, one after the other");
}

#[test]
fn device_memory_returns_only_after_its_fence() {
    // Longer than a busy machine takes for what follows.
    let (device, passed) = device(1000, false);
    let ring = pool(2, 2 * BLOCK);
    let options = SaveOptions { stall_timeout: Duration::from_millis(20), capture_threads: 1, ..options(1) };
    let (capture, flush) =
        prepare(vec![item("i0", vec![tensor_leaf(BLOCK, device)])], &ring, options).unwrap();
    assert_eq!(capture.run().unwrap_err().kind(), "timeout");
    drop(flush);
    assert_eq!(ring.free_slots(), 1, "the device still writes");
    assert_eq!(passed.load(Ordering::SeqCst), 0);
    let one = ring.try_acquire().unwrap().unwrap();
    let (two, waited) = ring.acquire(Duration::from_secs(10), Duration::MAX, || None).unwrap();
    assert!(waited.0.is_some());
    assert_eq!(passed.load(Ordering::SeqCst), 1);
    drop((one, two));
    assert_idle(&ring);
}

#[test]
fn a_copy_that_fails_on_the_device_fails_the_save() {
    let (device, _) = device(1, true);
    let ring = pool(4, 2 * BLOCK);
    let parts = prepare(vec![item("i0", vec![tensor_leaf(20 * BLOCK, device)])], &ring, options(1)).unwrap();
    let (captured, written) = run_both(parts, &SimDisk::new());
    assert!(captured.unwrap_err().to_string().contains("the copy failed"));
    assert!(written.unwrap_err().to_string().contains("the copy failed"));
    // The fences are asked whenever a slot is wanted; each answers in its own time.
    let deadline = Instant::now() + Duration::from_secs(60);
    while ring.free_slots() * ring.slot_bytes() < ring.bytes() && Instant::now() < deadline {
        drop(ring.try_acquire().unwrap());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_idle(&ring);
}

/// Tells which threads captured.
struct Named(Mutex<mpsc::Sender<String>>);
impl StateProvider for Named {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> Result<Ticket> {
        for fill in fills {
            slot.part(fill.at, fill.len)?.fill(1);
        }
        std::thread::sleep(Duration::from_millis(1));
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        self.0.lock().unwrap().send(name).unwrap();
        Ok(Ticket::Done)
    }
}

#[test]
fn helpers_end_with_their_pool() {
    let (sender, receiver) = mpsc::channel();
    let ring = pool(4, BLOCK);
    let leaf = tensor_leaf(60 * BLOCK, Arc::new(Named(Mutex::new(sender))));
    save(
        vec![item("i0", vec![leaf])],
        &ring,
        SaveOptions { capture_threads: 3, ..options(1) },
        &SimDisk::new(),
    );
    let names: Vec<String> = receiver.iter().collect();
    assert!(names.iter().any(|name| name.starts_with("stepwell-copy-")), "{names:?}");
    let watched = Arc::downgrade(&ring);
    drop(ring);
    assert!(watched.upgrade().is_none(), "something still holds the pool");
}
