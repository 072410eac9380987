//! S3 and stores with its interface, Google Cloud Storage and Azure Blob Storage, by the crate
//! `object_store`.
//!
//! The clients for data and for small requests repeat them. The one that creates entries of the
//! ledger repeats nothing: a request that was answered "exists" after a repetition would hide its
//! own success.
//!
//! Requests run on a runtime of this process, which is made when it is first needed. A forked child
//! cannot use it.

mod clients;
mod container;
mod credentials;
mod pace;
mod sendable;
mod transport;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use crossbeam_channel::{Sender, bounded};
use futures_util::{StreamExt, stream};
use object_store::multipart::PartId;
use object_store::path::Path as Key;
use object_store::{GetOptions, GetRange, ObjectMeta, PutMode, PutOptions, PutPayload};
use tokio::runtime::{Builder, Runtime};

pub use self::clients::StoreSettings;
pub use self::credentials::{CredentialParts, CredentialSource};

use self::clients::{Clients, REQUEST_TIMEOUT};
use self::credentials::SOURCE;
use super::store::{CreateOutcome, Listed, ObjectFacts, PartTag, Store, UploadId};
use crate::sys::{Birth, Buffer};
use crate::{Error, Result};

/// The threads of the runtime. They only move bytes between sockets and memory.
const RUNTIME_THREADS: usize = 2;
/// The slowest rate of a part that is no failure, in bytes per second.
const SLOWEST_RATE: u64 = 1 << 20;
/// The tries of a small object whose body breaks off.
const GET_TRIES: u32 = 3;
/// No repetition of a request begins later than this after the first one.
const RETRY_TIMEOUT: Duration = Duration::from_secs(180);

/// See the module documentation.
pub struct CloudStore {
    url: PathBuf,
    clients: Clients,
    birth: Birth,
}

impl std::fmt::Debug for CloudStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CloudStore").field("url", &self.url).finish_non_exhaustive()
    }
}

impl CloudStore {
    /// Opens the bucket of a URL, such as `s3://bucket`. Without a source, the cloud's own
    /// variables and services give credentials.
    pub fn open(
        url: &str,
        settings: &StoreSettings,
        source: Option<&Arc<dyn CredentialSource>>,
    ) -> Result<Self> {
        let clients = Clients::new(url, settings, source)?;
        Ok(Self { url: PathBuf::from(url), clients, birth: Birth::now() })
    }

    /// Drops credentials of the program that the store has refused. True if the request, which
    /// began then, should be sent once more, with new ones. A refused request has changed nothing.
    fn renews(&self, error: &object_store::Error, began: Instant) -> bool {
        let credentials = self.clients.credentials.as_ref().filter(|_| is_refused(error));
        credentials.inspect(|credentials| credentials.forget(began)).is_some()
    }

    /// True in the process that opened it. A forked child cannot use it.
    pub fn is_here(&self) -> bool {
        self.birth.is_here()
    }

    fn key(&self, key: &str) -> Result<Key> {
        Key::parse(key).map_err(|error| Error::Misuse(format!("{}: {error}", self.url.join(key).display())))
    }

    /// The prefix of a listing. The store adds the `/`.
    fn prefix(&self, prefix: &str) -> Result<Option<Key>> {
        let prefix = prefix.trim_end_matches('/');
        if prefix.is_empty() { Ok(None) } else { self.key(prefix).map(Some) }
    }

    /// Waits for requests that move so many bytes. They are sent again once if the store refuses
    /// credentials that the program can renew.
    fn answer<T>(
        &self,
        op: &'static str,
        key: &str,
        bytes: usize,
        mut requests: impl AsyncFnMut() -> object_store::Result<T>,
    ) -> Result<object_store::Result<T>> {
        if !self.birth.is_here() {
            return Err(Error::Forked("object store"));
        }
        let limit = RETRY_TIMEOUT + REQUEST_TIMEOUT + Duration::from_secs(bytes as u64 / SLOWEST_RATE);
        let began = Instant::now();
        let answered = async {
            match requests().await {
                Err(error) if self.renews(&error, began) => requests().await,
                answered => answered,
            }
        };
        runtime()?.block_on(async { tokio::time::timeout(limit, answered).await }).map_err(|_| {
            Error::io(op, self.url.join(key), std::io::Error::from_raw_os_error(libc::ETIMEDOUT))
        })
    }

    /// As [`CloudStore::answer`], with the error of this crate.
    fn wait<T>(
        &self,
        op: &'static str,
        key: &str,
        bytes: usize,
        requests: impl AsyncFnMut() -> object_store::Result<T>,
    ) -> Result<T> {
        self.answer(op, key, bytes, requests)?.map_err(|error| of_store(op, self.url.join(key), &error))
    }
}

