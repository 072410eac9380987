//! Flush: the half of a save that runs in the background. It submits slots to the queue as they
//! arrive, computes their checksums when no capture needs the processor, and returns them to the
//! pool. Then it writes the footers and syncs the files.

mod data_file;
mod writer;

use std::sync::Arc;

use self::data_file::FinishedFile;
use super::capture::Message;
use super::link::Link;
use super::progress::Progress;
use super::windows::Window;
use super::{SaveOptions, WrittenItem};
use crate::format::index::Index;
use crate::io::{Dir, Disk, SpaceReclaimer};
use crate::staging::StagingPool;
use crate::sync::Receiver;
use crate::{Error, Result};

/// One item, planned.
pub(super) struct PlannedItem {
    pub dir: String,
    pub file_name: String,
    pub file_id: u128,
    /// Offset of the footer: the end of the data.
    pub data_bytes: u64,
    pub tensor_bytes: u64,
    /// An upper estimate of the footer's size in bytes.
    pub footer_hint: u64,
}

/// The parts of a [`Flush::new`].
pub(super) struct FlushParts {
    pub items: Vec<PlannedItem>,
    pub windows: Vec<Window>,
    pub indexes: Arc<Vec<Index>>,
    pub receiver: Receiver<Message>,
    pub link: Arc<Link>,
    pub pool: Arc<StagingPool>,
    pub progress: Arc<Progress>,
    pub options: SaveOptions,
}

/// The half that writes. Dropping it cancels the save.
pub struct Flush {
    parts: FlushParts,
    over: bool,
}

impl Flush {
    pub(super) fn new(parts: FlushParts) -> Self {
        Self { parts, over: false }
    }

    /// The save's counters.
    pub fn progress(&self) -> Arc<Progress> {
        Arc::clone(&self.parts.progress)
    }

    /// Writes the data files below `step_dir`, and returns when each is complete and synced. The
    /// caller syncs the directories, and writes the indexes and the manifest. Returns the capture's
    /// error if it failed, and [`Error::Cancelled`] if it was dropped.
    pub fn run(
        mut self,
        disk: &dyn Disk,
        step_dir: &Arc<dyn Dir>,
        reclaimer: &mut dyn SpaceReclaimer,
    ) -> Result<Vec<WrittenItem>> {
        let written = writer::write(&self.parts, disk, step_dir, reclaimer);
        self.over = true;
        match written {
            Ok(files) => {
                let parts = &mut self.parts;
                // The capture may still hold its handle for a moment. Then clone.
                let indexes = std::mem::take(&mut parts.indexes);
                let indexes = Arc::try_unwrap(indexes).unwrap_or_else(|shared| (*shared).clone());
                Ok(collect(std::mem::take(&mut parts.items), indexes, &files))
            }
            Err(error) => {
                self.parts.link.stop(format!("the flush failed: {error}"));
                let is_cancelled = matches!(error, Error::Cancelled(_));
                let cause = if is_cancelled { self.parts.link.capture_error() } else { None };
                Err(cause.unwrap_or(error))
            }
        }
    }
}

impl Drop for Flush {
    fn drop(&mut self) {
        if !self.over {
            self.parts.link.stop("the flush was dropped before it was complete");
        }
    }
}

fn collect(items: Vec<PlannedItem>, indexes: Vec<Index>, files: &[FinishedFile]) -> Vec<WrittenItem> {
    let written = items.into_iter().zip(indexes).zip(files);
    written
        .map(|((item, mut index), end)| {
            if let Some(file) = index.files.first_mut() {
                file.length = end.length;
                file.trailer_crc = end.trailer_crc;
                file.within.clone_from(&end.within);
            }
            WrittenItem {
                dir: item.dir,
                index,
                length: end.length,
                file_id: item.file_id,
                trailer_crc: end.trailer_crc,
                tensor_bytes: item.tensor_bytes,
            }
        })
        .collect()
}
