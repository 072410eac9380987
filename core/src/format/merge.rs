//! The merge of several indexes of one item. Each part is the index of one rank, or that of one
//! data file's footer.
//!
//! * Files are listed in the order of the parts.
//! * A container or leaf that several parts have is merged into one. Children of a container keep
//!   their order in each part. A child that only a later part has comes before its successor there,
//!   or last.
//! * A tensor gets the chunks of all parts, in the order of the parts. [`Twice`] decides about a
//!   region that two parts have.
//! * All parts of ranks that have an object list it. One of them has its bytes.
//! * A single part is its own merge.

use std::collections::{HashMap, HashSet};

use super::check::{Bounds, IndexFault, check};
use super::index::{ChunkRegion, Index, LeafRecord, TensorRecord};
use crate::error::{Error, Result};
use crate::leaf_path::Component;
use crate::tree::{ContainerKind, Node, NodeKind, Tree};

/// The treatment of a region that two parts have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Twice {
    /// Keep the first copy, for a replica that was written twice.
    First,
    /// Keep both copies. The check of coverage refuses them.
    Both,
}

/// The reason why parts cannot be merged.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// Two parts contradict each other.
    #[error("`{leaf}`: the parts {first} and {second} of the index contradict each other: {what}")]
    Contradiction {
        /// The rendered path of the contradiction.
        leaf: String,
        /// The position of the first of these parts.
        first: usize,
        /// The position of the second one.
        second: usize,
        /// The values of both.
        what: String,
    },
    /// The parts are invalid.
    #[error(transparent)]
    Other(#[from] Error),
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Other(error) => error,
            Refusal::Contradiction { leaf, first, second, what } => Self::Leaf {
                leaf,
                what: format!("the parts {first} and {second} of the index contradict each other: {what}"),
            },
        }
    }
}

/// Merges all parts of an item's index. See the module documentation.
pub fn merge(parts: Vec<Index>, twice: Twice) -> Result<Index, Refusal> {
    let several = parts.len() > 1;
    let index = merge_some(parts, twice)?;
    if several {
        check_objects(&index)?;
    }
    Ok(index)
}

/// Merges some parts, to be merged with the others later. An object whose bytes are in another part
/// may have none here.
pub fn merge_some(parts: Vec<Index>, twice: Twice) -> Result<Index, Refusal> {
    let mut merger = Merger::default();
    for part in parts {
        merger.add(part)?;
    }
    let index = merger.finish(twice);
    check(&index, Bounds::Item).map_err(|fault| match fault {
        IndexFault::Limit(error) => error,
        IndexFault::Node(node, what) => Error::Leaf { leaf: index.tree.path(node).to_string(), what },
        IndexFault::Whole(what) => Error::internal("parts that make one valid index", what),
    })?;
    Ok(index)
}

/// Checks that one of the parts has the bytes of each object.
fn check_objects(index: &Index) -> Result<()> {
    for (leaf, record) in (0_u32..).zip(&index.leaves) {
        if matches!(record, LeafRecord::Object(extent) if extent.length == 0) {
            let what = "the parts of the index all say that another one holds its value".to_owned();
            return Err(Error::Leaf { leaf: index.tree.leaf_path(leaf).to_string(), what });
        }
    }
    Ok(())
}

/// A node of the merged tree. Children are a linked list, so that a new one can precede any other.
struct MergeEntry {
    /// The position of the first part that has it.
    part: usize,
    component: Option<Component>,
    /// The container kind, or the number of the leaf's record.
    kind: Result<ContainerKind, usize>,
    first_child: Option<usize>,
    last_child: Option<usize>,
    previous: Option<usize>,
    next: Option<usize>,
}

impl Default for MergeEntry {
    fn default() -> Self {
        Self {
            part: 0,
            component: None,
            kind: Ok(ContainerKind::Dict),
            first_child: None,
            last_child: None,
            previous: None,
            next: None,
        }
    }
}

#[derive(Default)]
struct Merger {
    entries: Vec<MergeEntry>,
    by_path: HashMap<(usize, Component), usize>,
    /// The records of leaves. Until the end, aliases name leaves by their position here.
    records: Vec<LeafRecord>,
    /// For each record, the position of the first part that has it.
    part_of: Vec<usize>,
    /// The number of parts so far.
    parts: usize,
    /// The records that several parts have.
    united: HashSet<usize>,
    files: Vec<super::index::FileRecord>,
}

