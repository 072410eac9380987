//! Holds a crash state against what was promised.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::Path;
use std::time::Duration;

use stepwell_core::format::sealed_text;
use stepwell_core::io::simulated::{Image, ImageNode, SimDisk, content_hash, mix};
use stepwell_manager::{Checkpoint, Manager, Options};

use super::promises::Promises;
use super::run::opened;
use super::{ROOT, states, world};
use crate::crash::Marks;

/// A step that was found complete.
#[derive(Clone, Debug)]
struct Facts {
    tag: String,
    items: BTreeSet<String>,
}

/// Checks crash states, and remembers which step directories it has read and verified.
#[derive(Default)]
pub struct Checker {
    verified: HashMap<(String, u64), Facts>,
    /// The states after recovery (without the epoch), with their marks, for which a second recovery
    /// was checked.
    settled: HashSet<u64>,
    /// How the root is opened.
    options: Options,
}

impl Checker {
    /// A checker that opens the root with these options.
    pub fn new(options: Options) -> Self {
        Self { verified: HashMap::new(), settled: HashSet::new(), options }
    }

    /// Checks every invariant that one disk can show after a crash. Recovery adds to the disk's
    /// log.
    pub fn check(&mut self, disk: &SimDisk, marks: &Marks) -> Result<(), String> {
        let promises = Promises::of(marks)?;
        let before = disk.image();
        let seed = seed_for(&before);
        if before.get(ROOT).is_some() {
            self.as_reader(disk, seed, &promises).map_err(|message| format!("before recovery: {message}"))?;
            if disk.image() != before {
                return Err("a reader has changed the root".into());
            }
        }
        self.as_writer(disk, seed ^ 1, &promises).map_err(|message| format!("after recovery: {message}"))?;
        let once = disk.image();
        // The epoch apart, what recovery leaves is mostly what it has left before.
        if !self.settled.insert(mix(without_epoch(&once), marks.hash())) {
            return Ok(());
        }
        // The second recovery is looked at, but is no part of what is crashed again.
        let twice = SimDisk::from_image(&once);
        self.as_writer(&twice, seed ^ 2, &promises)
            .map_err(|message| format!("after recovering twice: {message}"))?;
        if without_epoch(&once) == without_epoch(&twice.image()) {
            Ok(())
        } else {
            Err(format!("recovering twice is not recovering once:\n{once}\n{}", twice.image()))
        }
    }

    fn as_reader(&mut self, disk: &SimDisk, seed: u64, promises: &Promises) -> Result<(), String> {
        let options = Options { read_only: true, ..self.options.clone() };
        let manager = open(disk, seed, options)?;
        self.view(disk, &manager, promises)?;
        close(&manager)
    }

    fn as_writer(&mut self, disk: &SimDisk, seed: u64, promises: &Promises) -> Result<(), String> {
        let manager = open(disk, seed, self.options.clone())?;
        self.view(disk, &manager, promises)?;
        close(&manager)?;
        drop(manager);
        let image = disk.image();
        no_orphans(&image)?;
        let root = image.get(ROOT).and_then(|root| root.entries()).unwrap_or_default();
        for (name, node) in root {
            if name.starts_with(".tmp-") || name.starts_with(".trash-") {
                return Err(format!("I16: {name} was left behind"));
            }
            if let Some((file, _)) =
                node.entries().into_iter().flatten().find(|(file, _)| file.ends_with(".new"))
            {
                return Err(format!("I16: {name}/{file} was left behind"));
            }
        }
        if disk.locks_held() > 0 || disk.open_handles() > 0 {
            return Err(format!(
                "I14: {} handles and {} locks are left",
                disk.open_handles(),
                disk.locks_held()
            ));
        }
        Ok(())
    }

