//! The entries of an OCDBT database, which Orbax writes.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use stepwell_core::foreign::Fault;
use stepwell_core::foreign::ocdbt::{self, OcdbtNode, OcdbtPlace, OcdbtValue};
use stepwell_core::io::is_component;
use stepwell_core::sys::each;

use crate::error::Result;
use crate::foreign;
use crate::foreign_reading::ForeignFiles;

const MANIFEST: &str = "manifest.ocdbt";
/// The longest manifest, and the longest node.
const MAX_NODE_BYTES: u64 = 64 << 20;
/// The most bytes of memory that all entries may take: so many, and so many times the bytes that
/// were read.
const MIN_ENTRIES_BYTES: u64 = 64 << 20;
const ENTRIES_RATIO: u64 = 64;
/// Nodes that are read at a time: a disk answers many small reads together.
const THREADS: usize = 16;

/// A node that is to be read.
struct PendingNode {
    prefix: Vec<u8>,
    place: OcdbtPlace,
    height: u8,
}

/// The first of these nodes that are read together: some, and as many as need little memory.
fn batch(nodes: &[PendingNode]) -> usize {
    let mut bytes = 0_u64;
    let fits = |node: &&PendingNode| {
        bytes = bytes.saturating_add(node.place.length);
        bytes <= MAX_NODE_BYTES
    };
    nodes.iter().take_while(fits).count().max(1).min(nodes.len())
}

/// Returns the newest entries of the database in a directory: keys and values. Paths of values are
/// relative to the directory.
pub fn ocdbt_entries(path: &Path, files: &ForeignFiles) -> Result<Vec<(Vec<u8>, OcdbtValue)>> {
    let corrupt =
        |name: &str, fault: &Fault| stepwell_core::Error::corrupt(path.join(name), fault.to_string());
    let (bytes, length) = foreign::read_foreign(&path.join(MANIFEST), 0, MAX_NODE_BYTES as usize, files)?;
    if length > MAX_NODE_BYTES {
        let what = format!("the manifest {}", path.join(MANIFEST).display());
        return Err(stepwell_core::Error::Limit { what, found: length, limit: MAX_NODE_BYTES }.into());
    }
    let manifest = ocdbt::manifest(&bytes);
    let manifest = manifest.map_err(|fault| corrupt(MANIFEST, &fault))?;
    if manifest.is_numbered {
        let what = "its database has numbered manifests, which Orbax does not write. Copy its arrays \
                    with TensorStore into a database of the manifest kind `single`";
        return Err(stepwell_core::Error::Format { file: path.join(MANIFEST), what: what.to_owned() }.into());
    }
    let root = |(place, height)| PendingNode { prefix: Vec::new(), place, height };
    let mut pending: Vec<PendingNode> = manifest.root.map(root).into_iter().collect();
    let (mut entries, mut seen, mut memory) = (Vec::new(), HashSet::new(), MIN_ENTRIES_BYTES);
    while !pending.is_empty() {
        let mut below = Vec::new();
        let mut rest = pending.as_slice();
        while !rest.is_empty() {
            let (nodes, after) = rest.split_at(batch(rest));
            rest = after;
            for PendingNode { place, .. } in nodes {
                if !seen.insert((Arc::clone(&place.path), place.offset)) {
                    let what = format!("the node at byte {} is in the tree twice", place.offset);
                    return Err(stepwell_core::Error::corrupt(path.join(&*place.path), what).into());
                }
            }
            let contents = each("stepwell-foreign", THREADS, nodes, |node| read(path, &node.place, files));
            // Parsed one by one: each finds how much memory those before it have left.
            for (PendingNode { prefix, place, height }, bytes) in nodes.iter().zip(contents) {
                let bytes = bytes?;
                memory = memory.saturating_add((bytes.len() as u64).saturating_mul(ENTRIES_RATIO));
                let fault = |fault: Fault| corrupt(&place.path, &fault);
                let node = ocdbt::node(&bytes, &place.base, *height, &mut memory).map_err(fault)?;
                let count = match &node {
                    OcdbtNode::Leaf(found) => found.len(),
                    OcdbtNode::Interior(found) => found.len(),
                };
                let prefixes = prefix.len().saturating_mul(count) as u64;
                memory = memory.checked_sub(prefixes).ok_or_else(|| {
                    let what = "its entries take too much memory";
                    stepwell_core::Error::corrupt(path.join(&*place.path), what)
                })?;
                let key = |rest: Vec<u8>| [prefix.as_slice(), &rest].concat();
                match node {
                    OcdbtNode::Leaf(found) => {
                        entries.extend(found.into_iter().map(|(rest, value)| (key(rest), value)));
                    }
                    OcdbtNode::Interior(found) => below.extend(found.into_iter().map(|(rest, place)| {
                        PendingNode { prefix: key(rest), place, height: height.saturating_sub(1) }
                    })),
                }
            }
        }
        pending = below;
    }
    Ok(entries)
}

fn read(path: &Path, place: &OcdbtPlace, files: &ForeignFiles) -> Result<Vec<u8>> {
    let corrupt = |what: String| stepwell_core::Error::corrupt(path.join(&*place.path), what);
    if !place.path.split('/').all(is_component) {
        return Err(corrupt("a node names it, and it is no path below the database".to_owned()).into());
    }
    if place.length > MAX_NODE_BYTES {
        let what = format!("a node of {} bytes; at most {MAX_NODE_BYTES} are read", place.length);
        return Err(corrupt(what).into());
    }
    let file = files.open(&path.join(&*place.path))?;
    Ok(file.read_at(place.offset, place.length as usize)?)
}
