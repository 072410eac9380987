//! Waits that are detached from Python, and handle signals such as Ctrl-C.

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

/// Calls `ready` with a short interval until it answers. Returns `None` after the timeout. Signal
/// handlers run in between. If one raises, the wait ends with its exception.
pub fn poll<T: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    mut ready: impl FnMut(Duration) -> Option<T> + Send,
) -> PyResult<Option<T>> {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let interval = deadline.map_or(SIGNAL_POLL_INTERVAL, |deadline| {
            deadline.saturating_duration_since(Instant::now()).min(SIGNAL_POLL_INTERVAL)
        });
        if let Some(answer) = py.detach(|| ready(interval)) {
            return Ok(Some(answer));
        }
        py.check_signals()?;
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Ok(None);
        }
    }
}

/// Converts seconds of the package. A value that is too large means no timeout.
pub fn seconds(timeout: Option<f64>) -> Option<Duration> {
    timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
}

/// Runs work on a thread of its own and waits for it, so that signal handlers run at once. If one
/// raises, the work continues without this call.
pub fn on_thread<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    wait_for(py, &mut start(work)?)?.ok_or_else(no_answer)
}

/// An idle thread for the next call, because starting one takes longer than most calls. The thread
/// ends when this is dropped or cleared.
#[derive(Default)]
pub struct Standby(Mutex<Option<Worker>>);

struct Worker {
    work: Sender<Box<dyn FnOnce() + Send>>,
    /// The process that started it. A forked child does not have the thread.
    birth: Birth,
}

impl Standby {
    /// Runs work that may hang as [`on_thread`], on the idle thread or a new one. Returns `None`
    /// after the limit. Then the work continues without this call, and its thread ends with it.
    pub fn on_thread_within<T: Send + 'static>(
        &self,
        py: Python<'_>,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> PyResult<Option<T>> {
        let (send, mut receive) = channel();
        let worker = self.take().map_or_else(Worker::start, Ok)?;
        // Drop the work, with everything it owns, before the caller gets the answer.
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

    /// Ends the idle thread.
    pub fn clear(&self) {
        self.put(None);
    }

    fn take(&self) -> Option<Worker> {
        // Never wait for this lock: in a forked child, its holder may not exist.
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

/// Runs work that reads the caller's memory, on a thread of its own. If a signal handler raises,
/// sets `stop`, which the work checks, and returns only after the work has ended. `late` then gets
/// the answer. Signals that arrive meanwhile are handled after the return.
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
            // Move it in and out, because a receiver cannot be shared between threads.
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
    // Drop the work, with everything it owns, before the caller gets the answer.
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
/// end. Calls `on_poll` and signal handlers meanwhile. If one raises, sets `stop`, which the work
/// checks.
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
    let answer = poll(py, limit, |interval| {
        let receive = &mut *receive; // exclusive, since a receiver cannot be shared between threads
        match receive.recv_timeout(interval) {
            Err(RecvTimeoutError::Timeout) => None,
            answer => Some(answer),
        }
    })?;
    Ok(answer.unwrap_or(Err(RecvTimeoutError::Timeout)))
}
