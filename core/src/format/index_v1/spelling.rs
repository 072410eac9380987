//! How the format spells what a tree is made of: a tag, a number and texts for each component and
//! each kind of container. Columns are written from this, and a hash of a structure that is to mean
//! the same in every build is taken over it.

use super::page::tag;
use crate::leaf_path::Component;
use crate::tree::ContainerKind;

/// A component of a leaf path; `None` is the root's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComponentSpelling<'a> {
    /// Its sort.
    pub tag: u8,
    /// The integer key or the index; 0 for one that has a name.
    pub number: i64,
    /// Its name; empty for one that is a number.
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

/// A kind of container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KindSpelling<'a> {
    /// Its sort.
    pub tag: u8,
    /// The bound of one that has a bound, else 0.
    pub number: u64,
    /// The name of its type, where it has one.
    pub type_name: &'a str,
    /// How its state was taken, where it was taken.
    pub protocol: &'a str,
    /// The kind that it holds, where it holds one.
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
