//! A location: a path of a file system, or the URL of a root in an object store.

use std::path::{Path, PathBuf};

use pyo3::prelude::*;

use stepwell_core::io::{Engine, Purpose, shared_disk};
use stepwell_manager::{Environment, Error};

#[cfg(not(feature = "remote"))]
use self::stores::NoStore as StoreAccess;
#[cfg(feature = "remote")]
use self::stores::StoreAccess;

/// A finding of [`Location::probe`]: its name, the answer (`None`: unknown) and the observation.
pub type FindingRow = (&'static str, Option<bool>, String);

/// An object of [`Location::objects`].
pub type ObjectRow = (String, u64, i64, u64);

/// A location of the package: a `str`. That of a store is a `StoreUrl`, with the store's settings.
pub struct Location {
    /// The path, or the URL.
    pub path: PathBuf,
    store: Option<StoreAccess>,
}

impl<'py> FromPyObject<'_, 'py> for Location {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let path: PathBuf = object.extract()?;
        let store = if is_url(&path) { Some(StoreAccess::of(&object, &path)?) } else { None };
        Ok(Self { path, store })
    }
}

impl Location {
    /// True if it is in an object store.
    pub fn is_store(&self) -> bool {
        self.store.is_some()
    }

    /// Tries the store of a URL that nothing else uses, and removes all objects below it. There are
    /// no findings for a path. Writers race for `races` keys.
    pub fn probe(&self, races: u32) -> Result<Vec<FindingRow>, Error> {
        self.store.as_ref().map_or_else(|| Ok(Vec::new()), |store| store.probe(&self.path, races))
    }

    /// Returns the objects below a URL: name (empty: the URL is its own), bytes, time, and a number
    /// that differs between two contents. There are none for a path.
    pub fn objects(&self) -> Result<Vec<ObjectRow>, Error> {
        self.store.as_ref().map_or_else(|| Ok(Vec::new()), |store| store.objects(&self.path))
    }

    /// Returns the real environment of a single process for this location.
    pub fn environment(&self, engine: Engine, purpose: Purpose) -> Result<Environment, Error> {
        match &self.store {
            Some(store) => store.environment(&self.path),
            None => of_path(&self.path, engine, purpose),
        }
    }
}

/// Returns the real environment of a single process for a path.
pub fn of_path(path: &Path, engine: Engine, purpose: Purpose) -> Result<Environment, Error> {
    Ok(Environment::single_process(shared_disk(path, engine, purpose)?))
}

/// True for a URL. The package makes absolute paths of all other locations.
fn is_url(path: &Path) -> bool {
    path.to_str().is_some_and(|path| path.contains("://") && !path.starts_with('/'))
}

#[cfg(not(feature = "remote"))]
mod stores {
    use super::{Bound, Environment, Error, FindingRow, ObjectRow, Path, PyAny, PyResult};
    use crate::errors::invalid;

    /// No store can be reached in this build.
    pub(super) enum NoStore {}

    impl NoStore {
        pub(super) fn of(url: &Bound<'_, PyAny>, path: &Path) -> PyResult<Self> {
            let path = path.display();
            Err(invalid(url.py(), &format!("{path}: this build has no object stores (feature `remote`)")))
        }

        pub(super) fn environment(&self, _: &Path) -> Result<Environment, Error> {
            match *self {}
        }

        pub(super) fn probe(&self, _: &Path, _: u32) -> Result<Vec<FindingRow>, Error> {
            match *self {}
        }

        pub(super) fn objects(&self, _: &Path) -> Result<Vec<ObjectRow>, Error> {
            match *self {}
        }
    }
}

#[cfg(feature = "remote")]
mod stores {
    use std::collections::BTreeMap;
    use std::ffi::OsString;
    use std::hash::{DefaultHasher, Hash, Hasher};
    use std::sync::{Arc, Mutex, PoisonError};

    use stepwell_core::remote::cloud::{CloudStore, CredentialSource, StoreSettings};
    use stepwell_core::remote::{ObjectFacts, StoreOptions};
    use stepwell_manager::environment::SystemRng;
    use stepwell_manager::ledger::{LedgerDisk, LedgerPatience};

    use super::{Bound, Environment, Error, FindingRow, ObjectRow, Path, Py, PyAny, PyAnyMethods, PyResult};
    use crate::credentials::Credentials;

