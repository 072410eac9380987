//! A store as a disk.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::dir::StoreDir;
use super::queue::StoreQueue;
use super::store::Store;
use crate::io::{Dir, Disk, EngineChoice, Queue};
use crate::{Error, Result};

/// The most parts of an upload, with room for the last ones (S3 and GCS take 10 000).
pub(super) const MAX_PARTS: u64 = 8000;

/// How a store is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreOptions {
    /// The bytes of a part of an upload. All parts but the last are of one length. A store may want
    /// 5 MiB at least. Longer files get longer parts.
    pub part_bytes: u64,
    /// The most requests in flight of one queue.
    pub connections: usize,
    /// A small object whose outcome is unknown, or that the store refuses for now, is sent again
    /// for so long.
    pub create_timeout: Duration,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self { part_bytes: 8 << 20, connections: 32, create_timeout: Duration::from_secs(60) }
    }
}

/// See the module documentation.
pub struct StoreDisk {
    store: Arc<dyn Store>,
    options: StoreOptions,
    choice: EngineChoice,
}

impl StoreDisk {
    /// Wraps a store.
    pub fn new(store: Arc<dyn Store>, options: StoreOptions) -> Self {
        let choice = EngineChoice {
            engine: "store",
            direct: false,
            alignment: 1,
            registered: false,
            reasons: vec![format!("{} is an object store.", store.url().display())],
        };
        Self { store, options, choice }
    }

    /// The prefix of a path, which begins with the store's URL: empty, or with `/` at its end.
    pub fn prefix(&self, path: &Path) -> Result<String> {
        let (url, path) = (self.store.url().to_string_lossy(), path.to_string_lossy());
        let below = path.strip_prefix(url.trim_end_matches('/'));
        let Some(below) = below.filter(|below| below.is_empty() || below.starts_with('/')) else {
            return Err(Error::internal(format!("a URL below {url}"), path.into_owned()));
        };
        let below = below.trim_matches('/');
        Ok(if below.is_empty() { String::new() } else { format!("{below}/") })
    }
}

impl Disk for StoreDisk {
    fn choice(&self) -> &EngineChoice {
        &self.choice
    }

    fn open_dir(&self, path: &Path) -> Result<Arc<dyn Dir>> {
        let prefix = self.prefix(path)?;
        if self.store.list(&prefix)?.is_empty() {
            return Err(Error::io("open", path, std::io::Error::from_raw_os_error(libc::ENOENT)));
        }
        Ok(Arc::new(StoreDir::new(&self.store, self.options, prefix)))
    }

    fn create_dir_all(&self, path: &Path) -> Result<Arc<dyn Dir>> {
        Ok(Arc::new(StoreDir::new(&self.store, self.options, self.prefix(path)?)))
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn queue(&self, depth: usize) -> Result<Box<dyn Queue>> {
        Ok(Box::new(StoreQueue::new(depth, self.options.connections)?))
    }
}
