//! Foreign files that are replaced while a checkpoint is open.

use super::super::testing::{MemoryDisk, flat, options};
use super::super::{FileSet, KnownFile, LoadFailure, execute};
use crate::format::index::{FileRecord, Index};
use crate::read_plan::BoxCopy;
use crate::sys::HostTarget;

/// More files than a set keeps open.
const FILES: u32 = 200;
const LENGTH: u64 = 100;

fn name(file: u32) -> String {
    format!("{file}.bin")
}

fn opened() -> (MemoryDisk, FileSet) {
    let disk = MemoryDisk::new();
    let record = |file| {
        disk.put(&name(file), vec![1; LENGTH as usize]);
        FileRecord { name: name(file).into(), length: LENGTH, file_id: 0, trailer_crc: 0, within: None }
    };
    let records: Vec<FileRecord> = (0..FILES).map(record).collect();
    let files = FileSet::foreign(disk.dir(), &records, Vec::new(), &|_| KnownFile::default()).unwrap();
    (disk, files)
}

fn read(disk: &MemoryDisk, files: &FileSet, file: u32) -> Result<u8, LoadFailure> {
    let mut into = [0; 1];
    let targets = [HostTarget::from(into.as_mut_slice())];
    let copies = [BoxCopy { file, ..flat(0, 0, 5, 1) }];
    execute(disk, files, &Index::default(), &copies, targets, &options())?;
    Ok(into[0])
}

#[test]
fn a_replaced_foreign_file_is_refused_by_name() {
    let (disk, files) = opened();
    for file in 0..FILES - 1 {
        assert_eq!(read(&disk, &files, file).unwrap(), 1);
    }
    // Files of the same length. The set has closed the first one, and has not opened the last one.
    for file in [0, FILES - 2, FILES - 1] {
        disk.put(&name(file), vec![2; LENGTH as usize]);
    }
    assert_eq!(read(&disk, &files, FILES - 2).unwrap(), 1);
    for file in [0, FILES - 1] {
        let refused = read(&disk, &files, file).unwrap_err().to_string();
        assert!(refused.contains(&format!("/{}", name(file))), "{refused}");
        assert!(refused.contains("changed since the checkpoint was opened"), "{refused}");
    }
}
