//! Connections to one server. They are opened when they are needed, and kept for a while.

use std::io::Write as _;
use std::net::{TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::protocol::{Answer, Failure, MAX_ANSWER, MESSAGE_TIMEOUT, Request, receive, receive_bytes, send};
use crate::{Error, Result};

/// The longest wait for one address to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A connection is not used again after so long: its server may have ended it.
const REUSE_WITHIN: Duration = Duration::from_secs(10);
/// Timeout of one read of a socket.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The most connections that are kept.
const MAX_IDLE: usize = 16;

/// The destination of the bytes of an answer.
pub(super) enum AnswerBytes<'a> {
    /// None are expected.
    Nowhere,
    /// As many as fit.
    Buffer(&'a mut [u8]),
    /// As many as the limit.
    File(&'a mut Vec<u8>, u64),
}

impl AnswerBytes<'_> {
    /// Returns the room for this many bytes, if they are not too many.
    fn room(&mut self, len: usize) -> Option<&mut [u8]> {
        match self {
            Self::Nowhere => None,
            Self::Buffer(buffer) => buffer.get_mut(..len),
            Self::File(bytes, limit) => {
                u64::try_from(len).ok().filter(|len| len <= limit)?;
                bytes.clear();
                bytes.resize(len, 0);
                Some(&mut bytes[..])
            }
        }
    }
}

/// See the module documentation.
pub struct Connections {
    /// The server's directory, with its machine: for messages.
    path: PathBuf,
    addresses: Vec<String>,
    token: String,
    idle: Mutex<Vec<(TcpStream, Instant)>>,
}

impl Connections {
    /// A client of the server at one of these addresses. Connects nothing yet. `path` is for
    /// messages.
    pub fn new(path: PathBuf, addresses: Vec<String>, token: String) -> Self {
        Self { path, addresses, token, idle: Mutex::default() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a request. `op` and `at` are for its error. Bytes of the answer go to `into`.
    pub(super) fn ask(
        &self,
        op: &'static str,
        at: &Path,
        request: &Request,
        mut into: AnswerBytes<'_>,
    ) -> Result<Answer> {
        let kept = self.take();
        let was_kept = kept.is_some();
        let mut made = |kept: Option<TcpStream>| -> std::io::Result<_> {
            let mut stream = kept.map_or_else(|| self.connect(), Ok)?;
            let answer = exchange(&mut stream, request, &mut into)?;
            Ok((stream, answer))
        };
        let exchanged = match made(kept) {
            // The server may have ended the connection.
            Err(_) if was_kept => made(None),
            exchanged => exchanged,
        };
        let (stream, answer) = exchanged.map_err(|error| Error::io(op, at, error))?;
        self.keep(stream);
        answer.map_err(|failure| failure.error(op, at.to_owned()))
    }

    /// Makes a request that the connection belongs to. Returns the connection.
    pub(super) fn ask_alone(
        &self,
        op: &'static str,
        at: &Path,
        request: &Request,
    ) -> Result<(TcpStream, Answer)> {
        let failed = |error| Error::io(op, at, error);
        let mut stream = self.connect().map_err(failed)?;
        let answer = exchange(&mut stream, request, &mut AnswerBytes::Nowhere).map_err(failed)?;
        Ok((stream, answer.map_err(|failure| failure.error(op, at.to_owned()))?))
    }

    #[cfg(test)]
    pub(super) fn end_idle_connections(&self) {
        for (stream, _) in self.idle.lock().unwrap().iter() {
            stream.shutdown(std::net::Shutdown::Both).unwrap();
        }
    }

    fn take(&self) -> Option<TcpStream> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|(_, since)| since.elapsed() < REUSE_WITHIN);
        idle.pop().map(|(stream, _)| stream)
    }

    fn keep(&self, stream: TcpStream) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MAX_IDLE {
            idle.push((stream, Instant::now()));
        }
    }

    /// Connects to the first address at which the server answers.
    fn connect(&self) -> std::io::Result<TcpStream> {
        let mut failures = Vec::new();
        for address in &self.addresses {
            let greeted = address.to_socket_addrs().and_then(|resolved| {
                let mut failed = std::io::Error::from(std::io::ErrorKind::AddrNotAvailable);
                for address in resolved {
                    match self.greet(address) {
                        Ok(stream) => return Ok(stream),
                        Err(error) => failed = error,
                    }
                }
                Err(failed)
            });
            match greeted {
                Ok(stream) => return Ok(stream),
                Err(error) => failures.push(format!("{address}: {error}")),
            }
        }
        let why = format!("its machine does not answer ({})", failures.join("; "));
        Err(std::io::Error::new(std::io::ErrorKind::NotConnected, why))
    }

    fn greet(&self, address: std::net::SocketAddr) -> std::io::Result<TcpStream> {
        let mut stream = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(POLL_INTERVAL))?;
        stream.set_write_timeout(Some(MESSAGE_TIMEOUT))?;
        stream.write_all(self.token.as_bytes())?;
        match answer(&mut stream, &mut AnswerBytes::Nowhere)? {
            Ok(Answer::Welcome) => Ok(stream),
            _ => Err(std::io::Error::other("another program answers there")),
        }
    }
}

/// Sends a request, and waits for its answer.
fn exchange(
    stream: &mut TcpStream,
    request: &Request,
    into: &mut AnswerBytes<'_>,
) -> std::io::Result<std::result::Result<Answer, Failure>> {
    send(stream, request, &[])?;
    answer(stream, into)
}

fn answer(
    stream: &mut TcpStream,
    into: &mut AnswerBytes<'_>,
) -> std::io::Result<std::result::Result<Answer, Failure>> {
    let begun = Instant::now();
    let mut waits = || begun.elapsed() < MESSAGE_TIMEOUT;
    let Some(answer) = receive::<std::result::Result<Answer, Failure>>(stream, MAX_ANSWER, &mut waits)?
    else {
        return Err(std::io::ErrorKind::TimedOut.into());
    };
    if let Ok(Answer::Bytes(len)) = &answer {
        let Some(into) = into.room(*len) else {
            return Err(std::io::Error::new(
                std::io::ErrorKind::InvalidData,
                "more bytes than were asked for",
            ));
        };
        receive_bytes(stream, into)?;
    }
    Ok(answer)
}
