//! Windows: pieces of a save's data files that fit into one slot, each with all parts that it
//! consists of.
//!
//! They are stored in columns, so a save of 20 000 small leaves needs few allocations.

use std::ops::Range;
use std::sync::Arc;

use crate::provider::StateProvider;
use crate::region::Region;
use crate::{Error, Result};

/// A piece of a file that fits into one slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Window {
    /// The number of the item whose file it is of.
    pub item: u32,
    /// Its first byte in the file, a multiple of the slot size.
    pub offset: u64,
    /// Its length in bytes: the slot size, or less at the end of the data.
    pub len: u64,
    /// Its parts in order of `at`. They do not overlap. Zeros fill the gaps between them.
    pub parts: Range<usize>,
}

/// The source of a part's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartSource {
    /// The row-major bytes of the chunk with this number.
    Chunk(u32),
    /// [`Windows::arena`].
    Arena,
}

/// A piece of a chunk, header or object in one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WindowPart {
    pub source: PartSource,
    /// Its first byte in the window.
    pub at: u32,
    /// Its length in bytes.
    pub len: u32,
    /// Its first byte in the source.
    pub from: u64,
}

/// A chunk, as capture needs it.
pub(super) struct Chunk {
    /// Its leaf's number among [`Windows::leaves`].
    pub leaf: u32,
    /// Its region in the provider's array.
    pub local: Region,
}

/// A tensor leaf, as capture needs it.
pub(super) struct Leaf {
    pub provider: Arc<dyn StateProvider>,
    /// Its item, and its number there, for messages.
    pub item: u32,
    pub number: u32,
}

/// All windows of all items, in file order.
#[derive(Default)]
pub(super) struct Windows {
    pub list: Vec<Window>,
    pub parts: Vec<WindowPart>,
    pub chunks: Vec<Chunk>,
    pub leaves: Vec<Leaf>,
    /// The bytes of headers and objects.
    pub arena: Vec<u8>,
}

/// Cuts one item's file into windows. Its parts are added in order of their offsets.
pub(super) struct FileCutter<'a> {
    all: &'a mut Windows,
    item: u32,
    slot_bytes: u64,
    first_window: usize,
}

impl<'a> FileCutter<'a> {
    /// Returns a cutter. `slot_bytes` is below 2^32.
    pub(super) fn new(all: &'a mut Windows, item: u32, slot_bytes: u64) -> Self {
        let first_window = all.list.len();
        Self { all, item, slot_bytes, first_window }
    }

    /// Adds `len` bytes of `source`, from its byte `from` on, at `offset` of the file.
    pub(super) fn add(&mut self, offset: u64, len: u64, source: PartSource, from: u64) {
        let (mut offset, mut left, mut from) = (offset, len, from);
        while left > 0 {
            self.open_windows_to(offset / self.slot_bytes);
            let at = offset % self.slot_bytes;
            let len = left.min(self.slot_bytes - at);
            self.all.parts.push(WindowPart { source, at: at as u32, len: len as u32, from });
            offset += len;
            from += len;
            left -= len;
        }
    }

    /// Adds a tensor leaf and returns its number.
    pub(super) fn leaf(&mut self, leaf: Leaf) -> Result<u32> {
        push(&mut self.all.leaves, leaf, "tensor leaves of a save")
    }

    /// Adds a chunk and returns its number.
    pub(super) fn chunk(&mut self, chunk: Chunk) -> Result<u32> {
        push(&mut self.all.chunks, chunk, "chunks of a save")
    }

    /// Adds bytes at `offset`, through the arena.
    pub(super) fn add_bytes(&mut self, offset: u64, bytes: &[u8]) {
        let from = self.all.arena.len() as u64;
        self.all.arena.extend_from_slice(bytes);
        self.add(offset, bytes.len() as u64, PartSource::Arena, from);
    }

    /// Ends the file's data at `data_bytes`.
    pub(super) fn finish(mut self, data_bytes: u64) {
        if data_bytes > 0 {
            self.open_windows_to((data_bytes - 1) / self.slot_bytes);
        }
        let end = self.all.parts.len();
        let mut next_start = end;
        for window in self.all.list.iter_mut().skip(self.first_window).rev() {
            window.parts.end = next_start;
            next_start = window.parts.start;
            window.len = (data_bytes - window.offset).min(self.slot_bytes);
        }
    }

    fn open_windows_to(&mut self, last: u64) {
        let start = self.all.parts.len();
        while (self.all.list.len() - self.first_window) as u64 <= last {
            let offset = (self.all.list.len() - self.first_window) as u64 * self.slot_bytes;
            self.all.list.push(Window { item: self.item, offset, len: 0, parts: start..start });
        }
    }
}

fn push<T>(column: &mut Vec<T>, value: T, what: &str) -> Result<u32> {
    let number = u32::try_from(column.len()).map_err(|_| Error::Limit {
        what: format!("number of {what}"),
        found: column.len() as u64,
        limit: u64::from(u32::MAX),
    })?;
    column.push(value);
    Ok(number)
}
