//! Second reads of bytes that arrived damaged or not at all: from the same file, then from another
//! copy of it.

use std::ops::Range;
use std::sync::Arc;

use super::file_set::FileSet;
use crate::format::index::FileRecord;
use crate::io::Dir;

/// Other places with the same files, or with what these can be made of.
pub trait OtherCopies: Send + Sync {
    /// True if one of them can be opened.
    fn any(&self) -> bool;

    /// Reads or makes bytes of a file from one place after the other, until `is_right` accepts
    /// them. Returns these. Their place has checked them.
    fn read(
        &self,
        name: &str,
        offset: u64,
        len: usize,
        is_right: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Option<Vec<u8>>;
}

/// See the module documentation.
pub(super) struct Mender {
    dir: Arc<dyn Dir>,
    records: Arc<[FileRecord]>,
    others: Option<Arc<dyn OtherCopies>>,
}

impl Mender {
    /// For the files of a set.
    pub(super) fn new(files: &FileSet) -> Self {
        Self {
            dir: Arc::clone(files.directory()),
            records: Arc::clone(files.shared_records()),
            others: files.other_copies().cloned(),
        }
    }

    /// Reads bytes of a data file again: of this very file (`from_here`), then of other copies.
    /// Returns those that `is_right` accepts. It learns if they are of this file.
    pub(super) fn read(
        &self,
        file: u32,
        bytes: &Range<u64>,
        from_here: bool,
        mut is_right: impl FnMut(&[u8], bool) -> bool,
    ) -> Option<Vec<u8>> {
        let record = self.records.get(file as usize)?;
        let (name, offset) = (record.stored_name(), record.stored_offset(bytes.start));
        let len = (bytes.end - bytes.start) as usize;
        let mut is_right = |found: &[u8], is_here| found.len() == len && is_right(found, is_here);
        let path = self.dir.path().join(name);
        let again = || self.dir.open_file(name).and_then(|file| file.read_at(offset, len));
        if from_here
            && let Ok(found) = again()
            && is_right(&found, true)
        {
            tracing::warn!(file = %path.display(), offset, len, "bytes were damaged on their way, and right when they were read again");
            return Some(found);
        }
        let others = self.others.as_ref()?;
        let found = others.read(name, offset, len, &mut |found| is_right(found, false))?;
        tracing::warn!(file = %path.display(), offset, len, "damaged bytes were read from another copy. Verify the step");
        Some(found)
    }
}
