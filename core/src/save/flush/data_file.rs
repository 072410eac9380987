//! The data files that a flush writes: their creation, their checksums and their end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::FlushParts;
use crate::format::footer;
use crate::format::index::Within;
use crate::io::{Dir, File, LockKind, Section, SpaceReclaimer, retry_if_full};
use crate::{Error, Result};

/// Poll interval for the lock under which another rank of the node reserves its part of a file.
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A complete, synced data file.
pub(super) struct FinishedFile {
    pub length: u64,
    pub trailer_crc: u32,
    pub within: Option<Within>,
}

/// A data file that is being written.
pub(super) struct DataFile {
    pub file: Arc<dyn File>,
    /// The shared file that it is a part of.
    pub within: Option<Within>,
    /// The checksums of its blocks.
    pub crcs: Vec<u32>,
    /// The number of windows without a checksum.
    pub unsummed: usize,
    /// Its end, once its footer is encoded.
    pub footer: Option<FooterEnd>,
}

/// The end of a data file.
pub(super) struct FooterEnd {
    pub length: u64,
    pub trailer_crc: u32,
}

impl DataFile {
    /// Truncates and syncs it. All its writes have completed.
    pub(super) fn finish(&self) -> Result<FinishedFile> {
        let Some(FooterEnd { length, trailer_crc }) = self.footer else {
            return Err(Error::internal(format!("a footer of {}", self.file.path().display()), "none"));
        };
        self.file.set_len(length)?;
        self.file.sync()?;
        Ok(FinishedFile { length, trailer_crc, within: self.within.clone() })
    }
}

/// Creates the files of all items, each with space for its content.
pub(super) fn create(
    parts: &FlushParts,
    step_dir: &Arc<dyn Dir>,
    reclaimer: &mut dyn SpaceReclaimer,
) -> Result<Vec<DataFile>> {
    let mut files: Vec<DataFile> = Vec::with_capacity(parts.items.len());
    for item in &parts.items {
        let dir = match retry_if_full(&mut || reclaimer.reclaim(), || step_dir.create_dir(&item.dir)) {
            // Another rank has created it for the same step.
            Err(error) if error.already_exists() => step_dir.open_dir(&item.dir)?,
            other => other?,
        };
        let blocks = item.data_bytes.div_ceil(parts.options.block_bytes) as usize;
        let crcs = vec![0; blocks];
        let part = match (parts.options.node, parts.indexes.get(files.len())) {
            (Some(node), Some(index)) => {
                // The footer's length does not depend on the checksums, so the exact length of the
                // part is known now.
                let footer =
                    footer::encode(item.file_id, parts.options.block_bytes, item.data_bytes, index, &crcs)?;
                let length = item.data_bytes + footer.bytes.len() as u64;
                reserve_part(
                    &*dir,
                    &format!("n{node:05}.data"),
                    length,
                    reclaimer,
                    parts.options.stall_timeout,
                )?
            }
            _ => None,
        };
        let (file, within) = if let Some((file, within)) = part {
            (file, Some(within))
        } else {
            let len = item.data_bytes + item.footer_hint;
            let file = match reclaimer.take_over(&format!("{}/{}", item.dir, item.file_name), len) {
                Some(file) => file,
                None => create_file(&*dir, &item.file_name, len, reclaimer)?,
            };
            (file, None)
        };
        files.push(DataFile { file, within, crcs, unsummed: 0, footer: None });
    }
    for window in &parts.windows {
        if let Some(file) = files.get_mut(window.item as usize) {
            file.unsummed += 1;
        }
    }
    Ok(files)
}

fn create_file(
    dir: &dyn Dir,
    name: &str,
    len: u64,
    reclaimer: &mut dyn SpaceReclaimer,
) -> Result<Arc<dyn File>> {
    let mut again = false;
    retry_if_full(&mut || reclaimer.reclaim(), || {
        if std::mem::replace(&mut again, true) {
            // The first try may have created it before the disk was full.
            match dir.remove_file(name) {
                Err(error) if !error.is_not_found() => return Err(error),
                _ => {}
            }
        }
        dir.create_file(name, len)
    })
}

/// Reserves a part of that length in the file that the ranks of a node share. Returns `None` if the
/// file system has no locks: two ranks could then reserve the same bytes.
fn reserve_part(
    dir: &dyn Dir,
    name: &str,
    length: u64,
    reclaimer: &mut dyn SpaceReclaimer,
    timeout: Duration,
) -> Result<Option<(Arc<dyn File>, Within)>> {
    let begun = Instant::now();
    let lock = loop {
        match dir.try_lock(name, LockKind::Exclusive, true) {
            Ok(Some(lock)) => break lock,
            Ok(None) if begun.elapsed() < timeout => std::thread::sleep(LOCK_POLL_INTERVAL),
            Ok(None) => {
                let waited_for = format!("another rank of the node to reserve its part of {name}");
                return Err(Error::Timeout { waited_for, seconds: begun.elapsed().as_secs_f64() });
            }
            Err(error) if error.is_without_locks() => {
                tracing::info!(name, "no locks here: this rank writes a file of its own");
                return Ok(None);
            }
            Err(error) => return Err(error),
        }
    };
    let (file, offset) = retry_if_full(&mut || reclaimer.reclaim(), || dir.extend_file(name, length))?;
    drop(lock);
    let part: Arc<dyn File> = Arc::new(Section::new(file, offset, length));
    Ok(Some((part, Within { name: name.into(), offset, stream: None })))
}
