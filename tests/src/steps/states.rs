//! Tiny states whose every byte says which step and which attempt they are of.

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

/// Elements of each tensor, of four bytes.
const ELEMENTS: u64 = 6;

/// The items of a state: two containers with a tensor each, and the loose leaves (one object).
pub const ITEMS: [&str; 3] = ["params", "optimizer", "."];

fn bytes_of(step: u64, tag: &str, leaf: &str) -> Vec<u8> {
    let seed = mix(mix(step, content_hash(tag.as_bytes())), content_hash(leaf.as_bytes()));
    (0..ELEMENTS * 4).map(|at| mix(seed, at) as u8 | 1).collect()
}

fn object_of(step: u64, tag: &str) -> Value {
    Value::Str(format!("epoch of {step} {tag}"))
}

/// `{"params": {"w": …}, "optimizer": {"m": …}, "epoch": …}` of a step and an attempt.
pub fn state(step: u64, tag: &str) -> Result<StateSource, String> {
    let key = |name: &str| Some(Component::Key(name.into()));
    let mut tree = Tree::new();
    let mut leaves = Vec::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    for (item, name) in [("params", "w"), ("optimizer", "m")] {
        let parent = tree.push_container(Some(root), key(item), ContainerKind::Dict);
        tree.push_leaf(Some(parent), key(name));
        let path = format!("{item}/{name}");
        let source = HostSource::owned(bytes_of(step, tag, &path), 0, 4, &[ELEMENTS], &[4]);
        let source = source.map_err(|error| error.to_string())?;
        let provider = Arc::new(HostProvider::new(source));
        leaves.push(LeafSource::Tensor { dtype: Dtype::Float32, shape: vec![ELEMENTS], provider });
    }
    tree.push_leaf(Some(root), key("epoch"));
    leaves.push(LeafSource::Object(object_of(step, tag)));
    Ok(StateSource { tree, leaves })
}

/// Reads everything of a checkpoint, as a restore does, and compares it with what was saved. Gives the attempt's tag.
pub fn verify(checkpoint: &Checkpoint) -> Result<String, String> {
    let options = LoadOptions { budget_bytes: 1 << 20, threads: 1, ..LoadOptions::default() };
    let step = checkpoint.step();
    let manifest = checkpoint.manifest();
    let tag = manifest.custom_metadata.get("tag").and_then(|tag| tag.as_str());
    let tag = tag.ok_or_else(|| format!("step {step} has no tag"))?.to_owned();
    let report = checkpoint
        .verify(&options, &mut |_| true)
        .map_err(|error| format!("verifying step {step}: {error}"))?;
    if !report.is_clean() {
        return Err(format!("step {step} is damaged: {:?}", report.damages));
    }
    for (leaf, stored) in (0u32..).zip(checkpoint.leaves()) {
        let path = stored.path.to_string();
        match &stored.spec {
            StoredSpec::Tensor { .. } => {
                let index = checkpoint.index();
                let Some(LeafRecord::Tensor(record)) = index.leaves.get(leaf as usize) else {
                    return Err(format!("`{path}` of step {step} has no tensor"));
                };
                let mut bytes = vec![0; ELEMENTS as usize * 4];
                let target = HostTarget::from(&mut bytes[..]);
                checkpoint
                    .read(&[Request::whole(leaf, record, 0)], &[target], &options)
                    .map_err(|failure| format!("reading `{path}` of step {step}: {}", failure.error))?;
                if bytes != bytes_of(step, &tag, &path) {
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
