//! Files that are compressed streams in other files.

use super::super::decode::{MAX_PAUSED, MAX_PAUSED_BYTES};
use super::super::testing::{MemoryDisk, flat, options, pattern};
use super::super::{
    FileSet, KnownFile, LoadOptions, LoadStats, ReadLimits, execute, execute_while, plan, verify,
};
use crate::compression::Compression;
use crate::format::checksum::ZipCrc;
use crate::format::index::{CompressedStream, FileRecord, Index, Within};
use crate::read_plan::BoxCopy;
use crate::sys::HostTarget;
use crate::{Error, Result};

/// Bytes of the stream's content: several cells.
const LENGTH: u64 = 3_000_001;
/// The stream's offset in its file.
const BEGIN: u64 = 1001;
const NAME: &str = "x.npz";

fn content() -> Vec<u8> {
    // Half of it compresses.
    let mut bytes = pattern(3, LENGTH);
    bytes[1_000_000..2_500_000].fill(7);
    bytes
}

/// A file with a stream in it: as it is, and the records of both.
fn made(content: &[u8]) -> (Vec<u8>, [FileRecord; 2]) {
    let stream = miniz_oxide::deflate::compress_to_vec(content, 1);
    let mut crc = ZipCrc::default();
    crc.update(content);
    let bytes = [vec![9; BEGIN as usize].as_slice(), &stream, b"behind it"].concat();
    let outer = FileRecord {
        name: NAME.into(),
        length: bytes.len() as u64,
        file_id: 0,
        trailer_crc: 0,
        within: None,
    };
    let stream = CompressedStream {
        compression: Compression::Deflate,
        length: stream.len() as u64,
        crc: Some(crc.value()),
    };
    let within = Within { name: NAME.into(), offset: BEGIN, stream: Some(stream) };
    let inner = FileRecord { length: LENGTH, within: Some(within), ..outer.clone() };
    (bytes, [outer, inner])
}

struct Opened {
    disk: MemoryDisk,
    files: FileSet,
}

fn opened(bytes: Vec<u8>, records: &[FileRecord]) -> Result<Opened> {
    let disk = MemoryDisk::new();
    disk.put(NAME, bytes);
    let files = FileSet::foreign(disk.dir(), records, Vec::new(), &|_| KnownFile::default())?;
    Ok(Opened { disk, files })
}

impl Opened {
    /// Reads a part of the stream's content.
    fn read(&self, offset: u64, len: u64) -> Result<(Vec<u8>, LoadStats)> {
        let mut into = vec![0; len as usize];
        let targets = [HostTarget::from(into.as_mut_slice())];
        let copies = [of_stream(offset, len)];
        let stats = execute(&self.disk, &self.files, &Index::default(), &copies, targets, &options())?;
        Ok((into, stats))
    }
}

fn of_stream(offset: u64, len: u64) -> BoxCopy {
    BoxCopy { file: 1, ..flat(0, 0, offset, len) }
}

#[test]
fn any_part_of_a_stream_is_read() {
    let content = content();
    let (bytes, records) = made(&content);
    let opened = opened(bytes, &records).unwrap();
    for (offset, len) in [(0, LENGTH), (0, 1), (17, 900_000), (2_600_000, 300_001), (LENGTH - 1, 1)] {
        let (found, stats) = opened.read(offset, len).unwrap();
        assert!(found == content[offset as usize..][..len as usize], "{offset} + {len}");
        assert!(offset > 0 || stats.reads >= 1);
        assert!(stats.bytes_read <= records[0].length);
    }
    let planned = plan(&opened.files, &Index::default(), &[of_stream(5, 10)], ReadLimits::LOCAL).unwrap();
    let stream = records[1].stream().unwrap().length;
    let whole = BEGIN..BEGIN + stream;
    assert_eq!((planned[0].file, planned[0].reads.as_slice()), (1, std::slice::from_ref(&whole)));
}

