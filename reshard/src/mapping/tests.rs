use proptest::prelude::*;
use stepwell_core::dtype::Dtype;
use stepwell_core::leaf_path::Component;
use stepwell_core::region::volume;
use stepwell_core::tree::ContainerKind;

use super::*;
use crate::read_plan::{Request, copies};
use crate::testing::{Stored, checkpoint, execute, for_each_element};

/// A tree of one dict with so many leaves.
fn flat_tree(leaves: usize) -> Tree {
    let mut tree = Tree::new();
    tree.push_container(None, None, ContainerKind::Dict);
    for leaf in 0..leaves {
        tree.push_leaf(Some(0), Some(Component::Key(format!("m{leaf}").into())));
    }
    tree
}

/// Reads a whole tensor of an index over the files of `stored`.
fn read(stored: &Stored, index: &Index, leaf: u32) -> Result<Vec<u8>> {
    let LeafRecord::Tensor(record) = &index.leaves[leaf as usize] else { panic!("a tensor") };
    let bytes = volume(&record.shape).unwrap() as usize * record.dtype.size();
    let copies = copies(index, &[Request::whole(leaf, record, 0)])?;
    let mut into = vec![vec![0xAA; bytes]];
    execute(stored, &copies, &mut into);
    Ok(into.remove(0))
}

/// A piece of a stored tensor, chosen by fractions: first element, elements and step along each
/// axis, and the order of the axes.
fn piece(
    shape: &[u64],
    choices: &[(prop::sample::Index, prop::sample::Index, u64)],
    reversed: bool,
    stacked: bool,
) -> (MappedPiece, Dims) {
    let (mut first, mut counts, mut steps) = (Dims::new(), Vec::new(), Vec::new());
    for (&n, (from, count, step)) in shape.iter().zip(choices) {
        let from = from.index(n.max(1) as usize) as u64;
        let most = (n - from.min(n)).div_ceil(*step);
        first.push(from);
        counts.push(if n == 0 { 0 } else { count.index(most as usize) as u64 + 1 });
        steps.push(*step);
    }
    let mut order: Vec<usize> = (0..shape.len()).collect();
    if reversed {
        order.reverse();
    }
    let mut axes: SmallVec<[MappedAxis; 4]> =
        order.iter().map(|&d| MappedAxis { stored: Some(d as u32), step: steps[d] }).collect();
    let mut extent: Dims = order.iter().map(|&d| counts[d]).collect();
    if stacked {
        axes.insert(0, MappedAxis { stored: None, step: 1 });
        extent.insert(0, 1);
    }
    let region = Region::whole(&extent);
    (MappedPiece { region, source: MappedSource::Stored(0), first, axes }, extent)
}

