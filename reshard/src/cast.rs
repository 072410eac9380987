//! Which casts keep every value. Used by [`crate::matching`]; the casts themselves happen where the
//! arrays are.
//!
//! A cast is **lossless** when the wanted type holds every value of the stored one exactly, within
//! the same kind: integers to wider integers (unsigned into wider signed too), floats to floats
//! with at least the precision, range, subnormals, infinities, NaN and signed zero of the stored
//! format, complex likewise. A NaN stays a NaN; its payload may change. Numbers that change their
//! kind (`bool` to `int8`, `int8` to `float32`) are never lossless here, though the values would
//! survive: a changed kind is a mistake more often than a wish.

use stepwell_core::dtype::{Dtype, DtypeKind};

/// The values of a float format. Every finite value is a multiple of `2^quantum` with at most
/// `precision` significant bits.
#[expect(clippy::struct_excessive_bools, reason = "four independent properties of a format")]
struct FloatFormat {
    precision: u32,
    quantum: i32,
    max: f64,
    infinity: bool,
    nan: bool,
    negative_zero: bool,
    /// Zero and the negative values; only `float8_e8m0fnu` has neither.
    signed: bool,
}

const fn ieee(precision: u32, quantum: i32, max: f64) -> FloatFormat {
    FloatFormat { precision, quantum, max, infinity: true, nan: true, negative_zero: true, signed: true }
}

/// `fn`: finite and NaN only.
const fn finite(precision: u32, quantum: i32, max: f64, nan: bool) -> FloatFormat {
    FloatFormat { precision, quantum, max, infinity: false, nan, negative_zero: true, signed: true }
}

/// `fnuz`: finite, NaN, unsigned zero.
const fn unsigned_zero(precision: u32, quantum: i32, max: f64) -> FloatFormat {
    FloatFormat { precision, quantum, max, infinity: false, nan: true, negative_zero: false, signed: true }
}

fn float_format(dtype: Dtype) -> Option<FloatFormat> {
    Some(match dtype {
        Dtype::Float16 => ieee(11, -24, 65504.0),
        Dtype::Bfloat16 => ieee(8, -133, 3.389_531_389_251_535_5e38),
        Dtype::Float32 | Dtype::Complex64 => ieee(24, -149, 3.402_823_466_385_288_6e38),
        Dtype::Float64 | Dtype::Complex128 => ieee(53, -1074, f64::MAX),
        Dtype::Float8E3m4 => ieee(5, -6, 15.5),
        Dtype::Float8E4m3 => ieee(4, -9, 240.0),
        Dtype::Float8E5m2 => ieee(3, -16, 57344.0),
        Dtype::Float8E4m3fn => finite(4, -9, 448.0, true),
        Dtype::Float8E4m3b11fnuz => unsigned_zero(4, -13, 30.0),
        Dtype::Float8E4m3fnuz => unsigned_zero(4, -10, 240.0),
        Dtype::Float8E5m2fnuz => unsigned_zero(3, -17, 57344.0),
        Dtype::Float8E8m0fnu => FloatFormat {
            precision: 1,
            quantum: -127,
            max: 1.701_411_834_604_692_3e38, // 2^127
            infinity: false,
            nan: true,
            negative_zero: false,
            signed: false,
        },
        Dtype::Float6E2m3fn => finite(4, -3, 7.5, false),
        Dtype::Float6E3m2fn => finite(3, -4, 28.0, false),
        Dtype::Float4E2m1fn => finite(2, -1, 6.0, false),
        _ => return None,
    })
}

impl FloatFormat {
    fn holds(&self, other: &Self) -> bool {
        self.precision >= other.precision
            && self.quantum <= other.quantum
            && self.max >= other.max
            && (self.infinity || !other.infinity)
            && (self.nan || !other.nan)
            && (self.negative_zero || !other.negative_zero)
            && (self.signed || !other.signed)
    }
}

