//! The entries of an OCDBT database, which Orbax writes.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use stepwell_core::foreign::Fault;
use stepwell_core::foreign::ocdbt::{self, OcdbtNode, OcdbtPlace, OcdbtValue};
use stepwell_core::io::is_component;
use stepwell_core::sys::each;

use crate::error::{Error, Result};
use crate::foreign;
use crate::foreign_reading::ForeignFiles;

const MANIFEST: &str = "manifest.ocdbt";
/// The longest manifest, and the longest node.
const MAX_NODE_BYTES: u64 = 64 << 20;
/// The most bytes of memory that all entries may take: so many, and so many times the bytes that
/// were read.
const MIN_ENTRIES_BYTES: u64 = 64 << 20;
const ENTRIES_RATIO: u64 = 64;
/// Bytes of an entry beside those of its key and its value.
const ENTRY_BYTES: u64 = 64;
/// Nodes that are read at a time: a disk answers many small reads together.
const THREADS: usize = 16;

/// A node that is to be read.
struct PendingNode {
    prefix: Vec<u8>,
    place: OcdbtPlace,
    height: u8,
}

/// The memory that entries may take. Nodes are counted as they are read, by several threads.
#[derive(Default)]
struct EntryBudget {
    read: AtomicU64,
    taken: AtomicU64,
}

impl EntryBudget {
    /// Counts a node of that many bytes. Keys have the prefix of the nodes above it.
    fn count(&self, bytes: usize, prefix: &[u8], node: &OcdbtNode) {
        let key = |rest: &[u8]| ENTRY_BYTES + (prefix.len() + rest.len()) as u64;
        let value = |value: &OcdbtValue| match value {
            OcdbtValue::Inline(bytes) => bytes.len() as u64,
            OcdbtValue::At(_) => 0,
        };
        let entries: u64 = match node {
            OcdbtNode::Leaf(found) => found.iter().map(|(rest, one)| key(rest) + value(one)).sum(),
            OcdbtNode::Interior(found) => found.iter().map(|(rest, _)| key(rest)).sum(),
        };
        self.read.fetch_add(bytes as u64, Ordering::Relaxed);
        self.taken.fetch_add(entries, Ordering::Relaxed);
    }

    /// Fails if the entries that were counted take too much.
    fn check(&self, path: &Path) -> Result<()> {
        let read = self.read.load(Ordering::Relaxed);
        let limit = MIN_ENTRIES_BYTES.saturating_add(read.saturating_mul(ENTRIES_RATIO));
        if self.taken.load(Ordering::Relaxed) <= limit {
            return Ok(());
        }
        let what = format!("its entries take more than {limit} bytes of memory");
        Err(stepwell_core::Error::corrupt(path.join(MANIFEST), what).into())
    }
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
        let what = "it has its versions in numbered manifests, which are not supported";
        return Err(stepwell_core::Error::corrupt(path.join(MANIFEST), what).into());
    }
    let root = |(place, height)| PendingNode { prefix: Vec::new(), place, height };
    let mut pending: Vec<PendingNode> = manifest.root.map(root).into_iter().collect();
    let (mut entries, mut seen, budget) = (Vec::new(), HashSet::new(), EntryBudget::default());
    while !pending.is_empty() {
        for PendingNode { place, .. } in &pending {
            if !seen.insert((Arc::clone(&place.path), place.offset)) {
                let what = format!("the node at byte {} is in the tree twice", place.offset);
                return Err(stepwell_core::Error::corrupt(path.join(&*place.path), what).into());
            }
        }
        let read = each("stepwell-foreign", THREADS, &pending, |node| {
            budget.check(path)?;
            let bytes = read(path, &node.place, files)?;
            let parsed = ocdbt::node(&bytes, &node.place.base, node.height);
            let parsed = parsed.map_err(|fault| corrupt(&node.place.path, &fault))?;
            budget.count(bytes.len(), &node.prefix, &parsed);
            budget.check(path)?;
            Ok::<_, Error>(parsed)
        });
        let mut below = Vec::new();
        for (PendingNode { prefix, height, .. }, node) in pending.into_iter().zip(read) {
            let key = |rest: Vec<u8>| [prefix.as_slice(), &rest].concat();
            match node? {
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
