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
    /// Leaves whose writer the ranks have not decided, because the census does not have them. Each
    /// holder has written them, and the leader keeps one copy. In order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub undecided: Vec<u32>,
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
