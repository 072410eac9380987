//! A value in MessagePack, as inert nodes.
//!
//! Arrays lie inside such files, so a file may be as long as a model. The parser therefore asks for
//! the bytes that it needs, part by part ([`MsgpackParser::wants`]), and skips binary payloads: a
//! node has their place in the file. Text is kept.
//!
//! Nodes, depth and text are bounded by the length of the file, and every length and count is
//! compared with the bytes that are left before anything is kept for it.

use std::ops::Range;

use super::{Fault, Parsed};
use crate::limits::MAX_DEPTH;

/// A value, or the start of one: the parts of a container follow it.
#[derive(Clone, Debug, PartialEq)]
pub enum MsgpackNode {
    /// `nil`.
    Nil,
    /// A truth value.
    Bool(bool),
    /// An integer of at most 64 bits, with a sign.
    Int(i64),
    /// A larger one.
    Unsigned(u64),
    /// A float.
    Float(f64),
    /// Text.
    Str(Box<str>),
    /// Bytes: their place in the file.
    Bin(BinPlace),
    /// An array of so many values, which follow.
    Array(u32),
    /// A map of so many pairs, whose keys and values follow.
    Map(u32),
    /// A value of an application's own type.
    Ext {
        /// The type.
        code: i8,
        /// The place of its bytes.
        place: BinPlace,
        /// True if the bytes were parsed as a value, which follows.
        nested: bool,
    },
}

/// A place in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BinPlace {
    /// Offset in the file.
    pub offset: u64,
    /// Bytes. No MessagePack value has more than 32 bits can count.
    pub length: u32,
}

/// Bytes that a parser asks for, unless a text is longer.
const WINDOW_BYTES: u64 = 64 << 10;
/// The longest text.
const MAX_TEXT_BYTES: u64 = 16 << 20;
/// Values that any file may have.
const MIN_NODES: u64 = 1 << 16;
/// Bytes of a file for each further value. Files of arrays have far more.
const NODE_BYTES: u64 = 64;

/// Parses a file of `length` bytes. Feed it what it [wants](Self::wants) until it wants no more.
#[derive(Debug)]
pub struct MsgpackParser {
    length: u64,
    nested: Vec<i8>,
    at: u64,
    /// Bytes that the next value needs at once.
    needed: u64,
    nodes: Vec<MsgpackNode>,
    open: Vec<OpenValue>,
}

/// A container or nested value whose parts are being read.
#[derive(Debug)]
struct OpenValue {
    /// Values that are missing.
    left: u64,
    /// The end of the file, or of the application's value around it.
    end: u64,
    /// True if it must end there.
    exact: bool,
}

impl MsgpackParser {
    /// A parser of a file. Values of the application's types `nested` contain a value.
    pub fn new(length: u64, nested: &[i8]) -> Self {
        let whole = OpenValue { left: 1, end: length, exact: true };
        Self { length, nested: nested.to_vec(), at: 0, needed: 1, nodes: Vec::new(), open: vec![whole] }
    }

    /// The bytes of the file that it needs next. `None`: the value has ended.
    pub fn wants(&self) -> Option<Range<u64>> {
        let end = self.at.saturating_add(self.needed.max(WINDOW_BYTES)).min(self.length);
        (!self.open.is_empty()).then_some(self.at..end)
    }

    /// Takes the bytes that it wants.
    pub fn feed(&mut self, bytes: &[u8]) -> Parsed<()> {
        let begin = self.at;
        if self.wants().is_none_or(|wanted| (bytes.len() as u64) < wanted.end - wanted.start) {
            return Err(self.fault("the file became shorter"));
        }
        while self.close()? {
            let rest = usize::try_from(self.at - begin).ok().and_then(|at| bytes.get(at..));
            if !self.value(rest.unwrap_or_default())? {
                break;
            }
        }
        Ok(())
    }

    /// Returns the nodes of the value.
    pub fn finish(self) -> Parsed<Vec<MsgpackNode>> {
        if self.open.is_empty() { Ok(self.nodes) } else { Err(self.fault("the value has no end")) }
    }

    /// Closes the values that are complete. False after the last one.
    fn close(&mut self) -> Parsed<bool> {
        while let Some(&OpenValue { left: 0, end, exact }) = self.open.last() {
            if exact && end != self.at {
                return Err(self.fault("the value ends, and more bytes follow"));
            }
            self.open.pop();
        }
        Ok(!self.open.is_empty())
    }

