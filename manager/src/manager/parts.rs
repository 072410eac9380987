//! A root on the local disks of several machines: what its manager does beside saves and restores.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use stepwell_core::deadline::StallTimer;
use stepwell_core::format::manifest::{Attempt, Manifest};
use stepwell_core::served::ServedDisk;

use super::{Inner, Manager};
use crate::commit::aside;
use crate::coordination::LEADER;
use crate::coordination::team::Team;
use crate::directory_layout::{self, OwnName};
use crate::discovery::{damage, read_manifest};
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::guard::guarded;
use crate::machines::{self, Leftovers, Machines};
use crate::options::Options;
use crate::periodic::Periodic;
use crate::root::{self, Root};

/// The host of a machine looks at this interval if a save has ended.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// It removes parts at this interval in any case: retired steps are deleted later, as readers may
/// hold them.
const REMOVE_INTERVAL: Duration = Duration::from_secs(10);
/// A leader that closes looks at this interval if the other machines are still here.
const PRESENCE_INTERVAL: Duration = Duration::from_secs(1);
/// A host that closes looks at this interval if the leader still carries steps.
const CLOSE_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Branches of steps that lack files of a machine begin with this.
const INCOMPLETE: &str = "incomplete-";

/// A step that lacked files of a machine, in its branch.
struct IncompleteStep {
    /// The name of its directory.
    name: String,
    /// Its own name.
    step_name: String,
    step: u64,
    attempt: Attempt,
    /// True if it lacks nothing any more.
    is_whole: bool,
}

/// The work of a host for its machine, beside serving it.
#[derive(Default)]
pub(super) struct Parts {
    threads: Mutex<Vec<Periodic>>,
    /// True once the threads end.
    is_stopped: AtomicBool,
    /// True if it does not wait in a close until the leader has carried what is due.
    leaves_at_once: AtomicBool,
}

impl Parts {
    /// True once the threads of the host end.
    pub(super) fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    /// True after [`Manager::leave_at_once`].
    pub(super) fn leaves_at_once(&self) -> bool {
        self.leaves_at_once.load(Ordering::Relaxed)
    }
}

/// Opens the root on this machine, of a rank that does not lead, or makes the leader's see all
/// machines. All ranks make this call.
pub(super) fn meet(
    team: &Team,
    led: &mut Option<Root>,
    path: &std::path::Path,
    options: &Options,
    environment: &Environment,
) -> Result<(Root, Arc<Machines>)> {
    let opened = match &led {
        Some(root) => Ok(Arc::clone(&root.dir)),
        None => root::open(environment, path, options.create),
    };
    let mut local = None;
    team.agree("open the root", opened.map(|dir| local = Some(dir)), |_| Ok(()))?;
    let local = local.ok_or_else(|| stepwell_core::Error::internal("a root on this machine", "none"))?;
    let (machines, dir) = machines::meet(team, &local, led.as_mut(), options, environment)?;
    let root = match led.take() {
        Some(mut root) => {
            root.discovery.forget();
            root.dir = dir;
            root
        }
        None => Root::of_reader(path, team.session(), options, environment, (dir, &local))
            .inspect_err(|_| machines.stop())?,
    };
    Ok((root, machines))
}

/// Returns an environment whose queues also read files of other machines.
pub(super) fn with_served_files(environment: &Environment) -> Environment {
    let disk = Arc::new(ServedDisk::new(Arc::clone(&environment.disk)));
    Environment { disk, ..environment.clone() }
}

impl Manager {
    /// Does not wait for other ranks in a close: their calls fail. Call it when this process has
    /// failed. Steps that the leader has not carried by then are left to the next job.
    pub fn leave_at_once(&self) {
        self.inner.parts.leaves_at_once.store(true, Ordering::Relaxed);
    }
}

impl Inner {
    /// Starts the removal of parts of steps that are gone, on the host of each machine.
    pub(super) fn start_removing_parts(self: &Arc<Self>) -> Result<()> {
        let Some(machines) = self.machines.as_ref().filter(|machines| machines.is_host()) else {
            return Ok(());
        };
        let thins = self.options.retention.thins();
        let mut leftovers =
            Leftovers::new(Arc::clone(machines), self.environment.clone(), thins, self.options.copies);
        leftovers.empty_trash(&self.root)?;
        let what = "removing the files of retired steps on this machine";
        if let Err(error) = self.remove_parts(&mut leftovers) {
            tracing::warn!(%error, "{what} failed. It is tried again");
        }
        let (mut ended, mut last, mut has_gone_on) = (0, Instant::now(), !self.team.leads());
        self.start_host_thread("stepwell-parts", LOOK_INTERVAL, what, move |inner| {
            has_gone_on = has_gone_on || inner.forget_absent_machines();
            let now = inner.saves.lock().writes.ended;
            if now != ended || last.elapsed() >= REMOVE_INTERVAL {
                (ended, last) = (now, Instant::now());
                inner.remove_parts(&mut leftovers)?;
            }
            Ok(())
        })
    }

