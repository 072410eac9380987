//! A state with every kind of leaf, whose every byte says which step it is of. Steps have equal
//! shapes, so that files of two steps are of equal lengths.
#![expect(
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "shapes and steps of a few digits"
)]

use std::sync::Arc;

use stepwell_core::dtype::Dtype;
use stepwell_core::format::index::LeafRecord;
use stepwell_core::io::simulated::mix;
use stepwell_core::leaf_path::Component;
use stepwell_core::load::LoadOptions;
use stepwell_core::provider::HostProvider;
use stepwell_core::sys::{HostSource, HostTarget};
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_core::value::Value;
use stepwell_manager::{Checkpoint, Error, LeafSource, StateSource};
use stepwell_reshard::read_plan::Request;

/// The content of a leaf.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// A tensor's row-major bytes.
    Tensor(Vec<u8>),
    /// An object.
    Object(Value),
}

/// The memory layout of a tensor.
#[derive(Clone, Copy)]
enum Memory {
    /// Row by row.
    Rows,
    /// Column by column, as a transposed or Fortran array.
    Columns,
    /// Rows from the last to the first (a negative stride), with gaps between elements.
    Backwards,
}

struct Tensor {
    dtype: Dtype,
    shape: &'static [u64],
    memory: Memory,
}

const fn tensor(dtype: Dtype, shape: &'static [u64], memory: Memory) -> Tensor {
    Tensor { dtype, shape, memory }
}

/// The leaves of `params` and, so that two items have files of one length, of `twin`.
const TENSORS: [(&str, Tensor); 6] = [
    // Several blocks, several chunks.
    ("large", tensor(Dtype::Float32, &[150, 61], Memory::Rows)),
    ("columns", tensor(Dtype::Int16, &[11, 37], Memory::Columns)),
    ("backwards", tensor(Dtype::Float64, &[13, 3], Memory::Backwards)),
    ("five", tensor(Dtype::Uint8, &[5], Memory::Rows)),
    ("scalar", tensor(Dtype::Bfloat16, &[], Memory::Rows)),
    ("empty", tensor(Dtype::Float32, &[0, 3], Memory::Rows)),
];

fn bytes_of(step: u64, item: u64, leaf: u64, count: u64) -> Vec<u8> {
    let seed = mix(mix(step, item), leaf);
    (0..count).map(|at| mix(seed, at) as u8).collect()
}

/// An array with that memory layout whose row-major bytes are `bytes`.
fn source(tensor: &Tensor, bytes: &[u8]) -> stepwell_core::Result<HostSource> {
    let item = tensor.dtype.size();
    let shape: Vec<usize> = tensor.shape.iter().map(|&extent| extent as usize).collect();
    let (Memory::Columns | Memory::Backwards, &[rows, columns]) = (tensor.memory, &shape[..]) else {
        let mut strides = vec![item as i64; shape.len()];
        for d in (1..shape.len()).rev() {
            strides[d - 1] = strides[d] * shape[d] as i64;
        }
        return HostSource::owned(bytes.to_vec(), 0, item, tensor.shape, &strides);
    };
    let (row, column, first) = match tensor.memory {
        Memory::Columns => (item as i64, (item * rows) as i64, 0),
        _ => (-((2 * item * columns) as i64), 2 * item as i64, 2 * item * columns * (rows - 1)),
    };
    let mut memory = vec![0xEE; 2 * bytes.len()];
    for (number, element) in bytes.chunks(item).enumerate() {
        let at = first as i64 + (number / columns) as i64 * row + (number % columns) as i64 * column;
        memory[at as usize..at as usize + item].copy_from_slice(element);
    }
    HostSource::owned(memory, first, item, tensor.shape, &[row, column])
}

