//! A process's own array of a tensor: boxes of it one behind the other, between each other,
//! transposed, with padding. Fused and interleaved weights are such, and what ZeRO and FSDP1
//! flatten.

use ndarray::{Axis, Slice};
use stepwell_core::region::{Dims, Region};
use stepwell_reshard::layout::{Place, Segment};

use crate::dice::Dice;
use crate::tensors::{Values, nothing, slice};

/// See the module documentation.
#[derive(Clone, Debug)]
pub struct Local {
    pub shape: Vec<u64>,
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug)]
struct Piece {
    /// In the tensor.
    region: Region,
    /// In the array: the first place along each of its dimensions, and the steps.
    first: Vec<u64>,
    step: Vec<u64>,
    /// For each dimension of the array, that of the tensor.
    order: Vec<usize>,
}

impl Local {
    /// An array of these boxes, which differ along one axis at most.
    pub fn new(dice: &mut Dice, boxes: &[Region], axis: usize) -> Self {
        let dimensions = boxes[0].ndim();
        let order = dice.order(dimensions);
        let mut pieces: Vec<Piece> = Vec::new();
        let mut shape = boxes[0].extent.to_vec();
        let mut first = vec![0; dimensions];
        for d in 0..dimensions {
            if dice.once_in(8) {
                first[d] = dice.below(3);
                shape[d] += first[d] + dice.below(3);
            }
        }
        let step = vec![1; dimensions];
        let mut ordered = boxes.to_vec();
        dice.shuffle(&mut ordered);
        if dimensions > 0 {
            let lengths: Vec<u64> = ordered.iter().map(|one| one.extent[axis]).collect();
            let ways = ordered.len() as u64;
            // As long as each other, or an element longer where they come first.
            let alike = lengths.is_sorted_by(|one, other| one >= other)
                && lengths[0] <= lengths[ordered.len() - 1] + 1;
            let apart = if alike && dice.once_in(2) { ways + dice.below(2) } else { 1 };
            let mut at = first[axis];
            for (number, region) in ordered.into_iter().enumerate() {
                let (mut first, mut step) = (first.clone(), step.clone());
                step[axis] = apart;
                first[axis] = if apart > 1 { first[axis] + number as u64 } else { at };
                at += region.extent[axis];
                pieces.push(Piece { region, first, step, order: order.clone() });
            }
            shape[axis] = if apart > 1 {
                first[axis] + apart * lengths[0]
            } else {
                at + shape[axis] - boxes[0].extent[axis]
            };
        } else {
            pieces.push(Piece { region: ordered.remove(0), first, step, order: order.clone() });
        }
        for piece in &mut pieces {
            piece.first = order.iter().map(|&d| piece.first[d]).collect();
            piece.step = order.iter().map(|&d| piece.step[d]).collect();
        }
        Self { shape: order.iter().map(|&d| shape[d]).collect(), pieces }
    }

    /// Its part of a tensor with these values.
    pub fn values(&self, whole: &Values) -> Values {
        let mut local = nothing(&self.shape, *whole.shape().last().unwrap() as u64);
        for Piece { region, first, step, order } in
            self.pieces.iter().filter(|piece| !piece.region.is_empty())
        {
            let axes: Vec<usize> = order.iter().copied().chain([order.len()]).collect();
            let values = slice(whole, region).permuted_axes(axes);
            let places = |axis: Axis| {
                let Some(&first) = first.get(axis.index()) else { return Slice::from(..) };
                let (step, n) = (step[axis.index()], values.len_of(axis) as u64);
                Slice::new(first as isize, Some((first + (n - 1) * step + 1) as isize), step as isize)
            };
            local.slice_each_axis_mut(|axis| places(axis.axis)).assign(&values);
        }
        local
    }

    /// The same, as the planner is told: from byte `offset` on.
    pub fn layout(&self, itemsize: u64, offset: u64) -> Vec<Segment> {
        let steps = Place::row_major(&self.shape, itemsize).strides;
        let segment = |piece: &Piece| {
            let mut strides: Dims<i64> = Dims::from_elem(0, self.shape.len());
            let mut at = offset;
            for (d, &axis) in piece.order.iter().enumerate() {
                strides[axis] = steps[d] * piece.step[d].cast_signed();
                at += steps[d].cast_unsigned() * piece.first[d];
            }
            Segment { region: piece.region.clone(), place: Place { offset: at, strides } }
        };
        self.pieces.iter().filter(|piece| !piece.region.is_empty()).map(segment).collect()
    }

    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}
