//! All states of a cut, where they are few enough to be listed.
//!
//! The states of a directory are, for each variant of its entries, the product of the states of its
//! children: so each inode's list is made once, kept while neither it nor anything below it
//! changes, and free of repetitions at every level.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use stepwell_core::io::simulated::{ImageNode, Ino, ROOT};

use super::model::{Change, Edit, Entries, Model, Profile, State, prefix};
use super::{Options, Unread};

/// The states of one inode; `None` where they are more than the cap.
type List = Option<States>;
type States = Arc<Vec<Arc<ImageNode>>>;

pub(super) struct Space {
    cap: usize,
    profile: Profile,
    unread: Option<Unread>,
    /// By inode, and whether it is below an entry whose bytes nobody reads.
    lists: BTreeMap<(Ino, bool), List>,
}

impl Space {
    pub(super) fn new(options: &Options) -> Self {
        Self { cap: options.cap, profile: options.profile, unread: options.unread, lists: BTreeMap::new() }
    }

    /// Every state that a crash may leave now.
    pub(super) fn all(&mut self, model: &mut Model) -> List {
        for ino in std::mem::take(&mut model.touched) {
            self.lists.remove(&(ino, false));
            self.lists.remove(&(ino, true));
        }
        match self.profile {
            Profile::PosixMinimal => self.list(model, ROOT, false),
            Profile::OrderedMetadata => self.ordered(model),
        }
    }

    fn list(&mut self, model: &Model, ino: Ino, blind: bool) -> List {
        if let Some(list) = self.lists.get(&(ino, blind)) {
            return list.clone();
        }
        let list = match model.inodes.get(&ino) {
            Some(State::File { durable, .. }) if blind => {
                Some(vec![ImageNode::file_of(ino, Arc::clone(durable))])
            }
            Some(State::File { durable, pending }) => files(ino, durable, pending, self.cap),
            Some(State::Dir { durable, pending }) => self.dirs(model, durable, pending, blind),
            Some(State::Other) | None => Some(vec![ImageNode::other()]),
        };
        let list = list.map(Arc::new);
        self.lists.insert((ino, blind), list.clone());
        list
    }

    fn is_blind(&self, above: bool, name: &str) -> bool {
        above || self.unread.is_some_and(|unread| unread(name))
    }

    fn dirs(
        &mut self,
        model: &Model,
        durable: &Entries,
        pending: &[Edit],
        blind: bool,
    ) -> Option<Vec<Arc<ImageNode>>> {
        let mut nodes = Nodes::new(self.cap);
        for entries in variants(durable, pending, self.cap)? {
            let children: Option<Vec<_>> = entries
                .iter()
                .map(|(name, &child)| {
                    let blind = self.is_blind(blind, name);
                    Some((Arc::clone(name), self.list(model, child, blind)?))
                })
                .collect();
            nodes.product(&children?)?;
        }
        Some(nodes.list)
    }

    fn ordered(&mut self, model: &Model) -> List {
        let mut nodes = Nodes::new(self.cap);
        for last in model.prefixes() {
            for node in self.ordered_list(model, ROOT, last, false)?.iter() {
                nodes.push(Arc::clone(node))?;
            }
        }
        Some(Arc::new(nodes.list))
    }

    fn ordered_list(&mut self, model: &Model, ino: Ino, last: u64, blind: bool) -> List {
        let Some(State::Dir { durable, pending }) = model.inodes.get(&ino) else {
            return self.list(model, ino, blind);
        };
        let children: Option<Vec<_>> = prefix(durable, pending, last)
            .into_iter()
            .map(|(name, child)| {
                let blind = self.is_blind(blind, &name);
                let list = self.ordered_list(model, child, last, blind)?;
                Some((name, list))
            })
            .collect();
        let mut nodes = Nodes::new(self.cap);
        nodes.product(&children?)?;
        Some(Arc::new(nodes.list))
    }
}

/// Nodes without repetitions, up to a cap.
struct Nodes {
    list: Vec<Arc<ImageNode>>,
    seen: HashSet<u64>,
    cap: usize,
}

impl Nodes {
    fn new(cap: usize) -> Self {
        Self { list: Vec::new(), seen: HashSet::new(), cap }
    }

    fn push(&mut self, node: Arc<ImageNode>) -> Option<()> {
        if self.seen.insert(node.hash()) {
            if self.list.len() == self.cap {
                return None;
            }
            self.list.push(node);
        }
        Some(())
    }

    /// Directories with every combination of these children.
    fn product(&mut self, children: &[(Arc<str>, States)]) -> Option<()> {
        let mut count: usize = 1;
        for (_, list) in children {
            count = count.checked_mul(list.len()).filter(|&count| count <= self.cap)?;
        }
        for number in 0..count {
            let mut rest = number;
            let mut entries = Vec::with_capacity(children.len());
            for (name, list) in children {
                let node = list.get(rest % list.len())?;
                rest /= list.len();
                entries.push((Arc::clone(name), Arc::clone(node)));
            }
            self.push(ImageNode::dir(entries))?;
        }
        Some(())
    }
}

/// Every content that a crash may leave of a file.
fn files(ino: Ino, durable: &Arc<Vec<u8>>, pending: &[Change], cap: usize) -> Option<Vec<Arc<ImageNode>>> {
    let mut now = vec![ImageNode::file_of(ino, Arc::clone(durable))];
    for change in pending {
        let mut next = Nodes::new(cap);
        for node in &now {
            next.push(Arc::clone(node))?;
        }
        for node in &now {
            for choice in 1..change.choices() {
                let mut bytes = node.bytes()?.as_ref().clone();
                change.keep(choice, &mut bytes);
                next.push(ImageNode::file_of(ino, Arc::new(bytes)))?;
            }
        }
        now = next.list;
    }
    Some(now)
}

/// Every set of entries that a crash may leave of a directory.
fn variants(durable: &Entries, pending: &[Edit], cap: usize) -> Option<Vec<Entries>> {
    let mut now = vec![durable.clone()];
    for edit in pending {
        let mut seen: HashSet<Entries> = now.iter().cloned().collect();
        for at in 0..now.len() {
            let mut entries = now.get(at)?.clone();
            edit.keep(&mut entries);
            if seen.insert(entries.clone()) {
                if now.len() == cap {
                    return None;
                }
                now.push(entries);
            }
        }
    }
    Some(now)
}
