//! A node with a disk, and a store: the tiers of the tests.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use stepwell_core::io::simulated::SimDisk;
use stepwell_core::remote::StoreOptions;
use stepwell_core::remote::simulated::{Fate, SimStore};
use stepwell_core::staging::{DEFAULT_SLOT_BYTES, StagingPool};
use stepwell_manager::coordination::SingleProcess;
use stepwell_manager::ledger::{LedgerDisk, LedgerPatience};
use stepwell_manager::{Environment, Manager, Options, Outcome, Retention, TierPlace, TierReport, TierRule};

use super::*;

pub const HOME: &str = "s3://bucket/run";

/// A node with a disk, and a store.
pub struct Worlds {
    pub near: World,
    pub store: Arc<SimStore>,
    /// The globs of what is compressed in the store.
    pub compress: Vec<String>,
}

impl Worlds {
    pub fn new() -> Self {
        Self { near: World::default(), store: SimStore::new("s3://bucket"), compress: Vec::new() }
    }

    /// A store whose copies are compressed where one of the globs matches.
    pub fn compressing(globs: &[&str]) -> Self {
        Self { compress: globs.iter().map(|&glob| glob.to_owned()).collect(), ..Self::new() }
    }

    pub fn near_environment(&self, disk: &SimDisk) -> Environment {
        static STAGING: OnceLock<Arc<StagingPool>> = OnceLock::new();
        let staging = STAGING.get_or_init(|| StagingPool::new(64 << 20, DEFAULT_SLOT_BYTES).unwrap());
        Environment { staging: Some(Arc::clone(staging)), ..self.near.environment_of(disk) }
    }

    pub fn home_environment(&self, store: &Arc<SimStore>) -> Environment {
        let patience = LedgerPatience {
            full: Duration::from_millis(40),
            ending: Duration::from_millis(40),
            pause: Duration::from_millis(2),
        };
        let parts =
            StoreOptions { part_bytes: 8 << 20, connections: 4, create_timeout: Duration::from_millis(40) };
        let disk = LedgerDisk::new(Arc::clone(store) as _, parts, patience, self.near.rng.clone());
        Environment {
            disk: Arc::new(disk),
            clock: self.near.clock.clone(),
            rng: self.near.rng.clone(),
            coordinator: Arc::new(SingleProcess),
            staging: None,
        }
    }

    pub fn home(&self, store: &Arc<SimStore>, rule: TierRule, retention: Retention) -> TierPlace {
        TierPlace {
            name: "home".to_owned(),
            path: PathBuf::from(HOME),
            options: Options { retention, ..quick() },
            environment: self.home_environment(store),
            rule,
            bytes_per_second: None,
            compress: self.compress.clone(),
        }
    }

    pub fn try_open_with(
        &self,
        disk: &SimDisk,
        store: &Arc<SimStore>,
        options: Options,
        rule: TierRule,
    ) -> stepwell_manager::Result<Manager> {
        let home = self.home(store, rule, Retention::KeepAll);
        Manager::open_with_tiers(Path::new(ROOT), options, self.near_environment(disk), &[home])
    }

    /// Opens both tiers in a new process.
    pub fn open(&self, options: Options, rule: TierRule) -> Manager {
        self.try_open_with(&self.near.disk, &self.store.process(), options, rule).unwrap()
    }

    /// Opens the far tier alone, for reading.
    pub fn read_home(&self) -> Manager {
        let options = Options { read_only: true, ..quick() };
        Manager::open(Path::new(HOME), options, self.home_environment(&self.store.process())).unwrap()
    }

    /// Opens the far tier alone.
    pub fn write_home(&self) -> Manager {
        Manager::open(Path::new(HOME), quick(), self.home_environment(&self.store.process())).unwrap()
    }

    /// The same run on a node whose disk is new.
    pub fn on_a_new_node(self) -> Self {
        let near = World { disk: SimDisk::new(), ..self.near };
        Self { near, store: self.store, compress: self.compress }
    }
}

pub fn quick() -> Options {
    Options { stall_timeout: Duration::from_secs(10), ..options() }
}

pub fn home_of(manager: &Manager) -> TierReport {
    manager.tiers().unwrap().remove(1)
}

pub fn carried(manager: &Manager) {
    manager.wait_until_carried(Some(LONG)).unwrap();
}

pub const EACH: TierRule = TierRule { every: 1, all: true };
pub const EVERY_OTHER: TierRule = TierRule { every: 2, all: true };
pub const LATEST: TierRule = TierRule { every: 1, all: false };

/// A store that answers no upload while `silent` is set.
pub fn hold_uploads(store: &Arc<SimStore>) -> Arc<AtomicBool> {
    let silent = Arc::new(AtomicBool::new(false));
    let asked = Arc::clone(&silent);
    store.script(move |request| {
        let is_data = request.key.contains(".data");
        if is_data && asked.load(Ordering::SeqCst) { Fate::Dropped } else { Fate::Served }
    });
    silent
}

