//! The structure of an index page, version 1: the archived form of [`IndexPageV1`] is the payload
//! of the page. Never change it: a new version gets a new structure, and this one stays readable.
//!
//! The columns are read in order. A node whose component is a key takes the next `node_value` bytes
//! of `names`. A tensor of `n` dimensions takes the next `n` of `tensor_dims`. A leaf with bytes
//! takes the next extent, and so on. At the end of the page, every column is used up. So a page can
//! refer only to earlier nodes and container kinds, and memory is bounded by the page's size.

use rkyv::{Archive, Serialize};

/// The tags of columns. Numbers are part of the format.
pub(super) mod tag {
    pub const ROOT: u8 = 0;
    pub const KEY: u8 = 1;
    pub const INT: u8 = 2;
    pub const INDEX: u8 = 3;
    pub const FIELD: u8 = 4;

    pub const DICT: u8 = 1;
    pub const ORDERED_DICT: u8 = 2;
    pub const DEFAULT_DICT: u8 = 3;
    pub const LIST: u8 = 4;
    pub const TUPLE: u8 = 5;
    pub const DEQUE: u8 = 6;
    pub const DEQUE_BOUNDED: u8 = 7;
    pub const NAMED_TUPLE: u8 = 8;
    pub const DATACLASS: u8 = 9;
    pub const STATEFUL: u8 = 10;
    pub const CUSTOM: u8 = 11;

    pub const TENSOR: u8 = 1;
    pub const OBJECT: u8 = 2;
    pub const ALIAS: u8 = 3;

    pub const BOX: u8 = 1;
    pub const RUN: u8 = 2;

    pub const RAW: u8 = 0;
    pub const PLANES: u8 = 1;
    pub const FOREIGN: u8 = 255;

    pub const OWN: u8 = 1;
    pub const RANGE: u8 = 2;
    pub const PULLED: u8 = 3;

    pub const BLOCK_CRC: u8 = 1;
    pub const ZIP: u8 = 2;
    pub const NO_INTEGRITY: u8 = 3;
}

/// A page of an index. See the module documentation.
#[derive(Archive, Serialize, Debug, Default)]
pub(super) struct IndexPageV1 {
    /// The number in the index of the first node that is not repeated.
    pub first_node: u64,
    /// The number of repeated nodes at the front: the containers from the root down to the first
    /// own node.
    pub repeated_nodes: u32,

    /// The local number of the parent, smaller than the node's own number. The root names itself.
    pub node_parent: Vec<u32>,
    /// The tag of the node's component: `ROOT`, `KEY`, `INT`, `INDEX`, `FIELD`.
    pub node_tag: Vec<u8>,
    /// The length of the name (`KEY`, `FIELD`), the number (`INT`, `INDEX`), or 0.
    pub node_value: Vec<i64>,
    /// 0 for a leaf, else the container kind, counted from 1.
    pub node_kind: Vec<u32>,
    /// The names, one after the other.
    pub names: String,

    /// The tag of each distinct container kind.
    pub kind_tag: Vec<u8>,
    /// The bound (`DEQUE_BOUNDED`), or the kind of the state (`STATEFUL`), an earlier kind counted
    /// from 1. Otherwise 0.
    pub kind_number: Vec<u64>,
    /// The length of the type name, or 0.
    pub kind_name: Vec<u32>,
    /// The length of the protocol (`STATEFUL`), or 0.
    pub kind_protocol: Vec<u32>,
    /// Type names and protocols, one after the other.
    pub kind_texts: String,

    /// The tag of each leaf: `TENSOR`, `OBJECT`, `ALIAS`.
    pub leaf_tag: Vec<u8>,
    /// For each alias, the number of its leaf in the index.
    pub alias_of: Vec<u32>,

    /// For each tensor, the code of its dtype.
    pub tensor_dtype: Vec<u8>,
    /// For each tensor, the number of dimensions.
    pub tensor_ndim: Vec<u8>,
    /// The shapes, one after the other.
    pub tensor_dims: Vec<u64>,
    /// For each tensor, the number of chunks.
    pub tensor_chunks: Vec<u32>,

    /// For each chunk, `BOX` or `RUN`.
    pub chunk_tag: Vec<u8>,
    /// For each `BOX` the offsets, then the extents. For each `RUN` the start and the length.
    pub chunk_region: Vec<u64>,
    /// For each chunk, `RAW` or `PLANES`.
    pub chunk_codec: Vec<u8>,

    /// For each chunk and object, in leaf order: `OWN`, `RANGE`, `PULLED`.
    pub extent_tag: Vec<u8>,
    /// The ordinal of the file, or the number of the reader.
    pub extent_source: Vec<u32>,
    /// The offset of the first byte.
    pub extent_offset: Vec<u64>,
    /// The length in bytes.
    pub extent_length: Vec<u64>,
    /// `BLOCK_CRC`, `ZIP`, `NO_INTEGRITY`.
    pub extent_integrity: Vec<u8>,
    /// For each extent with `ZIP`, the CRC-32.
    pub extent_zip: Vec<u32>,
}

// If a change of rkyv or its features moves a byte, this must not compile.
const _: () = assert!(size_of::<ArchivedIndexPageV1>() == 8 + 4 + 25 * 8);
const _: () = assert!(align_of::<ArchivedIndexPageV1>() == 1);
