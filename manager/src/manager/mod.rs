//! The manager of one root: saves in order, what is there, what stays.
//!
//! | file | what it does |
//! |---|---|
//! | `open` | opens a root as its writer or as a reader; closes it |
//! | `together` | what several ranks decide, raise and say together |
//! | `saving` | `save`: checks, capture on the caller's thread, hand-over to the persister |
//! | `capturer` | the one thread that captures what saves have left for later |
//! | `persister` | the threads that write and commit, first in, first out |
//! | `retaining` | retention, after each commit |
//! | `trail` | what was saved and restored, in order |
//! | `queries` | what is there: steps, metrics, metadata, plans |
//! | `changes` | rewind, delete, hold, prune |
//!
//! Only committed steps are ever listed. Every call that may wait has a deadline.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use stepwell_core::io::{Dir, Lock};
use stepwell_core::staging::StagingPool;
use stepwell_core::sys::Birth;

use crate::beat::Heart;
use crate::coordination::pulse::Pulse;
use crate::coordination::team::Team;
use crate::discovery::Discovery;
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::metrics::Sidecars;
use crate::options::Options;
use crate::retire::Deleter;
use crate::root::RootInfo;
use crate::save::job::{Job, Rest};
use crate::save::{Save, Streams};
use crate::state::{Census, StateSource};
use crate::step_name::StepName;

mod capturer;
mod changes;
mod open;
mod persister;
mod queries;
mod retaining;
mod saving;
mod together;
mod trail;

pub use changes::Hold;
use persister::Turns;
pub use queries::{ItemReport, StepReport};
use retaining::Inspection;
pub use saving::{Decision, Ready};
pub use together::Ticket;
use trail::Trail;

/// A request to save.
pub struct SaveRequest {
    /// The step: the caller's label, 0 … 2^63 - 1.
    pub step: u64,
    /// The state.
    pub state: StateSource,
    /// Metrics; NaN and infinities survive.
    pub metrics: BTreeMap<String, f64>,
    /// Metadata; limited in size.
    pub custom_metadata: serde_json::Value,
    /// Skips the policy, and nothing else.
    pub force: bool,
    /// The treatment of an existing step.
    pub exists: Exists,
    /// Set from any thread (also before the call) to end the save as long as it is not captured:
    /// the call returns an error, nothing reads the state any more, nothing is committed.
    /// [`Save::cancel`] sets it too.
    pub cancel: Arc<AtomicBool>,
    /// The streams on which the caller's work on the devices is, by the number of their device:
    /// copies are made after what is there when `save` is called, and what must be captured before
    /// the caller changes it is waited for there. A device of which none is named is captured as
    /// its providers are made.
    pub streams: Streams,
}

impl SaveRequest {
    /// A save of a state, with nothing else said.
    pub fn new(step: u64, state: StateSource) -> Self {
        Self {
            step,
            state,
            metrics: BTreeMap::new(),
            custom_metadata: serde_json::Value::Null,
            force: false,
            exists: Exists::Error,
            cancel: Arc::default(),
            streams: Streams::new(),
        }
    }
}

/// The treatment of an existing step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Exists {
    /// It is an error.
    #[default]
    Error,
    /// It stays, and the save is refused without an error.
    Skip,
    /// The new one is written first and swapped in.
    Replace,
}

/// The manager of one root. See the module documentation.
pub struct Manager {
    inner: Arc<Inner>,
}

/// Shared by the handle and the persister.
struct Inner {
    path: PathBuf,
    root: Arc<dyn Dir>,
    names: StepName,
    info: Option<RootInfo>,
    options: Options,
    environment: Environment,
    /// The ranks that have opened this root together.
    team: Arc<Team>,
    discovery: Discovery,
    sidecars: Sidecars,
    inspection: Inspection,
    deleter: Arc<Deleter>,
    birth: Birth,
    state: Mutex<State>,
    /// Held while the ranks tell each other which leaves they have: a call that was interrupted may
    /// still be at it when the next one begins.
    telling: Mutex<()>,
    changed: Condvar,
}

