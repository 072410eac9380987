//! Leaf paths: the address of a value in the state, a *list* of typed components, never a joined
//! string.
//!
//! Messages and globs render a path as `params/layers[0]/w`. `/` separates keys and fields.
//! Brackets enclose indices and integer keys; the container's kind tells which. A key's `\`, `/`,
//! `[` and `]` are escaped with `\`, and an empty key is `\e`, so the rendering is reversible. The
//! empty path (of a state that is one leaf) is the empty string.

use std::fmt::{self, Write as _};
use std::sync::Arc;

/// One step from a container to its child. Names are shared, because the layers of a model repeat
/// them, and paths are copied often.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Component {
    /// A string key of a mapping, verbatim. A dotted torch name is one key.
    Key(Arc<str>),
    /// An integer key of a mapping.
    Int(i64),
    /// A position in a list, tuple or deque.
    Index(u32),
    /// A field of a namedtuple or dataclass, or an attribute.
    Field(Arc<str>),
}

impl Component {
    /// Appends the rendering to `out`, which has the rendering of the parent.
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

/// The address of a leaf. See the module documentation for its rendering.
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
/// Returns a leaf for messages, from its rendered path, which is empty for a state of one leaf.
pub fn named(path: &str) -> String {
    if path.is_empty() { "the whole state".to_owned() } else { format!("leaf `{path}`") }
}
