//! Small states whose every byte says which step and which attempt they are of.

use std::sync::Arc;

use stepwell_core::dtype::Dtype;
use stepwell_core::format::index::LeafRecord;
use stepwell_core::io::simulated::{content_hash, mix};
use stepwell_core::leaf_path::Component;
use stepwell_core::load::LoadOptions;
use stepwell_core::provider::HostProvider;
use stepwell_core::sys::{HostSource, HostTarget};
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_core::value::Value;
use stepwell_manager::{Checkpoint, LeafSource, StateSource};
use stepwell_reshard::matching::StoredSpec;
use stepwell_reshard::read_plan::Request;

/// Elements of a tensor, of four bytes, where nothing else is said.
pub const FEW: u64 = 6;

/// Elements of a tensor that takes nine blocks of 4096 bytes (and its file one more for the
/// header).
pub const MANY: u64 = 9 * 1024;

/// The items of a state: two containers with a tensor each, and the loose leaves (one object).
pub const ITEMS: [&str; 3] = ["params", "optimizer", "."];

/// Only `params` grow: one file of several windows beside one of a single one.
fn elements_of(leaf: &str, elements: u64) -> u64 {
    if leaf.starts_with("params/") { elements } else { FEW }
}

fn bytes_of(step: u64, tag: &str, leaf: &str, elements: u64) -> Vec<u8> {
    let seed = mix(mix(step, content_hash(tag.as_bytes())), content_hash(leaf.as_bytes()));
    (0..elements_of(leaf, elements) * 4).map(|at| mix(seed, at) as u8 | 1).collect()
}

fn object_of(step: u64, tag: &str) -> Value {
    Value::Str(format!("epoch of {step} {tag}"))
}

/// The metadata of a save: its tag and the size of its `params`.
pub fn metadata(tag: &str, elements: u64) -> serde_json::Value {
    serde_json::json!({ "tag": tag, "elements": elements })
}

/// `{"params": {"w": …}, "optimizer": {"m": …}, "epoch": …}` of a step and an attempt.
pub fn state(step: u64, tag: &str) -> Result<StateSource, String> {
    state_of(step, tag, FEW)
}

/// As [`state`], with `params` of so many elements.
pub fn state_of(step: u64, tag: &str, elements: u64) -> Result<StateSource, String> {
    let key = |name: &str| Some(Component::Key(name.into()));
    let mut tree = Tree::new();
    let mut leaves = Vec::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    for (item, name) in [("params", "w"), ("optimizer", "m")] {
        let parent = tree.push_container(Some(root), key(item), ContainerKind::Dict);
        tree.push_leaf(Some(parent), key(name));
        let path = format!("{item}/{name}");
        let shape = [elements_of(&path, elements)];
        let source = HostSource::owned(bytes_of(step, tag, &path, elements), 0, 4, &shape, &[4]);
        let source = source.map_err(|error| error.to_string())?;
        let provider = Arc::new(HostProvider::new(source));
        leaves.push(LeafSource::whole(Dtype::Float32, shape.to_vec(), provider));
    }
    tree.push_leaf(Some(root), key("epoch"));
    leaves.push(LeafSource::Object(object_of(step, tag)));
    Ok(StateSource { tree, leaves })
}

/// Reads everything of a checkpoint, as a restore does, and compares it with what was saved. Gives
/// the attempt's tag.
pub fn verify(checkpoint: &Checkpoint) -> Result<String, String> {
    let options = LoadOptions { budget_bytes: 1 << 20, threads: 1, ..LoadOptions::default() };
    let step = checkpoint.step();
    let manifest = checkpoint.manifest();
    let tag = manifest.custom_metadata.get("tag").and_then(|tag| tag.as_str());
    let tag = tag.ok_or_else(|| format!("step {step} has no tag"))?.to_owned();
    let elements = manifest.custom_metadata.get("elements").map_or(Some(FEW), serde_json::Value::as_u64);
    let elements = elements.ok_or_else(|| format!("step {step} does not say how large it is"))?;
    let report = checkpoint
        .verify(&options, &mut |_| true)
        .map_err(|error| format!("verifying step {step}: {error}"))?;
    if !report.damages.is_empty() {
        return Err(format!("step {step} is damaged: {:?}", report.damages));
    }
    for (leaf, stored) in (0u32..).zip(checkpoint.leaves()) {
        let path = stored.path.to_string();
        match &stored.spec {
            StoredSpec::Tensor { .. } => {
                let index = checkpoint.outline();
                let Some(LeafRecord::Tensor(record)) = index.leaves.get(leaf as usize) else {
                    return Err(format!("`{path}` of step {step} has no tensor"));
                };
                let wanted = bytes_of(step, &tag, &path, elements);
                let mut bytes = vec![0; wanted.len()];
                let target = HostTarget::from(&mut bytes[..]);
                checkpoint
                    .read(&[Request::whole(leaf, record, 0)], [target], &options)
                    .map_err(|failure| format!("reading `{path}` of step {step}: {}", failure.error))?;
                if bytes != wanted {
                    return Err(format!("`{path}` of step {step} {tag} holds other bytes"));
                }
            }
            StoredSpec::Object => {
                let read = checkpoint.read_objects(&[leaf], &options);
                let read = read.map_err(|error| format!("reading `{path}` of step {step}: {error}"))?;
                if read != [object_of(step, &tag)] {
                    return Err(format!("`{path}` of step {step} {tag} is {read:?}"));
                }
            }
            StoredSpec::Alias { of } => return Err(format!("`{path}` of step {step} is tied to {of}")),
        }
    }
    Ok(tag)
}