impl Merger {
    fn add(&mut self, part: Index) -> Result<(), Refusal> {
        let Index { tree, leaves, files } = part;
        let second = self.parts;
        self.parts += 1;
        let first_file = self.files.len() as u32;
        self.files.extend(files);

        let mut entry_of: Vec<(usize, bool)> = Vec::with_capacity(tree.nodes().len());
        let mut record_of: Vec<usize> = Vec::with_capacity(leaves.len());
        let mut new_records = HashSet::new();
        for (number, node) in tree.nodes().iter().enumerate() {
            // Only the root has no name and no parent. Parents precede their children.
            let parent = entry_of.get(node.parent as usize).map(|&(entry, _)| entry);
            if (number == 0) != node.component.is_none() || (number == 0) != parent.is_none() {
                let what = "the parts of the index contradict each other: a node has no place in the tree"
                    .to_owned();
                return Err(Error::Leaf { leaf: tree.path(number as u32).to_string(), what }.into());
            }
            let (entry, is_new) = self.entry(node, parent);
            match (&node.kind, self.entries.get(entry).map(|entry| &entry.kind)) {
                (NodeKind::Container(kind), Some(Ok(known))) if **kind == *known => {}
                (NodeKind::Leaf(_), Some(Err(record))) => {
                    if is_new {
                        new_records.insert(*record);
                    }
                    record_of.push(*record);
                }
                _ => {
                    return Err(Refusal::Contradiction {
                        leaf: tree.path(number as u32).to_string(),
                        first: self.entries.get(entry).map_or(0, |entry| entry.part),
                        second,
                        what: "they hold containers of different kinds, or a container and a leaf".to_owned(),
                    });
                }
            }
            entry_of.push((entry, is_new));
        }
        self.link(&tree, &entry_of);

        if record_of.len() != leaves.len() {
            return Err(Error::internal(
                format!("{} records in a part of the index", leaves.len()),
                record_of.len().to_string(),
            )
            .into());
        }
        for (leaf, record) in leaves.into_iter().enumerate() {
            let of = |leaf: u32| {
                let record = record_of.get(leaf as usize);
                record
                    .map(|&record| record as u32)
                    .ok_or_else(|| Error::internal("a leaf of the part", format!("leaf {leaf}")))
            };
            let record = renumbered(record, first_file, of)?;
            let place = record_of.get(leaf).copied().unwrap_or(usize::MAX);
            let Some(known) = self.records.get_mut(place) else { continue };
            if new_records.contains(&place) {
                *known = record;
                continue;
            }
            self.united.insert(place);
            if let Err(what) = unite(known, record) {
                return Err(Refusal::Contradiction {
                    leaf: tree.leaf_path(leaf as u32).to_string(),
                    first: self.part_of.get(place).copied().unwrap_or(0),
                    second,
                    what,
                });
            }
        }
        Ok(())
    }

    /// Returns the entry of a node below a parent, and true if it is new. Adds a missing entry.
    fn entry(&mut self, node: &Node, parent: Option<usize>) -> (usize, bool) {
        let number = self.entries.len();
        if let (Some(parent), Some(component)) = (parent, &node.component) {
            if let Some(&known) = self.by_path.get(&(parent, component.clone())) {
                return (known, false);
            }
            self.by_path.insert((parent, component.clone()), number);
        } else if number > 0 {
            return (0, false);
        }
        let kind = match &node.kind {
            NodeKind::Container(kind) => Ok((**kind).clone()),
            NodeKind::Leaf(_) => {
                // A placeholder, which `add` replaces.
                self.records.push(LeafRecord::Alias { of: u32::MAX });
                self.part_of.push(self.parts.saturating_sub(1));
                Err(self.records.len() - 1)
            }
        };
        let part = self.parts.saturating_sub(1);
        self.entries.push(MergeEntry {
            part,
            component: node.component.clone(),
            kind,
            ..MergeEntry::default()
        });
        (number, true)
    }

    /// Links the new entries of a part to their siblings. In reverse order, so that the next
    /// sibling is linked already.
    fn link(&mut self, tree: &Tree, entry_of: &[(usize, bool)]) {
        let mut next_of: Vec<Option<usize>> = vec![None; entry_of.len()];
        for (node, &(entry, is_new)) in tree.nodes().iter().zip(entry_of).skip(1).rev() {
            let parent = node.parent as usize;
            let (Some(next), Some(&(parent, _))) = (next_of.get_mut(parent), entry_of.get(parent)) else {
                continue;
            };
            if is_new {
                self.insert(entry, parent, *next);
            }
            *next = Some(entry);
        }
    }

