//! Any order of saves, guards, updates, full rings and failures: never torn, never stuck, every
//! buffer given back.

use std::sync::Arc;

use proptest::prelude::*;
use stepwell_core::provider::{CaptureTiming, StateProvider};
use stepwell_manager::{Outcome, Save};
use stepwell_tests::fake_cuda::{Array, FakeCuda, How, Stream};

use crate::world::*;

/// An action of a training.
#[derive(Clone, Debug)]
enum Act {
    /// Saves: how soon each array must be captured.
    Save(Vec<u8>),
    /// Updates everything, guarded.
    Update,
    /// Updates what the last save has captured or fenced when it returned, without a guard.
    Forward,
    /// Lets go of an array, and makes another in its place.
    Replace(u8),
    /// Waits for a commit.
    Wait,
    /// Something fails soon.
    Fail(u8, u8, bool),
    /// Another order of everything.
    Shuffle(u64, u16),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => prop::collection::vec(0_u8..3, 4).prop_map(Act::Save),
        4 => Just(Act::Update),
        2 => Just(Act::Forward),
        1 => any::<u8>().prop_map(Act::Replace),
        1 => Just(Act::Wait),
        1 => (any::<u8>(), 0_u8..12, any::<bool>()).prop_map(|(call, nth, sticky)| Act::Fail(call, nth, sticky)),
        2 => (any::<u64>(), 0_u16..400).prop_map(|(seed, delay)| Act::Shuffle(seed, delay)),
    ]
}

const CALLS: [&str; 6] = [
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuMemcpyDtoHAsync_v2",
    "cuEventQuery",
    "cuMemcpyBatchAsync",
    "copy",
];

struct Training<'a> {
    fake: &'a FakeCuda,
    world: World,
    streams: [Stream; 2],
    arrays: Vec<Arc<Array>>,
    /// The content of each array, once everything on the streams has run.
    versions: Vec<u64>,
    next_version: u64,
    next_step: u64,
    /// Saves, and what each must hold; the hastes of the last one.
    saves: Vec<(Save, Vec<u64>)>,
    hastes: Vec<CaptureTiming>,
    failed: bool,
}

