//! Bands: parts of stored tensors that are read once for several pieces of a save.
//!
//! A save cuts a matrix along both axes, and captures each chunk in pieces. Other libraries store
//! whole rows. A read of one chunk would read its neighbours' bytes too. So all rows of a chunk,
//! the *band*, are read together and kept for its neighbours, which are captured next. A plan cuts
//! a tensor into slabs first, so a band is small ([`MAX_BAND_BYTES`]), and threads have their bands
//! side by side.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use stepwell_core::region::{Region, row_major_strides};
use stepwell_core::{Error, Result};

/// Limit on bytes of a slab, so of a band of a plan. With larger ones, threads drop the bands that
/// others need.
pub(super) const MAX_BAND_BYTES: u64 = 16 << 20;
/// Limit on bytes of all bands.
const KEEP_BYTES: usize = 96 << 20;

/// The bands of the tensors of one save.
#[derive(Default)]
pub(super) struct Bands {
    kept: Mutex<KeptBands>,
}

#[derive(Default)]
struct KeptBands {
    /// The number of providers that read.
    users: usize,
    /// In order of their first use.
    bands: Vec<Arc<Band>>,
    /// The memory of a band that was dropped.
    spare: Vec<u8>,
}

struct Band {
    leaf: u32,
    region: Region,
    nbytes: usize,
    /// Bytes that no save has copied yet. At 0 the band is dropped.
    left: AtomicUsize,
    /// Its row-major bytes. Empty before they are read.
    bytes: RwLock<Vec<u8>>,
}

/// Reads a region.
pub(super) type ReadRegion<'a> = &'a dyn Fn(&Region, &mut [u8]) -> Result<()>;

impl Bands {
    /// Adds a provider that reads.
    pub(super) fn enter(&self) {
        self.lock().users += 1;
    }

    /// Removes a provider. The last one frees all memory.
    pub(super) fn leave(&self) {
        let mut kept = self.lock();
        kept.users = kept.users.saturating_sub(1);
        if kept.users == 0 {
            *kept = KeptBands::default();
        }
    }

    /// Copies the row-major bytes of `local` from byte `from` on. `read` fills a band that is not
    /// kept. Returns false without a band: it is too large, or `read` is `None`.
    pub(super) fn copy(
        &self,
        leaf: u32,
        size: u64,
        (region, local): (Region, &Region),
        (from, into): (u64, &mut [u8]),
        read: Option<ReadRegion<'_>>,
    ) -> Result<bool> {
        let band = match read {
            None => self.lock().find(leaf, &region),
            Some(_) => self.reserve(leaf, region, size, true).map(|(band, _)| band),
        };
        let Some(band) = band else { return Ok(false) };
        let Some(bytes) = band.read(self, read)? else { return Ok(false) };
        let len = into.len();
        copy_rows((&band.region, &bytes), local, size, from, into).ok_or_else(|| {
            let found = format!("byte {from} of {local:?} in {:?}", band.region);
            Error::internal("a run inside its band", found)
        })?;
        drop(bytes);
        if band.left.fetch_sub(len, Ordering::Relaxed) <= len {
            self.lock().bands.retain(|kept| !Arc::ptr_eq(kept, &band));
        }
        self.release(band);
        Ok(true)
    }

    /// Reads a band that is not kept, for a copy that comes soon. Returns false if it is kept, or
    /// has no place beside the others.
    pub(super) fn read_ahead(
        &self,
        leaf: u32,
        size: u64,
        region: Region,
        read: ReadRegion<'_>,
    ) -> Result<bool> {
        let Some((band, true)) = self.reserve(leaf, region, size, false) else { return Ok(false) };
        band.read(self, Some(read))?;
        self.release(band);
        Ok(true)
    }

