//! Groups: the arrays of a plain subtree, matched and read without a Python object for each leaf.
//!
//! A subtree is plain if it has dicts and lists only, and numpy arrays as leaves. A group of a
//! target holds the memory of its arrays from the walk to the read. A group that gets new arrays
//! holds theirs after the match.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyString, PyTuple};

use stepwell_core::leaf_path::{Component, LeafPath};
use stepwell_core::limits::MAX_DEPTH;
use stepwell_core::region::Region;
use stepwell_core::tree::{ContainerKind, Node, NodeKind, Tree};
use stepwell_reshard::matching::{Match, Report, Spec, StoredSpec, TensorMatch, Wanted};
use stepwell_reshard::read_plan::Request;

use crate::checkpoint::Checkpoint;
use crate::flatten::Dtypes;
use crate::hooks::{Hooks, hooks};
use crate::ingest::HeldBuffer;
use crate::matching::component_of;

/// See the module documentation.
#[pyclass(frozen, module = "stepwell._core")]
pub struct ArrayGroup(Mutex<Group>);

#[derive(Default)]
struct Group {
    /// The leaves of a target, until they are matched.
    wanted: Vec<Wanted>,
    /// The memory of the arrays, until it is read into.
    buffers: Vec<HeldBuffer>,
    /// The stored leaves, in the order of the arrays.
    stored: Vec<u32>,
    /// The top of a stored subtree.
    top: u32,
}

/// The group of a plain subtree of a target, which is at that path below `depth` containers. `None`
/// if it is not plain, or has an array that must be handled alone. With `fill` the arrays are to be
/// filled.
#[pyfunction]
pub fn array_group(
    target: &Bound<'_, PyAny>,
    at: &Bound<'_, PyTuple>,
    depth: usize,
    fill: bool,
) -> PyResult<Option<ArrayGroup>> {
    let (hooks, dtypes) = (hooks(target.py())?, Dtypes::default());
    let mut walk =
        GroupWalk { hooks, dtypes, fill, depth, open: Vec::new(), path: None, group: Group::default() };
    // Most states are no group. The first walk shows that without taking hold of an array.
    if !walk.visit(target)? {
        return Ok(None);
    }
    walk.path = Some(at.iter().map(|row| component_of(&row)).collect::<PyResult<_>>()?);
    Ok(walk.visit(target)?.then(|| ArrayGroup(Mutex::new(walk.group))))
}

struct GroupWalk<'h, 'py> {
    hooks: &'h Hooks,
    dtypes: Dtypes<'py>,
    fill: bool,
    /// The number of containers around the target.
    depth: usize,
    /// The addresses of the containers around the value in the target.
    open: Vec<usize>,
    /// The path of the value. `None`: arrays are only looked at.
    path: Option<Vec<Component>>,
    group: Group,
}

impl<'py> GroupWalk<'_, 'py> {
    /// Adds the arrays of a value. Returns false if the value is not plain.
    fn visit(&mut self, value: &Bound<'py, PyAny>) -> PyResult<bool> {
        if value.get_type().is(&self.hooks.ndarray) {
            return self.array(value);
        }
        let at = value.as_ptr() as usize;
        if (self.depth + self.open.len()) as u64 >= MAX_DEPTH || self.open.contains(&at) {
            return Ok(false);
        }
        self.open.push(at);
        let mut is_plain = false;
        if let Ok(dict) = value.cast_exact::<PyDict>() {
            is_plain = !dict.is_empty();
            for (key, value) in dict.iter() {
                is_plain = is_plain && self.child(|| key_of(&key), &value)?;
            }
        } else if let Ok(list) = value.cast_exact::<PyList>() {
            is_plain = !list.is_empty();
            for (index, value) in (0..).zip(list.iter()) {
                is_plain = is_plain && self.child(|| Some(Component::Index(index)), &value)?;
            }
        }
        self.open.pop();
        Ok(is_plain)
    }

    fn child(
        &mut self,
        component: impl FnOnce() -> Option<Component>,
        value: &Bound<'py, PyAny>,
    ) -> PyResult<bool> {
        if let Some(path) = &mut self.path {
            let Some(component) = component() else { return Ok(false) };
            path.push(component);
        }
        let is_plain = self.visit(value)?;
        self.path.as_mut().and_then(Vec::pop);
        Ok(is_plain)
    }

    fn array(&mut self, array: &Bound<'py, PyAny>) -> PyResult<bool> {
        let Some(path) = &self.path else {
            return Ok(array.getattr(intern!(array.py(), "ndim"))?.extract::<usize>()? > 0);
        };
        let Ok(buffer) = HeldBuffer::new(array, self.fill) else { return Ok(false) };
        let Some(dtype) = self.dtypes.of(self.hooks, array)? else { return Ok(false) };
        self.group.wanted.push(Wanted {
            path: LeafPath(path.clone()),
            spec: Spec::Tensor { dtype: Some(dtype), shape: Some(buffer.dims()) },
            holds_value: true,
        });
        if self.fill {
            self.group.buffers.push(buffer);
        }
        Ok(true)
    }
}

