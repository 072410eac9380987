//! Singular checkpoints: one state under one path, by the same commit machine. The temporary is a
//! sibling of the path.
//!
//! Several ranks may save one together. They meet for this one save, as the ranks of a manager do
//! when they open it, and leave each other when it has ended.
//!
//! There is no root, and no writer's lock. A writer holds the lease of its temporary. The next save
//! to the same path removes temporaries without a held lease. If the path is inside a root, that
//! root's next writer does so too. On a file system without locks they stay.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use stepwell_core::Kind;
use stepwell_core::io::{Dir, EntryKind};
use stepwell_core::staging::StagingPool;
use stepwell_core::sys::spawn;

use crate::commit::Existing;
use crate::control::read_info;
use crate::coordination::team::{RankHeartbeat, Team};
use crate::directory_layout::{self, CONTROL, OwnName, SINGLE};
use crate::discovery::read_manifest;
use crate::environment::Environment;
use crate::error::{Advice, Error, Result};
use crate::guard::guarded;
use crate::manager::{Exists, SaveRequest, agreed};
use crate::options::Options;
use crate::periodic::Periodic;
use crate::recovery;
use crate::retire::Deleter;
use crate::save::job::{self, PlanContext, PlannedSave, SaveJob, SaveTarget};
use crate::save::{Refusal, Save, participation, persist};
use crate::state::plain_leaves;

/// The longest wait of the leader for the other ranks, once a save has ended.
const LEAVING: Duration = Duration::from_secs(30);
/// The longest wait for deletions.
const CLEANING: Duration = Duration::from_secs(600);

/// Saves a state under a path. Returns when it is captured. The outcome comes through the handle.
/// The manifest records the request's step, although it has no meaning here.
pub fn save(path: &Path, request: SaveRequest, options: &Options, environment: &Environment) -> Result<Save> {
    match PathTicket::new(path, request.exists, options, environment) {
        Ok(ticket) => ticket.save(request),
        Err(error) if request.exists == Exists::Skip && error.kind() == Kind::StepExists.name() => {
            Ok(Save::refused(request.step, Refusal::Exists))
        }
        Err(error) => Err(error),
    }
}

/// The right to save to one path. On several ranks also the duty to take part: a ticket that is
/// dropped unused reports to the other ranks that this one does not save.
pub struct PathTicket {
    path: PathBuf,
    /// Its parent directory.
    parent: Arc<dyn Dir>,
    name: String,
    existing: Existing,
    team: Arc<Team>,
    options: Options,
    environment: Environment,
    pool: Arc<StagingPool>,
    /// True once this rank has taken part in the exchange of leaves.
    exchanged: bool,
    used: bool,
    cause: Arc<OnceLock<String>>,
}

impl PathTicket {
    /// Checks the path, and returns the right to save there. Several ranks meet here: the leader
    /// checks, and all ranks get its answer.
    pub fn new(path: &Path, exists: Exists, options: &Options, environment: &Environment) -> Result<Self> {
        options.check()?;
        let (parent, name) = place(path, environment)?;
        let open = || {
            let disk = &environment.disk;
            if options.create { disk.create_dir_all(parent) } else { disk.open_dir(parent) }
        };
        let coordinator = &environment.coordinator;
        let team = if coordinator.world_size() == 1 {
            Team::alone(environment.hex_id())
        } else {
            let mut agreed = agreed(options);
            agreed.push(("exists".to_owned(), format!("{exists:?}").to_lowercase()));
            let what = path.display().to_string();
            Team::meet(coordinator, &what, agreed, options.stall_timeout, || Ok(environment.hex_id()))?
        };
        let mut owned = None;
        let existing = team
            .ask("save", || {
                let parent = open()?;
                let existing = existing(path, &*parent, &name, exists)?;
                own(path, &*parent, team.session(), environment)?;
                owned = Some(parent);
                Ok(existing)
            })
            .inspect_err(|_| leave(&team, options.stall_timeout))?;
        let parent = owned.map_or_else(open, Ok).inspect_err(|error| {
            if !team.is_alone() {
                participation::abstain_from_exchange(&team, &error.to_string());
                leave(&team, options.stall_timeout);
            }
        })?;
        Ok(Self {
            path: path.to_owned(),
            parent,
            name,
            existing,
            team: Arc::new(team),
            options: options.clone(),
            environment: environment.clone(),
            pool: environment.pool(),
            exchanged: false,
            used: false,
            cause: Arc::default(),
        })
    }

