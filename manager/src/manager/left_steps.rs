//! The steps of a near tier that the run has left, because it went on elsewhere while this machine
//! was absent.
//!
//! The last tier, home, is the truth. It shows two things:
//!
//! * It has a step of a session that the near tier does not know, newer than the last step that
//!   both have. So another manager has saved since. The near tier keeps a list of the sessions of
//!   both roots.
//! * One of its branches has a step that the near tier still lists. So a rewind has not reached the
//!   near tier.
//!
//! The near tier then moves its steps into a branch: all that are newer than the last one that home
//! has too, or than the rewind.

use std::collections::{BTreeMap, BTreeSet};

use stepwell_core::format::manifest::Manifest;

use super::Inner;
use super::tiers::Tier;
use crate::control::{read_sessions, write_sessions};
use crate::directory_layout::{self, OwnName, STALE};
use crate::discovery::{Listing, is_not_a_step, read_manifest};
use crate::error::Result;

impl Inner {
    /// Moves the steps that the run has left into a branch.
    pub(super) fn set_left_steps_aside(&self) -> Result<()> {
        let Some(home) = self.tiers.last() else { return Ok(()) };
        let near = self.root.list_changes()?;
        let theirs = home.root().list_changes()?;
        let rewound = first_rewound(home, &near)?;
        let known = read_sessions(&*self.root.dir)?;
        let left = known.as_ref().and_then(|known| first_left(&manifests(&near), &manifests(&theirs), known));
        if let Some(first) = [rewound, left].into_iter().flatten().min() {
            let branch = self.environment.new_branch(STALE);
            let moved = self.move_aside(first, &branch, true)?.carry_out()?;
            tracing::warn!(
                ?moved, %branch, root = %self.root.path.display(), home = %home.manager.path().display(),
                "the run went on elsewhere: these steps of the near tier were moved into a branch"
            );
        }
        // Not before: after a crash, the sessions of the others must still be new.
        let all = near.steps.values().chain(theirs.steps.values());
        let mut sessions: BTreeSet<String> =
            all.map(|found| found.manifest.attempt.session.clone()).collect();
        sessions.insert(self.team.session().to_owned());
        write_sessions(&*self.root.dir, &sessions)
    }
}

/// Returns the first step of the near tier that a branch of home has.
fn first_rewound(home: &Tier, near: &Listing) -> Result<Option<u64>> {
    let root = home.root();
    let mut first = None;
    for entry in root.dir.entries()? {
        let Some(OwnName::Branch { step_name, .. }) = directory_layout::parse(&entry.name) else {
            continue;
        };
        let Some(found) = root.names.parse(&step_name).and_then(|step| near.steps.get(&step)) else {
            continue;
        };
        let step = found.manifest.step;
        let is_it = match read_manifest(&*root.dir, &entry.name) {
            Ok(manifest) => manifest.attempt == found.manifest.attempt,
            Err(error) if is_not_a_step(&error) => false,
            Err(error) => return Err(error.into()),
        };
        if is_it && first.is_none_or(|first| step < first) {
            first = Some(step);
        }
    }
    Ok(first)
}

fn manifests(listing: &Listing) -> BTreeMap<u64, &Manifest> {
    listing.steps.iter().map(|(&step, found)| (step, &*found.manifest)).collect()
}

/// Returns the first step of the near tier that the run has left, if home shows that it went on.
fn first_left(
    near: &BTreeMap<u64, &Manifest>,
    home: &BTreeMap<u64, &Manifest>,
    known: &BTreeSet<String>,
) -> Option<u64> {
    let is_common = |step: &u64| {
        home.get(step).zip(near.get(step)).is_some_and(|(theirs, ours)| theirs.attempt == ours.attempt)
    };
    let common = near.keys().rev().find(|step| is_common(step));
    let first = common.map_or(0, |&common| common.saturating_add(1));
    home.range(first..).find(|(_, manifest)| !known.contains(&manifest.attempt.session))?;
    near.range(first..).next().map(|(&step, _)| step)
}
