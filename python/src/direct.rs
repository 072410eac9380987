//! The short way of a restore: a target that has the structure, dtypes and shapes of what is stored, in containers that are exactly built in.
//!
//! [`plan`] walks the target and the stored tree side by side and answers `None` the moment anything is off, or only Python knows what it means:
//! the general way (`stepwell.restore`) then starts from the beginning, makes its report, and does whatever is to be done. So nothing here
//! decides what is an error. No leaf costs a Python object but the array that is returned; no path is rendered unless a read fails.
//!
//! What the two ways have in common: objects are read first, then arrays in new memory, then the caller's own arrays; leaves that are tied in the
//! store come back as one object; the structure is put together when everything has been read.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyString, PyTuple};

use stepwell_core::dtype::Dtype;
use stepwell_core::format::index::{LeafRecord, TensorRecord};
use stepwell_core::leaf_path::Component;
use stepwell_core::limits::MAX_DEPTH;
use stepwell_core::region::Region;
use stepwell_core::tree::{ContainerKind, NodeKind, Tree};
use stepwell_core::value::Value;
use stepwell_reshard::read_plan::Request;

use crate::checkpoint::{Checkpoint, Engined, kind_row, read_all};
use crate::flatten::Dtypes;
use crate::hooks::{Hooks, hooks};
use crate::ingest::HeldBuffer;
use crate::slabs::{Place, Slabs};
use crate::values::{Plain, exact_scalar, to_value};

/// A restore that has been matched, and what it has read so far.
#[pyclass(frozen, module = "stepwell._core")]
pub struct Direct {
    inner: Arc<Engined>,
    /// Whether the caller's containers are filled, not made anew.
    fill: bool,
    work: Mutex<Work>,
}

struct Work {
    root: Node,
    /// Leaves that hold the objects that are wanted.
    objects: Vec<u32>,
    /// Leaves that hold the tensors that get new memory, and where in it.
    fresh: Vec<(u32, Place)>,
    slabs: Slabs,
    /// Tensors that are read into the caller's memory.
    in_place: Vec<InPlace>,
    /// Of those that are being read, the leaves whose paths are told: the tensors themselves, or what is tied to them.
    named: Vec<u32>,
    /// By leaf, its number in `objects` or `fresh`.
    number_of: HashMap<u32, usize>,
    siblings: Siblings,
}

/// What is put together at the end.
enum Node {
    /// An object or an array in new memory, by the leaf that holds it.
    Leaf(u32),
    /// A node of the stored tree, with everything below it.
    Stored(u32),
    /// The caller's own array.
    Own(Py<PyAny>),
    Dict(Py<PyDict>, Vec<(Py<PyAny>, Node)>),
    List(Py<PyList>, Vec<Node>),
    Tuple(Vec<Node>),
}

struct InPlace {
    leaf: u32,
    /// The leaf where the caller has it: `leaf` itself, or one that is tied to it.
    named: u32,
    buffer: HeldBuffer,
    /// Its elements are those of the one before it in memory, and so is what is stored.
    twin: bool,
}

/// The children of every node, in order.
struct Siblings {
    first: Vec<u32>,
    next: Vec<u32>,
    count: Vec<u32>,
}

const NONE: u32 = u32::MAX;

impl Siblings {
    fn of(tree: &Tree) -> Self {
        let nodes = tree.nodes();
        let mut found = Self {
            first: vec![NONE; nodes.len()],
            next: vec![NONE; nodes.len()],
            count: vec![0; nodes.len()],
        };
        for (number, node) in nodes.iter().enumerate().skip(1).rev() {
            let parent = node.parent as usize;
            if let (Some(first), Some(next), Some(count)) =
                (found.first.get_mut(parent), found.next.get_mut(number), found.count.get_mut(parent))
            {
                *next = std::mem::replace(first, number as u32);
                *count += 1;
            }
        }
        found
    }

    fn count(&self, node: u32) -> usize {
        self.count.get(node as usize).copied().unwrap_or(0) as usize
    }

    fn children(&self, node: u32) -> impl Iterator<Item = u32> {
        let mut at = self.first.get(node as usize).copied().unwrap_or(NONE);
        std::iter::from_fn(move || {
            let found = (at != NONE).then_some(at)?;
            at = self.next.get(found as usize).copied().unwrap_or(NONE);
            Some(found)
        })
    }
}

