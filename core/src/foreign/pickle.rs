//! A machine for pickles that builds inert nodes and calls nothing.
//!
//! It knows the 55 opcodes that `pickle` writes from protocol 2 on. A call (`REDUCE`, `NEWOBJ`, …)
//! becomes a [`PickleNode::Call`], which names its callable. The caller decides which names it
//! understands. A pickle is a graph: nodes may be shared, and lists, dicts and calls may contain
//! themselves. So a walk over the nodes keeps a set of the visited ones.
//!
//! Text and bytes stay where they are: a node has their place in the stream. Nodes, stack, marks
//! and memo are counted together. A stream that needs more of them than any writer does is refused,
//! so memory is bounded by the length of the stream.

use std::collections::HashMap;
use std::ops::Range;

use super::{Fault, Parsed};

/// The number of a node in [`Pickle::nodes`].
pub type NodeId = u32;

/// A value of a pickle.
#[derive(Clone, Debug, PartialEq)]
pub enum PickleNode {
    /// `None`.
    None,
    /// A truth value.
    Bool(bool),
    /// An integer of at most 64 bits.
    Int(i64),
    /// A longer integer: two's complement, little-endian.
    Long(Span),
    /// A float.
    Float(f64),
    /// Text. May contain lone surrogates, so it is not always UTF-8.
    Str(Span),
    /// Bytes.
    Bytes(Span),
    /// A `bytearray`.
    ByteArray(Span),
    /// A list.
    List(Box<Vec<NodeId>>),
    /// A tuple.
    Tuple(Box<[NodeId]>),
    /// A dict: its pairs, in order.
    Dict(Box<Vec<(NodeId, NodeId)>>),
    /// A set.
    Set(Box<Vec<NodeId>>),
    /// A frozenset.
    FrozenSet(Box<[NodeId]>),
    /// A name.
    Global(Box<Global>),
    /// The object of a persistent id.
    Persistent(NodeId),
    /// A call that was not made.
    Call(Box<Call>),
}

/// A place in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    start: usize,
    length: usize,
}

impl Span {
    /// Its bytes in the stream.
    pub fn range(self) -> Range<usize> {
        self.start..self.start + self.length
    }
}

/// A name: module and qualified name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Global {
    /// The module.
    pub module: String,
    /// The name in it. A dot in it makes it another name, not an attribute.
    pub name: String,
}

/// A call, and what is done with its result.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The callable or class.
    pub callable: NodeId,
    /// The arguments: mostly a tuple.
    pub args: NodeId,
    /// The keyword arguments of a class.
    pub keywords: Option<NodeId>,
    /// The state that the object is given.
    pub state: Option<NodeId>,
    /// Elements that are appended to the object.
    pub items: Vec<NodeId>,
    /// Entries that are set in the object.
    pub entries: Vec<(NodeId, NodeId)>,
}

/// A parsed pickle.
#[derive(Clone, Debug, PartialEq)]
pub struct Pickle {
    /// All nodes.
    pub nodes: Vec<PickleNode>,
    /// The node of the value.
    pub root: NodeId,
    /// Bytes from the start to behind the last opcode. A stream may go on after a pickle.
    pub length: usize,
}

/// Longest name of a module, and of a name in it.
const MAX_NAME_BYTES: usize = 4096;
/// Nodes, stack, marks and memo entries that a stream may need beyond one for each of its bytes. An
/// empty list and its place in the memo take two bytes.
const MIN_ENTRIES: usize = 4096;
/// The deepest nesting of values that are made before they are put into others, as picklers write
/// them. Python's stops at its recursion limit, mostly 1000. A stream may nest deeper in another
/// order, so walks over the nodes have a limit, too.
const MAX_NESTING: u32 = 10_000;
/// Small integers, which are one node each, as are `None`, truth values and the empty tuple.
const SMALL_INTEGERS: usize = 256;
const NONE: usize = SMALL_INTEGERS;
const TRUE: usize = SMALL_INTEGERS + 1;
const FALSE: usize = SMALL_INTEGERS + 2;
const EMPTY_TUPLE: usize = SMALL_INTEGERS + 3;

