//! The structure of an index page, version 1: the archived form of [`IndexPageV1`] is the payload
//! of the page. Never change it: a new version gets a new structure, and this one stays readable.
//!
//! Columns, consumed in order: a node whose component is a key takes the next `node_value` bytes of
//! `names`, a tensor of `n` dimensions takes the next `n` of `tensor_dims`, a leaf with bytes takes
//! the next extent, and so on. At the end of the page every column is used up. So nothing in a page
//! can point anywhere but backwards to a node or a container kind, and memory is bounded by the
//! page's size.

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
    /// Number, in the index, of the first node that is not repeated.
    pub first_node: u64,
    /// How many nodes at the front are repeated: the containers from the root down to the first own
    /// node.
    pub repeated_nodes: u32,

    /// Local number of the parent; smaller than the node's own, and the root's own for the root.
    pub node_parent: Vec<u32>,
    /// How the parent reaches it: `ROOT`, `KEY`, `INT`, `INDEX`, `FIELD`.
    pub node_tag: Vec<u8>,
    /// Length of the name (`KEY`, `FIELD`), the number (`INT`, `INDEX`), or 0.
    pub node_value: Vec<i64>,
    /// 0 for a leaf, else the container kind, counted from 1.
    pub node_kind: Vec<u32>,
    /// The names, one after the other.
    pub names: String,

    /// The distinct container kinds: what each is.
    pub kind_tag: Vec<u8>,
    /// `DEQUE_BOUNDED`: the bound. `STATEFUL`: the kind of its state, counted from 1, an earlier
    /// one. Else 0.
    pub kind_number: Vec<u64>,
    /// Length of the type name, or 0.
    pub kind_name: Vec<u32>,
    /// Length of the protocol (`STATEFUL`), or 0.
    pub kind_protocol: Vec<u32>,
    /// Type names and protocols, one after the other.
    pub kind_texts: String,

    /// The tag of each leaf: `TENSOR`, `OBJECT`, `ALIAS`.
    pub leaf_tag: Vec<u8>,
    /// Of each alias: the leaf, by its number in the index.
    pub alias_of: Vec<u32>,

    /// Of each tensor: code of its dtype.
    pub tensor_dtype: Vec<u8>,
    /// Number of dimensions.
    pub tensor_ndim: Vec<u8>,
    /// The shapes, one after the other.
    pub tensor_dims: Vec<u64>,
    /// Number of chunks.
    pub tensor_chunks: Vec<u32>,
    /// 1 if it is a view.
    pub tensor_view: Vec<u8>,
    /// 0, or 1 more than the length of its rank key.
    pub tensor_rank_key: Vec<u32>,
    /// The rank keys, one after the other.
    pub rank_keys: String,

    /// Of each view: the leaf, by its number in the index.
    pub view_of: Vec<u32>,
    /// Dimensions of the tensor that is looked at.
    pub view_ndim: Vec<u8>,
    /// Offset, then extent, of each.
    pub view_region: Vec<u64>,
    /// Order of the dimensions, of each.
    pub view_permutation: Vec<u8>,

    /// Of each chunk: `BOX` or `RUN`.
    pub chunk_tag: Vec<u8>,
    /// `BOX`: offset, then extent. `RUN`: start, length.
    pub chunk_region: Vec<u64>,
    /// `RAW`.
    pub chunk_codec: Vec<u8>,

    /// Of each chunk and object, in leaf order: `OWN`, `RANGE`, `PULLED`.
    pub extent_tag: Vec<u8>,
    /// Ordinal of the file, or number of the reader.
    pub extent_source: Vec<u32>,
    /// First byte.
    pub extent_offset: Vec<u64>,
    /// Number of bytes.
    pub extent_length: Vec<u64>,
    /// `BLOCK_CRC`, `ZIP`, `NO_INTEGRITY`.
    pub extent_integrity: Vec<u8>,
    /// Of each extent with `ZIP`: the CRC-32.
    pub extent_zip: Vec<u32>,
}

// A change of rkyv or of its features that moves a byte must not compile.
const _: () = assert!(size_of::<ArchivedIndexPageV1>() == 8 + 4 + 32 * 8);
const _: () = assert!(align_of::<ArchivedIndexPageV1>() == 1);
