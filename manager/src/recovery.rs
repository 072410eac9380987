//! Recovery: a new writer cleans up after a crash, under the lock. It is idempotent, and safe to
//! kill at any point.
//!
//! 1. fsync the root: all that is visible becomes durable first;
//! 2. take the epoch (without locks, an older writer sees it before its next rename);
//! 3. retire the temporaries of dead owners. The lock shows that every other writer of steps is
//!    dead. A save to a path in this directory shows by a held lease that it is alive. Nothing is
//!    deleted because of its age;
//! 4. finish thinnings, create missing leases;
//! 5. pass all trash to the deleter.

use std::sync::Arc;
use std::time::Duration;

use stepwell_core::io::{Dir, EntryKind, LockKind};

use crate::commit::aside;
use crate::delete_tree::ignore_missing;
use crate::directory_layout::{self, CONTROL, KNOWN_RUN, LEASE, MANIFEST_NEW, OwnName, REMOVALS, REWIND};
use crate::discovery::Listing;
use crate::environment::Environment;
use crate::error::Result;

/// The result of a recovery.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Trash to delete. Its renames are durable.
    pub trash: Vec<String>,
    /// Temporaries of dead owners, by their old names.
    pub abandoned: Vec<String>,
}

/// Retires temporaries of dead owners, and finds all trash. `session` is the caller's.
pub fn sweep(root: &dyn Dir, session: &str, environment: &Environment) -> Result<Recovered> {
    let mut recovered = Recovered::default();
    let mut renames = Vec::new();
    let mut of_paths = Vec::new();
    for entry in root.entries()? {
        match directory_layout::parse(&entry.name) {
            Some(OwnName::Trash { .. }) if entry.kind == EntryKind::Dir => recovered.trash.push(entry.name),
            // It is empty. If it cannot be removed now, the next writer tries again.
            Some(OwnName::GivenUp { session: owner, .. }) if owner != session => {
                let _ = root.remove_dir(&entry.name);
            }
            Some(OwnName::Temporary { session: owner, label, .. })
                if owner != session && entry.kind == EntryKind::Dir =>
            {
                let trash = directory_layout::trash(&label, environment.rng.next_u128());
                // A fence keeps out every other owner.
                let is_dead = directory_layout::is_step_label(&label) || root.fence().is_some();
                let to = if is_dead { &mut renames } else { &mut of_paths };
                to.push((entry.name, trash));
            }
            _ => {}
        }
    }
    let retired = aside::retire_all(root, &renames);
    if let Some(error) = retired.error {
        return Err(error.into());
    }
    for (name, trash) in renames {
        recovered.abandoned.push(name);
        recovered.trash.push(trash);
    }
    for (name, trash) in retire_of_dead_owners(root, of_paths)? {
        recovered.abandoned.push(name);
        recovered.trash.push(trash);
    }
    Ok(recovered)
}

/// Deletes records of the root that a killed writer has not finished.
pub(crate) fn remove_unfinished_records(root: &dyn Dir) {
    if root.fence().is_some() {
        return; // records in a store appear whole
    }
    let removed = root.open_dir(CONTROL).and_then(|control| {
        [KNOWN_RUN, REMOVALS, REWIND]
            .into_iter()
            .try_for_each(|name| ignore_missing(control.remove_file(&format!(".{name}.new"))))
    });
    if let Err(error) = removed {
        tracing::warn!(root = %root.path().display(), %error, "deleting unfinished records failed");
    }
}

/// Returns the temporaries of a session, and its marks of saves that were given up.
pub(crate) fn of_session(root: &dyn Dir, session: &str) -> stepwell_core::Result<Vec<String>> {
    let is_ours = |name: &str| {
        matches!(
            directory_layout::parse(name),
            Some(OwnName::Temporary { session: owner, .. } | OwnName::GivenUp { session: owner, .. })
                if owner == session
        )
    };
    Ok(root.entries()?.into_iter().map(|entry| entry.name).filter(|name| is_ours(name)).collect())
}

