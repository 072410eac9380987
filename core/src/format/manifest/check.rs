//! The invariants of a manifest beyond its JSON form, for writers and readers.

use std::collections::HashSet;
use std::io;

use serde_json::Value;

use super::json::is_hex;
use super::{ADOPTED_FILES, Manifest, NODE_FILES};
use crate::error::Result;
use crate::format::limit;
use crate::format::paths::{check_visible, is_below};
use crate::limits::{
    MAX_FILE_BYTES, MAX_FILES, MAX_INDEX_BYTES, MAX_ITEMS, MAX_LEAVES, MAX_METADATA_BYTES,
    MAX_METADATA_DEPTH, MAX_METRICS, MAX_NAME_BYTES, MAX_STEP,
};

/// Header and trailer, the least that a data file is made of.
const MIN_DATA_FILE_BYTES: u64 = 8192;
/// The longest path of adopted files, as of the operating system.
const MAX_PATH_BYTES: usize = 4096;

/// The outer error is a limit; the inner one says what else is wrong.
pub(super) fn check(manifest: &Manifest) -> Result<std::result::Result<(), String>> {
    limit("the step", manifest.step, MAX_STEP)?;
    limit("the number of items", manifest.items.len() as u64, MAX_ITEMS)?;
    limit("the number of dropped items", manifest.dropped.len() as u64, MAX_ITEMS)?;
    limit("the number of leaves that were left out", manifest.unsupported.len() as u64, MAX_LEAVES)?;
    limit("the number of data files", manifest.files.len() as u64, MAX_FILES)?;
    limit("the length of the writer's name in bytes", manifest.writer.len() as u64, MAX_NAME_BYTES)?;
    limit("the length of the plan's hash in bytes", manifest.plan_hash.len() as u64, MAX_NAME_BYTES)?;
    limit("the number of metrics", manifest.metrics.len() as u64, MAX_METRICS)?;
    for name in manifest.metrics.keys() {
        limit("the length of a metric's name in bytes", name.len() as u64, MAX_NAME_BYTES)?;
    }
    for item in &manifest.items {
        // A component renders with escapes (a factor of two), brackets and a sign.
        limit("the length of an item's name in bytes", item.name.len() as u64, 2 * MAX_NAME_BYTES + 8)?;
        limit("the leaves of an item", item.leaves, MAX_LEAVES)?;
        limit("the top-level entries of an item", item.top_level.len() as u64, MAX_LEAVES)?;
    }
    limit("the nesting of the metadata", depth(&manifest.custom_metadata), MAX_METADATA_DEPTH)?;
    limit("the size of the metadata in bytes", json_bytes(&manifest.custom_metadata), MAX_METADATA_BYTES)?;
    for entry in &manifest.files {
        limit("the length of a data file", entry.length, MAX_FILE_BYTES)?;
    }
    for item in &manifest.items {
        limit("the length of an index", item.index.length, MAX_INDEX_BYTES)?;
    }
    Ok(check_meaning(manifest))
}

fn check_meaning(manifest: &Manifest) -> std::result::Result<(), String> {
    if !is_hex(&manifest.attempt.session, 32) {
        return Err("the session is not 32 lower-case hexadecimal digits".to_owned());
    }
    if manifest.world_size == 0 {
        return Err("the world size is 0".to_owned());
    }

    let mut names = HashSet::new();
    let mut dirs = HashSet::new();
    let mut paths = HashSet::new();
    let mut positions = HashSet::new();
    for item in &manifest.items {
        check_dir(&item.dir)?;
        check_visible(&item.index.path)?;
        if !is_below(&item.index.path, &item.dir) {
            return Err(format!("the index `{}` is not below `{}`", item.index.path, item.dir));
        }
        unique(&mut names, item.name.as_str(), "the item")?;
        unique(&mut dirs, item.dir.as_str(), "the directory")?;
        unique(&mut paths, item.index.path.as_str(), "the file")?;
        for entry in &item.top_level {
            unique(&mut positions, entry.position, "the top-level position")?;
        }
        if !item.top_level.is_sorted_by_key(|entry| entry.position) {
            return Err(format!("the top-level entries of item `{}` are not in order", item.name));
        }
    }
    for entry in &manifest.files {
        check_visible(&entry.path)?;
        let dir = entry.path.split('/').next().unwrap_or_default();
        if !dirs.contains(dir) || !is_below(&entry.path, dir) {
            return Err(format!("the data file `{}` is not below an item's directory", entry.path));
        }
        unique(&mut paths, entry.path.as_str(), "the file")?;
        if entry.length < MIN_DATA_FILE_BYTES {
            return Err(format!(
                "the data file `{}` has an impossible length of {}",
                entry.path, entry.length
            ));
        }
    }
    check_parts(manifest, &paths)?;
    check_adopted(manifest)?;
    // Recovery deletes what a tombstone names, so it must not name anything in use.
    for tombstone in &manifest.dropped {
        check_dir(&tombstone.dir)?;
        unique(&mut dirs, tombstone.dir.as_str(), "the directory")?;
        for path in &tombstone.paths {
            check_visible(path)?;
            if !is_below(path, &tombstone.dir) {
                return Err(format!("the dropped file `{path}` is not below `{}`", tombstone.dir));
            }
            unique(&mut paths, path.as_str(), "the file")?;
        }
    }
    Ok(())
}

