//! The manifest and the B+tree nodes of an OCDBT database, which TensorStore writes for Orbax:
//! names with values, which lie inside a node or in a data file.
//!
//! Paths of data files are relative to the database. A node names them in parts: its children know
//! the first part from it ([`OcdbtPlace::base`]).

use std::sync::Arc;

use super::{Fault, Parsed};
use crate::compression::{Compression, Decompressor};
use crate::format::checksum::crc32c;

const MANIFEST: u32 = 0x0cdb_3a2a;
const NODE: u32 = 0x0cdb_20de;
/// The most bytes that a manifest or a node may have, decoded: so many, and so many times its
/// compressed bytes.
const MIN_DECODED_BYTES: usize = 1 << 20;
const DECODED_RATIO: usize = 64;
const MAX_DECODED_BYTES: usize = 64 << 20;
const MAX_PATH_BYTES: usize = 65_535;
/// Bytes of memory of an entry, beside those of its name and its value.
const ENTRY_BYTES: usize = 64;
/// Bytes of the checksum at the end.
const FOOTER_BYTES: usize = 4;

/// The newest version of a database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OcdbtManifest {
    /// True if other files (`manifest.<number>`) have the versions.
    pub is_numbered: bool,
    /// The root of its tree, and its height. `None`: the database is empty.
    pub root: Option<(OcdbtPlace, u8)>,
}

/// A place in a data file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OcdbtPlace {
    /// Path of the file, relative to the database. It is not checked. Places share it.
    pub path: Arc<str>,
    /// The part of the path that the places named in these bytes begin with.
    pub base: Arc<str>,
    /// Offset of the first byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// A node of the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OcdbtNode {
    /// Keys and their values. Keys lack the prefix of the node.
    Leaf(Vec<(Vec<u8>, OcdbtValue)>),
    /// Nodes below it: what their keys begin with behind the prefix of this node, and places.
    Interior(Vec<(Vec<u8>, OcdbtPlace)>),
}

/// The value of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OcdbtValue {
    /// Its bytes.
    Inline(Vec<u8>),
    /// Their place.
    At(OcdbtPlace),
}

/// Parses `manifest.ocdbt`, or a numbered one.
pub fn manifest(bytes: &[u8]) -> Parsed<OcdbtManifest> {
    let body = body(bytes, MANIFEST, "a manifest")?;
    let mut memory = MAX_DECODED_BYTES as u64;
    let mut fields = OcdbtFields { bytes: &body, at: 0, memory: &mut memory };
    fields.skip(16)?; // uuid
    let kind = fields.varint()?;
    fields.varint()?; // the longest inline value
    fields.varint()?; // the longest node
    fields.skip(1)?; // arity of the tree of versions
    match fields.varint()? {
        0 => {}
        1 => fields.skip(4)?, // level
        other => {
            return Err(fields.fault(format!("nodes are compressed by method {other}, which is not known")));
        }
    }
    match kind {
        0 => {}
        1 => return Ok(OcdbtManifest { is_numbered: true, root: None }),
        other => return Err(fields.fault(format!("a manifest of kind {other}, which is not known"))),
    }
    let files = fields.files("")?;
    let count = fields.count(10)?;
    // Generations grow: the newest version is the last one.
    for _ in 0..count {
        fields.varint()?;
    }
    let heights: Vec<u8> = (0..count).map(|_| fields.byte()).collect::<Parsed<_>>()?;
    let places = fields.places(&files, count)?;
    let root = places.into_iter().zip(heights).next_back();
    Ok(OcdbtManifest { is_numbered: false, root: root.and_then(|(place, height)| Some((place?, height))) })
}

