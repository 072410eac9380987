//! A leaf that is stored in another floating-point dtype than its array has. The cast happens piece
//! by piece during capture, so it needs no second copy of the array.

use std::sync::Arc;

use super::{CaptureTiming, Fill, StateProvider};
use crate::dtype::Dtype;
use crate::region::Region;
use crate::staging::{Filling, Slot};
use crate::{Error, Result};

/// Elements that are cast at a time.
const PIECE: usize = 2048;
/// The widest element.
const WIDEST: usize = 8;

/// Casts what another provider gives.
pub struct CastProvider {
    inner: Arc<dyn StateProvider>,
    from: Dtype,
    to: Dtype,
    leaf: Box<str>,
}

impl CastProvider {
    /// A provider of the same array in dtype `to`. `leaf` names it in errors. An error is a
    /// sentence for the user.
    pub fn new(inner: Arc<dyn StateProvider>, from: Dtype, to: Dtype, leaf: &str) -> Result<Self, String> {
        if !can_cast(from, to) {
            return Err(format!(
                "a save casts between float16, bfloat16, float32 and float64, not {from} to {to}"
            ));
        }
        if !inner.devices().is_empty() {
            return Err(format!("it is on a device, where a save cannot cast it to {to}"));
        }
        Ok(Self { inner, from, to, leaf: leaf.into() })
    }

    /// Writes elements from byte `from` of the cast region on. `false`: the values cannot be read.
    fn cast(&self, local: &Region, from: u64, into: &mut [u8]) -> Result<bool> {
        let (own, other) = (self.to.size(), self.from.size());
        let mut scratch = [0_u8; PIECE * WIDEST];
        let mut at = from / own as u64 * other as u64;
        for out in into.chunks_mut(PIECE * own) {
            let source = &mut scratch[..out.len() / own * other];
            if !self.inner.peek(local, at, source)? {
                return Ok(false);
            }
            at += source.len() as u64;
            if !cast(self.from, self.to, source, out) {
                return Err(Error::Leaf {
                    leaf: self.leaf.to_string(),
                    what: format!(
                        "a value of it is too large for {}; leave it out of the cast, or rescale it",
                        self.to
                    ),
                });
            }
        }
        Ok(true)
    }
}

impl StateProvider for CastProvider {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> Result<()> {
        for fill in fills {
            if !self.cast(fill.local, fill.from, slot.part(fill.at, fill.len)?)? {
                return Err(Error::internal("a leaf in host memory to cast", "none"));
            }
        }
        Ok(())
    }

    fn peek(&self, local: &Region, from: u64, into: &mut [u8]) -> Result<bool> {
        self.cast(local, from, into)
    }

    fn has_gaps_in_rows(&self) -> bool {
        self.inner.has_gaps_in_rows()
    }

    fn timing(&self) -> CaptureTiming {
        self.inner.timing()
    }

    fn slab_bytes(&self) -> Option<u64> {
        Some(self.inner.slab_bytes()? / self.from.size() as u64 * self.to.size() as u64)
    }

    fn read_ahead(&self, local: &Region) -> bool {
        self.inner.read_ahead(local)
    }

    fn check(&self, local: &Region, itemsize: usize) -> Result<(), String> {
        if itemsize != self.to.size() {
            return Err(format!("its elements are cast to {} bytes, not to {itemsize}", self.to.size()));
        }
        self.inner.check(local, self.from.size())
    }
}

/// Bits of the exponent and of the fraction.
fn layout(dtype: Dtype) -> Option<(u32, u32)> {
    match dtype {
        Dtype::Float16 => Some((5, 10)),
        Dtype::Bfloat16 => Some((8, 7)),
        Dtype::Float32 => Some((8, 23)),
        Dtype::Float64 => Some((11, 52)),
        _ => None,
    }
}

/// True if [`cast`] knows both dtypes.
pub fn can_cast(from: Dtype, to: Dtype) -> bool {
    layout(from).is_some() && layout(to).is_some()
}

