//! A root: one directory of steps. It lists steps, finds damaged ones, holds the writer's rights,
//! and deletes steps.
//!
//! [`Root`] knows nothing of saves, ranks and policies. A process may have any number of roots.
//! [`crate::control`] has the root's own files on disk.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use stepwell_core::deadline::deadline_after;
use stepwell_core::io::change_log::{ChangeLog, RecordingDir};
use stepwell_core::io::{Dir, Disk, Lock};
use stepwell_core::load::LoadOptions;

pub use crate::control::{
    Epoch, PathKind, RootInfo, lock, make_control, make_info, open, other_writer, path_kind, read_epoch,
    read_info, take_epoch,
};

use crate::adopted_step;
use crate::checkpoint::Checkpoint;
use crate::control::{is_single, replace_info};
use crate::directory_layout;
use crate::discovery::{
    Discovery, Found, Listing, Quarantined, damage, is_current, is_not_a_step, read_manifest,
};
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::machines;
use crate::metrics::Sidecars;
use crate::options::Options;
use crate::recovery;
use crate::retire::{self, Deleter};
use crate::sidecars;
use crate::step_name::StepName;
use crate::writer_heartbeat::{self, WriterHeartbeat};

/// The timeout of the search for a newest step that is not retired before it is opened.
const NEWEST_LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);

/// The most listings of one question, while another process removes steps.
pub(crate) const MAX_LISTINGS: usize = 64;

/// The longest delay until a file system shows one machine the changes of another.
pub(crate) const VISIBLE_WITHIN: Duration = Duration::from_secs(30);

/// Refuses a URL in a root: a root there would hide what is committed.
fn check_not_inside(path: &Path, environment: &Environment) -> Result<()> {
    if !path.to_str().is_some_and(|path| path.contains("://")) {
        return Ok(());
    }
    // A client without rights there cannot know.
    let above = path.parent().and_then(|above| environment.disk.open_dir(above).ok());
    match above.filter(|above| above.fence().is_some()) {
        Some(above) => Err(Error::Invalid(format!(
            "{} is in a root or a checkpoint. Pass {}, or another URL",
            path.display(),
            above.path().display()
        ))),
        None => Ok(()),
    }
}

/// A directory of steps.
pub struct Root {
    pub(crate) path: PathBuf,
    pub(crate) dir: Arc<dyn Dir>,
    session: String,
    pub(crate) names: StepName,
    pub(crate) info: Option<RootInfo>,
    environment: Environment,
    is_writer: bool,
    pub(crate) discovery: Discovery,
    pub(crate) sidecars: Sidecars,
    pub(crate) deleter: Arc<Deleter>,
    findings: Mutex<Findings>,
    rights: Mutex<WriterRights>,
}

/// Findings that outlive one listing.
#[derive(Default)]
struct Findings {
    /// Damage that was logged: the attempt and the damage.
    reported: BTreeSet<String>,
    /// Steps that have their name, but may not be durable.
    uncertain: BTreeSet<u64>,
    /// True if the root ever had a step.
    populated: bool,
}

/// The rights of the root's writer.
#[derive(Default)]
struct WriterRights {
    lock: Option<Box<dyn Lock>>,
    /// The writer's heartbeat, on file systems without locks.
    heartbeat: Option<WriterHeartbeat>,
}

impl Root {
    /// Opens a root. A writer recovers it from a crash. A reader changes nothing.
    pub fn open(
        path: &Path,
        session: &str,
        options: &Options,
        environment: &Environment,
        is_writer: bool,
    ) -> Result<Self> {
        let dir = open(environment, path, options.create && is_writer)?;
        if !is_writer {
            return Self::of_reader(path, session, options, environment, (Arc::clone(&dir), &dir));
        }
        let changes = Arc::new(ChangeLog::default());
        let dir: Arc<dyn Dir> = Arc::new(RecordingDir::new(dir, Arc::clone(&changes)));
        let mut root = Self::new(path, session, options, environment, (Arc::clone(&dir), &dir));
        root.is_writer = true;
        root.discovery = Discovery::of_writer(changes);
        if let Err(error) = root.own(options) {
            root.release();
            return Err(error);
        }
        Ok(root)
    }