    /// Compares a manager's view with the promises.
    fn view(&mut self, disk: &SimDisk, manager: &Manager, promises: &Promises) -> Result<(), String> {
        let image = disk.image();
        let steps = manager.all_steps().map_err(words("listing"))?;
        let mut seen = BTreeSet::new();
        for &step in &steps {
            let name = manager.step_name().format(step);
            let facts = self.facts(disk, &image, &name).map_err(|message| format!("I1: {message}"))?;
            let promise = promises.steps.get(&step).cloned().unwrap_or_default();
            promise.allows(step, &facts.tag, &facts.items)?;
            if !promise.metrics.is_empty() {
                let metrics = manager.metrics(step).map_err(words("metrics"))?;
                for (name, value) in &promise.metrics {
                    if metrics.get(name).map(ToString::to_string).as_ref() != Some(value) {
                        return Err(format!("I2: metric {name}={value} of step {step} is lost: {metrics:?}"));
                    }
                }
            }
            seen.insert(step);
        }
        promises.nothing_is_lost(&seen)?;
        are_recorded(&image, &promises.removed(&seen))?;
        if let Some((id, epoch)) = &promises.opened {
            let found = opened(disk);
            if !found.as_ref().is_some_and(|(found, now)| found == id && now >= epoch) {
                return Err(format!("I2, I7: the root was {id} at epoch {epoch}, it is {found:?}"));
            }
        }
        let latest = manager.latest_step().map_err(words("latest"))?;
        if latest != steps.last().copied() {
            return Err(format!("the latest of {steps:?} is {latest:?}"));
        }
        let quarantined = manager.quarantined().map_err(words("quarantined"))?;
        if let Some(found) = quarantined.iter().find(|found| !promises.quarantined.contains_key(&found.name))
        {
            return Err(format!("I1, I4: {} is no step: {}", found.name, found.reason));
        }
        set_aside(&image, promises)?;
        for (branch, step, tag) in &promises.branches {
            let name = format!(".branch-{branch}.{}", manager.step_name().format(*step));
            let facts =
                self.facts(disk, &image, &name).map_err(|message| format!("I2: branch {name}: {message}"))?;
            if facts.tag != *tag {
                return Err(format!("{name} is attempt {}, not {tag}", facts.tag));
            }
        }
        Ok(())
    }

    /// Reads and verifies a step directory, once for each content.
    fn facts(&mut self, disk: &SimDisk, image: &Image, name: &str) -> Result<Facts, String> {
        let path = format!("{ROOT}/{name}");
        let node = image.get(&path).ok_or_else(|| format!("{name} is not there"))?;
        let key = (name.to_owned(), node.hash());
        if let Some(facts) = self.verified.get(&key) {
            return Ok(facts.clone());
        }
        let environment = world::environment(disk, key.1);
        let checkpoint = Checkpoint::open(Path::new(&path), &environment).map_err(words(name))?;
        let tag = states::verify(&checkpoint)?;
        let items = checkpoint.manifest().items.iter().map(|item| item.name.clone()).collect();
        let facts = Facts { tag, items };
        self.verified.insert(key, facts.clone());
        Ok(facts)
    }
}

/// Identities that nothing in the root has, the same ones wherever its names are the same: so
/// recoveries of many crash states leave few different ones.
fn seed_for(image: &Image) -> u64 {
    let root = image.get(ROOT).and_then(|root| root.entries()).unwrap_or_default();
    let leftovers = root.iter().map(|(name, _)| name).filter(|name| name.starts_with(".t"));
    leftovers.fold(1, |seed, name| mix(seed, content_hash(name.as_bytes()))) | 1 << 40
}

