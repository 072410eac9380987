//! Archived columns. They are read in order, and each read checks that a value is left.

use rkyv::primitive::{ArchivedI64, ArchivedU32, ArchivedU64};

use crate::region::Dims;

/// The result of reading a column. The error says what is missing.
pub(super) type ReadResult<T> = Result<T, String>;

/// An archived number.
pub(super) trait Number: Copy {
    type Native;
    fn native(self) -> Self::Native;
}

macro_rules! numbers {
    ($($archived:ty => $native:ty),*) => {$(
        impl Number for $archived {
            type Native = $native;
            fn native(self) -> $native { self.into() }
        }
    )*};
}
numbers!(u8 => u8, ArchivedU32 => u32, ArchivedU64 => u64, ArchivedI64 => i64);

/// The rest of a column that is not read yet.
pub(super) struct Column<'a, T> {
    rest: &'a [T],
    name: &'static str,
}

impl<'a, T: Number> Column<'a, T> {
    pub(super) fn new(rest: &'a [T], name: &'static str) -> Self {
        Self { rest, name }
    }

    pub(super) fn len(&self) -> usize {
        self.rest.len()
    }

    pub(super) fn next(&mut self) -> ReadResult<T::Native> {
        let (first, rest) = self.rest.split_first().ok_or_else(|| short(self.name))?;
        self.rest = rest;
        Ok(first.native())
    }

    pub(super) fn end(self) -> ReadResult<()> {
        if self.rest.is_empty() { Ok(()) } else { Err(long(self.name)) }
    }
}

impl Column<'_, ArchivedU64> {
    /// Reads the numbers of so many dimensions. Reads a few together after one check of the length,
    /// because an index has several for each leaf.
    #[inline]
    pub(super) fn dims(&mut self, ndim: usize, into: &mut Dims) -> ReadResult<()> {
        let (taken, rest) = self.rest.split_at_checked(ndim).ok_or_else(|| short(self.name))?;
        match self.rest.first_chunk::<4>() {
            Some(four) if ndim <= four.len() => {
                *into = Dims::from_buf_and_len(four.map(ArchivedU64::to_native), ndim);
            }
            _ => into.extend(taken.iter().map(|number| number.to_native())),
        }
        self.rest = rest;
        Ok(())
    }
}

/// The rest of a column of texts that is not read yet.
pub(super) struct Texts<'a> {
    rest: &'a str,
    name: &'static str,
}

impl<'a> Texts<'a> {
    pub(super) fn new(rest: &'a str, name: &'static str) -> Self {
        Self { rest, name }
    }

    pub(super) fn take(&mut self, bytes: usize) -> ReadResult<&'a str> {
        let (taken, rest) = self.rest.split_at_checked(bytes).ok_or_else(|| short(self.name))?;
        self.rest = rest;
        Ok(taken)
    }

    pub(super) fn end(self) -> ReadResult<()> {
        if self.rest.is_empty() { Ok(()) } else { Err(long(self.name)) }
    }
}

fn short(name: &str) -> String {
    format!("its column `{name}` is too short")
}

fn long(name: &str) -> String {
    format!("its column `{name}` is longer than what uses it")
}
