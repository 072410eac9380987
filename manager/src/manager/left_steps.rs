//! The steps of a nearer tier that the run has left, because it went on elsewhere while this
//! machine was absent.
//!
//! The last tier, home, is the truth. It shows three things:
//!
//! * It has a step of a session that the near tier does not know, newer than the last step that
//!   both have. So another manager has saved since.
//! * It has a record of a rewind that a nearer tier has not followed.
//! * It has a record of a deleted step.
//!
//! The nearer tier then moves its steps into a branch: all that are newer than the last one that
//! home has too, and those that the rewind has removed. Deleted steps are deleted.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use stepwell_core::format::manifest::{Attempt, Manifest};

use super::Inner;
use crate::commit::aside;
use crate::control::KnownRun;
use crate::directory_layout::STALE;
use crate::discovery::Listing;
use crate::error::Result;
use crate::removals::Removals;

impl Inner {
    /// Takes the steps that the run has left out of the tiers before home.
    pub(super) fn set_left_steps_aside(&self) -> Result<()> {
        let Some((home, between)) = self.tiers.split_last() else { return Ok(()) };
        let theirs = home.root().list_changes()?;
        let removals = Removals::read(&*home.root().dir)?;
        for tier in between {
            let gone = tier.manager.inner.follow(&removals, &theirs, None)?;
            tier.lock().steps.retain(|step, _| !gone.contains(step));
        }
        self.follow(&removals, &theirs, Some(self.team.session())).map(|_| ())
    }

    /// Makes this root follow what has happened at home. `session` is the new session of the near
    /// tier. Returns the steps that are gone.
    fn follow(&self, removals: &Removals, home: &Listing, session: Option<&str>) -> Result<BTreeSet<u64>> {
        let own = self.root.list_changes()?;
        let known = KnownRun::read(&*self.root.dir)?;
        let is_at_home = |step: u64, attempt: &Attempt| {
            home.steps.get(&step).is_some_and(|found| found.manifest.attempt == *attempt)
        };
        // Without a record, this is its first time beside home.
        let missed = known.as_ref().map(|known| removals.missed(&known.rewinds)).unwrap_or_default();
        let of_sessions = known.as_ref().filter(|_| session.is_some());
        let left =
            of_sessions.and_then(|known| first_left(&manifests(&own), &manifests(home), &known.sessions));
        let is_left = |step: u64, attempt: &Attempt| {
            let is_removed = || missed.iter().any(|rewound| rewound.removes(step, attempt));
            !is_at_home(step, attempt) && (left.is_some_and(|left| step >= left) || is_removed())
        };
        let deleted = removals.deleted();
        let (mut moved, mut gone, mut retired) = (HashSet::new(), BTreeSet::new(), Vec::new());
        for (&step, found) in &own.steps {
            let attempt = &found.manifest.attempt;
            if deleted.contains(attempt) && !is_at_home(step, attempt) {
                retired.push((found.name.clone(), self.root.trash(step)));
                gone.insert(step);
            } else if is_left(step, attempt) {
                moved.insert(attempt.clone());
                gone.insert(step);
            }
        }
        let branch = self.environment.new_branch(STALE);
        let incomplete = self.move_incomplete(&branch, &is_left)?;
        if !moved.is_empty() {
            let moved = self.move_aside(0, Some(&moved), &branch, true)?.carry_out()?;
            tracing::warn!(
                ?moved, ?incomplete, %branch, root = %self.root.path.display(),
                "the run went on elsewhere: these steps were moved into a branch"
            );
        }
        if !retired.is_empty() {
            tracing::warn!(steps = ?gone, root = %self.root.path.display(), "these steps were deleted elsewhere");
            self.root.check_writer()?;
            let done = aside::retire_all(&*self.root.dir, &retired);
            self.root.deleter.enqueue(retired.into_iter().take(done.deletable()).map(|(_, trash)| trash));
            done.error.map_or(Ok(()), Err)?;
        }
        // Not before: after a crash, what the others did must still be new.
        let all = own.steps.values().chain(home.steps.values());
        let sessions = session.into_iter().map(str::to_owned);
        KnownRun {
            sessions: sessions.chain(all.map(|found| found.manifest.attempt.session.clone())).collect(),
            rewinds: removals.rewinds.iter().map(|one| one.id.clone()).collect(),
        }
        .write(&*self.root.dir)?;
        Ok(gone)
    }

    /// Records in all tiers before home that they have followed a rewind.
    pub(super) fn know_rewind(&self, id: &str) -> Result<()> {
        let between = self.tiers.iter().rev().skip(1).map(|tier| &tier.root().dir);
        for root in between.chain([&self.root.dir]) {
            let Some(mut known) = KnownRun::read(&**root)? else { continue };
            known.rewinds.insert(id.to_owned());
            known.write(&**root)?;
        }
        Ok(())
    }
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
