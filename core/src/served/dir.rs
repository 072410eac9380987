//! A served directory and its files, as their readers see them.

use std::any::Any;
use std::collections::BTreeMap;
use std::net::{Shutdown, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::client::{AnswerBytes, Connections};
use super::protocol::{Answer, MAX_READ, Place, Request};
use crate::io::{Dir, Entry, EntryKind, File, Lock, LockKind, Rename, Stat};
use crate::{Error, Result};

/// A directory on another machine. It is read only. Its identity goes with each request: another
/// directory may have its name by now. Under a lock, it is read even if it has lost its name.
pub struct ServedDir {
    client: Arc<Connections>,
    /// Relative to the served directory. Empty: that directory.
    below: String,
    /// `None`: the served directory.
    id: Option<(u64, u64)>,
    path: PathBuf,
}

impl ServedDir {
    /// The directory that a server serves.
    pub fn new(client: Arc<Connections>) -> Self {
        let path = client.path().to_owned();
        Self { client, below: String::new(), id: None, path }
    }

    #[cfg(test)]
    pub(super) fn client(&self) -> &Connections {
        &self.client
    }

    fn place(&self, name: &str) -> Place {
        Place { dir: self.below.clone(), id: self.id, name: name.to_owned() }
    }

    fn at(&self, name: &str) -> PathBuf {
        if name.is_empty() { self.path.clone() } else { self.path.join(name) }
    }

    fn ask(&self, op: &'static str, name: &str, request: &Request) -> Result<Answer> {
        self.client.ask(op, &self.at(name), request, AnswerBytes::Nowhere)
    }

    fn unexpected<T>(&self, answer: &Answer) -> Result<T> {
        Err(Error::internal(format!("an answer of {}", self.path.display()), format!("{answer:?}")))
    }

    fn refuse<T>(&self, op: &'static str, name: &str) -> Result<T> {
        let why = "only its own machine changes this directory";
        let refused = std::io::Error::new(std::io::ErrorKind::ReadOnlyFilesystem, why);
        Err(Error::io(op, self.at(name), refused))
    }

    fn identity(&self, name: &str) -> Result<((u64, u64), i64)> {
        match self.ask("open", name, &Request::Identity(self.place(name)))? {
            Answer::Identity { id, changed } => Ok((id, changed)),
            answer => self.unexpected(&answer),
        }
    }
}

impl Dir for ServedDir {
    fn path(&self) -> &Path {
        &self.path
    }

    fn open_dir(&self, name: &str) -> Result<Arc<dyn Dir>> {
        let (id, _) = self.identity(name)?;
        let below = if self.below.is_empty() { name.to_owned() } else { format!("{}/{name}", self.below) };
        Ok(Arc::new(Self { client: Arc::clone(&self.client), below, id: Some(id), path: self.at(name) }))
    }

    fn create_dir(&self, name: &str) -> Result<Arc<dyn Dir>> {
        self.refuse("create", name)
    }

    fn unsorted_entries(&self) -> Result<Vec<Entry>> {
        match self.ask("list", "", &Request::Entries(self.place("")))? {
            Answer::Entries(entries) => Ok(entries.into_iter().map(Into::into).collect()),
            answer => self.unexpected(&answer),
        }
    }

    fn stat(&self, name: &str) -> Result<Option<Stat>> {
        match self.ask("stat", name, &Request::Stat(self.place(name)))? {
            Answer::Stat(stat) => Ok(stat.map(Into::into)),
            answer => self.unexpected(&answer),
        }
    }

    fn id(&self) -> Result<(u64, u64)> {
        self.id.map_or_else(|| Ok(self.identity("")?.0), Ok)
    }

    fn changed(&self) -> Result<i64> {
        Ok(self.identity("")?.1)
    }

    fn create_file(&self, name: &str, _: u64) -> Result<Arc<dyn File>> {
        self.refuse("create", name)
    }

    fn overwrite_file(&self, name: &str, _: u64) -> Result<Arc<dyn File>> {
        self.refuse("overwrite", name)
    }

    fn extend_file(&self, name: &str, _: u64) -> Result<(Arc<dyn File>, u64)> {
        self.refuse("extend", name)
    }

    fn open_file(&self, name: &str) -> Result<Arc<dyn File>> {
        let place = self.place(name);
        match self.ask("open", name, &Request::Open(place.clone()))? {
            Answer::Length(len) => {
                let (client, path) = (Arc::clone(&self.client), self.at(name));
                Ok(Arc::new(ServedFile { client, place, path, len }))
            }
            answer => self.unexpected(&answer),
        }
    }

    fn lengths(&self, name: &str) -> Result<Option<BTreeMap<String, u64>>> {
        match self.ask("list", name, &Request::Lengths(self.place(name)))? {
            Answer::Lengths(lengths) => Ok(Some(lengths)),
            answer => self.unexpected(&answer),
        }
    }

    fn read_file(&self, name: &str, limit: u64) -> Result<Vec<u8>> {
        let request = Request::ReadFile { file: self.place(name), limit };
        let mut bytes = Vec::new();
        self.client.ask("read", &self.at(name), &request, AnswerBytes::File(&mut bytes, limit))?;
        Ok(bytes)
    }

    fn write_file(&self, name: &str, _: &[u8]) -> Result<()> {
        self.refuse("write", name)
    }

    fn rename(&self, from: &str, _: &str, _: Rename) -> Result<()> {
        self.refuse("rename", from)
    }

    fn remove_file(&self, name: &str) -> Result<()> {
        self.refuse("remove", name)
    }

    fn remove_dir(&self, name: &str) -> Result<()> {
        self.refuse("remove", name)
    }

    fn sync(&self) -> Result<()> {
        self.refuse("fsync", "")
    }

    fn try_lock(&self, name: &str, kind: LockKind, create: bool) -> Result<Option<Box<dyn Lock>>> {
        if kind == LockKind::Exclusive || create {
            return self.refuse("lock", name);
        }
        let id = self.stat(name)?.map_or((0, 0), |stat| stat.id);
        match self.client.ask_alone("lock", &self.at(name), &Request::Lock(self.place(name)))? {
            (connection, Answer::Locked(true)) => {
                keep_alive(&connection).map_err(|error| Error::io("lock", self.at(name), error))?;
                Ok(Some(Box::new(ServedLock { connection, id })))
            }
            (_, Answer::Locked(false)) => Ok(None),
            (_, answer) => self.unexpected(&answer),
        }
    }

    fn free_bytes(&self) -> Result<u64> {
        self.refuse("ask for free space of", "")
    }
}

/// A lock that a server holds for this connection.
struct ServedLock {
    connection: TcpStream,
    id: (u64, u64),
}

impl Lock for ServedLock {
    fn id(&self) -> Result<(u64, u64)> {
        Ok(self.id)
    }
}

impl Drop for ServedLock {
    fn drop(&mut self) {
        // A forked child may have the socket too, so closing it here would not end it.
        let _ = self.connection.shutdown(Shutdown::Both);
    }
}

/// A file of a served directory.
pub(super) struct ServedFile {
    client: Arc<Connections>,
    place: Place,
    path: PathBuf,
    len: u64,
}

impl ServedFile {
    /// Reads until the buffer is full, or the file ends.
    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> Result<usize> {
        let mut done = 0;
        while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let offset = offset.saturating_add(done as u64);
            let most = rest.len().min(MAX_READ);
            let request = Request::Read { file: self.place.clone(), offset, len: most };
            let Some(rest) = rest.get_mut(..most) else { break };
            match self.client.ask("read", &self.path, &request, AnswerBytes::Buffer(rest))? {
                Answer::Bytes(0) => break,
                Answer::Bytes(read) => done += read,
                answer => {
                    let expected = format!("bytes of {}", self.path.display());
                    return Err(Error::internal(expected, format!("{answer:?}")));
                }
            }
        }
        Ok(done)
    }

    fn refuse<T>() -> Result<T> {
        Err(Error::internal("a read of a file on another machine", "a write"))
    }
}

