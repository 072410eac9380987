//! Opening and closing.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use stepwell_core::deadline::deadline_after;
use stepwell_core::io::Dir;
use stepwell_core::io::change_log::{ChangeLog, RecordingDir};
use stepwell_core::sys::Birth;

use super::retaining::Inspection;
use super::{Inner, Manager, State};
use crate::beat::{self, Heart};
use crate::coordination::pulse::Pulse;
use crate::coordination::team::{Beat, Team};
use crate::directory_layout::{self, OwnName};
use crate::discovery::Discovery;
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::metrics::{self, Sidecars};
use crate::options::{OnSaveError, Options};
use crate::recovery;
use crate::retire::{self, Deleter};
use crate::root::{self, RootInfo};
use crate::step_name::StepName;

impl Manager {
    /// Opens a root: as its writer, which settles what a crash has left there, or read-only, which
    /// changes nothing. Of several ranks, all must open it; the leader is the writer of what all of
    /// them save.
    pub fn open(path: &Path, options: Options, environment: Environment) -> Result<Self> {
        options.check()?;
        let mut opened = None;
        let met = if environment.coordinator.world_size() == 1 {
            let session = environment.hex_id();
            opened = Some(Opened::new(path, &session, &options, &environment, !options.read_only)?);
            Ok((Team::alone(session), ()))
        } else {
            let what = path.display().to_string();
            let patience = options.stall_timeout;
            Team::meet(&environment.coordinator, &what, agreed(&options), patience, || {
                let session = environment.hex_id();
                opened = Some(Opened::new(path, &session, &options, &environment, !options.read_only)?);
                Ok((session, ()))
            })
        };
        let (team, ()) = match met {
            Ok(met) => met,
            Err(error) => {
                if let Some(opened) = opened {
                    opened.let_go();
                }
                return Err(error);
            }
        };
        let opened = match opened {
            Some(opened) => opened,
            None => Opened::beside(path, team.session(), &options, &environment)?,
        };
        let Opened { directory, discovery, deleter, state, names, info } = opened;
        let manager = Self {
            inner: Arc::new(Inner {
                path: path.to_owned(),
                root: directory,
                names,
                info,
                options,
                environment,
                team: Arc::new(team),
                discovery,
                sidecars: Sidecars::default(),
                inspection: Inspection::default(),
                deleter,
                birth: Birth::now(),
                state: Mutex::new(state),
                telling: Mutex::default(),
                changed: Condvar::new(),
            }),
        };
        manager.inner.join()?;
        Ok(manager)
    }

    /// Waits until every save is over and what it made superfluous is out of sight; raises a
    /// failure that nobody has seen.
    pub fn wait_until_finished(&self, timeout: Option<Duration>) -> Result<()> {
        self.inner.birth.check("manager")?;
        self.inner.drain(timeout)?;
        self.check_for_errors()
    }

    /// Raises a failure in the background that nobody has seen, once.
    pub fn check_for_errors(&self) -> Result<()> {
        self.inner.birth.check("manager")?;
        self.inner.raise_unseen(None)
    }

    /// [`Manager::check_for_errors`] by a save that is not begun where this raises: the error says
    /// so. Several ranks raise it by the same call, and so in [`Manager::decide`].
    pub fn check_before_saving(&self, step: u64) -> Result<()> {
        self.inner.birth.check("manager")?;
        if self.inner.team.is_alone() { self.inner.raise_unseen(Some(step)) } else { Ok(()) }
    }

    /// Takes back a failure that was raised here and could not be reported, so that it is raised
    /// again. Ignores other errors.
    pub fn put_back(&self, error: &Error) {
        if let Error::Earlier { save, .. } = error
            && self.inner.birth.is_here()
        {
            let mut state = self.inner.lock();
            save.not_seen();
            if !state.failed.iter().any(|failed| failed.is(save)) {
                state.failed.push(save.clone());
            }
        }
    }

    /// The failures that nobody has seen, as text; they stay unseen. For a process that ends.
    pub fn unseen_errors(&self) -> Vec<String> {
        if !self.inner.birth.is_here() {
            return Vec::new();
        }
        let state = self.inner.lock();
        state
            .failed
            .iter()
            .filter(|save| save.is_unseen())
            .filter_map(|save| save.outcome().and_then(|outcome| outcome.error().map(ToString::to_string)))
            .collect()
    }

    /// Finishes all saves, deletes what is to be deleted, and lets go of the root. Ends by its
    /// deadline: what the kernel does not return is leaked on purpose, and reported. Closing again
    /// is nothing where that was its end; where a close goes on, or has given up, it waits for what
    /// is left, and says so.
    pub fn close(&self, timeout: Option<Duration>) -> Result<()> {
        self.inner.birth.check("manager")?;
        self.inner.close(timeout.unwrap_or(self.inner.options.stall_timeout))
    }

