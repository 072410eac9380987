//! The walk over a state: Python containers and leaves → a [`Tree`] and its leaves, arrays by
//! reference.
//!
//! Exact `dict`, `list`, `tuple`, `ndarray` and built-in scalars never leave Rust; everything else
//! goes through `_state.leaves.describe`, but for arrays of classes that its adapters have made
//! known ([`crate::arrays`]). Nothing is copied but arrays that are not little-endian, or not in
//! host memory; the buffers stay held until the [`Flat`] is dropped, under the GIL.

use std::collections::HashMap;
use std::sync::Arc;

use pyo3::exceptions::{PyException, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyString, PyTuple};

use stepwell_core::dtype::Dtype;
use stepwell_core::leaf_path::{Component, named};
use stepwell_core::limits::{MAX_DEPTH, MAX_NAME_BYTES};
use stepwell_core::region::Region;
use stepwell_core::tree::{ContainerKind, NodeKind, Tree};
use stepwell_core::value::Value;
use stepwell_manager::state::Holders;
use stepwell_reshard::glob::{Glob, PathText};
use stepwell_reshard::matching::PerGlob;
use stepwell_reshard::selection::Selection;

use crate::arrays::{self, ArrayType, Known};
use crate::errors::invalid;
use crate::hooks::{Hooks, dtype_named, hooks, unsupported};
use crate::ingest::{HeldBuffer, device_of};
use crate::values::{Plain, TOO_DEEP, described, exact_scalar, to_value};

/// A leaf of a flattened state.
pub enum Leaf {
    /// An array whose elements are in the held buffer. `immutable`: they never change.
    Array { dtype: Dtype, buffer: HeldBuffer, immutable: bool },
    /// An array in several buffers, each a box of it.
    Sharded { dtype: Dtype, shape: Vec<u64>, shards: Vec<Shard> },
    /// A typed value.
    Object(Value),
    /// The same memory, shape, strides and dtype as an earlier leaf.
    Alias(u32),
}

/// A box of an array, and the buffer that holds it.
pub struct Shard {
    /// Its region in the whole array.
    pub region: Region,
    /// Its elements.
    pub buffer: HeldBuffer,
    /// Nobody changes them, or not before they are captured.
    pub immutable: bool,
    /// Which processes hold the same.
    pub holders: Holders,
}

/// A flattened state.
#[derive(Default)]
pub struct Flat {
    /// Containers and leaves.
    pub tree: Tree,
    /// The leaves, in the tree's order.
    pub leaves: Vec<Leaf>,
    /// Numbers of those that may differ between ranks, in order: the first one's count.
    pub drifting: Vec<u32>,
    /// The dtypes that leaves are stored in, where they are not their own.
    pub cast: PerGlob<Option<Dtype>>,
}

/// The part of a state that is saved.
#[derive(Default)]
pub struct Choice {
    selection: Selection,
    cast: PerGlob<Option<Dtype>>,
    /// Globs that have matched nothing as yet, and the options that they were given to.
    idle: Vec<(&'static str, Glob)>,
}

impl Choice {
    pub fn new(selection: Selection, cast: PerGlob<Option<Dtype>>) -> Self {
        let idle = [
            ("include", selection.include().unwrap_or_default()),
            ("exclude", selection.exclude()),
            ("cast", cast.globs()),
        ];
        let named = |(option, globs): (&'static str, &[Glob])| {
            globs.iter().map(|glob| (option, glob.clone())).collect::<Vec<_>>()
        };
        Self { idle: idle.into_iter().flat_map(named).collect(), selection, cast }
    }

