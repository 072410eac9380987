//! HTTP/1.1: reads requests from a connection and writes answers.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::Arc;

use crate::encoding::{percent_decoded, query};

/// The longest head of a request.
const MAX_HEAD: usize = 64 << 10;
/// The longest body of a request.
const MAX_BODY: u64 = 5 << 30;
/// Bodies up to this length are sent with their head.
const SMALL_BODY: u64 = 16 << 10;

/// A request.
#[derive(Debug)]
pub struct Request {
    pub method: String,
    /// The path with its percent signs, without the query.
    pub path: String,
    pub query: Vec<(String, String)>,
    /// Names are in lower case.
    headers: Vec<(String, String)>,
    pub body: Arc<Vec<u8>>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    pub fn parameter(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    /// The first segment of the path, and what is after it.
    pub fn bucket_and_key(&self) -> Option<(String, String)> {
        split(self.path.strip_prefix('/')?)
    }

    pub fn text(&self) -> Option<&str> {
        std::str::from_utf8(&self.body).ok()
    }
}

/// Splits a path at its first slash, and decodes both sides.
pub fn split(path: &str) -> Option<(String, String)> {
    let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
    Some((percent_decoded(bucket)?, percent_decoded(key)?))
}

/// The next message of a connection.
pub enum Incoming {
    Request(Request),
    /// Bytes that are not a request which the server understands.
    Bad,
    /// The client has closed the connection.
    Closed,
}

/// The body of an answer.
#[derive(Debug)]
pub enum Body {
    Bytes(Vec<u8>),
    /// A range of the pieces of an object.
    Pieces(Vec<Arc<Vec<u8>>>, Range<u64>),
}

impl Body {
    pub fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Pieces(_, range) => range.end - range.start,
        }
    }

    /// Calls `act` with the bytes before the offset `end` of the body, piece by piece.
    fn each(&self, end: u64, mut act: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        match self {
            Self::Bytes(bytes) => act(bytes.get(..end as usize).unwrap_or(bytes)),
            Self::Pieces(pieces, range) => {
                let end = range.end.min(range.start + end);
                let mut offset = 0;
                for piece in pieces {
                    let len = piece.len() as u64;
                    let from = range.start.saturating_sub(offset).min(len) as usize;
                    let to = end.saturating_sub(offset).min(len) as usize;
                    if let Some(bytes) = piece.get(from..to).filter(|bytes| !bytes.is_empty()) {
                        act(bytes)?;
                    }
                    offset += len;
                }
                Ok(())
            }
        }
    }

    /// A copy with one flipped bit.
    pub fn flipped(&self, bit: u64) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len() as usize);
        let _ = self.each(self.len(), |piece| {
            bytes.extend_from_slice(piece);
            Ok(())
        });
        let place = (bit / 8).checked_rem(self.len()).unwrap_or_default();
        if let Some(byte) = bytes.get_mut(place as usize) {
            *byte ^= 1 << (bit % 8);
        }
        bytes
    }
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Body,
    /// The answer to HEAD: the length of the body, and no body.
    pub is_head: bool,
}

impl Answer {
    pub fn new(status: u16, kind: &str, body: impl Into<Vec<u8>>) -> Self {
        let body = Body::Bytes(body.into());
        Self { status, headers: vec![("Content-Type", kind.to_owned())], body, is_head: false }
    }

    pub fn empty(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Body::Bytes(Vec::new()), is_head: false }
    }

    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        201 => "Created",
        202 => "Accepted",
        204 => "No Content",
        206 => "Partial Content",
        301 => "Moved Permanently",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        409 => "Conflict",
        412 => "Precondition Failed",
        416 => "Range Not Satisfiable",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        _ => "Internal Server Error",
    }
}

/// The head of a request, parsed.
struct Head {
    request: Request,
    len: usize,
    body: Option<u64>,
}