/// Checks data files that are parts of others. `paths` are all files with their own path.
fn check_parts(manifest: &Manifest, paths: &HashSet<&str>) -> std::result::Result<(), String> {
    let mut parts: Vec<(&str, u64, u64)> = Vec::new();
    for entry in &manifest.files {
        let Some(within) = &entry.within else { continue };
        let dir = entry.path.split('/').next().unwrap_or_default();
        check_visible(&within.path)?;
        if !is_below(&within.path, dir) || paths.contains(within.path.as_str()) {
            return Err(format!("`{}` cannot be a part of `{}`", entry.path, within.path));
        }
        let end = within.offset.checked_add(entry.length).filter(|&end| end <= MAX_FILE_BYTES);
        let end = end.ok_or_else(|| format!("`{}` lies too far in `{}`", entry.path, within.path))?;
        parts.push((&within.path, within.offset, end));
    }
    if !parts.is_empty() && !manifest.required_features.iter().any(|name| name == NODE_FILES) {
        return Err(format!("data files are parts of others, which is the feature `{NODE_FILES}`"));
    }
    parts.sort_unstable();
    match parts.windows(2).find(|two| matches!(two, [one, next] if one.0 == next.0 && next.1 < one.2)) {
        Some(two) => Err(format!("data files in `{}` overlap", two.first().map_or("", |part| part.0))),
        None => Ok(()),
    }
}

/// Checks the reference of a step whose bytes are files of another library.
fn check_adopted(manifest: &Manifest) -> std::result::Result<(), String> {
    let is_declared = manifest.required_features.iter().any(|name| name == ADOPTED_FILES);
    let Some(adopted) = &manifest.adopted else {
        return if is_declared { Err(format!("`{ADOPTED_FILES}` are not named")) } else { Ok(()) };
    };
    if !is_declared {
        return Err(format!("adopted files are the feature `{ADOPTED_FILES}`"));
    }
    if !(manifest.items.is_empty() && manifest.files.is_empty() && manifest.dropped.is_empty()) {
        return Err("a step of adopted files has items of its own".to_owned());
    }
    for path in [&adopted.path, &adopted.checksums.path] {
        if path.is_empty() || path.contains('\0') || path.len() > MAX_PATH_BYTES {
            return Err(format!("`{}` cannot be the path of adopted files", path.escape_debug()));
        }
    }
    Ok(())
}

fn check_dir(dir: &str) -> std::result::Result<(), String> {
    check_visible(dir)?;
    if dir.contains('/') || dir == "manifest.json" {
        return Err(format!("`{dir}` cannot be the directory of an item"));
    }
    Ok(())
}

fn unique<T: Eq + std::hash::Hash + std::fmt::Display + Copy>(
    seen: &mut HashSet<T>,
    value: T,
    what: &str,
) -> std::result::Result<(), String> {
    if seen.insert(value) { Ok(()) } else { Err(format!("{what} `{value}` occurs twice")) }
}

/// Levels of lists and objects, counted no further than one past the limit, so that the stack is
/// safe whatever the value is.
fn depth(value: &Value) -> u64 {
    fn below(value: &Value, level: u64) -> u64 {
        if level > MAX_METADATA_DEPTH {
            return level;
        }
        match value {
            Value::Array(values) => {
                values.iter().map(|value| below(value, level + 1)).max().unwrap_or(level + 1)
            }
            Value::Object(map) => {
                map.values().map(|value| below(value, level + 1)).max().unwrap_or(level + 1)
            }
            _ => level,
        }
    }
    below(value, 0)
}

/// Length of the compact JSON text; called only once the depth is known to be small.
fn json_bytes(value: &Value) -> u64 {
    struct Count(u64);
    impl io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len() as u64;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    match serde_json::to_writer(&mut count, value) {
        Ok(()) => count.0,
        Err(_) => u64::MAX,
    }
}
