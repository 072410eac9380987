//! The share of each machine in carrying a root on several machines to its further tiers
//! ([`crate::machines`]).
//!
//! The leader's carrier gives orders and waits for the reports. The host of each other machine has
//! a thread for each tier. If another machine fails at a step, the leader carries all of it in the
//! next try: perhaps the tier can only be written from there.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use stepwell_core::deadline::{StallTimer, deadline_after};
use stepwell_core::format::manifest::FileEntry;
use stepwell_core::sys::lower_priority;

use super::Inner;
use super::partner_copies::spaced;
use super::tiers::{CarryPace, Tier};
use crate::copy::OtherWriters;
use crate::error::{Error, Result};
use crate::machines::{
    CarryLimits, CarryOutcome, CarryRoots, CarryTask, CopyTarget, FileCarrier, FoundReport, Machines,
};

/// The leader looks at the reports of the machines at this interval.
const REPORTS_INTERVAL: Duration = Duration::from_millis(50);
/// A machine looks for orders at this interval.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// The longest wait for machines to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// The other machines, which carry their files of a step. On the leader.
pub(super) struct OtherMachines<'a> {
    inner: &'a Inner,
    machines: &'a Machines,
    tier: &'a Tier,
    source: CopyTarget,
    /// Those that have files of the step.
    carriers: RefCell<BTreeSet<u32>>,
    /// The orders that were given.
    given: RefCell<Option<CarryTask>>,
    /// True after a failure of another machine.
    has_failed: Cell<bool>,
}

impl<'a> OtherMachines<'a> {
    /// The machines that help to carry this step. `None` if this machine is alone.
    pub(super) fn of(inner: &'a Inner, tier: &'a Tier, source: CopyTarget) -> Option<Self> {
        let machines = inner.machines.as_deref().filter(|machines| machines.count() > 1)?;
        let (carriers, given) = (RefCell::default(), RefCell::default());
        Some(Self { inner, machines, tier, source, carriers, given, has_failed: Cell::new(false) })
    }

    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.get()
    }

    /// Returns this machine's share of the bytes that may be written to the tier per second.
    pub(super) fn bytes_per_second(&self) -> Option<u64> {
        let machines = self.carriers.borrow().len() as u64 + 1;
        self.tier.bytes_per_second.map(|rate| rate / machines)
    }

    fn is_hurried(&self) -> bool {
        self.tier.lock().pace == CarryPace::Hurried
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

    /// Reads the reports on this order. Returns the bytes that were copied, the new entries, and a
    /// machine that has not ended.
    fn reports(&self, number: u64) -> Result<(u64, Vec<FileEntry>, Option<String>)> {
        let (mut bytes, mut entries, mut late) = (0_u64, Vec::new(), None);
        for FoundReport { place, report } in
            self.machines.carry_reports(self.tier.number, &self.carriers.borrow())
        {
            let report = Some(report?).filter(|report| report.number == number).unwrap_or_default();
            bytes = bytes.saturating_add(report.bytes);
            match report.outcome {
                None => late = Some(place),
                Some(CarryOutcome::Carried(theirs)) => entries.extend(theirs),
                Some(CarryOutcome::Damaged { file, what }) => {
                    return Err(stepwell_core::Error::corrupt(file, what).into());
                }
                Some(CarryOutcome::Failed(why)) => {
                    let why = std::io::Error::other(why);
                    return Err(stepwell_core::Error::io("carry the files of", place, why).into());
                }
            }
        }
        Ok((bytes, entries, late))
    }

    fn wait_for(&self, number: u64, went_on: &mut dyn FnMut(u64) -> bool) -> Result<Vec<FileEntry>> {
        let (begun, mut before) = (Instant::now(), 0);
        let mut timer = StallTimer::new(self.inner.options.stall_timeout);
        loop {
            let (bytes, entries, late) = self.reports(number)?;
            let Some(late) = late else { return Ok(entries) };
            if !went_on(bytes.saturating_sub(before)) {
                return Err(stepwell_core::Error::Cancelled("by the carrier".to_owned()).into());
            }
            before = before.max(bytes);
            if timer.left(bytes).is_zero() {
                let waited_for = format!("{late} to carry its files to the tier `{}`", self.tier.name);
                return Err(Error::Timeout { waited_for, waited: begun.elapsed() });
            }
            self.hurry(number)?;
            self.pause();
        }
    }

    /// Gives the order again if there is less time now.
    fn hurry(&self, number: u64) -> Result<()> {
        let mut given = self.given.borrow_mut();
        if let Some(task) = given.as_mut().filter(|task| !task.is_hurried && self.is_hurried()) {
            task.is_hurried = true;
            self.machines.order_carrying(self.tier.number, number, Some(task.clone()))?;
        }
        Ok(())
    }
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
        if !theirs.is_empty() {
            let task = CarryTask {
                source: self.source.clone(),
                temporary: temporary.to_owned(),
                bytes_per_second: self.bytes_per_second(),
                is_hurried: self.is_hurried(),
            };
            *self.given.borrow_mut() = Some(task.clone());
            self.order(Some(task))?;
        }
        Ok(theirs)
    }

    fn wait(&self, went_on: &mut dyn FnMut(u64) -> bool) -> Result<Vec<FileEntry>> {
        let number = self.tier.lock().ordered;
        let mut is_wanted = true;
        let waited = self.wait_for(number, &mut |bytes| {
            is_wanted = went_on(bytes);
            is_wanted
        });
        self.has_failed.set(waited.is_err() && is_wanted);
        waited
    }

    fn stop(&self) {
        if self.given.borrow_mut().take().is_none() {
            return;
        }
        let stopped = self.order(None).and_then(|number| {
            let deadline = deadline_after(STOP_TIMEOUT.min(self.inner.options.stall_timeout / 2));
            while Instant::now() < deadline && self.reports(number)?.2.is_some() {
                self.pause();
            }
            Ok(())
        });
        if let Err(error) = stopped {
            tracing::debug!(%error, "stopping the carriers of other machines failed");
        }
    }
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
        let roots = CarryRoots { near: &self.root, far: tier.root(), compress: &tier.compress };
        let limits = CarryLimits {
            load: self.options.load_options(&*self.environment.disk, false),
            timeout: self.options.stall_timeout,
            goes_on: &|| !self.parts.is_stopped(),
            is_saving: &|| !self.saves.lock().pending.is_empty(),
        };
        carrier.look(&roots, &limits)
    }
}
