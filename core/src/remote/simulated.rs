//! A store in memory, for tests. A script decides what becomes of each request.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::store::{CreateOutcome, Listed, ObjectFacts, PartTag, Store, UploadId};
use crate::sys::Buffer;
use crate::{Error, Result};

/// The fate of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is served.
    Served,
    /// It is served, and the answer is lost.
    AnswerLost,
    /// It is not served, and there is no answer.
    Dropped,
    /// It is served when [`SimStore::land_late`] is called. There is no answer.
    Late,
    /// A create is served, and the answer is "exists", as from a library that tried again.
    SaidToExist,
    /// A create is served although the key is taken, as by a store that ignores conditions.
    Overwritten,
    /// Everything fails from now on, as for a process that was killed.
    Killed,
    /// Served, and then everything fails.
    KilledAfterwards,
}

/// A request, as scripts see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimRequest {
    /// Its number, from 0 on.
    pub number: u64,
    /// The name of the call.
    pub call: &'static str,
    /// Its key or prefix.
    pub key: String,
}

type Script = Box<dyn FnMut(&SimRequest) -> Fate + Send>;

#[derive(Default)]
struct Objects {
    stored: BTreeMap<String, (Arc<Vec<u8>>, ObjectFacts)>,
    uploads: BTreeMap<String, BTreeMap<u32, Vec<u8>>>,
    /// Writes that have not landed: if the key must be free, the key and the bytes.
    late: Vec<(bool, String, Vec<u8>)>,
    clock: i64,
}

impl Objects {
    fn store(&mut self, key: &str, bytes: Vec<u8>) {
        self.clock += 1;
        let facts =
            ObjectFacts { len: bytes.len() as u64, tag: format!("{:x}", self.clock), modified: self.clock };
        self.stored.insert(key.to_owned(), (Arc::new(bytes), facts));
    }
}

/// A process's client of a store in memory. Clients of one store share its objects.
pub struct SimStore {
    url: PathBuf,
    objects: Arc<Mutex<Objects>>,
    client: Mutex<Client>,
}

struct Client {
    requests: Vec<SimRequest>,
    script: Script,
    is_dead: bool,
}

impl fmt::Debug for SimStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimStore").field("url", &self.url).finish_non_exhaustive()
    }
}

impl SimStore {
    /// An empty store.
    pub fn new(url: &str) -> Arc<Self> {
        Self::over(Path::new(url), Arc::default())
    }

    fn over(url: &Path, objects: Arc<Mutex<Objects>>) -> Arc<Self> {
        let script = Box::new(|_: &SimRequest| Fate::Served);
        let client = Mutex::new(Client { requests: Vec::new(), script, is_dead: false });
        Arc::new(Self { url: url.to_owned(), objects, client })
    }

    /// A client of another process.
    pub fn process(&self) -> Arc<Self> {
        Self::over(&self.url, Arc::clone(&self.objects))
    }

    /// Lets a script decide on every request from now on.
    pub fn script(&self, script: impl FnMut(&SimRequest) -> Fate + Send + 'static) {
        self.client().script = Box::new(script);
    }

    /// The requests of this client so far.
    pub fn requests(&self) -> Vec<SimRequest> {
        self.client().requests.clone()
    }

    /// Serves what was late.
    pub fn land_late(&self) {
        let mut objects = self.objects();
        for (is_create, key, bytes) in std::mem::take(&mut objects.late) {
            if !(is_create && objects.stored.contains_key(&key)) {
                objects.store(&key, bytes);
            }
        }
    }

    /// All keys.
    pub fn keys(&self) -> Vec<String> {
        self.objects().stored.keys().cloned().collect()
    }

    /// The bytes of an object.
    pub fn bytes(&self, key: &str) -> Option<Vec<u8>> {
        self.objects().stored.get(key).map(|(bytes, _)| bytes.to_vec())
    }

    /// Changes the bytes of an object without a request. False: there is no such object.
    pub fn corrupt(&self, key: &str, change: impl FnOnce(&mut Vec<u8>)) -> bool {
        let mut objects = self.objects();
        let found = objects.stored.get_mut(key);
        found.map(|(bytes, _)| change(Arc::make_mut(bytes))).is_some()
    }

    /// The number of uploads that have begun and not ended.
    pub fn open_uploads(&self) -> usize {
        self.objects().uploads.len()
    }

    fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn client(&self) -> MutexGuard<'_, Client> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fate(&self, call: &'static str, key: &str) -> Fate {
        let mut client = self.client();
        if client.is_dead {
            return Fate::Killed;
        }
        let request = SimRequest { number: client.requests.len() as u64, call, key: key.to_owned() };
        let fate = (client.script)(&request);
        client.requests.push(request);
        client.is_dead = matches!(fate, Fate::Killed | Fate::KilledAfterwards);
        fate
    }

    fn error(&self, op: &'static str, key: &str, errno: i32) -> Error {
        Error::io(op, self.url.join(key), std::io::Error::from_raw_os_error(errno))
    }

    /// Performs a request whose outcome is certain only if it is answered.
    fn perform<T>(
        &self,
        call: &'static str,
        key: &str,
        serve: impl FnOnce(&mut Objects) -> Result<T>,
    ) -> Result<T> {
        let lost = || Err(self.error(call, key, libc::ETIMEDOUT));
        match self.fate(call, key) {
            Fate::Served | Fate::SaidToExist | Fate::Overwritten => serve(&mut self.objects()),
            Fate::AnswerLost | Fate::KilledAfterwards => serve(&mut self.objects()).and_then(|_| lost()),
            Fate::Dropped | Fate::Late | Fate::Killed => lost(),
        }
    }
}

