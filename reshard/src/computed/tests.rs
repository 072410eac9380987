use proptest::prelude::*;
use smallvec::smallvec;
use stepwell_core::format::index::{ChunkRegion, Index};
use stepwell_core::leaf_path::Component;

use super::*;
use crate::mapping::{MappedLeaf, MappedPiece, MappedSource, mapped};
use crate::read_plan::copies;
use crate::testing::{Stored, execute};

/// A whole tensor, perhaps with its axes the other way round.
fn whole(source: MappedSource, shape: &[u64], turned: bool) -> MappedTensor {
    let mut axes: SmallVec<[MappedAxis; 4]> =
        (0..shape.len() as u32).map(|axis| MappedAxis { stored: Some(axis), step: 1 }).collect();
    let mut own: Dims = shape.into();
    if turned {
        axes.reverse();
        own.reverse();
    }
    let first = smallvec![0; shape.len()];
    MappedTensor {
        pieces: vec![MappedPiece { region: Region::whole(&own), source, first, axes }],
        shape: own,
    }
}

fn stored(shapes: &[[u64; 2]]) -> Stored {
    let mut stored = Stored::new(2);
    for shape in shapes {
        let half = shape[0] / 2;
        let part =
            |from, n| ChunkRegion::Box(Region { offset: smallvec![from, 0], extent: smallvec![n, shape[1]] });
        stored.push(Dtype::Int8, shape, vec![part(0, half), part(half, shape[0] - half)], 8);
        let Some(stepwell_core::format::index::LeafRecord::Tensor(record)) = stored.index.leaves.last_mut()
        else {
            panic!("a tensor")
        };
        // Any byte is a number of this dtype, or NaN.
        record.dtype = Dtype::Float8E4m3fn;
    }
    stored.finish()
}

/// A merge of transposed weights, scaled blocks of it, and a constant: one leaf of three tensors.
fn computations(stored: &Stored) -> Computations {
    let weight = |leaf, shape, turned| whole(MappedSource::Stored(leaf), shape, turned);
    let tensor = |operation, operands| ComputedTensor {
        dtype: Dtype::Float32,
        shape: smallvec![12, 10],
        operation,
        operands,
    };
    let previous = |number| whole(MappedSource::Computed(number), &[12, 10], false);
    let computed = [
        tensor(
            Operation::Merge(0.5),
            vec![weight(0, &[10, 12], true), weight(1, &[12, 3], false), weight(2, &[3, 10], false)],
        ),
        tensor(Operation::Dequantise(smallvec![5, 4]), vec![previous(0), weight(3, &[3, 3], false)]),
        tensor(Operation::Add(1.0), vec![previous(1)]),
    ];
    let mut tree = Tree::new();
    tree.push_container(None, None, ContainerKind::Dict);
    tree.push_leaf(Some(0), Some(Component::Key("m".into())));
    let leaf = MappedLeaf::Tensor(whole(MappedSource::Computed(2), &[12, 10], true));
    mapped(&stored.index, tree, &[leaf], &computed).unwrap().1.unwrap()
}

fn evaluate(stored: &Stored, computations: &Computations, region: Region) -> Vec<u8> {
    evaluate_leaf(stored, computations, 0, region)
}

fn evaluate_leaf(stored: &Stored, computations: &Computations, leaf: u32, region: Region) -> Vec<u8> {
    let mut assembly = computations.assembly(leaf, region).unwrap();
    assembly.for_each_read(&mut |reads, target| {
        let mut into = vec![target.clone()];
        execute(stored, &copies(&computations.index, reads).unwrap(), &mut into);
        *target = into.remove(0);
    });
    assembly.bytes().unwrap().into_owned()
}

const SHAPES: [[u64; 2]; 4] = [[10, 12], [12, 3], [3, 10], [3, 3]];