/// Matches a target that has exactly the stored structure; `None` where the general way must look. `fill`: arrays of the caller are to be filled.
#[pyfunction]
pub fn plan_direct(
    py: Python<'_>,
    checkpoint: &Checkpoint,
    target: &Bound<'_, PyAny>,
    fill: bool,
) -> PyResult<Option<Direct>> {
    let inner = checkpoint.get(py)?;
    if inner.tree().nodes().is_empty() {
        return Ok(None);
    }
    let work = Work {
        root: Node::Stored(0),
        objects: Vec::new(),
        fresh: Vec::new(),
        slabs: Slabs::default(),
        in_place: Vec::new(),
        named: Vec::new(),
        number_of: HashMap::new(),
        siblings: Siblings::of(inner.tree()),
    };
    let hooks = hooks(py)?;
    let mut walk = Walk { inner: &inner, hooks, fill, dtypes: Dtypes::default(), work };
    let Some(root) = walk.node(0, target, 0)? else { return Ok(None) };
    walk.work.root = root;
    if !walk.settle_shared() {
        return Ok(None);
    }
    let work = Mutex::new(walk.work);
    Ok(Some(Direct { inner, fill, work }))
}

struct Walk<'a, 'py> {
    inner: &'a Engined,
    hooks: &'a Hooks,
    fill: bool,
    dtypes: Dtypes<'py>,
    work: Work,
}

type Found<T> = PyResult<Option<T>>;

impl<'a, 'py> Walk<'a, 'py> {
    fn node(&mut self, at: u32, target: &Bound<'py, PyAny>, depth: u64) -> Found<Node> {
        if depth > MAX_DEPTH {
            return Ok(None);
        }
        let Some(stored) = self.inner.tree().nodes().get(at as usize) else { return Ok(None) };
        let class = target.get_type();
        if target.is(&self.hooks.as_stored) {
            self.everything(at);
            return Ok(Some(Node::Stored(at)));
        }
        if let NodeKind::Leaf(leaf) = stored.kind {
            let (source, tensor) = self.record(leaf);
            return match tensor {
                Some(tensor) if class.is(&self.hooks.ndarray) => self.array(leaf, source, tensor, target),
                Some(tensor) if class.is(&self.hooks.array_spec) => self.spec(source, tensor, target),
                None if class.is(&self.hooks.object_spec) || self.is_plain(target, depth)? => {
                    self.object(source);
                    Ok(Some(Node::Leaf(source)))
                }
                _ => Ok(None),
            };
        }
        if let Ok(dict) = target.cast_exact::<PyDict>() {
            let keys: Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)> = dict.iter().collect();
            let Some(places) = self.places(at, &keys, depth == 0) else { return Ok(None) };
            let mut children = Vec::with_capacity(keys.len());
            for ((key, value), place) in keys.into_iter().zip(places) {
                let Some(child) = self.node(place, &value, depth + 1)? else { return Ok(None) };
                children.push((key.unbind(), child));
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
        // An empty sequence may be an object or a container; which, the general way decides. So it does where the target is one object and
        // what is stored is none.
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

    /// The stored children that the keys of a dict name, in the dict's order. At the top, others may be stored too.
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

    /// Whether a value of the caller is one object, made of exact built-in values only: no class of the caller's is then needed to revive what is stored.
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
            self.fresh(source);
            return Ok(Some(Node::Leaf(source)));
        }
        if buffer.nbytes() > 0 && !buffer.is_injective() {
            return Ok(None);
        }
        self.work.in_place.push(InPlace { leaf: source, named: leaf, buffer, twin: false });
        Ok(Some(Node::Own(target.clone().unbind())))
    }

    fn spec(&mut self, source: u32, tensor: &TensorRecord, target: &Bound<'py, PyAny>) -> Found<Node> {
        let py = target.py();
        let (shape, dtype) = (target.getattr(intern!(py, "shape"))?, target.getattr(intern!(py, "dtype"))?);
        if !target.getattr(intern!(py, "layout"))?.is_none() {
            return Ok(None);
        }
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
        self.fresh(source);
        Ok(Some(Node::Leaf(source)))
    }

    /// Wants a node and everything below it, as it is stored.
    fn everything(&mut self, at: u32) {
        let mut pending = vec![at];
        while let Some(at) = pending.pop() {
            let kind = self.inner.tree().nodes().get(at as usize).map(|node| &node.kind);
            if let Some(NodeKind::Leaf(leaf)) = kind {
                let (source, tensor) = self.record(*leaf);
                if tensor.is_some() { self.fresh(source) } else { self.object(source) }
            } else {
                let before = pending.len();
                pending.extend(self.work.siblings.children(at));
                pending.get_mut(before..).unwrap_or_default().reverse();
            }
        }
    }

    fn object(&mut self, source: u32) {
        let work = &mut self.work;
        work.number_of.entry(source).or_insert_with(|| {
            work.objects.push(source);
            work.objects.len() - 1
        });
    }