    fn lock(&self) -> MutexGuard<'_, KeptBands> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the kept band and false, or a new one, which is not read yet, and true. `None`: the
    /// others leave no place for it. `drops`: the oldest of them are dropped for it.
    fn reserve(&self, leaf: u32, region: Region, size: u64, drops: bool) -> Option<(Arc<Band>, bool)> {
        let mut kept = self.lock();
        if let Some(band) = kept.find(leaf, &region) {
            return Some((band, false));
        }
        let nbytes = usize::try_from(region.volume()?.checked_mul(size)?).ok()?;
        let mut dropped = Vec::new();
        while nbytes > KEEP_BYTES.saturating_sub(kept.nbytes()) {
            if !drops || kept.bands.is_empty() {
                return None;
            }
            dropped.push(kept.bands.remove(0));
        }
        let band =
            Arc::new(Band { leaf, region, nbytes, left: AtomicUsize::new(nbytes), bytes: RwLock::default() });
        kept.bands.push(Arc::clone(&band));
        drop(kept);
        for band in dropped {
            self.release(band);
        }
        Some((band, true))
    }

    /// Keeps the memory of a band that nobody else has.
    fn release(&self, band: Arc<Band>) {
        let Some(band) = Arc::into_inner(band) else { return };
        let memory = band.bytes.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut kept = self.lock();
        if kept.users > 0 {
            kept.spare = memory;
        }
    }
}

impl KeptBands {
    fn find(&self, leaf: u32, region: &Region) -> Option<Arc<Band>> {
        self.bands.iter().find(|band| band.leaf == leaf && band.region == *region).cloned()
    }

    fn nbytes(&self) -> usize {
        self.bands.iter().map(|band| band.nbytes).sum()
    }
}

impl Band {
    /// Returns its bytes, read now if they have not been. `None` if that takes a missing `read`.
    fn read(
        &self,
        all: &Bands,
        read: Option<ReadRegion<'_>>,
    ) -> Result<Option<RwLockReadGuard<'_, Vec<u8>>>> {
        let bytes = self.bytes.read().unwrap_or_else(PoisonError::into_inner);
        if !bytes.is_empty() {
            return Ok(Some(bytes));
        }
        drop(bytes);
        let Some(read) = read else { return Ok(None) };
        let mut empty = self.bytes.write().unwrap_or_else(PoisonError::into_inner);
        if empty.is_empty() {
            let mut memory = std::mem::take(&mut all.lock().spare);
            if memory.capacity() < self.nbytes {
                drop(memory);
                memory = vec![0; self.nbytes];
            }
            memory.resize(self.nbytes, 0);
            read(&self.region, &mut memory)?;
            *empty = memory;
        }
        drop(empty);
        Ok(Some(self.bytes.read().unwrap_or_else(PoisonError::into_inner)))
    }
}

/// Returns the band of a region: its rows, whole. It is contiguous in a row-major tensor.
pub(super) fn band_of(shape: &[u64], local: &Region) -> Region {
    let mut band = local.clone();
    let first = local.extent.iter().position(|&extent| extent > 1).unwrap_or(shape.len());
    for (axis, &length) in shape.iter().enumerate().skip(first + 1) {
        if let (Some(offset), Some(extent)) = (band.offset.get_mut(axis), band.extent.get_mut(axis)) {
            (*offset, *extent) = (0, length);
        }
    }
    band
}

