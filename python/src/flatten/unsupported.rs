//! Leaves that cannot be stored: they are left out, or converted by a function of the caller.

use std::sync::Arc;

use pyo3::prelude::*;

use stepwell_core::leaf_path::{Component, named};

use super::Walk;
use super::choice::Unsupported;

/// The position of a walk before a value.
pub(super) struct Mark {
    nodes: usize,
    leaves: usize,
    drifting: usize,
    library: Option<Arc<str>>,
    component: Option<Component>,
}

impl<'py> Walk<'_, 'py> {
    /// Returns the position before a value, if a value that cannot be stored is not refused.
    pub(super) fn mark(&self, component: Option<&Component>) -> Option<Mark> {
        self.choice.unsupported.as_ref()?;
        Some(Mark {
            nodes: self.flat.tree.nodes().len(),
            leaves: self.flat.leaves.len(),
            drifting: self.flat.drifting.len(),
            library: self.library.clone(),
            component: component.cloned(),
        })
    }

    /// Leaves out or converts a value whose visit has failed. An element of a sequence cannot be
    /// left out alone, so the error goes on to the sequence. The whole state is never left out.
    pub(super) fn replace_unsupported(
        &mut self,
        mark: Mark,
        parent: Option<u32>,
        object: &Bound<'py, PyAny>,
        depth: u64,
        error: PyErr,
    ) -> PyResult<()> {
        let py = object.py();
        if !error.is_instance(py, self.hooks.unsupported.bind(py)) {
            return Err(error);
        }
        let path = self.path(parent, mark.component.as_ref());
        match self.choice.unsupported.take() {
            None => Err(error),
            Some(Unsupported::Drop) => {
                self.choice.unsupported = Some(Unsupported::Drop);
                if matches!(mark.component, None | Some(Component::Index(_))) {
                    return Err(error);
                }
                self.roll_back(mark);
                self.flat.unsupported.push((path, error.value(py).to_string()));
                Ok(())
            }
            // Meanwhile, and after an error, values that cannot be stored are refused.
            Some(Unsupported::Convert(convert)) => {
                let component = mark.component.clone();
                self.roll_back(mark);
                let visited = match convert.bind(py).call1((&path, object)) {
                    Ok(converted) => {
                        // It may be alive no longer than this visit, and its memory may be reused.
                        self.converted.push(converted.clone());
                        self.visit_chosen(parent, component, &converted, depth)
                    }
                    Err(error) => Err(error),
                };
                visited.inspect_err(|error| {
                    let note = format!("unsupported= was called for {}", named(&path));
                    // If this fails, the error still says what went wrong.
                    let _ = error.value(py).call_method1("add_note", (note,));
                })?;
                self.choice.unsupported = Some(Unsupported::Convert(convert));
                Ok(())
            }
        }
    }

    /// Forgets what the walk has added since then.
    fn roll_back(&mut self, mark: Mark) {
        let Mark { nodes, leaves, drifting, library, component: _ } = mark;
        self.library = library;
        if self.flat.tree.nodes().len() == nodes {
            return;
        }
        self.flat.tree.truncate(nodes);
        self.flat.leaves.truncate(leaves);
        self.flat.drifting.truncate(drifting);
        let is_kept = |leaf: &u32| (*leaf as usize) < leaves;
        for ties in self.ties.values_mut() {
            ties.retain(is_kept);
        }
        self.copies.retain(|_, leaf| is_kept(leaf));
        self.stored.retain(|_, leaf| is_kept(leaf));
        self.originals.retain(|leaf, _| is_kept(leaf));
        self.lengths.retain(|node, _| (*node as usize) < nodes);
    }
}
