//! The table of inodes: the live state of the simulated file system.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::image::{Image, ImageNode};
use super::{Ino, ROOT};

/// A file or a directory, apart from its names.
#[derive(Clone, Debug)]
pub enum Inode {
    /// A directory: names and what they mean.
    Dir(BTreeMap<Arc<str>, Ino>),
    /// A regular file.
    File(Arc<Vec<u8>>),
    /// A symlink, device or socket: never followed, never opened.
    Other,
}

/// All inodes of a file system. Cheap to clone while it is small: contents are shared.
#[derive(Clone, Debug)]
pub struct Inodes {
    table: BTreeMap<Ino, Inode>,
    next: Ino,
    /// Files with two names that were never linked: a power cut may leave this of a rename.
    twice: BTreeSet<Ino>,
}

impl Inodes {
    /// A root directory without entries.
    pub fn empty() -> Self {
        Self {
            table: BTreeMap::from([(ROOT, Inode::Dir(BTreeMap::new()))]),
            next: ROOT + 1,
            twice: BTreeSet::new(),
        }
    }

    /// The inodes of an image, renumbered.
    pub fn of(image: &Image) -> Self {
        let mut inodes = Self { table: BTreeMap::new(), next: ROOT, twice: BTreeSet::new() };
        inodes.plant(&image.0);
        inodes
    }

    /// Adds a whole tree; gives its inode. It has no name yet.
    pub fn plant(&mut self, node: &Arc<ImageNode>) -> Ino {
        self.plant_below(node, &mut BTreeMap::new())
    }

    fn plant_below(&mut self, node: &Arc<ImageNode>, planted: &mut BTreeMap<Ino, Ino>) -> Ino {
        if let Some(&known) = node.ino().and_then(|ino| planted.get(&ino)) {
            self.twice.insert(known);
            return known;
        }
        let ino = self.next;
        self.next += 1;
        planted.extend(node.ino().map(|before| (before, ino)));
        let inode = if let Some(entries) = node.entries() {
            let planted = entries
                .iter()
                .map(|(name, child)| (Arc::clone(name), self.plant_below(child, planted)))
                .collect();
            Inode::Dir(planted)
        } else if let Some(bytes) = node.bytes() {
            Inode::File(Arc::clone(bytes))
        } else {
            Inode::Other
        };
        self.table.insert(ino, inode);
        ino
    }

    /// Everything that a name reaches.
    pub fn image(&self) -> Image {
        Image(self.node(ROOT))
    }

    fn node(&self, ino: Ino) -> Arc<ImageNode> {
        match self.table.get(&ino) {
            Some(Inode::Dir(entries)) => ImageNode::dir(
                entries.iter().map(|(name, &child)| (Arc::clone(name), self.node(child))).collect(),
            ),
            Some(Inode::File(bytes)) => ImageNode::file_of(ino, Arc::clone(bytes)),
            Some(Inode::Other) | None => ImageNode::other(),
        }
    }

    /// Adds an inode without a name.
    pub fn add(&mut self, inode: Inode) -> Ino {
        let ino = self.next;
        self.next += 1;
        self.table.insert(ino, inode);
        ino
    }

    /// An inode by number.
    pub fn get(&self, ino: Ino) -> Option<&Inode> {
        self.table.get(&ino)
    }

    /// An inode by number, to change it.
    pub fn get_mut(&mut self, ino: Ino) -> Option<&mut Inode> {
        self.table.get_mut(&ino)
    }

    /// Returns true if the file has two names, and clears that mark.
    pub fn take_twice(&mut self, ino: Ino) -> bool {
        self.twice.remove(&ino)
    }

    /// Forgets an inode.
    pub fn remove(&mut self, ino: Ino) {
        self.table.remove(&ino);
    }

    /// Every inode with its number.
    pub fn iter(&self) -> impl Iterator<Item = (Ino, &Inode)> {
        self.table.iter().map(|(&ino, inode)| (ino, inode))
    }

    /// The entries of a directory.
    pub fn entries(&self, dir: Ino) -> Option<&BTreeMap<Arc<str>, Ino>> {
        match self.table.get(&dir) {
            Some(Inode::Dir(entries)) => Some(entries),
            _ => None,
        }
    }

    /// Bytes that the file system counts as used: whole pages per file, one page per directory.
    pub fn used_bytes(&self) -> u64 {
        self.table
            .values()
            .map(|inode| match inode {
                Inode::Dir(_) => 4096,
                Inode::File(bytes) => (bytes.len() as u64).next_multiple_of(4096),
                Inode::Other => 0,
            })
            .sum()
    }
}

/// Puts `data` at `offset` of a file's bytes, extending it with zeros where needed.
pub fn overwrite(bytes: &mut Vec<u8>, offset: u64, data: &[u8]) {
    let start = offset as usize;
    let end = start.saturating_add(data.len());
    if bytes.len() < end {
        bytes.resize(end, 0);
    }
    if let Some(window) = bytes.get_mut(start..end) {
        window.copy_from_slice(data);
    }
}