#[test]
fn a_stream_without_an_end_may_go_on() {
    // The bytes are characters of two bytes each.
    let text: String = (0..4000_u32).map(|number| char::from(0x80 | number as u8)).collect();
    let content: Vec<u8> = text.chars().map(|one| one as u8).collect();
    let stream = CompressedStream { compression: Compression::Latin1, length: 8000, crc: None };
    let within = Within { name: NAME.into(), offset: 0, stream: Some(stream) };
    let outer = FileRecord { name: NAME.into(), length: 8000, file_id: 0, trailer_crc: 0, within: None };
    let inner = |length| FileRecord { length, within: Some(within.clone()), ..outer.clone() };
    for length in [3000, 4000, 4001] {
        let opened = opened(text.clone().into_bytes(), &[outer.clone(), inner(length)]).unwrap();
        match opened.read(17, 2983) {
            Ok((found, _)) => assert_eq!(found, content[17..3000]),
            Err(failed) => assert!(length > 4000 && failed.to_string().contains("it has no end"), "{failed}"),
        }
        let report =
            verify(&opened.disk, &opened.files, &Index::default(), &options(), &mut |_| true).unwrap();
        assert_eq!(report.damages.is_empty(), length <= 4000, "{:?}", report.damages);
    }
}

#[test]
fn a_read_of_a_stream_can_be_cancelled() {
    let (bytes, records) = made(&content());
    let opened = opened(bytes, &records).unwrap();
    let mut into = vec![0; LENGTH as usize];
    let targets = [HostTarget::from(into.as_mut_slice())];
    let copies = [of_stream(0, LENGTH)];
    let mut go_on = |done: u64| done < 1_000_000;
    let (disk, files) = (&opened.disk, &opened.files);
    let failed = execute_while(disk, files, &Index::default(), &copies, targets, &options(), &mut go_on);
    assert!(matches!(failed.unwrap_err().error, Error::Cancelled(_)));
}

#[test]
fn a_stream_is_decoded_once_for_reads_one_after_the_other() {
    let content = content();
    let (bytes, records) = made(&content);
    let stream = records[1].stream().unwrap().length;
    let opened = opened(bytes, &records).unwrap();
    let (mut read, mut offset) = (0, 0);
    // Pieces that begin in the middle of a block, and some in one block.
    for len in [100_001, 1, 5000, 299_999].into_iter().cycle() {
        let len = len.min(LENGTH - offset);
        let (found, stats) = opened.read(offset, len).unwrap();
        assert!(found == content[offset as usize..][..len as usize], "{offset} + {len}");
        read += stats.bytes_read;
        offset += len;
        if offset == LENGTH {
            break;
        }
    }
    assert_eq!(read, stream);
    // Another reader serves the reads before it.
    let halves = [0, LENGTH / 2];
    let mut read = 0;
    for at in 0..10 {
        for half in halves {
            let offset = half + at * 100_000;
            let (found, stats) = opened.read(offset, 100_000).unwrap();
            assert!(found == content[offset as usize..][..100_000], "{offset}");
            read += stats.bytes_read;
        }
    }
    assert!(read <= 2 * stream, "{read} of {stream}");
}

#[test]
fn the_readers_that_are_kept_are_bounded() {
    let content = content();
    let (bytes, [outer, inner]) = made(&content);
    let streams = std::iter::repeat_n(inner, 2 * MAX_PAUSED);
    let records: Vec<FileRecord> = std::iter::once(outer).chain(streams).collect();
    let opened = opened(bytes, &records).unwrap();
    for file in 1..records.len() as u32 {
        let mut into = [0; 1];
        let targets = [HostTarget::from(into.as_mut_slice())];
        let copies = [BoxCopy { file, ..flat(0, 0, 17, 1) }];
        execute(&opened.disk, &opened.files, &Index::default(), &copies, targets, &options()).unwrap();
        let (count, bytes) = opened.files.paused().kept();
        assert!(count <= MAX_PAUSED && bytes <= MAX_PAUSED_BYTES, "{count} readers of {bytes} bytes");
    }
    assert!(opened.files.paused().kept().0 > 1);
}

