//! A process that saves, replaces, rewinds and deletes, with retention and thinning behind it,
//! until the power goes; and that writes down each thing before it asks for it and after it was
//! told of it.
//!
//! The lines are the marks of [`crate::steps::promises`]: what must hold of a simulated disk must
//! hold of a real one. A line that begins with `error` says what failed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use stepwell_core::format::sealed_text;
use stepwell_core::io::simulated::mix;
use stepwell_core::io::{Disk, Engine, open_disk};
use stepwell_manager::{Environment, Error, Exists, Manager, Options, Outcome, Retention, Save, SaveRequest};

use super::forgetful::{Forgetful, Forgets};
use crate::steps::states;

/// Longer than any one thing takes on any machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The newest steps that stay whole.
const LATEST: usize = 3;

/// Of older ones, those divisible by it stay thinned.
const THINNED: u64 = 5;

/// Sizes of `params`, in elements of four bytes: a block, several, and several windows of a file.
const SIZES: [u64; 4] = [states::FEW, states::MANY, 60_000, states::FEW];

/// Small blocks, little memory, and a retention that retires and thins.
pub fn options() -> Options {
    let latest = Retention::KeepLatest { n: LATEST as u64 };
    let thinned = Retention::KeepEvery { steps: THINNED, items: Some(vec!["params".to_owned()]) };
    Options {
        retention: Retention::Any { of: vec![latest, thinned] },
        block_bytes: 4096,
        overwrite_from_bytes: Some(1),
        capture_threads: Some(1),
        staging_bytes: Some(1 << 20),
        stall_timeout: PATIENCE,
        ..Options::default()
    }
}

/// The world of a root: the engine that suits the disk, or the one that `STEPWELL_ENGINE` says.
pub fn environment(root: &Path, forgets: Option<Forgets>) -> Result<Environment, Error> {
    let disk = open_disk(root, Engine::Auto)?;
    let disk: Arc<dyn Disk> = match forgets {
        Some(forgets) => Arc::new(Forgetful::new(disk, forgets, root)),
        None => disk,
    };
    Ok(Environment::single_process(disk))
}

/// The id of a root and the epoch of its last writer, from the disk.
pub fn opened(root: &Path) -> Option<(String, u64)> {
    let read = |name: &str| -> Option<serde_json::Value> {
        let bytes = std::fs::read(root.join(".stepwell").join(name)).ok()?;
        serde_json::from_slice(sealed_text::unseal(&bytes).unwrap_or(&bytes)).ok()
    };
    let id = read("root.json")?.get("root_id")?.as_str()?.to_owned();
    Some((id, read("epoch")?.get("epoch")?.as_u64()?))
}

/// The journal: standard output, and numbered marks in the log of a `log-writes` device.
#[derive(Default)]
pub struct Journal {
    /// Name of the device.
    pub device: Option<String>,
    lines: u64,
}

impl Journal {
    /// Writes a line, whole or not at all.
    pub fn say(&mut self, line: &str) -> Result<(), String> {
        rustix::io::write(std::io::stdout(), format!("{line}\n").as_bytes())
            .map_err(|error| error.to_string())?;
        self.lines += 1;
        let Some(device) = &self.device else { return Ok(()) };
        let message = ["message", device, "0", "mark", &self.lines.to_string()];
        let marked = Command::new("dmsetup").args(message).stdin(Stdio::null()).status();
        match marked {
            Ok(status) if status.success() => Ok(()),
            other => Err(format!("the device took no mark: {other:?}")),
        }
    }

    fn failed(&mut self, what: &str, error: &Error) -> Result<(), String> {
        let errno = error.errno().map_or_else(|| "none".to_owned(), |errno| errno.to_string());
        let text = error.to_string().replace('\n', " ");
        self.say(&format!("error {what} {} {errno} {text}", error.kind()))
    }
}

/// A history that goes on.
pub struct History {
    root: PathBuf,
    name: String,
    seed: u64,
    forgets: Option<Forgets>,
    journal: Journal,
    /// Steps that were said to be there, and not to be gone.
    known: BTreeSet<u64>,
}

impl History {
    /// A history that has not begun. `name` tells the attempts of this process from those of
    /// others.
    pub fn new(root: PathBuf, name: String, seed: u64, forgets: Option<Forgets>, journal: Journal) -> Self {
        Self { root, name, seed, forgets, journal, known: BTreeSet::new() }
    }

