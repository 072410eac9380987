//! Saves by processes that are killed or fed errors, and the invariants of their root afterwards.
#![expect(
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    reason = "shapes and steps of a few digits"
)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use stepwell_core::dtype::Dtype;
use stepwell_core::leaf_path::Component;
use stepwell_core::provider::HostProvider;
use stepwell_core::sys::HostSource;
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_core::value::Value;
use stepwell_manager::{
    Checkpoint, LeafSource, Manager, Options, Outcome, Retention, SaveRequest, StateSource,
};

use super::look;
use super::states::{self, Content};

const ROWS: u64 = 64;
const COLUMNS: u64 = 1024;

/// Options with little memory and timeouts beyond any machine's.
pub fn options() -> Options {
    Options {
        staging_bytes: Some(1 << 20),
        stall_timeout: Duration::from_secs(20),
        overwrite_from_bytes: Some(1),
        ..Options::default()
    }
}

fn bytes(step: u64) -> Vec<u8> {
    (step as f32).to_le_bytes().repeat((ROWS * COLUMNS) as usize)
}

/// `{"params": {"w": 64 × 1024 floats}, "updates": step}`, all of which say the step.
pub fn state(step: u64) -> StateSource {
    let key = |name: &str| Some(Component::Key(name.into()));
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    let params = tree.push_container(Some(root), key("params"), ContainerKind::Dict);
    tree.push_leaf(Some(params), key("w"));
    tree.push_leaf(Some(root), key("updates"));
    let strides = [4 * COLUMNS as i64, 4];
    let source = match HostSource::owned(bytes(step), 0, 4, &[ROWS, COLUMNS], &strides) {
        Ok(source) => source,
        Err(error) => unreachable!("{error}"),
    };
    let provider = Arc::new(HostProvider::new(source));
    let tensor = LeafSource::whole(Dtype::Float32, vec![ROWS, COLUMNS], provider);
    StateSource { tree, leaves: vec![tensor, LeafSource::Object(Value::Int(step as i64))] }
}

/// True if an open step holds what [`state`] gave, and verifies.
pub fn is_whole(checkpoint: &Checkpoint) -> Result<(), String> {
    let step = checkpoint.step();
    let read = states::read_all(checkpoint).map_err(|error| format!("step {step}: {error}"))?;
    if read != [Content::Tensor(bytes(step)), Content::Object(Value::Int(step as i64))] {
        return Err(format!("step {step} holds other values"));
    }
    match look::verify(checkpoint)? {
        None => Ok(()),
        Some(found) => Err(format!("step {step} is damaged: {}", found.what)),
    }
}

/// Checks the invariants after any accident, as the next writer: every listed step is complete; no
/// acknowledged step is lost unless retention (the newest two) may have taken it; the next save
/// works; nothing is left behind.
pub fn check(root: &Path, acknowledged: &[u64]) -> Result<(), String> {
    if !root.exists() {
        return if acknowledged.is_empty() { Ok(()) } else { Err("the root is gone".to_owned()) };
    }
    let say = |error: stepwell_manager::Error| format!("the next writer: {error}");
    let options = Options { retention: Retention::KeepLatest { n: 2 }, ..options() };
    let environment = look::environment(root).map_err(say)?;
    let manager = Manager::open(root, options, environment).map_err(say)?;
    let steps = manager.all_steps().map_err(say)?;
    for &step in &steps {
        is_whole(&manager.checkpoint(Some(step)).map_err(say)?)?;
    }
    let quarantined = manager.quarantined().map_err(say)?;
    if !quarantined.is_empty() {
        return Err(format!("quarantined: {quarantined:?}"));
    }
    for (at, step) in acknowledged.iter().rev().enumerate() {
        let newer = steps.iter().filter(|other| *other > step).count();
        if !steps.contains(step) && newer < 2 {
            return Err(format!(
                "step {step}, acknowledged {at} before the last, is lost: {steps:?} are there"
            ));
        }
    }
    let next = steps.last().copied().unwrap_or(0) + 100;
    let save = manager.save(SaveRequest::new(next, state(next))).map_err(say)?;
    match save.wait(Some(Duration::from_secs(30))).map_err(say)? {
        Some(Outcome::Committed) => {}
        other => return Err(format!("the next save: {other:?}")),
    }
    is_whole(&manager.checkpoint(None).map_err(say)?)?;
    manager.close(Some(Duration::from_secs(30))).map_err(say)?;
    let left = leftovers(root, &[".tmp-", ".trash-", ".stepwell-probe", ".quarantine-"])?;
    if !left.is_empty() {
        return Err(format!("left behind: {left:?}"));
    }
    let control = leftovers(&root.join(".stepwell"), &["."])?;
    if !control.is_empty() {
        return Err(format!("left behind in .stepwell: {control:?}"));
    }
    Ok(())
}

/// The names in a directory that begin with one of these.
pub fn leftovers(dir: &Path, prefixes: &[&str]) -> Result<Vec<String>, String> {
    let entries = std::fs::read_dir(dir).map_err(|error| error.to_string())?;
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    Ok(names.filter(|name| prefixes.iter().any(|prefix| name.starts_with(prefix))).collect())
}
