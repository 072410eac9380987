//! One step, opened for reading: leased, its items merged into one tree in the order that was saved.
//!
//! Leaves have one numbering over all items: positions in [`Checkpoint::index`], which is also what [`Checkpoint::match_state`] speaks of. Data files are opened
//! lazily below one directory descriptor; a file that is not there any more is [`Error::StepGone`], never other data.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use stepwell_core::format::checksum::crc32c;
use stepwell_core::format::index::{Index, LeafRecord, Source};
use stepwell_core::format::index_v1;
use stepwell_core::format::manifest::{Item, Manifest};
use stepwell_core::io::Dir;
use stepwell_core::load::{self, FileSet, LoadFailure, LoadOptions, LoadStats, VerifyProgress, VerifyReport};
use stepwell_core::sys::{Birth, HostTarget};
use stepwell_core::tree::{NodeKind, Tree};
use stepwell_core::value::Value;
use stepwell_reshard::matching::{self, Report, StoredLeaf, Wanted};
use stepwell_reshard::read_plan::{self, PlanOptions, Request};

use crate::directory_layout::{self, MANIFEST};
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::lease::{self, Lease};

/// How long a lease that is held exclusively (by a thinning) is waited for, where nobody says otherwise.
const PATIENCE: Duration = Duration::from_secs(60);

/// A committed step, leased. See the module documentation.
pub struct Checkpoint {
    dir: Arc<dyn Dir>,
    lease: Lease,
    manifest: Arc<Manifest>,
    index: Arc<Index>,
    /// Made when matching asks for it: a path for every leaf.
    stored: OnceLock<Vec<StoredLeaf>>,
    files: FileSet,
    environment: Environment,
    birth: Birth,
}

/// A read that failed, and what it had overwritten before.
#[derive(Debug)]
pub struct ReadFailure {
    /// Why.
    pub error: Error,
    /// Numbers of the targets that were written to before.
    pub overwritten: Vec<u32>,
}

impl From<Error> for Box<ReadFailure> {
    fn from(error: Error) -> Self {
        Self::new(ReadFailure { error, overwritten: Vec::new() })
    }
}

impl Checkpoint {
    /// Opens a checkpoint by the path of its directory.
    pub fn open(path: &Path, environment: &Environment) -> Result<Self> {
        let gone = || Error::StepNotFound { step: None, root: path.to_owned(), latest: None };
        let name = path.file_name().and_then(|name| name.to_str());
        let (parent, name) = match (path.parent(), name) {
            (Some(parent), Some(name)) if parent.as_os_str().is_empty() => (Path::new("."), name),
            (Some(parent), Some(name)) => (parent, name),
            _ => return Err(Error::Invalid(format!("{} cannot be a checkpoint", path.display()))),
        };
        if let Some(directory_layout::OwnName::Temporary { .. } | directory_layout::OwnName::Trash) =
            directory_layout::parse(name)
        {
            let reason = "it is a save in flight, or was retired".to_owned();
            return Err(Error::NotAStep { path: path.to_owned(), reason });
        }
        let parent = match environment.disk.open_dir(parent) {
            Ok(parent) => parent,
            Err(error) if error.is_not_found() => return Err(gone()),
            Err(error) => return Err(error.into()),
        };
        Self::lease(&parent, name, environment, PATIENCE)?.ok_or_else(gone)
    }

