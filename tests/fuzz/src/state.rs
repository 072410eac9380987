//! Random states, saved into a file system in memory and restored. A state that cannot be saved is
//! refused without leftovers. A saved one comes back bit for bit, with its structure.

use arbitrary::Unstructured;
use stepwell_core::io::simulated::SimDisk;

use crate::tree::State;
use crate::{damage, world};

/// See the module documentation.
pub fn run(input: &[u8]) {
    let mut u = Unstructured::new(input);
    let Ok((block, chunk)) = sizes(&mut u) else { return };
    let Ok(state) = State::from(&mut u) else { return };
    let disk = SimDisk::new();
    if let Err(error) = world::save(&disk, state.source(), &world::options(block, chunk)) {
        let refused = matches!(error.kind(), "unsupported_leaf" | "invalid" | "format");
        assert!(refused, "a state in memory is refused for what it is: {} {error}", error.kind());
        assert!(world::files(&disk).is_empty(), "what is refused leaves nothing");
        return;
    }
    let checkpoint = world::open(&disk).expect("what is committed opens");
    assert!(world::is_clean(&checkpoint), "what is committed is whole");
    let leaves: Vec<usize> = (0..state.leaves.len()).collect();
    assert_eq!(checkpoint.tree(), &state.tree, "the structure that was saved");
    let read = world::read(&checkpoint, &leaves).expect("what is whole restores");
    for (leaf, read) in read.iter().enumerate() {
        damage::check(&state, leaf, read);
    }
}

fn sizes(u: &mut Unstructured<'_>) -> arbitrary::Result<(u64, u64)> {
    Ok((4096 << u.int_in_range(0..=4)?, u.int_in_range(1..=65_536)?))
}
