//! Accidents: bytes of a sound step that change, move, vanish or appear, with no checksum
//! corrected. A reader with the manifest finds every change of indexes and data files, and never
//! gets a value that was not saved. (Only its own checksum guards the manifest.)

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use arbitrary::{Arbitrary, Unstructured};
use stepwell_core::io::simulated::SimDisk;

use crate::seeds;
use crate::tree::{Expected, State};
use crate::world::{self, Restored};

#[derive(Arbitrary, Debug)]
enum Edit {
    Set(u8, u32, u8),
    Flip(u8, u32, u8),
    Write(u8, u32, Vec<u8>),
    Zero(u8, u32, u16),
    Cut(u8, u32),
    Grow(u8, Vec<u8>),
    Insert(u8, u32, Vec<u8>),
    Remove(u8, u32, u16),
    /// A page of one file over a page of another: what a disk does that writes to the wrong place.
    Misdirect(u8, u8, u8, u8),
    Swap(u8, u8),
    Lose(u8),
}

type Files = BTreeMap<String, Arc<Vec<u8>>>;

struct Sound {
    state: State,
    files: Files,
}

fn sound() -> &'static Sound {
    static SOUND: OnceLock<Sound> = OnceLock::new();
    SOUND.get_or_init(|| {
        let state = seeds::state();
        let disk = SimDisk::new();
        world::save(&disk, state.source(), &world::options(4096, 8192)).expect("a sound state is saved");
        Sound { files: world::files(&disk), state }
    })
}

/// See the module documentation.
pub fn run(input: &[u8]) {
    let Ok(edits) = Vec::<Edit>::arbitrary(&mut Unstructured::new(input)) else { return };
    let Sound { state, files: before } = sound();
    let mut files = before.clone();
    for edit in &edits {
        apply(&mut files, edit);
    }
    let same = files == *before;
    let disk = SimDisk::new();
    assert!(world::plant(&disk, &files), "sound names");
    let checkpoint = match world::open(&disk) {
        Ok(checkpoint) => checkpoint,
        Err(error) => return assert!(!same, "a sound step is refused: {error}"),
    };
    assert_eq!(world::is_clean(&checkpoint), same, "every edit is found, and nothing else is: {edits:?}");
    assert_eq!(checkpoint.leaves().len(), state.leaves.len());
    let all: Vec<usize> = (0..state.leaves.len()).collect();
    if let Ok(read) = world::read(&checkpoint, &all) {
        return all.iter().zip(&read).for_each(|(&leaf, read)| check(state, leaf, read));
    }
    for leaf in all {
        match world::read(&checkpoint, &[leaf]) {
            Ok(read) => check(state, leaf, &read[0]),
            Err(error) => assert!(!same, "a sound leaf is refused: {error}"),
        }
    }
}

/// A value that was given out is the one that was saved.
pub fn check(state: &State, leaf: usize, read: &Restored) {
    let path = state.tree.leaf_path(leaf as u32);
    match (state.resolved(leaf), read) {
        (Expected::Tensor(dtype, shape, bytes), Restored::Tensor(found, extent, read)) => {
            assert_eq!((dtype, shape), (found, extent), "{path}");
            assert!(bytes == read, "{path} was restored with other bytes than were saved");
        }
        (Expected::Object(value), Restored::Object(read)) => {
            use stepwell_core::format::object::encode;
            assert_eq!(encode(value).ok(), encode(read).ok(), "{path}");
        }
        (saved, read) => panic!("{path} was saved as {saved:?}, and is {read:?}"),
    }
}

/// The files that may be damaged, in order.
fn name(files: &Files, number: u8) -> Option<String> {
    let names: Vec<&String> =
        files.keys().filter(|name| !matches!(name.as_str(), "manifest.json" | ".lease")).collect();
    names.get(usize::from(number) % names.len().max(1)).map(|name| (*name).clone())
}

fn apply(files: &mut Files, edit: &Edit) {
    let number = match edit {
        Edit::Set(file, ..) | Edit::Flip(file, ..) | Edit::Write(file, ..) | Edit::Zero(file, ..) => file,
        Edit::Cut(file, ..) | Edit::Grow(file, ..) | Edit::Insert(file, ..) | Edit::Remove(file, ..) => file,
        Edit::Misdirect(file, ..) | Edit::Swap(file, ..) | Edit::Lose(file) => file,
    };
    let Some(name_of_it) = name(files, *number) else { return };
    match edit {
        Edit::Lose(_) => {
            files.remove(&name_of_it);
            return;
        }
        Edit::Swap(_, other) => {
            let Some(other) = name(files, *other) else { return };
            let (one, two) = (Arc::clone(&files[&name_of_it]), Arc::clone(&files[&other]));
            files.insert(name_of_it, two);
            files.insert(other, one);
            return;
        }
        _ => {}
    }
    let from = match edit {
        Edit::Misdirect(_, _, other, page) => name(files, *other).map(|name| {
            let page = usize::from(*page) * 4096 % files[&name].len().max(1);
            files[&name][page..].iter().take(4096).copied().collect::<Vec<u8>>()
        }),
        _ => None,
    };
    let Some(bytes) = files.get_mut(&name_of_it).map(Arc::make_mut) else { return };
    let length = bytes.len();
    let place = |at: &u32| *at as usize % length.max(1);
    match edit {
        Edit::Set(_, at, value) => bytes[place(at)..].iter_mut().take(1).for_each(|byte| *byte = *value),
        Edit::Flip(_, at, bit) => {
            bytes[place(at)..].iter_mut().take(1).for_each(|byte| *byte ^= 1 << (bit % 8))
        }
        Edit::Write(_, at, new) => {
            bytes[place(at)..].iter_mut().zip(new).for_each(|(byte, new)| *byte = *new)
        }
        Edit::Zero(_, at, count) => {
            bytes[place(at)..].iter_mut().take(usize::from(*count)).for_each(|byte| *byte = 0)
        }
        Edit::Cut(_, at) => bytes.truncate(place(at)),
        Edit::Grow(_, more) => bytes.extend(more),
        Edit::Insert(_, at, more) => drop(bytes.splice(place(at)..place(at), more.iter().copied())),
        Edit::Remove(_, at, count) => {
            drop(bytes.drain(place(at)..(place(at) + usize::from(*count)).min(length)));
        }
        Edit::Misdirect(_, page, ..) => {
            let at = usize::from(*page) * 4096 % length.max(1);
            let from = from.unwrap_or_default();
            bytes[at..].iter_mut().zip(from).for_each(|(byte, new)| *byte = new);
        }
        Edit::Swap(..) | Edit::Lose(_) => {}
    }
}
