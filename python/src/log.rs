//! Forwards the engine's `tracing` events to Python's `logging`.
//!
//! The module's only subscriber puts level, target and text into the notifier's queue, and the
//! notifier calls `logging`. So engine threads never touch Python. Levels below INFO and spans are
//! ignored. So every important event names its step.

use std::fmt::{self, Write};
use std::sync::{RwLock, TryLockError};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::events::Events;

/// A level of `logging`, a target, and a text.
pub type Line = (u8, String, String);

/// The queue for lines, and the process that owns it. A forked child must not push into its
/// parent's queue. No thread waits for this lock: in a forked child, its holder may not exist.
static SINK: RwLock<Option<(u32, Events)>> = RwLock::new(None);

/// Sends this process's lines to a queue.
pub fn listen(events: &Events) {
    // If another thread of the parent held this lock at the fork, the child logs nothing.
    let mut sink = match SINK.try_write() {
        Ok(sink) => sink,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return,
    };
    *sink = Some((std::process::id(), events.clone()));
}

/// Starts to receive the engine's events, once per process.
pub fn install() {
    // Another subscriber can only be that of an earlier import, and works as well.
    let _ = tracing::subscriber::set_global_default(Lines);
}

struct Lines;

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::INFO
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::INFO)
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        let level = match *metadata.level() {
            Level::ERROR => 40,
            Level::WARN => 30,
            _ => 20,
        };
        let mut text = Text::default();
        event.record(&mut text);
        let sink = match SINK.try_read() {
            Ok(sink) => sink.clone(),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().clone(),
            Err(TryLockError::WouldBlock) => return,
        };
        if let Some((process, events)) = sink
            && process == std::process::id()
        {
            events.line((level, metadata.target().to_owned(), text.message + &text.fields));
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The message of an event, then its fields.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Text {
    fn put(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = if field.name() == "message" {
            self.message.write_fmt(value)
        } else if self.fields.is_empty() {
            write!(self.fields, ": {}={value}", field.name())
        } else {
            write!(self.fields, ", {}={value}", field.name())
        };
    }
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format_args!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, format_args!("{value}"));
    }
}
