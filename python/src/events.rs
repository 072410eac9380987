//! The queue of Python's notifier thread: due callbacks, log lines, and buffers to release.
//!
//! Engine threads only ever push here; they never attach to the interpreter. The notifier waits
//! detached, and drops owners and runs callbacks attached. A queue belongs to one process: after a
//! fork the child makes its own.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;

use crate::flatten::Flat;
use crate::log::{self, Line};

/// Something for the notifier to do.
enum Event {
    /// Run the callback of that number.
    Callback(u64),
    /// Log this.
    Line(Line),
    /// Give buffers back.
    Release(Box<Flat>),
}

#[derive(Default)]
struct EventQueue {
    events: Mutex<VecDeque<Event>>,
    pushed: Condvar,
}

impl EventQueue {
    fn push(&self, event: Event) {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push_back(event);
        self.pushed.notify_one();
    }
}

/// The queue of one process's notifier. The latest one made is where the engine's log goes.
#[pyclass(frozen, module = "stepwell._core")]
#[derive(Clone, Default)]
pub struct Events {
    queue: Arc<EventQueue>,
}

impl Events {
    /// Has a callback run. From any thread.
    pub fn callback(&self, number: u64) {
        self.queue.push(Event::Callback(number));
    }

    /// Has a line logged. From any thread.
    pub fn line(&self, line: Line) {
        self.queue.push(Event::Line(line));
    }
}

/// A message for the notifier.
#[derive(IntoPyObject)]
enum Notice {
    Callback(u64),
    Line(Line),
}

#[pymethods]
impl Events {
    #[new]
    fn new() -> Self {
        let events = Self::default();
        log::listen(&events);
        events
    }

    /// Has the callback of that number run on the notifier's thread; 0 ends the thread.
    fn post(&self, number: u64) {
        self.callback(number);
    }

    /// Waits, detached, for callbacks that are due and lines to log (level, target, text), and
    /// gives back the buffers that engine threads are done with. Returns at least every `timeout`
    /// seconds.
    #[pyo3(signature = (timeout = 60.0))]
    fn next(&self, py: Python<'_>, timeout: f64) -> Vec<Notice> {
        let timeout = Duration::try_from_secs_f64(timeout).unwrap_or(Duration::from_secs(60));
        let events: Vec<Event> = py.detach(|| {
            let guard = self.queue.events.lock().unwrap_or_else(PoisonError::into_inner);
            let (mut guard, _) = self
                .queue
                .pushed
                .wait_timeout_while(guard, timeout, |events| events.is_empty())
                .unwrap_or_else(PoisonError::into_inner);
            guard.drain(..).collect()
        });
        events
            .into_iter()
            .filter_map(|event| match event {
                Event::Callback(number) => Some(Notice::Callback(number)),
                Event::Line(line) => Some(Notice::Line(line)),
                Event::Release(flat) => {
                    drop(flat); // attached here, so the buffers go back at once
                    None
                }
            })
            .collect()
    }
}

/// A flattened state in the engine. The thread that drops its last share passes it to the notifier;
/// [`Parcel::give_back`] needs no notifier.
pub struct Parcel {
    flat: Option<Box<Flat>>,
    events: Events,
}

impl Parcel {
    /// Wraps a state.
    pub fn new(flat: Flat, events: Events) -> Arc<Self> {
        Arc::new(Self { flat: Some(Box::new(flat)), events })
    }

    /// The state.
    pub fn flat(&self) -> Option<&Flat> {
        self.flat.as_deref()
    }

    /// Gives the buffers back at once if this is the last share.
    pub fn give_back(self: Arc<Self>, _: Python<'_>) {
        if let Some(mut parcel) = Arc::into_inner(self) {
            drop(parcel.flat.take());
        }
    }
}

impl Drop for Parcel {
    fn drop(&mut self) {
        if let Some(flat) = self.flat.take() {
            self.events.queue.push(Event::Release(flat));
        }
    }
}