#[derive(Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own; no two exclude each other")]
struct State {
    /// No call begins any more, but that of `close`.
    closed: bool,
    /// A call of `close` runs.
    closing: bool,
    /// Nothing is left that `close` would wait for.
    ended: bool,
    /// The persister is to end once the queue is empty.
    stop: bool,
    /// Damage that a warning has told of: the attempt, and what does not hold.
    told_damaged: BTreeSet<String>,
    /// The save counter of the session.
    counter: u64,
    queue: VecDeque<Job>,
    /// A save is being captured, by its caller or by the capturer.
    capturing: bool,
    /// Its turn to be captured has come, and it is not in the queue yet: no other may come before
    /// it there.
    claimed: bool,
    /// Unfinished captures whose callers have continued, in the order of their saves.
    rests: VecDeque<Rest>,
    /// Every save that is not over, oldest first.
    pending: Vec<Save>,
    /// Saves that failed, until someone has seen it.
    failed: Vec<Save>,
    /// The last of them, seen or not.
    last_failure: Option<Save>,
    /// Numbers of the saves that have ended, from `over_before` on; what is below has.
    over: BTreeSet<u64>,
    over_before: u64,
    /// Of those that failed: the ranks have not told each other yet who has seen it.
    unsettled: BTreeSet<u64>,
    /// The largest step that was there when the root was opened, or that a save was begun of: the
    /// same on all ranks.
    highest: Option<u64>,
    /// The step that the leader has last chosen for a restore.
    chosen: Option<u64>,
    /// The holders of plain leaves, as the ranks have exchanged them.
    census: Option<Arc<Census>>,
    /// Steps that have their name and may not be durable.
    uncertain: BTreeSet<u64>,
    /// The saved and restored steps, in order.
    trail: Trail,
    /// True if a step was ever seen here: then the root is not empty, and need not be looked at to
    /// know that.
    populated: bool,
    /// When the last save began.
    last_save: Option<Duration>,
    /// The newest step that the save policy was asked about.
    decided: Option<u64>,
    /// The step from which on the job counts as preempted.
    preempted: Option<u64>,
    preemption_asked: bool,
    /// Steps that this manager holds, and how often. A step is never here and in `retiring` at
    /// once, but for a [`Hold`] that waits to see what became of it.
    held: BTreeMap<u64, u64>,
    /// Steps that are being taken out of sight at this moment.
    retiring: BTreeSet<u64>,
    /// Steps that pending saves are to replace, one for each save. A [`Hold`] waits for those too.
    replacing: Vec<u64>,
    persisters: Vec<JoinHandle<()>>,
    turns: Turns,
    capturer: Option<JoinHandle<()>>,
    /// The staging memory, from the first use until nothing is left to save.
    pool: Option<Arc<StagingPool>>,
    lock: Option<Box<dyn Lock>>,
    /// The writer's heartbeat, on file systems without locks.
    heart: Option<Heart>,
    /// This rank's heartbeat, if there are other ranks.
    pulse: Option<Pulse>,
    /// This rank takes part in a restore: it lives, however long it reads.
    restoring: bool,
    /// It is at a call of that restore which all make.
    asking: bool,
    /// Why its caller has left that call: it says so in the next one.
    restore_left: Option<String>,
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every call begins here.
    fn check_usable(&self) -> Result<()> {
        self.birth.check("manager")?;
        if self.lock().closed {
            return Err(Error::Closed { root: self.path.clone() });
        }
        Ok(())
    }

    fn check_writable(&self, what: &'static str) -> Result<()> {
        self.check_usable()?;
        if self.options.read_only {
            return Err(Error::ReadOnly { what, root: self.path.clone() });
        }
        Ok(())
    }

    /// Asked before a step is taken out of sight, set aside or thinned: nobody but the root's
    /// current writer does that.
    fn check_fence(&self) -> Result<()> {
        match crate::root::usurper(&*self.root, self.team.session())? {
            Some(owner) => Err(Error::Locked { root: self.path.clone(), owner: Some(owner) }),
            None => Ok(()),
        }
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, deadline: Instant) -> Option<MutexGuard<'a, State>> {
        let left = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
        Some(self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0)
    }
}

impl Manager {
    /// The root's path.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// The injected world.
    pub fn environment(&self) -> &Environment {
        &self.inner.environment
    }

    /// Its options.
    pub fn options(&self) -> &Options {
        &self.inner.options
    }

    /// How steps are named here.
    pub fn step_name(&self) -> &StepName {
        &self.inner.names
    }

    /// The user's metadata of the root.
    pub fn root_metadata(&self) -> Option<&serde_json::Value> {
        self.inner.info.as_ref().map(|info| &info.metadata).filter(|metadata| !metadata.is_null())
    }
}
