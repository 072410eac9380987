//! Fills one window with the bytes of its parts.

use crate::format::index::Index;
use crate::provider::Fill;
use crate::save::link::Link;
use crate::save::windows::{Leaf, PartSource, WindowPart, Windows};
use crate::staging::{Filled, Filling, Slot};
use crate::{Error, Result};

/// Fills a window: all parts in order, and zeros between them.
pub(super) fn fill(
    all: &Windows,
    window: usize,
    mut slot: Slot<Filling>,
    indexes: &[Index],
    link: &Link,
) -> Result<Filled> {
    let filled = fill_parts(all, window, &mut slot, indexes, link);
    // Finish the slot even after an error: a device may still write to its memory.
    let slot = slot.finish();
    filled.map(|()| slot)
}

fn fill_parts(
    all: &Windows,
    window: usize,
    slot: &mut Slot<Filling>,
    indexes: &[Index],
    link: &Link,
) -> Result<()> {
    let missing = || Error::internal("a window of the plan", format!("window {window}"));
    let window = all.list.get(window).ok_or_else(missing)?;
    let mut parts = all.parts.get(window.parts.clone()).ok_or_else(missing)?.iter().peekable();
    let mut fills: Vec<Fill<'_>> = Vec::new();
    let mut end = 0_u64;
    while let Some(part) = parts.next() {
        if let Some(error) = link.capture_stopped() {
            return Err(error);
        }
        zero(slot, end, u64::from(part.at))?;
        end = u64::from(part.at) + u64::from(part.len);
        let Some((owner, first)) = chunk_fill(all, part) else {
            let from = part.from as usize;
            let bytes = all.arena.get(from..from + part.len as usize).ok_or_else(missing)?;
            slot.part(u64::from(part.at), u64::from(part.len))?.copy_from_slice(bytes);
            continue;
        };
        // All consecutive parts of one leaf go to its provider in one call.
        fills.clear();
        fills.push(first);
        while let Some((_, next)) =
            parts.peek().and_then(|part| chunk_fill(all, part)).filter(|&(other, _)| other == owner)
        {
            zero(slot, end, next.at)?;
            end = next.at + next.len;
            fills.push(next);
            parts.next();
        }
        let leaf = all.leaves.get(owner as usize).ok_or_else(missing)?;
        leaf.provider.capture(&fills, slot).map_err(|error| with_path(error, leaf, indexes))?;
    }
    zero(slot, end, window.len)
}

/// Returns the part as a fill, with its leaf's number. `None` for a header or an object.
fn chunk_fill<'a>(all: &'a Windows, part: &WindowPart) -> Option<(u32, Fill<'a>)> {
    let PartSource::Chunk(chunk) = part.source else { return None };
    let chunk = all.chunks.get(chunk as usize)?;
    let fill =
        Fill { local: &chunk.local, from: part.from, len: u64::from(part.len), at: u64::from(part.at) };
    Some((chunk.leaf, fill))
}

fn zero(slot: &mut Slot<Filling>, from: u64, to: u64) -> Result<()> {
    if from < to {
        slot.part(from, to - from)?.fill(0);
    }
    Ok(())
}

/// Adds the leaf's path to an error that names no leaf.
fn with_path(error: Error, leaf: &Leaf, indexes: &[Index]) -> Error {
    let path = || {
        let index = indexes.get(leaf.item as usize);
        index.map(|index| index.tree.leaf_path(leaf.number).to_string()).unwrap_or_default()
    };
    match error {
        Error::Misuse(what) => Error::Leaf { leaf: path(), what },
        Error::Internal { expected, found } => {
            Error::Internal { expected: format!("{expected} (leaf `{}`)", path()), found }
        }
        other => other,
    }
}