/// The component of a key that can be stored.
fn key_of(key: &Bound<'_, PyAny>) -> Option<Component> {
    if let Ok(name) = key.cast_exact::<PyString>() {
        return Some(Component::Key(name.to_str().ok()?.into()));
    }
    key.cast_exact::<PyInt>().ok()?.extract().ok().map(Component::Int)
}

#[pymethods]
impl ArrayGroup {
    fn __len__(&self) -> usize {
        self.lock().wanted.len()
    }

    /// The stored leaves, in the order of the arrays.
    pub(crate) fn stored(&self) -> Vec<u32> {
        self.lock().stored.clone()
    }

    /// Bytes of the arrays whose memory it holds.
    fn nbytes(&self) -> usize {
        self.lock().buffers.iter().map(HeldBuffer::nbytes).sum()
    }

    /// Holds the memory of new arrays.
    fn hold(&self, arrays: &Bound<'_, PyList>) -> PyResult<()> {
        let held = arrays.iter().map(|array| HeldBuffer::new(&array, true)).collect::<PyResult<_>>()?;
        self.lock().buffers = held;
        Ok(())
    }

    /// The stored subtree. Its leaves are shapes and dtypes.
    fn outline<'py>(&self, py: Python<'py>, checkpoint: &Checkpoint) -> PyResult<Option<Bound<'py, PyAny>>> {
        let inner = checkpoint.get(py)?;
        let top = self.lock().top;
        let mut made: Vec<Bound<'py, PyAny>> = Vec::new();
        for node in subtree(inner.tree(), top) {
            let value = match &node.kind {
                NodeKind::Container(kind) if **kind == ContainerKind::List => PyList::empty(py).into_any(),
                NodeKind::Container(_) => PyDict::new(py).into_any(),
                NodeKind::Leaf(leaf) => match inner.leaves().get(*leaf as usize).map(|leaf| &leaf.spec) {
                    Some(StoredSpec::Tensor { dtype, shape }) => {
                        (PyTuple::new(py, shape)?, dtype.name()).into_pyobject(py)?.into_any()
                    }
                    _ => return Ok(None),
                },
            };
            match (made.get(node.parent.wrapping_sub(top) as usize), &node.component) {
                (Some(parent), Some(Component::Key(name))) => parent.set_item(&**name, &value)?,
                (Some(parent), Some(Component::Int(key))) => parent.set_item(key, &value)?,
                (Some(parent), _) => parent.cast::<PyList>()?.append(&value)?,
                (None, _) => {}
            }
            made.push(value);
        }
        Ok(made.into_iter().next())
    }
}

/// The nodes of a subtree.
fn subtree(tree: &Tree, top: u32) -> &[Node] {
    let nodes = tree.nodes().get(top as usize..).unwrap_or_default();
    let below = nodes.iter().skip(1).take_while(|node| node.parent >= top);
    nodes.get(..=below.count()).unwrap_or_default()
}

impl ArrayGroup {
    fn lock(&self) -> MutexGuard<'_, Group> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `add` with the lowest byte of each array, the one after the highest, and whether no
    /// two of its elements share memory. An array without elements is left out.
    pub fn spans(&self, mut add: impl FnMut(usize, usize, bool)) {
        for buffer in self.lock().buffers.iter().filter(|buffer| buffer.nbytes() > 0) {
            let (below, len) = buffer.span();
            let low = buffer.address() as usize - below;
            add(low, low + len, buffer.is_injective());
        }
    }

