//! Bands: parts of stored tensors that are read once for several pieces of a save.
//!
//! A save cuts a matrix along both axes, and captures each chunk in pieces. Other libraries store
//! whole rows. A read of one chunk would read its neighbours' bytes too. So all rows of a chunk,
//! the *band*, are read together and kept for its neighbours, which are captured next.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use stepwell_core::region::{Region, row_major_strides};
use stepwell_core::{Error, Result};

/// Limit on bytes of bands. The oldest are dropped.
const KEEP_BYTES: usize = 64 << 20;

/// The bands of a checkpoint.
#[derive(Default)]
pub(crate) struct Bands {
    kept: Mutex<KeptBands>,
}

#[derive(Default)]
struct KeptBands {
    /// The number of providers that read.
    users: usize,
    /// In order of their first use.
    bands: VecDeque<Arc<Band>>,
    /// The memory of the last band that was dropped.
    spare: Vec<u8>,
}

struct Band {
    leaf: u32,
    region: Region,
    nbytes: usize,
    /// Its row-major bytes. Empty before they are read.
    bytes: RwLock<Vec<u8>>,
}

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
        read: Option<impl FnOnce(&Region, &mut [u8]) -> Result<()>>,
    ) -> Result<bool> {
        let nbytes = region.volume().and_then(|count| usize::try_from(count.checked_mul(size)?).ok());
        let Some(nbytes) = nbytes.filter(|&nbytes| nbytes <= KEEP_BYTES) else { return Ok(false) };
        let Some(band) = self.band(leaf, region, nbytes, read.is_some()) else { return Ok(false) };
        let mut bytes = band.bytes.read().unwrap_or_else(PoisonError::into_inner);
        if bytes.is_empty() {
            drop(bytes);
            let Some(read) = read else { return Ok(false) };
            let mut empty = band.bytes.write().unwrap_or_else(PoisonError::into_inner);
            if empty.is_empty() {
                let mut memory = std::mem::take(&mut self.lock().spare);
                if memory.len() != nbytes {
                    memory = vec![0; nbytes];
                }
                read(&band.region, &mut memory)?;
                *empty = memory;
            }
            drop(empty);
            bytes = band.bytes.read().unwrap_or_else(PoisonError::into_inner);
        }
        copy_rows((&band.region, &bytes), local, size, from, into).ok_or_else(|| {
            Error::internal("a run inside its band", format!("byte {from} of {local:?} in {:?}", band.region))
        })?;
        Ok(true)
    }

    fn lock(&self) -> MutexGuard<'_, KeptBands> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the kept band. `makes`: or a new one, which is not read yet.
    fn band(&self, leaf: u32, region: Region, nbytes: usize, makes: bool) -> Option<Arc<Band>> {
        let mut kept = self.lock();
        let found = kept.bands.iter().find(|band| band.leaf == leaf && band.region == region);
        if found.is_some() || !makes {
            return found.cloned();
        }
        let mut all = nbytes + kept.bands.iter().map(|band| band.nbytes).sum::<usize>();
        while all > KEEP_BYTES
            && let Some(oldest) = kept.bands.pop_front()
        {
            all -= oldest.nbytes;
            if let Some(oldest) = Arc::into_inner(oldest) {
                kept.spare = oldest.bytes.into_inner().unwrap_or_else(PoisonError::into_inner);
            }
        }
        let band = Arc::new(Band { leaf, region, nbytes, bytes: RwLock::default() });
        kept.bands.push_back(Arc::clone(&band));
        Some(band)
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
    use super::*;

    const SHAPE: [u64; 3] = [6, 10, 8];

    fn region(offset: [u64; 3], extent: [u64; 3]) -> Region {
        Region { offset: offset.to_vec().into(), extent: extent.to_vec().into() }
    }

    /// The bytes of a region of a tensor whose elements are their own numbers.
    fn bytes_of(region: &Region) -> Vec<u8> {
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
    fn pieces_of_a_band_are_read_once() {
        let bands = Bands::default();
        bands.enter();
        let mut reads = 0;
        for (offset, extent) in [([2, 0, 0], [3, 10, 4]), ([2, 0, 4], [3, 10, 4])] {
            let local = region(offset, extent);
            let expected = bytes_of(&local);
            let mut found = vec![0; expected.len()];
            for (number, piece) in found.chunks_mut(14).enumerate() {
                let both = (band_of(&SHAPE, &local), &local);
                let read = |band: &Region, into: &mut [u8]| {
                    reads += 1;
                    into.copy_from_slice(&bytes_of(band));
                    Ok(())
                };
                assert!(bands.copy(0, 2, both, (number as u64 * 14, piece), Some(read)).unwrap());
            }
            assert_eq!(found, expected);
        }
        assert_eq!(reads, 1);
        bands.leave();
        assert!(bands.lock().bands.is_empty());
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
        let mut into = [0; 2];
        let large = Region::whole(&[KEEP_BYTES as u64 / 2]);
        let both = || (large.clone(), &large);
        let failing = |_: &Region, _: &mut [u8]| Err(Error::internal("a", "b"));
        assert!(bands.copy(0, 2, both(), (0, &mut into), Some(failing)).is_err());
        let reading = |_: &Region, _: &mut [u8]| Ok(());
        for leaf in 0..3 {
            let kept = bands.copy(leaf, 2, both(), (0, &mut into), Some(reading).filter(|_| leaf < 2));
            assert_eq!(kept.unwrap(), leaf < 2, "{leaf}");
            assert_eq!(bands.lock().bands.len(), 1);
        }
        let larger = Region::whole(&[KEEP_BYTES as u64]);
        assert!(!bands.copy(0, 2, (larger.clone(), &larger), (0, &mut into), Some(reading)).unwrap());
    }
}
