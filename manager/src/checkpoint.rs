//! One step, opened for reading: leased, with its items merged into one tree in the saved order.
//!
//! Leaves have one numbering over all items: positions in [`Checkpoint::outline`], also used by
//! [`Checkpoint::match_state`]. The chunks of a large index are read when they are needed. Data
//! files are opened lazily below one directory descriptor. A missing file is [`Error::StepGone`],
//! never other data.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use stepwell_core::format::index::Index;
use stepwell_core::format::manifest::Manifest;
use stepwell_core::io::Dir;
use stepwell_core::load::{
    self, Destination, FileReads, FileSet, LoadFailure, LoadOptions, LoadStats, VerifyProgress, VerifyReport,
};
use stepwell_core::read_plan::BoxCopy;
use stepwell_core::sys::{Birth, cores, each, spawn};
use stepwell_core::tree::Tree;
use stepwell_core::value::Value;
use stepwell_reshard::matching::{self, Report, StoredLeaf, Wanted};
use stepwell_reshard::read_plan::{self, Request};

use crate::directory_layout::{self, MANIFEST};
use crate::discovery::damage_by;
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::lease::{self, Lease};
use crate::options::Options;
use crate::stored_index::{self, StoredIndex};

/// The default timeout for a lease that a thinning holds exclusively.
const LEASE_TIMEOUT: Duration = Duration::from_secs(60);

/// The plan of a read uses one thread for so many requests.
const REQUESTS_PER_THREAD: usize = 4096;

/// A committed step, leased until it is dropped.
pub struct Checkpoint {
    dir: Arc<dyn Dir>,
    lease: Lease,
    manifest: Arc<Manifest>,
    index: StoredIndex,
    /// The leaves with their paths, made on the first use.
    stored: OnceLock<Vec<StoredLeaf>>,
    files: Arc<FileSet>,
    environment: Environment,
    load_options: LoadOptions,
    birth: Birth,
}

/// An index with so many leaves takes milliseconds to free.
const MANY_LEAVES: usize = 4096;

impl Drop for Checkpoint {
    fn drop(&mut self) {
        if self.index.outline().leaves.len() >= MANY_LEAVES {
            let index = std::mem::take(&mut self.index);
            // Without a thread it is freed here.
            let _ = spawn("stepwell-free", move || drop(index));
        }
    }
}