    /// The most stores that are kept open.
    const KEPT_STORES: usize = 16;
    /// Variables of the clouds begin so.
    const VARIABLES: [&str; 4] = ["AWS_", "GOOGLE_", "STORAGE_EMULATOR_", "AZURE_"];

    /// A store that is kept open: a new client would connect again.
    struct KeptStore {
        bucket: String,
        settings: String,
        variables: BTreeMap<OsString, OsString>,
        source: Option<Arc<dyn CredentialSource>>,
        store: Arc<CloudStore>,
    }

    static KEPT: Mutex<Vec<KeptStore>> = Mutex::new(Vec::new());

    /// How a store is reached.
    pub(super) struct StoreAccess {
        /// The JSON of [`StoreSettings`].
        settings: String,
        part_bytes: u64,
        credentials: Option<Py<Credentials>>,
    }

    impl StoreAccess {
        pub(super) fn of(url: &Bound<'_, PyAny>, _: &Path) -> PyResult<Self> {
            Ok(Self {
                settings: url.getattr("settings")?.extract()?,
                part_bytes: url.getattr("part_bytes")?.extract()?,
                credentials: url.getattr("credentials")?.extract()?,
            })
        }

        pub(super) fn environment(&self, path: &Path) -> Result<Environment, Error> {
            Ok(Environment::single_process(Arc::new(self.disk(path)?)))
        }

        pub(super) fn probe(&self, path: &Path, races: u32) -> Result<Vec<FindingRow>, Error> {
            let found = self.disk(path)?.probe(path, races)?;
            Ok(found.into_iter().map(|one| (one.name, one.holds, one.detail)).collect())
        }

        pub(super) fn objects(&self, path: &Path) -> Result<Vec<ObjectRow>, Error> {
            let number = |tag: &str| {
                let mut hasher = DefaultHasher::new();
                tag.hash(&mut hasher);
                hasher.finish()
            };
            let row =
                |(name, facts): (String, ObjectFacts)| (name, facts.len, facts.modified, number(&facts.tag));
            Ok(self.disk(path)?.objects(path)?.into_iter().map(row).collect())
        }

        fn disk(&self, path: &Path) -> Result<LedgerDisk, Error> {
            let text = path.to_string_lossy();
            let (scheme, rest) = text.split_once("://").unwrap_or_default();
            let bucket = format!("{scheme}://{}", rest.split('/').next().unwrap_or_default());
            let store = self.store(bucket)?;
            let options = StoreOptions { part_bytes: self.part_bytes, ..StoreOptions::default() };
            Ok(LedgerDisk::new(store, options, LedgerPatience::default(), Arc::new(SystemRng)))
        }

        fn store(&self, bucket: String) -> Result<Arc<CloudStore>, Error> {
            let source = self.credentials.as_ref().map(|credentials| credentials.get().source());
            let address = |source: &Option<Arc<dyn CredentialSource>>| {
                source.as_ref().map(|source| Arc::as_ptr(source).cast::<()>())
            };
            let variables = variables();
            let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
            kept.retain(|one| one.store.is_here());
            if let Some(one) = kept.iter().find(|one| {
                one.bucket == bucket
                    && one.settings == self.settings
                    && one.variables == variables
                    && address(&one.source) == address(&source)
            }) {
                return Ok(Arc::clone(&one.store));
            }
            let settings: StoreSettings = serde_json::from_str(&self.settings)
                .map_err(|error| Error::Invalid(format!("the settings of {bucket}: {error}")))?;
            let store = Arc::new(CloudStore::open(&bucket, &settings, source.as_ref())?);
            let settings = self.settings.clone();
            kept.push(KeptStore { bucket, settings, variables, source, store: Arc::clone(&store) });
            let surplus = kept.len().saturating_sub(KEPT_STORES);
            kept.drain(..surplus);
            Ok(store)
        }
    }

    /// The variables that stores are configured by.
    fn variables() -> BTreeMap<OsString, OsString> {
        let is_theirs = |name: &OsString| {
            name.to_str().is_some_and(|name| VARIABLES.iter().any(|prefix| name.starts_with(prefix)))
        };
        std::env::vars_os().filter(|(name, _)| is_theirs(name)).collect()
    }
}
