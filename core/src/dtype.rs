//! Element types, with the names of numpy and ml_dtypes. A dtype has a name, a stored size, and a
//! kind, which decides which casts are lossless.
//!
//! Sub-byte types (`int4`, `uint4`, `int2`, `uint2`, `float4_*`, `float6_*`) are stored as
//! ml_dtypes holds them in memory: **one byte per element**, unpacked. Multi-byte types are stored
//! little-endian.

/// The kind of a dtype's values. A cast to a wider dtype of the same kind is lossless.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DtypeKind {
    /// `bool`
    Bool,
    /// Two's complement integers.
    Signed,
    /// Integers without sign.
    Unsigned,
    /// Binary floating point of any format.
    Float,
    /// Pairs of floats.
    Complex,
    /// `datetime64[unit]`, a count of units since 1970.
    Datetime,
    /// `timedelta64[unit]`, a count of units.
    Timedelta,
}

macro_rules! dtypes {
    ($($variant:ident = $code:literal, $name:literal, $size:literal, $bits:literal, $kind:ident;)*) => {
        /// The type of a logical tensor's elements. The discriminants are part of the file format:
        /// never reuse one.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        #[expect(missing_docs, reason = "the variants are numpy's and ml_dtypes' own names")]
        pub enum Dtype { $($variant = $code,)* }

        impl Dtype {
            /// Every dtype, in the order of their codes.
            pub const ALL: &'static [Dtype] = &[$(Dtype::$variant,)*];

            /// The name that numpy or ml_dtypes gives it.
            pub const fn name(self) -> &'static str { match self { $(Self::$variant => $name,)* } }

            /// Bytes per stored element.
            pub const fn size(self) -> usize { match self { $(Self::$variant => $size,)* } }

            /// Significant bits of one element (less than `8 * size` for unpacked sub-byte types
            /// and `bool`).
            pub const fn bits(self) -> usize { match self { $(Self::$variant => $bits,)* } }

            /// The kind of its values.
            pub const fn kind(self) -> DtypeKind { match self { $(Self::$variant => DtypeKind::$kind,)* } }

            /// Returns the dtype with a code from a file.
            pub const fn from_code(code: u8) -> Option<Self> {
                match code { $($code => Some(Self::$variant),)* _ => None }
            }

            /// Returns the dtype with that name.
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$variant),)* _ => None }
            }
        }
    };
}

dtypes! {
    Bool = 1, "bool", 1, 1, Bool;
    Int8 = 2, "int8", 1, 8, Signed;
    Int16 = 3, "int16", 2, 16, Signed;
    Int32 = 4, "int32", 4, 32, Signed;
    Int64 = 5, "int64", 8, 64, Signed;
    Uint8 = 6, "uint8", 1, 8, Unsigned;
    Uint16 = 7, "uint16", 2, 16, Unsigned;
    Uint32 = 8, "uint32", 4, 32, Unsigned;
    Uint64 = 9, "uint64", 8, 64, Unsigned;
    Float16 = 10, "float16", 2, 16, Float;
    Float32 = 11, "float32", 4, 32, Float;
    Float64 = 12, "float64", 8, 64, Float;
    Complex64 = 13, "complex64", 8, 64, Complex;
    Complex128 = 14, "complex128", 16, 128, Complex;
    Bfloat16 = 15, "bfloat16", 2, 16, Float;
    Float8E3m4 = 16, "float8_e3m4", 1, 8, Float;
    Float8E4m3 = 17, "float8_e4m3", 1, 8, Float;
    Float8E4m3b11fnuz = 18, "float8_e4m3b11fnuz", 1, 8, Float;
    Float8E4m3fn = 19, "float8_e4m3fn", 1, 8, Float;
    Float8E4m3fnuz = 20, "float8_e4m3fnuz", 1, 8, Float;
    Float8E5m2 = 21, "float8_e5m2", 1, 8, Float;
    Float8E5m2fnuz = 22, "float8_e5m2fnuz", 1, 8, Float;
    Float8E8m0fnu = 23, "float8_e8m0fnu", 1, 8, Float;
    Float6E2m3fn = 24, "float6_e2m3fn", 1, 6, Float;
    Float6E3m2fn = 25, "float6_e3m2fn", 1, 6, Float;
    Float4E2m1fn = 26, "float4_e2m1fn", 1, 4, Float;
    Int4 = 27, "int4", 1, 4, Signed;
    Uint4 = 28, "uint4", 1, 4, Unsigned;
    Int2 = 29, "int2", 1, 2, Signed;
    Uint2 = 30, "uint2", 1, 2, Unsigned;
    Int1 = 31, "int1", 1, 1, Signed;
    Uint1 = 32, "uint1", 1, 1, Unsigned;
    Complex32 = 33, "complex32", 4, 32, Complex;
    Bcomplex32 = 34, "bcomplex32", 4, 32, Complex;
    DatetimeY = 40, "datetime64[Y]", 8, 64, Datetime;
    DatetimeM = 41, "datetime64[M]", 8, 64, Datetime;
    DatetimeW = 42, "datetime64[W]", 8, 64, Datetime;
    DatetimeD = 43, "datetime64[D]", 8, 64, Datetime;
    DatetimeH = 44, "datetime64[h]", 8, 64, Datetime;
    DatetimeMin = 45, "datetime64[m]", 8, 64, Datetime;
    DatetimeS = 46, "datetime64[s]", 8, 64, Datetime;
    DatetimeMs = 47, "datetime64[ms]", 8, 64, Datetime;
    DatetimeUs = 48, "datetime64[us]", 8, 64, Datetime;
    DatetimeNs = 49, "datetime64[ns]", 8, 64, Datetime;
    DatetimePs = 50, "datetime64[ps]", 8, 64, Datetime;
    DatetimeFs = 51, "datetime64[fs]", 8, 64, Datetime;
    DatetimeAs = 52, "datetime64[as]", 8, 64, Datetime;
    TimedeltaY = 60, "timedelta64[Y]", 8, 64, Timedelta;
    TimedeltaM = 61, "timedelta64[M]", 8, 64, Timedelta;
    TimedeltaW = 62, "timedelta64[W]", 8, 64, Timedelta;
    TimedeltaD = 63, "timedelta64[D]", 8, 64, Timedelta;
    TimedeltaH = 64, "timedelta64[h]", 8, 64, Timedelta;
    TimedeltaMin = 65, "timedelta64[m]", 8, 64, Timedelta;
    TimedeltaS = 66, "timedelta64[s]", 8, 64, Timedelta;
    TimedeltaMs = 67, "timedelta64[ms]", 8, 64, Timedelta;
    TimedeltaUs = 68, "timedelta64[us]", 8, 64, Timedelta;
    TimedeltaNs = 69, "timedelta64[ns]", 8, 64, Timedelta;
    TimedeltaPs = 70, "timedelta64[ps]", 8, 64, Timedelta;
    TimedeltaFs = 71, "timedelta64[fs]", 8, 64, Timedelta;
    TimedeltaAs = 72, "timedelta64[as]", 8, 64, Timedelta;
}

impl Dtype {
    /// Returns its code in files.
    pub const fn code(self) -> u8 {
        self as u8
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_is_found_again_by_its_code_and_its_name() {
        for &dtype in Dtype::ALL {
            assert_eq!(Dtype::from_code(dtype.code()), Some(dtype));
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
            assert!(dtype.bits() <= 8 * dtype.size());
        }
        assert_eq!(Dtype::from_code(0), None);
    }
}
