//! The walk: target and stored tree side by side, until they differ.

use std::collections::HashMap;
use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyString, PyTuple};

use stepwell_core::format::index::TensorRecord;
use stepwell_core::leaf_path::Component;
use stepwell_core::limits::MAX_DEPTH;
use stepwell_core::tree::{ContainerKind, NodeKind};
use stepwell_core::value::Value;

use super::{InPlace, Node, Number, Use, Work, record};
use crate::arrays::Known;
use crate::checkpoint::Engined;
use crate::flatten::Dtypes;
use crate::hooks::Hooks;
use crate::ingest::{HeldBuffer, device_of};
use crate::values::{Plain, exact_scalar, to_value};

pub(super) struct Walk<'a, 'py> {
    pub(super) inner: &'a Engined,
    pub(super) hooks: &'a Hooks,
    pub(super) fill: bool,
    pub(super) dtypes: Dtypes<'py>,
    pub(super) arrays: Arc<Known>,
    pub(super) work: Work,
}

type Found<T> = PyResult<Option<T>>;

impl<'a, 'py> Walk<'a, 'py> {
    pub(super) fn node(&mut self, at: u32, target: &Bound<'py, PyAny>, depth: u64) -> Found<Node> {
        if depth > MAX_DEPTH {
            return Ok(None);
        }
        let Some(stored) = self.inner.tree().nodes().get(at as usize) else { return Ok(None) };
        let class = target.get_type();
        if target.is(&self.hooks.as_stored) {
            return Ok(self.everything(at).map(|()| Node::Stored(at)));
        }
        if let NodeKind::Leaf(leaf) = stored.kind {
            let (source, tensor) = self.record(leaf);
            return match tensor {
                Some(tensor) if class.is(&self.hooks.ndarray) => self.array(leaf, source, tensor, target),
                Some(tensor) if class.is(&self.hooks.array_spec) => self.spec(source, tensor, target),
                Some(tensor) => self.foreign(leaf, source, tensor, target),
                None if class.is(&self.hooks.object_spec) || self.is_plain(target, depth)? => {
                    self.object(source);
                    Ok(Some(Node::Leaf(source)))
                }
                _ => Ok(None),
            };
        }
        if let Ok(dict) = target.cast_exact::<PyDict>() {
            let keys: Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)> = dict.iter().collect();
            // At the top, names that the target does not have are not wanted; places of a sequence
            // have no names.
            let sequence = matches!(
                stored.container(),
                Some(ContainerKind::List | ContainerKind::Tuple | ContainerKind::Deque { .. })
            );
            let Some(places) = self.places(at, &keys, depth == 0 && !sequence) else { return Ok(None) };
            let mut children = Vec::new();
            for ((key, value), place) in keys.into_iter().zip(places) {
                let Some(child) = self.node(place, &value, depth + 1)? else { return Ok(None) };
                // The caller's own value stays in place.
                if !matches!(child, Node::Own(_)) {
                    children.push((key.unbind(), child));
                }
            }
            return Ok(Some(Node::Dict(dict.clone().unbind(), children)));
        }
        let items: Vec<Bound<'py, PyAny>> = if let Ok(list) = target.cast_exact::<PyList>() {
            list.iter().collect()
        } else if let Ok(tuple) = target.cast_exact::<PyTuple>() {
            tuple.iter().collect()
        } else {
            return Ok(None);
        };
        // An empty sequence may be an object or a container; which, the general way decides. So it
        // does where the target is one object and what is stored is none.
        if items.len() != self.work.siblings.count(at) || items.is_empty() {
            return Ok(None);
        }
        let places: Vec<u32> = self.work.siblings.children(at).collect();
        let mut children = Vec::with_capacity(items.len());
        let mut objects = true;
        for (index, (item, place)) in items.iter().zip(places).enumerate() {
            let component = self.inner.tree().nodes().get(place as usize).and_then(|n| n.component.as_ref());
            let fits = match component {
                Some(Component::Index(number)) => *number as usize == index,
                Some(Component::Int(number)) => usize::try_from(*number) == Ok(index),
                _ => false,
            };
            if !fits {
                return Ok(None);
            }
            let Some(child) = self.node(place, item, depth + 1)? else { return Ok(None) };
            objects &= exact_scalar(item)?.is_some()
                || item.is_exact_instance_of::<PyList>()
                || item.is_exact_instance_of::<PyTuple>();
            children.push(child);
        }
        if objects && matches!(to_value(self.hooks, target, false, depth)?, Plain::Value(_)) {
            return Ok(None);
        }
        Ok(Some(match target.cast_exact::<PyList>() {
            Ok(list) => Node::List(list.clone().unbind(), children),
            Err(_) => Node::Tuple(children),
        }))
    }

    /// The stored children that the keys of a dict name, in the dict's order. At the top, others
    /// may be stored too.
    fn places(
        &self,
        at: u32,
        keys: &[(Bound<'py, PyAny>, Bound<'py, PyAny>)],
        top: bool,
    ) -> Option<Vec<u32>> {
        let count = self.work.siblings.count(at);
        if keys.len() > count || (keys.len() < count && !top) {
            return None;
        }
        let nodes = self.inner.tree().nodes();
        let component = |place: u32| nodes.get(place as usize).and_then(|node| node.component.as_ref());
        if keys.len() == count {
            // The usual case: the same keys in the same order.
            let mut places = Vec::with_capacity(count);
            for ((key, _), place) in keys.iter().zip(self.work.siblings.children(at)) {
                if !matches!((Key::of(key), component(place)), (Some(key), Some(stored)) if key.is(stored)) {
                    break;
                }
                places.push(place);
            }
            if places.len() == count {
                return Some(places);
            }
        }
        let mut stored: HashMap<Name<'_>, u32> = HashMap::with_capacity(count);
        for place in self.work.siblings.children(at) {
            let component = component(place)?;
            if stored.insert(Name::of(component), place).is_some() {
                return None;
            }
        }
        let mut places = Vec::with_capacity(keys.len());
        for (key, _) in keys {
            let name = match Key::of(key) {
                Some(Key::Text(text)) => Name::Text(text),
                Some(Key::Number(number)) => Name::Number(number),
                None => return None,
            };
            let &place = stored.get(&name)?;
            places.push(place);
        }
        Some(places)
    }

    /// The leaf that holds a leaf's bytes, and its tensor if it is one.
    fn record(&self, leaf: u32) -> (u32, Option<&'a TensorRecord>) {
        record(self.inner, leaf)
    }

    /// True if a value of the caller is one object, made of exact built-in values only: no class of
    /// the caller's is then needed to revive what is stored.
    fn is_plain(&self, target: &Bound<'py, PyAny>, depth: u64) -> PyResult<bool> {
        let sequence = target.cast_exact::<PyList>().is_ok_and(|list| !list.is_empty())
            || target.cast_exact::<PyTuple>().is_ok_and(|tuple| !tuple.is_empty());
        if !sequence {
            return Ok(
                !target.is(pyo3::types::PyEllipsis::get(target.py())) && exact_scalar(target)?.is_some()
            );
        }
        Ok(matches!(to_value(self.hooks, target, false, depth)?, Plain::Value(value) if is_built_in(&value)))
    }

    fn array(
        &mut self,
        leaf: u32,
        source: u32,
        tensor: &TensorRecord,
        target: &Bound<'py, PyAny>,
    ) -> Found<Node> {
        if self.dtypes.of(self.hooks, target)? != Some(tensor.dtype) {
            return Ok(None);
        }
        // A read-only array is not filled; what is returned in its place, the general way knows.
        let Ok(buffer) = HeldBuffer::new(target, self.fill) else { return Ok(None) };
        let same = buffer.itemsize() == tensor.dtype.size()
            && buffer.shape().len() == tensor.shape.len()
            && buffer.shape().iter().zip(&tensor.shape).all(|(&n, &stored)| u64::try_from(n) == Ok(stored));
        if !same {
            return Ok(None);
        }
        if !self.fill {
            return Ok(self.fresh(source, Use::AsItIs).map(|_| Node::Leaf(source)));
        }
        Ok(self.own(leaf, source, buffer, target))
    }

    /// An array of another library: filled in place if possible, otherwise made like the target.
    fn foreign(
        &mut self,
        leaf: u32,
        source: u32,
        tensor: &TensorRecord,
        target: &Bound<'py, PyAny>,
    ) -> Found<Node> {
        let arrays = Arc::clone(&self.arrays);
        if arrays.abstract_array(target).is_some_and(|known| known.is_whole(target)) {
            return self.like(source, tensor, target);
        }
        let Some(known) = arrays.array(target) else { return Ok(None) };
        if known.immutable && known.is_whole(target) {
            return self.like(source, tensor, target);
        }
        if known.immutable || !self.fill {
            return Ok(None);
        }
        let Ok(capsule) = known.capsule.bind(target.py()).call1((target,)) else { return Ok(None) };
        let Ok((dtype, buffer)) = HeldBuffer::of_capsule(capsule) else { return Ok(None) };
        if dtype != tensor.dtype || buffer.dims() != tensor.shape.as_slice() || device_of(&buffer).is_err() {
            return Ok(None);
        }
        Ok(self.own(leaf, source, buffer, target))
    }

    /// An array that nobody can change, or an abstract one, of the same dtype and shape.
    fn like(&mut self, source: u32, tensor: &TensorRecord, target: &Bound<'py, PyAny>) -> Found<Node> {
        // A symbolic dimension has no value in a file.
        let Ok(shape) = target.getattr(intern!(target.py(), "shape"))?.extract::<Vec<u64>>() else {
            return Ok(None);
        };
        if self.dtypes.of(self.hooks, target)? != Some(tensor.dtype) || shape != tensor.shape.as_slice() {
            return Ok(None);
        }
        let Some(number) = self.fresh(source, Use::Like) else { return Ok(None) };
        let work = &mut self.work;
        let at = *work.like_of.entry((source, target.as_ptr() as usize)).or_insert_with(|| {
            work.like.push((number, target.clone().unbind()));
            work.like.len() - 1
        });
        Ok(Some(Node::Like(at)))
    }

    /// Memory of the caller's that is filled, where no two of its elements are one.
    fn own(
        &mut self,
        leaf: u32,
        source: u32,
        buffer: HeldBuffer,
        target: &Bound<'py, PyAny>,
    ) -> Option<Node> {
        if buffer.nbytes() > 0 && !buffer.is_injective() {
            return None;
        }
        self.work.in_place.push(InPlace { leaf: source, named: leaf, buffer, twin: false });
        Some(Node::Own(target.clone().unbind()))
    }

    fn spec(&mut self, source: u32, tensor: &TensorRecord, target: &Bound<'py, PyAny>) -> Found<Node> {
        let py = target.py();
        let (shape, dtype) = (target.getattr(intern!(py, "shape"))?, target.getattr(intern!(py, "dtype"))?);
        if !dtype.is_none() && self.dtypes.named(self.hooks, dtype)? != Some(tensor.dtype) {
            return Ok(None);
        }
        if !shape.is_none() {
            let shape = shape.cast_into_exact::<PyTuple>()?;
            if shape.len() != tensor.shape.len() {
                return Ok(None);
            }
            for (n, &stored) in shape.iter().zip(&tensor.shape) {
                if n.extract::<u64>().ok() != Some(stored) {
                    return Ok(None);
                }
            }
        }
        Ok(self.fresh(source, Use::AsItIs).map(|_| Node::Leaf(source)))
    }

    /// Wants a node and everything below it, as it is stored; `None` where a tie has another use
    /// for one of these.
    fn everything(&mut self, at: u32) -> Option<()> {
        let mut pending = vec![at];
        while let Some(at) = pending.pop() {
            let kind = self.inner.tree().nodes().get(at as usize).map(|node| &node.kind);
            if let Some(NodeKind::Leaf(leaf)) = kind {
                let (source, tensor) = self.record(*leaf);
                if tensor.is_some() {
                    self.fresh(source, Use::AsItIs)?;
                } else {
                    self.object(source);
                }
            } else {
                let before = pending.len();
                pending.extend(self.work.siblings.children(at));
                pending.get_mut(before..).unwrap_or_default().reverse();
            }
        }
        Some(())
    }

    fn object(&mut self, source: u32) {
        let work = &mut self.work;
        work.number_of.entry(source).or_insert_with(|| {
            work.objects.push(source);
            Number { at: work.objects.len() - 1, usage: Use::AsItIs }
        });
    }

    /// The number of an array in new memory; `None` where a leaf that is tied to it has another use
    /// for it.
    fn fresh(&mut self, source: u32, usage: Use) -> Option<usize> {
        let tensor = record(self.inner, source).1?;
        let work = &mut self.work;
        let number = work.number_of.entry(source).or_insert_with(|| {
            let place = work.slabs.take(bytes_of(tensor));
            work.fresh.push((source, place));
            Number { at: work.fresh.len() - 1, usage }
        });
        (number.usage == usage).then_some(number.at)
    }

    /// Finds targets that share memory: the same elements from the same stored tensor are read
    /// once. Anything else that overlaps is the general way's.
    pub(super) fn settle_shared(&mut self) -> bool {
        let span = |one: &InPlace| {
            let (below, len) = one.buffer.span();
            let low = (one.buffer.address() as usize).wrapping_sub(below);
            (low, low.saturating_add(len))
        };
        let all = &mut self.work.in_place;
        let mut order: Vec<(usize, usize, usize)> = all
            .iter()
            .enumerate()
            .filter(|(_, one)| one.buffer.nbytes() > 0)
            .map(|(number, one)| {
                let (low, high) = span(one);
                (low, high, number)
            })
            .collect();
        order.sort_unstable();
        let mut twins = Vec::new();
        let mut last: Option<(usize, usize)> = None;
        for &(low, high, number) in &order {
            let Some((end, before)) = last.filter(|&(end, _)| low < end) else {
                last = Some((high, number));
                continue;
            };
            let (Some(one), Some(other)) = (all.get(before), all.get(number)) else { return false };
            let same = one.leaf == other.leaf
                && one.buffer.address() == other.buffer.address()
                && one.buffer.strides() == other.buffer.strides();
            if !same || end != high {
                return false;
            }
            twins.push(number);
        }
        for number in twins {
            if let Some(one) = all.get_mut(number) {
                one.twin = true;
            }
        }
        true
    }
}