    /// Parses the start of the value at the start of `rest`. False if it needs more bytes.
    fn value(&mut self, rest: &[u8]) -> Parsed<bool> {
        let end = self.open.last().map_or(self.length, |open| open.end);
        let left = end - self.at;
        let Some((&tag, behind)) = rest.split_first().filter(|_| left > 0) else {
            return self.more(1, left);
        };
        let (width, type_width) = widths(tag);
        let head = 1 + width + type_width;
        let (Some(field), Some(code)) = (behind.get(..width), behind.get(width..width + type_width)) else {
            return self.more(head as u64, left);
        };
        let number = field.iter().fold(0_u64, |number, &byte| number << 8 | u64::from(byte));
        let behind = behind.get(width + type_width..).unwrap_or_default();
        let left = left.checked_sub(head as u64);
        let left = left.ok_or_else(|| self.fault("the file, or a value, ends in the middle of a value"))?;
        let place = BinPlace { offset: self.at + head as u64, length: number as u32 };
        let mut opened = None;
        let mut payload = 0;
        let node = match tag {
            0x00..=0x7f => MsgpackNode::Int(i64::from(tag)),
            0xe0..=0xff => MsgpackNode::Int(i64::from(tag.cast_signed())),
            0xc0 => MsgpackNode::Nil,
            0xc2 => MsgpackNode::Bool(false),
            0xc3 => MsgpackNode::Bool(true),
            0xca => MsgpackNode::Float(f64::from(f32::from_bits(number as u32))),
            0xcb => MsgpackNode::Float(f64::from_bits(number)),
            0xcc..=0xcf => i64::try_from(number).map_or(MsgpackNode::Unsigned(number), MsgpackNode::Int),
            0xd0 => MsgpackNode::Int(i64::from((number as u8).cast_signed())),
            0xd1 => MsgpackNode::Int(i64::from((number as u16).cast_signed())),
            0xd2 => MsgpackNode::Int(i64::from((number as u32).cast_signed())),
            0xd3 => MsgpackNode::Int(number.cast_signed()),
            0xa0..=0xbf | 0xd9..=0xdb => {
                payload = if tag < 0xc0 { u64::from(tag & 0x1f) } else { number };
                if payload > MAX_TEXT_BYTES {
                    return Err(self.fault(&format!("a text of {payload} bytes")));
                }
                self.check_payload(payload, left)?;
                let Some(text) = behind.get(..payload as usize) else {
                    return self.more(head as u64 + payload, left + head as u64);
                };
                let text = std::str::from_utf8(text).map_err(|_| self.fault("a text that is no UTF-8"))?;
                MsgpackNode::Str(text.into())
            }
            0xc4..=0xc6 => {
                payload = number;
                self.check_payload(payload, left)?;
                MsgpackNode::Bin(place)
            }
            0xc7..=0xc9 | 0xd4..=0xd8 => {
                let length = if tag < 0xd0 { number as u32 } else { 1 << (tag - 0xd4) };
                let place = BinPlace { length, ..place };
                self.check_payload(u64::from(length), left)?;
                let code = code.first().copied().unwrap_or_default().cast_signed();
                let nested = self.nested.contains(&code);
                if nested {
                    let end = place.offset + u64::from(length);
                    opened = Some(OpenValue { left: 1, end, exact: true });
                } else {
                    payload = u64::from(length);
                }
                MsgpackNode::Ext { code, place, nested }
            }
            0x90..=0x9f | 0xdc | 0xdd => {
                let count = if tag < 0xa0 { u64::from(tag & 0xf) } else { number };
                opened = Some(self.container(count, end, left)?);
                MsgpackNode::Array(count as u32)
            }
            0x80..=0x8f | 0xde | 0xdf => {
                let count = if tag < 0x90 { u64::from(tag & 0xf) } else { number };
                opened = Some(self.container(2 * count, end, left)?);
                MsgpackNode::Map(count as u32)
            }
            0xc1 => return Err(self.fault("0xc1 begins no value")),
        };
        self.at += head as u64 + payload;
        self.needed = 1;
        self.push(node, opened)?;
        Ok(true)
    }

    fn push(&mut self, node: MsgpackNode, opened: Option<OpenValue>) -> Parsed<()> {
        if self.nodes.len() as u64 >= MIN_NODES + self.length / NODE_BYTES {
            return Err(self.fault(&format!("more than {} values in so few bytes", self.nodes.len())));
        }
        self.nodes.push(node);
        if let Some(parent) = self.open.last_mut() {
            parent.left -= 1; // Values that miss nothing were closed before.
        }
        if let Some(opened) = opened {
            if self.open.len() as u64 > MAX_DEPTH {
                return Err(self.fault(&format!("values nested more than {MAX_DEPTH} deep")));
            }
            self.open.push(opened);
        }
        Ok(())
    }

    /// Asks for so many bytes, of the `left` ones.
    fn more(&mut self, needed: u64, left: u64) -> Parsed<bool> {
        if needed > left {
            return Err(self.fault("the file, or a value, ends in the middle of a value"));
        }
        self.needed = needed;
        Ok(false)
    }

    fn check_payload(&self, payload: u64, left: u64) -> Parsed<()> {
        if payload <= left {
            return Ok(());
        }
        Err(self.fault(&format!("a value of {payload} bytes, and {left} are left")))
    }

    /// A container of so many values, each of a byte or more.
    fn container(&self, values: u64, end: u64, left: u64) -> Parsed<OpenValue> {
        if values <= left {
            return Ok(OpenValue { left: values, end, exact: false });
        }
        Err(self.fault(&format!("a container of {values} values, and {left} bytes are left")))
    }

    fn fault(&self, what: &str) -> Fault {
        Fault::new(self.at, what)
    }
}

/// Bytes of the number behind a first byte, and of the type behind it.
fn widths(tag: u8) -> (usize, usize) {
    match tag {
        0xc4 | 0xcc | 0xd0 | 0xd9 => (1, 0),
        0xc5 | 0xcd | 0xd1 | 0xda | 0xdc | 0xde => (2, 0),
        0xc6 | 0xca | 0xce | 0xd2 | 0xdb | 0xdd | 0xdf => (4, 0),
        0xcb | 0xcf | 0xd3 => (8, 0),
        0xc7 => (1, 1),
        0xc8 => (2, 1),
        0xc9 => (4, 1),
        0xd4..=0xd8 => (0, 1),
        _ => (0, 0),
    }
}

/// Parses a file that is in memory.
pub fn parse(bytes: &[u8], nested: &[i8]) -> Parsed<Vec<MsgpackNode>> {
    let mut parser = MsgpackParser::new(bytes.len() as u64, nested);
    while let Some(wanted) = parser.wants() {
        parser.feed(bytes.get(wanted.start as usize..wanted.end as usize).unwrap_or_default())?;
    }
    parser.finish()
}

#[cfg(test)]
mod tests;