    /// Starts a thread of a host, which works at this interval until the host leaves. `what` is its
    /// work. A failure is told once.
    pub(super) fn start_host_thread(
        self: &Arc<Self>,
        name: &str,
        interval: Duration,
        what: &'static str,
        mut work: impl FnMut(&Arc<Self>) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let inner = Arc::downgrade(self);
        let mut told = String::new();
        let look = move || {
            let Some(inner) = inner.upgrade() else { return false };
            let worked = guarded(what, || work(&inner)).map_err(Error::from).and_then(|worked| worked);
            let failure = worked.err().map(|error| error.to_string()).unwrap_or_default();
            if !failure.is_empty() && failure != told {
                tracing::warn!(error = failure, "{what} failed. It is tried again");
            }
            told = failure;
            true
        };
        let thread = Periodic::start(name, interval, look)
            .map_err(|error| stepwell_core::Error::io("start a thread for", &self.root.path, error))?;
        self.parts.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }

    fn remove_parts(&self, leftovers: &mut Leftovers) -> Result<()> {
        leftovers.remove(&self.root, &|step: u64, counter: u64| {
            self.saves.lock().endings.is_over(counter) && !self.root.uncertain_from(step).contains(&step)
        })
    }

    /// Takes steps that lack files of a machine out of the listing, on the leader. Those that a
    /// further tier has are deleted. The others go into a branch, of which there is one at most.
    pub(super) fn set_incomplete_steps_aside(&self) -> Result<()> {
        if self.machines.is_none() {
            return Ok(());
        }
        self.take_whole_steps_back()?;
        let (root, listing) = (&self.root, self.root.list()?);
        let (mut kept, mut retired) = (Vec::new(), Vec::new());
        for (&step, found) in &listing.steps {
            let Some(damage) = root.damage(found)? else { continue };
            let is_carried =
                |attempt| self.tiers.iter().any(|tier| tier.lock().steps.get(&step) == Some(attempt));
            if is_carried(&found.manifest.attempt) {
                retired.push((found.name.clone(), root.trash(step)));
            } else {
                tracing::warn!(step, %damage, "a step lacks files of a machine: it is moved into a branch");
                kept.push(found.name.clone());
            }
        }
        if kept.is_empty() && retired.is_empty() {
            return Ok(());
        }
        root.check_writer()?;
        let branch = self.environment.new_branch(INCOMPLETE);
        if !kept.is_empty() {
            let lacking = self.incomplete_steps()?.into_iter().filter(|step| !step.is_whole);
            retired.extend(lacking.map(|step| (step.name, root.trash(step.step))));
        }
        for name in kept {
            aside::set_aside(&*root.dir, &name, &branch)?;
        }
        let done = aside::retire_all(&*root.dir, &retired);
        root.deleter.enqueue(retired.into_iter().take(done.deletable()).map(|(_, trash)| trash));
        done.error.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Returns the steps that [`Self::set_incomplete_steps_aside`] has moved before.
    fn incomplete_steps(&self) -> Result<Vec<IncompleteStep>> {
        let root = &self.root;
        let is_ours = |branch: &str| {
            branch.strip_prefix(INCOMPLETE).is_some_and(|unique| {
                unique.len() == 8 && unique.bytes().all(|byte| byte.is_ascii_hexdigit())
            })
        };
        let mut found = Vec::new();
        for entry in root.dir.entries()? {
            let Some(OwnName::Branch { branch, step_name }) = directory_layout::parse(&entry.name) else {
                continue;
            };
            if is_ours(&branch) {
                let manifest = read_manifest(&*root.dir, &entry.name)?;
                let is_whole = damage(&*root.dir, &entry.name, &manifest)?.is_none();
                let Manifest { step, attempt, .. } = manifest;
                found.push(IncompleteStep { name: entry.name, step_name, step, attempt, is_whole });
            }
        }
        Ok(found)
    }

    /// Moves steps that lack files of a machine into another branch. Returns them.
    pub(super) fn move_incomplete(
        &self,
        branch: &str,
        is_moved: &dyn Fn(u64, &Attempt) -> bool,
    ) -> Result<Vec<u64>> {
        let mut moved = Vec::new();
        if self.machines.is_none() {
            return Ok(moved);
        }
        let mut found = self.incomplete_steps()?;
        found.retain(|step| is_moved(step.step, &step.attempt));
        for IncompleteStep { name, step_name, step, .. } in found {
            self.root.check_writer()?;
            aside::name_part(&*self.root.dir, &name, &directory_layout::branch(branch, &step_name))?;
            moved.push(step);
        }
        Ok(moved)
    }

    /// Gives steps their names back whose machine is here again, unless the run has gone on.
    fn take_whole_steps_back(&self) -> Result<()> {
        let root = &self.root;
        let mut whole = self.incomplete_steps()?;
        whole.retain(|step| step.is_whole);
        let Some(first) = whole.iter().map(|step| step.step).min() else { return Ok(()) };
        let near = root.list()?.steps.keys().next_back().copied();
        let others = self.tiers.iter().filter_map(|tier| tier.lock().steps.keys().next_back().copied());
        if near.into_iter().chain(others).max().is_some_and(|newest| newest >= first) {
            let branches: Vec<String> = whole.into_iter().map(|step| step.name).collect();
            tracing::warn!(
                ?branches,
                "these steps are whole again, but the run has gone on without them. They stay aside"
            );
            return Ok(());
        }
        root.check_writer()?;
        for IncompleteStep { name, step_name, step, .. } in whole {
            tracing::info!(step, "a step is listed again: the machine that it lacked is here");
            aside::name_part(&*root.dir, &name, &step_name)?;
        }
        root.discovery.forget();
        Ok(())
    }

    /// Notices, on the leader, that the run has gone on without the steps of absent machines: a
    /// further tier has a step of this session, or the root has one, if it is the only tier. After
    /// the first true answer, no further call is needed.
    fn forget_absent_machines(&self) -> bool {
        let Some(machines) = &self.machines else { return true };
        let is_ours = |attempt: &Attempt| attempt.session == self.team.session();
        let has_gone_on = if self.tiers.is_empty() {
            let known = self.root.list();
            known.is_ok_and(|known| known.steps.values().any(|found| is_ours(&found.manifest.attempt)))
        } else {
            self.tiers.iter().any(|tier| tier.lock().steps.values().any(is_ours))
        };
        if !has_gone_on {
            return false;
        }
        if let Err(error) = machines.forget_absent() {
            tracing::warn!(%error, "recording that the run has gone on failed. It is tried again");
            return false;
        }
        true
    }

    /// Waits on a host until the leader has carried all steps: it reads from this machine. Does not
    /// wait if the session is lost, or after [`Manager::leave_at_once`].
    pub(super) fn serve_until_carried(&self, deadline: Instant) -> Result<()> {
        let Some(machines) = self.machines.as_ref().filter(|machines| machines.is_host()) else {
            return Ok(());
        };
        if self.team.leads() {
            self.forget_absent_machines();
            return self.team.report_carried();
        }
        let mut timer = StallTimer::new(self.options.stall_timeout);
        while Instant::now() < deadline && self.team.check_session().is_ok() && !self.parts.leaves_at_once() {
            let Some(progress) = self.team.leader_progress()? else { break };
            if timer.left(machines.reads().wrapping_add(progress)).is_zero() {
                break;
            }
            std::thread::sleep(CLOSE_POLL_INTERVAL);
        }
        Ok(())
    }

    /// Waits until nothing is due, or a machine has left. The next job carries or copies the rest.
    pub(super) fn wait_while_machines_are_here(
        &self,
        deadline: Instant,
        wait_until_idle: &dyn Fn(Option<Duration>) -> Result<()>,
    ) -> Result<()> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match wait_until_idle(Some(left.min(PRESENCE_INTERVAL))) {
                Err(Error::Timeout { .. }) if Instant::now() < deadline => {}
                ended => return ended,
            }
            self.team.check_session()?;
            let mut hosts = BTreeMap::new();
            for (rank, &machine) in (0..).zip(self.team.nodes()) {
                hosts.entry(machine).or_insert(rank);
            }
            for &rank in hosts.values().filter(|&&rank| rank != LEADER) {
                if self.team.has_left(rank)? {
                    tracing::warn!(
                        rank,
                        "a machine has left before its steps were carried. The next job carries them"
                    );
                    return Ok(());
                }
            }
        }
    }

    /// Ends what this process does for its machine.
    pub(super) fn leave_machines(&self) {
        self.parts.is_stopped.store(true, Ordering::Relaxed);
        self.stop_copying();
        let threads = std::mem::take(&mut *self.parts.threads.lock().unwrap_or_else(PoisonError::into_inner));
        threads.into_iter().for_each(Periodic::stop);
        if let Some(machines) = &self.machines {
            machines.stop();
        }
    }
}
