//! Ranks write large replicated state in equal parts.

use std::sync::Arc;

use stepwell_core::dtype::Dtype;
use stepwell_core::io::simulated::SimDisk;
use stepwell_core::leaf_path::Component;
use stepwell_core::provider::{Fill, StateProvider};
use stepwell_core::region::Region;
use stepwell_core::staging::{Filling, Slot};
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_manager::state::{Holders, Part};
use stepwell_manager::{LeafSource, StateSource};

use crate::cases;
use crate::dice::Dice;
use crate::reading::written;
use crate::world::{self, Setting};

/// Bytes of each rank's part: less could not be cut as evenly.
const MUCH: u64 = 4 << 20;

/// Zeros, wherever one asks.
struct Zeros;

impl StateProvider for Zeros {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> stepwell_core::Result<()> {
        for fill in fills {
            slot.part(fill.at, fill.len)?.fill(0);
        }
        Ok(())
    }
}

/// Tensors of any sizes, of that many bytes in all at least.
fn model(dice: &mut Dice, bytes: u64) -> Vec<(Dtype, Vec<u64>)> {
    let (mut tensors, mut made) = (Vec::new(), 0);
    let largest = dice.pick(&[16, 18, 20]);
    while made < bytes {
        let dtype = *dice.pick(&[Dtype::Bfloat16, Dtype::Float32, Dtype::Complex128, Dtype::Uint8]);
        let most = dice.between(0, *largest);
        let shape: Vec<u64> = match dice.below(3) {
            0 => vec![dice.between(1, 1 << most)],
            1 => vec![dice.between(1, 1 << (most / 2)), dice.between(1, 1 << (most / 2))],
            _ => vec![dice.between(1, 4), dice.between(1, 1 << (most / 2)), dice.between(1, 1 << (most / 3))],
        };
        made += shape.iter().product::<u64>() * dtype.size() as u64;
        tensors.push((dtype, shape));
    }
    tensors
}

fn one(seed: u64) {
    let mut dice = Dice::new(seed);
    let dice = &mut dice;
    let world = dice.between(2, 4) as u32;
    let per_node: Vec<u32> = (1..=world).filter(|per_node| world.is_multiple_of(*per_node)).collect();
    let setting = Setting::usual(world, *dice.pick(&per_node));
    let tensors = model(dice, MUCH * u64::from(world));
    let knowing = dice.once_in(2);
    let all: Arc<[u32]> = (0..world).collect();
    let state = |_: &mut Dice, _, _| {
        let mut state = StateSource { tree: Tree::new(), leaves: Vec::new() };
        let root = state.tree.push_container(None, None, ContainerKind::Dict);
        for (number, (dtype, shape)) in tensors.iter().enumerate() {
            state.tree.push_leaf(Some(root), Some(Component::Key(number.to_string().into())));
            let holders = if knowing { Holders::Ranks(Arc::clone(&all)) } else { Holders::Everyone };
            let parts = vec![Part { region: Region::whole(shape), holders }];
            let (dtype, shape, provider) = (*dtype, shape.clone(), Arc::new(Zeros));
            state.leaves.push(LeafSource::Tensor { dtype, shape, parts, provider });
        }
        state
    };
    let disk = SimDisk::new();
    assert!(world::save(dice, &disk, &setting, 1, state).iter().flatten().all(Result::is_ok));
    let checkpoint = world::open(&disk, 0);
    let bytes = |(dtype, shape): &(Dtype, Vec<u64>)| shape.iter().product::<u64>() * dtype.size() as u64;
    let total: u64 = tensors.iter().map(bytes).sum();
    let (written, largest) = (written(&checkpoint), written(&checkpoint).into_values().max().unwrap());
    assert_eq!(written.values().sum::<u64>(), total);
    assert!(
        largest * 100 * u64::from(world) <= 105 * total,
        "{written:?} of {total} by {setting:?}: {tensors:?}"
    );
}

#[test]
fn no_rank_writes_much_more_than_its_part_of_what_all_hold() {
    cases(20, one);
}
