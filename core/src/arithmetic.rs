//! Arithmetic on the elements of tensors, for maps that compute.
//!
//! Rounding is to the nearest, ties to even. Elements of at most 32 bits are computed in float32,
//! constants included, and the result is rounded to its dtype. An operation on float64 stays in
//! float64. The products and sums of a merge are float64, in the order of the rank, and rounded
//! once. So an element has the same bits whatever region it is computed in.

use crate::dtype::Dtype;
use crate::provider::{can_cast, cast};
use crate::region::{Dims, Region};

/// Elements that are computed at a time.
const PIECE: usize = 1024;
/// The memory for them, as float64.
const SCRATCH: usize = PIECE * 8;

/// How a tensor is computed from its operands.
#[derive(Clone, Debug, PartialEq)]
pub enum Operation {
    /// The same value everywhere. No operand.
    Fill(f64),
    /// The operand in another dtype.
    Cast,
    /// The operand times a constant.
    Scale(f64),
    /// The operand divided by a constant.
    Divide(f64),
    /// The operand plus a constant.
    Add(f64),
    /// The first operand times the second, which has one element for each block of this shape.
    Dequantise(Dims),
    /// The first operand plus a constant times the product of the other two, which are matrices.
    Merge(f64),
}

/// A region of an operand, as row-major elements.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// Their dtype.
    pub dtype: Dtype,
    /// The region.
    pub region: &'a Region,
    /// The elements.
    pub bytes: &'a [u8],
}

/// True if an operation can take elements of this dtype.
pub fn can_read(dtype: Dtype) -> bool {
    can_cast(dtype, dtype) || matches!(dtype, Dtype::Float8E4m3fn | Dtype::Float8E5m2 | Dtype::Float8E8m0fnu)
}