fn objects(step: u64) -> [(&'static str, Value); 3] {
    [
        ("step", Value::Int(step as i64)),
        ("name", Value::Str(format!("run {step}"))),
        // Longer than a block of 4096 bytes.
        ("generator", Value::Bytes(bytes_of(step, 7, 7, 5000))),
    ]
}

/// The state of a step: two items with tensors and an alias, loose objects, and a nested object in
/// an item.
pub fn state(step: u64) -> StateSource {
    let key = |name: &str| Some(Component::Key(name.into()));
    let mut tree = Tree::new();
    let mut leaves = Vec::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    for (item, name) in [(0, "params"), (1, "twin")] {
        let parent = tree.push_container(Some(root), key(name), ContainerKind::Dict);
        let first = leaves.len() as u32;
        for (number, (leaf, tensor)) in (0..).zip(&TENSORS) {
            let count = tensor.shape.iter().product::<u64>() * tensor.dtype.size() as u64;
            let bytes = bytes_of(step, item, number, count);
            let source = match source(tensor, &bytes) {
                Ok(source) => source,
                Err(error) => unreachable!("{leaf}: {error}"),
            };
            tree.push_leaf(Some(parent), key(leaf));
            let provider = Arc::new(HostProvider::new(source));
            leaves.push(LeafSource::whole(tensor.dtype, tensor.shape.to_vec(), provider));
        }
        tree.push_leaf(Some(parent), key("tied"));
        leaves.push(LeafSource::Alias(first));
        let nested = tree.push_container(Some(parent), key("extra"), ContainerKind::List);
        tree.push_leaf(Some(nested), Some(Component::Index(0)));
        leaves.push(LeafSource::Object(Value::Float(step as f64)));
    }
    for (name, value) in objects(step) {
        tree.push_leaf(Some(root), key(name));
        leaves.push(LeafSource::Object(value));
    }
    StateSource { tree, leaves }
}

/// The content of every leaf of a step, in leaf order.
pub fn contents(step: u64) -> Vec<Content> {
    let mut out = Vec::new();
    for item in 0..2 {
        let first = out.len();
        for (number, (_, tensor)) in (0..).zip(&TENSORS) {
            let count = tensor.shape.iter().product::<u64>() * tensor.dtype.size() as u64;
            out.push(Content::Tensor(bytes_of(step, item, number, count)));
        }
        out.push(out[first].clone());
        out.push(Content::Object(Value::Float(step as f64)));
    }
    out.extend(objects(step).map(|(_, value)| Content::Object(value)));
    out
}

/// Small buffers and no helper threads: what is read is tiny, and there is much of it.
pub fn load_options() -> LoadOptions {
    LoadOptions { budget_bytes: 1 << 20, threads: 1, ..LoadOptions::default() }
}

/// Reads one leaf; a tie gives what it is tied to.
pub fn read(checkpoint: &Checkpoint, leaf: u32) -> Result<Content, Error> {
    let index = checkpoint.index()?;
    let record = match index.leaves.get(leaf as usize) {
        Some(LeafRecord::Alias { of }) => index.leaves.get(*of as usize),
        record => record,
    };
    let Some(LeafRecord::Tensor(record)) = record else {
        let mut values = checkpoint.read_objects(&[leaf], &load_options())?;
        let value = values.pop().ok_or_else(|| Error::Invalid(format!("leaf {leaf} gave no value")))?;
        return Ok(Content::Object(value));
    };
    let count = record.shape.iter().product::<u64>() * record.dtype.size() as u64;
    let mut bytes = vec![0; count as usize];
    let request = Request::whole(leaf, record, 0);
    let target = HostTarget::from(&mut bytes[..]);
    checkpoint.read(&[request], [target], &load_options()).map_err(|failure| failure.error)?;
    Ok(Content::Tensor(bytes))
}

/// Reads every leaf in one restore (all tensors) and one reading of all objects, and gives what was
/// read in leaf order.
pub fn read_all(checkpoint: &Checkpoint) -> Result<Vec<Content>, Error> {
    let index = checkpoint.index()?;
    let mut requests = Vec::new();
    let mut buffers = Vec::new();
    let mut objects = Vec::new();
    let mut places = Vec::new();
    for (leaf, record) in (0_u32..).zip(&index.leaves) {
        let record = match record {
            LeafRecord::Alias { of } => index.leaves.get(*of as usize),
            record => Some(record),
        };
        if let Some(LeafRecord::Tensor(record)) = record {
            places.push((true, buffers.len()));
            let count = record.shape.iter().product::<u64>() * record.dtype.size() as u64;
            requests.push(Request::whole(leaf, record, buffers.len() as u32));
            buffers.push(vec![0; count as usize]);
        } else {
            places.push((false, objects.len()));
            objects.push(leaf);
        }
    }
    let targets: Vec<HostTarget<'_>> =
        buffers.iter_mut().map(|buffer| HostTarget::from(&mut buffer[..])).collect();
    checkpoint.read(&requests, targets, &load_options()).map_err(|failure| failure.error)?;
    let values = checkpoint.read_objects(&objects, &load_options())?;
    let content = |&(tensor, at): &(bool, usize)| {
        if tensor { Content::Tensor(buffers[at].clone()) } else { Content::Object(values[at].clone()) }
    };
    Ok(places.iter().map(content).collect())
}
