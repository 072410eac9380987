//! The walk over a state: it turns Python containers and leaves into a [`Flat`].
//!
//! Rust handles exact `dict`, `list`, `tuple`, `ndarray`, built-in scalars, and arrays of classes
//! that the package's adapters have registered ([`crate::arrays`]). The Python function
//! `_state.leaves.describe` describes everything else. The walk holds the buffers of arrays, and
//! copies only arrays that are not little-endian or that Python copies. The buffers stay held until
//! the [`Flat`] is dropped, under the GIL.

mod arrays;
mod choice;
mod dtypes;
mod leaf;
mod unselected;
mod unsupported;

use std::collections::HashMap;
use std::sync::Arc;

use pyo3::exceptions::{PyException, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyString, PyTuple};

use stepwell_core::dtype::Dtype;
use stepwell_core::leaf_path::{Component, named};
use stepwell_core::limits::{MAX_DEPTH, MAX_NAME_BYTES};
use stepwell_core::tree::ContainerKind;
use stepwell_reshard::glob::{Glob, PathText};

use crate::arrays::{Known, known};
use crate::convert::StoredTensor;
use crate::hooks::{Hooks, hooks, unsupported};
use crate::ingest::HeldBuffer;
use crate::values::{Plain, TOO_DEEP, described, exact_scalar, to_value};

pub use self::choice::{Choice, Unsupported};
pub use self::dtypes::Dtypes;
pub use self::leaf::{Flat, Leaf, Shard};

/// Flattens the chosen part of a state. Also returns the globs that match nothing. An error names
/// the path of a leaf that cannot be stored.
pub fn flatten(state: &Bound<'_, PyAny>, choice: Choice) -> PyResult<(Flat, Vec<(&'static str, Glob)>)> {
    let hooks = hooks(state.py())?;
    hooks.load_adapters.call0(state.py())?;
    let mut walk = Walk {
        hooks,
        arrays: known(),
        drifting: false,
        library: None,
        flat: Flat::default(),
        ties: HashMap::new(),
        copies: HashMap::new(),
        stored: HashMap::new(),
        originals: HashMap::new(),
        dtypes: Dtypes::default(),
        open: Vec::new(),
        lengths: HashMap::new(),
        converted: Vec::new(),
        choice,
    };
    walk.visit(None, None, state, 0)?;
    if !walk.choice.selection.is_all() {
        walk.remove_unselected(state.py())?;
    }
    walk.flat.cast = walk.choice.cast;
    Ok((walk.flat, walk.choice.idle))
}

