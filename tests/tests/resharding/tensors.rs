//! Whole tensors, as the oracle has them (ndarray), and memory that holds boxes of them anywhere.

use ndarray::{ArrayD, ArrayViewD, Axis, IxDyn, Slice};
use stepwell_core::dtype::Dtype;
use stepwell_core::region::{Dims, Region, volume};
use stepwell_reshard::layout::Place;

use crate::dice::Dice;

/// Bytes of an array's elements: one more dimension than the array, of the bytes of one element.
/// [`NOTHING`] where the array has no value.
pub type Values = ArrayD<i32>;
pub const NOTHING: i32 = -1;

const DTYPES: [Dtype; 8] = [
    Dtype::Bool,
    Dtype::Float8E4m3fn,
    Dtype::Bfloat16,
    Dtype::Uint16,
    Dtype::Float32,
    Dtype::Int32,
    Dtype::Float64,
    Dtype::Complex128,
];

/// A logical tensor.
#[derive(Clone)]
pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub whole: Values,
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.shape)
    }
}

impl Tensor {
    /// Of at most so many bytes.
    pub fn random(dice: &mut Dice, most_bytes: u64) -> Self {
        let dtype = *dice.pick(&DTYPES);
        let mut shape = vec![1; dice.below(6) as usize];
        let mut left = most_bytes / dtype.size() as u64;
        let longest = *dice.pick(&[3, 7, 40, 1 << 20]);
        let mut order: Vec<usize> = (0..shape.len()).collect();
        dice.shuffle(&mut order);
        for d in order {
            shape[d] = if dice.once_in(40) { 0 } else { dice.between(1, left.clamp(1, longest)) };
            left /= shape[d].max(1);
        }
        Self::of(dice, dtype, shape)
    }

    /// Of any values.
    pub fn of(dice: &mut Dice, dtype: Dtype, shape: Vec<u64>) -> Self {
        let mut tensor = Self { dtype, shape, whole: Values::zeros(IxDyn(&[0])) };
        tensor.set_values(dice);
        tensor
    }

    pub fn itemsize(&self) -> u64 {
        self.dtype.size() as u64
    }

    pub fn bytes(&self) -> u64 {
        volume(&self.shape).unwrap() * self.itemsize()
    }

    /// Gives it other values, any bit patterns.
    pub fn set_values(&mut self, dice: &mut Dice) {
        let mut bytes = Vec::with_capacity(self.bytes() as usize + 8);
        while bytes.len() < self.bytes() as usize {
            bytes.extend(dice.number().to_le_bytes().map(i32::from));
        }
        bytes.truncate(self.bytes() as usize);
        self.whole = Values::from_shape_vec(dimensions(&self.shape, self.itemsize()), bytes).unwrap();
    }

    /// An array that holds the number of each element, row-major, instead of its bytes.
    pub fn numbers(&self) -> Values {
        let elements = 0..i32::try_from(self.bytes() / self.itemsize()).unwrap();
        Values::from_shape_vec(dimensions(&self.shape, 1), elements.collect()).unwrap()
    }
}

/// Values in an array of another shape: the common part.
pub fn resized(whole: &Values, shape: &[u64]) -> Values {
    let (&itemsize, extent) = whole.shape().split_last().unwrap();
    let mut other = nothing(shape, itemsize as u64);
    let both = Region {
        offset: Dims::from_elem(0, shape.len()),
        extent: shape.iter().zip(extent).map(|(&a, &b)| a.min(b as u64)).collect(),
    };
    if !both.is_empty() {
        other.slice_each_axis_mut(|axis| range(&both, axis.axis)).assign(&slice(whole, &both));
    }
    other
}

/// The values of a box of an array, and nothing around it.
pub fn inside(whole: &Values, region: &Region) -> Values {
    let mut other = Values::from_elem(whole.raw_dim(), NOTHING);
    other.slice_each_axis_mut(|axis| range(region, axis.axis)).assign(&slice(whole, region));
    other
}

fn dimensions(shape: &[u64], itemsize: u64) -> IxDyn {
    IxDyn(&shape.iter().chain([&itemsize]).map(|&n| n as usize).collect::<Vec<_>>())
}

fn range(region: &Region, axis: Axis) -> Slice {
    let Some(&first) = region.offset.get(axis.index()) else { return Slice::from(..) };
    Slice::from(first as usize..(first + region.extent[axis.index()]) as usize)
}

/// A box of an array.
pub fn slice<'a>(whole: &'a Values, region: &Region) -> ArrayViewD<'a, i32> {
    whole.slice_each_axis(|axis| range(region, axis.axis))
}

/// An array of no values.
pub fn nothing(shape: &[u64], itemsize: u64) -> Values {
    Values::from_elem(dimensions(shape, itemsize), NOTHING)
}