/// Casts elements, also from the 8-bit floats of quantised weights. `false`: a finite value became
/// infinite.
pub fn cast(from: Dtype, to: Dtype, source: &[u8], out: &mut [u8]) -> bool {
    if from == to {
        out.copy_from_slice(source);
        return true;
    }
    match from {
        Dtype::Float32 if to == Dtype::Bfloat16 => round_to_bfloat16(source, out),
        Dtype::Float16 => cast_from(source, |bits| widen(u16::from_le_bytes(bits), 5, 10), to, out),
        Dtype::Bfloat16 => {
            let value = |bits| f64::from(f32::from_bits(u32::from(u16::from_le_bytes(bits)) << 16));
            cast_from(source, value, to, out)
        }
        Dtype::Float8E4m3fn => cast_from(source, |[bits]| widen_e4m3fn(bits), to, out),
        // The upper half of a float16.
        Dtype::Float8E5m2 => cast_from(source, |[bits]| widen(u16::from(bits) << 8, 5, 10), to, out),
        // An exponent without a sign.
        Dtype::Float8E8m0fnu => {
            let value = |[bits]: [u8; 1]| match bits {
                255 => f64::NAN,
                _ => f64::from_bits((u64::from(bits) + 896) << 52),
            };
            cast_from(source, value, to, out)
        }
        Dtype::Float32 => cast_from(source, |bits| f64::from(f32::from_le_bytes(bits)), to, out),
        _ => cast_from(source, f64::from_le_bytes, to, out),
    }
}

/// The common cast, without branches.
fn round_to_bfloat16(source: &[u8], out: &mut [u8]) -> bool {
    let mut fits = true;
    for (bits, out) in source.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        let bits = u32::from_le_bytes(*bits);
        let size = bits & 0x7FFF_FFFF;
        let rounded = (bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16) as u16;
        let nan = (bits >> 16) as u16 & 0x8000 | 0x7FC0;
        *out = if size > 0x7F80_0000 { nan } else { rounded }.to_le_bytes();
        // The least size that rounds to infinity, up to infinity itself.
        fits &= !(0x7F7F_8000..0x7F80_0000).contains(&size);
    }
    fits
}

fn cast_from<const N: usize>(
    source: &[u8],
    value: impl Fn([u8; N]) -> f64 + Copy,
    to: Dtype,
    out: &mut [u8],
) -> bool {
    match to {
        Dtype::Float16 => each(source, value, out, |value| {
            let bits = narrow(value, 5, 10);
            (bits.to_le_bytes(), bits & 0x7FFF == 0x7C00)
        }),
        Dtype::Bfloat16 => each(source, value, out, |value| {
            let bits = narrow(value, 8, 7);
            (bits.to_le_bytes(), bits & 0x7FFF == 0x7F80)
        }),
        Dtype::Float32 => each(source, value, out, |value| {
            #[expect(clippy::cast_possible_truncation, reason = "rounds to the nearest")]
            let cast = value as f32;
            (cast.to_le_bytes(), cast.is_infinite())
        }),
        _ => each(source, value, out, |value| (value.to_le_bytes(), value.is_infinite())),
    }
}

fn each<const N: usize, const M: usize>(
    source: &[u8],
    value: impl Fn([u8; N]) -> f64,
    out: &mut [u8],
    encode: impl Fn(f64) -> ([u8; M], bool),
) -> bool {
    let (source, _) = source.as_chunks::<N>();
    let (out, _) = out.as_chunks_mut::<M>();
    let mut fits = true;
    for (bits, out) in source.iter().zip(out) {
        let value = value(*bits);
        let (bytes, is_infinite) = encode(value);
        *out = bytes;
        fits &= !is_infinite || value.is_infinite();
    }
    fits
}

/// The value of a `float8_e4m3fn`, which has no infinity.
fn widen_e4m3fn(bits: u8) -> f64 {
    let (exponent, fraction) = (u32::from(bits >> 3 & 15), u32::from(bits & 7));
    let size = match (exponent, fraction) {
        (15, 7) => f32::NAN,
        (0, _) => f32::from(bits & 7) / 512.0,
        _ => f32::from_bits((exponent + 120) << 23 | fraction << 20),
    };
    f64::from(if bits >> 7 == 1 { -size } else { size })
}

/// The value of a float of 16 bits.
fn widen(bits: u16, exponent_bits: u32, fraction_bits: u32) -> f64 {
    let bias = (1_i32 << (exponent_bits - 1)) - 1;
    let exponent = i32::from(bits >> fraction_bits & ((1 << exponent_bits) - 1));
    let fraction = f64::from(bits & ((1 << fraction_bits) - 1)) / f64::from(1_u32 << fraction_bits);
    let size = if exponent == (1 << exponent_bits) - 1 {
        if fraction == 0.0 { f64::INFINITY } else { f64::NAN }
    } else if exponent == 0 {
        fraction * f64::powi(2.0, 1 - bias)
    } else {
        (1.0 + fraction) * f64::powi(2.0, exponent - bias)
    };
    if bits >> 15 == 1 { -size } else { size }
}

