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
    let mut assembly = computations.assembly(0, region).unwrap();
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
    let unknown = refuse(Dtype::Int8, Operation::Cast, vec![leaf(0)]);
    assert!(unknown.contains("maps do not compute with int8"), "{unknown}");
    assert!(Computations::new(&Index::default()).assembly(0, Region::whole(&[])).is_none());
}
