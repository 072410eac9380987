//! One disk per file system and process, probed once.
//!
//! Findings (engine, alignment, reasons) are kept for the life of the process. Its users own the
//! disk with its memory, and share it while it lives. A forked child makes its own disks from the
//! same findings.

use std::path::Path;
use std::sync::{Arc, Mutex, Weak};

use super::posix_disk::PosixDisk;
use super::probe::{Facts, Wanted};
use super::{Disk, Engine};
use crate::Result;

/// The purpose of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Reading only. The probe writes nothing either.
    Read,
    /// Creating files.
    Write,
}

struct Known {
    device: u64,
    engine: Engine,
    purpose: Purpose,
    facts: Facts,
    disk: Weak<PosixDisk>,
}

static KNOWN: Mutex<Vec<Known>> = Mutex::new(Vec::new());

/// Returns the disk for `path`, as [`super::open_disk`] finds it.
pub fn shared_disk(path: &Path, wanted: Engine, purpose: Purpose) -> Result<Arc<dyn Disk>> {
    let wanted = Wanted::find(path, wanted)?;
    let (device, engine) = (wanted.device()?, wanted.engine);
    if purpose == Purpose::Write {
        wanted.refuse_bucket(device)?;
    }
    let made = |facts: &Facts| Arc::new(facts.clone().into_disk());
    // A lock that was held during a fork stays locked. The child probes again.
    if let Ok(mut known) = KNOWN.try_lock() {
        let mut found: Vec<&mut Known> =
            known.iter_mut().filter(|one| (one.device, one.engine) == (device, engine)).collect();
        // Findings from a writing probe hold for reading too.
        found.sort_by_key(|one| one.purpose == Purpose::Read);
        let fits = |one: &&mut Known| purpose == Purpose::Read || one.purpose == Purpose::Write;
        if let Some(one) = found.into_iter().find(fits) {
            if let Some(disk) = one.disk.upgrade().filter(|disk| disk.is_here()) {
                return Ok(disk);
            }
            let disk = made(&one.facts);
            one.disk = Arc::downgrade(&disk);
            return Ok(disk);
        }
    }
    let facts = wanted.probe(purpose)?;
    let disk = made(&facts);
    // A read-only directory says little about the others.
    let lasting = purpose == Purpose::Read || facts.written;
    if lasting && let Ok(mut known) = KNOWN.try_lock() {
        known.retain(|one| (one.device, one.engine, one.purpose) != (device, engine, purpose));
        known.push(Known { device, engine, purpose, facts, disk: Arc::downgrade(&disk) });
    }
    Ok(disk)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_share_a_disk_and_readers_use_the_writers_probe() {
        let dir = tempfile::tempdir().unwrap();
        let writer = shared_disk(dir.path(), Engine::Threads, Purpose::Write).unwrap();
        let again = shared_disk(dir.path(), Engine::Threads, Purpose::Write).unwrap();
        let reader = shared_disk(dir.path(), Engine::Threads, Purpose::Read).unwrap();
        assert!(std::ptr::addr_eq(Arc::as_ptr(&writer), Arc::as_ptr(&again)));
        assert_eq!(writer.choice(), reader.choice());
        let other = shared_disk(dir.path(), Engine::Buffered, Purpose::Write).unwrap();
        assert_eq!(other.choice().engine, "buffered");
    }

    #[test]
    fn opening_for_reading_changes_no_directory() {
        use std::os::unix::fs::MetadataExt;

        let dir = tempfile::tempdir().unwrap();
        let before = std::fs::metadata(dir.path()).unwrap();
        let wanted = Wanted::find(dir.path(), Engine::Auto).unwrap();
        let facts = wanted.probe(Purpose::Read).unwrap();
        assert!(!facts.written);
        let after = std::fs::metadata(dir.path()).unwrap();
        assert_eq!((before.mtime(), before.mtime_nsec()), (after.mtime(), after.mtime_nsec()));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