fn bytes_of(tensor: &TensorRecord) -> u64 {
    tensor.shape.iter().fold(tensor.dtype.size() as u64, |bytes, &n| bytes.saturating_mul(n))
}

fn is_built_in(value: &Value) -> bool {
    match value {
        Value::List(values) | Value::Tuple(values) => values.iter().all(is_built_in),
        Value::Extension(..) | Value::Set(_) | Value::FrozenSet(_) | Value::Dict(_) => false,
        _ => true,
    }
}

/// A key of a dict.
enum Key<'a> {
    Text(&'a str),
    Number(i64),
}

impl<'a> Key<'a> {
    fn of(key: &'a Bound<'_, PyAny>) -> Option<Self> {
        if let Ok(text) = key.cast_exact::<PyString>() {
            return text.to_str().ok().map(Self::Text);
        }
        key.is_exact_instance_of::<PyInt>().then(|| key.extract().ok()).flatten().map(Self::Number)
    }

    fn is(&self, component: &Component) -> bool {
        match (self, Name::of(component)) {
            (Self::Text(one), Name::Text(other)) => *one == other,
            (Self::Number(one), Name::Number(other)) => *one == other,
            _ => false,
        }
    }
}

/// The rendering of a component: keys and fields by name, indices and integer keys by number.
#[derive(PartialEq, Eq, Hash)]
enum Name<'a> {
    Text(&'a str),
    Number(i64),
}

impl<'a> Name<'a> {
    fn of(component: &'a Component) -> Self {
        match component {
            Component::Key(name) | Component::Field(name) => Self::Text(name),
            Component::Int(number) => Self::Number(*number),
            Component::Index(number) => Self::Number(i64::from(*number)),
        }
    }
}
