//! The short way of a restore: a target that has the structure, dtypes and shapes of what is
//! stored, in containers that are exactly built in.
//!
//! [`plan`] walks the target and the stored tree side by side and answers `None` the moment
//! anything is off, or only Python knows what it means. The general way (`_restore/restore.py`)
//! then starts from the beginning and makes its report. So nothing here decides what is an error.
//! No leaf costs a Python object but the array that is returned; no path is rendered unless a read
//! fails.
//!
//! Both paths have the same order: objects are read first, then arrays in new memory, then the
//! caller's own arrays. Leaves that are tied in the store come back as one object, those of another
//! library as one for each target. The structure is assembled when everything has been read.

mod build;
mod siblings;
mod walk;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use stepwell_core::dtype::Dtype;
use stepwell_core::format::index::{LeafRecord, TensorRecord};
use stepwell_core::region::Region;
use stepwell_core::tree::{ContainerKind, Node as TreeNode};
use stepwell_reshard::read_plan::Request;

use self::build::Build;
use self::siblings::Siblings;
use self::walk::Walk;
use crate::arrays;
use crate::checkpoint::{Checkpoint, Engined, read_all};
use crate::flatten::Dtypes;
use crate::hooks::hooks;
use crate::ingest::HeldBuffer;
use crate::slabs::{Place, Slabs};

/// A restore that has been matched, and what it has read so far.
#[pyclass(frozen, module = "stepwell._core")]
pub struct Direct {
    /// Closing it ends this restore too. A traceback may keep a failed restore alive, but not its
    /// lease.
    checkpoint: Py<Checkpoint>,
    /// True if the caller's containers are filled, false if new ones are made.
    fill: bool,
    /// True if all arrays that are made are to be others than numpy's.
    convert: bool,
    work: Mutex<Work>,
}

struct Work {
    root: Node,
    /// Leaves that hold the objects that are wanted.
    objects: Vec<u32>,
    /// Leaves that hold the tensors that get new memory, and where in it.
    fresh: Vec<(u32, Place)>,
    slabs: Slabs,
    /// Arrays that become another library's, by number, each with the array to imitate.
    like: Vec<(usize, Py<PyAny>)>,
    /// By the leaf that holds a tensor and the address of a target, its place in `like`.
    like_of: HashMap<(u32, usize), usize>,
    /// The arrays over them, once there are any; as long as they are being filled nobody else has
    /// them.
    arrays: Vec<Py<PyAny>>,
    /// Tensors that are read into the caller's memory.
    in_place: Vec<InPlace>,
    /// Of those that are being read, the leaves whose paths are told: the tensors themselves, or
    /// what is tied to them.
    named: Vec<u32>,
    /// By leaf, its number in `objects` or `fresh`.
    number_of: HashMap<u32, Number>,
    siblings: Siblings,
}

/// The place of a leaf's object or array among those that are read, and its treatment.
#[derive(Clone, Copy)]
struct Number {
    at: usize,
    usage: Use,
}

/// The treatment of an array in new memory. The two exclude each other: a writable array must not
/// share memory with an immutable one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// It is returned as it is, like an object.
    AsItIs,
    /// Arrays of another library are made of it.
    Like,
}

