//! Bytes of files that other libraries wrote, for the package's format modules: headers, members of
//! zip archives, values around arrays. Their tensors are read by [`crate::Reader`].

use std::ops::Range;
use std::path::{Path, PathBuf};

use stepwell_core::compression::{Compression, Decompressor};
use stepwell_core::foreign::Fault;
use stepwell_core::foreign::msgpack::{MsgpackNode, MsgpackParser};
use stepwell_core::foreign::npy::{self, NpyHeader};
use stepwell_core::foreign::zip::{self, ZipMember, ZipMethod};
use stepwell_core::io::File;
use stepwell_core::sys::each;

use crate::error::{Error, Result};
use crate::foreign_reading::ForeignFiles;

/// Local headers of an archive that are not further apart are read together.
const NEAR_BYTES: u64 = 4096;
/// The longest read of local headers.
const MAX_HEADERS_BYTES: u64 = 1 << 20;
/// A shorter archive inside a file is read whole.
const SMALL_ARCHIVE_BYTES: u64 = 16 << 10;
/// Bytes of the start and of the end of a longer one that are read at first: enough for one tensor.
const HEAD_BYTES: u64 = 2 << 10;
const SHORT_TAIL_BYTES: u64 = 2 << 10;
/// The longest member whose content is read with its archive.
const MAX_RECORD_BYTES: u64 = 16 << 20;
/// Archives inside a file that are read at a time.
const ARCHIVES_AT_ONCE: usize = 1024;
/// Small reads at a time: a disk answers that many together.
const THREADS: usize = 16;

/// Reads bytes of a foreign file, as far as it has them. Also returns its length.
pub fn read_foreign(path: &Path, offset: u64, length: usize, files: &ForeignFiles) -> Result<(Vec<u8>, u64)> {
    let file = files.open(path)?;
    let file_length = file.len()?;
    // A length that a file names must not decide how much memory is reserved.
    let length = file_length.saturating_sub(offset).min(length as u64);
    Ok((file.read_at(offset, length as usize)?, file_length))
}

/// Reads bytes of several foreign files, as far as these have them: path, offset and length of
/// each.
pub fn read_foreign_ranges(ranges: &[(PathBuf, u64, usize)], files: &ForeignFiles) -> Result<Vec<Vec<u8>>> {
    let read = |(path, offset, length): &(PathBuf, u64, usize)| {
        read_foreign(path, *offset, *length, files).map(|(bytes, _)| bytes)
    };
    each("stepwell-foreign", THREADS, ranges, read).into_iter().collect()
}

/// A zip archive inside a file.
pub struct Archive {
    /// Its members, in the order of its directory, and the offsets of their contents in the file.
    pub members: Vec<(ZipMember, u64)>,
    /// The contents of the stored members with the wanted names, by their numbers.
    pub records: Vec<(usize, Vec<u8>)>,
}

/// The directory of a zip archive.
#[derive(Debug)]
pub struct ZipDirectory {
    path: PathBuf,
    place: zip::ZipDirectory,
    members: Vec<ZipMember>,
}