/// Parses a node of that height. `base` is that of its place. Its entries may take `memory` bytes,
/// and what they take is subtracted.
pub fn node(bytes: &[u8], base: &str, height: u8, memory: &mut u64) -> Parsed<OcdbtNode> {
    let body = body(bytes, NODE, "a node")?;
    let mut fields = OcdbtFields { bytes: &body, at: 0, memory };
    let found = fields.byte()?;
    if found != height {
        return Err(fields.fault(format!("a node of height {height} was expected, not of {found}")));
    }
    let files = fields.files(base)?;
    let count = fields.count(3)?;
    let lengths = fields.lengths(count)?;
    let parts = if height > 0 { fields.column(count)? } else { Vec::new() };
    let keys = fields.prefixed(&lengths)?;
    if height > 0 {
        let places = fields.places(&files, count)?;
        let children = keys.into_iter().zip(parts).zip(places).map(|((mut key, part), place)| {
            let part = usize::try_from(part).ok().filter(|&part| part <= key.len());
            let (Some(part), Some(place)) = (part, place) else {
                return Err(fields.fault("a child without a place or with a longer prefix than its key"));
            };
            key.truncate(part);
            Ok((key, place))
        });
        return Ok(OcdbtNode::Interior(children.collect::<Parsed<_>>()?));
    }
    let lengths = fields.column(count)?;
    let kinds = fields.column(count)?;
    let stored = kinds.iter().filter(|&&kind| kind == 1).count();
    let numbers = fields.column(stored)?;
    let offsets = fields.column(stored)?;
    let mut places = numbers.into_iter().zip(offsets);
    let mut entries = Vec::with_capacity(count);
    for ((key, length), kind) in keys.into_iter().zip(lengths).zip(kinds) {
        let value = match kind {
            0 => {
                let length = usize::try_from(length).unwrap_or(usize::MAX);
                fields.reserve(length)?;
                OcdbtValue::Inline(fields.take(length)?.to_vec())
            }
            1 => {
                let place = places.next().ok_or_else(|| fields.fault("a value without a place"))?;
                OcdbtValue::At(fields.place(&files, place.0, place.1, length)?)
            }
            other => return Err(fields.fault(format!("a value of kind {other}, which is not known"))),
        };
        entries.push((key, value));
    }
    Ok(OcdbtNode::Leaf(entries))
}

/// Checks the frame of a manifest or a node, and returns what is in it, decoded.
fn body(bytes: &[u8], magic: u32, what: &str) -> Parsed<Vec<u8>> {
    let mut fields = OcdbtFields { bytes, at: 0, memory: &mut 0 };
    let found = fields.take(4)?;
    if found != magic.to_be_bytes() {
        return Err(Fault::new(0, format!("{what} of an OCDBT database was expected")));
    }
    let length = fields.take(8)?;
    if length != (bytes.len() as u64).to_le_bytes() {
        return Err(Fault::new(4, format!("{what} of {} bytes names another length", bytes.len())));
    }
    let version = fields.varint()?;
    if version != 0 {
        return Err(fields.fault(format!("{what} of version {version}; 0 is known")));
    }
    let method = fields.varint()?;
    let end = bytes.len().saturating_sub(FOOTER_BYTES);
    let (Some(content), Some(framed), Some(footer)) =
        (bytes.get(fields.at..end), bytes.get(..end), bytes.get(end..))
    else {
        return Err(Fault::cut(bytes.len() as u64, format!("{what} ends in the middle")));
    };
    if footer != crc32c(framed).to_le_bytes() {
        return Err(Fault::new(end as u64, format!("{what} does not have its recorded checksum")));
    }
    match method {
        0 => Ok(content.to_vec()),
        1 => decoded(content).ok_or_else(|| {
            Fault::new(fields.at as u64, format!("{what} whose stream of zstd is damaged or too long"))
        }),
        other => Err(fields.fault(format!("{what} is compressed by method {other}, which is not known"))),
    }
}

/// Decodes a stream of zstd.
fn decoded(mut stream: &[u8]) -> Option<Vec<u8>> {
    let limit = stream.len().saturating_mul(DECODED_RATIO).clamp(MIN_DECODED_BYTES, MAX_DECODED_BYTES);
    let mut decoder = Decompressor::new(Compression::Zstd);
    let mut out = Vec::new();
    let mut piece = [0; 16 << 10];
    loop {
        let step = decoder.step(stream, &mut piece).ok()?;
        stream = stream.get(step.used..)?;
        out.extend_from_slice(piece.get(..step.written)?);
        if out.len() > limit {
            return None;
        }
        if (step.used, step.written) == (0, 0) {
            return stream.is_empty().then_some(out);
        }
    }
}

/// A path of a data file, and its base.
struct OcdbtFile {
    path: Arc<str>,
    base: Arc<str>,
}

/// The fields of decoded bytes, one after the other.
struct OcdbtFields<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Bytes of memory that may still be taken.
    memory: &'a mut u64,
}

impl<'a> OcdbtFields<'a> {
    fn fault(&self, what: impl Into<String>) -> Fault {
        Fault::new(self.at as u64, what)
    }

