//! The share of each machine in carrying a root on several machines to its further tiers
//! ([`crate::machines`]).
//!
//! The leader's carrier gives orders and waits for the reports. The host of each other machine has
//! a thread for each tier. If another machine fails, the leader carries alone for a while: perhaps
//! the tier can only be written from there.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use stepwell_core::deadline::{StallTimer, deadline_after};
use stepwell_core::format::manifest::FileEntry;
use stepwell_core::sys::lower_priority;

use super::Inner;
use super::partner_copies::spaced;
use super::tiers::Tier;
use crate::copy::OtherWriters;
use crate::error::{Error, Result};
use crate::machines::{
    CarryLimits, CarryOutcome, CarryRoots, CarryTask, CopyTarget, FileCarrier, FoundReport, Machines,
};

/// The leader looks at the reports of the machines at this interval.
const REPORTS_INTERVAL: Duration = Duration::from_millis(50);
/// It does so at this interval while it copies files of its own.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);
/// A machine looks for orders at this interval.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// The longest wait for machines to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// The leader carries alone for so long after a failure of another machine. Each further failure
/// doubles it, up to a limit.
const ALONE: Duration = Duration::from_secs(600);
const MAX_DOUBLINGS: u32 = 6;

/// The other machines, which carry their files of a step. On the leader.
pub(super) struct OtherMachines<'a> {
    inner: &'a Inner,
    machines: &'a Machines,
    tier: &'a Tier,
    source: CopyTarget,
    /// Those that have files of the step.
    carriers: RefCell<BTreeSet<u32>>,
    /// The order that was given, and its number.
    given: RefCell<Option<(u64, CarryTask)>>,
    /// The bytes that they have copied, and the time of the last look at their reports.
    bytes: Cell<u64>,
    looked: Cell<Instant>,
    /// True after a failure of another machine.
    has_failed: Cell<bool>,
}

impl<'a> OtherMachines<'a> {
    /// The machines that help to carry this step. `None` if this machine is to be alone.
    pub(super) fn of(inner: &'a Inner, tier: &'a Tier, source: CopyTarget) -> Option<Self> {
        let machines = inner.machines.as_deref().filter(|machines| machines.count() > 1)?;
        if tier.lock().alone_until.is_some_and(|until| Instant::now() < until) {
            return None;
        }
        let (carriers, given, bytes) = (RefCell::default(), RefCell::default(), Cell::default());
        let (looked, has_failed) = (Cell::new(Instant::now()), Cell::new(false));
        Some(Self { inner, machines, tier, source, carriers, given, bytes, looked, has_failed })
    }

    /// Records if another machine has failed.
    pub(super) fn end(self, has_arrived: bool) {
        let mut state = self.tier.lock();
        if self.has_failed.get() {
            let alone = ALONE.saturating_mul(1 << state.failed_together.min(MAX_DOUBLINGS));
            state.failed_together += 1;
            state.alone_until = Some(deadline_after(alone));
            // Bytes that this machine copies again are progress.
            state.farthest = (0, 0);
        } else if has_arrived {
            (state.failed_together, state.alone_until) = (0, None);
        }
    }

    /// Returns the bytes that the other machines have copied. Looks at their reports now and then,
    /// and tells them if there is less time now.
    pub(super) fn bytes(&self) -> u64 {
        if let Some(number) = self.number()
            && self.looked.get().elapsed() >= PROGRESS_INTERVAL
        {
            // `wait` finds their failures.
            let _ = self.reports(number);
            self.hurry();
        }
        self.bytes.get()
    }

    /// Returns this machine's share of the bytes that may be written to the tier per second.
    pub(super) fn bytes_per_second(&self) -> Option<u64> {
        let machines = self.carriers.borrow().len() as u64 + 1;
        self.tier.bytes_per_second.map(|rate| rate / machines)
    }

    /// Returns the number of the order that was given.
    fn number(&self) -> Option<u64> {
        self.given.borrow().as_ref().map(|(number, _)| *number)
    }

    fn is_hurried(&self) -> bool {
        self.tier.lock().is_hurried()
    }

    /// Gives the next order. Returns its number.
    fn order(&self, task: Option<CarryTask>) -> Result<u64> {
        let number = {
            let mut state = self.tier.lock();
            state.ordered += 1;
            state.ordered
        };
        self.machines.order_carrying(self.tier.number, number, task)?;
        Ok(number)
    }

    /// Waits until the next look at the reports.
    fn pause(&self) {
        drop(self.tier.wait(self.tier.lock(), spaced(REPORTS_INTERVAL, self.machines)));
    }

    /// Reads the reports on this order. A machine that does not answer has not ended.
    fn reports(&self, number: u64) -> Result<Reports> {
        let mut found = Reports::default();
        self.looked.set(Instant::now());
        for FoundReport { place, report } in
            self.machines.carry_reports(self.tier.number, &self.carriers.borrow())
        {
            let report = match report {
                Ok(report) => Some(report).filter(|report| report.number == number).unwrap_or_default(),
                Err(error) => {
                    found.late = Some(format!("{place} ({error})"));
                    continue;
                }
            };
            found.bytes = found.bytes.saturating_add(report.bytes);
            found.looks = found.looks.wrapping_add(report.looks);
            match report.outcome {
                None => {
                    found.late = Some(place);
                    found.working += 1;
                }
                Some(CarryOutcome::Carried(theirs)) => found.entries.extend(theirs),
                Some(CarryOutcome::Damaged { file, what }) => {
                    return Err(stepwell_core::Error::corrupt(file, what).into());
                }
                Some(CarryOutcome::Failed(why)) => {
                    let why = std::io::Error::other(why);
                    return Err(stepwell_core::Error::io("carry the files of", place, why).into());
                }
            }
        }
        self.bytes.set(self.bytes.get().max(found.bytes));
        Ok(found)
    }

