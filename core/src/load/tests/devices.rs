//! A destination whose copies end late, in any order, or never.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::super::testing::{FILE, TestItem, flat, options, pattern};
use super::super::{Destination, DeviceTarget, LoadOptions, execute};
use crate::load::Fence;
use crate::read_plan::BoxCopy;
use crate::sys::{HostTarget, Piece};
use crate::{Error, Result};

const BLOCK: u64 = 16 << 10;

/// The behaviour of a simulated card.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Temper {
    /// Copies the last piece first, after a delay.
    Late,
    /// Like `Late`, but the copy of this piece fails.
    Fails(usize),
    /// Rejects this piece.
    Refuses(usize),
    /// Accepts every piece and copies none.
    Stuck,
    /// Copies nothing before it has this many pieces.
    Waits(usize),
}

/// A device's memory, and an engine that copies into it.
#[derive(Debug)]
pub(super) struct Card {
    temper: Temper,
    len: u64,
    memory: Mutex<Vec<u8>>,
    waiting: Mutex<Vec<(usize, Piece)>>,
    ended: Mutex<HashSet<usize>>,
    changed: Condvar,
    order: Mutex<Vec<usize>>,
    taken: AtomicUsize,
    off: AtomicBool,
}

impl Card {
    pub(super) fn new(len: u64, temper: Temper) -> Arc<Self> {
        Arc::new(Self {
            temper,
            len,
            memory: Mutex::new(vec![0xEE; len as usize]),
            waiting: Mutex::default(),
            ended: Mutex::default(),
            changed: Condvar::new(),
            order: Mutex::default(),
            taken: AtomicUsize::new(0),
            off: AtomicBool::new(false),
        })
    }

    pub(super) fn memory(&self) -> Vec<u8> {
        self.memory.lock().unwrap().clone()
    }

    /// Runs `work` while the card copies.
    pub(super) fn running<T>(self: &Arc<Self>, work: impl FnOnce() -> T) -> T {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !self.off.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(2));
                    let is_idle = match self.temper {
                        Temper::Stuck => true,
                        Temper::Waits(pieces) => self.taken.load(Ordering::SeqCst) < pieces,
                        _ => false,
                    };
                    if is_idle {
                        continue;
                    }
                    let Some((number, piece)) = self.waiting.lock().unwrap().pop() else { continue };
                    {
                        let mut memory = self.memory.lock().unwrap();
                        for (to, bytes) in piece.units() {
                            memory[to as usize..to as usize + bytes.len()].copy_from_slice(bytes);
                        }
                    }
                    self.order.lock().unwrap().push(number);
                    self.ended.lock().unwrap().insert(number);
                    self.changed.notify_all();
                    // Dropped late, after the fence has passed.
                    std::thread::sleep(Duration::from_millis(1));
                    drop(piece);
                }
            });
            let out = work();
            self.off.store(true, Ordering::SeqCst);
            out
        })
    }

    pub(super) fn target(self: &Arc<Self>) -> Arc<dyn DeviceTarget> {
        Arc::new(CardTarget(Arc::clone(self)))
    }
}

#[derive(Debug)]
struct CardTarget(Arc<Card>);

impl DeviceTarget for CardTarget {
    fn bytes(&self) -> u64 {
        self.0.len
    }

    fn put(&self, piece: Piece) -> Result<Box<dyn Fence>> {
        let number = self.0.taken.fetch_add(1, Ordering::SeqCst);
        if self.0.temper == Temper::Refuses(number) {
            return Err(Error::Misuse("the card takes no more".into()));
        }
        self.0.waiting.lock().unwrap().push((number, piece));
        Ok(Box::new(Copied { card: Arc::clone(&self.0), number }))
    }
}

struct Copied {
    card: Arc<Card>,
    number: usize,
}

impl Fence for Copied {
    fn host_wait(&self, deadline: Instant) -> Result<()> {
        let mut ended = self.card.ended.lock().unwrap();
        while !ended.contains(&self.number) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Timeout { waited_for: "a copy to the card".into(), seconds: 0.0 });
            }
            ended = self.card.changed.wait_timeout(ended, left).unwrap().0;
        }
        if self.card.temper == Temper::Fails(self.number) {
            return Err(Error::Misuse("the card has lost a copy".into()));
        }
        Ok(())
    }
}

/// Returns options with few buffers, so that each is reused.
fn tight() -> LoadOptions {
    LoadOptions { budget_bytes: 8 << 20, queue_depth: 2, ..options() }
}

#[test]
fn a_late_device_copy_is_complete_on_return() {
    let lengths = [30 << 20, 5 * BLOCK + 77, 3];
    let item = TestItem::of_tensors(BLOCK, &lengths);
    for cached in [false, true] {
        item.disk.knobs.cached.store(cached, Ordering::SeqCst);
        let card = Card::new(lengths[0], Temper::Late);
        let small = Card::new(lengths[2], Temper::Late);
        let mut host = vec![0xEE; lengths[1] as usize];
        let stats = {
            let targets = [
                Destination::Device(card.target()),
                Destination::Host(HostTarget::from(host.as_mut_slice())),
                Destination::Device(small.target()),
            ];
            let copies = item.copies(&[0, 1, 2]);
            card.running(|| {
                small.running(|| execute(&item.disk, &item.files(), &item.index, &copies, targets, &tight()))
            })
            .unwrap()
        };
        assert_eq!(stats.bytes_copied, lengths.iter().sum::<u64>());
        assert!(*card.memory.lock().unwrap() == pattern(0, lengths[0]), "cached: {cached}");
        assert!(host == pattern(1, lengths[1]));
        assert!(*small.memory.lock().unwrap() == pattern(2, lengths[2]));
        assert!(!card.order.lock().unwrap().is_sorted(), "the card was not given several at a time");
    }
    assert_eq!(item.disk.knobs.in_flight.load(Ordering::SeqCst), 0);
}

