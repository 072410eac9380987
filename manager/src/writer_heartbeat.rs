//! Heartbeats of writers, for file systems without locks.
//!
//! With locks, the writer's lock shows that it is alive. Without locks, a writer rewrites a small
//! file in the root's own directory every few seconds: `.stepwell/beat-<session>`. A new writer
//! writes its own first, then watches the others for a while, by its own clock. While a file
//! changes, its writer is alive. (Neither clocks of two machines nor ages of files are compared.)
//! Two writers that start at once see each other, and both give up. Each session has its own file,
//! so that an old writer's heartbeat never overwrites a new writer's epoch.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use stepwell_core::io::Dir;

use crate::control::owner;
use crate::delete_tree::ignore_missing;
use crate::directory_layout::{CONTROL, HEARTBEAT_PREFIX};
use crate::environment::Clock;
use crate::error::{Error, Result};
use crate::periodic::Periodic;

const MAX_HEARTBEAT_BYTES: u64 = 64 << 10;
/// A writer sends so many heartbeats in the silence for which others wait.
const HEARTBEATS_PER_SILENCE: u32 = 6;
/// A silence lasts at least so many heartbeats of the watched writer, by its own interval.
const MISSED_HEARTBEATS: u32 = 3;
/// The number of checks during a silence.
const POLLS_PER_SILENCE: u32 = 20;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct HeartbeatRecord {
    /// A counter.
    count: u64,
    /// The interval in milliseconds.
    every_ms: u64,
    /// The writer, for messages.
    owner: String,
}

/// Sends heartbeats until it is stopped, or until another writer takes the root over.
pub struct WriterHeartbeat {
    session: String,
    thread: Periodic,
}

impl WriterHeartbeat {
    /// Starts the heartbeat. The first one is written when this returns.
    pub fn start(root: &Arc<dyn Dir>, session: &str, silence: Duration) -> Result<Self> {
        let every = silence / HEARTBEATS_PER_SILENCE;
        write(&**root, session, 0, every)?;
        let (dir, owned, mut count) = (Arc::clone(root), session.to_owned(), 0);
        let heartbeat = move || {
            count += 1;
            // Another writer has taken the root over and removed it.
            if matches!(dir.stat(&format!("{CONTROL}/{}", name(&owned))), Ok(None)) {
                return false;
            }
            if let Err(error) = write(&*dir, &owned, count, every) {
                tracing::warn!(%error, "writing a heartbeat failed. Another writer may take this root over");
            }
            true
        };
        let thread = Periodic::start("stepwell-heartbeat", every, heartbeat)
            .map_err(|error| stepwell_core::Error::io("start a thread for", root.path(), error))?;
        Ok(Self { session: session.to_owned(), thread })
    }

    /// Ends it, and removes its file, so that the next writer need not wait.
    pub fn stop(self, root: &dyn Dir) {
        self.thread.stop();
        let removed = root.open_dir(CONTROL).and_then(|control| control.remove_file(&name(&self.session)));
        if let Err(error) = removed {
            tracing::debug!(%error, "removing the heartbeat failed. The next writer waits until it has not changed for a while");
        }
    }
}

/// Watches the heartbeats of all other writers until they have not changed for `silence`. A changed
/// or new one shows a live writer: [`Error::Locked`].
pub fn wait_for_silence(root: &dyn Dir, session: &str, clock: &dyn Clock, silence: Duration) -> Result<()> {
    let seen = others(root, session)?;
    if seen.is_empty() {
        return Ok(());
    }
    let slowest = seen.values().flatten().map(|heartbeat| Duration::from_millis(heartbeat.every_ms)).max();
    let silence = silence.max(slowest.unwrap_or_default().saturating_mul(MISSED_HEARTBEATS));
    tracing::warn!(
        root = %root.path().display(), seconds = silence.as_secs_f64(),
        "an earlier writer of this root did not close it: watching its heartbeat"
    );
    let begun = clock.monotonic();
    while clock.monotonic().saturating_sub(begun) < silence {
        clock.pause(silence / POLLS_PER_SILENCE);
        for (name, heartbeat) in others(root, session)? {
            if seen.get(&name) != Some(&heartbeat) {
                let owner = heartbeat.map(|heartbeat| heartbeat.owner);
                return Err(Error::Locked { root: root.path().to_owned(), owner });
            }
        }
    }
    Ok(())
}

/// Removes the heartbeats of all writers but `session`, now the root's writer. The others then
/// stop.
pub fn forget_others(root: &dyn Dir, session: &str) -> Result<()> {
    let control = root.open_dir(CONTROL)?;
    for entry in control.entries()? {
        let stale =
            entry.name.trim_start_matches('.').starts_with(HEARTBEAT_PREFIX) && !entry.name.contains(session);
        if stale {
            ignore_missing(control.remove_file(&entry.name))?;
        }
    }
    Ok(())
}

/// Reads the heartbeats of other writers, by file name. `None`: an unreadable one.
fn others(root: &dyn Dir, session: &str) -> Result<BTreeMap<String, Option<HeartbeatRecord>>> {
    let control = root.open_dir(CONTROL)?;
    let mut heartbeats = BTreeMap::new();
    for entry in control.entries()? {
        if !entry.name.starts_with(HEARTBEAT_PREFIX) || entry.name == name(session) {
            continue;
        }
        match control.read_file(&entry.name, MAX_HEARTBEAT_BYTES) {
            Ok(bytes) => drop(heartbeats.insert(entry.name, serde_json::from_slice(&bytes).ok())),
            Err(error) if error.is_gone() => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(heartbeats)
}

fn name(session: &str) -> String {
    format!("{HEARTBEAT_PREFIX}{session}")
}

fn write(root: &dyn Dir, session: &str, count: u64, every: Duration) -> Result<()> {
    let every_ms = u64::try_from(every.as_millis()).unwrap_or(u64::MAX);
    let heartbeat = HeartbeatRecord { count, every_ms, owner: owner() };
    let bytes = serde_json::to_vec(&heartbeat).map_err(|error| crate::error::unencodable(&error))?;
    let control = root.open_dir(CONTROL)?;
    let name = name(session);
    control.replace_file(&name, &format!(".{name}.new"), &bytes)?;
    Ok(())
}
