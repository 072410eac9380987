//! The acknowledgements at the time of the power cut.

use std::fmt;
use std::sync::Arc;

use stepwell_core::io::simulated::{content_hash, mix};

/// The marks of a log before a cut, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    labels: Vec<Arc<str>>,
    hash: u64,
}

impl Marks {
    /// Adds one.
    pub fn push(&mut self, label: &Arc<str>) {
        self.hash = mix(self.hash, content_hash(label.as_bytes()));
        self.labels.push(Arc::clone(label));
    }

    /// All of them, oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.labels.iter().map(AsRef::as_ref)
    }

    /// True if exactly this was marked.
    pub fn contains(&self, label: &str) -> bool {
        self.iter().any(|mark| mark == label)
    }

    /// The rest of each mark that begins with `prefix`, oldest first.
    pub fn after<'a>(&'a self, prefix: &'a str) -> impl DoubleEndedIterator<Item = &'a str> {
        self.iter().filter_map(move |mark| mark.strip_prefix(prefix))
    }

    /// The numbers that follow `prefix`, oldest first: `numbers("committed ")`.
    pub fn numbers<'a>(&'a self, prefix: &'a str) -> impl DoubleEndedIterator<Item = u64> + 'a {
        self.after(prefix).filter_map(|rest| rest.split(' ').next()?.parse().ok())
    }

    /// Over labels and their order.
    pub fn hash(&self) -> u64 {
        self.hash
    }
}

impl fmt::Display for Marks {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.labels.is_empty() {
            return out.write_str("nothing");
        }
        let labels: Vec<&str> = self.iter().collect();
        out.write_str(&labels.join(", "))
    }
}