    /// True if no other ranks save.
    pub fn is_alone(&self) -> bool {
        self.team.is_alone()
    }

    /// Returns the place for the reason of a drop, which the other ranks get. The first reason
    /// stays.
    pub fn cause(&self) -> Arc<OnceLock<String>> {
        Arc::clone(&self.cause)
    }

    /// Saves a state, as [`save`].
    pub fn save(mut self, request: SaveRequest) -> Result<Save> {
        let begun = Instant::now();
        self.plan(request, begun).and_then(|prepared| self.begin(prepared)).inspect_err(|error| {
            let _ = self.cause.set(error.to_string());
        })
    }

    fn plan(&mut self, request: SaveRequest, begun: Instant) -> Result<PlannedSave> {
        let census = if self.is_alone() {
            None
        } else {
            self.exchanged = true;
            Some(participation::exchange_leaves(&self.team, Ok(plain_leaves(&request.state)))?)
        };
        let Self { path, options, environment, team, pool, .. } = self;
        let context = PlanContext { root: path, environment, options, pool, team, census: census.as_ref() };
        let mut prepared = job::plan(&context, request, begun)?;
        job::allocate_staging(&mut prepared, options, pool)?;
        Ok(prepared)
    }

    fn begin(&mut self, prepared: PlannedSave) -> Result<Save> {
        let Self { path, parent, name, existing, team, options, environment, .. } = self;
        let no_thread = |error| stepwell_core::Error::io("start a thread for", path.as_path(), error);
        let label = directory_layout::label_of_path(name);
        let place = SaveTarget {
            label,
            target: name.clone(),
            existing: *existing,
            counter: 0,
            in_root: false,
            stale: false,
        };
        let (job, capturing) = prepared.split(environment, options, place);
        let heartbeat = heartbeat(team, &job.save).map_err(no_thread)?;
        let ending = Ending {
            parent: Arc::clone(parent),
            team: Arc::clone(team),
            environment: environment.clone(),
            stall_timeout: options.stall_timeout,
            heartbeat,
            path: path.clone(),
        };
        spawn("stepwell-persist", move || ending.run(job)).map_err(no_thread)?;
        self.used = true;
        let (save, rest) = capturing.run_eager()?;
        if let Some(rest) = rest {
            let (options, pool) = (self.options.clone(), Arc::clone(&self.pool));
            spawn("stepwell-capture", move || rest.run_rest(&pool, &options)).map_err(no_thread)?;
        }
        Ok(save)
    }
}

impl Drop for PathTicket {
    fn drop(&mut self) {
        if self.used || self.is_alone() {
            return;
        }
        let cause = self.cause.get_or_init(|| "its call of save was interrupted".to_owned());
        if self.exchanged {
            participation::abstain(&self.team, 0, 0, cause);
        } else {
            participation::abstain_from_exchange(&self.team, cause);
        }
        let deleter = deleter(&self.parent, &self.environment);
        if let Err(error) =
            leave_after_failure(&self.parent, &self.team, &deleter, self.options.stall_timeout)
        {
            tracing::warn!(%error, "cleaning up after a save to a path failed");
        }
        deleter.stop(CLEANING);
    }
}

/// Returns the treatment of an existing checkpoint at a path.
fn existing(path: &Path, parent: &dyn Dir, name: &str, exists: Exists) -> Result<Existing> {
    if parent.stat(name)?.is_none() {
        return Ok(Existing::Refuse);
    }
    if exists != Exists::Replace {
        return Err(Error::PathExists { path: path.to_owned(), advice: Advice::ReplacePath });
    }
    // Replace a checkpoint only, never another directory.
    match read_manifest(parent, name) {
        Ok(_) => Ok(Existing::Replace),
        Err(error) => {
            let reason = format!("it is not replaced: {error}");
            Err(Error::NotAStep { path: path.to_owned(), reason })
        }
    }
}