/// A node of the result.
enum Node {
    /// An object or an array in new memory, by the leaf that holds it.
    Leaf(u32),
    /// An array of another library, by its place in [`Work::like`].
    Like(usize),
    /// A node of the stored tree, with everything below it.
    Stored(u32),
    /// The caller's own array. Dicts of the caller's that are filled do not list those.
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

/// Matches a target that has exactly the stored structure; `None` where the general way must look.
/// `fill`: arrays of the caller are to be filled; `convert`: what is built is to have other arrays
/// than numpy's, which those in the state of an object may have to stay.
#[pyfunction]
pub fn plan_direct(
    py: Python<'_>,
    checkpoint: &Bound<'_, Checkpoint>,
    target: &Bound<'_, PyAny>,
    fill: bool,
    convert: bool,
) -> PyResult<Option<Direct>> {
    let inner = checkpoint.get().get(py)?;
    let is_object = |node: &TreeNode| matches!(node.container(), Some(ContainerKind::Stateful { .. }));
    if inner.tree().nodes().is_empty() || (convert && inner.tree().nodes().iter().any(is_object)) {
        return Ok(None);
    }
    let work = Work {
        root: Node::Stored(0),
        objects: Vec::new(),
        fresh: Vec::new(),
        slabs: Slabs::default(),
        like: Vec::new(),
        like_of: HashMap::new(),
        arrays: Vec::new(),
        in_place: Vec::new(),
        named: Vec::new(),
        number_of: HashMap::new(),
        siblings: Siblings::of(inner.tree()),
    };
    let hooks = hooks(py)?;
    hooks.load_adapters.call0(py)?;
    let arrays = arrays::known();
    let mut walk = Walk { inner: &inner, hooks, fill, dtypes: Dtypes::default(), arrays, work };
    let Some(root) = walk.node(0, target, 0)? else { return Ok(None) };
    walk.work.root = root;
    if !walk.settle_shared() {
        return Ok(None);
    }
    let work = Mutex::new(walk.work);
    Ok(Some(Direct { checkpoint: checkpoint.clone().unbind(), fill, convert, work }))
}

fn record(inner: &Engined, leaf: u32) -> (u32, Option<&TensorRecord>) {
    match inner.outline().resolve(leaf) {
        Some((source, LeafRecord::Tensor(tensor))) => (source, Some(tensor)),
        Some((source, _)) => (source, None),
        None => (leaf, None),
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
        let inner = self.checkpoint(py)?;
        let (parts, buffers) = {
            let mut work = self.lock();
            work.slabs.map(py)?;
            let mut parts = Vec::with_capacity(work.fresh.len());
            for &(leaf, place) in &work.fresh {
                let Some(tensor) = record(&inner, leaf).1 else { continue };
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
        // They are as much work as the rest of a restore where leaves are small.
        self.read(py, parts, buffers, || self.make_arrays(py))
    }

    /// Reads into the caller's arrays.
    fn read_in_place(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.checkpoint(py)?;
        let mut parts = Vec::new();
        let mut buffers = Vec::new();
        let mut work = self.lock();
        for one in std::mem::take(&mut work.in_place) {
            if !one.twin {
                work.named.push(one.named);
            }
            if !one.twin && one.buffer.nbytes() > 0 {
                let Some(tensor) = record(&inner, one.leaf).1 else { continue };
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
        self.read(py, parts, buffers, || Ok(()))
    }

    /// Paths of the leaves that [`Direct::read_in_place`] has begun to read.
    fn in_place_paths(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let inner = self.checkpoint(py)?;
        Ok(self.lock().named.iter().map(|&leaf| inner.tree().leaf_path(leaf).to_string()).collect())
    }

    /// The caller's structure, or the stored one, with what was read. `objects`: the values of
    /// [`Direct::objects`]; `convert`: arrays → what is returned in their place; `like`: arrays,
    /// and the targets that those of another library are to be like → these.
    fn build<'py>(
        &self,
        py: Python<'py>,
        objects: Vec<Bound<'py, PyAny>>,
        convert: Bound<'py, PyAny>,
        like: Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let inner = self.checkpoint(py)?;
        let (arrays, wanted) = {
            let mut work = self.lock();
            (std::mem::take(&mut work.arrays), std::mem::take(&mut work.like))
        };
        let (values, targets): (Vec<_>, Vec<_>) = wanted
            .into_iter()
            .filter_map(|(number, target)| Some((arrays.get(number)?.clone_ref(py), target)))
            .unzip();
        let like: Vec<Py<PyAny>> =
            if values.is_empty() { Vec::new() } else { like.call1((values, targets))?.extract()? };
        let arrays = if self.convert { convert.call1((arrays,))?.extract()? } else { arrays };
        self.lock().arrays = arrays;
        let mut work = self.lock();
        let build = Build {
            py,
            inner: &inner,
            fill: self.fill,
            siblings: &work.siblings,
            number_of: &work.number_of,
            objects,
            arrays: &work.arrays,
            like: &like,
        };
        let built = build.node(&work.root)?;
        work.root = Node::Stored(0);
        work.arrays.clear();
        Ok(built)
    }
}

impl Direct {
    fn lock(&self) -> std::sync::MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn checkpoint(&self, py: Python<'_>) -> PyResult<Arc<Engined>> {
        self.checkpoint.get().get(py)
    }

    /// One array for each tensor that gets new memory, over that memory.
    fn make_arrays(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.checkpoint(py)?;
        let hooks = hooks(py)?;
        let ndarray = hooks.ndarray.bind(py);
        let mut dtypes: HashMap<Dtype, Bound<'_, PyAny>> = HashMap::new();
        let mut work = self.lock();
        let mut arrays = Vec::with_capacity(work.fresh.len());
        for &(leaf, place) in &work.fresh {
            let Some(tensor) = record(&inner, leaf).1 else { continue };
            let dtype = if let Some(dtype) = dtypes.get(&tensor.dtype) {
                dtype
            } else {
                let made = hooks.to_dtype.bind(py).call1((tensor.dtype.name(),))?;
                dtypes.entry(tensor.dtype).or_insert(made)
            };
            let shape = PyTuple::new(py, &tensor.shape)?;
            let array = match place {
                Place::Slab { slab, offset } => {
                    ndarray.call1((shape, dtype, work.slabs.object(py, slab)?, offset))?
                }
                Place::Empty => ndarray.call1((shape, dtype))?,
            };
            arrays.push(array.unbind());
        }
        work.arrays = arrays;
        Ok(())
    }

    /// Reads, and does `meanwhile` here.
    fn read(
        &self,
        py: Python<'_>,
        parts: Vec<Request>,
        buffers: Vec<HeldBuffer>,
        meanwhile: impl FnOnce() -> PyResult<()>,
    ) -> PyResult<()> {
        if parts.is_empty() {
            return meanwhile();
        }
        read_all(py, &self.checkpoint(py)?, parts, buffers, meanwhile).map(|_| ())
    }
}
