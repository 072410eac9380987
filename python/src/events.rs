//! The queue of Python's notifier thread: due callbacks, log lines, and buffers to release.
//!
//! Engine threads only push events here. They never attach to the interpreter. The notifier waits
//! detached. Attached, it drops buffers and runs callbacks. A queue belongs to one process, so a
//! forked child makes its own.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;

use crate::flatten::Flat;
use crate::log::{self, Line};

/// A task of the notifier.
enum Event {
    /// Run the callback with that number.
    Callback(u64),
    /// Log a line.
    Line(Line),
    /// Release the buffers of a state.
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

/// The queue of one process's notifier. The engine logs to the latest queue.
#[pyclass(frozen, module = "stepwell._core")]
#[derive(Clone, Default)]
pub struct Events {
    queue: Arc<EventQueue>,
}

impl Events {
    /// Makes the notifier run a callback. Any thread may call it.
    pub fn callback(&self, number: u64) {
        self.queue.push(Event::Callback(number));
    }

    /// Makes the notifier log a line. Any thread may call it.
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

    /// Makes the notifier run the callback with that number. 0 ends its thread.
    fn post(&self, number: u64) {
        self.callback(number);
    }

    /// Waits, detached, for due callbacks and for log lines (level, target, text). Releases buffers
    /// that the engine no longer uses. Returns at least every `timeout` seconds.
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
                    drop(flat); // attached here, so this releases the buffers at once
                    None
                }
            })
            .collect()
    }
}

/// A flattened state that the engine uses. The thread that drops the last share passes it to the
/// notifier. [`Parcel::give_back`] needs no notifier.
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

    /// Releases the buffers at once if this is the last share.
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