/// The runtime of this process. A forked child of the process that made it has none of its threads.
fn runtime() -> Result<&'static Runtime> {
    static RUNTIME: OnceLock<Option<(Runtime, Birth)>> = OnceLock::new();
    let made = RUNTIME.get_or_init(|| {
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(RUNTIME_THREADS).thread_name("stepwell-store").enable_all();
        builder.build().ok().map(|runtime| (runtime, Birth::now()))
    });
    match made {
        Some((runtime, birth)) if birth.is_here() => Ok(runtime),
        Some(_) => Err(Error::Forked("object store")),
        None => {
            let source = std::io::Error::from_raw_os_error(libc::EAGAIN);
            Err(Error::io("start threads for", "<object store>", source))
        }
    }
}

/// The message of an error, without the queries of URLs and the body of the answer: they may have
/// keys and signatures. The code of the answer stays.
fn without_secrets(error: &object_store::Error) -> String {
    let message = without_queries(&error.to_string());
    if message.contains("redirect without LOCATION") {
        return "the bucket is in another region. Set the variable AWS_REGION".to_owned();
    }
    if message.contains("Account must be specified") {
        return "the account is missing. Set the variable AZURE_STORAGE_ACCOUNT_NAME, or name it in the URL, \
                as abfss://container@account.dfs.core.windows.net/run"
            .to_owned();
    }
    let Some((before, body)) = message.split_once('<') else { return message };
    let code = body.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>"));
    let code = code.map_or_else(String::new, |(code, _)| format!(" ({code})"));
    format!("{}{code}", before.trim_end_matches([' ', ':', '\n']))
}

/// A text without the queries of its URLs.
fn without_queries(text: &str) -> String {
    let word = |word: &str| {
        let query = word.find("://").and_then(|_| word.find('?'));
        let end = query.map(|at| word[at..].find([')', '"', '\'']).map_or(word.len(), |end| at + end));
        match (query, end) {
            (Some(at), Some(end)) => format!("{}{}", &word[..at], &word[end..]),
            _ => word.to_owned(),
        }
    };
    text.split(' ').map(word).collect::<Vec<String>>().join(" ")
}

/// Parts of the requests that ask a virtual machine for credentials. They are sent if nothing else
/// gives some.
const OF_MACHINES: [&str; 4] =
    ["/latest/api/token", "/latest/meta-data/iam", "/computeMetadata/v1/", "/metadata/identity/"];

/// The variables that give credentials, by the scheme of a URL.
fn credential_variables(url: &Path) -> &'static str {
    match url.to_string_lossy().split("://").next() {
        Some("s3") => "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        Some("gs") => "GOOGLE_APPLICATION_CREDENTIALS",
        _ => "AZURE_STORAGE_ACCOUNT_KEY",
    }
}

/// True if a store has refused the credentials of a request. The answer to a request for facts has
/// no body that says so.
fn is_refused(error: &object_store::Error) -> bool {
    use object_store::Error as E;
    let says = |code: &str| error.to_string().contains(code);
    match error {
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => true,
        E::Generic { .. } => says("ExpiredToken") || (is_status(error, 400) && !says("<")),
        _ => false,
    }
}

/// True if a store has answered with a status that the library has no error for.
fn is_status(error: &object_store::Error, status: u16) -> bool {
    error.to_string().contains(&format!("status code: {status}"))
}

fn of_store(op: &'static str, path: PathBuf, error: &object_store::Error) -> Error {
    use object_store::Error as E;
    let message = error.to_string();
    let says = |code: &str| message.contains(code);
    let fail = |kind, what: String| Error::io(op, path.clone(), std::io::Error::new(kind, what));
    if OF_MACHINES.iter().any(|part| says(part)) {
        let what = format!(
            "no credentials were found. Set {}, or give them in another way ({})",
            credential_variables(&path),
            without_secrets(error)
        );
        return fail(std::io::ErrorKind::PermissionDenied, what);
    }
    if says("NoSuchBucket") || says("ContainerNotFound") {
        let what = "there is no such bucket or container. Create it, or check its name and the endpoint";
        return fail(std::io::ErrorKind::Other, what.to_owned());
    }
    let kind = match error {
        E::Generic { store: SOURCE, source } => {
            return fail(std::io::ErrorKind::PermissionDenied, source.to_string());
        }
        E::NotFound { .. } => return Error::io(op, path, std::io::Error::from_raw_os_error(libc::ENOENT)),
        E::InvalidPath { source } => {
            let what = format!(
                "a key below this prefix is none of ours, and cannot be listed ({source}). \
                 Move or delete this object"
            );
            return fail(std::io::ErrorKind::InvalidData, what);
        }
        E::AlreadyExists { .. } | E::Precondition { .. } => std::io::ErrorKind::AlreadyExists,
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => std::io::ErrorKind::PermissionDenied,
        E::NotSupported { .. } | E::NotImplemented { .. } => std::io::ErrorKind::Unsupported,
        _ => std::io::ErrorKind::Other,
    };
    fail(kind, without_secrets(error))
}