impl Store for SimStore {
    fn url(&self) -> &Path {
        &self.url
    }

    fn create(&self, key: &str, bytes: &[u8]) -> Result<CreateOutcome> {
        let create = || {
            let mut objects = self.objects();
            if objects.stored.contains_key(key) {
                return CreateOutcome::Exists;
            }
            objects.store(key, bytes.to_vec());
            CreateOutcome::Stored
        };
        Ok(match self.fate("create", key) {
            Fate::Served => create(),
            Fate::SaidToExist => {
                create();
                CreateOutcome::Exists
            }
            Fate::Overwritten => {
                self.objects().store(key, bytes.to_vec());
                CreateOutcome::Stored
            }
            Fate::AnswerLost | Fate::KilledAfterwards => {
                create();
                CreateOutcome::Unknown
            }
            Fate::Late => {
                self.objects().late.push((true, key.to_owned(), bytes.to_vec()));
                CreateOutcome::Unknown
            }
            Fate::Dropped => CreateOutcome::Unknown,
            // Nobody hears this answer. It ends the process soon.
            Fate::Killed => return Err(self.error("create", key, libc::ETIMEDOUT)),
        })
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        self.perform("put", key, |objects| {
            objects.store(key, bytes.to_vec());
            Ok(())
        })
    }

    fn look(&self, key: &str) -> Result<Option<ObjectFacts>> {
        self.perform("look", key, |objects| Ok(objects.stored.get(key).map(|(_, facts)| facts.clone())))
    }

    fn get(&self, key: &str, limit: u64) -> Result<Vec<u8>> {
        self.perform("get", key, |objects| {
            let Some((bytes, _)) = objects.stored.get(key) else {
                return Err(self.error("read", key, libc::ENOENT));
            };
            if bytes.len() as u64 > limit {
                let what = format!("the length of {}", self.url.join(key).display());
                return Err(Error::Limit { what, found: bytes.len() as u64, limit });
            }
            Ok(bytes.to_vec())
        })
    }

    fn read(&self, key: &str, offset: u64, into: &mut [u8]) -> Result<usize> {
        self.perform("read", key, |objects| {
            let Some((bytes, _)) = objects.stored.get(key) else {
                return Err(self.error("read", key, libc::ENOENT));
            };
            let rest =
                usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..)).unwrap_or_default();
            let count = rest.len().min(into.len());
            if let (Some(into), Some(rest)) = (into.get_mut(..count), rest.get(..count)) {
                into.copy_from_slice(rest);
            }
            Ok(count)
        })
    }

    fn list(&self, prefix: &str) -> Result<Vec<Listed>> {
        self.perform("list", prefix, |objects| {
            let mut found: Vec<Listed> = Vec::new();
            for (key, (_, facts)) in objects.stored.range(prefix.to_owned()..) {
                let Some(below) = key.strip_prefix(prefix) else { break };
                let listed = match below.split_once('/') {
                    Some((name, _)) => Listed::Prefix(format!("{prefix}{name}/")),
                    None => Listed::Object(key.clone(), facts.clone()),
                };
                if found.last() != Some(&listed) {
                    found.push(listed);
                }
            }
            Ok(found)
        })
    }

    fn list_below(&self, prefix: &str) -> Result<Vec<(String, ObjectFacts)>> {
        self.perform("list", prefix, |objects| {
            let below = objects.stored.range(prefix.to_owned()..);
            let below = below.take_while(|(key, _)| key.starts_with(prefix));
            Ok(below.map(|(key, (_, facts))| (key.clone(), facts.clone())).collect())
        })
    }

    fn delete(&self, keys: &[String]) -> Result<()> {
        self.perform("delete", keys.first().map_or("", String::as_str), |objects| {
            for key in keys {
                objects.stored.remove(key);
            }
            Ok(())
        })
    }

    fn start_upload(&self, key: &str) -> Result<UploadId> {
        self.perform("start_upload", key, |objects| {
            objects.clock += 1;
            let id = format!("upload-{}", objects.clock);
            objects.uploads.insert(id.clone(), BTreeMap::new());
            Ok(UploadId(id))
        })
    }

    fn put_part(
        &self,
        key: &str,
        upload: &UploadId,
        number: u32,
        part: Buffer,
        len: usize,
    ) -> (Buffer, Result<PartTag>) {
        let stored = self.perform("put_part", key, |objects| {
            let Some(parts) = objects.uploads.get_mut(&upload.0) else {
                return Err(self.error("write", key, libc::ENOENT));
            };
            parts.insert(number, part.get(..len).unwrap_or_default().to_vec());
            Ok(PartTag(format!("{number}")))
        });
        (part, stored)
    }

    fn complete_upload(&self, key: &str, upload: &UploadId, parts: &[PartTag]) -> Result<()> {
        self.perform("complete_upload", key, |objects| {
            let Some(stored) = objects.uploads.remove(&upload.0) else {
                return Err(self.error("complete", key, libc::ENOENT));
            };
            let expected = (1..=parts.len()).map(|number| PartTag(number.to_string()));
            if !expected.eq(parts.iter().cloned()) || stored.len() != parts.len() {
                return Err(self.error("complete", key, libc::EINVAL));
            }
            objects.store(key, stored.into_values().flatten().collect());
            Ok(())
        })
    }

    fn abort_upload(&self, key: &str, upload: &UploadId) -> Result<()> {
        self.perform("abort_upload", key, |objects| {
            objects.uploads.remove(&upload.0);
            Ok(())
        })
    }
}
