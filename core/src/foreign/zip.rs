//! The directory of a zip archive, as `torch.save` and `numpy.savez` write it.
//!
//! Sizes and checksums are those of the central directory: writers of streams leave them out of the
//! local headers. An archive that two readers could understand in two ways is refused: a name that
//! occurs twice, a local header with another name, members that overlap, several disks, encryption.

use std::collections::HashSet;

use super::{Fault, Parsed};

/// The longest end of an archive: records and a comment.
pub const MAX_TAIL_BYTES: u64 = 22 + 65_535 + 20 + 56;
/// The largest central directory that is read.
pub const MAX_DIRECTORY_BYTES: u64 = 256 << 20;
/// Bytes of a local header in front of the name.
pub const LOCAL_HEADER_BYTES: u64 = 30;

/// The most members that are found without the directory.
const MAX_FIRST_MEMBERS: usize = 64;
/// The length of a member whose end is not known.
pub const OPEN_LENGTH: u64 = 1 << 62;

const END: &[u8] = b"PK\x05\x06";
const END_64: &[u8] = b"PK\x06\x06";
const LOCATOR_64: &[u8] = b"PK\x06\x07";
const CENTRAL: &[u8] = b"PK\x01\x02";
const LOCAL: &[u8] = b"PK\x03\x04";
const DESCRIPTOR: &[u8] = b"PK\x07\x08";
const NONE_16: u64 = 0xffff;
const NONE_32: u64 = 0xffff_ffff;
/// Flag bits of encrypted members and of masked headers.
const ENCRYPTED: u64 = 1 | 1 << 6 | 1 << 13;
/// Flag bit of a member whose checksum and length are behind its content.
const STREAMED: u64 = 1 << 3;
/// Flag bit of a patch.
const PATCHED: u64 = 1 << 5;

/// The place of the central directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZipDirectory {
    /// Offset in the file.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Members.
    pub count: u64,
}

/// How a member's bytes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZipMethod {
    /// As they are.
    Stored,
    /// Deflated.
    Deflated,
}

/// A member of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZipMember {
    /// Its name.
    pub name: String,
    /// How its bytes are stored.
    pub method: ZipMethod,
    /// CRC-32 of its bytes. `None`: the archive has none, because all of its checksums are zero.
    pub crc: Option<u32>,
    /// Bytes as they are stored.
    pub stored_length: u64,
    /// Bytes of the content.
    pub length: u64,
    /// Offset of its local header.
    pub header: u64,
}

/// Finds the central directory. `tail` are the last bytes of a file of `file_length` bytes: all, or
/// at least [`MAX_TAIL_BYTES`].
pub fn directory(tail: &[u8], file_length: u64) -> Parsed<ZipDirectory> {
    let begin = file_length.saturating_sub(tail.len() as u64);
    let none = || Fault::new(begin, "the end record of a zip archive was expected, and there is none");
    let last = tail.len().checked_sub(22).ok_or_else(none)?;
    // The comment behind it ends the file. A second one inside the comment would be ambiguous.
    let mut ends = (0..=last).rev().filter(|&at| {
        tail.get(at) == END.first()
            && tail.get(at..).is_some_and(|rest| rest.starts_with(END))
            && word(tail, at + 20, 2) == Some((tail.len() - at - 22) as u64)
    });
    let at = ends.next().ok_or_else(none)?;
    if ends.next().is_some() {
        return Err(Fault::new(begin + at as u64, "the archive has two end records"));
    }
    let field = |offset: usize, width: usize| word(tail, at + offset, width).unwrap_or_default();
    let (disk, first_disk) = (field(4, 2), field(6, 2));
    let (here, count, length, offset) = (field(8, 2), field(10, 2), field(12, 4), field(16, 4));
    let end_at = begin + at as u64;
    let found = match end_64(tail, at, begin)? {
        Some(found) => {
            let agrees = |short: u64, none: u64, long: u64| short == none || short == long;
            let agree = agrees(count, NONE_16, found.count)
                && agrees(length, NONE_32, found.length)
                && agrees(offset, NONE_32, found.offset);
            if !agree {
                return Err(Fault::new(end_at, "the two end records of the archive contradict each other"));
            }
            found
        }
        None if disk != 0 || first_disk != 0 || here != count => {
            return Err(Fault::new(end_at, "an archive on several disks is not supported"));
        }
        None => ZipDirectory { offset, length, count },
    };
    let end = found.offset.checked_add(found.length);
    if end.is_none_or(|end| end > end_at) {
        return Err(Fault::new(end_at, "the central directory reaches beyond its end record"));
    }
    if found.length > MAX_DIRECTORY_BYTES {
        let what = format!(
            "a central directory of {} bytes; at most {MAX_DIRECTORY_BYTES} are supported",
            found.length
        );
        return Err(Fault::new(end_at, what));
    }
    Ok(found)
}