    /// Adds its requests, and moves the buffers that they fill behind those of others.
    pub fn give_requests(&self, requests: &mut Vec<Request>, targets: &mut Vec<HeldBuffer>) {
        let mut group = self.lock();
        let buffers = std::mem::take(&mut group.buffers);
        for (&leaf, buffer) in group.stored.iter().zip(buffers).filter(|(_, buffer)| buffer.nbytes() > 0) {
            requests.push(request(leaf, vec![0; buffer.shape().len()], &buffer, targets.len()));
            targets.push(buffer);
        }
    }
}

/// The request that fills the buffer of that number with a region of a stored tensor.
pub fn request(leaf: u32, offset: Vec<u64>, buffer: &HeldBuffer, number: usize) -> Request {
    Request {
        leaf,
        region: Region { offset: offset.into(), extent: buffer.dims().into() },
        dst: number as u32,
        dst_offset: buffer.span().0 as u64,
        dst_strides: buffer.strides().iter().map(|&stride| stride as i64).collect(),
    }
}

/// Rows of a match that may be read as groups. Without a group: a row for a stored subtree.
pub type Candidates<'py> = Vec<(Range<usize>, Option<Bound<'py, ArrayGroup>>)>;
/// Groups, and the positions of their matches in a report.
pub type Groups<'py> = Vec<(Range<usize>, Bound<'py, ArrayGroup>)>;

/// Moves the leaves of a target's group behind those that are wanted so far.
pub fn candidate<'py>(
    group: &Bound<'py, ArrayGroup>,
    wanted: &mut Vec<Wanted>,
) -> (Range<usize>, Option<Bound<'py, ArrayGroup>>) {
    let first = wanted.len();
    wanted.append(&mut group.get().lock().wanted);
    (first..wanted.len(), Some(group.clone()))
}

/// The groups among candidates. Each leaf of a group gets the bytes of a stored tensor as they are,
/// and no other leaf gets them. `None` if a group of the target is not like that.
pub fn settle<'py>(
    py: Python<'py>,
    mut candidates: Candidates<'py>,
    report: &Report,
    wanted: &[Wanted],
    tree: &Tree,
) -> PyResult<Option<Groups<'py>>> {
    let mut uses = vec![0; tree.leaf_count()];
    for found in &report.matches {
        uses.get_mut(found.source).into_iter().for_each(|uses| *uses += 1);
    }
    let is_exact = |found: &Match| {
        let as_stored = |tensor: &TensorMatch| !tensor.is_cast() && !tensor.padded && !tensor.truncated;
        let is_untied = found.stored == found.source && uses.get(found.source) == Some(&1);
        is_untied && found.tensor.as_ref().is_some_and(as_stored)
    };
    candidates.sort_unstable_by_key(|(rows, _)| rows.start);
    let mut groups = Vec::new();
    for (rows, group) in candidates {
        let position = |row| report.matches.partition_point(|found| found.wanted < row);
        let range = position(rows.start)..position(rows.end);
        let matches = report.matches.get(range.clone()).unwrap_or_default();
        let stored: Vec<u32> = matches.iter().map(|found| found.stored as u32).collect();
        let is_exact = matches.iter().all(is_exact);
        if let Some(group) = group {
            if !is_exact || stored.len() < rows.len() {
                return Ok(None);
            }
            group.get().lock().stored = stored;
            groups.push((range, group));
            continue;
        }
        let depth = wanted.get(rows.start).map_or(0, |wanted| wanted.path.0.len());
        if let Some(top) = plain_top(tree, &stored, depth).filter(|_| is_exact) {
            let group = ArrayGroup(Mutex::new(Group { stored, top, ..Group::default() }));
            groups.push((range, Bound::new(py, group)?));
        }
    }
    Ok(Some(groups))
}

/// The node at that depth above stored leaves, if its subtree is plain and has these leaves only.
fn plain_top(tree: &Tree, stored: &[u32], depth: usize) -> Option<u32> {
    let leaf = tree.leaf_node(*stored.first()?)?;
    let above = tree.path(leaf).0.len().checked_sub(depth)?;
    let top = (0..above).try_fold(leaf, |at, _| tree.nodes().get(at as usize).map(|node| node.parent))?;
    let mut leaves = stored.iter();
    let is_plain = subtree(tree, top).iter().all(|node| match &node.kind {
        NodeKind::Container(kind) => matches!(**kind, ContainerKind::Dict | ContainerKind::List),
        NodeKind::Leaf(leaf) => leaves.next() == Some(leaf),
    });
    (is_plain && leaves.next().is_none()).then_some(top)
}
