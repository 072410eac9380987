//! How a shard is cut into chunks, and how a flat run is cut into boxes. Called when a save is
//! planned; pure and deterministic, so that ranks which agree on shapes and options agree on the
//! chunks.
//!
//! A chunk is the unit that a later read for *another* cut can skip. Cut along one axis only, a
//! column-parallel tensor that is read row-parallel needs every chunk; cut along several, it needs
//! a few of them. The price is shorter rows (the contiguous runs of the source), so an axis is cut
//! only while rows stay long.

use stepwell_core::region::{Region, row_major_strides, volume};

/// How large chunks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubchunkOptions {
    /// No chunk has more bytes than this (unless one element has).
    pub target_bytes: u64,
    /// Contiguous bytes that a chunk's rows keep in its region. More than half the target is read
    /// as half the target, and where the two contradict each other the target wins.
    pub min_row_bytes: u64,
    /// The same, where a shard is cut for readers with other cuts.
    pub min_band_row_bytes: u64,
}

impl SubchunkOptions {
    /// Host memory: 8 MiB keeps 16 requests in flight within 128 MiB; copies of 4 KiB rows run at
    /// the speed of memory, those of 512 bytes at half of it.
    pub const HOST: Self = Self { target_bytes: 8 << 20, min_row_bytes: 4096, min_band_row_bytes: 512 };

    /// The same for chunks of slabs: so many that other cuts leave most of a slab unread.
    #[must_use]
    pub fn in_slabs(self, slab_bytes: u64) -> Self {
        Self { target_bytes: self.target_bytes.min(slab_bytes / BANDS), ..self }
    }

    /// The same for device memory: a 2-d device-to-host copy needs longer rows to reach the bus's
    /// speed.
    #[must_use]
    pub fn on_device(self) -> Self {
        let least = |bytes: u64| bytes.max(DEVICE_ROW_BYTES);
        Self {
            min_row_bytes: least(self.min_row_bytes),
            min_band_row_bytes: least(self.min_band_row_bytes),
            ..self
        }
    }
}

impl Default for SubchunkOptions {
    fn default() -> Self {
        Self::HOST
    }
}

/// Rows of copies from a device have at least so many bytes.
const DEVICE_ROW_BYTES: u64 = 16 << 10;

/// Along each axis that a shard has whole it is cut into up to so many parts, so that a reader
/// whose cut is along that axis leaves most of the shard unread.
const BANDS: u64 = 8;
/// But no chunk gets fewer bytes by that: a chunk costs its record in the index.
const BAND_BYTES: u64 = 64 << 10;
/// Nor fewer than this by the last halving, which fewer readers gain from.
const LAST_BAND_BYTES: u64 = 128 << 10;

/// The boxes of a region, in row-major order. How many there are is known before the first one:
/// `len`, at most what 64 bits hold.
pub struct Cut<'a> {
    region: &'a Region,
    /// Into how many parts each axis is cut; empty: it stays whole.
    parts: Vec<u64>,
    /// Offset of the next box.
    at: Vec<u64>,
    left: u64,
}

impl Iterator for Cut<'_> {
    type Item = Region;

    fn next(&mut self) -> Option<Region> {
        let Self { region, parts, at, left } = self;
        *left = left.checked_sub(1)?;
        if parts.is_empty() {
            return Some(region.clone());
        }
        let border = |d: usize, i: u64| {
            // Parts differ by at most one element, and no part is empty because there are never
            // more parts than elements.
            (u128::from(region.extent[d]) * u128::from(i) / u128::from(parts[d])) as u64
        };
        let (mut offset, mut extent) = (Vec::with_capacity(at.len()), Vec::with_capacity(at.len()));
        for (d, &i) in at.iter().enumerate() {
            offset.push(region.offset[d] + border(d, i));
            extent.push(border(d, i + 1) - border(d, i));
        }
        if let Some(d) = (0..at.len()).rev().find(|&d| at[d] + 1 < parts[d]) {
            at[d] += 1;
            at[d + 1..].fill(0);
        }
        Some(Region { offset: offset.into(), extent: extent.into() })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left as usize, Some(self.left as usize))
    }
}