    /// [`Root::open`] of an open directory, as a reader. `local` is where the deleter works.
    pub(crate) fn of_reader(
        path: &Path,
        session: &str,
        options: &Options,
        environment: &Environment,
        (dir, local): (Arc<dyn Dir>, &Arc<dyn Dir>),
    ) -> Result<Self> {
        let mut root = Self::new(path, session, options, environment, (dir, local));
        root.info = read_info(&*root.dir)?;
        root.names = names(options, root.info.as_ref());
        if root.info.is_none() {
            check_not_inside(path, environment)?;
        }
        if !options.per_machine && machines::is_spread(&*root.dir)? {
            tracing::warn!(
                root = %path.display(),
                "this directory has one machine's part of a run on several machines. Files of the others are missing here. Read another tier of the run"
            );
        }
        if let Some(info) = &root.info {
            root.check_names(&info.step_name)?;
        }
        Ok(root)
    }

    fn new(
        path: &Path,
        session: &str,
        options: &Options,
        environment: &Environment,
        (dir, local): (Arc<dyn Dir>, &Arc<dyn Dir>),
    ) -> Self {
        let deleter = Deleter::new(
            Arc::clone(local),
            Arc::clone(&environment.clock),
            options.grace,
            options.overwrite_from_bytes,
        );
        Self {
            path: path.to_owned(),
            dir,
            session: session.to_owned(),
            names: names(options, None),
            info: None,
            environment: environment.clone(),
            is_writer: false,
            discovery: Discovery::default(),
            sidecars: Sidecars::default(),
            deleter: Arc::new(deleter),
            findings: Mutex::default(),
            rights: Mutex::default(),
        }
    }

    /// [`Root::open`] as a reader, of a root that another machine has just made. A network file
    /// system may not show it yet.
    pub(crate) fn open_beside(
        path: &Path,
        session: &str,
        options: &Options,
        environment: &Environment,
    ) -> Result<Self> {
        let deadline = deadline_after(VISIBLE_WITHIN);
        loop {
            match Self::open(path, session, options, environment, false) {
                Err(Error::Core(error)) if error.is_gone() && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                opened => return opened,
            }
        }
    }

    /// Becomes the writer, and recovers the root from a crash.
    fn own(&mut self, options: &Options) -> Result<()> {
        let Self { dir: root, session, environment, .. } = self;
        if is_single(&**root)? {
            return Err(Error::Invalid(format!(
                "{} is no root but a single checkpoint: pass another URL",
                self.path.display()
            )));
        }
        if root.fence().is_some() && read_info(&**root)?.is_none() {
            check_not_inside(&self.path, environment)?;
        }
        make_control(&**root)?;
        let lock = lock(&**root, options.take_over)?;
        let is_locked = lock.is_some();
        let rights = self.rights.get_mut().unwrap_or_else(PoisonError::into_inner);
        rights.lock = lock;
        if !is_locked {
            let place =
                if root.fence().is_some() { "an object store" } else { "a file system without locks" };
            tracing::warn!(
                root = %root.path().display(), place, grace_seconds = options.grace.as_secs_f64(),
                "no locks here: readers hold no leases. Files of a retired step are deleted after the grace period"
            );
            // Start the heartbeat before the check of others: two writers that start at once then
            // see each other.
            rights.heartbeat = Some(WriterHeartbeat::start(root, session, options.silence)?);
        }
        writer_heartbeat::wait_for_silence(&**root, session, &*environment.clock, options.silence)?;
        root.sync()?;
        if !options.per_machine && machines::is_spread(&**root)? {
            return Err(Error::Spread { root: self.path.clone() });
        }
        self.info = read_info(&**root)?;
        self.names = names(options, self.info.as_ref());
        let recorded = self.info.as_ref().map_or(&self.names, |info| &info.step_name).clone();
        // Check before the first change.
        self.check_names(&recorded)?;
        let Self { dir: root, session, environment, names, .. } = self;
        match take_epoch(&**root, session) {
            // A killed save may have filled the disk: delete its files, which nobody uses while
            // this writer has the lock.
            Err(Error::Core(error)) if error.is_full() && is_locked => {
                for trash in recovery::sweep(&**root, session, environment)?.trash {
                    if let Err(error) = retire::remove(&**root, &trash, false, &mut || true) {
                        tracing::warn!(%trash, %error, "deleting it to free disk space failed");
                    }
                }
                take_epoch(&**root, session)?;
            }
            taken => drop(taken?),
        }
        writer_heartbeat::forget_others(&**root, session)?;
        self.info = Some(make_info(&**root, environment, names, &options.root_metadata)?);
        recovery::remove_unfinished_records(&**root);
        let recovered = recovery::sweep(&**root, session, environment)?;
        let listing = self.discovery.list(&**root, names)?;
        self.findings.get_mut().unwrap_or_else(PoisonError::into_inner).populated = !listing.steps.is_empty();
        recovery::mend(&**root, &listing, environment.clock.unix_ns(), options.grace);
        match sidecars::reclaim(&**root, names, &recorded, &listing) {
            Ok(0) => {}
            Ok(files) => tracing::info!(files, "removed later metrics and traces of deleted steps"),
            Err(error) => {
                tracing::warn!(%error, "removing later metrics and traces of deleted steps failed. The next writer tries again");
            }
        }
        if !recovered.abandoned.is_empty() {
            tracing::info!(temporaries = ?recovered.abandoned, "removing temporaries of dead writers");
        }
        self.deleter.enqueue(recovered.trash);
        Ok(())
    }

