//! An item of a state, on its way to disk.

use serde::{Deserialize, Serialize};
use stepwell_core::format::index::Index;
use stepwell_core::format::manifest::TopLevel;

/// An item, before it is written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftItem {
    /// Its directory.
    pub dir: String,
    /// Its name.
    pub name: String,
    /// Its top-level entries.
    pub top_level: Vec<TopLevel>,
    /// Leaves that this rank has written without knowing the other holders, in order. The leader
    /// keeps one copy of each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unsettled: Vec<u32>,
}

/// A rank's part of one item.
#[derive(Clone, Debug, PartialEq)]
pub struct ItemPart {
    /// The item in this rank's state.
    pub item: DraftItem,
    /// The content of its data file; `files[0]` is that file.
    pub index: Index,
    /// Bytes of tensors.
    pub tensor_bytes: u64,
}
