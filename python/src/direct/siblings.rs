//! The children of a stored tree's nodes, without an allocation for each.

use stepwell_core::tree::Tree;

/// The children of every node, in order.
pub(super) struct Siblings {
    first: Vec<u32>,
    next: Vec<u32>,
    count: Vec<u32>,
}

const NONE: u32 = u32::MAX;

impl Siblings {
    pub(super) fn of(tree: &Tree) -> Self {
        let nodes = tree.nodes();
        let mut found = Self {
            first: vec![NONE; nodes.len()],
            next: vec![NONE; nodes.len()],
            count: vec![0; nodes.len()],
        };
        for (number, node) in nodes.iter().enumerate().skip(1).rev() {
            let parent = node.parent as usize;
            if let (Some(first), Some(next), Some(count)) =
                (found.first.get_mut(parent), found.next.get_mut(number), found.count.get_mut(parent))
            {
                *next = std::mem::replace(first, number as u32);
                *count += 1;
            }
        }
        found
    }

    pub(super) fn count(&self, node: u32) -> usize {
        self.count.get(node as usize).copied().unwrap_or(0) as usize
    }

    pub(super) fn children(&self, node: u32) -> impl Iterator<Item = u32> {
        let mut at = self.first.get(node as usize).copied().unwrap_or(NONE);
        std::iter::from_fn(move || {
            let found = (at != NONE).then_some(at)?;
            at = self.next.get(found as usize).copied().unwrap_or(NONE);
            Some(found)
        })
    }
}