    /// True if `close` was called: it may go on still, or have given up. To a forked child it is
    /// closed: there, nobody may ever let go of the lock.
    pub fn is_closed(&self) -> bool {
        !self.inner.birth.is_here() || self.inner.lock().closed
    }
}

/// The options that must be equal on all ranks: those for planning and for counting.
fn agreed(options: &Options) -> Vec<(String, String)> {
    let writers = options.writers.map_or_else(
        || "all".to_owned(),
        |most| format!("{most} per {:?}", options.writers_per).to_lowercase(),
    );
    [
        ("read_only", options.read_only.to_string()),
        ("max_pending", options.max_pending.to_string()),
        ("chunk_bytes", options.chunk_bytes.to_string()),
        ("min_row_bytes", options.min_row_bytes.to_string()),
        ("block_bytes", options.block_bytes.to_string()),
        ("writers", writers),
        ("files_per", format!("{:?}", options.files_per).to_lowercase()),
        ("save_policy", serde_json::to_string(&options.save_policy).unwrap_or_default()),
        ("on_save_error", format!("{:?}", options.on_save_error)),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

/// A root that was opened.
struct Opened {
    directory: Arc<dyn Dir>,
    discovery: Discovery,
    deleter: Arc<Deleter>,
    state: State,
    names: StepName,
    info: Option<RootInfo>,
}

impl Opened {
    fn new(
        path: &Path,
        session: &str,
        options: &Options,
        environment: &Environment,
        is_writer: bool,
    ) -> Result<Self> {
        let directory = root::open(environment, path, options.create && is_writer)?;
        let changes = Arc::new(ChangeLog::default());
        let (discovery, directory): (_, Arc<dyn Dir>) = if is_writer {
            (Discovery::of_writer(Arc::clone(&changes)), Arc::new(RecordingDir::new(directory, changes)))
        } else {
            (Discovery::default(), directory)
        };
        let deleter = Arc::new(Deleter::with_spares(
            Arc::clone(&directory),
            Arc::clone(&environment.clock),
            options.grace,
            options.overwrite_from_bytes,
        ));
        let mut state = State::default();
        let (names, info) = if is_writer {
            let opening = Opening {
                root: &directory,
                session,
                options,
                environment,
                discovery: &discovery,
                deleter: &deleter,
            };
            match opening.as_writer(&mut state) {
                Ok((names, info)) => (names, Some(info)),
                Err(error) => {
                    if let Some(heart) = state.heart.take() {
                        heart.stop(&*directory);
                    }
                    return Err(error);
                }
            }
        } else {
            let info = root::read_info(&*directory)?;
            let names = names(options.step_name.clone(), info.as_ref());
            if let Some(info) = &info {
                check_names(&*directory, &discovery, &names, &info.step_name)?;
            }
            (names, info)
        };
        Ok(Self { directory, discovery, deleter, state, names, info })
    }

    /// On a rank that does not lead: the leader has just opened it, and a network file system may
    /// not show that yet.
    fn beside(path: &Path, session: &str, options: &Options, environment: &Environment) -> Result<Self> {
        let deadline = deadline_after(VISIBLE_WITHIN);
        loop {
            match Self::new(path, session, options, environment, false) {
                Err(Error::Core(error)) if error.is_gone() && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                opened => return opened,
            }
        }
    }

    /// The other ranks have not come: nobody writes here.
    fn let_go(mut self) {
        if let Some(heart) = self.state.heart.take() {
            heart.stop(&*self.directory);
        }
        self.deleter.stop(Duration::from_millis(100));
    }
}

/// How long a file system may take to show one machine what another has made.
pub(super) const VISIBLE_WITHIN: Duration = Duration::from_secs(30);

/// A root that is being opened by its writer.
struct Opening<'a> {
    root: &'a Arc<dyn Dir>,
    session: &'a str,
    options: &'a Options,
    environment: &'a Environment,
    discovery: &'a Discovery,
    deleter: &'a Deleter,
}

impl Opening<'_> {
    /// Becomes the writer, and settles what a crash has left.
    fn as_writer(&self, state: &mut State) -> Result<(StepName, RootInfo)> {
        let Self { root, session, options, environment, .. } = *self;
        root::make_control(&**root)?;
        state.lock = root::lock(&**root, options.take_over)?;
        if state.lock.is_none() {
            tracing::warn!(
                root = %root.path().display(), grace_seconds = options.grace.as_secs_f64(),
                "no locks here: readers hold no leases; the files of a retired step are deleted after the grace period"
            );
            // Before the others are looked at: so two that come at once see each other.
            state.heart = Some(Heart::start(root, session, options.silence)?);
        }
        beat::wait_for_silence(&**root, session, &*environment.clock, options.silence)?;
        root.sync()?;
        let info = root::read_info(&**root)?;
        let names = names(options.step_name.clone(), info.as_ref());
        let recorded = info.map_or_else(|| names.clone(), |info| info.step_name);
        // Before anything is changed.
        check_names(&**root, self.discovery, &names, &recorded)?;
        match root::take_epoch(&**root, session) {
            // A disk that a killed save has filled has room again once that save's files are gone.
            // With the lock, they are nobody's.
            Err(Error::Core(error)) if error.is_full() && state.lock.is_some() => {
                self.make_room()?;
                root::take_epoch(&**root, session)?;
            }
            taken => drop(taken?),
        }
        beat::forget_others(&**root, session)?;
        let info = root::make_info(&**root, environment, &names, &options.root_metadata)?;
        let mut recovered = recovery::sweep(&**root, session, environment)?;
        let listing = self.discovery.list(&**root, &names)?;
        state.populated = !listing.steps.is_empty();
        recovery::mend(&**root, &listing, environment.clock.unix_ns(), options.grace, &mut recovered);
        match metrics::reclaim(&**root, &names, &recorded, &listing) {
            Ok(0) => {}
            Ok(files) => tracing::info!(files, "removed the later metrics of steps that are gone"),
            Err(error) => tracing::warn!(%error, "the later metrics of steps that are gone stay for now"),
        }
        if !recovered.abandoned.is_empty() {
            tracing::info!(temporaries = ?recovered.abandoned, "removing what dead writers left");
        }
        self.deleter.enqueue(recovered.trash);
        Ok((names, info))
    }

    /// Deletes what dead writers left, at once; what readers hold stays.
    fn make_room(&self) -> Result<()> {
        let recovered = recovery::sweep(&**self.root, self.session, self.environment)?;
        for trash in recovered.trash {
            if let Err(error) = retire::remove(&**self.root, &trash, false, &mut || true) {
                tracing::warn!(%trash, %error, "could not be deleted to make room");
            }
        }
        Ok(())
    }
}

