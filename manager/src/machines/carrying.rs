//! Machines that carry their own files to a further tier.
//!
//! The leader has a temporary in the tier. It gives orders in a file, one for each tier, which the
//! other machines read: each writes its own data files of a step into the temporary. They report in
//! a file of theirs. The leader writes the rest, and gives the step its name once all have ended.
//! So no bytes of a step pass through the main machine that are not its own.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use stepwell_core::Result as CoreResult;
use stepwell_core::deadline::deadline_after;
use stepwell_core::format::manifest::{FileEntry, stored_files};
use stepwell_core::io::Dir;
use stepwell_core::load::LoadOptions;

use super::copies::{CopyTarget, FoundReport, read_control};
use super::{Machines, writer_of};
use crate::control;
use crate::convert::SavePauses;
use crate::copy::{self, CopyProgress};
use crate::directory_layout::{carry_orders, carry_report};
use crate::error::{Error, Result};
use crate::root::{Root, VISIBLE_WITHIN};

/// A machine looks for new orders, and reports its progress, at this interval.
const ORDERS_INTERVAL: Duration = Duration::from_millis(500);
/// A machine that waits looks at this interval if it may go on.
const WAIT_INTERVAL: Duration = Duration::from_millis(20);
/// A machine that works goes on for so long if the main machine does not answer.
const LONGEST_SILENCE: Duration = Duration::from_secs(30);

/// The orders of the main machine for a tier.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct CarryOrders {
    /// The session that gives them.
    session: String,
    /// Counts the tasks of the session. The first one is 1. A task that is to be hurried keeps its
    /// number.
    number: u64,
    /// `None`: nothing is to be carried.
    task: Option<CarryTask>,
}

/// The files that machines are to carry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct CarryTask {
    pub(crate) source: CopyTarget,
    /// The name of the directory in the tier.
    pub(crate) temporary: String,
    /// Globs of tensors that are compressed.
    pub(crate) compress: Vec<String>,
    /// The most bytes that a machine writes per second.
    pub(crate) bytes_per_second: Option<u64>,
    /// True if little time is left: there are no pauses, and no such limit.
    pub(crate) is_hurried: bool,
}

/// The report of a machine on these orders.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct CarryReport {
    session: String,
    /// The number of the orders.
    pub(crate) number: u64,
    /// The bytes of its files that were copied.
    pub(crate) bytes: u64,
    /// The number of its looks at the orders, between pieces.
    pub(crate) looks: u64,
    /// `None` before the end.
    pub(crate) outcome: Option<CarryOutcome>,
}

/// The end of the work of a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CarryOutcome {
    /// They are in the tier. The entries are of those that were compressed.
    Carried(Vec<FileEntry>),
    /// A file of the step is damaged.
    Damaged { file: PathBuf, what: String },
    /// Another failure.
    Failed(String),
}

impl Machines {
    /// The number of this machine.
    pub(crate) fn own(&self) -> u32 {
        self.own
    }

    /// Returns the machine that carries a file of a step.
    pub(crate) fn carrier_of(&self, source: &CopyTarget, path: &str) -> u32 {
        let Some(writer) = writer_of(path) else { return self.main };
        let is_here = |machine: &u32| *machine == self.own || self.others.contains_key(machine);
        // The one that wrote it, before those with copies.
        let held = self.held_of(&source.attempt).filter(|held| held.has(writer) && !held.in_copy());
        let wrote = self.saved_by(&source.attempt, writer).into_iter().chain(held.map(|held| held.machine));
        let mut holders = wrote.chain(self.machines_with(&source.attempt, writer));
        holders.find(is_here).unwrap_or(self.main)
    }

    /// Gives an order for a tier, on the main machine.
    pub(crate) fn order_carrying(&self, tier: usize, number: u64, task: Option<CarryTask>) -> CoreResult<()> {
        let orders = CarryOrders { session: self.session.clone(), number, task };
        control::replace_json(&*self.local, &carry_orders(tier), &orders)
    }

