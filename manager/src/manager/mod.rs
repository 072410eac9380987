//! The manager of one root: saves in order, what is there, what stays.
//!
//! | file | what it does |
//! |---|---|
//! | `open` | opens and closes |
//! | `saves` | the saves that are not over, and how the others have ended |
//! | `history` | what was saved and restored, for policies |
//! | `usage` | the steps that are held, retired or replaced at this moment |
//! | `together` | what several ranks decide, raise and say together |
//! | `saving` | `save`: checks, capture on the caller's thread, hand-over to the persister |
//! | `capturer` | the one thread that captures what saves have left for later |
//! | `persister` | the threads that write and commit, first in, first out |
//! | `retaining` | retention, after each commit |
//! | `queries` | what is there: steps, metrics, metadata, plans |
//! | `changes` | rewind, delete, hold, prune |
//!
//! Only committed steps are ever listed. Every call that may wait has a deadline.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use stepwell_core::sys::Birth;

use crate::coordination::team::Team;
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::options::Options;
use crate::root::Root;
use crate::save::Streams;
use crate::state::StateSource;
use crate::step_name::StepName;

mod capturer;
mod changes;
mod history;
mod open;
mod persister;
mod queries;
mod retaining;
mod saves;
mod saving;
mod together;
mod usage;

pub use changes::Hold;
use history::History;
pub(crate) use open::agreed;
pub use queries::{ItemReport, StepReport};
use retaining::Inspection;
use saves::Saves;
pub use saving::{Decision, Ready};
use together::Ranks;
pub use together::Ticket;
use usage::Usage;

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

/// Shared by the handle and the threads of the manager. Each part has its own lock, if it changes.
struct Inner {
    root: Root,
    options: Options,
    environment: Environment,
    /// The ranks that have opened this root together.
    team: Arc<Team>,
    /// The agreements between these ranks.
    ranks: Ranks,
    saves: Saves,
    history: History,
    usage: Usage,
    inspection: Inspection,
    birth: Birth,
}

impl Inner {
    /// Every call begins here.
    fn check_usable(&self) -> Result<()> {
        self.birth.check("manager")?;
        self.check_open(&self.saves.lock())
    }

    fn check_writable(&self, what: &'static str) -> Result<()> {
        self.check_usable()?;
        if self.options.read_only {
            return Err(Error::ReadOnly { what, root: self.root.path.clone() });
        }
        Ok(())
    }

    /// Raises after `close` was called.
    fn check_open(&self, queued: &saves::QueuedSaves) -> Result<()> {
        if queued.end.closed { Err(Error::Closed { root: self.root.path.clone() }) } else { Ok(()) }
    }
}

impl Manager {
    /// The root's path.
    pub fn path(&self) -> &Path {
        &self.inner.root.path
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
        &self.inner.root.names
    }

    /// The user's metadata of the root.
    pub fn root_metadata(&self) -> Option<&serde_json::Value> {
        self.inner.root.info.as_ref().map(|info| &info.metadata).filter(|metadata| !metadata.is_null())
    }
}
