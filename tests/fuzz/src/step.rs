//! Whole steps whose every checksum holds, and that were written by somebody who means harm:
//! opened, verified, restored.
//!
//! The input is a flag byte, the number of files, a `u32` of length for each, and the files: the
//! manifest, the indexes in the order of its items, the data files in the order of its list. The
//! flags say what is put right: 1 the data files, 2 the indexes (and what they say of the data
//! files), 4 the manifest (and what it says of both).

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value as Json;
use stepwell_core::io::simulated::SimDisk;

use crate::{seal, world};

/// The least of a sealed step.
pub const SEALED: u8 = 7;

/// The bytes of an input.
pub fn bundle(flags: u8, parts: &[&[u8]]) -> Vec<u8> {
    let mut out = vec![flags, parts.len() as u8];
    parts.iter().for_each(|part| out.extend((part.len() as u32).to_le_bytes()));
    parts.iter().for_each(|part| out.extend_from_slice(part));
    out
}

/// The inverse of [`bundle`]. Lengths that are too large take what is there.
fn unbundle(input: &[u8]) -> Option<(u8, Vec<&[u8]>)> {
    let (&[flags, count], rest) = input.split_first_chunk()?;
    let (lengths, mut rest) = rest.split_at_checked(4 * usize::from(count))?;
    let mut parts = Vec::new();
    for length in lengths.chunks_exact(4) {
        let length = u32::from_le_bytes(*length.first_chunk()?) as usize;
        let (part, after) = rest.split_at(length.min(rest.len()));
        parts.push(part);
        rest = after;
    }
    Some((flags, parts))
}

/// See the module documentation.
pub fn run(input: &[u8]) {
    let Some((flags, parts)) = unbundle(input) else { return };
    let Some(files) = files(flags, &parts) else { return };
    let disk = SimDisk::new();
    if !world::plant(&disk, &files) {
        return;
    }
    let Ok(checkpoint) = world::open(&disk) else { return };
    let _ = checkpoint.damage();
    let clean = world::is_clean(&checkpoint);
    if !world::fits(&checkpoint) {
        return;
    }
    let leaves: Vec<usize> = (0..checkpoint.leaves().len()).collect();
    let all = world::read(&checkpoint, &leaves);
    let alone: Vec<_> = leaves.iter().take(64).map(|&leaf| world::read(&checkpoint, &[leaf])).collect();
    if all.is_ok() {
        assert!(alone.iter().all(Result::is_ok), "what restores as a whole restores leaf by leaf");
    }
    // Objects that do not decode are the reader's matter: verification is of bytes.
    let tensors = leaves.iter().zip(&alone).filter(|(leaf, _)| world::is_tensor(&checkpoint, **leaf));
    for (leaf, read) in tensors.filter(|_| clean) {
        if let Err(error) = read {
            // The bytes are whole, and the index contradicts itself or the files: planning says so.
            assert!(
                matches!(error.kind(), "corrupt_checkpoint" | "format" | "invalid"),
                "leaf {leaf}: {error}"
            );
        }
    }
    assert_eq!(disk.locks_held(), 1, "the lease");
    drop(checkpoint);
    assert_eq!(disk.locks_held(), 0, "a checkpoint that is closed holds nothing");
}

/// The files of the step by their paths.
fn files(flags: u8, parts: &[&[u8]]) -> Option<BTreeMap<String, Arc<Vec<u8>>>> {
    let (text, rest) = parts.split_first()?;
    let mut files = BTreeMap::from([(".lease".to_owned(), Arc::default())]);
    let mut put = |path: String, bytes: Vec<u8>| {
        files.insert(path, Arc::new(bytes));
    };
    let Ok(mut manifest) = serde_json::from_slice::<Json>(text) else {
        put("manifest.json".to_owned(), seal::manifest(text));
        return Some(files);
    };
    let path_of = |entry: &Json| entry.get("path")?.as_str().map(str::to_owned);
    let items = manifest.get("items").and_then(Json::as_array).map_or(0, Vec::len);
    let (indexes, data) = rest.split_at(items.min(rest.len()));
    let mut records: Vec<(String, seal::File)> = Vec::new();
    for (entry, bytes) in
        manifest.get_mut("files").and_then(Json::as_array_mut).into_iter().flatten().zip(data)
    {
        let mut bytes = bytes.to_vec();
        if flags & 1 != 0 {
            seal::data(&mut bytes);
        }
        let (Some(path), Some(file)) = (path_of(entry), seal::File::of(&bytes)) else { continue };
        if flags & 4 != 0 {
            entry["length"] = file.length.into();
            entry["trailer_crc32c"] = format!("{:08x}", file.trailer_crc).into();
            entry["file_id"] = format!("{:032x}", file.id).into();
        }
        put(path.clone(), bytes);
        records.push((path, file));
    }
    for (item, bytes) in
        manifest.get_mut("items").and_then(Json::as_array_mut).into_iter().flatten().zip(indexes)
    {
        let mut bytes = bytes.to_vec();
        let dir = format!("{}/", item.get("dir").and_then(Json::as_str).unwrap_or_default());
        if flags & 2 != 0 {
            let (own, others) = records.into_iter().partition(|(path, _)| path.starts_with(&dir));
            records = others;
            let own: Vec<seal::File> = own.into_iter().map(|(_, file)| file).collect();
            seal::index(&mut bytes, &own);
        }
        let Some(index) = item.get_mut("index").filter(|index| index.is_object()) else { continue };
        if flags & 4 != 0 {
            index["length"] = bytes.len().into();
            index["crc32c"] = format!("{:08x}", seal::crc32c(&bytes)).into();
        }
        if let Some(path) = path_of(index) {
            put(path, bytes);
        }
    }
    let text = if flags & 4 != 0 { serde_json::to_vec_pretty(&manifest).ok()? } else { text.to_vec() };
    put("manifest.json".to_owned(), seal::manifest(&text));
    Some(files)
}
