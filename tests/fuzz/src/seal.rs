//! Corrects checksums, so that a mutated file is judged by its content. Written from
//! `docs/format.md`, apart from the code under test, and lenient: if a field makes no sense, the
//! reader must report it.
//!
//! Lengths that follow from the size of the input (of the last page, of the file) are put right
//! too: otherwise every byte that is inserted would be refused for that alone.

/// CRC-32C.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn usize_at(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u64_at(bytes, at)?).ok()
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(place) = bytes.get_mut(at..).and_then(|rest| rest.get_mut(..value.len())) {
        place.copy_from_slice(value);
    }
}

/// Returns `offset .. offset + length` if it is inside `bytes`.
fn window(bytes: &[u8], offset: usize, length: usize) -> Option<std::ops::Range<usize>> {
    let end = offset.checked_add(length)?;
    (end <= bytes.len()).then_some(offset..end)
}

const LAST_LINE: usize = 23;

/// Returns a manifest's text with its correct last line; replaces an existing one.
pub fn manifest(text: &[u8]) -> Vec<u8> {
    let has_line = text.len() > LAST_LINE && text[text.len() - LAST_LINE..].starts_with(b"{\"crc32c\": \"");
    let mut out = if has_line { text[..text.len() - LAST_LINE].to_vec() } else { text.to_vec() };
    if !out.ends_with(b"\n") {
        out.push(b'\n');
    }
    let line = format!("{{\"crc32c\": \"{:08x}\"}}\n", crc32c(&out));
    out.extend_from_slice(line.as_bytes());
    out
}

/// A column of an index's root table: where its elements begin, and how many there are.
fn column(root: &[u8], number: usize) -> Option<(usize, usize)> {
    let at = root.len().checked_sub(72)? + 8 * number;
    let offset = u32_at(root, at)?.cast_signed();
    let first = usize::try_from(i64::try_from(at).ok()? + i64::from(offset)).ok()?;
    Some((first, u32_at(root, at + 4)? as usize))
}

const PAGE_LENGTH: usize = 0;
const PAGE_CRC: usize = 1;
const FILE_LENGTH: usize = 6;
const FILE_ID: usize = 7;
const FILE_TRAILER_CRC: usize = 8;

/// An index's record of a data file.
pub struct File {
    /// Bytes.
    pub length: u64,
    /// As in header and trailer.
    pub id: u128,
    /// The CRC at the end of its trailer.
    pub trailer_crc: u32,
}

impl File {
    /// Reads the record from a data file.
    pub fn of(data: &[u8]) -> Option<Self> {
        let trailer = data.len().checked_sub(4096)?;
        let id = u128::from_le_bytes(*data.get(trailer + 16..)?.first_chunk()?);
        Some(Self { length: data.len() as u64, id, trailer_crc: u32_at(data, data.len() - 4)? })
    }
}

/// Corrects an index file. `files` are its records of data files; without any, they stay.
pub fn index(bytes: &mut [u8], files: &[File]) {
    put(bytes, 0, b"\x89SWI\r\n\x1a\n");
    let length = bytes.len();
    put(bytes, 24 + 8, &(length as u64).to_le_bytes());
    if let Some(root) = usize_at(bytes, 40).and_then(|length| window(bytes, 128, length)) {
        let outline = usize_at(bytes, 72).and_then(|length| window(bytes, root.end, length));
        if let Some(outline) = outline.filter(|outline| !outline.is_empty()) {
            let crc = crc32c(&bytes[outline.clone()]);
            put(bytes, 80, &crc.to_le_bytes());
            pages(bytes, root.clone(), outline.end);
        } else {
            pages(bytes, root.clone(), root.end);
        }
        records(&mut bytes[root.clone()], files);
        let crc = crc32c(&bytes[root]);
        put(bytes, 48, &crc.to_le_bytes());
    }
    if let Some(covered) = bytes.get(12..128) {
        let crc = crc32c(covered);
        put(bytes, 8, &crc.to_le_bytes());
    }
}

/// Those of the root table, the first of which begins at `at`.
fn pages(bytes: &mut [u8], root: std::ops::Range<usize>, mut at: usize) {
    let table = &bytes[root.clone()];
    let (Some((lengths, count)), Some((crcs, _))) = (column(table, PAGE_LENGTH), column(table, PAGE_CRC))
    else {
        return;
    };
    for number in 0..count {
        let place = root.start + lengths + 8 * number;
        let Some(mut length) = usize_at(&bytes[..root.end], place) else { return };
        if number + 1 == count {
            length = bytes.len() - at.min(bytes.len());
            put(&mut bytes[..root.end], place, &(length as u64).to_le_bytes());
            put(bytes, at + 8, &(length as u64).saturating_sub(32).to_le_bytes());
        }
        let Some(page) = window(bytes, at, length) else { return };
        let crc = crc32c(&bytes[page.clone()]);
        put(&mut bytes[..root.end], root.start + crcs + 4 * number, &crc.to_le_bytes());
        at = page.end;
    }
}

fn records(root: &mut [u8], files: &[File]) {
    let columns = (column(root, FILE_LENGTH), column(root, FILE_ID), column(root, FILE_TRAILER_CRC));
    let (Some((lengths, _)), Some((ids, _)), Some((crcs, _))) = columns else { return };
    for (number, file) in files.iter().enumerate() {
        put(root, lengths + 8 * number, &file.length.to_le_bytes());
        put(root, ids + 16 * number, &file.id.to_le_bytes());
        put(root, crcs + 4 * number, &file.trailer_crc.to_le_bytes());
    }
}

/// A data file: checksums of blocks, pages, page table, header and trailer.
pub fn data(bytes: &mut [u8]) {
    put(bytes, 0, b"\x89SWD\r\n\x1a\n");
    let Some(trailer) = bytes.len().checked_sub(4096) else { return };
    put(bytes, trailer, b"\x89SWT\r\n\x1a\n");
    if let Some(header) = bytes.get(12..4096) {
        let crc = crc32c(header);
        put(bytes, 8, &crc.to_le_bytes());
    }
    footer(bytes, trailer);
    let crc = crc32c(&bytes[trailer..trailer + 4092]);
    put(bytes, trailer + 4092, &crc.to_le_bytes());
}

fn footer(bytes: &mut [u8], trailer: usize) -> Option<()> {
    let footer_offset = usize_at(bytes, trailer + 32)?;
    let block = usize_at(bytes, trailer + 48)?.max(4096);
    let table = window(bytes, usize_at(bytes, trailer + 56)?, usize_at(bytes, trailer + 64)?)?;
    let count = u32_at(bytes, trailer + 12)? as usize;
    for entry in table.clone().step_by(40).take(count) {
        let Some(page) = window(bytes, usize_at(bytes, entry + 8)?, usize_at(bytes, entry + 16)?) else {
            continue;
        };
        let blocks = bytes.get(..footer_offset).unwrap_or_default().chunks(block);
        if u32_at(bytes, entry) == Some(2) && page.len() > 32 {
            let first = usize_at(bytes, entry + 24)?;
            let crcs: Vec<u8> = blocks
                .skip(first)
                .take((page.len() - 32) / 4)
                .flat_map(|b| crc32c(b).to_le_bytes())
                .collect();
            put(&mut bytes[..page.end], page.start + 32, &crcs);
        }
        let crc = crc32c(&bytes[page]);
        put(bytes, entry + 4, &crc.to_le_bytes());
    }
    let crc = crc32c(&bytes[table]);
    put(bytes, trailer + 72, &crc.to_le_bytes());
    Some(())
}