impl ExactSizeIterator for Cut<'_> {}

/// Cuts `region` of a tensor of that shape into boxes that tile it exactly. An empty region gives
/// no box. There may be more of them than any memory holds: ask for their number first.
///
/// The axes of a whole tensor are halved, the longest first, until a box has at most
/// `target_bytes`: so boxes have between about half and all of it, stay near cubes, and fall on the
/// borders that meshes of 2, 4, 8 … ranks have. A shard is first cut along the axes that it has
/// whole, into up to [`BANDS`] parts, since other cuts of the tensor will go along those; then,
/// until boxes are small enough, along the axes that it is a part of, and only then further along
/// the others.
pub fn cut<'a>(region: &'a Region, shape: &[u64], itemsize: u64, options: &SubchunkOptions) -> Cut<'a> {
    let whole = |left| Cut { region, parts: Vec::new(), at: Vec::new(), left };
    if region.is_empty() {
        return whole(0);
    }
    let sharded: Vec<bool> = region.extent.iter().zip(shape).map(|(extent, all)| extent != all).collect();
    let bytes = region.volume().and_then(|n| n.checked_mul(itemsize)).unwrap_or(u64::MAX);
    if !sharded.contains(&true) && bytes <= options.target_bytes {
        return whole(1); // most leaves, and training waits for this
    }
    let parts = parts(&region.extent, &sharded, itemsize, options);
    let left = parts.iter().fold(1_u64, |chunks, &parts| chunks.saturating_mul(parts));
    Cut { region, at: vec![0; parts.len()], parts, left }
}

/// Cuts a region into slabs of whole rows with at most `limit` bytes. A row that has more is cut
/// in the same way. One slab without a limit.
pub fn slabs(region: &Region, itemsize: u64, limit: Option<u64>) -> Cut<'_> {
    let (mut parts, mut left) = (Vec::new(), u64::from(!region.is_empty()));
    if let Some(limit) = limit.filter(|_| left > 0) {
        let limit = limit.max(1);
        let mut bytes = region.volume().and_then(|n| n.checked_mul(itemsize)).unwrap_or(u64::MAX);
        for &extent in &*region.extent {
            let row = bytes / extent;
            let rows = (limit / row.max(1)).clamp(1, extent);
            let count = extent.div_ceil(rows).checked_next_power_of_two().map_or(extent, |n| n.min(extent));
            bytes = extent.div_ceil(count).saturating_mul(row);
            left = left.saturating_mul(count);
            parts.push(count);
        }
    }
    Cut { region, at: vec![0; parts.len()], parts, left }
}

/// Returns the band of a chunk: its place in its shard, in parts of each axis. Chunks of one band
/// are adjacent in a file, across tensors, so a reader with another sharding finds many small
/// chunks in one piece.
pub fn band(chunk: &Region, shard: &Region, shape: &[u64]) -> u32 {
    let mut band = 0_u32;
    for (d, &extent) in shard.extent.iter().enumerate().filter(|&(_, &extent)| extent > 0) {
        let bands = bands(d, shape.get(d) != Some(&extent));
        let inside = chunk.offset[d].saturating_sub(shard.offset[d]);
        let part = u128::from(inside) * u128::from(bands) / u128::from(extent);
        band = band.saturating_mul(bands as u32).saturating_add(part as u32);
    }
    band
}

/// Into how many parts a shard is cut along an axis for readers with other cuts. Steps of the
/// outermost axis are not cut where the shard has some of them: any others can be read of it.
fn bands(axis: usize, is_sharded: bool) -> u64 {
    match (axis, is_sharded) {
        (0, true) => 1,
        (_, true) => BANDS / 4,
        (_, false) => BANDS,
    }
}