/// A connection of a client.
pub struct Connection<'a> {
    stream: &'a TcpStream,
    /// Bytes of the next request that were read already.
    ahead: Vec<u8>,
}

impl<'a> Connection<'a> {
    pub fn new(stream: &'a TcpStream) -> Self {
        let _ = stream.set_nodelay(true);
        Self { stream, ahead: Vec::new() }
    }

    /// Reads the next request with its body.
    pub fn read(&mut self) -> io::Result<Incoming> {
        let head = loop {
            match parsed(&self.ahead) {
                Ok(Some(head)) => break head,
                Ok(None) if self.ahead.len() < MAX_HEAD => {}
                Ok(None) | Err(()) => return Ok(Incoming::Bad),
            }
            let mut piece = [0; 8 << 10];
            let read = self.stream.read(&mut piece)?;
            if read == 0 {
                return Ok(Incoming::Closed);
            }
            self.ahead.extend_from_slice(piece.get(..read).unwrap_or_default());
        };
        let Head { mut request, len, body } = head;
        let Some(wanted) = body.filter(|body| *body <= MAX_BODY) else { return Ok(Incoming::Bad) };
        let mut after = self.ahead.split_off(len);
        self.ahead = after.split_off(after.len().min(wanted as usize));
        let mut body = Vec::new();
        if body.try_reserve_exact(wanted as usize).is_err() {
            return Ok(Incoming::Bad);
        }
        if request.header("expect").is_some() {
            self.stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        }
        body.append(&mut after);
        self.stream.take(wanted - body.len() as u64).read_to_end(&mut body)?;
        if body.len() as u64 != wanted {
            return Ok(Incoming::Closed);
        }
        request.body = Arc::new(body);
        Ok(Incoming::Request(request))
    }

    /// Sends the answer, or only the first `limit` bytes of its body. Returns the number of bytes
    /// of the body that it has sent.
    pub fn write(&mut self, answer: &Answer, limit: Option<u64>) -> io::Result<u64> {
        let mut head = format!("HTTP/1.1 {} {}\r\n", answer.status, reason(answer.status)).into_bytes();
        for (name, value) in &answer.headers {
            write!(head, "{name}: {value}\r\n")?;
        }
        write!(head, "Content-Length: {}\r\n\r\n", answer.body.len())?;
        if answer.is_head {
            self.stream.write_all(&head)?;
            return Ok(0);
        }
        let end = limit.unwrap_or(answer.body.len());
        if end > SMALL_BODY {
            self.stream.write_all(&head)?;
            answer.body.each(end, |bytes| self.stream.write_all(bytes))?;
        } else {
            answer.body.each(end, |bytes| {
                head.extend_from_slice(bytes);
                Ok(())
            })?;
            self.stream.write_all(&head)?;
        }
        Ok(end)
    }
}

/// Parses the head of a request, if all of it is there.
fn parsed(bytes: &[u8]) -> Result<Option<Head>, ()> {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut found = httparse::Request::new(&mut headers);
    let len = match found.parse(bytes) {
        Ok(httparse::Status::Complete(len)) => len,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(_) => return Err(()),
    };
    let (path, asked) = {
        let target = found.path.ok_or(())?;
        target.split_once('?').unwrap_or((target, ""))
    };
    let headers = found.headers.iter().map(|header| {
        let value = String::from_utf8_lossy(header.value).into_owned();
        (header.name.to_ascii_lowercase(), value)
    });
    let request = Request {
        method: found.method.ok_or(())?.to_owned(),
        path: path.to_owned(),
        query: query(asked).ok_or(())?,
        headers: headers.collect(),
        body: Arc::default(),
    };
    let is_chunked = request.header("transfer-encoding").is_some();
    let body = match request.header("content-length") {
        _ if is_chunked => None,
        None => Some(0),
        Some(text) => text.trim().parse().ok(),
    };
    Ok(Some(Head { request, len, body }))
}
