//! A store as the disk of a manager: a directory with a ledger is a root.

use std::path::Path;
use std::sync::Arc;

use stepwell_core::Result;
use stepwell_core::io::{Dir, Disk, EngineChoice, Queue};
use stepwell_core::remote::probe::{ProbeFinding, probe};
use stepwell_core::remote::{ObjectFacts, Store, StoreDisk, StoreOptions};

use super::client::{Ledger, LedgerPatience};
use super::root_dir::{RootDir, check_new};
use crate::environment::Rng;

/// See the module documentation.
pub struct LedgerDisk {
    disk: StoreDisk,
    store: Arc<dyn Store>,
    patience: LedgerPatience,
    rng: Arc<dyn Rng>,
}

impl LedgerDisk {
    /// Wraps a store.
    pub fn new(
        store: Arc<dyn Store>,
        options: StoreOptions,
        patience: LedgerPatience,
        rng: Arc<dyn Rng>,
    ) -> Self {
        Self { disk: StoreDisk::new(Arc::clone(&store), options), store, patience, rng }
    }

    /// Tries the store below a path that nothing else uses, and removes all objects there. Writers
    /// race for `races` keys.
    pub fn probe(&self, path: &Path, races: u32) -> Result<Vec<ProbeFinding>> {
        probe(&*self.store, &self.disk.prefix(path)?, races)
    }

    /// Returns the objects below a path by their names there, or the object at the path by an empty
    /// name.
    pub fn objects(&self, path: &Path) -> Result<Vec<(String, ObjectFacts)>> {
        let prefix = self.disk.prefix(path)?;
        let name = |key: String| key.strip_prefix(&prefix).map(str::to_owned).unwrap_or(key);
        let below = self.store.list_below(&prefix)?;
        if below.is_empty()
            && let Some(facts) = self.store.look(prefix.trim_end_matches('/'))?
        {
            return Ok(vec![(String::new(), facts)]);
        }
        Ok(below.into_iter().map(|(key, facts)| (name(key), facts)).collect())
    }

    fn ledger(&self, path: &Path) -> Result<Ledger> {
        Ok(Ledger::new(&self.store, &self.disk.prefix(path)?, self.patience, &self.rng))
    }
}

impl Disk for LedgerDisk {
    fn choice(&self) -> &EngineChoice {
        self.disk.choice()
    }

    /// Opens a root; or a directory of one, which the root's ledger names; or another prefix.
    fn open_dir(&self, path: &Path) -> Result<Arc<dyn Dir>> {
        let ledger = self.ledger(path)?;
        if ledger.has_entries()? {
            return Ok(Arc::new(RootDir::new(self.disk.create_dir_all(path)?, ledger)));
        }
        if let (Some(parent), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str()))
            && let Ok(ledger) = self.ledger(parent)
            && ledger.has_entries()?
        {
            return RootDir::new(self.disk.create_dir_all(parent)?, ledger).open_dir(name);
        }
        let dir = self.disk.open_dir(path)?;
        check_new(&*dir)?;
        Ok(dir)
    }

    fn create_dir_all(&self, path: &Path) -> Result<Arc<dyn Dir>> {
        Ok(Arc::new(RootDir::new(self.disk.create_dir_all(path)?, self.ledger(path)?)))
    }

    fn open_foreign_dir(&self, path: &Path) -> Result<Arc<dyn Dir>> {
        self.disk.create_dir_all(path)
    }

    fn is_remote(&self) -> bool {
        self.disk.is_remote()
    }

    fn keeps_ledgers(&self) -> bool {
        true
    }

    fn queue(&self, depth: usize) -> Result<Box<dyn Queue>> {
        self.disk.queue(depth)
    }
}