    /// Refuses a pattern that does not match the existing steps. Listings and retention would miss
    /// them, the root would forget their pattern, and an evaluator would wait permanently.
    fn check_names(&self, recorded: &StepName) -> Result<()> {
        if self.names == *recorded {
            return Ok(());
        }
        let there = self.discovery.list(&*self.dir, recorded)?;
        match there.steps.values().find(|found| self.names.parse(&found.name).is_none()) {
            Some(found) => Err(Error::OtherStepName {
                root: self.path.clone(),
                recorded: recorded.to_string(),
                wanted: self.names.to_string(),
                both: self.names.clone().reading_too(recorded).to_string(),
                example: found.name.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Takes the description of the run over from another machine, which has these steps.
    pub(crate) fn take_info_over(
        &mut self,
        info: &RootInfo,
        steps: impl Iterator<Item = String>,
        options: &Options,
    ) -> Result<()> {
        let names = names(options, Some(info));
        let mut others = steps.filter(|step| names.parse(step).is_none());
        if let Some(example) = others.next() {
            return Err(Error::OtherStepName {
                root: self.path.clone(),
                recorded: info.step_name.to_string(),
                wanted: names.to_string(),
                both: names.clone().reading_too(&info.step_name).to_string(),
                example,
            });
        }
        let mut info = info.clone();
        info.step_name = names.clone();
        replace_info(&*self.dir, &info)?;
        (self.info, self.names) = (Some(info), names);
        Ok(())
    }

    /// Releases the writer's rights. Until then, a new writer sees that this one may write.
    pub fn release(&self) {
        let WriterRights { heartbeat, .. } =
            std::mem::take(&mut *self.rights.lock().unwrap_or_else(PoisonError::into_inner));
        if let Some(heartbeat) = heartbeat {
            heartbeat.stop(&*self.dir);
        }
    }

    /// Returns the disk that it is on.
    pub(crate) fn disk(&self) -> &dyn Disk {
        &*self.environment.disk
    }

    /// True if a lock protects the writer's rights.
    pub(crate) fn is_locked(&self) -> bool {
        self.rights.lock().unwrap_or_else(PoisonError::into_inner).lock.is_some()
    }

    /// Checks that this is still the root's writer. Call it before a step is retired, set aside or
    /// thinned.
    pub(crate) fn check_writer(&self) -> Result<()> {
        match other_writer(&*self.dir, &self.session)? {
            Some(owner) => Err(Error::Locked { root: self.path.clone(), owner: Some(owner) }),
            None => Ok(()),
        }
    }

    /// Returns a new trash name for a step.
    pub(crate) fn trash(&self, step: u64) -> String {
        directory_layout::trash(&directory_layout::label(step), self.environment.rng.next_u128())
    }

    fn findings(&self) -> MutexGuard<'_, Findings> {
        self.findings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the root ever had a step. Needs no listing.
    pub(crate) fn is_populated(&self) -> bool {
        self.findings().populated
    }

    /// Records if it is uncertain that a step is durable.
    pub(crate) fn set_uncertain(&self, step: u64, is_uncertain: bool) {
        let mut findings = self.findings();
        if is_uncertain {
            findings.uncertain.insert(step);
        } else {
            findings.uncertain.remove(&step);
        }
    }

    /// Returns the steps from this one on that may not be durable, newest first.
    pub(crate) fn uncertain_from(&self, first: u64) -> Vec<u64> {
        self.findings().uncertain.range(first..).rev().copied().collect()
    }

    /// Syncs the root again for a step that may not be durable, as the next writer would. After a
    /// successful sync the step is committed and listed. Returns true if it is still uncertain.
    pub(crate) fn sync_uncertain(&self, step: u64) -> bool {
        if !self.findings().uncertain.contains(&step) {
            return false;
        }
        if let Err(error) = self.dir.sync() {
            tracing::warn!(step, %error, "it is still uncertain whether this step survives a power cut");
            return true;
        }
        tracing::info!(step, "a step that was uncertain is committed: the root is synced");
        self.set_uncertain(step, false);
        false
    }

    /// Lists all committed steps. Checks every manifest.
    pub fn list(&self) -> Result<Arc<Listing>> {
        Ok(self.counted(self.discovery.list(&*self.dir, &self.names)?))
    }

    /// Lists all committed steps, by the changes of the root's directory. A caller checks the step
    /// that it chooses.
    pub(crate) fn list_changes(&self) -> Result<Arc<Listing>> {
        Ok(self.counted(self.discovery.list_changes(&*self.dir, &self.names)?))
    }

    fn counted(&self, mut listing: Arc<Listing>) -> Arc<Listing> {
        let mut findings = self.findings();
        // A reader may see a copy in progress, so it logs none.
        let reported = if self.is_writer { listing.quarantined.as_slice() } else { &[] };
        for quarantined in reported {
            findings.report_quarantined(quarantined);
        }
        findings.populated |= !listing.steps.is_empty();
        if !findings.uncertain.is_empty() {
            let steps = &mut Arc::make_mut(&mut listing).steps;
            steps.retain(|step, _| !findings.uncertain.contains(step));
        }
        listing
    }

    /// Returns the newest whole step.
    pub fn newest(&self) -> Result<Option<Found>> {
        self.newest_from(0)
    }

    /// Returns the number of the newest whole step.
    pub(crate) fn newest_step(&self) -> Result<Option<u64>> {
        Ok(self.newest()?.map(|found| found.manifest.step))
    }

    /// Returns the newest whole step from `first` on.
    pub(crate) fn newest_from(&self, first: u64) -> Result<Option<Found>> {
        let begun = Instant::now();
        'listing: for _ in 0..MAX_LISTINGS {
            let listing = self.list_changes()?;
            self.report_passed_over(&listing);
            for found in listing.steps.range(first..).rev().map(|(_, found)| found) {
                if !self.discovery.is_as_listed(&*self.dir, found)? {
                    continue 'listing;
                }
                let Some(damage) = self.damage(found)? else {
                    return Ok(Some(found.clone()));
                };
                if !is_current(&*self.dir, found)? {
                    // It was retired or replaced since the listing.
                    self.discovery.forget();
                    continue 'listing;
                }
                self.report_damaged(found, &damage);
            }
            return Ok(None);
        }
        Err(self.unstable_listing(begun))
    }

    /// Logs invalid directories with a newer step's name, so that an older latest step does not
    /// surprise. One without a manifest may be a copy in progress.
    fn report_passed_over(&self, listing: &Listing) {
        let newest = listing.steps.keys().next_back();
        for quarantined in &listing.quarantined {
            let is_newer = self.names.parse(&quarantined.name).is_some_and(|step| Some(&step) > newest);
            if is_newer && quarantined.has_manifest {
                self.findings().report_quarantined(quarantined);
            }
        }
    }

    pub(crate) fn unstable_listing(&self, begun: Instant) -> Error {
        let waited_for = format!("a listing of {} during which no step is taken away", self.path.display());
        Error::Timeout { waited_for, waited: begun.elapsed() }
    }

    /// Returns the damage of a listed step.
    pub(crate) fn damage(&self, found: &Found) -> stepwell_core::Result<Option<String>> {
        if let Some(files) = &found.manifest.adopted {
            return adopted_step::damage(&*self.environment.disk, &self.path, files);
        }
        damage(&*self.dir, &found.name, &found.manifest)
    }

    /// Returns the damage of a listed step, and true if it still has its name.
    pub(crate) fn damage_if_current(&self, found: &Found) -> stepwell_core::Result<(Option<String>, bool)> {
        let damage = self.damage(found)?;
        let is_current = damage.is_none() || is_current(&*self.dir, found)?;
        Ok((damage, is_current))
    }

    /// Logs a damaged step, once.
    pub(crate) fn report_damaged(&self, found: &Found, damage: &str) {
        let known = format!("{:?} {damage}", found.manifest.attempt);
        if self.findings().reported.insert(known) {
            let step = found.manifest.step;
            tracing::warn!(step, %damage, "a damaged step is skipped, and neither counted nor deleted by retention");
        }
    }

    /// Returns a committed step by its number.
    pub(crate) fn committed(&self, step: u64) -> Result<Option<Found>> {
        let begun = Instant::now();
        for _ in 0..MAX_LISTINGS {
            let listing = self.list_changes()?;
            let Some(found) = listing.steps.get(&step) else { return Ok(None) };
            if self.discovery.is_as_listed(&*self.dir, found)? {
                return Ok(Some(found.clone()));
            }
        }
        Err(self.unstable_listing(begun))
    }

    /// Returns a committed step by its number, or the newest.
    pub fn find(&self, step: Option<u64>) -> Result<Found> {
        let found = match step {
            Some(step) => self.committed(step)?,
            None => self.newest()?,
        };
        found.ok_or_else(|| self.not_found(step))
    }

    pub(crate) fn not_found(&self, step: Option<u64>) -> Error {
        // Report the damage of a damaged step instead.
        let names = step.map(|step| self.names.names(step)).unwrap_or_default();
        for name in names {
            match read_manifest(&*self.dir, &name) {
                Err(error) if is_not_a_step(&error) => return error.into(),
                _ => {}
            }
        }
        let latest = self.newest_step().ok().flatten();
        Error::StepNotFound { step, root: self.path.clone(), latest }
    }

    /// Opens and leases a step (`None`: the newest). If the newest step is retired between listing
    /// and leasing, the root is listed again.
    pub(crate) fn lease(
        &self,
        step: Option<u64>,
        timeout: Duration,
        load: &LoadOptions,
    ) -> Result<Checkpoint> {
        let deadline = deadline_after(NEWEST_LOOKUP_TIMEOUT);
        loop {
            let gone = match self.lease_found(&self.find(step)?, timeout, load.clone()) {
                Ok(Some(leased)) => return Ok(leased),
                Ok(None) => self.not_found(step),
                Err(error @ Error::StepGone { .. }) => error,
                Err(error) => return Err(error),
            };
            if step.is_some() || Instant::now() >= deadline {
                return Err(gone);
            }
        }
    }

    /// Opens and leases a listed step. `None` if it is gone.
    pub(crate) fn lease_found(
        &self,
        found: &Found,
        timeout: Duration,
        load: LoadOptions,
    ) -> Result<Option<Checkpoint>> {
        self.lease_name(&found.name, timeout, load)
    }

    /// Opens and leases a step by the name of its directory. `None` if it is gone.
    pub(crate) fn lease_name(
        &self,
        name: &str,
        timeout: Duration,
        load: LoadOptions,
    ) -> Result<Option<Checkpoint>> {
        Checkpoint::lease(&self.dir, name, &self.environment, timeout, load)
    }
}

/// Returns the pattern of step names: the caller's, else the root's, else the default.
fn names(options: &Options, info: Option<&RootInfo>) -> StepName {
    options.step_name.clone().or_else(|| info.map(|info| info.step_name.clone())).unwrap_or_default()
}

impl Findings {
    /// Logs an invalid step, once.
    fn report_quarantined(&mut self, Quarantined { name, reason, .. }: &Quarantined) {
        if self.reported.insert(format!("{name} {reason}")) {
            tracing::warn!(%name, %reason, "ignoring invalid step directory. Saving this step quarantines it");
        }
    }
}