    fn is_all(&self) -> bool {
        self.selection.is_all() && self.idle.is_empty()
    }
}

/// Flattens the chosen part of a state, and returns the globs that match nothing. A leaf that
/// cannot be stored is named by its path.
pub fn flatten(state: &Bound<'_, PyAny>, choice: Choice) -> PyResult<(Flat, Vec<(&'static str, Glob)>)> {
    let hooks = hooks(state.py())?;
    hooks.load_adapters.call0(state.py())?;
    let mut walk = Walk {
        hooks,
        arrays: arrays::known(),
        drifting: false,
        library: None,
        flat: Flat::default(),
        ties: HashMap::new(),
        copies: HashMap::new(),
        originals: HashMap::new(),
        dtypes: Dtypes::default(),
        open: Vec::new(),
        lengths: HashMap::new(),
        choice,
    };
    walk.visit(None, None, state, 0)?;
    if !walk.choice.selection.is_all() {
        walk.drop_emptied(state.py())?;
    }
    walk.flat.cast = walk.choice.cast;
    Ok((walk.flat, walk.choice.idle))
}

/// Dtype objects seen, by address (kept alive here, so that no address comes twice).
#[derive(Default)]
pub struct Dtypes<'py>(HashMap<usize, (Bound<'py, PyAny>, Option<Dtype>)>);

impl<'py> Dtypes<'py> {
    /// The storable dtype of an array, or `None`.
    pub fn of(&mut self, hooks: &Hooks, array: &Bound<'py, PyAny>) -> PyResult<Option<Dtype>> {
        self.named(hooks, array.getattr(intern!(array.py(), "dtype"))?)
    }

    /// The stored dtype of a dtype object, or `None`.
    pub fn named(&mut self, hooks: &Hooks, dtype: Bound<'py, PyAny>) -> PyResult<Option<Dtype>> {
        if let Some((_, known)) = self.0.get(&(dtype.as_ptr() as usize)) {
            return Ok(*known);
        }
        let name: Option<String> = hooks.storable_name.bind(dtype.py()).call1((&dtype,))?.extract()?;
        let known = name.map(|name| dtype_named(&name)).transpose()?;
        self.0.insert(dtype.as_ptr() as usize, (dtype, known));
        Ok(known)
    }
}

struct Walk<'h, 'py> {
    hooks: &'h Hooks,
    arrays: Arc<Known>,
    /// The value may differ between ranks, and the first holder's counts.
    drifting: bool,
    /// The library of the arrays in the stateful object that is being walked.
    library: Option<Arc<str>>,
    flat: Flat,
    /// Address, dtype, and whether the leaf is a converted copy of what lies there → the leaves
    /// that start there.
    ties: HashMap<(usize, Dtype, bool), Vec<u32>>,
    /// Leaves that are copies of something whose memory is not seen here, by what names it.
    copies: HashMap<String, u32>,
    /// For leaves that are converted copies: their originals.
    originals: HashMap<u32, HeldBuffer>,
    dtypes: Dtypes<'py>,
    /// The objects that are being walked, outermost first, by address, and the numbers of their
    /// nodes. All are alive, so that no address comes twice.
    open: Vec<(usize, u32)>,
    /// Elements of the caller's sequences, by node. Known where only a part of the state is saved.
    lengths: HashMap<u32, u32>,
    choice: Choice,
}

