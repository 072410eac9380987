//! Gathering: strided memory → a run of the row-major bytes of a box.
//!
//! [`super::HostSource`] calls this. A box is first *simplified* (dimensions of one element
//! dropped, neighbours that are contiguous in memory merged), so that a contiguous box of any rank
//! is one dimension. A run of its elements is then cut into *pieces*, at most `2 N - 1` for `N`
//! dimensions, each a box of its own and contiguous where it is written.

/// One dimension of a box: how many elements, and how many bytes from one to the next (any sign; 0
/// is a broadcast).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dim {
    /// Number of elements, never zero.
    pub(super) extent: u64,
    /// Distance of neighbours in memory, in bytes.
    pub(super) stride: i64,
}

/// A part of a run: `count` indices of dimension `dim` and everything below, starting `offset`
/// bytes from the box's first element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GatherPiece {
    /// Bytes from the box's first element to the piece's first.
    pub(super) offset: i64,
    /// The outermost dimension that it spans.
    pub(super) dim: usize,
    /// Indices of that dimension.
    pub(super) count: u64,
    /// Elements in it.
    pub(super) elements: u64,
}

/// The dimensions of a box, outermost first, with those of one element dropped and contiguous
/// neighbours merged. A box of one element has none. `None` if the box is empty.
pub(super) fn simplify(extent: &[u64], strides: &[i64]) -> Option<Vec<Dim>> {
    let mut dims: Vec<Dim> = Vec::with_capacity(extent.len());
    for (&extent, &stride) in extent.iter().zip(strides) {
        match extent {
            0 => return None,
            1 => {}
            _ => match dims.last_mut() {
                Some(outer)
                    if i64::try_from(extent).ok().and_then(|n| n.checked_mul(stride))
                        == Some(outer.stride) =>
                {
                    *outer = Dim { extent: outer.extent.saturating_mul(extent), stride };
                }
                _ => dims.push(Dim { extent, stride }),
            },
        }
    }
    Some(dims)
}

/// Calls `emit` with the pieces of the run of `len` elements from element `start` (both in
/// row-major order), in order. The run must be inside the box.
pub(super) fn pieces(dims: &[Dim], start: u64, len: u64, mut emit: impl FnMut(GatherPiece)) {
    if dims.is_empty() {
        if len > 0 {
            emit(GatherPiece { offset: 0, dim: 0, count: 1, elements: 1 });
        }
        return;
    }
    let mut position = start;
    let mut left = len;
    while left > 0 {
        // The outermost dimension of which the run holds at least one whole index from here on.
        let mut inner: u64 = 1;
        let mut best = (dims.len() - 1, 1, 1);
        let mut offset = 0_i64;
        for (d, dim) in dims.iter().enumerate().rev() {
            let index = position / inner % dim.extent;
            if position.is_multiple_of(inner) && left >= inner {
                best = (d, inner, (left / inner).min(dim.extent - index));
            }
            offset = offset.wrapping_add(index.cast_signed().wrapping_mul(dim.stride));
            inner = inner.saturating_mul(dim.extent);
        }
        let (dim, step, count) = best;
        let elements = step * count;
        emit(GatherPiece { offset, dim, count, elements });
        position += elements;
        left -= elements;
    }
}

#[cfg(test)]
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    reason = "the numbers of these tests are small"
)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_contiguous_box_of_any_rank_is_one_dimension() {
        assert_eq!(simplify(&[2, 3, 4], &[48, 16, 4]), Some(vec![Dim { extent: 24, stride: 4 }]));
        assert_eq!(simplify(&[1, 1], &[999, -7]), Some(vec![]));
        assert_eq!(simplify(&[], &[]), Some(vec![]));
        assert_eq!(simplify(&[3, 0], &[8, 8]), None);
        // A broadcast of a broadcast is one, too.
        assert_eq!(simplify(&[5, 6], &[0, 0]), Some(vec![Dim { extent: 30, stride: 0 }]));
        // A row of a padded matrix is not merged.
        assert_eq!(simplify(&[2, 3], &[16, 4]).map(|dims| dims.len()), Some(2));
    }

    proptest! {
        #[test]
        fn pieces_visit_exactly_the_run_in_order(
            extent in prop::collection::vec(1_u64..5, 1..5),
            strides in prop::collection::vec(-50_i64..50, 4),
            from in 0.0..1.0_f64,
            to in 0.0..1.0_f64,
        ) {
            let strides = &strides[..extent.len()];
            let total: u64 = extent.iter().product();
            let (a, b) = ((from * total as f64) as u64, (to * total as f64).ceil() as u64);
            let (start, end) = (a.min(b), a.max(b).min(total));
            let wanted: Vec<i64> = (start..end).map(|element| address(&extent, strides, element)).collect();

            let dims = simplify(&extent, strides).unwrap();
            let mut found = Vec::new();
            let mut count = 0;
            pieces(&dims, start, end - start, |piece| {
                count += 1;
                let mut extent: Vec<u64> = dims[piece.dim.min(dims.len())..].iter().map(|d| d.extent).collect();
                let strides: Vec<i64> = dims[piece.dim.min(dims.len())..].iter().map(|d| d.stride).collect();
                if let Some(first) = extent.first_mut() {
                    *first = piece.count;
                }
                assert_eq!(extent.iter().product::<u64>(), piece.elements);
                found.extend((0..piece.elements).map(|e| piece.offset + address(&extent, &strides, e)));
            });
            prop_assert_eq!(found, wanted);
            prop_assert!(count <= (2 * dims.len()).saturating_sub(1).max(1));
        }
    }

    fn address(extent: &[u64], strides: &[i64], mut element: u64) -> i64 {
        let mut address = 0;
        for (&extent, &stride) in extent.iter().zip(strides).rev() {
            address += (element % extent) as i64 * stride;
            element /= extent;
        }
        address
    }
}