struct Walk<'h, 'py> {
    hooks: &'h Hooks,
    arrays: Arc<Known>,
    /// True inside a value that may differ between ranks (`Replicated`).
    drifting: bool,
    /// The library of the arrays in the current stateful object.
    library: Option<Arc<str>>,
    flat: Flat,
    /// The leaves that start at an address, by address, dtype, and true for converted copies.
    ties: HashMap<(usize, Dtype, bool), Vec<u32>>,
    /// Leaves that Python has copied, by the id of their original.
    copies: HashMap<String, u32>,
    /// Tensors of open checkpoints, by checkpoint and leaf.
    stored: HashMap<(usize, u32), u32>,
    /// The originals of leaves that are converted copies.
    originals: HashMap<u32, HeldBuffer>,
    dtypes: Dtypes<'py>,
    /// The containers from the outermost to the current one: address and node. All are alive, so
    /// no address occurs twice.
    open: Vec<(usize, u32)>,
    /// The lengths of the caller's sequences, by node, if only a part of the state is saved.
    lengths: HashMap<u32, u32>,
    /// The results of the caller's function for values that cannot be stored.
    converted: Vec<Bound<'py, PyAny>>,
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
        let mark = self.mark(component.as_ref());
        let visited = if self.choice.is_all() {
            self.visit_chosen(parent, component, object, depth)
        } else {
            self.visit_selected(parent, component, object, depth)
        };
        match (visited, mark) {
            (Err(error), Some(mark)) => self.replace_unsupported(mark, parent, object, depth, error),
            (visited, _) => visited,
        }
    }

    fn visit_selected(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        object: &Bound<'py, PyAny>,
        depth: u64,
    ) -> PyResult<()> {
        let text = self.text(parent, component.as_ref());
        self.choice.idle.retain(|(_, glob)| !glob.selects(text.as_bytes()));
        if self.choice.selection.excludes_text(text.as_bytes()) {
            return Ok(());
        }
        let before = self.flat.tree.nodes().len();
        let walked = self.visit_chosen(parent, component, object, depth);
        // A leaf that cannot be stored is no error if it is not selected.
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
                &format!("{why}. Leave this reference out"),
            ));
        }
        self.open.push((address, self.flat.tree.nodes().len() as u32));
        let walked = self.container(parent, component, object, depth);
        self.open.pop();
        walked
    }

    /// Adds a tensor of an open checkpoint.
    fn stored(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        tensor: &Bound<'py, StoredTensor>,
    ) -> PyResult<()> {
        if self.is_left_out(parent, component.as_ref()) {
            return Ok(());
        }
        let (holder, dtype, shape) = tensor.get().describe(tensor.py())?;
        let key = (tensor.get().source_address(), holder);
        let leaf = if let Some(&of) = self.stored.get(&key) {
            Leaf::Alias(of)
        } else {
            self.stored.insert(key, self.flat.leaves.len() as u32);
            Leaf::Stored { dtype, shape, tensor: tensor.clone().unbind() }
        };
        self.leaf(parent, component, leaf);
        Ok(())
    }

    /// Visits a value that is no array and no built-in scalar.
    fn container(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        object: &Bound<'py, PyAny>,
        depth: u64,
    ) -> PyResult<()> {
        if let Ok(tensor) = object.cast_exact::<StoredTensor>() {
            return self.stored(parent, component, tensor);
        }
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
                    // The visit of the elements fails again, and names the element.
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

    /// Visits pairs of key and value. The keys are names of fields, or keys of a mapping.
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
                    let why = format!("a key of {} bytes. The limit is {MAX_NAME_BYTES}", name.len());
                    Err(self.refuse(Some(node), None, key.py(), &why))
                }
                Ok(name) => Ok(Component::Key(name.into())),
                Err(_) => {
                    let why =
                        format!("the key {} has lone surrogates, so it has no UTF-8 encoding", key.repr()?);
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
            "the key {} is a {}. Only str and int keys can be restored with their type",
            key.repr()?,
            key.get_type().name()?
        );
        Err(self.refuse(Some(node), None, key.py(), &why))
    }

    /// Visits a value that is not exactly one of the common built-ins.
    fn other(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        object: &Bound<'py, PyAny>,
        depth: u64,
    ) -> PyResult<()> {
        // Sets must be plain values. Python describes all other types.
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
            // The caller's code has run (`state_dict`, a property). Its error does not know the
            // path in the state.
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

    /// Adds a stateful object, with the children of its state as its own. If its state is no
    /// container, the object has the field `state`.
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
        // A restore passes arrays of the same library to the object.
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

    /// True if the leaf is not selected.
    fn is_left_out(&self, parent: Option<u32>, component: Option<&Component>) -> bool {
        !self.choice.selection.is_all()
            && !self.choice.selection.selects_text(self.text(parent, component).as_bytes())
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

/// Adds the leaf's path to a stepwell error.
fn at_leaf(py: Python<'_>, error: PyErr, path: &str) -> PyErr {
    let value = error.value(py);
    let text = format!("{}: {value}", named(path));
    // If this fails, the error still says what went wrong.
    let _ = value.setattr(intern!(py, "args"), (text,));
    let _ = value.setattr(intern!(py, "leaf"), path);
    error
}

/// Adds a note with the path to an error of the caller's code.
fn add_note(object: &Bound<'_, PyAny>, error: PyErr, path: &str) -> PyErr {
    let kind = object.get_type().name().map_or_else(|_| "object".to_owned(), |name| name.to_string());
    let note = format!("while flattening the {kind} at {}", named(path));
    // If this fails, the error still says what went wrong.
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