impl ZipDirectory {
    /// Reads the directory of a file that is an archive.
    pub fn read(path: &Path, files: &ForeignFiles) -> Result<Self> {
        let file = files.open(path)?;
        let bytes = ArchiveBytes { file: &*file, begin: 0, length: file.len()?, head: &[], tail: &[] };
        let (place, members) = listed(&bytes, zip::MAX_TAIL_BYTES).map_err(|error| error.at(path))?;
        Ok(Self { path: path.to_owned(), place, members })
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns its members, in its order.
    pub fn members(&self) -> &[ZipMember] {
        &self.members
    }

    /// Reads the offsets of the contents of the members with these numbers.
    pub fn contents(&self, numbers: &[usize], files: &ForeignFiles) -> Result<Vec<u64>> {
        let file = files.open(&self.path)?;
        let bytes = ArchiveBytes { file: &*file, begin: 0, length: file.len()?, head: &[], tail: &[] };
        contents(&bytes, &self.place, &self.members, numbers).map_err(|error| error.at(&self.path))
    }
}

/// The archives at these places of a file (offset, length), and the contents of their short members
/// whose names end with one of `wanted`.
pub fn archives(
    path: &Path,
    places: &[(u64, u64)],
    wanted: &[&str],
    files: &ForeignFiles,
) -> Result<Vec<Archive>> {
    let file = files.open(path)?;
    let file_length = file.len()?;
    let outside =
        places.iter().find(|(at, length)| at.checked_add(*length).is_none_or(|end| end > file_length));
    if let Some(&(at, length)) = outside {
        let end = at.saturating_add(length);
        let what = format!("bytes {at} to {end} were expected; the file has {file_length}");
        return Err(ArchiveError::Fault(Fault { at, what, is_cut: false }).at(path));
    }
    let mut found = Vec::with_capacity(places.len());
    for some in places.chunks(ARCHIVES_AT_ONCE) {
        let near = NearBytes::read(&*file, some)?;
        for &(begin, length) in some {
            found.push(archive(&*file, begin, length, &near, wanted).map_err(|error| error.at(path))?);
        }
    }
    Ok(found)
}

/// Parts of a file or archive, by their offsets. Those that are near each other are read together.
struct NearBytes(Vec<(u64, Vec<u8>)>);

impl NearBytes {
    fn read(file: &dyn File, places: &[(u64, u64)]) -> Result<Self> {
        let mut pieces: Vec<Range<u64>> = places
            .iter()
            .flat_map(|&(begin, length)| ends(length).map(|at| begin + at.start..begin + at.end))
            .collect();
        pieces.sort_unstable_by_key(|piece| piece.start);
        let ranges = joined(pieces);
        let read = |range: &Range<u64>| file.read_at(range.start, (range.end - range.start) as usize);
        let read = each("stepwell-foreign", THREADS, &ranges, read);
        let found = ranges.iter().zip(read).map(|(range, bytes)| Ok((range.start, bytes?)));
        Ok(Self(found.collect::<Result<_>>()?))
    }

    /// These bytes of the file, as far as they were read.
    fn get(&self, bytes: Range<u64>) -> &[u8] {
        let after = self.0.partition_point(|&(start, _)| start <= bytes.start);
        let found = after.checked_sub(1).and_then(|at| self.0.get(at)).and_then(|(start, read)| {
            read.get((bytes.start - start) as usize..)?.get(..(bytes.end - bytes.start) as usize)
        });
        found.unwrap_or_default()
    }
}

/// Joins ranges that are near each other. They are in the order of their starts.
fn joined(pieces: impl IntoIterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for piece in pieces {
        match ranges.last_mut() {
            Some(last)
                if piece.start <= last.end.saturating_add(NEAR_BYTES)
                    && piece.end - last.start <= MAX_HEADERS_BYTES =>
            {
                last.end = last.end.max(piece.end);
            }
            _ => ranges.push(piece),
        }
    }
    ranges
}

/// The first and the last bytes of an archive of that length. Those of a short one are all.
fn ends(length: u64) -> [Range<u64>; 2] {
    let head = if length <= SMALL_ARCHIVE_BYTES { length } else { HEAD_BYTES };
    [0..head, length - length.min(SHORT_TAIL_BYTES)..length]
}

fn archive(
    file: &dyn File,
    begin: u64,
    length: u64,
    near: &NearBytes,
    wanted: &[&str],
) -> Result<Archive, ArchiveError> {
    let [head, tail] = ends(length).map(|at| near.get(begin + at.start..begin + at.end));
    let bytes = ArchiveBytes { file, begin, length, head, tail };
    // Writers of torch leave no comment, so that a short end has the directory. Otherwise the
    // longest end is read.
    let tail = length.min(SHORT_TAIL_BYTES);
    let members = match members(&bytes, tail) {
        Err(ArchiveError::Fault(_)) if length > tail => members(&bytes, zip::MAX_TAIL_BYTES)?,
        found => found?,
    };
    let mut records = Vec::new();
    for (number, (member, content)) in members.iter().enumerate() {
        let is_wanted = wanted.iter().any(|name| member.name.ends_with(name));
        if is_wanted && member.method == ZipMethod::Stored && member.length <= MAX_RECORD_BYTES {
            records.push((number, bytes.read(*content, member.length)?));
        }
    }
    let members = members.into_iter().map(|(member, content)| (member, begin + content)).collect();
    Ok(Archive { members, records })
}

/// The archives that are compressed streams at these places of a file (offset, length), as far as
/// their first `head` bytes show them. Offsets are those in the decoded archive.
pub fn compressed_archives(
    path: &Path,
    places: &[(u64, u64)],
    compression: Compression,
    wanted: &[&str],
    head: u64,
    files: &ForeignFiles,
) -> Result<Vec<Archive>> {
    let file = files.open(path)?;
    let archive = |&(offset, length): &(u64, u64)| {
        let place = StreamPlace { name: String::new(), offset, length, compression: Some(compression) };
        let head = first_bytes(&*file, &place, head)?;
        let members = zip::first_members(&head);
        let content = |(member, content): &(ZipMember, u64)| {
            let is_wanted = wanted.iter().any(|name| member.name.ends_with(name));
            head.get(*content as usize..)?.get(..member.length as usize).filter(|_| is_wanted)
        };
        let records = members.iter().enumerate();
        let records = records.filter_map(|(number, member)| Some((number, content(member)?.to_vec())));
        Ok(Archive { records: records.collect(), members })
    };
    places.iter().map(archive).collect()
}

/// A failure in an archive.
enum ArchiveError {
    /// Its bytes are not what they should be.
    Fault(Fault),
    /// They cannot be read.
    Read(Error),
}

impl ArchiveError {
    fn at(self, path: &Path) -> Error {
        match self {
            Self::Fault(fault) => stepwell_core::Error::corrupt(path, fault.to_string()).into(),
            Self::Read(error) => error,
        }
    }
}

/// The bytes of an archive inside a file.
struct ArchiveBytes<'a> {
    file: &'a dyn File,
    begin: u64,
    length: u64,
    /// Its first bytes, and its last ones.
    head: &'a [u8],
    tail: &'a [u8],
}

