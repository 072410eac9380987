//! The structure of a state: containers and leaves in order, so that a restore without a target
//! returns the saved types and order. Nodes are in pre-order and have the number of their parent.
//! Paths are computed on request.

use std::collections::TryReserveError;

use crate::leaf_path::{Component, LeafPath};
use crate::sys::try_reserve_huge;

/// The kind of a container. Its type names are descriptions. They never choose an import.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ContainerKind {
    /// `dict`, in insertion order.
    Dict,
    /// `collections.OrderedDict`
    OrderedDict,
    /// `collections.defaultdict`. The target provides its factory. Without a target, it is restored
    /// as a `dict`.
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
    /// A namedtuple, with its fields by name.
    NamedTuple {
        /// `module.QualName`
        type_name: Box<str>,
    },
    /// A dataclass, with its fields by name.
    Dataclass {
        /// `module.QualName`
        type_name: Box<str>,
    },
    /// An object that was saved through its own protocol (`state_dict`, `get_state`, an adapter).
    /// Its children are those of its state, without a path component in between.
    Stateful {
        /// `module.QualName`
        type_name: Box<str>,
        /// The protocol: `state_dict`, `get_state`, `numpy.random.Generator`, …
        protocol: Box<str>,
        /// The kind of its state.
        inner: Box<ContainerKind>,
    },
    /// A registered node type (`sw.register`, a JAX pytree node), with its children by key.
    Custom {
        /// The name under which it was registered.
        type_name: Box<str>,
    },
}

/// The kind of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum NodeKind {
    /// A container. Its children are the nodes whose parent it is.
    Container(Box<ContainerKind>),
    /// A leaf. Leaves are numbered in pre-order.
    Leaf(u32),
}

/// One node of a [`Tree`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Node {
    /// The number of the parent node. The root is its own parent.
    pub parent: u32,
    /// The path component from the parent to it. `None` for the root.
    pub component: Option<Component>,
    /// Its kind.
    pub kind: NodeKind,
}

impl Node {
    /// Returns its container kind. `None` for a leaf.
    pub fn container(&self) -> Option<&ContainerKind> {
        match &self.kind {
            NodeKind::Container(kind) => Some(kind),
            NodeKind::Leaf(_) => None,
        }
    }
}

/// The structure of a state. Node 0 is the root. An empty tree has no nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tree {
    nodes: Vec<Node>,
    leaf_nodes: Vec<u32>,
}

impl Tree {
    /// Returns a tree without nodes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reserves memory for so many more nodes and leaves.
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

    /// Changes the protocol of a stateful object. Does nothing for other nodes.
    pub fn map_protocol(&mut self, node: u32, map: impl FnOnce(&str) -> String) {
        if let Some(Node { kind: NodeKind::Container(kind), .. }) = self.nodes.get_mut(node as usize)
            && let ContainerKind::Stateful { protocol, .. } = &mut **kind
        {
            *protocol = map(protocol).into_boxed_str();
        }
    }

    /// Removes the nodes from that number on, with their leaves.
    pub fn truncate(&mut self, nodes: usize) {
        self.nodes.truncate(nodes);
        self.leaf_nodes.retain(|&node| (node as usize) < nodes);
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

    /// Returns the nodes in pre-order, for the caller to keep.
    pub fn into_nodes(self) -> Vec<Node> {
        self.nodes
    }

    /// Returns all nodes in pre-order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Returns the number of leaves.
    pub fn leaf_count(&self) -> usize {
        self.leaf_nodes.len()
    }

    /// Returns the node number of a leaf.
    pub fn leaf_node(&self, leaf: u32) -> Option<u32> {
        self.leaf_nodes.get(leaf as usize).copied()
    }

    /// Returns the path of a node. Empty for the root, and for an unknown number.
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

    /// Returns the path of a leaf.
    pub fn leaf_path(&self, leaf: u32) -> LeafPath {
        self.leaf_node(leaf).map(|node| self.path(node)).unwrap_or_default()
    }
}
