//! Values and states made from the bytes of the fuzzer.

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use stepwell_core::dtype::Dtype;
use stepwell_core::leaf_path::Component;
use stepwell_core::provider::HostProvider;
use stepwell_core::sys::HostSource;
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_core::value::Value;
use stepwell_manager::{LeafSource, StateSource};

/// Deeper than this nothing new happens, but the bound itself, which has its own test.
const MAX_DEPTH: usize = 6;

/// An object of any sort, integers and sets in whatever spelling.
pub fn value(u: &mut Unstructured<'_>, depth: usize) -> Result<Value> {
    let sorts = if depth < MAX_DEPTH { 17 } else { 11 };
    let many = |u: &mut Unstructured<'_>| {
        (0..u.int_in_range(0..=4)?).map(|_| value(u, depth + 1)).collect::<Result<Vec<Value>>>()
    };
    Ok(match u.int_in_range(0..=sorts)? {
        0 => Value::None,
        1 => Value::Ellipsis,
        2 => Value::Bool(u.arbitrary()?),
        3 => Value::Int(u.arbitrary()?),
        4 => Value::BigInt(u.arbitrary()?),
        5 => Value::Float(f64::from_bits(u.arbitrary()?)),
        6 => Value::Complex(f64::from_bits(u.arbitrary()?), f64::from_bits(u.arbitrary()?)),
        7 => Value::Str(u.arbitrary()?),
        8 => Value::Bytes(u.arbitrary()?),
        9 => Value::ByteArray(u.arbitrary()?),
        10 => {
            let dtype = *u.choose(Dtype::ALL)?;
            // Sometimes of a size that is not its own: that is to be refused.
            let size = if u.ratio(1, 16)? { u.int_in_range(0..=20)? } else { dtype.size() };
            Value::NumpyScalar(dtype, u.bytes(size)?.to_vec())
        }
        11 => Value::Str(String::new()),
        12 => Value::List(many(u)?),
        13 => Value::Tuple(many(u)?),
        14 => Value::Set(many(u)?),
        15 => Value::FrozenSet(many(u)?),
        16 => Value::Dict(
            many(u)?.into_iter().map(|key| Ok((key, value(u, depth + 1)?))).collect::<Result<_>>()?,
        ),
        _ => Value::Extension(u.arbitrary()?, Box::new(value(u, depth + 1)?)),
    })
}

/// The expected value of a leaf after a restore.
#[derive(Clone, Debug, PartialEq)]
pub enum Expected {
    /// A tensor's dtype, shape and row-major bytes.
    Tensor(Dtype, Vec<u64>, Vec<u8>),
    /// An object.
    Object(Value),
    /// The same as another leaf.
    Tie(u32),
}

/// A state, and what its leaves are.
pub struct State {
    /// The structure.
    pub tree: Tree,
    /// By leaf.
    pub leaves: Vec<Expected>,
}

impl State {
    /// A state from bytes. A tie may name any leaf, or none: what does not make sense is to be
    /// refused.
    pub fn from(u: &mut Unstructured<'_>) -> Result<Self> {
        let mut state = Self { tree: Tree::new(), leaves: Vec::new() };
        state.node(u, None, None, 0)?;
        Ok(state)
    }

    fn node(
        &mut self,
        u: &mut Unstructured<'_>,
        parent: Option<u32>,
        component: Option<Component>,
        depth: usize,
    ) -> Result<()> {
        let is_leaf = if depth == 0 { u.ratio(1, 16)? } else { depth > MAX_DEPTH || u.ratio(3, 5)? };
        if is_leaf {
            self.tree.push_leaf(parent, component);
            let leaf = self.leaf(u)?;
            self.leaves.push(leaf);
            return Ok(());
        }
        let kind = kind(u, 0)?;
        let node = self.tree.push_container(parent, component, kind);
        for place in 0..u.int_in_range(0..=5)? {
            let component = match u.int_in_range(0..=6)? {
                0 => Component::Int(u.arbitrary()?),
                1 => Component::Index(place),
                2 => Component::Field(u.arbitrary()?),
                3 => Component::Key(u.arbitrary()?),
                // A name that is like no other: most states are to be sound ones.
                _ => Component::Key(format!("k{place}").into()),
            };
            self.node(u, Some(node), Some(component), depth + 1)?;
        }
        Ok(())
    }

