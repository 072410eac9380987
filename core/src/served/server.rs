//! The server of one directory: a thread that accepts connections, and one thread for each.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::protocol::{Answer, Failure, MAX_READ, MAX_REQUEST, Place, Request, receive, receive_token, send};
use super::{dir, protocol};
use crate::io::{Dir, File, Lock, LockKind, is_relative};
use crate::sys::{host_name, spawn};
use crate::{Error, Result};

/// A connection without requests for so long ends, unless it holds a lock.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Connections look at this interval if the server ends.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The most connections at once. Others wait.
const MAX_CONNECTIONS: usize = 16384;
/// With that many, the server looks for a free one at this interval.
const FULL_INTERVAL: Duration = Duration::from_millis(20);
/// The most files that a connection keeps open.
const MAX_OPEN: usize = 16;

/// See the module documentation. Dropping it ends it.
pub struct Server {
    shared: Arc<Shared>,
    addresses: Vec<String>,
    port: u16,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The identity of a directory.
type DirId = (u64, u64);
/// Directories by identity, with the number of locks.
type HeldDirs = HashMap<DirId, (Arc<dyn Dir>, usize)>;

struct Shared {
    dir: Arc<dyn Dir>,
    token: String,
    stop: AtomicBool,
    connections: AtomicUsize,
    reads: AtomicU64,
    /// Directories with a lock that connections hold.
    held: Mutex<HeldDirs>,
}

impl Shared {
    fn held(&self) -> MutexGuard<'_, HeldDirs> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Server {
    /// Serves a directory to clients that show the token, on a free port of all interfaces.
    pub fn start(dir: Arc<dyn Dir>, token: String) -> Result<Self> {
        let path = dir.path().to_owned();
        let failed = |op, error| Error::io(op, &path, error);
        let any = |address: SocketAddr| TcpListener::bind(address);
        let listener = any((Ipv6Addr::UNSPECIFIED, 0).into())
            .or_else(|_| any(([0, 0, 0, 0], 0).into()))
            .map_err(|error| failed("open a port to serve", error))?;
        let prepared = listener.set_nonblocking(true).and_then(|()| listener.local_addr());
        let local = prepared.map_err(|error| failed("open a port to serve", error))?;
        let shared = Arc::new(Shared {
            dir,
            token,
            stop: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
            reads: AtomicU64::new(0),
            held: Mutex::default(),
        });
        let accepting = Arc::clone(&shared);
        let thread = spawn("stepwell-serve", move || accept(&listener, &accepting))
            .map_err(|error| failed("start a thread for", error))?;
        Ok(Self {
            shared,
            addresses: addresses(local.port()),
            port: local.port(),
            thread: Mutex::new(Some(thread)),
        })
    }

    /// The addresses at which it may be reached, each with its port: the likeliest first.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// The number of reads of data files that it has answered.
    pub fn reads(&self) -> u64 {
        self.shared.reads.load(Ordering::Relaxed)
    }