/// Checks that the record of removals, which absent tiers follow, is whole and covers these steps.
fn are_recorded(image: &Image, removed: &BTreeSet<u64>) -> Result<(), String> {
    let file = image.get(&format!("{ROOT}/.stepwell/removals.json"));
    let Some(bytes) = file.as_ref().and_then(|file| file.bytes()) else {
        return if removed.is_empty() { Ok(()) } else { Err(format!("I17: {removed:?} are not recorded")) };
    };
    let record: serde_json::Value = sealed_text::parse(bytes)
        .map_err(|error| format!("I17: the record of removals is damaged: {error}"))?;
    let firsts: Vec<u64> =
        record["rewinds"].as_array().into_iter().flatten().filter_map(|one| one["first"].as_u64()).collect();
    let deleted = record["deleted"].as_array().map_or(0, Vec::len);
    let others = removed.iter().filter(|&step| !firsts.iter().any(|first| first <= step)).count();
    if others <= deleted { Ok(()) } else { Err(format!("I17: of {removed:?}, some are not in {record}")) }
}

/// Checks that an invalid directory with a step's name still exists, under that name or as
/// quarantined.
fn set_aside(image: &Image, promises: &Promises) -> Result<(), String> {
    let root = image.get(ROOT).and_then(|root| root.entries()).unwrap_or_default();
    for (name, hash) in &promises.quarantined {
        let aside = format!(".quarantine-{name}-");
        let is_it = |found: &str| found == name || found.starts_with(&aside);
        if !root.iter().any(|(found, node)| is_it(found) && node.hash() == *hash) {
            return Err(format!("what stood under {name}, and was no step, is nowhere:\n{image}"));
        }
    }
    Ok(())
}

/// Checks that the root's own files contain nothing of dead writers or removed steps.
fn no_orphans(image: &Image) -> Result<(), String> {
    let names = |path: &str| -> Vec<String> {
        let entries = image.get(path).and_then(|dir| dir.entries()).unwrap_or_default();
        entries.iter().map(|(name, _)| name.to_string()).collect()
    };
    let attempts: BTreeSet<String> = names(ROOT).iter().filter_map(|name| attempt(image, name)).collect();
    for sidecar in names(&format!("{ROOT}/.stepwell/metrics")) {
        // A half-written one of a step that is there may be a live evaluator's, who takes no lock.
        let of = sidecar.trim_start_matches('.').rsplit_once('-').map_or("", |(of, _)| of);
        if !attempts.contains(of) {
            return Err(format!("I16: {sidecar} is of no step: {attempts:?}"));
        }
    }
    match names(&format!("{ROOT}/.stepwell")).into_iter().find(|name| name.contains("beat-")) {
        Some(beat) => Err(format!("I16: {beat} was left behind")),
        None => Ok(()),
    }
}

/// The attempt of whatever has a manifest, as sidecars are named by it.
fn attempt(image: &Image, name: &str) -> Option<String> {
    let manifest = image.get(&format!("{ROOT}/{name}/manifest.json"))?.bytes()?;
    let mut values = serde_json::Deserializer::from_slice(manifest).into_iter::<serde_json::Value>();
    let manifest = values.next()?.ok()?;
    let attempt = manifest.get("attempt")?;
    Some(format!("{}-{}", attempt.get("session")?.as_str()?, attempt.get("counter")?))
}

fn open(disk: &SimDisk, seed: u64, options: Options) -> Result<Manager, String> {
    let environment = world::environment(disk, seed);
    Manager::open(Path::new(ROOT), options, environment).map_err(words("opening the root"))
}

fn close(manager: &Manager) -> Result<(), String> {
    manager.close(Some(Duration::from_secs(60))).map_err(words("closing"))
}

fn words<E: std::fmt::Display>(what: &str) -> impl Fn(E) -> String {
    let what = what.to_owned();
    move |error| format!("{what}: {error}")
}

/// The hash of everything but the epoch, which counts openings.
fn without_epoch(image: &Image) -> u64 {
    fn strip(node: &ImageNode, at: &str) -> u64 {
        let Some(entries) = node.entries() else { return node.hash() };
        let kept = entries.iter().filter(|(name, _)| !(at == ".stepwell" && name.as_ref() == "epoch"));
        kept.fold(entries.len() as u64, |hash, (name, child)| {
            let hash = mix(hash, strip(child, name));
            mix(hash, content_hash(name.as_bytes()))
        })
    }
    strip(&image.0, "")
}