    /// Reads the reports of these other machines, on the main machine.
    pub(crate) fn carry_reports(
        &self,
        tier: usize,
        machines: &BTreeSet<u32>,
    ) -> Vec<FoundReport<CarryReport>> {
        let others = machines.iter().filter_map(|machine| self.others.get(machine));
        let roots: Vec<_> = others.map(|other| Arc::clone(other) as Arc<dyn Dir>).collect();
        self.reports(&roots, &carry_report(tier), |report: &CarryReport| &report.session)
    }
}

/// Carries the files of one machine to one tier. Its host owns it.
pub(crate) struct FileCarrier {
    machines: Arc<Machines>,
    tier: usize,
    report: CarryReport,
    /// The report that was written last.
    written: CarryReport,
}

/// The roots between which files are carried.
pub(crate) struct CarryRoots<'a> {
    /// That of all machines.
    pub(crate) near: &'a Root,
    pub(crate) far: &'a Root,
}

/// The limits that the process of a carrier sets to it.
pub(crate) struct CarryLimits<'a> {
    pub(crate) load: LoadOptions,
    /// For the lease of a step.
    pub(crate) timeout: Duration,
    /// False once the process ends.
    pub(crate) goes_on: &'a dyn Fn() -> bool,
    /// True while a save runs, for which the carrier is to pause.
    pub(crate) is_saving: &'a dyn Fn() -> bool,
}

impl FileCarrier {
    /// The carrier of this machine to the tier with this number.
    pub(crate) fn new(machines: Arc<Machines>, tier: usize) -> Self {
        let report = CarryReport { session: machines.session.clone(), ..CarryReport::default() };
        Self { machines, tier, report, written: CarryReport::default() }
    }

    /// Does what the main machine has ordered.
    pub(crate) fn look(&mut self, roots: &CarryRoots<'_>, limits: &CarryLimits<'_>) -> Result<()> {
        let Some(orders) = self.orders(roots.near)? else { return Ok(()) };
        if self.report.number >= orders.number && self.report.outcome.is_some() {
            return Ok(self.write_report()?);
        }
        let session = self.machines.session.clone();
        self.report = CarryReport { session, number: orders.number, ..CarryReport::default() };
        self.write_report()?;
        let mut is_stopped = false;
        let carried = match &orders.task {
            Some(task) => self.carry(task, roots, limits, &mut is_stopped),
            None => Ok(Vec::new()),
        };
        // A later manager of this process may carry now.
        if is_stopped || !(limits.goes_on)() {
            return Ok(());
        }
        self.report.outcome = Some(match carried {
            Ok(entries) => CarryOutcome::Carried(entries),
            Err(Error::Core(stepwell_core::Error::Corrupt { file, what, .. }))
                if !file.starts_with(&roots.far.path) =>
            {
                CarryOutcome::Damaged { file, what }
            }
            Err(error) => CarryOutcome::Failed(error.to_string()),
        });
        Ok(self.write_report()?)
    }

    fn orders(&self, near: &Root) -> CoreResult<Option<CarryOrders>> {
        let orders: Option<CarryOrders> = read_control(&*near.dir, &carry_orders(self.tier))?;
        Ok(orders.filter(|orders| orders.session == self.machines.session))
    }

    fn write_report(&mut self) -> CoreResult<()> {
        if self.written != self.report {
            control::replace_json(&*self.machines.local, &carry_report(self.tier), &self.report)?;
            self.written = self.report.clone();
        }
        Ok(())
    }