impl Training<'_> {
    fn both(&self) -> [&Stream; 2] {
        [&self.streams[0], &self.streams[1]]
    }

    fn set(&mut self, number: usize) {
        self.next_version += 1;
        self.versions[number] = self.next_version;
        let array = &self.arrays[number];
        self.streams[number % 2].update(array, self.next_version);
    }

    fn guard(&self) -> bool {
        self.saves.iter().all(|(save, _)| {
            save.wait_started(Some(LONG)).unwrap();
            save.fence(&named(&self.both())).is_ok()
        })
    }

    fn run(&mut self, act: &Act) {
        match act {
            Act::Save(hastes) => {
                let hastes: Vec<CaptureTiming> = hastes
                    .iter()
                    .map(|&timing| {
                        [CaptureTiming::Deferred, CaptureTiming::Enqueued, CaptureTiming::Copied]
                            [timing as usize]
                    })
                    .collect();
                let leaves = self.arrays.iter().zip(&hastes);
                let leaves = leaves
                    .map(|(array, &timing)| {
                        (array.bytes() as u64, array.provider(timing) as Arc<dyn StateProvider>)
                    })
                    .collect();
                self.next_step += 1;
                let saved = self.world.try_save(self.next_step, state(leaves), &self.both());
                match saved {
                    Ok(save) => {
                        self.saves.push((save, self.versions.clone()));
                        self.hastes = hastes;
                    }
                    // It did not begin, or an earlier one is told of; what was started before it
                    // failed still reads.
                    Err(error) => {
                        assert!(self.failed, "{error}");
                        self.recover();
                    }
                }
            }
            Act::Update => {
                let guarded = self.guard();
                assert!(guarded || self.failed);
                self.recover();
                (0..self.arrays.len()).for_each(|number| self.set(number));
            }
            Act::Forward => {
                self.recover();
                for number in 0..self.arrays.len() {
                    // Those of earlier saves are guarded by the update between, or by the same
                    // timing.
                    if self.saves.len() == 1
                        && self.hastes.get(number).is_some_and(|&timing| timing > CaptureTiming::Deferred)
                    {
                        self.set(number);
                    }
                }
            }
            Act::Replace(which) => {
                self.recover();
                let number = *which as usize % self.arrays.len();
                let old = &self.arrays[number];
                let new = self.fake.array((number % 2) as u32, old.bytes());
                // As frameworks free: the training's own work on it is over, ours may not be.
                self.streams[number % 2].synchronize();
                self.arrays[number] = new;
                self.set(number);
            }
            Act::Wait => self.settle(),
            Act::Fail(call, nth, sticky) => {
                self.failed = true;
                let how = if *sticky { How::Sticky } else { How::Once };
                self.fake.fail(CALLS[*call as usize % CALLS.len()], i64::from(*nth), 719, how);
            }
            Act::Shuffle(seed, delay) => self.fake.random(*seed, i64::from(*delay)),
        }
    }

    /// A CUDA error ends a training. Started work ends; then it starts again.
    fn recover(&mut self) {
        if !self.failed {
            return;
        }
        self.settle();
        self.fake.heal();
        for stream in &self.streams {
            stream.synchronize();
        }
        self.failed = false;
        // A driver error drops the work on its streams, so every array is written again.
        for number in 0..self.arrays.len() {
            self.arrays[number] = self.fake.array((number % 2) as u32, self.arrays[number].bytes());
            self.set(number);
        }
    }

    /// Every save has ended, and is whole or not there.
    fn settle(&mut self) {
        let mut lost = false;
        for (save, versions) in std::mem::take(&mut self.saves) {
            match save.wait(Some(LONG)).unwrap() {
                Some(Outcome::Committed) => {
                    if self.failed {
                        continue; // with updates that the driver has dropped; whether it is torn, clean runs say
                    }
                    for (number, (bytes, version)) in
                        self.world.read(save.step()).iter().zip(versions).enumerate()
                    {
                        assert!(
                            *bytes == self.fake.pattern(0, bytes.len(), version),
                            "step {}, leaf {number}: not version {version}",
                            save.step()
                        );
                    }
                }
                outcome => {
                    assert!(self.failed, "{outcome:?}");
                    lost = true;
                }
            }
        }
        if lost {
            self.fake.heal();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    #[test]
    fn no_order_of_events_tears_a_step_or_keeps_a_slot(
        slots in 2_usize..10,
        lengths in prop::collection::vec(1_usize..(2 << 20), 4),
        seed in any::<u64>(),
        acts in prop::collection::vec(act(), 1..25),
    ) {
        let fake = FakeCuda::alone();
        fake.random(seed, 100);
        let streams = [fake.stream(0), fake.stream(1)];
        let arrays: Vec<Arc<Array>> =
            lengths.iter().enumerate().map(|(number, &bytes)| fake.array((number % 2) as u32, bytes)).collect();
        let mut training = Training {
            fake: &fake,
            world: World::new(slots),
            streams,
            versions: vec![0; arrays.len()],
            arrays,
            next_version: 0,
            next_step: 0,
            saves: Vec::new(),
            hastes: Vec::new(),
            failed: false,
        };
        (0..lengths.len()).for_each(|number| training.set(number));
        for act in &acts {
            training.run(act);
        }
        training.settle();
        fake.heal();
        training.world.assert_idle();
        training.streams.iter().for_each(Stream::synchronize);
        if acts.iter().any(|act| matches!(act, Act::Fail(..))) {
            fake.forgive();
            let found = fake.violations();
            // What is dropped by a failed driver orders nothing any more; memory is never used
            // after it was freed, whatever happens.
            prop_assert!(found.iter().all(|line| line.contains("races")), "{found:?}");
        }
    }
}

fn cases() -> u32 {
    if std::env::var_os("STEPWELL_LONG").is_some() { 5000 } else { 150 }
}
