//! Mismatched states never become a step: every rank gets the tensor's name, and the next save
//! works.

use stepwell_core::dtype::Dtype;
use stepwell_core::io::simulated::SimDisk;
use stepwell_core::region::Region;

use crate::cases;
use crate::dice::Dice;
use crate::reading::Stored;
use crate::states::{Held, How, Share, State, What, path, plain, shared_out};
use crate::tensors::Tensor;
use crate::world::{self, Setting};

/// Damages a tensor's layout, or what one rank says of it. `None`: there is nothing to damage in
/// that way.
type Damage = fn(&mut Dice, &mut [State], usize) -> Option<()>;

const DAMAGES: [Damage; 9] =
    [hole, shorter, longer, undeclared, twice, taller, other_shape, other_dtype, other_values];

/// A state's tensor at a leaf.
fn tensor(state: &mut State, leaf: usize) -> (&mut Tensor, &mut Held) {
    match &mut state.leaves[leaf].what {
        What::Tensor { tensor, held } => (tensor, held),
        other => panic!("a tensor was made, not {other:?}"),
    }
}

fn shares(state: &mut State, leaf: usize) -> Option<&mut Vec<Share>> {
    match tensor(state, leaf).1 {
        Held::Cut { shares, .. } => Some(shares),
        Held::Plain { .. } => None,
    }
}

/// One of the shares of a tensor that there are.
fn a_share(dice: &mut Dice, states: &mut [State], leaf: usize, is_it: fn(&Share) -> bool) -> Option<usize> {
    let shares = shares(&mut states[0], leaf)?.iter().enumerate();
    let found: Vec<usize> = shares.filter(|(_, share)| is_it(share)).map(|(at, _)| at).collect();
    (!found.is_empty()).then(|| *dice.pick(&found))
}

fn has_elements(share: &Share) -> bool {
    share.boxes.iter().any(|region| !region.is_empty())
}

fn is_of_boxes(share: &Share) -> bool {
    has_elements(share) && !matches!(share.how, How::Flat { .. })
}

/// Nobody holds a part of it.
fn hole(dice: &mut Dice, states: &mut [State], leaf: usize) -> Option<()> {
    let at = a_share(dice, states, leaf, has_elements)?;
    for state in states {
        let (_, Held::Cut { shares, idle }) = tensor(state, leaf) else { return None };
        let gone = shares.remove(at);
        // Its holders still have the leaf.
        idle.extend(gone.holders);
    }
    Some(())
}

/// A share of one box that holds elements, and an axis of it.
fn a_side(dice: &mut Dice, states: &mut [State], leaf: usize) -> Option<(usize, usize)> {
    for state in &mut *states {
        let shares = shares(state, leaf)?;
        let of_one = |share: Share| {
            let boxes = if is_of_boxes(&share) {
                share.boxes.iter().map(|one| vec![one.clone()]).collect()
            } else {
                vec![share.boxes.clone()]
            };
            boxes.into_iter().map(move |boxes| Share { boxes, ..share.clone() })
        };
        *shares = std::mem::take(shares).into_iter().flat_map(of_one).collect();
    }
    let share = a_share(dice, states, leaf, is_of_boxes)?;
    let axes = shares(&mut states[0], leaf)?[share].boxes[0].ndim();
    (axes > 0).then(|| (share, dice.below(axes as u64) as usize))
}

/// A box is an element shorter than all ranks have said.
fn shorter(dice: &mut Dice, states: &mut [State], leaf: usize) -> Option<()> {
    let (share, axis) = a_side(dice, states, leaf)?;
    for state in states {
        let region = &mut shares(state, leaf)?[share].boxes[0];
        region.extent[axis] -= 1;
    }
    Some(())
}

/// A box reaches into what others hold.
fn longer(dice: &mut Dice, states: &mut [State], leaf: usize) -> Option<()> {
    let (share, axis) = a_side(dice, states, leaf)?;
    let end = tensor(&mut states[0], leaf).0.shape[axis];
    for state in states {
        let region = &mut shares(state, leaf)?[share].boxes[0];
        if region.offset[axis] + region.extent[axis] < end {
            region.extent[axis] += 1;
        } else {
            region.offset[axis] = region.offset[axis].checked_sub(1)?;
            region.extent[axis] += 1;
        }
    }
    Some(())
}

/// Several ranks hold the same, and none says that others do.
fn undeclared(dice: &mut Dice, states: &mut [State], leaf: usize) -> Option<()> {
    let share = a_share(dice, states, leaf, |share| is_of_boxes(share) && share.holders.len() > 1)?;
    for state in states {
        shares(state, leaf)?[share].how = How::Alone;
    }
    Some(())
}

/// Another rank holds a part of what one does.
fn twice(dice: &mut Dice, states: &mut [State], leaf: usize) -> Option<()> {
    let share = a_share(dice, states, leaf, has_elements)?;
    let rank = dice.below(states.len() as u64) as u32;
    for state in states {
        let shares = shares(state, leaf)?;
        let region = shares[share].boxes.iter().find(|region| !region.is_empty())?.clone();
        shares.push(Share { boxes: vec![region], axis: 0, holders: vec![rank], how: How::Alone });
    }
    Some(())
}

