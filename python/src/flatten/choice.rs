//! The part of a state that is saved, and the dtypes that it is cast to.

use pyo3::{Py, PyAny};

use stepwell_core::dtype::Dtype;
use stepwell_reshard::glob::Glob;
use stepwell_reshard::matching::PerGlob;
use stepwell_reshard::selection::Selection;

/// The part of a state that is saved.
#[derive(Default)]
pub struct Choice {
    pub(super) selection: Selection,
    pub(super) cast: PerGlob<Option<Dtype>>,
    /// The treatment of leaves that cannot be stored. `None`: they are refused.
    pub(super) unsupported: Option<Unsupported>,
    /// Globs that have matched nothing yet, each with the option that it was passed to.
    pub(super) idle: Vec<(&'static str, Glob)>,
}

/// The treatment of leaves that cannot be stored.
pub enum Unsupported {
    /// They are left out.
    Drop,
    /// A function of path and value returns what is stored.
    Convert(Py<PyAny>),
}

impl Choice {
    pub fn new(selection: Selection, cast: PerGlob<Option<Dtype>>, unsupported: Option<Unsupported>) -> Self {
        let idle = [
            ("include", selection.include().unwrap_or_default()),
            ("exclude", selection.exclude()),
            ("cast", cast.globs()),
        ];
        let named = |(option, globs): (&'static str, &[Glob])| {
            globs.iter().map(|glob| (option, glob.clone())).collect::<Vec<_>>()
        };
        Self { idle: idle.into_iter().flat_map(named).collect(), selection, cast, unsupported }
    }

    /// True if the whole state is saved and no glob is left to match.
    pub(super) fn is_all(&self) -> bool {
        self.selection.is_all() && self.idle.is_empty()
    }
}