proptest! {
    #[test]
    fn cells_cover_a_region_once_with_the_bits_of_the_whole(
        offset in (0_u64..10, 0_u64..12),
        extent in (0_u64..=10, 0_u64..=12),
        limit in 1_u64..4000,
    ) {
        let stored = stored(&SHAPES);
        let computations = computations(&stored);
        let all = evaluate(&stored, &computations, Region::whole(&[10, 12]));
        let region = Region {
            offset: smallvec![offset.0, offset.1],
            extent: smallvec![extent.0.min(10 - offset.0), extent.1.min(12 - offset.1)],
        };
        let mut found = vec![None; 120];
        for cell in computations.cells(0, region.clone(), limit) {
            let needed = computations.assembly(0, cell.clone()).unwrap().bytes_needed();
            prop_assert!(needed <= limit || cell.volume() == Some(1), "{needed} of {limit}");
            let bytes = evaluate(&stored, &computations, cell.clone());
            for (number, value) in bytes.as_chunks::<4>().0.iter().enumerate() {
                let (row, column) = (number as u64 / cell.extent[1], number as u64 % cell.extent[1]);
                let at = (cell.offset[0] + row) * 12 + cell.offset[1] + column;
                prop_assert!(found[at as usize].replace(*value).is_none());
            }
        }
        for (at, (found, value)) in found.iter().zip(all.as_chunks::<4>().0).enumerate() {
            let one = Region { offset: smallvec![at as u64 / 12, at as u64 % 12], extent: smallvec![1, 1] };
            let wanted = one.intersect(&region).is_some_and(|shared| !shared.is_empty());
            prop_assert_eq!(*found, wanted.then_some(*value));
        }
    }
}

/// A tensor of boxes: elements of a doubled weight, `steps` apart from `first` on, perhaps with the
/// axes the other way round, and below them two rows of a constant. Before it, the doubled weight.
fn strided(
    stored: &Stored,
    first: [u64; 2],
    steps: [u64; 2],
    extent: [u64; 2],
    turned: bool,
) -> Computations {
    let tensor = |operation, operands| ComputedTensor {
        dtype: Dtype::Float32,
        shape: smallvec![10, 12],
        operation,
        operands,
    };
    let computed = [
        tensor(Operation::Scale(2.0), vec![whole(MappedSource::Stored(0), &[10, 12], false)]),
        tensor(Operation::Fill(3.0), Vec::new()),
    ];
    let mut axes = [0, 1].map(|axis| MappedAxis { stored: Some(axis), step: steps[axis as usize] });
    if turned {
        axes.reverse();
    }
    let constant = [0, 1].map(|axis| MappedAxis { stored: Some(axis), step: 1 });
    let piece = |from, rows, number, first: [u64; 2], axes: [MappedAxis; 2]| MappedPiece {
        region: Region { offset: smallvec![from, 0], extent: smallvec![rows, extent[1]] },
        source: MappedSource::Computed(number),
        first: first.as_slice().into(),
        axes: axes.into_iter().collect(),
    };
    let pieces = vec![piece(0, extent[0], 0, first, axes), piece(extent[0], 2, 1, [0, 0], constant)];
    let boxes = MappedTensor { shape: smallvec![extent[0] + 2, extent[1]], pieces };
    let mut tree = Tree::new();
    tree.push_container(None, None, ContainerKind::Dict);
    for name in ["all", "boxes"] {
        tree.push_leaf(Some(0), Some(Component::Key(name.into())));
    }
    let all = whole(MappedSource::Computed(0), &[10, 12], false);
    mapped(&stored.index, tree, &[MappedLeaf::Tensor(all), MappedLeaf::Tensor(boxes)], &computed)
        .unwrap()
        .1
        .unwrap()
}