/// Retires temporaries of saves to a path: old and new name each. One whose owner may be alive
/// stays. Returns those that were retired, durably.
pub(crate) fn retire_of_dead_owners(
    dir: &dyn Dir,
    renames: Vec<(String, String)>,
) -> stepwell_core::Result<Vec<(String, String)>> {
    if renames.is_empty() {
        return Ok(renames);
    }
    // One of them may be a checkpoint that a live save has just replaced. Make that replacement
    // durable first.
    dir.sync()?;
    let mut retired = Vec::new();
    for (name, trash) in renames {
        match aside::retire_abandoned(dir, &name, &trash) {
            Ok(true) => {
                tracing::info!(%name, "removing leftovers of a killed save");
                retired.push((name, trash));
            }
            Ok(false) => {}
            Err(error) => tracing::warn!(%name, %error, "removing leftovers of a save to a path failed"),
        }
    }
    if !retired.is_empty() {
        dir.sync()?;
    }
    Ok(retired)
}

/// Finishes thinnings, and creates missing leases. A step that cannot be mended stays as it is,
/// with a warning. Without locks, files that were thinned away within `grace` stay. This uses the
/// clock of this process: a wrong one costs a reader its step, but no data.
///
/// A root in a store has no leases, and a manifest is replaced at once there.
pub fn mend(root: &dyn Dir, listing: &Listing, unix_ns: i64, grace: Duration) {
    let is_store = root.fence().is_some();
    for found in listing.steps.values() {
        let mended = (|| -> stepwell_core::Result<()> {
            if !is_store && root.stat(&format!("{}/{LEASE}", found.name))?.is_none() {
                let step = root.open_dir(&found.name)?;
                step.write_file(LEASE, &[])?;
                step.sync()?;
            }
            // A crash may have stopped the first thinning of a step before its manifest had a
            // tombstone.
            let begun = || root.stat(&format!("{}/{MANIFEST_NEW}", found.name));
            if !found.manifest.dropped.is_empty() || (!is_store && begun()?.is_some()) {
                finish_thinning(&root.open_dir(&found.name)?, found, unix_ns, grace)?;
            }
            Ok(())
        })();
        if let Err(error) = mended {
            tracing::warn!(step = %found.name, %error, "mending a step failed. It stays as it is");
        }
    }
}

/// Deletes the files that a thinning has left, unless a reader holds the step.
pub fn finish_thinning(
    step: &Arc<dyn Dir>,
    found: &crate::discovery::Found,
    unix_ns: i64,
    grace: Duration,
) -> stepwell_core::Result<()> {
    let left = found.manifest.dropped.iter().any(|tombstone| {
        // An error here occurs again below, and is reported there.
        step.stat(&tombstone.dir).map_or(true, |stat| stat.is_some())
    });
    let half_written = step.stat(MANIFEST_NEW)?.is_some();
    if !left && !half_written {
        return Ok(());
    }
    let lock = match step.try_lock(LEASE, LockKind::Exclusive, true) {
        Ok(Some(lock)) => Some(lock),
        Ok(None) => return Ok(()),
        Err(error) if error.is_without_locks() => None,
        Err(error) => return Err(error),
    };
    if half_written {
        step.remove_file(MANIFEST_NEW)?;
    }
    if lock.is_none() {
        let thinned =
            found.manifest.dropped.iter().map(|tombstone| tombstone.unix_ns).max().unwrap_or(i64::MIN);
        if i128::from(unix_ns) - i128::from(thinned) < grace.as_nanos().cast_signed() {
            return Ok(());
        }
    }
    // The writer of this manifest may have been killed before its rename was durable. Without this
    // sync, a power cut after the deletion could restore the old manifest without its files.
    step.sync()?;
    aside::apply_tombstones(step, &found.manifest)
}
