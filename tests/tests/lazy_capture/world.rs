//! A manager over a disk in memory, with a ring of its own; states of arrays on devices.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use stepwell_core::dtype::Dtype;
use stepwell_core::io::simulated::SimDisk;
use stepwell_core::leaf_path::Component;
use stepwell_core::load::{Destination, LoadOptions};
use stepwell_core::provider::{CaptureTiming, StateProvider};
use stepwell_core::region::Region;
use stepwell_core::staging::StagingPool;
use stepwell_core::sys::HostTarget;
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_manager::{
    Environment, LeafSource, Manager, Options, Outcome, Save, SaveRequest, StateSource, Streams,
};
use stepwell_reshard::read_plan::Request;
use stepwell_tests::fake_cuda::{Array, FakeCuda, Stream};

pub const ROOT: &str = "/run";
/// Long enough for any machine, short enough to see a hang.
pub const LONG: Duration = Duration::from_secs(60);
pub const SLOT: usize = 1 << 20;

pub struct World {
    pub disk: SimDisk,
    pub ring: Arc<StagingPool>,
    pub manager: Manager,
}

impl World {
    /// With so many slots of [`SLOT`] bytes.
    pub fn new(slots: usize) -> Self {
        Self::with(slots, LONG)
    }

    /// That reads what is captured late twice.
    pub fn detecting(slots: usize) -> Self {
        Self::of(slots, Options { detect_torn: true, stall_timeout: LONG, ..Options::default() })
    }

    pub fn with(slots: usize, stall_timeout: Duration) -> Self {
        Self::of(slots, Options { stall_timeout, ..Options::default() })
    }

    fn of(slots: usize, options: Options) -> Self {
        let disk = SimDisk::new();
        let ring = StagingPool::of_slots(slots, SLOT).unwrap();
        let environment = Environment {
            staging: Some(Arc::clone(&ring)),
            ..Environment::single_process(Arc::new(disk.clone()))
        };
        let options = Options {
            staging_bytes: Some((slots * SLOT) as u64),
            max_pending: 8,
            chunk_bytes: 300 << 10,
            ..options
        };
        let manager = Manager::open(Path::new(ROOT), options, environment).unwrap();
        Self { disk, ring, manager }
    }

    pub fn save(&self, step: u64, state: StateSource, streams: &[&Stream]) -> Save {
        self.try_save(step, state, streams).unwrap()
    }

    pub fn try_save(
        &self,
        step: u64,
        state: StateSource,
        streams: &[&Stream],
    ) -> stepwell_manager::Result<Save> {
        self.manager.save(SaveRequest { streams: named(streams), ..SaveRequest::new(step, state) })
    }

    /// All leaves of a step.
    pub fn read(&self, step: u64) -> Vec<Vec<u8>> {
        let checkpoint = self.manager.checkpoint(Some(step)).unwrap();
        let lengths: Vec<u64> = checkpoint.leaves().iter().map(|leaf| bytes_of(&leaf.spec)).collect();
        let mut found: Vec<Vec<u8>> = lengths.iter().map(|&len| vec![0; len as usize]).collect();
        let targets: Vec<Destination<'_>> =
            found.iter_mut().map(|one| HostTarget::from(one.as_mut_slice()).into()).collect();
        self.read_into(step, targets).unwrap();
        found
    }

    /// All leaves of a step, each into a target of its own.
    pub fn read_into(&self, step: u64, targets: Vec<Destination<'_>>) -> stepwell_manager::Result<()> {
        let checkpoint = self.manager.checkpoint(Some(step)).unwrap();
        let requests: Vec<Request> = (0_u32..)
            .zip(checkpoint.leaves())
            .map(|(number, leaf)| {
                let stepwell_reshard::matching::StoredSpec::Tensor { shape, dtype } = &leaf.spec else {
                    panic!("an object")
                };
                Request::row_major(number, Region::whole(shape), dtype.size() as u64, number)
            })
            .collect();
        let options = LoadOptions { stall_timeout: Duration::from_secs(2), ..LoadOptions::default() };
        checkpoint.read(&requests, targets, &options).map(drop).map_err(|failure| failure.error)
    }

    /// Everything that was borrowed has come back: every slot, every registration.
    pub fn assert_idle(&self) {
        let deadline = std::time::Instant::now() + LONG;
        while self.ring.free_slots() * SLOT < self.ring.bytes() {
            drop(self.ring.try_acquire().unwrap());
            assert!(std::time::Instant::now() < deadline, "slots are missing");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn bytes_of(spec: &stepwell_reshard::matching::StoredSpec) -> u64 {
    match spec {
        stepwell_reshard::matching::StoredSpec::Tensor { shape, dtype } => {
            shape.iter().product::<u64>() * dtype.size() as u64
        }
        _ => panic!("an object"),
    }
}

pub fn named(streams: &[&Stream]) -> Streams {
    streams.iter().map(|stream| (stream.device(), stream.user())).collect()
}

/// `{"0": …, "1": …}` of bytes.
pub fn state(leaves: Vec<(u64, Arc<dyn StateProvider>)>) -> StateSource {
    let leaves = leaves.into_iter();
    state_of(leaves.map(|(bytes, provider)| LeafSource::whole(Dtype::Uint8, vec![bytes], provider)).collect())
}

pub fn state_of(leaves: Vec<LeafSource>) -> StateSource {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    for number in 0..leaves.len() {
        tree.push_leaf(Some(root), Some(Component::Key(number.to_string().into())));
    }
    StateSource { tree, leaves }
}

/// All of these arrays, captured when there is time.
pub fn lazily(arrays: &[Arc<Array>]) -> StateSource {
    with_timing(arrays, CaptureTiming::Deferred)
}

pub fn with_timing(arrays: &[Arc<Array>], timing: CaptureTiming) -> StateSource {
    state(
        arrays
            .iter()
            .map(|array| (array.bytes() as u64, array.provider(timing) as Arc<dyn StateProvider>))
            .collect(),
    )
}

/// Arrays of these lengths on a device, updated to a version by that stream.
pub fn arrays(fake: &FakeCuda, stream: &Stream, lengths: &[usize], version: u64) -> Vec<Arc<Array>> {
    let arrays: Vec<Arc<Array>> = lengths.iter().map(|&bytes| fake.array(stream.device(), bytes)).collect();
    update(stream, &arrays, version);
    arrays
}

pub fn update(stream: &Stream, arrays: &[Arc<Array>], version: u64) {
    for array in arrays {
        stream.update(array, version);
    }
}

pub fn committed(save: &Save) {
    match save.wait(Some(LONG)).unwrap() {
        Some(Outcome::Committed) => {}
        other => panic!("step {}: {other:?}", save.step()),
    }
}

/// Checks that each array has that version, complete.
pub fn assert_version(fake: &FakeCuda, found: &[Vec<u8>], version: u64) {
    for (number, bytes) in found.iter().enumerate() {
        assert!(
            bytes == &fake.pattern(0, bytes.len(), version),
            "leaf {number} is not that of version {version}"
        );
    }
}

/// Acts as an update guard.
pub fn guard(save: &Save, streams: &[&Stream]) {
    save.wait_started(Some(LONG)).unwrap();
    save.fence(&named(streams)).unwrap();
}