/// How steps are named: as the caller says, else as the root says, else the default.
fn names(wanted: Option<StepName>, info: Option<&RootInfo>) -> StepName {
    wanted.or_else(|| info.map(|info| info.step_name.clone())).unwrap_or_default()
}

/// Refuses a pattern that does not read the existing steps. `latest_step()` and retention would not
/// know them, a writer's root would forget their pattern, and an evaluator would wait permanently.
fn check_names(root: &dyn Dir, discovery: &Discovery, names: &StepName, recorded: &StepName) -> Result<()> {
    if names == recorded {
        return Ok(());
    }
    let there = discovery.list(root, recorded)?;
    match there.steps.values().find(|found| names.parse(&found.name).is_none()) {
        Some(found) => Err(Error::OtherStepName {
            root: root.path().to_owned(),
            recorded: Box::new(recorded.clone()),
            wanted: Box::new(names.clone()),
            example: found.name.clone(),
        }),
        None => Ok(()),
    }
}

impl Inner {
    /// Exchanges the shared settings, and starts heartbeats.
    fn join(self: &Arc<Self>) -> Result<()> {
        if self.team.is_alone() {
            return Ok(());
        }
        let newest = self.team.ask("open", || Ok(self.newest()?.map(|found| found.manifest.step)))?;
        let inner = Arc::downgrade(self);
        let looks = AtomicU64::new(0);
        let life = move || {
            let inner = inner.upgrade()?;
            let state = inner.lock();
            let is_to_say = |&save: &u64| !state.over.contains(&save) && !inner.team.has_voted(save);
            let save = (state.over_before..state.counter).find(is_to_say).unwrap_or(state.counter);
            if state.restoring || inner.team.gathers() {
                return Some(Beat { save, moved: looks.fetch_add(1, Ordering::Relaxed) });
            }
            if state.pending.is_empty() {
                return None;
            }
            let moved = state.pending.iter().fold(0_u64, |sum, save| sum.wrapping_add(save.moved()));
            let moved = moved.wrapping_add(state.counter.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            Some(Beat { save, moved })
        };
        let pulse = Pulse::start(Arc::clone(&self.team), life)
            .map_err(|error| stepwell_core::Error::io("start a thread for", &self.path, error))?;
        let mut state = self.lock();
        state.highest = newest;
        state.pulse = Some(pulse);
        Ok(())
    }

    /// Waits until no save is pending. Without a timeout: as long as there is progress.
    pub(super) fn drain(&self, timeout: Option<Duration>) -> Result<()> {
        let begun = Instant::now();
        let limit = timeout.unwrap_or(self.options.stall_timeout);
        let mut deadline = deadline_after(limit);
        let mut state = self.lock();
        let mut seen = (state.pending.len(), 0);
        loop {
            let Some(first) = state.pending.first() else { return Ok(()) };
            let now = (state.pending.len(), first.moved());
            if timeout.is_none() && now != seen {
                seen = now;
                deadline = deadline_after(limit);
            }
            let waited_for = format!("{} save(s), the oldest of step {}", state.pending.len(), first.step());
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Timeout { waited_for, waited: begun.elapsed() });
            }
            let pause = Instant::now() + left.min(Duration::from_secs(1));
            state = match self.wait(state, pause) {
                Some(state) => state,
                None => self.lock(),
            };
        }
    }

    /// Returns `None` if everything is closed. A second call waits for the first, and may have to
    /// close in its place.
    fn begin_closing(&self, deadline: Instant) -> Result<Option<Closing<'_>>> {
        let begun = Instant::now();
        let mut state = self.lock();
        state.closed = true;
        while state.closing {
            state = self.wait(state, deadline).ok_or_else(|| Error::Timeout {
                waited_for: "another close of this manager".to_owned(),
                waited: begun.elapsed(),
            })?;
        }
        if state.ended {
            return Ok(None);
        }
        state.closing = true;
        Ok(Some(Closing(self)))
    }

    pub(super) fn raise_unseen(&self, unsaved: Option<u64>) -> Result<()> {
        let mut state = self.lock();
        while !state.failed.is_empty() {
            let save = state.failed.remove(0);
            let Some(error) = save.take_unseen() else { continue };
            if self.options.on_save_error == OnSaveError::Warn {
                tracing::warn!(step = save.step(), %error, "a save failed; training goes on");
                continue;
            }
            return Err(Error::Earlier { unsaved, save, source: error });
        }
        Ok(())
    }

    pub(super) fn close(&self, timeout: Duration) -> Result<()> {
        let deadline = deadline_after(timeout);
        let left = || deadline.saturating_duration_since(Instant::now());
        let Some(_closing) = self.begin_closing(deadline)? else { return Ok(()) };
        let drained = self.drain(Some(timeout));
        self.lock().stop = true;
        self.changed.notify_all();
        if drained.is_ok() {
            let threads = {
                let mut state = self.lock();
                let mut threads = std::mem::take(&mut state.persisters);
                threads.extend(state.capturer.take());
                threads
            };
            for thread in threads {
                // It has nothing left to do but to see that.
                let _ = thread.join();
            }
        }
        let left_together =
            if drained.is_ok() { self.leave(left().min(self.options.stall_timeout)) } else { Ok(()) };
        // Past the deadline a moment is still given: a deletion stops between two files.
        let stopped = self.deleter.stop(left().max(Duration::from_millis(100)));
        if drained.is_ok() {
            // Keep it otherwise, so that a new writer sees that this one still writes.
            let heart = {
                let mut state = self.lock();
                state.lock = None;
                state.heart.take()
            };
            if let Some(heart) = heart {
                heart.stop(&*self.root);
            }
            // Given back here and not with the last handle: a program may keep one to its end.
            let pool = self.lock().pool.take();
            drop(pool);
        }
        drained?;
        self.lock().ended = stopped;
        left_together?;
        self.raise_unseen(None)?;
        if let Some(error) = self.deleter.take_failures().into_iter().next() {
            return Err(error.into());
        }
        if stopped {
            Ok(())
        } else {
            Err(Error::Timeout { waited_for: "a deletion".to_owned(), waited: timeout })
        }
    }
}

