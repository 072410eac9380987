//! Waiting without holding up Python: detached, and awake often enough that Ctrl-C is answered.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use stepwell_core::sys::{Birth, spawn};

/// Poll interval for pending signals.
pub const SIGNAL_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Polls `ready` with slices of time until it answers or the timeout has passed (`None`). Signal
/// handlers run in between; what they raise ends the wait.
pub fn poll<T: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    mut ready: impl FnMut(Duration) -> Option<T> + Send,
) -> PyResult<Option<T>> {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let slice = deadline.map_or(SIGNAL_POLL_INTERVAL, |deadline| {
            deadline.saturating_duration_since(Instant::now()).min(SIGNAL_POLL_INTERVAL)
        });
        if let Some(answer) = py.detach(|| ready(slice)) {
            return Ok(Some(answer));
        }
        py.check_signals()?;
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Ok(None);
        }
    }
}

/// Seconds as the package gives them; what no clock can hold is no deadline.
pub fn seconds(timeout: Option<f64>) -> Option<Duration> {
    timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
}

/// Runs work on a thread of its own and waits for it, so that a signal handler runs at once. If one
/// raises, the work goes on by itself.
pub fn on_thread<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    wait_for(py, &mut start(work)?)?.ok_or_else(no_answer)
}

/// A thread that has ended its work and waits for more: making one takes longer than most
/// questions. It ends when this is dropped, or cleared.
#[derive(Default)]
pub struct Standby(Mutex<Option<Worker>>);

struct Worker {
    work: Sender<Box<dyn FnOnce() + Send>>,
    /// In a forked child nobody waits.
    birth: Birth,
}

impl Standby {
    /// [`on_thread`], on the thread that waits or on a new one, for work that may not come back:
    /// `None` after that long. The work goes on by itself then, and its thread ends with it.
    pub fn on_thread_within<T: Send + 'static>(
        &self,
        py: Python<'_>,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> PyResult<Option<T>> {
        let (send, mut receive) = channel();
        let worker = self.take().map_or_else(Worker::start, Ok)?;
        // The work and everything that it holds is dropped before its answer is sent.
        worker.work.send(Box::new(move || drop(send.send(work())))).map_err(|_| no_answer())?;
        match wait_within(py, Some(limit), &mut receive)? {
            Ok(answer) => {
                self.put(Some(worker));
                Ok(Some(answer))
            }
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(no_answer()),
        }
    }

    /// Has the thread end.
    pub fn clear(&self) {
        self.put(None);
    }

    fn take(&self) -> Option<Worker> {
        // Never wait here: in a forked child, the holder may not exist.
        self.0.try_lock().ok()?.take().filter(|worker| worker.birth.is_here())
    }

    fn put(&self, worker: Option<Worker>) {
        if let Ok(mut place) = self.0.try_lock() {
            *place = worker;
        }
    }
}

impl Worker {
    fn start() -> PyResult<Self> {
        let (work, receive) = channel::<Box<dyn FnOnce() + Send>>();
        spawn("stepwell-call", move || receive.iter().for_each(|work| work())).map_err(no_thread)?;
        Ok(Self { work, birth: Birth::now() })
    }
}

/// Runs work that reads the caller's memory, on a thread of its own. A signal handler that raises
/// sets `stop`, which the work checks, and this returns only after the work has ended. Its later
/// answer goes to `late`. Signals in between are handled after the return.
pub fn until_stopped<T: Send + 'static>(
    py: Python<'_>,
    stop: &AtomicBool,
    work: impl FnOnce() -> T + Send + 'static,
    late: impl FnOnce(T),
) -> PyResult<T> {
    let mut receive = start(work)?;
    match wait_for(py, &mut receive) {
        Ok(answer) => answer.ok_or_else(no_answer),
        Err(interrupt) => {
            stop.store(true, Ordering::Release);
            // Moved in and out: a receiver cannot be shared between threads.
            if let Ok(answer) = py.detach(move || receive.recv()) {
                late(answer);
            }
            Err(interrupt)
        }
    }
}

fn start<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> PyResult<Receiver<T>> {
    start_named("stepwell-call", work).map(|(_, receive)| receive)
}

fn start_named<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<(JoinHandle<()>, Receiver<T>)> {
    let (send, receive) = channel();
    // The work and everything that it holds is dropped before its answer is sent.
    let thread = spawn(name, move || drop(send.send(work()))).map_err(no_thread)?;
    Ok((thread, receive))
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn no_thread(error: std::io::Error) -> PyErr {
    PyRuntimeError::new_err(format!("no thread could be started: {error}"))
}

fn no_answer() -> PyErr {
    PyRuntimeError::new_err("the engine ended a call without an answer; please report this")
}

/// Runs work that writes into the caller's memory, on a thread of its own, and always waits for its
/// end. `on_poll` runs here, as do signal handlers. An exception from one sets `stop`, which
/// the work checks.
pub fn to_the_end<T: Send + 'static>(
    py: Python<'_>,
    stop: &AtomicBool,
    work: impl FnOnce() -> T + Send + 'static,
    mut on_poll: impl FnMut() -> PyResult<()>,
) -> PyResult<T> {
    let (thread, mut receive) = start_named("stepwell-read", work)?;
    let mut interrupt = None;
    let answer = loop {
        let here = &mut receive; // exclusive, since a receiver cannot be shared between threads
        match py.detach(move || here.recv_timeout(SIGNAL_POLL_INTERVAL)) {
            Ok(answer) => break Some(answer),
            Err(RecvTimeoutError::Disconnected) => break None,
            Err(RecvTimeoutError::Timeout) => {}
        }
        if interrupt.is_none() {
            interrupt = py.check_signals().and_then(|()| on_poll()).err();
            stop.fetch_or(interrupt.is_some(), Ordering::Relaxed);
        }
    };
    let answer = py.detach(|| thread.join()).ok().and(answer).ok_or_else(no_answer)?;
    interrupt.map_or(Ok(answer), Err)
}

/// Waits for a message without a limit. `None` if no sender is left.
fn wait_for<T: Send>(py: Python<'_>, receive: &mut Receiver<T>) -> PyResult<Option<T>> {
    Ok(wait_within(py, None, receive)?.ok())
}

/// Waits for a message within the limit.
fn wait_within<T: Send>(
    py: Python<'_>,
    limit: Option<Duration>,
    receive: &mut Receiver<T>,
) -> PyResult<Result<T, RecvTimeoutError>> {
    let answer = poll(py, limit, |slice| {
        let receive = &mut *receive; // exclusive, since a receiver cannot be shared between threads
        match receive.recv_timeout(slice) {
            Err(RecvTimeoutError::Timeout) => None,
            answer => Some(answer),
        }
    })?;
    Ok(answer.unwrap_or(Err(RecvTimeoutError::Timeout)))
}
