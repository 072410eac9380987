//! Files of other libraries whose blocks have known checksums. Every read of such a file is
//! checked, by whichever function: parsers of headers, restores, verification.
//!
//! The package keeps the checksums beside the files, and an [`AdoptedFile`] for each file while it
//! reads them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use stepwell_core::io::File;
use stepwell_core::load::{BlockChecksums, CheckedFile};

use crate::error::{Error, Result};

/// The files of this process, by path. Several checkpoints may have the same file open. The last
/// one that was opened has the newest checksums.
static FILES: Mutex<Option<HashMap<PathBuf, Vec<Weak<BlockChecksums>>>>> = Mutex::new(None);

/// A file of another library with checksums. Reads of its path are checked until it is dropped.
#[derive(Debug)]
pub struct AdoptedFile {
    path: PathBuf,
    checksums: Arc<BlockChecksums>,
}

impl AdoptedFile {
    /// `crcs` has the checksum of each block of `block_bytes`. The path is one without links.
    pub fn new(path: PathBuf, block_bytes: u64, length: u64, crcs: Vec<u32>) -> Result<Self> {
        let checksums = BlockChecksums::new(block_bytes, length, crcs.into())
            .map_err(|what| Error::Invalid(format!("{}: {what}", path.display())))?;
        let checksums = Arc::new(checksums);
        let mut files = FILES.lock().unwrap_or_else(PoisonError::into_inner);
        files.get_or_insert_default().entry(path.clone()).or_default().push(Arc::downgrade(&checksums));
        Ok(Self { path, checksums })
    }
}

impl Drop for AdoptedFile {
    fn drop(&mut self) {
        let mut files = FILES.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(files) = &mut *files else { return };
        let Some(held) = files.get_mut(&self.path) else { return };
        held.retain(|one| one.as_ptr() != Arc::as_ptr(&self.checksums));
        if held.is_empty() {
            files.remove(&self.path);
        }
    }
}

/// Returns the checksums of the file at a path, if it has any.
pub(crate) fn checksums_of(path: &Path) -> Option<Arc<BlockChecksums>> {
    let files = FILES.lock().unwrap_or_else(PoisonError::into_inner);
    files.as_ref()?.get(path)?.last()?.upgrade()
}

/// Returns a file whose reads are checked if its checksums are known.
pub(crate) fn checked(path: &Path, file: Arc<dyn File>) -> Result<Arc<dyn File>> {
    Ok(match checksums_of(path) {
        Some(checksums) => Arc::new(CheckedFile::new(file, checksums)?),
        None => file,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_known_as_long_as_their_file_is_held() {
        let path = PathBuf::from("/adopted/known-while-held");
        let of = |crc| AdoptedFile::new(path.clone(), 4096, 1, vec![crc]).unwrap();
        let found = || checksums_of(&path).map(|found| found.crcs().to_vec());
        assert_eq!(found(), None);
        for is_first_dropped_first in [true, false] {
            let (first, second) = (of(1), of(2));
            assert_eq!(found(), Some(vec![2]));
            let (dropped, kept) = if is_first_dropped_first { (first, second) } else { (second, first) };
            drop(dropped);
            assert_eq!(found(), Some(vec![if is_first_dropped_first { 2 } else { 1 }]));
            drop(kept);
            assert_eq!(found(), None);
        }
        assert!(AdoptedFile::new(path.clone(), 4096, 1, vec![]).is_err());
    }
}
