//! Reads, checks and decodes object leaves.

use std::collections::{HashMap, HashSet};

use super::execute::execute;
use super::file_set::FileSet;
use super::options::{LoadFailure, LoadOptions};
use crate::format::index::{Extent, Index, LeafRecord};
use crate::format::object;
use crate::io::Disk;
use crate::limits::MAX_OBJECT_BYTES;
use crate::read_plan::BoxCopy;
use crate::sys::HostTarget;
use crate::value::Value;
use crate::{Error, Result};

/// Returns the values of object leaves, in the order requested. A tie returns the value of its
/// target leaf. The encoded objects need memory besides the read buffers.
pub fn read_objects(
    disk: &dyn Disk,
    files: &FileSet,
    index: &Index,
    leaves: &[u32],
    options: &LoadOptions,
) -> Result<Vec<Value>> {
    let copies = copies_of_objects(files, index, leaves)?;
    let length = |copy: &BoxCopy| vec![0_u8; copy.extent.iter().product::<u64>() as usize];
    let mut encoded: Vec<Vec<u8>> = copies.iter().map(length).collect();
    let targets: Vec<HostTarget<'_>> =
        encoded.iter_mut().map(|bytes| HostTarget::from(bytes.as_mut_slice())).collect();
    execute(disk, files, index, &copies, targets, options).map_err(|LoadFailure { error, .. }| error)?;
    let decode = |(copy, bytes): (&BoxCopy, &Vec<u8>)| {
        object::decode(bytes).map_err(|what| Error::Corrupt {
            file: files.path(copy.file),
            leaf: Some(index.tree.leaf_path(copy.leaf).to_string()),
            block: None,
            what: format!("its object does not decode: {what}"),
        })
    };
    copies.iter().zip(&encoded).map(decode).collect()
}

/// Returns the copies that [`read_objects`] makes, one per leaf, each to a destination of its own.
pub fn copies_of_objects(files: &FileSet, index: &Index, leaves: &[u32]) -> Result<Vec<BoxCopy>> {
    let mut copies = Vec::with_capacity(leaves.len());
    // Objects do not share bytes, so the claimed sizes of a file's objects must fit the file. A
    // leaf that is requested twice counts once.
    let mut claimed: HashMap<u32, u64> = HashMap::new();
    let mut seen = HashSet::with_capacity(leaves.len());
    for (number, &leaf) in leaves.iter().enumerate() {
        let (holder, file, extent) = place(index, leaf)?;
        let name = || index.tree.leaf_path(leaf).to_string();
        if extent.length > MAX_OBJECT_BYTES {
            let what = format!("the size in bytes of object `{}`", name());
            return Err(Error::Limit { what, found: extent.length, limit: MAX_OBJECT_BYTES });
        }
        // Check before allocating memory of a size that the index merely claims.
        let info = files.info(file)?;
        if extent.offset.checked_add(extent.length).is_none_or(|end| end > info.data_end) {
            let what = format!(
                "the index says that its {} bytes begin at byte {}, but the file's blocks end at {}",
                extent.length, extent.offset, info.data_end
            );
            return Err(Error::Corrupt { file: info.path.clone(), leaf: Some(name()), block: None, what });
        }
        if seen.insert(holder) {
            let claimed = claimed.entry(file).or_default();
            *claimed = claimed.saturating_add(extent.length);
            if *claimed > info.data_end {
                let what = format!(
                    "its objects claim {claimed} bytes, more than the {} of its blocks",
                    info.data_end
                );
                return Err(Error::Corrupt {
                    file: info.path.clone(),
                    leaf: Some(name()),
                    block: None,
                    what,
                });
            }
        }
        copies.push(BoxCopy {
            leaf,
            file,
            src_offset: extent.offset,
            src_strides: vec![1].into(),
            extent: vec![extent.length].into(),
            itemsize: 1,
            dst: number as u32,
            dst_offset: 0,
            dst_strides: vec![1].into(),
            inverted: 0,
            encoded: None,
        });
    }
    Ok(copies)
}

/// Returns the leaf that holds an object, the object's file and its extent.
fn place(index: &Index, leaf: u32) -> Result<(u32, u32, Extent)> {
    let refuse =
        |what: &str| Err(Error::Leaf { leaf: index.tree.leaf_path(leaf).to_string(), what: what.into() });
    match index.resolve(leaf) {
        Some((holder, LeafRecord::Object(extent))) => match extent.source.file() {
            Some(file) => Ok((holder, file, *extent)),
            None => refuse("its bytes come from a reader outside the engine"),
        },
        Some(_) => refuse("is a tensor, no object"),
        None => refuse("is not in the index, or is tied to a leaf that is itself tied"),
    }
}