/// A failed read, and the targets that it had overwritten.
#[derive(Debug)]
pub struct ReadFailure {
    /// Why.
    pub error: Error,
    /// The numbers of the targets that it had written to.
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
        if let Some(directory_layout::OwnName::Temporary { .. } | directory_layout::OwnName::Trash { .. }) =
            directory_layout::parse(name)
        {
            let reason = "it is a save in progress, or was retired".to_owned();
            return Err(Error::NotAStep { path: path.to_owned(), reason });
        }
        let parent = match environment.disk.open_dir(parent) {
            Ok(parent) => parent,
            Err(error) if error.is_not_found() => return Err(gone()),
            Err(error) => return Err(error.into()),
        };
        let load_options = Options::default().load_options(false);
        Self::lease(&parent, name, environment, LEASE_TIMEOUT, load_options)?.ok_or_else(gone)
    }

    /// Opens and leases a directory below `parent`. `None` if it does not exist.
    pub(crate) fn lease(
        parent: &Arc<dyn Dir>,
        name: &str,
        environment: &Environment,
        timeout: Duration,
        load_options: LoadOptions,
    ) -> Result<Option<Self>> {
        let Some((dir, lease)) = lease::acquire(&**parent, name, timeout)? else {
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
        let mut files = Arc::new(FileSet::new(Arc::clone(&dir), &stored_index::files(&manifest)));
        let index = StoredIndex::read(&*dir, &manifest)?;
        if files.records() != index.outline().files {
            files = Arc::new(FileSet::new(Arc::clone(&dir), &index.outline().files));
        }
        Ok(Some(Self {
            dir,
            lease,
            manifest: Arc::new(manifest),
            index,
            stored: OnceLock::new(),
            files,
            environment: environment.clone(),
            load_options,
            birth: Birth::now(),
        }))
    }

    /// Opens a checkpoint that still has a temporary name, below `parent`.
    pub(crate) fn open_in(parent: &Arc<dyn Dir>, name: &str, environment: &Environment) -> Result<Self> {
        let load_options = Options::default().load_options(false);
        Self::lease(parent, name, environment, LEASE_TIMEOUT, load_options)?
            .ok_or_else(|| Error::StepNotFound { step: None, root: parent.path().join(name), latest: None })
    }

    /// Returns its open directory.
    pub(crate) fn dir(&self) -> &dyn Dir {
        &*self.dir
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Returns its number.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Returns its manifest.
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// True if its lease protects it from deletion.
    pub fn is_leased(&self) -> bool {
        self.lease.protects()
    }

    /// Returns the first file of the manifest that is missing or has another length. Reads no data.
    /// A foreign copy in progress may have its manifest before the rest.
    pub fn damage(&self) -> Result<Option<String>> {
        self.birth.check("checkpoint")?;
        Ok(damage_by(&self.manifest, |path| self.dir.stat(path))?)
    }

    /// Returns the options for reads: those of the manager that opened it, or the defaults of
    /// [`Options`].
    pub fn load_options(&self) -> &LoadOptions {
        &self.load_options
    }

    /// Returns all items merged: one tree, one numbering of leaves, file names relative to the
    /// step. For a large index it lacks the chunks of tensors: see [`Checkpoint::index_of`].
    pub fn outline(&self) -> &Arc<Index> {
        self.index.outline()
    }

    /// [`Checkpoint::outline`] with at least the chunks of those leaves, and of the leaves to which
    /// they are tied.
    pub fn index_of(&self, leaves: impl IntoIterator<Item = u32>) -> Result<Arc<Index>> {
        self.index.with(leaves)
    }

    /// Returns the whole index.
    pub fn index(&self) -> Result<Arc<Index>> {
        self.index.whole()
    }

    /// Returns the structure of the state.
    pub fn tree(&self) -> &Tree {
        &self.outline().tree
    }

    /// Returns the leaves, for matching.
    pub fn leaves(&self) -> &[StoredLeaf] {
        self.stored.get_or_init(|| matching::stored_leaves(self.outline()))
    }

    /// Matches the wanted leaves with the stored ones. Reads no data.
    pub fn match_state(&self, wanted: &[Wanted], options: &matching::MatchOptions) -> Report {
        matching::match_state(wanted, self.leaves(), options)
    }

    /// Returns the reads of a restore of `requests` and `objects` (leaves of
    /// [`Checkpoint::outline`]), by file. A restore makes exactly these if the page cache holds no
    /// data. Reads no data.
    pub fn plan(&self, requests: &[Request], objects: &[u32]) -> Result<Vec<FileReads>> {
        let (index, copies) = self.copies(requests)?;
        let of_tensors = load::plan(&self.files, &index, &copies);
        let of_objects = load::copies_of_objects(&self.files, self.outline(), objects)
            .and_then(|copies| load::plan(&self.files, self.outline(), &copies));
        let mut planned = of_tensors.map_err(|error| self.gone_or(error))?;
        planned.extend(of_objects.map_err(|error| self.gone_or(error))?);
        Ok(planned)
    }

    /// Returns the copies of requests, and the index that they refer to.
    fn copies(&self, requests: &[Request]) -> Result<(Arc<Index>, Vec<BoxCopy>)> {
        let index = self.index_of(requests.iter().map(|request| request.leaf))?;
        let threads = cores().min(requests.len() / REQUESTS_PER_THREAD).max(1);
        let shares: Vec<&[Request]> = requests.chunks(requests.len().div_ceil(threads).max(1)).collect();
        let planned = each("stepwell-plan", threads, &shares, |share| read_plan::copies(&index, share));
        let mut copies = Vec::new();
        for share in planned {
            let mut share = share?;
            if copies.is_empty() { copies = share } else { copies.append(&mut share) }
        }
        Ok((index, copies))
    }

    /// Reads regions of stored tensors into host or device memory. Verifies every block.
    pub fn read<'a>(
        &self,
        requests: &[Request],
        targets: impl IntoIterator<Item = impl Into<Destination<'a>>>,
        options: &LoadOptions,
    ) -> std::result::Result<LoadStats, Box<ReadFailure>> {
        self.read_while(requests, targets, options, &mut |_| true)
    }

    /// [`Checkpoint::read`] until `go_on` returns false. It is called between reads, with the
    /// number of bytes read.
    pub fn read_while<'a>(
        &self,
        requests: &[Request],
        targets: impl IntoIterator<Item = impl Into<Destination<'a>>>,
        options: &LoadOptions,
        go_on: &mut dyn FnMut(u64) -> bool,
    ) -> std::result::Result<LoadStats, Box<ReadFailure>> {
        self.birth.check("checkpoint").map_err(Error::from)?;
        let (index, copies) = self.copies(requests)?;
        let disk = &*self.environment.disk;
        load::execute_while(disk, &self.files, &index, &copies, targets, options, go_on).map_err(
            |LoadFailure { error, overwritten }| {
                Box::new(ReadFailure { error: self.gone_or(error), overwritten })
            },
        )
    }

    /// Reads the values of object leaves.
    pub fn read_objects(&self, leaves: &[u32], options: &LoadOptions) -> Result<Vec<Value>> {
        self.birth.check("checkpoint")?;
        load::read_objects(&*self.environment.disk, &self.files, self.outline(), leaves, options)
            .map_err(|error| self.gone_or(error))
    }

    /// Reads and checks every byte, and reports all damage. `progress` may return false to stop it.
    pub fn verify(
        &self,
        options: &LoadOptions,
        progress: &mut dyn FnMut(VerifyProgress) -> bool,
    ) -> Result<VerifyReport> {
        self.birth.check("checkpoint")?;
        let index = self.index()?;
        let mut report = load::verify(&*self.environment.disk, &self.files, &index, options, progress)
            .map_err(|error| self.gone_or(error))?;
        // A file that is in the manifest and in no index is damage too.
        let known: std::collections::HashSet<&str> = index.files.iter().map(|file| &*file.name).collect();
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

    /// Converts an error of a read. A missing file means that the step was removed under an
    /// unprotected reader, or that it is damaged.
    fn gone_or(&self, error: stepwell_core::Error) -> Error {
        let missing = error.is_gone();
        if missing && !self.has_manifest() {
            let what = error.file().map_or_else(|| "a file".to_owned(), |file| file.display().to_string());
            return Error::StepGone { path: self.dir.path().to_owned(), what };
        }
        if missing {
            let file = error.file().unwrap_or(self.dir.path()).to_owned();
            return stepwell_core::Error::corrupt(file, "its manifest lists it, and it is missing").into();
        }
        error.into()
    }

    fn has_manifest(&self) -> bool {
        matches!(self.dir.stat(MANIFEST), Ok(Some(_)))
    }
}