/// Copies row-major bytes of `local` out of its band. `None` if they exceed the band.
fn copy_rows(
    (band, bytes): (&Region, &[u8]),
    local: &Region,
    size: u64,
    from: u64,
    into: &mut [u8],
) -> Option<()> {
    let (strides, own) = (row_major_strides(&band.extent), row_major_strides(&local.extent));
    // The innermost axis that is cut, and the bytes of `local` that are contiguous in the band.
    let cut = local.extent.iter().zip(&band.extent).rposition(|(own, all)| own != all);
    let axes = cut.map_or(0, |cut| cut + 1);
    let run = match cut {
        Some(cut) => local.extent.get(cut)? * own.get(cut)?,
        None => local.volume()?,
    };
    let (mut at, mut rest) = (from / size, into);
    while !rest.is_empty() {
        let (mut inner, mut place) = (at, 0);
        for axis in 0..axes {
            let stride = *own.get(axis)?;
            let ahead = local.offset.get(axis)? - band.offset.get(axis)?;
            place += (ahead + inner / stride) * strides.get(axis)?;
            inner %= stride;
        }
        let count = (run - at % run).min(rest.len() as u64 / size);
        let (start, len) = ((place + inner) * size, count * size);
        let (next, others) = std::mem::take(&mut rest).split_at_mut_checked(usize::try_from(len).ok()?)?;
        next.copy_from_slice(bytes.get(usize::try_from(start).ok()?..usize::try_from(start + len).ok()?)?);
        (at, rest) = (at + count, others);
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const SHAPE: [u64; 3] = [6, 10, 8];

    fn region(offset: [u64; 3], extent: [u64; 3]) -> Region {
        Region { offset: offset.to_vec().into(), extent: extent.to_vec().into() }
    }

    /// The bytes of a region of a tensor whose elements are their own numbers.
    fn content(region: &Region) -> Vec<u8> {
        let range = |axis: usize| {
            let first = region.offset[axis];
            first..first + region.extent[axis]
        };
        let numbers = range(0)
            .flat_map(|i| range(1).map(move |j| i * 10 + j))
            .flat_map(|row| range(2).map(move |k| row * 8 + k));
        numbers.flat_map(|number| (number as u16).to_le_bytes()).collect()
    }

    #[test]
    fn a_band_is_read_once_and_dropped_after_its_last_piece() {
        for is_read_ahead in [false, true] {
            let bands = Bands::default();
            bands.enter();
            let reads = Cell::new(0);
            let read = |band: &Region, into: &mut [u8]| {
                reads.set(reads.get() + 1);
                into.copy_from_slice(&content(band));
                Ok(())
            };
            let halves = [([2, 0, 0], [3, 10, 4]), ([2, 0, 4], [3, 10, 4])];
            let halves = halves.map(|(offset, extent)| region(offset, extent));
            let band = || band_of(&SHAPE, &halves[0]);
            if is_read_ahead {
                assert!(bands.read_ahead(0, 2, band(), &read).unwrap());
                assert!(!bands.read_ahead(0, 2, band(), &read).unwrap());
            }
            for local in &halves {
                let expected = content(local);
                let mut found = vec![0; expected.len()];
                for (number, piece) in found.chunks_mut(14).enumerate() {
                    let from = number as u64 * 14;
                    assert!(bands.copy(0, 2, (band(), local), (from, piece), Some(&read)).unwrap());
                }
                assert_eq!(found, expected);
            }
            assert_eq!(reads.get(), 1);
            assert!(bands.lock().bands.is_empty());
            assert_eq!(bands.lock().spare.len(), content(&band()).len());
            bands.leave();
            assert!(bands.lock().spare.is_empty());
        }
    }

    #[test]
    fn a_band_has_whole_rows() {
        let all = region([2, 0, 0], [3, 10, 8]);
        assert_eq!(band_of(&SHAPE, &region([2, 3, 1], [3, 4, 2])), all);
        assert_eq!(band_of(&SHAPE, &region([2, 3, 1], [1, 4, 2])), region([2, 3, 0], [1, 4, 8]));
        assert_eq!(band_of(&SHAPE, &region([2, 3, 1], [1, 1, 2])), region([2, 3, 1], [1, 1, 2]));
        assert_eq!(band_of(&[], &Region::whole(&[])), Region::whole(&[]));
    }

    #[test]
    fn a_failed_read_is_tried_again_and_old_bands_are_dropped() {
        let bands = Bands::default();
        bands.enter();
        let mut into = [0; 2];
        let large = Region::whole(&[KEEP_BYTES as u64 / 2]);
        let both = || (large.clone(), &large);
        let failing = |_: &Region, _: &mut [u8]| Err(Error::internal("a", "b"));
        assert!(bands.copy(0, 2, both(), (0, &mut into), Some(&failing)).is_err());
        let reading = |_: &Region, _: &mut [u8]| Ok(());
        for leaf in 0..3 {
            let read = (leaf < 2).then_some(&reading as ReadRegion<'_>);
            assert_eq!(bands.copy(leaf, 2, both(), (0, &mut into), read).unwrap(), leaf < 2, "{leaf}");
            assert_eq!(bands.lock().bands.len(), 1);
        }
        // A read ahead drops nothing.
        assert!(!bands.read_ahead(2, 2, large.clone(), &reading).unwrap());
        assert_eq!(bands.lock().bands[0].leaf, 1);
        let larger = Region::whole(&[KEEP_BYTES as u64]);
        assert!(!bands.copy(0, 2, (larger.clone(), &larger), (0, &mut into), Some(&reading)).unwrap());
    }
}