proptest! {
    #[test]
    fn boxes_have_the_elements_that_they_name(
        first in [0_u64..10, 0_u64..12],
        steps in [1_u64..5, 1_u64..5],
        wanted in [1_u64..=10, 1_u64..=10],
        turned: bool,
        cut in [0_u64..12, 0_u64..10],
    ) {
        let stored = stored(&SHAPES);
        let axis = |d: usize| if turned { 1 - d } else { d };
        let fitting = |d: usize| (([10, 12][axis(d)] - 1 - first[axis(d)]) / steps[axis(d)] + 1).min(wanted[d]);
        let extent = [fitting(0), fitting(1)];
        let computations = strided(&stored, first, steps, extent, turned);
        let all = evaluate(&stored, &computations, Region::whole(&[10, 12]));
        let offset = [cut[0].min(extent[0] + 1), cut[1].min(extent[1] - 1)];
        let region = Region {
            offset: offset.as_slice().into(),
            extent: smallvec![extent[0] + 2 - offset[0], extent[1] - offset[1]],
        };
        let bytes = evaluate_leaf(&stored, &computations, 1, region.clone());
        for (number, found) in bytes.as_chunks::<4>().0.iter().enumerate() {
            let row = offset[0] + number as u64 / region.extent[1];
            let at = [row, offset[1] + number as u64 % region.extent[1]];
            let mut source = first;
            for d in 0..2 {
                source[axis(d)] += at[d] * steps[axis(d)];
            }
            let element = (source[0] * 12 + source[1]) as usize;
            let value = if row < extent[0] { all.as_chunks::<4>().0[element] } else { 3_f32.to_le_bytes() };
            prop_assert_eq!(*found, value, "{:?}", at);
        }
    }
}

#[test]
fn memory_counts_operands_and_wide_scales() {
    let stored = stored(&SHAPES);
    let doubled = strided(&stored, [0, 0], [1, 1], [10, 12], false);
    let needed = |computations: &Computations, leaf, region| {
        computations.assembly(leaf, region).unwrap().bytes_needed()
    };
    // The leaf and the product are float32, the weight has one byte per element.
    assert_eq!(needed(&doubled, 0, Region::whole(&[10, 12])), 120 * (4 + 4 + 1));
    assert_eq!(needed(&doubled, 1, Region::whole(&[12, 12])), 144 * 4 + 120 * (4 + 1) + 24 * 4);
    // A merge of one element reads a row and a column of three. They are float64 while used.
    let merged = computations(&stored);
    let one = Region { offset: smallvec![4, 5], extent: smallvec![1, 1] };
    let [sum, scaled, merge] = [4 + 4, 4 + 4 + 1 + 8, 4 + 4 + 1 + 6 + 6 * 8];
    assert_eq!(needed(&merged, 0, one), sum + scaled + merge);
}

#[test]
fn the_fingerprint_names_the_computation() {
    let stored = stored(&SHAPES);
    let made = |first| strided(&stored, first, [1, 2], [2, 2], false).fingerprint();
    assert_eq!(made([0, 0]), made([0, 0]));
    assert_ne!(made([0, 0]), made([0, 1]));
    assert_ne!(made([0, 0]), computations(&stored).fingerprint());
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let stored = stored(&SHAPES);
    let leaf = |leaf: u32| whole(MappedSource::Stored(leaf), &SHAPES[leaf as usize], false);
    let refuse = |dtype, operation: Operation, operands| {
        let tensor = ComputedTensor { dtype, shape: smallvec![10, 12], operation, operands };
        mapped(&stored.index, Tree::new(), &[], &[tensor]).unwrap_err().to_string()
    };
    for (operation, operands) in [
        (Operation::Cast, vec![leaf(1)]),
        (Operation::Scale(2.0), vec![]),
        (Operation::Dequantise(smallvec![5, 4]), vec![leaf(0), leaf(3)]),
        (Operation::Dequantise(smallvec![0, 4]), vec![leaf(0), leaf(3)]),
        (Operation::Merge(1.0), vec![leaf(0), leaf(1), leaf(2)]),
    ] {
        let error = refuse(Dtype::Float32, operation.clone(), operands);
        assert!(error.contains("of operands of shapes"), "{operation:?}: {error}");
    }
    let later =
        refuse(Dtype::Float32, Operation::Cast, vec![whole(MappedSource::Computed(0), &[10, 12], false)]);
    assert!(later.contains("computed tensor 0 is not before it"), "{later}");
    let filled = ComputedTensor {
        dtype: Dtype::Int8,
        shape: smallvec![2],
        operation: Operation::Fill(0.0),
        operands: Vec::new(),
    };
    mapped(&stored.index, Tree::new(), &[], &[filled]).expect("zeros are of any dtype");
    let unknown = refuse(Dtype::Int8, Operation::Cast, vec![leaf(0)]);
    assert!(unknown.contains("maps do not compute with int8"), "{unknown}");
    assert!(Computations::new(&Index::default()).assembly(0, Region::whole(&[])).is_none());
}
