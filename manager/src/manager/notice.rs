//! The best use of the time before a machine is taken away: the carriers bring the newest step that
//! they can to the further tiers.

use std::time::{Duration, Instant};

use stepwell_core::deadline::deadline_after;

use super::Manager;
use super::tiers::Tier;
use crate::copy;
use crate::discovery::Found;
use crate::error::Result;

impl Manager {
    /// Waits until no save is pending. Raises no failure of a save.
    pub fn wait_until_saved(&self, timeout: Duration) -> Result<()> {
        self.inner.check_usable()?;
        self.inner.drain(Some(timeout))
    }

    /// Prepares the end of this machine in `left`. Until then, the carriers make no pauses and know
    /// no limit. Each carries one step only: the newest, even if the tier does not take it. If its
    /// bytes do not fit into the time, and a started step has fewer bytes left, it carries that
    /// one. All others are passed over. Only the leader carries.
    ///
    /// Call it when no save is pending, and then [`Manager::wait_until_carried`].
    pub fn hurry_carriers(&self, left: Duration) -> Result<()> {
        let inner = &self.inner;
        inner.check_usable()?;
        inner.check_carrying()?;
        let deadline = deadline_after(left);
        let Some(newest) = inner.root.newest()? else { return Ok(()) };
        for tier in &inner.tiers {
            tier.hurry(&newest, deadline);
        }
        Ok(())
    }
}

impl Tier {
    /// Carries what is most useful before the deadline.
    fn hurry(&self, newest: &Found, deadline: Instant) {
        let (step, bytes) = (newest.manifest.step, copy::total(&newest.manifest));
        let mut state = self.lock();
        state.hurried_until = Some(deadline);
        if state.steps.get(&step) == Some(&newest.manifest.attempt) {
            return;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let affordable = state.speed.map_or(u64::MAX, |speed| speed.saturating_mul(left.as_secs()));
        // Without a first byte, nothing is known of a started step.
        let (done, total) = state.arrived;
        let left_of_carried = if total == 0 { u64::MAX } else { total.saturating_sub(done) };
        let chosen = state.queue.most_useful((step, bytes), left_of_carried, affordable);
        state.queue.carry_only(chosen);
        state.progress += 1;
        drop(state);
        self.changed.notify_all();
        tracing::info!(
            tier = %self.name, newest = step, chosen, bytes, affordable, seconds = left.as_secs_f64(),
            "this machine ends soon: the carrier carries one step only"
        );
    }
}