/// The end record of a long archive, if the end record at `at` has a locator in front of it.
fn end_64(tail: &[u8], at: usize, begin: u64) -> Parsed<Option<ZipDirectory>> {
    let locator = at.checked_sub(20);
    let Some(locator) = locator.filter(|&at| tail.get(at..).is_some_and(|rest| rest.starts_with(LOCATOR_64)))
    else {
        return Ok(None);
    };
    let fault = |what: &str| Fault::new(begin + locator as u64, what);
    let record = word(tail, locator + 8, 8).and_then(|at| at.checked_sub(begin));
    let record = record.and_then(|at| usize::try_from(at).ok()).filter(|&at| at < locator);
    let record = record.ok_or_else(|| fault("it names an end record that is not in front of it"))?;
    if !tail.get(record..).is_some_and(|rest| rest.starts_with(END_64)) {
        return Err(fault("it names a place where no end record is"));
    }
    let field = |offset: usize| word(tail, record + offset, 8);
    let disks = word(tail, record + 16, 8);
    match (field(24), field(32), field(40), field(48)) {
        (Some(here), Some(count), Some(length), Some(offset)) if disks == Some(0) && here == count => {
            Ok(Some(ZipDirectory { offset, length, count }))
        }
        _ => Err(fault("an archive on several disks is not supported")),
    }
}

/// Parses the central directory: the members, in its order.
pub fn members(bytes: &[u8], directory: &ZipDirectory) -> Parsed<Vec<ZipMember>> {
    let mut members = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let place = directory.offset + at as u64;
        let fault = |what: &str| Fault::new(place, what);
        if !bytes.get(at..).is_some_and(|rest| rest.starts_with(CENTRAL)) {
            return Err(fault("an entry of the central directory was expected"));
        }
        let field = |offset: usize, width: usize| word(bytes, at + offset, width);
        let short = || fault("the central directory ends in the middle of an entry");
        let lengths = (field(28, 2), field(30, 2), field(32, 2), field(42, 4));
        let (Some(name), Some(extra), Some(comment), Some(header)) = lengths else { return Err(short()) };
        let name_at = at + 46;
        let extra_at = name_at + name as usize;
        let end = extra_at + extra as usize + comment as usize;
        let (Some(name), Some(extra)) =
            (bytes.get(name_at..extra_at), bytes.get(extra_at..extra_at + extra as usize))
        else {
            return Err(short());
        };
        if end > bytes.len() {
            return Err(short());
        }
        let name = std::str::from_utf8(name).map_err(|_| fault("a member's name is no UTF-8"))?.to_owned();
        let flags = field(8, 2).unwrap_or_default();
        if flags & ENCRYPTED != 0 {
            return Err(fault("an encrypted archive is not supported"));
        }
        if flags & PATCHED != 0 {
            return Err(fault("a member that is a patch is not supported"));
        }
        let method = match field(10, 2) {
            Some(0) => ZipMethod::Stored,
            Some(8) => ZipMethod::Deflated,
            _ => return Err(fault("a member is stored by a method that is not supported")),
        };
        let crc = field(16, 4).map(|crc| crc as u32);
        let wide = wide_sizes(extra).ok_or_else(|| fault("a member's extra field is broken"))?;
        let mut wide = wide.into_iter();
        let mut long = |short: Option<u64>| match short {
            Some(NONE_32) => wide.next(),
            short => short,
        };
        let sizes = (long(field(24, 4)), long(field(20, 4)), long(Some(header)));
        let (Some(length), Some(stored_length), Some(header)) = sizes else {
            return Err(fault("a member's sizes are missing"));
        };
        if method == ZipMethod::Stored && length != stored_length {
            return Err(fault("a stored member has two lengths"));
        }
        members.push(ZipMember { name, method, crc, stored_length, length, header });
        at = end;
    }
    if members.len() as u64 != directory.count {
        let what =
            format!("the archive says that it has {} members, and lists {}", directory.count, members.len());
        return Err(Fault::new(directory.offset, what));
    }
    check(&members, directory)?;
    // Some writers leave the checksums out.
    if members.iter().all(|member| member.crc == Some(0)) {
        for member in &mut members {
            member.crc = None;
        }
    }
    Ok(members)
}