    fn leaf(&self, u: &mut Unstructured<'_>) -> Result<Expected> {
        Ok(match u.int_in_range(0..=9)? {
            0..=2 => Expected::Object(value(u, 0)?),
            3 if !self.leaves.is_empty() => Expected::Tie(u.int_in_range(0..=self.leaves.len() as u32)?),
            _ => {
                let dtype = *u.choose(Dtype::ALL)?;
                let ndim = u.int_in_range(0..=4)?;
                let largest = [0, 4096, 64, 24, 9][ndim];
                let shape = (0..ndim).map(|_| u.int_in_range(0..=largest)).collect::<Result<Vec<u64>>>()?;
                let bytes = shape.iter().product::<u64>() as usize * dtype.size();
                let seed: u64 = u.arbitrary()?;
                Expected::Tensor(dtype, shape, pattern(seed, bytes))
            }
        })
    }

    /// The state for the manager. Tensors with several dimensions have another order in memory than
    /// in the file.
    pub fn source(&self) -> StateSource {
        let leaves = self.leaves.iter().enumerate().map(|(number, leaf)| match leaf {
            Expected::Tensor(dtype, shape, bytes) => {
                let (memory, strides) = if number % 2 == 0 {
                    in_order(dtype, shape, bytes)
                } else {
                    reversed(dtype, shape, bytes)
                };
                let first = 0;
                let source = HostSource::owned(memory, first, dtype.size(), shape, &strides)
                    .expect("it lies in its memory");
                LeafSource::whole(*dtype, shape.clone(), Arc::new(HostProvider::new(source)))
            }
            Expected::Object(value) => LeafSource::Object(value.clone()),
            Expected::Tie(of) => LeafSource::Alias(*of),
        });
        StateSource { tree: self.tree.clone(), leaves: leaves.collect() }
    }

    /// The expected value of a leaf, with ties resolved.
    pub fn resolved(&self, leaf: usize) -> &Expected {
        match &self.leaves[leaf] {
            Expected::Tie(of) => &self.leaves[*of as usize],
            own => own,
        }
    }
}

fn kind(u: &mut Unstructured<'_>, depth: usize) -> Result<ContainerKind> {
    Ok(match u.int_in_range(0..=12)? {
        0 => ContainerKind::OrderedDict,
        1 => ContainerKind::DefaultDict,
        2 => ContainerKind::List,
        3 => ContainerKind::Tuple,
        4 => ContainerKind::Deque { maxlen: u.arbitrary()? },
        5 => ContainerKind::NamedTuple { type_name: u.arbitrary()? },
        6 => ContainerKind::Dataclass { type_name: u.arbitrary()? },
        7 => ContainerKind::Custom { type_name: u.arbitrary()? },
        8 if depth < MAX_DEPTH => ContainerKind::Stateful {
            type_name: u.arbitrary()?,
            protocol: u.arbitrary()?,
            inner: Box::new(kind(u, depth + 1)?),
        },
        _ => ContainerKind::Dict,
    })
}

/// Recognisable bytes.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    (0..length as u64)
        .map(|i| ((i ^ seed.wrapping_mul(0x9E37_79B9)).wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u8)
        .collect()
}

/// Memory and strides of a row-major array.
fn in_order(dtype: &Dtype, shape: &[u64], bytes: &[u8]) -> (Vec<u8>, Vec<i64>) {
    let mut strides = vec![0; shape.len()];
    let mut step = dtype.size() as i64;
    for (d, &extent) in shape.iter().enumerate().rev() {
        strides[d] = step;
        step *= extent.max(1).cast_signed();
    }
    (bytes.to_vec(), strides)
}

/// The same array in column-major memory.
fn reversed(dtype: &Dtype, shape: &[u64], bytes: &[u8]) -> (Vec<u8>, Vec<i64>) {
    let size = dtype.size();
    let mut strides = vec![0_i64; shape.len()];
    let mut step = size as i64;
    for (d, &extent) in shape.iter().enumerate() {
        strides[d] = step;
        step *= extent.max(1).cast_signed();
    }
    let mut memory = vec![0; bytes.len()];
    let mut index = vec![0_u64; shape.len()];
    for element in bytes.chunks(size) {
        let at: i64 = index.iter().zip(&strides).map(|(&i, &stride)| i.cast_signed() * stride).sum();
        memory[at as usize..at as usize + size].copy_from_slice(element);
        for d in (0..shape.len()).rev() {
            index[d] += 1;
            if index[d] < shape[d] {
                break;
            }
            index[d] = 0;
        }
    }
    (memory, strides)
}