    /// Opens the root, runs so many operations (`None`: until the power goes), and closes it.
    /// Failed operations are recorded, and the history continues. An `Err` is a failure of the
    /// test.
    pub fn live(&mut self, operations: Option<u64>) -> Result<(), String> {
        let opened = environment(&self.root, self.forgets)
            .and_then(|environment| Manager::open(&self.root, options(), environment));
        let manager = match opened {
            Ok(manager) => manager,
            Err(error) => return self.journal.failed("open", &error),
        };
        self.begun(&manager)?;
        let mut number = 0;
        while operations.is_none_or(|operations| number < operations) {
            self.act(&manager, number)?;
            number += 1;
        }
        match manager.close(Some(PATIENCE)) {
            Ok(()) => self.journal.say("error none closed"),
            Err(error) => self.journal.failed("close", &error),
        }
    }

    /// Checks that everything a writer sees after opening the root is durable.
    fn begun(&mut self, manager: &Manager) -> Result<(), String> {
        if let Some((id, epoch)) = opened(&self.root) {
            self.journal.say(&format!("opened {id} {epoch}"))?;
        }
        let seen = self.seen(manager)?;
        // A process without time to report it removed the missing ones. That this was no loss was
        // checked before this one began.
        let newest = seen.keys().next_back().copied().unwrap_or(0);
        for step in (1..newest).filter(|step| !seen.contains_key(step)) {
            self.journal.say(&format!("may go {step}"))?;
        }
        for (step, tag) in seen {
            self.known.insert(step);
            self.journal.say(&format!("seen {step} {tag}"))?;
        }
        Ok(())
    }

    /// The steps that are listed, each with the attempt that its manifest says it is.
    fn seen(&mut self, manager: &Manager) -> Result<BTreeMap<u64, String>, String> {
        let tags = manager.all_steps().and_then(|steps| {
            let tag = |step: u64| {
                let manifest = manager.manifest(Some(step))?;
                let tag = manifest.custom_metadata.get("tag").and_then(|tag| tag.as_str());
                Ok((step, tag.unwrap_or("untagged").to_owned()))
            };
            steps.into_iter().map(tag).collect()
        });
        match tags {
            Ok(tags) => Ok(tags),
            Err(error) => self.journal.failed("list", &error).map(|()| BTreeMap::new()),
        }
    }

    fn drawn(&self, number: u64, what: u64, below: u64) -> u64 {
        mix(mix(self.seed, number), what) % below.max(1)
    }

    fn act(&mut self, manager: &Manager, number: u64) -> Result<(), String> {
        let steps: Vec<u64> = self.note_away(manager)?.into_iter().collect();
        let kind = self.drawn(number, 0, 20);
        let Some((&newest, older)) = steps.split_last() else { return self.save(manager, number, 1, 1) };
        match kind {
            0..=3 => self.save(manager, number, newest + 1, 2),
            4..=6 => self.replace(manager, number, newest),
            7 | 8 if !older.is_empty() => {
                let back = 1 + self.drawn(number, 1, older.len().min(LATEST - 1) as u64) as usize;
                self.rewind(manager, number, &steps[steps.len() - 1 - back..])
            }
            9 | 10 if !older.is_empty() => {
                let step = older[self.drawn(number, 1, older.len() as u64) as usize];
                self.delete(manager, step)
            }
            _ => self.save(manager, number, newest + 1, 1),
        }
    }

    fn begin(
        &mut self,
        manager: &Manager,
        number: u64,
        step: u64,
        exists: Exists,
    ) -> Result<Option<Save>, String> {
        let tag = self.tag(number, step);
        let verb = if exists == Exists::Replace { "replace" } else { "begin" };
        self.journal.say(&format!("{verb} {step} {tag}"))?;
        let elements = SIZES[self.drawn(number, 2, SIZES.len() as u64) as usize];
        let mut request = SaveRequest::new(step, states::state_of(step, &tag, elements)?);
        request.custom_metadata = states::metadata(&tag, elements);
        request.exists = exists;
        match manager.save(request) {
            Ok(save) => Ok(Some(save)),
            Err(error) => {
                self.journal.failed("save", &error)?;
                self.journal.say(&format!("failed {step} {tag}"))?;
                Ok(None)
            }
        }
    }

    fn tag(&self, number: u64, step: u64) -> String {
        format!("{}-{number}-{step}", self.name)
    }

