//! The files of another library's checkpoint, as one reading of it knows them.
//!
//! A format module reads headers and metadata first, and the engine reads tensors later. Both see
//! the same files: whatever has changed since its first read is refused. If the checkpoint was
//! adopted, the package has computed checksums, and all of these reads are checked.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stepwell_core::io::{Disk, File, Stat};
use stepwell_core::load::{BlockChecksums, CheckedFile, KnownFile};
use stepwell_core::sys::each;

use crate::error::{Error, Result};

/// Files that are looked at together.
const THREADS: usize = 16;

/// The known facts about the files of a reading, by their paths without links.
#[derive(Debug, Default)]
pub struct ForeignReading {
    files: Mutex<HashMap<PathBuf, KnownFile>>,
    /// The objects of a store, as it has listed them.
    listed: Arc<HashMap<PathBuf, Stat>>,
}

impl ForeignReading {
    /// A reading of objects that a store has listed.
    pub fn of_objects(listed: Arc<HashMap<PathBuf, Stat>>) -> Self {
        Self { files: Mutex::default(), listed }
    }

    /// From now on, reads of the file are checked. `crcs` has the checksum of each block of
    /// `block_bytes`.
    pub fn adopt(&self, path: PathBuf, block_bytes: u64, length: u64, crcs: Vec<u32>) -> Result<()> {
        let checksums = BlockChecksums::new(block_bytes, length, crcs.into())
            .map_err(|what| Error::Invalid(format!("{}: {what}", path.display())))?;
        self.lock().entry(path).or_default().checksums = Some(Arc::new(checksums));
        Ok(())
    }

    /// Returns what is known of a file.
    pub(crate) fn known(&self, path: &Path) -> KnownFile {
        let mut known = self.lock().get(path).cloned().unwrap_or_default();
        known.first = known.first.or_else(|| self.listed.get(path).copied());
        known
    }

    /// Fails if a file has changed since it was first read.
    pub(crate) fn check_unchanged(&self, disk: &dyn Disk) -> Result<()> {
        let read = |(path, known): (&PathBuf, &KnownFile)| Some((path.clone(), known.first?));
        let files: Vec<(PathBuf, Stat)> = self.lock().iter().filter_map(read).collect();
        let check = |(path, first): &(PathBuf, Stat)| {
            let now = parent_and_name(path)
                .and_then(|(parent, name)| Ok(disk.open_foreign_dir(parent)?.stat(name)?))?
                .ok_or_else(|| stepwell_core::Error::corrupt(path, "it was removed while it was read"))?;
            if (now.len, now.modified) == (first.len, first.modified) {
                return Ok(());
            }
            let what = "it has changed while the checkpoint was opened. Open it when its writer has ended";
            Err(Error::from(stepwell_core::Error::corrupt(path, what)))
        };
        each("stepwell-foreign", THREADS, &files, check).into_iter().collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, KnownFile>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The files of a disk, for one reading.
pub struct ForeignFiles {
    disk: Arc<dyn Disk>,
    reading: Arc<ForeignReading>,
}

impl ForeignFiles {
    /// The files of a disk.
    pub fn new(disk: Arc<dyn Disk>, reading: Arc<ForeignReading>) -> Self {
        Self { disk, reading }
    }

    /// Opens a file. Its reads are checked if its checksums are known.
    pub(crate) fn open(&self, path: &Path) -> Result<Arc<dyn File>> {
        let (parent, name) = parent_and_name(path)?;
        let dir = self.disk.open_foreign_dir(parent)?;
        let known = self.reading.known(path);
        // Before it is opened: a file that replaces it in between is found to have changed.
        let first = known.first.map_or_else(|| dir.stat(name), |first| Ok(Some(first)))?;
        if let Some(now) = first {
            self.reading.lock().entry(path.to_owned()).or_default().first.get_or_insert(now);
        }
        let file = dir.open_file(name)?;
        Ok(match known.checksums {
            Some(checksums) => Arc::new(CheckedFile::new(file, checksums)?),
            None => file,
        })
    }
}

/// A path's directory and its name in it.
pub(crate) fn parent_and_name(path: &Path) -> Result<(&Path, &str)> {
    path.parent()
        .zip(path.file_name().and_then(|name| name.to_str()))
        .ok_or_else(|| Error::Invalid(format!("{} is no path of a file", path.display())))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use stepwell_core::io::{Engine, open_disk};

    use super::*;

    fn disk() -> (tempfile::TempDir, Arc<dyn Disk>) {
        let place = tempfile::tempdir().unwrap();
        let disk = open_disk(place.path(), Engine::Auto).unwrap();
        (place, disk)
    }

    #[test]
    fn checksums_are_those_of_one_reading() {
        let (place, disk) = disk();
        let path = place.path().join("x");
        fs::write(&path, "x").unwrap();
        let (checked, other) = (Arc::new(ForeignReading::default()), Arc::default());
        checked.adopt(path.clone(), 4096, 1, vec![7]).unwrap();
        assert!(checked.adopt(path.clone(), 4096, 1, vec![]).is_err());
        let read = |reading| ForeignFiles::new(Arc::clone(&disk), reading).open(&path).unwrap().read_at(0, 1);
        assert!(read(checked).unwrap_err().to_string().contains("checksum"));
        assert_eq!(read(other).unwrap(), b"x");
    }

    #[test]
    fn a_file_that_has_changed_since_its_first_read_is_refused() {
        let (place, disk) = disk();
        let path = place.path().join("x");
        let reading = Arc::new(ForeignReading::default());
        let files = ForeignFiles::new(Arc::clone(&disk), Arc::clone(&reading));
        fs::write(&path, "x").unwrap();
        files.open(&path).unwrap();
        reading.check_unchanged(&*disk).unwrap();
        fs::write(&path, "longer").unwrap();
        files.open(&path).unwrap(); // the facts are those before the first read
        assert!(reading.check_unchanged(&*disk).unwrap_err().to_string().contains("has changed"));
        fs::remove_file(&path).unwrap();
        assert!(reading.check_unchanged(&*disk).unwrap_err().to_string().contains("removed"));
    }
}