/// True if every value of `from` is a value of `to`, of the same kind. True for equal types.
pub fn is_lossless(from: Dtype, to: Dtype) -> bool {
    if from == to {
        return true;
    }
    match (from.kind(), to.kind()) {
        (DtypeKind::Signed, DtypeKind::Signed) | (DtypeKind::Unsigned, DtypeKind::Unsigned) => {
            from.bits() <= to.bits()
        }
        (DtypeKind::Unsigned, DtypeKind::Signed) => from.bits() < to.bits(),
        (DtypeKind::Float, DtypeKind::Float) | (DtypeKind::Complex, DtypeKind::Complex) => {
            matches!((float_format(from), float_format(to)), (Some(from), Some(to)) if to.holds(&from))
        }
        // Two units of time differ in range or in resolution, always.
        _ => false,
    }
}

/// True if the cast means anything, with loss allowed: numbers (and `bool`) into numbers, except
/// complex into real, which would drop half of every value; times into times and spans into spans
/// of another unit.
pub fn is_possible(from: Dtype, to: Dtype) -> bool {
    let number =
        |kind| matches!(kind, DtypeKind::Bool | DtypeKind::Signed | DtypeKind::Unsigned | DtypeKind::Float);
    match (from.kind(), to.kind()) {
        (from, DtypeKind::Complex) => number(from) || from == DtypeKind::Complex,
        (from, to) => from == to || (number(from) && number(to)),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Decodes all codes of a small float format straight from its definition: exponent bits,
    /// mantissa bits, bias, and what the top codes are.
    fn values(exponent_bits: u32, mantissa_bits: u32, bias: i32, top: Top) -> BTreeSet<Value> {
        let bits = 1 + exponent_bits + mantissa_bits;
        let mut values = BTreeSet::new();
        for code in 0..1_u32 << bits {
            let negative = code >> (bits - 1) == 1;
            let mantissa = code & ((1 << mantissa_bits) - 1);
            let exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1);
            let all_ones = exponent == (1 << exponent_bits) - 1;
            let value = match top {
                Top::Ieee if all_ones && mantissa == 0 => Value::Infinity(negative),
                Top::Ieee if all_ones => Value::Nan,
                Top::Fn if all_ones && mantissa == (1 << mantissa_bits) - 1 => Value::Nan,
                Top::Fnuz if negative && exponent == 0 && mantissa == 0 => Value::Nan,
                _ => {
                    let (significand, exponent) = if exponent == 0 {
                        (f64::from(mantissa), 1 - bias)
                    } else {
                        (f64::from(mantissa + (1 << mantissa_bits)), exponent.cast_signed() - bias)
                    };
                    let magnitude = significand * 2_f64.powi(exponent - mantissa_bits.cast_signed());
                    Value::Finite((if negative { -magnitude } else { magnitude }).to_bits())
                }
            };
            values.insert(value);
        }
        values
    }

    #[derive(Clone, Copy)]
    enum Top {
        Ieee,
        Fn,
        Fnuz,
        Finite,
    }

    #[derive(PartialEq, Eq, PartialOrd, Ord)]
    enum Value {
        Finite(u64),
        Infinity(bool),
        Nan,
    }

    #[test]
    fn a_float_cast_is_lossless_where_every_code_survives() {
        let mut formats = vec![
            (Dtype::Float16, values(5, 10, 15, Top::Ieee)),
            (Dtype::Bfloat16, values(8, 7, 127, Top::Ieee)),
            (Dtype::Float8E3m4, values(3, 4, 3, Top::Ieee)),
            (Dtype::Float8E4m3, values(4, 3, 7, Top::Ieee)),
            (Dtype::Float8E5m2, values(5, 2, 15, Top::Ieee)),
            (Dtype::Float8E4m3fn, values(4, 3, 7, Top::Fn)),
            (Dtype::Float8E4m3b11fnuz, values(4, 3, 11, Top::Fnuz)),
            (Dtype::Float8E4m3fnuz, values(4, 3, 8, Top::Fnuz)),
            (Dtype::Float8E5m2fnuz, values(5, 2, 16, Top::Fnuz)),
            (Dtype::Float6E2m3fn, values(2, 3, 1, Top::Finite)),
            (Dtype::Float6E3m2fn, values(3, 2, 3, Top::Finite)),
            (Dtype::Float4E2m1fn, values(2, 1, 1, Top::Finite)),
        ];
        let powers =
            (-127..=127).map(|e| Value::Finite(2_f64.powi(e).to_bits())).chain([Value::Nan]).collect();
        formats.push((Dtype::Float8E8m0fnu, powers));
        for (from, from_values) in &formats {
            for (to, to_values) in &formats {
                assert_eq!(is_lossless(*from, *to), from_values.is_subset(to_values), "{from} to {to}");
            }
            assert!(
                is_lossless(*from, Dtype::Float32) && is_lossless(*from, Dtype::Float64),
                "{from} widens"
            );
        }
    }

    #[test]
    fn every_float_format_holds_itself() {
        let formats: Vec<FloatFormat> = Dtype::ALL.iter().filter_map(|&dtype| float_format(dtype)).collect();
        assert!(formats.len() >= 15);
        assert!(formats.iter().all(|format| format.holds(format)));
    }

    #[test]
    fn casts_are_lossless_within_a_kind() {
        let lossless = [
            ("int8", "int16"),
            ("int4", "int8"),
            ("int32", "int64"),
            ("uint8", "uint64"),
            ("uint8", "int16"),
            ("uint32", "int64"),
            ("uint4", "int8"),
            ("bfloat16", "float32"),
            ("float16", "float32"),
            ("float32", "float64"),
            ("float8_e4m3fn", "bfloat16"),
            ("float8_e4m3fn", "float16"),
            ("float8_e5m2", "float16"),
            ("float8_e8m0fnu", "bfloat16"),
            ("float4_e2m1fn", "float8_e4m3fn"),
            ("complex64", "complex128"),
            ("bool", "bool"),
            ("datetime64[s]", "datetime64[s]"),
        ];
        let lossy = [
            ("int16", "int8"),
            ("int8", "uint8"),
            ("int8", "uint64"),
            ("uint8", "int8"),
            ("uint64", "int64"),
            ("float32", "bfloat16"),
            ("float32", "float16"),
            ("float16", "bfloat16"),
            ("bfloat16", "float16"),
            ("float8_e5m2", "float8_e4m3fn"),
            ("float8_e8m0fnu", "float16"),
            ("complex128", "complex64"),
            ("bool", "int8"),
            ("int8", "float32"),
            ("int8", "bool"),
            ("float32", "complex64"),
            ("datetime64[s]", "datetime64[ms]"),
        ];
        let dtype = |name| Dtype::from_name(name).unwrap();
        for (from, to) in lossless {
            assert!(is_lossless(dtype(from), dtype(to)), "{from} to {to} keeps every value");
        }
        for (from, to) in lossy {
            assert!(!is_lossless(dtype(from), dtype(to)), "{from} to {to} loses");
            assert!(is_possible(dtype(from), dtype(to)), "{from} to {to} can be asked for");
        }
    }

    #[test]
    fn some_casts_are_impossible_even_with_loss() {
        let dtype = |name| Dtype::from_name(name).unwrap();
        for (from, to) in [
            ("complex64", "float32"),
            ("datetime64[s]", "int64"),
            ("int64", "datetime64[s]"),
            ("timedelta64[s]", "datetime64[s]"),
            ("datetime64[s]", "complex64"),
        ] {
            assert!(!is_possible(dtype(from), dtype(to)), "{from} to {to}");
        }
        for &from in Dtype::ALL {
            for &to in Dtype::ALL {
                assert!(!is_lossless(from, to) || is_possible(from, to), "{from} to {to}");
            }
        }
    }
}
