//! The entries of an OCDBT database, which Orbax writes.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use stepwell_core::foreign::Fault;
use stepwell_core::foreign::ocdbt::{self, OcdbtNode, OcdbtPlace, OcdbtValue};
use stepwell_core::io::is_component;
use stepwell_core::sys::each;

use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::foreign;

const MANIFEST: &str = "manifest.ocdbt";
/// The longest manifest, and the longest node.
const MAX_NODE_BYTES: u64 = 64 << 20;
/// The most bytes of all keys. Each has the prefixes of the nodes above it.
const MAX_KEYS_BYTES: usize = 64 << 20;
/// Nodes that are read at a time: a disk answers many small reads together.
const THREADS: usize = 16;

/// A node that is to be read.
struct PendingNode {
    prefix: Vec<u8>,
    place: OcdbtPlace,
    height: u8,
}

/// Returns the newest entries of the database in a directory: keys and values. Paths of values are
/// relative to the directory.
pub fn ocdbt_entries(path: &Path, environment: &Environment) -> Result<Vec<(Vec<u8>, OcdbtValue)>> {
    let corrupt =
        |name: &str, fault: &Fault| stepwell_core::Error::corrupt(path.join(name), fault.to_string());
    let (bytes, length) =
        foreign::read_foreign(&path.join(MANIFEST), 0, MAX_NODE_BYTES as usize, environment)?;
    if length > MAX_NODE_BYTES {
        let what = format!("the manifest {}", path.join(MANIFEST).display());
        return Err(stepwell_core::Error::Limit { what, found: length, limit: MAX_NODE_BYTES }.into());
    }
    let manifest = ocdbt::manifest(&bytes);
    let manifest = manifest.map_err(|fault| corrupt(MANIFEST, &fault))?;
    if manifest.is_numbered {
        let what = "it has its versions in numbered manifests, which are not supported";
        return Err(stepwell_core::Error::corrupt(path.join(MANIFEST), what).into());
    }
    let root = |(place, height)| PendingNode { prefix: Vec::new(), place, height };
    let mut pending: Vec<PendingNode> = manifest.root.map(root).into_iter().collect();
    let (mut entries, mut seen, mut key_bytes) = (Vec::new(), HashSet::new(), 0);
    while !pending.is_empty() {
        for PendingNode { place, .. } in &pending {
            if !seen.insert((Arc::clone(&place.path), place.offset)) {
                let what = format!("the node at byte {} is in the tree twice", place.offset);
                return Err(stepwell_core::Error::corrupt(path.join(&*place.path), what).into());
            }
        }
        let read = each("stepwell-foreign", THREADS, &pending, |node| {
            let bytes = read(path, &node.place, environment)?;
            let parsed = ocdbt::node(&bytes, &node.place.base, node.height);
            Ok::<_, Error>(parsed.map_err(|fault| corrupt(&node.place.path, &fault))?)
        });
        let mut below = Vec::new();
        for (PendingNode { prefix, height, .. }, node) in pending.into_iter().zip(read) {
            let key = |rest: Vec<u8>| [prefix.as_slice(), &rest].concat();
            let node = node?;
            let length = |rest: &[u8]| prefix.len() + rest.len();
            key_bytes += match &node {
                OcdbtNode::Leaf(found) => found.iter().map(|(rest, _)| length(rest)).sum::<usize>(),
                OcdbtNode::Interior(found) => found.iter().map(|(rest, _)| length(rest)).sum(),
            };
            if key_bytes > MAX_KEYS_BYTES {
                let what = format!("its keys have more than {MAX_KEYS_BYTES} bytes");
                return Err(stepwell_core::Error::corrupt(path.join(MANIFEST), what).into());
            }
            match node {
                OcdbtNode::Leaf(found) => {
                    entries.extend(found.into_iter().map(|(rest, value)| (key(rest), value)));
                }
                OcdbtNode::Interior(children) => below.extend(children.into_iter().map(|(rest, place)| {
                    PendingNode { prefix: key(rest), place, height: height.saturating_sub(1) }
                })),
            }
        }
        pending = below;
    }
    Ok(entries)
}

fn read(path: &Path, place: &OcdbtPlace, environment: &Environment) -> Result<Vec<u8>> {
    let corrupt = |what: String| stepwell_core::Error::corrupt(path.join(&*place.path), what);
    if !place.path.split('/').all(is_component) {
        return Err(corrupt("a node names it, and it is no path below the database".to_owned()).into());
    }
    if place.length > MAX_NODE_BYTES {
        let what = format!("a node of {} bytes; at most {MAX_NODE_BYTES} are read", place.length);
        return Err(corrupt(what).into());
    }
    let file = foreign::open(&path.join(&*place.path), environment)?;
    Ok(file.read_at(place.offset, place.length as usize)?)
}
