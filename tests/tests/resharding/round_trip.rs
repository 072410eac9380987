//! Ranks of any job read exactly what any other job has saved, in any layouts.

use stepwell_core::io::simulated::SimDisk;

use crate::cases;
use crate::dice::Dice;
use crate::reading::{Stored, read_as_a_rank};
use crate::states::{Leaf, State};
use crate::world::{self, Setting};

fn one(seed: u64) {
    let mut dice = Dice::new(seed);
    let dice = &mut dice;
    let world = dice.between(1, 5) as u32;
    let setting = Setting::random(dice, world);
    let mut states = Vec::new();
    let mut state = State::new(world);
    for _ in 0..*dice.pick(&[1, 1, 2, 4]) {
        state.go_on(dice);
        let leaves = if states.is_empty() { dice.between(1, 6) } else { dice.below(3) };
        // Now and then more than is left in one piece.
        let (leaves, most_bytes) =
            if dice.once_in(50) { (1, 1 << 18) } else { (leaves, 1 << dice.between(3, 14)) };
        state.grow(dice, leaves, most_bytes);
        states.push(state.clone());
    }
    let disk = SimDisk::new();
    let state = |dice: &mut Dice, rank, step: u64| states[step as usize].of_rank(dice, rank);
    for (rank, ended) in
        world::save(dice, &disk, &setting, states.len() as u64, state).into_iter().enumerate()
    {
        assert!(ended.iter().all(Result::is_ok), "rank {rank}: {ended:?} of {states:#?} with {setting:?}");
    }
    for (step, state) in (0..).zip(&states) {
        let checkpoint = world::open(&disk, step);
        let stored = Stored::check(&disk, step, &checkpoint, state);
        written_once(&states[0], state, &stored);
        assert!(stored.chunks().all(|(itemsize, bytes)| bytes <= setting.chunk_bytes.max(itemsize)));
        for _ in 0..dice.between(1, 4) {
            read_as_a_rank(dice, &stored, state);
        }
    }
}

/// Checks that the ranks have written each byte of each tensor once, except for leaves after the
/// last census: those that the job's first step did not have.
fn written_once(first: &State, state: &State, stored: &Stored<'_>) {
    let written: u64 = stored.checkpoint.manifest().items.iter().map(|item| item.tensor_bytes).sum();
    let told: Vec<_> = first.leaves.iter().map(|leaf| &leaf.path).collect();
    let bytes = |leaf: &Leaf| state.tensor(leaf).unwrap().bytes();
    let untold = state.stored().filter(|leaf| leaf.is_plain() && !told.contains(&&leaf.path));
    let more: u64 = untold.map(|leaf| (state.ranks(leaf).len() as u64 - 1) * bytes(leaf)).sum();
    let least: u64 = state.stored().map(bytes).sum();
    assert!(
        (least..=least + more).contains(&written),
        "{written} bytes were written of {least}, or of {more} more"
    );
}

#[test]
fn what_is_saved_in_any_layout_is_read_in_any_other_bit_for_bit() {
    cases(3000, one);
}
