//! The encoding of components and container kinds as tags, numbers and texts. Columns are written
//! from it. Hashes of structures use it too, because it is the same in every build.

use super::page::tag;
use crate::leaf_path::Component;
use crate::tree::ContainerKind;

/// The spelling of a component of a leaf path. The root has the component `None`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComponentSpelling<'a> {
    /// Its tag.
    pub tag: u8,
    /// The integer key or the index. 0 for a named component.
    pub number: i64,
    /// Its name. Empty for a numbered component.
    pub name: &'a str,
}

impl<'a> ComponentSpelling<'a> {
    /// The spelling of a component.
    pub fn of(component: Option<&'a Component>) -> Self {
        let (tag, number, name) = match component {
            None => (tag::ROOT, 0, ""),
            Some(Component::Key(name)) => (tag::KEY, 0, &**name),
            Some(Component::Field(name)) => (tag::FIELD, 0, &**name),
            Some(Component::Int(number)) => (tag::INT, *number, ""),
            Some(Component::Index(number)) => (tag::INDEX, i64::from(*number), ""),
        };
        Self { tag, number, name }
    }
}

/// The spelling of a container kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KindSpelling<'a> {
    /// Its tag.
    pub tag: u8,
    /// Its bound, or 0.
    pub number: u64,
    /// The name of its type, or empty.
    pub type_name: &'a str,
    /// The protocol of a stateful object, or empty.
    pub protocol: &'a str,
    /// The kind of a stateful object's state.
    pub inner: Option<&'a ContainerKind>,
}

impl<'a> KindSpelling<'a> {
    /// The spelling of a kind.
    pub fn of(kind: &'a ContainerKind) -> Self {
        let plain = |tag| Self { tag, number: 0, type_name: "", protocol: "", inner: None };
        match kind {
            ContainerKind::Dict => plain(tag::DICT),
            ContainerKind::OrderedDict => plain(tag::ORDERED_DICT),
            ContainerKind::DefaultDict => plain(tag::DEFAULT_DICT),
            ContainerKind::List => plain(tag::LIST),
            ContainerKind::Tuple => plain(tag::TUPLE),
            ContainerKind::Deque { maxlen: None } => plain(tag::DEQUE),
            ContainerKind::Deque { maxlen: Some(maxlen) } => {
                Self { number: *maxlen, ..plain(tag::DEQUE_BOUNDED) }
            }
            ContainerKind::NamedTuple { type_name } => Self { type_name, ..plain(tag::NAMED_TUPLE) },
            ContainerKind::Dataclass { type_name } => Self { type_name, ..plain(tag::DATACLASS) },
            ContainerKind::Custom { type_name } => Self { type_name, ..plain(tag::CUSTOM) },
            ContainerKind::Stateful { type_name, protocol, inner } => {
                Self { type_name, protocol, inner: Some(inner), ..plain(tag::STATEFUL) }
            }
        }
    }
}
