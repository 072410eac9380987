//! The removal of containers without a selected leaf, after the walk.

use pyo3::prelude::*;

use stepwell_core::leaf_path::Component;
use stepwell_core::tree::NodeKind;
use stepwell_reshard::glob::PathText;

use super::Walk;
use crate::errors::invalid;

impl Walk<'_, '_> {
    /// Removes the containers without a selected leaf. Fails for a list with only some of its
    /// elements.
    pub(super) fn remove_unselected(&mut self, py: Python<'_>) -> PyResult<()> {
        let tree = std::mem::take(&mut self.flat.tree);
        let nodes = tree.nodes();
        // In reverse order, children come before their parents.
        let mut is_kept = vec![false; nodes.len()];
        for (number, node) in nodes.iter().enumerate().rev() {
            is_kept[number] |= number == 0
                || node.container().is_none()
                || self.choice.selection.selects_text(PathText::new(&tree.path(number as u32)).as_bytes());
            is_kept[node.parent as usize] |= is_kept[number];
        }
        let mut numbers = vec![0_u32; nodes.len()];
        let mut children = vec![0_u32; nodes.len()];
        for (number, node) in nodes.iter().enumerate().filter(|(number, _)| is_kept[*number]) {
            let above = node.parent as usize;
            if let Some(Component::Index(index)) = node.component
                && index != children[above]
            {
                let what = format!(
                    "include= and exclude= leave a gap in the list `{}`: element {index} is selected, but not all \
                     elements before it. Select the whole list, or nothing of it",
                    tree.path(node.parent)
                );
                return Err(invalid(py, &what));
            }
            let parent = (number > 0).then(|| numbers[above]);
            if number > 0 {
                children[above] += 1;
            }
            numbers[number] = match &node.kind {
                NodeKind::Container(kind) => {
                    self.flat.tree.push_container(parent, node.component.clone(), kind.clone())
                }
                NodeKind::Leaf(_) => self.flat.tree.push_leaf(parent, node.component.clone()),
            };
        }
        for (number, &saved) in children.iter().enumerate().filter(|(number, _)| is_kept[*number]) {
            if let Some(&length) = self.lengths.get(&(number as u32))
                && saved != length
            {
                let what = format!(
                    "include= and exclude= select {saved} of the {length} elements of the list `{}`. Select the \
                     whole list, or nothing of it",
                    tree.path(number as u32)
                );
                return Err(invalid(py, &what));
            }
        }
        Ok(())
    }
}