impl ArchiveBytes<'_> {
    /// Reads bytes of the archive, as far as it has them.
    fn read(&self, offset: u64, length: u64) -> Result<Vec<u8>, ArchiveError> {
        let length = self.length.saturating_sub(offset).min(length);
        let tail_at = self.length - self.tail.len() as u64;
        for (begin, known) in [(0, self.head), (tail_at, self.tail)] {
            let from = offset.checked_sub(begin);
            let found = from.and_then(|from| known.get(from as usize..)?.get(..length as usize));
            if let Some(found) = found {
                return Ok(found.to_vec());
            }
        }
        let read = self.file.read_at(self.begin + offset, length as usize);
        read.map_err(|error| ArchiveError::Read(error.into()))
    }
}

/// The members of an archive, and the offsets of their contents in it. Its last `tail_bytes` are
/// searched for its end record.
fn members(bytes: &ArchiveBytes<'_>, tail_bytes: u64) -> Result<Vec<(ZipMember, u64)>, ArchiveError> {
    let (place, members) = listed(bytes, tail_bytes)?;
    let all: Vec<usize> = (0..members.len()).collect();
    let contents = contents(bytes, &place, &members, &all)?;
    Ok(members.into_iter().zip(contents).collect())
}

/// The place of an archive's directory, and the members that it lists.
fn listed(
    bytes: &ArchiveBytes<'_>,
    tail_bytes: u64,
) -> Result<(zip::ZipDirectory, Vec<ZipMember>), ArchiveError> {
    let tail_at = bytes.length.saturating_sub(tail_bytes);
    let tail = bytes.read(tail_at, tail_bytes)?;
    let place = zip::directory(&tail, bytes.length).map_err(ArchiveError::Fault)?;
    let listed = bytes.read(place.offset, place.length)?;
    let members = zip::members(&listed, &place).map_err(ArchiveError::Fault)?;
    Ok((place, members))
}

/// The offsets of the contents of the members with these numbers.
fn contents(
    bytes: &ArchiveBytes<'_>,
    place: &zip::ZipDirectory,
    members: &[ZipMember],
    numbers: &[usize],
) -> Result<Vec<u64>, ArchiveError> {
    let headers = local_headers(bytes, members, numbers)?;
    let wanted: Vec<(usize, &[u8])> =
        numbers.iter().zip(&headers).map(|(&number, header)| (number, header.as_slice())).collect();
    zip::contents(&wanted, members, place).map_err(ArchiveError::Fault)
}