impl Inner {
    /// The last word to the other ranks. When all of them have said it, the leader takes out of
    /// sight what late ones have written for saves that were over.
    fn leave(&self, timeout: Duration) -> Result<()> {
        let pulse = self.lock().pulse.take();
        drop(pulse);
        if self.team.is_alone() {
            return Ok(());
        }
        let saves = self.lock().counter;
        if self.team.leave(saves, timeout)? && !self.options.read_only {
            let is_ours = |name: &str| {
                matches!(
                    directory_layout::parse(name),
                    Some(OwnName::Temporary { session, .. } | OwnName::GivenUp { session })
                        if session == self.team.session()
                )
            };
            let entries = self.root.entries()?.into_iter().map(|entry| entry.name);
            let ours: Vec<String> = entries.filter(|name| is_ours(name)).collect();
            if !ours.is_empty() {
                // One of them may be a step that was replaced by one of which it is uncertain
                // whether it is durable.
                self.root.sync()?;
                self.deleter.enqueue(ours);
            }
        }
        Ok(())
    }
}

/// The right to close; one call at a time has it.
struct Closing<'a>(&'a Inner);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.lock().closing = false;
        self.0.changed.notify_all();
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        // A close that missed its deadline was reported. Do not wait again.
        if self.is_closed() {
            return;
        }
        if let Err(error) = self.inner.close(self.inner.options.stall_timeout) {
            tracing::error!(%error, root = %self.inner.path.display(), "a manager was dropped without close()");
        }
    }
}
