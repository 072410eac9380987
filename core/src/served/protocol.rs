//! Requests and answers. A connection begins with the token. A message is the length of its head,
//! the head as JSON, and the bytes that the head announces.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::io::{Entry, EntryKind, Stat};

/// The most bytes that one request reads.
pub(super) const MAX_READ: usize = 4 << 20;
/// The most bytes of a request.
pub(super) const MAX_REQUEST: u32 = 1 << 20;
/// The most bytes of an answer's head: a listing of a large directory.
pub(super) const MAX_ANSWER: u32 = 256 << 20;
/// The longest wait for the token of a new connection.
const TOKEN_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest wait for the rest of a message that has begun, and for an answer.
pub(super) const MESSAGE_TIMEOUT: Duration = Duration::from_secs(60);

/// A file or directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Place {
    /// A directory that the reader has opened, relative to the served one.
    pub(super) dir: String,
    /// The identity of that directory: another one may have its name by now. `None`: it is the
    /// served one.
    pub(super) id: Option<(u64, u64)>,
    /// The path in that directory. Empty: that directory.
    pub(super) name: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// The identity of a directory, and the time of its last change.
    Identity(Place),
    Entries(Place),
    Stat(Place),
    /// The lengths of all files below a directory.
    Lengths(Place),
    /// The length of a file.
    Open(Place),
    /// A part of a file.
    Read {
        file: Place,
        offset: u64,
        len: usize,
    },
    /// A whole small file.
    ReadFile {
        file: Place,
        limit: u64,
    },
    /// A shared lock, until the connection ends.
    Lock(Place),
}

/// The answer to a request that succeeded.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    Welcome,
    Identity {
        id: (u64, u64),
        changed: i64,
    },
    Entries(Vec<WireEntry>),
    Stat(Option<WireStat>),
    Lengths(BTreeMap<String, u64>),
    Length(u64),
    /// This many bytes follow.
    Bytes(usize),
    /// False: somebody else holds the lock.
    Locked(bool),
}

/// A failure of a request.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Failure {
    errno: Option<i32>,
    /// A limit that is exceeded: what was found, and the limit.
    limit: Option<(u64, u64)>,
    message: String,
}

impl Failure {
    pub(super) fn of(error: &Error) -> Self {
        let limit = match error.inner() {
            Error::Limit { found, limit, .. } => Some((*found, *limit)),
            _ => None,
        };
        let missing = || error.is_not_found().then(|| rustix::io::Errno::NOENT.raw_os_error());
        Self { errno: error.errno().or_else(missing), limit, message: error.to_string() }
    }

    /// Returns the error of an operation on a file.
    pub(super) fn error(self, op: &'static str, path: std::path::PathBuf) -> Error {
        match (self.limit, self.errno) {
            (Some((found, limit)), _) => Error::Limit { what: path.display().to_string(), found, limit },
            (None, Some(errno)) => Error::io(op, path, std::io::Error::from_raw_os_error(errno)),
            (None, None) => Error::io(op, path, std::io::Error::other(self.message)),
        }
    }
}

/// [`Entry`] on its way: name, kind, inode.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct WireEntry(String, WireKind, u64);

/// [`Stat`] on its way: kind, length, id, changed, modified.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct WireStat(WireKind, u64, (u64, u64), i64, i64);

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum WireKind {
    File,
    Dir,
    Other,
}

impl From<EntryKind> for WireKind {
    fn from(kind: EntryKind) -> Self {
        match kind {
            EntryKind::File => Self::File,
            EntryKind::Dir => Self::Dir,
            EntryKind::Other => Self::Other,
        }
    }
}

impl From<WireKind> for EntryKind {
    fn from(kind: WireKind) -> Self {
        match kind {
            WireKind::File => Self::File,
            WireKind::Dir => Self::Dir,
            WireKind::Other => Self::Other,
        }
    }
}

impl From<Entry> for WireEntry {
    fn from(Entry { name, kind, inode }: Entry) -> Self {
        Self(name, kind.into(), inode)
    }
}

impl From<WireEntry> for Entry {
    fn from(WireEntry(name, kind, inode): WireEntry) -> Self {
        Self { name, kind: kind.into(), inode }
    }
}

impl From<Stat> for WireStat {
    fn from(Stat { kind, len, id, changed, modified }: Stat) -> Self {
        Self(kind.into(), len, id, changed, modified)
    }
}

impl From<WireStat> for Stat {
    fn from(WireStat(kind, len, id, changed, modified): WireStat) -> Self {
        Self { kind: kind.into(), len, id, changed, modified }
    }
}

/// Sends a message.
pub(super) fn send(stream: &mut TcpStream, head: &impl Serialize, bytes: &[u8]) -> std::io::Result<()> {
    let head = serde_json::to_vec(head)?;
    let length =
        u32::try_from(head.len()).map_err(|_| std::io::Error::other("a message that is too long"))?;
    let mut message = length.to_le_bytes().to_vec();
    message.extend_from_slice(&head);
    stream.write_all(&message)?;
    stream.write_all(bytes)
}

/// Waits for the head of a message, as long as `waits`. `None`: it has not begun. The stream has a
/// short timeout for each read.
pub(super) fn receive<T: DeserializeOwned>(
    stream: &mut TcpStream,
    limit: u32,
    waits: &mut dyn FnMut() -> bool,
) -> std::io::Result<Option<T>> {
    let mut length = [0; 4];
    if !fill(stream, &mut length, waits)? {
        return Ok(None);
    }
    let length = u32::from_le_bytes(length);
    if length > limit {
        return Err(std::io::Error::new(ErrorKind::InvalidData, "a message that is too long"));
    }
    let mut head = vec![0; length as usize];
    receive_bytes(stream, &mut head)?;
    serde_json::from_slice(&head)
        .map(Some)
        .map_err(|error| std::io::Error::new(ErrorKind::InvalidData, error))
}

/// Receives the token of a new connection. Waits no longer for a stranger.
pub(super) fn receive_token(stream: &mut TcpStream, len: usize) -> std::io::Result<Vec<u8>> {
    let deadline = Instant::now() + TOKEN_TIMEOUT;
    let mut token = vec![0; len];
    let mut done = 0;
    while let Some(rest) = token.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match stream.read(rest) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(read) => done += read,
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut
                ) => {}
            Err(error) => return Err(error),
        }
        if Instant::now() >= deadline {
            return Err(ErrorKind::TimedOut.into());
        }
    }
    Ok(token)
}

/// Receives bytes of a message that has begun.
pub(super) fn receive_bytes(stream: &mut TcpStream, into: &mut [u8]) -> std::io::Result<()> {
    let begun = Instant::now();
    if fill(stream, into, &mut || begun.elapsed() < MESSAGE_TIMEOUT)? {
        return Ok(());
    }
    Err(ErrorKind::TimedOut.into())
}

/// Fills a buffer. Returns false if nothing has come and `waits` returns false.
fn fill(stream: &mut TcpStream, into: &mut [u8], waits: &mut dyn FnMut() -> bool) -> std::io::Result<bool> {
    let (mut done, mut last) = (0, Instant::now());
    while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match stream.read(rest) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(read) => (done, last) = (done + read, Instant::now()),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                if done == 0 && !waits() {
                    return Ok(false);
                }
                if done > 0 && last.elapsed() >= MESSAGE_TIMEOUT {
                    return Err(ErrorKind::TimedOut.into());
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}