impl File for ServedFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn len(&self) -> Result<u64> {
        Ok(self.len)
    }

    fn set_len(&self, _: u64) -> Result<()> {
        Self::refuse()
    }

    fn sync(&self) -> Result<()> {
        Self::refuse()
    }

    fn read_at(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let left = usize::try_from(self.len.saturating_sub(offset)).unwrap_or(usize::MAX);
        let mut bytes = vec![0; len.min(left)];
        let read = self.read(offset, &mut bytes)?;
        bytes.truncate(read);
        Ok(bytes)
    }

    fn cached(&self, _: u64, _: u64) -> Option<u64> {
        None
    }

    /// All files of a machine have the same client.
    fn source(&self) -> u64 {
        Arc::as_ptr(&self.client).addr() as u64
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Makes the kernel find out within a minute that the other machine is gone.
pub(super) fn keep_alive(stream: &TcpStream) -> std::io::Result<()> {
    use rustix::net::sockopt;
    use std::time::Duration;

    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(20))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(10))?;
    Ok(sockopt::set_tcp_keepcnt(stream, 3)?)
}

/// Returns the lengths of all files below a directory, by their paths in it.
pub fn lengths_below(dir: &Arc<dyn Dir>) -> Result<BTreeMap<String, u64>> {
    if let Some(known) = dir.lengths("")? {
        return Ok(known);
    }
    let mut found = BTreeMap::new();
    add_lengths(dir, "", &mut found)?;
    Ok(found)
}

fn add_lengths(dir: &Arc<dyn Dir>, above: &str, found: &mut BTreeMap<String, u64>) -> Result<()> {
    for entry in dir.unsorted_entries()? {
        let path = if above.is_empty() { entry.name.clone() } else { format!("{above}/{}", entry.name) };
        match entry.kind {
            EntryKind::Dir => add_lengths(&dir.open_dir(&entry.name)?, &path, found)?,
            EntryKind::File => {
                let stat = dir.stat(&entry.name)?;
                found.extend(stat.map(|stat| (path, stat.len)));
            }
            EntryKind::Other => {}
        }
    }
    Ok(())
}