/// Opens both tiers, over a store that answers no upload while the flag is set.
pub fn open_silenced(near: Options, rule: TierRule) -> (Worlds, Arc<AtomicBool>, Manager) {
    let worlds = Worlds::new();
    let store = worlds.store.process();
    let silent = hold_uploads(&store);
    let manager = worlds.try_open_with(&worlds.near.disk, &store, near, rule).unwrap();
    (worlds, silent, manager)
}

/// Changes a byte of the data of a step on the near disk.
pub fn damage(worlds: &Worlds, manager: &Manager, step: u64) {
    let manifest = manager.manifest(Some(step)).unwrap();
    for file in &manifest.files {
        let path = manager.step_path(step).join(&file.path);
        assert!(worlds.near.disk.corrupt(path.to_str().unwrap(), |bytes| bytes[4200] ^= 1));
    }
}

/// The answers that a run got: steps that are committed near, and steps that have arrived.
#[derive(Debug, Default)]
pub struct Heard {
    pub committed: Vec<u64>,
    pub arrived: Vec<u64>,
}

/// Saves three steps, keeps one of them near, and carries all.
pub fn run(worlds: &Worlds, store: &Arc<SimStore>, patience: Duration) -> Heard {
    let mut heard = Heard::default();
    let near =
        Options { retention: Retention::keep_latest(1), stall_timeout: Duration::from_secs(5), ..quick() };
    let Ok(manager) = worlds.try_open_with(&worlds.near.disk, store, near, EACH) else { return heard };
    for step in 1..=3 {
        let Ok(save) = manager.save(request(step)) else { continue };
        if let Ok(Some(Outcome::Committed)) = save.wait(Some(LONG)) {
            heard.committed.push(step);
        }
        if manager.wait_carried(step, "home", patience).is_ok() {
            heard.arrived.push(step);
        }
    }
    // It ends here: what is due is left to the next process.
    let _ = manager.close(Some(Duration::from_millis(1)));
    heard
}

/// The next process finds all that was committed, and carries what is left.
pub fn check(worlds: Worlds, heard: &Heard, what: &str) {
    worlds.store.land_late();
    let whole = worlds.read_home_if_any();
    for step in &whole {
        assert_restores(&worlds.read_home(), *step);
    }
    assert!(heard.arrived.iter().all(|step| whole.contains(step)), "{what}: {heard:?}, home has {whole:?}");
    let next = worlds.open(quick(), EACH);
    let steps = next.all_steps().unwrap();
    assert_eq!(next.latest_step().unwrap(), heard.committed.last().copied(), "{what}: {heard:?}");
    for step in &steps {
        assert_restores(&next, *step);
    }
    carried(&next);
    let home = home_of(&next).steps;
    assert_eq!(home, heard.committed, "{what}: {heard:?}");
    next.close(Some(LONG)).unwrap();
    let worlds = worlds.on_a_new_node();
    let other = worlds.open(quick(), EACH);
    assert_eq!(other.latest_step().unwrap(), heard.committed.last().copied(), "{what}");
    commit(&other, 9);
    other.close(Some(LONG)).unwrap();
    assert_restores(&worlds.read_home(), 9);
}

impl Worlds {
    /// The steps of the far tier; none if it has no root.
    pub fn read_home_if_any(&self) -> Vec<u64> {
        let options = Options { read_only: true, ..quick() };
        let opened = Manager::open(Path::new(HOME), options, self.home_environment(&self.store.process()));
        opened.map_or_else(|_| Vec::new(), |home| home.all_steps().unwrap())
    }
}

/// Ends the process at its requests: at each `step`th, without `STEPWELL_LONG`.
pub fn end_at_each_request(compress: &[&str], step: usize) {
    let worlds = Worlds::compressing(compress);
    let store = worlds.store.process();
    let heard = run(&worlds, &store, LONG);
    assert_eq!((&*heard.committed, &*heard.arrived), (&[1, 2, 3][..], &[1, 2, 3][..]));
    let requests = store.requests().len() as u64;
    assert!(requests > 20);
    // A run takes a second.
    let (step, fates) = match std::env::var_os("STEPWELL_LONG") {
        Some(_) => {
            (1, &[Fate::Killed, Fate::KilledAfterwards, Fate::AnswerLost, Fate::Dropped, Fate::Late][..])
        }
        None => (step, &[Fate::Killed, Fate::KilledAfterwards, Fate::Late][..]),
    };
    for number in (0..requests).step_by(step) {
        for &fate in fates {
            let worlds = Worlds::compressing(compress);
            let store = worlds.store.process();
            store.script(move |request| if request.number == number { fate } else { Fate::Served });
            let heard = run(&worlds, &store, Duration::from_millis(300));
            check(worlds, &heard, &format!("{fate:?} at request {number}"));
        }
    }
}