/// Reports to the other ranks that this one's save makes progress.
fn heartbeat(team: &Arc<Team>, save: &Save) -> std::io::Result<Option<Periodic>> {
    if team.is_alone() {
        return Ok(None);
    }
    let (ranks, save) = (Arc::clone(team), save.clone());
    let heartbeat = move || {
        let first_open = u64::from(ranks.has_voted(0));
        if let Err(error) =
            ranks.send_heartbeat(RankHeartbeat { save: first_open, progress: save.progress_counter() })
        {
            tracing::debug!(%error, "sending a heartbeat to the other ranks failed");
        }
        true
    };
    Periodic::start("stepwell-heartbeat", team.heartbeat_interval(), heartbeat).map(Some)
}

/// Leaves the other ranks.
fn leave(team: &Team, timeout: Duration) {
    if let Err(error) = all_have_left(team, timeout) {
        tracing::debug!(%error, "the ranks of a save did not leave together");
    }
}

/// Leaves the other ranks. Returns true on the leader, once all of them have left.
fn all_have_left(team: &Team, timeout: Duration) -> Result<bool> {
    if team.is_alone() { Ok(false) } else { team.leave(1, timeout.min(LEAVING)) }
}

/// Leaves the other ranks after a failed save. The leader then deletes what they have written.
fn leave_after_failure(
    parent: &Arc<dyn Dir>,
    team: &Team,
    deleter: &Deleter,
    timeout: Duration,
) -> Result<()> {
    if all_have_left(team, timeout)? {
        parent.sync()?;
        deleter.enqueue(recovery::of_session(&**parent, team.session())?);
    }
    Ok(())
}

/// Returns the deleter of a save to a path. No writer returns here later. Without locks, a reader
/// of a replaced checkpoint finds it gone.
fn deleter(parent: &Arc<dyn Dir>, environment: &Environment) -> Deleter {
    Deleter::new(Arc::clone(parent), Arc::clone(&environment.clock), Duration::ZERO, None)
}

/// The write and the commit of a save, on a background thread.
struct Ending {
    parent: Arc<dyn Dir>,
    team: Arc<Team>,
    environment: Environment,
    stall_timeout: Duration,
    heartbeat: Option<Periodic>,
    path: PathBuf,
}

impl Ending {
    fn run(self, job: SaveJob) {
        let Self { parent, team, environment, stall_timeout, heartbeat, path } = self;
        let deleter = Arc::new(deleter(&parent, &environment));
        // A panic outside of the save must not leave it without an outcome.
        let found = guarded("the removal of leftovers", || -> Result<Vec<String>> {
            match parent.fence() {
                _ if !team.leads() => Ok(Vec::new()),
                None => Ok(leftovers(&*parent, &job.plan.target, &environment)?),
                // No other session can commit.
                Some(_) => Ok(recovery::sweep(&*parent, team.session(), &environment)?.trash),
            }
        });
        match found.map_err(Error::from).and_then(|trash| trash) {
            Ok(trash) => deleter.enqueue(trash),
            Err(error) => {
                tracing::warn!(%error, "removing leftovers of a killed save failed");
            }
        }
        let (save, ended) = persist::run(job, &parent, &environment, &team, &deleter, &|| Ok(()));
        heartbeat.into_iter().for_each(Periodic::stop);
        let cleaned = guarded("the deleter", || {
            // Late ranks may have written files for a save that was over by then.
            let left = if ended.outcome.error().is_some() {
                leave_after_failure(&parent, &team, &deleter, stall_timeout)
            } else {
                all_have_left(&team, stall_timeout).map(drop)
            };
            deleter.enqueue(ended.replaced);
            deleter.stop(CLEANING);
            left
        });
        if let Err(error) = cleaned.map_err(Error::from).and_then(|cleaned| cleaned) {
            tracing::warn!(%error, "cleaning up after a save to a path failed");
        }
        let callbacks = save.set_outcome(ended.outcome);
        save.call(callbacks);
        persist::log_commit(&save, &team, "a checkpoint", &path);
    }
}