    /// Ends it. Connections end soon after.
    pub fn stop(&self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // Wakes it, so that it does not wait to the end of its interval.
            let here = [Ipv6Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into()]
                .map(|ip: IpAddr| (ip, self.port).into());
            let _ = here.iter().find(|here| TcpStream::connect_timeout(here, POLL_INTERVAL).is_ok());
            let _ = thread.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns the addresses of this machine: the one of its default route, and its name.
fn addresses(port: u16) -> Vec<String> {
    // Sends nothing: it only asks the kernel which address it would send from.
    let route = |bind: &str, to: &str| {
        let socket = UdpSocket::bind(bind).ok()?;
        socket.connect(to).ok()?;
        Some(SocketAddr::new(socket.local_addr().ok()?.ip(), port).to_string())
    };
    let routes = [("0.0.0.0:0", "192.0.2.1:9"), ("[::]:0", "[2001:db8::1]:9")];
    let mut all: Vec<String> = routes.into_iter().filter_map(|(bind, to)| route(bind, to)).collect();
    let name = host_name();
    if !name.is_empty() {
        all.push(format!("{name}:{port}"));
    }
    if all.is_empty() {
        // Without a network, all processes are on this machine.
        all.push(format!("127.0.0.1:{port}"));
    }
    all
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    while !shared.stop.load(Ordering::Acquire) {
        if shared.connections.load(Ordering::Relaxed) >= MAX_CONNECTIONS {
            std::thread::sleep(FULL_INTERVAL);
            continue;
        }
        match listener.accept() {
            Ok((stream, _)) => begin(stream, shared),
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait_for_connection(listener),
            Err(error) => {
                tracing::debug!(%error, "accepting a connection failed");
                std::thread::sleep(POLL_INTERVAL);
            }
        }
    }
}

fn wait_for_connection(listener: &TcpListener) {
    let mut listener = [PollFd::new(listener, PollFlags::IN)];
    let timeout = Timespec::try_from(POLL_INTERVAL).ok();
    let _ = poll(&mut listener, timeout.as_ref());
}

/// Starts the thread of a connection.
fn begin(stream: TcpStream, shared: &Arc<Shared>) {
    shared.connections.fetch_add(1, Ordering::Relaxed);
    let counted = Counted(Arc::clone(shared));
    let serve = move || {
        let mut connection = Connection { shared: &counted.0, files: HashMap::new(), locks: Vec::new() };
        if let Err(error) = connection.serve(stream) {
            tracing::debug!(%error, "a connection ended");
        }
    };
    if let Err(error) = spawn("stepwell-served", serve) {
        tracing::debug!(%error, "no thread for a connection");
    }
}

/// A connection that is counted as long as this lives.
struct Counted(Arc<Shared>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Connection<'a> {
    shared: &'a Shared,
    files: HashMap<Place, Arc<dyn File>>,
    /// Its locks, each with the identity of the directory that it holds.
    locks: Vec<(Option<DirId>, Box<dyn Lock>)>,
}

impl Drop for Connection<'_> {
    fn drop(&mut self) {
        for (id, _lock) in self.locks.drain(..) {
            let mut held = self.shared.held();
            if let Some(id) = id
                && let Entry::Occupied(mut dir) = held.entry(id)
            {
                dir.get_mut().1 -= 1;
                if dir.get().1 == 0 {
                    dir.remove();
                }
            }
        }
    }
}

impl Connection<'_> {
    fn serve(&mut self, mut stream: TcpStream) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(POLL_INTERVAL))?;
        stream.set_write_timeout(Some(protocol::MESSAGE_TIMEOUT))?;
        // A machine that is gone holds no lock for long.
        dir::keep_alive(&stream)?;
        let expected = self.shared.token.as_bytes();
        let token = receive_token(&mut stream, expected.len())?;
        // In constant time.
        if token.iter().zip(expected).fold(0, |all, (one, other)| all | (one ^ other)) != 0 {
            return Ok(());
        }
        send(&mut stream, &Ok::<_, Failure>(Answer::Welcome), &[])?;
        loop {
            let begun = Instant::now();
            let mut waits = || {
                let is_idle = begun.elapsed() >= IDLE_TIMEOUT && self.locks.is_empty();
                !self.shared.stop.load(Ordering::Acquire) && !is_idle
            };
            let Some(request) = receive(&mut stream, MAX_REQUEST, &mut waits)? else { return Ok(()) };
            if matches!(request, Request::Read { .. }) {
                self.shared.reads.fetch_add(1, Ordering::Relaxed);
            }
            match self.answer(request) {
                Ok((answer, bytes)) => send(&mut stream, &Ok::<_, Failure>(answer), &bytes)?,
                Err(error) => send(&mut stream, &Err::<Answer, _>(Failure::of(&error)), &[])?,
            }
        }
    }

    fn answer(&mut self, request: Request) -> Result<(Answer, Vec<u8>)> {
        let plain = |answer| Ok((answer, Vec::new()));
        match request {
            Request::Identity(at) => {
                let dir = self.dir(&at)?;
                plain(Answer::Identity { id: dir.id()?, changed: dir.changed()? })
            }
            Request::Entries(at) => {
                let entries = self.dir(&at)?.unsorted_entries()?;
                plain(Answer::Entries(entries.into_iter().map(Into::into).collect()))
            }
            Request::Stat(at) => {
                plain(Answer::Stat(self.base(&at)?.stat(self.checked(&at.name)?)?.map(Into::into)))
            }
            Request::Lengths(at) => plain(Answer::Lengths(dir::lengths_below(&self.dir(&at)?)?)),
            Request::Open(at) => {
                self.files.remove(&at);
                plain(Answer::Length(self.file(at)?.len()?))
            }
            Request::Read { file, offset, len } => {
                let bytes = self.file(file)?.read_at(offset, len.min(MAX_READ))?;
                Ok((Answer::Bytes(bytes.len()), bytes))
            }
            Request::ReadFile { file, limit } => {
                let bytes = self.base(&file)?.read_file(self.checked(&file.name)?, limit)?;
                Ok((Answer::Bytes(bytes.len()), bytes))
            }
            Request::Lock(at) => {
                let base = self.base(&at)?;
                let Some(lock) = base.try_lock(self.checked(&at.name)?, LockKind::Shared, false)? else {
                    return plain(Answer::Locked(false));
                };
                if let Some(id) = at.id {
                    self.shared.held().entry(id).or_insert((base, 0)).1 += 1;
                }
                self.locks.push((at.id, lock));
                plain(Answer::Locked(true))
            }
        }
    }

    fn checked<'p>(&self, path: &'p str) -> Result<&'p str> {
        if is_relative(path) {
            return Ok(path);
        }
        Err(Error::io("open", self.shared.dir.path().join(path), ErrorKind::InvalidInput))
    }

    /// Returns the directory that the reader has opened. ENOENT if another one has its name.
    fn base(&self, at: &Place) -> Result<Arc<dyn Dir>> {
        let Some(id) = at.id else { return Ok(Arc::clone(&self.shared.dir)) };
        if let Some((held, _)) = self.shared.held().get(&id) {
            return Ok(Arc::clone(held));
        }
        let dir = self.shared.dir.open_dir(self.checked(&at.dir)?)?;
        if dir.id()? == id {
            return Ok(dir);
        }
        Err(Error::io("open", self.shared.dir.path().join(&at.dir), ErrorKind::NotFound))
    }

    fn dir(&self, at: &Place) -> Result<Arc<dyn Dir>> {
        let base = self.base(at)?;
        if at.name.is_empty() { Ok(base) } else { base.open_dir(self.checked(&at.name)?) }
    }

    fn file(&mut self, at: Place) -> Result<Arc<dyn File>> {
        if let Some(file) = self.files.get(&at) {
            return Ok(Arc::clone(file));
        }
        let file = self.base(&at)?.open_file(self.checked(&at.name)?)?;
        if self.files.len() >= MAX_OPEN {
            self.files.clear();
        }
        self.files.insert(at, Arc::clone(&file));
        Ok(file)
    }
}
