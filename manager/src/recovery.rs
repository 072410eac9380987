//! Opening a root as its writer: what a crash may have left is settled, under the lock. Idempotent,
//! and safe to be killed at any point.
//!
//! 1. fsync the root: what is visible is durable before anything is concluded from it;
//! 2. take the epoch (where locks do not reach, an older writer sees it before its next rename);
//! 3. take the temporaries of dead owners out of sight. The lock says that every other writer of
//!    steps is dead; a save to a path in this directory is none, and says by a held lease that it
//!    lives. Nothing is ever deleted by its age;
//! 4. finish what tombstones name, make missing leases again;
//! 5. hand all trash to the deleter.

use std::sync::Arc;
use std::time::Duration;

use stepwell_core::io::{Dir, EntryKind, LockKind};

use crate::commit::aside;
use crate::directory_layout::{self, LEASE, MANIFEST_NEW, OwnName};
use crate::discovery::Listing;
use crate::environment::Environment;
use crate::error::Result;

/// The findings and actions of a recovery.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Trash to delete: its renames are durable.
    pub trash: Vec<String>,
    /// Temporaries of dead owners, by their old names.
    pub abandoned: Vec<String>,
    /// Steps that got their `.lease` back.
    pub leases: Vec<String>,
}

/// Takes temporaries of dead owners out of sight and finds all trash. `session` is the caller's
/// own.
pub fn sweep(root: &dyn Dir, session: &str, environment: &Environment) -> Result<Recovered> {
    let mut recovered = Recovered::default();
    let mut renames = Vec::new();
    let mut of_paths = Vec::new();
    for entry in root.entries()? {
        match directory_layout::parse(&entry.name) {
            Some(OwnName::Trash { .. }) if entry.kind == EntryKind::Dir => recovered.trash.push(entry.name),
            // Empty. If it cannot be removed now, the next writer tries again.
            Some(OwnName::GivenUp { session: owner, .. }) if owner != session => {
                let _ = root.remove_dir(&entry.name);
            }
            Some(OwnName::Temporary { session: owner, label, .. })
                if owner != session && entry.kind == EntryKind::Dir =>
            {
                let trash = directory_layout::trash(&label, environment.rng.next_u128());
                let to = if directory_layout::is_step_label(&label) { &mut renames } else { &mut of_paths };
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
    sweep_paths(root, of_paths, &mut recovered)?;
    Ok(recovered)
}

/// The temporaries of a session, and its marks of saves that were given up.
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

/// Takes what dead saves to a path left out of sight: (name, trash) each. One whose owner lives, or
/// of which nobody can tell, stays.
fn sweep_paths(root: &dyn Dir, names: Vec<(String, String)>, recovered: &mut Recovered) -> Result<()> {
    if names.is_empty() {
        return Ok(());
    }
    // One of them may be what a live save has just swapped out: nothing of it is touched before
    // that swap is durable.
    root.sync()?;
    let before = recovered.trash.len();
    for (name, trash) in names {
        match aside::retire_abandoned(root, &name, &trash) {
            Ok(true) => {
                recovered.abandoned.push(name);
                recovered.trash.push(trash);
            }
            Ok(false) => {}
            Err(error) => tracing::warn!(%name, %error, "what a save to a path left stays for now"),
        }
    }
    if recovered.trash.len() > before {
        root.sync()?;
    }
    Ok(())
}

/// Finishes thinnings, and recreates missing leases. A step that cannot be repaired stays as it is,
/// with a warning, and remains readable. Without locks, files thinned away within `grace` stay.
/// This uses the clock of this process: a wrong one costs a reader its step, but no data.
pub fn mend(root: &dyn Dir, listing: &Listing, unix_ns: i64, grace: Duration, recovered: &mut Recovered) {
    for found in listing.steps.values() {
        let mended = (|| -> stepwell_core::Result<bool> {
            let missing = root.stat(&format!("{}/{LEASE}", found.name))?.is_none();
            if missing {
                let step = root.open_dir(&found.name)?;
                step.write_file(LEASE, &[])?;
                step.sync()?;
            }
            // The first thinning of a step may have been cut before its manifest named anything.
            let begun = || root.stat(&format!("{}/{MANIFEST_NEW}", found.name));
            if !found.manifest.dropped.is_empty() || begun()?.is_some() {
                finish_thinning(&root.open_dir(&found.name)?, found, unix_ns, grace)?;
            }
            Ok(missing)
        })();
        match mended {
            Ok(true) => recovered.leases.push(found.name.clone()),
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(step = %found.name, %error, "a step could not be mended; it is left as it is");
            }
        }
    }
}

/// Deletes what a thinning has left of a step, where nobody holds it.
pub fn finish_thinning(
    step: &Arc<dyn Dir>,
    found: &crate::discovery::Found,
    unix_ns: i64,
    grace: Duration,
) -> stepwell_core::Result<()> {
    let left = found.manifest.dropped.iter().any(|tombstone| {
        // An error here is met again below, and told there.
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
    // The writer of this manifest may have been killed before its rename was durable. A power cut
    // after the deletion would then restore the old manifest without its files.
    step.sync()?;
    aside::apply_tombstones(step, &found.manifest)
}
