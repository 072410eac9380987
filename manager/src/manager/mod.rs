//! The manager of one root: it saves steps in order, lists them, and applies retention.
//!
//! | file | what it does |
//! |---|---|
//! | `open` | opens and closes |
//! | `saves` | the pending saves, and the failures of those that ended |
//! | `history` | the saved and restored steps, for policies |
//! | `usage` | the steps that are held, retired or replaced now |
//! | `together`, `restores` | the agreements of several ranks, on saves and on restores |
//! | `ticket` | the right to save one step |
//! | `saving` | `save`: checks, capture on the caller's thread, hand-over to the persister |
//! | `capturer` | the thread of late captures |
//! | `persister` | the threads that write and commit, first in, first out |
//! | `retaining` | retention, after each commit |
//! | `tiers`, `carrier` | further roots, and the threads that copy steps there |
//! | `notice` | the best use of the time before a machine is taken away |
//! | `copies` | the copies of a step in all tiers, the nearest first |
//! | `parts` | the parts of steps on the local disk of a machine, in a root of several machines |
//! | `left_steps` | the steps of a machine that was absent while the run went on |
//! | `queries` | steps, metrics, metadata, plans |
//! | `traces` | digests of states, and the traces of steps |
//! | `changes` | rewind, delete, hold, prune |
//!
//! Only committed steps are listed. Every call that may wait has a deadline.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use stepwell_core::format::manifest::UnsupportedLeaf;
use stepwell_core::sys::Birth;

use crate::coordination::team::Team;
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::machines::Machines;
use crate::options::Options;
use crate::root::Root;
use crate::save::Streams;
use crate::state::StateSource;

mod capturer;
mod carrier;
mod changes;
mod copies;
mod history;
mod left_steps;
mod machine_carrying;
mod notice;
mod open;
mod partner_copies;
mod parts;
mod persister;
mod queries;
mod rebuilt_bytes;
mod restores;
mod retaining;
mod saves;
mod saving;
#[cfg(any(test, feature = "test-support"))]
mod testing;
mod ticket;
mod tiers;
mod together;
mod traces;
mod usage;

pub use changes::Hold;
use history::History;
pub(crate) use open::agreed;
use partner_copies::PartnerCopies;
use parts::Parts;
pub use queries::{ItemReport, StepReport};
use retaining::Inspection;
use saves::Saves;
pub use saving::{Decision, Ready};
pub use ticket::Ticket;
use tiers::Tier;
pub use tiers::{TierPlace, TierReport};
use together::Ranks;
use usage::Usage;

/// A request to save.
pub struct SaveRequest {
    /// The step: the caller's label, 0 … 2^63 - 1.
    pub step: u64,
    /// The state.
    pub state: StateSource,
    /// Leaves that could not be stored, and were left out. The leader's are recorded.
    pub unsupported: Vec<UnsupportedLeaf>,
    /// Metrics; NaN and infinities survive.
    pub metrics: BTreeMap<String, f64>,
    /// Metadata; limited in size.
    pub custom_metadata: serde_json::Value,
    /// True if the save policy is not asked.
    pub force: bool,
    /// The treatment of an existing step.
    pub exists: Exists,
    /// Set it from any thread, also before the call, to end the save before it is captured. The
    /// call then returns an error. Nothing reads the state any more, and nothing is committed.
    /// [`crate::Save::cancel`] sets it too.
    pub cancel: Arc<AtomicBool>,
    /// The caller's streams, by device number. Copies run after the earlier work on them. An eager
    /// capture makes later work on them wait. A device without a stream is captured as its
    /// providers decide.
    pub streams: Streams,
    /// True if the state's providers are dropped before the call that captures returns, where it
    /// captures all of them.
    pub drops_providers: bool,
}

impl SaveRequest {
    /// A save of a state, with defaults for all else.
    pub fn new(step: u64, state: StateSource) -> Self {
        Self {
            step,
            state,
            unsupported: Vec::new(),
            metrics: BTreeMap::new(),
            custom_metadata: serde_json::Value::Null,
            force: false,
            exists: Exists::Error,
            cancel: Arc::default(),
            streams: Streams::new(),
            drops_providers: false,
        }
    }
}

/// The treatment of an existing step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Exists {
    /// The call fails.
    #[default]
    Error,
    /// The step stays, and the save is refused without an error.
    Skip,
    /// The new step is written first, then swapped in.
    Replace,
}

/// The manager of one root. Dropping it closes it.
pub struct Manager {
    inner: Arc<Inner>,
}

/// The state that the handle and the threads of a manager share. Each part has its own lock.
struct Inner {
    root: Root,
    options: Options,
    environment: Environment,
    /// The ranks that opened this root together.
    team: Arc<Team>,
    /// The agreements between these ranks.
    ranks: Ranks,
    saves: Saves,
    history: History,
    usage: Usage,
    inspection: Inspection,
    /// The further tiers, nearest first.
    tiers: Vec<Arc<Tier>>,
    /// The machines of a root that is on the local disk of each.
    machines: Option<Arc<Machines>>,
    parts: Parts,
    partners: PartnerCopies,
    birth: Birth,
}

impl Inner {
    /// Every call begins with this check.
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

    /// Fails after `close` was called.
    fn check_open(&self, queued: &saves::QueuedSaves) -> Result<()> {
        if queued.end.closed { Err(Error::Closed { root: self.root.path.clone() }) } else { Ok(()) }
    }
}

impl Manager {
    /// The root's path.
    pub fn path(&self) -> &Path {
        &self.inner.root.path
    }

    /// The user's metadata of the root.
    pub fn root_metadata(&self) -> Option<&serde_json::Value> {
        self.inner.root.info.as_ref().map(|info| &info.metadata).filter(|metadata| !metadata.is_null())
    }
}