    fn fresh(&mut self, source: u32) {
        let Some(tensor) = record(self.inner, source).1 else { return };
        let work = &mut self.work;
        work.number_of.entry(source).or_insert_with(|| {
            let place = work.slabs.take(bytes_of(tensor));
            work.fresh.push((source, place));
            work.fresh.len() - 1
        });
    }

    /// Finds targets that share memory: the same elements from the same stored tensor are read once. Anything else that overlaps is the general way's.
    fn settle_shared(&mut self) -> bool {
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

fn record(inner: &Engined, leaf: u32) -> (u32, Option<&TensorRecord>) {
    let leaves = &inner.index().leaves;
    let source = match leaves.get(leaf as usize) {
        Some(LeafRecord::Alias { of }) => *of,
        _ => leaf,
    };
    match leaves.get(source as usize) {
        Some(LeafRecord::Tensor(tensor)) => (source, Some(tensor)),
        _ => (source, None),
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

/// What a component renders as: keys and fields by name, indices and integer keys by number.
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

#[pymethods]
impl Direct {
    /// The leaves whose objects [`Direct::build`] wants, in this order.
    fn objects(&self) -> Vec<u32> {
        self.lock().objects.clone()
    }

    /// Reads what gets new memory.
    fn read_fresh(&self, py: Python<'_>) -> PyResult<()> {
        let (parts, buffers) = {
            let mut work = self.lock();
            work.slabs.map(py)?;
            let mut parts = Vec::with_capacity(work.fresh.len());
            for &(leaf, place) in &work.fresh {
                let Some(tensor) = record(&self.inner, leaf).1 else { continue };
                if let Place::Slab { slab, offset } = place {
                    let itemsize = tensor.dtype.size() as u64;
                    let region = Region::whole(&tensor.shape);
                    let mut request = Request::row_major(leaf, region, itemsize, slab);
                    request.dst_offset = offset;
                    parts.push(request);
                }
            }
            (parts, work.slabs.buffers(py)?)
        };
        self.read(py, parts, buffers).map(|_| ())
    }

    /// Reads into the caller's arrays.
    fn read_in_place(&self, py: Python<'_>) -> PyResult<()> {
        let mut parts = Vec::new();
        let mut buffers = Vec::new();
        let mut work = self.lock();
        for one in std::mem::take(&mut work.in_place) {
            if !one.twin {
                work.named.push(one.named);
            }
            if !one.twin && one.buffer.nbytes() > 0 {
                let Some(tensor) = record(&self.inner, one.leaf).1 else { continue };
                let request = Request {
                    leaf: one.leaf,
                    region: Region::whole(&tensor.shape),
                    dst: buffers.len() as u32,
                    dst_offset: one.buffer.span().0 as u64,
                    dst_strides: one.buffer.strides().iter().map(|&stride| stride as i64).collect(),
                };
                parts.push(request);
            }
            // That of a twin too: it is the caller's memory, and stays until it is read.
            buffers.push(one.buffer);
        }
        drop(work);
        self.read(py, parts, buffers).map(|_| ())
    }

    /// Paths of the leaves that [`Direct::read_in_place`] has begun to read.
    fn in_place_paths(&self) -> Vec<String> {
        let tree = self.inner.tree();
        self.lock().named.iter().map(|&leaf| tree.leaf_path(leaf).to_string()).collect()
    }

    /// The caller's structure, or the stored one, with what was read. `objects`: the values of [`Direct::objects`].
    fn build<'py>(&self, py: Python<'py>, objects: Vec<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
        let mut work = self.lock();
        let mut build = Build {
            py,
            inner: &self.inner,
            fill: self.fill,
            siblings: &work.siblings,
            number_of: &work.number_of,
            objects,
            arrays: Vec::with_capacity(work.fresh.len()),
        };
        let mut dtypes: HashMap<Dtype, Bound<'py, PyAny>> = HashMap::new();
        let hooks = hooks(py)?;
        for &(leaf, place) in &work.fresh {
            let Some(tensor) = record(&self.inner, leaf).1 else { continue };
            let dtype = if let Some(dtype) = dtypes.get(&tensor.dtype) {
                dtype
            } else {
                let made = hooks.to_dtype.bind(py).call1((tensor.dtype.name(),))?;
                dtypes.entry(tensor.dtype).or_insert(made)
            };
            let shape = PyTuple::new(py, &tensor.shape)?;
            let ndarray = hooks.ndarray.bind(py);
            build.arrays.push(match place {
                Place::Slab { slab, offset } => {
                    ndarray.call1((shape, dtype, work.slabs.object(py, slab)?, offset))?
                }
                Place::Empty => ndarray.call1((shape, dtype))?,
            });
        }
        let built = build.node(&work.root)?;
        drop(build);
        work.root = Node::Stored(0);
        Ok(built)
    }
}

impl Direct {
    fn lock(&self) -> std::sync::MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self, py: Python<'_>, parts: Vec<Request>, buffers: Vec<HeldBuffer>) -> PyResult<u64> {
        if parts.is_empty() {
            return Ok(0);
        }
        read_all(py, &self.inner, parts, buffers)
    }
}

struct Build<'a, 'py> {
    py: Python<'py>,
    inner: &'a Engined,
    fill: bool,
    siblings: &'a Siblings,
    number_of: &'a HashMap<u32, usize>,
    objects: Vec<Bound<'py, PyAny>>,
    arrays: Vec<Bound<'py, PyAny>>,
}

impl<'py> Build<'_, 'py> {
    fn node(&self, node: &Node) -> PyResult<Bound<'py, PyAny>> {
        Ok(match node {
            Node::Leaf(source) => self.leaf(*source)?,
            Node::Stored(at) => self.stored(*at)?,
            Node::Own(array) => array.bind(self.py).clone(),
            Node::Dict(target, children) => {
                // A `like` is never changed.
                let dict = if self.fill { target.bind(self.py).clone() } else { PyDict::new(self.py) };
                for (key, child) in children {
                    dict.set_item(key, self.node(child)?)?;
                }
                dict.into_any()
            }
            Node::List(target, children) => {
                let values: Vec<_> =
                    children.iter().map(|child| self.node(child)).collect::<PyResult<_>>()?;
                if self.fill {
                    let list = target.bind(self.py);
                    list.set_slice(0, list.len(), PyList::new(self.py, values)?.as_any())?;
                    list.clone().into_any()
                } else {
                    PyList::new(self.py, values)?.into_any()
                }
            }
            Node::Tuple(children) => {
                let values: Vec<_> =
                    children.iter().map(|child| self.node(child)).collect::<PyResult<_>>()?;
                PyTuple::new(self.py, values)?.into_any()
            }
        })
    }