impl<'py> Walk<'_, 'py> {
    fn visit(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        object: &Bound<'py, PyAny>,
        depth: u64,
    ) -> PyResult<()> {
        if depth > MAX_DEPTH {
            return Err(self.refuse(parent, component, object.py(), TOO_DEEP));
        }
        if self.choice.is_all() {
            return self.visit_chosen(parent, component, object, depth);
        }
        let text = self.text(parent, component.as_ref());
        self.choice.idle.retain(|(_, glob)| !glob.selects(text.as_bytes()));
        if self.choice.selection.excludes_text(text.as_bytes()) {
            return Ok(());
        }
        let before = self.flat.tree.nodes().len();
        let walked = self.visit_chosen(parent, component, object, depth);
        // A leaf that is not selected need not be one that can be stored.
        let is_left_out = self.flat.tree.nodes().len() == before
            && parent.is_some()
            && !self.choice.selection.selects_text(text.as_bytes());
        match walked {
            Err(error)
                if is_left_out && error.is_instance(object.py(), self.hooks.error.bind(object.py())) =>
            {
                Ok(())
            }
            walked => walked,
        }
    }

    fn visit_chosen(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        object: &Bound<'py, PyAny>,
        depth: u64,
    ) -> PyResult<()> {
        if object.get_type().is(&self.hooks.ndarray) {
            return self.array(parent, component, object, depth);
        }
        if let Some((dtype, buffer, immutable)) = self.hold(object)? {
            return self.hold_array(parent, component, object.py(), (dtype, buffer, immutable), None);
        }
        if let Some(value) = exact_scalar(object)? {
            self.leaf(parent, component, Leaf::Object(value));
            return Ok(());
        }
        let address = object.as_ptr() as usize;
        if let Some(&(_, node)) = self.open.iter().find(|(open, _)| *open == address) {
            let at = self.flat.tree.path(node).to_string();
            let kind = object.get_type().name()?;
            let why = if at.is_empty() {
                format!("a cycle: the whole state (a {kind}) is inside itself here")
            } else {
                format!("a cycle: the {kind} at `{at}` is inside itself here")
            };
            return Err(self.refuse(
                parent,
                component,
                object.py(),
                &format!("{why}; leave this reference out"),
            ));
        }
        self.open.push((address, self.flat.tree.nodes().len() as u32));
        let walked = self.container(parent, component, object, depth);
        self.open.pop();
        walked
    }

    /// Any value except arrays and built-in scalars.
    fn container(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        object: &Bound<'py, PyAny>,
        depth: u64,
    ) -> PyResult<()> {
        if let Ok(dict) = object.cast_exact::<PyDict>() {
            let node = self.flat.tree.push_container(parent, component, ContainerKind::Dict);
            for (key, value) in dict.iter() {
                let component = self.key(node, &key)?;
                self.visit(Some(node), Some(component), &value, depth + 1)?;
            }
            return Ok(());
        }
        let list = object.cast_exact::<PyList>();
        let tuple = object.cast_exact::<PyTuple>();
        if list.is_ok() || tuple.is_ok() {
            if object.len()? > 0 {
                match to_value(self.hooks, object, false, depth) {
                    Ok(Plain::Value(value)) => {
                        self.leaf(parent, component, Leaf::Object(value));
                        return Ok(());
                    }
                    // The visit of its parts fails again, and knows which of them it is.
                    Err(error) if !error.is_instance_of::<PyException>(object.py()) => return Err(error),
                    Ok(Plain::Not | Plain::Refused(_)) | Err(_) => {}
                }
            }
            let kind = if list.is_ok() { ContainerKind::List } else { ContainerKind::Tuple };
            let node = self.flat.tree.push_container(parent, component, kind);
            return match (list, tuple) {
                (Ok(list), _) => self.children(node, list.iter(), depth),
                (_, Ok(tuple)) => self.children(node, tuple.iter(), depth),
                _ => Ok(()),
            };
        }
        self.other(parent, component, object, depth)
    }

    fn children(
        &mut self,
        node: u32,
        items: impl Iterator<Item = Bound<'py, PyAny>>,
        depth: u64,
    ) -> PyResult<()> {
        let mut length = 0;
        for (index, item) in items.enumerate() {
            let index =
                u32::try_from(index).map_err(|_| PyValueError::new_err("a sequence of 2**32 elements"))?;
            self.visit(Some(node), Some(Component::Index(index)), &item, depth + 1)?;
            length = index + 1;
        }
        if !self.choice.selection.is_all() {
            self.lengths.insert(node, length);
        }
        Ok(())
    }

    /// Children whose keys are fields (`fields`) or keys of a mapping.
    fn pairs(&mut self, node: u32, pairs: &Bound<'py, PyAny>, fields: bool, depth: u64) -> PyResult<()> {
        for pair in pairs.try_iter()? {
            let pair = pair?;
            let key = pair.get_item(0)?;
            let component = match self.key(node, &key)? {
                Component::Key(name) if fields => Component::Field(name),
                other => other,
            };
            self.visit(Some(node), Some(component), &pair.get_item(1)?, depth + 1)?;
        }
        Ok(())
    }

    fn key(&self, node: u32, key: &Bound<'py, PyAny>) -> PyResult<Component> {
        if let Ok(name) = key.cast_exact::<PyString>() {
            return match name.to_str() {
                Ok(name) if name.len() as u64 > MAX_NAME_BYTES => {
                    let why = format!("a key of {} bytes; at most {MAX_NAME_BYTES} are stored", name.len());
                    Err(self.refuse(Some(node), None, key.py(), &why))
                }
                Ok(name) => Ok(Component::Key(name.into())),
                Err(_) => {
                    let why = format!("the key {} holds lone surrogates and has no UTF-8", key.repr()?);
                    Err(self.refuse(Some(node), None, key.py(), &why))
                }
            };
        }
        if key.is_exact_instance_of::<PyInt>() {
            if let Ok(key) = key.extract::<i64>() {
                return Ok(Component::Int(key));
            }
            let why = format!("the key {} does not fit 64 bits", key.repr()?);
            return Err(self.refuse(Some(node), None, key.py(), &why));
        }
        let why = format!(
            "keys are str or int; {} is a {} (keys of other types would not come back as what they are)",
            key.repr()?,
            key.get_type().name()?
        );
        Err(self.refuse(Some(node), None, key.py(), &why))
    }

    /// Any value that is not exactly one of the common built-ins.
    fn other(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        object: &Bound<'py, PyAny>,
        depth: u64,
    ) -> PyResult<()> {
        // Sets are plain or refused; the rest is described once, by Python.
        let set = object.is_exact_instance_of::<pyo3::types::PySet>()
            || object.is_exact_instance_of::<pyo3::types::PyFrozenSet>();
        if set {
            return match to_value(self.hooks, object, false, depth)? {
                Plain::Value(value) => {
                    self.leaf(parent, component, Leaf::Object(value));
                    Ok(())
                }
                Plain::Not => {
                    Err(self.refuse(parent, component, object.py(), "a set can only hold plain values"))
                }
                Plain::Refused(why) => Err(self.refuse(parent, component, object.py(), &why)),
            };
        }
        let answer = self.hooks.describe.bind(object.py()).call1((object,)).map_err(|error| {
            // Code of the caller's has run (`state_dict`, a property): where, its own error does
            // not know.
            let path = self.path(parent, component.as_ref());
            if error.is_instance(object.py(), self.hooks.error.bind(object.py())) {
                return at_leaf(object.py(), error, &path);
            }
            add_note(object, error, &path)
        })?;
        let tag: String = answer.get_item(0)?.extract()?;
        match tag.as_str() {
            "array" => {
                let converted = answer.get_item(1)?;
                self.store_array(parent, component, &converted, HeldBuffer::new(object, false).ok())
            }
            "copied" => self.store_copy(parent, component, &answer),
            "sharded" => self.store_shards(parent, component, &answer),
            "first" => {
                let around = std::mem::replace(&mut self.drifting, true);
                let walked = self.visit(parent, component, &answer.get_item(1)?, depth + 1);
                self.drifting = around;
                walked
            }
            "same" => self.visit(parent, component, &answer.get_item(1)?, depth + 1),
            "mapping" => {
                let kind = mapping_kind(&answer)?;
                let node = self.flat.tree.push_container(parent, component, kind);
                self.pairs(node, &answer.get_item(2)?, false, depth)
            }
            "fields" => {
                let type_name = answer.get_item(2)?.extract::<String>()?.into_boxed_str();
                let kind = if answer.get_item(1)?.extract::<String>()? == "namedtuple" {
                    ContainerKind::NamedTuple { type_name }
                } else {
                    ContainerKind::Dataclass { type_name }
                };
                let node = self.flat.tree.push_container(parent, component, kind);
                self.pairs(node, &answer.get_item(3)?, true, depth)
            }
            "custom" => {
                let type_name = answer.get_item(1)?.extract::<String>()?.into_boxed_str();
                let node =
                    self.flat.tree.push_container(parent, component, ContainerKind::Custom { type_name });
                self.pairs(node, &answer.get_item(2)?, false, depth)
            }
            "stateful" => self.stateful(parent, component, &answer, depth),
            _ => match described(self.hooks, &answer, depth)? {
                Plain::Value(value) => {
                    self.leaf(parent, component, Leaf::Object(value));
                    Ok(())
                }
                Plain::Refused(why) => Err(self.refuse(parent, component, object.py(), &why)),
                Plain::Not if tag == "deque" => {
                    let maxlen = answer.get_item(1)?.extract()?;
                    let node =
                        self.flat.tree.push_container(parent, component, ContainerKind::Deque { maxlen });
                    let items = answer.get_item(2)?;
                    self.children(node, items.cast::<PyList>()?.iter(), depth)
                }
                Plain::Not => {
                    Err(self.refuse(parent, component, object.py(), &format!("unknown answer `{tag}`")))
                }
            },
        }
    }

    /// An object that gave its state: the children of that state stand directly below it. A state
    /// that is no container stands below the field `state`.
    fn stateful(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        answer: &Bound<'py, PyAny>,
        depth: u64,
    ) -> PyResult<()> {
        let node = self.flat.tree.nodes().len() as u32;
        let around = self.library.take();
        self.stateful_children(parent, component, answer, depth)?;
        // It gets back arrays of the library whose arrays it gave.
        if let Some(library) = std::mem::replace(&mut self.library, around) {
            self.flat.tree.map_protocol(node, |protocol| format!("{protocol}/{library}"));
        }
        Ok(())
    }

    fn stateful_children(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        answer: &Bound<'py, PyAny>,
        depth: u64,
    ) -> PyResult<()> {
        let type_name = answer.get_item(1)?.extract::<String>()?.into_boxed_str();
        let protocol = answer.get_item(2)?.extract::<String>()?.into_boxed_str();
        let state = answer.get_item(3)?;
        let make = |inner: ContainerKind| ContainerKind::Stateful {
            type_name: type_name.clone(),
            protocol: protocol.clone(),
            inner: Box::new(inner),
        };
        if let Ok(dict) = state.cast_exact::<PyDict>() {
            let node = self.flat.tree.push_container(parent, component, make(ContainerKind::Dict));
            for (key, value) in dict.iter() {
                let component = self.key(node, &key)?;
                self.visit(Some(node), Some(component), &value, depth + 1)?;
            }
            return Ok(());
        }
        if exact_scalar(&state)?.is_none() && state.is_instance_of::<PyDict>() {
            let inner = self.hooks.describe.bind(state.py()).call1((&state,))?;
            if inner.get_item(0)?.extract::<String>()? == "mapping" {
                let kind = mapping_kind(&inner)?;
                let node = self.flat.tree.push_container(parent, component, make(kind));
                return self.pairs(node, &inner.get_item(2)?, false, depth);
            }
        }
        let node = self.flat.tree.push_container(
            parent,
            component,
            make(ContainerKind::NamedTuple { type_name: "stepwell.state".into() }),
        );
        self.visit(Some(node), Some(Component::Field("state".into())), &state, depth + 1)
    }

    fn array(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        array: &Bound<'py, PyAny>,
        depth: u64,
    ) -> PyResult<()> {
        if self.dtypes.of(self.hooks, array)?.is_some() {
            return self.store_array(parent, component, array, None);
        }
        // Big-endian (converted), or nothing that can be stored (refused by path).
        self.other(parent, component, array, depth)
    }

    /// Adds an array, or an alias of an earlier one. `original`: what `array` is a converted copy
    /// of; its memory then decides what is tied.
    fn store_array(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        array: &Bound<'py, PyAny>,
        original: Option<HeldBuffer>,
    ) -> PyResult<()> {
        let Some(dtype) = self.dtypes.of(self.hooks, array)? else {
            return Err(self.refuse(parent, component, array.py(), "its dtype cannot be stored"));
        };
        let buffer = HeldBuffer::new(array, false)?;
        self.hold_array(parent, component, array.py(), (dtype, buffer, false), original)
    }

    /// The memory of an array of a class that was made known; `None` where it is none, or cannot be
    /// had like this.
    fn hold(&mut self, object: &Bound<'py, PyAny>) -> PyResult<Option<(Dtype, HeldBuffer, bool)>> {
        let arrays = Arc::clone(&self.arrays);
        let known = arrays.array(object);
        let Some(known) = known.filter(|known| known.is_whole(object)) else { return Ok(None) };
        self.hold_as(known, object)
    }

    /// The same of one that is in one piece of memory.
    fn hold_as(
        &mut self,
        known: &ArrayType,
        object: &Bound<'py, PyAny>,
    ) -> PyResult<Option<(Dtype, HeldBuffer, bool)>> {
        if known.buffer
            && let Ok(buffer) = HeldBuffer::new(object, false)
        {
            let dtype = self.dtypes.of(self.hooks, object)?;
            self.library = Some(Arc::clone(&known.library));
            return Ok(dtype.map(|dtype| (dtype, buffer, known.immutable)));
        }
        let capsule = match known.capsule.bind(object.py()).call1((object,)) {
            Ok(capsule) => capsule,
            Err(error) if error.is_instance_of::<PyException>(object.py()) => return Ok(None),
            // An interrupt.
            Err(error) => return Err(error),
        };
        let Ok((dtype, mut buffer)) = HeldBuffer::of_capsule(capsule) else { return Ok(None) };
        // Without a driver, or with a layout that needs copies element by element, the package has
        // another way.
        let Ok(device) = device_of(&buffer) else { return Ok(None) };
        if device.is_some() && buffer.is_broadcast() {
            return Ok(None);
        }
        if let Some((device, on_device)) = device.zip(known.on_device.as_ref()) {
            let Ok(stream) = device.copy_stream() else { return Ok(None) };
            let capsule = on_device.bind(object.py()).call1((object, stream))?;
            let Ok((_, ordered)) = HeldBuffer::of_capsule(capsule) else { return Ok(None) };
            buffer = ordered;
        }
        self.library = Some(Arc::clone(&known.library));
        Ok(Some((dtype, buffer, known.immutable)))
    }

    fn hold_array(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        py: Python<'py>,
        (dtype, buffer, immutable): (Dtype, HeldBuffer, bool),
        original: Option<HeldBuffer>,
    ) -> PyResult<()> {
        if self.is_left_out(parent, component.as_ref()) {
            return Ok(());
        }
        if buffer.itemsize() != dtype.size() {
            let why = format!("{} bytes per element, where {dtype} has {}", buffer.itemsize(), dtype.size());
            return Err(self.refuse(parent, component, py, &why));
        }
        if buffer.nbytes() > 0 {
            let identity = original.as_ref().unwrap_or(&buffer);
            let place = (identity.address() as usize, dtype, original.is_some());
            let same = self.ties.get(&place).into_iter().flatten().copied().find(|&leaf| {
                self.identity(leaf).is_some_and(|other| {
                    other.shape() == identity.shape() && other.strides() == identity.strides()
                })
            });
            if let Some(of) = same {
                self.leaf(parent, component, Leaf::Alias(of));
                return Ok(());
            }
            let number = self.flat.leaves.len() as u32;
            self.ties.entry(place).or_default().push(number);
            if let Some(original) = original {
                self.originals.insert(number, original);
            }
        }
        self.leaf(parent, component, Leaf::Array { dtype, buffer, immutable });
        Ok(())
    }

    /// A copy of an array that is not in host memory, or not there as it is stored: `("copied",
    /// array, what names the original, library)`.
    fn store_copy(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        answer: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        if self.is_left_out(parent, component.as_ref()) {
            return Ok(());
        }
        let key: Option<String> = answer.get_item(2)?.extract()?;
        self.library = Some(Arc::from(answer.get_item(3)?.extract::<String>()?));
        if let Some(&of) = key.as_ref().and_then(|key| self.copies.get(key)) {
            self.leaf(parent, component, Leaf::Alias(of));
            return Ok(());
        }
        if let Some(key) = key {
            self.copies.insert(key, self.flat.leaves.len() as u32);
        }
        let array = answer.get_item(1)?;
        let Some(dtype) = self.dtypes.of(self.hooks, &array)? else {
            return Err(self.refuse(parent, component, array.py(), "its dtype cannot be stored"));
        };
        let buffer = HeldBuffer::new(&array, false)?;
        // Nobody else has it.
        self.leaf(parent, component, Leaf::Array { dtype, buffer, immutable: true });
        Ok(())
    }

    /// An array in several buffers: `("sharded", dtype, shape, [(offset, array, whether nobody
    /// changes it, who holds the same), …], library)`. The last one of a part: nothing (this
    /// process alone), a number of replicas and which of them this is, the ranks, or `"everyone"`.
    fn store_shards(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        answer: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        let py = answer.py();
        let dtype = dtype_named(&answer.get_item(1)?.extract::<String>()?)?;
        let shape: Vec<u64> = answer.get_item(2)?.extract()?;
        let arrays = Arc::clone(&self.arrays);
        let mut shards = Vec::new();
        for shard in answer.get_item(3)?.try_iter()? {
            let shard = shard?;
            let array = shard.get_item(1)?;
            let known = arrays.array(&array);
            let held = known.map(|known| self.hold_as(known, &array)).transpose()?.flatten();
            let held = match held {
                Some((held, buffer, _)) if held == dtype => buffer,
                Some(_) => return Err(self.refuse(parent, component, py, "its parts differ in dtype")),
                None => HeldBuffer::new(&array, false)?,
            };
            let offset: Vec<u64> = shard.get_item(0)?.extract()?;
            let region = Region { offset: offset.into(), extent: held.dims().into() };
            let holders = holders(&shard)?;
            shards.push(Shard { region, buffer: held, immutable: shard.get_item(2)?.extract()?, holders });
        }
        if let Some(library) = answer.get_item(4)?.extract::<Option<String>>()? {
            self.library = Some(Arc::from(library));
        }
        self.leaf(parent, component, Leaf::Sharded { dtype, shape, shards });
        Ok(())
    }

    /// The memory that decides what is tied to a leaf.
    fn identity(&self, leaf: u32) -> Option<&HeldBuffer> {
        self.originals.get(&leaf).or_else(|| match self.flat.leaves.get(leaf as usize) {
            Some(Leaf::Array { buffer, .. }) => Some(buffer),
            _ => None,
        })
    }

    /// True if nothing of a leaf is saved.
    fn is_left_out(&self, parent: Option<u32>, component: Option<&Component>) -> bool {
        !self.choice.selection.is_all()
            && !self.choice.selection.selects_text(self.text(parent, component).as_bytes())
    }

    /// Drops the containers that selection has left nothing of.
    fn drop_emptied(&mut self, py: Python<'_>) -> PyResult<()> {
        let tree = std::mem::take(&mut self.flat.tree);
        let nodes = tree.nodes();
        // Children follow their parents.
        let mut stays = vec![false; nodes.len()];
        for (number, node) in nodes.iter().enumerate().rev() {
            stays[number] |= number == 0
                || node.container().is_none()
                || self.choice.selection.selects_text(PathText::new(&tree.path(number as u32)).as_bytes());
            stays[node.parent as usize] |= stays[number];
        }
        let mut numbers = vec![0_u32; nodes.len()];
        let mut children = vec![0_u32; nodes.len()];
        for (number, node) in nodes.iter().enumerate().filter(|(number, _)| stays[*number]) {
            let above = node.parent as usize;
            if let Some(Component::Index(index)) = node.component
                && index != children[above]
            {
                let what = format!(
                    "include= and exclude= leave a gap in the list `{}`: element {index} is saved, and not all before \
                     it. Save the whole list, or nothing of it",
                    tree.path(node.parent)
                );
                return Err(invalid(py, &what));
            }
            let parent = (number > 0).then(|| numbers[above]);
            if number > 0 {
                children[above] += 1;
            }
            numbers[number] = match &node.kind {
                NodeKind::Container(kind) => {
                    self.flat.tree.push_container(parent, node.component.clone(), kind.clone())
                }
                NodeKind::Leaf(_) => self.flat.tree.push_leaf(parent, node.component.clone()),
            };
        }
        for (number, &saved) in children.iter().enumerate().filter(|(number, _)| stays[*number]) {
            if let Some(&length) = self.lengths.get(&(number as u32))
                && saved != length
            {
                let what = format!(
                    "include= and exclude= select {saved} of the {length} elements of the list `{}`. Save the \
                     whole list, or nothing of it",
                    tree.path(number as u32)
                );
                return Err(invalid(py, &what));
            }
        }
        Ok(())
    }

    fn leaf(&mut self, parent: Option<u32>, component: Option<Component>, leaf: Leaf) {
        if self.is_left_out(parent, component.as_ref()) {
            return;
        }
        if self.drifting {
            self.flat.drifting.push(self.flat.leaves.len() as u32);
        }
        self.flat.tree.push_leaf(parent, component);
        self.flat.leaves.push(leaf);
    }

    fn text(&self, parent: Option<u32>, component: Option<&Component>) -> PathText {
        let mut path = parent.map(|node| self.flat.tree.path(node)).unwrap_or_default();
        path.0.extend(component.cloned());
        PathText::new(&path)
    }

    fn path(&self, parent: Option<u32>, component: Option<&Component>) -> String {
        let mut path = parent.map(|node| self.flat.tree.path(node)).unwrap_or_default();
        path.0.extend(component.cloned());
        path.to_string()
    }

    fn refuse(&self, parent: Option<u32>, component: Option<Component>, py: Python<'py>, why: &str) -> PyErr {
        unsupported(py, &self.path(parent, component.as_ref()), why)
    }
}

