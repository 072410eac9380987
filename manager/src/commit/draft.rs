//! The draft of a manifest. No other module makes manifests. Pure.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use stepwell_core::format::FORMAT_VERSION;
use stepwell_core::format::manifest::{
    self, Attempt, FileEntry, IndexEntry, Item, Manifest, NODE_FILES, Others, UnsupportedLeaf,
};
use stepwell_core::limits;

use crate::directory_layout::INDEX;
use crate::error::Result;
use crate::state::claims::Claim;
use crate::state::item::DraftItem;

/// The parts of a manifest that are known before the data is written.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    /// The root, for messages.
    pub root: PathBuf,
    /// The step.
    pub step: u64,
    /// The time at which the save began, in nanoseconds since 1970.
    pub started_unix_ns: i64,
    /// The hash of the state's structure.
    pub plan_hash: String,
    /// The items, in order: directory, name, top-level entries.
    pub items: Vec<DraftItem>,
    /// This rank's values of leaves that should be equal on others.
    pub claims: Vec<Claim>,
    /// Leaves that this rank has left out.
    pub unsupported: Vec<UnsupportedLeaf>,
    /// The user's metrics.
    pub metrics: BTreeMap<String, f64>,
    /// The user's metadata.
    pub custom_metadata: serde_json::Value,
}

impl Draft {
    /// Checks the limits of the manifest before the capture. Encodes and decodes a manifest with
    /// the widest numbers for unknown values. It contains the files of two ranks at most. From
    /// these, computes the size with the files of all ranks.
    pub fn check(&self, session: &str, world_size: u32) -> Result<()> {
        let limit = |what: &str, found: u64, limit: u64| match found {
            found if found > limit => Err(stepwell_core::Error::Limit { what: what.into(), found, limit }),
            _ => Ok(()),
        };
        limit(
            "the number of data files",
            u64::from(world_size) * self.items.len() as u64,
            limits::MAX_FILES,
        )?;
        let bytes_of = |ranks: u32| -> Result<u64> {
            let bytes = self.widest(session, world_size, world_size - ranks..world_size).encode()?;
            Manifest::decode(&bytes, &self.root)?;
            Ok(bytes.len() as u64)
        };
        let one = bytes_of(1)?;
        if world_size > 1 {
            let each = bytes_of(2)?.saturating_sub(one);
            let all = one.saturating_add(each.saturating_mul(u64::from(world_size) - 1));
            limit("a manifest's size in bytes", all, limits::MAX_MANIFEST_BYTES)?;
        }
        Ok(())
    }

    /// Returns a manifest with the widest numbers for unknown values, and the files of some ranks.
    fn widest(&self, session: &str, world_size: u32, ranks: Range<u32>) -> Manifest {
        let items = self.items.iter().map(|item| {
            let index = IndexEntry {
                path: format!("{}/{INDEX}", item.dir),
                length: limits::MAX_INDEX_BYTES,
                crc32c: u32::MAX,
                others: Others::new(),
            };
            item.entry(index, limits::MAX_LEAVES, u64::MAX)
        });
        let ranks = ranks.flat_map(|rank| self.items.iter().map(move |item| (rank, item)));
        let files = ranks.map(|(rank, item)| FileEntry {
            path: format!("{}/{rank:05}.data", item.dir),
            length: limits::MAX_FILE_BYTES / 2,
            trailer_crc32c: u32::MAX,
            file_id: u128::MAX,
            within: Some(manifest::WithinEntry {
                path: format!("{}/n{rank:05}.data", item.dir),
                offset: limits::MAX_FILE_BYTES / 2,
                others: Others::new(),
            }),
            others: Others::new(),
        });
        let attempt = Attempt { session: session.to_owned(), counter: u64::MAX };
        self.manifest(&attempt, world_size, i64::MAX, items.collect(), files.collect())
    }

    /// Returns the manifest of the step, with the unsupported leaves of this rank.
    pub(super) fn manifest(
        &self,
        attempt: &Attempt,
        world_size: u32,
        committed_unix_ns: i64,
        items: Vec<Item>,
        files: Vec<FileEntry>,
    ) -> Manifest {
        Manifest {
            format_version: FORMAT_VERSION,
            required_features: if files.iter().any(|file| file.within.is_some()) {
                vec![NODE_FILES.to_owned()]
            } else {
                Vec::new()
            },
            writer: format!("stepwell {}", env!("CARGO_PKG_VERSION")),
            step: self.step,
            attempt: attempt.clone(),
            started_unix_ns: self.started_unix_ns,
            committed_unix_ns,
            world_size,
            plan_hash: self.plan_hash.clone(),
            items,
            files,
            adopted: None,
            dropped: Vec::new(),
            unsupported: self.unsupported.clone(),
            metrics: self.metrics.clone(),
            custom_metadata: self.custom_metadata.clone(),
            others: Others::new(),
        }
    }
}

impl DraftItem {
    pub(super) fn entry(&self, index: IndexEntry, leaves: u64, tensor_bytes: u64) -> Item {
        Item {
            name: self.name.clone(),
            dir: self.dir.clone(),
            index,
            top_level: self.top_level.clone(),
            leaves,
            tensor_bytes,
            others: Others::new(),
        }
    }
}