/// The nearest float of 16 bits; of two, the even one. (The crate `half` drops the last 32 bits of
/// a float64 before it rounds.)
fn narrow(value: f64, exponent_bits: u32, fraction_bits: u32) -> u16 {
    let bits = value.to_bits();
    let sign = ((bits >> 63) as u16) << 15;
    let largest = ((1_u64 << exponent_bits) - 1) << fraction_bits;
    if value.is_nan() {
        return sign | largest as u16 | 1 << (fraction_bits - 1);
    }
    let exponent = (bits >> 52 & 0x7FF) as i32 - 1023 + (1 << (exponent_bits - 1)) - 1;
    let fraction = bits & ((1 << 52) - 1);
    // A value below the normal ones loses more bits of its fraction.
    let (base, fraction, lost) = if exponent > 0 {
        (u64::from(exponent.unsigned_abs()) << fraction_bits, fraction, 52 - fraction_bits)
    } else {
        let lost = (52 - fraction_bits).saturating_add_signed(1 - exponent);
        (0, fraction | 1 << 52, lost.min(63))
    };
    let half = 1_u64 << (lost - 1);
    let odd = fraction >> lost & 1;
    let rounded = base + ((fraction + half - 1 + odd) >> lost);
    sign | rounded.min(largest) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits16(value: f32, to: Dtype) -> u16 {
        let mut out = [0; 2];
        cast(Dtype::Float32, to, &value.to_le_bytes(), &mut out);
        u16::from_le_bytes(out)
    }

    #[test]
    fn bfloat16_rounds_every_pattern_to_the_nearest_even() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let value = f32::from_bits(u32::from(high) << 16 | low);
                let up = low > 0x8000 || (low == 0x8000 && high & 1 == 1);
                let wanted = if value.is_nan() { high & 0x8000 | 0x7FC0 } else { high + u16::from(up) };
                assert_eq!(bits16(value, Dtype::Bfloat16), wanted, "{value}");
            }
        }
    }

    #[test]
    fn every_float16_survives_the_way_up_and_down() {
        for bits in 0..=u16::MAX {
            let mut wide = [0; 4];
            assert!(cast(Dtype::Float16, Dtype::Float32, &bits.to_le_bytes(), &mut wide));
            let value = f32::from_le_bytes(wide);
            let back = bits16(value, Dtype::Float16);
            assert!(back == bits || (value.is_nan() && back & 0x7C00 == 0x7C00), "{bits:#x} {value}");
        }
    }

    #[test]
    fn float16_rounds_ties_to_even_and_tells_of_overflow() {
        for (value, wanted) in [
            (1.0 + f32::powi(2.0, -11), 0x3C00),
            (1.0 + 3.0 * f32::powi(2.0, -11), 0x3C02),
            (f32::powi(2.0, -25), 0),
            (1.5 * f32::powi(2.0, -24), 2),
            (65519.0, 0x7BFF),
            (f32::NEG_INFINITY, 0xFC00),
        ] {
            assert_eq!(bits16(value, Dtype::Float16), wanted, "{value}");
        }
        for (to, tie, wanted) in [(Dtype::Float16, -11, 0x3C01_u16), (Dtype::Bfloat16, -8, 0x3F81)] {
            let above = f64::from_bits((1.0 + f64::powi(2.0, tie)).to_bits() + 1);
            let mut out = [0; 2];
            assert!(cast(Dtype::Float64, to, &above.to_le_bytes(), &mut out));
            assert_eq!(u16::from_le_bytes(out), wanted, "just above a tie of {to}");
        }
        let mut out = [0; 2];
        for (bits, fits) in
            [(0x7F7F_7FFF_u32, true), (0x7F7F_8000, false), (0xFF80_0000, true), (0x7FC0_0001, true)]
        {
            assert_eq!(
                cast(Dtype::Float32, Dtype::Bfloat16, &bits.to_le_bytes(), &mut out),
                fits,
                "{bits:#x}"
            );
        }
        assert!(!cast(Dtype::Float32, Dtype::Float16, &65520_f32.to_le_bytes(), &mut out));
        assert!(cast(Dtype::Float64, Dtype::Float32, &f64::INFINITY.to_le_bytes(), &mut [0; 4]));
        assert!(!cast(Dtype::Float64, Dtype::Float32, &1e300_f64.to_le_bytes(), &mut [0; 4]));
    }
}
