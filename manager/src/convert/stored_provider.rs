//! A tensor of an open checkpoint as a leaf of a save. Its bytes are read when they are captured.
//! So a checkpoint of any size passes through the staging ring.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use stepwell_core::Kind;
use stepwell_core::load::LoadOptions;
use stepwell_core::provider::{CaptureTiming, Fill, StateProvider};
use stepwell_core::region::Region;
use stepwell_core::staging::{Filling, Slot};
use stepwell_core::sys::HostTarget;
use stepwell_reshard::layout::Place;
use stepwell_reshard::read_plan::Request;
use stepwell_reshard::subchunk::run_to_boxes;

use super::bands::{Bands, MAX_BAND_BYTES, ReadRegion, band_of};
use super::file_plan::tensor_of;
use crate::error::Error;
use crate::reader::Reader;

/// Limit on bytes of read buffers of one read. Several threads of a capture read at a time.
const READ_BUDGET_BYTES: u64 = 16 << 20;

/// The state that the tensors of one save share.
#[derive(Default)]
pub struct StoredReads {
    is_stopped: AtomicBool,
    bands: Bands,
}

impl StoredReads {
    /// Has all reads fail.
    pub fn stop(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
    }
}

/// See the module documentation.
pub struct StoredProvider<R: Deref<Target = Reader>> {
    source: Arc<R>,
    leaf: u32,
    reads: Arc<StoredReads>,
}

impl<R: Deref<Target = Reader>> StoredProvider<R> {
    /// A provider of a tensor leaf. All leaves of a save are of one source, and share `reads`.
    pub fn new(source: Arc<R>, leaf: u32, reads: Arc<StoredReads>) -> Self {
        reads.bands.enter();
        Self { source, leaf, reads }
    }

    /// Copies some of the row-major bytes of a region, from `from` on. `peeks`: small pieces of it
    /// are wanted.
    fn copy(&self, local: &Region, from: u64, into: &mut [u8], peeks: bool) -> stepwell_core::Result<()> {
        let tensor = tensor_of(&self.source, self.leaf).map_err(core_error)?;
        let (size, band) = (tensor.dtype.size() as u64, band_of(&tensor.shape, local));
        let (len, all) = (into.len() as u64, local.volume().unwrap_or(0) * size);
        // Most of a chunk is worth its band. A window also has the ends of other chunks.
        let read = |region: &Region, into: &mut [u8]| self.read(region, 0, into);
        let reads = (peeks || len >= all / 2).then_some(&read as ReadRegion<'_>);
        let is_kept = (band != *local || (peeks && len < all))
            && self.reads.bands.copy(self.leaf, size, (band, local), (from, &mut *into), reads)?;
        if is_kept { Ok(()) } else { self.read(local, from, into) }
    }

    /// Reads some of the row-major bytes of a region, from `from` on.
    fn read(&self, local: &Region, from: u64, into: &mut [u8]) -> stepwell_core::Result<()> {
        let reader: &Reader = &self.source;
        let size = tensor_of(reader, self.leaf).map_err(core_error)?.dtype.size() as u64;
        let wrong =
            || stepwell_core::Error::internal("a run inside its region", format!("{from} of {local:?}"));
        let boxes = run_to_boxes(&local.extent, from / size, into.len() as u64 / size).ok_or_else(wrong)?;
        let (mut requests, mut dst_offset) = (Vec::with_capacity(boxes.len()), 0);
        for mut region in boxes {
            let bytes = region.volume().ok_or_else(wrong)? * size;
            let Place { strides: dst_strides, .. } = Place::row_major(&region.extent, size);
            for (offset, first) in region.offset.iter_mut().zip(&local.offset) {
                *offset += first;
            }
            requests.push(Request { leaf: self.leaf, region, dst: 0, dst_offset, dst_strides });
            dst_offset += bytes;
        }
        let target = HostTarget::from(into);
        let mut go_on = |_| !self.reads.is_stopped.load(Ordering::Relaxed);
        let options = reader.load_options();
        let options =
            LoadOptions { budget_bytes: options.budget_bytes.min(READ_BUDGET_BYTES), ..options.clone() };
        let read = reader.read_while(&requests, [target], &options, &mut go_on);
        read.map(drop).map_err(|failure| core_error(failure.error))
    }
}

impl<R: Deref<Target = Reader>> Drop for StoredProvider<R> {
    fn drop(&mut self) {
        self.reads.bands.leave();
    }
}

impl<R: Deref<Target = Reader> + Send + Sync> StateProvider for StoredProvider<R> {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> stepwell_core::Result<()> {
        for fill in fills {
            self.copy(fill.local, fill.from, slot.part(fill.at, fill.len)?, false)?;
        }
        Ok(())
    }

    fn peek(&self, local: &Region, from: u64, into: &mut [u8]) -> stepwell_core::Result<bool> {
        self.copy(local, from, into, true).map(|()| true)
    }

    fn timing(&self) -> CaptureTiming {
        CaptureTiming::Deferred
    }

    fn read_ahead(&self, local: &Region) -> bool {
        let Ok(tensor) = tensor_of(&self.source, self.leaf) else { return false };
        let (size, band) = (tensor.dtype.size() as u64, band_of(&tensor.shape, local));
        let read = |region: &Region, into: &mut [u8]| self.read(region, 0, into);
        // After an error the capture reads it again, and fails with it.
        band != *local && self.reads.bands.read_ahead(self.leaf, size, band, &read).unwrap_or(false)
    }

    fn slab_bytes(&self) -> Option<u64> {
        Some(MAX_BAND_BYTES)
    }

    fn check(&self, local: &Region, itemsize: usize) -> Result<(), String> {
        let tensor = tensor_of(&self.source, self.leaf).map_err(|error| error.to_string())?;
        if tensor.dtype.size() != itemsize || !local.fits(&tensor.shape) {
            return Err(format!("it is stored as {} of shape {:?}", tensor.dtype, tensor.shape));
        }
        Ok(())
    }
}

/// Returns the error for those that wait for the save. It has the same kind.
fn core_error(error: Error) -> stepwell_core::Error {
    let kind = Kind::named(error.kind()).unwrap_or(Kind::Internal);
    match error {
        Error::Core(error) => error,
        other => stepwell_core::Error::Provider { kind, what: other.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_failed_read_of_the_source_keeps_its_kind() {
        let gone = || Error::StepGone { path: "/run/step_1".into(), what: "a file".to_owned() };
        let late = || Error::Timeout { waited_for: "a read".to_owned(), waited: Duration::from_secs(1) };
        for error in [gone(), late()] {
            let (kind, text) = (error.kind(), error.to_string());
            let source = core_error(error);
            assert_eq!((source.kind(), source.to_string()), (kind, text));
            assert_eq!(Error::SaveFailed { step: 0, source }.kind(), kind);
        }
    }
}