/// The bytes of the local headers of the members with these numbers, up to the end of the name.
fn local_headers(
    bytes: &ArchiveBytes<'_>,
    members: &[ZipMember],
    numbers: &[usize],
) -> Result<Vec<Vec<u8>>, ArchiveError> {
    let headers: Vec<Range<u64>> = numbers
        .iter()
        .map(|&number| {
            members.get(number).map_or(0..0, |one| one.header..one.header + zip::local_header_bytes(one))
        })
        .collect();
    let mut pieces = headers.clone();
    pieces.sort_unstable_by_key(|piece| piece.start);
    let ranges = joined(pieces);
    // A disk answers many small reads together.
    let read = |range: &Range<u64>| bytes.read(range.start, range.end - range.start);
    let read = each("stepwell-foreign", THREADS, &ranges, read);
    let found = ranges.iter().zip(read).map(|(range, bytes)| Ok((range.start, bytes?)));
    let found = NearBytes(found.collect::<Result<_, ArchiveError>>()?);
    Ok(headers.into_iter().map(|header| found.get(header).to_vec()).collect())
}

/// The place of an array of numpy, or of a compressed archive, in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamPlace {
    /// Its name, for messages. Empty: it has none.
    pub name: String,
    /// Its first byte in the file.
    pub offset: u64,
    /// Its bytes in the file.
    pub length: u64,
    /// How they are compressed, if they are.
    pub compression: Option<Compression>,
}

/// Compressed bytes that are read first.
const COMPRESSED_BYTES: u64 = 4096;
/// Bytes of an array that are read first. Most headers have 128.
const NPY_START_BYTES: u64 = 256;

/// The headers of arrays in a file.
pub fn npy_headers(path: &Path, places: &[StreamPlace], files: &ForeignFiles) -> Result<Vec<NpyHeader>> {
    let file = files.open(path)?;
    places.iter().map(|place| npy_header(&*file, place)).collect()
}

fn npy_header(file: &dyn File, place: &StreamPlace) -> Result<NpyHeader> {
    let fault = |fault: Fault| place.corrupt(file, &fault.to_string());
    let mut start = first_bytes(file, place, NPY_START_BYTES)?;
    let length = npy::header_length(&start).map_err(fault)?;
    if length > NPY_START_BYTES {
        start = first_bytes(file, place, length)?;
    }
    npy::parse(&start).map_err(fault)
}

impl StreamPlace {
    fn corrupt(&self, file: &dyn File, what: &str) -> Error {
        let name = if self.name.is_empty() { String::new() } else { format!("array `{}`: ", self.name) };
        stepwell_core::Error::corrupt(file.path(), format!("{name}{what}")).into()
    }
}

/// The first bytes at a place, decoded, as far as it has them.
fn first_bytes(file: &dyn File, place: &StreamPlace, wanted: u64) -> Result<Vec<u8>> {
    let Some(compression) = place.compression else {
        return Ok(file.read_at(place.offset, wanted.min(place.length) as usize)?);
    };
    let mut decoder = Decompressor::new(compression);
    let mut decoded = vec![0; wanted as usize];
    let (mut written, mut at) = (0, 0);
    let mut size = COMPRESSED_BYTES;
    while at < place.length {
        let length = (place.length - at).min(size);
        size = (2 * size).min(MAX_HEADERS_BYTES);
        let input = file.read_at(place.offset + at, length as usize)?;
        let output = decoded.get_mut(written..).unwrap_or_default();
        let piece = decoder.step(&input, output).map_err(|what| place.corrupt(file, what))?;
        written += piece.written;
        at += piece.used as u64;
        if piece.ended || (piece.used, piece.written) == (0, 0) {
            break;
        }
    }
    decoded.truncate(written);
    Ok(decoded)
}

/// The value in a MessagePack file. Values of the application's types `nested` contain a value.
pub fn msgpack(path: &Path, nested: &[i8], files: &ForeignFiles) -> Result<Vec<MsgpackNode>> {
    let file = files.open(path)?;
    let fault = |fault: Fault| Error::from(stepwell_core::Error::corrupt(path, fault.to_string()));
    let mut parser = MsgpackParser::new(file.len()?, nested);
    while let Some(wanted) = parser.wants() {
        let bytes = file.read_at(wanted.start, (wanted.end - wanted.start) as usize)?;
        parser.feed(&bytes).map_err(fault)?;
    }
    parser.finish().map_err(fault)
}