/// Returns the same facts of an object from a listing and from the answer about itself: the latter
/// has whole seconds, and quotes around the tag. Some stores list milliseconds, or no quotes.
fn facts(meta: &ObjectMeta) -> ObjectFacts {
    let tag = meta.e_tag.as_deref().unwrap_or_default();
    ObjectFacts {
        len: meta.size,
        tag: tag.trim_matches('"').to_owned(),
        modified: meta.last_modified.timestamp().saturating_mul(1_000_000_000),
    }
}

/// A buffer that a request has borrowed. It goes back when the request is over.
struct Lent {
    buffer: Option<Buffer>,
    len: usize,
    back: Sender<Buffer>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.buffer.as_ref().and_then(|buffer| buffer.get(..self.len)).unwrap_or_default()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            // Nobody waits for it only in a queue that was given up.
            let _ = self.back.send(buffer);
        }
    }
}

impl Store for CloudStore {
    fn url(&self) -> &Path {
        &self.url
    }

    fn create(&self, key: &str, bytes: &[u8]) -> Result<CreateOutcome> {
        use object_store::Error as E;
        let (at, payload) = (self.key(key)?, PutPayload::from(bytes.to_vec()));
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let answered = self.answer("create", key, bytes.len(), async || {
            self.clients.entries.put_opts(&at, payload.clone(), options.clone()).await
        });
        match answered {
            Ok(Ok(_)) => Ok(CreateOutcome::Stored),
            Ok(Err(E::AlreadyExists { .. } | E::Precondition { .. })) => Ok(CreateOutcome::Exists),
            Ok(Err(
                error @ (E::NotFound { .. }
                | E::PermissionDenied { .. }
                | E::Unauthenticated { .. }
                | E::NotSupported { .. }
                | E::NotImplemented { .. }),
            )) => Err(of_store("create", self.url.join(key), &error)),
            Ok(Err(error)) => {
                tracing::debug!(key, error = without_secrets(&error), "the outcome of a create is unknown");
                Ok(CreateOutcome::Unknown)
            }
            Err(error @ (Error::Forked(_) | Error::Misuse(_))) => Err(error),
            Err(_) => Ok(CreateOutcome::Unknown),
        }
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        let (at, payload) = (self.key(key)?, PutPayload::from(bytes.to_vec()));
        self.wait("write", key, bytes.len(), async || {
            self.clients.data.put_opts(&at, payload.clone(), PutOptions::default()).await
        })
        .map(drop)
    }

