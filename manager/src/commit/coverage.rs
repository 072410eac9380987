//! The check that the ranks have written every tensor exactly once.

use stepwell_core::format::index::{Index, LeafRecord};
use stepwell_reshard::tiling::{self, Fault, Slices};

use super::rank_parts::rank_of;
use crate::coordination::LEADER;
use crate::error::{Advice, Error, Result};

/// Checks that the chunks of every tensor cover its shape, each element once.
pub(super) fn check_coverage(index: &Index) -> Result<()> {
    for (leaf, record) in (0_u32..).zip(&index.leaves) {
        let LeafRecord::Tensor(tensor) = record else { continue };
        let regions: Vec<_> = tensor.chunks.iter().map(|chunk| chunk.region.clone()).collect();
        let Err(fault) = tiling::check(&tensor.shape, &regions) else { continue };
        let rank_of = |chunk: usize| {
            let file = tensor.chunks.get(chunk).and_then(|chunk| chunk.extent.source.file());
            file.and_then(|file| rank_of(index.files.get(file as usize)?)).unwrap_or(LEADER)
        };
        let shape = tensor.shape.as_slice();
        let what = match fault {
            Fault::Hole { region } => {
                let mut holders: Vec<u32> = (0..tensor.chunks.len()).map(rank_of).collect();
                holders.sort_unstable();
                holders.dedup();
                if holders.is_empty() {
                    format!(
                        "no rank writes any part of it, of shape {shape:?}. Each rank holds no part, or declares that another rank writes its copy, or leaves the leaf out"
                    )
                } else {
                    format!(
                        "no rank holds {} of its shape {shape:?}; ranks {holders:?} hold parts of it",
                        Slices(&region)
                    )
                }
            }
            Fault::Overlap { first, second, region } => {
                let (one, other) = (rank_of(first), rank_of(second));
                let who = if one == other {
                    format!("rank {one} holds {} twice", Slices(&region))
                } else {
                    format!("ranks {one} and {other} both hold {}", Slices(&region))
                };
                format!("{who} of its shape {shape:?}, and none declares that the other one writes it")
            }
            fault @ (Fault::Outside { .. } | Fault::TooIrregular) => fault.to_string(),
        };
        let advice = Some(Advice::NameReplicas);
        return Err(Error::Layout { leaf: index.tree.leaf_path(leaf).to_string(), what, advice });
    }
    Ok(())
}
