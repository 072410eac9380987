//! The nodes of a pickle as inert Python objects: the classes of `stepwell.formats.pickled`.
//!
//! Nothing is imported for a name, nothing is called, and nothing is hashed. One pass makes all
//! objects, and a second one fills those that may contain themselves. So neither recurses.

use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBytes, PyInt, PyList, PyString, PyTuple};

use stepwell_core::foreign::Fault;
use stepwell_core::foreign::pickle::{self as machine, Call, NodeId, PickleNode};

use crate::foreign::corrupt;

/// Parses the pickle at the start of `data[begin..end]`, bytes of the file at `path`. Returns its
/// value and its end in `data`; `None` if it does not end before `end`.
#[pyfunction]
pub fn pickle<'py>(
    py: Python<'py>,
    path: PathBuf,
    data: &[u8],
    begin: usize,
    end: usize,
) -> PyResult<Option<(Bound<'py, PyAny>, usize)>> {
    let bytes = data.get(begin..end).unwrap_or_default();
    let parsed = match py.detach(|| machine::parse(bytes)) {
        Ok(parsed) => parsed,
        Err(fault) if fault.is_cut => return Ok(None),
        Err(fault) => {
            let fault = Fault { at: fault.at + begin as u64, ..fault };
            return Err(corrupt(py, &path, &fault));
        }
    };
    let objects = PickleObjects {
        py,
        classes: Classes::of(py)?,
        bytes,
        begin,
        made: Vec::new(),
        texts: HashMap::new(),
    };
    let root = objects.build(&parsed)?;
    Ok(Some((root, begin + parsed.length)))
}

/// The classes of the objects.
struct Classes<'py> {
    name: Bound<'py, PyAny>,
    call: Bound<'py, PyAny>,
    pairs: Bound<'py, PyAny>,
    elements: Bound<'py, PyAny>,
    persistent: Bound<'py, PyAny>,
    blob: Bound<'py, PyAny>,
}

impl<'py> Classes<'py> {
    fn of(py: Python<'py>) -> PyResult<Self> {
        let module = py.import("stepwell.formats.pickled")?;
        let class = |name: &str| module.getattr(name);
        Ok(Self {
            name: class("Name")?,
            call: class("Call")?,
            pairs: class("Pairs")?,
            elements: class("Elements")?,
            persistent: class("Persistent")?,
            blob: class("Blob")?,
        })
    }
}

struct PickleObjects<'a, 'py> {
    py: Python<'py>,
    classes: Classes<'py>,
    bytes: &'a [u8],
    /// Offset of `bytes` in the caller's data.
    begin: usize,
    /// The objects of the nodes so far.
    made: Vec<Bound<'py, PyAny>>,
    /// The bytes that were written as text, by the places of the text; `None`: it has other
    /// characters. Calls may share a long one.
    texts: HashMap<usize, Option<Bound<'py, PyAny>>>,
}