/// The members at the start of an archive without its directory, and the offsets of their contents.
/// The last one may go on behind these bytes. Its length is then [`OPEN_LENGTH`]. The list ends at
/// a member that is compressed, encrypted or damaged.
pub fn first_members(head: &[u8]) -> Vec<(ZipMember, u64)> {
    let mut members: Vec<(ZipMember, u64)> = Vec::new();
    let mut at = 0;
    let is_next = |at: usize| head.get(at..).is_some_and(|rest| rest.starts_with(LOCAL));
    while is_next(at) && members.len() < MAX_FIRST_MEMBERS {
        let field = |offset: usize, width: usize| word(head, at + offset, width);
        let (Some(name_length), Some(extra)) = (field(26, 2), field(28, 2)) else { break };
        let (name_at, flags) = (at + LOCAL_HEADER_BYTES as usize, field(6, 2).unwrap_or_default());
        let content = name_at + name_length as usize + extra as usize;
        let name = head.get(name_at..name_at + name_length as usize);
        let Some(Ok(name)) = name.map(std::str::from_utf8) else { break };
        let is_plain = field(8, 2) == Some(0) && flags & (ENCRYPTED | PATCHED) == 0;
        if !is_plain || members.iter().any(|(known, _)| known.name == name) {
            break;
        }
        // A stream has checksum and length behind the content, and nothing in front of it.
        let ends = |end: usize| {
            let rest = head.get(end..).unwrap_or_default();
            rest.starts_with(DESCRIPTOR) && word(rest, 8, 4) == Some((end - content) as u64)
        };
        let is_stream = flags & STREAMED != 0;
        let end = if is_stream {
            (content..head.len()).find(|&end| ends(end))
        } else {
            field(18, 4).map(|length| content + length as usize).filter(|&end| end <= head.len())
        };
        let length = end.map_or(OPEN_LENGTH, |end| (end - content) as u64);
        let crc = if is_stream { end.and_then(|end| word(head, end + 4, 4)) } else { field(14, 4) };
        let crc = crc.map(|crc| crc as u32).filter(|&crc| crc != 0);
        let (name, header) = (name.to_owned(), at as u64);
        let method = ZipMethod::Stored;
        members
            .push((ZipMember { name, method, crc, stored_length: length, length, header }, content as u64));
        let Some(end) = end else { break };
        // Lengths behind the content have four or eight bytes.
        at = if is_stream {
            [end + 16, end + 24].into_iter().find(|&at| is_next(at)).unwrap_or(head.len())
        } else {
            end
        };
    }
    members
}

