//! Many indexes of one item become one: what each rank wrote, or what each data file's footer says of itself.
//!
//! Files are listed in the order of the parts. Containers and leaves that are in several parts are one; the children of a container
//! keep the order that they have in each part (a child that only a later part has comes before the one that it precedes there, or
//! last). Chunks of a tensor that several parts hold are put together, in the order of the parts; where two say that they hold the same region (a replica that
//! was written twice), the first counts. One part merges to itself.

use std::collections::{HashMap, HashSet};

use super::check::{Bounds, Fault, check};
use super::index::{ChunkRegion, Index, LeafRecord};
use crate::error::{Error, Result};
use crate::leaf_path::Component;
use crate::tree::{ContainerKind, Node, NodeKind, Tree};

/// See the module documentation. Refuses parts that contradict each other, with the leaf that they disagree on.
pub fn merge(parts: Vec<Index>) -> Result<Index> {
    let mut merger = Merger::default();
    for part in parts {
        merger.add(part)?;
    }
    let index = merger.finish();
    check(&index, Bounds::Item).map_err(|fault| match fault {
        Fault::Limit(error) => error,
        Fault::Node(node, what) => Error::Leaf { leaf: index.tree.path(node).to_string(), what },
        Fault::Whole(what) => Error::Misuse(format!("the parts of the index cannot be put together: {what}")),
    })?;
    Ok(index)
}

/// A node of the merged tree. Children are a linked list, so that one can be put before any other.
struct Entry {
    component: Option<Component>,
    /// The kind, or the number of the record.
    kind: Result<ContainerKind, usize>,
    first_child: Option<usize>,
    last_child: Option<usize>,
    previous: Option<usize>,
    next: Option<usize>,
}

impl Default for Entry {
    fn default() -> Self {
        Self {
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
    entries: Vec<Entry>,
    by_path: HashMap<(usize, Component), usize>,
    /// Leaf numbers in aliases and views count these records until the end.
    records: Vec<LeafRecord>,
    /// Records that several parts have.
    united: HashSet<usize>,
    files: Vec<super::index::FileRecord>,
}

impl Merger {
    fn add(&mut self, part: Index) -> Result<()> {
        let Index { tree, leaves, files } = part;
        let first_file = self.files.len() as u32;
        self.files.extend(files);

        let mut entry_of: Vec<(usize, bool)> = Vec::with_capacity(tree.nodes().len());
        let mut record_of: Vec<usize> = Vec::with_capacity(leaves.len());
        let mut new_records = HashSet::new();
        for (number, node) in tree.nodes().iter().enumerate() {
            let contradicts = |what: &str| Error::Leaf {
                leaf: tree.path(number as u32).to_string(),
                what: format!("the parts of the index contradict each other: {what}"),
            };
            // Only the root has no name and no parent, and a parent stands before its children.
            let parent = entry_of.get(node.parent as usize).map(|&(entry, _)| entry);
            if (number == 0) != node.component.is_none() || (number == 0) != parent.is_none() {
                return Err(contradicts("a node has no place in the tree"));
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
                    return Err(contradicts(
                        "they hold containers of different kinds, or a container and a leaf",
                    ));
                }
            }
            entry_of.push((entry, is_new));
        }
        self.link(&tree, &entry_of);

        if record_of.len() != leaves.len() {
            return Err(Error::Misuse("a part of the index has not as many records as leaves".to_owned()));
        }
        for (leaf, record) in leaves.into_iter().enumerate() {
            let of = |leaf: u32| {
                let record = record_of.get(leaf as usize);
                record
                    .map(|&record| record as u32)
                    .ok_or_else(|| Error::Misuse(format!("a part has no leaf {leaf}")))
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
                return Err(Error::Leaf {
                    leaf: tree.leaf_path(leaf as u32).to_string(),
                    what: format!("the parts of the index contradict each other: {what}"),
                });
            }
        }
        Ok(())
    }

    /// The entry of a node below that entry, made where it is not there; and whether it was made.
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
                // A place; `add` puts the record there.
                self.records.push(LeafRecord::Alias { of: u32::MAX });
                Err(self.records.len() - 1)
            }
        };
        self.entries.push(Entry { component: node.component.clone(), kind, ..Entry::default() });
        (number, true)
    }

    /// Gives the new entries of a part their places among their siblings. Backwards, so that what follows a node has its place already.
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

    /// Puts an entry before its sibling `next`, or last.
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

    fn finish(mut self) -> Index {
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
        for &record in &self.united {
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
                if let Some(of) = record.refers_to() {
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
        let no_file = || Error::Misuse(format!("a part has no file {file}"));
        *file = file.checked_add(first_file).ok_or_else(no_file)?;
    }
    if let Some(leaf) = record.refers_to() {
        *leaf = of(*leaf)?;
    }
    Ok(record)
}

fn unite(known: &mut LeafRecord, other: LeafRecord) -> Result<(), &'static str> {
    match (known, other) {
        (LeafRecord::Tensor(known), LeafRecord::Tensor(other)) => {
            if known.dtype != other.dtype || known.shape != other.shape {
                return Err("it is a tensor of different dtypes or shapes");
            }
            if known.view != other.view || known.rank_key != other.rank_key {
                return Err("it is different views, or different ranks' values");
            }
            known.chunks.extend(other.chunks); // `finish` drops what came twice, once for all parts
            Ok(())
        }
        // Replicated values, of which the ranks compared digests before they committed.
        (LeafRecord::Object(_), LeafRecord::Object(_)) => Ok(()),
        (LeafRecord::Alias { of: known }, LeafRecord::Alias { of: other }) if *known == other => Ok(()),
        _ => Err("it is different sorts of leaf"),
    }
}