/// Computes a region of a tensor into `out`, row-major. `false`: a finite value became infinite.
/// The operands have the regions that the operation needs.
pub fn compute(
    operation: &Operation,
    dtype: Dtype,
    region: &Region,
    operands: &[Operand<'_>],
    out: &mut [u8],
) -> bool {
    match (operation, operands) {
        (Operation::Fill(value), _) => fill(*value, dtype, out),
        (Operation::Cast, [x]) => each(x, dtype, (&mut [0; SCRATCH], out), |x| x, |x| x),
        #[expect(clippy::cast_possible_truncation, reason = "constants are rounded to the nearest float32")]
        (Operation::Scale(by), [x]) => {
            let narrow = *by as f32;
            each(x, dtype, (&mut [0; SCRATCH], out), |x| x * narrow, |x| x * by)
        }
        #[expect(clippy::cast_possible_truncation, reason = "constants are rounded to the nearest float32")]
        (Operation::Divide(by), [x]) => {
            let narrow = *by as f32;
            each(x, dtype, (&mut [0; SCRATCH], out), |x| x / narrow, |x| x / by)
        }
        #[expect(clippy::cast_possible_truncation, reason = "constants are rounded to the nearest float32")]
        (Operation::Add(value), [x]) => {
            let narrow = *value as f32;
            each(x, dtype, (&mut [0; SCRATCH], out), |x| x + narrow, |x| x + value)
        }
        (Operation::Dequantise(block), [x, scales]) => dequantise(block, dtype, region, x, scales, out),
        (Operation::Merge(scale), [x, left, right]) => merge(*scale, dtype, x, left, right, out),
        _ => false,
    }
}

fn fill(value: f64, dtype: Dtype, out: &mut [u8]) -> bool {
    let mut element = [0; 16];
    let element = &mut element[..dtype.size()];
    let fits = !can_cast(dtype, dtype) || cast(Dtype::Float64, dtype, &value.to_le_bytes(), element);
    for out in out.chunks_exact_mut(element.len()) {
        out.copy_from_slice(element);
    }
    fits
}

/// Changes each element, in float32 or in float64. `scratch` has [`SCRATCH`] bytes.
fn each(
    x: &Operand<'_>,
    dtype: Dtype,
    (scratch, out): (&mut [u8], &mut [u8]),
    narrow: impl Fn(f32) -> f32,
    wide: impl Fn(f64) -> f64,
) -> bool {
    let is_wide = x.dtype == Dtype::Float64 || dtype == Dtype::Float64;
    let between = if is_wide { Dtype::Float64 } else { Dtype::Float32 };
    let mut fits = true;
    for (source, out) in x.bytes.chunks(PIECE * x.dtype.size()).zip(out.chunks_mut(PIECE * dtype.size())) {
        let values = &mut scratch[..source.len() / x.dtype.size() * between.size()];
        cast(x.dtype, between, source, values);
        if is_wide {
            for bytes in values.as_chunks_mut().0 {
                let before = f64::from_le_bytes(*bytes);
                let value = wide(before);
                fits &= !value.is_infinite() || before.is_infinite();
                *bytes = value.to_le_bytes();
            }
        } else {
            for bytes in values.as_chunks_mut().0 {
                let before = f32::from_le_bytes(*bytes);
                let value = narrow(before);
                fits &= !value.is_infinite() || before.is_infinite();
                *bytes = value.to_le_bytes();
            }
        }
        fits &= cast(between, dtype, values, out);
    }
    fits
}

fn dequantise(
    block: &[u64],
    dtype: Dtype,
    region: &Region,
    x: &Operand<'_>,
    scales: &Operand<'_>,
    out: &mut [u8],
) -> bool {
    let factors = wide(scales);
    let mut scratch = [0; SCRATCH];
    let (Some(&columns), Some(&width)) = (region.extent.last(), block.last()) else { return false };
    let (from, size) = (x.dtype.size(), dtype.size());
    let mut fits = true;
    let mut at = region.offset.clone();
    let rows = x.bytes.chunks_exact(columns as usize * from);
    for (source, out) in rows.zip(out.chunks_exact_mut(columns as usize * size)) {
        let mut row = 0;
        for (axis, &position) in at.iter().enumerate().take(at.len() - 1) {
            row = row * scales.region.extent[axis] + position / block[axis] - scales.region.offset[axis];
        }
        row *= scales.region.extent.last().copied().unwrap_or(1);
        let first = *region.offset.last().unwrap_or(&0);
        let mut begin = first;
        while begin < first + columns {
            let end = (first + columns).min((begin / width + 1) * width);
            let number = row + begin / width - scales.region.offset.last().unwrap_or(&0);
            let Some(&factor) = factors.get(number as usize) else { return false };
            let (a, b) = ((begin - first) as usize, (end - first) as usize);
            let run = Operand { bytes: &source[a * from..b * from], ..*x };
            #[expect(clippy::cast_possible_truncation, reason = "float32 scales, or rounded to it")]
            let narrow = factor as f32;
            let out = (&mut scratch[..], &mut out[a * size..b * size]);
            let fit = each(&run, dtype, out, |x| x * narrow, |x| x * factor);
            // A block whose scale is infinite is no overflow.
            fits &= fit || factor.is_infinite();
            begin = end;
        }
        for axis in (0..at.len() - 1).rev() {
            at[axis] += 1;
            if at[axis] < region.offset[axis] + region.extent[axis] {
                break;
            }
            at[axis] = region.offset[axis];
        }
    }
    fits
}

fn merge(
    scale: f64,
    dtype: Dtype,
    x: &Operand<'_>,
    left: &Operand<'_>,
    right: &Operand<'_>,
    out: &mut [u8],
) -> bool {
    let (Some(&rank), Some(&columns)) = (right.region.extent.first(), right.region.extent.get(1)) else {
        return false;
    };
    let (left, right) = (wide(left), wide(right));
    let (rank, columns) = (rank as usize, columns as usize);
    let mut sums = vec![0.0; columns];
    let mut values = vec![0; columns * 8];
    let mut fits = true;
    let rows = x.bytes.chunks_exact(columns * x.dtype.size());
    let out = out.chunks_exact_mut(columns * dtype.size());
    for ((source, out), left) in rows.zip(out).zip(left.chunks_exact(rank)) {
        sums.fill(0.0);
        for (factor, right) in left.iter().zip(right.chunks_exact(columns)) {
            for (sum, value) in sums.iter_mut().zip(right) {
                *sum += factor * value;
            }
        }
        cast(x.dtype, Dtype::Float64, source, &mut values);
        for (bytes, sum) in values.as_chunks_mut().0.iter_mut().zip(&sums) {
            let before = f64::from_le_bytes(*bytes);
            let value = before + scale * sum;
            fits &= !value.is_infinite() || !before.is_finite() || !sum.is_finite();
            *bytes = value.to_le_bytes();
        }
        fits &= cast(Dtype::Float64, dtype, &values, out);
    }
    fits
}

fn wide(x: &Operand<'_>) -> Vec<f64> {
    let mut bytes = vec![0; x.bytes.len() / x.dtype.size() * 8];
    cast(x.dtype, Dtype::Float64, x.bytes, &mut bytes);
    bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn computed(operation: &Operation, values: &[f32], dtype: Dtype) -> (Vec<u8>, bool) {
        let region = Region::whole(&[values.len() as u64]);
        let bytes = of(values);
        let operand = Operand { dtype: Dtype::Float32, region: &region, bytes: &bytes };
        let mut out = vec![0; values.len() * dtype.size()];
        let fits = compute(operation, dtype, &region, &[operand], &mut out);
        (out, fits)
    }

    #[test]
    fn elements_round_once_to_their_dtype() {
        let values: Vec<f32> = (0..3000_u16).map(|n| f32::from(n) * 0.37 - 500.0).collect();
        let expected: Vec<f32> = values.iter().map(|x| x * 0.1_f32).collect();
        assert_eq!(computed(&Operation::Scale(0.1), &values, Dtype::Float32), (of(&expected), true));
        let expected: Vec<u8> = values.iter().flat_map(|x| (f64::from(*x) * 0.1).to_le_bytes()).collect();
        assert_eq!(computed(&Operation::Scale(0.1), &values, Dtype::Float64), (expected, true));
    }

    #[test]
    fn only_a_finite_value_that_became_infinite_overflows() {
        for (values, by, fits) in
            [([1e30, 1.0], 1e30, false), ([f32::INFINITY, 1.0], 1e30, true), ([f32::NAN, 1.0], 2.0, true)]
        {
            assert_eq!(computed(&Operation::Scale(by), &values, Dtype::Float32).1, fits, "{values:?}");
        }
        assert!(!computed(&Operation::Cast, &[65520.0], Dtype::Float16).1);
    }

    #[test]
    fn every_float8_has_its_value() {
        let codes: Vec<u8> = (0..=255).collect();
        let mut out = vec![0; 256 * 4];
        cast(Dtype::Float8E4m3fn, Dtype::Float32, &codes, &mut out);
        for (code, bytes) in codes.iter().zip(out.as_chunks().0) {
            let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7));
            let size = match exponent {
                0 => fraction * f32::powi(2.0, -9),
                _ => (8.0 + fraction) * f32::powi(2.0, exponent - 10),
            };
            let expected = if code & 0x7F == 0x7F { f32::NAN } else { size };
            let value = f32::from_le_bytes(*bytes);
            let is_same = value.abs().to_bits() == expected.to_bits();
            assert!(is_same || (value.is_nan() && expected.is_nan()), "{code:#x}: {value}");
            assert_eq!(value.is_sign_negative(), code >> 7 == 1, "{code:#x}");
        }
        cast(Dtype::Float8E5m2, Dtype::Float32, &codes, &mut out);
        let largest = f32::from_le_bytes(out.as_chunks().0[0x7B]);
        assert!((largest - 57344.0).abs() < f32::EPSILON);
    }
}