    fn leaf(&self, source: u32) -> PyResult<Bound<'py, PyAny>> {
        let values = if record(self.inner, source).1.is_some() { &self.arrays } else { &self.objects };
        let found = self.number_of.get(&source).and_then(|&number| values.get(number));
        found.cloned().ok_or_else(|| PyRuntimeError::new_err(format!("leaf {source} was not read")))
    }

    fn stored(&self, at: u32) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        let nodes = self.inner.tree().nodes();
        let kind = match nodes.get(at as usize).map(|node| &node.kind) {
            Some(NodeKind::Leaf(leaf)) => return self.leaf(record(self.inner, *leaf).0),
            Some(NodeKind::Container(kind)) => kind,
            None => return Err(PyRuntimeError::new_err(format!("there is no node {at}"))),
        };
        let children = self.siblings.children(at);
        match kind {
            ContainerKind::Dict => {
                let dict = PyDict::new(py);
                for child in children {
                    dict.set_item(self.key(child)?, self.stored(child)?)?;
                }
                Ok(dict.into_any())
            }
            ContainerKind::List => {
                let values: Vec<_> = children.map(|child| self.stored(child)).collect::<PyResult<_>>()?;
                Ok(PyList::new(py, values)?.into_any())
            }
            ContainerKind::Tuple => {
                let values: Vec<_> = children.map(|child| self.stored(child)).collect::<PyResult<_>>()?;
                Ok(PyTuple::new(py, values)?.into_any())
            }
            kind => {
                let pairs: Vec<_> = children
                    .map(|child| Ok((self.key(child)?, self.stored(child)?)))
                    .collect::<PyResult<_>>()?;
                hooks(py)?.make.bind(py).call1((kind_row(py, kind)?, PyList::new(py, pairs)?))
            }
        }
    }

    /// How a parent reaches a node.
    fn key(&self, at: u32) -> PyResult<Bound<'py, PyAny>> {
        let component = self.inner.tree().nodes().get(at as usize).and_then(|node| node.component.as_ref());
        Ok(match component {
            Some(Component::Key(name) | Component::Field(name)) => PyString::new(self.py, name).into_any(),
            Some(Component::Int(number)) => number.into_pyobject(self.py)?.into_any(),
            Some(Component::Index(number)) => number.into_pyobject(self.py)?.into_any(),
            None => PyString::new(self.py, "").into_any(),
        })
    }
}