proptest! {
    #[test]
    fn a_piece_has_the_elements_that_it_names(
        stored in checkpoint(),
        leaf in any::<prop::sample::Index>(),
        choices in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 1_u64..4), 4),
        reversed in any::<bool>(),
        stacked in any::<bool>(),
    ) {
        let leaf = leaf.index(stored.tensors.len()) as u32;
        let tensor = stored.tensor(leaf);
        let itemsize = tensor.dtype.size();
        let (mut piece, extent) = piece(&tensor.shape, &choices, reversed, stacked);
        piece.source = MappedSource::Stored(leaf);
        let mut expected = Vec::new();
        let strides = stepwell_core::region::row_major_strides(&tensor.shape);
        for_each_element(&extent, &Region::whole(&extent), |element| {
            let mut rest = element as u64;
            let mut source: u64 = piece.first.iter().zip(&strides).map(|(at, stride)| at * stride).sum();
            for d in (0..extent.len()).rev() {
                if let Some(stored) = piece.axes[d].stored {
                    source += rest % extent[d] * piece.axes[d].step * strides[stored as usize];
                }
                rest /= extent[d];
            }
            let at = source as usize * itemsize;
            expected.extend_from_slice(&stored.tensors[leaf as usize][at..at + itemsize]);
        });
        let wanted = MappedLeaf::Tensor(MappedTensor { shape: extent, pieces: vec![piece] });
        let (index, _) = mapped(&stored.index, flat_tree(1), &[wanted], &[]).unwrap();
        prop_assert_eq!(read(&stored, &index, 0).unwrap(), expected);
    }

    #[test]
    fn split_and_concatenated_again_is_the_same(
        stored in checkpoint(),
        cut in any::<prop::sample::Index>(),
        axis in any::<prop::sample::Index>(),
    ) {
        for leaf in 0..stored.tensors.len() as u32 {
            let shape = stored.tensor(leaf).shape.clone();
            if shape.is_empty() {
                continue;
            }
            let axis = axis.index(shape.len());
            let cut = cut.index(shape[axis] as usize + 1) as u64;
            let part = |from: u64, until: u64, leaf: u32, at: u64| {
                let mut region = Region::whole(&shape);
                let mut first = Dims::from_elem(0, shape.len());
                (region.offset[axis], region.extent[axis], first[axis]) = (at, until - from, from);
                let axes = (0..shape.len() as u32).map(|d| MappedAxis { stored: Some(d), step: 1 });
                MappedPiece { region, source: MappedSource::Stored(leaf), first, axes: axes.collect() }
            };
            let half = |from, until| {
                let piece = part(from, until, leaf, 0);
                MappedLeaf::Tensor(MappedTensor { shape: piece.region.extent.clone(), pieces: vec![piece] })
            };
            let halves = [half(0, cut), half(cut, shape[axis])];
            let (split, _) = mapped(&stored.index, flat_tree(2), &halves, &[]).unwrap();
            let pieces = vec![part(0, cut, 0, 0), part(0, shape[axis] - cut, 1, cut)];
            let joined = MappedLeaf::Tensor(MappedTensor { shape: shape.clone(), pieces });
            let (index, _) = mapped(&split, flat_tree(1), &[joined], &[]).unwrap();
            prop_assert_eq!(&read(&stored, &index, 0).unwrap(), &stored.tensors[leaf as usize]);
        }
    }
}

type Damage = fn(&mut MappedPiece);

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let mut stored = Stored::new(1);
    stored.push(Dtype::Float32, &[4, 6], vec![ChunkRegion::Box(Region::whole(&[4, 6]))], 8);
    stored.push(Dtype::Int8, &[4], vec![ChunkRegion::Box(Region::whole(&[4]))], 8);
    let stored = stored.finish();
    let axis = |stored| MappedAxis { stored, step: 1 };
    let whole = MappedPiece {
        region: Region::whole(&[4, 6]),
        source: MappedSource::Stored(0),
        first: Dims::from_elem(0, 2),
        axes: [axis(Some(0)), axis(Some(1))].into_iter().collect(),
    };
    let cases: [(&str, Damage); 7] = [
        ("ends at element [4, 5]", |piece| piece.first[0] = 1),
        ("is not inside the shape", |piece| piece.region.offset[1] = 1),
        ("followed twice", |piece| piece.axes[0].stored = Some(1)),
        ("or is none", |piece| piece.axes[0].stored = Some(2)),
        ("follows no stored axis", |piece| piece.axes[0].stored = None),
        ("other dimensions", |piece| piece.axes.truncate(1)),
        ("further than 64 bits", |piece| piece.axes[1].step = u64::MAX),
    ];
    for (says, damage) in cases {
        let mut piece = whole.clone();
        damage(&mut piece);
        let wanted = MappedTensor { shape: Dims::from_slice(&[4, 6]), pieces: vec![piece] };
        let error = mapped(&stored.index, flat_tree(1), &[MappedLeaf::Tensor(wanted)], &[]).unwrap_err();
        assert!(error.to_string().contains(says) && error.to_string().contains("`m0`"), "{says}: {error}");
    }
    let other = MappedPiece {
        region: Region { offset: Dims::from_slice(&[0, 0]), extent: Dims::from_slice(&[4, 1]) },
        source: MappedSource::Stored(1),
        first: Dims::from_slice(&[0]),
        axes: [axis(Some(0)), axis(None)].into_iter().collect(),
    };
    let mixed = MappedTensor { shape: Dims::from_slice(&[4, 6]), pieces: vec![whole, other] };
    let error = mapped(&stored.index, flat_tree(1), &[MappedLeaf::Tensor(mixed)], &[]).unwrap_err();
    assert!(error.to_string().contains("stored as int8, another part of it as float32"), "{error}");
    let later = mapped(&stored.index, flat_tree(1), &[MappedLeaf::Tie(0)], &[]).unwrap_err();
    assert!(later.to_string().contains("not before it"), "{later}");
}