    fn look(&self, key: &str) -> Result<Option<ObjectFacts>> {
        let at = self.key(key)?;
        let options = GetOptions { head: true, ..GetOptions::default() };
        match self.wait("look at", key, 0, async || self.clients.small.get_opts(&at, options.clone()).await) {
            Ok(found) => Ok(Some(facts(&found.meta))),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The library repeats requests, but not bodies that break off.
    fn get(&self, key: &str, limit: u64) -> Result<Vec<u8>> {
        let at = self.key(key)?;
        let bytes = usize::try_from(limit).unwrap_or(usize::MAX).min(64 << 20);
        let mut tries = 0;
        let got = loop {
            tries += 1;
            let got = self.wait("read", key, bytes, async || {
                let found = self.clients.small.get_opts(&at, GetOptions::default()).await?;
                let len = found.meta.size;
                if len > limit {
                    return Ok(Err(len));
                }
                found.bytes().await.map(Ok)
            });
            match got {
                Err(error) if tries < GET_TRIES && error.errno().is_none() => {}
                got => break got?,
            }
        };
        match got {
            Ok(bytes) => Ok(bytes.to_vec()),
            Err(found) => {
                let what = format!("the length of {}", self.url.join(key).display());
                Err(Error::Limit { what, found, limit })
            }
        }
    }

    fn read(&self, key: &str, offset: u64, into: &mut [u8]) -> Result<usize> {
        let (at, wanted) = (self.key(key)?, into.len());
        let range: Range<u64> = offset..offset + wanted as u64;
        let options = GetOptions { range: Some(GetRange::Bounded(range)), ..GetOptions::default() };
        let read = self.answer("read", key, wanted, async || {
            let mut pieces = self.clients.data.get_opts(&at, options.clone()).await?.into_stream();
            let mut done = 0;
            while let Some(piece) = pieces.next().await {
                let piece = piece?;
                let Some(place) = into.get_mut(done..done + piece.len()) else { break };
                place.copy_from_slice(&piece);
                done += piece.len();
            }
            Ok(done)
        });
        match read? {
            // The range begins behind the end of the object.
            Err(error) if is_status(&error, 416) => Ok(0),
            read => read.map_err(|error| of_store("read", self.url.join(key), &error)),
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<Listed>> {
        let at = self.prefix(prefix)?;
        let object = |meta: &ObjectMeta| Listed::Object(meta.location.to_string(), facts(meta));
        let found =
            self.wait("list", prefix, 0, async || self.clients.small.list_with_delimiter(at.as_ref()).await)?;
        let prefixes = found.common_prefixes.iter().map(|below| Listed::Prefix(format!("{below}/")));
        Ok(prefixes.chain(found.objects.iter().map(object)).collect())
    }

    fn list_below(&self, prefix: &str) -> Result<Vec<(String, ObjectFacts)>> {
        let at = self.prefix(prefix)?;
        self.wait("list", prefix, 0, async || {
            let mut objects = self.clients.small.list(at.as_ref());
            let mut found = Vec::new();
            while let Some(meta) = objects.next().await {
                let meta = meta?;
                found.push((meta.location.to_string(), facts(&meta)));
            }
            Ok(found)
        })
    }

    fn delete(&self, keys: &[String]) -> Result<()> {
        let at = keys.iter().map(|key| self.key(key)).collect::<Result<Vec<Key>>>()?;
        self.wait("remove", keys.first().map_or("", String::as_str), 0, async || {
            let at = stream::iter(at.clone().into_iter().map(Ok));
            let mut answers = self.clients.small.delete_stream(at.boxed());
            while let Some(answer) = answers.next().await {
                match answer {
                    Err(object_store::Error::NotFound { .. }) => {}
                    answer => drop(answer?),
                }
            }
            Ok(())
        })
    }

    fn start_upload(&self, key: &str) -> Result<UploadId> {
        let at = self.key(key)?;
        self.wait("create", key, 0, async || self.clients.data.create_multipart(&at).await).map(UploadId)
    }

    fn put_part(
        &self,
        key: &str,
        upload: &UploadId,
        number: u32,
        part: Buffer,
        len: usize,
    ) -> (Buffer, Result<PartTag>) {
        let at = match self.key(key) {
            Ok(at) => at,
            Err(error) => return (part, Err(error)),
        };
        let (back, returned) = bounded(1);
        let lent = Lent { buffer: Some(part), len, back };
        let payload = PutPayload::from(Bytes::from_owner(lent));
        let index = (number - 1) as usize;
        let stored = self.wait("write", key, len, async || {
            self.clients.data.put_part(&at, &upload.0, index, payload.clone()).await
        });
        drop(payload);
        let stored = stored.map(|part| PartTag(part.content_id));
        // The last copy of the request gives it back.
        match returned.recv() {
            Ok(part) => (part, stored),
            Err(_) => unreachable!("a lent buffer is sent back when it is dropped"),
        }
    }

    fn complete_upload(&self, key: &str, upload: &UploadId, parts: &[PartTag]) -> Result<()> {
        let at = self.key(key)?;
        let parts: Vec<PartId> = parts.iter().map(|part| PartId { content_id: part.0.clone() }).collect();
        self.wait("write", key, 0, async || {
            self.clients.data.complete_multipart(&at, &upload.0, parts.clone()).await
        })
        .map(drop)
    }

    fn abort_upload(&self, key: &str, upload: &UploadId) -> Result<()> {
        let at = self.key(key)?;
        self.wait("abort", key, 0, async || self.clients.data.abort_multipart(&at, &upload.0).await)
    }
}

#[cfg(test)]
mod tests {
    use super::without_queries;

    #[test]
    fn queries_of_urls_are_not_shown() {
        let text = "error of GET https://a.b/c?sig=wonderful&x=1 in 1ms (https://d?e=wonderful): why?";
        assert_eq!(without_queries(text), "error of GET https://a.b/c in 1ms (https://d): why?");
    }
}