/// Into how many parts each axis is cut; `sharded` says along which axes the region is a part of
/// its tensor.
fn parts(extent: &[u64], sharded: &[bool], itemsize: u64, options: &SubchunkOptions) -> Vec<u64> {
    let target = u128::from(options.target_bytes.max(1));
    let min_row = u128::from(options.min_row_bytes).min(target / 2);
    let mut row_bytes = vec![u128::from(itemsize); extent.len()]; // of one step along the axis, trailing axes whole
    for d in (1..extent.len()).rev() {
        row_bytes[d - 1] = row_bytes[d].saturating_mul(u128::from(extent[d]));
    }
    let mut parts = vec![1_u64; extent.len()];
    let longest = |parts: &[u64], d: usize| extent[d].div_ceil(parts[d]);
    let bytes = |parts: &[u64]| {
        (0..extent.len())
            .fold(u128::from(itemsize), |bytes, d| bytes.saturating_mul(u128::from(longest(parts, d))))
    };
    let doubled = |parts: &[u64], d: usize| parts[d].saturating_mul(2).min(extent[d]);
    let keeps_rows = |parts: &[u64], d: usize, least: u128| {
        u128::from(extent[d] / doubled(parts, d)).saturating_mul(row_bytes[d]) >= least
    };
    if sharded.contains(&true) {
        let least = |parts: u64| {
            u128::from(if parts < BANDS / 2 { BAND_BYTES } else { LAST_BAND_BYTES }).min(target / 2)
        };
        let band_row = u128::from(options.min_band_row_bytes).min(target / 2);
        // Each axis as far as it goes, in turn; the first is the one whose rows are longest.
        let whole_first =
            (0..extent.len()).filter(|&d| !sharded[d]).chain((1..extent.len()).filter(|&d| sharded[d]));
        for d in whole_first {
            while parts[d] < bands(d, sharded[d])
                && longest(&parts, d) > 1
                && keeps_rows(&parts, d, band_row)
                && bytes(&parts) >= 2 * least(parts[d])
            {
                parts[d] = doubled(&parts, d);
            }
        }
    }
    while bytes(&parts) > target {
        let axis = (0..extent.len())
            .filter(|&d| longest(&parts, d) > 1 && keeps_rows(&parts, d, min_row))
            .max_by_key(|&d| (sharded[d], longest(&parts, d), std::cmp::Reverse(d)))
            .or_else(|| (0..extent.len()).find(|&d| longest(&parts, d) > 1));
        let Some(axis) = axis else { return parts }; // single elements: nothing is left to cut
        parts[axis] = doubled(&parts, axis);
    }
    parts
}

