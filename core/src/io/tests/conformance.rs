//! Every promise of the traits in [`crate::io`], as one suite that each engine runs: the real ones
//! on a real file system, the simulated one in memory.
//!
//! It asks only for what the traits promise: no symlinks, no page cache, no particular alignment.
//! If a promise names an errno, the suite checks that errno. A broken promise panics with the
//! engine's name and the expectation.

mod names;
mod queues;

use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::io::{Completion, Dir, Disk, File, Queue, Transfer};
use crate::sys::{Buffer, Mapping};
use crate::{Error, Result};

/// Alignment that every engine can serve, and that the format keeps to.
const BLOCK: usize = 4096;
/// Long enough for any disk; a test that waits for it has failed.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs the whole suite below `root`, a directory that exists or can be made, and leaves it empty.
///
/// # Panics
/// At the first promise that `disk` breaks.
pub(crate) fn run(disk: &dyn Disk, root: &Path) {
    disk.create_dir_all(root).unwrap();
    for (name, check) in names::CHECKS.iter().chain(queues::CHECKS) {
        let path = root.join(name);
        let dir = disk.create_dir_all(&path).unwrap();
        check(&Scene { disk, path: &path, dir });
        let root = disk.open_dir(root).unwrap();
        remove_tree(root.as_ref(), name);
    }
    let left = disk.open_dir(root).unwrap().entries().unwrap();
    assert!(left.is_empty(), "{}: left behind: {left:?}", disk.choice().engine);
}

type Check = fn(&Scene<'_>);

/// A fresh directory for one promise.
struct Scene<'a> {
    disk: &'a dyn Disk,
    path: &'a Path,
    dir: Arc<dyn Dir>,
}

impl Scene<'_> {
    /// A data file with these bytes, written through a queue in whole blocks, cut to length and
    /// synced.
    fn data_file(&self, name: &str, bytes: &[u8]) -> Arc<dyn File> {
        let padded = bytes.len().next_multiple_of(BLOCK);
        let file = self.dir.create_file(name, padded as u64).unwrap();
        if padded > 0 {
            let mut queue = self.disk.queue(4).unwrap();
            let mut buffer = Buffer::alone(padded).unwrap();
            buffer[..bytes.len()].copy_from_slice(bytes);
            queue.submit(Transfer::Write, &file, 0, padded, buffer, 0);
            assert_eq!(finish(queue.as_mut()).result.unwrap(), padded);
        }
        file.set_len(bytes.len() as u64).unwrap();
        file.sync().unwrap();
        file
    }

    fn names(&self) -> Vec<String> {
        self.dir.entries().unwrap().into_iter().map(|entry| entry.name).collect()
    }
}

/// The next completion, which must come.
fn finish(queue: &mut dyn Queue) -> Completion {
    queue.complete(PATIENCE).unwrap_or_else(|| panic!("no completion within {PATIENCE:?}"))
}

/// Bytes without a period that a block has.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// The call failed with this errno, and says which file it is about.
fn assert_errno<T>(answer: Result<T>, expected: &[i32], about: &str) {
    let Err(error) = answer else { panic!("{about}: succeeded, expected errno {expected:?}") };
    let errno = error.errno().unwrap_or_else(|| panic!("{about}: no errno in {error}"));
    assert!(expected.contains(&errno), "{about}: {error}, expected errno {expected:?}");
    let file = error.file().unwrap_or_else(|| panic!("{about}: no path in {error}"));
    assert!(file.to_string_lossy().ends_with(about), "{about}: the error names {}", file.display());
}

fn assert_bytes(found: &[u8], expected: &[u8], what: impl Debug) {
    assert_eq!(found.len(), expected.len(), "{what:?}: length");
    if found != expected {
        let at = found.iter().zip(expected).position(|(found, expected)| found != expected).unwrap_or(0);
        panic!("{what:?}: byte {at} is {}, expected {}", found[at], expected[at]);
    }
}

fn remove_tree(dir: &dyn Dir, name: &str) {
    let below = dir.open_dir(name).unwrap();
    for entry in below.entries().unwrap() {
        match entry.kind {
            super::EntryKind::Dir => remove_tree(below.as_ref(), &entry.name),
            _ => below.remove_file(&entry.name).unwrap(),
        }
    }
    dir.remove_dir(name).unwrap();
}

/// Buffers of one mapping, of `size` bytes each.
fn buffers(count: usize, size: usize) -> Vec<Buffer> {
    let mut all = Mapping::new(count * size).unwrap().into_buffers(size).unwrap();
    all.truncate(count);
    all
}

/// For checks that a certain kind of error came, whatever file it names.
fn is_limit(error: &Error) -> bool {
    matches!(error, Error::Limit { .. })
}