/// Removes leftovers of killed writers beside a path, as the next save to it does. Returns their
/// names.
pub fn sweep(path: &Path, environment: &Environment) -> Result<Vec<String>> {
    let (parent, name) = split(path)?;
    let parent = match environment.disk.open_dir(parent) {
        Ok(parent) => parent,
        Err(error) if error.is_not_found() => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let trash = leftovers(&*parent, &name, environment)?;
    let deleter = deleter(&parent, environment);
    deleter.enqueue(trash.iter().cloned());
    deleter.stop(CLEANING);
    Ok(trash)
}

/// Retires leftovers of killed writers beside a path: temporaries, and replaced checkpoints, whose
/// lease no process holds. Returns all trash of that path, ready to be deleted. Removes nothing
/// because of its age, and nothing without locks.
fn leftovers(parent: &dyn Dir, name: &str, environment: &Environment) -> stepwell_core::Result<Vec<String>> {
    if parent.stat(CONTROL)?.is_some() {
        // In a root, its next writer removes leftovers, also those of saves to a path.
        return Ok(Vec::new());
    }
    let mut trash = Vec::new();
    let mut renames = Vec::new();
    for entry in parent.entries()?.into_iter().filter(|entry| entry.kind == EntryKind::Dir) {
        match directory_layout::parse(&entry.name) {
            Some(OwnName::Temporary { label, .. }) if directory_layout::is_label_of(&label, name) => {
                renames.push((entry.name, directory_layout::trash(&label, environment.rng.next_u128())));
            }
            Some(OwnName::Trash { label } | OwnName::GivenUp { label, .. })
                if directory_layout::is_label_of(&label, name) =>
            {
                trash.push(entry.name);
            }
            _ => {}
        }
    }
    let retired = recovery::retire_of_dead_owners(parent, renames)?;
    if retired.is_empty() && !trash.is_empty() {
        // A killed process may have renamed it without a sync.
        parent.sync()?;
    }
    trash.extend(retired.into_iter().map(|(_, trash)| trash));
    Ok(trash)
}

/// Returns the directory for a checkpoint at a path, and its name there. In an object store, takes
/// that directory for a session.
pub(crate) fn own_destination(
    path: &Path,
    session: &str,
    environment: &Environment,
) -> Result<(Arc<dyn Dir>, String)> {
    let (parent, name) = place(path, environment)?;
    let parent = environment.disk.create_dir_all(parent)?;
    own(path, &*parent, session, environment)?;
    Ok((parent, name))
}

/// Returns the path of the directory that has a checkpoint, and its name there.
fn place<'a>(path: &'a Path, environment: &Environment) -> Result<(&'a Path, String)> {
    if environment.disk.keeps_ledgers() { Ok((path, SINGLE.to_owned())) } else { split(path) }
}

/// Takes the directory of a single checkpoint for a session, in an object store. Refuses a root of
/// a run, and a path in one.
fn own(path: &Path, parent: &dyn Dir, session: &str, environment: &Environment) -> Result<()> {
    let Some(fence) = parent.fence() else { return Ok(()) };
    let above = path.parent().and_then(|above| environment.disk.open_dir(above).ok());
    if above.is_some_and(|above| above.fence().is_some()) {
        return Err(Error::Invalid(format!(
            "{} is in a root or a checkpoint. Pass another URL",
            path.display()
        )));
    }
    if read_info(parent)?.is_some() {
        return Err(Error::Invalid(format!(
            "{} is the root of a run. Save to it through a manager, or pass another URL",
            path.display()
        )));
    }
    Ok(fence.take(session)?)
}

pub(crate) fn split(path: &Path) -> Result<(&Path, String)> {
    let bad = || Error::Invalid(format!("{} cannot be the path of a checkpoint", path.display()));
    let name = path.file_name().and_then(|name| name.to_str()).ok_or_else(bad)?;
    if name.starts_with('.') {
        return Err(Error::Invalid(format!(
            "{}: the name of a checkpoint must not start with a dot. Such names are temporary",
            path.display()
        )));
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((parent, name.to_owned()))
}