    fn take(&mut self, length: usize) -> Parsed<&'a [u8]> {
        let end = self.at.checked_add(length);
        let found = end.and_then(|end| self.bytes.get(self.at..end));
        let found =
            found.ok_or_else(|| Fault::cut(self.at as u64, format!("{length} more bytes were expected")))?;
        self.at += length;
        Ok(found)
    }

    fn skip(&mut self, length: usize) -> Parsed<()> {
        self.take(length).map(|_| ())
    }

    fn byte(&mut self) -> Parsed<u8> {
        Ok(self.take(1)?.first().copied().unwrap_or_default())
    }

    /// Counts memory before it is taken.
    fn reserve(&mut self, bytes: usize) -> Parsed<()> {
        *self.memory = self
            .memory
            .checked_sub(bytes as u64)
            .ok_or_else(|| Fault::new(self.at as u64, "its entries take too much memory"))?;
        Ok(())
    }

    /// A number in groups of seven bits, the lowest first.
    fn varint(&mut self) -> Parsed<u64> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let group = u64::from(byte & 0x7f);
            if group << shift >> shift != group {
                break;
            }
            value |= group << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(self.fault("a number of more than 64 bits"))
    }

    /// A number of entries that take at least so many bytes each.
    fn count(&mut self, bytes: usize) -> Parsed<usize> {
        let count = self.varint()?;
        let left = self.bytes.len() - self.at;
        let count = usize::try_from(count)
            .ok()
            .filter(|count| count.checked_mul(bytes).is_some_and(|needed| needed <= left))
            .ok_or_else(|| self.fault(format!("{count} entries in {left} bytes")))?;
        self.reserve(count.saturating_mul(ENTRY_BYTES))?;
        Ok(count)
    }

    fn column(&mut self, count: usize) -> Parsed<Vec<u64>> {
        (0..count).map(|_| self.varint()).collect()
    }

    /// The lengths of names: of what each shares with the one before it, and of the rest.
    fn lengths(&mut self, count: usize) -> Parsed<Vec<(usize, usize)>> {
        let prefixes = self.column(count.saturating_sub(1))?;
        let suffixes = self.column(count)?;
        let size = |length: u64| usize::try_from(length).unwrap_or(usize::MAX);
        Ok([0].into_iter().chain(prefixes).map(size).zip(suffixes.into_iter().map(size)).collect())
    }

    /// The names of these lengths.
    fn prefixed(&mut self, lengths: &[(usize, usize)]) -> Parsed<Vec<Vec<u8>>> {
        let mut names: Vec<Vec<u8>> = Vec::with_capacity(lengths.len());
        for &(prefix, suffix) in lengths {
            let last = names.last().map(Vec::as_slice).unwrap_or_default();
            let Some(prefix) = last.get(..prefix) else {
                return Err(self.fault("a name shares more with the one before it than that has"));
            };
            let length = prefix.len().saturating_add(suffix);
            if length > MAX_PATH_BYTES {
                return Err(self.fault("a name that is too long"));
            }
            self.reserve(length)?;
            names.push([prefix, self.take(suffix)?].concat());
        }
        Ok(names)
    }

    /// The table of data files.
    fn files(&mut self, transitive: &str) -> Parsed<Vec<OcdbtFile>> {
        let count = self.count(2)?;
        let lengths = self.lengths(count)?;
        let bases = self.column(count)?;
        let paths = self.prefixed(&lengths)?;
        let file = |(path, base): (Vec<u8>, u64)| {
            let base = usize::try_from(base).ok().filter(|&base| base <= path.len());
            let path = String::from_utf8(path).ok();
            let (Some(base), Some(path)) = (base, path) else {
                return Err(self.fault("a path of a data file that is no text, or shorter than its base"));
            };
            if !path.is_char_boundary(base) {
                return Err(self.fault("a path of a data file whose base ends inside a character"));
            }
            let base = path.get(..base).unwrap_or_default();
            Ok(OcdbtFile {
                base: format!("{transitive}{base}").into(),
                path: format!("{transitive}{path}").into(),
            })
        };
        paths.into_iter().zip(bases).map(file).collect()
    }

    /// The places of nodes. `None` for one that there is not.
    fn places(&mut self, files: &[OcdbtFile], count: usize) -> Parsed<Vec<Option<OcdbtPlace>>> {
        let numbers = self.column(count)?;
        let offsets = self.column(count)?;
        let lengths = self.column(count)?;
        let rows = numbers.into_iter().zip(offsets).zip(lengths);
        rows.map(|((number, offset), length)| match (offset, length) {
            (u64::MAX, u64::MAX) => Ok(None),
            _ => self.place(files, number, offset, length).map(Some),
        })
        .collect()
    }

    fn place(&self, files: &[OcdbtFile], number: u64, offset: u64, length: u64) -> Parsed<OcdbtPlace> {
        let file = usize::try_from(number).ok().and_then(|number| files.get(number));
        let file = file.ok_or_else(|| self.fault(format!("data file {number} of {}", files.len())))?;
        if offset.checked_add(length).is_none() {
            return Err(self.fault("a place that passes the end of any file"));
        }
        Ok(OcdbtPlace { path: Arc::clone(&file.path), base: Arc::clone(&file.base), offset, length })
    }
}

#[cfg(test)]
mod tests;