#[test]
fn a_read_can_be_cancelled_while_bytes_are_skipped() {
    let (bytes, records) = made(&content());
    let opened = opened(bytes, &records).unwrap();
    let mut into = [0; 1];
    let targets = [HostTarget::from(into.as_mut_slice())];
    let copies = [of_stream(LENGTH - 1, 1)];
    let mut asked = 0;
    let mut go_on = |_| {
        asked += 1;
        asked < 5
    };
    let (disk, files) = (&opened.disk, &opened.files);
    let failed = execute_while(disk, files, &Index::default(), &copies, targets, &options(), &mut go_on);
    assert!(matches!(failed.unwrap_err().error, Error::Cancelled(_)));
    assert_eq!(asked, 5);
}

#[test]
fn several_streams_are_decoded_at_a_time() {
    let content = content();
    let (bytes, [outer, inner]) = made(&content);
    let streams = std::iter::repeat_n(inner, 9);
    let records: Vec<FileRecord> = std::iter::once(outer).chain(streams).collect();
    let opened = opened(bytes, &records).unwrap();
    let (disk, files) = (&opened.disk, &opened.files);
    let read = |into: &mut [Vec<u8>], go_on: &mut dyn FnMut(u64) -> bool| {
        let copies: Vec<BoxCopy> = (0..9).map(|n| BoxCopy { file: n + 1, ..flat(0, n, 0, LENGTH) }).collect();
        let targets = into.iter_mut().map(|one| HostTarget::from(one.as_mut_slice()));
        let options = LoadOptions { threads: 4, ..options() };
        execute_while(disk, files, &Index::default(), &copies, targets, &options, go_on)
    };
    let mut into = vec![vec![0; LENGTH as usize]; 9];
    let stats = read(&mut into, &mut |_| true).unwrap();
    assert_eq!(stats.bytes_copied, 9 * LENGTH);
    assert!(into.iter().all(|one| *one == content));
    let failed = read(&mut into, &mut |done| done < LENGTH);
    assert!(matches!(failed.unwrap_err().error, Error::Cancelled(_)));
}

#[test]
fn damaged_streams_are_found_by_reads_and_verification() {
    let (sound, records) = made(&content());
    let longer = [content(), vec![0]].concat();
    let shorter = &content()[1..];
    let in_the_middle = BEGIN as usize + 500_000;
    let mut flipped = sound.clone();
    flipped[in_the_middle] ^= 4;
    for (bytes, crc, expected) in [
        (flipped, None, "its compressed part at byte 1001"),
        (made(&longer).0, None, "it goes on behind its 3000001 bytes"),
        (made(shorter).0, None, "it ends after 3000000 of 3000001 bytes"),
        (sound.clone(), Some(1), "written with 00000001"),
        (sound.clone(), None, ""),
    ] {
        let mut records = records.clone();
        records[0].length = bytes.len() as u64;
        if let Some(stream) = records[1].within.as_mut().and_then(|within| within.stream.as_mut()) {
            stream.length = bytes.len() as u64 - BEGIN - 9;
            stream.crc = crc.or(stream.crc);
        }
        let opened = opened(bytes, &records).unwrap();
        let report =
            verify(&opened.disk, &opened.files, &Index::default(), &options(), &mut |_| true).unwrap();
        assert_eq!((report.files, report.bytes), (1, records[0].length));
        if expected.is_empty() {
            assert!(report.damages.is_empty());
            assert_eq!(report.unguarded_bytes, BEGIN + 9);
            continue;
        }
        assert_eq!(report.damages.len(), 1);
        assert!(report.damages[0].what.contains(expected), "{:?}", report.damages);
        let failed = opened.read(0, LENGTH).unwrap_err();
        assert!(
            matches!(&failed, Error::Corrupt { .. }) && failed.to_string().contains(expected),
            "{failed}"
        );
    }
}

#[test]
fn claims_of_streams_are_checked_before_reads() {
    let (bytes, [outer, inner]) = made(&content());
    let claiming = FileRecord { length: bytes.len() as u64 * 1032, ..inner.clone() };
    let refused = opened(bytes.clone(), &[outer.clone(), claiming]).map(|_| ()).unwrap_err();
    assert!(refused.to_string().contains("cannot become"), "{refused}");
    let short = opened(bytes[..bytes.len() / 2].to_vec(), &[outer, inner]).unwrap();
    assert!(short.read(0, 10).unwrap_err().to_string().contains("in the middle of data"));
}
