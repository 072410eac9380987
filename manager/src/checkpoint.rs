//! One step: a [`Reader`] of its files under a lease, and its commit record. Its items are merged
//! into one tree in the saved order. A missing file is [`Error::StepGone`], never other data.

use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use stepwell_core::format::manifest::Manifest;
use stepwell_core::io::{Dir, File};
use stepwell_core::load::{self, FileSet, LoadOptions, StoredFile, VerifyProgress, VerifyReport};

use crate::control::is_single;
use crate::directory_layout::{self, MANIFEST, SINGLE};
use crate::discovery::damage;
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::lease::{self, Lease};
use crate::options::Options;
use crate::reader::Reader;
use crate::stored_index::{self, StoredIndex};

/// The default timeout for a lease that a thinning holds exclusively.
const LEASE_TIMEOUT: Duration = Duration::from_secs(60);

/// A committed step, leased until it is dropped.
pub struct Checkpoint {
    reader: Reader,
    lease: Lease,
    manifest: Arc<Manifest>,
}

impl Deref for Checkpoint {
    type Target = Reader;

    fn deref(&self) -> &Reader {
        &self.reader
    }
}

impl Checkpoint {
    /// Opens a checkpoint by the path of its directory.
    pub fn open(path: &Path, environment: &Environment) -> Result<Self> {
        let gone = || Error::StepNotFound { step: None, root: path.to_owned(), latest: None };
        let load_options = Options::default().load_options(&*environment.disk, false);
        if environment.disk.keeps_ledgers()
            && let Ok(root) = environment.disk.open_dir(path)
            && is_single(&*root)?
        {
            return Self::lease(&root, SINGLE, environment, LEASE_TIMEOUT, load_options)?.ok_or_else(gone);
        }
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
        let mut files = FileSet::new(Arc::clone(&dir), &stored_index::files(&manifest));
        let index = StoredIndex::read(&*dir, &manifest)?;
        if files.records() != index.outline().files {
            files = FileSet::new(Arc::clone(&dir), &index.outline().files);
        }
        let reader = Reader::of_step(dir, index, files, environment, load_options);
        Ok(Some(Self { reader, lease, manifest: Arc::new(manifest) }))
    }

    /// Opens a checkpoint that still has a temporary name, below `parent`.
    pub(crate) fn open_in(parent: &Arc<dyn Dir>, name: &str, environment: &Environment) -> Result<Self> {
        let load_options = Options::default().load_options(&*environment.disk, false);
        Self::lease(parent, name, environment, LEASE_TIMEOUT, load_options)?
            .ok_or_else(|| Error::StepNotFound { step: None, root: parent.path().join(name), latest: None })
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
        self.check_process()?;
        Ok(damage(self.dir(), "", &self.manifest)?)
    }

    /// Checks the index, and the header and footer of every file.
    pub(crate) fn check_records(&self) -> Result<()> {
        self.index()?;
        Ok(self.files().check_records()?)
    }

    /// Opens a file of the manifest. Its blocks are checked while it is read.
    pub(crate) fn stored_file(&self, path: &str) -> Result<Arc<dyn File>> {
        Ok(StoredFile::of(self.files(), path)?)
    }

    /// Reads and checks every byte, and reports all damage. `progress` may return false to stop it.
    pub fn verify(
        &self,
        options: &LoadOptions,
        progress: &mut dyn FnMut(VerifyProgress) -> bool,
    ) -> Result<VerifyReport> {
        let mut report = self.reader.verify(options, progress)?;
        // A file that is in the manifest and in no index is damage too.
        let known: std::collections::HashSet<&str> =
            self.outline().files.iter().map(|file| &*file.name).collect();
        for file in &self.manifest.files {
            if !known.contains(file.path.as_str()) {
                report.damages.push(load::Damage {
                    file: self.path().join(&file.path),
                    block: None,
                    leaves: Vec::new(),
                    what: "the manifest lists it, and no index does".to_owned(),
                });
            }
        }
        Ok(report)
    }
}