/// Parses the pickle at the start of `bytes`.
pub fn parse(bytes: &[u8]) -> Parsed<Pickle> {
    let mut machine = Machine {
        bytes,
        at: 0,
        opcode_at: 0,
        nodes: Vec::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
        nesting: Vec::new(),
        shared: [None; EMPTY_TUPLE + 1],
    };
    let root = machine.run()?;
    Ok(Pickle { nodes: machine.nodes, root, length: machine.at })
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Offset of the current opcode, for messages.
    opcode_at: usize,
    nodes: Vec<PickleNode>,
    stack: Vec<NodeId>,
    /// Heights of the stack at its marks.
    marks: Vec<usize>,
    memo: HashMap<u32, NodeId>,
    /// Levels below each node.
    nesting: Vec<u32>,
    /// Nodes of values that many others have: small integers, then the rest.
    shared: [Option<NodeId>; EMPTY_TUPLE + 1],
}

impl Machine<'_> {
    fn run(&mut self) -> Parsed<NodeId> {
        loop {
            self.opcode_at = self.at;
            let entries = self.nodes.len() + self.stack.len() + self.marks.len() + self.memo.len();
            if entries > MIN_ENTRIES + self.bytes.len() {
                return Err(self.fault(format!("{entries} values in so few bytes")));
            }
            let opcode = self.byte()?;
            match opcode {
                b'.' => return self.pop(),
                0x80 => {
                    let protocol = self.byte()?;
                    if !(2..=5).contains(&protocol) {
                        return Err(
                            self.fault(format!("a pickle of protocol 2 to 5 was expected, not {protocol}"))
                        );
                    }
                }
                0x95 => {
                    self.take(8)?; // the length of a frame, which says nothing that is needed
                }
                b'(' => self.marks.push(self.stack.len()),
                b'0' => self.discard()?,
                b'1' => drop(self.pop_to_mark()?),
                b'2' => {
                    let top = self.top()?;
                    self.stack.push(top);
                }
                b'q' => {
                    let key = u32::from(self.byte()?);
                    self.put(key)?;
                }
                b'r' => {
                    let key = self.u32()?;
                    self.put(key)?;
                }
                0x94 => {
                    let key = u32::try_from(self.memo.len())
                        .map_err(|_| self.fault("a memo of 2^32 entries".to_owned()))?;
                    self.put(key)?;
                }
                b'h' => {
                    let key = u32::from(self.byte()?);
                    self.get(key)?;
                }
                b'j' => {
                    let key = self.u32()?;
                    self.get(key)?;
                }
                b'a' | b'e' | 0x90 => self.extend(opcode)?,
                b's' | b'u' => self.set_items(opcode)?,
                b'b' => self.build()?,
                b'N' => self.push_shared(NONE, PickleNode::None)?,
                0x88 => self.push_shared(TRUE, PickleNode::Bool(true))?,
                0x89 => self.push_shared(FALSE, PickleNode::Bool(false))?,
                b')' => self.push_shared(EMPTY_TUPLE, PickleNode::Tuple(Box::default()))?,
                b'K' => {
                    let value = self.byte()?;
                    self.push_shared(usize::from(value), PickleNode::Int(i64::from(value)))?;
                }
                _ => {
                    let node = self.value(opcode)?;
                    self.push(node)?;
                }
            }
        }
    }

    /// The value that an opcode puts on the stack.
    fn value(&mut self, opcode: u8) -> Parsed<PickleNode> {
        Ok(match opcode {
            b'J' => PickleNode::Int(i64::from(i32::from_le_bytes(self.array()?))),
            b'M' => PickleNode::Int(i64::from(u16::from_le_bytes(self.array()?))),
            0x8a => {
                let length = usize::from(self.byte()?);
                self.integer(length)?
            }
            0x8b => {
                let length = self.length_of(4)?;
                self.integer(length)?
            }
            b'G' => PickleNode::Float(f64::from_be_bytes(self.array()?)),
            b'U' | 0x8c | b'C' => {
                let length = self.length_of(1)?;
                self.sized(opcode, length)?
            }
            b'T' | b'X' | b'B' => {
                let length = self.length_of(4)?;
                self.sized(opcode, length)?
            }
            0x8d | 0x8e | 0x96 => {
                let length = self.length_of(8)?;
                self.sized(opcode, length)?
            }
            b']' => PickleNode::List(Box::default()),
            b'l' => PickleNode::List(Box::new(self.pop_to_mark()?)),
            b't' => PickleNode::Tuple(self.pop_to_mark()?.into()),
            0x85..=0x87 => PickleNode::Tuple(self.pop_several(usize::from(opcode - 0x84))?.into()),
            b'}' => PickleNode::Dict(Box::default()),
            b'd' => {
                let values = self.pop_to_mark()?;
                PickleNode::Dict(Box::new(self.pairs(&values)?))
            }
            0x8f => PickleNode::Set(Box::default()),
            0x91 => PickleNode::FrozenSet(self.pop_to_mark()?.into()),
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                global(module, name)
            }
            0x93 => {
                let [module, name] = self.pop_array()?;
                global(self.name(module)?, self.name(name)?)
            }
            b'R' | 0x81 => {
                let [callable, args] = self.pop_array()?;
                call(callable, args, None)
            }
            0x92 => {
                let [class, args, keywords] = self.pop_array()?;
                call(class, args, Some(keywords))
            }
            b'Q' => PickleNode::Persistent(self.pop()?),
            other => return Err(self.refused(other)),
        })
    }

    /// Text or bytes of that length.
    fn sized(&mut self, opcode: u8, length: usize) -> Parsed<PickleNode> {
        let span = self.span(length)?;
        Ok(match opcode {
            b'X' | 0x8c | 0x8d => PickleNode::Str(span),
            0x96 => PickleNode::ByteArray(span),
            // A string of Python 2 is text or bytes.
            b'U' | b'T' => {
                let text = self.bytes.get(span.range()).unwrap_or_default();
                if std::str::from_utf8(text).is_ok() {
                    PickleNode::Str(span)
                } else {
                    PickleNode::Bytes(span)
                }
            }
            _ => PickleNode::Bytes(span),
        })
    }

    /// Appends elements to the list, set or object below them.
    fn extend(&mut self, opcode: u8) -> Parsed<()> {
        let values = if opcode == b'a' { vec![self.pop()?] } else { self.pop_to_mark()? };
        let target = self.top()?;
        self.nest(target, &values)?;
        match (opcode, self.node_mut(target)) {
            (b'a' | b'e', Some(PickleNode::List(items))) | (0x90, Some(PickleNode::Set(items))) => {
                items.extend(values);
            }
            (_, Some(PickleNode::Call(call))) => call.items.extend(values),
            _ => {
                return Err(self
                    .fault("elements are appended to a value that is not a list, set or object".to_owned()));
            }
        }
        Ok(())
    }

    /// Sets entries of the dict or object below them.
    fn set_items(&mut self, opcode: u8) -> Parsed<()> {
        let values = if opcode == b's' { self.pop_several(2)? } else { self.pop_to_mark()? };
        let pairs = self.pairs(&values)?;
        let target = self.top()?;
        self.nest(target, &values)?;
        match self.node_mut(target) {
            Some(PickleNode::Dict(entries)) => entries.extend(pairs),
            Some(PickleNode::Call(call)) => call.entries.extend(pairs),
            _ => return Err(self.fault("entries are set in a value that is not a dict or object".to_owned())),
        }
        Ok(())
    }

    /// Gives the object below a state.
    fn build(&mut self) -> Parsed<()> {
        let state = self.pop()?;
        let target = self.top()?;
        self.nest(target, &[state])?;
        match self.node_mut(target) {
            Some(PickleNode::Call(call)) if call.state.is_none() => call.state = Some(state),
            Some(PickleNode::Call(_)) => return Err(self.fault("an object gets a second state".to_owned())),
            _ => return Err(self.fault("a state is given to a value that is not an object".to_owned())),
        }
        Ok(())
    }

    fn push(&mut self, node: PickleNode) -> Parsed<()> {
        let id = NodeId::try_from(self.nodes.len())
            .map_err(|_| self.fault("it has more than 2^32 values".to_owned()))?;
        self.nesting.push(0);
        match &node {
            PickleNode::List(ids) => self.nest(id, ids)?,
            PickleNode::Tuple(ids) | PickleNode::FrozenSet(ids) => self.nest(id, ids)?,
            PickleNode::Dict(pairs) => {
                pairs.iter().try_for_each(|&(key, value)| self.nest(id, &[key, value]))?;
            }
            PickleNode::Persistent(inner) => self.nest(id, &[*inner])?,
            PickleNode::Call(call) => {
                self.nest(id, &[call.callable, call.args])?;
                self.nest(id, call.keywords.as_slice())?;
            }
            _ => {}
        }
        self.nodes.push(node);
        self.stack.push(id);
        Ok(())
    }

    /// Pushes a value that is one node, however often a stream has it.
    fn push_shared(&mut self, place: usize, node: PickleNode) -> Parsed<()> {
        if let Some(&Some(id)) = self.shared.get(place) {
            self.stack.push(id);
            return Ok(());
        }
        self.push(node)?;
        if let (Some(shared), Some(&id)) = (self.shared.get_mut(place), self.stack.last()) {
            *shared = Some(id);
        }
        Ok(())
    }

    /// Counts the levels below a node that gets parts.
    fn nest(&mut self, id: NodeId, parts: &[NodeId]) -> Parsed<()> {
        let below = parts.iter().filter_map(|&part| self.nesting.get(part as usize)).max();
        let levels = below.map_or(0, |levels| levels + 1);
        if levels > MAX_NESTING {
            return Err(self.fault(format!("values that nest more than {MAX_NESTING} levels")));
        }
        if let Some(own) = self.nesting.get_mut(id as usize) {
            *own = levels.max(*own);
        }
        Ok(())
    }

    fn node_mut(&mut self, id: NodeId) -> Option<&mut PickleNode> {
        self.nodes.get_mut(id as usize)
    }

    /// The height below which the stack belongs to what is before the last mark.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn top(&self) -> Parsed<NodeId> {
        let top = if self.stack.len() > self.floor() { self.stack.last().copied() } else { None };
        top.ok_or_else(|| self.underflow())
    }

    fn pop(&mut self) -> Parsed<NodeId> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    /// Drops the top of the stack, which may be a mark.
    fn discard(&mut self) -> Parsed<()> {
        if self.stack.len() > self.floor() {
            self.stack.pop();
        } else if self.marks.pop().is_none() {
            return Err(self.underflow());
        }
        Ok(())
    }

    fn pop_several(&mut self, count: usize) -> Parsed<Vec<NodeId>> {
        let from = self.stack.len().checked_sub(count).filter(|&from| from >= self.floor());
        from.map(|from| self.stack.split_off(from)).ok_or_else(|| self.underflow())
    }

    fn pop_array<const N: usize>(&mut self) -> Parsed<[NodeId; N]> {
        let values = self.pop_several(N)?;
        values.try_into().map_err(|_| self.underflow())
    }

    fn pop_to_mark(&mut self) -> Parsed<Vec<NodeId>> {
        let mark = self.marks.pop().ok_or_else(|| self.fault("no mark was set".to_owned()))?;
        Ok(self.stack.split_off(mark.min(self.stack.len())))
    }

    fn pairs(&self, values: &[NodeId]) -> Parsed<Vec<(NodeId, NodeId)>> {
        let (pairs, rest) = values.as_chunks::<2>();
        if rest.is_empty() {
            Ok(pairs.iter().map(|&[key, value]| (key, value)).collect())
        } else {
            Err(self.fault("a key has no value".to_owned()))
        }
    }

    fn put(&mut self, key: u32) -> Parsed<()> {
        let top = self.top()?;
        self.memo.insert(key, top);
        Ok(())
    }

    fn get(&mut self, key: u32) -> Parsed<()> {
        let found = self.memo.get(&key).copied();
        let id = found.ok_or_else(|| self.fault(format!("the memo has no entry {key}")))?;
        self.stack.push(id);
        Ok(())
    }

    /// The text of a module or name.
    fn name(&self, id: NodeId) -> Parsed<String> {
        let text = match self.nodes.get(id as usize) {
            Some(PickleNode::Str(span)) if span.length <= MAX_NAME_BYTES => {
                self.bytes.get(span.range()).and_then(|bytes| std::str::from_utf8(bytes).ok())
            }
            _ => None,
        };
        text.map(str::to_owned).ok_or_else(|| self.fault("a name that is no short text".to_owned()))
    }

    /// The text up to the end of the line.
    fn line(&mut self) -> Parsed<String> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let is_last = rest.len() <= MAX_NAME_BYTES;
        let rest = rest.get(..=MAX_NAME_BYTES).unwrap_or(rest);
        let end = rest.iter().position(|&byte| byte == b'\n');
        if end.is_none() && is_last {
            return Err(Fault::cut(self.opcode_at as u64, "a name was expected, and the pickle ends before"));
        }
        let line = end.and_then(|end| rest.get(..end)).and_then(|line| std::str::from_utf8(line).ok());
        let line = line.ok_or_else(|| self.fault("a name that is no short line of text".to_owned()))?;
        self.at += line.len() + 1;
        Ok(line.to_owned())
    }

    fn take(&mut self, count: usize) -> Parsed<&[u8]> {
        let end = self.at.checked_add(count).filter(|&end| end <= self.bytes.len());
        let Some(end) = end else {
            let what = format!("{count} more bytes were expected, and the pickle ends before");
            return Err(Fault::cut(self.opcode_at as u64, what));
        };
        let taken = self.bytes.get(self.at..end).unwrap_or_default();
        self.at = end;
        Ok(taken)
    }

    fn span(&mut self, length: usize) -> Parsed<Span> {
        let start = self.at;
        self.take(length)?;
        Ok(Span { start, length })
    }

    /// An integer in two's complement, little-endian.
    fn integer(&mut self, length: usize) -> Parsed<PickleNode> {
        if length > 8 {
            return self.span(length).map(PickleNode::Long);
        }
        let bytes = self.take(length)?;
        let fill = if bytes.last().is_some_and(|byte| byte & 0x80 != 0) { 0xff } else { 0 };
        let mut wide = [fill; 8];
        for (to, from) in wide.iter_mut().zip(bytes) {
            *to = *from;
        }
        Ok(PickleNode::Int(i64::from_le_bytes(wide)))
    }

    fn array<const N: usize>(&mut self) -> Parsed<[u8; N]> {
        let bytes = self.take(N)?.try_into();
        bytes.map_err(|_| self.fault("the pickle ends too early".to_owned()))
    }

    fn byte(&mut self) -> Parsed<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Parsed<u32> {
        self.array().map(u32::from_le_bytes)
    }

    /// A length of 1, 4 or 8 bytes.
    fn length_of(&mut self, width: usize) -> Parsed<usize> {
        let mut wide = [0; 8];
        let bytes = self.take(width)?;
        for (to, from) in wide.iter_mut().zip(bytes) {
            *to = *from;
        }
        usize::try_from(u64::from_le_bytes(wide)).map_err(|_| self.fault("a length without end".to_owned()))
    }

    fn fault(&self, what: String) -> Fault {
        Fault::new(self.opcode_at as u64, what)
    }

    fn underflow(&self) -> Fault {
        self.fault("an opcode needs more values than there are".to_owned())
    }

    /// The refusal of an opcode that no writer of checkpoints uses.
    fn refused(&self, opcode: u8) -> Fault {
        let name = match opcode {
            b'i' => "INST",
            b'o' => "OBJ",
            0x82..=0x84 => "EXT",
            b'P' => "PERSID",
            0x97 => "NEXT_BUFFER",
            0x98 => "READONLY_BUFFER",
            b'g' | b'p' => "GET and PUT in text",
            b'I' | b'L' | b'F' | b'S' | b'V' => "text of protocol 0",
            _ => return self.fault(format!("{opcode:#04x} is no opcode of a pickle")),
        };
        self.fault(format!("opcode {name}: checkpoints are pickled by protocol 2 or later, without it"))
    }
}

fn call(callable: NodeId, args: NodeId, keywords: Option<NodeId>) -> PickleNode {
    let (items, entries) = (Vec::new(), Vec::new());
    PickleNode::Call(Box::new(Call { callable, args, keywords, state: None, items, entries }))
}

fn global(module: String, name: String) -> PickleNode {
    PickleNode::Global(Box::new(Global { module, name }))
}

#[cfg(test)]
mod tests;