/// Elements of a flattened array.
pub fn run(values: &Values, start: u64, len: u64) -> Values {
    let itemsize = *values.shape().last().unwrap() as u64;
    let elements = values.iter().skip((start * itemsize) as usize).take((len * itemsize) as usize);
    Values::from_shape_vec(dimensions(&[len], itemsize), elements.copied().collect()).unwrap()
}

/// Boxes that tile a region: it is cut in two, one of the parts is, and so on, anywhere along any
/// axis. Now and then one is empty.
pub fn tiles(dice: &mut Dice, region: &Region, parts: u64) -> Vec<Region> {
    let mut boxes = vec![region.clone()];
    for _ in 1..parts {
        let at = dice.below(boxes.len() as u64) as usize;
        if boxes[at].ndim() > 0 {
            let axis = dice.below(boxes[at].ndim() as u64) as usize;
            if boxes[at].extent[axis] > 1 || dice.once_in(20) {
                let [one, other] = cut(dice, &boxes[at], axis);
                boxes[at] = one;
                boxes.push(other);
            }
        }
    }
    boxes
}

/// A box as two, cut along an axis; where it can be, neither of them is empty.
pub fn cut(dice: &mut Dice, region: &Region, axis: usize) -> [Region; 2] {
    let n = region.extent[axis];
    let border = if n > 1 { dice.between(1, n - 1) } else { dice.below(n + 1) };
    let (mut one, mut other) = (region.clone(), region.clone());
    one.extent[axis] = border;
    other.offset[axis] += border;
    other.extent[axis] -= border;
    [one, other]
}

/// Any box of a shape.
pub fn any_box(dice: &mut Dice, shape: &[u64]) -> Region {
    let mut region = Region::whole(shape);
    for (d, &n) in shape.iter().enumerate() {
        if dice.once_in(2) {
            let borders = dice.borders(n, 3);
            (region.offset[d], region.extent[d]) = (borders[1], borders[2] - borders[1]);
        }
    }
    region
}

/// A buffer of a process. Bytes without a box are padding of any value.
#[derive(Clone, Default)]
pub struct Memory {
    pub bytes: Vec<u8>,
    /// Room between the elements of boxes: extent, place, bytes between.
    gaps: Vec<(Vec<u64>, Place, u64)>,
}

impl Memory {
    fn grow(&mut self, dice: &mut Dice, bytes: u64) -> u64 {
        let before = dice.below(9);
        let first = self.bytes.len() as u64 + before;
        let end = (first + bytes + dice.below(5)) as usize;
        let filler = dice.number().to_le_bytes();
        self.bytes.extend((self.bytes.len()..end).map(|at| filler[at % 8] ^ (at / 8) as u8));
        first
    }

    /// Room for bytes one after the other.
    pub fn flat(&mut self, dice: &mut Dice, bytes: u64) -> u64 {
        self.grow(dice, bytes)
    }

    /// Room for a box: dimensions in any order, forwards or backwards, elements and rows apart; or
    /// between the elements of another one.
    pub fn place(&mut self, dice: &mut Dice, extent: &[u64], itemsize: u64) -> Place {
        let fits = |(other, _, room): &(Vec<u64>, Place, u64)| other == extent && *room >= itemsize;
        if let Some(at) = self.gaps.iter().position(fits) {
            return self.gaps.swap_remove(at).1;
        }
        let gap = if dice.once_in(4) { dice.between(1, 16) } else { 0 };
        let mut strides: Dims<i64> = Dims::from_elem(0, extent.len());
        let (mut size, mut first) = (itemsize + gap, 0);
        for &d in dice.order(extent.len()).iter().rev() {
            let apart = if dice.once_in(5) { dice.below(3) } else { 0 };
            strides[d] = i64::try_from(size).unwrap();
            if dice.once_in(6) {
                first += size * extent[d].saturating_sub(1);
                strides[d] = -strides[d];
            }
            size *= extent[d] + apart;
        }
        let offset = self.grow(dice, size) + if extent.contains(&0) { 0 } else { first };
        if gap > 0 && !extent.contains(&0) {
            let between = Place { offset: offset + itemsize, strides: strides.clone() };
            self.gaps.push((extent.to_vec(), between, gap));
        }
        Place { offset, strides }
    }

    /// Puts values where a box of them lies.
    pub fn put(&mut self, place: &Place, values: &ArrayViewD<'_, i32>) {
        let (&itemsize, extent) = values.shape().split_last().unwrap();
        let elements = values.lanes(Axis(extent.len()));
        for (mut number, element) in elements.into_iter().enumerate() {
            let mut at = place.offset;
            for (&n, &stride) in extent.iter().zip(&place.strides).rev() {
                at = at.checked_add_signed(i64::try_from(number % n).unwrap() * stride).unwrap();
                number /= n;
            }
            if element[0] != NOTHING {
                let bytes = element.iter().map(|&byte| u8::try_from(byte).unwrap());
                self.bytes[at as usize..][..itemsize].iter_mut().zip(bytes).for_each(|(to, byte)| *to = byte);
            }
        }
    }
}
