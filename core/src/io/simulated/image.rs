//! The content of a disk, by names and bytes alone: an immutable tree that shares its parts and
//! knows its own hash.
//!
//! Two images with equal hashes hold the same names and bytes (64 bits: a collision among millions
//! of states is a one-in-a-million event, and could only hide a state, never invent one).

use std::fmt;
use std::sync::Arc;

use super::Ino;

/// One file, directory or something else.
#[derive(Debug)]
pub struct ImageNode {
    hash: u64,
    body: Body,
}

#[derive(Debug)]
enum Body {
    Dir(Box<[(Arc<str>, Arc<ImageNode>)]>),
    File(Arc<Vec<u8>>, Option<Ino>),
    Other,
}

impl ImageNode {
    /// A directory; `entries` sorted by name.
    pub fn dir(entries: Vec<(Arc<str>, Arc<ImageNode>)>) -> Arc<Self> {
        let mut hash = mix(0x6469_7265, entries.len() as u64);
        for (name, node) in &entries {
            hash = mix(mix(hash, content_hash(name.as_bytes())), node.hash);
        }
        Arc::new(Self { hash, body: Body::Dir(entries.into_boxed_slice()) })
    }

    /// A file.
    pub fn file(bytes: Arc<Vec<u8>>) -> Arc<Self> {
        Self::made_of(None, bytes)
    }

    /// A file that is that inode. A power cut may leave one under two names, when it was renamed
    /// into another directory and that one was synced alone: nodes of one inode are planted as one,
    /// of which the inode itself knows but one name. The hash is that of the bytes.
    pub fn file_of(ino: Ino, bytes: Arc<Vec<u8>>) -> Arc<Self> {
        Self::made_of(Some(ino), bytes)
    }

    fn made_of(ino: Option<Ino>, bytes: Arc<Vec<u8>>) -> Arc<Self> {
        Arc::new(Self { hash: mix(0x6669_6c65, content_hash(&bytes)), body: Body::File(bytes, ino) })
    }

    /// A symlink, device or socket.
    pub fn other() -> Arc<Self> {
        Arc::new(Self { hash: mix(0x6f74_6865, 1), body: Body::Other })
    }

    /// Over names and bytes, at any depth.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// The entries, where it is a directory.
    pub fn entries(&self) -> Option<&[(Arc<str>, Arc<ImageNode>)]> {
        match &self.body {
            Body::Dir(entries) => Some(entries),
            Body::File(..) | Body::Other => None,
        }
    }

    /// The bytes, where it is a file.
    pub fn bytes(&self) -> Option<&Arc<Vec<u8>>> {
        match &self.body {
            Body::File(bytes, _) => Some(bytes),
            Body::Dir(_) | Body::Other => None,
        }
    }

    /// The inode that it is, where it is a file of which that is known.
    pub fn ino(&self) -> Option<Ino> {
        match self.body {
            Body::File(_, ino) => ino,
            Body::Dir(_) | Body::Other => None,
        }
    }

    fn describe(&self, name: &str, depth: usize, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.body {
            Body::Dir(entries) => {
                writeln!(out, "{:depth$}{name}/", "")?;
                entries.iter().try_for_each(|(name, node)| node.describe(name, depth + 2, out))
            }
            Body::File(bytes, _) => {
                let zeros =
                    if !bytes.is_empty() && bytes.iter().all(|&b| b == 0) { ", all zero" } else { "" };
                writeln!(out, "{:depth$}{name}  {} bytes{zeros} #{:08x}", "", bytes.len(), self.hash >> 32)
            }
            Body::Other => writeln!(out, "{:depth$}{name}  (neither file nor directory)", ""),
        }
    }
}

/// A whole file system at rest. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Image(pub Arc<ImageNode>);

impl Image {
    /// An empty file system.
    pub fn empty() -> Self {
        Self(ImageNode::dir(Vec::new()))
    }

    /// Over names and bytes.
    pub fn hash(&self) -> u64 {
        self.0.hash
    }

    /// The node at a `/`-separated path.
    pub fn get(&self, path: &str) -> Option<&Arc<ImageNode>> {
        let mut at = &self.0;
        for part in path.split('/').filter(|part| !part.is_empty()) {
            let entries = at.entries()?;
            let place = entries.binary_search_by(|(name, _)| name.as_ref().cmp(part)).ok()?;
            at = &entries.get(place)?.1;
        }
        Some(at)
    }
}

impl PartialEq for Image {
    fn eq(&self, other: &Self) -> bool {
        self.0.hash == other.0.hash
    }
}

impl Eq for Image {}

impl fmt::Display for Image {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.describe("", 0, out)
    }
}

/// Folds `value` into `hash`; good avalanche, one multiplication.
#[inline]
pub fn mix(hash: u64, value: u64) -> u64 {
    let product = u128::from(hash ^ 0x9e37_79b9_7f4a_7c15) * u128::from(value ^ 0xe703_7ed1_a0b4_28db);
    let folded = (product as u64) ^ ((product >> 64) as u64);
    folded.rotate_left(23) ^ hash.wrapping_mul(0xff51_afd7_ed55_8ccd) ^ value
}

/// A hash of bytes, eight at a time.
pub fn content_hash(bytes: &[u8]) -> u64 {
    let mut hash = 0x51ed_270b_0a1f_39c1 ^ bytes.len() as u64;
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        hash = mix(hash, u64::from_le_bytes(*word));
    }
    let mut last = [0u8; 8];
    for (to, from) in last.iter_mut().zip(rest) {
        *to = *from;
    }
    mix(hash, u64::from_le_bytes(last))
}