#[test]
fn a_thread_reads_on_while_its_copies_to_a_device_run() {
    let length = 4 << 20;
    let item = TestItem::of_tensors(BLOCK, &[length]);
    item.disk.knobs.cached.store(true, Ordering::SeqCst);
    let card = Card::new(length, Temper::Waits(3));
    let options = LoadOptions { threads: 1, ..options() };
    let targets = [card.target()];
    let copies = item.copies(&[0]);
    card.running(|| execute(&item.disk, &item.files(), &item.index, &copies, targets, &options)).unwrap();
    assert!(card.memory() == pattern(0, length));
}

#[test]
fn a_transposed_tensor_reaches_a_device_too() {
    let (rows, cols) = (300_u64, 500_u64);
    let item = TestItem::of_tensors(BLOCK, &[rows * cols]);
    let at = item.extent(0).offset;
    let copy = BoxCopy {
        src_strides: vec![cols, 1].into(),
        extent: vec![rows, cols].into(),
        dst_strides: vec![1, rows.cast_signed()].into(),
        ..flat(0, 0, at, 0)
    };
    let card = Card::new(rows * cols, Temper::Late);
    let targets = [card.target()];
    card.running(|| execute(&item.disk, &item.files(), &item.index, &[copy], targets, &options())).unwrap();
    let (stored, found) = (pattern(0, rows * cols), card.memory.lock().unwrap());
    let right = (0..rows * cols).all(|i| stored[i as usize] == found[(i % cols * rows + i / cols) as usize]);
    assert!(right);
}

#[test]
fn a_failed_device_copy_names_its_destination() {
    let item = TestItem::of_tensors(BLOCK, &[100, 9 << 20]);
    for (temper, said) in [(Temper::Fails(5), "lost a copy"), (Temper::Refuses(5), "takes no more")] {
        for cached in [false, true] {
            item.disk.knobs.cached.store(cached, Ordering::SeqCst);
            let card = Card::new(9 << 20, temper);
            let mut host = vec![0; 100];
            let failure = {
                let targets = [
                    Destination::from(HostTarget::from(host.as_mut_slice())),
                    Destination::from(card.target()),
                ];
                let copies = item.copies(&[0, 1]);
                card.running(|| execute(&item.disk, &item.files(), &item.index, &copies, targets, &options()))
                    .unwrap_err()
            };
            assert!(failure.error.to_string().contains(said), "{failure}");
            assert!(failure.overwritten.contains(&1), "{:?}", failure.overwritten);
            // All accepted copies ended before the restore did.
            assert!(card.waiting.lock().unwrap().is_empty());
        }
    }
}

#[test]
fn a_silent_device_ends_the_restore() {
    let item = TestItem::of_tensors(BLOCK, &[12 << 20]);
    for cached in [false, true] {
        item.disk.knobs.cached.store(cached, Ordering::SeqCst);
        let card = Card::new(12 << 20, Temper::Stuck);
        let impatient = LoadOptions { stall_timeout: Duration::from_millis(200), ..tight() };
        let targets = [card.target()];
        let copies = item.copies(&[0]);
        let begun = Instant::now();
        let failure = card
            .running(|| execute(&item.disk, &item.files(), &item.index, &copies, targets, &impatient))
            .unwrap_err();
        assert!(begun.elapsed() < Duration::from_secs(8));
        assert_eq!(failure.error.kind(), "timeout", "{failure}");
        // Later restores do not touch memory that the card may still read.
        let (found, result) = item.load(&[0], &tight());
        result.unwrap();
        assert!(found[0] == pattern(0, 12 << 20));
        let stored = pattern(0, 12 << 20);
        let waiting = card.waiting.lock().unwrap();
        assert!(!waiting.is_empty());
        for (to, bytes) in waiting.iter().flat_map(|(_, piece)| piece.units()) {
            assert!(bytes == &stored[to as usize..to as usize + bytes.len()], "at {to}");
        }
    }
}

#[test]
fn no_byte_of_a_damaged_block_reaches_a_device() {
    let item = TestItem::of_tensors(BLOCK, &[4 * BLOCK]);
    item.disk.change(FILE, |bytes| bytes[4096 + 2 * BLOCK as usize] ^= 1);
    let card = Card::new(4 * BLOCK, Temper::Late);
    let targets = [card.target()];
    let copies = item.copies(&[0]);
    let failure = card
        .running(|| execute(&item.disk, &item.files(), &item.index, &copies, targets, &options()))
        .unwrap_err();
    assert_eq!(failure.error.kind(), "corrupt_checkpoint");
    assert_eq!(card.taken.load(Ordering::SeqCst), 0);
}
