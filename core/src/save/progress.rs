//! The progress of a save, readable from any thread while it runs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Counters of one save; [`Progress::snapshot`] reads them.
#[derive(Debug, Default)]
pub struct Progress {
    total_bytes: AtomicU64,
    captured_bytes: AtomicU64,
    written_bytes: AtomicU64,
    plan_nanos: AtomicU64,
    capture_nanos: AtomicU64,
    write_nanos: AtomicU64,
    checksum_nanos: AtomicU64,
    sync_nanos: AtomicU64,
    slots_waited: AtomicU64,
    waited_nanos: AtomicU64,
}

/// The progress of a save at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SaveStats {
    /// Bytes of all data files before their footers.
    pub total_bytes: u64,
    /// Bytes that were copied into slots.
    pub captured_bytes: u64,
    /// Bytes whose writes have completed, footers included.
    pub written_bytes: u64,
    /// Seconds that planning took.
    pub plan_seconds: f64,
    /// Seconds that `Capture::run` took.
    pub capture_seconds: f64,
    /// Seconds from the start of `Flush::run` to the last completion.
    pub write_seconds: f64,
    /// Seconds of these that checksums took.
    pub checksum_seconds: f64,
    /// Seconds for the final truncation and sync of the files.
    pub sync_seconds: f64,
    /// The number of times that the capture waited for a slot.
    pub slots_waited: u64,
    /// Seconds of these waits, added up over all threads.
    pub waited_seconds: f64,
}

macro_rules! counters {
    ($($add:ident, $field:ident;)*) => {
        $(pub(super) fn $add(&self, more: u64) {
            self.$field.fetch_add(more, Ordering::Relaxed);
        })*
    };
}

macro_rules! timers {
    ($($since:ident, $field:ident;)*) => {
        $(pub(super) fn $since(&self, start: Instant) {
            self.$field.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        })*
    };
}

impl Progress {
    counters! {
        total, total_bytes;
        captured, captured_bytes;
        written, written_bytes;
    }

    timers! {
        planned_since, plan_nanos;
        captured_since, capture_nanos;
        written_since, write_nanos;
        checksummed_since, checksum_nanos;
        synced_since, sync_nanos;
    }

    pub(super) fn waited(&self, time: Duration) {
        self.slots_waited.fetch_add(1, Ordering::Relaxed);
        self.waited_nanos.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Reads the counters, one after the other. They may change in between.
    pub fn snapshot(&self) -> SaveStats {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let seconds = |nanos: &AtomicU64| Duration::from_nanos(count(nanos)).as_secs_f64();
        SaveStats {
            total_bytes: count(&self.total_bytes),
            captured_bytes: count(&self.captured_bytes),
            written_bytes: count(&self.written_bytes),
            plan_seconds: seconds(&self.plan_nanos),
            capture_seconds: seconds(&self.capture_nanos),
            write_seconds: seconds(&self.write_nanos),
            checksum_seconds: seconds(&self.checksum_nanos),
            sync_seconds: seconds(&self.sync_nanos),
            slots_waited: count(&self.slots_waited),
            waited_seconds: seconds(&self.waited_nanos),
        }
    }
}