    fn wait_for(&self, number: u64, goes_on: &mut dyn FnMut() -> bool) -> Result<Vec<FileEntry>> {
        let begun = Instant::now();
        let mut timer = StallTimer::new(self.inner.options.stall_timeout);
        loop {
            let Reports { bytes, looks, entries, late, .. } = self.reports(number)?;
            if !goes_on() {
                return Err(stepwell_core::Error::Cancelled("by the carrier".to_owned()).into());
            }
            let Some(late) = late else { return Ok(entries) };
            if timer.left((bytes, looks)).is_zero() {
                let waited_for = format!("{late} to carry its files to the tier `{}`", self.tier.name);
                return Err(Error::Timeout { waited_for, waited: begun.elapsed() });
            }
            self.hurry();
            self.pause();
        }
    }

    /// Gives the order again if there is less time now.
    fn hurry(&self) {
        let mut given = self.given.borrow_mut();
        let Some((number, task)) = given.as_mut() else { return };
        if !task.is_hurried && self.is_hurried() {
            let hurried = CarryTask { is_hurried: true, ..task.clone() };
            match self.machines.order_carrying(self.tier.number, *number, Some(hurried)) {
                Ok(()) => task.is_hurried = true,
                Err(error) => tracing::debug!(%error, "hurrying the carriers of other machines failed"),
            }
        }
    }
}

/// The reports of all machines that carry.
#[derive(Default)]
struct Reports {
    bytes: u64,
    /// The looks of machines at the orders.
    looks: u64,
    /// The new entries of data files.
    entries: Vec<FileEntry>,
    /// A machine that has not ended.
    late: Option<String>,
    /// The number of machines that have not ended, and answer.
    working: usize,
}

impl OtherWriters for OtherMachines<'_> {
    fn begin(&self, temporary: &str, stored: &[String]) -> Result<BTreeSet<String>> {
        let mut theirs = BTreeSet::new();
        for path in stored {
            let machine = self.machines.carrier_of(&self.source, path);
            if machine != self.machines.own() {
                theirs.insert(path.clone());
                self.carriers.borrow_mut().insert(machine);
            }
        }
        if theirs.is_empty() {
            return Ok(theirs);
        }
        let task = CarryTask {
            source: self.source.clone(),
            temporary: temporary.to_owned(),
            compress: self.tier.compress.clone(),
            bytes_per_second: self.bytes_per_second(),
            is_hurried: self.is_hurried(),
        };
        match self.order(Some(task.clone())) {
            Ok(number) => *self.given.borrow_mut() = Some((number, task)),
            Err(error) => {
                let tier = &self.tier.name;
                tracing::warn!(%tier, %error, "ordering other machines to carry failed. This one carries alone");
                self.carriers.borrow_mut().clear();
                theirs.clear();
            }
        }
        Ok(theirs)
    }

    fn wait(&self, goes_on: &mut dyn FnMut() -> bool) -> Result<Vec<FileEntry>> {
        let waited = self.number().map_or(Ok(Vec::new()), |number| self.wait_for(number, goes_on));
        // Damage and a step that was removed meanwhile are nobody's failure.
        let failed = waited.as_ref().is_err_and(|error| !is_damage(error));
        self.has_failed.set(failed && goes_on());
        waited
    }

    fn stop(&self) {
        if self.given.borrow_mut().take().is_none() {
            return;
        }
        let stopped = self.order(None).and_then(|number| {
            let deadline = deadline_after(STOP_TIMEOUT.min(self.inner.options.stall_timeout / 2));
            while Instant::now() < deadline && self.reports(number)?.working > 0 {
                self.pause();
            }
            Ok(())
        });
        if let Err(error) = stopped {
            tracing::debug!(%error, "stopping the carriers of other machines failed");
        }
    }
}

fn is_damage(error: &Error) -> bool {
    matches!(error, Error::Core(stepwell_core::Error::Corrupt { .. }))
}

impl Inner {
    /// Starts the threads of a host that carry the files of its machine.
    pub(super) fn start_file_carriers(self: &Arc<Self>) -> Result<()> {
        let is_host = |machines: &&Arc<Machines>| machines.is_host() && machines.count() > 1;
        let Some(machines) = self.machines.as_ref().filter(is_host) else { return Ok(()) };
        if self.options.read_only || self.team.leads() {
            return Ok(());
        }
        for tier in &self.tiers {
            let mut carrier = FileCarrier::new(Arc::clone(machines), tier.number);
            let (tier, mut is_first) = (Arc::clone(tier), true);
            let interval = spaced(LOOK_INTERVAL, machines);
            let what = "looking for what this machine is to carry";
            self.start_host_thread("stepwell-carry", interval, what, move |inner| {
                if std::mem::take(&mut is_first) {
                    lower_priority();
                }
                inner.carry_files(&tier, &mut carrier)
            })?;
        }
        Ok(())
    }

    fn carry_files(&self, tier: &Tier, carrier: &mut FileCarrier) -> Result<()> {
        let roots = CarryRoots { near: &self.root, far: tier.root() };
        let limits = CarryLimits {
            load: self.options.load_options(&*self.environment.disk, false),
            timeout: self.options.stall_timeout,
            goes_on: &|| !self.parts.is_stopped(),
            is_saving: &|| !self.saves.lock().pending.is_empty(),
        };
        carrier.look(&roots, &limits)
    }
}