/// The holders of a part, from its description.
fn holders(shard: &Bound<'_, PyAny>) -> PyResult<Holders> {
    if shard.len()? < 4 {
        return Ok(Holders::This);
    }
    let described = shard.get_item(3)?;
    if described.is_none() {
        return Ok(Holders::This);
    }
    if described.is_instance_of::<PyString>() {
        return Ok(Holders::Everyone);
    }
    if let Ok((index, count)) = described.extract::<(u32, u32)>()
        && described.is_instance_of::<PyTuple>()
    {
        return Ok(Holders::Replicas { index, count });
    }
    Ok(Holders::Ranks(described.extract::<Vec<u32>>()?.into()))
}

/// One of our errors, with its leaf.
fn at_leaf(py: Python<'_>, error: PyErr, path: &str) -> PyErr {
    let value = error.value(py);
    let text = format!("{}: {value}", named(path));
    // Without the path it is still what went wrong.
    let _ = value.setattr(intern!(py, "args"), (text,));
    let _ = value.setattr(intern!(py, "leaf"), path);
    error
}

/// The error, with a note of where in the state it was raised.
fn add_note(object: &Bound<'_, PyAny>, error: PyErr, path: &str) -> PyErr {
    let kind = object.get_type().name().map_or_else(|_| "object".to_owned(), |name| name.to_string());
    let note = format!("while the {kind} at {} was taken apart", named(path));
    // Without the note it is still what went wrong.
    let _ = error.value(object.py()).call_method1(intern!(object.py(), "add_note"), (note,));
    error
}

fn mapping_kind(description: &Bound<'_, PyAny>) -> PyResult<ContainerKind> {
    Ok(match description.get_item(1)?.extract::<String>()?.as_str() {
        "OrderedDict" => ContainerKind::OrderedDict,
        "defaultdict" => ContainerKind::DefaultDict,
        _ => ContainerKind::Dict,
    })
}