impl<'py> PickleObjects<'_, 'py> {
    fn build(mut self, parsed: &machine::Pickle) -> PyResult<Bound<'py, PyAny>> {
        self.made.reserve(parsed.nodes.len());
        for node in &parsed.nodes {
            let object = self.make(node, &parsed.nodes)?;
            self.made.push(object);
        }
        for (node, object) in parsed.nodes.iter().zip(&self.made) {
            self.fill(node, object)?;
        }
        self.at(parsed.root).cloned()
    }

    /// The object of a node, without parts that may be made later.
    fn make(&mut self, node: &PickleNode, nodes: &[PickleNode]) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        Ok(match node {
            PickleNode::None => py.None().into_bound(py),
            PickleNode::Bool(value) => value.into_pyobject(py)?.to_owned().into_any(),
            PickleNode::Int(value) => value.into_pyobject(py)?.into_any(),
            PickleNode::Long(span) => {
                let integer = py.get_type::<PyInt>();
                let bytes = PyBytes::new(py, self.part(span.range()));
                let signed = [("signed", true)].into_py_dict(py)?;
                integer.call_method(intern!(py, "from_bytes"), (bytes, "little"), Some(&signed))?
            }
            PickleNode::Float(value) => value.into_pyobject(py)?.into_any(),
            PickleNode::Str(span) => self.text(self.part(span.range()))?,
            PickleNode::Bytes(span) => self.blob(span.range(), false, false)?,
            PickleNode::ByteArray(span) => self.blob(span.range(), true, false)?,
            PickleNode::List(_) => PyList::empty(py).into_any(),
            PickleNode::Tuple(ids) => PyTuple::new(py, self.all(ids)?)?.into_any(),
            PickleNode::Dict(_) => self.classes.pairs.call0()?,
            PickleNode::Set(_) => self.classes.elements.call1((false,))?,
            PickleNode::FrozenSet(_) => self.classes.elements.call1((true,))?,
            PickleNode::Global(global) => {
                self.classes.name.call1((global.module.as_str(), global.name.as_str()))?
            }
            PickleNode::Persistent(id) => self.classes.persistent.call1((self.at(*id)?,))?,
            PickleNode::Call(call) => match self.bytes_of_text(call, nodes)? {
                Some(blob) => blob,
                None => self.classes.call.call1((self.at(call.callable)?, self.at(call.args)?))?,
            },
        })
    }

    /// The bytes that protocol 2 writes as text: `_codecs.encode(text, "latin1")`.
    fn bytes_of_text(&mut self, call: &Call, nodes: &[PickleNode]) -> PyResult<Option<Bound<'py, PyAny>>> {
        let node = |id: NodeId| nodes.get(id as usize);
        let has_more = call.keywords.is_some() || call.state.is_some();
        if has_more || !call.items.is_empty() || !call.entries.is_empty() {
            return Ok(None);
        }
        let (Some(PickleNode::Global(name)), Some(PickleNode::Tuple(args))) =
            (node(call.callable), node(call.args))
        else {
            return Ok(None);
        };
        let &[text, encoding] = &**args else { return Ok(None) };
        let (Some(PickleNode::Str(text)), Some(PickleNode::Str(encoding))) = (node(text), node(encoding))
        else {
            return Ok(None);
        };
        let is_encoded = (name.module.as_str(), name.name.as_str()) == ("_codecs", "encode")
            && self.part(encoding.range()) == b"latin1";
        if !is_encoded {
            return Ok(None);
        }
        let range = text.range();
        if let Some(known) = self.texts.get(&range.start) {
            return Ok(known.clone());
        }
        let bytes = self.part(range.clone());
        // From 0xc4 on, a byte begins a character that is no byte.
        let is_sound = std::str::from_utf8(bytes).is_ok() && bytes.iter().all(|&byte| byte < 0xc4);
        let blob = is_sound.then(|| self.blob(range.clone(), false, !bytes.is_ascii())).transpose()?;
        self.texts.insert(range.start, blob.clone());
        Ok(blob)
    }

    /// Gives an object the parts that may contain it.
    fn fill(&self, node: &PickleNode, object: &Bound<'py, PyAny>) -> PyResult<()> {
        let py = self.py;
        match node {
            PickleNode::List(ids) => {
                let list = object.cast::<PyList>()?;
                for &id in ids.iter() {
                    list.append(self.at(id)?)?;
                }
            }
            PickleNode::Dict(pairs) => object.setattr(intern!(py, "flat"), self.flat(pairs)?)?,
            PickleNode::Set(ids) => object.setattr(intern!(py, "items"), self.all(ids)?)?,
            PickleNode::FrozenSet(ids) => object.setattr(intern!(py, "items"), self.all(ids)?)?,
            PickleNode::Call(call) => {
                let Call { keywords, state, items, entries, .. } = &**call;
                if let Some(keywords) = keywords {
                    object.setattr(intern!(py, "keywords"), self.at(*keywords)?)?;
                }
                if let Some(state) = state {
                    object.setattr(intern!(py, "state"), self.at(*state)?)?;
                }
                if !items.is_empty() {
                    object.setattr(intern!(py, "items"), self.all(items)?)?;
                }
                if !entries.is_empty() {
                    object.setattr(intern!(py, "entries"), self.flat(entries)?)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn part(&self, range: Range<usize>) -> &[u8] {
        self.bytes.get(range).unwrap_or_default()
    }

    fn text(&self, bytes: &[u8]) -> PyResult<Bound<'py, PyAny>> {
        if let Ok(text) = std::str::from_utf8(bytes) {
            return Ok(PyString::new(self.py, text).into_any());
        }
        // Text may contain lone surrogates. Other invalid bytes are replaced.
        let bytes = PyBytes::new(self.py, bytes);
        let decode = |errors: &str| bytes.call_method1(intern!(self.py, "decode"), ("utf-8", errors));
        decode("surrogatepass").or_else(|_| decode("replace"))
    }

    fn blob(&self, range: Range<usize>, is_mutable: bool, is_text: bool) -> PyResult<Bound<'py, PyAny>> {
        self.classes.blob.call1((self.begin + range.start, range.len(), is_mutable, is_text))
    }

    fn at(&self, id: NodeId) -> PyResult<&Bound<'py, PyAny>> {
        let missing = || pyo3::exceptions::PyValueError::new_err(format!("no node {id} before this one"));
        self.made.get(id as usize).ok_or_else(missing)
    }

    fn all(&self, ids: &[NodeId]) -> PyResult<Vec<Bound<'py, PyAny>>> {
        ids.iter().map(|&id| self.at(id).cloned()).collect()
    }

    /// Keys and values, one after the other.
    fn flat(&self, pairs: &[(NodeId, NodeId)]) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let mut flat = Vec::with_capacity(2 * pairs.len());
        for &(key, value) in pairs {
            flat.extend([self.at(key)?.clone(), self.at(value)?.clone()]);
        }
        Ok(flat)
    }
}
