//! Assembles the result of a restore, in the caller's containers or in stored ones.

use std::collections::HashMap;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple};

use stepwell_core::leaf_path::Component;
use stepwell_core::tree::{ContainerKind, NodeKind};

use super::{Node, Number, Siblings, record};
use crate::checkpoint::{Engined, kind_row};
use crate::hooks::hooks;

pub(super) struct Build<'a, 'py> {
    pub(super) py: Python<'py>,
    pub(super) inner: &'a Engined,
    pub(super) fill: bool,
    pub(super) siblings: &'a Siblings,
    pub(super) number_of: &'a HashMap<u32, Number>,
    pub(super) objects: Vec<Bound<'py, PyAny>>,
    pub(super) arrays: &'a [Py<PyAny>],
    pub(super) like: &'a [Py<PyAny>],
}

impl<'py> Build<'_, 'py> {
    pub(super) fn node(&self, node: &Node) -> PyResult<Bound<'py, PyAny>> {
        Ok(match node {
            Node::Leaf(source) => self.leaf(*source)?,
            Node::Like(at) => match self.like.get(*at) {
                Some(array) => array.bind(self.py).clone(),
                None => return Err(PyRuntimeError::new_err(format!("array {at} was not made"))),
            },
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
        let number = self.number_of.get(&source).map(|number| number.at);
        let found = match record(self.inner, source).1 {
            Some(_) => number.and_then(|number| self.arrays.get(number)).map(|array| array.bind(self.py)),
            None => number.and_then(|number| self.objects.get(number)),
        };
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
        match &**kind {
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