/// Names are unique, and members do not overlap.
fn check(members: &[ZipMember], directory: &ZipDirectory) -> Parsed<()> {
    let mut names = HashSet::with_capacity(members.len());
    let mut places = Vec::with_capacity(members.len());
    for member in members {
        let fault = |what: String| Fault::new(member.header, what);
        if !names.insert(member.name.as_str()) {
            return Err(fault(format!("member `{}` occurs twice", member.name)));
        }
        let begin = member.header.saturating_add(LOCAL_HEADER_BYTES + member.name.len() as u64);
        let end = begin.checked_add(member.stored_length).filter(|&end| end <= directory.offset);
        let Some(end) = end else {
            return Err(fault(format!("member `{}` reaches into the central directory", member.name)));
        };
        places.push((member.header, end, member.name.as_str()));
    }
    places.sort_unstable();
    let overlap = places.windows(2).find_map(|two| match two {
        [(_, end, one), (begin, _, other)] if begin < end => Some((begin, one, other)),
        _ => None,
    });
    match overlap {
        Some((begin, one, other)) => {
            Err(Fault::new(*begin, format!("members `{one}` and `{other}` overlap")))
        }
        None => Ok(()),
    }
}

/// The offsets of the contents of some members: of those with these numbers in `members`, which are
/// all. Each has the first bytes of its local header: as many as [`local_header_bytes`] says, or
/// what the file has of them.
pub fn contents(
    wanted: &[(usize, &[u8])],
    members: &[ZipMember],
    directory: &ZipDirectory,
) -> Parsed<Vec<u64>> {
    let mut begins: Vec<u64> = members.iter().map(|member| member.header).collect();
    begins.sort_unstable();
    let mut found = Vec::with_capacity(wanted.len());
    for &(number, header) in wanted {
        let Some(member) = members.get(number) else {
            return Err(Fault::new(directory.offset, format!("the archive has no member {number}")));
        };
        let content = content(header, member)?;
        let next = begins.partition_point(|&begin| begin <= member.header);
        let end = begins.get(next).copied().unwrap_or(directory.offset);
        if content.checked_add(member.stored_length).is_none_or(|last| last > end) {
            let what = format!("member `{}` reaches into what is behind it", member.name);
            return Err(Fault::new(member.header, what));
        }
        found.push(content);
    }
    Ok(found)
}

/// The offset of a member's content.
fn content(header: &[u8], member: &ZipMember) -> Parsed<u64> {
    let fault = |what: &str| Fault::new(member.header, format!("member `{}`: {what}", member.name));
    if !header.starts_with(LOCAL) {
        return Err(fault("its local header was expected"));
    }
    let method = match member.method {
        ZipMethod::Stored => 0,
        ZipMethod::Deflated => 8,
    };
    let flags = word(header, 6, 2).unwrap_or_default();
    if word(header, 8, 2) != Some(method) || flags & (ENCRYPTED | PATCHED) != 0 {
        return Err(fault("its local header contradicts the central directory"));
    }
    let (Some(name), Some(extra)) = (word(header, 26, 2), word(header, 28, 2)) else {
        return Err(fault("its local header is too short"));
    };
    let name_at = LOCAL_HEADER_BYTES as usize;
    if header.get(name_at..name_at + name as usize) != Some(member.name.as_bytes()) {
        return Err(fault("its local header has another name"));
    }
    Ok(member.header + LOCAL_HEADER_BYTES + name + extra)
}

/// Bytes of a member's local header up to the end of its name.
pub fn local_header_bytes(member: &ZipMember) -> u64 {
    LOCAL_HEADER_BYTES + member.name.len() as u64
}

/// The wide sizes of an extra field, in the order in which they stand for short ones. `None` for a
/// broken field.
fn wide_sizes(extra: &[u8]) -> Option<Vec<u64>> {
    let mut rest = extra;
    while !rest.is_empty() {
        let (id, length) = (word(rest, 0, 2)?, word(rest, 2, 2)? as usize);
        let field = rest.get(4..4 + length)?;
        if id == 1 {
            return Some(field.chunks_exact(8).filter_map(|bytes| word(bytes, 0, 8)).collect());
        }
        rest = rest.get(4 + length..)?;
    }
    Some(Vec::new())
}

/// A number of up to eight bytes, little-endian.
fn word(bytes: &[u8], at: usize, width: usize) -> Option<u64> {
    let mut wide = [0; 8];
    wide.get_mut(..width)?.copy_from_slice(bytes.get(at..at.checked_add(width)?)?);
    Some(u64::from_le_bytes(wide))
}

#[cfg(test)]
mod tests;
