//! A board that Python provides. The engine's threads never touch Python. A Python thread carries
//! out their requests to put and read messages.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use stepwell_manager::Error;
use stepwell_manager::coordination::shared_directory::Membership;
use stepwell_manager::coordination::{Coordinator, Message};

/// The timeout of one request. The Python thread has its own connection, so no other work delays
/// it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
/// Poll interval for a message.
const FIRST_PAUSE: Duration = Duration::from_micros(200);
const LAST_PAUSE: Duration = Duration::from_millis(10);

type Answer = Result<Option<Message>, String>;

/// A request to Python: an operation (`put`, `get`, `remove`), a key, and the message of a `put`.
struct Request {
    operation: &'static str,
    key: String,
    message: Option<Message>,
    answer: Sender<Answer>,
}

#[derive(Default)]
struct RequestQueue {
    requests: VecDeque<Request>,
    closed: bool,
}

struct Shared {
    queue: Mutex<RequestQueue>,
    changed: Condvar,
}

/// The queue of requests, for the Python thread that answers them.
#[pyclass(frozen, module = "stepwell._core")]
pub struct Board {
    shared: Arc<Shared>,
    rank: u32,
    world_size: u32,
    node: String,
    namespace: String,
    /// The request that Python is answering.
    at: Mutex<Option<Sender<Answer>>>,
}

#[pymethods]
impl Board {
    #[new]
    fn new(rank: u32, world_size: u32, node: String, namespace: String) -> Self {
        let shared = Arc::new(Shared { queue: Mutex::default(), changed: Condvar::new() });
        Self { shared, rank, world_size, node, namespace, at: Mutex::new(None) }
    }

    /// Waits for the next request: operation, key, message. `None` once the board is closed.
    fn next<'py>(&self, py: Python<'py>) -> Option<(&'static str, String, Option<Bound<'py, PyBytes>>)> {
        let request = py.detach(|| {
            let mut queue = self.shared.queue.lock().unwrap_or_else(PoisonError::into_inner);
            loop {
                if let Some(request) = queue.requests.pop_front() {
                    return Some(request);
                }
                if queue.closed {
                    return None;
                }
                queue = self.shared.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
        })?;
        let Request { operation, key, message, answer } = request;
        *self.at.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
        Some((operation, key, message.map(|message| PyBytes::new(py, &message))))
    }

    /// Answers the request with a message, or `None`.
    #[pyo3(signature = (message = None))]
    fn answer(&self, message: Option<Vec<u8>>) {
        self.send(Ok(message));
    }

    /// Fails the request, with the reason.
    fn fail(&self, why: String) {
        self.send(Err(why));
    }

    /// Closes the board. Later requests fail.
    fn close(&self) {
        let mut queue = self.shared.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.closed = true;
        queue.requests.clear();
        drop(queue);
        self.shared.changed.notify_all();
    }
}

impl Board {
    fn send(&self, answer: Answer) {
        if let Some(sender) = self.at.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // The requester may have timed out.
            let _ = sender.send(answer);
        }
    }

    /// Returns the board for the engine.
    pub fn coordinator(&self) -> AskedBoard {
        AskedBoard {
            shared: Arc::clone(&self.shared),
            rank: self.rank,
            world_size: self.world_size,
            node: self.node.clone(),
            namespace: self.namespace.clone(),
            opened: AtomicU64::new(0),
        }
    }
}

/// A [`Coordinator`] whose messages Python carries.
pub struct AskedBoard {
    shared: Arc<Shared>,
    rank: u32,
    world_size: u32,
    node: String,
    namespace: String,
    opened: AtomicU64,
}

impl AskedBoard {
    fn ask(
        &self,
        operation: &'static str,
        key: &str,
        message: Option<&[u8]>,
    ) -> Result<Option<Message>, Error> {
        let (answer, receive): (_, Receiver<Answer>) = channel();
        let request =
            Request { operation, key: key.to_owned(), message: message.map(<[u8]>::to_vec), answer };
        {
            let mut queue = self.shared.queue.lock().unwrap_or_else(PoisonError::into_inner);
            if queue.closed {
                return Err(Error::Unreachable("the coordinator was closed".to_owned()));
            }
            queue.requests.push_back(request);
        }
        self.shared.changed.notify_all();
        match receive.recv_timeout(ANSWER_TIMEOUT) {
            Ok(Ok(message)) => Ok(message),
            Ok(Err(why)) => Err(Error::Unreachable(why)),
            Err(RecvTimeoutError::Timeout) => Err(Error::Unreachable(format!(
                "the coordinator has not answered for {} s",
                ANSWER_TIMEOUT.as_secs()
            ))),
            Err(RecvTimeoutError::Disconnected) => {
                Err(Error::Unreachable("the coordinator was closed".to_owned()))
            }
        }
    }
}

impl Coordinator for AskedBoard {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.world_size
    }

    fn namespace(&self) -> String {
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        format!("{}-{number}", self.namespace)
    }

    fn put(&self, key: &str, message: &[u8]) -> Result<(), Error> {
        self.ask("put", key, Some(message)).map(drop)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Message>, Error> {
        let deadline = Instant::now() + timeout;
        let mut pause = FIRST_PAUSE;
        loop {
            if let Some(message) = self.ask("get", key, None)? {
                return Ok(Some(message));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 3 / 2).min(LAST_PAUSE);
        }
    }

    fn remove(&self, key: &str) -> Result<(), Error> {
        self.ask("remove", key, None).map(drop)
    }

    fn node(&self) -> String {
        self.node.clone()
    }
}

/// A coordinator as Python passes it: a board, or `(rank, world_size, job_id, directory)` of a
/// shared directory. The directory `None` is the root's own.
#[derive(FromPyObject)]
pub enum Agreeing<'py> {
    Board(PyRef<'py, Board>),
    Directory((u32, u32, String, Option<std::path::PathBuf>)),
}

/// Returns the coordinator for the engine.
pub enum Ranks {
    Board(AskedBoard),
    Directory(Membership, Option<std::path::PathBuf>),
}

impl Agreeing<'_> {
    pub fn ranks(self) -> Ranks {
        match self {
            Self::Board(board) => Ranks::Board(board.coordinator()),
            Self::Directory((rank, world_size, job_id, path)) => {
                Ranks::Directory(Membership { rank, world_size, job_id }, path)
            }
        }
    }
}
