//! The structure of a state: containers and leaves in order, so that a restore without a target
//! returns the saved types and order. Nodes are in pre-order and know their parent, so a leaf's
//! path costs nothing until it is needed.

use std::collections::TryReserveError;

use crate::leaf_path::{Component, LeafPath};
use crate::sys::try_reserve_huge;

/// The kind of a container. Type names describe what was saved; they never choose an import.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ContainerKind {
    /// `dict`; insertion order is kept.
    Dict,
    /// `collections.OrderedDict`
    OrderedDict,
    /// `collections.defaultdict`; its factory comes from the target, without one it is restored as
    /// a `dict`.
    DefaultDict,
    /// `list`
    List,
    /// `tuple`
    Tuple,
    /// `collections.deque`, with its `maxlen`.
    Deque {
        /// The bound, or `None`.
        maxlen: Option<u64>,
    },
    /// A namedtuple, its fields by name.
    NamedTuple {
        /// `module.QualName`
        type_name: Box<str>,
    },
    /// A dataclass, its fields by name.
    Dataclass {
        /// `module.QualName`
        type_name: Box<str>,
    },
    /// An object that was expanded through its own protocol (`state_dict`, `get_state`, an
    /// adapter); it has one child, at `Field("state")`-free paths: the children are those of the
    /// state it gave.
    Stateful {
        /// `module.QualName`
        type_name: Box<str>,
        /// How its state was taken: `state_dict`, `get_state`, `numpy.random.Generator`, …
        protocol: Box<str>,
        /// The container that its state was, or `Dict`.
        inner: Box<ContainerKind>,
    },
    /// A registered node type (`sw.register`, a JAX pytree node), its children by key.
    Custom {
        /// The name under which it was registered.
        type_name: Box<str>,
    },
}

/// The kind of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum NodeKind {
    /// A container; its children are the nodes that name it as their parent.
    Container(Box<ContainerKind>),
    /// A leaf; leaves are numbered in pre-order.
    Leaf(u32),
}

/// One node of a [`Tree`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Node {
    /// Number of the parent node; the root names itself.
    pub parent: u32,
    /// How the parent reaches it; `None` for the root.
    pub component: Option<Component>,
    /// Its kind.
    pub kind: NodeKind,
}

impl Node {
    /// The kind of container that it is, where it is one.
    pub fn container(&self) -> Option<&ContainerKind> {
        match &self.kind {
            NodeKind::Container(kind) => Some(kind),
            NodeKind::Leaf(_) => None,
        }
    }
}

/// A state's structure; node 0 is the root. An empty tree has no nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tree {
    nodes: Vec<Node>,
    leaf_nodes: Vec<u32>,
}

impl Tree {
    /// A tree with no nodes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes room for that many more nodes, and leaves among them.
    pub fn try_reserve(&mut self, nodes: usize, leaves: usize) -> Result<(), TryReserveError> {
        try_reserve_huge(&mut self.nodes, nodes)?;
        self.leaf_nodes.try_reserve_exact(leaves)
    }

    /// Appends a container below `parent` (`None`: the root) and returns its number.
    pub fn push_container(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        kind: impl Into<Box<ContainerKind>>,
    ) -> u32 {
        self.push(parent, component, NodeKind::Container(kind.into()))
    }

    /// Changes what is said of how a stateful object's state was taken. Nothing happens where the
    /// node is none.
    pub fn map_protocol(&mut self, node: u32, map: impl FnOnce(&str) -> String) {
        if let Some(Node { kind: NodeKind::Container(kind), .. }) = self.nodes.get_mut(node as usize)
            && let ContainerKind::Stateful { protocol, .. } = &mut **kind
        {
            *protocol = map(protocol).into_boxed_str();
        }
    }

    /// Appends a leaf below `parent` (`None`: the state is itself a leaf) and returns its *leaf*
    /// number.
    pub fn push_leaf(&mut self, parent: Option<u32>, component: Option<Component>) -> u32 {
        let leaf = self.leaf_nodes.len() as u32;
        let node = self.push(parent, component, NodeKind::Leaf(leaf));
        self.leaf_nodes.push(node);
        leaf
    }

    fn push(&mut self, parent: Option<u32>, component: Option<Component>, kind: NodeKind) -> u32 {
        let number = self.nodes.len() as u32;
        self.nodes.push(Node { parent: parent.unwrap_or(number), component, kind });
        number
    }

    /// The nodes themselves, in pre-order.
    pub fn into_nodes(self) -> Vec<Node> {
        self.nodes
    }

    /// All nodes, in pre-order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Number of leaves.
    pub fn leaf_count(&self) -> usize {
        self.leaf_nodes.len()
    }

    /// The node number of a leaf.
    pub fn leaf_node(&self, leaf: u32) -> Option<u32> {
        self.leaf_nodes.get(leaf as usize).copied()
    }

    /// The path of a node (empty for the root, and for a number that is none of this tree).
    pub fn path(&self, node: u32) -> LeafPath {
        let mut components = Vec::new();
        let mut at = node;
        while let Some(Node { parent, component, .. }) = self.nodes.get(at as usize) {
            components.extend(component.clone());
            if *parent >= at {
                break;
            }
            at = *parent;
        }
        components.reverse();
        LeafPath(components)
    }

    /// The path of a leaf.
    pub fn leaf_path(&self, leaf: u32) -> LeafPath {
        self.leaf_node(leaf).map(|node| self.path(node)).unwrap_or_default()
    }
}