    /// Inserts an entry before its sibling `next`, or as the last child.
    fn insert(&mut self, entry: usize, parent: usize, next: Option<usize>) {
        let previous = match next {
            Some(next) => self.entries.get_mut(next).and_then(|next| next.previous.replace(entry)),
            None => self.entries.get_mut(parent).and_then(|parent| parent.last_child.replace(entry)),
        };
        match previous {
            Some(previous) => {
                if let Some(previous) = self.entries.get_mut(previous) {
                    previous.next = Some(entry);
                }
            }
            None => {
                if let Some(parent) = self.entries.get_mut(parent) {
                    parent.first_child = Some(entry);
                }
            }
        }
        if let Some(entry) = self.entries.get_mut(entry) {
            (entry.previous, entry.next) = (previous, next);
        }
    }

    fn finish(mut self, twice: Twice) -> Index {
        let mut tree = Tree::new();
        let mut leaf_of: Vec<u32> = vec![u32::MAX; self.records.len()];
        let mut order: Vec<usize> = Vec::with_capacity(self.records.len());
        // (entry, node number of its parent)
        let mut open: Vec<(usize, Option<u32>)> =
            if self.entries.is_empty() { Vec::new() } else { vec![(0, None)] };
        while let Some((number, parent)) = open.pop() {
            let Some(entry) = self.entries.get_mut(number) else { continue };
            if let Some(sibling) = entry.next {
                open.push((sibling, parent));
            }
            let component = entry.component.take();
            match &entry.kind {
                Ok(kind) => {
                    let node = tree.push_container(parent, component, kind.clone());
                    if let Some(child) = entry.first_child {
                        open.push((child, Some(node)));
                    }
                }
                Err(record) => {
                    let leaf = tree.push_leaf(parent, component);
                    if let Some(place) = leaf_of.get_mut(*record) {
                        *place = leaf;
                        order.push(*record);
                    }
                }
            }
        }
        for &record in self.united.iter().filter(|_| twice == Twice::First) {
            if let Some(LeafRecord::Tensor(tensor)) = self.records.get_mut(record) {
                let mut seen: HashSet<ChunkRegion> = HashSet::with_capacity(tensor.chunks.len());
                tensor.chunks.retain(|chunk| seen.insert(chunk.region.clone()));
            }
        }
        let mut records: Vec<Option<LeafRecord>> = self.records.into_iter().map(Some).collect();
        let leaves = order
            .into_iter()
            .filter_map(|record| records.get_mut(record)?.take())
            .map(|mut record| {
                if let Some(of) = record.alias_of_mut() {
                    *of = leaf_of.get(*of as usize).copied().unwrap_or(u32::MAX);
                }
                record
            })
            .collect();
        Index { tree, leaves, files: self.files }
    }
}

fn renumbered(
    mut record: LeafRecord,
    first_file: u32,
    of: impl Fn(u32) -> Result<u32>,
) -> Result<LeafRecord> {
    for file in record.extents_mut().filter_map(|extent| extent.source.file_mut()) {
        let no_file = || Error::internal("a file of the part", format!("file {file}"));
        *file = file.checked_add(first_file).ok_or_else(no_file)?;
    }
    if let Some(leaf) = record.alias_of_mut() {
        *leaf = of(*leaf)?;
    }
    Ok(record)
}

fn unite(known: &mut LeafRecord, other: LeafRecord) -> Result<(), String> {
    match (known, other) {
        (LeafRecord::Tensor(known), LeafRecord::Tensor(other)) => {
            if known.dtype != other.dtype || known.shape != other.shape {
                let said = |tensor: &TensorRecord| {
                    format!("{} of shape {:?}", tensor.dtype.name(), tensor.shape.as_slice())
                };
                return Err(format!("it is {} there, and {} here", said(known), said(&other)));
            }
            known.chunks.extend(other.chunks); // `finish` drops what came twice, once for all parts
            Ok(())
        }
        // Replicated values, of which the ranks compared digests before they committed.
        (LeafRecord::Object(known), LeafRecord::Object(other)) => {
            if known.length == 0 {
                *known = other;
            }
            Ok(())
        }
        (LeafRecord::Alias { of: known }, LeafRecord::Alias { of: other }) if *known == other => Ok(()),
        (known, other) => Err(format!("it is {} there, and {} here", sort(known), sort(&other))),
    }
}

fn sort(record: &LeafRecord) -> &'static str {
    match record {
        LeafRecord::Tensor(_) => "an array",
        LeafRecord::Object(_) => "an object",
        LeafRecord::Alias { .. } => "tied to another leaf",
    }
}