    fn end(&mut self, manager: &Manager, number: u64, step: u64, save: &Save) -> Result<(), String> {
        let tag = self.tag(number, step);
        let verdict = match save.wait(Some(PATIENCE)) {
            Ok(Some(Outcome::Committed)) => {
                self.known.insert(step);
                return self.journal.say(&format!("committed {step} {tag}"));
            }
            Ok(Some(Outcome::NotCommitted(error))) => {
                self.journal.failed("save", &error)?;
                "failed"
            }
            Ok(Some(Outcome::DurabilityUncertain(error))) => {
                self.journal.failed("save", &error)?;
                "uncertain"
            }
            other => return Err(format!("step {step} has no outcome: {other:?}")),
        };
        // Seen here, not by the next call.
        drop(manager.check_for_errors());
        self.journal.say(&format!("{verdict} {step} {tag}"))
    }

    /// Saves `count` steps, the second before the first is committed.
    fn save(&mut self, manager: &Manager, number: u64, first: u64, count: u64) -> Result<(), String> {
        let mut there: BTreeSet<u64> = self.seen(manager)?.into_keys().collect();
        let mut begun = Vec::new();
        for step in first..first + count {
            there.insert(step);
            // Before it is asked for: retention follows the commit without another word.
            for &old in there.iter().rev().skip(LATEST) {
                let verb = if old % THINNED == 0 { "thin" } else { "go" };
                self.journal.say(&format!("may {verb} {old} once {step}"))?;
            }
            if let Some(save) = self.begin(manager, number, step, Exists::Error)? {
                begun.push((step, save));
            }
        }
        begun.into_iter().try_for_each(|(step, save)| self.end(manager, number, step, &save))
    }

    fn replace(&mut self, manager: &Manager, number: u64, step: u64) -> Result<(), String> {
        self.settle(manager)?;
        match self.begin(manager, number, step, Exists::Replace)? {
            Some(save) => self.end(manager, number, step, &save),
            None => Ok(()),
        }
    }

    /// Back to the first of `steps`; the others move aside, the newest first.
    fn rewind(&mut self, manager: &Manager, number: u64, steps: &[u64]) -> Result<(), String> {
        self.settle(manager)?;
        let tags = self.seen(manager)?;
        let mut above = None;
        for step in steps[1..].iter().rev() {
            match above.replace(step) {
                None => self.journal.say(&format!("may go {step}"))?,
                Some(above) => self.journal.say(&format!("may go {step} after {above}"))?,
            }
        }
        let branch = format!("{}-{number}", self.name);
        match manager.rewind(steps[0], Some(&branch)) {
            Err(error) => self.journal.failed("rewind", &error),
            Ok((branch, moved)) => moved.into_iter().rev().try_for_each(|step| {
                self.known.remove(&step);
                self.journal.say(&format!("gone {step}"))?;
                let tag = tags.get(&step).map_or("untagged", String::as_str);
                self.journal.say(&format!("branch {branch} {step} {tag}"))
            }),
        }
    }

    fn delete(&mut self, manager: &Manager, step: u64) -> Result<(), String> {
        self.settle(manager)?;
        self.journal.say(&format!("may go {step}"))?;
        match manager.delete(step) {
            Ok(()) => {
                self.known.remove(&step);
                self.journal.say(&format!("gone {step}"))
            }
            Err(error) => self.journal.failed("delete", &error),
        }
    }

    /// Writes down what retention has taken, and gives the steps that are listed. A step may be
    /// away *once* another is there, and that other one may be the next to go.
    ///
    /// It *may* be away, no more: retention whose fsync has failed has deleted nothing, and a power
    /// cut may bring such a step back, whole.
    fn note_away(&mut self, manager: &Manager) -> Result<BTreeSet<u64>, String> {
        let steps: BTreeSet<u64> = self.seen(manager)?.into_keys().collect();
        let away: Vec<u64> = self.known.difference(&steps).copied().collect();
        self.known.retain(|step| steps.contains(step));
        away.into_iter().try_for_each(|step| self.journal.say(&format!("may go {step}")))?;
        Ok(steps)
    }

    /// Waits for retention: what is asked for next takes steps away too.
    fn settle(&mut self, manager: &Manager) -> Result<(), String> {
        if let Err(error) = manager.apply_retention() {
            self.journal.failed("retention", &error)?;
        }
        self.note_away(manager).map(drop)
    }
}
