//! Forwards the engine's `tracing` events to Python's `logging`.
//!
//! The module's one subscriber puts level, target and text into the notifier's queue, and the
//! notifier calls `logging`. So engine threads never touch Python. Levels below INFO are ignored,
//! and spans are not followed: an important event names its step itself.

use std::fmt::{self, Write};
use std::sync::{RwLock, TryLockError};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::events::Events;

/// Level as `logging` counts, target, text.
pub type Line = (u8, String, String);

/// The queue for lines, and the process that owns it. A forked child must not push into its
/// parent's. Neither side waits for it: in a forked child, a missing thread may hold it.
static SINK: RwLock<Option<(u32, Events)>> = RwLock::new(None);

/// Makes this process's lines go to a queue.
pub fn listen(events: &Events) {
    // In a forked child another thread of the parent may have held this when it forked: then the
    // child stays silent.
    let mut sink = match SINK.try_write() {
        Ok(sink) => sink,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return,
    };
    *sink = Some((std::process::id(), events.clone()));
}

/// Begins to listen to the engine, once per process.
pub fn install() {
    // Another subscriber can only be one of an earlier import: it serves as well.
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

/// The message, and the fields behind it.
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