    /// Opens and leases a directory below `parent`; `None` if there is none.
    pub(crate) fn lease(
        parent: &Arc<dyn Dir>,
        name: &str,
        environment: &Environment,
        patience: Duration,
    ) -> Result<Option<Self>> {
        let Some((dir, lease)) = lease::acquire(&**parent, name, patience)? else {
            return Ok(None);
        };
        let manifest = match dir.read_file(MANIFEST, stepwell_core::limits::MAX_MANIFEST_BYTES) {
            Ok(bytes) => Manifest::decode(&bytes, &dir.path().join(MANIFEST))?,
            Err(error) if error.is_not_found() => {
                let reason = format!("it has no {MANIFEST}");
                return Err(Error::NotAStep { path: dir.path().to_owned(), reason });
            }
            Err(error) => return Err(error.into()),
        };
        let index = Arc::new(merged(&*dir, &manifest)?);
        let files = FileSet::new(Arc::clone(&dir), &index.files);
        Ok(Some(Self {
            dir,
            lease,
            manifest: Arc::new(manifest),
            index,
            stored: OnceLock::new(),
            files,
            environment: environment.clone(),
            birth: Birth::now(),
        }))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Its number.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Its commit record.
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// Whether nobody can remove it while this lives.
    pub fn is_leased(&self) -> bool {
        self.lease.protects()
    }

    /// All items merged: one tree, one numbering of leaves, file names relative to the step.
    pub fn index(&self) -> &Arc<Index> {
        &self.index
    }

    /// The structure of the state.
    pub fn tree(&self) -> &Tree {
        &self.index.tree
    }

    /// The leaves, as matching sees them.
    pub fn leaves(&self) -> &[StoredLeaf] {
        self.stored.get_or_init(|| matching::stored_leaves(&self.index))
    }

    /// Matches what is wanted against what is stored. Nothing is read.
    pub fn match_state(&self, wanted: &[Wanted], options: &matching::Options) -> Report {
        matching::match_state(wanted, self.leaves(), options)
    }

    /// Plans the reads of `requests`, whose leaves are numbers of [`Checkpoint::index`].
    pub fn plan(&self, requests: &[Request], network: bool) -> Result<stepwell_core::read_plan::ReadPlan> {
        let mut sizes = vec![None; self.index.files.len()];
        for request in requests {
            for file in files_of(&self.index, request.leaf) {
                if let Some(size @ None) = sizes.get_mut(file as usize) {
                    *size = Some(self.block_bytes(file)?);
                }
            }
        }
        let block = stepwell_core::format::block::DEFAULT_BLOCK_BYTES;
        let options = if network { PlanOptions::network(block) } else { PlanOptions::local(block) };
        Ok(read_plan::plan(&self.index, requests, &PlanOptions { file_block_bytes: sizes, ..options })?)
    }

    /// Bytes per block of a data file, by its ordinal in [`Checkpoint::index`].
    pub fn block_bytes(&self, file: u32) -> Result<u64> {
        self.files.block_bytes(file).map_err(|error| self.gone_or(error))
    }

    /// Reads regions of stored tensors into host memory, every block of them verified.
    pub fn read(
        &self,
        requests: &[Request],
        targets: &[HostTarget<'_>],
        options: &LoadOptions,
    ) -> std::result::Result<LoadStats, Box<ReadFailure>> {
        self.read_while(requests, targets, options, &mut |_| true)
    }

    /// [`Checkpoint::read`], which `go_on` may end: it is asked between reads, with the bytes that are done.
    pub fn read_while(
        &self,
        requests: &[Request],
        targets: &[HostTarget<'_>],
        options: &LoadOptions,
        go_on: &mut dyn FnMut(u64) -> bool,
    ) -> std::result::Result<LoadStats, Box<ReadFailure>> {
        self.birth.check("checkpoint").map_err(Error::from)?;
        let plan = self.plan(requests, false)?;
        let disk = &*self.environment.disk;
        load::execute_while(disk, &self.files, &self.index, &plan, targets, options, go_on).map_err(
            |LoadFailure { error, overwritten }| {
                Box::new(ReadFailure { error: self.gone_or(error), overwritten })
            },
        )
    }

    /// The values of object leaves.
    pub fn read_objects(&self, leaves: &[u32], options: &LoadOptions) -> Result<Vec<Value>> {
        self.birth.check("checkpoint")?;
        load::read_objects(&*self.environment.disk, &self.files, &self.index, leaves, options)
            .map_err(|error| self.gone_or(error))
    }

    /// Reads and checks every byte; all damage is reported. `progress` may stop it by `false`.
    pub fn verify(
        &self,
        options: &LoadOptions,
        progress: &mut dyn FnMut(VerifyProgress) -> bool,
    ) -> Result<VerifyReport> {
        self.birth.check("checkpoint")?;
        let mut report = load::verify(&*self.environment.disk, &self.files, &self.index, options, progress)
            .map_err(|error| self.gone_or(error))?;
        // A file that the manifest knows and no index names is as much damage as one that is missing.
        let known: std::collections::HashSet<&str> =
            self.index.files.iter().map(|file| &*file.name).collect();
        for file in &self.manifest.files {
            if !known.contains(file.path.as_str()) {
                report.damages.push(load::Damage {
                    file: self.dir.path().join(&file.path),
                    block: None,
                    leaves: Vec::new(),
                    what: "the manifest lists it, and no index does".to_owned(),
                });
            }
        }
        Ok(report)
    }

    /// A missing file means that the step was removed under a reader that could not lease it, or that it is damaged.
    fn gone_or(&self, error: stepwell_core::Error) -> Error {
        const ESTALE: i32 = 116;
        let missing = error.is_not_found() || error.errno() == Some(ESTALE);
        if missing && !self.manifest_stands() {
            let what = error.file().map_or_else(|| "a file".to_owned(), |file| file.display().to_string());
            return Error::StepGone { path: self.dir.path().to_owned(), what };
        }
        if missing {
            let file = error.file().unwrap_or(self.dir.path()).to_owned();
            return stepwell_core::Error::corrupt(file, "its manifest lists it, and it is missing").into();
        }
        error.into()
    }

    fn manifest_stands(&self) -> bool {
        matches!(self.dir.stat(MANIFEST), Ok(Some(_)))
    }
}

fn files_of(index: &Index, leaf: u32) -> Vec<u32> {
    let record = match index.leaves.get(leaf as usize) {
        Some(LeafRecord::Alias { of }) => index.leaves.get(*of as usize),
        record => record,
    };
    let of = |source: Source| match source {
        Source::Own(file) | Source::Range(file) => Some(file),
        Source::Pulled(_) => None,
    };
    match record {
        Some(LeafRecord::Tensor(tensor)) => {
            let mut files: Vec<u32> =
                tensor.chunks.iter().filter_map(|chunk| of(chunk.extent.source)).collect();
            files.dedup();
            files
        }
        Some(LeafRecord::Object(extent)) => of(extent.source).into_iter().collect(),
        _ => Vec::new(),
    }
}

/// The index of an item, checked against the manifest.
fn item_index(dir: &dyn Dir, manifest: &Manifest, item: &Item) -> Result<Index> {
    let file = dir.path().join(&item.index.path);
    let bytes = match dir.read_file(&item.index.path, item.index.length) {
        Ok(bytes) => bytes,
        Err(error) if error.is_not_found() => {
            return Err(
                stepwell_core::Error::corrupt(file, "its manifest lists it, and it is missing").into()
            );
        }
        Err(stepwell_core::Error::Limit { .. }) => {
            return Err(stepwell_core::Error::corrupt(file, "it is longer than its manifest says").into());
        }
        Err(error) => return Err(error.into()),
    };
    if bytes.len() as u64 != item.index.length || crc32c(&bytes) != item.index.crc32c {
        return Err(stepwell_core::Error::corrupt(file, "it is not the index that its manifest names").into());
    }
    let mut index = index_v1::decode(&bytes, &file)?;
    check_claims(&index, &file)?;
    for record in &mut index.files {
        let path = format!("{}/{}", item.dir, record.name);
        let entry = manifest.files.iter().find(|entry| entry.path == path);
        let agrees = entry.is_some_and(|entry| {
            entry.length == record.length
                && entry.file_id == record.file_id
                && entry.trailer_crc32c == record.trailer_crc
        });
        if !agrees {
            let what = format!("index and manifest do not agree on {path}");
            return Err(stepwell_core::Error::corrupt(file, what).into());
        }
        record.name = path.into();
    }
    Ok(index)
}

/// Readers take memory for a tensor before its chunks are looked at one by one: they must add up to it.
fn check_claims(index: &Index, file: &Path) -> Result<()> {
    for (leaf, record) in (0_u32..).zip(&index.leaves) {
        let LeafRecord::Tensor(tensor) = record else { continue };
        if tensor.view.is_some() {
            continue;
        }
        let size = tensor.dtype.size() as u128;
        let claimed = tensor.shape.iter().try_fold(size, |bytes, &n| bytes.checked_mul(u128::from(n)));
        let stored = tensor.chunks.iter().map(|chunk| u128::from(chunk.extent.length)).sum::<u128>();
        if claimed != Some(stored) {
            return Err(stepwell_core::Error::Corrupt {
                file: file.to_owned(),
                leaf: Some(index.tree.leaf_path(leaf).to_string()),
                block: None,
                what: format!(
                    "its {stored} bytes are not those of a {} of shape {:?}",
                    tensor.dtype.name(),
                    tensor.shape
                ),
            }
            .into());
        }
    }
    Ok(())
}

/// All items as one index: top-level entries in the order that was saved.
fn merged(dir: &dyn Dir, manifest: &Manifest) -> Result<Index> {
    let mut indexes = Vec::with_capacity(manifest.items.len());
    for item in &manifest.items {
        indexes.push(item_index(dir, manifest, item)?);
    }
    if indexes.len() <= 1 {
        return Ok(indexes.pop().unwrap_or_default());
    }
    // (position in the state, item, first node, end)
    let mut branches = Vec::new();
    for (number, (item, index)) in manifest.items.iter().zip(&indexes).enumerate() {
        let nodes = index.tree.nodes();
        let tops: Vec<usize> =
            (1..nodes.len()).filter(|&at| nodes.get(at).is_some_and(|node| node.parent == 0)).collect();
        if tops.len() != item.top_level.len() {
            let what = format!(
                "it has {} top-level entries, its manifest says {}",
                tops.len(),
                item.top_level.len()
            );
            return Err(stepwell_core::Error::corrupt(dir.path().join(&item.index.path), what).into());
        }
        for (at, (&first, entry)) in tops.iter().zip(&item.top_level).enumerate() {
            let end = tops.get(at + 1).copied().unwrap_or(nodes.len());
            branches.push((entry.position, number, first, end));
        }
    }
    branches.sort_unstable();
    let mut out = Index::default();
    if let Some(root) = indexes.iter().find_map(|index| index.tree.nodes().first()) {
        match &root.kind {
            NodeKind::Container(kind) => {
                out.tree.push_container(None, None, kind.clone());
            }
            NodeKind::Leaf(_) => {
                let file = dir.path().join(MANIFEST);
                return Err(
                    stepwell_core::Error::corrupt(file, "several items, and the state is one leaf").into()
                );
            }
        }
    }
    let mut shifts = Vec::with_capacity(indexes.len());
    for index in &indexes {
        shifts.push(out.files.len() as u32);
        out.files.extend(index.files.iter().cloned());
    }
    // New number of each item's leaves; a tie may point forward.
    let mut leaf_numbers: Vec<Vec<u32>> =
        indexes.iter().map(|index| vec![u32::MAX; index.leaves.len()]).collect();
    let mut origins = Vec::new();
    for (_, item, first, end) in branches {
        let Some(index) = indexes.get(item) else { continue };
        let nodes = index.tree.nodes();
        let mut numbers = vec![0_u32; end - first];
        for at in first..end {
            let Some(node) = nodes.get(at) else { continue };
            let parent = (node.parent as usize)
                .checked_sub(first)
                .and_then(|at| numbers.get(at))
                .copied()
                .unwrap_or(0);
            let number = out.tree.nodes().len() as u32;
            match &node.kind {
                NodeKind::Container(kind) => {
                    out.tree.push_container(Some(parent), node.component.clone(), kind.clone());
                }
                NodeKind::Leaf(leaf) => {
                    let new = out.tree.push_leaf(Some(parent), node.component.clone());
                    if let Some(slot) =
                        leaf_numbers.get_mut(item).and_then(|leaves| leaves.get_mut(*leaf as usize))
                    {
                        *slot = new;
                    }
                    origins.push((item, *leaf));
                }
            }
            if let Some(slot) = numbers.get_mut(at - first) {
                *slot = number;
            }
        }
    }
    for (item, leaf) in origins {
        let record = indexes.get(item).and_then(|index| index.leaves.get(leaf as usize)).cloned();
        let (Some(mut record), Some(shift)) = (record, shifts.get(item)) else {
            let file = dir.path().join(MANIFEST);
            return Err(stepwell_core::Error::corrupt(file, format!("item {item} has no leaf {leaf}")).into());
        };
        let moved = |source: &mut Source| {
            if let Source::Own(file) | Source::Range(file) = source {
                *file += shift;
            }
        };
        match &mut record {
            LeafRecord::Tensor(tensor) => {
                tensor.chunks.iter_mut().for_each(|chunk| moved(&mut chunk.extent.source));
            }
            LeafRecord::Object(extent) => moved(&mut extent.source),
            LeafRecord::Alias { of } => {
                let new = leaf_numbers.get(item).and_then(|leaves| leaves.get(*of as usize)).copied();
                *of = new.unwrap_or(u32::MAX);
            }
        }
        out.leaves.push(record);
    }
    Ok(out)
}