/// All ranks say that it is longer than what they hold of it together.
fn taller(dice: &mut Dice, states: &mut [State], leaf: usize) -> Option<()> {
    let axes = tensor(&mut states[0], leaf).0.shape.len();
    let axis = dice.below(axes as u64) as usize;
    for state in states {
        shares(state, leaf)?;
        *tensor(state, leaf).0.shape.get_mut(axis)? += 1;
    }
    Some(())
}

/// One of the ranks that have the leaf.
fn a_rank(dice: &mut Dice, states: &[State], leaf: usize) -> Option<usize> {
    let ranks: Vec<u32> = states[0].ranks(&states[0].leaves[leaf]).into_iter().collect();
    (ranks.len() > 1).then(|| *dice.pick(&ranks) as usize)
}

/// One rank says that it has another shape.
fn other_shape(dice: &mut Dice, states: &mut [State], leaf: usize) -> Option<()> {
    let rank = a_rank(dice, states, leaf)?;
    let (tensor, held) = tensor(&mut states[rank], leaf);
    let axis = dice.below(tensor.shape.len() as u64) as usize;
    *tensor.shape.get_mut(axis)? += 1;
    let shape = tensor.shape.clone();
    if let Held::Plain { boxes, .. } = held {
        *tensor = Tensor::of(dice, tensor.dtype, shape.clone());
        *boxes = vec![Region::whole(&shape)];
    }
    Some(())
}

/// One rank says that it has another dtype, whose elements may be as long.
fn other_dtype(dice: &mut Dice, states: &mut [State], leaf: usize) -> Option<()> {
    let rank = a_rank(dice, states, leaf)?;
    let (tensor, _) = tensor(&mut states[rank], leaf);
    let dtype = if dice.once_in(2) { Dtype::Float16 } else { Dtype::Int64 };
    let dtype = match tensor.dtype.size() {
        4 if dice.once_in(2) => Dtype::Uint32,
        1 => Dtype::Int8,
        _ => dtype,
    };
    *tensor = Tensor::of(dice, dtype, tensor.shape.clone());
    Some(())
}

/// What is simply there is another value on one rank.
fn other_values(dice: &mut Dice, states: &mut [State], leaf: usize) -> Option<()> {
    let rank = a_rank(dice, states, leaf)?;
    let (tensor, Held::Plain { drifting: false, .. }) = tensor(&mut states[rank], leaf) else { return None };
    let element = dice.below(tensor.whole.len() as u64) as usize;
    *tensor.whole.iter_mut().nth(element)? ^= 1;
    Some(())
}

fn one(seed: u64) {
    let mut dice = Dice::new(seed);
    let dice = &mut dice;
    let world = dice.between(2, 5) as u32;
    let setting = Setting::random(dice, world);
    let mut state = State::new(world);
    let others = dice.below(3);
    state.grow(dice, others, 1 << 10);
    let most_bytes = 1 << dice.between(3, 12);
    let mut whole = Tensor::random(dice, most_bytes);
    while whole.bytes() == 0 {
        whole = Tensor::random(dice, 1 << 8);
    }
    let ranks: Vec<u32> = (0..world).collect();
    let held = if dice.once_in(5) { plain(dice, &whole, &ranks) } else { shared_out(dice, &whole, &ranks) };
    state.add(dice, What::Tensor { tensor: whole, held });
    let leaf = state.leaves.len() - 1;

    let mut bad = vec![state.clone(); world as usize];
    let number = dice.below(DAMAGES.len() as u64) as usize;
    if DAMAGES[number](dice, &mut bad, leaf).is_none() {
        return;
    }
    let disk = SimDisk::new();
    let name = path(&state.leaves[leaf].path).to_string();
    let described =
        || format!("damage {number} of {:#?}, of {state:#?}, by {setting:?}", bad[0].leaves[leaf]);
    let of_rank = |dice: &mut Dice, rank: u32, step| {
        let state = if step == 0 { &bad[rank as usize] } else { &state };
        state.of_rank(dice, rank)
    };
    for (rank, ended) in world::save(dice, &disk, &setting, 2, of_rank).into_iter().enumerate() {
        match &ended[0] {
            Ok(()) => panic!("rank {rank}: {}", described()),
            Err(error) => {
                assert!(error.contains(&format!("`{name}`")), "rank {rank}: {error}: {}", described());
            }
        }
        assert_eq!(ended[1], Ok(()), "rank {rank}: {}", described());
    }
    assert_eq!(world::steps(&disk), ["step_00000001"]);
    Stored::check(&disk, 1, &world::open(&disk, 1), &state);
}

#[test]
fn holes_and_overlaps_between_ranks_are_refused_by_name() {
    cases(1500, one);
}
