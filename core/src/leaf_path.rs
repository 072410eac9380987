//! Leaf paths: the address of a value in the state, a *list* of typed components, never a joined
//! string.
//!
//! People and globs see a path as `params/layers[0]/w`. `/` separates keys and fields; brackets
//! hold indices and integer keys (the container says which). `\`, `/`, `[` and `]` inside a key are
//! escaped with `\`, and an empty key renders as `\e`, so the rendering is reversible. The empty
//! path (a state that is itself a leaf) renders as the empty string.

use std::fmt::{self, Write as _};
use std::sync::Arc;

/// One step from a container to its child. Names are shared, because every layer of a model repeats
/// them and paths are copied often.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Component {
    /// A string key of a mapping, verbatim (a dotted torch name is one key).
    Key(Arc<str>),
    /// An integer key of a mapping.
    Int(i64),
    /// A place in a list, tuple or deque.
    Index(u32),
    /// A field of a namedtuple or dataclass, or an attribute.
    Field(Arc<str>),
}

impl Component {
    /// Appends the rendering to `out`, which holds what stands before it.
    pub fn render(&self, out: &mut String) {
        match self {
            Self::Key(name) | Self::Field(name) => {
                if !out.is_empty() {
                    out.push('/');
                }
                escape(name, out);
            }
            Self::Int(key) => {
                let _ = write!(out, "[{key}]");
            }
            Self::Index(index) => {
                let _ = write!(out, "[{index}]");
            }
        }
    }
}

fn escape(name: &str, out: &mut String) {
    if name.is_empty() {
        out.push_str("\\e");
    }
    for c in name.chars() {
        if matches!(c, '\\' | '/' | '[' | ']') {
            out.push('\\');
        }
        out.push(c);
    }
}

/// The address of a leaf. See the module documentation for how it renders.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeafPath(pub Vec<Component>);

impl fmt::Display for LeafPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = String::new();
        for component in &self.0 {
            component.render(&mut out);
        }
        f.write_str(&out)
    }
}
/// A leaf in a message, by its rendered path; that of a state which is one leaf is empty.
pub fn named(path: &str) -> String {
    if path.is_empty() { "the whole state".to_owned() } else { format!("leaf `{path}`") }
}