/// Returns the run `start .. start + len` of the row-major flattened tensor as at most `2 * ndim -
/// 1` boxes, in the run's order. Each box is contiguous in that order. `None` if the run exceeds
/// the tensor.
pub fn run_to_boxes(shape: &[u64], start: u64, len: u64) -> Option<Vec<Region>> {
    let end = start.checked_add(len)?;
    if end > volume(shape)? {
        return None;
    }
    if len == 0 {
        return Some(Vec::new());
    }
    if shape.is_empty() {
        return Some(vec![Region::whole(shape)]);
    }
    let strides = row_major_strides(shape);
    let (mut boxes, mut at) = (Vec::new(), start);
    while at < end {
        // The outermost axis along which a whole step starts here and ends inside the run; the
        // innermost always does.
        let axis = (0..shape.len()).find(|&d| at.is_multiple_of(strides[d]) && strides[d] <= end - at)?;
        let coordinate = |d: usize| (at / strides[d]) % shape[d];
        let count = ((end - at) / strides[axis]).min(shape[axis] - coordinate(axis));
        let offset = (0..shape.len()).map(|d| if d <= axis { coordinate(d) } else { 0 }).collect();
        let extent = (0..shape.len())
            .map(|d| match d.cmp(&axis) {
                std::cmp::Ordering::Less => 1,
                std::cmp::Ordering::Equal => count,
                std::cmp::Ordering::Greater => shape[d],
            })
            .collect();
        boxes.push(Region { offset, extent });
        at += count * strides[axis];
    }
    Some(boxes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn extents(shape: &[u64], itemsize: u64, options: &SubchunkOptions) -> Vec<Vec<u64>> {
        let mut extents: Vec<_> =
            cut(&Region::whole(shape), shape, itemsize, options).map(|part| part.extent.to_vec()).collect();
        extents.dedup();
        extents
    }

    #[test]
    fn slabs_have_whole_rows_and_tile_their_region() {
        let region = Region { offset: vec![4, 0, 2].into(), extent: vec![6, 10, 8].into() };
        for (limit, count, first) in [
            (960, 1, [6, 10, 8]),
            (959, 2, [3, 10, 8]),
            (160, 6, [1, 10, 8]),
            (80, 12, [1, 5, 8]),
            (7, 240, [1, 1, 2]),
        ] {
            let found: Vec<Region> = slabs(&region, 2, Some(limit)).collect();
            assert_eq!((found.len(), &*found[0].extent), (count, &first[..]), "{limit}");
            assert_eq!(found[0].offset, region.offset);
            assert_eq!(found.iter().map(|slab| slab.volume().unwrap()).sum::<u64>(), 480);
            assert!(found.windows(2).all(|pair| pair[0].offset < pair[1].offset));
        }
        assert_eq!(slabs(&region, 2, None).collect::<Vec<_>>(), std::slice::from_ref(&region));
        assert_eq!(slabs(&Region::whole(&[0, 3]), 2, Some(1)).len(), 0);
        assert_eq!(slabs(&Region::whole(&[]), 2, Some(1)).len(), 1);
        assert_eq!(slabs(&Region::whole(&[u64::MAX, u64::MAX]), 2, Some(1)).len(), usize::MAX);
    }

    #[test]
    fn a_large_matrix_is_cut_along_both_axes() {
        let cuts = |shape: &[u64], itemsize| extents(shape, itemsize, &SubchunkOptions::HOST);
        assert_eq!(cuts(&[8192, 8192], 2), [[2048, 2048]], "square, rows of 4096 bytes");
        assert_eq!(cuts(&[8192, 8192], 4), [[1024, 2048]], "rows would fall below 4096 bytes: no, 8192");
        assert_eq!(cuts(&[1 << 20, 64], 4), [[32768, 64]], "short rows are never cut");
        assert_eq!(cuts(&[16, 1 << 24], 4), [[16, 131_072]], "long rows are");
        assert_eq!(cuts(&[1 << 26], 2), [[1 << 22]]);
        assert_eq!(cuts(&[1024, 1024], 4), [[1024, 1024]], "what fits stays whole");
    }

    #[test]
    fn half_the_target_is_the_longest_row_that_is_kept() {
        let options = SubchunkOptions { target_bytes: 64, min_row_bytes: 1000, min_band_row_bytes: 1000 };
        assert_eq!(extents(&[64, 64], 1, &options), [[2, 32]]);
        let shard = Region::whole(&[2, 256]);
        let extents: Vec<_> = cut(&shard, &[4, 256], 1, &options).map(|part| part.extent.to_vec()).collect();
        assert_eq!(extents, [[2, 32]; 8]);
    }

    #[test]
    fn rows_of_device_memory_are_longer() {
        let device = SubchunkOptions::HOST.on_device();
        assert_eq!((device.min_row_bytes, device.min_band_row_bytes), (16 << 10, 16 << 10));
        assert_eq!(device.target_bytes, SubchunkOptions::HOST.target_bytes);
        let long = SubchunkOptions { target_bytes: 1, min_row_bytes: 1 << 20, min_band_row_bytes: 1 << 19 };
        assert_eq!(long.on_device(), long);
    }

    /// Extents of the chunks of a shard, and their bands.
    fn shard(offset: &[u64], extent: &[u64], shape: &[u64], itemsize: u64) -> Vec<(Vec<u64>, u32)> {
        let region = Region { offset: offset.into(), extent: extent.into() };
        let parts = cut(&region, shape, itemsize, &SubchunkOptions::HOST);
        parts.map(|part| (part.extent.to_vec(), band(&part, &region, shape))).collect()
    }

    #[test]
    fn a_shard_is_cut_along_the_axes_that_it_has_whole() {
        let cut = |offset, extent, shape, itemsize| {
            shard(offset, extent, shape, itemsize).into_iter().map(|(extent, _)| extent).collect::<Vec<_>>()
        };
        let in_four = |extent: [u64; 2]| vec![extent.to_vec(); 4];
        assert_eq!(cut(&[128, 0], &[128, 1024], &[1024, 1024], 4), in_four([128, 256]), "some rows");
        assert_eq!(cut(&[0, 128], &[1024, 128], &[1024, 1024], 4), in_four([256, 128]), "some columns");
        assert_eq!(cut(&[512, 0], &[512, 4096], &[4096, 4096], 2), vec![[512, 512]; 8], "chunks stay large");
        assert_eq!(cut(&[0, 0], &[64, 512], &[512, 512], 2), [[64, 512]], "chunks would be too small");
        assert_eq!(cut(&[0, 0], &[96, 512], &[512, 512], 2), [[96, 512]], "with 48 KiB too");
        assert_eq!(cut(&[0, 0], &[128, 512], &[1024, 512], 2), [[128, 256]; 2], "or smaller than 64 KiB");
        assert_eq!(
            cut(&[64, 64], &[512, 512], &[1024, 1024], 4),
            [[512, 256]; 2],
            "no axis whole: the inner one once"
        );
    }

    #[test]
    fn bands_of_different_tensors_are_the_same_parts_of_them() {
        let bands = |extent: &[u64], shape: &[u64]| {
            shard(&[0, 0], extent, shape, 2).into_iter().map(|(_, band)| band).collect::<Vec<_>>()
        };
        assert_eq!(bands(&[512, 4096], &[4096, 4096]), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(
            bands(&[128, 1024], &[1024, 1024]),
            [0, 2, 4, 6],
            "a quarter begins where every second eighth does"
        );
        assert_eq!(bands(&[64, 512], &[512, 512]), [0], "and what is not cut comes first");
        let columns = bands(&[4096, 512], &[4096, 4096]);
        assert!(columns.is_sorted());
        let empty = Region::whole(&[0, 3]);
        assert_eq!(band(&empty, &empty, &[0, 3]), 0);
        assert_eq!(columns.len(), 16, "eighths of the rows, and each of them in two");
    }

    #[test]
    fn a_large_shard_is_cut_along_its_own_axes_before_the_others() {
        // An eighth of the columns, and then rows until there are no more than 8 MiB.
        let parts = shard(&[6656, 0], &[6656, 16384], &[53248, 16384], 2);
        assert_eq!(parts.len(), 32);
        assert!(parts.iter().all(|(extent, _)| *extent == [1664, 2048]));
        assert_eq!(parts.iter().map(|(_, band)| *band).max(), Some(7));
    }

    #[test]
    fn scalars_are_one_chunk_and_empty_tensors_none() {
        let boxes =
            |shape: &[u64]| cut(&Region::whole(shape), shape, 8, &SubchunkOptions::HOST).collect::<Vec<_>>();
        assert_eq!(boxes(&[]), [Region::whole(&[])]);
        assert_eq!(boxes(&[5, 0]), []);
    }

    #[test]
    fn an_element_that_is_larger_than_a_chunk_is_a_chunk() {
        let options = SubchunkOptions { target_bytes: 4, ..SubchunkOptions::HOST };
        assert_eq!(cut(&Region::whole(&[2, 2]), &[2, 2], 16, &options).count(), 4);
    }

    #[test]
    fn more_chunks_than_any_memory_holds_are_counted_and_not_made() {
        let options = SubchunkOptions { target_bytes: 1, min_row_bytes: 0, min_band_row_bytes: 0 };
        for (shape, count) in
            [(vec![1 << 40], 1 << 40), (vec![1 << 21, 1 << 21], 1 << 42), (vec![1 << 40; 3], u64::MAX)]
        {
            let whole = Region::whole(&shape);
            let mut chunks = cut(&whole, &shape, 1, &options);
            assert_eq!(chunks.len() as u64, count);
            assert_eq!(chunks.next().map(|first| first.extent.to_vec()), Some(vec![1; shape.len()]));
            assert_eq!(chunks.len() as u64, count - 1);
        }
    }

    proptest! {
        #[test]
        fn chunks_tile_the_region_in_row_major_order_within_the_target(
            offset in prop::collection::vec(0_u64..100, 4),
            extent in prop::collection::vec(1_u64..40, 0..4),
            itemsize in prop_oneof![Just(1_u64), Just(2), Just(8)],
            target_bytes in 1_u64..3000,
            min_row_bytes in 0_u64..300,
            whole in prop::collection::vec(any::<bool>(), 4),
        ) {
            let options = SubchunkOptions { target_bytes, min_row_bytes, min_band_row_bytes: min_row_bytes / 8 };
            // Along an axis that it has whole, a region begins where the tensor does.
            let has = |d: usize| extent.len() <= d || whole[d];
            let shape: Vec<u64> = (0..extent.len()).map(|d| if has(d) { extent[d] } else { 200 }).collect();
            let offset = (0..extent.len()).map(|d| if has(d) { 0 } else { offset[d] }).collect();
            let region = Region { offset, extent: extent.into() };
            let chunks = cut(&region, &shape, itemsize, &options);
            let count = chunks.len();
            let parts: Vec<Region> = chunks.collect();
            prop_assert_eq!(parts.len(), count);
            prop_assert_eq!(&parts, &cut(&region, &shape, itemsize, &options).collect::<Vec<_>>());
            let bytes = |part: &Region| part.volume().unwrap() * itemsize;
            prop_assert!(parts.iter().all(|part| bytes(part) <= target_bytes.max(itemsize)));
            let numbered = parts.iter().cloned().enumerate().collect();
            prop_assert_eq!(crate::tiling::check_boxes(&region, numbered), Ok(()));
            prop_assert!(parts.windows(2).all(|pair| pair[0].offset < pair[1].offset));
            // Not needlessly small: a chunk that could have stayed larger would be at most a
            // quarter, odd lengths included.
            if parts.len() > 1 {
                let largest = parts.iter().map(bytes).max().unwrap();
                prop_assert!(largest * 4 > target_bytes || largest <= itemsize, "{} of {}", largest, target_bytes);
            }
        }

        #[test]
        fn rows_stay_long_where_the_target_has_room_for_them(
            rows in 1_u64..5000,
            columns in 1_u64..5000,
            min_row_bytes in 1_u64..256,
        ) {
            // The target is many rows of the least length, so the two never contradict each other.
            let options = SubchunkOptions { target_bytes: 16 * min_row_bytes, min_row_bytes, ..SubchunkOptions::HOST };
            for part in cut(&Region::whole(&[rows, columns]), &[rows, columns], 1, &options) {
                let row = if part.extent[1] == columns { part.extent[0] * columns } else { part.extent[1] };
                prop_assert!(row >= min_row_bytes.min(rows * columns), "{:?}", part);
            }
        }

        #[test]
        fn a_run_has_few_boxes_in_its_own_order(
            (shape, start, len) in prop::collection::vec(1_u64..6, 1..6).prop_flat_map(|shape| {
                let n = volume(&shape).unwrap();
                (Just(shape), 0..n).prop_flat_map(move |(shape, start)| (Just(shape), Just(start), 0..=n - start))
            })
        ) {
            let boxes = run_to_boxes(&shape, start, len).unwrap();
            prop_assert!(boxes.len() < 2 * shape.len());
            let strides = row_major_strides(&shape);
            let mut at = start;
            for part in boxes {
                for n in 0..part.volume().unwrap() {
                    let (mut rest, mut element) = (n, 0);
                    for d in (0..shape.len()).rev() {
                        element += (part.offset[d] + rest % part.extent[d]) * strides[d];
                        rest /= part.extent[d];
                    }
                    prop_assert_eq!(element, at);
                    at += 1;
                }
            }
            prop_assert_eq!(at, start + len);
            let all = volume(&shape).unwrap();
            prop_assert_eq!(run_to_boxes(&shape, start, all - start + 1), None);
        }
    }
}