    /// Writes the files of this machine. Returns the new entries of those that were compressed.
    fn carry(
        &mut self,
        task: &CarryTask,
        roots: &CarryRoots<'_>,
        limits: &CarryLimits<'_>,
        is_stopped: &mut bool,
    ) -> Result<Vec<FileEntry>> {
        let step = &task.source;
        let source = roots.near.lease_name(&step.name, limits.timeout, limits.load.clone())?;
        let source = source.filter(|source| source.manifest().attempt == step.attempt);
        let source = source.ok_or_else(|| Error::StepNotFound {
            step: Some(step.step),
            root: roots.near.path.clone(),
            latest: None,
        })?;
        let is_ours = |path: &str| self.machines.carrier_of(step, path) == self.machines.own;
        let files = stored_files(&source.manifest().files).into_iter();
        let ours: Vec<(&str, u64)> = files.filter(|(path, _)| is_ours(path)).collect();
        let bytes = ours.iter().map(|(_, length)| length).sum();
        let stored: Vec<String> = ours.into_iter().map(|(path, _)| path.to_owned()).collect();
        let mut pace = Pace::new(task);
        // A network file system may not show what another machine has just made.
        let deadline = deadline_after(VISIBLE_WITHIN);
        let dir = loop {
            match roots.far.dir.open_dir(&task.temporary) {
                Err(error) if error.is_gone() && Instant::now() < deadline => {}
                opened => break opened?,
            }
            if !self.may_go_on(&mut pace, roots.near, limits)? {
                *is_stopped = true;
                return Ok(Vec::new());
            }
            std::thread::sleep(WAIT_INTERVAL);
        };
        let mut failure = None;
        let written = copy::write_some(&source, &task.compress, (&*dir, &stored), &mut |at| {
            let goes_on = self.wait_for_turn(&at, &mut pace, roots.near, limits);
            *is_stopped = matches!(goes_on, Ok(false));
            goes_on.unwrap_or_else(|error| {
                failure = Some(error);
                false
            })
        });
        if let Some(error) = failure {
            return Err(error.into());
        }
        self.report.bytes = bytes;
        written
    }

    /// False if the orders have changed, or the process ends.
    fn may_go_on(&mut self, pace: &mut Pace, near: &Root, limits: &CarryLimits<'_>) -> CoreResult<bool> {
        if !(limits.goes_on)() {
            return Ok(false);
        }
        if pace.looked.elapsed() < ORDERS_INTERVAL {
            return Ok(true);
        }
        pace.looked = Instant::now();
        self.report.looks += 1;
        self.write_report()?;
        match self.orders(near) {
            Ok(orders) => {
                pace.answered = Instant::now();
                let orders = orders.filter(|orders| orders.number == self.report.number);
                let Some(task) = orders.and_then(|orders| orders.task) else { return Ok(false) };
                pace.is_hurried = task.is_hurried;
                Ok(true)
            }
            Err(error) if pace.answered.elapsed() >= LONGEST_SILENCE => Err(error),
            Err(_) => Ok(true),
        }
    }

    /// Waits until the next piece may be written. False if the orders have changed, or the process
    /// ends.
    fn wait_for_turn(
        &mut self,
        at: &CopyProgress,
        pace: &mut Pace,
        near: &Root,
        limits: &CarryLimits<'_>,
    ) -> CoreResult<bool> {
        self.report.bytes = at.done;
        loop {
            if !self.may_go_on(pace, near, limits)? {
                return Ok(false);
            }
            if pace.is_hurried {
                return Ok(true);
            }
            if pace.left(at.written).is_zero() {
                break;
            }
            std::thread::sleep(WAIT_INTERVAL.min(pace.left(at.written)));
        }
        let deadline = deadline_after(ORDERS_INTERVAL);
        pace.pauses.wait(|| (limits.goes_on)() && Instant::now() < deadline && (limits.is_saving)());
        Ok(true)
    }
}

/// The pace of a carrier.
struct Pace {
    begun: Instant,
    bytes_per_second: Option<u64>,
    is_hurried: bool,
    /// The time of the last look at the orders.
    looked: Instant,
    /// The time of its last answer.
    answered: Instant,
    pauses: SavePauses,
}

impl Pace {
    fn new(task: &CarryTask) -> Self {
        let begun = Instant::now();
        let CarryTask { bytes_per_second, is_hurried, .. } = *task;
        let pauses = SavePauses::default();
        Self { begun, bytes_per_second, is_hurried, looked: begun, answered: begun, pauses }
    }

    /// Returns the time until more may be written than these bytes.
    fn left(&self, written: u64) -> Duration {
        let due = self.bytes_per_second.map(|rate| written as f64 / rate.max(1) as f64);
        Duration::from_secs_f64(due.unwrap_or(0.0)).saturating_sub(self.begun.elapsed())
    }
}
